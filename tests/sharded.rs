//! Every core model under every kind of parallelism computes what the unsharded model computes: planned by the command
//! line with pins, run on virtual ranks, compared by `verify` (outputs, gradients, updated parameters and optimizer states,
//! within 1e-4).

mod common;

const LOGITS: &[&str] = &[
    "gpt2-logits-dyn",
    "gpt2-logits-leg",
    "llama-logits-dyn",
    "llama-logits-leg",
    "vit-logits-dyn",
    "resnet-logits-dyn",
    "resnet-logits-leg",
];

const LOSS: &[&str] = &[
    "gpt2-loss-dyn",
    "gpt2-loss-leg",
    "llama-loss-dyn",
    "llama-loss-leg",
    "bert-mlm-loss-dyn",
    "bert-mlm-loss-leg",
    "vit-loss-dyn",
    "vit-loss-leg",
    // With dropout: no recorded outputs.
    "random/gpt2-train-loss-dyn",
    // Mixtures of experts as Qwen3 has them, by the generator of `benches/published`.
    "random/qwen3-moe-loss-dyn",
];

/// Files without weights.
const WEIGHTLESS: &[&str] = &["random/qwen3-moe-loss-dyn"];

/// Name, GPUs, pins.
const PLANS: &[(&str, usize, &[&str])] = &[
    ("dp=2", 2, &["--dp", "2"]),
    ("tp=2", 2, &["--tp", "2"]),
    ("pp=2", 2, &["--pp", "2"]),
    ("tp=2 pp=2, 4 micro-batches", 4, &["--tp", "2", "--pp", "2", "--micro-batch", "2"]),
    ("zero 1", 2, &["--dp", "2", "--zero", "1"]),
    ("zero 2", 2, &["--dp", "2", "--zero", "2", "--micro-batch", "2"]),
    ("zero 3", 2, &["--dp", "2", "--zero", "3"]),
    ("sequence parallel", 2, &["--tp", "2", "--sequence-parallel", "on"]),
    ("selective, dp=2 zero 3", 2, &["--dp", "2", "--zero", "3", "--recompute", "selective"]),
    ("full, dp=2 zero 3", 2, &["--dp", "2", "--zero", "3", "--recompute", "full"]),
    (
        "selective, tp=2 pp=2, 4 micro-batches",
        4,
        &["--tp", "2", "--pp", "2", "--micro-batch", "2", "--recompute", "selective"],
    ),
    ("full, tp=2 pp=2, 4 micro-batches", 4, &["--tp", "2", "--pp", "2", "--micro-batch", "2", "--recompute", "full"]),
    (
        "layers, tp=2 pp=2, 4 micro-batches",
        4,
        &["--tp", "2", "--pp", "2", "--micro-batch", "2", "--recompute", "layers"],
    ),
    ("gpipe", 2, &["--pp", "2", "--micro-batch", "2", "--schedule", "gpipe"]),
    ("cp=2", 2, &["--cp", "2"]),
    ("cp=2 tp=2 zero 3", 4, &["--cp", "2", "--tp", "2", "--zero", "3"]),
    (
        "cp=2 pp=2, 2 micro-batches, recompute",
        4,
        &["--cp", "2", "--pp", "2", "--micro-batch", "4", "--recompute", "full"],
    ),
    ("planner's choice for 8", 8, &[]),
];

fn run(args: &[&str]) -> Result<(), String> {
    let ran = common::autoshard(args);
    if ran.code == 0 { Ok(()) } else { Err(ran.stderr) }
}

fn check(models: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    for model in models {
        let file = common::model(&format!("{model}.onnx"));
        let mut base = vec!["--global-batch", "8", "--cluster", "dgx-h100", "--quiet"];
        if !model.starts_with("vit") && !model.starts_with("resnet") {
            base.extend(["--dim", "sequence=12"]);
        }
        for (name, gpus, pins) in PLANS {
            let of_training = ["--zero", "--recompute", "--schedule"].iter().any(|flag| pins.contains(flag));
            if of_training && !LOSS.contains(model) {
                continue;
            }
            // No product of it has a sequence: rows and columns of an image are not split by convolutions.
            if pins.contains(&"--cp") && (model.starts_with("resnet") || model.starts_with("vit")) {
                continue;
            }
            let plan = dir.path().join("plan.json");
            let gpus = gpus.to_string();
            let plan = plan.to_str().unwrap();
            let mut args = vec!["plan", &file, "--gpus", &gpus, "-o", plan];
            args.extend(&base);
            args.extend(*pins);
            let mut verify = vec!["verify", plan];
            if WEIGHTLESS.contains(model) {
                verify.push("--random-weights");
            }
            let done = run(&args).and_then(|()| run(&["check", plan])).and_then(|()| run(&verify));
            if let Err(e) = done {
                failures.push(format!("{model}, {name}: {e}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn inference() {
    check(LOGITS);
}

#[test]
fn training() {
    check(LOSS);
}
