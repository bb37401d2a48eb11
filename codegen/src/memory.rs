//! What the arena of each stage holds, by category. The total is the arena's size, so it is exact.

use autoshard_ir::graph::StateKind;
use autoshard_runtime::program::{Instr, Job, Program, Region, place_bytes};

/// Bytes of one rank's arena, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct StageMemory {
    /// Parameters kept by the stage.
    pub parameters: u64,
    /// Optimizer states.
    pub optimizer: u64,
    /// Gradients summed over micro-batches. With one micro-batch they lie among the activations.
    pub gradients: u64,
    /// Constants, parameters received from other stages, and casts of parameters that serve all micro-batches.
    pub constants: u64,
    /// What micro-batches in flight keep from forward to backward.
    pub activations: u64,
    /// Temporaries of the lists, gathered parameters, communication buffers.
    pub workspace: u64,
}

impl StageMemory {
    /// Bytes of the arena.
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.gradients + self.constants + self.activations + self.workspace
    }
}

/// The memory of every stage.
pub fn memory(job: &Job) -> Vec<StageMemory> {
    job.stages.iter().map(stage).collect()
}

fn stage(p: &Program) -> StageMemory {
    let mut m = StageMemory {
        activations: p.frame_bytes * p.frames as u64,
        workspace: p.scratch_bytes,
        ..StageMemory::default()
    };
    let sums: std::collections::BTreeSet<u32> = [&p.forward, &p.backward]
        .into_iter()
        .flatten()
        .filter_map(|i| if let Instr::Accumulate { output, .. } = i { Some(output.0) } else { None })
        .collect();
    let kinds: std::collections::BTreeMap<u32, StateKind> = p.states.iter().map(|s| (s.buffer.0, s.kind)).collect();
    // Views lie in the same place as what they are views of: a place counts once.
    let mut places: std::collections::BTreeMap<u64, Vec<u32>> = std::collections::BTreeMap::new();
    for (i, b) in p.buffers.iter().enumerate().filter(|(_, b)| b.region == Region::Persistent) {
        places.entry(b.offset).or_default().push(i as u32);
    }
    for here in places.values() {
        let slot = match here.iter().find_map(|i| kinds.get(i)) {
            Some(StateKind::Parameter) => &mut m.parameters,
            Some(StateKind::Optimizer) => &mut m.optimizer,
            None if here.iter().any(|i| sums.contains(i)) => &mut m.gradients,
            None => &mut m.constants,
        };
        *slot += place_bytes(p.buffers[here[0] as usize].bytes());
    }
    m
}
