//! `check`: a plan against its model and cluster, without a device.

use autoshard_planner::simulate::simulate;
use autoshard_planner::times::Times;
use autoshard_runtime::program::List;

use crate::args::CheckArgs;
use crate::failure::Failure;
use crate::loaded::{Loaded, compile, micro_batchable};
use crate::show;

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let loaded = Loaded::open(&args.plan)?;
    let (graph, assignment) = loaded.resolve()?;
    let mut problems = Vec::new();
    if let Err(found) = autoshard_ir::verify::verify(&graph) {
        problems.extend(found.iter().map(|v| format!("graph: {v}")));
    }
    let plan = &loaded.plan;
    if plan.pipeline.micro_batches > 1
        && let Err(why) = micro_batchable(&loaded.model, &plan.workload)
    {
        problems.push(format!("the step cannot be cut into micro-batches: {why}"));
    }
    // Of what can only be estimated there are no programs.
    let job = match assignment.only_estimate() {
        None => Some(compile(&graph, &assignment)?),
        Some(_) => None,
    };
    let cluster = plan.cluster.cluster().map_err(Failure::new)?;
    if cluster.usable_memory().0 < plan.cluster.memory_limit_bytes {
        problems.push(format!(
            "cluster {}: a GPU has {} to use, the plan counts on {}",
            cluster.name,
            cluster.usable_memory(),
            show::bytes(plan.cluster.memory_limit_bytes)
        ));
    }
    let blocks = autoshard_ir::blocks::find(&graph);
    let mut times = Times::new(&cluster, &assignment.mesh).executing(plan.constraints.execution);
    let prediction = simulate(&graph, &blocks, &assignment, &mut times);
    let time = prediction.step_time_s;
    if (time - plan.predicted.step_time_s).abs() > 1e-6 * time {
        problems.push(format!(
            "a step is predicted to take {}, the plan says {}",
            show::seconds(time),
            show::seconds(plan.predicted.step_time_s)
        ));
    }
    let (what, peaks): (_, Vec<u64>) = match &job {
        Some(job) => ("the arena", autoshard_codegen::memory::memory(job).iter().map(|m| m.total()).collect()),
        None => ("a rank", prediction.stages.iter().map(|s| s.memory.allocated().0).collect()),
    };
    let planned = &plan.predicted.peak_memory_bytes;
    if planned.len() != peaks.len() {
        problems.push(format!("{} stages, the plan has the memory of {}", peaks.len(), planned.len()));
    }
    for (s, (peak, planned)) in peaks.iter().zip(planned).enumerate() {
        if peak != planned {
            problems.push(format!(
                "stage {s}: {what} takes {}, the plan says {}",
                show::bytes(*peak),
                show::bytes(*planned)
            ));
        }
        if *peak > plan.cluster.memory_limit_bytes {
            problems.push(format!(
                "stage {s}: {what} takes {}, the limit is {}",
                show::bytes(*peak),
                show::bytes(plan.cluster.memory_limit_bytes)
            ));
        }
    }
    if !problems.is_empty() {
        return Err(Failure::new(format!("{} is not sound:\n  {}", args.plan.display(), problems.join("\n  ")))
            .help("make the plan anew"));
    }
    let (path, nodes, stages) = (args.plan.display(), graph.nodes.len(), assignment.stages);
    let ranks = stages * assignment.mesh.ranks();
    match job {
        Some(job) => {
            let instructions: usize = job.stages.iter().flat_map(|p| List::ALL.map(|l| p.list(l).len())).sum();
            println!(
                "{path}: sound. {nodes} nodes on {ranks} ranks in {stages} stages; {instructions} instructions; graph, plan and programs verified"
            );
        }
        None => println!(
            "{path}: sound, but an estimate: {}. {nodes} nodes on {ranks} ranks in {stages} stages; graph and plan verified",
            assignment.only_estimate().unwrap_or_default()
        ),
    }
    Ok(())
}
