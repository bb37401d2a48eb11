//! `--cluster` takes a name, a cluster file, or what `nvidia-smi topo -m` printed, and plans keep what they were made for.

mod common;

use std::fs;
use std::path::PathBuf;

use common::{autoshard, model, works};

fn matrix(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cost_models/tests/topologies").join(name);
    path.to_str().unwrap().to_string()
}

#[test]
fn a_matrix_is_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (copy, plan, again) = (at("node.txt"), at("p.json"), at("node.toml"));
    fs::copy(matrix("crossed-pairs.txt"), &copy).unwrap();
    let flags = ["--gpus", "4", "--global-batch", "8", "-q"];
    let file = model("vit-loss-dyn.onnx");
    let refused = autoshard(&[&["plan", &file, "--cluster", &copy, "-o", &plan], &flags[..]].concat());
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("nvidia-smi -L") && !PathBuf::from(&plan).exists(), "{}", refused.stderr);
    let device = ["--device", "A100-SXM4-40GB"];
    let said = works(&[&["plan", &file, "--cluster", &copy, "-o", &plan], &flags[..], &device].concat());
    assert!(said.contains("GPU0 GPU2 are not neighbours") && said.contains("NVLinks count as PCIe"), "{said}");
    // The file that it stands for says the same, and the plan needs neither.
    fs::write(&again, works(&[&["clusters", &copy], &device[..]].concat())).unwrap();
    let other = at("q.json");
    works(&[&["plan", &file, "--cluster", &again, "-o", &other], &flags[..]].concat());
    let time = |path: &str| {
        let doc: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        doc["predicted"]["step_time_s"].as_f64().unwrap()
    };
    assert_eq!(time(&plan), time(&other));
    fs::remove_file(&copy).unwrap();
    works(&["check", &plan]);
}

#[test]
fn a_device_without_effect_is_refused() {
    let file = model("vit-loss-dyn.onnx");
    for (args, says) in [
        (vec!["plan", &file, "--gpus", "8", "--cluster", "dgx-h100", "--device", "T4-16GB"], "names its own"),
        (vec!["plan", &file, "--gpus", "8", "--device", "T4-16GB"], "--cluster"),
        (vec!["clusters", "dgx-h100", "--device", "T4-16GB"], "names its own"),
        (vec!["clusters", "--device", "T4-16GB"], "<NAME>"),
    ] {
        let ran = autoshard(&args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
}
