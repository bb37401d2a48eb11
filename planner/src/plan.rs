//! The plan file: small, versioned, the same bytes for the same inputs.
//!
//! Choices are kept per class (see [`autoshard_ir::blocks`]), so the file does not grow with depth or ranks. Stage cuts
//! are node ranges of the forward graph. [`Plan::resolve`] rebuilds the step graph from the model and expands the choices;
//! a plan of another model file is refused. Readers ignore fields they do not know and refuse another major version.

use std::collections::BTreeMap;

use autoshard_cost_models::{Cluster, ClusterError};
use autoshard_ir::factor::{FactorId, FactorRule};
use autoshard_ir::fuse::Forms;
use autoshard_ir::graph::{Graph, Section};
use autoshard_ir::onnx::{Bindings, ImportErrors, Model};
use autoshard_ir::train::micro_batchable;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::assignment::{Assignment, Schedule, StageId};
use crate::constraints::{Constraints, Objective};
use crate::execution::{AttentionChoice, Operators, Overlap};
use crate::mesh::{AxisId, AxisName, Mesh, MeshAxis};
use crate::request::{PlanRequest, RecomputeChoice, StepGraph, Workload};
use crate::search::{Found, NextBests};
use crate::simulate::StagePrediction;
use crate::space::specs;
use crate::spec::{Spec, Strategy, Use};
use crate::strategies::{Strategies, of_node};

/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// A plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// Of the format.
    pub version: u32,
    /// The model file.
    pub model: ModelEntry,
    /// The machines.
    pub cluster: ClusterEntry,
    /// What is run.
    pub workload: Workload,
    /// What was pinned.
    #[serde(default)]
    pub constraints: Constraints,
    /// Ranks inside a stage.
    pub mesh: MeshEntry,
    /// Stages and micro-batches.
    pub pipeline: PipelineEntry,
    /// What the backward pass makes anew.
    #[serde(default)]
    pub recompute: RecomputeChoice,
    /// Per class of nodes, in order: how it is split.
    pub operators: Vec<OperatorEntry>,
    /// Per class of states, in order: how it is stored.
    pub states: Vec<StateEntry>,
    /// The spec that each input is fed in.
    pub inputs: Vec<InputEntry>,
    /// Figures under the cost model.
    pub predicted: Predicted,
    /// What is proven.
    pub search: SearchEntry,
    /// The best of other meshes, best first.
    #[serde(default)]
    pub alternatives: Vec<AlternativeEntry>,
    /// Assumptions, and what could not be kept to the letter.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The model file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelEntry {
    /// As given.
    pub path: String,
    /// Of the file.
    pub sha256: String,
    /// Elements of all parameters.
    pub parameters: u64,
}

/// The machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterEntry {
    /// Name.
    pub name: String,
    /// Ranks.
    pub gpus: usize,
    /// Bytes a rank may allocate.
    pub memory_limit_bytes: u64,
    /// The text of its file, where it is not one of the library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<String>,
}

impl ClusterEntry {
    /// The cluster.
    ///
    /// # Errors
    /// One that is not known, or does not have so many GPUs.
    pub fn cluster(&self) -> Result<Cluster, ClusterError> {
        let cluster = match &self.definition {
            Some(text) => Cluster::parse(text, "the plan's cluster")?,
            None => Cluster::load(&self.name)?,
        };
        cluster.with_gpus(self.gpus)
    }
}

/// Ranks inside a stage; the last axis is contiguous.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeshEntry {
    /// Outermost first, `pp` before all; sizes of 1 included, but for `ep` and `cp`.
    /// Ranks along `dp` and `ep` have different samples.
    pub axes: Vec<AxisEntry>,
}

/// An axis.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AxisEntry {
    /// `pp`, `dp`, `ep`, `cp`, `tp`.
    pub name: String,
    /// Ranks along it.
    pub size: usize,
}

/// Stages and micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PipelineEntry {
    /// The number of stages.
    pub stages: usize,
    /// Order of forwards and backwards.
    pub schedule: Schedule,
    /// Per step.
    pub micro_batches: usize,
    /// Samples of one micro-batch on one `dp` rank.
    pub micro_batch_size: usize,
    /// Always 1 yet.
    pub virtual_stages: usize,
    /// Per stage, the forward node after its last.
    pub cuts: Vec<usize>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A class of nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperatorEntry {
    /// Operator with attributes.
    pub op: String,
    /// Name of the first member.
    pub name: String,
    /// `forward`, `backward`, `update`.
    pub section: String,
    /// Members, without those recomputed.
    pub count: usize,
    /// How many of them the backward pass makes anew, split in the same way.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recomputed: usize,
    /// Per axis that does something: `split NAME`, or `linear N`.
    pub strategy: BTreeMap<String, String>,
    /// Specs of operands.
    pub inputs: Vec<String>,
    /// Specs of results.
    pub outputs: Vec<String>,
    /// The best other strategy, all else chosen anew on the same mesh, and its price; none where nothing else fits, or none
    /// was found in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_best: Option<NextStrategy>,
}

/// Another strategy of a class of nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NextStrategy {
    /// As that of [`OperatorEntry`].
    pub strategy: BTreeMap<String, String>,
    /// Seconds per step that the best plan with it takes more, by the ILP's costs; 0: as good.
    pub extra_s: f64,
}

/// Another storage of a class of states.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NextStorage {
    /// As that of [`StateEntry`].
    pub storage: String,
    /// See [`NextStrategy`].
    pub extra_s: f64,
}

/// A class of states.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StateEntry {
    /// Name of the first member.
    pub name: String,
    /// Members.
    pub count: usize,
    /// As stored.
    pub storage: String,
    /// The best other storage, as [`OperatorEntry::next_best`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_best: Option<NextStorage>,
}

/// An input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InputEntry {
    /// Its name.
    pub name: String,
    /// As fed.
    pub spec: String,
}

/// Figures under the cost model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Predicted {
    /// Of a step.
    pub step_time_s: f64,
    /// Samples (times the sequence, where there is one) per second.
    pub tokens_per_s: f64,
    /// Arithmetic of the unsharded step over time and GPUs; what is recomputed counts once.
    pub tflops_per_gpu: f64,
    /// Of the device's dense peak at the compute precision.
    pub mfu: f64,
    /// Per stage, bytes on one rank.
    pub peak_memory_bytes: Vec<u64>,
    /// Where the time of the busiest stage goes.
    pub breakdown: Breakdown,
    /// By stage.
    pub stages: Vec<StagePrediction>,
}

/// Seconds of a step of the stage with least idle time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs)]
pub struct Breakdown {
    pub compute_s: f64,
    /// The part of `compute_s` that makes forward results anew.
    #[serde(default)]
    pub recompute_s: f64,
    pub communication_s: f64,
    pub bubble_s: f64,
    pub optimizer_s: f64,
}

/// What is proven.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SearchEntry {
    /// Simulated seconds of the plan (bytes, for least memory).
    pub objective_s: f64,
    /// No plan of the searched space takes less.
    pub bound_s: f64,
    /// (objective - bound) / objective.
    pub gap: f64,
    /// The ILP's value of the plan.
    pub ilp_objective_s: f64,
    /// Wall time; left out where it must not differ between runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_s: Option<f64>,
    /// Candidates in the space.
    pub candidates: usize,
    /// Of them solved; the bounds of others were no better than the plan.
    pub solved: usize,
    /// Whether time ran out or the search was interrupted.
    pub cut_short: bool,
    /// Of randomised searches.
    pub seed: u64,
    /// What was minimised.
    pub objective: Objective,
}

/// Another mesh.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AlternativeEntry {
    /// `pp=2 dp=4 tp=1, 8 micro-batches`.
    pub configuration: String,
    /// Of a step.
    pub step_time_s: f64,
    /// On the fullest rank.
    pub peak_memory_bytes: u64,
}

/// Why a plan cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Not a plan.
    #[error("this is no plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// Of another version.
    #[error("the plan has format version {0}, this program reads version {VERSION}; make the plan anew")]
    Version(u64),
    /// Of another model file.
    #[error("the plan was made for a model with sha256 {plan}, but {path} has {model}; make the plan anew")]
    Stale {
        /** in the plan */
        plan: String,
        /** of the file */
        model: String,
        /** of the file */
        path: String,
    },
    /// The model gives no graph.
    #[error("{0}")]
    Graph(String),
    /// The plan and the graph do not fit.
    #[error("the plan does not fit the model: {0}; make the plan anew")]
    Mismatch(String),
}

/// Sizes for a batch: the workload's dims, and the batch symbol.
pub fn bindings(model: &Model, workload: &Workload, batch: usize) -> Bindings {
    let mut sizes = workload.dims.clone();
    if let Some(symbol) = model.batch_symbol() {
        sizes.insert(symbol.to_string(), batch);
    }
    Bindings(sizes)
}

/// The forward graph of a model for `batch` samples.
///
/// # Errors
/// As [`Model::instantiate`].
pub fn forward_graph(model: &Model, workload: &Workload, batch: usize) -> Result<Graph, ImportErrors> {
    let forms = Forms {
        attention: workload.attention == AttentionChoice::Fused,
        composites: workload.operators == Operators::Fused,
    };
    model.instantiate_with(&bindings(model, workload, batch), forms)
}

impl Plan {
    /// Writes down what a search found. `path` is the model's as given, `notes` what the caller assumed.
    pub fn new(
        found: &Found,
        request: &PlanRequest,
        cluster: &Cluster,
        model: ModelEntry,
        wall_s: Option<f64>,
        mut notes: Vec<String>,
    ) -> Plan {
        let best = &found.best;
        let (step, a) = (&best.step, &best.assignment);
        if request.constraints.execution.overlap == Overlap::None {
            notes.push("compute and communication of a stage do not overlap in the prediction".into());
        }
        notes.push("repeated blocks are planned alike; stages are cut for equal time".into());
        if best.candidate.recompute != RecomputeChoice::None {
            notes.push("what is recomputed is split as in the forward pass".into());
        }
        notes.extend(best.notes.iter().cloned());
        let dp = a.mesh.data_parallel();
        let inside = AxisName::ALL.iter().map(|n| (n.name(), a.mesh.along(*n)));
        // Context and expert parallelism are said where they are used.
        let seldom = [AxisName::Cp.name(), AxisName::Ep.name()];
        let inside = inside.filter(|(name, size)| *size > 1 || !seldom.contains(name));
        let axes = [("pp", a.stages)].into_iter().chain(inside);
        let mut cuts = vec![0; a.stages];
        for (n, stage) in a.stage[..step.forward].iter().enumerate() {
            cuts[stage.0 as usize] = n + 1;
        }
        if let Some(last) = cuts.last_mut() {
            *last = step.forward;
        }
        let batch = request.workload.global_batch;
        let certificate = &found.certificate;
        Plan {
            version: VERSION,
            model,
            cluster: ClusterEntry {
                name: cluster.name.clone(),
                gpus: cluster.gpus(),
                memory_limit_bytes: found.memory_limit,
                definition: None,
            },
            workload: request.workload.clone(),
            constraints: request.constraints.clone(),
            mesh: MeshEntry { axes: axes.map(|(name, size)| AxisEntry { name: name.into(), size }).collect() },
            pipeline: PipelineEntry {
                stages: a.stages,
                schedule: a.schedule,
                micro_batches: a.micro_batches,
                micro_batch_size: batch / a.micro_batches / dp,
                virtual_stages: 1,
                cuts,
            },
            recompute: best.candidate.recompute,
            operators: operators(step, a, &found.next_bests),
            states: step
                .blocks
                .states
                .iter()
                .enumerate()
                .map(|(class, members)| StateEntry {
                    name: step.graph.state(members[0]).name.clone(),
                    count: members.len(),
                    storage: a.storage(members[0]).show(&a.mesh),
                    next_best: found
                        .next_bests
                        .states
                        .get(class)
                        .and_then(Option::as_ref)
                        .map(|n| NextStorage { storage: n.choice.show(&a.mesh), extra_s: n.extra_s }),
                })
                .collect(),
            inputs: step
                .graph
                .inputs
                .iter()
                .zip(&a.inputs)
                .map(|(x, spec)| InputEntry { name: x.name.clone(), spec: spec.show(&a.mesh) })
                .collect(),
            predicted: predicted(found, cluster, batch),
            search: SearchEntry {
                objective_s: certificate.objective,
                bound_s: certificate.bound,
                gap: certificate.gap(),
                ilp_objective_s: best.ilp_objective_s,
                wall_s,
                candidates: certificate.candidates,
                solved: certificate.solved,
                cut_short: certificate.cut_short,
                seed: request.seed,
                objective: request.objective,
            },
            alternatives: found
                .alternatives
                .iter()
                .map(|x| AlternativeEntry {
                    configuration: x.candidate.show(),
                    step_time_s: x.step_time_s,
                    peak_memory_bytes: x.peak_bytes,
                })
                .collect(),
            notes,
        }
    }

    /// The text of the file.
    ///
    /// # Errors
    /// None in practice: every figure is finite.
    pub fn to_json(&self) -> Result<String, PlanError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Not a plan, or of another version.
    pub fn from_json(text: &str) -> Result<Plan, PlanError> {
        #[derive(Deserialize)]
        struct Head {
            version: u64,
        }
        let head: Head = serde_json::from_str(text)?;
        if head.version != u64::from(VERSION) {
            return Err(PlanError::Version(head.version));
        }
        Ok(serde_json::from_str(text)?)
    }

    /// The JSON Schema of plan files.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Plan).to_value()
    }

    /// The mesh of a stage.
    ///
    /// # Errors
    /// Axes that this program does not know.
    pub fn stage_mesh(&self) -> Result<Mesh, PlanError> {
        let mut axes = Vec::new();
        for a in &self.mesh.axes {
            let name = AxisName::ALL.into_iter().find(|n| n.name() == a.name);
            match name {
                _ if a.size == 0 => return Err(PlanError::Mismatch(format!("mesh axis `{}` has size 0", a.name))),
                None if a.name != "pp" => {
                    return Err(PlanError::Mismatch(format!("unknown mesh axis `{}`", a.name)));
                }
                _ if self.mesh.axes.iter().filter(|other| other.name == a.name).count() > 1 => {
                    return Err(PlanError::Mismatch(format!("mesh axis `{}` occurs twice", a.name)));
                }
                Some(name) if a.size > 1 => axes.push(MeshAxis { name, size: a.size }),
                _ => {}
            }
        }
        Ok(Mesh { axes })
    }

    /// The step graph and the decision for each of its nodes.
    ///
    /// # Errors
    /// A plan of another file, or one that does not fit the graph.
    pub fn resolve(&self, model: &Model) -> Result<(Graph, Assignment), PlanError> {
        if self.model.sha256 != model.sha256() {
            return Err(PlanError::Stale {
                plan: self.model.sha256.clone(),
                model: model.sha256().to_string(),
                path: model.path().display().to_string(),
            });
        }
        let batch = self.workload.global_batch / self.pipeline.micro_batches.max(1);
        let graph = forward_graph(model, &self.workload, batch).map_err(|e| PlanError::Graph(e.to_string()))?;
        self.resolve_graph(&graph)
    }

    /// [`resolve`](Self::resolve) of the file's graph for one micro-batch.
    ///
    /// # Errors
    /// A plan that does not fit the graph.
    pub fn resolve_graph(&self, graph: &Graph) -> Result<(Graph, Assignment), PlanError> {
        let mismatch = |text: String| PlanError::Mismatch(text);
        let p = &self.pipeline;
        if p.stages == 0 || p.cuts.len() != p.stages || !p.cuts.is_sorted() || p.micro_batches == 0 {
            return Err(mismatch("its pipeline is not consistent".into()));
        }
        let mesh = self.stage_mesh()?;
        let ranks = self.mesh.axes.iter().try_fold(1usize, |n, a| n.checked_mul(a.size));
        let stages = self.mesh.axes.iter().find(|a| a.name == "pp").map_or(1, |a| a.size);
        if ranks != Some(self.cluster.gpus) || stages != p.stages {
            return Err(mismatch(format!(
                "its mesh, {} GPUs and {} stages contradict each other",
                self.cluster.gpus, p.stages
            )));
        }
        if let Some(problem) = self.constraints.execution.problem() {
            return Err(mismatch(problem));
        }
        if p.virtual_stages != 1 {
            return Err(mismatch(format!("{} virtual stages cannot be executed", p.virtual_stages)));
        }
        let dp = mesh.data_parallel();
        let batch = p.micro_batches.checked_mul(p.micro_batch_size).and_then(|n| n.checked_mul(dp));
        if batch != Some(self.workload.global_batch) {
            return Err(mismatch(format!(
                "{} micro-batches of {} samples on dp={dp} are no batch of {}",
                p.micro_batches, p.micro_batch_size, self.workload.global_batch
            )));
        }
        let forward = *p.cuts.last().unwrap_or(&0);
        let nodes = self.workload.forward(graph).map_err(|e| PlanError::Graph(e.to_string()))?.nodes.len();
        if forward != nodes {
            return Err(mismatch(format!("{nodes} forward nodes, the plan has {forward}")));
        }
        let stage = |n: usize| StageId(p.cuts.iter().position(|c| n < *c).unwrap_or(0) as u16);
        let stages: Vec<StageId> = if p.stages == 1 { Vec::new() } else { (0..forward).map(stage).collect() };
        let step = self
            .workload
            .step(graph, &stages, p.stages, self.recompute)
            .map_err(|e| PlanError::Graph(e.to_string()))?;
        // A micro-batch of one does not show what couples samples.
        if p.micro_batches > 1
            && p.micro_batch_size * dp > 1
            && let Err(reasons) = micro_batchable(&step.graph)
        {
            let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            return Err(mismatch(format!("it cuts what needs the whole batch: {}", reasons.join("; "))));
        }
        let blocks = &step.blocks;
        let counts = [
            ("operator classes", blocks.nodes.len(), self.operators.len()),
            ("state classes", blocks.states.len(), self.states.len()),
            ("inputs", step.graph.inputs.len(), self.inputs.len()),
        ];
        for (what, found, planned) in counts {
            if found != planned {
                return Err(mismatch(format!("{found} {what}, the plan has {planned}")));
            }
        }
        let mut strategies = Vec::new();
        for (class, (members, entry)) in blocks.nodes.iter().zip(&self.operators).enumerate() {
            let n = step.graph.node(members[0]);
            if n.op.to_string() != entry.op {
                return Err(mismatch(format!("operator {} is planned as {}", n.op, entry.op)));
            }
            let found = members.iter().filter(|m| step.graph.node(**m).section == n.section).count();
            if found != entry.count {
                return Err(mismatch(format!("{} occurs {found} times, in the plan {} times", entry.op, entry.count)));
            }
            strategies.push(
                strategy_of(entry, &of_node(&step.graph, n, &mesh, step.routes.of(class)), &mesh).map_err(mismatch)?,
            );
        }
        let find = |ty, text: &str, what: &str| {
            specs(ty, &mesh)
                .into_iter()
                .find(|s| s.show(&mesh) == text)
                .ok_or_else(|| mismatch(format!("{what} cannot have the spec {text}")))
        };
        let mut storage = Vec::new();
        for (members, entry) in blocks.states.iter().zip(&self.states) {
            let state = step.graph.state(members[0]);
            storage.push(find(step.graph.ty(state.read), &entry.storage, &state.name)?);
        }
        let mut inputs = Vec::new();
        for (x, entry) in step.graph.inputs.iter().zip(&self.inputs) {
            inputs.push(find(step.graph.ty(x.value), &entry.spec, &x.name)?);
        }
        let assignment = Assignment {
            stages: p.stages,
            stage: step.stages.node,
            everywhere: step.stages.everywhere,
            strategy: blocks.node_class.iter().map(|c| strategies[*c as usize].clone()).collect(),
            storage: blocks.state_class.iter().map(|c| storage[*c as usize].clone()).collect(),
            home: step.stages.home,
            inputs,
            schedule: p.schedule,
            micro_batches: p.micro_batches,
            mesh,
        };
        Ok((step.graph, assignment))
    }
}

fn operators(step: &StepGraph, a: &Assignment, next: &NextBests) -> Vec<OperatorEntry> {
    let show = |s: Spec| s.show(&a.mesh);
    step.blocks
        .nodes
        .iter()
        .enumerate()
        .map(|(class, members)| {
            let recomputed = step.blocks.copies(&step.graph, class);
            let (n, strategy) = (step.graph.node(members[0]), a.strategy(members[0]));
            let rule = n.op.factors(&step.graph.input_types(n), &step.graph.output_types(n));
            OperatorEntry {
                op: n.op.to_string(),
                name: n.name.clone(),
                section: match n.section {
                    Section::Forward => "forward",
                    Section::Backward => "backward",
                    Section::Update => "update",
                }
                .into(),
                count: members.len() - recomputed,
                recomputed,
                strategy: print_strategy(strategy, &rule, &a.mesh),
                inputs: (0..n.inputs.len()).map(|i| show(strategy.input_spec(&rule, i))).collect(),
                outputs: (0..n.outputs.len()).map(|i| show(strategy.output_spec(&rule, i))).collect(),
                next_best: next
                    .operators
                    .get(class)
                    .and_then(Option::as_ref)
                    .map(|n| NextStrategy { strategy: print_strategy(&n.choice, &rule, &a.mesh), extra_s: n.extra_s }),
            }
        })
        .collect()
}

/// The name of a factor; with its index where another has the same.
fn factor_name(rule: &FactorRule, f: FactorId) -> String {
    let name = rule.factor(f).name;
    if rule.factors.iter().filter(|g| g.name == name).count() > 1 { format!("{name}#{}", f.0) } else { name.into() }
}

fn print_strategy(s: &Strategy, rule: &FactorRule, mesh: &Mesh) -> BTreeMap<String, String> {
    let text = |u: &Use| match u {
        Use::Replicate => None,
        Use::Split(f) => Some(format!("split {}", factor_name(rule, *f))),
        Use::Linear(set) => Some(format!("linear {set}")),
        Use::Route(_) => Some("route rows to experts".into()),
    };
    let axis = |(a, u): (usize, &Use)| Some((mesh.axis(AxisId(a as u8)).name.name().to_string(), text(u)?));
    s.0.iter().enumerate().filter_map(axis).collect()
}

/// The legal strategy that an entry names.
fn strategy_of(entry: &OperatorEntry, of: &Strategies, mesh: &Mesh) -> Result<Strategy, String> {
    let named = of.list.iter().find(|c| print_strategy(&c.strategy, &of.rule, mesh) == entry.strategy);
    let Some(choice) = named else {
        return Err(format!("operator {} ({}) has no strategy {:?}", entry.op, entry.name, entry.strategy));
    };
    let show = |specs: &[Spec]| specs.iter().map(|s| s.show(mesh)).collect::<Vec<_>>();
    if show(&choice.inputs) != entry.inputs || show(&choice.outputs) != entry.outputs {
        return Err(format!("operator {} ({}) has other specs than its strategy gives", entry.op, entry.name));
    }
    Ok(choice.strategy.clone())
}

fn predicted(found: &Found, cluster: &Cluster, batch: usize) -> Predicted {
    let best = &found.best;
    let (graph, prediction) = (&best.step.graph, &best.prediction);
    let m = best.assignment.micro_batches as f64;
    let mut flops = 0.0;
    let mut dtype = autoshard_ir::DType::F32;
    let blocks = &best.step.blocks;
    for (n, class) in graph.nodes.iter().zip(&blocks.node_class) {
        // Model arithmetic: a copy of a forward node is none.
        if n.section == Section::Backward && graph.node(blocks.nodes[*class as usize][0]).section == Section::Forward {
            continue;
        }
        let work = n.op.work(&graph.input_types(n), &graph.output_types(n));
        flops += work.flops * if n.section == Section::Update { 1.0 } else { m };
        if work.gemm.is_some()
            && let Some(&v) = n.inputs.first()
        {
            dtype = graph.ty(v).dtype;
        }
    }
    // Elements of the first input that has a batch dim and holds indices: tokens.
    let tokens = graph
        .inputs
        .iter()
        .filter(|x| x.batch_dim.is_some() && !graph.ty(x.value).dtype.is_float())
        .map(|x| graph.ty(x.value).numel() as f64 * m)
        .next()
        .unwrap_or(batch as f64);
    let time = prediction.step_time_s.max(f64::MIN_POSITIVE);
    let per_gpu = flops / time / cluster.gpus() as f64;
    let busiest = prediction.stages.iter().min_by(|a, b| a.idle_s.total_cmp(&b.idle_s)).cloned().unwrap_or_default();
    let breakdown = Breakdown {
        compute_s: m * (busiest.forward.compute_s + busiest.backward.compute_s),
        recompute_s: m * busiest.recompute_s,
        communication_s: m * (busiest.forward.communication_s + busiest.backward.communication_s)
            + busiest.update.communication_s,
        bubble_s: busiest.idle_s.max(0.0),
        optimizer_s: busiest.update.compute_s,
    };
    Predicted {
        step_time_s: prediction.step_time_s,
        tokens_per_s: tokens / time,
        tflops_per_gpu: per_gpu / 1e12,
        mfu: per_gpu / cluster.device.peak_for(dtype).0,
        peak_memory_bytes: prediction.stages.iter().map(|s| s.memory.allocated().0).collect(),
        breakdown,
        stages: prediction.stages.clone(),
    }
}
