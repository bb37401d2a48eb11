//! Strategy selection: one strategy per node, least cost of nodes and edges, usage of every row within its limit.
//!
//! This module knows nothing of operators, meshes or devices. [`Problem`] is the model, [`solve`] the one entry point.
//!
//! How it works, in the order of the files:
//!
//! 1. `problem`: costs become integers (a stated quantum), so sums are exact and "no choice costs less" means just that.
//! 2. `graph`, `reduce`, `rows`: exact reductions to a fixed point, or until the clock stops them; every rewriting can be undone for a
//!    choice.
//! 3. `dual`: rows are priced, costs move between edges and nodes until independent minima sum to a high bound. The bound is repeated in
//!    integers, and whatever only choices above the best known cost could use is forbidden, which lets reductions go on.
//! 4. `exact`: branch and bound out of 2 and 3. It solves small components, and neighbourhoods of large ones.
//! 5. `search`: exchanges of one node. `dive`: nodes fixed a share at a time while multipliers follow. `neighbourhood`: some nodes of a
//!    choice choose anew, where the choice pays most above the bound. `threads`: tasks side by side, results in order.
//! 6. `ilp`: HiGHS, for what is of medium size after all that.
//! 7. `drive`: which of these is used when. `conflict`: what is in the way when nothing is feasible.
//!
//! Work, not time, decides how long each part runs, so a result does not depend on the machine or its threads unless a limit of
//! time is hit. A warm start is both a choice to improve and a cost that is of no further interest.
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
//! // How the bound comes about: at a price of 1/4 per unit (over 10) the row takes 2.5 from every choice and adds 2 or 1 to the
//! // strategies. Then a pair costs (3 or 4) + (3 or 3) + (0 or 5), and no less than 6 - 2.5: choices cost at least 3.5, and since
//! // (0, 0) is excluded by the row and (0, 1), (1, 0) pay 5 for the edge, branching on the first node proves 5.
//!
//! // When nothing fits, what is in each other's way is named: with the first strategy fixed, 8 + 4 is still more than 10.
//! p.fix(a, 0);
//! let error = solve(&p, &Options::default()).unwrap_err();
//! assert_eq!(error.to_string(), "no choice satisfies rows [0], nodes [0] together");
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
