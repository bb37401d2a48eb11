//! Why a plan does not compile: it does not fit the graph, or is an estimate of what cannot be executed.

use autoshard_runtime::program::List;

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
    /// A stage needs a value that never reaches it.
    #[error("stage {stage} needs {value} in its {list} list, where it is not available")]
    Unavailable {
        /// The value and its producer.
        value: String,
        /// The stage.
        stage: usize,
        /// Its list.
        list: List,
    },
    /// A sum over the batch (or another value of all of it) is to be delivered, and the step is cut into micro-batches.
    #[error(
        "output `{output}` depends on the whole batch, and the step is cut into {micro_batches} micro-batches: none of them has its value; plan with one"
    )]
    NeedsWholeBatch {
        /// Its name.
        output: String,
        /// How many there are.
        micro_batches: usize,
    },
    /// There are no programs for what the plan does.
    #[error("the plan is an estimate: {0}")]
    OnlyEstimate(&'static str),
}
