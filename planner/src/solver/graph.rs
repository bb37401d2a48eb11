//! The working form of a problem: what reductions rewrite, bounds and searches read, and how a choice is carried back.
//!
//! Between calls: alive nodes have at least one strategy; an alive edge joins two alive nodes, at most one per pair; the
//! usage of a node is a list of segments (row range, amount per strategy). Limits are what is left after usage common to all strategies was
//! subtracted. Each rewriting appends a [`Step`]; [`Undo`] replays them backwards.

use super::problem::{Cost, FORBIDDEN, Problem, Total};
use std::collections::HashMap;
use std::sync::Arc;

/// No choice satisfies the constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Infeasible;

/// Amounts used of each row of a range, per strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) amounts: Vec<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct GNode {
    pub(crate) alive: bool,
    pub(crate) costs: Vec<Cost>,
    pub(crate) segments: Vec<Segment>,
    /// Whether segments are disjoint, sorted, with least amount 0.
    pub(crate) normal: bool,
    /// Alive edges.
    pub(crate) edges: Vec<usize>,
}

/// An edge; its matrix is row-major over the strategies of `u`.
#[derive(Clone, Debug)]
pub(crate) struct GEdge {
    pub(crate) alive: bool,
    pub(crate) u: usize,
    pub(crate) v: usize,
    pub(crate) cols: usize,
    pub(crate) m: Vec<Cost>,
}

impl GEdge {
    /// The node at the other end.
    pub(crate) fn other(&self, node: usize) -> usize {
        if self.u == node { self.v } else { self.u }
    }

    /// The cost of strategy `i` of `node` with strategy `j` of the other.
    #[inline]
    pub(crate) fn at(&self, node: usize, i: usize, j: usize) -> Cost {
        if self.u == node { self.m[i * self.cols + j] } else { self.m[j * self.cols + i] }
    }

    /// Distances in the matrix between neighbouring strategies of `node`, and of the other end.
    #[inline]
    pub(crate) fn strides(&self, node: usize) -> (usize, usize) {
        if self.u == node { (self.cols, 1) } else { (1, self.cols) }
    }
}

/// One rewriting, enough to give removed nodes their choice.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Strategy `k` of the node was strategy `kept[k]` before.
    Shrink { node: usize, kept: Vec<u32> },
    /// The node takes this strategy.
    Take { node: usize, strategy: u32 },
    /// The node's strategy follows from the other's.
    Follow { node: usize, leader: usize, map: Vec<u32> },
    /// The node's strategy follows from two others', row-major over those of `a`.
    Follow2 { node: usize, a: usize, b: usize, cols: usize, map: Vec<u32> },
}

/// Carries choices of a reduced graph back to the graph it came from.
#[derive(Clone, Debug)]
pub(crate) struct Undo {
    steps: Vec<Step>,
    /// Index before, per node of the reduced graph.
    nodes: Vec<usize>,
    before: usize,
}

impl Undo {
    /// The choice of what is left after reduction that comes nearest to one of every node before: where a strategy was dropped,
    /// the first that was kept.
    pub(crate) fn project(&self, choice: &[usize]) -> Vec<usize> {
        let mut out = choice.to_vec();
        for step in &self.steps {
            if let Step::Shrink { node, kept } = step {
                out[*node] = kept.iter().position(|&k| k as usize == out[*node]).unwrap_or(0);
            }
        }
        self.nodes.iter().map(|&node| out[node]).collect()
    }

    /// The choice of every node before reduction.
    pub(crate) fn expand(&self, choice: &[usize]) -> Vec<usize> {
        let mut out = vec![0; self.before];
        for (&node, &c) in self.nodes.iter().zip(choice) {
            out[node] = c;
        }
        for step in self.steps.iter().rev() {
            match step {
                Step::Shrink { node, kept } => out[*node] = kept[out[*node]] as usize,
                Step::Take { node, strategy } => out[*node] = *strategy as usize,
                Step::Follow { node, leader, map } => out[*node] = map[out[*leader]] as usize,
                Step::Follow2 { node, a, b, cols, map } => out[*node] = map[out[*a] * cols + out[*b]] as usize,
            }
        }
        out
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Graph {
    /// Cost that every choice pays.
    pub(crate) constant: Total,
    pub(crate) nodes: Vec<GNode>,
    pub(crate) edges: Vec<GEdge>,
    pub(crate) limits: Vec<i64>,
    /// Multipliers of the rows, cost per unit of usage: where a search for bounds starts.
    pub(crate) prices: Vec<f64>,
    /// Relative length of the first steps of the multipliers: 1 where nothing is known of them, less where they are nearly right.
    pub(crate) step: f64,
    /// Changes of limits not yet applied, as steps: what is to be added from this row on.
    pub(crate) pending: Vec<i64>,
    /// The edge of a pair of nodes, smaller first. Looked up only.
    pub(crate) pairs: HashMap<(usize, usize), usize>,
    pub(crate) steps: Vec<Step>,
}

/// Sum of costs where any forbidden part forbids the whole.
#[inline]
pub(crate) fn plus(a: Cost, b: Cost) -> Cost {
    if a == FORBIDDEN || b == FORBIDDEN { FORBIDDEN } else { a + b }
}

impl Graph {
    /// The working form of a checked problem. Groups are merged, fixed choices made the only ones.
    pub(crate) fn new(problem: &Problem) -> Graph {
        let mut g = Graph {
            constant: 0,
            nodes: problem
                .nodes
                .iter()
                .map(|n| {
                    let mut costs = n.costs.clone();
                    if let Some(f) = n.fixed {
                        costs.iter_mut().enumerate().filter(|(k, _)| *k != f).for_each(|(_, c)| *c = FORBIDDEN);
                    }
                    GNode { alive: true, costs, segments: vec![], normal: false, edges: vec![] }
                })
                .collect(),
            edges: Vec::with_capacity(problem.edges.len()),
            limits: problem.limits.clone(),
            prices: vec![0.0; problem.limits.len()],
            step: 1.0,
            pending: vec![0; problem.limits.len() + 1],
            pairs: HashMap::new(),
            steps: vec![],
        };
        for usage in &problem.usages {
            if !usage.rows.is_empty() {
                let (from, to) = (usage.rows.start, usage.rows.end);
                g.nodes[usage.node].segments.push(Segment { from, to, amounts: usage.amounts.to_vec() });
            }
        }
        // Sharing makes most matrices of large problems equal: ask each one once whether it is all zero.
        let mut zero: HashMap<*const super::problem::Matrix, bool> = HashMap::new();
        for e in &problem.edges {
            let is_zero = *zero.entry(Arc::as_ptr(&e.costs)).or_insert_with(|| e.costs.costs().iter().all(|&c| c == 0));
            if !is_zero {
                g.add_edge(e.u, e.v, e.costs.costs().to_vec());
            }
        }
        // The node that each was merged into, itself at first.
        let mut into: Vec<usize> = (0..g.nodes.len()).collect();
        let follow = |into: &[usize], mut node: usize| {
            while into[node] != node {
                node = into[node];
            }
            node
        };
        for group in &problem.groups {
            let [first, rest @ ..] = &group[..] else { continue };
            for &node in rest {
                // Either may have been merged by an earlier group.
                let (leader, node) = (follow(&into, *first), follow(&into, node));
                if leader != node {
                    let map = (0..g.nodes[leader].costs.len() as u32).collect();
                    g.merge(node, leader, map);
                    into[node] = leader;
                }
            }
        }
        g
    }

    /// Adds an edge, or adds to the one between these nodes. The matrix is row-major over `u`.
    pub(crate) fn add_edge(&mut self, u: usize, v: usize, m: Vec<Cost>) {
        let key = (u.min(v), u.max(v));
        if let Some(&e) = self.pairs.get(&key) {
            let cols = self.nodes[v].costs.len();
            let edge = &mut self.edges[e];
            if edge.u == u {
                edge.m.iter_mut().zip(&m).for_each(|(a, &b)| *a = plus(*a, b));
            } else {
                for (k, a) in edge.m.iter_mut().enumerate() {
                    *a = plus(*a, m[(k % edge.cols) * cols + k / edge.cols]);
                }
            }
            return;
        }
        let e = self.edges.len();
        self.edges.push(GEdge { alive: true, u, v, cols: self.nodes[v].costs.len(), m });
        self.pairs.insert(key, e);
        self.nodes[u].edges.push(e);
        self.nodes[v].edges.push(e);
    }

    /// Removes an edge.
    pub(crate) fn drop_edge(&mut self, e: usize) {
        let (u, v) = (self.edges[e].u, self.edges[e].v);
        self.edges[e].alive = false;
        self.edges[e].m = vec![];
        self.pairs.remove(&(u.min(v), u.max(v)));
        for node in [u, v] {
            let list = &mut self.nodes[node].edges;
            if let Some(at) = list.iter().position(|&x| x == e) {
                list.swap_remove(at);
            }
        }
    }

    /// Merges `node` into `leader`: its strategy becomes `map[strategy of the leader]`.
    pub(crate) fn merge(&mut self, node: usize, leader: usize, map: Vec<u32>) {
        let gone = std::mem::take(&mut self.nodes[node].costs);
        for (c, &k) in self.nodes[leader].costs.iter_mut().zip(&map) {
            *c = plus(*c, gone[k as usize]);
        }
        for e in self.nodes[node].edges.clone() {
            let other = self.edges[e].other(node);
            if other == leader {
                let edge = &self.edges[e];
                for (i, c) in self.nodes[leader].costs.iter_mut().enumerate() {
                    *c = plus(*c, edge.at(leader, i, map[i] as usize));
                }
                self.drop_edge(e);
                continue;
            }
            let edge = &self.edges[e];
            let size = self.nodes[other].costs.len();
            let (step, across) = edge.strides(node);
            let mut m = Vec::with_capacity(map.len() * size);
            for &k in &map {
                m.extend((0..size).map(|j| edge.m[k as usize * step + j * across]));
            }
            self.drop_edge(e);
            self.add_edge(leader, other, m);
        }
        for s in std::mem::take(&mut self.nodes[node].segments) {
            let amounts = map.iter().map(|&k| s.amounts[k as usize]).collect();
            self.nodes[leader].segments.push(Segment { amounts, ..s });
        }
        self.nodes[leader].normal = false;
        self.nodes[node].alive = false;
        self.steps.push(Step::Follow { node, leader, map });
    }

    /// Keeps only some strategies of a node, at least one, in the given order.
    pub(crate) fn shrink(&mut self, node: usize, kept: Vec<u32>) {
        debug_assert!(!kept.is_empty());
        let n = &mut self.nodes[node];
        n.costs = kept.iter().map(|&k| n.costs[k as usize]).collect();
        for s in &mut n.segments {
            s.amounts = kept.iter().map(|&k| s.amounts[k as usize]).collect();
        }
        n.normal &= n.segments.is_empty();
        for e in n.edges.clone() {
            let edge = &mut self.edges[e];
            if edge.u == node {
                edge.m =
                    kept.iter().flat_map(|&k| edge.m[k as usize * edge.cols..][..edge.cols].iter().copied()).collect();
            } else {
                let old = edge.cols;
                edge.m = edge.m.chunks(old).flat_map(|row| kept.iter().map(|&k| row[k as usize])).collect();
                edge.cols = kept.len();
            }
        }
        self.steps.push(Step::Shrink { node, kept });
    }

    /// Takes usage off the limits of a range of rows.
    pub(crate) fn consume(&mut self, from: usize, to: usize, amount: i64) {
        self.pending[from] -= amount;
        self.pending[to] += amount;
    }

    /// Makes the segments of a node disjoint and sorted, moves what all strategies use to the limits, and drops empty ones.
    pub(crate) fn normalise(&mut self, node: usize) {
        if self.nodes[node].normal {
            return;
        }
        let segments = std::mem::take(&mut self.nodes[node].segments);
        let size = self.nodes[node].costs.len();
        // Events: at this row, add (or take away) the amounts of a segment.
        let mut events: Vec<(usize, usize, bool)> = Vec::with_capacity(2 * segments.len());
        for (k, s) in segments.iter().enumerate() {
            events.push((s.from, k, true));
            events.push((s.to, k, false));
        }
        events.sort_unstable();
        let mut sum = vec![0i64; size];
        let mut out: Vec<Segment> = vec![];
        let mut at = 0;
        while at < events.len() {
            let row = events[at].0;
            while at < events.len() && events[at].0 == row {
                let (_, k, start) = events[at];
                for (s, a) in sum.iter_mut().zip(&segments[k].amounts) {
                    *s += if start { *a } else { -*a };
                }
                at += 1;
            }
            let Some(&(next, _, _)) = events.get(at) else { break };
            let least = sum.iter().copied().min().unwrap_or(0);
            if least != 0 {
                self.consume(row, next, least);
            }
            if sum.iter().any(|&s| s != least) {
                let amounts: Vec<i64> = sum.iter().map(|s| s - least).collect();
                match out.last_mut() {
                    Some(last) if last.to == row && last.amounts == amounts => last.to = next,
                    _ => out.push(Segment { from: row, to: next, amounts }),
                }
            }
        }
        self.nodes[node].segments = out;
        self.nodes[node].normal = true;
    }

    /// Normalises all nodes and applies pending changes of limits.
    pub(crate) fn settle(&mut self) -> Result<(), Infeasible> {
        for node in 0..self.nodes.len() {
            if self.nodes[node].alive {
                self.normalise(node);
            }
        }
        let mut sum = 0;
        for (limit, step) in self.limits.iter_mut().zip(&mut self.pending) {
            sum += std::mem::take(step);
            *limit += sum;
        }
        self.pending.fill(0);
        if self.limits.iter().any(|&l| l < 0) { Err(Infeasible) } else { Ok(()) }
    }

    /// Renumbers what is alive and gives the way back.
    pub(crate) fn compact(mut self) -> (Graph, Undo) {
        let before = self.nodes.len();
        let mut index = vec![usize::MAX; before];
        let mut alive = vec![];
        for (k, n) in self.nodes.iter().enumerate() {
            if n.alive {
                index[k] = alive.len();
                alive.push(k);
            }
        }
        let mut g = Graph {
            constant: self.constant,
            nodes: alive
                .iter()
                .map(|&k| GNode { edges: vec![], ..std::mem::replace(&mut self.nodes[k], dead()) })
                .collect(),
            edges: vec![],
            limits: self.limits,
            prices: self.prices,
            step: self.step,
            pending: self.pending,
            pairs: HashMap::new(),
            steps: vec![],
        };
        for e in self.edges.into_iter().filter(|e| e.alive) {
            g.add_edge(index[e.u], index[e.v], e.m);
        }
        (g, Undo { steps: self.steps, nodes: alive, before })
    }

    /// The cost of a choice of all nodes, or none when it takes something forbidden.
    pub(crate) fn cost(&self, choice: &[usize]) -> Option<Total> {
        let mut total = self.constant;
        for (n, &c) in self.nodes.iter().zip(choice) {
            if n.costs[c] == FORBIDDEN {
                return None;
            }
            total += Total::from(n.costs[c]);
        }
        for e in &self.edges {
            let c = e.m[choice[e.u] * e.cols + choice[e.v]];
            if c == FORBIDDEN {
                return None;
            }
            total += Total::from(c);
        }
        Some(total)
    }

    /// What is left of each limit under a choice, for a settled graph.
    pub(crate) fn slack(&self, choice: &[usize]) -> Vec<i64> {
        let mut steps = vec![0i64; self.limits.len() + 1];
        for (n, &c) in self.nodes.iter().zip(choice) {
            for s in &n.segments {
                steps[s.from] += s.amounts[c];
                steps[s.to] -= s.amounts[c];
            }
        }
        let mut sum = 0;
        self.limits
            .iter()
            .zip(steps)
            .map(|(l, s)| {
                sum += s;
                l - sum
            })
            .collect()
    }

    /// The cost of a choice that is allowed and fits.
    pub(crate) fn objective(&self, choice: &[usize]) -> Option<Total> {
        self.cost(choice).filter(|_| self.slack(choice).iter().all(|&s| s >= 0))
    }
}

/// A place-holder for a node moved elsewhere.
fn dead() -> GNode {
    GNode { alive: false, costs: vec![], segments: vec![], normal: true, edges: vec![] }
}
