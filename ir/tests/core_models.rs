//! Exported models compute what ONNX Runtime recorded for them, and their parameters are those that PyTorch trained.

mod recorded;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use autoshard_ir::graph::{Init, StateKind};
use autoshard_ir::onnx::{Bindings, Model};
use autoshard_ir::verify::verify;
use recorded::{bindings, distance, files, models, more_models, npz, run};

const CORE: [&str; 15] = [
    "bert-mlm-loss-dyn",
    "bert-mlm-loss-leg",
    "gpt2-logits-dyn",
    "gpt2-logits-leg",
    "gpt2-loss-dyn",
    "gpt2-loss-leg",
    "llama-logits-dyn",
    "llama-logits-leg",
    "llama-loss-dyn",
    "llama-loss-leg",
    "resnet-logits-dyn",
    "resnet-logits-leg",
    "vit-logits-dyn",
    "vit-loss-dyn",
    "vit-loss-leg",
];

/// Imports a file for a set of recorded inputs, runs it, and gives the worst distances of its outputs.
fn check(path: &Path, set: &str) -> Result<(f64, f64), String> {
    let model = Model::open(path).map_err(|e| e.to_string())?;
    let arrays = npz(&path.with_extension("npz"));
    let graph = model.instantiate(&bindings(&model, &arrays, set)).map_err(|e| e.to_string())?;
    verify(&graph).map_err(|v| format!("{v:?}"))?;
    let outputs = run(&graph, &arrays, set);
    let mut worst = (0.0f64, 0.0f64);
    for (port, found) in graph.outputs.iter().zip(&outputs) {
        let recorded = format!("{}/{}", set.replace("in", "out"), port.name);
        // Where ONNX Runtime could not run a file, what PyTorch gave for set 0.
        let expected = arrays.get(&recorded).or_else(|| arrays.get(&format!("torch0/{}", port.name)));
        let expected = expected.ok_or_else(|| format!("{recorded} is not recorded"))?;
        let (norm, max) = distance(found, expected);
        // A distance that is no number is larger than any.
        let order = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
        worst = (worst.0.max(order(norm)), worst.1.max(order(max)));
    }
    Ok(worst)
}

#[test]
fn core_models_compute_what_onnx_runtime_recorded() {
    let mut failed = Vec::new();
    println!("{:24} {:>4} {:>10} {:>10} {:>8}", "model", "set", "norm", "max", "seconds");
    for name in CORE {
        for set in ["in0", "in1"] {
            let start = Instant::now();
            let found = check(&models().join(format!("{name}.onnx")), set);
            let seconds = start.elapsed().as_secs_f64();
            match found {
                Ok((norm, max)) => {
                    println!("{name:24} {set:>4} {norm:10.2e} {max:10.2e} {seconds:8.2}");
                    if norm > 1e-4 || max > 1e-3 {
                        failed.push(format!("{name} {set}"));
                    }
                }
                Err(e) => {
                    println!("{name:24} {set:>4} {e}");
                    failed.push(format!("{name} {set}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// What differs between the parameters of a model and the initializers that PyTorch trained.
fn parameters_differ(path: &Path) -> Result<Vec<String>, String> {
    let model = Model::open(path).map_err(|e| e.to_string())?;
    let arrays = npz(&path.with_extension("npz"));
    let graph = model.instantiate(&bindings(&model, &arrays, "in0")).map_err(|e| e.to_string())?;
    let trained = npz(&path.with_extension("train.npz"));
    let trained: BTreeSet<&str> = trained.keys().filter_map(|k| k.strip_prefix("grad/")).collect();
    let parameters = graph.states.iter().filter(|s| s.kind == StateKind::Parameter && s.trainable);
    let found: BTreeSet<&str> = parameters
        .filter_map(|s| if let Init::Weight(w) = &s.init { Some((w, &s.tied)) } else { None })
        .flat_map(|(w, tied)| std::iter::once(w).chain(tied.iter().map(|t| &t.weight)))
        .map(|w| w.initializer.as_str())
        .collect();
    Ok(found.symmetric_difference(&trained).map(ToString::to_string).collect())
}

#[test]
fn parameters_are_those_that_pytorch_trained() {
    let shipped = files(&models(), ".train.npz");
    assert!(shipped.len() >= 8);
    let more = more_models("small").map(|folder| files(&folder, ".train.npz")).unwrap_or_default();
    for (path, must) in shipped.iter().map(|p| (p, true)).chain(more.iter().map(|p| (p, false))) {
        let path = Path::new(&path.to_string_lossy().replace(".train.npz", ".onnx")).to_path_buf();
        match parameters_differ(&path) {
            Ok(differ) => assert!(differ.is_empty(), "{}: {differ:?}", path.display()),
            Err(e) if !must => println!("not imported: {e}"),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn large_models_import_without_weights() {
    let Some(folder) = more_models("large") else {
        println!("skipped: there are no large models beside this checkout");
        return;
    };
    println!("{:28} {:>8} {:>7} {:>7} {:>9} {:>14}", "model", "seconds", "onnx", "nodes", "states", "parameters");
    for path in files(&folder, ".onnx") {
        let start = Instant::now();
        let model = Model::open(&path).unwrap_or_else(|e| panic!("{e}"));
        let sizes = [("batch", 8), ("sequence", 2048), ("past_sequence", 2048), ("total_sequence", 4096)];
        let sizes = sizes.into_iter().chain([("decoder_sequence", 512)]);
        let symbols: BTreeSet<String> = model.symbols().into_iter().map(|s| s.name).collect();
        let mut bound: Vec<(String, usize)> =
            sizes.map(|(k, v)| (k.to_string(), v)).filter(|(k, _)| symbols.contains(k)).collect();
        if path.to_string_lossy().contains("bert") {
            bound.iter_mut().for_each(|(_, n)| *n = (*n).min(512));
        }
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        match model.instantiate(&Bindings(bound.into_iter().collect())) {
            Ok(graph) => {
                let seconds = start.elapsed().as_secs_f64();
                verify(&graph).unwrap_or_else(|v| panic!("{name}: {v:?}"));
                let (onnx, nodes, states) = (model.proto().graph.node.len(), graph.nodes.len(), graph.states.len());
                println!("{name:28} {seconds:8.2} {onnx:7} {nodes:7} {states:9} {:14}", graph.parameter_count());
            }
            Err(e) => println!("{name:28} {e}"),
        }
    }
}

#[test]
fn which_other_small_models_import() {
    match more_models("small") {
        Some(folder) => report(&folder),
        None => println!("skipped: there are no more models beside this checkout"),
    }
}

/// Reports on every recorded model of a directory, such as the node tests of ONNX with their tensors as `.npz`:
/// `MODELS=DIR cargo test --test core_models -- --ignored --nocapture`.
#[test]
#[ignore = "a report on models that are not part of the repository"]
fn other_models() {
    report(Path::new(&std::env::var("MODELS").expect("MODELS names a directory")));
}

fn report(folder: &Path) {
    let (mut good, mut bad) = (0, 0);
    for path in files(folder, ".onnx").into_iter().filter(|p| p.with_extension("npz").exists()) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        // What the helpers of tests cannot compare panics.
        match std::panic::catch_unwind(|| check(&path, "in0")) {
            Ok(Ok((norm, _))) if norm <= 1e-4 => {
                good += 1;
                continue;
            }
            Ok(Ok((norm, max))) => println!("{name}: differs by {norm:.2e} (largest {max:.2e})"),
            Ok(Err(e)) => println!("{name}: {}", e.lines().take(6).collect::<Vec<_>>().join(" ")),
            Err(_) => println!("{name}: panicked"),
        }
        bad += 1;
    }
    println!("{good} import and agree, {bad} do not");
}
