//! Compiles a plan: graph and assignment in, one program per pipeline stage out.
//!
//! [`compile`] runs: the specs of every node ([`partition::node_specs`]), what crosses stages ([`transfer`]), the lists of each stage
//! ([`partition`]), the schedule ([`schedule`]), what shares memory ([`views`]), places in memory ([`layout`], [`assemble`]).
//! What it gives passes the runtime's verifier; the caller runs that ([`autoshard_runtime::verify`]).

pub mod assemble;
pub mod error;
pub mod layout;
pub mod memory;
pub mod partition;
pub mod schedule;
pub mod transfer;
pub mod views;

use autoshard_ir::{Graph, Section};
use autoshard_planner::assignment::{Assignment, StageId};
use autoshard_runtime::program::{Job, Port, Rank};

pub use error::CompileError;

/// Compiles a graph under an assignment.
///
/// # Errors
/// The assignment does not fit the graph; an output that needs the whole batch, which is cut; a plan that can only be estimated.
pub fn compile(graph: &Graph, a: &Assignment) -> Result<Job, CompileError> {
    let counts = [
        ("node stages", a.stage.len(), graph.nodes.len()),
        ("node strategies", a.strategy.len(), graph.nodes.len()),
        ("node flags", a.everywhere.len(), graph.nodes.len()),
        ("storage specs", a.storage.len(), graph.states.len()),
        ("state homes", a.home.len(), graph.states.len()),
        ("input specs", a.inputs.len(), graph.inputs.len()),
    ];
    if let Some(&(what, got, want)) = counts.iter().find(|(_, got, want)| got != want) {
        return Err(CompileError::Shape { what, got, want });
    }
    if let Some(output) = needs_whole_batch(graph).filter(|_| a.micro_batches > 1) {
        return Err(CompileError::NeedsWholeBatch { output, micro_batches: a.micro_batches });
    }
    if let Some(reason) = a.only_estimate() {
        return Err(CompileError::OnlyEstimate(reason));
    }
    let specs = partition::node_specs(graph, a);
    let transfers = transfer::transfers(graph, a, &specs)?;
    let backward = graph.nodes.iter().any(|n| n.section == Section::Backward);
    let mut stages = Vec::with_capacity(a.stages);
    for s in 0..a.stages {
        let stage = partition::stage(graph, a, StageId(s as u16), &specs, &transfers)?;
        let (slots, frames) = schedule::slots(a.schedule, s, a.stages, a.micro_batches, backward);
        stages.push(assemble::program(stage, slots, frames, a.micro_batches));
    }
    let port = |name: &String, value, batch_dim| Port { name: name.clone(), ty: graph.ty(value).clone(), batch_dim };
    Ok(Job {
        axes: a.mesh.axes.iter().map(|x| (x.name.name().to_string(), x.size)).collect(),
        stages,
        micro_batches: a.micro_batches,
        inputs: graph.inputs.iter().map(|i| port(&i.name, i.value, i.batch_dim)).collect(),
        outputs: graph.outputs.iter().map(|o| port(&o.name, o.value, o.batch_dim)).collect(),
        ranks: (0..(a.stages * a.mesh.ranks()) as u32).map(Rank).collect(),
    })
}

/// An output of the forward pass that depends on the batch and has no dim along which micro-batches could be joined.
fn needs_whole_batch(graph: &Graph) -> Option<String> {
    let mut depends = vec![false; graph.values.len()];
    for x in graph.inputs.iter().filter(|x| x.batch_dim.is_some()) {
        depends[x.value.index()] = true;
    }
    for n in graph.nodes.iter().filter(|n| n.section == Section::Forward) {
        if n.inputs.iter().any(|v| depends[v.index()]) {
            n.outputs.iter().for_each(|v| depends[v.index()] = true);
        }
    }
    graph.outputs.iter().find(|o| o.batch_dim.is_none() && depends[o.value.index()]).map(|o| o.name.clone())
}
