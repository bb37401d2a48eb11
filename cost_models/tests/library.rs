//! The embedded clusters load, cite every figure, and show as recorded; wrong input is answered in full.

use autoshard_cost_models::hardware::{ClusterFile, Figure};
use autoshard_cost_models::{Cluster, ClusterError, Group, library};

fn load(name: &str) -> Cluster {
    Cluster::load(name).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn summaries_of_embedded_clusters() {
    let shown: Vec<String> = library::names().map(|n| load(n).to_string()).collect();
    insta::assert_snapshot!("clusters", shown.join("\n\n"));
}

#[test]
fn names_are_sorted_and_agree_with_the_files() {
    let names: Vec<&str> = library::names().collect();
    assert!(names.is_sorted());
    for name in names {
        assert_eq!(load(name).name, name);
    }
}

#[test]
fn every_embedded_figure_has_a_source() {
    let cited = |at: &str, f: &Figure| assert!(f.source.as_ref().is_some_and(|s| s.len() > 8), "{at} has no source");
    for d in library::devices().unwrap() {
        for f in [&d.processors, &d.memory_gib, &d.memory_bandwidth_gb_s, &d.reserve_gib] {
            cited(&d.name, f);
        }
        d.matmul_efficiency.iter().for_each(|f| cited(&d.name, f));
        for (format, peak) in &d.peak {
            assert!(peak.source.is_some(), "{}: peak.{} has no source", d.name, format.name());
        }
    }
    for name in library::names() {
        for t in &load(name).tiers {
            let at = format!("{name}: tier {}", t.name);
            for f in [&t.bandwidth_gb_s, &t.efficiency, &t.latency_us].into_iter().chain(&t.all_to_all_gb_s) {
                cited(&at, f);
            }
            t.groups.iter().for_each(|g| cited(&at, &g.bandwidth_gb_s));
            t.in_switch.iter().for_each(|s| [&s.efficiency, &s.min_devices].iter().for_each(|f| cited(&at, f)));
        }
    }
}

#[test]
fn gpus_that_fit() {
    let cluster = load("dgx-h100");
    for n in [1, 3, 8, 16, 4096] {
        assert_eq!(cluster.with_gpus(n).unwrap().gpus(), n);
    }
    assert_eq!(cluster.with_gpus(32).unwrap().nodes(), 4);
}

#[test]
fn errors_say_what_is_valid() {
    let mut text = String::new();
    for (name, gpus) in [("dgx-h100", 0), ("dgx-h100", 12), ("cpu", 65)] {
        text += &format!("{}\n\n", load(name).with_gpus(gpus).unwrap_err());
    }
    text += &format!("{}\n\n", Cluster::load("dgx-h10").unwrap_err());
    text += &format!("{}\n\n", Cluster::load("no-such-machine-at-all.toml").unwrap_err());
    text += &format!("{}\n\n", Cluster::parse("name = 3", "mine.toml").unwrap_err());
    let unknown_key = r#"
name = "mine"
title = "t"
device = "T4-16GB"
devices_per_node = 8
tier = []
colour = "blue"
"#;
    text += &format!("{}\n\n", Cluster::parse(unknown_key, "mine.toml").unwrap_err());
    insta::assert_snapshot!("errors", text);
}

/// All that is wrong is listed at once.
#[test]
fn validation_lists_every_problem() {
    let text = r#"
name = ""
title = "wrong in many ways"
device = "H1000"
devices_per_node = 0
max_nodes = 0

[[devices]]
name = "odd"
architecture = "hopper"
processors = 0
memory_gib = 1
memory_bandwidth_gb_s = -5
reserve_gib = 2
peak.bf16 = { dense_tflops = 100, sparse_tflops = 50 }
[devices.compute]
launch_us = -1
matmul = 0
sustained = 1
attention = 1
conv = 1
stream = 1
gather = 1
tile_us = 0
tiles = []
operators.Gelu = { call_us = -1, gb_s = 0 }
operators.Geluu = { call_us = 1 }

[[tier]]
name = "a"
kind = "nvswitch"
bandwidth_gb_s = 0
efficiency = 1.5
in_switch = { efficiency = 0.7, min_devices = 1 }

[[tier]]
name = "a"
kind = "mesh"
devices = 1
bandwidth_gb_s = 10
efficiency = 0.5
latency_us = -1
groups = [{ members = 4, bandwidth_gb_s = 5 }, { members = 2, bandwidth_gb_s = 0 }]
measured.all-reduce = { latency_us = -1, bandwidth_gb_s = 0 }
"#;
    insta::assert_snapshot!("problems", Cluster::parse(text, "mine.toml").unwrap_err());
}

/// A file of one's own, with a device of one's own, written out and read back through a path.
#[test]
fn a_users_file_loads() {
    let text = r#"
name = "mine"
title = "two boxes in the corner"
device = "my-gpu"
devices_per_node = 2
max_nodes = 2

[[devices]]
name = "my-gpu"
architecture = "ada"
processors = 128
memory_gib = 24
memory_bandwidth_gb_s = { value = 1000, source = "measured" }
peak.fp32 = { dense_tflops = 80 }
peak.bf16 = { dense_tflops = 160 }

[[tier]]
name = "pcie"
kind = "pcie"
devices = 2
bandwidth_gb_s = 25
efficiency = 0.8

[[tier]]
name = "network"
kind = "tcp"
bandwidth_gb_s = 1.25
efficiency = 0.9
latency_us = 20
"#;
    let path = std::env::temp_dir().join(format!("autoshard-cluster-{}.toml", std::process::id()));
    std::fs::write(&path, text).unwrap();
    let cluster = Cluster::load(path.to_str().unwrap());
    std::fs::remove_file(&path).unwrap();
    let cluster = cluster.unwrap().with_gpus(4).unwrap();
    assert_eq!(cluster.spanning_tier(Group::contiguous(2)), 0);
    assert_eq!(cluster.spanning_tier(Group::new(2, 2)), 1);
    assert_eq!(cluster.device.memory_bandwidth_gb_s.source.as_deref(), Some("measured"));
    assert!(matches!(cluster.with_gpus(6), Err(ClusterError::Gpus { .. })));
}

#[test]
fn schema_of_cluster_files() {
    let schema = ClusterFile::json_schema();
    for key in ["name", "device", "devices", "devices_per_node", "max_nodes", "tier", "sources"] {
        assert!(schema["properties"][key].is_object(), "{key} is not in the schema");
    }
    assert!(schema["$defs"]["Tier"]["properties"]["bandwidth_gb_s"].is_object());
}
