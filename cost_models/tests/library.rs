//! The embedded clusters load, are cited, and show as recorded; wrong input is answered in full.

use autoshard_cost_models::{Cluster, ClusterError, library};

#[test]
fn every_embedded_cluster_loads() {
    for name in library::names() {
        let cluster = Cluster::load(name).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(cluster.name, name);
        assert!(cluster.usable_memory().0 > 0);
    }
}

#[test]
fn gpus_that_fit() {
    let cluster = Cluster::load("dgx-h100").unwrap();
    for n in [1, 3, 8, 16, 4096] {
        assert_eq!(cluster.with_gpus(n).unwrap().gpus(), n);
    }
    for n in [0, 9, 12] {
        assert!(matches!(cluster.with_gpus(n), Err(ClusterError::Gpus { .. })), "{n}");
    }
}
