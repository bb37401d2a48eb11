//! `report`: writes the page that shows a plan.

use autoshard_planner::times::Times;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::loaded::{Loaded, compile};
use crate::{files, report};

/// Runs the command.
pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let output = args.output.clone().unwrap_or_else(|| files::with_suffix(&args.plan, ".html"));
    let loaded = Loaded::open(&args.plan)?;
    files::check_output(&output, &[&args.plan, loaded.model.path()])?;
    let plan = &loaded.plan;
    let (graph, assignment) = loaded.resolve()?;
    let job = compile(&graph, &assignment)?;
    let memory = autoshard_codegen::memory::memory(&job);
    let blocks = autoshard_ir::blocks::find(&graph);
    let cluster = plan.cluster.cluster().map_err(Failure::new)?;
    let times = Times::new(&cluster, &assignment.mesh);
    let seconds: Vec<f64> = blocks
        .nodes
        .iter()
        .map(|members| {
            let n = graph.node(members[0]);
            let (ins, outs) = (graph.input_types(n), graph.output_types(n));
            let rule = n.op.factors(&ins, &outs);
            let strategy = assignment.strategy(members[0]);
            let local = |types: &[autoshard_ir::Type], spec: &dyn Fn(usize) -> autoshard_planner::spec::Spec| {
                types
                    .iter()
                    .enumerate()
                    .map(|(i, t)| spec(i).local(t, &assignment.mesh).unwrap_or_else(|| t.clone()))
                    .collect::<Vec<_>>()
            };
            let ins = local(&ins, &|i| strategy.input_spec(&rule, i));
            let outs = local(&outs, &|i| strategy.output_spec(&rule, i));
            times.compute(&n.op, &ins, &outs)
        })
        .collect();
    let data = report::data::data(plan, &graph, &assignment, &blocks, &memory, &seconds);
    files::write(&output, report::page(&data)?.as_bytes())?;
    println!("wrote {}", output.display());
    Ok(())
}
