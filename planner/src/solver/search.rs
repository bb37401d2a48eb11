//! Local search on a compact, settled graph by exchanges of one node.

use super::graph::Graph;
use super::problem::FORBIDDEN;

/// Cost of each strategy of a node with its neighbours' present choices: (forbidden parts, sum of the rest).
fn local_costs(g: &Graph, choice: &[usize], node: usize) -> Vec<(u32, i64)> {
    let n = &g.nodes[node];
    let mut costs: Vec<(u32, i64)> = n.costs.iter().map(|&c| if c == FORBIDDEN { (1, 0) } else { (0, c) }).collect();
    for &e in &n.edges {
        let edge = &g.edges[e];
        let other = choice[edge.other(node)];
        let (step, across) = edge.strides(node);
        for (k, c) in costs.iter_mut().enumerate() {
            match edge.m[k * step + other * across] {
                FORBIDDEN => c.0 += 1,
                x => c.1 += x,
            }
        }
    }
    costs
}

/// Sweeps over the nodes, each taking the strategy that violates least and then costs least, until nothing improves. Feasible
/// choices stay feasible. Gives whether the choice is feasible now.
pub(crate) fn descend(g: &Graph, choice: &mut [usize], mut stop: impl FnMut() -> bool) -> bool {
    let mut slack = g.slack(choice);
    let mut fresh: Vec<bool> = vec![true; g.nodes.len()];
    let mut room = vec![];
    for _ in 0..50 {
        let mut moved = false;
        for node in 0..g.nodes.len() {
            if node % 64 == 63 && stop() {
                break;
            }
            room.clear();
            room.extend(g.nodes[node].segments.iter().map(|s| slack[s.from..s.to].iter().copied().min().unwrap_or(0)));
            let over_now = room.iter().any(|&l| l < 0);
            if !std::mem::take(&mut fresh[node]) && !over_now {
                continue;
            }
            let old = choice[node];
            let costs = local_costs(g, choice, node);
            let segments = &g.nodes[node].segments;
            // Overflow, summed over rows, if the node took strategy k.
            let over = |k: usize| -> i64 {
                if segments.iter().zip(&room).all(|(s, &room)| s.amounts[k] - s.amounts[old] <= room) {
                    return 0;
                }
                segments
                    .iter()
                    .map(|s| {
                        let more = s.amounts[k] - s.amounts[old];
                        slack[s.from..s.to].iter().map(|&l| (more - l).max(0)).sum::<i64>()
                    })
                    .sum()
            };
            let now = (costs[old].0, over(old), costs[old].1);
            let mut best = (now, old);
            for k in 0..costs.len() {
                if k != old && (costs[k].0, costs[k].1) < (costs[old].0, costs[old].1) || now.1 > 0 {
                    // Without overflow now, none may come.
                    let then = (costs[k].0, over(k), costs[k].1);
                    if then < best.0 {
                        best = (then, k);
                    }
                }
            }
            let new = best.1;
            if new != old {
                for s in segments {
                    let less = s.amounts[old] - s.amounts[new];
                    slack[s.from..s.to].iter_mut().for_each(|l| *l += less);
                }
                choice[node] = new;
                moved = true;
                fresh[node] = true;
                for &e in &g.nodes[node].edges {
                    fresh[g.edges[e].other(node)] = true;
                }
            }
        }
        if !moved || stop() {
            break;
        }
    }
    g.objective(choice).is_some()
}
