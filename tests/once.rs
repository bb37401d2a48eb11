//! What runs once in a step: casts of parameters serve all micro-batches, in whatever stage and shard.

mod common;

use common::{model, works};

/// Losses of four steps in bf16 under some pins, eight samples per step.
fn losses(dir: &tempfile::TempDir, pins: &[&str]) -> Vec<f64> {
    let path = dir.path().join("p.json").to_str().unwrap().to_string();
    let file = model("gpt2-loss-dyn.onnx");
    let flags = ["--precision", "bf16", "--global-batch", "8", "--dim", "sequence=12", "--quiet", "-o", &path];
    works(&[&["plan", &file], pins, &flags].concat());
    works(&["check", &path]);
    let said = works(&["run", &path, "--steps", "4", "--seed", "1", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    said["loss"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect()
}

#[test]
fn casts_that_serve_all_micro_batches_change_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    let alone = losses(&dir, &["--gpus", "1", "--micro-batch", "2"]);
    assert!(alone[3] < alone[0], "{alone:?}");
    // One micro-batch casts where it computes; sums over samples, shards and stages (of a tied weight) round differently.
    for pins in [
        &["--gpus", "1", "--micro-batch", "8"][..],
        &["--gpus", "2", "--pp", "2", "--micro-batch", "2"],
        &["--gpus", "8", "--pp", "2", "--dp", "4", "--zero", "3", "--micro-batch", "1"],
        &["--gpus", "8", "--tp", "4", "--dp", "2", "--zero", "3", "--recompute", "full", "--micro-batch", "1"],
    ] {
        for (a, b) in alone.iter().zip(losses(&dir, pins)) {
            assert!((a - b).abs() < 2e-4 * a, "{pins:?}: {b}, not {a}");
        }
    }
}
