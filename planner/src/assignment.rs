//! The planner's decision on a graph, node by node: what codegen compiles.

use autoshard_ir::{Graph, NodeId, StateId};

use crate::mesh::{AxisName, Mesh};
use crate::spec::{Spec, Strategy};

/// A pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StageId(pub u16);

/// In which order a stage runs forwards and backwards.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward, one backward: at most `stages - stage` micro-batches in flight.
    #[serde(rename = "1f1b")]
    OneF1B,
    /// 1F1B with gradients by weights in passes of their own, which fill what would be idle time; as many micro-batches in flight as
    /// the first stage of 1F1B has (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
}

impl Schedule {
    /// As shown.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "GPipe",
            Schedule::OneF1B => "1F1B",
            Schedule::ZeroBubble => "zero bubble (ZB-H1)",
        }
    }
}

/// How every node of a graph is executed. Vectors are by [`NodeId`] and [`StateId`].
#[derive(Debug, Clone)]
pub struct Assignment {
    /// The mesh of every stage.
    pub mesh: Mesh,
    /// The number of stages.
    pub stages: usize,
    /// The stage of each node. A node that several stages need and that depends on no state may run in each of them
    /// ([`Assignment::everywhere`]).
    pub stage: Vec<StageId>,
    /// Nodes cheap enough to run in every stage that needs their results, rather than sending them.
    pub everywhere: Vec<bool>,
    /// The strategy of each node.
    pub strategy: Vec<Strategy>,
    /// The storage spec of each state.
    pub storage: Vec<Spec>,
    /// The stage that keeps each state.
    pub home: Vec<StageId>,
    /// The spec in which each input is fed.
    pub inputs: Vec<Spec>,
    /// The schedule.
    pub schedule: Schedule,
    /// Micro-batches per step. The graph is that of one micro-batch (over all data-parallel ranks).
    pub micro_batches: usize,
}

impl Assignment {
    /// Everything on one rank.
    pub fn single(graph: &Graph) -> Assignment {
        let mesh = Mesh::default();
        Assignment {
            stages: 1,
            stage: vec![StageId(0); graph.nodes.len()],
            everywhere: vec![false; graph.nodes.len()],
            strategy: vec![Strategy::replicate(&mesh); graph.nodes.len()],
            storage: graph.states.iter().map(|s| Spec::replicated(graph.ty(s.read).rank())).collect(),
            home: vec![StageId(0); graph.states.len()],
            inputs: graph.inputs.iter().map(|i| Spec::replicated(graph.ty(i.value).rank())).collect(),
            mesh,
            schedule: Schedule::GPipe,
            micro_batches: 1,
        }
    }
    /// What of it can only be estimated, why, and what to plan with instead; none where programs can be made.
    pub fn only_estimate(&self) -> Option<&'static str> {
        // One stage has nothing to schedule.
        if self.stages > 1 && self.schedule == Schedule::ZeroBubble {
            return Some(
                "the zero-bubble schedule cannot be executed yet: programs have no list of gradients by weights; plan with --schedule 1f1b",
            );
        }
        if self.mesh.axes.iter().any(|x| x.name == AxisName::Ep) {
            return Some(
                "expert parallelism cannot be executed yet: programs have no exchange of rows by what the data says; plan with --ep 1",
            );
        }
        None
    }
    /// The strategy of a node.
    pub fn strategy(&self, n: NodeId) -> &Strategy {
        &self.strategy[n.index()]
    }
    /// The storage spec of a state.
    pub fn storage(&self, s: StateId) -> &Spec {
        &self.storage[s.index()]
    }
}
