//! What a search gives: the plan with its certificate and alternatives, or why there is none.

use std::rc::Rc;

use autoshard_cost_models::{Bytes, Category, MemoryBreakdown};

use super::candidates::Candidate;
use super::next_best::NextBests;
use crate::assignment::Assignment;
use crate::request::StepGraph;
use crate::simulate::Prediction;

/// A solved candidate.
pub struct Solved {
    /// Which.
    pub candidate: Candidate,
    /// The step graph.
    pub step: Rc<StepGraph>,
    /// The decision.
    pub assignment: Assignment,
    /// What it takes.
    pub prediction: Prediction,
    /// Objective of the ILP, seconds or bytes; where no optimum within the limits was found, the simulated seconds.
    pub ilp_objective_s: f64,
    /// The ILP's solution, where the plan is one.
    pub solution: Option<Chosen>,
    /// Constraints that could not be kept to the letter.
    pub notes: Vec<String>,
}

/// A solution of the ILP of step time.
pub struct Chosen {
    /// Its rows' limits, bytes per stage.
    pub limits: Vec<u64>,
    /// By variable.
    pub choice: Vec<usize>,
}

/// The best of a mesh that is not the best of all.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// Which.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Bytes on the fullest rank.
    pub peak_bytes: u64,
}

/// What is proven.
#[derive(Debug, Clone, PartialEq)]
pub struct Certificate {
    /// Simulated seconds of the plan (bytes, for least memory).
    pub objective: f64,
    /// No plan of the searched space takes less.
    pub bound: f64,
    /// Candidates in the space, and how many were solved.
    pub candidates: usize,
    /// See above.
    pub solved: usize,
    /// Whether time ran out or the search was interrupted.
    pub cut_short: bool,
}

impl Certificate {
    /// (objective - bound) / objective.
    pub fn gap(&self) -> f64 {
        if self.objective > 0.0 { ((self.objective - self.bound) / self.objective).max(0.0) } else { 0.0 }
    }
}

/// The outcome of a search.
pub struct Found {
    /// The best plan.
    pub best: Solved,
    /// What is proven of it.
    pub certificate: Certificate,
    /// The best of every other mesh that was solved, best first.
    pub alternatives: Vec<Alternative>,
    /// What else operators and states could do, and at what price.
    pub next_bests: NextBests,
    /// Bytes a rank may allocate.
    pub memory_limit: u64,
}

/// The nearest to fitting.
#[derive(Debug, Clone, PartialEq)]
pub struct Closest {
    /// Which candidate.
    pub candidate: String,
    /// Bytes too many on the fullest rank.
    pub excess: u64,
    /// What takes most there.
    pub category: Category,
    /// Bytes of it.
    pub category_bytes: u64,
}

impl Closest {
    pub(super) fn new(c: &Candidate, memory: &MemoryBreakdown, limit: u64) -> Closest {
        let largest = memory.0.iter().filter(|(c, _)| **c != Category::Reserve).max_by_key(|(_, b)| b.0);
        let (category, bytes) = largest.map_or((Category::Weights, 0), |(c, b)| (*c, b.0));
        Closest {
            candidate: c.show(),
            excess: memory.allocated().0.saturating_sub(limit),
            category,
            category_bytes: bytes,
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SearchError {
    /// The graph cannot be made.
    #[error("{0}")]
    Graph(String),
    /// The pins contradict each other, the cluster or the batch.
    #[error("no configuration fits the constraints: {0}")]
    Pins(String),
    /// Nothing fits into memory.
    #[error(
        "no plan fits into {} per GPU; closest is {} with {} too much, of which {} of {}{}",
        Bytes(*.limit), .closest.candidate, Bytes(.closest.excess), Bytes(.closest.category_bytes), .closest.category.name(),
        .relaxations.iter().map(|r| format!("\n  would help: {r}")).collect::<String>()
    )]
    Memory {
        /// Bytes a rank may allocate.
        limit: u64,
        /// The nearest to fitting.
        closest: Closest,
        /// Changes that would help.
        relaxations: Vec<String>,
    },
    /// Stopped before any plan was found.
    #[error("stopped before any plan was found; give it more time (--time-limit)")]
    Stopped,
}
