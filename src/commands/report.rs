//! `report`: writes the page that shows a plan.

use autoshard_codegen::memory::{StageMemory, memory};
use autoshard_codegen::partition::node_specs;
use autoshard_cost_models::{Category, MemoryBreakdown};
use autoshard_planner::simulate::class_seconds;
use autoshard_planner::times::Times;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::loaded::{Loaded, compile};
use crate::{files, report};

/// Runs the command.
pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let output = args.output.clone().unwrap_or_else(|| files::with_suffix(&args.plan, ".html"));
    let loaded = Loaded::open(&args.plan)?;
    let mut read = vec![&*args.plan];
    read.extend(loaded.model.files());
    files::check_output(&output, &read)?;
    let plan = &loaded.plan;
    let (graph, assignment) = loaded.resolve()?;
    let memory = match assignment.only_estimate().is_none() {
        true => memory(&compile(&graph, &assignment)?),
        false => plan.predicted.stages.iter().map(|s| estimated(&s.memory)).collect(),
    };
    let blocks = autoshard_ir::blocks::find(&graph);
    let cluster = plan.cluster.cluster().map_err(Failure::new)?;
    let times = Times::new(&cluster, &assignment.mesh).executing(plan.constraints.execution);
    let seconds = class_seconds(&graph, &blocks, &assignment, &times);
    let specs = node_specs(&graph, &assignment);
    let data = report::data::data(plan, &graph, &assignment, &blocks, &specs, &memory, &seconds);
    files::write(&output, report::page(&data)?.as_bytes())?;
    println!("wrote {}", output.display());
    Ok(())
}

/// Of a plan without programs.
fn estimated(m: &MemoryBreakdown) -> StageMemory {
    StageMemory {
        parameters: m.get(Category::Weights).0,
        optimizer: m.get(Category::Optimizer).0,
        gradients: m.get(Category::Gradients).0,
        constants: 0,
        activations: m.get(Category::Activations).0,
        workspace: m.get(Category::Workspace).0 + m.get(Category::Communication).0,
    }
}
