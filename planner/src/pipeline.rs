//! Cuts a forward graph into contiguous pipeline stages.
//!
//! Dynamic programming over the places where few values cross: first the least possible time of the slowest stage, then
//! among the cuts that reach it those with fewest bytes between stages. Embeddings and heads count like everything else,
//! so stages may have unequal numbers of blocks. Nodes that depend on no state belong to no stage.

use autoshard_ir::graph::{Def, Graph};

use crate::assignment::StageId;

/// There are too few places to cut at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the model can be cut into at most {most} pipeline stages, not {wanted}")]
pub struct TooManyStages {
    /** asked for */
    pub wanted: usize,
    /** possible */
    pub most: usize,
}

/// Places to consider, at most: those with fewest crossing bytes.
const CANDIDATES: usize = 600;

/// The stage of each forward node. `time` is that of each node, forward and backward together, in any unit.
///
/// # Errors
/// More stages than places.
pub fn cut(graph: &Graph, forward: usize, time: &[f64], stages: usize) -> Result<Vec<StageId>, TooManyStages> {
    if stages <= 1 {
        return Ok(vec![StageId(0); forward]);
    }
    let places = places(graph, forward, time);
    let cuts = places.len() - 1;
    if cuts < stages {
        return Err(TooManyStages { wanted: stages, most: cuts });
    }
    let mut sums = vec![0.0; forward + 1];
    for i in 0..forward {
        sums[i + 1] = sums[i] + time[i];
    }
    let span = |a: usize, b: usize| sums[places[b].at] - sums[places[a].at];
    // Least slowest stage for the nodes before place `j` in `k` stages.
    let mut least = vec![vec![f64::INFINITY; cuts + 1]; stages + 1];
    least[0][0] = 0.0;
    for k in 1..=stages {
        for j in k..=cuts {
            least[k][j] = (k - 1..j).map(|i| least[k - 1][i].max(span(i, j))).fold(f64::INFINITY, f64::min);
        }
    }
    let slowest = least[stages][cuts] * (1.0 + 1e-9);
    // Fewest bytes among the cuts that are that fast.
    let mut bytes = vec![vec![(u64::MAX, 0); cuts + 1]; stages + 1];
    bytes[0][0] = (0, 0);
    for k in 1..=stages {
        for j in k..=cuts {
            let ways = (k - 1..j).filter(|&i| bytes[k - 1][i].0 < u64::MAX && span(i, j) <= slowest);
            let cost = |i: usize| bytes[k - 1][i].0 + if i > 0 { places[i].bytes } else { 0 };
            if let Some(best) = ways.min_by_key(|&i| (cost(i), i)) {
                bytes[k][j] = (cost(best), best);
            }
        }
    }
    let mut stage = vec![StageId(0); forward];
    let mut end = cuts;
    for k in (1..=stages).rev() {
        let begin = bytes[k][end].1;
        for s in &mut stage[places[begin].at..places[end].at] {
            *s = StageId(k as u16 - 1);
        }
        end = begin;
    }
    Ok(stage)
}

/// A place to cut at: before node `at`.
struct Place {
    at: usize,
    bytes: u64,
}

/// The places with fewest crossing bytes that have work before them; the ends always.
fn places(graph: &Graph, forward: usize, time: &[f64]) -> Vec<Place> {
    let free = graph.stateless();
    let mut change = vec![0i64; forward + 1];
    let mut last = vec![None; graph.values.len()];
    for i in 0..forward {
        for v in &graph.nodes[i].inputs {
            last[v.index()] = Some(i);
        }
    }
    for (v, last) in last.iter().enumerate() {
        if let (Some(last), Def::Node(p, _)) = (last, &graph.values[v].def)
            && !free[p.index()]
        {
            let bytes = graph.values[v].ty.bytes() as i64;
            change[p.index() + 1] += bytes;
            change[last + 1] -= bytes;
        }
    }
    let mut crossing = 0;
    let mut all = Vec::new();
    let mut work = 0.0;
    for at in 0..=forward {
        crossing += change[at];
        if at == 0 || at == forward || (work > 0.0 && crossing > 0) {
            all.push(Place { at, bytes: crossing.max(0) as u64 });
        }
        if at < forward && !free[at] {
            work += time[at];
        }
    }
    // Between blocks of a transformer one value crosses, inside them several: the cheapest kind of place is enough when
    // there are many of it.
    let mut order: Vec<u64> = all[1..all.len() - 1].iter().map(|p| p.bytes).collect();
    order.sort();
    if let Some(&limit) = order.get(CANDIDATES) {
        let ends = [0, forward];
        let mut room = CANDIDATES;
        all.retain(|p| {
            ends.contains(&p.at)
                || p.bytes < limit
                || (p.bytes == limit && room > 0 && {
                    room -= 1;
                    true
                })
        });
    }
    all
}
