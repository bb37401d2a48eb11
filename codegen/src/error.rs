//! Why a plan does not compile: in each case the plan does not fit the graph, since every plan of the planner compiles.

use autoshard_ir::{NodeId, ValueId};

/// See the module.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    /// The assignment is of another graph.
    #[error("the assignment has {got} {what}, the graph has {want}: it was made for another graph")]
    Shape {
        /// What is counted.
        what: &'static str,
        /// In the assignment.
        got: usize,
        /// In the graph.
        want: usize,
    },
    /// A dim does not divide.
    #[error("{place}: {ty} cannot be laid out as {spec}: a dim does not divide by the size of its axes")]
    Uneven {
        /// Node and value.
        place: String,
        /// Its type.
        ty: String,
        /// The spec.
        spec: String,
    },
    /// No sequence of collectives leads from one spec to the other.
    #[error("{place}: {reason}")]
    Reshard {
        /// Node and value.
        place: String,
        /// Why.
        reason: String,
    },
    /// A node runs in one stage but reads a value that never reaches it.
    #[error("node {node} reads {value}, which is not available in its stage: {reason}")]
    Unavailable {
        /// The reader.
        node: NodeId,
        /// The value.
        value: ValueId,
        /// Why.
        reason: String,
    },
}
