//! How the parts work together: reduce, split into components, then per component branch and bound where it is small, HiGHS where it is
//! medium, and large neighbourhoods with dual bounds where it is large.

use super::conflict;
use super::dual::{self, Model, Watch};
use super::exact::{Outcome, Solver};
use super::graph::{Graph, Undo};
use super::ilp;
use super::problem::{Matrix, Problem, Total, Usage};
use super::random::Random;
use super::reduce;
use super::result::{Method, Options, Phase, Reductions, Solution, SolveError, Statistics};
use super::search;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of matrices up to which branch and bound is tried first, and up to which HiGHS is.
const SMALL_ENTRIES: usize = 60_000;
const MEDIUM_ENTRIES: usize = 300_000;
/// Branches that branch and bound may take before HiGHS is asked, and within a neighbourhood.
const SMALL_BUDGET: u64 = 3000;
const NEIGHBOURHOOD_BUDGET: u64 = 20;

/// Solves a checked problem.
pub(crate) fn solve(problem: &Problem, options: &Options) -> Result<Solution, SolveError> {
    let start = Instant::now();
    let mut solver = Solver {
        options,
        on: Reductions { consistency: true, ..options.reductions },
        deadline: start + options.time_limit,
        statistics: Statistics::default(),
        removed: vec![],
        random: Random(options.seed),
        budget: u64::MAX,
        gave_up: false,
    };
    let reduced = reduce_root(problem, &mut solver);
    solver.statistics.spend(Phase::Reduce, start.elapsed().as_secs_f64());
    let Some((core, undo)) = reduced else {
        return Err(SolveError::Infeasible(conflict::find(problem, options)?));
    };
    let (mut nodes, mut strategies) = (0, 0);
    core.nodes.iter().for_each(|n| (nodes, strategies) = (nodes + 1, strategies + n.costs.len()));
    solver.statistics.core_nodes = nodes;
    solver.statistics.core_strategies = strategies;
    solver.statistics.core_edges = core.edges.len();

    let parts = if options.reductions.components { components(&core) } else { vec![(0..nodes).collect()] };
    let mut choice = vec![0; nodes];
    let mut bound = core.constant;
    let mut complete = true;
    // The largest last: it gets the time that the others leave.
    for part in &parts {
        let sub = extract(&core, part);
        // A single component may use the cut-off and the warm start; others only see their own part.
        let cutoff = options.cutoff.filter(|_| parts.len() == 1).map(|c| c - core.constant);
        let out = solver.part(sub, cutoff)?;
        let limit = cutoff.unwrap_or(Total::MAX);
        bound = bound.saturating_add(out.bound.min(limit));
        match out.found {
            Some((_, found)) => part.iter().zip(found).for_each(|(&node, c)| choice[node] = c),
            None if out.bound == Total::MAX && cutoff.is_none() => {
                return Err(SolveError::Infeasible(conflict::find(problem, options)?));
            }
            None => complete = false,
        }
    }
    let mut best: Option<(Total, Vec<usize>)> = None;
    let candidates = [complete.then(|| undo.expand(&choice)), problem.warm_start.clone()];
    for candidate in candidates.into_iter().flatten() {
        if let Some(cost) = problem.objective(&candidate)
            && best.as_ref().is_none_or(|(c, _)| cost < *c)
        {
            best = Some((cost, candidate));
        }
    }
    solver.statistics.removed = solver.removed;
    if let Some(cutoff) = options.cutoff
        && bound >= cutoff
    {
        return Err(SolveError::CutOff { bound: cutoff });
    }
    match best {
        Some((objective, choice)) => {
            Ok(Solution { choice, objective, bound: bound.min(objective), statistics: solver.statistics })
        }
        None => Err(SolveError::NoChoice { bound }),
    }
}

/// Whether a problem, all of whose costs are zero, has a feasible choice; none when time ran out.
pub(crate) fn feasible(problem: &Problem, options: &Options) -> Result<Option<bool>, SolveError> {
    let mut solver = Solver {
        options,
        on: Reductions::ALL,
        deadline: Instant::now() + options.time_limit,
        statistics: Statistics::default(),
        removed: vec![],
        random: Random(options.seed),
        budget: u64::MAX,
        gave_up: false,
    };
    let Some((core, _)) = reduce_root(problem, &mut solver) else { return Ok(Some(false)) };
    let mut unknown = false;
    for part in components(&core) {
        let out = solver.part(extract(&core, &part), None)?;
        if out.found.is_none() {
            if out.bound == Total::MAX {
                return Ok(Some(false));
            }
            unknown = true;
        }
    }
    Ok((!unknown).then_some(true))
}

/// The problem after reductions, none when they show that no choice is feasible.
fn reduce_root(problem: &Problem, solver: &mut Solver<'_>) -> Option<(Graph, Undo)> {
    let mut g = Graph::new(problem);
    reduce::reduce(&mut g, solver.on, &mut solver.removed).ok()?;
    Some(g.compact())
}

/// Sets of nodes that neither edges nor rows join, the largest last.
fn components(g: &Graph) -> Vec<Vec<usize>> {
    let rows = g.limits.len();
    let mut parent: Vec<usize> = (0..g.nodes.len() + rows).collect();
    fn root(parent: &mut [usize], mut x: usize) -> usize {
        while parent[x] != x {
            parent[x] = parent[parent[x]];
            x = parent[x];
        }
        x
    }
    let mut join = |a: usize, b: usize| {
        let (a, b) = (root(&mut parent, a), root(&mut parent, b));
        parent[a.max(b)] = a.min(b);
    };
    for e in &g.edges {
        join(e.u, e.v);
    }
    // Rows of one segment are joined once: a node that starts within a joined run only joins its end.
    let mut joined_to: Vec<usize> = (0..rows).collect();
    for (node, n) in g.nodes.iter().enumerate() {
        for s in &n.segments {
            join(node, g.nodes.len() + s.from);
            let mut row = s.from;
            while row + 1 < s.to {
                let end = joined_to[row];
                if end > row {
                    joined_to[row] = joined_to[end].max(end);
                    row = end;
                } else {
                    join(g.nodes.len() + row, g.nodes.len() + row + 1);
                    joined_to[row] = row + 1;
                    row += 1;
                }
            }
        }
    }
    let mut by_root = std::collections::BTreeMap::<usize, Vec<usize>>::new();
    for node in 0..g.nodes.len() {
        by_root.entry(root(&mut parent, node)).or_default().push(node);
    }
    let mut parts: Vec<Vec<usize>> = by_root.into_values().collect();
    parts.sort_by_key(Vec::len);
    parts
}

/// The graph of some nodes, which are a union of components, without the constant.
fn extract(g: &Graph, nodes: &[usize]) -> Graph {
    let mut index = vec![usize::MAX; g.nodes.len()];
    let slack = g.limits.clone();
    // With all nodes of the components present nothing is frozen, and their own use of the limits is added back: start from it.
    let mut sub = search::neighbourhood(g, &vec![0; g.nodes.len()], &slack, nodes, &mut index);
    sub.limits = g.limits.clone();
    sub
}

impl Solver<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Solves one component.
    fn part(&mut self, g: Graph, cutoff: Option<Total>) -> Result<Outcome, SolveError> {
        if self.options.method == Method::Ilp {
            if g.nodes.is_empty() {
                return Ok(Outcome { found: Some((g.constant, vec![])), bound: g.constant });
            }
            let clock = Instant::now();
            let (found, bound) = self.by_ilp(&g, cutoff)?;
            self.statistics.spend(Phase::Ilp, clock.elapsed().as_secs_f64());
            return Ok(Outcome { found, bound });
        }
        let entries: usize = g.edges.iter().map(|e| e.m.len()).sum();
        let mut first = Outcome { found: None, bound: Total::MIN };
        if entries <= SMALL_ENTRIES {
            (self.budget, self.gave_up) = (SMALL_BUDGET, false);
            first = self.branch(g.clone(), cutoff, 0);
            if !self.gave_up {
                return Ok(first);
            }
        }
        (self.budget, self.gave_up) = (u64::MAX, false);
        self.large(g, cutoff, first)
    }

    /// A component that branch and bound alone does not solve.
    fn large(&mut self, g: Graph, outer: Option<Total>, first: Outcome) -> Result<Outcome, SolveError> {
        let mut best = first.found;
        let mut bound = first.bound;
        // The graph without what the best choice made superfluous; bounds of it hold for better choices only.
        let mut tight = g.clone();
        let mut undos: Vec<Undo> = vec![];
        let mut prices = g.prices.clone();
        let mut round = 0;
        loop {
            let clock = Instant::now();
            let (model, mut dual) = Model::new(&tight);
            if best.is_none() {
                let mut choice = model.round(&tight, &dual, true);
                let limit = clock + self.left().mul_f64(0.1);
                if search::descend(&tight, &mut choice, || Instant::now() >= limit) {
                    best = tight.objective(&choice).map(|cost| (cost, choice));
                }
            }
            let entries: usize = tight.edges.iter().map(|e| e.m.len()).sum();
            tracing::debug!(round, nodes = tight.nodes.len(), entries, rows = tight.limits.len(), best = ?best.as_ref().map(|b| b.0), bound);
            let cutoff = lower(best.as_ref().map(|b| b.0), outer);
            let share = self.left().mul_f64(if round == 0 { 0.5 } else { 0.15 });
            let iterations = 2000;
            let until = clock + share;
            let options = self.options;
            let mut rounded: Option<(Total, Vec<usize>)> = None;
            // Rounding costs about as much as a pass; choices differ as multipliers move.
            let mut watch = |iteration: usize, dual: &dual::Dual| {
                if Instant::now() >= until || options.interrupted() {
                    return Watch::Stop;
                }
                if iteration % 16 != 15 {
                    return Watch::Continue;
                }
                let mut choice = model.round(&tight, dual, iteration % 32 < 16);
                // Repairing an infeasible choice of a large graph takes longer than the next rounding.
                if tight.objective(&choice).is_some() {
                    search::descend(&tight, &mut choice, || Instant::now() >= until);
                }
                match tight.objective(&choice) {
                    Some(cost) if rounded.as_ref().is_none_or(|(c, _)| cost < *c) => {
                        rounded = Some((cost, choice));
                        Watch::Target(cost as f64)
                    }
                    _ => Watch::Continue,
                }
            };
            let step = dual::ascend(&model, &tight, &mut dual, iterations, cutoff.map(|c| c as f64), &mut watch);
            if let Some((cost, choice)) = rounded
                && best.as_ref().is_none_or(|(c, _)| cost < *c)
            {
                best = Some((cost, undos.iter().rev().fold(choice, |c, undo| undo.expand(&c))));
            }
            let ascent = clock.elapsed();
            tight.step = step;
            self.statistics.spend(Phase::Bound, clock.elapsed().as_secs_f64());

            let clock = Instant::now();
            for forward in [true, false] {
                let mut choice = model.round(&tight, &dual, forward);
                let limit = clock + self.left().mul_f64(0.05);
                search::descend(&tight, &mut choice, || Instant::now() >= limit);
                let full = undos.iter().rev().fold(choice, |c, undo| undo.expand(&c));
                if let Some(cost) = g.objective(&full)
                    && best.as_ref().is_none_or(|(c, _)| cost < *c)
                {
                    best = Some((cost, full));
                }
            }
            if round == 0 {
                prices = dual.prices.clone();
            }
            if let Some(best) = &mut best {
                let seconds = self.left().mul_f64(0.1).min(ascent + Duration::from_millis(50));
                self.improve(&g, &prices, best, Instant::now() + seconds);
            }
            self.statistics.spend(Phase::Search, clock.elapsed().as_secs_f64());

            let clock = Instant::now();
            let cutoff = lower(best.as_ref().map(|b| b.0), outer);
            let certified = dual::certify(&model, &mut tight, &dual, cutoff);
            bound = bound.max(certified.bound);
            self.statistics.spend(Phase::Bound, clock.elapsed().as_secs_f64());
            if self.closed(cutoff, bound) || self.out() {
                return Ok(Outcome { found: best, bound });
            }
            round += 1;
            let clock = Instant::now();
            let before: usize = tight.nodes.iter().map(|n| n.costs.len()).sum();
            let reduced = reduce::reduce(&mut tight, self.on, &mut self.removed);
            self.statistics.spend(Phase::Reduce, clock.elapsed().as_secs_f64());
            if reduced.is_err() {
                return Ok(Outcome { found: best, bound: Total::MAX });
            }
            let (next, undo) = tight.compact();
            tight = next;
            undos.push(undo);
            let after: usize = tight.nodes.iter().map(|n| n.costs.len()).sum();
            if after * 50 < before * 49 && round < 8 {
                continue;
            }
            break;
        }
        let cutoff = lower(best.as_ref().map(|b| b.0), outer);
        let entries: usize = tight.edges.iter().map(|e| e.m.len()).sum();
        if entries <= SMALL_ENTRIES {
            (self.budget, self.gave_up) = (SMALL_BUDGET, false);
            let out = self.branch(tight.clone(), cutoff, 0);
            let gave_up = std::mem::take(&mut self.gave_up);
            self.budget = u64::MAX;
            bound = bound.max(out.bound);
            if let Some((cost, choice)) = out.found {
                best = Some((cost, undos.iter().rev().fold(choice, |c, undo| undo.expand(&c))));
            }
            if !gave_up {
                return Ok(Outcome { found: best, bound });
            }
        }
        if self.options.method == Method::Auto && entries <= MEDIUM_ENTRIES && !self.left().is_zero() {
            let clock = Instant::now();
            let (out, low) = self.by_ilp(&tight, cutoff)?;
            self.statistics.spend(Phase::Ilp, clock.elapsed().as_secs_f64());
            bound = bound.max(low);
            if let Some((cost, choice)) = out
                && best.as_ref().is_none_or(|(c, _)| cost < *c)
            {
                best = Some((cost, undos.iter().rev().fold(choice, |c, undo| undo.expand(&c))));
            }
            if self.closed(lower(best.as_ref().map(|b| b.0), outer), bound) {
                return Ok(Outcome { found: best, bound });
            }
        }
        if let Some(best) = &mut best {
            let clock = Instant::now();
            self.improve(&g, &prices, best, self.deadline);
            self.statistics.spend(Phase::Search, clock.elapsed().as_secs_f64());
        }
        Ok(Outcome { found: best, bound })
    }

    /// Whether the bound is as near to the cut-off as asked.
    fn closed(&self, cutoff: Option<Total>, bound: Total) -> bool {
        cutoff.is_some_and(|c| {
            bound >= c || (c.saturating_sub(bound)) as f64 <= self.options.relative_gap * c.abs() as f64
        })
    }

    /// Solves neighbourhoods of the best choice exactly, until a moment.
    fn improve(&mut self, g: &Graph, prices: &[f64], best: &mut (Total, Vec<usize>), until: Instant) {
        let deadline = self.deadline;
        self.deadline = until.min(deadline);
        let mut index = vec![usize::MAX; g.nodes.len()];
        let mut base = g.clone();
        base.prices = prices.to_vec();
        base.step = 0.02;
        let mut size = 12.0f64;
        let mut slack = base.slack(&best.1);
        let mut idle = 0;
        while Instant::now() < self.deadline && !self.options.interrupted() {
            let nodes = search::pick_nodes(&base, &slack, size as usize, &mut self.random);
            let whole = nodes.len() == base.nodes.len();
            let sub = search::neighbourhood(&base, &best.1, &slack, &nodes, &mut index);
            let now = search::cost_around(&base, &best.1, &nodes, &mut index);
            (self.budget, self.gave_up) = (NEIGHBOURHOOD_BUDGET, false);
            let out = self.branch(sub, Some(now), 1);
            size = (size * if self.gave_up { 0.93 } else { 1.03 }).clamp(4.0, 400.0);
            idle += 1;
            if let Some((cost, choice)) = out.found {
                nodes.iter().zip(choice).for_each(|(&node, c)| best.1[node] = c);
                best.0 += cost - now;
                slack = base.slack(&best.1);
                idle = 0;
            }
            if whole && !self.gave_up || idle > 40 * base.nodes.len() {
                break;
            }
        }
        self.deadline = deadline;
        (self.budget, self.gave_up) = (u64::MAX, false);
    }

    /// Asks HiGHS for a choice below the cut-off.
    #[allow(clippy::type_complexity)]
    fn by_ilp(&mut self, g: &Graph, cutoff: Option<Total>) -> Result<(Option<(Total, Vec<usize>)>, Total), SolveError> {
        let problem = to_problem(g);
        let options =
            Options { time_limit: self.left(), cutoff: cutoff.map(|c| c - g.constant), ..self.options.clone() };
        let answer = ilp::run(&problem, &options, &mut self.statistics)?;
        let found = answer.choice.and_then(|c| g.objective(&c).map(|cost| (cost, c)));
        let bound = answer.bound.map_or(Total::MAX, |b| b + g.constant);
        Ok((found, bound))
    }
}

/// The lower of two limits.
fn lower(a: Option<Total>, b: Option<Total>) -> Option<Total> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// A compact, settled graph as a problem, without its constant.
pub(crate) fn to_problem(g: &Graph) -> Problem {
    let mut p = Problem::integers();
    for n in &g.nodes {
        p.add_node_quanta(n.costs.clone());
    }
    for e in &g.edges {
        let m = Matrix::from_fn(g.nodes[e.u].costs.len(), e.cols, |i, j| e.m[i * e.cols + j]);
        p.add_edge_quanta(e.u, e.v, Arc::new(m));
    }
    p.limits.clone_from(&g.limits);
    for (node, n) in g.nodes.iter().enumerate() {
        p.usages.extend(n.segments.iter().map(|s| Usage {
            node,
            rows: s.from..s.to,
            amounts: s.amounts.clone().into(),
        }));
    }
    p
}
