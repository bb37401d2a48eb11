//! Jobs written by hand: what codegen would make, small enough to reason about.

#![allow(dead_code)] // Each test file uses its part.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use autoshard_ir::factor::FactorRule;
use autoshard_ir::graph::StateKind;
use autoshard_ir::op::{Gradient, KernelError, Work};
use autoshard_ir::weights::{WeightRef, WeightStorage};
use autoshard_ir::{DType, Op, OpDef, Tensor, Type};
use autoshard_runtime::program::*;

/// A job under construction: every buffer at a place of its own.
pub struct JobBuilder {
    pub job: Job,
}

/// Axes by index.
pub fn axes(list: &[u8]) -> Vec<Axis> {
    list.iter().map(|a| Axis(*a)).collect()
}

impl JobBuilder {
    /// A mesh, a number of stages and of micro-batches.
    pub fn new(mesh: &[(&str, usize)], stages: usize, micro_batches: usize) -> JobBuilder {
        let axes: Vec<(String, usize)> = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
        let ranks = stages * axes.iter().map(|a| a.1).product::<usize>();
        JobBuilder {
            job: Job {
                axes,
                stages: vec![Program::default(); stages],
                micro_batches,
                inputs: Vec::new(),
                outputs: Vec::new(),
                ranks: (0..ranks as u32).map(Rank).collect(),
            },
        }
    }
    /// A buffer of an unsharded type, sharded per dim.
    pub fn buffer(&mut self, stage: usize, name: &str, global: Type, shards: &[&[u8]], region: Region) -> BufferId {
        let shards: Vec<Vec<Axis>> = shards.iter().map(|s| axes(s)).collect();
        let dims: Vec<usize> = global.dims.iter().zip(&shards).map(|(d, s)| d / self.job.parts(s)).collect();
        let ty = Type::new(global.dtype, dims);
        let p = &mut self.job.stages[stage];
        let end = match region {
            Region::Persistent => &mut p.persistent_bytes,
            Region::Frame => &mut p.frame_bytes,
            Region::Scratch => &mut p.scratch_bytes,
        };
        let offset = *end;
        *end += (ty.bytes() as u64).max(1).next_multiple_of(64);
        p.buffers.push(Buffer { name: name.into(), ty, global: global.dims, shards, region, offset });
        BufferId(p.buffers.len() as u32 - 1)
    }
    /// A state; its buffer is persistent.
    pub fn state(
        &mut self,
        stage: usize,
        name: &str,
        global: Type,
        shards: &[&[u8]],
        init: Option<Tensor>,
    ) -> BufferId {
        let buffer = self.buffer(stage, name, global, shards, Region::Persistent);
        let kind = if init.is_some() { StateKind::Parameter } else { StateKind::Optimizer };
        let init = init.map(|t| weight(name, t));
        let slot = StateSlot { name: name.into(), kind, buffer, init };
        self.job.stages[stage].states.push(slot);
        buffer
    }
    /// A constant, sharded per dim.
    pub fn constant(&mut self, stage: usize, name: &str, t: Tensor, shards: &[&[u8]]) -> BufferId {
        let buffer = self.buffer(stage, name, t.ty().clone(), shards, Region::Persistent);
        self.job.stages[stage].constants.push((buffer, Arc::new(t)));
        buffer
    }
    pub fn input(&mut self, name: &str, ty: Type, batch_dim: Option<usize>) -> usize {
        self.job.inputs.push(Port { name: name.into(), ty, batch_dim });
        self.job.inputs.len() - 1
    }
    pub fn output(&mut self, name: &str, ty: Type, batch_dim: Option<usize>) -> usize {
        self.job.outputs.push(Port { name: name.into(), ty, batch_dim });
        self.job.outputs.len() - 1
    }
    pub fn forward(&mut self, stage: usize, instr: Instr) {
        self.job.stages[stage].forward.push(instr);
    }
    pub fn backward(&mut self, stage: usize, instr: Instr) {
        self.job.stages[stage].backward.push(instr);
    }
    pub fn update(&mut self, stage: usize, instr: Instr) {
        self.job.stages[stage].update.push(instr);
    }
    /// All forwards, then all backwards where a stage has any, then the update.
    pub fn finish(mut self) -> Job {
        let m = self.job.micro_batches;
        let training = self.job.stages.iter().any(|p| !p.backward.is_empty());
        for p in &mut self.job.stages {
            p.frames = if training { m } else { 1 };
            let frame = |i| if training { i } else { 0 };
            p.schedule.extend((0..m).map(|i| Slot::Forward { micro_batch: i, frame: frame(i) }));
            if training {
                p.schedule.extend((0..m).map(|i| Slot::Backward { micro_batch: i, frame: frame(i) }));
            }
            p.schedule.push(Slot::Update);
        }
        self.job
    }
}

/// A weight that lies in memory.
pub fn weight(name: &str, t: Tensor) -> WeightRef {
    WeightRef {
        initializer: name.into(),
        ty: t.ty().clone(),
        region: t.dims().iter().map(|d| 0..*d).collect(),
        storage: WeightStorage::Inline(Arc::new(t)),
    }
}

/// `f32` of these sizes.
pub fn f32s(dims: &[usize]) -> Type {
    Type::new(DType::F32, dims)
}

/// Numbers of any element type that differ from place to place (truth values: a pattern). Floats are small multiples of
/// 1/64, so that sums of a few are exact even in bf16 where they stay below 4.
pub fn numbers(ty: &Type, salt: usize) -> Tensor {
    let mut t = Tensor::zeros(ty.clone());
    let x = |i: usize| match ty.dtype {
        DType::Bool => ((i * 7 + salt * 3) % 5 % 2) as f64,
        DType::I8 | DType::U8 => ((i * 13 + salt * 17) % 23) as f64,
        DType::Bf16 => ((i * 37 + salt * 11) % 29) as f64 / 64.0 - 0.25,
        d if d.is_float() => ((i * 37 + salt * 101) % 211) as f64 / 64.0 - 1.5,
        _ => (i * 3 + salt * 1000) as f64,
    };
    autoshard_ir::convert::from_f64(ty.dtype, (0..ty.numel()).map(x), t.bytes_mut());
    t
}

/// A box of a tensor.
pub fn cut(t: &Tensor, region: &[Range<usize>]) -> Tensor {
    autoshard_runtime::boxes::part(t, region)
}

pub fn map<const N: usize>(list: [(&str, Tensor); N]) -> BTreeMap<String, Tensor> {
    list.into_iter().map(|(n, t)| (n.to_string(), t)).collect()
}

/// An elementwise operator for tests, of any number of operands of one type.
const fn op(name: &'static str, kernel: autoshard_ir::op::Kernel) -> OpDef {
    OpDef {
        name,
        doc: "for tests",
        attrs: &[],
        onnx: &[],
        infer: |_, inputs| Ok(vec![inputs[0].clone()]),
        factors: |_, i, o| FactorRule::elementwise(i, o),
        work: |_, i, o| Work::memory(i, o, 1.0),
        identity: |_, _, _| None,
        gradient: Gradient::None,
        kernel,
        samples: Vec::new,
    }
}

/// `2 x`
pub static DOUBLE: OpDef = op("TestDouble", |_, x, y| {
    let x: &[f32] = x[0].as_slice();
    y[0].as_mut_slice::<f32>().iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
    Ok(())
});

/// `x + y`
pub static ADD: OpDef = op("TestAdd", |_, x, y| {
    let (a, b): (&[f32], &[f32]) = (x[0].as_slice(), x[1].as_slice());
    for (i, y) in y[0].as_mut_slice::<f32>().iter_mut().enumerate() {
        *y = a[i] + b[i];
    }
    Ok(())
});

/// `x + (index in the unsharded tensor)`
pub static INDEX: OpDef = op("TestIndex", |_, x, y| {
    let (dims, origin, global) = (y[0].ty.dims.clone(), y[0].origin.clone(), y[0].global.clone());
    let x: &[f32] = x[0].as_slice();
    for (i, y) in y[0].as_mut_slice::<f32>().iter_mut().enumerate() {
        let (mut rest, mut flat, mut stride) = (i, 0, 1);
        for d in (0..dims.len()).rev() {
            flat += (origin[d] + rest % dims[d]) * stride;
            rest /= dims[d];
            stride *= global[d];
        }
        *y = x[i] + flat as f32;
    }
    Ok(())
});

/// Fails where the shard begins at index 2 of dim 0.
pub static FAIL: OpDef = op("TestFail", |_, x, y| {
    y[0].data.copy_from_slice(x[0].data);
    if x[0].origin[0] == 2 { Err(KernelError("the third row is bad".into())) } else { Ok(()) }
});

/// Panics where the shard begins at index 1 of dim 0.
pub static PANIC: OpDef = op("TestPanic", |_, x, y| {
    y[0].data.copy_from_slice(x[0].data);
    assert_ne!(x[0].origin[0], 1, "the second row is bad");
    Ok(())
});

/// An application of a test operator.
pub fn compute(def: &'static OpDef, inputs: &[BufferId], outputs: &[BufferId]) -> Instr {
    Instr::Compute { name: "node".into(), op: Op::new(def), inputs: inputs.to_vec(), outputs: outputs.to_vec() }
}
