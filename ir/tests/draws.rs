//! Random draws of training steps: each step draws anew, each layer its own, and layers stay the same otherwise.

use std::path::PathBuf;
use std::sync::Arc;

use autoshard_ir::graph::{NodeId, Section};
use autoshard_ir::onnx::{Bindings, Model};
use autoshard_ir::ops::optimizer::Sgd;
use autoshard_ir::train::update::Optimizer;
use autoshard_ir::train::{TrainOptions, micro_batchable, train_step};
use autoshard_ir::{Graph, Tensor, blocks, interp};

fn model() -> Model {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/models/random/gpt2-train-loss-dyn.onnx");
    Model::open(&file).unwrap()
}

fn forward(batch: usize) -> Graph {
    let model = model();
    let symbol = model.batch_symbol().unwrap().to_string();
    let sizes = model.symbols().iter().map(|s| (s.name.clone(), if s.name == symbol { batch } else { 8 })).collect();
    model.instantiate(&Bindings(sizes)).unwrap()
}

fn dropouts(g: &Graph) -> Vec<NodeId> {
    g.node_ids().filter(|n| g.node(*n).op.name() == "Dropout" && g.node(*n).section == Section::Forward).collect()
}

#[test]
fn each_step_draws_anew() {
    let sgd = Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.0, nesterov: false };
    for optimizer in [Optimizer::default(), Optimizer::Sgd(sgd)] {
        let mut g = train_step(&forward(2), &TrainOptions { optimizer, ..TrainOptions::default() }).unwrap();
        // The masks as outputs.
        let masks: Vec<_> = dropouts(&g).iter().map(|n| g.node(*n).outputs[1]).collect();
        let of_model = g.outputs.len();
        for (i, v) in masks.iter().enumerate() {
            let output = autoshard_ir::graph::Output { name: format!("mask {i}"), value: *v, batch_dim: Some(0) };
            g.outputs.push(output);
        }
        let inputs: Vec<Tensor> = g.inputs.iter().map(|x| Tensor::zeros(g.ty(x.value).clone())).collect();
        let mut states: Vec<Arc<Tensor>> =
            g.states.iter().map(|s| Arc::new(Tensor::zeros(g.ty(s.read).clone()))).collect();
        let mut seen: Vec<Vec<Tensor>> = Vec::new();
        for _ in 0..3 {
            let out = interp::run(&g, &inputs, &states).unwrap();
            seen.push(out.outputs[of_model..].to_vec());
            states = out.states;
        }
        for pair in seen.windows(2) {
            for (i, (before, after)) in pair[0].iter().zip(&pair[1]).enumerate() {
                assert_ne!(before, after, "mask {i}");
            }
        }
    }
}

/// Layers that differ by their seeds alone are planned as one.
#[test]
fn layers_draw_their_own_and_are_the_same_otherwise() {
    let g = train_step(&forward(2), &TrainOptions::default()).unwrap();
    let found = dropouts(&g);
    let mut seeds: Vec<i64> = found.iter().map(|n| g.node(*n).op.get_int("seed")).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), found.len(), "a seed occurs twice");
    let of = blocks::find(&g);
    let classes: std::collections::BTreeSet<u32> = found.iter().map(|n| of.node_class[n.index()]).collect();
    // One after the embedding; two in each of two layers.
    assert_eq!((found.len(), classes.len()), (5, 3));
}

/// A batch of one does not show where it lies; the draws are told all the same.
#[test]
fn batch_dims_are_the_same_at_every_size() {
    let dims = |batch| {
        let g = forward(batch);
        dropouts(&g).iter().map(|n| (g.node(*n).op.clone(), g.node(*n).op.batch_dim())).collect::<Vec<_>>()
    };
    assert!(dims(1).iter().all(|(_, d)| *d == Some(0)), "{:?}", dims(1));
    assert_eq!(dims(1), dims(4));
    assert_eq!(micro_batchable(&train_step(&forward(2), &TrainOptions::default()).unwrap()), Ok(()));
}
