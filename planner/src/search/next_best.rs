//! Why this and not that: for every class of operators and states of the plan, the best plan in which it does something else.
//!
//! Mesh, stages, micro-batches and memory limits stay; all other choices are made anew. What that plan costs more, by the
//! ILP's costs, is the price of the next best choice. Only what is proven is reported.

use std::time::{Duration, Instant};

use super::{Search, Solved};
use crate::formulate::{Formulation, Step};
use crate::solver::{FORBIDDEN, Options, Problem, solve};
use crate::space::Space;
use crate::spec::{Spec, Strategy};

/// The next best choice of a class.
#[derive(Debug, Clone, PartialEq)]
pub struct NextBest<T> {
    /// Which.
    pub choice: T,
    /// Seconds per step that the best plan with it takes more.
    pub extra_s: f64,
}

/// By class; `None` where there is no other choice that fits, or it was not found in time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NextBests {
    /// Of operators.
    pub operators: Vec<Option<NextBest<Strategy>>>,
    /// Of states: as stored.
    pub states: Vec<Option<NextBest<Spec>>>,
}

/// Seconds for one class.
const EACH: Duration = Duration::from_secs(2);
/// The part of the time limit that all classes may take.
const SHARE: f64 = 0.2;

impl Search<'_> {
    /// Of the best plan; nothing where it was not found by the ILP's costs.
    pub(super) fn next_bests(&self, best: &Solved) -> NextBests {
        let Some(solution) = &best.solution else { return NextBests::default() };
        let (c, step) = (&best.candidate, &best.step);
        let Ok(space) = Space::new(step, &c.mesh, &self.request.constraints) else { return NextBests::default() };
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace: c.pace };
        let problem = Formulation::new(&view, &space, &mut self.times(&c.mesh), &solution.limits).problem;
        let share = Duration::from_secs_f64((self.request.time_limit_s * SHARE).clamp(0.0, 1e5));
        let until = Instant::now() + share;
        let of = |variable| self.next_best(&problem, &solution.choice, variable, until);
        let (classes, states) = (space.choices.len(), space.storage.len());
        let strategy = |class: usize| {
            let (k, extra_s) = of(class)?;
            Some(NextBest { choice: space.choices[class][k].strategy.clone(), extra_s })
        };
        let storage = |class: usize| {
            let (k, extra_s) = of(classes + class)?;
            Some(NextBest { choice: space.storage[class][k].clone(), extra_s })
        };
        NextBests { operators: (0..classes).map(strategy).collect(), states: (0..states).map(storage).collect() }
    }

    /// The next best choice of a variable, and its price.
    fn next_best(&self, problem: &Problem, choice: &[usize], variable: usize, until: Instant) -> Option<(usize, f64)> {
        let left = until.saturating_duration_since(Instant::now());
        let chosen = choice[variable];
        let others = problem.nodes()[variable].costs.iter().enumerate().any(|(k, c)| k != chosen && *c != FORBIDDEN);
        if !others || left.is_zero() || self.interrupted() {
            return None;
        }
        let mut without = problem.clone();
        without.forbid(variable, chosen);
        let options = Options { relative_gap: 0.0, ..self.options(Instant::now() + left.min(EACH)) };
        let solution = solve(&without, &options).ok().filter(|s| s.optimal())?;
        let now = problem.objective(choice)?;
        Some((solution.choice[variable], problem.value(solution.objective - now).max(0.0)))
    }
}
