//! Diving: a choice by fixing some nodes at a time, with bound and multipliers raised anew for the rest.
//!
//! Large problems repeat themselves, and at the multipliers of the bound all repetitions change their mind at once: rounding one
//! bound takes the dear strategies everywhere, or nowhere. Here the multipliers follow what is fixed. Nodes that are surest
//! go first; where none is sure, those that come first in a breadth-first walk.

use super::dual::{self, Model};
use super::exact::Solver;
use super::graph::{Graph, Undo};
use super::problem::{FORBIDDEN, Total};
use super::reduce;
use super::search;
use std::time::Instant;

/// Iterations after each round of fixing.
const ITERATIONS: usize = 40;
/// Iterations on the whole graph that a dive may take as much work as.
const LONGEST: usize = 500;

/// A choice that costs less than `best`, if the dive finds one. Of the nodes left, one in `share` is fixed per round. `until` ends
/// it early.
pub(crate) fn dive(
    solver: &mut Solver<'_>,
    g: &Graph,
    best: Option<Total>,
    share: usize,
    until: Instant,
) -> Option<Vec<usize>> {
    let mut g = g.clone();
    let mut undos: Vec<Undo> = vec![];
    let mut found: Option<(Total, Vec<usize>)> = None;
    let options = solver.options;
    let entries: usize = g.edges.iter().map(|e| e.m.len()).sum();
    let most = solver.work + (2 * LONGEST * entries) as u64;
    while !g.nodes.is_empty() && solver.work < most {
        let stop = || Instant::now() >= until || options.interrupted();
        let target = found.as_ref().map(|f| f.0).or(best);
        let (model, mut dual) = Model::new(&g);
        let entries: usize = g.edges.iter().map(|e| e.m.len()).sum();
        solver.work += (2 * ITERATIONS * (entries + g.nodes.len() + g.limits.len())) as u64;
        let mut watch = |_: usize, _: &dual::Dual| if stop() { dual::Watch::Stop } else { dual::Watch::Continue };
        g.step = dual::ascend(&model, &g, &mut dual, ITERATIONS, 1e-4, target.map(|t| t as f64), &mut watch);
        if stop() {
            break;
        }
        let choice = model.round(&g, &dual, true);
        let mut full = choice.clone();
        if search::descend(&g, &mut full, stop)
            && let Some(cost) = g.objective(&full)
            && target.is_none_or(|t| cost < t)
        {
            found = Some((cost, undos.iter().rev().fold(full, |c, undo: &Undo| undo.expand(&c))));
        }
        let cutoff = found.as_ref().map(|f| f.0).or(best);
        let certified = dual::certify(&model, &mut g, &dual, cutoff);
        if cutoff.is_some_and(|c| certified.bound >= c) {
            break;
        }
        // The margin by which the chosen strategy beats the others.
        let margin = |node: usize| {
            let regrets = &certified.regrets[node];
            let others = (0..regrets.len()).filter(|&k| k != choice[node]).map(|k| regrets[k]).min();
            others.map_or(i64::MAX, |o| (o - regrets[choice[node]]).max(0))
        };
        let place = model.places();
        let mut order: Vec<(std::cmp::Reverse<i64>, u32, usize)> =
            (0..g.nodes.len()).map(|node| (std::cmp::Reverse(margin(node)), place[node], node)).collect();
        order.sort_unstable();
        drop(model);
        for &(_, _, node) in &order[..g.nodes.len().div_ceil(share)] {
            let costs = &mut g.nodes[node].costs;
            // Unless nothing below the cut-off takes it.
            if costs[choice[node]] != FORBIDDEN {
                costs.iter_mut().enumerate().filter(|(k, _)| *k != choice[node]).for_each(|(_, c)| *c = FORBIDDEN);
            }
        }
        if reduce::reduce(&mut g, solver.on, &mut solver.removed, &stop).is_err() {
            break;
        }
        let (next, undo) = g.compact();
        g = next;
        undos.push(undo);
        if g.nodes.is_empty() && cutoff.is_none_or(|c| g.constant < c) {
            found = Some((g.constant, undos.iter().rev().fold(vec![], |c, undo| undo.expand(&c))));
        }
    }
    found.map(|(_, choice)| choice)
}
