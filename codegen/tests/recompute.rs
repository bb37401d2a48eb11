//! Recomputation frees memory in the compiled program: the frame of a micro-batch holds what the step keeps, and no more.

use autoshard_codegen::compile;
use autoshard_ir::graph::{Def, Init, StateKind};
use autoshard_ir::train::recompute::kept;
use autoshard_ir::train::{Loss, Recompute, TrainOptions, train_step};
use autoshard_ir::{Builder, DType, Graph, Type};
use autoshard_planner::assignment::{Assignment, Schedule};

/// Six blocks `x + (h tanh(h)) w2` with `h = x w1`, and the mean of squares.
fn model(batch: usize) -> Graph {
    let mut b = Builder::new("deep");
    let mut x = b.input("x", Type::new(DType::F32, [batch, 64]), Some(0));
    for layer in 0..6 {
        let weight = |b: &mut Builder, name: &str, dims: [usize; 2]| {
            let ty = Type::new(DType::F32, dims);
            let id = b.state(format!("{layer}.{name}"), StateKind::Parameter, ty, Init::Zeros, None);
            b.graph().state(id).read
        };
        let (w1, w2) = (weight(&mut b, "w1", [64, 256]), weight(&mut b, "w2", [256, 64]));
        let h = b.einsum("bk,kn->bn", x, w1).unwrap();
        let t = b.tanh(h).unwrap();
        let p = b.mul(h, t).unwrap();
        let y = b.einsum("bk,kn->bn", p, w2).unwrap();
        x = b.add(x, y).unwrap();
    }
    b.output("y", x, Some(0));
    b.finish()
}

#[test]
fn frames_hold_what_is_kept() {
    let loss = Loss::Mse { output: "y".into(), target: "target".into() };
    let sizes = |recompute, micro_batches| {
        let options = TrainOptions { loss: loss.clone(), recompute, ..TrainOptions::default() };
        let graph = train_step(&model(512), &options).unwrap();
        let a = Assignment { micro_batches, schedule: Schedule::GPipe, ..Assignment::single(&graph) };
        let job = compile(&graph, &a).unwrap();
        // Inputs are fed again in the backward list where it wants them.
        let is_made = |v: &autoshard_ir::ValueId| matches!(graph.value(*v).def, Def::Node(..));
        let bytes: u64 = kept(&graph).iter().filter(|v| is_made(v)).map(|v| graph.ty(*v).bytes() as u64).sum();
        let s = &job.stages[0];
        (bytes, s.frame_bytes, s.frame_bytes * s.frames as u64 + s.scratch_bytes)
    };
    for micro_batches in [1, 4] {
        let [none, selective, full] =
            [Recompute::None, Recompute::Selective, Recompute::Full].map(|r| sizes(r, micro_batches));
        println!("{micro_batches}: {none:?} {selective:?} {full:?}");
        assert!(full.2 < selective.2 && selective.2 < none.2, "{none:?} {selective:?} {full:?}");
        if micro_batches > 1 {
            for (kept, frame, _) in [none, selective, full] {
                assert!(frame.abs_diff(kept) <= 2 * 512 * 64 * 4, "the frame has {frame} bytes, {kept} are kept");
            }
        }
    }
}
