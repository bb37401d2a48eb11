//! Large neighbourhoods: some nodes of a feasible choice choose anew, exactly, while the others keep theirs.
//!
//! The graph comes with moved costs (see `dual`), so what a choice costs above the bound is a sum of terms that are not negative: of nodes,
//! of edges, and of rows (price times slack). Where these terms are large there is something to win, so that is where nodes are picked,
//! less often where that was in vain. Neighbourhoods of one batch are solved on several threads from the same choice and applied in order, so
//! the result does not depend on how many.

use super::exact::{Outcome, Solver};
use super::graph::{GNode, Graph, plus};
use super::problem::{FORBIDDEN, Total};
use super::random::Random;
use super::threads;
use std::time::Instant;

/// Branches that a neighbourhood may take.
const BUDGET: u64 = 20;
/// Neighbourhoods that start from one choice.
const BATCH: usize = 8;
/// Nodes of the smallest neighbourhoods.
const LEAST: f64 = 6.0;
/// Weight of a place per time that it was tried in vain.
const FATIGUE: f64 = 0.7;
/// Kinds of neighbourhoods; each has a size of its own that follows what can be solved.
const KINDS: usize = 4;

/// The problem of choosing anew for some nodes while the others keep their choice. Its objective leaves out what they cost.
pub(crate) fn cut_out(g: &Graph, choice: &[usize], slack: &[i64], nodes: &[usize], index: &mut [usize]) -> Graph {
    let mut limits = slack.to_vec();
    for (k, &node) in nodes.iter().enumerate() {
        index[node] = k;
        for s in &g.nodes[node].segments {
            let amount = s.amounts[choice[node]];
            limits[s.from..s.to].iter_mut().for_each(|l| *l += amount);
        }
    }
    let mut sub = Graph {
        constant: 0,
        nodes: nodes.iter().map(|&node| GNode { edges: vec![], ..g.nodes[node].clone() }).collect(),
        edges: vec![],
        pending: vec![0; limits.len() + 1],
        limits,
        prices: g.prices.clone(),
        step: g.step,
        pairs: Default::default(),
        steps: vec![],
    };
    for &node in nodes {
        for &e in &g.nodes[node].edges {
            let edge = &g.edges[e];
            let other = edge.other(node);
            if index[other] == usize::MAX {
                for (k, c) in sub.nodes[index[node]].costs.iter_mut().enumerate() {
                    *c = plus(*c, edge.at(node, k, choice[other]));
                }
            } else if edge.u == node {
                sub.add_edge(index[node], index[other], edge.m.clone());
            }
        }
    }
    for &node in nodes {
        index[node] = usize::MAX;
    }
    sub
}

/// The cost of the nodes in question and all their edges, under a feasible choice.
pub(crate) fn cost_around(g: &Graph, choice: &[usize], nodes: &[usize], index: &mut [usize]) -> Total {
    nodes.iter().for_each(|&n| index[n] = 0);
    let mut total: Total = 0;
    for &node in nodes {
        total += Total::from(g.nodes[node].costs[choice[node]]);
        for &e in &g.nodes[node].edges {
            let edge = &g.edges[e];
            if edge.u == node || index[edge.u] == usize::MAX {
                total += Total::from(edge.m[choice[edge.u] * edge.cols + choice[edge.v]]);
            }
        }
    }
    nodes.iter().for_each(|&n| index[n] = usize::MAX);
    total
}

/// Whether the choice takes nothing forbidden at these nodes and their edges.
fn allowed_around(g: &Graph, choice: &[usize], nodes: &[usize]) -> bool {
    nodes.iter().all(|&node| {
        let pair = |&e: &usize| g.edges[e].m[choice[g.edges[e].u] * g.edges[e].cols + choice[g.edges[e].v]];
        g.nodes[node].costs[choice[node]] != FORBIDDEN && g.nodes[node].edges.iter().all(|e| pair(e) != FORBIDDEN)
    })
}

/// What was learned of where and how large neighbourhoods should be.
pub(crate) struct Places {
    /// Times a node was tried in vain.
    tries: Vec<u32>,
    /// Largest size per kind.
    sizes: [f64; KINDS],
    /// Neighbourhoods since the last that was better.
    idle: usize,
}

impl Places {
    pub(crate) fn new(nodes: usize) -> Places {
        Places { tries: vec![0; nodes], sizes: [8.0 * LEAST; KINDS], idle: 0 }
    }
}

/// Where the next neighbourhoods are cut out.
struct Picker<'a> {
    g: &'a Graph,
    /// Per node, what each strategy costs above the least, at the prices of rows.
    above: Vec<Vec<f64>>,
    /// Rows with a price, and the nodes that use each.
    priced: Vec<(usize, Vec<u32>)>,
    /// Per node, the priced rows it uses, as a range of `priced`, per segment.
    uses: Vec<Vec<(u32, u32)>>,
    /// Weight per node under the present choice.
    weights: Vec<f64>,
    row_weights: Vec<f64>,
    seen: Vec<bool>,
}

impl Picker<'_> {
    fn new(g: &Graph) -> Picker<'_> {
        let cumulated: Vec<f64> = std::iter::once(0.0)
            .chain(g.prices.iter().scan(0.0, |sum, p| {
                *sum += p;
                Some(*sum)
            }))
            .collect();
        let above = g
            .nodes
            .iter()
            .map(|n| {
                let mut costs: Vec<f64> =
                    n.costs.iter().map(|&c| if c == FORBIDDEN { f64::INFINITY } else { c as f64 }).collect();
                for s in &n.segments {
                    let price = cumulated[s.to] - cumulated[s.from];
                    costs.iter_mut().zip(&s.amounts).for_each(|(c, &a)| *c += price * a as f64);
                }
                let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
                costs.iter_mut().for_each(|c| *c -= least);
                costs
            })
            .collect();
        let rows: Vec<usize> = (0..g.limits.len()).filter(|&r| g.prices[r] > 0.0).collect();
        let mut priced: Vec<(usize, Vec<u32>)> = rows.iter().map(|&r| (r, vec![])).collect();
        let mut uses = vec![vec![]; g.nodes.len()];
        for (node, n) in g.nodes.iter().enumerate() {
            for s in &n.segments {
                let (a, b) = (rows.partition_point(|&r| r < s.from), rows.partition_point(|&r| r < s.to));
                if a < b {
                    uses[node].push((a as u32, b as u32));
                    priced[a..b].iter_mut().for_each(|(_, users)| users.push(node as u32));
                }
            }
        }
        Picker {
            g,
            above,
            row_weights: vec![0.0; priced.len()],
            priced,
            uses,
            weights: vec![0.0; g.nodes.len()],
            seen: vec![false; g.nodes.len()],
        }
    }

    /// Weighs places by what they cost above the bound.
    fn weigh(&mut self, choice: &[usize], slack: &[i64], tries: &[u32]) {
        for ((w, above), &c) in self.weights.iter_mut().zip(&self.above).zip(choice) {
            *w = above[c];
        }
        for e in &self.g.edges {
            let cost = e.m[choice[e.u] * e.cols + choice[e.v]].max(0) as f64;
            self.weights[e.u] += 0.5 * cost;
            self.weights[e.v] += 0.5 * cost;
        }
        for (w, (row, _)) in self.row_weights.iter_mut().zip(&self.priced) {
            *w = self.g.prices[*row] * slack[*row] as f64;
        }
        for (w, &tries) in self.weights.iter_mut().zip(tries) {
            *w *= FATIGUE.powi(tries.min(60) as i32);
        }
    }

    /// Nodes to choose anew, of some kind. The first was the seed.
    fn pick(&mut self, kind: usize, size: usize, slack: &[i64], random: &mut Random) -> Vec<usize> {
        let n = self.g.nodes.len();
        let mut picked: Vec<usize> = vec![];
        match kind {
            // Around a place that costs much.
            0 => {
                self.push(weighted(&self.weights, random), &mut picked);
                self.grow(&mut picked, 0, size, random);
            }
            // The same, with users of a priced row that the place uses.
            1 => {
                self.push(weighted(&self.weights, random), &mut picked);
                self.grow(&mut picked, 0, size / 2, random);
                let ranges: Vec<(u32, u32)> = picked.iter().flat_map(|&node| self.uses[node].iter().copied()).collect();
                if !ranges.is_empty() {
                    let (a, b) = ranges[random.below(ranges.len())];
                    self.users(a as usize + random.below((b - a) as usize), &mut picked, size, random);
                }
                let from = picked.len() - 1;
                self.grow(&mut picked, from, size, random);
            }
            // Users of a priced row that is not full, or of a full row.
            2 => {
                if !self.priced.is_empty() {
                    let row = if random.below(2) == 0 {
                        weighted(&self.row_weights, random)
                    } else {
                        random.below(self.priced.len())
                    };
                    self.users(row, &mut picked, 2 * size / 3, random);
                } else if !slack.is_empty() {
                    let row = (0..8).map(|_| random.below(slack.len())).min_by_key(|&r| slack[r]).unwrap_or(0);
                    let users = |k: &usize| self.g.nodes[*k].segments.iter().any(|s| s.from <= row && row < s.to);
                    let users: Vec<usize> = (0..n).filter(users).collect();
                    for _ in 0..if users.is_empty() { 0 } else { (size / 3).max(2) } {
                        self.push(users[random.below(users.len())], &mut picked);
                    }
                }
                if picked.is_empty() {
                    self.push(random.below(n), &mut picked);
                }
                self.grow(&mut picked, 0, size, random);
            }
            // Anywhere.
            _ => {
                self.push(random.below(n), &mut picked);
                self.grow(&mut picked, 0, size, random);
            }
        }
        picked.iter().for_each(|&node| self.seen[node] = false);
        picked
    }

    fn push(&mut self, node: usize, picked: &mut Vec<usize>) {
        if !std::mem::replace(&mut self.seen[node], true) {
            picked.push(node);
        }
    }

    /// Adds random users of a priced row, rather those that cost much.
    fn users(&mut self, row: usize, picked: &mut Vec<usize>, size: usize, random: &mut Random) {
        let count = self.priced[row].1.len();
        for _ in 0..if count == 0 { 0 } else { 2 * size.saturating_sub(picked.len()) } {
            if picked.len() >= size {
                break;
            }
            let user = self.priced[row].1[random.below(count)] as usize;
            self.push(user, picked);
        }
    }

    /// Adds neighbours of the picked nodes from `at` on, breadth first from a random side.
    fn grow(&mut self, picked: &mut Vec<usize>, mut at: usize, size: usize, random: &mut Random) {
        let g = self.g;
        while at < picked.len() && picked.len() < size {
            let edges = &g.nodes[picked[at]].edges;
            let skip = if edges.is_empty() { 0 } else { random.below(edges.len()) };
            for k in 0..edges.len() {
                if picked.len() < size {
                    self.push(g.edges[edges[(k + skip) % edges.len()]].other(picked[at]), picked);
                }
            }
            at += 1;
            if at == picked.len() && picked.len() < size.min(g.nodes.len()) && random.below(4) != 0 {
                self.push(random.below(g.nodes.len()), picked);
            }
        }
    }
}

/// An index with a chance in proportion to its weight; any where all weights are zero.
fn weighted(weights: &[f64], random: &mut Random) -> usize {
    let sum: f64 = weights.iter().filter(|w| w.is_finite()).sum();
    if sum <= 0.0 {
        return random.below(weights.len());
    }
    let mut at = sum * (random.below(1 << 30) as f64 / f64::from(1 << 30));
    let last = weights.len() - 1;
    for (k, &w) in weights.iter().enumerate().filter(|(_, w)| w.is_finite()) {
        at -= w;
        if at < 0.0 {
            return k;
        }
    }
    last
}

/// Improves a feasible choice of a graph with moved costs, until a moment, or until some work is done, or until nothing was
/// found for long: then it gives true.
pub(crate) fn improve(
    solver: &mut Solver<'_>,
    places: &mut Places,
    g: &Graph,
    best: &mut (Total, Vec<usize>),
    until: Instant,
    work: Option<u64>,
    threads: usize,
) -> bool {
    let until = until.min(solver.deadline);
    let n = g.nodes.len();
    if n == 0 {
        return true;
    }
    let start = solver.work;
    let mut picker = Picker::new(g);
    let Places { tries, sizes, idle } = places;
    let mut slack = g.slack(&best.1);
    let mut index = vec![usize::MAX; n];
    let mut whole = false;
    let (mut tried, mut won) = ([0; KINDS], [0; KINDS]);
    while Instant::now() < until && !solver.options.interrupted() && !whole && *idle <= 40 * n {
        if work.is_some_and(|w| solver.work - start >= w) {
            break;
        }
        picker.weigh(&best.1, &slack, tries);
        let tasks: Vec<(usize, Vec<usize>, u64)> = (0..BATCH)
            .map(|k| {
                // Small ones find more per time, large ones find what small ones do not: sizes are spread evenly by magnitude.
                let share = solver.random.below(1 << 20) as f64 / f64::from(1 << 20);
                let size = LEAST * (sizes[k % KINDS] / LEAST).powf(share);
                let nodes = picker.pick(k % KINDS, size as usize, &slack, &mut solver.random);
                tries[nodes[0]] += 1;
                (k % KINDS, nodes, solver.random.below(1 << 62) as u64)
            })
            .collect();
        let outcomes = solve_all(solver, g, &best.1, &slack, &tasks, until, threads);
        for ((kind, nodes, _), (out, gave_up)) in tasks.iter().zip(outcomes) {
            let size = &mut sizes[*kind];
            // Sizes above two thirds of the largest say whether that is right.
            if gave_up || 3 * nodes.len() >= 2 * *size as usize {
                *size = (*size * if gave_up { 0.9 } else { 1.15 }).clamp(2.0 * LEAST, (n as f64).max(2.0 * LEAST));
            }
            whole |= nodes.len() == n && !gave_up;
            tried[*kind] += 1;
            *idle += 1;
            let Some((_, found)) = out.found else { continue };
            // What an earlier one of the batch changed may be next to it or use the same rows.
            let before = cost_around(g, &best.1, nodes, &mut index);
            let old: Vec<usize> = nodes.iter().map(|&node| best.1[node]).collect();
            nodes.iter().zip(&found).for_each(|(&node, &c)| best.1[node] = c);
            let after = allowed_around(g, &best.1, nodes).then(|| cost_around(g, &best.1, nodes, &mut index));
            let change = |slack: &mut Vec<i64>, from: &[usize], to: &[usize]| {
                for ((&node, &a), &b) in nodes.iter().zip(from).zip(to).filter(|((_, a), b)| a != b) {
                    for s in &g.nodes[node].segments {
                        let less = s.amounts[a] - s.amounts[b];
                        slack[s.from..s.to].iter_mut().for_each(|l| *l += less);
                    }
                }
            };
            change(&mut slack, &old, &found);
            match after {
                Some(after) if after < before && slack.iter().all(|&l| l >= 0) => {
                    best.0 += after - before;
                    *idle = 0;
                    won[*kind] += 1;
                    nodes.iter().for_each(|&node| tries[node] = 0);
                }
                _ => {
                    change(&mut slack, &found, &old);
                    nodes.iter().zip(&old).for_each(|(&node, &c)| best.1[node] = c);
                }
            }
        }
    }
    tracing::debug!(?sizes, ?tried, ?won, best = best.0, "neighbourhoods");
    whole || *idle > 40 * n
}

/// Solves neighbourhoods of one choice on some threads. Gives of each the outcome and whether it gave up, in order.
fn solve_all(
    solver: &mut Solver<'_>,
    g: &Graph,
    choice: &[usize],
    slack: &[i64],
    tasks: &[(usize, Vec<usize>, u64)],
    until: Instant,
    count: usize,
) -> Vec<(Outcome, bool)> {
    let parent = &*solver;
    let outcomes = threads::map(tasks.len(), count, |k| {
        let (_, nodes, seed) = &tasks[k];
        let mut own = parent.fork(*seed, until, BUDGET);
        let mut index = vec![usize::MAX; g.nodes.len()];
        let sub = cut_out(g, choice, slack, nodes, &mut index);
        let now = cost_around(g, choice, nodes, &mut index);
        let out = own.branch(sub, Some(now), 1);
        (out, own)
    });
    outcomes
        .into_iter()
        .map(|(out, own)| {
            let gave_up = own.gave_up;
            solver.join(own);
            (out, gave_up)
        })
        .collect()
}
