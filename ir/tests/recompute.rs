//! Steps with recomputation: equal to the plain step on every core model, with fewer bytes kept, in the order that frees
//! memory.

mod recorded;

use std::collections::BTreeMap;
use std::sync::Arc;

use autoshard_ir::graph::{Def, Graph, Init, NodeId, Section, StateKind};
use autoshard_ir::onnx::Model;
use autoshard_ir::train::recompute::{kept, originals};
use autoshard_ir::train::{Loss, Precision, Recompute, TrainOptions, train_step};
use autoshard_ir::{Builder, DType, Tensor, Type, blocks, interp, text, verify};

use recorded::{bindings, models, npz};

const WAYS: [Recompute; 3] = [Recompute::Selective, Recompute::Full, Recompute::Layers];

const MODELS: [&str; 8] = [
    "gpt2-loss-dyn",
    "gpt2-loss-leg",
    "llama-loss-dyn",
    "llama-loss-leg",
    "bert-mlm-loss-dyn",
    "bert-mlm-loss-leg",
    "vit-loss-dyn",
    "vit-loss-leg",
];

fn forward(name: &str) -> (Graph, BTreeMap<String, Tensor>) {
    let path = models().join(format!("{name}.onnx"));
    let arrays = npz(&path.with_extension("npz"));
    let model = Model::open(&path).unwrap();
    let graph = model.instantiate(&bindings(&model, &arrays, "in0")).unwrap();
    let inputs = arrays.iter().filter_map(|(k, t)| Some((k.strip_prefix("in0/")?.to_string(), t.clone()))).collect();
    (graph, inputs)
}

fn options(graph: &Graph, recompute: Recompute, precision: Precision) -> TrainOptions {
    let loss = Loss::Output(graph.outputs[0].name.clone());
    TrainOptions { loss, gradient_outputs: true, recompute, precision, ..TrainOptions::default() }
}

fn step(graph: &Graph, recompute: Recompute, precision: Precision) -> Graph {
    let step = train_step(graph, &options(graph, recompute, precision)).unwrap();
    verify::verify(&step).unwrap_or_else(|v| panic!("{}\n{}", verify::report(&v), text::print(&step)));
    step
}

fn bytes(g: &Graph) -> u64 {
    kept(g).into_iter().map(|v| g.ty(v).bytes() as u64).sum()
}

fn copies(g: &Graph) -> usize {
    originals(g).iter().flatten().count()
}

/// Losses, gradients, parameters and optimizer states are the same to the bit, and less is kept.
#[test]
fn recomputed_steps_equal_the_plain_step() {
    for name in MODELS {
        let (graph, inputs) = forward(name);
        let plain = step(&graph, Recompute::None, Precision::F32);
        let ins: Vec<Tensor> = plain.inputs.iter().map(|x| inputs[&x.name].clone()).collect();
        let states = recorded::states(&plain);
        let want = interp::run(&plain, &ins, &states).unwrap();
        assert_eq!(copies(&plain), 0, "{name}");
        for way in WAYS {
            let g = step(&graph, way, Precision::F32);
            assert!(copies(&g) > 0 && bytes(&g) < bytes(&plain), "{name} {way:?}: {} of {}", bytes(&g), bytes(&plain));
            println!("{name} {way:?}: {} copies, {} of {} bytes kept", copies(&g), bytes(&g), bytes(&plain));
            let names = |g: &Graph| g.outputs.iter().map(|o| o.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&g), names(&plain));
            let got = interp::run(&g, &ins, &states).unwrap();
            for ((o, got), want) in g.outputs.iter().zip(&got.outputs).zip(&want.outputs) {
                assert_eq!(got, want, "{name} {way:?}: output {}", o.name);
            }
            for ((s, got), want) in g.states.iter().zip(&got.states).zip(&want.states) {
                assert_eq!(got, want, "{name} {way:?}: state {}", s.name);
            }
        }
    }
}

/// Forward nodes keep their ids, copies share the class of their original, and classes are those of the plain step: a
/// decision for the one is a decision for the other.
#[test]
fn a_step_with_copies_has_the_classes_of_the_plain_step() {
    for name in MODELS {
        let (graph, _) = forward(name);
        let plain = step(&graph, Recompute::None, Precision::Bf16);
        let of_plain = blocks::find(&plain);
        let forward = plain.nodes.iter().take_while(|n| n.section == Section::Forward).count();
        for way in WAYS {
            let g = step(&graph, way, Precision::Bf16);
            let of = blocks::find(&g);
            assert_eq!((of.runs, of.nodes.len()), (of_plain.runs.clone(), of_plain.nodes.len()), "{name} {way:?}");
            assert_eq!(of.states, of_plain.states, "{name} {way:?}");
            for i in 0..forward {
                assert_eq!(
                    (g.nodes[i].op.clone(), of.node_class[i]),
                    (plain.nodes[i].op.clone(), of_plain.node_class[i])
                );
            }
            for (id, original) in g.node_ids().zip(originals(&g)) {
                if let Some(original) = original {
                    assert_eq!(of.node_class[id.index()], of.node_class[original.index()]);
                }
            }
        }
    }
}

/// Where a framework runs a layer again, it does so to its end, also what the backward pass does not need.
#[test]
fn layers_are_run_again_to_their_end() {
    let (graph, _) = forward("gpt2-loss-dyn");
    let products = |way| {
        let g = step(&graph, way, Precision::F32);
        let is_product = |n: &NodeId| g.node(*n).op.name() == "Einsum";
        let again = originals(&g).into_iter().flatten().filter(is_product).count();
        let run = blocks::find(&g).runs.into_iter().max_by_key(|r| r.period * r.count).unwrap();
        let of_blocks = (run.start..run.end()).map(|i| NodeId(i as u32)).filter(is_product).count();
        (again, of_blocks)
    };
    // Without it the last product of each of the two blocks is spared.
    let (full, of_blocks) = products(Recompute::Full);
    assert_eq!((full, products(Recompute::Layers)), (of_blocks - 2, (of_blocks, of_blocks)));
}

/// A gradient that applies a forward operator (the cosine of a sine's operand) stays a node beside the copy of one.
#[test]
fn a_copy_does_not_take_the_place_of_a_gradient() {
    let mut b = Builder::new("waves");
    let mut x = b.input("x", Type::new(DType::F32, [6, 16]), Some(0));
    for layer in 0..4 {
        let ty = Type::new(DType::F32, [16, 16]);
        let w = b.state(format!("{layer}.w"), StateKind::Parameter, ty, Init::Zeros, None);
        let w = b.graph().state(w).read;
        let h = b.einsum("bk,kn->bn", x, w).unwrap();
        let (s, c) = (b.sin(h).unwrap(), b.cos(h).unwrap());
        let p = b.mul(s, c).unwrap();
        x = b.add(x, p).unwrap();
    }
    let loss = b.reduce_sum(x, &[0, 1], false).unwrap();
    b.output("loss", loss, None);
    let graph = b.finish();
    let of_plain = blocks::find(&step(&graph, Recompute::None, Precision::F32));
    for way in WAYS {
        let g = step(&graph, way, Precision::F32);
        assert!(copies(&g) > 0, "{way:?}");
        let of = blocks::find(&g);
        assert_eq!((of.runs, of.nodes.len()), (of_plain.runs.clone(), of_plain.nodes.len()), "{way:?}");
    }
}

/// Bytes of activations that the blocks of the longest run keep, per block. Casts of parameters are weights.
fn kept_per_block(g: &Graph) -> Vec<u64> {
    let run = blocks::find(g).runs.into_iter().max_by_key(|r| r.period * r.count).unwrap();
    let mut by_block = vec![0; run.count];
    for v in kept(g) {
        if let Def::Node(n, _) = g.value(v).def
            && (run.start..run.end()).contains(&n.index())
            && !g.casts_state(g.node(n))
        {
            by_block[(n.index() - run.start) / run.period] += g.ty(v).bytes() as u64;
        }
    }
    by_block
}

/// Korthikanti et al. 2022, table 2: full recomputation keeps `2 s b h` bytes per layer in half precision. A block keeps
/// what it gives to the next.
#[test]
fn full_recomputation_keeps_the_residual_stream_alone() {
    for (name, layers) in [
        ("gpt2-loss-dyn", 2),
        ("gpt2-loss-leg", 2),
        ("llama-loss-dyn", 2),
        ("bert-mlm-loss-dyn", 2),
        ("vit-loss-dyn", 2),
    ] {
        let (graph, _) = forward(name);
        let g = step(&graph, Recompute::Full, Precision::Bf16);
        let (b, s, h) = if name.starts_with("vit") { (2, 17, 64) } else { (2, 12, 64) };
        assert_eq!(kept_per_block(&g), vec![2 * s * b * h; layers], "{name}");
    }
}

/// A block is recomputed when the backward pass reaches it, after the blocks behind it are done: its copies come after
/// the last backward node of the next block, but for what passes between both.
#[test]
fn blocks_are_recomputed_one_after_the_other() {
    for name in ["gpt2-loss-dyn", "llama-loss-dyn", "vit-loss-dyn"] {
        let (graph, _) = forward(name);
        let g = step(&graph, Recompute::Full, Precision::Bf16);
        let run = blocks::find(&g).runs.into_iter().max_by_key(|r| r.period * r.count).unwrap();
        let block =
            |n: NodeId| (run.start..run.end()).contains(&n.index()).then(|| (n.index() - run.start) / run.period);
        let mut at = run.count;
        for (id, original) in g.node_ids().zip(originals(&g)) {
            if let Some(now) = original.and_then(block) {
                assert!(now <= at, "{name}: {id} recomputes block {now} after block {at}");
                at = now;
            } else if let Some(now) = g.node(id).of.filter(|_| g.node(id).op.name() != "Accumulate").and_then(block) {
                assert!(now <= at, "{name}: {id} belongs to block {now}, and comes after block {at} is recomputed");
            }
        }
        assert_eq!(at, 0, "{name}");
    }
}

/// A copy of a dropout drops what the original drops: random numbers are a function of seed, step and element.
#[test]
fn recomputed_dropout_drops_the_same() {
    let mut b = Builder::new("dropout");
    let mut x = b.input("x", Type::new(DType::F32, [6, 16]), Some(0));
    for layer in 0..3 {
        let ty = Type::new(DType::F32, [16, 16]);
        let w = b.state(format!("{layer}.w"), StateKind::Parameter, ty, Init::Zeros, None);
        let w = b.graph().state(w).read;
        let h = b.einsum("bk,kn->bn", x, w).unwrap();
        let t = b.tanh(h).unwrap();
        let (y, _) = b.dropout(t, 0.5, 7, None).unwrap();
        let y = b.mul(y, h).unwrap();
        x = b.add(x, y).unwrap();
    }
    let loss = b.reduce_sum(x, &[0, 1], false).unwrap();
    b.output("loss", loss, None);
    let graph = b.finish();
    let plain = step(&graph, Recompute::None, Precision::F32);
    let ins = [Tensor::f32([6, 16], &(0..96).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>())];
    let weight = Tensor::f32([16, 16], &(0..256).map(|i| (i as f32 * 0.11).cos()).collect::<Vec<_>>());
    let states: Vec<Arc<Tensor>> = plain
        .states
        .iter()
        .map(|s| {
            let ty = plain.ty(s.read).clone();
            Arc::new(if s.kind == StateKind::Parameter { weight.clone() } else { Tensor::zeros(ty) })
        })
        .collect();
    let want = interp::run(&plain, &ins, &states).unwrap();
    for way in WAYS {
        let g = step(&graph, way, Precision::F32);
        let dropouts = g.nodes.iter().filter(|n| n.op.name() == "Dropout" && n.section == Section::Backward).count();
        assert!(dropouts > 0, "{way:?}");
        assert_eq!(interp::run(&g, &ins, &states).unwrap().outputs, want.outputs, "{way:?}");
    }
}

/// Stages cut blocks wherever they like: what comes from another stage is kept there, never made there.
#[test]
fn copies_stay_in_the_stage_of_their_original() {
    let (graph, inputs) = forward("gpt2-loss-dyn");
    let plain = step(&graph, Recompute::None, Precision::F32);
    let forward = plain.nodes.iter().take_while(|n| n.section == Section::Forward).count();
    let ins: Vec<Tensor> = plain.inputs.iter().map(|x| inputs[&x.name].clone()).collect();
    let states = recorded::states(&plain);
    let want = interp::run(&plain, &ins, &states).unwrap();
    for cut in (20..forward).step_by(17) {
        for way in WAYS {
            let stage_of: Vec<u16> = (0..forward).map(|i| u16::from(i >= cut)).collect();
            let g = train_step(
                &graph,
                &TrainOptions { stage_of: Some(stage_of.clone()), ..options(&graph, way, Precision::F32) },
            )
            .unwrap();
            verify::verify(&g).unwrap_or_else(|v| panic!("{}", verify::report(&v)));
            let stage = |n: NodeId| g.node(n).of.map_or(0, |f| stage_of[f.index()]);
            for (id, original) in g.node_ids().zip(originals(&g)) {
                for p in g.node(id).inputs.iter().filter_map(|&v| g.producer(v)).filter(|_| original.is_some()) {
                    if g.node(p).section == Section::Backward {
                        assert_eq!(stage(p), stage(id), "cut at {cut}, {way:?}: {id} reads the copy {p}");
                    }
                }
            }
            let got = interp::run(&g, &ins, &states).unwrap();
            assert_eq!(got.outputs[0], want.outputs[0], "cut at {cut}, {way:?}");
        }
    }
}
