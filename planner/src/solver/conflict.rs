//! Which constraints are in each other's way when no choice is feasible.
//!
//! Constraints are the limits of rows, the forbidden pairs of edges, the fixed or forbidden strategies of nodes, and groups. What is
//! found conflicts, and is *irreducible*: without any one of it, a choice exists. Then `smallest` looks for a conflict of fewer
//! members, or proves that there is none. All of it within the limit of time; a conflict says what is proven of it.
//!
//! Constraints are dropped in runs, which double where what is left still conflicts and halve where it does not, so few
//! questions are asked when few of many constraints matter. Costs are zero meanwhile.

mod smallest;

use super::drive;
use super::problem::{FORBIDDEN, Matrix, Node, Problem, RANGE};
use super::result::{Conflict, Options, SolveError};
use std::sync::Arc;
use std::time::Instant;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Constraint {
    Row(usize),
    Edge(usize),
    Node(usize),
    Group(usize),
}

/// A conflict of fewest members, as far as time allows.
pub(crate) fn find(problem: &Problem, options: &Options, deadline: Instant) -> Result<Conflict, SolveError> {
    if !options.explain {
        return Ok(Conflict::default());
    }
    let p = without_costs(problem);
    if let Some(alone) = alone(&p) {
        return Ok(conflict(&[alone], true, true));
    }
    let mut all: Vec<Constraint> = (0..p.limits.len()).map(Constraint::Row).collect();
    all.extend((0..p.edges.len()).filter(|&k| p.edges[k].costs.costs().contains(&FORBIDDEN)).map(Constraint::Edge));
    let restricted = |node: &Node| node.fixed.is_some() || node.costs.contains(&FORBIDDEN);
    all.extend((0..p.nodes.len()).filter(|&k| restricted(&p.nodes[k])).map(Constraint::Node));
    all.extend((0..p.groups.len()).map(Constraint::Group));

    let asked = Asked { p: &p, options, deadline };
    let mut proven = true;
    let mut needed: Vec<Constraint> = vec![];
    let (mut at, mut run) = (0, 1);
    while at < all.len() {
        let end = (at + run).min(all.len());
        let kept: Vec<Constraint> = needed.iter().chain(&all[end..]).copied().collect();
        match asked.choice(&kept)? {
            Answer::Conflict => (at, run) = (end, 2 * run),
            Answer::Choice(_) if end - at > 1 => run = (end - at) / 2,
            Answer::Choice(_) => {
                needed.push(all[at]);
                (at, run) = (end, 1);
            }
            // Without a proof constraints stay.
            Answer::Unknown => {
                proven = false;
                needed.extend(&all[at..end]);
                (at, run) = (end, 1);
            }
        }
    }
    // None conflicts alone, so two are fewest.
    if !proven || needed.len() <= 2 {
        return Ok(conflict(&needed, proven, proven));
    }
    Ok(match smallest::search(&asked, &all, needed.len())? {
        smallest::Found::Smaller(members) => conflict(&members, true, true),
        smallest::Found::NoSmaller => conflict(&needed, true, true),
        smallest::Found::Unknown => conflict(&needed, true, false),
    })
}

/// The problem, and how long it may be asked.
struct Asked<'a> {
    p: &'a Problem,
    options: &'a Options,
    deadline: Instant,
}

/// Whether some constraints can hold together.
enum Answer {
    /// No.
    Conflict,
    /// This choice keeps them.
    Choice(Vec<usize>),
    /// Not known in time.
    Unknown,
}

impl Asked<'_> {
    /// Whether some constraints can hold together.
    fn choice(&self, kept: &[Constraint]) -> Result<Answer, SolveError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || self.options.interrupted() {
            return Ok(Answer::Unknown);
        }
        let quick =
            Options { time_limit: left, relative_gap: 0.0, cutoff: None, explain: false, ..self.options.clone() };
        Ok(match drive::any_choice(&only(self.p, kept), &quick)? {
            Some(Some(choice)) => Answer::Choice(choice),
            Some(None) => Answer::Conflict,
            None => Answer::Unknown,
        })
    }

    /// Of all constraints those that a choice does not keep.
    fn broken(&self, all: &[Constraint], choice: &[usize]) -> Vec<Constraint> {
        let p = self.p;
        let usage = p.usage(choice);
        let keeps = |c: &Constraint| match *c {
            Constraint::Row(k) => usage[k] <= p.limits[k],
            Constraint::Edge(k) => p.edges[k].costs.get(choice[p.edges[k].u], choice[p.edges[k].v]) != FORBIDDEN,
            Constraint::Node(k) => {
                p.nodes[k].costs[choice[k]] != FORBIDDEN && p.nodes[k].fixed.is_none_or(|f| f == choice[k])
            }
            Constraint::Group(k) => p.groups[k].windows(2).all(|w| choice[w[0]] == choice[w[1]]),
        };
        all.iter().filter(|c| !keeps(c)).copied().collect()
    }
}

/// A constraint that no choice satisfies even without all others.
fn alone(p: &Problem) -> Option<Constraint> {
    let forbids_all = |costs: &[i64]| costs.iter().all(|&c| c == FORBIDDEN);
    let node_forbids = |node: &Node| match node.fixed {
        Some(fixed) => node.costs[fixed] == FORBIDDEN,
        None => forbids_all(&node.costs),
    };
    if let Some(k) = p.nodes.iter().position(node_forbids) {
        return Some(Constraint::Node(k));
    }
    if let Some(k) = p.edges.iter().position(|e| forbids_all(e.costs.costs())) {
        return Some(Constraint::Edge(k));
    }
    // The least that each node uses of a row: usages of one node in one row add up per strategy.
    let mut by_node: Vec<Vec<&super::problem::Usage>> = vec![vec![]; p.nodes.len()];
    p.usages.iter().for_each(|u| by_node[u.node].push(u));
    let mut steps = vec![0i64; p.limits.len() + 1];
    for usages in by_node.iter().filter(|u| !u.is_empty()) {
        let mut bounds: Vec<usize> = usages.iter().flat_map(|u| [u.rows.start, u.rows.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        for piece in bounds.windows(2) {
            let inside = usages.iter().filter(|u| u.rows.start <= piece[0] && piece[1] <= u.rows.end);
            let mut sum = vec![0i64; p.nodes[usages[0].node].costs.len()];
            inside.for_each(|u| sum.iter_mut().zip(u.amounts.iter()).for_each(|(s, a)| *s += a));
            let least = sum.into_iter().min().unwrap_or(0);
            steps[piece[0]] += least;
            steps[piece[1]] -= least;
        }
    }
    let mut used = 0;
    let over = |(step, limit): (&i64, &i64)| {
        used += step;
        used > *limit
    };
    steps.iter().zip(&p.limits).position(over).map(Constraint::Row)
}

/// The problem with all finite costs zero.
fn without_costs(problem: &Problem) -> Problem {
    let zero = |c: i64| if c == FORBIDDEN { FORBIDDEN } else { 0 };
    let mut p = problem.clone();
    p.warm_start = None;
    p.nodes.iter_mut().flat_map(|n| &mut n.costs).for_each(|c| *c = zero(*c));
    for e in &mut p.edges {
        e.costs = Arc::new(Matrix::from_fn(e.costs.rows(), e.costs.cols(), |i, j| zero(e.costs.get(i, j))));
    }
    p
}

/// The problem with only some of its constraints.
fn only(p: &Problem, kept: &[Constraint]) -> Problem {
    let free = |node: &Node| Node { costs: vec![0; node.costs.len()], fixed: None };
    let mut q = Problem {
        nodes: p.nodes.iter().map(free).collect(),
        edges: vec![],
        limits: vec![RANGE as i64 / 2; p.limits.len()],
        groups: vec![],
        ..p.clone()
    };
    for &constraint in kept {
        match constraint {
            Constraint::Row(k) => q.limits[k] = p.limits[k],
            Constraint::Edge(k) => q.edges.push(p.edges[k].clone()),
            Constraint::Node(k) => q.nodes[k] = p.nodes[k].clone(),
            Constraint::Group(k) => q.groups.push(p.groups[k].clone()),
        }
    }
    q
}

fn conflict(members: &[Constraint], irreducible: bool, smallest: bool) -> Conflict {
    let mut out = Conflict { irreducible, smallest, ..Conflict::default() };
    for &member in members {
        match member {
            Constraint::Row(k) => out.rows.push(k),
            Constraint::Edge(k) => out.edges.push(k),
            Constraint::Node(k) => out.nodes.push(k),
            Constraint::Group(k) => out.groups.push(k),
        }
    }
    out
}
