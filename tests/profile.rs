//! `profile` measures this machine, and `plan` and `run` use its cluster file. How near the prediction is to the measurement is a
//! benchmark (`benches/profile.rs`): a test that other programs can fail is none.

mod common;

use autoshard_cost_models::Cluster;
use common::{autoshard, model, works};

/// Attempts to find the machine quiet: other programs make a step longer, hardly shorter.
const ATTEMPTS: usize = 4;

/// Seconds of a step on that many ranks, predicted and measured (the median), on a machine that may be busy with other things.
fn step(cluster: &str, plan: &str, ranks: usize) -> (f64, f64) {
    let file = model("gpt2-loss-dyn.onnx");
    let gpus = ranks.to_string();
    let sizes = ["--global-batch", "16", "--dim", "sequence=64"];
    works(&[&["plan", &file, "--cluster", cluster, "--gpus", &gpus, "-q", "-o", plan], &sizes[..]].concat());
    let text = works(&["run", plan, "--steps", "20", "--random-weights", "--json"]);
    let doc: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut seconds: Vec<f64> =
        doc["seconds_of_steps"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    seconds.sort_by(f64::total_cmp);
    let (took, predicted) = (seconds[seconds.len() / 2], doc["predicted_seconds_per_step"].as_f64().unwrap());
    println!("{ranks} ranks: predicted {:.1} ms, measured {:.1} ms", predicted * 1e3, took * 1e3);
    (predicted, took)
}

/// On one rank the prediction is within 40 % in one of a few attempts (on a quiet machine some 5 %: see the benchmark); on several,
/// where each waits for the others and another program holds up all, it is of the right size.
#[test]
fn a_measured_machine_is_planned_for_and_run_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (cluster, plan) = (at("here.toml"), at("plan.json"));
    let mut ratios = Vec::new();
    let near = |ratio: &f64| (0.6..=1.0 / 0.6).contains(ratio);
    while !ratios.iter().any(near) && ratios.len() < ATTEMPTS {
        println!("{}", works(&["profile", "-q", "-o", &cluster]));
        let (predicted, took) = step(&cluster, &plan, 1);
        ratios.push(predicted / took);
    }
    assert!(ratios.iter().any(near), "predicted by measured seconds, in each attempt: {ratios:.2?}");
    let ranks = Cluster::load(&cluster).unwrap().devices_per_node.min(2);
    let (predicted, took) = step(&cluster, &plan, ranks);
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
