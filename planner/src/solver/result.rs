//! Options of the solver and what it returns.

use super::problem::{MalformedProblem, Total};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Which exact reductions are applied before the search. All of them, unless a test or a benchmark says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reductions {
    /// Strategies without a finite partner, or that overflow a row whatever the others choose, are dropped.
    pub consistency: bool,
    /// Strategies that another one beats in cost and usage are dropped; of equal ones the first is kept.
    pub domination: bool,
    /// A node whose choice follows from a neighbour's is merged into it.
    pub contraction: bool,
    /// Row and column minima move from edges to nodes; edges left without cost are dropped.
    pub separation: bool,
    /// Nodes with no, one or two neighbours and without usage are eliminated.
    pub elimination: bool,
    /// Usage common to all strategies is taken off the limits; rows implied by others are dropped.
    pub rows: bool,
    /// Independent parts are solved apart.
    pub components: bool,
}

impl Reductions {
    /// All reductions.
    pub const ALL: Reductions = Reductions::from_bits(0x7f);
    /// No reduction.
    pub const NONE: Reductions = Reductions::from_bits(0);

    /// The subset of a bit mask, in the order of the fields; used to test all subsets.
    pub const fn from_bits(bits: u32) -> Reductions {
        Reductions {
            consistency: bits & 1 != 0,
            domination: bits & 2 != 0,
            contraction: bits & 4 != 0,
            separation: bits & 8 != 0,
            elimination: bits & 16 != 0,
            rows: bits & 32 != 0,
            components: bits & 64 != 0,
        }
    }
}

/// What may be used after the reductions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Branch and bound with dual bounds where small, then HiGHS, neighbourhood search where too large for both.
    #[default]
    Auto,
    /// Everything but HiGHS.
    WithoutIlp,
    /// HiGHS alone. Its bound is lowered by its tolerances, so it can stay below an optimum.
    Ilp,
    /// microlp alone, to compare with: exact only up to its tolerances, and slow.
    #[cfg(feature = "microlp")]
    Microlp,
}

impl Method {
    /// Whether a solver of integer programs does everything.
    pub(crate) fn is_program(self) -> bool {
        match self {
            Method::Auto | Method::WithoutIlp => false,
            Method::Ilp => true,
            #[cfg(feature = "microlp")]
            Method::Microlp => true,
        }
    }
}

/// How to solve.
#[derive(Clone, Debug)]
pub struct Options {
    /// Wall-clock limit; the best choice found so far is returned with its true gap.
    pub time_limit: Duration,
    /// Stop when (objective - bound) is at most this fraction of the objective. 0 asks for a proven optimum.
    pub relative_gap: f64,
    /// Choices that cost this much or more, in quanta, are of no interest: the search may stop with [`SolveError::CutOff`].
    pub cutoff: Option<Total>,
    /// Seed of the randomised searches.
    pub seed: u64,
    /// Threads to use. The result does not depend on it, unless a limit of time is hit.
    pub threads: usize,
    /// Set by another thread (Ctrl-C) to stop as if time had run out.
    pub interrupt: Option<Arc<AtomicBool>>,
    /// Whether to look for the smallest conflict when no choice is feasible; else the error names none.
    pub explain: bool,
    /// Exact reductions to apply.
    pub reductions: Reductions,
    /// What to use after them.
    pub method: Method,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            time_limit: Duration::from_secs(60),
            relative_gap: 0.0,
            cutoff: None,
            seed: 0,
            threads: 1,
            interrupt: None,
            explain: true,
            reductions: Reductions::ALL,
            method: Method::Auto,
        }
    }
}

impl Options {
    /// Whether another thread asked to stop.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// Part of a solve, for its timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Exact reductions.
    Reduce,
    /// Dual bounds: reparametrisation and multipliers of the rows.
    Bound,
    /// Heuristic choices and local search.
    Search,
    /// Exact dynamic programming or branch and bound.
    Exact,
    /// HiGHS.
    Ilp,
}

/// What happened during a solve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Seconds spent per phase, in order of first use.
    pub seconds: Vec<(Phase, f64)>,
    /// What was removed, by name of the reduction.
    pub removed: Vec<(&'static str, u64)>,
    /// Nodes left after reduction.
    pub core_nodes: usize,
    /// Strategies left after reduction, over all nodes.
    pub core_strategies: usize,
    /// Edges left after reduction.
    pub core_edges: usize,
    /// Calls of HiGHS.
    pub ilp_calls: usize,
    /// Branch-and-bound nodes, of HiGHS and of the search here.
    pub branches: u64,
}

impl Statistics {
    /// Adds time to a phase.
    pub(crate) fn spend(&mut self, phase: Phase, seconds: f64) {
        match self.seconds.iter_mut().find(|(p, _)| *p == phase) {
            Some((_, s)) => *s += seconds,
            None => self.seconds.push((phase, seconds)),
        }
    }
}

/// A choice and what is proven about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Strategy per node.
    pub choice: Vec<usize>,
    /// Its cost, in quanta.
    pub objective: Total,
    /// No choice costs less than this, in quanta. Equal to the objective where optimality is proven.
    pub bound: Total,
    /// Times and counts.
    pub statistics: Statistics,
}

impl Solution {
    /// Whether the choice is proven to be of least cost.
    pub fn optimal(&self) -> bool {
        self.bound >= self.objective
    }

    /// (objective - bound) / |objective|, 0 for an optimum.
    pub fn gap(&self) -> f64 {
        if self.optimal() { 0.0 } else { (self.objective - self.bound) as f64 / (self.objective.abs() as f64).max(1.0) }
    }
}

/// Constraints that cannot hold together; dropping any one of them leaves a set that can, and no other conflict has fewer
/// members, as far as proven. Empty where it was not asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conflict {
    /// Rows whose limits take part.
    pub rows: Vec<usize>,
    /// Edges whose forbidden pairs take part.
    pub edges: Vec<usize>,
    /// Nodes whose fixed choice or forbidden strategies take part.
    pub nodes: Vec<usize>,
    /// Groups whose equality takes part.
    pub groups: Vec<usize>,
    /// Whether the set is proven irreducible. If time ran out, it conflicts but may be larger than needed.
    pub irreducible: bool,
    /// Whether it is proven that no conflict has fewer members.
    pub smallest: bool,
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = [("rows", &self.rows), ("edges", &self.edges), ("nodes", &self.nodes), ("groups", &self.groups)];
        if parts.iter().all(|(_, v)| v.is_empty()) {
            return f.write_str("all constraints");
        }
        let parts: Vec<String> =
            parts.iter().filter(|(_, v)| !v.is_empty()).map(|(name, v)| format!("{name} {v:?}")).collect();
        f.write_str(&parts.join(", "))
    }
}

/// Why there is no solution.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SolveError {
    /// The problem breaks an invariant.
    #[error(transparent)]
    Malformed(#[from] MalformedProblem),
    /// No choice satisfies these constraints together.
    #[error("no choice satisfies {0} together")]
    Infeasible(Conflict),
    /// No choice costs less than the cut-off.
    #[error("no choice costs less than the cut-off; the bound is {bound} quanta")]
    CutOff {
        /// Proven lower bound on the cost of any choice.
        bound: Total,
    },
    /// Time ran out before any feasible choice was found.
    #[error("no feasible choice found within the limit of time; the bound is {bound} quanta")]
    NoChoice {
        /// Proven lower bound on the cost of any choice.
        bound: Total,
    },
    /// A solver of integer programs failed.
    #[error("the solver of integer programs failed: {0}")]
    Backend(String),
}
