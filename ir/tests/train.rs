//! Training steps of small graphs in textual form: gradients against finite differences, micro-batches by hand against one
//! batch, stages, clipping, precision, losses, and what is refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use autoshard_ir::graph::{Def, Graph, Section, ValueId};
use autoshard_ir::tensor::{Tensor, Type};
use autoshard_ir::train::{self, Loss, Optimizer, Precision, TrainError, TrainOptions, micro_batchable, train_step};
use autoshard_ir::{Builder, DType, convert, interp, ops, text, verify};

/// A two-layer network on f64, with the mean cross-entropy over valid labels as import emits it.
const MLP: &str = r#"graph "mlp" {
  inputs {
    %x = "x" : f64[8,6] batch 0
    %labels = "labels" : i64[8] batch 0
  }
  states {
    %w1 = parameter "w1" : f64[6,10] = zeros
    %b1 = parameter "b1" : f64[10] = zeros
    %w2 = parameter "w2" : f64[10,10] = zeros
    %scale = frozen "scale" : f64[10] = splat(0.75)
    %unused = parameter "unused" : f64[3] = zeros
  }
  constants {
    %ignore : i64[] = -100
    %zero : f64[] = 0.0
    %one : f64[] = 1.0
  }
  forward {
    %h0 = Einsum{eq="bk,kn->bn"}(%x, %w1)  "fc1" in "layers.0"
    %h1 = Add(%h0, %b1)  "bias1" in "layers.0"
    %h2 = Tanh(%h1)  "act1" in "layers.0"
    %h3 = Einsum{eq="bk,kn->bn"}(%h2, %w2)  "fc2" in "layers.1"
    %h4 = Mul(%h3, %scale)  "scale" in "layers.1"
    %h5 = Add(%h4, %h2)  "residual" in "layers.1"
    %logits = Einsum{eq="bk,kn->bn"}(%h5, %w2)  "fc2 again" in "head"
    %lse, %picked = CrossEntropyParts(%logits, %labels)  "parts" in "loss"
    %each = Sub(%lse, %picked)
    %same = Equal(%labels, %ignore)
    %nll = Where(%same, %zero, %each)
    %valid = Where(%same, %zero, %one)
    %sum = ReduceSum{dims=[0]}(%nll)
    %count = ReduceSum{dims=[0]}(%valid)
    %loss = Div(%sum, %count)  "mean" in "loss"
  }
  outputs {
    "loss" = %loss
    "logits" = %logits batch 0
  }
}
"#;

/// Reproducible numbers in [-1, 1).
fn random(ty: &Type, seed: u64) -> Tensor {
    let mut t = Tensor::zeros(ty.clone());
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let xs = (0..ty.numel()).map(|_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    });
    convert::from_f64(ty.dtype, xs, t.bytes_mut());
    t
}

/// Parameters at random, optimizer states zero.
fn states(g: &Graph) -> Vec<Arc<Tensor>> {
    g.state_ids()
        .map(|s| {
            let ty = g.ty(g.state(s).read);
            let parameter = g.state(s).kind == autoshard_ir::graph::StateKind::Parameter;
            Arc::new(if parameter { random(ty, 1 + u64::from(s.0)) } else { Tensor::zeros(ty.clone()) })
        })
        .collect()
}

fn inputs(g: &Graph) -> Vec<Tensor> {
    g.inputs
        .iter()
        .enumerate()
        .map(|(i, x)| match g.ty(x.value).dtype {
            // Every third label is ignored, unevenly over the batch.
            DType::I64 => {
                let ty = g.ty(x.value);
                let labels: Vec<i64> =
                    (0..ty.numel() as i64).map(|j| if j % 8 < 3 && j % 2 == 0 { -100 } else { (3 * j) % 10 }).collect();
                Tensor::i64(ty.dims.clone(), &labels)
            }
            _ => random(g.ty(x.value), 100 + i as u64),
        })
        .collect()
}

fn outputs(g: &Graph, inputs: &[Tensor], states: &[Arc<Tensor>]) -> BTreeMap<String, Vec<f64>> {
    let out = interp::run(g, inputs, states).unwrap();
    let floats = |t: &Tensor| convert::to_f64(t.dtype(), t.bytes());
    g.outputs.iter().zip(&out.outputs).map(|(o, t)| (o.name.clone(), floats(t))).collect()
}

fn step(g: &Graph, options: &TrainOptions) -> Graph {
    let step = train_step(g, options).unwrap();
    verify::verify(&step).unwrap_or_else(|v| panic!("{}\n{}", verify::report(&v), text::print(&step)));
    step
}

fn gradients() -> TrainOptions {
    TrainOptions { gradient_outputs: true, ..TrainOptions::default() }
}

#[track_caller]
fn close(a: &[f64], b: &[f64], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let norm = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    let size = norm(&mut b.iter().copied());
    assert!(difference <= tolerance * size, "{what}: difference {difference:e} of {size:e}");
}

/// Central differences of the loss in every element of every trained parameter.
fn check_finite_differences(text: &str) {
    let g = text::parse(text).unwrap();
    verify::verify(&g).unwrap_or_else(|v| panic!("{}", verify::report(&v)));
    let step = step(&g, &gradients());
    let (ins, start) = (inputs(&g), states(&g));
    let got = outputs(&step, &ins, &states(&step));
    let loss = |states: &[Arc<Tensor>]| outputs(&g, &ins, states)["loss"][0];
    assert!((got["loss"][0] - loss(&start)).abs() < 1e-6);
    let mut checked = 0;
    for s in g.state_ids() {
        let Some(grad) = got.get(&format!("grad/{}", g.state(s).name)) else { continue };
        let numeric: Vec<f64> = (0..grad.len())
            .map(|i| {
                let at = |delta: f64| {
                    let mut moved = start.clone();
                    Arc::make_mut(&mut moved[s.index()]).as_mut_slice::<f64>()[i] += delta;
                    loss(&moved)
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            })
            .collect();
        close(grad, &numeric, 1e-6, &g.state(s).name);
        checked += 1;
    }
    assert!(checked > 0);
}

#[test]
fn gradients_equal_finite_differences() {
    check_finite_differences(MLP);
}

/// Losses whose mean is spelled in other ways.
const LOSSES: [&str; 8] = [
    "%loss = ReduceSum{dims=[0]}(%nll)",
    "%loss0 = ReduceSum{dims=[0]}(%nll) %loss = Mul(%loss0, %share)",
    // The mean over the batch of each element, then their sum; and the mean of elements, then the sum over the batch.
    "%sq = Mul(%logits, %logits) %s = ReduceSum{dims=[0]}(%sq) %m = Mul(%s, %share) %loss = ReduceSum{dims=[0]}(%m)",
    "%sq = Mul(%logits, %logits) %s = ReduceSum{dims=[1]}(%sq) %m = Mul(%s, %eighth) %loss = ReduceSum{dims=[0]}(%m)",
    "%loss0 = Div(%sum, %count) %loss = Mul(%eighth, %loss0)",
    "%loss0 = Div(%sum, %count) %loss1 = Neg(%loss0) %loss2 = Neg(%loss1) %loss = Div(%loss2, %eighth)",
    "%sum1 = Mul(%sum, %eighth) %loss0 = Div(%sum, %count) %loss1 = Div(%sum1, %count) %loss = Add(%loss0, %loss1)",
    "%loss0 = Div(%sum, %count) %loss = Mul(%loss0, %loss0)",
];

fn with_loss(loss: &str) -> String {
    MLP.replace("%loss = Div(%sum, %count)  \"mean\" in \"loss\"", loss)
        .replace("%one : f64[] = 1.0", "%one : f64[] = 1.0 %eighth : f64[] = 0.125 %share : f64[] = 0.125")
}

#[test]
fn gradients_of_other_losses_equal_finite_differences() {
    for loss in LOSSES {
        check_finite_differences(&with_loss(loss));
    }
}

/// Runs a step with micro-batches by hand: the per-micro-batch sections on slices, sums of what is accumulated, then the
/// update.
fn micro_batched(step: &Graph, ins: &[Tensor], states: &[Arc<Tensor>], parts: usize) -> interp::Outcome {
    let mut sums: BTreeMap<ValueId, Vec<f64>> = BTreeMap::new();
    let run = |ins: &[Tensor], known: &BTreeMap<ValueId, Tensor>, update: bool| {
        let mut values: Vec<Option<Tensor>> = vec![None; step.values.len()];
        for (i, v) in step.values.iter().enumerate() {
            values[i] = match &v.def {
                Def::Const(t) => Some((**t).clone()),
                Def::Input(at) => ins.get(*at).cloned(),
                Def::State(s) => Some((*states[s.index()]).clone()),
                Def::Node(..) => known.get(&ValueId(i as u32)).cloned(),
            };
        }
        for n in step.nodes.iter().filter(|n| (n.section == Section::Update) == update) {
            let operands: Vec<Tensor> = n.inputs.iter().map(|v| values[v.index()].clone().unwrap()).collect();
            let results = interp::apply(&n.op, &operands, &step.output_types(n)).unwrap();
            for (v, t) in n.outputs.iter().zip(results) {
                values[v.index()] = Some(t);
            }
        }
        values
    };
    for part in 0..parts {
        let slices: Vec<Tensor> = step
            .inputs
            .iter()
            .zip(ins)
            .map(|(x, whole)| {
                let local = step.ty(x.value);
                assert_eq!(x.batch_dim, Some(0));
                Tensor::from_bytes(local.clone(), &whole.bytes()[part * local.bytes()..][..local.bytes()]).unwrap()
            })
            .collect();
        let values = run(&slices, &BTreeMap::new(), false);
        for n in step.nodes.iter().filter(|n| n.op.name() == verify::ACCUMULATE) {
            let t = values[n.outputs[0].index()].as_ref().unwrap();
            let xs = convert::to_f64(t.dtype(), t.bytes());
            let sum = sums.entry(n.outputs[0]).or_insert_with(|| vec![0.0; xs.len()]);
            sum.iter_mut().zip(xs).for_each(|(s, x)| *s += x);
        }
    }
    let known = sums
        .into_iter()
        .map(|(v, xs)| {
            let mut t = Tensor::zeros(step.ty(v).clone());
            convert::from_f64(t.dtype(), xs.into_iter(), t.bytes_mut());
            (v, t)
        })
        .collect();
    let values = run(&[], &known, true);
    let get = |v: ValueId| values[v.index()].clone().unwrap_or_else(|| Tensor::zeros(step.ty(v).clone()));
    interp::Outcome {
        outputs: step.outputs.iter().map(|o| get(o.value)).collect(),
        states: step.state_ids().map(|s| Arc::new(get(step.state(s).write.unwrap_or(step.state(s).read)))).collect(),
    }
}

/// The same model for a batch of 2 instead of 8; `%share` is one over the batch.
fn small_batch(text: &str) -> Graph {
    let small = text.replace("f64[8,6]", "f64[2,6]").replace("i64[8]", "i64[2]");
    text::parse(&small.replace("%share : f64[] = 0.125", "%share : f64[] = 0.5")).unwrap()
}

#[test]
fn four_micro_batches_equal_one_batch() {
    // The last loss, a product of means, has no such identity; see below.
    for loss in ["%loss = Div(%sum, %count)"].into_iter().chain(LOSSES[..7].iter().copied()) {
        let options = TrainOptions { clip_norm: Some(0.05), ..gradients() };
        let text = with_loss(loss);
        let (whole, part) = (step(&text::parse(&text).unwrap(), &options), step(&small_batch(&text), &options));
        micro_batchable(&part).unwrap_or_else(|r| panic!("{loss}: {r:?}"));
        let (ins, start) = (inputs(&whole), states(&whole));
        let one = interp::run(&whole, &ins, &start).unwrap();
        let four = micro_batched(&part, &ins, &start, 4);
        for (i, o) in whole.outputs.iter().enumerate().filter(|(_, o)| o.name != "logits") {
            let (a, b) = (&four.outputs[i], &one.outputs[i]);
            close(&convert::to_f64(a.dtype(), a.bytes()), &convert::to_f64(b.dtype(), b.bytes()), 1e-6, &o.name);
        }
        for (i, s) in whole.states.iter().enumerate() {
            let (a, b) = (&four.states[i], &one.states[i]);
            close(&convert::to_f64(a.dtype(), a.bytes()), &convert::to_f64(b.dtype(), b.bytes()), 1e-6, &s.name);
        }
    }
}

#[test]
fn what_needs_the_whole_batch_is_named() {
    let centred = MLP.replace(
        "%h2 = Tanh(%h1)  \"act1\" in \"layers.0\"",
        "%mean = ReduceSum{dims=[0]}(%h1) \"mean\" %centred = Sub(%h1, %mean) \"centre\" %h2 = Tanh(%centred)",
    );
    let across = MLP.replace(
        "%h2 = Tanh(%h1)  \"act1\" in \"layers.0\"",
        "%pairs = Einsum{eq=\"bk,ck->bc\"}(%h1, %h1) \"pairs\" %h2 = Einsum{eq=\"bc,ck->bk\"}(%pairs, %h1)",
    );
    let unmarked = MLP.replace("\"logits\" = %logits batch 0", "\"logits\" = %logits");
    let mut report = String::new();
    for text in [centred, across, unmarked, with_loss(LOSSES[7])] {
        let g = step(&text::parse(&text).unwrap(), &TrainOptions::default());
        for r in micro_batchable(&g).unwrap_err() {
            report += &format!("{r}\n");
        }
        report += "\n";
    }
    insta::assert_snapshot!(report);
}

/// Picking by index keeps samples apart where each index names its own place, and only there.
#[test]
fn samples_picked_by_their_own_index_stay_apart() {
    use autoshard_ir::op::{Attr, Op};
    let picked = |indices: [i64; 4]| {
        let mut b = Builder::new("picked");
        let x = b.input("x", Type::new(DType::F32, [2, 3]), Some(0));
        let indices = b.constant(Tensor::i64([2, 2], &indices));
        let row = b.emit1(Op::new(&ops::gather_nd::GATHER_ND).int("batch_dims", 0), &[x, indices]).unwrap();
        let scatter = Op::new(&ops::scatter::SCATTER_ND).with("reduction", Attr::Str("none".into()));
        let shifted = b.emit1(scatter, &[x, indices, row]).unwrap();
        b.output("row", row, Some(0));
        b.output("shifted", shifted, Some(0));
        micro_batchable(&b.finish())
    };
    picked([0, 2, 1, 0]).unwrap();
    assert!(picked([1, 2, 0, 0]).is_err(), "of another sample");
    assert!(picked([0, 2, 0, 0]).is_err(), "of the first sample only");
}

#[test]
fn the_step_of_the_mlp() {
    let g = text::parse(&MLP.replace("f64", "f32")).unwrap();
    let options = TrainOptions { clip_norm: Some(1.0), ..gradients() };
    insta::assert_snapshot!(text::print(&step(&g, &options)));
}

#[test]
fn stages_accumulate_apart_and_give_the_same_gradient() {
    let g = text::parse(MLP).unwrap();
    let prepared = train::prepare(&g, &gradients()).unwrap();
    let stages: Vec<u16> =
        prepared.graph.nodes.iter().map(|n| if n.scope.starts_with("layers") { 0 } else { 1 }).collect();
    let staged = TrainOptions { stage_of: Some(stages.clone()), ..gradients() };
    let (one, two) = (step(&g, &gradients()), step(&g, &staged));
    let accumulated =
        |g: &Graph| g.nodes.iter().filter(|n| n.op.name() == verify::ACCUMULATE && n.name == "grad/w2").count();
    assert_eq!((accumulated(&one), accumulated(&two)), (1, 2));
    let (ins, start) = (inputs(&one), states(&one));
    let (a, b) = (outputs(&one, &ins, &start), outputs(&two, &ins, &start));
    for (name, x) in &a {
        close(&b[name], x, 1e-6, name);
    }
    // The step keeps the node ids of the prepared graph.
    for (p, s) in prepared.graph.nodes.iter().zip(&two.nodes) {
        assert_eq!((&p.op, &p.scope, &p.name), (&s.op, &s.scope, &s.name));
    }
    let wrong = TrainOptions { stage_of: Some(vec![0; 3]), ..gradients() };
    assert!(matches!(train_step(&g, &wrong), Err(TrainError::Options(_))));
}

#[test]
fn clipping_bounds_the_global_norm() {
    let g = text::parse(MLP).unwrap();
    let sgd = Optimizer::Sgd(ops::optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0, nesterov: false });
    let limit = 0.01;
    let clipped = step(&g, &TrainOptions { optimizer: sgd, clip_norm: Some(limit), ..TrainOptions::default() });
    let (ins, start) = (inputs(&clipped), states(&clipped));
    let out = interp::run(&clipped, &ins, &start).unwrap();
    // With a learning rate of 1, what the parameters move is the gradient.
    let moved: f64 = start
        .iter()
        .zip(&out.states)
        .flat_map(|(a, b)| {
            a.as_slice::<f64>().iter().zip(b.as_slice::<f64>()).map(|(a, b)| (a - b).powi(2)).collect::<Vec<_>>()
        })
        .sum::<f64>()
        .sqrt();
    assert!((moved - limit).abs() < 1e-3 * limit, "{moved}");
}

#[test]
fn momentum_is_a_state_of_each_trained_parameter() {
    let g = text::parse(MLP).unwrap();
    let sgd = Optimizer::Sgd(ops::optimizer::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0, nesterov: false });
    let g = step(&g, &TrainOptions { optimizer: sgd, ..TrainOptions::default() });
    let written: Vec<&str> = g.states.iter().filter(|s| s.write.is_some()).map(|s| s.name.as_str()).collect();
    assert_eq!(written, ["w1", "b1", "w2", "sgd.momentum/w1", "sgd.momentum/b1", "sgd.momentum/w2"]);
}

#[test]
fn half_precision_follows_full_precision() {
    let full = text::parse(&MLP.replace("f64", "f32")).unwrap();
    let want = outputs(&step(&full, &gradients()), &inputs(&full), &states(&step(&full, &gradients())));
    for (precision, tolerance) in [
        (Precision::Bf16, 3e-2),
        (Precision::F16 { loss_scale: 1024.0 }, 4e-3),
        (Precision::F16 { loss_scale: 1.0 }, 4e-3),
    ] {
        let half = step(&full, &TrainOptions { precision, ..gradients() });
        assert!(half.states.iter().all(|s| half.ty(s.read).dtype == DType::F32), "master weights");
        let low = precision.compute().unwrap();
        for n in half.nodes.iter().filter(|n| n.op.name() == "Einsum") {
            assert_eq!(half.ty(n.outputs[0]).dtype, low, "{}", n.name);
        }
        let casts = half.nodes.iter().filter(|n| n.section == Section::Forward && n.op.name() == "Cast");
        let of_w2 =
            casts.filter(|n| matches!(half.value(n.inputs[0]).def, Def::State(s) if half.state(s).name == "w2"));
        assert_eq!(of_w2.count(), 1, "w2 is used twice and cast once");
        let got = outputs(&half, &inputs(&half), &states(&half));
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        for (name, x) in &want {
            close(&got[name], x, tolerance, &format!("{name} in {low}"));
        }
    }
}

#[test]
fn position_tables_and_masks_stay_in_full_precision() {
    let g = text::parse(
        r#"graph "rotary" {
             inputs { %p = "positions" : f32[4,1] %x = "x" : f32[4,3] batch 0 }
             states { %w = parameter "w" : f32[3,3] = zeros  %f = frozen "frequencies" : f32[1,3] = zeros }
             forward {
               %a = Einsum{eq="pk,kf->pf"}(%p, %f)
               %c = Cos(%a)
               %h = Einsum{eq="bk,kn->bn"}(%x, %w)
               %r = Mul(%h, %c)
               %s = ReduceSum{dims=[0,1]}(%r)
             }
             outputs { "loss" = %s } }"#,
    )
    .unwrap();
    let half = step(&g, &TrainOptions { precision: Precision::Bf16, ..TrainOptions::default() });
    let types: Vec<String> = half
        .nodes
        .iter()
        .filter(|n| n.section == Section::Forward && n.op.name() != "Cast")
        .map(|n| format!("{} {}", n.op.name(), half.ty(n.outputs[0]).dtype))
        .collect();
    assert_eq!(types, ["Einsum f32", "Cos f32", "Einsum bf16", "Mul bf16", "ReduceSum f32"]);
}

#[test]
fn losses_are_appended_to_outputs() {
    let g = text::parse(MLP).unwrap();
    let mut bare = g.clone();
    bare.outputs.retain(|o| o.name == "logits");
    bare.inputs[1].name = "file's labels".into();
    let loss = Loss::CrossEntropy { output: "logits".into(), labels: "labels".into(), ignore_index: -100 };
    let appended = step(&bare, &TrainOptions { loss, ..gradients() });
    let mut ins = inputs(&g);
    ins.push(ins[1].clone());
    let want = outputs(&step(&g, &gradients()), &ins[..2], &states(&step(&g, &gradients())));
    let got = outputs(&appended, &ins, &states(&appended));
    for (name, x) in &want {
        close(&got[name], x, 1e-6, name);
    }
    micro_batchable(&appended).unwrap();

    let loss = Loss::Mse { output: "logits".into(), target: "target".into() };
    let mse = step(&bare, &TrainOptions { loss, ..TrainOptions::default() });
    let ins = inputs(&mse);
    let got = outputs(&mse, &ins, &states(&mse));
    let target = convert::to_f64(DType::F64, ins[2].bytes());
    let mean = got["logits"].iter().zip(&target).map(|(x, t)| (x - t).powi(2)).sum::<f64>() / target.len() as f64;
    assert!((got["loss"][0] - mean).abs() < 1e-6 * mean);
    micro_batchable(&mse).unwrap();
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let frozen = MLP.replace("= parameter", "= frozen");
    let cases: Vec<(String, TrainOptions)> = vec![
        (MLP.into(), TrainOptions { loss: Loss::Output("lost".into()), ..TrainOptions::default() }),
        (MLP.into(), TrainOptions { loss: Loss::Output("logits".into()), ..TrainOptions::default() }),
        (
            MLP.into(),
            TrainOptions { loss: Loss::Mse { output: "logits".into(), target: "x".into() }, ..TrainOptions::default() },
        ),
        (
            MLP.into(),
            TrainOptions { loss: Loss::Mse { output: "logits".into(), target: "t".into() }, ..TrainOptions::default() },
        ),
        (MLP.into(), TrainOptions { precision: Precision::F16 { loss_scale: 0.0 }, ..TrainOptions::default() }),
        (frozen, TrainOptions::default()),
        // Two operators that only backward graphs contain.
        (
            MLP.replace(
                "%h2 = Tanh(%h1)  \"act1\"",
                "%g1 = TanhGrad(%h1, %h1) \"first\" %h2 = TanhGrad(%g1, %h1) \"second\"",
            ),
            TrainOptions::default(),
        ),
    ];
    let mut report = String::new();
    for (text, options) in cases {
        let g = text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
        report += &format!("{}\n", train_step(&g, &options).expect_err(&text));
    }
    let step = step(&text::parse(MLP).unwrap(), &TrainOptions::default());
    report += &format!("{}\n", train_step(&step, &TrainOptions::default()).unwrap_err());
    insta::assert_snapshot!(report);
}

/// Gradients go from later stages to earlier ones: a sum of contributions of three stages is never made in a stage that its
/// parts have to come back to.
#[test]
fn no_gradient_goes_back_to_a_later_stage() {
    let mut b = Builder::new("skips");
    let ty = Type::new(DType::F32, [4, 4]);
    let x = b.input("x", ty.clone(), Some(0));
    let w = b.state("w", autoshard_ir::graph::StateKind::Parameter, ty, autoshard_ir::graph::Init::Zeros, None);
    let w = b.graph().state(w).read;
    // By name: the stage of each node. `a` is read in stage 2, then twice in stage 1.
    let mut node = |name: &str, op: &dyn Fn(&mut Builder) -> ValueId| {
        b.name = name.into();
        op(&mut b)
    };
    let a = node("0", &|b| b.einsum("bk,kn->bn", x, w).unwrap());
    let t = node("1", &|b| b.tanh(a).unwrap());
    let s = node("1", &|b| b.mul(a, t).unwrap());
    let e = node("2", &|b| b.mul(s, a).unwrap());
    let loss = node("2", &|b| b.reduce_sum(e, &[0, 1], false).unwrap());
    b.output("loss", loss, None);
    let options = TrainOptions::default();
    let prepared = train::prepare(&b.finish(), &options).unwrap();
    let stage_of: Vec<u16> = prepared.graph.nodes.iter().map(|n| n.name.parse().unwrap_or(2)).collect();
    let step = train::step(&prepared, &TrainOptions { stage_of: Some(stage_of.clone()), ..options }).unwrap();
    let stage = |n: autoshard_ir::NodeId| step.node(n).of.map(|of| stage_of[of.index()]);
    for id in step.node_ids().filter(|&n| step.node(n).section == Section::Backward) {
        for p in step.node(id).inputs.iter().filter_map(|&v| step.producer(v)) {
            if step.node(p).section == Section::Backward {
                assert!(stage(p) >= stage(id), "{} reads from an earlier stage", step.node(id).name);
            }
        }
    }
}
