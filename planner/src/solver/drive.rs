//! How the parts work together: reduce, split into components, then per component branch and bound where it is small, HiGHS where it is
//! medium, and large neighbourhoods with dual bounds where it is large.

use super::conflict;
use super::dive;
use super::dual::{self, Dual, Model, Watch};
use super::exact::{Outcome, Solver};
use super::graph::{Graph, Undo};
use super::ilp;
use super::neighbourhood::{self, Places};
use super::problem::{Matrix, Problem, Total, Usage};
use super::reduce;
use super::result::{Method, Options, Phase, Reductions, Solution, SolveError};
use super::search;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of matrices up to which branch and bound is tried first, and up to which HiGHS is.
const SMALL_ENTRIES: usize = 60_000;
const MEDIUM_ENTRIES: usize = 300_000;
/// Branches that branch and bound may take before HiGHS is asked.
const SMALL_BUDGET: u64 = 3000;
/// Iterations that raise the bound of a large component at first, and then in turn with search.
const FIRST_ASCENT: usize = 600;
const ASCENT: usize = 150;

/// Solves a checked problem.
pub(crate) fn solve(problem: &Problem, options: &Options) -> Result<Solution, SolveError> {
    let start = Instant::now();
    let mut solver = Solver::new(options, start + options.time_limit);
    let reduced = reduce_root(problem, &mut solver);
    solver.statistics.spend(Phase::Reduce, start.elapsed().as_secs_f64());
    let Some((core, undo)) = reduced else {
        return Err(SolveError::Infeasible(conflict::find(problem, options, solver.deadline)?));
    };
    let (mut nodes, mut strategies) = (0, 0);
    core.nodes.iter().for_each(|n| (nodes, strategies) = (nodes + 1, strategies + n.costs.len()));
    solver.statistics.core_nodes = nodes;
    solver.statistics.core_strategies = strategies;
    solver.statistics.core_edges = core.edges.len();

    let parts = if options.reductions.components { components(&core) } else { vec![(0..nodes).collect()] };
    let known = problem.warm_start.as_ref().and_then(|start| problem.objective(start));
    let start = problem.warm_start.as_ref().map(|start| undo.project(start));
    let mut choice = vec![0; nodes];
    let mut bound = core.constant;
    let mut complete = true;
    // The largest last: it gets the time that the others leave.
    for part in &parts {
        let sub = extract(&core, part);
        // A single component may use the cut-off and the cost of the warm start; others only see their own part.
        let cutoff = lower(options.cutoff, known).filter(|_| parts.len() == 1).map(|c| c - core.constant);
        let start = start.as_ref().map(|s| part.iter().map(|&node| s[node]).collect());
        let out = solver.part(sub, cutoff, start)?;
        let limit = cutoff.unwrap_or(Total::MAX);
        bound = bound.saturating_add(out.bound.min(limit));
        match out.found {
            Some((_, found)) => part.iter().zip(found).for_each(|(&node, c)| choice[node] = c),
            None if out.bound == Total::MAX && cutoff.is_none() => {
                return Err(SolveError::Infeasible(conflict::find(problem, options, solver.deadline)?));
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

/// A feasible choice of a problem all of whose costs are zero, if it has one; none when time ran out.
pub(crate) fn any_choice(problem: &Problem, options: &Options) -> Result<Option<Option<Vec<usize>>>, SolveError> {
    let mut solver = Solver::new(options, Instant::now() + options.time_limit);
    solver.on = Reductions::ALL;
    let Some((core, undo)) = reduce_root(problem, &mut solver) else { return Ok(Some(None)) };
    let mut choice = vec![0; core.nodes.len()];
    let mut unknown = false;
    for part in components(&core) {
        let out = solver.part(extract(&core, &part), None, None)?;
        match out.found {
            Some((_, found)) => part.iter().zip(found).for_each(|(&node, c)| choice[node] = c),
            None if out.bound == Total::MAX => return Ok(Some(None)),
            None => unknown = true,
        }
    }
    Ok((!unknown).then(|| Some(undo.expand(&choice))))
}

/// The problem after reductions, none when they show that no choice is feasible.
fn reduce_root(problem: &Problem, solver: &mut Solver<'_>) -> Option<(Graph, Undo)> {
    let mut g = Graph::new(problem);
    // What is left of a short limit is for finding a choice.
    let (options, until) = (solver.options, Instant::now() + solver.left() / 2);
    let stop = || options.interrupted() || Instant::now() >= until;
    reduce::reduce(&mut g, solver.on, &mut solver.removed, &stop).ok()?;
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
    let mut sub = neighbourhood::cut_out(g, &vec![0; g.nodes.len()], &slack, nodes, &mut index);
    sub.limits = g.limits.clone();
    sub
}

impl Solver<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Solves one component. `start` may be infeasible.
    fn part(&mut self, g: Graph, cutoff: Option<Total>, start: Option<Vec<usize>>) -> Result<Outcome, SolveError> {
        if self.options.method.is_program() {
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
        if first.found.is_none()
            && let Some(mut start) = start
        {
            let limit = Instant::now() + self.left().mul_f64(0.1);
            search::descend(&g, &mut start, || Instant::now() >= limit);
            first.found = g.objective(&start).map(|cost| (cost, start));
        }
        self.large(g, cutoff, first)
    }

    /// A component that branch and bound alone does not solve.
    fn large(&mut self, g: Graph, outer: Option<Total>, first: Outcome) -> Result<Outcome, SolveError> {
        let mut best = first.found;
        let mut bound = first.bound;
        // The graph without what the best choice made superfluous; bounds of it hold for better choices only.
        let mut tight = g.clone();
        let mut undos: Vec<Undo> = vec![];
        // The graph with the costs that the first ascent moved: what neighbourhoods are cut out of.
        let mut base: Option<Graph> = None;
        let mut places = Places::new(g.nodes.len());
        let mut round = 0usize;
        let mut share = 5;
        let (mut rises, mut idle) = (true, false);
        while !idle || rises {
            let clock = Instant::now();
            let (model, mut dual) = Model::new(&tight);
            if best.is_none() {
                let mut choice = model.round(&tight, &dual, true);
                let limit = clock + self.left().mul_f64(0.1);
                if search::descend(&tight, &mut choice, || Instant::now() >= limit) {
                    best = tight.objective(&choice).map(|cost| (cost, expand(&undos, choice)));
                }
            }
            let entries: usize = tight.edges.iter().map(|e| e.m.len()).sum();
            tracing::debug!(round, nodes = tight.nodes.len(), entries, rows = tight.limits.len(), best = ?best.as_ref().map(|b| b.0), bound);
            let overlap = base.is_some() && best.is_some() && entries > MEDIUM_ENTRIES;
            let before = best.as_ref().map(|b| b.0);
            let cutoff = lower(before, outer);
            let effort = match (round, overlap) {
                (0, _) => {
                    Effort { iterations: if entries > MEDIUM_ENTRIES { FIRST_ASCENT } else { 2000 }, stall: 3e-3 }
                }
                (_, true) => Effort { iterations: if rises { ASCENT } else { 0 }, stall: 1e-4 },
                (_, false) => Effort { iterations: 2000, stall: 3e-3 },
            };
            let until = clock + self.left().mul_f64(if round == 0 { 0.5 } else { 0.3 });
            let options = self.options;
            let raise = |dual: &mut Dual| raise(&model, &tight, dual, &effort, cutoff, until, options);
            let raised;
            if overlap && let (Some(base), Some(best)) = (&base, &mut best) {
                // Bound and search take turns, or run beside each other: neither sees the other before both are done.
                let work = (2 * ASCENT * entries) as u64;
                let beside = options.threads > 1 && effort.iterations > 0;
                let (deadline, threads) = (self.deadline, options.threads - usize::from(beside));
                let mut search =
                    || neighbourhood::improve(self, &mut places, base, best, deadline, Some(work), threads);
                if beside {
                    raised = std::thread::scope(|scope| {
                        let bound = scope.spawn(|| raise(&mut dual));
                        idle = search();
                        bound.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    });
                } else {
                    raised = raise(&mut dual);
                    idle = search();
                }
            } else {
                raised = raise(&mut dual);
            }
            tight.step = raised.step;
            self.statistics.spend(Phase::Bound, clock.elapsed().as_secs_f64());

            let clock = Instant::now();
            let mut candidates: Vec<Vec<usize>> = raised.choice.into_iter().collect();
            if !overlap {
                for forward in [true, false] {
                    let mut choice = model.round(&tight, &dual, forward);
                    let limit = clock + self.left().mul_f64(0.05);
                    search::descend(&tight, &mut choice, || Instant::now() >= limit);
                    candidates.push(choice);
                }
            }
            for choice in candidates {
                let full = expand(&undos, choice);
                if let Some(cost) = g.objective(&full)
                    && best.as_ref().is_none_or(|(c, _)| cost < *c)
                {
                    best = Some((cost, full));
                }
            }
            if base.is_none() && best.is_some() && undos.is_empty() {
                let mut moved = tight.clone();
                dual::certify(&model, &mut moved, &dual, None);
                base = Some(moved);
            }
            if !overlap && let (Some(base), Some(best)) = (&base, &mut best) {
                let until = Instant::now() + self.left().mul_f64(0.1);
                let work = (2 * (raised.iterations + 10) * entries) as u64;
                idle = neighbourhood::improve(self, &mut places, base, best, until, Some(work), options.threads);
            }
            self.statistics.spend(Phase::Search, clock.elapsed().as_secs_f64());

            let clock = Instant::now();
            let now = best.as_ref().map(|b| b.0);
            let cutoff = lower(now, outer);
            let mut shrinks = false;
            if !overlap || effort.iterations > 0 || now < before {
                let certified = dual::certify(&model, &mut tight, &dual, cutoff);
                let gap = cutoff.map_or(Total::MAX, |c| c - bound.max(certified.bound));
                rises = round == 0 || certified.bound - bound > gap / 500;
                bound = bound.max(certified.bound);
                self.statistics.spend(Phase::Bound, clock.elapsed().as_secs_f64());
                if self.closed(cutoff, bound) || self.out() {
                    return Ok(Outcome { found: best, bound });
                }
                drop(model);
                let clock = Instant::now();
                let before: usize = tight.nodes.iter().map(|n| n.costs.len()).sum();
                let deadline = self.deadline;
                let stop = || options.interrupted() || Instant::now() >= deadline;
                let reduced = reduce::reduce(&mut tight, self.on, &mut self.removed, &stop);
                self.statistics.spend(Phase::Reduce, clock.elapsed().as_secs_f64());
                if reduced.is_err() {
                    return Ok(Outcome { found: best, bound: Total::MAX });
                }
                let (next, undo) = tight.compact();
                tight = next;
                undos.push(undo);
                let after: usize = tight.nodes.iter().map(|n| n.costs.len()).sum();
                shrinks = after * 50 < before * 49;
                rises |= shrinks;
            }
            if entries > MEDIUM_ENTRIES && (round + 1).is_power_of_two() && !self.out() {
                let clock = Instant::now();
                let until = clock + self.left().mul_f64(0.2);
                share = (2 * share).min(40);
                let choice = dive::dive(self, &tight, lower(now, outer), share, until).map(|c| expand(&undos, c));
                if let Some(choice) = choice
                    && let Some(cost) = g.objective(&choice)
                    && best.as_ref().is_none_or(|(c, _)| cost < *c)
                {
                    best = Some((cost, choice));
                }
                self.statistics.spend(Phase::Search, clock.elapsed().as_secs_f64());
            }
            if self.out() {
                return Ok(Outcome { found: best, bound });
            }
            round += 1;
            let entries: usize = tight.edges.iter().map(|e| e.m.len()).sum();
            if entries <= MEDIUM_ENTRIES && (!shrinks || round >= 8) {
                break;
            }
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
                best = Some((cost, expand(&undos, choice)));
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
                best = Some((cost, expand(&undos, choice)));
            }
            if self.closed(lower(best.as_ref().map(|b| b.0), outer), bound) {
                return Ok(Outcome { found: best, bound });
            }
        }
        if let (Some(base), Some(best)) = (&base, &mut best) {
            let clock = Instant::now();
            let work = (2 * ASCENT * base.edges.iter().map(|e| e.m.len()).sum::<usize>()).max(1) as u64;
            let (until, threads) = (self.deadline, self.options.threads);
            while !self.closed(lower(Some(best.0), outer), bound) && !self.out() {
                if neighbourhood::improve(self, &mut places, base, best, until, Some(work), threads) {
                    break;
                }
            }
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

/// How long to raise a bound.
struct Effort {
    iterations: usize,
    stall: f64,
}

/// What an ascent leaves besides messages and multipliers.
struct Raised {
    step: f64,
    /// The best choice met on the way.
    choice: Option<Vec<usize>>,
    iterations: usize,
}

/// Raises the bound of a graph, and rounds to choices on the way: they differ as multipliers move.
fn raise(
    model: &Model,
    g: &Graph,
    dual: &mut Dual,
    effort: &Effort,
    cutoff: Option<Total>,
    until: Instant,
    options: &Options,
) -> Raised {
    let mut rounded: Option<(Total, Vec<usize>)> = None;
    let mut done = 0;
    let mut watch = |iteration: usize, dual: &Dual| {
        done = iteration + 1;
        if Instant::now() >= until || options.interrupted() {
            return Watch::Stop;
        }
        // Rounding costs about as much as a pass.
        if iteration % 16 != 15 {
            return Watch::Continue;
        }
        let mut choice = model.round(g, dual, iteration % 32 < 16);
        // Repairing an infeasible choice of a large graph takes longer than the next rounding.
        if g.objective(&choice).is_some() {
            search::descend(g, &mut choice, || Instant::now() >= until);
        }
        match g.objective(&choice) {
            Some(cost) if rounded.as_ref().is_none_or(|(c, _)| cost < *c) => {
                rounded = Some((cost, choice));
                Watch::Target(cost as f64)
            }
            _ => Watch::Continue,
        }
    };
    let target = cutoff.map(|c| c as f64);
    let step = dual::ascend(model, g, dual, effort.iterations, effort.stall, target, &mut watch);
    Raised { step, choice: rounded.map(|(_, choice)| choice), iterations: done }
}

/// A choice of a graph that was reduced several times, carried back to the first.
fn expand(undos: &[Undo], choice: Vec<usize>) -> Vec<usize> {
    undos.iter().rev().fold(choice, |c, undo| undo.expand(&c))
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
