//! Lower bounds: rows priced by multipliers, costs moved between edges and nodes (reparametrisation) so that independent minima sum
//! to as much as possible.
//!
//! For any multipliers `p >= 0` and any messages `m`, every feasible choice costs at least
//! `constant + sum_i min_k c'_i(k) + sum_e min_kl c'_e(k,l) - p . limits`, where `c'_i = c_i + p . usage_i + sum_e m_e,i` and
//! `c'_e = c_e - m_e,u - m_e,v`. Passes over the nodes, forward and backward, pull all that edges can give to a node and push an equal
//! share of it to the edges ahead (sequential reweighted message passing; V. Kolmogorov, "A new look at reweighted message
//! passing", 2015): the bound never falls. Multipliers follow a subgradient.
//!
//! Passes run in floating point. [`certify`] rounds messages and multipliers and repeats the sums in integers, so what it reports is exact,
//! and drops every strategy and pair that no choice better than the best known can use.

use super::graph::Graph;
use super::problem::{Cost, FORBIDDEN, Total};

/// Multipliers are multiples of 2^-40 when certified.
const PRICE_BITS: u32 = 40;

/// A copy of a compact graph in floating point, laid out for passes.
pub(crate) struct Model {
    /// Start of each node's strategies in the arrays below; one more than nodes.
    pub(crate) first: Vec<usize>,
    pub(crate) costs: Vec<f64>,
    edges: Vec<MEdge>,
    matrices: Vec<f64>,
    /// Per node its edges, and whether the node is their first.
    incident: Vec<Vec<(u32, bool)>>,
    /// Where each node comes in passes.
    place: Vec<u32>,
    order: Vec<u32>,
}

struct MEdge {
    u: usize,
    v: usize,
    rows: usize,
    cols: usize,
    at: usize,
    /// Start of the messages to `u` and to `v`.
    mu: usize,
    mv: usize,
}

/// Messages and multipliers.
#[derive(Clone)]
pub(crate) struct Dual {
    messages: Vec<f64>,
    pub(crate) prices: Vec<f64>,
}

#[cfg(test)]
impl Dual {
    /// Adds to all messages, and to multipliers as far as they stay above zero.
    pub(crate) fn disturb(&mut self, mut by: impl FnMut() -> f64) {
        self.messages.iter_mut().for_each(|m| *m += by());
        self.prices.iter_mut().for_each(|p| *p = (*p + by()).max(0.0));
    }
}

impl Model {
    pub(crate) fn new(g: &Graph) -> (Model, Dual) {
        let mut first = vec![0];
        let mut costs = vec![];
        for n in &g.nodes {
            costs.extend(n.costs.iter().map(|&c| c as f64));
            first.push(costs.len());
        }
        let mut edges = vec![];
        let mut matrices = vec![];
        let mut incident = vec![vec![]; g.nodes.len()];
        let mut at_message = 0;
        for (k, e) in g.edges.iter().enumerate() {
            let rows = g.nodes[e.u].costs.len();
            edges.push(MEdge {
                u: e.u,
                v: e.v,
                rows,
                cols: e.cols,
                at: matrices.len(),
                mu: at_message,
                mv: at_message + rows,
            });
            at_message += rows + e.cols;
            matrices.extend(e.m.iter().map(|&c| if c == FORBIDDEN { f64::INFINITY } else { c as f64 }));
            incident[e.u].push((k as u32, true));
            incident[e.v].push((k as u32, false));
        }
        let order = order(g);
        let mut place = vec![0; g.nodes.len()];
        order.iter().enumerate().for_each(|(k, &node)| place[node as usize] = k as u32);
        let model = Model { first, costs, edges, matrices, incident, place, order };
        (model, Dual { messages: vec![0.0; at_message], prices: g.prices.clone() })
    }

    /// Appends the cost of each strategy of a node at the multipliers' cumulated sums, without messages.
    fn priced(&self, g: &Graph, cumulated: &[f64], node: usize, out: &mut Vec<f64>) {
        let at = out.len();
        out.extend_from_slice(&self.costs[self.first[node]..self.first[node + 1]]);
        for s in &g.nodes[node].segments {
            let price = cumulated[s.to] - cumulated[s.from];
            if price != 0.0 {
                out[at..].iter_mut().zip(&s.amounts).for_each(|(c, &a)| *c += price * a as f64);
            }
        }
    }

    /// What an edge can give to each strategy of one end: the least over the other end's, messages to it taken off.
    fn pull(&self, e: &MEdge, from_u: bool, messages: &[f64], out: &mut Vec<f64>) {
        let m = &self.matrices[e.at..e.at + e.rows * e.cols];
        out.clear();
        if from_u {
            let other = &messages[e.mv..e.mv + e.cols];
            out.extend(m.chunks_exact(e.cols).map(|row| least_difference(row, other)));
        } else {
            out.resize(e.cols, f64::INFINITY);
            let other = &messages[e.mu..e.mu + e.rows];
            for (row, &o) in m.chunks_exact(e.cols).zip(other) {
                out.iter_mut().zip(row).for_each(|(x, &c)| *x = if c - o < *x { c - o } else { *x });
            }
        }
    }

    /// One pass, forward or backward, with node costs at the multipliers. Gives the bound it reached (without the limits' part), and
    /// the cheapest strategy per node. The pass before left nothing to pull from edges ahead: only the `first` looks at them.
    fn pass(&self, priced: &[f64], messages: &mut [f64], forward: bool, first: bool, picks: &mut [usize]) -> f64 {
        let mut sum = 0.0;
        let mut total = vec![];
        let mut pulled = vec![];
        for step in 0..self.order.len() {
            let node = self.order[if forward { step } else { self.order.len() - 1 - step }] as usize;
            total.clear();
            total.extend_from_slice(&priced[self.first[node]..self.first[node + 1]]);
            let (mut ahead, mut behind) = (0, 0);
            for &(e, is_u) in &self.incident[node] {
                let edge = &self.edges[e as usize];
                let own = if is_u { edge.mu } else { edge.mv };
                let other = if is_u { edge.v } else { edge.u };
                let is_ahead = (self.place[other] > self.place[node]) == forward;
                if is_ahead {
                    ahead += 1;
                } else {
                    behind += 1;
                }
                if first || !is_ahead {
                    self.pull(edge, is_u, messages, &mut pulled);
                    messages[own..own + pulled.len()].copy_from_slice(&pulled);
                }
                total.iter_mut().zip(&messages[own..]).for_each(|(t, m)| *t += m);
            }
            let (mut pick, mut least) = (0, f64::INFINITY);
            for (k, &t) in total.iter().enumerate() {
                if t < least {
                    (pick, least) = (k, t);
                }
            }
            if least == f64::INFINITY {
                // Every strategy is forbidden by an edge: there is no choice.
                return least;
            }
            picks[node] = pick;
            sum += least;
            if ahead > 0 {
                let share = 1.0 / f64::from(ahead.max(behind));
                total.iter_mut().for_each(|t| *t = (*t - least) * share);
                for &(e, is_u) in &self.incident[node] {
                    let edge = &self.edges[e as usize];
                    let other = if is_u { edge.v } else { edge.u };
                    if (self.place[other] > self.place[node]) == forward {
                        let own = if is_u { edge.mu } else { edge.mv };
                        messages[own..own + total.len()].iter_mut().zip(&total).for_each(|(m, t)| *m -= t);
                    }
                }
            }
        }
        sum
    }

    /// Where each node comes in passes.
    pub(crate) fn places(&self) -> Vec<u32> {
        self.place.clone()
    }

    /// A choice by going through the nodes once: cheapest given what is chosen, what the rest can give, and what still fits.
    pub(crate) fn round(&self, g: &Graph, dual: &Dual, forward: bool) -> Vec<usize> {
        let cumulated = cumulate(&dual.prices);
        let mut choice = vec![usize::MAX; self.order.len()];
        let mut slack = g.limits.clone();
        let (mut total, mut pulled, mut room) = (vec![], vec![], vec![]);
        for step in 0..self.order.len() {
            let node = self.order[if forward { step } else { self.order.len() - 1 - step }] as usize;
            total.clear();
            self.priced(g, &cumulated, node, &mut total);
            for &(e, is_u) in &self.incident[node] {
                let edge = &self.edges[e as usize];
                let other = choice[if is_u { edge.v } else { edge.u }];
                if other == usize::MAX {
                    self.pull(edge, is_u, &dual.messages, &mut pulled);
                    total.iter_mut().zip(&pulled).for_each(|(t, p)| *t += p);
                } else {
                    for (k, t) in total.iter_mut().enumerate() {
                        *t += self.matrices[edge.at + if is_u { k * edge.cols + other } else { other * edge.cols + k }];
                    }
                }
            }
            let segments = &g.nodes[node].segments;
            room.clear();
            room.extend(segments.iter().map(|s| slack[s.from..s.to].iter().copied().min().unwrap_or(0).max(0)));
            let over =
                |k: usize| -> i64 { segments.iter().zip(&room).map(|(s, &room)| (s.amounts[k] - room).max(0)).sum() };
            let pick = if segments.is_empty() {
                (0..total.len()).min_by(|&a, &b| total[a].total_cmp(&total[b]))
            } else {
                let over: Vec<i64> = (0..total.len()).map(over).collect();
                (0..total.len()).min_by(|&a, &b| {
                    (total[a].is_infinite(), over[a])
                        .cmp(&(total[b].is_infinite(), over[b]))
                        .then(total[a].total_cmp(&total[b]))
                })
            }
            // Every node has a strategy: the model asks for one and reductions never drop the last.
            .unwrap_or(0);
            choice[node] = pick;
            for s in segments {
                slack[s.from..s.to].iter_mut().for_each(|l| *l -= s.amounts[pick]);
            }
        }
        choice
    }
}

/// Least of `a - b`, in four lanes so that it vectorises.
fn least_difference(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [f64::INFINITY; 4];
    let (a4, b4) = (a.chunks_exact(4), b.chunks_exact(4));
    let (ra, rb) = (a4.remainder(), b4.remainder());
    for (x, y) in a4.zip(b4) {
        for k in 0..4 {
            let d = x[k] - y[k];
            lanes[k] = if d < lanes[k] { d } else { lanes[k] };
        }
    }
    let mut least = lanes.into_iter().fold(f64::INFINITY, f64::min);
    for (x, y) in ra.iter().zip(rb) {
        least = least.min(x - y);
    }
    least
}

fn cumulate(prices: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    std::iter::once(0.0)
        .chain(prices.iter().map(|p| {
            sum += p;
            sum
        }))
        .collect()
}

/// Nodes in breadth-first order from the first of each component: neighbours come close, paths are long.
fn order(g: &Graph) -> Vec<u32> {
    let n = g.nodes.len();
    let mut order: Vec<u32> = Vec::with_capacity(n);
    let mut seen = vec![false; n];
    for root in 0..n {
        if seen[root] {
            continue;
        }
        seen[root] = true;
        let mut at = order.len();
        order.push(root as u32);
        while at < order.len() {
            let node = order[at] as usize;
            at += 1;
            for &e in &g.nodes[node].edges {
                let other = g.edges[e].other(node);
                if !seen[other] {
                    seen[other] = true;
                    order.push(other as u32);
                }
            }
        }
    }
    order
}

/// What the caller of [`ascend`] wants after an iteration.
pub(crate) enum Watch {
    /// Go on.
    Continue,
    /// Go on; a choice of this cost is known.
    Target(f64),
    /// Stop here.
    Stop,
}

/// Raises the bound for some iterations, or until it stalls, or until `watch` says so. Leaves the best state in `dual`, and gives the
/// length of steps to go on with.
///
/// `target` is the cost of a known choice: it sets the length of steps, and reaching it ends the ascent.
pub(crate) fn ascend(
    model: &Model,
    g: &Graph,
    dual: &mut Dual,
    iterations: usize,
    stall: f64,
    mut target: Option<f64>,
    watch: &mut dyn FnMut(usize, &Dual) -> Watch,
) -> f64 {
    let rows = g.limits.len();
    let mut picks = vec![0; g.nodes.len()];
    let mut priced = vec![];
    let mut best = f64::NEG_INFINITY;
    let mut best_state = dual.clone();
    // The volume method (F. Barahona and R. Anbil, 2000): steps start from the best multipliers, along the excess of an
    // average of recent choices.
    let mut excess: Vec<f64> = vec![];
    let mut scale = g.step;
    let mut failures = 0;
    let mut last_check = f64::NEG_INFINITY;
    let mut restart = false;
    for iteration in 0..iterations {
        let cumulated = cumulate(&dual.prices);
        priced.clear();
        for node in 0..g.nodes.len() {
            model.priced(g, &cumulated, node, &mut priced);
        }
        model.pass(&priced, &mut dual.messages, true, iteration == 0, &mut picks);
        let sum = model.pass(&priced, &mut dual.messages, false, false, &mut picks);
        let paid: f64 = dual.prices.iter().zip(&g.limits).map(|(p, &l)| p * l as f64).sum();
        let bound = g.constant as f64 + sum - paid;
        if bound == f64::INFINITY {
            break;
        }
        if bound > best {
            best = bound;
            best_state.clone_from(dual);
            failures = 0;
            scale = f64::min(scale * 1.1, 2.0);
        } else {
            failures += 1;
            let far = target.is_some_and(|t| best - bound > t - best);
            if failures >= if far { 2 } else { 8 } {
                scale *= if far { 0.5 } else { 0.66 };
                failures = 0;
                // Messages follow prices, and do not always find back from bad ones.
                restart = true;
            }
        }
        match watch(iteration, dual) {
            Watch::Continue => {}
            Watch::Target(cost) => target = Some(target.map_or(cost, |t| t.min(cost))),
            Watch::Stop => break,
        }
        if target.is_some_and(|t| best > t - 0.5) {
            break;
        }
        // Stop where it hardly rises.
        let patience = if rows == 0 { 10 } else { 40 };
        if iteration % patience == patience - 1 {
            let reach = target.map_or(best.abs(), |t| (t - best).abs());
            if best - last_check <= stall * reach + 1e-10 * best.abs() {
                break;
            }
            last_check = best;
        }
        if rows > 0 {
            let slack = g.slack(&picks);
            if excess.is_empty() {
                excess = slack.iter().map(|&s| -(s as f64)).collect();
            } else {
                excess.iter_mut().zip(&slack).for_each(|(x, &s)| *x = 0.9 * *x - 0.1 * s as f64);
            }
            if std::mem::take(&mut restart) {
                dual.clone_from(&best_state);
            }
            let prices = &best_state.prices;
            // Neighbouring rows are used nearly alike: of a run of exceeded rows only the worst may get a price.
            let mut moving: Vec<usize> = vec![];
            let mut run: Option<usize> = None;
            for r in 0..rows {
                if excess[r] > 0.0 {
                    run = Some(run.filter(|&w| excess[w] >= excess[r]).unwrap_or(r));
                } else {
                    moving.extend(run.take());
                }
                if prices[r] > 0.0 {
                    moving.push(r);
                }
            }
            moving.extend(run);
            moving.sort_unstable();
            moving.dedup();
            let norm: f64 = moving.iter().map(|&r| excess[r] * excess[r]).sum();
            if norm > 0.0 {
                let reach = target.map_or(0.02 * bound.abs().max(1.0), |t| (t - best).max(1e-6 * t.abs()).max(1.0));
                let step = scale * reach / norm;
                dual.prices.clone_from(prices);
                for r in moving {
                    dual.prices[r] = (dual.prices[r] + step * excess[r]).max(0.0);
                }
            }
        }
    }
    *dual = best_state;
    (2.0 * scale).clamp(1e-4, 1.0)
}

/// The outcome of [`certify`].
pub(crate) struct Certified {
    /// No choice costs less, exactly.
    pub(crate) bound: Total,
    /// Strategies dropped.
    pub(crate) strategies: u64,
    /// Pairs forbidden.
    pub(crate) pairs: u64,
    /// Per node, how much more than the bound each strategy costs at least.
    pub(crate) regrets: Vec<Vec<Cost>>,
}

/// Repeats the bound in integers and rewrites the graph by it: costs are replaced by the moved ones (equal for every choice), and
/// what only choices of at least `cutoff` use is forbidden.
pub(crate) fn certify(model: &Model, g: &mut Graph, dual: &Dual, cutoff: Option<Total>) -> Certified {
    let mut messages: Vec<i64> = dual.messages.iter().map(|&m| m.round() as i64).collect();
    let prices: Vec<i128> = dual.prices.iter().map(|p| (p * (1u64 << PRICE_BITS) as f64).round() as i128).collect();
    let mut cumulated = vec![0i128];
    for p in &prices {
        cumulated.push(cumulated[cumulated.len() - 1] + p);
    }
    let paid: i128 = prices.iter().zip(&g.limits).map(|(p, &l)| p * i128::from(l)).sum();
    let mut bound = g.constant - ((paid + (1 << PRICE_BITS) - 1) >> PRICE_BITS);
    // Potentials: costs at prices and messages, what was counted in the bound taken off.
    let mut potentials: Vec<Vec<Cost>> = g
        .nodes
        .iter()
        .map(|n| {
            let mut usage = vec![0i128; n.costs.len()];
            for s in &n.segments {
                let price = cumulated[s.to] - cumulated[s.from];
                usage.iter_mut().zip(&s.amounts).for_each(|(u, &a)| *u += price * i128::from(a));
            }
            n.costs.iter().zip(usage).map(|(&c, u)| c + (u >> PRICE_BITS) as i64).collect()
        })
        .collect();
    // Rounded messages may leave an edge a little below zero: give that to its first node.
    for (e, edge) in model.edges.iter().zip(&g.edges) {
        let mut least = FORBIDDEN;
        for (row, &a) in edge.m.chunks_exact(e.cols).zip(&messages[e.mu..]) {
            for (&c, &b) in row.iter().zip(&messages[e.mv..e.mv + e.cols]) {
                if c != FORBIDDEN {
                    least = least.min(c - a - b);
                }
            }
        }
        if least != FORBIDDEN {
            messages[e.mu..e.mu + e.rows].iter_mut().for_each(|m| *m += least);
        }
        potentials[e.u].iter_mut().zip(&messages[e.mu..]).for_each(|(p, m)| *p += m);
        potentials[e.v].iter_mut().zip(&messages[e.mv..]).for_each(|(p, m)| *p += m);
    }
    // From here on nothing is negative: what a strategy or pair costs more than the bound is a bound on what it costs at least.
    for p in &mut potentials {
        let least = p.iter().copied().min().unwrap_or(0);
        bound += Total::from(least);
        p.iter_mut().for_each(|x| *x -= least);
    }
    let mut drop: Vec<Vec<bool>> = g.nodes.iter().map(|n| vec![false; n.costs.len()]).collect();
    let beyond = |bound: Total, extra: Cost| cutoff.is_some_and(|c| bound + Total::from(extra) >= c);
    let mut pulled: Vec<Cost> = vec![];
    let mut regrets = potentials.clone();
    for forward in [true, false] {
        for step in 0..model.order.len() {
            let node = model.order[if forward { step } else { model.order.len() - 1 - step }] as usize;
            let own = &mut potentials[node];
            let (mut ahead, mut behind) = (0i64, 0i64);
            for &(e, is_u) in &model.incident[node] {
                let (e, m) = (&model.edges[e as usize], &g.edges[e as usize].m);
                pull_exact(e, m, is_u, &messages, &mut pulled);
                let at = if is_u { e.mu } else { e.mv };
                for ((p, &x), m) in own.iter_mut().zip(&pulled).zip(&mut messages[at..]) {
                    // A strategy without partner is as good as dropped.
                    if x == FORBIDDEN {
                        continue;
                    }
                    *p += x - *m;
                    *m = x;
                }
                let other = if is_u { e.v } else { e.u };
                if (model.place[other] > model.place[node]) == forward {
                    ahead += 1;
                } else {
                    behind += 1;
                }
            }
            let least = own.iter().copied().min().unwrap_or(0);
            bound += Total::from(least);
            for (p, d) in own.iter_mut().zip(&mut drop[node]) {
                *p -= least;
                *d |= beyond(bound, *p);
            }
            regrets[node].copy_from_slice(own);
            if ahead > 0 {
                let shares = ahead.max(behind);
                for &(e, is_u) in &model.incident[node] {
                    let e = &model.edges[e as usize];
                    let other = if is_u { e.v } else { e.u };
                    if (model.place[other] > model.place[node]) == forward {
                        let at = if is_u { e.mu } else { e.mv };
                        messages[at..].iter_mut().zip(own.iter()).for_each(|(m, p)| *m -= p / shares);
                    }
                }
                own.iter_mut().for_each(|p| *p -= ahead * (*p / shares));
            }
        }
    }
    let mut strategies = 0;
    let mut pairs = 0;
    for (e, edge) in model.edges.iter().zip(&mut g.edges) {
        for i in 0..e.rows {
            for j in 0..e.cols {
                let c = &mut edge.m[i * e.cols + j];
                if *c == FORBIDDEN {
                    continue;
                }
                *c -= messages[e.mu + i] + messages[e.mv + j];
                if !drop[e.u][i] && !drop[e.v][j] && beyond(bound, *c + potentials[e.u][i] + potentials[e.v][j]) {
                    *c = FORBIDDEN;
                    pairs += 1;
                }
            }
        }
        g.nodes[e.u].costs.iter_mut().zip(&messages[e.mu..]).for_each(|(c, m)| *c += m);
        g.nodes[e.v].costs.iter_mut().zip(&messages[e.mv..]).for_each(|(c, m)| *c += m);
    }
    for (n, drop) in g.nodes.iter_mut().zip(&drop) {
        for (c, _) in n.costs.iter_mut().zip(drop).filter(|(_, d)| **d) {
            *c = FORBIDDEN;
            strategies += 1;
        }
    }
    g.prices.clone_from(&dual.prices);
    Certified { bound, strategies, pairs, regrets }
}

fn pull_exact(e: &MEdge, m: &[Cost], from_u: bool, messages: &[i64], out: &mut Vec<Cost>) {
    out.clear();
    let differ = |c: Cost, o: i64| if c == FORBIDDEN { FORBIDDEN } else { c - o };
    if from_u {
        let other = &messages[e.mv..e.mv + e.cols];
        out.extend(
            m.chunks_exact(e.cols)
                .map(|row| row.iter().zip(other).map(|(&c, &o)| differ(c, o)).min().unwrap_or(FORBIDDEN)),
        );
    } else {
        out.resize(e.cols, FORBIDDEN);
        for (row, &o) in m.chunks_exact(e.cols).zip(&messages[e.mu..]) {
            out.iter_mut().zip(row).for_each(|(x, &c)| *x = differ(c, o).min(*x));
        }
    }
}
