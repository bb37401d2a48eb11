//! `profile` measures this machine, and `plan` and `run` use its cluster file. How near the prediction is to the measurement is a
//! benchmark (`benches/profile.rs`): a test that other programs can fail is none.

mod common;

use autoshard_cost_models::Cluster;
use common::{autoshard, model, works};

/// Predicted and measured seconds of a step, side by side, on a machine that may be busy with other things.
#[test]
fn a_measured_machine_is_planned_for_and_run_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (cluster, plan) = (at("here.toml"), at("plan.json"));
    println!("{}", works(&["profile", "-q", "-o", &cluster]));
    let ranks = Cluster::load(&cluster).unwrap().devices_per_node.min(2).to_string();
    let sizes = ["--global-batch", "16", "--dim", "sequence=64"];
    let file = model("gpt2-loss-dyn.onnx");
    works(&[&["plan", &file, "--cluster", &cluster, "--gpus", &ranks, "-q", "-o", &plan], &sizes[..]].concat());
    let text = works(&["run", &plan, "--steps", "10", "--random-weights", "--json"]);
    let doc: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut seconds: Vec<f64> =
        doc["seconds_of_steps"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    seconds.sort_by(f64::total_cmp);
    let (took, predicted) = (seconds[seconds.len() / 2], doc["predicted_seconds_per_step"].as_f64().unwrap());
    println!("{ranks} ranks: predicted {:.1} ms, measured {:.1} ms", predicted * 1e3, took * 1e3);
    // Neither the launch-bound nothing nor the seconds that another unit would give.
    assert!(predicted > took / 10.0 && predicted < took * 10.0, "{predicted} s predicted, {took} s measured");
}

#[test]
fn of_bad_flags() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    for (args, says) in [
        (vec!["profile", "-o", folder], "it is a folder"),
        (vec!["profile", "-o", "/no/such/folder/c.toml"], "there is no folder"),
        (vec!["profile", "--ranks", "0"], "--ranks 0"),
        (vec!["profile", "--ranks", "100000"], "cores to run ranks on"),
    ] {
        let ran = autoshard(&args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
}
