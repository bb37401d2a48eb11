//! Training: from a forward graph to the graph of a training step.
//!
//! [`prepare`] makes the forward graph of the step: appends a loss where asked, applies the compute precision
//! ([`precision`]), and splits the loss into a sum and a count ([`loss`]). [`train_step`] then appends `Backward` nodes
//! ([`autodiff`]) and `Update` nodes ([`update`]). `Forward` and `Backward` run once per micro-batch, `Update` once per step:
//!
//! ```text
//! Forward   sum, count = ...
//! Backward  G = Accumulate(d sum / d parameter);  S = Accumulate(sum);  C = Accumulate(count)
//! Update    gradient = G / C;  loss = S / C;  clip;  optimizer;  states written
//! ```
//!
//! so that means over labels are global means, whatever the number of micro-batches and ranks.
//!
//! [`recompute`] lets the backward pass make some forward results anew, rather than keep them.
//!
//! Node ids of the prepared graph stay those of the step, so that a choice per forward node (its pipeline stage) made on
//! the one holds for the other.

pub mod autodiff;
pub mod draws;
pub mod loss;
pub mod micro_batch;
mod noise;
mod order;
pub mod precision;
pub mod recompute;
pub mod update;

pub use autodiff::NoGradient;
pub use loss::{Loss, Normalization};
pub use micro_batch::{Reason, micro_batchable};
pub use noise::{NOISE, is_noise, rms};
pub use precision::Precision;
pub use recompute::Recompute;
pub use update::Optimizer;

use crate::blocks;
use crate::builder::Builder;
use crate::graph::{Graph, Section, ValueId};
use crate::op::OpError;
use crate::rewrite::{self, RewriteError};

/// Name of the step's output for the loss, in the `Update` section: mean over all micro-batches.
pub const LOSS: &str = "loss";

/// What a training step is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// What is minimised.
    pub loss: Loss,
    /// How parameters follow their gradients.
    pub optimizer: Optimizer,
    /// The pipeline stage of each node of the [prepared](prepare) graph; `None`: one stage. Contributions of several
    /// stages to the gradient of one parameter accumulate apart and are added in `Update`.
    pub stage_of: Option<Vec<u16>>,
    /// Adds outputs `grad/NAME`: the gradient that the optimizer sees, before clipping.
    pub gradient_outputs: bool,
    /// Largest allowed norm of all gradients together.
    pub clip_norm: Option<f64>,
    /// Compute precision.
    pub precision: Precision,
    /// What the backward pass makes anew.
    pub recompute: Recompute,
}

impl Default for TrainOptions {
    /// AdamW with the defaults of PyTorch on the output `loss`, in f32.
    fn default() -> TrainOptions {
        TrainOptions {
            loss: Loss::Output(LOSS.into()),
            optimizer: Optimizer::default(),
            stage_of: None,
            gradient_outputs: false,
            clip_norm: None,
            precision: Precision::F32,
            recompute: Recompute::None,
        }
    }
}

/// Why a graph cannot be trained.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrainError {
    /// The options name what the graph does not have.
    #[error("the model has no {what} `{name}`; it has: {}", .found.join(", "))]
    Unknown {
        /// Output, input.
        what: &'static str,
        /// The name asked for.
        name: String,
        /// Names there are.
        found: Vec<String>,
    },
    /// The output cannot serve as loss, or the loss does not fit it.
    #[error("`{name}` cannot be the loss: {reason}")]
    Loss {
        /// The output.
        name: String,
        /// Why.
        reason: String,
    },
    /// The loss depends on no trainable parameter.
    #[error("the loss does not depend on any trainable parameter")]
    NothingToTrain,
    /// Nodes that no gradient passes through.
    #[error("{} node(s) between parameters and loss cannot be differentiated:\n{}", .0.len(),
        .0.iter().map(|n| format!("  {n}")).collect::<Vec<_>>().join("\n"))]
    NoGradient(Vec<NoGradient>),
    /// Options that do not fit the graph or each other.
    #[error("{0}")]
    Options(String),
    /// A pass failed on a node.
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
    /// An operator refused its operands while the step was built.
    #[error("while building {0}: {1}")]
    Build(&'static str, OpError),
}

/// A forward graph ready for differentiation.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The graph: only what its outputs need. Its last outputs are [`loss::SUM`] and, where there is one, [`loss::COUNT`].
    pub graph: Graph,
    /// How the loss is put together from sums over micro-batches.
    pub normalization: Normalization,
}

impl Prepared {
    fn output(&self, name: &str) -> Option<ValueId> {
        self.graph.outputs.iter().find(|o| o.name == name).map(|o| o.value)
    }
}

/// Makes the forward graph of a training step: see the module.
///
/// # Errors
/// Options that name what is not there; a loss that is not a scalar; operators that refuse the compute precision.
pub fn prepare(forward: &Graph, options: &TrainOptions) -> Result<Prepared, TrainError> {
    if let Some(n) = forward.nodes.iter().find(|n| n.section != Section::Forward) {
        let text =
            format!("the graph has a node in the {:?} section ({}): it is a training step already", n.section, n.name);
        return Err(TrainError::Options(text));
    }
    let (graph, name) = loss::attach(forward, &options.loss)?;
    let graph = precision::rewrite(&graph, &options.precision)?;
    let split = loss::split(&graph, &name)?;
    let graph = draws::with_step(split.graph, &options.optimizer);
    Ok(Prepared { graph: order::stateless_first(graph), ..split })
}

/// Makes the graph of a training step: see the module.
///
/// # Errors
/// As [`prepare`]; all nodes without gradient; nothing to train.
pub fn train_step(forward: &Graph, options: &TrainOptions) -> Result<Graph, TrainError> {
    let prepared = prepare(forward, options)?;
    step(&prepared, options)
}

/// Appends the backward pass and the update to a prepared graph. Node ids of the prepared graph are kept.
///
/// # Errors
/// As [`train_step`].
pub fn step(prepared: &Prepared, options: &TrainOptions) -> Result<Graph, TrainError> {
    let forward_nodes = prepared.graph.nodes.len();
    let stages: &[u16] = options.stage_of.as_deref().unwrap_or(&[]);
    if !stages.is_empty() && stages.len() != forward_nodes {
        let n = stages.len();
        let text = format!("stage_of has {n} entries for {forward_nodes} nodes of the prepared forward graph");
        return Err(TrainError::Options(text));
    }
    let sum = prepared.output(loss::SUM).expect("prepare makes it");
    let count = prepared.output(loss::COUNT);
    let mut b = Builder::resume(prepared.graph.clone());
    b.graph_mut().outputs.retain(|o| o.name != loss::SUM && o.name != loss::COUNT);

    let build = |e| TrainError::Build("the seed of the gradient", e);
    b.enter(Section::Backward);
    let scale = options.precision.loss_scale();
    let seed = b.scalar(b.ty(sum).dtype, scale);
    let gradients = autodiff::differentiate(&mut b, &[(sum, seed)], stages).map_err(TrainError::NoGradient)?;
    if gradients.is_empty() {
        return Err(TrainError::NothingToTrain);
    }
    let totals = update::accumulate(&mut b, &gradients, sum, count).map_err(build)?;
    update::append(&mut b, &totals, options, scale).map_err(|e| TrainError::Build("the update", e))?;
    let step = rewrite::compact(b.finish());
    match options.recompute {
        Recompute::None => Ok(step),
        what => Ok(recompute::apply(&step, &blocks::find(&step), what, stages)?),
    }
}
