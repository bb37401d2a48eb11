//! Strategy selection: one strategy per node, least cost of nodes and edges, usage of every row within its limit.
//!
//! This module knows nothing of operators, meshes or devices. [`Problem`] is the model, [`solve`] the one entry point.
//!
//! How it works, in the order of the files:
//!
//! 1. `problem`: costs become integers (a stated quantum), so sums are exact and "no choice costs less" means just that.
//! 2. `graph`, `reduce`, `rows`: exact reductions to a fixed point; every rewriting can be undone for a choice.
//! 3. `dual`: rows are priced, costs move between edges and nodes until independent minima sum to a high bound. The bound is repeated in
//!    integers, and whatever only choices above the best known cost could use is forbidden, which lets reductions go on.
//! 4. `exact`: branch and bound out of 2 and 3. `search`: local search, neighbourhoods solved by `exact`. `ilp`: HiGHS.
//! 5. `drive`: which of these is used when. `conflict`: what is in the way when nothing is feasible.
//!
//! The example: the cheapest strategies of both nodes together use 16 of 10. One must give way, and since unequal strategies cost
//! 5 for resharding, both do.
//!
//! ```
//! use autoshard_planner::solver::{Options, Problem, solve};
//!
//! // Two nodes; equal strategies need no resharding, the cheap pair (0, 0) does not fit.
//! let mut p = Problem::seconds();
//! let a = p.add_node([1.0, 3.0]);
//! let b = p.add_node([1.0, 2.0]);
//! p.add_edge(a, b, |i, j| if i == j { 0.0 } else { 5.0 });
//! let memory = p.add_row(10);
//! p.add_usage(a, memory..memory + 1, [8, 4]);
//! p.add_usage(b, memory..memory + 1, [8, 4]);
//! let solution = solve(&p, &Options::default()).unwrap();
//! assert_eq!(solution.choice, [1, 1]);
//! assert_eq!(p.value(solution.objective), 5.0);
//! assert_eq!(solution.bound, solution.objective);
//! ```

mod conflict;
pub mod contest;
mod dive;
mod drive;
mod dual;
mod exact;
mod graph;
mod ilp;
mod neighbourhood;
mod problem;
mod random;
mod reduce;
#[cfg(test)]
mod reference;
mod result;
mod rows;
mod search;
#[cfg(test)]
mod tests;
mod threads;

pub use problem::{Cost, Edge, FORBIDDEN, MalformedProblem, Matrix, Node, Problem, Total, Usage};
pub use result::{Conflict, Method, Options, Phase, Reductions, Solution, SolveError, Statistics};

/// Finds a choice of least cost, with a proven lower bound on the cost of any choice.
///
/// Errors: see [`SolveError`].
pub fn solve(problem: &Problem, options: &Options) -> Result<Solution, SolveError> {
    problem.check()?;
    drive::solve(problem, options)
}
