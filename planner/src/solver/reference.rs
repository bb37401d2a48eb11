//! Exhaustive enumeration, the judge of every other method in tests.

use super::problem::{Problem, Total};
use super::random::Random;

/// A cheapest choice and its cost, none when no choice is feasible. Only for problems with few combinations.
pub(crate) fn enumerate(problem: &Problem) -> Option<(Total, Vec<usize>)> {
    let sizes: Vec<usize> = problem.nodes().iter().map(|n| n.costs.len()).collect();
    let combinations: usize = sizes.iter().product();
    assert!(combinations <= 2_000_000, "{combinations} combinations are too many to enumerate");
    let mut best: Option<(Total, Vec<usize>)> = None;
    let mut choice = vec![0; sizes.len()];
    for _ in 0..combinations {
        if let Some(cost) = problem.objective(&choice)
            && best.as_ref().is_none_or(|(b, _)| cost < *b)
        {
            best = Some((cost, choice.clone()));
        }
        for (c, &size) in choice.iter_mut().zip(&sizes) {
            *c += 1;
            if *c < size {
                break;
            }
            *c = 0;
        }
    }
    best
}

/// A random problem of at most `nodes` nodes: sparse, with forbidden pairs, functional edges, repeated edges, fixed choices,
/// groups, and rows from slack to infeasible.
pub(crate) fn random_problem(seed: u64, nodes: usize, strategies: usize) -> Problem {
    use super::problem::{FORBIDDEN, Matrix};
    use std::sync::Arc;
    let mut r = Random(seed.wrapping_mul(0x1234_5678_9abc_def1) ^ 77);
    let mut p = Problem::integers();
    let n = 1 + r.below(nodes);
    let scale = [3, 100, 1_000_000_007][r.below(3)];
    let forbid = [0, 0, 10, 30][r.below(4)];
    for _ in 0..n {
        let k = 1 + r.below(strategies);
        let costs = (0..k).map(|_| if r.below(100) < forbid / 3 { FORBIDDEN } else { r.below(scale) as i64 }).collect();
        p.add_node_quanta(costs);
    }
    let edges = if n < 2 { 0 } else { r.below(2 * n) };
    for _ in 0..edges {
        let u = r.below(n);
        let v = (u + 1 + r.below(n - 1)) % n;
        let (a, b) = (p.nodes()[u].costs.len(), p.nodes()[v].costs.len());
        let kind = r.below(5);
        let shift = r.below(7);
        let add: Vec<i64> = (0..a + b).map(|_| r.below(scale) as i64).collect();
        let m = Matrix::from_fn(a, b, |i, j| match kind {
            0 if b > 0 && (i + shift) % b != j => FORBIDDEN,
            1 => add[i] + add[a + j],
            2 => 0,
            _ if r.below(100) < forbid => FORBIDDEN,
            _ => r.below(scale) as i64 * r.below(2) as i64,
        });
        p.add_edge_quanta(u, v, Arc::new(m));
    }
    let rows = [0, 0, 1, 2, 4][r.below(5)];
    for _ in 0..rows {
        p.add_row(0);
    }
    let mut used = vec![(0i64, 0i64); rows];
    if rows > 0 {
        for node in 0..n {
            for _ in 0..r.below(3) {
                let from = r.below(rows);
                let to = from + 1 + r.below(rows - from);
                let amounts: Vec<i64> = (0..p.nodes()[node].costs.len()).map(|_| r.below(20) as i64).collect();
                for row in &mut used[from..to] {
                    row.0 += amounts.iter().min().expect("nodes have strategies");
                    row.1 += amounts.iter().max().expect("nodes have strategies");
                }
                p.add_usage(node, from..to, amounts);
            }
        }
    }
    for (limit, (low, high)) in p.limits.iter_mut().zip(used) {
        *limit = low - 1 + r.below((high - low) as usize + 3) as i64;
    }
    if r.below(4) == 0 {
        let node = r.below(n);
        p.fix(node, r.below(p.nodes()[node].costs.len()));
    }
    if r.below(4) == 0 {
        let node = r.below(n);
        let size = p.nodes()[node].costs.len();
        let group: Vec<usize> = (0..n).filter(|&i| p.nodes()[i].costs.len() == size).take(3).collect();
        p.add_group(group);
    }
    p
}
