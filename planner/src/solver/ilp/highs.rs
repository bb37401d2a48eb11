//! HiGHS.
//!
//! It computes in floating point. Every reduced cost of the LP is right within its tolerance, and the values of one node's
//! (or one edge's) columns sum to one, so a bound is lowered by the tolerance times the number of nodes and edges before it
//! is called proven.

use super::super::problem::Total;
use super::super::result::{Options, SolveError, Statistics};
use super::Relaxed;
use super::program::Program;
use highs::{HighsModelStatus, HighsSolutionStatus};

/// Its tolerance on reduced costs, in units of the scaled objective.
const DUAL_TOLERANCE: f64 = 1e-7;

/// Solves a program. `None` says that it has no solution.
pub(super) fn relax(
    program: Program<'_>,
    options: &Options,
    seconds: f64,
    statistics: &mut Statistics,
) -> Result<Option<Relaxed>, SolveError> {
    let Program { problem, vars, objective, rows, hot, constant, scale, start } = program;
    let mut model = vars.minimise(objective).using(good_lp::highs);
    Program::add(rows, &mut model);
    // good_lp's own `solve` keeps the bound to itself, so the model is run here.
    let mut inner = model.try_into_inner().map_err(|e| SolveError::Backend(e.to_string()))?;
    inner.make_quiet();
    inner.set_option("time_limit", seconds);
    inner.set_option("threads", options.threads.max(1) as i32);
    inner.set_option("random_seed", (options.seed & 0x7fff_ffff) as i32);
    inner.set_option("mip_rel_gap", options.relative_gap.max(0.0));
    inner.set_option("mip_abs_gap", 1e-9);
    inner.set_option("dual_feasibility_tolerance", DUAL_TOLERANCE);
    if let Some(values) = &start {
        inner.set_solution(Some(values), None, None, None);
    }
    let solved = inner.try_solve().map_err(|e| SolveError::Backend(format!("{e:?}")))?;
    let info = |name: &std::ffi::CStr| solved.double_info_value(name).unwrap_or(f64::NEG_INFINITY);
    statistics.branches += solved.int_info_value(c"mip_node_count").unwrap_or(0).max(0) as u64;
    match solved.status() {
        HighsModelStatus::Infeasible | HighsModelStatus::UnboundedOrInfeasible => return Ok(None),
        HighsModelStatus::Optimal
        | HighsModelStatus::ReachedTimeLimit
        | HighsModelStatus::ReachedInterrupt
        | HighsModelStatus::ReachedIterationLimit
        | HighsModelStatus::ReachedSolutionLimit => {}
        other => return Err(SolveError::Backend(format!("status {other:?}"))),
    }
    // Costs are at least 0 in the program, so 0 is a bound too.
    let margin = DUAL_TOLERANCE * (problem.nodes.len() + problem.edges.len()) as f64;
    let low = ((info(c"mip_dual_bound") - margin).max(0.0) / scale).min(2f64.powi(62));
    let values = solved.get_solution();
    let mut columns = values.columns().iter();
    // Variables of nodes come first.
    let mut value = |_| columns.next().copied().unwrap_or(0.0);
    let choice = (solved.primal_solution_status() == HighsSolutionStatus::Feasible)
        .then(|| super::program::chosen(problem, &hot, &mut value))
        .flatten();
    Ok(Some(Relaxed { choice, bound: constant + low.ceil() as Total }))
}
