//! Steps, failures, states and checkpoints of whole sessions.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use autoshard_ir::factor::ReduceKind;
use autoshard_ir::{Tensor, Type};
use autoshard_runtime::checkpoint::{self, Checkpoint, CheckpointError};
use autoshard_runtime::program::*;
use autoshard_runtime::session::{Options, Session, SessionError};
use autoshard_runtime::trace::{Observer, Recorder};
use autoshard_runtime::weights::Weights;
use common::*;

/// Two stages of `mesh`, micro-batches of 4 rows by 3. Stage 0 doubles the input and adds the element's index; stage 1
/// adds its weight, sends the result back, and accumulates it; stage 0 accumulates what comes back as well, and adds it to
/// its state. Rows are sharded over axis 0.
fn pipeline(size: usize, micro_batches: usize) -> Job {
    let mut b = JobBuilder::new(&[("dp", size)], 2, micro_batches);
    let ty = f32s(&[4, 3]);
    let s: [&[u8]; 2] = [&[0], &[]];
    let x = b.input("x", ty.clone(), Some(0));
    let y = b.output("y", ty.clone(), Some(0));
    let sum = b.output("sum", ty.clone(), None);
    let weight = b.state(1, "w", ty.clone(), &s, Some(numbers(&ty, 9)));
    let moment = b.state(0, "m", ty.clone(), &s, None);

    let fed = b.buffer(0, "x", ty.clone(), &s, Region::Scratch);
    let kept = b.buffer(0, "kept", ty.clone(), &s, Region::Frame);
    let back = b.buffer(0, "back", ty.clone(), &s, Region::Scratch);
    let total = b.buffer(0, "total", ty.clone(), &s, Region::Persistent);
    b.forward(0, Instr::Feed { port: x, output: fed });
    b.forward(0, compute(&DOUBLE, &[fed], &[kept]));
    b.forward(0, compute(&INDEX, &[kept], &[kept]));
    b.forward(0, Instr::Send { input: kept, to: 1, tag: 7 });
    b.backward(0, Instr::Recv { output: back, from: 1, tag: 7 });
    b.backward(0, compute(&ADD, &[back, kept], &[back]));
    b.backward(0, Instr::Accumulate { input: back, output: total });
    b.update(0, compute(&ADD, &[moment, total], &[moment]));
    b.update(0, Instr::Fetch { input: moment, port: sum });

    let got = b.buffer(1, "got", ty.clone(), &s, Region::Frame);
    let result = b.buffer(1, "result", ty.clone(), &s, Region::Frame);
    b.forward(1, Instr::Recv { output: got, from: 0, tag: 7 });
    b.forward(1, compute(&ADD, &[got, weight], &[result]));
    b.forward(1, Instr::Fetch { input: result, port: y });
    b.backward(1, Instr::Send { input: result, to: 0, tag: 7 });
    b.finish()
}

/// What [`pipeline`] should give for `y` of one micro-batch: `2 x + index + w`, and for what it adds to `m`.
fn expected(x: &Tensor, w: &Tensor, micro_batches: usize) -> (Vec<f32>, Vec<f32>) {
    let (x, w) = (x.as_slice::<f32>(), w.as_slice::<f32>());
    let kept = |i: usize| 2.0 * x[i] + (i % 12) as f32;
    let y: Vec<f32> = (0..12 * micro_batches).map(|i| kept(i) + w[i % 12]).collect();
    let sum = (0..12).map(|i| (0..micro_batches).map(|m| y[m * 12 + i] + kept(m * 12 + i)).sum()).collect();
    (y, sum)
}

#[test]
fn pipeline_with_micro_batches() {
    for size in [1, 2, 4] {
        for micro_batches in [1, 2, 5] {
            let job = pipeline(size, micro_batches);
            let x = numbers(&f32s(&[4 * micro_batches, 3]), 3);
            let mut session = Session::new(job, &Options::default()).unwrap();
            let (y, sum) = expected(&x, &numbers(&f32s(&[4, 3]), 9), micro_batches);
            for step in 1..=3 {
                let out = session.step(&map([("x", x.clone())])).unwrap();
                assert_eq!(out["y"].as_slice::<f32>(), y, "{size} ranks, {micro_batches} micro-batches");
                // The numbers are multiples of 1/64 and small: sums are exact in any order.
                let total: Vec<f32> = sum.iter().map(|s| s * step as f32).collect();
                assert_eq!(out["sum"].as_slice::<f32>(), total);
                assert_eq!(session.state("m").unwrap().as_slice::<f32>(), total);
            }
            assert_eq!(session.steps(), 3);
        }
    }
}

#[test]
fn one_f_one_b_gives_the_same() {
    let mut job = pipeline(2, 3);
    let f = |micro_batch| Slot::Forward { micro_batch, frame: micro_batch % 2 };
    let b = |micro_batch| Slot::Backward { micro_batch, frame: micro_batch % 2 };
    job.stages[0].schedule = vec![f(0), f(1), b(0), f(2), b(1), b(2), Slot::Update];
    job.stages[0].frames = 2;
    let (f, b) = (|m| Slot::Forward { micro_batch: m, frame: 0 }, |m| Slot::Backward { micro_batch: m, frame: 0 });
    job.stages[1].schedule = vec![f(0), b(0), f(1), b(1), f(2), b(2), Slot::Update];
    job.stages[1].frames = 1;
    let x = numbers(&f32s(&[12, 3]), 3);
    let (y, sum) = expected(&x, &numbers(&f32s(&[4, 3]), 9), 3);
    let out = Session::new(job, &Options::default()).unwrap().step(&map([("x", x)])).unwrap();
    assert_eq!((out["y"].as_slice::<f32>(), out["sum"].as_slice::<f32>()), (&y[..], &sum[..]));
}

/// Four ranks, each with a row; the operator fails or panics on one of them, and all meet before and after.
fn faulty(def: &'static autoshard_ir::OpDef) -> Job {
    let mut b = JobBuilder::new(&[("dp", 4)], 1, 1);
    let ty = f32s(&[4, 3]);
    let x = b.input("x", ty.clone(), None);
    let fed = b.buffer(0, "x", ty.clone(), &[&[0], &[]], Region::Scratch);
    let whole = b.buffer(0, "whole", ty.clone(), &[&[], &[]], Region::Scratch);
    let y = b.buffer(0, "y", ty.clone(), &[&[0], &[]], Region::Scratch);
    let gather = |input| Instr::AllGather { input, output: whole, dim: 0, axes: axes(&[0]) };
    b.forward(0, Instr::Feed { port: x, output: fed });
    b.forward(0, gather(fed));
    b.forward(0, compute(def, &[fed], &[y]));
    b.forward(0, gather(y));
    b.forward(0, Instr::AllReduce { input: whole, output: whole, kind: ReduceKind::Sum, axes: axes(&[0]) });
    b.finish()
}

#[test]
fn failure_of_one_rank_ends_all_and_names_it() {
    for (def, expected) in [
        (&FAIL, "rank 2, stage 0, forward[2] of micro-batch 0, TestFail (node): the third row is bad"),
        (
            &PANIC,
            "rank 1, stage 0, forward[2] of micro-batch 0, TestPanic (node): panic: assertion `left != right` failed",
        ),
    ] {
        let mut session = Session::new(faulty(def), &Options::default()).unwrap();
        let start = Instant::now();
        let inputs = map([("x", numbers(&f32s(&[4, 3]), 1))]);
        let error = session.step(&inputs).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20), "no rank waits for the watchdog");
        assert_eq!(session.step(&inputs).unwrap_err().to_string(), error, "a failed session stays failed");
    }
}

#[test]
fn stuck_ranks_are_told_apart() {
    use autoshard_runtime::comm::{CommError, Communicator, Tag, World, threads::connect};
    let mut comms = connect(World { ranks: 3, watchdog: Duration::from_millis(300) });
    let (mut c, mut b, mut a) = (comms.pop().unwrap(), comms.pop().unwrap(), comms.pop().unwrap());
    let texts: Vec<String> = std::thread::scope(|s| {
        // Rank 0 waits for rank 1 in an all-reduce; rank 1 for a message of rank 2; rank 2 has ended.
        let first = s.spawn(move || {
            let g = a.open_group(&[Rank(0), Rank(1)]).unwrap();
            let mut number = [0f32];
            // SAFETY: lives until the call returns, and nobody else touches it.
            let mem = unsafe { autoshard_runtime::device::Mem::new(number.as_mut_ptr().cast(), 4) };
            a.all_reduce(g, &f32s(&[1]), ReduceKind::Sum, mem, mem)
        });
        let second = s.spawn(move || {
            let mut byte = [0u8];
            // SAFETY: lives until the call returns, and nobody else touches it.
            let mem = unsafe { autoshard_runtime::device::Mem::new(byte.as_mut_ptr(), 1) };
            b.recv(Rank(2), Tag::Update(5), mem)
        });
        c.leave();
        [first.join().unwrap(), second.join().unwrap()]
            .into_iter()
            .filter_map(|r| match r.unwrap_err() {
                CommError::Stuck(text) => Some(text),
                _ => None,
            })
            .collect()
    });
    let text = texts.first().expect("one of them says so");
    assert!(text.contains("rank 2 has ended its step"), "{text}");
    assert!(
        text.contains("rank 0 waits in all-reduce for ranks 1")
            || text.contains("rank 1 waits for a message of rank 2 (Update(5))"),
        "{text}"
    );
}

#[test]
fn wrong_inputs_are_refused() {
    let mut session = Session::new(pipeline(2, 2), &Options::default()).unwrap();
    let good = numbers(&f32s(&[8, 3]), 1);
    for (inputs, expected) in [
        (map([]), "input `x`: is missing, expected f32[8,3]"),
        (map([("x", numbers(&f32s(&[4, 3]), 1))]), "input `x`: is f32[4,3], expected f32[8,3]"),
        (map([("x", good.clone()), ("z", good.clone())]), "input `z`: the model has no such input, only x"),
    ] {
        assert_eq!(session.step(&inputs).unwrap_err().to_string(), expected);
    }
    session.step(&map([("x", good)])).unwrap();
}

#[test]
fn what_does_not_fit_is_refused_with_the_sizes() {
    let job = pipeline(2, 2);
    let needed: u64 = job.stages.iter().map(|p| 2 * p.arena_bytes()).sum();
    let error = Session::new(job.clone(), &Options { memory: Some(needed - 1), ..Options::default() }).err().unwrap();
    let SessionError::Memory { ranks: 4, needed: said, largest, free } = error else { panic!("{error}") };
    assert_eq!(free, needed - 1);
    assert!(said >= needed && largest >= job.stages.iter().map(Program::arena_bytes).max().unwrap());
    Session::new(job, &Options { memory: Some(said), ..Options::default() }).unwrap();
}

/// States on a mesh, sharded as given.
fn states(mesh: &[(&str, usize)], w: &[&[u8]], v: &[&[u8]]) -> Job {
    let mut b = JobBuilder::new(mesh, 1, 1);
    b.state(0, "w", f32s(&[8, 6]), w, Some(Tensor::zeros(f32s(&[8, 6]))));
    b.state(0, "v", f32s(&[8]), v, Some(Tensor::zeros(f32s(&[8]))));
    b.state(0, "adam.m/w", Type::new(autoshard_ir::DType::Bf16, [8, 6]), w, None);
    b.finish()
}

fn layouts() -> Vec<Job> {
    vec![
        states(&[], &[&[], &[]], &[&[]]),
        states(&[("a", 2)], &[&[], &[0]], &[&[0]]),
        states(&[("a", 2), ("b", 2), ("c", 2)], &[&[0, 2], &[1]], &[&[2]]),
        states(&[("a", 4), ("b", 2)], &[&[1, 0], &[]], &[&[0]]),
    ]
}

#[test]
fn random_weights_do_not_depend_on_the_sharding() {
    let options = |seed| Options { weights: Weights::Random(seed), ..Options::default() };
    let all: Vec<BTreeMap<String, Tensor>> =
        layouts().into_iter().map(|job| Session::new(job, &options(3)).unwrap().states().unwrap()).collect();
    for other in &all[1..] {
        assert_eq!(*other, all[0]);
    }
    assert_ne!(Session::new(layouts().remove(0), &options(4)).unwrap().states().unwrap(), all[0]);
    let ty = f32s(&[8, 6]);
    let slot = weight("w", Tensor::zeros(ty.clone()));
    assert_eq!(Weights::Random(3).whole("w", Some(&slot), &ty).unwrap(), all[0]["w"], "what the reference sees");
    assert!(all[0]["v"].as_slice::<f32>().iter().all(|x| (x - 1.0).abs() < 0.2));
    assert!(all[0]["adam.m/w"].bytes().iter().all(|b| *b == 0));
}

#[test]
fn checkpoints_load_on_any_mesh() {
    for limit in [1, 300, 1 << 30] {
        let dir = tempfile::tempdir().unwrap();
        for (i, from) in layouts().into_iter().enumerate() {
            let mut a = Session::new(from, &Options::default()).unwrap();
            let types = a.state_types();
            let want: BTreeMap<String, Tensor> =
                types.iter().map(|(n, t)| (n.clone(), numbers(t, n.len() + i))).collect();
            a.load_states(&want).unwrap();
            a.set_steps(40 + i as u64 / 2);
            let at = checkpoint::save_in_files_of(&mut a, dir.path(), limit).unwrap();
            let files = std::fs::read_dir(&at).unwrap().count() - 1;
            assert_eq!(
                files,
                match limit {
                    1 => 3,
                    300 => 2,
                    _ => 1,
                }
            );
            for to in layouts() {
                let mut b = Session::new(to, &Options::default()).unwrap();
                Checkpoint::open(dir.path()).unwrap().load(&mut b).unwrap();
                assert_eq!(b.states().unwrap(), want);
                assert_eq!(b.steps(), 40 + i as u64 / 2);
            }
        }
        let mut left: Vec<String> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, ["latest.json", "step-00000040.1", "step-00000041.1"], "nothing else is left");
    }
}

#[test]
fn bad_checkpoints_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = |dir: &std::path::Path| Checkpoint::open(dir).map(|_| ()).unwrap_err();
    assert!(matches!(error(dir.path()), CheckpointError::Absent { .. }));
    let mut session = Session::new(layouts().remove(1), &Options::default()).unwrap();
    let at = checkpoint::save(&mut session, dir.path()).unwrap();

    let mut other = Session::new(pipeline(1, 1), &Options::default()).unwrap();
    let unfit = Checkpoint::open(dir.path()).unwrap().load(&mut other).unwrap_err().to_string();
    for part in ["it lacks state `m`", "its state `w` is f32[8,6], the plan's f32[4,3]", "the plan has no state `v`"] {
        assert!(unfit.contains(part), "{unfit}");
    }
    assert_eq!(other.state("w").unwrap(), numbers(&f32s(&[4, 3]), 9), "nothing was replaced");

    // Of a damaged file, whichever byte: said with its name.
    for name in ["states-00001.safetensors", "index.json"] {
        let file = at.join(name);
        let good = std::fs::read(&file).unwrap();
        for n in [0, 7, good.len() / 2, good.len() - 1] {
            let mut flipped = good.clone();
            flipped[n] ^= 1;
            for bytes in [&good[..n], &flipped] {
                std::fs::write(&file, bytes).unwrap();
                let e = error(dir.path());
                assert!(matches!(e, CheckpointError::Damaged { .. }) && e.to_string().contains(name), "{e}");
            }
        }
        std::fs::write(&file, &good).unwrap();
    }
    // The directory of a checkpoint itself, whose index nothing vouches for.
    let index = at.join("index.json");
    let good = std::fs::read_to_string(&index).unwrap();
    for (from, to) in [("\"version\": 2", "\"version\": 3"), ("states-00001", "../x"), ("\"w\"", "\"u\""), ("{", "[")] {
        std::fs::write(&index, good.replacen(from, to, if from == "states-00001" { 9 } else { 1 })).unwrap();
        assert!(matches!(error(&at), CheckpointError::Damaged { .. }), "{from} to {to}");
    }
}

#[test]
fn a_checkpoint_of_the_same_step_replaces_the_old_one_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut session = Session::new(layouts().remove(1), &Options::default()).unwrap();
    let first = checkpoint::save(&mut session, dir.path()).unwrap();
    session.load_states(&map([("v", numbers(&f32s(&[8]), 5))])).unwrap();
    let second = checkpoint::save(&mut session, dir.path()).unwrap();
    assert!(first != second && !first.exists() && second.exists());
    let third = checkpoint::save(&mut session, dir.path()).unwrap();
    assert_eq!((first, second.exists()), (third, false));
    let mut other = Session::new(layouts().remove(2), &Options::default()).unwrap();
    Checkpoint::open(dir.path()).unwrap().load(&mut other).unwrap();
    assert_eq!(other.state("v").unwrap(), numbers(&f32s(&[8]), 5));
}

#[test]
fn a_session_that_does_not_train_leaves_the_optimizer_states() {
    let dir = tempfile::tempdir().unwrap();
    let mut trained = Session::new(layouts().remove(1), &Options::default()).unwrap();
    checkpoint::save(&mut trained, dir.path()).unwrap();
    let mut b = JobBuilder::new(&[], 1, 1);
    b.state(0, "w", f32s(&[8, 6]), &[&[], &[]], Some(numbers(&f32s(&[8, 6]), 1)));
    b.state(0, "v", f32s(&[8]), &[&[]], Some(numbers(&f32s(&[8]), 1)));
    let mut session = Session::new(b.finish(), &Options::default()).unwrap();
    Checkpoint::open(dir.path()).unwrap().load(&mut session).unwrap();
    assert!(session.states().unwrap() == map([("w", Tensor::zeros(f32s(&[8, 6]))), ("v", Tensor::zeros(f32s(&[8])))]));
}

#[cfg(unix)]
#[test]
fn files_have_the_rights_of_ordinary_ones() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |p: &std::path::Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    let (ordinary, folder) = (dir.path().join("ordinary"), dir.path().join("folder"));
    std::fs::write(&ordinary, "x").unwrap();
    std::fs::create_dir(&folder).unwrap();
    let mut session = Session::new(layouts().remove(1), &Options::default()).unwrap();
    let at = checkpoint::save(&mut session, dir.path()).unwrap();
    assert_eq!(mode(&at), mode(&folder));
    for file in [dir.path().join("latest.json"), at.join("index.json"), at.join("states-00001.safetensors")] {
        assert_eq!(mode(&file), mode(&ordinary), "{}", file.display());
    }
    let (private, link) = (dir.path().join("private"), dir.path().join("link"));
    std::fs::write(&private, "x").unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&private, &link).unwrap();
    autoshard_runtime::files::write(&link, b"new").unwrap();
    assert_eq!((std::fs::read(&private).unwrap(), mode(&private)), (b"new".to_vec(), 0o640));
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn traces_hold_every_instruction_of_every_rank() {
    let recorder = Arc::new(Recorder::default());
    let observer: Option<Arc<dyn Observer>> = Some(recorder.clone());
    let job = pipeline(2, 2);
    let per_rank: Vec<usize> =
        job.stages.iter().map(|p| 2 * (p.forward.len() + p.backward.len()) + p.update.len()).collect();
    let mut session = Session::new(job, &Options { observer, ..Options::default() }).unwrap();
    session.step(&map([("x", numbers(&f32s(&[8, 3]), 1))])).unwrap();
    let mut out = Vec::new();
    recorder.write(&mut out).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    for rank in 0..4 {
        let mine: Vec<_> = events.iter().filter(|e| e["ph"] == "X" && e["tid"] == rank).collect();
        assert_eq!(mine.len(), per_rank[rank / 2]);
        assert!(mine.iter().all(|e| e["pid"] == rank / 2 && e["dur"].as_f64().unwrap() >= 0.0));
        let starts: Vec<f64> = mine.iter().map(|e| e["ts"].as_f64().unwrap()).collect();
        assert!(starts.is_sorted());
    }
}

#[test]
fn few_permits_change_nothing() {
    let x = numbers(&f32s(&[20, 3]), 3);
    let run = |threads| {
        let mut s = Session::new(pipeline(4, 5), &Options { threads, ..Options::default() }).unwrap();
        s.step(&map([("x", x.clone())])).unwrap()
    };
    assert_eq!(run(Some(1)), run(None));
}

#[test]
fn constants_are_cut_to_shards() {
    let mut b = JobBuilder::new(&[("a", 2), ("b", 2)], 1, 1);
    let t = numbers(&f32s(&[4, 6]), 2);
    let c = b.constant(0, "c", t.clone(), &[&[1], &[0]]);
    let out = b.output("c", f32s(&[4, 6]), None);
    b.forward(0, Instr::Fetch { input: c, port: out });
    let got = Session::new(b.finish(), &Options::default()).unwrap().step(&BTreeMap::new()).unwrap();
    assert_eq!(got["c"], t);
}
