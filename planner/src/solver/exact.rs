//! Branch and bound on a graph: reduce, bound, drop what cannot be in a better choice, branch on what is left.

use super::dual::{self, Model, Watch};
use super::graph::Graph;
use super::problem::{FORBIDDEN, Total};
use super::random::Random;
use super::reduce::{self, Removed};
use super::result::{Options, Phase, Reductions, Statistics};
use super::search;
use std::time::Instant;

/// Iterations that raise the bound at the root and below it, where multipliers are inherited.
const ROOT_ITERATIONS: usize = 400;
const ITERATIONS: usize = 30;
/// What one step of branch and bound takes, in passes over the graph.
const PASSES: usize = 2 * ITERATIONS + 10;

/// What is known about a graph after a search.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// The best choice below the cut-off, if any.
    pub(crate) found: Option<(Total, Vec<usize>)>,
    /// No choice costs less. `Total::MAX` says that there is none at all.
    pub(crate) bound: Total,
}

/// The state shared by all parts of one solve.
pub(crate) struct Solver<'a> {
    pub(crate) options: &'a Options,
    /// Reductions in use; consistency always, since bounds rely on it.
    pub(crate) on: Reductions,
    pub(crate) deadline: Instant,
    pub(crate) statistics: Statistics,
    pub(crate) removed: Removed,
    pub(crate) random: Random,
    /// Branches left before giving up.
    pub(crate) budget: u64,
    pub(crate) gave_up: bool,
    /// Entries of matrices gone through, a measure of time that is the same on every machine.
    pub(crate) work: u64,
}

/// The cost below which a choice is worth looking for, given one of this cost and the gap that is asked for.
pub(crate) fn below_by(cost: Total, gap: f64) -> Total {
    cost - (gap.clamp(0.0, 1.0) * cost.max(0) as f64) as Total
}

/// How much two strategies of a node differ: in priced usage, and in what they cost neighbours on average; at most `most`.
fn difference(g: &Graph, node: usize, a: usize, b: usize, most: f64) -> f64 {
    let n = &g.nodes[node];
    let usage = n.segments.iter().map(|s| {
        let price: f64 = g.prices[s.from..s.to].iter().sum();
        price * (s.amounts[a] - s.amounts[b]).abs() as f64
    });
    let edges = n.edges.iter().map(|&e| {
        let edge = &g.edges[e];
        let others = edge.m.len() / n.costs.len();
        let apart = |j: usize| match (edge.at(node, a, j), edge.at(node, b, j)) {
            (FORBIDDEN, FORBIDDEN) => 0.0,
            (FORBIDDEN, _) | (_, FORBIDDEN) => most,
            (x, y) => ((x - y).abs() as f64).min(most),
        };
        (0..others).map(apart).sum::<f64>() / others as f64
    });
    (usage.sum::<f64>() + edges.sum::<f64>()).min(most)
}

impl<'a> Solver<'a> {
    /// A solver that stops at a deadline.
    pub(crate) fn new(options: &'a Options, deadline: Instant) -> Solver<'a> {
        Solver {
            options,
            on: Reductions { consistency: true, ..options.reductions },
            deadline,
            statistics: Statistics::default(),
            removed: vec![],
            random: Random(options.seed),
            budget: u64::MAX,
            work: 0,
            gave_up: false,
        }
    }

    /// A solver for a part of the work, that may run on another thread.
    pub(crate) fn fork(&self, seed: u64, until: Instant, budget: u64) -> Solver<'a> {
        let fresh = Solver::new(self.options, until.min(self.deadline));
        Solver { on: self.on, random: Random(seed), budget, ..fresh }
    }

    /// Takes over what a fork counted.
    pub(crate) fn join(&mut self, fork: Solver<'_>) {
        for (name, n) in fork.removed {
            reduce::count(&mut self.removed, name, n);
        }
        self.statistics.branches += fork.statistics.branches;
        self.work += fork.work;
        fork.statistics.seconds.iter().for_each(|&(phase, seconds)| self.statistics.spend(phase, seconds));
    }

    /// Whether to stop now.
    pub(crate) fn out(&mut self) -> bool {
        if !self.gave_up {
            self.gave_up = self.budget == 0 || self.options.interrupted() || Instant::now() >= self.deadline;
        }
        self.gave_up
    }

    /// Searches for the best choice that costs less than the cut-off.
    pub(crate) fn branch(&mut self, mut g: Graph, cutoff: Option<Total>, depth: usize) -> Outcome {
        let none = |bound| Outcome { found: None, bound };
        let (options, deadline) = (self.options, self.deadline);
        let stop = || options.interrupted() || Instant::now() >= deadline;
        if reduce::reduce(&mut g, self.on, &mut self.removed, &stop).is_err() {
            return none(Total::MAX);
        }
        let (core, undo) = g.compact();
        let mut out = self.branch_reduced(core, cutoff, depth);
        if let Some((_, choice)) = &mut out.found {
            *choice = undo.expand(choice);
        }
        out
    }

    fn branch_reduced(&mut self, mut g: Graph, mut cutoff: Option<Total>, depth: usize) -> Outcome {
        let below = |cost: Total, cutoff: Option<Total>| cutoff.is_none_or(|c| cost < c);
        if g.nodes.is_empty() {
            let found = below(g.constant, cutoff).then(|| (g.constant, vec![]));
            return Outcome { found, bound: g.constant };
        }
        let clock = Instant::now();
        let (model, mut dual) = Model::new(&g);
        let iterations = if depth == 0 { ROOT_ITERATIONS } else { ITERATIONS };
        let entries: usize = g.edges.iter().map(|e| e.m.len()).sum();
        self.work += (PASSES * (entries + g.nodes.len() + g.limits.len())) as u64;
        g.step = dual::ascend(&model, &g, &mut dual, iterations, 3e-3, cutoff.map(|c| c as f64), &mut |_, _| {
            Watch::Continue
        });
        let mut best: Option<(Total, Vec<usize>)> = None;
        for forward in [true, false] {
            let mut choice = model.round(&g, &dual, forward);
            search::descend(&g, &mut choice, || false);
            if let Some(cost) = g.objective(&choice)
                && below(cost, cutoff)
            {
                cutoff = Some(below_by(cost, self.options.relative_gap));
                best = Some((cost, choice));
            }
        }
        let certified = dual::certify(&model, &mut g, &dual, cutoff);
        self.statistics.spend(Phase::Exact, clock.elapsed().as_secs_f64());
        drop(model);
        let relative = self.options.relative_gap;
        let close = |out: Outcome, best: Option<(Total, Vec<usize>)>, floor: Total| {
            let found = out.found.or(best);
            // Only choices below this were looked for, so a bound beyond it is proven up to it.
            let bound = found.as_ref().map_or(out.bound, |(c, _)| out.bound.min(below_by(*c, relative)));
            let bound = found.as_ref().map_or(bound.max(floor), |(c, _)| bound.max(floor).min(*c));
            Outcome { found, bound }
        };
        if cutoff.is_some_and(|c| certified.bound >= c) {
            return close(Outcome { found: None, bound: certified.bound }, best, certified.bound);
        }
        if self.out() {
            return close(Outcome { found: None, bound: certified.bound }, best, certified.bound);
        }
        let size: usize = g.nodes.iter().map(|n| n.costs.len()).sum();
        if certified.strategies > 0 || certified.pairs as usize > size / 8 {
            let out = self.branch(g, cutoff, depth + 1);
            return close(out, best, certified.bound);
        }
        // A node whose two cheapest strategies cost nearly the same, though they differ much in what they use and in what they cost
        // their neighbours: either child then has a higher bound.
        let gap = cutoff.map_or(Total::from(FORBIDDEN), |c| c - certified.bound).max(1) as f64;
        let mut pick = (f64::INFINITY, 0, 0);
        for (node, regrets) in certified.regrets.iter().enumerate() {
            let mut order: Vec<usize> = (0..regrets.len()).collect();
            order.sort_by_key(|&k| regrets[k]);
            let [first, second, ..] = order[..] else { continue };
            let score = (regrets[second] as f64 + 0.02 * gap) / (difference(&g, node, first, second, gap) + 0.01 * gap);
            if score < pick.0 {
                pick = (score, node, first);
            }
        }
        let (_, node, first) = pick;
        if pick.0.is_infinite() {
            // Only nodes with one strategy are left, and reductions that would take them are off.
            let choice = vec![0; g.nodes.len()];
            let out = match g.objective(&choice) {
                Some(cost) => Outcome { found: below(cost, cutoff).then_some((cost, choice)), bound: cost },
                None => Outcome { found: None, bound: Total::MAX },
            };
            return close(out, best, certified.bound);
        }
        self.budget = self.budget.saturating_sub(1);
        self.statistics.branches += 1;
        let mut with = g.clone();
        with.nodes[node].costs.iter_mut().enumerate().filter(|(k, _)| *k != first).for_each(|(_, c)| *c = FORBIDDEN);
        let a = self.branch(with, cutoff, depth + 1);
        if let Some((cost, choice)) = a.found {
            cutoff = Some(below_by(cost, relative));
            best = Some((cost, choice));
        }
        let mut bound = a.bound;
        if self.out() {
            return close(Outcome { found: None, bound: certified.bound }, best, certified.bound);
        }
        g.nodes[node].costs[first] = FORBIDDEN;
        let b = self.branch(g, cutoff, depth + 1);
        bound = bound.min(b.bound);
        close(Outcome { found: b.found, bound }, best, certified.bound)
    }
}
