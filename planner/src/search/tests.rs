//! Small models planned: against exhaustive enumeration, and against common sense.

use super::*;
use crate::assignment::Assignment;
use crate::mesh::AxisName;
use crate::request::{LossChoice, Workload};
use crate::spec::Strategy;
use crate::stages::Stages;
use autoshard_ir::graph::{Init, StateKind};
use autoshard_ir::{Builder, Type};

/// `layers` blocks `x + tanh(x w1) w2` and a head, on `[batch, hidden]`.
fn mlp(batch: usize, hidden: usize, layers: usize, head: usize) -> Graph {
    let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
    let mut b = Builder::new("mlp");
    let mut x = b.input("x", f32(&[batch, hidden]), Some(0));
    let parameter = |b: &mut Builder, name: String, dims: &[usize]| {
        let s = b.state(name, StateKind::Parameter, f32(dims), Init::Zeros, None);
        b.graph().state(s).read
    };
    for l in 0..layers {
        let w1 = parameter(&mut b, format!("{l}.w1"), &[hidden, 4 * hidden]);
        let w2 = parameter(&mut b, format!("{l}.w2"), &[4 * hidden, hidden]);
        let h = b.einsum("bk,kn->bn", x, w1).unwrap();
        let h = b.tanh(h).unwrap();
        let y = b.einsum("bk,kn->bn", h, w2).unwrap();
        x = b.add(x, y).unwrap();
    }
    let w = parameter(&mut b, "head".into(), &[hidden, head]);
    let y = b.einsum("bk,kn->bn", x, w).unwrap();
    b.output("y", y, Some(0));
    b.finish()
}

fn cluster(gpus: usize) -> Cluster {
    Cluster::load("dgx-h100").unwrap().with_gpus(gpus).unwrap()
}

fn training(batch: usize) -> PlanRequest {
    let loss = LossChoice::Mse { output: "y".into(), target: "target".into() };
    PlanRequest { time_limit_s: 600.0, ..PlanRequest::new(Workload { loss, ..Workload::train(batch) }) }
}

fn plan(source: &dyn GraphSource, cluster: &Cluster, request: &PlanRequest) -> Found {
    search(source, cluster, request, None, &|_, _, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Every assignment of a one-stage graph, simulated. Per variable (classes of nodes, of states, inputs) and choice, the least
/// time among those that fit; infinite where none does.
fn exhaustive(graph: &Graph, mesh: &Mesh, cluster: &Cluster, request: &PlanRequest, limit: u64) -> Vec<Vec<f64>> {
    let step = request.workload.step(graph, &[], 1, RecomputeChoice::None).unwrap();
    let space = Space::new(&step, mesh, &request.constraints).unwrap();
    let mut times = Times::new(cluster, mesh);
    let sizes: Vec<usize> = space
        .choices
        .iter()
        .map(Vec::len)
        .chain(space.storage.iter().map(Vec::len))
        .chain(space.inputs.iter().map(Vec::len))
        .collect();
    let all: usize = sizes.iter().product();
    assert!((2..200_000).contains(&all), "{all} assignments");
    let (nc, sc) = (space.choices.len(), space.storage.len());
    let mut least: Vec<Vec<f64>> = sizes.iter().map(|s| vec![f64::INFINITY; *s]).collect();
    for mut n in 0..all {
        let pick: Vec<usize> = sizes.iter().map(|s| (n % s, n /= s).0).collect();
        let strategy = |c: &u32| -> Strategy { space.choices[*c as usize][pick[*c as usize]].strategy.clone() };
        let stages = Stages::single(&step.graph);
        let a = Assignment {
            mesh: mesh.clone(),
            strategy: step.blocks.node_class.iter().map(strategy).collect(),
            storage: step
                .blocks
                .state_class
                .iter()
                .map(|c| space.storage[*c as usize][pick[nc + *c as usize]].clone())
                .collect(),
            inputs: (0..space.inputs.len()).map(|i| space.inputs[i][pick[nc + sc + i]].clone()).collect(),
            stage: stages.node,
            home: stages.home,
            schedule: Schedule::OneF1B,
            ..Assignment::single(&step.graph)
        };
        let p = simulate(&step.graph, &step.blocks, &a, &mut times);
        if p.peak() <= limit {
            for (of, &k) in least.iter_mut().zip(&pick) {
                of[k] = of[k].min(p.step_time_s);
            }
        }
    }
    least
}

/// The least of all.
fn optimum(least: &[Vec<f64>]) -> Option<f64> {
    least[0].iter().copied().reduce(f64::min).filter(|t| t.is_finite())
}

/// The plan is the best of all assignments, with ample memory and with memory that binds.
#[test]
fn the_optimum_is_that_of_exhaustive_enumeration() {
    let cluster = cluster(2);
    for (hidden, batch) in [(64, 8), (2048, 64), (4096, 4)] {
        let source = |b: usize| {
            let mut g = Builder::new("two products");
            let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
            let x = g.input("x", f32(&[b, hidden]), Some(0));
            let w1 = g.state("w1", StateKind::Parameter, f32(&[hidden, 4 * hidden]), Init::Zeros, None);
            let w2 = g.state("w2", StateKind::Parameter, f32(&[4 * hidden, hidden]), Init::Zeros, None);
            let (w1, w2) = (g.graph().state(w1).read, g.graph().state(w2).read);
            let h = g.einsum("bk,kn->bn", x, w1).unwrap();
            let h = g.tanh(h).unwrap();
            let y = g.einsum("bk,kn->bn", h, w2).unwrap();
            g.output("y", y, Some(0));
            Ok::<Graph, String>(g.finish())
        };
        let graph = source(batch).unwrap();
        let weights = 8 * (hidden * hidden * 4) as u64;
        for (axis, pins) in [("tp", (Some(2), Some(1))), ("dp", (Some(1), Some(2)))] {
            for limit in [u64::MAX, weights * 3 / 4 + 4 * 10 * (batch * hidden) as u64] {
                let mut request = PlanRequest::new(Workload::infer(batch));
                (request.constraints.tp, request.constraints.dp) = pins;
                request.constraints.pp = Some(1);
                request.constraints.memory_limit = Some(limit);
                let mesh = Mesh::new([(if axis == "tp" { AxisName::Tp } else { AxisName::Dp }, 2)]);
                let least = exhaustive(&graph, &mesh, &cluster, &request, limit);
                let best = optimum(&least);
                let found = search(&source, &cluster, &request, None, &|_, _, _| {});
                match (best, found) {
                    (Some(best), Ok(found)) => {
                        let time = found.best.prediction.step_time_s;
                        assert!(
                            (time - best).abs() <= best * 1e-9,
                            "{axis} hidden={hidden} limit={limit}: {time} is not {best}"
                        );
                        assert!(found.certificate.bound <= time * (1.0 + 1e-9));
                        if limit == u64::MAX {
                            next_bests_are_right(&found, &mesh, &request, &least);
                        }
                    }
                    (None, Err(SearchError::Memory { .. })) => {}
                    (best, found) => panic!("{best:?} but {:?}", found.map(|f| f.best.prediction)),
                }
            }
        }
    }
}

/// The price of what a class does next best is the difference of the optima.
fn next_bests_are_right(found: &Found, mesh: &Mesh, request: &PlanRequest, least: &[Vec<f64>]) {
    let space = Space::new(&found.best.step, mesh, &request.constraints).unwrap();
    let chosen = &found.best.solution.as_ref().unwrap().choice;
    let best = optimum(least).unwrap();
    let next = &found.next_bests;
    let operators = next.operators.iter().enumerate().map(|(c, n)| {
        n.as_ref().map(|n| (space.choices[c].iter().position(|x| x.strategy == n.choice).unwrap(), n.extra_s))
    });
    let states =
        next.states.iter().enumerate().map(|(c, n)| {
            n.as_ref().map(|n| (space.storage[c].iter().position(|x| *x == n.choice).unwrap(), n.extra_s))
        });
    let mut with_others = 0;
    // The ILP rounds each cost to picoseconds.
    let rounding = 1e-9 * best + 1e-11;
    for (variable, (found, least)) in operators.chain(states).zip(least).enumerate() {
        let others = (0..least.len()).filter(|k| *k != chosen[variable]).map(|k| least[k]);
        let want = others.fold(f64::INFINITY, f64::min) - best;
        match found {
            Some((choice, extra_s)) => {
                with_others += 1;
                assert!((extra_s - want).abs() <= rounding, "variable {variable}: {extra_s} is not {want}");
                assert!((least[choice] - best - want).abs() <= rounding, "variable {variable}: not by that choice");
            }
            None => assert!(want.is_infinite(), "variable {variable} could do something else for {want}"),
        }
    }
    assert!(with_others > 0);
}

fn sizes(found: &Found) -> (usize, usize, usize) {
    let c = &found.best.candidate;
    let size = |name| c.mesh.find(name).map_or(1, |a| c.mesh.size(a));
    (c.stages, size(AxisName::Dp), size(AxisName::Tp))
}

/// Bytes of states that a rank would hold if nothing were sharded.
fn state_bytes(found: &Found) -> u64 {
    let g = &found.best.step.graph;
    g.states.iter().map(|s| g.ty(s.read).bytes() as u64).sum()
}

fn sharded(found: &Found, kind: StateKind, name: AxisName) -> bool {
    let (g, a) = (&found.best.step.graph, &found.best.assignment);
    let Some(axis) = a.mesh.find(name) else { return false };
    g.state_ids().any(|s| g.state(s).kind == kind && a.storage(s).dims.iter().flatten().any(|x| *x == axis))
}

/// A small model with ample memory is trained data parallel; with less memory states are sharded; with still less
/// everything is, in one way or another.
#[test]
fn plans_follow_common_sense_as_memory_shrinks() {
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 256, 4, 256));
    let cluster = cluster(8);
    let ample = plan(&source, &cluster, &training(32768));
    assert_eq!(sizes(&ample), (1, 8, 1));
    assert!(!sharded(&ample, StateKind::Parameter, AxisName::Dp));
    let states = state_bytes(&ample);

    let mut request = training(32768);
    request.constraints.memory_limit = Some(states);
    let tight = plan(&source, &cluster, &request);
    assert!(tight.best.prediction.peak() <= states);
    assert!(sharded(&tight, StateKind::Optimizer, AxisName::Dp), "{:?}", sizes(&tight));
    assert!(tight.best.prediction.step_time_s >= ample.best.prediction.step_time_s);

    request.constraints.memory_limit = Some(states * 2 / 5);
    let tighter = plan(&source, &cluster, &request);
    let (pp, _, tp) = sizes(&tighter);
    assert!(tighter.best.prediction.peak() <= states * 2 / 5);
    assert!(pp > 1 || tp > 1 || sharded(&tighter, StateKind::Parameter, AxisName::Dp));
    assert!(tighter.best.prediction.step_time_s >= tight.best.prediction.step_time_s);
}

/// What does not fit is refused with how much is missing, and the pins that are in the way.
#[test]
fn what_does_not_fit_is_explained() {
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 256, 2, 64));
    let mut request = training(64);
    request.constraints.memory_limit = Some(8 << 20);
    request.constraints.zero = Some(0);
    (request.constraints.tp, request.constraints.pp) = (Some(1), Some(1));
    let free =
        PlanRequest { constraints: Constraints { zero: None, ..request.constraints.clone() }, ..request.clone() };
    plan(&source, &cluster(8), &free);
    let e = search(&source, &cluster(8), &request, None, &|_, _, _| {}).err().expect("does not fit");
    let SearchError::Memory { closest, relaxations, .. } = &e else { panic!("{e}") };
    assert!(closest.excess > 1 << 20 && closest.category == Category::Optimizer, "{e}");
    assert!(relaxations.iter().any(|r| r.contains("without --zero 0")), "{e}");
}

#[test]
fn pins_that_contradict_are_named() {
    let say = |change: &dyn Fn(&mut PlanRequest)| {
        let mut request = training(8);
        change(&mut request);
        candidates(&cluster(8), &request).unwrap_err().to_string()
    };
    insta::assert_snapshot!(
        [
            say(&|r| r.constraints.tp = Some(3)),
            say(&|r| (r.constraints.tp, r.constraints.dp, r.constraints.pp) = (Some(2), Some(2), Some(1))),
            say(&|r| {
                r.constraints.dp = Some(8);
                r.workload.global_batch = 12;
            }),
            say(&|r| {
                r.constraints.dp = Some(4);
                r.constraints.micro_batch = Some(3);
            }),
            say(&|r| r.workload.global_batch = 0),
        ]
        .join("\n"),
        @r"
    no configuration fits the constraints: tp=3 does not divide 8 GPUs
    no configuration fits the constraints: pp=1 dp=2 tp=2 makes 4 ranks, there are 8 GPUs
    no configuration fits the constraints: dp=8 on 8 GPUs; a batch of 12 is no multiple of dp=8
    no configuration fits the constraints: dp=4 on 8 GPUs; 2 samples per dp=4 rank are no multiple of micro-batches of 3
    no configuration fits the constraints: the batch is empty
    "
    );
}

#[test]
fn zero_pins_decide_what_is_sharded() {
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 64, 2, 64));
    for zero in 0..=3 {
        let mut request = training(16);
        request.constraints = Constraints { dp: Some(2), zero: Some(zero), ..Constraints::default() };
        let found = plan(&source, &cluster(2), &request);
        assert_eq!(sharded(&found, StateKind::Optimizer, AxisName::Dp), zero >= 1, "zero {zero}");
        assert_eq!(sharded(&found, StateKind::Parameter, AxisName::Dp), zero >= 3, "zero {zero}");
        let b = &found.best;
        let accumulated = b.step.graph.node_ids().any(|id| {
            let n = b.step.graph.node(id);
            let s = b.assignment.strategy(id);
            let rule = n.op.factors(&b.step.graph.input_types(n), &b.step.graph.output_types(n));
            n.op.name() == "Accumulate" && s.output_spec(&rule, 0).dims.iter().flatten().next().is_some()
        });
        assert_eq!(accumulated, zero >= 2, "zero {zero}");
    }
}

/// Pipeline pins give that many stages, with every block in one of them and states at home.
#[test]
fn stages_are_balanced_and_cut_between_blocks() {
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 256, 8, 256));
    let mut request = training(64);
    request.constraints = Constraints { pp: Some(4), dp: Some(1), tp: Some(1), ..Constraints::default() };
    let found = plan(&source, &cluster(4), &request);
    let (step, a) = (&found.best.step, &found.best.assignment);
    assert_eq!(a.stages, 4);
    let mut per_stage = [0usize; 4];
    for s in step.graph.state_ids().filter(|s| step.graph.state(*s).kind == StateKind::Parameter) {
        per_stage[a.home[s.index()].0 as usize] += 1;
    }
    assert_eq!(per_stage.iter().sum::<usize>(), 17);
    assert!(per_stage.iter().all(|n| (3..=6).contains(n)), "{per_stage:?}");
    let b = found.certificate.bound;
    assert!(b > 0.0 && b <= found.certificate.objective);
}

/// The time for a model of forty blocks is planned with the variables of one.
#[test]
fn repeated_blocks_share_their_variables() {
    let classes = |layers| {
        let step = training(64).workload.step(&mlp(64, 64, layers, 64), &[], 1, RecomputeChoice::None).unwrap();
        assert!(step.graph.nodes.len() > 10 * layers);
        (step.blocks.nodes.len(), step.blocks.states.len(), step.blocks.runs.clone())
    };
    let (four, forty) = (classes(4), classes(40));
    assert_eq!((four.0, four.1), (forty.0, forty.1));
    assert_eq!(forty.2.len(), 1);
    assert_eq!((forty.2[0].period, forty.2[0].count), (4, 40));
}

#[test]
fn the_same_request_gives_the_same_plan() {
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 128, 3, 64));
    let mut request = training(32);
    request.constraints.memory_limit = Some(3 << 20);
    let show = || {
        let f = plan(&source, &cluster(8), &request);
        format!("{:?} {:?} {:?}", f.best.assignment, f.certificate, f.alternatives)
    };
    assert_eq!(show(), show());
}

/// A model may have no graph at some batch sizes (values too large): those candidates are left out, the others planned.
#[test]
fn a_batch_without_a_graph_is_no_end() {
    let source = |batch: usize| {
        if batch > 8 { Err(format!("too large at {batch}")) } else { Ok(mlp(batch, 32, 1, 8)) }
    };
    let found = plan(&source, &cluster(1), &training(32));
    assert!(found.best.assignment.micro_batches >= 4);
    let none = |_: usize| Err("never".to_string());
    let refused = search(&none, &cluster(1), &training(32), None, &|_, _, _| {}).err().map(|e| e.to_string());
    assert_eq!(refused.as_deref(), Some("never"));
}

/// Eight blocks `x + (h tanh(h)) w2` with `h = x w1`, on `[batch, 256]`: of the three wide values that the backward pass
/// reads, `h` is enough to make the others.
fn deep(batch: usize) -> Result<Graph, String> {
    let mut b = Builder::new("deep");
    let mut x = b.input("x", Type::new(DType::F32, [batch, 256]), Some(0));
    for l in 0..8 {
        let parameter = |b: &mut Builder, name: String, dims: [usize; 2]| {
            let s = b.state(name, StateKind::Parameter, Type::new(DType::F32, dims), Init::Zeros, None);
            b.graph().state(s).read
        };
        let w1 = parameter(&mut b, format!("{l}.w1"), [256, 1024]);
        let w2 = parameter(&mut b, format!("{l}.w2"), [1024, 256]);
        let h = b.einsum("bk,kn->bn", x, w1).unwrap();
        let t = b.tanh(h).unwrap();
        let p = b.mul(h, t).unwrap();
        let y = b.einsum("bk,kn->bn", p, w2).unwrap();
        x = b.add(x, y).unwrap();
    }
    b.output("y", x, Some(0));
    Ok(b.finish())
}

/// One rank, one micro-batch: no way to save memory but recomputation.
fn alone(batch: usize, memory_limit: Option<u64>, recompute: Option<RecomputeChoice>) -> PlanRequest {
    let mut request = training(batch);
    request.constraints.micro_batch = Some(batch);
    request.constraints.memory_limit = memory_limit;
    request.constraints.recompute = recompute;
    request
}

fn peak_and_time(request: &PlanRequest) -> (u64, f64) {
    let found = plan(&deep, &cluster(1), request);
    (found.best.prediction.peak(), found.best.prediction.step_time_s)
}

/// Ample memory: nothing is recomputed, and the variants are not even built. As memory shrinks: first what is cheap,
/// then the blocks; each slower than what needs more.
#[test]
fn recomputation_is_chosen_when_memory_shrinks_and_not_before() {
    let batch = 8192;
    let pinned = |r| peak_and_time(&alone(batch, None, Some(r)));
    let none = pinned(RecomputeChoice::None);
    let selective = pinned(RecomputeChoice::Selective);
    let full = pinned(RecomputeChoice::Full);
    assert!(full.0 < selective.0 && selective.0 < none.0, "{none:?} {selective:?} {full:?}");
    assert!(none.1 < selective.1 && selective.1 < full.1, "{none:?} {selective:?} {full:?}");

    let ample = plan(&deep, &cluster(1), &alone(batch, None, None));
    assert_eq!(ample.best.candidate.recompute, RecomputeChoice::None);
    assert_eq!((ample.certificate.candidates, ample.certificate.solved), (3, 1));

    for (limit, want) in
        [(none.0, RecomputeChoice::None), (selective.0, RecomputeChoice::Selective), (full.0, RecomputeChoice::Full)]
    {
        let found = plan(&deep, &cluster(1), &alone(batch, Some(limit), None));
        assert_eq!(found.best.candidate.recompute, want);
        assert!(found.best.prediction.peak() <= limit);
        assert!(found.certificate.bound <= found.best.prediction.step_time_s);
        // The bound covers the ways that were not chosen.
        for (peak, time) in [none, selective, full] {
            assert!(peak > limit || found.certificate.bound <= time);
        }
    }
    let least = alone(batch, Some(full.0 - 1), None);
    assert!(search(&deep, &cluster(1), &least, None, &|_, _, _| {}).is_err());
}

/// What only recomputation fits is refused without it, and the pin is named as what is in the way; where recomputation
/// does not help, it is not named.
#[test]
fn recomputation_is_a_relaxation_only_where_it_helps() {
    let batch = 8192;
    let full = peak_and_time(&alone(batch, None, Some(RecomputeChoice::Full))).0;
    for (limit, helps) in [(full, true), (full / 8, false)] {
        let request = alone(batch, Some(limit), Some(RecomputeChoice::None));
        let e = search(&deep, &cluster(1), &request, None, &|_, _, _| {}).err().expect("does not fit");
        let SearchError::Memory { relaxations, .. } = &e else { panic!("{e}") };
        assert_eq!(relaxations.iter().any(|r| r.contains("without --recompute none")), helps, "{e}");
    }
}

/// A decision for a step with copies is one for the step without, which takes no more: what lets the search skip variants.
#[test]
fn without_regard_to_memory_copies_only_cost() {
    for gpus in [1, 2, 4] {
        for (tp, dp) in [(1, gpus), (gpus, 1)] {
            let bound = |r| {
                let mut request = alone(1024, None, Some(r));
                request.constraints.micro_batch = None;
                (request.constraints.tp, request.constraints.dp) = (Some(tp), Some(dp));
                plan(&deep, &cluster(gpus), &request).best.ilp_objective_s
            };
            let none = bound(RecomputeChoice::None);
            for other in [RecomputeChoice::Selective, RecomputeChoice::Full] {
                assert!(bound(other) > none, "tp={tp} dp={dp} {other:?}");
            }
        }
    }
}

/// The arithmetic that counts for MFU is the model's.
#[test]
fn recomputed_arithmetic_does_not_count() {
    let flops = |r| {
        let request = alone(1024, None, Some(r));
        let found = plan(&deep, &cluster(1), &request);
        let model = crate::plan::ModelEntry { path: String::new(), sha256: String::new(), parameters: 0 };
        let p = crate::plan::Plan::new(&found, &request, &cluster(1), model, None, Vec::new());
        assert_eq!(p.recompute, r);
        assert_eq!(p.operators.iter().any(|o| o.recomputed > 0), r != RecomputeChoice::None);
        assert_eq!(p.predicted.breakdown.recompute_s > 0.0, r != RecomputeChoice::None);
        p.predicted.tflops_per_gpu * p.predicted.step_time_s
    };
    let none = flops(RecomputeChoice::None);
    for other in [RecomputeChoice::Selective, RecomputeChoice::Full] {
        assert!((flops(other) / none - 1.0).abs() < 1e-12);
    }
}

/// A model without repeated blocks cannot be recomputed in full: a pin without effect is refused.
#[test]
fn recomputing_nothing_is_refused() {
    let source = |b: usize| Ok::<Graph, String>(mlp(b, 32, 1, 8));
    let mut request = training(8);
    request.constraints.recompute = Some(RecomputeChoice::Full);
    let e = search(&source, &cluster(1), &request, None, &|_, _, _| {}).err().expect("has no effect");
    assert!(e.to_string().contains("the model has no repeated blocks"), "{e}");
}

mod sound;
