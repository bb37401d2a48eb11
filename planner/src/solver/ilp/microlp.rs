//! microlp: a solver in Rust alone, to compare with. Floating point; its bound is proven only where it says that it found an
//! optimum, and is lowered by its tolerance.

use super::super::problem::Total;
use super::super::result::SolveError;
use super::Relaxed;
use super::program::{Program, chosen};
use good_lp::solvers::{SolutionStatus, WithTimeLimit};
use good_lp::{ResolutionError, Solution, SolverModel};

/// Its tolerance, in units of the scaled objective, per node and edge.
const TOLERANCE: f64 = 1e-7;

/// Solves a program. `None` says that it has no solution.
pub(super) fn relax(program: Program<'_>, seconds: f64) -> Result<Option<Relaxed>, SolveError> {
    let Program { problem, vars, objective, rows, hot, constant, scale, .. } = program;
    let costs = objective.clone();
    let mut model = vars.minimise(objective).using(good_lp::microlp).with_time_limit(seconds);
    Program::add(rows, &mut model);
    let solution = match model.solve() {
        Ok(solution) => solution,
        Err(ResolutionError::Infeasible) => return Ok(None),
        // No choice before the time was up: nothing is known.
        Err(ResolutionError::Other(_)) => return Ok(Some(Relaxed { choice: None, bound: constant })),
        Err(e) => return Err(SolveError::Backend(e.to_string())),
    };
    let margin = TOLERANCE * (problem.nodes.len() + problem.edges.len()) as f64;
    let low = match solution.status() {
        SolutionStatus::Optimal => ((solution.eval(&costs) - margin).max(0.0) / scale).min(2f64.powi(62)),
        _ => 0.0,
    };
    let choice = chosen(problem, &hot, &mut |var| solution.value(var));
    Ok(Some(Relaxed { choice, bound: constant + low.ceil() as Total }))
}
