//! Local search on a compact, settled graph: exchanges of one node, and neighbourhoods cut out to be solved exactly.

use super::graph::{GNode, Graph, plus};
use super::problem::{FORBIDDEN, Total};
use super::random::Random;

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
    for _ in 0..50 {
        let mut moved = false;
        for node in 0..g.nodes.len() {
            if node % 64 == 63 && stop() {
                break;
            }
            let over_now = g.nodes[node].segments.iter().any(|s| slack[s.from..s.to].iter().any(|&l| l < 0));
            if !std::mem::take(&mut fresh[node]) && !over_now {
                continue;
            }
            let old = choice[node];
            let costs = local_costs(g, choice, node);
            let segments = &g.nodes[node].segments;
            // Overflow, summed over rows, if the node took strategy k.
            let over = |k: usize| -> i64 {
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

/// The problem of choosing anew for some nodes while the others keep their choice. Its objective leaves out what they cost.
pub(crate) fn neighbourhood(g: &Graph, choice: &[usize], slack: &[i64], nodes: &[usize], index: &mut [usize]) -> Graph {
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

/// Picks nodes to choose anew: those around a random node, or users of a random full row and what is around them.
pub(crate) fn pick_nodes(g: &Graph, slack: &[i64], size: usize, random: &mut Random) -> Vec<usize> {
    let n = g.nodes.len();
    let mut picked: Vec<usize> = vec![];
    let mut seen = vec![false; n];
    let push = |node: usize, picked: &mut Vec<usize>, seen: &mut Vec<bool>| {
        if !std::mem::replace(&mut seen[node], true) {
            picked.push(node);
        }
    };
    if !slack.is_empty() && random.below(3) == 0 {
        // Of a few random rows the fullest.
        let row = (0..8).map(|_| random.below(slack.len())).min_by_key(|&r| slack[r]).expect("eight rows");
        let users: Vec<usize> =
            (0..n).filter(|&k| g.nodes[k].segments.iter().any(|s| s.from <= row && row < s.to)).collect();
        if !users.is_empty() {
            for _ in 0..(size / 3).max(2) {
                push(users[random.below(users.len())], &mut picked, &mut seen);
            }
        }
    }
    if picked.is_empty() {
        push(random.below(n), &mut picked, &mut seen);
    }
    let mut at = 0;
    while at < picked.len() && picked.len() < size {
        let edges = &g.nodes[picked[at]].edges;
        let skip = if edges.is_empty() { 0 } else { random.below(edges.len()) };
        for k in 0..edges.len() {
            let other = g.edges[edges[(k + skip) % edges.len()]].other(picked[at]);
            if picked.len() < size {
                push(other, &mut picked, &mut seen);
            }
        }
        at += 1;
        if at == picked.len() && picked.len() < size && picked.len() < n && random.below(4) != 0 {
            push(random.below(n), &mut picked, &mut seen);
        }
    }
    picked
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
