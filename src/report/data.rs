//! What the page draws, made from a plan, its graph and its compiled programs.

use std::collections::BTreeMap;

use autoshard_codegen::memory::StageMemory;
use autoshard_codegen::partition::NodeSpecs;
use autoshard_codegen::transfer::made;
use autoshard_ir::blocks::Blocks;
use autoshard_ir::{Graph, NodeId};
use autoshard_planner::assignment::Assignment;
use autoshard_planner::constraints::Objective;
use autoshard_planner::formulate::Pace;
use autoshard_planner::plan::{Breakdown, Plan};
use autoshard_planner::request::{Mode, RecomputeChoice};
use autoshard_planner::reshard::reshard;
use autoshard_planner::timeline::{Event, timeline};
use serde::Serialize;

use crate::commands::plan::{bound, recompute, storage, unit};
use crate::show;

/// Everything on the page.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Data {
    pub title: String,
    pub subtitle: String,
    pub verdict: Vec<String>,
    pub workload: Workload,
    pub predicted: Predicted,
    pub search: Search,
    pub memory: Memory,
    pub mesh: Mesh,
    pub timeline: Timeline,
    pub blocks: Vec<Block>,
    pub alternatives: Vec<Alternative>,
    pub notes: Vec<String>,
}

/// Of the workload.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Workload {
    pub mode: Mode,
}

/// Predicted figures.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Predicted {
    pub step_time_s: f64,
    pub per_s: f64,
    /// What `per_s` counts.
    pub unit: &'static str,
    pub tflops_per_gpu: f64,
    pub mfu: f64,
    pub breakdown: Breakdown,
}

/// The certificate.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Search {
    pub bound: String,
    pub gap: f64,
}

/// Memory of all stages.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Memory {
    pub limit_bytes: u64,
    pub compiled: bool,
    pub stages: Vec<Stage>,
}

/// Memory of a rank of one stage.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Stage {
    pub stage: usize,
    pub ranks: String,
    pub total: u64,
    #[serde(flatten)]
    pub by: StageMemory,
}

/// The mesh.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Mesh {
    pub axes: Vec<Axis>,
    pub stages: usize,
    pub ranks_per_stage: usize,
    /// Per stage, what it holds.
    pub holds: Vec<String>,
}

/// An axis.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Axis {
    pub name: String,
    pub size: usize,
}

/// The schedule, drawn.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Timeline {
    pub stages: usize,
    pub end_s: f64,
    pub events: Vec<Event>,
}

/// Operators that occur equally often: those of the repeated blocks, or those outside them.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Block {
    pub title: String,
    pub subtitle: String,
    pub count: usize,
    pub ops: Vec<Operator>,
}

/// A line of the operator table.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Operator {
    pub op: String,
    pub name: String,
    pub section: String,
    pub strategy: String,
    pub next_best: Option<String>,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub collectives: Vec<String>,
    pub time_s: f64,
}

/// Another configuration.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Alternative {
    pub label: String,
    pub time_s: f64,
    pub memory_bytes: u64,
    pub note: String,
}

/// Everything on the page of a plan. `times` gives the seconds of each class of nodes.
pub fn data(
    plan: &Plan,
    graph: &Graph,
    a: &Assignment,
    blocks: &Blocks,
    specs: &[NodeSpecs],
    memory: &[StageMemory],
    times: &[f64],
) -> Data {
    let per = a.mesh.ranks();
    let pace = Pace { micro_batches: a.micro_batches, schedule: a.schedule, chunks: plan.constraints.execution.chunks };
    let events = timeline(&plan.predicted.stages, &pace);
    let end_s = events.iter().map(|e| e.end_s).fold(0.0, f64::max);
    Data {
        title: format!("{} on {} GPUs", name(&plan.model.path), plan.cluster.gpus),
        subtitle: subtitle(plan),
        verdict: verdict(plan),
        workload: Workload { mode: plan.workload.mode },
        predicted: Predicted {
            step_time_s: plan.predicted.step_time_s,
            per_s: plan.predicted.tokens_per_s,
            unit: unit(plan),
            tflops_per_gpu: plan.predicted.tflops_per_gpu,
            mfu: plan.predicted.mfu,
            breakdown: plan.predicted.breakdown.clone(),
        },
        search: Search { bound: bound(plan), gap: plan.search.gap },
        memory: Memory {
            limit_bytes: plan.cluster.memory_limit_bytes,
            compiled: a.only_estimate().is_none(),
            stages: memory
                .iter()
                .enumerate()
                .map(|(s, m)| Stage {
                    stage: s,
                    ranks: if per == 1 { s.to_string() } else { format!("{}–{}", s * per, (s + 1) * per - 1) },
                    total: m.total(),
                    by: *m,
                })
                .collect(),
        },
        mesh: Mesh {
            axes: a.mesh.axes.iter().map(|x| Axis { name: x.name.name().into(), size: x.size }).collect(),
            stages: a.stages,
            ranks_per_stage: per,
            holds: (0..a.stages).map(|s| holds(graph, a, s)).collect(),
        },
        timeline: Timeline { stages: a.stages, end_s, events },
        blocks: groups(plan, graph, a, blocks, specs, times),
        alternatives: alternatives(plan),
        notes: plan.notes.clone(),
    }
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn subtitle(plan: &Plan) -> String {
    let dims: Vec<String> = plan.workload.dims.iter().map(|(n, v)| format!("{n}={v}")).collect();
    format!(
        "{} parameters; {} with batch {}{}{}; cluster {}",
        show::count(plan.model.parameters as f64),
        match plan.workload.mode {
            Mode::Train => "training",
            Mode::Infer => "inference",
        },
        plan.workload.global_batch,
        if dims.is_empty() { "" } else { ", " },
        dims.join(", "),
        plan.cluster.name
    )
}

fn verdict(plan: &Plan) -> Vec<String> {
    let size = |n: &str| plan.mesh.axes.iter().find(|a| a.name == n).map_or(1, |a| a.size);
    let mut parts = Vec::new();
    for (axis, what) in [("dp", "data"), ("ep", "expert"), ("cp", "context"), ("tp", "tensor"), ("pp", "pipeline")] {
        // Ranks along `ep` have other samples too.
        let ranks = if axis == "dp" { size("dp") * size("ep") } else { size(axis) };
        if ranks > 1 {
            parts.push(format!("{what} parallelism over {ranks}"));
        }
    }
    let split = if parts.is_empty() { "Nothing is split".to_string() } else { format!("Use {}", parts.join(", ")) };
    let p = &plan.pipeline;
    let batches = format!(
        "{} micro-batch{} of {} per data-parallel rank",
        p.micro_batches,
        if p.micro_batches == 1 { "" } else { "es" },
        p.micro_batch_size
    );
    let gap = plan.search.gap;
    let proof = if gap <= 1e-9 {
        "No plan of the searched space is better under the cost model.".to_string()
    } else {
        format!("No plan of the searched space can be better by more than {} under the cost model.", show::percent(gap))
    };
    let mut lines = vec![format!("{split}, {batches}; {}.", storage(plan))];
    if plan.recompute != RecomputeChoice::None {
        lines.push(format!("Recomputation is {}.", recompute(plan)));
    }
    lines.push(proof);
    lines
}

/// Parameters that a stage keeps.
fn holds(graph: &Graph, a: &Assignment, stage: usize) -> String {
    let kept = graph
        .states
        .iter()
        .zip(&a.home)
        .filter(|(s, h)| h.0 as usize == stage && s.kind == autoshard_ir::graph::StateKind::Parameter);
    let (tensors, elements) = kept.fold((0, 0.0), |(n, e), (s, _)| (n + 1, e + graph.ty(s.read).numel() as f64));
    format!("{} parameters in {tensors} tensors", show::count(elements))
}

fn alternatives(plan: &Plan) -> Vec<Alternative> {
    let mesh: Vec<String> = plan.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    let p = &plan.pipeline;
    let chosen = Alternative {
        label: format!(
            "{}, {} micro-batch{}{}",
            mesh.join(" "),
            p.micro_batches,
            if p.micro_batches == 1 { "" } else { "es" },
            match plan.recompute {
                RecomputeChoice::None => String::new(),
                some => format!(", recompute {}", some.name()),
            }
        ),
        time_s: plan.predicted.step_time_s,
        memory_bytes: plan.predicted.peak_memory_bytes.iter().max().copied().unwrap_or(0),
        note: "the plan".into(),
    };
    let (time, memory) = (chosen.time_s, chosen.memory_bytes);
    let others = plan.alternatives.iter().map(|x| {
        let (slower, more) = (x.step_time_s > time, x.peak_memory_bytes > memory);
        let note = match plan.search.objective {
            Objective::StepTime if slower => "slower",
            Objective::Memory if !more && slower => "slower",
            _ if more => "more memory",
            _ => "as good",
        };
        Alternative {
            label: x.configuration.clone(),
            time_s: x.step_time_s,
            memory_bytes: x.peak_memory_bytes,
            note: note.into(),
        }
    });
    std::iter::once(chosen).chain(others).collect()
}

/// Classes grouped by how often they occur, the most frequent first.
fn groups(
    plan: &Plan,
    graph: &Graph,
    a: &Assignment,
    blocks: &Blocks,
    specs: &[NodeSpecs],
    times: &[f64],
) -> Vec<Block> {
    let mut by_count: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (class, members) in blocks.nodes.iter().enumerate() {
        by_count.entry(members.len() - blocks.copies(graph, class)).or_default().push(class);
    }
    let mut groups: Vec<Block> = by_count
        .into_iter()
        .map(|(count, classes)| Block {
            title: if count == 1 { "Outside the repeated blocks".into() } else { format!("Repeated {count} times") },
            subtitle: format!("{} operators", classes.len()),
            count,
            ops: classes.into_iter().map(|c| operator(plan, graph, a, specs, blocks.nodes[c][0], c, times)).collect(),
        })
        .collect();
    groups.sort_by_key(|b| std::cmp::Reverse(b.count));
    groups
}

fn operator(
    plan: &Plan,
    graph: &Graph,
    a: &Assignment,
    specs: &[NodeSpecs],
    first: NodeId,
    class: usize,
    times: &[f64],
) -> Operator {
    let (n, entry) = (graph.node(first), &plan.operators[class]);
    Operator {
        op: n.op.to_string(),
        name: if n.scope.is_empty() { n.name.clone() } else { n.scope.clone() },
        section: entry.section.clone(),
        strategy: show::strategy(&entry.strategy),
        next_best: entry.next_best.as_ref().map(|n| {
            format!("{}: {}", show::strategy(&n.strategy), show::extra(n.extra_s, plan.predicted.step_time_s))
        }),
        inputs: entry.inputs.clone(),
        outputs: entry.outputs.clone(),
        collectives: collectives(graph, a, specs, first),
        time_s: times.get(class).copied().unwrap_or(0.0),
    }
}

/// What it takes to bring a node's operands from where they are made into the specs it wants.
fn collectives(graph: &Graph, a: &Assignment, specs: &[NodeSpecs], id: NodeId) -> Vec<String> {
    let mut lines = Vec::new();
    for (i, (&v, want)) in graph.node(id).inputs.iter().zip(&specs[id.index()].inputs).enumerate() {
        let Some(from) = made(graph, a, specs, v) else { continue };
        let Ok(steps) = reshard(&from, want, graph.ty(v), &a.mesh) else { continue };
        for step in steps.iter().filter(|s| s.kind.communicates()) {
            let axes: Vec<&str> = step.kind.axes().iter().map(|x| a.mesh.axis(*x).name.name()).collect();
            lines.push(format!("{} over {} of operand {i}", step.kind.name(), axes.join("+")));
        }
    }
    lines
}
