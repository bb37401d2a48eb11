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
    let job = compile(&graph, &assignment)?;
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
    let time = simulate(&graph, &blocks, &assignment, &mut times).step_time_s;
    if (time - plan.predicted.step_time_s).abs() > 1e-6 * time {
        problems.push(format!(
            "a step is predicted to take {}, the plan says {}",
            show::seconds(time),
            show::seconds(plan.predicted.step_time_s)
        ));
    }
    if plan.predicted.peak_memory_bytes.len() != job.stages.len() {
        problems.push(format!(
            "{} stages, the plan has the memory of {}",
            job.stages.len(),
            plan.predicted.peak_memory_bytes.len()
        ));
    }
    for (s, (m, planned)) in
        autoshard_codegen::memory::memory(&job).iter().zip(&plan.predicted.peak_memory_bytes).enumerate()
    {
        if m.total() != *planned {
            problems.push(format!(
                "stage {s}: the arena takes {}, the plan says {}",
                show::bytes(m.total()),
                show::bytes(*planned)
            ));
        }
        if m.total() > plan.cluster.memory_limit_bytes {
            problems.push(format!(
                "stage {s}: the arena takes {}, the limit is {}",
                show::bytes(m.total()),
                show::bytes(plan.cluster.memory_limit_bytes)
            ));
        }
    }
    if !problems.is_empty() {
        return Err(Failure::new(format!("{} is not sound:\n  {}", args.plan.display(), problems.join("\n  ")))
            .help("make the plan anew"));
    }
    let instructions: usize = job.stages.iter().flat_map(|p| List::ALL.map(|l| p.list(l).len())).sum();
    println!(
        "{}: sound. {} nodes on {} ranks in {} stages; {} instructions; graph, plan and programs verified",
        args.plan.display(),
        graph.nodes.len(),
        job.ranks.len(),
        job.stages.len(),
        instructions
    );
    Ok(())
}
