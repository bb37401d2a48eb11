//! Three steps of AdamW, unsharded, against what PyTorch recorded beside the model files (`NAME.train.npz`).
//!
//! Losses within 1e-4, gradients of the first step within 1e-4 and parameters after the third step within 1e-3, relative in
//! norm per tensor. Where a gradient is rounding noise (`train::is_noise`), the gradient recorded must be noise too, and the
//! parameter is not compared.

mod recorded;

use std::collections::BTreeMap;
use std::path::Path;

use autoshard_ir::assemble::{assemble, parts_of};
use autoshard_ir::graph::{Graph, Init, State};
use autoshard_ir::onnx::Model;
use autoshard_ir::train::{self, Loss, TrainOptions, is_noise, micro_batchable, rms, train_step};
use autoshard_ir::weights::WeightRef;
use autoshard_ir::{Tensor, Type, interp, verify};

use recorded::{bindings, distance, models, npz};

/// Largest differences of a model.
#[derive(Debug, Default)]
struct Found {
    loss: f64,
    gradient: f64,
    parameter: f64,
    noise: usize,
    tensors: usize,
}

/// The larger; not a number is worst of all.
fn worst(a: f64, b: f64) -> f64 {
    if b.is_nan() { f64::INFINITY } else { a.max(b) }
}

fn weight(s: &State) -> &WeightRef {
    let Init::Weight(w) = &s.init else { panic!("{} has no initializer", s.name) };
    w
}

/// The tensors whose names start with `prefix`, without it.
fn group(all: &BTreeMap<String, Tensor>, prefix: &str) -> BTreeMap<String, Tensor> {
    all.iter().filter_map(|(k, t)| Some((k.strip_prefix(prefix)?.to_string(), t.clone()))).collect()
}

fn floats(t: &Tensor) -> Vec<f64> {
    autoshard_ir::convert::to_f64(t.dtype(), t.bytes())
}

/// A part of a recorded tensor.
fn part(whole: &Tensor, w: &WeightRef) -> Tensor {
    let whole = WeightRef {
        ty: Type::new(whole.dtype(), whole.dims()),
        storage: autoshard_ir::weights::WeightStorage::Inline(whole.clone().into()),
        ..w.clone()
    };
    let dims: Vec<_> = whole.region.iter().map(|r| 0..r.len()).collect();
    whole.read(&dims).unwrap()
}

/// Trains, and compares with the record. An error says what is in the way.
fn train(path: &Path) -> Result<Found, String> {
    let record = npz(&path.with_extension("train.npz"));
    let arrays = npz(&path.with_extension("npz"));
    let model = Model::open(path).map_err(|e| e.to_string())?;
    let mut graph = model.instantiate(&bindings(&model, &arrays, "in0")).map_err(|e| e.to_string())?;
    let gradients = group(&record, "grad/");
    // The record lists exactly what PyTorch trained.
    for s in graph.states.iter_mut().filter(|s| matches!(s.init, Init::Weight(_))) {
        let listed = gradients.contains_key(&weight(s).initializer);
        if s.trainable != listed {
            return Err(format!("{} is {}trainable", s.name, if listed { "not " } else { "" }));
        }
    }
    let loss = Loss::Output(graph.outputs[0].name.clone());
    let options = TrainOptions { loss, gradient_outputs: true, ..TrainOptions::default() };
    let step = train_step(&graph, &options).map_err(|e| e.to_string())?;
    verify::verify(&step).map_err(|v| verify::report(&v))?;
    micro_batchable(&step).map_err(|r| r.iter().map(|r| format!("{r}\n")).collect::<String>())?;
    run(&step, &group(&arrays, "in0/"), &record, &gradients)
}

fn run(
    step: &Graph,
    inputs: &BTreeMap<String, Tensor>,
    record: &BTreeMap<String, Tensor>,
    gradients: &BTreeMap<String, Tensor>,
) -> Result<Found, String> {
    let ins: Vec<Tensor> = step.inputs.iter().map(|x| inputs[&x.name].clone()).collect();
    let mut states = recorded::states(step);
    let losses = floats(&record["loss"]);
    let mut found = Found::default();
    let mut first = BTreeMap::new();
    for (i, want) in losses.iter().enumerate() {
        let out = interp::run(step, &ins, &states).map_err(|e| e.to_string())?;
        let outputs: BTreeMap<&str, &Tensor> = step.outputs.iter().map(|o| o.name.as_str()).zip(&out.outputs).collect();
        let loss = floats(outputs[train::LOSS])[0];
        found.loss = worst(found.loss, (loss - want).abs() / want.abs());
        if i == 0 {
            first = outputs
                .iter()
                .filter_map(|(n, t)| Some((n.strip_prefix("grad/")?.to_string(), (*t).clone())))
                .collect::<BTreeMap<String, Tensor>>();
        }
        if i + 1 < losses.len() {
            states = out.states;
        }
    }
    let trained: Vec<(usize, &State)> =
        step.states.iter().enumerate().filter(|(_, s)| first.contains_key(&s.name)).collect();
    let whole = |of: &dyn Fn(usize, &State) -> Tensor| {
        let parts: Vec<(WeightRef, Tensor)> = trained.iter().flat_map(|(i, s)| parts_of(s, &of(*i, s))).collect();
        assemble(parts.iter().map(|(w, t)| (w, t))).map_err(|e| e.to_string())
    };
    let joined = whole(&|_, s| first[&s.name].clone())?;
    let parameters = whole(&|i, _| (*states[i]).clone())?;
    let largest = first.values().map(rms).fold(0.0, f64::max);
    for (name, want) in gradients {
        let (Some(got), Some(parameter)) = (joined.get(name), parameters.get(name)) else {
            return Err(format!("{name} gets no gradient"));
        };
        found.tensors += 1;
        if is_noise(rms(want), largest) {
            if !is_noise(rms(got), largest) {
                return Err(format!("{name}: the gradient is {:e}, where noise is recorded", rms(got)));
            }
            found.noise += 1;
            continue;
        }
        found.gradient = worst(found.gradient, distance(got, want).0);
        // A part of a fused parameter may be noise where the whole is not.
        let noisy =
            trained.iter().any(|(_, s)| weight(s).initializer == *name && is_noise(rms(&first[&s.name]), largest));
        if !noisy {
            found.parameter = worst(found.parameter, distance(parameter, &record[&format!("param/{name}")]).0);
            continue;
        }
        for (i, s) in trained.iter().filter(|(_, s)| weight(s).initializer == *name) {
            if is_noise(rms(&first[&s.name]), largest) {
                found.noise += 1;
            } else {
                let want = part(&record[&format!("param/{name}")], weight(s));
                found.parameter = worst(found.parameter, distance(&states[*i], &want).0);
            }
        }
    }
    Ok(found)
}

#[test]
fn core_models_train_as_pytorch_trains_them() {
    let mut failures = String::new();
    for arch in ["gpt2", "llama", "bert-mlm", "vit"] {
        for exporter in ["dyn", "leg"] {
            let name = format!("{arch}-loss-{exporter}");
            match train(&models().join(format!("{name}.onnx"))) {
                Ok(f) if f.loss <= 1e-4 && f.gradient <= 1e-4 && f.parameter <= 1e-3 && f.noise * 4 < f.tensors => {
                    println!("{name}: {f:?}");
                }
                Ok(f) => failures += &format!("{name}: {f:?}\n"),
                Err(e) => failures += &format!("{name}: {e}\n"),
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Reports on every recorded model of a directory: `MODELS=DIR cargo test --test training -- --ignored --nocapture`.
#[test]
#[ignore = "a report on models that are not part of the repository"]
fn other_models() {
    let dir = std::env::var("MODELS").expect("MODELS names a directory");
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for path in files
        .iter()
        .filter(|p| p.to_string_lossy().ends_with("-loss.onnx") || p.extension().is_some_and(|e| e == "onnx"))
    {
        if path.with_extension("train.npz").exists() {
            let result = train(path);
            println!(
                "{}: {}",
                path.file_stem().unwrap().display(),
                match result {
                    Ok(f) => format!("{f:?}"),
                    Err(e) => e,
                }
            );
        }
    }
}
