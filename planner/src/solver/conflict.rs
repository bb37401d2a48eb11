//! Which constraints are in each other's way when no choice is feasible.
//!
//! Costs are set to zero. Each constraint (the limit of a row, the forbidden pairs of an edge, the fixed or forbidden strategies of a node, a group) is
//! dropped in turn and stays out if the rest still conflicts. What remains is irreducible: without any one of it, a
//! choice exists.

use super::drive;
use super::problem::{FORBIDDEN, Matrix, Node, Problem, RANGE};
use super::result::{Conflict, Options, SolveError};
use std::sync::Arc;
use std::time::Instant;

/// An irreducible set of constraints that no choice satisfies: each is dropped in turn, and stays out if the rest still conflicts.
pub(crate) fn find(problem: &Problem, options: &Options) -> Result<Conflict, SolveError> {
    let deadline = Instant::now() + options.time_limit;
    let mut p = problem.clone();
    p.warm_start = None;
    for node in &mut p.nodes {
        node.costs.iter_mut().filter(|c| **c != FORBIDDEN).for_each(|c| *c = 0);
    }
    for e in &mut p.edges {
        let m =
            Matrix::from_fn(
                e.costs.rows(),
                e.costs.cols(),
                |i, j| {
                    if e.costs.get(i, j) == FORBIDDEN { FORBIDDEN } else { 0 }
                },
            );
        e.costs = Arc::new(m);
    }
    let mut out = Conflict { irreducible: true, ..Conflict::default() };
    let mut conflicts = |q: &Problem| -> Result<bool, SolveError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || options.interrupted() {
            out.irreducible = false;
            return Ok(false);
        }
        let quick = Options { time_limit: left, relative_gap: 0.0, cutoff: None, ..options.clone() };
        let conflict = drive::feasible(q, &quick)?;
        out.irreducible &= conflict.is_some();
        Ok(conflict == Some(false))
    };
    let (mut rows, mut edges, mut nodes, mut groups) = (vec![], vec![], vec![], vec![]);
    for k in 0..p.limits.len() {
        let limit = std::mem::replace(&mut p.limits[k], RANGE as i64 / 2);
        if !conflicts(&p)? {
            p.limits[k] = limit;
            rows.push(k);
        }
    }
    for k in 0..p.edges.len() {
        if !p.edges[k].costs.costs().contains(&FORBIDDEN) {
            continue;
        }
        let free = Arc::new(Matrix::from_fn(p.edges[k].costs.rows(), p.edges[k].costs.cols(), |_, _| 0));
        let costs = std::mem::replace(&mut p.edges[k].costs, free);
        if !conflicts(&p)? {
            p.edges[k].costs = costs;
            edges.push(k);
        }
    }
    for k in 0..p.nodes.len() {
        if p.nodes[k].fixed.is_none() && !p.nodes[k].costs.contains(&FORBIDDEN) {
            continue;
        }
        let free = Node { costs: vec![0; p.nodes[k].costs.len()], fixed: None };
        let node = std::mem::replace(&mut p.nodes[k], free);
        if !conflicts(&p)? {
            p.nodes[k] = node;
            nodes.push(k);
        }
    }
    for k in 0..p.groups.len() {
        let group = std::mem::take(&mut p.groups[k]);
        if !conflicts(&p)? {
            p.groups[k] = group;
            groups.push(k);
        }
    }
    Ok(Conflict { rows, edges, nodes, groups, ..out })
}
