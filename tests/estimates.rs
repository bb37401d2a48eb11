//! Estimates of how other frameworks execute a plan: each way changes what it is about, in the right direction.

mod common;

use common::{model, works};

/// A plan of the small Llama on 8 GPUs with some flags, as JSON.
fn plan(flags: &[&str]) -> serde_json::Value {
    plan_of("llama-loss-dyn.onnx", flags)
}

fn plan_of(name: &str, flags: &[&str]) -> serde_json::Value {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json").to_str().unwrap().to_string();
    let file = model(name);
    let pins = ["--gpus", "8", "--global-batch", "64", "--dim", "sequence=64", "--json", "-o", &path];
    serde_json::from_str(&works(&[&["plan", &file], &pins[..], flags].concat())).unwrap()
}

fn seconds(flags: &[&str]) -> f64 {
    plan(flags)["predicted"]["step_time_s"].as_f64().unwrap()
}

#[test]
fn ways_of_executing_change_times_as_they_should() {
    let data = ["--dp", "8", "--micro-batch", "2", "--recompute", "none"];
    // Gradients are cast after their reduction: one micro-batch, no sum over several.
    let once = ["--dp", "8", "--micro-batch", "8", "--recompute", "none"];
    let staged = ["--pp", "2", "--dp", "4", "--micro-batch", "2", "--recompute", "none"];
    for (pins, faster) in [
        (&data[..], &["--kernels", "compiled"][..]),
        (&data, &["--overlap", "data"]),
        (&once, &["--overlap", "data"]),
        (&["--tp", "8", "--micro-batch", "8"], &["--overlap", "all"]),
        (&staged, &["--chunks", "2"]),
    ] {
        let (plain, other) = (seconds(pins), seconds(&[pins, faster].concat()));
        assert!(other < plain, "{pins:?}: {plain} s, with {faster:?} {other} s");
    }
    // Scores are made, kept and read again; so are the parts of norms.
    for slower in [["--attention", "scores"], ["--operators", "graph"]] {
        let (plain, other) = (seconds(&data), seconds(&[&data[..], &slower].concat()));
        assert!(other > plain, "{plain} s, with {slower:?} {other} s");
    }
}

#[test]
fn tensor_parallelism_of_weights_gathers_none() {
    let flags = ["--tp", "8", "--micro-batch", "8", "--tp-splits", "weights", "--recompute", "none"];
    let plan = plan(&flags);
    let of_products = |o: &&serde_json::Value| o["op"].as_str().unwrap().starts_with("Einsum");
    let splits = plan["operators"].as_array().unwrap().iter().filter(of_products);
    let splits: Vec<&str> = splits.filter_map(|o| o["strategy"]["tp"].as_str()).collect();
    assert!(splits.contains(&"split n") && splits.contains(&"split k"), "{splits:?}");
    assert!(!splits.contains(&"split s"), "{splits:?}");
}

#[test]
fn what_cannot_be_executed_is_said() {
    let notes = plan(&["--pp", "2", "--chunks", "2", "--products", "fp8", "--overlap", "all"])["notes"].to_string();
    for part in ["interleaved schedule (2 chunks per stage)", "8 or 4 bits", "communication overlaps with compute"] {
        assert!(notes.contains(part), "{notes}");
    }
}

#[test]
fn experts_are_spread_over_data_parallel_ranks() {
    let pins = ["--dp", "8", "--micro-batch", "8", "--recompute", "none"];
    for name in ["random/qwen3-moe-loss-dyn.onnx", "random/gpt-oss-loss-dyn.onnx"] {
        let (whole, spread) = (plan_of(name, &pins), plan_of(name, &[&pins[..], &["--ep", "8"]].concat()));
        let bytes = |plan: &serde_json::Value, what: &str| {
            plan["predicted"]["stages"][0]["memory"][what].as_u64().unwrap_or_else(|| panic!("{}", plan["predicted"]))
        };
        // Most parameters are those of experts, of which a rank has one in eight.
        assert!(bytes(&spread, "optimizer") < bytes(&whole, "optimizer") * 6 / 10, "{name}");
        let products = spread["operators"].as_array().unwrap().iter();
        let products = products.filter(|o| o["op"].as_str().unwrap().starts_with("ExpertMatMul"));
        let split: Vec<_> = products.map(|o| o["strategy"]["ep"].as_str().unwrap_or("none").to_string()).collect();
        assert!(split.len() >= 3 && split.iter().all(|s| s == "route rows to experts"), "{name}: {split:?}");
        assert!(spread["notes"].to_string().contains("expert"), "{name}: {}", spread["notes"]);
    }
}
