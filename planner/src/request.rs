//! What is asked for: mode, batch, sizes, loss, optimizer, precision, constraints.

use std::collections::BTreeMap;

use autoshard_ir::blocks::{Blocks, classes, find};
use autoshard_ir::graph::{Graph, Section};
use autoshard_ir::ops::optimizer::{AdamW, Sgd};
use autoshard_ir::train::{
    Loss, Normalization, Optimizer, Precision, Recompute, TrainError, TrainOptions, precision, prepare, recompute, step,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::assignment::StageId;
use crate::constraints::{Constraints, Objective};
use crate::execution::{AttentionChoice, Operators};
use crate::roles::{Tags, tags};
use crate::routes::Routes;
use crate::stages::{Stages, place};

/// What the model is run for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Training steps.
    Train,
    /// Forward passes.
    Infer,
}

/// The loss, see [`Loss`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
#[allow(missing_docs)]
pub enum LossChoice {
    Output { output: String },
    CrossEntropy { output: String, labels: String, ignore_index: i64 },
    Mse { output: String, target: String },
}

/// The optimizer, see [`Optimizer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase", tag = "kind")]
#[allow(missing_docs)]
pub enum OptimizerChoice {
    Adamw { lr: f64, beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64, decoupled: bool },
    Sgd { lr: f64, momentum: f64, weight_decay: f64, nesterov: bool },
}

/// The compute precision, see [`Precision`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum PrecisionChoice {
    Fp32,
    Bf16,
    Fp16,
}

/// What the backward pass makes anew rather than keep, see [`Recompute`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeChoice {
    /// Nothing.
    #[default]
    None,
    /// What is cheap, where it lowers the bytes kept.
    Selective,
    /// All repeated blocks, as much of them as the backward pass needs.
    Full,
    /// All repeated blocks, each as a whole, as frameworks' checkpoint functions do. Never better than `Full`: for pins.
    Layers,
}

impl RecomputeChoice {
    /// How many ways the search tries besides none.
    pub const OTHERS: usize = 2;
    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            RecomputeChoice::None => "none",
            RecomputeChoice::Selective => "selective",
            RecomputeChoice::Full => "full",
            RecomputeChoice::Layers => "layers",
        }
    }
}

fn is_default<T: Default + PartialEq>(x: &T) -> bool {
    *x == T::default()
}

/// What is run: with the model and what is recomputed, it determines the graph of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Workload {
    /// Training or inference.
    pub mode: Mode,
    /// Samples of a step, over all ranks and micro-batches.
    pub global_batch: usize,
    /// Sizes of the model's other symbols.
    #[serde(default)]
    pub dims: BTreeMap<String, usize>,
    /// Compute precision.
    pub precision: PrecisionChoice,
    /// What is minimised in training.
    pub loss: LossChoice,
    /// How parameters follow their gradients.
    pub optimizer: OptimizerChoice,
    /// Whether attention is a fused kernel.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention: AttentionChoice,
    /// Whether norms and the like are single operators.
    #[serde(default, skip_serializing_if = "is_default")]
    pub operators: Operators,
    /// Largest norm of all gradients together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Adds outputs `grad/NAME` to the step, for verification.
    #[serde(default)]
    pub gradient_outputs: bool,
}

impl Workload {
    /// Training of the output `loss` by AdamW with its defaults, in f32.
    pub fn train(global_batch: usize) -> Workload {
        let (lr, beta1, beta2, epsilon, weight_decay) = (1e-3, 0.9, 0.999, 1e-8, 0.01);
        Workload {
            mode: Mode::Train,
            global_batch,
            dims: BTreeMap::new(),
            precision: PrecisionChoice::Fp32,
            loss: LossChoice::Output { output: autoshard_ir::train::LOSS.into() },
            optimizer: OptimizerChoice::Adamw { lr, beta1, beta2, epsilon, weight_decay, decoupled: true },
            attention: AttentionChoice::default(),
            operators: Operators::default(),
            clip_norm: None,
            gradient_outputs: false,
        }
    }
    /// Forward passes.
    pub fn infer(global_batch: usize) -> Workload {
        Workload { mode: Mode::Infer, ..Workload::train(global_batch) }
    }

    fn precision(&self) -> Precision {
        match self.precision {
            PrecisionChoice::Fp32 => Precision::F32,
            PrecisionChoice::Bf16 => Precision::Bf16,
            PrecisionChoice::Fp16 => Precision::F16 { loss_scale: 1024.0 },
        }
    }

    /// As the options of [`autoshard_ir::train`], with nothing recomputed.
    pub fn train_options(&self) -> TrainOptions {
        let loss = match &self.loss {
            LossChoice::Output { output } => Loss::Output(output.clone()),
            LossChoice::CrossEntropy { output, labels, ignore_index } => {
                Loss::CrossEntropy { output: output.clone(), labels: labels.clone(), ignore_index: *ignore_index }
            }
            LossChoice::Mse { output, target } => Loss::Mse { output: output.clone(), target: target.clone() },
        };
        let optimizer = match self.optimizer {
            OptimizerChoice::Adamw { lr, beta1, beta2, epsilon, weight_decay, decoupled } => {
                Optimizer::AdamW(AdamW { lr, beta1, beta2, epsilon, weight_decay, decoupled })
            }
            OptimizerChoice::Sgd { lr, momentum, weight_decay, nesterov } => {
                Optimizer::Sgd(Sgd { lr, momentum, weight_decay, nesterov })
            }
        };
        TrainOptions {
            loss,
            optimizer,
            stage_of: None,
            gradient_outputs: self.gradient_outputs,
            clip_norm: self.clip_norm,
            precision: self.precision(),
            recompute: Recompute::None,
        }
    }

    /// The forward graph of a step, from that of the file: see [`prepare`]. For inference, the file's in the compute
    /// precision.
    ///
    /// # Errors
    /// As [`prepare`].
    pub fn forward(&self, graph: &Graph) -> Result<Graph, TrainError> {
        match self.mode {
            Mode::Train => Ok(prepare(graph, &self.train_options())?.graph),
            Mode::Infer => precision::rewrite(graph, &self.precision()),
        }
    }

    /// The step of a graph as the file has it, with the stage of each node of [`Self::forward`]'s graph (empty: one
    /// stage). Inference has nothing to recompute.
    ///
    /// # Errors
    /// As [`autoshard_ir::train::train_step`].
    pub fn step(
        &self,
        graph: &Graph,
        stages: &[StageId],
        count: usize,
        recompute: RecomputeChoice,
    ) -> Result<StepGraph, TrainError> {
        let mut normalization = None;
        let graph = match self.mode {
            Mode::Infer => self.forward(graph)?,
            Mode::Train => {
                let mut options = self.train_options();
                let prepared = prepare(graph, &options)?;
                if !stages.is_empty() {
                    options.stage_of = Some(stages.iter().map(|s| s.0).collect());
                }
                normalization = Some(prepared.normalization);
                step(&prepared, &options)?
            }
        };
        let blocks = find(&graph);
        let stages = place(&graph, stages, count);
        let forward = graph.nodes.iter().take_while(|n| n.section == Section::Forward).count();
        let (tags, routes) = (tags(&graph, &blocks), Routes::new(&graph, &blocks));
        let plain = StepGraph { graph, blocks, tags, routes, stages, forward, copies: 0, normalization };
        match (recompute, self.mode) {
            (RecomputeChoice::None, _) | (_, Mode::Infer) => Ok(plain),
            _ => plain.recompute(recompute),
        }
    }
}

/// The graph of a step, with what the planner knows of it before deciding.
pub struct StepGraph {
    /// The graph of one micro-batch.
    pub graph: Graph,
    /// Its classes.
    pub blocks: Blocks,
    /// Per class, which factors are the batch and which the sequence.
    pub tags: Tags,
    /// Where rows may lie with their experts.
    pub routes: Routes,
    /// Where its nodes run.
    pub stages: Stages,
    /// The number of forward nodes.
    pub forward: usize,
    /// The number of nodes that are recomputed.
    pub copies: usize,
    /// How the loss of a training step is put together from micro-batches.
    pub normalization: Option<Normalization>,
}

impl StepGraph {
    /// The step that makes some results anew. Its classes, and so their tags, are those of this one.
    ///
    /// # Errors
    /// As [`recompute::apply`].
    pub fn recompute(&self, choice: RecomputeChoice) -> Result<StepGraph, TrainError> {
        let what = match choice {
            RecomputeChoice::None => Recompute::None,
            RecomputeChoice::Selective => Recompute::Selective,
            RecomputeChoice::Full => Recompute::Full,
            RecomputeChoice::Layers => Recompute::Layers,
        };
        let forward = &self.stages.node[..self.forward];
        let stage_of: Vec<u16> = forward.iter().map(|s| s.0).collect();
        let graph = recompute::apply(&self.graph, &self.blocks, what, &stage_of)?;
        let blocks = classes(&graph, self.blocks.runs.clone());
        let copies = (0..blocks.nodes.len()).map(|class| blocks.copies(&graph, class)).sum();
        let stages = place(&graph, forward, self.stages.count);
        let (tags, forward, normalization) = (self.tags.clone(), self.forward, self.normalization);
        let routes = Routes::new(&graph, &blocks);
        Ok(StepGraph { graph, blocks, tags, routes, stages, forward, copies, normalization })
    }
}

/// What is asked of the search.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// What is run.
    pub workload: Workload,
    /// Pins.
    pub constraints: Constraints,
    /// What is minimised.
    pub objective: Objective,
    /// Wall-clock limit of the search, in seconds.
    pub time_limit_s: f64,
    /// The search stops when it has proven this relative gap.
    pub gap: f64,
    /// Of randomised searches.
    pub seed: u64,
}

impl PlanRequest {
    /// A free search.
    pub fn new(workload: Workload) -> PlanRequest {
        PlanRequest {
            workload,
            constraints: Constraints::default(),
            objective: Objective::default(),
            time_limit_s: 60.0,
            gap: 0.0,
            seed: 0,
        }
    }
}
