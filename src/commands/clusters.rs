//! `clusters`: what is known of clusters.

use autoshard_cost_models::hardware::ClusterFile;
use autoshard_cost_models::{Cluster, library};

use crate::args::ClustersArgs;
use crate::failure::Failure;
use crate::show;

/// Runs the command.
pub fn run(args: &ClustersArgs) -> Result<(), Failure> {
    if args.schema {
        let schema = serde_json::to_string_pretty(&ClusterFile::json_schema()).map_err(Failure::new)?;
        println!("{schema}");
        return Ok(());
    }
    if let Some(name) = &args.name {
        let (c, origin) = Cluster::load_with(name, args.device.as_deref())
            .map_err(|e| Failure::usage(e).help("`autoshard clusters` lists the names"))?;
        let text = origin.text().or_else(|| Cluster::definition(name).map(String::from)).unwrap_or_default();
        println!("# {}: {}, {} usable per GPU\n", c.name, c.device.name, show::bytes(c.usable_memory().0));
        print!("{text}");
        return Ok(());
    }
    let mut rows = vec![["name", "device", "GPUs per node", "usable memory"].map(String::from).to_vec()];
    for name in library::names() {
        let c = Cluster::load(name).map_err(Failure::new)?;
        rows.push(vec![
            name.to_string(),
            c.device.name.clone(),
            c.devices_per_node.to_string(),
            show::bytes(c.usable_memory().0),
        ]);
    }
    print!("{}", show::columns(&rows));
    Ok(())
}
