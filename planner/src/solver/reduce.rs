//! Exact reductions to a fixed point. Each keeps at least one optimal choice, or all choices better than any it drops.
//!
//! Cheap ones run from a queue of changed nodes: inconsistent strategies, minima moved to nodes, edges without cost, nodes with one
//! strategy, functional edges, elimination. Where the queue is empty, domination and rows are tried; what they remove
//! feeds the queue again.

use super::graph::{Graph, Infeasible, Step, plus};
use super::problem::{Cost, FORBIDDEN, Total};
use super::result::Reductions;
use std::collections::VecDeque;

/// A degree-2 elimination may fill a matrix up to this many times the entries it removes (or a small one in any case).
const FILL: usize = 2;
const SMALL_FILL: usize = 256;

/// Nodes visited between two looks at the clock.
const VISITS: usize = 64;

/// What was removed, by reduction.
pub(crate) type Removed = Vec<(&'static str, u64)>;

/// Adds to a count.
pub(crate) fn count(removed: &mut Removed, name: &'static str, n: u64) {
    match removed.iter_mut().find(|(x, _)| *x == name) {
        Some((_, c)) => *c += n,
        None => removed.push((name, n)),
    }
}

struct Work<'a> {
    g: &'a mut Graph,
    on: Reductions,
    queue: VecDeque<usize>,
    queued: Vec<bool>,
    /// Nodes to try domination on.
    stale: Vec<bool>,
    removed: &'a mut Removed,
    stop: &'a dyn Fn() -> bool,
    visits: usize,
    stopped: bool,
}

/// Reduces in place. The graph is settled afterwards, and no strategy is forbidden by itself.
///
/// When `stop` says so, what is left of the work is left out: every single reduction is exact.
pub(crate) fn reduce(
    g: &mut Graph,
    on: Reductions,
    removed: &mut Removed,
    stop: &dyn Fn() -> bool,
) -> Result<(), Infeasible> {
    let n = g.nodes.len();
    let queue = (0..n).filter(|&k| g.nodes[k].alive).collect();
    let mut w =
        Work { g, on, queue, queued: vec![true; n], stale: vec![true; n], removed, stop, visits: 0, stopped: false };
    w.forbidden()?;
    while !w.stops() {
        w.drain()?;
        w.g.settle()?;
        let mut progress = false;
        if on.rows {
            let (changed, map) = super::rows::compress(w.g, w.removed);
            if !map.is_empty() {
                let mut moved = vec![0.0; w.g.limits.len()];
                for (price, to) in w.g.prices.iter().zip(map) {
                    if let Some(to) = to {
                        moved[to] += price;
                    }
                }
                w.g.prices = moved;
            }
            progress = !changed.is_empty();
            changed.into_iter().for_each(|node| w.touch(node));
        }
        if on.consistency {
            progress |= w.overflowing()?;
        }
        if on.domination && !progress {
            progress |= w.domination();
        }
        if !progress {
            break;
        }
    }
    // Work that was stopped may leave forbidden strategies at nodes still queued.
    w.forbidden()?;
    w.g.settle()
}

impl Work<'_> {
    /// Whether to stop; the clock is read only now and then.
    fn stops(&mut self) -> bool {
        self.visits += 1;
        self.stopped |= self.visits % VISITS == 0 && (self.stop)();
        self.stopped
    }

    fn touch(&mut self, node: usize) {
        self.stale[node] = true;
        if !self.queued[node] {
            self.queued[node] = true;
            self.queue.push_back(node);
        }
    }

    fn touch_around(&mut self, node: usize) {
        self.touch(node);
        for k in 0..self.g.nodes[node].edges.len() {
            let other = self.g.edges[self.g.nodes[node].edges[k]].other(node);
            self.touch(other);
        }
    }

    /// Forbidden strategies go in any case: everything after relies on finite node costs.
    fn forbidden(&mut self) -> Result<(), Infeasible> {
        for node in 0..self.g.nodes.len() {
            if self.g.nodes[node].alive {
                self.drop_forbidden(node)?;
            }
        }
        Ok(())
    }

    fn drop_forbidden(&mut self, node: usize) -> Result<bool, Infeasible> {
        let costs = &self.g.nodes[node].costs;
        if !costs.contains(&FORBIDDEN) {
            return Ok(false);
        }
        let kept: Vec<u32> = (0..costs.len()).filter(|&k| costs[k] != FORBIDDEN).map(|k| k as u32).collect();
        if kept.is_empty() {
            return Err(Infeasible);
        }
        count(self.removed, "forbidden strategies", (costs.len() - kept.len()) as u64);
        self.g.shrink(node, kept);
        self.touch_around(node);
        Ok(true)
    }

    fn drain(&mut self) -> Result<(), Infeasible> {
        while let Some(node) = self.queue.pop_front() {
            if self.stops() {
                break;
            }
            self.queued[node] = false;
            if self.g.nodes[node].alive {
                self.visit(node)?;
            }
        }
        Ok(())
    }

    fn visit(&mut self, node: usize) -> Result<(), Infeasible> {
        self.drop_forbidden(node)?;
        if self.on.consistency && self.inconsistent(node)? {
            return Ok(());
        }
        if self.on.separation {
            for e in self.g.nodes[node].edges.clone() {
                self.separate(e);
            }
            if self.drop_forbidden(node)? {
                return Ok(());
            }
        }
        let g = &mut *self.g;
        if self.on.elimination && g.nodes[node].costs.len() == 1 {
            self.take_only(node)?;
            return Ok(());
        }
        if self.on.contraction && self.functional(node) {
            return Ok(());
        }
        if self.on.elimination {
            self.eliminate(node)?;
        }
        Ok(())
    }

    /// Drops strategies without a finite partner on some edge.
    fn inconsistent(&mut self, node: usize) -> Result<bool, Infeasible> {
        let g = &mut *self.g;
        let size = g.nodes[node].costs.len();
        let mut kept: Vec<u32> = (0..size as u32).collect();
        for &e in &g.nodes[node].edges {
            let edge = &g.edges[e];
            let (step, across) = edge.strides(node);
            let others = edge.m.len() / size;
            kept.retain(|&k| (0..others).any(|j| edge.m[k as usize * step + j * across] != FORBIDDEN));
        }
        if kept.is_empty() {
            return Err(Infeasible);
        }
        if kept.len() == size {
            return Ok(false);
        }
        count(self.removed, "strategies without partner", (size - kept.len()) as u64);
        self.g.shrink(node, kept);
        self.touch_around(node);
        Ok(true)
    }

    /// Moves row and column minima of an edge to its nodes; drops it when nothing is left.
    fn separate(&mut self, e: usize) {
        let g = &mut *self.g;
        let edge = &mut g.edges[e];
        let (u, v, cols) = (edge.u, edge.v, edge.cols);
        let mut changed_u = false;
        for (row, cost) in edge.m.chunks_mut(cols).zip(&mut g.nodes[u].costs) {
            let least = row.iter().copied().min().unwrap_or(FORBIDDEN);
            if least == FORBIDDEN {
                *cost = FORBIDDEN;
                changed_u = true;
            } else if least != 0 {
                row.iter_mut().filter(|c| **c != FORBIDDEN).for_each(|c| *c -= least);
                *cost = plus(*cost, least);
                changed_u = true;
            }
        }
        let mut least = vec![FORBIDDEN; cols];
        for row in edge.m.chunks(cols) {
            least.iter_mut().zip(row).for_each(|(l, &c)| *l = c.min(*l));
        }
        let changed_v = least.iter().any(|&l| l != 0);
        if changed_v {
            for row in edge.m.chunks_mut(cols) {
                for (c, &l) in row.iter_mut().zip(&least) {
                    if *c != FORBIDDEN {
                        *c -= l;
                    }
                }
            }
            g.nodes[v].costs.iter_mut().zip(&least).for_each(|(c, &l)| *c = plus(*c, l));
        }
        let zero = edge.m.iter().all(|&c| c == 0);
        if zero {
            g.drop_edge(e);
            count(self.removed, "edges without cost", 1);
        }
        if changed_u || zero {
            self.touch(u);
        }
        if changed_v || zero {
            self.touch(v);
        }
    }

    /// A node with one strategy: its costs go to the neighbours, its usage to the limits.
    fn take_only(&mut self, node: usize) -> Result<(), Infeasible> {
        for e in self.g.nodes[node].edges.clone() {
            let g = &mut *self.g;
            let other = g.edges[e].other(node);
            for (c, &m) in g.nodes[other].costs.iter_mut().zip(&g.edges[e].m) {
                *c = plus(*c, m);
            }
            g.drop_edge(e);
            self.touch(other);
        }
        if self.g.nodes[node].costs[0] == FORBIDDEN {
            return Err(Infeasible);
        }
        self.take(node, 0);
        count(self.removed, "nodes with one strategy", 1);
        Ok(())
    }

    /// Removes a node without edges.
    fn take(&mut self, node: usize, strategy: usize) {
        let n = &mut self.g.nodes[node];
        n.alive = false;
        self.g.constant += Total::from(n.costs[strategy]);
        for s in std::mem::take(&mut n.segments) {
            self.g.consume(s.from, s.to, s.amounts[strategy]);
        }
        self.g.steps.push(Step::Take { node, strategy: strategy as u32 });
    }

    /// Merges along an edge where each strategy of one end leaves exactly one of the other.
    fn functional(&mut self, node: usize) -> bool {
        for at in 0..self.g.nodes[node].edges.len() {
            let g = &*self.g;
            let edge = &g.edges[g.nodes[node].edges[at]];
            if !edge.m.contains(&FORBIDDEN) {
                continue;
            }
            let follows = |leader: usize| -> Option<Vec<u32>> {
                let (step, across) = edge.strides(leader);
                let size = g.nodes[leader].costs.len();
                let others = edge.m.len() / size;
                (0..size)
                    .map(|i| {
                        let mut finite = (0..others).filter(|j| edge.m[i * step + j * across] != FORBIDDEN);
                        let first = finite.next()? as u32;
                        finite.next().is_none().then_some(first)
                    })
                    .collect()
            };
            let other = edge.other(node);
            let merge = match (follows(node), follows(other)) {
                // Both ways: keep the node with more edges, there is less to move.
                (Some(m), Some(n)) => {
                    if g.nodes[node].edges.len() >= g.nodes[other].edges.len() {
                        (other, node, m)
                    } else {
                        (node, other, n)
                    }
                }
                (Some(m), None) => (other, node, m),
                (None, Some(n)) => (node, other, n),
                (None, None) => continue,
            };
            let (gone, leader, map) = merge;
            self.g.merge(gone, leader, map);
            count(self.removed, "nodes following a neighbour", 1);
            self.touch_around(leader);
            return true;
        }
        false
    }

    /// Eliminates a node of degree 0, 1 or 2 where its usage does not matter or can be carried.
    fn eliminate(&mut self, node: usize) -> Result<(), Infeasible> {
        let degree = self.g.nodes[node].edges.len();
        if degree > 2 {
            return Ok(());
        }
        self.g.normalise(node);
        let g = &mut *self.g;
        let free = g.nodes[node].segments.is_empty();
        let size = g.nodes[node].costs.len();
        match degree {
            0 if free => {
                let best = (0..size).min_by_key(|&k| g.nodes[node].costs[k]);
                let best = best.filter(|&k| g.nodes[node].costs[k] != FORBIDDEN).ok_or(Infeasible)?;
                self.take(node, best);
                count(self.removed, "nodes of degree 0", 1);
            }
            1 => {
                let e = g.nodes[node].edges[0];
                let edge = &g.edges[e];
                let other = edge.other(node);
                let cost = |i: usize, j: usize| plus(g.nodes[node].costs[i], edge.at(node, i, j));
                // Per strategy of the neighbour the cheapest here; with usage, it must also use least of everything.
                let mut map = vec![];
                for j in 0..g.nodes[other].costs.len() {
                    let lighter =
                        |a: usize, b: usize| g.nodes[node].segments.iter().all(|s| s.amounts[a] <= s.amounts[b]);
                    let best = (0..size)
                        .reduce(|a, b| {
                            let (ca, cb) = (cost(a, j), cost(b, j));
                            if cb < ca || (cb == ca && !free && lighter(b, a) && !lighter(a, b)) { b } else { a }
                        })
                        .ok_or(Infeasible)?;
                    if !free && !(0..size).all(|i| cost(i, j) == FORBIDDEN || lighter(best, i)) {
                        return Ok(());
                    }
                    map.push(best as u32);
                }
                self.g.merge(node, other, map);
                count(self.removed, "nodes of degree 1", 1);
                self.touch_around(other);
            }
            2 if free => {
                let (e, f) = (g.nodes[node].edges[0], g.nodes[node].edges[1]);
                let (a, b) = (g.edges[e].other(node), g.edges[f].other(node));
                let (rows, cols) = (g.nodes[a].costs.len(), g.nodes[b].costs.len());
                if rows * cols > (FILL * size * (rows + cols)).max(SMALL_FILL) {
                    return Ok(());
                }
                let mut m: Vec<Cost> = vec![FORBIDDEN; rows * cols];
                let mut map = vec![0u32; rows * cols];
                for k in 0..size {
                    let own = g.nodes[node].costs[k];
                    for i in 0..rows {
                        let with = plus(own, g.edges[e].at(node, k, i));
                        if with == FORBIDDEN {
                            continue;
                        }
                        for j in 0..cols {
                            let c = plus(with, g.edges[f].at(node, k, j));
                            if c < m[i * cols + j] {
                                m[i * cols + j] = c;
                                map[i * cols + j] = k as u32;
                            }
                        }
                    }
                }
                g.drop_edge(e);
                g.drop_edge(f);
                g.nodes[node].alive = false;
                g.steps.push(Step::Follow2 { node, a, b, cols, map });
                g.add_edge(a, b, m);
                count(self.removed, "nodes of degree 2", 1);
                self.touch(a);
                self.touch(b);
            }
            _ => {}
        }
        Ok(())
    }

    /// Drops strategies that overflow a row even when all other nodes use their least. For a settled graph.
    fn overflowing(&mut self) -> Result<bool, Infeasible> {
        let least = super::rows::RangeMin::new(&self.g.limits);
        let mut progress = false;
        for node in 0..self.g.nodes.len() {
            let n = &self.g.nodes[node];
            if !n.alive || n.segments.is_empty() {
                continue;
            }
            let size = n.costs.len();
            let room: Vec<i64> = n.segments.iter().map(|s| least.min(s.from, s.to)).collect();
            let fits = |k: usize| n.segments.iter().zip(&room).all(|(s, r)| s.amounts[k] <= *r);
            let kept: Vec<u32> = (0..size).filter(|&k| fits(k)).map(|k| k as u32).collect();
            if kept.is_empty() {
                return Err(Infeasible);
            }
            if kept.len() < size {
                count(self.removed, "strategies that overflow", (size - kept.len()) as u64);
                self.g.shrink(node, kept);
                self.touch_around(node);
                progress = true;
            }
        }
        Ok(progress)
    }

    /// Drops strategies that another one of the node beats, whatever the neighbours choose (Goldstein's criterion), with no
    /// more usage. For a settled graph.
    fn domination(&mut self) -> bool {
        let mut progress = false;
        for node in 0..self.g.nodes.len() {
            if !self.g.nodes[node].alive || !std::mem::take(&mut self.stale[node]) {
                continue;
            }
            if self.stops() {
                return false;
            }
            let kept = undominated(self.g, node);
            let size = self.g.nodes[node].costs.len();
            if kept.len() < size {
                count(self.removed, "dominated strategies", (size - kept.len()) as u64);
                self.g.shrink(node, kept);
                self.g.normalise(node);
                self.touch_around(node);
                progress = true;
            }
        }
        progress
    }
}

/// The strategies of a node that no other beats; of equal ones the first.
fn undominated(g: &Graph, node: usize) -> Vec<u32> {
    let n = &g.nodes[node];
    let size = n.costs.len();
    // With minima taken out of the rows, no edge can pay for a higher cost of its own: the sums below only grow.
    let minima: Vec<Vec<Cost>> = n
        .edges
        .iter()
        .map(|&e| {
            let edge = &g.edges[e];
            let (step, across) = edge.strides(node);
            let others = edge.m.len() / size;
            (0..size).map(|i| (0..others).map(|j| edge.m[i * step + j * across]).min().unwrap_or(0)).collect()
        })
        .collect();
    let base: Vec<Cost> = (0..size).map(|i| minima.iter().fold(n.costs[i], |sum, m| plus(sum, m[i]))).collect();
    let mut order: Vec<usize> = (0..size).collect();
    order.sort_by_key(|&i| (base[i], i));
    let beats = |i: usize, k: usize| -> bool {
        if base[i] == FORBIDDEN || !n.segments.iter().all(|s| s.amounts[i] <= s.amounts[k]) {
            return false;
        }
        let mut lead = base[k] - base[i];
        if lead < 0 {
            return false;
        }
        for (&e, minima) in n.edges.iter().zip(&minima) {
            let edge = &g.edges[e];
            let (step, across) = edge.strides(node);
            let others = edge.m.len() / size;
            let (a, b) = (i * step, k * step);
            let shift = minima[k] - minima[i];
            let mut worst = 0;
            for j in 0..others {
                let with = edge.m[b + j * across];
                if with == FORBIDDEN {
                    continue;
                }
                let instead = edge.m[a + j * across];
                if instead == FORBIDDEN {
                    return false;
                }
                worst = worst.max(instead - with + shift);
                if worst > lead {
                    return false;
                }
            }
            lead -= worst;
        }
        true
    };
    let mut kept: Vec<usize> = vec![];
    for &k in &order {
        if base[k] == FORBIDDEN {
            continue;
        }
        if !kept.iter().any(|&i| beats(i, k)) {
            kept.push(k);
        }
    }
    if kept.is_empty() {
        // Every strategy is forbidden by an edge; that is for consistency to report.
        kept = (0..size).collect();
    }
    kept.sort_unstable();
    kept.into_iter().map(|k| k as u32).collect()
}
