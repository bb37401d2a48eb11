//! Times of operators and reshardings on one mesh of one cluster, remembered.
//!
//! The bridge from specs and steps to [`autoshard_cost_models`]; the only place of the planner that asks it for times.

use std::collections::HashMap;

use autoshard_cost_models::compute::Kernel;
use autoshard_cost_models::{Bytes, Cluster, CollectiveKind, Group};
use autoshard_ir::op::{Family, Work};
use autoshard_ir::{DType, Op, Type};

use crate::execution::Execution;
use crate::kernels::Fused;
use crate::mesh::{AxisId, Mesh};
use crate::reshard::{Resharder, Step, StepKind, local_bytes};
use crate::spec::Spec;
use crate::streams::{COPIES, Communicator};

/// A step of a resharding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Who communicates.
    pub communicator: Communicator,
    /// Whether that is over data parallelism alone.
    pub data: bool,
    /// How long it takes.
    pub seconds: f64,
}

/// Seconds that pieces take, one after the other.
pub fn total(pieces: &[Piece]) -> f64 {
    pieces.iter().map(|p| p.seconds).sum()
}

/// Times on one mesh.
pub struct Times<'a> {
    cluster: &'a Cluster,
    mesh: &'a Mesh,
    execution: Execution,
    resharder: Resharder,
    reshards: HashMap<(Spec, Type), HashMap<Spec, Option<f64>>>,
}

impl<'a> Times<'a> {
    /// For a mesh on a cluster.
    pub fn new(cluster: &'a Cluster, mesh: &'a Mesh) -> Times<'a> {
        let execution = Execution::default();
        Times { cluster, mesh, execution, resharder: Resharder::new(mesh.clone()), reshards: HashMap::new() }
    }
    /// The same for another way of executing.
    pub fn executing(self, execution: Execution) -> Times<'a> {
        Times { execution, ..self }
    }
    /// How steps are executed.
    pub fn execution(&self) -> Execution {
        self.execution
    }
    /// The mesh.
    pub fn mesh(&self) -> &'a Mesh {
        self.mesh
    }

    /// Seconds that an operator takes on local operands and results, of which some need not be read or written.
    pub fn compute(&self, op: &Op, inputs: &[Type], outputs: &[Type], fused: &Fused) -> f64 {
        let float = |t: &&Type| t.dtype.is_float();
        let dtype = inputs.iter().chain(outputs).find(float).map_or(DType::F32, |t| t.dtype);
        let mut work = op.work(inputs, outputs);
        let saved = |types: &[Type], free: &[bool]| -> usize {
            types.iter().zip(free).filter(|(_, free)| **free).map(|(t, _)| t.bytes()).sum()
        };
        work.bytes = (work.bytes - (saved(inputs, &fused.inputs) + saved(outputs, &fused.outputs)) as f64).max(0.0);
        let products = self.execution.products.format();
        let kernel = Kernel { joins: fused.joins(), products, operator: Some(op.name()) };
        let slower = if work.family == Family::Attention { self.execution.attention.slowdown() } else { 1.0 };
        slower * self.cluster.kernel_time(&work, dtype, kernel).0
    }

    /// Seconds that a resharding takes; `None` where there is no way (see [`crate::reshard`]).
    pub fn reshard(&mut self, from: &Spec, to: &Spec, ty: &Type) -> Option<f64> {
        if from == to {
            return Some(0.0);
        }
        let key = (from.clone(), ty.clone());
        if let Some(time) = self.reshards.get(&key).and_then(|m| m.get(to)) {
            return *time;
        }
        let time = self.resharder.steps(from, to, ty).ok().map(|steps| total(&self.steps(from, &steps, ty)));
        self.reshards.entry(key).or_default().insert(to.clone(), time);
        time
    }

    /// Steps, one after the other.
    pub fn steps(&self, from: &Spec, steps: &[Step], ty: &Type) -> Vec<Piece> {
        let mut before = from;
        let mut pieces = Vec::with_capacity(steps.len());
        for s in steps {
            let seconds = self.step(&s.kind, local_bytes(before, ty, self.mesh), local_bytes(&s.spec, ty, self.mesh));
            let axes = if s.kind.communicates() { s.kind.axes() } else { &[] };
            let communicator = axes.iter().fold(COPIES, |set, a| set | 1 << a.0);
            let data = communicator != COPIES
                && !s.kind.is_routing()
                && axes.iter().all(|a| self.mesh.axis(*a).name.is_data());
            pieces.push(Piece { communicator, data, seconds });
            before = &s.spec;
        }
        pieces
    }

    fn step(&self, kind: &StepKind, before: u64, after: u64) -> f64 {
        let group = self.group(kind.axes());
        let (collective, bytes) = match kind {
            StepKind::Slice { .. }
            | StepKind::ZeroUnlessFirst { .. }
            | StepKind::KeepRows { .. }
            | StepKind::PlaceRows { .. } => return self.copy(2 * after),
            StepKind::AllGather { .. } => (CollectiveKind::AllGather, after),
            StepKind::ReduceScatter { .. } => (CollectiveKind::ReduceScatter, before),
            StepKind::AllReduce { .. } => (CollectiveKind::AllReduce, before),
            StepKind::AllToAll { .. } | StepKind::Dispatch { .. } | StepKind::Combine { .. } => {
                (CollectiveKind::AllToAll, before * group.size as u64)
            }
        };
        self.cluster.collective_time(collective, Bytes(bytes), group).0
    }

    /// Seconds to read and write `bytes` of device memory.
    fn copy(&self, bytes: u64) -> f64 {
        let work = Work { family: Family::Memory, bytes: bytes as f64, ..Work::FREE };
        self.cluster.op_time(&work, DType::F32).0
    }

    /// The ranks of a collective over axes. Of axes that are not neighbours, the span is that of the innermost.
    fn group(&self, axes: &[AxisId]) -> Group {
        let size = axes.iter().map(|&a| self.mesh.size(a)).product();
        Group::new(size, axes.last().map_or(1, |&a| self.mesh.stride(a)))
    }

    /// Seconds to send `bytes` from each rank of a stage to the next of `stages` stages.
    pub fn send(&self, bytes: u64, stages: usize) -> f64 {
        self.cluster.collective_time(CollectiveKind::SendRecv, Bytes(bytes), Group::new(stages, self.mesh.ranks())).0
    }
}
