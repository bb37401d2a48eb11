//! A reshape costs nothing: neither in the arena that codegen lays out nor in the planner's estimate. Compared are two spellings
//! of one model, planned and compiled alike.

use autoshard_codegen::compile;
use autoshard_cost_models::{Category, Cluster};
use autoshard_ir::graph::{Init, StateKind};
use autoshard_ir::{Builder, DType, Graph, Type};
use autoshard_planner::request::{LossChoice, PlanRequest, Workload};
use autoshard_planner::search::{Found, search};
use autoshard_runtime::program::{Instr, Job, List, Program, Region};

/// `tanh(x w1) w2` on `[batch, 8, 64]`, by two products over the last dim or, `flat`, with the middle value reshaped. The
/// backward pass reads that value both before (of `tanh`) and after the reshape (of the product).
fn model(batch: usize, flat: bool) -> Graph {
    let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
    let mut b = Builder::new("two products");
    let x = b.input("x", f32(&[batch, 8, 64]), Some(0));
    let parameter = |b: &mut Builder, name: &str, dims: &[usize]| {
        let s = b.state(name, StateKind::Parameter, f32(dims), Init::Zeros, None);
        b.graph().state(s).read
    };
    let (w1, w2) = (parameter(&mut b, "w1", &[64, 256]), parameter(&mut b, "w2", &[256, 64]));
    let h = b.einsum("bsk,kn->bsn", x, w1).unwrap();
    let h = b.tanh(h).unwrap();
    let y = if flat {
        let h = b.reshape(h, &[batch * 8, 256]).unwrap();
        let y = b.einsum("bk,kn->bn", h, w2).unwrap();
        b.reshape(y, &[batch, 8, 64]).unwrap()
    } else {
        b.einsum("bsk,kn->bsn", h, w2).unwrap()
    };
    b.output("y", y, Some(0));
    b.finish()
}

fn planned(flat: bool, pins: impl Fn(&mut PlanRequest)) -> (Found, Job) {
    let cluster = Cluster::load("dgx-h100").unwrap().with_gpus(2).unwrap();
    let loss = LossChoice::Mse { output: "y".into(), target: "target".into() };
    let mut request = PlanRequest::new(Workload { loss, ..Workload::train(16) });
    pins(&mut request);
    let source = |batch: usize| Ok(model(batch, flat));
    let found = search(&source, &cluster, &request, None, &|_, _, _| {}).unwrap();
    let job = compile(&found.best.step.graph, &found.best.assignment).unwrap();
    autoshard_runtime::verify::verify(&job).unwrap();
    (found, job)
}

fn reshapes(p: &Program) -> Vec<&Instr> {
    let all = List::ALL.iter().flat_map(|l| p.list(*l));
    all.filter(|i| i.mnemonic() == "Reshape").collect()
}

/// A pin: its name, and how it is made.
type Pin = (&'static str, fn(&mut PlanRequest));

const PINS: [Pin; 4] = [
    ("dp", |r| r.constraints.dp = Some(2)),
    ("tp", |r| r.constraints.tp = Some(2)),
    ("dp, 4 micro-batches", |r| (r.constraints.dp, r.constraints.micro_batch) = (Some(2), Some(2))),
    ("pp, 4 micro-batches", |r| (r.constraints.pp, r.constraints.micro_batch) = (Some(2), Some(4))),
];

#[test]
fn a_value_kept_before_and_after_a_reshape_is_kept_once() {
    for (name, pin) in PINS {
        let ((plain, a), (reshaped, b)) = (planned(false, pin), planned(true, pin));
        let bytes = |job: &Job| job.stages.iter().map(Program::arena_bytes).collect::<Vec<_>>();
        assert_eq!(bytes(&a), bytes(&b), "{name}: arenas");
        let estimate = |found: &Found| {
            let stages = &found.best.prediction.stages;
            stages
                .iter()
                .map(|s| [Category::Activations, Category::Workspace].map(|c| s.memory.get(c)))
                .collect::<Vec<_>>()
        };
        assert_eq!(estimate(&plain), estimate(&reshaped), "{name}: estimates");
        assert_eq!(
            plain.best.prediction.step_time_s.to_bits(),
            reshaped.best.prediction.step_time_s.to_bits(),
            "{name}: times"
        );
        assert!(b.stages.iter().any(|p| !reshapes(p).is_empty()), "{name}: nothing was tested");
        for p in &b.stages {
            for r in reshapes(p) {
                assert!(p.view(r).is_some(), "{name}: {r:?} copies");
            }
        }
    }
}

#[test]
fn the_least_memory_that_is_proven_counts_a_view_once() {
    let least = |flat| {
        let pin = |r: &mut PlanRequest| {
            r.constraints.dp = Some(2);
            r.objective = autoshard_planner::constraints::Objective::Memory;
        };
        planned(flat, pin).0.certificate
    };
    let (plain, reshaped) = (least(false), least(true));
    assert_eq!((plain.objective, plain.bound), (reshaped.objective, reshaped.bound));
}

/// One head per rank: `[batch, 8, 1, 32]` to `[batch, 1, 8, 32]` moves nothing.
#[test]
fn a_transpose_that_moves_nothing_on_a_shard_is_a_view() {
    let heads = |batch: usize| {
        let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
        let mut b = Builder::new("heads");
        let x = b.input("x", f32(&[batch, 8, 64]), Some(0));
        let w = b.state("w", StateKind::Parameter, f32(&[64, 64]), Init::Zeros, None);
        let w = b.graph().state(w).read;
        let y = b.einsum("bsk,kn->bsn", x, w).unwrap();
        let y = b.reshape(y, &[batch, 8, 2, 32]).unwrap();
        let y = b.transpose(y, &[0, 2, 1, 3]).unwrap();
        let y = b.tanh(y).unwrap();
        b.output("y", y, Some(0));
        b.finish()
    };
    let cluster = Cluster::load("dgx-h100").unwrap().with_gpus(2).unwrap();
    let mut request = PlanRequest::new(Workload::infer(1));
    request.constraints.tp = Some(2);
    let found = search(&|batch| Ok(heads(batch)), &cluster, &request, None, &|_, _, _| {}).unwrap();
    let job = compile(&found.best.step.graph, &found.best.assignment).unwrap();
    autoshard_runtime::verify::verify(&job).unwrap();
    let p = &job.stages[0];
    let moves: Vec<&Instr> = p.forward.iter().filter(|i| ["Reshape", "Transpose"].contains(&i.mnemonic())).collect();
    assert_eq!(moves.len(), 2, "{job}");
    assert!(moves.iter().all(|i| p.view(i).is_some()), "{job}");
}

/// A view of a parameter lies in the parameter; it counts neither as a frame's nor as a constant of its own.
#[test]
fn a_view_of_a_parameter_takes_no_memory() {
    let build = |batch: usize| {
        let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
        let mut b = Builder::new("flat parameter");
        let x = b.input("x", f32(&[batch, 64]), Some(0));
        let s = b.state("w", StateKind::Parameter, f32(&[64 * 64]), Init::Zeros, None);
        let w = b.graph().state(s).read;
        let w = b.reshape(w, &[64, 64]).unwrap();
        let y = b.einsum("bk,kn->bn", x, w).unwrap();
        let y = b.tanh(y).unwrap();
        let y = b.einsum("bk,kn->bn", y, w).unwrap();
        b.output("y", y, Some(0));
        b.finish()
    };
    let cluster = Cluster::load("dgx-h100").unwrap().with_gpus(1).unwrap();
    let loss = LossChoice::Mse { output: "y".into(), target: "target".into() };
    let mut request = PlanRequest::new(Workload { loss, ..Workload::train(8) });
    request.constraints.micro_batch = Some(4);
    let found = search(&|batch| Ok(build(batch)), &cluster, &request, None, &|_, _, _| {}).unwrap();
    let job = compile(&found.best.step.graph, &found.best.assignment).unwrap();
    autoshard_runtime::verify::verify(&job).unwrap();
    let p = &job.stages[0];
    let views: Vec<_> = p.forward.iter().filter_map(|i| p.view(i)).collect();
    assert!(views.iter().any(|(from, to)| p.buffer(*to).region == Region::Persistent && p.states[0].buffer == *from));
    let memory = &autoshard_codegen::memory::memory(&job)[0];
    assert_eq!(memory.parameters, 64 * 64 * 4);
    assert_eq!(memory.total(), p.arena_bytes());
    // x, target, tanh's result and the difference: four values of 4 x 64.
    let kept = found.best.prediction.stages[0].memory.get(Category::Activations).0;
    assert!(kept <= 4 * 4 * 64 * 4, "{kept}");
}
