//! The verifier against a good job broken in one place each, one line per rule and way to break it.

mod common;

use std::sync::Arc;

use autoshard_ir::factor::ReduceKind;
use autoshard_ir::ops::reshape::RESHAPE;
use autoshard_ir::{DType, Op, Tensor};
use autoshard_runtime::program::*;
use autoshard_runtime::session::{Options, Session};
use autoshard_runtime::trace::{Observer, Recorder};
use autoshard_runtime::verify::{Rule, verify};
use common::*;

// Buffers of stage 0.
const W: BufferId = BufferId(0);
const TOTAL: BufferId = BufferId(1);
const FED: BufferId = BufferId(2);
const KEPT: BufferId = BufferId(3);
const WHOLE: BufferId = BufferId(4);
const PART: BufferId = BufferId(5);
const BACK: BufferId = BufferId(6);
const TURNED: BufferId = BufferId(7);

/// Two stages on a 2x2 mesh, two micro-batches, every instruction.
fn good() -> Job {
    let mut b = JobBuilder::new(&[("dp", 2), ("tp", 2)], 2, 2);
    let ty = f32s(&[4, 8]);
    let rows: [&[u8]; 2] = [&[0], &[]];
    let both: [&[u8]; 2] = [&[0], &[1]];
    let x = b.input("x", ty.clone(), Some(0));
    let y = b.output("y", ty.clone(), Some(0));
    let sum = b.output("sum", ty.clone(), None);
    assert_eq!(b.state(0, "w", ty.clone(), &both, Some(numbers(&ty, 1))), W);
    assert_eq!(b.buffer(0, "total", ty.clone(), &both, Region::Persistent), TOTAL);
    assert_eq!(b.buffer(0, "fed", ty.clone(), &rows, Region::Scratch), FED);
    assert_eq!(b.buffer(0, "kept", ty.clone(), &rows, Region::Frame), KEPT);
    assert_eq!(b.buffer(0, "whole", ty.clone(), &[&[], &[]], Region::Scratch), WHOLE);
    assert_eq!(b.buffer(0, "part", ty.clone(), &both, Region::Scratch), PART);
    assert_eq!(b.buffer(0, "back", ty.clone(), &rows, Region::Scratch), BACK);
    assert_eq!(b.buffer(0, "turned", ty.clone(), &[&[0, 1], &[]], Region::Scratch), TURNED);
    b.constant(0, "c", numbers(&ty, 2), &both);
    b.forward(0, Instr::Feed { port: x, output: FED });
    b.forward(0, compute(&DOUBLE, &[FED], &[KEPT]));
    b.forward(0, Instr::Slice { input: KEPT, output: PART, dim: 1, axes: axes(&[1]) });
    b.forward(0, Instr::AllToAll { input: PART, output: TURNED, gather: 1, split: 0, axes: axes(&[1]) });
    b.forward(0, Instr::AllGather { input: KEPT, output: WHOLE, dim: 0, axes: axes(&[0]) });
    b.forward(0, Instr::ZeroUnlessFirst { buffer: FED, axes: axes(&[1]) });
    b.forward(0, Instr::AllReduce { input: FED, output: FED, kind: ReduceKind::Sum, axes: axes(&[1]) });
    b.forward(0, Instr::Send { input: FED, to: 1, tag: 1 });
    b.forward(0, Instr::Send { input: KEPT, to: 1, tag: 2 });
    b.backward(0, Instr::Recv { output: BACK, from: 1, tag: 1 });
    b.backward(0, compute(&ADD, &[BACK, KEPT], &[BACK]));
    let kind = ReduceKind::Sum;
    b.backward(0, Instr::ReduceScatter { input: BACK, output: PART, dim: 1, kind, axes: axes(&[1]) });
    b.backward(0, Instr::Accumulate { input: PART, output: TOTAL });
    b.update(0, compute(&ADD, &[W, TOTAL], &[W]));
    b.update(0, Instr::Fetch { input: W, port: sum });

    let a = b.buffer(1, "a", ty.clone(), &rows, Region::Scratch);
    let k = b.buffer(1, "k", ty.clone(), &rows, Region::Frame);
    b.forward(1, Instr::Recv { output: a, from: 0, tag: 1 });
    b.forward(1, Instr::Recv { output: k, from: 0, tag: 2 });
    b.forward(1, compute(&ADD, &[k, a], &[k]));
    b.forward(1, Instr::Fetch { input: k, port: y });
    b.backward(1, Instr::Send { input: k, to: 0, tag: 1 });
    b.finish()
}

/// Puts one buffer of stage 0 into the memory of another.
fn share(job: &mut Job, a: BufferId, with: BufferId) {
    let p = &mut job.stages[0];
    let (region, offset) = (p.buffer(with).region, p.buffer(with).offset);
    let b = &mut p.buffers[a.0 as usize];
    (b.region, b.offset) = (region, offset);
}

#[test]
fn the_good_job_is_good_and_runs() {
    let job = good();
    verify(&job).unwrap();
    let mut session = Session::new(job, &Options::default()).unwrap();
    let x = numbers(&f32s(&[8, 8]), 3);
    let out = session.step(&map([("x", x.clone())])).unwrap();
    let three: Vec<f32> = x.as_slice::<f32>().iter().map(|x| 3.0 * x).collect();
    assert_eq!(out["y"].as_slice::<f32>(), three);
}

#[test]
fn every_way_to_break_it_is_found() {
    type Break = fn(&mut Job);
    let table: &[(&str, Rule, &str, Break)] = &[
        ("axis twice", Rule::Mesh, "two mesh axes are called `dp`", |j| j.axes[1].0 = "dp".into()),
        ("empty axis", Rule::Mesh, "mesh axis `tp` has size 0", |j| j.axes[1].1 = 0),
        ("no micro-batch", Rule::Mesh, "there must be", |j| j.micro_batches = 0),
        ("rank twice", Rule::Mesh, "not a permutation of 0..8", |j| j.ranks[3] = Rank(2)),
        ("unknown buffer", Rule::Mesh, "names the unknown buffer 99", |j| {
            j.stages[0].forward[1] = compute(&DOUBLE, &[BufferId(99)], &[KEPT]);
        }),
        ("unknown axis", Rule::Mesh, "unknown axis", |j| {
            j.stages[0].forward[5] = Instr::ZeroUnlessFirst { buffer: FED, axes: axes(&[2]) };
        }),
        ("axis twice in a collective", Rule::Mesh, "one axis twice", |j| {
            let (kind, axes) = (ReduceKind::Sum, axes(&[1, 1]));
            j.stages[0].forward[6] = Instr::AllReduce { input: FED, output: FED, kind, axes };
        }),
        ("unknown port", Rule::Ports, "names port 5 of 1", |j| {
            j.stages[0].forward[0] = Instr::Feed { port: 5, output: FED };
        }),
        ("unknown stage", Rule::Messages, "with stage 2 of 2", |j| {
            j.stages[0].forward[7] = Instr::Send { input: FED, to: 2, tag: 1 };
        }),
        ("unaligned", Rule::Placement, "at offset 8, not a multiple", |j| j.stages[0].buffers[1].offset = 8),
        ("behind its region", Rule::Placement, "ends behind its Scratch region", |j| {
            j.stages[0].buffers[7].offset = j.stages[0].scratch_bytes;
        }),
        ("offset overflows", Rule::Placement, "ends behind its Scratch region", |j| {
            j.stages[0].buffers[7].offset = u64::MAX - 63;
        }),
        ("region unaligned", Rule::Placement, "is not a multiple of 64", |j| j.stages[0].persistent_bytes += 8),
        ("sharded twice", Rule::Shards, "sharded twice over one axis", |j| {
            j.stages[0].buffers[7].shards = vec![axes(&[0, 0]), vec![]];
        }),
        ("size does not divide", Rule::Shards, "local size 2 in 2 parts, but global size 5", |j| {
            j.stages[0].buffers[3].global[0] = 5;
        }),
        ("shards of a dim missing", Rule::Shards, "do not fit its dims", |j| {
            j.stages[0].buffers[3].shards.pop();
        }),
        ("operator's result", Rule::Types, "TestDouble gives", |j| {
            j.stages[0].forward[1] = compute(&DOUBLE, &[FED], &[])
        }),
        ("gather of the wrong dim", Rule::Types, "not sharded innermost by dp", |j| {
            j.stages[0].forward[4] = Instr::AllGather { input: KEPT, output: WHOLE, dim: 1, axes: axes(&[0]) };
        }),
        ("gather of a missing dim", Rule::Types, "has no dim 2", |j| {
            j.stages[0].forward[4] = Instr::AllGather { input: KEPT, output: WHOLE, dim: 2, axes: axes(&[0]) };
        }),
        ("gather into a shard", Rule::Types, "the result should be", |j| {
            j.stages[0].forward[4] = Instr::AllGather { input: KEPT, output: FED, dim: 0, axes: axes(&[0]) };
        }),
        ("reduction of what is sharded", Rule::Types, "is not whole on dp", |j| {
            let (kind, axes) = (ReduceKind::Sum, axes(&[0]));
            j.stages[0].forward[6] = Instr::AllReduce { input: FED, output: FED, kind, axes };
        }),
        ("logsumexp of integers", Rule::Types, "i32 has no logsumexp", |j| {
            let (kind, axes) = (ReduceKind::LogSumExp, axes(&[1]));
            j.stages[0].forward[6] = Instr::AllReduce { input: FED, output: FED, kind, axes };
            j.stages[0].buffers[2].ty.dtype = DType::I32;
        }),
        ("slice of what is sharded", Rule::Types, "is not whole on dp", |j| {
            j.stages[0].forward[2] = Instr::Slice { input: KEPT, output: PART, dim: 1, axes: axes(&[0]) };
        }),
        ("all-to-all within a dim", Rule::Types, "both gathered and split", |j| {
            let axes = axes(&[1]);
            j.stages[0].forward[3] = Instr::AllToAll { input: PART, output: TURNED, gather: 1, split: 1, axes };
        }),
        ("shard order", Rule::Types, "the result should be", |j| {
            j.stages[0].buffers[7].shards = vec![axes(&[1, 0]), vec![]];
        }),
        ("copy of another size", Rule::Types, "64 bytes are copied to 32", |j| {
            j.stages[0].forward.push(Instr::Copy { input: KEPT, output: PART });
        }),
        ("accumulate of another type", Rule::Types, "the result should be", |j| {
            j.stages[0].backward[3] = Instr::Accumulate { input: BACK, output: TOTAL };
        }),
        ("feed of another type", Rule::Ports, "port `x` is i64[4,8]", |j| j.inputs[0].ty.dtype = DType::I64),
        ("micro-batches in the update", Rule::Ports, "belongs to micro-batches", |j| {
            j.outputs[1].batch_dim = Some(0);
        }),
        ("missing batch dim", Rule::Ports, "has no such batch dim", |j| j.outputs[0].batch_dim = Some(2)),
        ("output never fetched", Rule::Ports, "output `y` is fetched by 0", |j| drop(j.stages[1].forward.pop())),
        ("output fetched twice", Rule::Ports, "output `sum` is fetched by 2", |j| {
            let again = j.stages[0].update[1].clone();
            j.stages[0].update.push(again);
        }),
        ("port twice", Rule::Ports, "two ports are called `y`", |j| j.outputs[1].name = "y".into()),
        ("state in scratch", Rule::States, "state `w` is kept in Scratch", |j| share(j, W, WHOLE)),
        ("state twice", Rule::States, "is kept twice, also by stage 0", |j| {
            let again = j.stages[0].states[0].clone();
            j.stages[0].states.push(again);
        }),
        ("state of another size", Rule::States, "its initializer's region [4, 4]", |j| {
            j.stages[0].states[0].init = Some(weight("w", Tensor::zeros(f32s(&[4, 4]))));
        }),
        ("constant of another type", Rule::States, "constant `c` is i64[4,8]", |j| {
            j.stages[0].constants[0].1 = Tensor::zeros(autoshard_ir::Type::new(DType::I64, [4, 8])).into();
        }),
        ("states share memory", Rule::States, "kept in the same memory", |j| share(j, BufferId(8), W)),
        ("state overwritten", Rule::States, "must outlive the step but is overwritten by `part`", |j| {
            share(j, PART, BufferId(8));
        }),
        ("forward missing", Rule::Schedule, "micro-batch 1 passes forward 0 times", |j| {
            j.stages[0].schedule.remove(1);
        }),
        ("backward twice", Rule::Schedule, "backward 2 times", |j| {
            j.stages[0].schedule.insert(3, Slot::Backward { micro_batch: 0, frame: 0 });
        }),
        ("unknown micro-batch", Rule::Schedule, "there are 2 micro-batches", |j| {
            j.stages[0].schedule[1] = Slot::Forward { micro_batch: 2, frame: 1 };
        }),
        ("frame in use", Rule::Schedule, "the frame still holds micro-batch 0", |j| {
            j.stages[0].schedule[1] = Slot::Forward { micro_batch: 1, frame: 0 };
        }),
        ("backward in another frame", Rule::Schedule, "the frame does not hold that micro-batch", |j| {
            j.stages[0].schedule.swap(2, 3);
            j.stages[0].schedule[2] = Slot::Backward { micro_batch: 1, frame: 0 };
        }),
        ("backward first", Rule::Schedule, "the frame does not hold that micro-batch", |j| {
            j.stages[0].schedule.swap(1, 3)
        }),
        ("update too early", Rule::Schedule, "the update is not last", |j| j.stages[0].schedule.swap(3, 4)),
        ("no update", Rule::Schedule, "the update is never run", |j| {
            j.stages[0].schedule.pop();
        }),
        ("read before write", Rule::Read, "reads `part`, which was not written", |j| j.stages[0].forward.swap(2, 3)),
        ("scratch across lists", Rule::Read, "reads `whole`, which was not written", |j| {
            j.stages[0].backward.push(Instr::Slice { input: WHOLE, output: FED, dim: 0, axes: axes(&[0]) });
        }),
        ("frame in the update", Rule::Read, "`kept` is in a frame", |j| {
            j.stages[0].update.insert(0, compute(&DOUBLE, &[KEPT], &[FED]));
        }),
        ("overwritten", Rule::Read, "reads `fed`, whose memory forward[4] overwrote with `whole`", |j| {
            share(j, FED, WHOLE)
        }),
        ("accumulator overwritten", Rule::Read, "reads `total`, whose memory forward[2] overwrote with `part`", |j| {
            share(j, PART, TOTAL);
            j.stages[0].schedule = vec![
                Slot::Forward { micro_batch: 0, frame: 0 },
                Slot::Backward { micro_batch: 0, frame: 0 },
                Slot::Forward { micro_batch: 1, frame: 0 },
                Slot::Backward { micro_batch: 1, frame: 0 },
                Slot::Update,
            ];
            // The sum of the first micro-batch lies where the second's forward writes.
            j.stages[0].backward[2] = Instr::Slice { input: BACK, output: BufferId(8), dim: 1, axes: axes(&[1]) };
            j.stages[0].backward[3] = Instr::Accumulate { input: BufferId(8), output: TOTAL };
            j.stages[0].constants.clear();
        }),
        ("operand and result overlap", Rule::Overlap, "`kept` and `whole` share memory", |j| {
            share(j, WHOLE, KEPT);
            j.stages[0].frame_bytes = 128;
        }),
        ("all-reduce half in place", Rule::Overlap, "share a part of their memory", |j| {
            let p = &mut j.stages[0];
            p.buffers[2].ty.dims = vec![2, 16];
            p.buffers[2].global = vec![4, 16];
            let mut other = p.buffers[2].clone();
            other.offset += 64;
            p.buffers.push(other);
            p.scratch_bytes += 64;
            let output = BufferId(p.buffers.len() as u32 - 1);
            p.forward[6] = Instr::AllReduce { input: FED, output, kind: ReduceKind::Sum, axes: axes(&[1]) };
        }),
        ("results overlap", Rule::Overlap, "results `kept` and `kept` share memory", |j| {
            j.stages[0].forward[1] = compute(&DOUBLE, &[FED], &[KEPT, KEPT]);
        }),
        ("send without receive", Rule::Messages, "sends Update(9) to stage 1, which does not receive it", |j| {
            j.stages[0].update.push(Instr::Send { input: W, to: 1, tag: 9 });
        }),
        ("receive without send", Rule::Messages, "waits for MicroBatch(0, 1), which stage 1 does not send", |j| {
            j.stages[1].backward.clear();
        }),
        ("another order", Rule::Messages, "whose next message is MicroBatch(0, 1)", |j| j.stages[1].forward.swap(0, 1)),
        ("another tag", Rule::Messages, "whose next message is MicroBatch(0, 3)", |j| {
            j.stages[0].forward[7] = Instr::Send { input: FED, to: 1, tag: 3 };
        }),
        ("another type", Rule::Messages, "or their shards differ", |j| {
            j.stages[0].forward[7] = Instr::Send { input: PART, to: 1, tag: 1 };
        }),
        ("deadlock", Rule::Deadlock, "a deadlock", |j| {
            // Each stage first waits for what the other sends afterwards.
            let back = j.stages[0].backward.remove(0);
            j.stages[0].forward.insert(0, back);
            j.stages[0].backward[0] = compute(&DOUBLE, &[KEPT], &[BACK]);
            let send = j.stages[1].backward.pop().unwrap();
            j.stages[1].forward.push(send);
        }),
        ("deadlock by the schedule", Rule::Deadlock, "a deadlock", |j| {
            // Stage 0 waits for the first backward before it sends the second micro-batch, stage 1 for the latter.
            j.stages[0].schedule.swap(1, 2);
        }),
    ];
    for (name, rule, reason, change) in table {
        let mut job = good();
        change(&mut job);
        let violations = match verify(&job) {
            Ok(()) => panic!("{name}: not found"),
            Err(v) => v,
        };
        let found = violations.iter().any(|v| v.rule == *rule && v.to_string().contains(reason));
        let all: Vec<String> = violations.iter().map(|v| format!("{:?}: {v}", v.rule)).collect();
        assert!(found, "{name}: expected {rule:?} `{reason}`, found\n{}", all.join("\n"));
        assert!(Session::new(job, &Options::default()).is_err(), "{name}: must not run");
    }
    let covered: std::collections::BTreeSet<Rule> = table.iter().map(|t| t.1).collect();
    assert_eq!(covered.len(), 11, "every rule is covered");
}

/// A state and a value kept for backward, each with a view of other sizes that is read in a later list.
fn viewed() -> (Job, [BufferId; 6]) {
    let mut b = JobBuilder::new(&[("dp", 2)], 1, 2);
    let (ty, flat) = (f32s(&[4, 16]), f32s(&[4, 4, 4]));
    let shards: [&[u8]; 3] = [&[0], &[], &[]];
    let x = b.input("x", ty.clone(), Some(0));
    let y = b.output("y", flat.clone(), Some(0));
    let z = b.output("z", ty.clone(), Some(0));
    let v = b.output("v", flat.clone(), None);
    let w = b.state(0, "w", ty.clone(), &shards[..2], Some(numbers(&ty, 1)));
    let kept = b.buffer(0, "kept", ty.clone(), &shards[..2], Region::Frame);
    let other = b.buffer(0, "other", ty.clone(), &shards[..2], Region::Frame);
    let kept_view = b.buffer(0, "kept_view", flat.clone(), &shards, Region::Frame);
    let w_view = b.buffer(0, "w_view", flat.clone(), &shards, Region::Persistent);
    let new = b.buffer(0, "new", ty.clone(), &shards[..2], Region::Scratch);
    b.forward(0, Instr::Feed { port: x, output: kept });
    b.forward(0, reshape(kept, kept_view, &[4, 4, 4]));
    b.forward(0, compute(&DOUBLE, &[kept], &[other]));
    b.backward(0, Instr::Fetch { input: kept_view, port: y });
    b.backward(0, Instr::Fetch { input: kept, port: z });
    b.update(0, reshape(w, w_view, &[4, 4, 4]));
    b.update(0, compute(&DOUBLE, &[w], &[new]));
    b.update(0, Instr::Fetch { input: w_view, port: v });
    b.update(0, Instr::Copy { input: new, output: w });
    let mut job = b.finish();
    share(&mut job, kept_view, kept);
    share(&mut job, w_view, w);
    (job, [w, kept, other, kept_view, w_view, new])
}

fn reshape(from: BufferId, to: BufferId, dims: &[i64]) -> Instr {
    let op = Op::new(&RESHAPE).ints("dims", dims.iter().copied());
    Instr::Compute { name: "node".into(), op, inputs: vec![from], outputs: vec![to] }
}

#[test]
fn a_view_is_read_where_its_operand_lies() {
    let (job, [_, kept, _, kept_view, ..]) = viewed();
    verify(&job).unwrap();
    assert_eq!(job.stages[0].view(&job.stages[0].forward[1]), Some((kept, kept_view)));
    assert!(job.to_string().contains("b3 = view of b1"), "{job}");
    let x = numbers(&f32s(&[8, 16]), 3);
    let recorder = Arc::new(Recorder::default());
    let observer: Option<Arc<dyn Observer>> = Some(recorder.clone());
    let mut session = Session::new(job, &Options { poison: true, observer, ..Options::default() }).unwrap();
    let before = session.states().unwrap()["w"].clone();
    let out = session.step(&map([("x", x.clone())])).unwrap();
    assert_eq!((out["y"].bytes(), out["z"].bytes()), (x.bytes(), x.bytes()));
    assert_eq!(out["v"].bytes(), before.bytes());
    let twice: Vec<f32> = before.as_slice::<f32>().iter().map(|x| 2.0 * x).collect();
    assert_eq!(session.states().unwrap()["w"].as_slice::<f32>(), twice);
    let views: Vec<u64> = recorder.events().iter().filter(|e| e.category == "view").map(|e| e.bytes).collect();
    assert_eq!(views, [0; 6], "on two ranks, of a value of two micro-batches and of a state");
}

#[test]
fn every_unsafe_view_is_found() {
    type Break = fn(&mut Program, [BufferId; 6]);
    let table: &[(&str, Rule, &str, Break)] = &[
        ("begins before its operand", Rule::Read, "reads `kept`, which was not written", |p, _| p.forward.swap(0, 1)),
        ("never begins", Rule::Read, "reads `kept_view`, which was not written", |p, _| drop(p.forward.remove(1))),
        (
            "operand written",
            Rule::Read,
            "reads `kept_view`, whose memory forward[2] overwrote with `kept`",
            |p, [_, kept, ..]| p.forward[2] = compute(&DOUBLE, &[kept], &[kept]),
        ),
        (
            "written itself",
            Rule::Read,
            "reads `kept`, whose memory forward[3] overwrote with `kept_view`",
            |p, [_, _, _, view, ..]| p.forward.push(compute(&DOUBLE, &[view], &[view])),
        ),
        (
            "operand's memory used for something else",
            Rule::Read,
            "reads `kept_view`, whose memory forward[2] overwrote with `other`",
            |p, [_, kept, other, ..]| p.buffers[other.0 as usize].offset = p.buffer(kept).offset,
        ),
        ("half in place", Rule::Read, "reads `kept`, whose memory forward[1] overwrote with `kept_view`", |p, ids| {
            p.buffers[ids[3].0 as usize].offset += 64;
            p.frame_bytes += 64;
        }),
        ("not the same bytes", Rule::Read, "reads `kept`, whose memory forward[1] overwrote with `z`", |p, ids| {
            let mut z = p.buffer(ids[1]).clone();
            z.name = "z".into();
            p.buffers.push(z);
            p.forward[1] = compute(&DOUBLE, &[ids[1]], &[BufferId(p.buffers.len() as u32 - 1)]);
        }),
        ("another size", Rule::Types, "Reshape{dims=[4,4,4]} gives", |p, ids| {
            let b = &mut p.buffers[ids[3].0 as usize];
            (b.ty.dims[2], b.global[2]) = (2, 2);
        }),
        ("another element type", Rule::Types, "Reshape{dims=[4,4,4]} gives", |p, ids| {
            p.buffers[ids[3].0 as usize].ty.dtype = DType::I32;
        }),
        (
            "state written before its view is read",
            Rule::Read,
            "reads `w_view`, whose memory update[2] overwrote with `w`",
            |p, _| p.update.swap(2, 3),
        ),
        ("state written through its view", Rule::States, "`w` must outlive the step", |p, [.., view, _]| {
            p.update.push(compute(&DOUBLE, &[view], &[view]));
        }),
        ("of a frame in the update", Rule::Read, "`kept_view` is in a frame", |p, [_, kept, _, view, ..]| {
            p.update.push(reshape(kept, view, &[4, 4, 4]));
        }),
        ("scratch across lists", Rule::Read, "reads `kept_view`, which was not written", |p, ids| {
            for b in [ids[1], ids[3]] {
                p.buffers[b.0 as usize].region = Region::Scratch;
                p.buffers[b.0 as usize].offset = 0;
            }
        }),
    ];
    for (name, rule, reason, change) in table {
        let (mut job, ids) = viewed();
        change(&mut job.stages[0], ids);
        let violations = match verify(&job) {
            Ok(()) => panic!("{name}: not found"),
            Err(v) => v,
        };
        let found = violations.iter().any(|v| v.rule == *rule && v.to_string().contains(reason));
        let all: Vec<String> = violations.iter().map(|v| format!("{:?}: {v}", v.rule)).collect();
        assert!(found, "{name}: expected {rule:?} `{reason}`, found\n{}", all.join("\n"));
    }
}

#[test]
fn one_frame_serves_all_lists_of_a_single_micro_batch() {
    let mut b = JobBuilder::new(&[("dp", 2)], 1, 1);
    let ty = f32s(&[4, 3]);
    let x = b.input("x", ty.clone(), None);
    let y = b.output("y", ty.clone(), None);
    let kept = b.buffer(0, "kept", ty.clone(), &[&[0], &[]], Region::Frame);
    b.forward(0, Instr::Feed { port: x, output: kept });
    b.update(0, compute(&DOUBLE, &[kept], &[kept]));
    b.update(0, Instr::Fetch { input: kept, port: y });
    let job = b.finish();
    verify(&job).unwrap();
    let x = numbers(&ty, 1);
    let out = Session::new(job, &Options::default()).unwrap().step(&map([("x", x.clone())])).unwrap();
    let twice: Vec<f32> = x.as_slice::<f32>().iter().map(|x| 2.0 * x).collect();
    assert_eq!(out["y"].as_slice::<f32>(), twice);
}
