//! Any assignment computes what the unsharded graph computes: strategies, storage, stages, placement of states and
//! schedules are drawn at random from all legal ones, compiled, run on virtual ranks, and compared.
//!
//! This is the strongest test of codegen, since it knows nothing of how a planner would choose.

use std::collections::BTreeMap;
use std::sync::Arc;

use autoshard_codegen::compile;
use autoshard_ir::graph::{Def, Init, StateKind};
use autoshard_ir::ops::optimizer::Sgd;
use autoshard_ir::train::{Optimizer, Recompute, TrainOptions, recompute, train_step};
use autoshard_ir::{Builder, DType, Graph, Section, Tensor, Type, interp};
use autoshard_planner::assignment::{Assignment, Schedule, StageId};
use autoshard_planner::mesh::{AxisName, Mesh};
use autoshard_planner::spec::Spec;
use autoshard_planner::strategies;
use autoshard_runtime::program::List;
use autoshard_runtime::random::Stream;
use autoshard_runtime::session::{Options, Session};

/// Reproducible draws.
struct Draw(Stream);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        (self.0.bits() % n as u64) as usize
    }
    fn tensor(&mut self, ty: &Type, high: f64) -> Tensor {
        let n = ty.numel();
        let mut t = Tensor::zeros(ty.clone());
        let float = ty.dtype.is_float();
        let xs: Vec<f64> = (0..n)
            .map(|_| {
                let u = self.0.uniform();
                if float { (u * 2.0 - 1.0) * 0.5 } else { (u * high).floor() }
            })
            .collect();
        autoshard_ir::convert::from_f64(ty.dtype, xs.into_iter(), t.bytes_mut());
        t
    }
}

/// A tiny language model with a loss: embedding, two residual blocks with attention by hand, tied head. Reshaped are
/// activations, parameters, outputs and values that are read on both sides.
fn model(batch: usize) -> Graph {
    let (s, h, heads, v) = (6, 12, 3, 18);
    let mut b = Builder::new("tiny");
    let ids = b.input("ids", Type::new(DType::I64, [batch, s]), Some(0));
    let labels = b.input("labels", Type::new(DType::I64, [batch, s]), Some(0));
    let weight = |b: &mut Builder, name: &str, dims: &[usize]| {
        let id = b.state(name, StateKind::Parameter, Type::new(DType::F32, dims), Init::Zeros, None);
        b.graph().state(id).read
    };
    let table = weight(&mut b, "embedding", &[v, h]);
    let mut x = b.gather(table, ids, 0).unwrap();
    for layer in 0..2 {
        let w = |b: &mut Builder, name: &str, dims: &[usize]| weight(b, &format!("{layer}.{name}"), dims);
        let (scale, bias) = (w(&mut b, "ln.scale", &[h]), w(&mut b, "ln.bias", &[h]));
        let normed = b.layer_norm(x, scale, Some(bias), 2, 1e-5).unwrap();
        let mut parts = Vec::new();
        for name in ["q", "k", "v"] {
            let p = w(&mut b, name, &[h, h]);
            let y = b.einsum("bsh,hk->bsk", normed, p).unwrap();
            let y = b.reshape(y, &[batch, s, heads, h / heads]).unwrap();
            parts.push(b.transpose(y, &[0, 2, 1, 3]).unwrap());
        }
        let scores = b.einsum("bnsd,bntd->bnst", parts[0], parts[1]).unwrap();
        let probs = b.softmax(scores, 3).unwrap();
        let mixed = b.einsum("bnst,bntd->bnsd", probs, parts[2]).unwrap();
        let mixed = b.transpose(mixed, &[0, 2, 1, 3]).unwrap();
        let mixed = b.reshape(mixed, &[batch, s, h]).unwrap();
        let o = w(&mut b, "o", &[h * h]);
        let o = b.reshape(o, &[h, h]).unwrap();
        let y = b.einsum("bsh,hk->bsk", mixed, o).unwrap();
        x = b.add(x, y).unwrap();
        let (up, down) = (w(&mut b, "up", &[h, 24]), w(&mut b, "down", &[24, h]));
        let y = b.einsum("bsh,hf->bsf", x, up).unwrap();
        let y = b.tanh(y).unwrap();
        let y = b.reshape(y, &[batch * s, 24]).unwrap();
        let y = b.einsum("tf,fh->th", y, down).unwrap();
        let y = b.reshape(y, &[batch, s, h]).unwrap();
        x = b.add(x, y).unwrap();
    }
    let flat = b.reshape(x, &[batch, s * h]).unwrap();
    b.output("flat", flat, Some(0));
    let first = b.reshape(table, &[v * h]).unwrap();
    b.output("table before the step", first, None);
    b.output("the table itself", table, None);
    b.output("ids as fed", ids, Some(0));
    let thirteen = b.scalar(DType::I64, 13.0);
    b.output("thirteen", thirteen, None);
    let logits = b.einsum("bsh,vh->bsv", x, table).unwrap();
    b.output("logits", logits, Some(0));
    let (lse, picked) = b.cross_entropy_parts(logits, labels).unwrap();
    let nll = b.sub(lse, picked).unwrap();
    let limit = b.scalar(DType::I64, 14.0);
    let valid = b.less(labels, limit).unwrap();
    let zero = b.scalar(DType::F32, 0.0);
    let nll = b.where_(valid, nll, zero).unwrap();
    let valid = b.cast(valid, DType::F32).unwrap();
    let (sum, count) = (b.reduce_sum(nll, &[0, 1], false).unwrap(), b.reduce_sum(valid, &[0, 1], false).unwrap());
    let loss = b.div(sum, count).unwrap();
    b.output("loss", loss, None);
    b.finish()
}

fn pick_storage(d: &mut Draw, ty: &Type, mesh: &Mesh) -> Spec {
    let mut spec = Spec::replicated(ty.rank());
    for a in mesh.ids() {
        if ty.rank() > 0 && d.below(3) > 0 {
            spec.dims[d.below(ty.rank())].push(a);
        }
    }
    if spec.local(ty, mesh).is_some() { spec } else { Spec::replicated(ty.rank()) }
}

/// `cuts` are the first forward nodes of all stages but the first.
fn random_assignment(graph: &Graph, mesh: Mesh, cuts: &[usize], micro_batches: usize, d: &mut Draw) -> Assignment {
    let n = graph.nodes.len();
    let stages = cuts.len() + 1;
    let mut stage = vec![StageId(0); n];
    let mut stateless = vec![false; n];
    let mut everywhere = vec![false; n];
    for id in graph.node_ids() {
        let (i, node) = (id.index(), graph.node(id));
        stage[i] = match (node.section, node.of) {
            (Section::Forward, _) => StageId(cuts.iter().filter(|c| **c <= i).count() as u16),
            (_, Some(of)) => stage[of.index()],
            (Section::Backward, None) => StageId(stages as u16 - 1),
            (Section::Update, None) => StageId(d.below(stages) as u16),
        };
        stateless[i] = node.section == Section::Forward
            && node.inputs.iter().all(|&v| match graph.value(v).def {
                Def::State(_) => false,
                Def::Node(p, _) => stateless[p.index()],
                _ => true,
            });
        let inputs_everywhere = node.inputs.iter().all(|&v| graph.producer(v).is_none_or(|p| everywhere[p.index()]));
        everywhere[i] = stateless[i] && inputs_everywhere && d.below(2) == 0;
    }
    let strategy = graph
        .nodes
        .iter()
        .map(|node| {
            let choices = strategies::of_node(graph, node, &mesh, None).list;
            choices[d.below(choices.len())].strategy.clone()
        })
        .collect();
    Assignment {
        stages,
        stage,
        everywhere,
        strategy,
        storage: graph.states.iter().map(|s| pick_storage(d, graph.ty(s.read), &mesh)).collect(),
        home: graph.states.iter().map(|_| StageId(d.below(stages) as u16)).collect(),
        inputs: graph.inputs.iter().map(|i| pick_storage(d, graph.ty(i.value), &mesh)).collect(),
        mesh,
        schedule: if d.below(2) == 0 { Schedule::GPipe } else { Schedule::OneF1B },
        micro_batches,
    }
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.ty(), b.ty());
    let (a, b) =
        (autoshard_ir::convert::to_f64(a.dtype(), a.bytes()), autoshard_ir::convert::to_f64(b.dtype(), b.bytes()));
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(&b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(1e-6)
}

/// `train`: a training step with that recomputed.
fn check(seed: u64, train: Option<Recompute>) {
    let mut d = Draw(Stream(seed));
    let micro_batches = [1, 1, 2, 4][d.below(4)];
    let batch = 8;
    // The whole is the plain step: what it is compared with must not be recomputed too.
    let build = |batch: usize, recompute: Recompute, stage_of: Option<Vec<u16>>| {
        let mut forward = model(batch);
        let Some(_) = train else {
            // A mean over the batch, which micro-batches of a forward pass do not have.
            forward.outputs.retain(|o| micro_batches == 1 || o.name != "loss");
            return forward;
        };
        let options = TrainOptions {
            gradient_outputs: true,
            optimizer: Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0, nesterov: false }),
            recompute,
            stage_of,
            ..TrainOptions::default()
        };
        train_step(&forward, &options).unwrap()
    };
    let what = train.unwrap_or_default();
    let whole = build(batch, Recompute::None, None);
    let forward = whole.nodes.iter().filter(|n| n.section == Section::Forward).count();
    let mesh = Mesh::new([(AxisName::Dp, 1 + d.below(3)), (AxisName::Tp, 1 + d.below(3))]);
    let mut cuts: Vec<usize> = (0..d.below(3)).map(|_| d.below(forward + 1)).collect();
    cuts.sort_unstable();
    // Copies are made for the stage of their original, so recomputation must know the stages.
    let stage = |n: usize| cuts.iter().filter(|c| **c <= n).count() as u16;
    let stage_of = (what != Recompute::None).then(|| (0..forward).map(stage).collect());
    let graph = build(batch / micro_batches, what, stage_of);
    let copies = recompute::originals(&graph).iter().flatten().count();
    assert_eq!(copies > 0, what != Recompute::None, "seed {seed}: {copies} copies");
    let a = random_assignment(&graph, mesh, &cuts, micro_batches, &mut d);
    let job = compile(&graph, &a).unwrap_or_else(|e| panic!("seed {seed}: {e}"));

    let inputs: Vec<Tensor> = whole.inputs.iter().map(|i| d.tensor(whole.ty(i.value), 18.0)).collect();
    let states: Vec<Arc<Tensor>> = whole
        .states
        .iter()
        .map(|s| {
            Arc::new(if s.kind == StateKind::Parameter {
                d.tensor(whole.ty(s.read), 0.0)
            } else {
                Tensor::zeros(whole.ty(s.read).clone())
            })
        })
        .collect();
    let want = interp::run(&whole, &inputs, &states).unwrap();

    let mut session = Session::new(job, &Options::default()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    let named: BTreeMap<String, Tensor> =
        whole.states.iter().zip(&states).map(|(s, t)| (s.name.clone(), Tensor::clone(t))).collect();
    session.load_states(&named).unwrap();
    let feeds: BTreeMap<String, Tensor> = whole.inputs.iter().zip(inputs).map(|(i, t)| (i.name.clone(), t)).collect();
    let got = session.step(&feeds).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    for (o, want) in whole.outputs.iter().zip(&want.outputs) {
        let off = distance(&got[&o.name], want);
        assert!(off < 1e-4, "seed {seed}: output {} is off by {off:e}", o.name);
    }
    let after = session.states().unwrap();
    for (s, want) in whole.states.iter().zip(&want.states) {
        let off = distance(&after[&s.name], want);
        assert!(off < 1e-4, "seed {seed}: state {} is off by {off:e}", s.name);
    }
}

/// None of the micro-batches of a forward pass has a mean over the batch.
#[test]
fn an_output_of_the_whole_batch_is_not_cut() {
    let mut d = Draw(Stream(7));
    let graph = model(4);
    let a = random_assignment(&graph, Mesh::new([(AxisName::Dp, 2)]), &[], 2, &mut d);
    let error = compile(&graph, &a).unwrap_err().to_string();
    assert!(error.contains("output `loss` depends on the whole batch"), "{error}");
    compile(&graph, &Assignment { micro_batches: 1, ..a }).unwrap();
}

/// Most reshapes are views, whatever is drawn: the others stand before something that changes in place.
#[test]
fn reshapes_are_views() {
    let (mut views, mut copies) = (0, 0);
    for seed in 1000..1020 {
        let mut d = Draw(Stream(seed));
        let graph = train_step(&model(4), &TrainOptions::default()).unwrap();
        let mesh = Mesh::new([(AxisName::Dp, 2), (AxisName::Tp, 2)]);
        let forward = graph.nodes.iter().filter(|n| n.section == Section::Forward).count();
        let cut = d.below(forward + 1);
        let a = random_assignment(&graph, mesh, &[cut], 2, &mut d);
        for p in &compile(&graph, &a).unwrap().stages {
            for instr in List::ALL.iter().flat_map(|l| p.list(*l)).filter(|i| i.mnemonic() == "Reshape") {
                *(if p.view(instr).is_some() { &mut views } else { &mut copies }) += 1;
            }
        }
    }
    assert!(views > 20 * copies && views > 100, "{views} views, {copies} copies");
}

#[test]
fn inference() {
    (0..40).for_each(|seed| check(seed, None));
}

#[test]
fn training() {
    (1000..1060).for_each(|seed| check(seed, Some(Recompute::None)));
}

/// Copies with strategies of their own, which no planner would give them, in the stages of their originals.
#[test]
fn training_with_recomputation() {
    for (seed, what) in (2000..2060).zip([Recompute::Selective, Recompute::Full].into_iter().cycle()) {
        check(seed, Some(what));
    }
}
