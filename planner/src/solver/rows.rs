//! Rows of a settled graph: those that can never be violated go, of neighbours the implied one goes.

use super::graph::Graph;
use super::reduce::{Removed, count};

/// Least value over any range, in constant time.
pub(crate) struct RangeMin {
    /// `levels[l][k]`: least of `2^l` values from `k` on.
    levels: Vec<Vec<i64>>,
}

impl RangeMin {
    pub(crate) fn new(values: &[i64]) -> RangeMin {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while 2 * width <= values.len() {
            let Some(last) = levels.last() else { break };
            levels.push((0..=values.len() - 2 * width).map(|k| last[k].min(last[k + width])).collect());
            width *= 2;
        }
        RangeMin { levels }
    }

    /// Least of the values from `from` up to, not including, `to`.
    pub(crate) fn min(&self, from: usize, to: usize) -> i64 {
        if from >= to {
            return i64::MAX;
        }
        let level = (to - from).ilog2() as usize;
        self.levels[level][from].min(self.levels[level][to - (1 << level)])
    }
}

/// Drops rows whose limit holds whatever is chosen, joins rows that are used alike, and drops a row that uses no more than
/// its neighbour, node by node, within no smaller limit. Segments are renumbered.
///
/// Gives the nodes that lost usage, and the new index per old row (of a dropped row that of the row that implies it, if any).
pub(crate) fn compress(g: &mut Graph, removed: &mut Removed) -> (Vec<usize>, Vec<Option<usize>>) {
    let rows = g.limits.len();
    if rows == 0 {
        return (vec![], vec![]);
    }
    let mut most = vec![0i64; rows + 1];
    // Changes of usage at each row: (row, node, segment, whether it starts).
    let mut events: Vec<(usize, usize, usize, bool)> = vec![];
    for (node, n) in g.nodes.iter().enumerate().filter(|(_, n)| n.alive) {
        for (k, s) in n.segments.iter().enumerate() {
            let top = s.amounts.iter().copied().max().unwrap_or(0);
            most[s.from] += top;
            most[s.to] -= top;
            events.push((s.from, node, k, true));
            events.push((s.to, node, k, false));
        }
    }
    events.sort_unstable();
    let mut sum = 0;
    for m in &mut most {
        sum += *m;
        *m = sum;
    }
    // Blocks of rows that are used alike: (first row, limit, whether it can be violated).
    let mut starts: Vec<usize> = events.iter().map(|e| e.0).filter(|&r| r < rows).collect();
    starts.dedup();
    if starts.first() != Some(&0) {
        starts.insert(0, 0);
    }
    let blocks = starts.len();
    let mut limit = vec![0i64; blocks];
    let mut keep = vec![false; blocks];
    for (b, &from) in starts.iter().enumerate() {
        let to = starts.get(b + 1).copied().unwrap_or(rows);
        limit[b] = g.limits[from..to].iter().copied().min().unwrap_or(i64::MAX);
        keep[b] = most[from] > limit[b];
    }
    let mut implied_by: Vec<usize> = (0..blocks).collect();
    let mut at = events.partition_point(|e| e.0 == 0);
    for b in 1..blocks {
        let (mut grows, mut shrinks) = (false, false);
        while at < events.len() && events[at].0 == starts[b] {
            let (row, node, k, start) = events[at];
            let s = &g.nodes[node].segments[k];
            let partner = (!start).then(|| g.nodes[node].segments.get(k + 1)).flatten().filter(|next| next.from == row);
            match (start, partner) {
                (false, Some(next)) => {
                    for (a, b) in s.amounts.iter().zip(&next.amounts) {
                        grows |= b > a;
                        shrinks |= b < a;
                    }
                }
                (false, None) => shrinks = true,
                (true, _) => grows |= k == 0 || g.nodes[node].segments[k - 1].to != row,
            }
            at += 1;
        }
        // A row dropped for a neighbour that cannot be violated either is rightly dropped.
        if !shrinks && limit[b - 1] >= limit[b] {
            keep[b - 1] = false;
            implied_by[b - 1] = b;
        } else if !grows && limit[b - 1] <= limit[b] {
            keep[b] = false;
            implied_by[b] = b - 1;
        }
    }
    // Segments start and end at starts of blocks: `index` counts the rows kept before.
    let mut index = vec![0usize; rows + 1];
    let mut limits = vec![];
    let mut renamed = vec![None; blocks];
    for b in 0..blocks {
        index[starts[b]] = limits.len();
        if keep[b] {
            renamed[b] = Some(limits.len());
            limits.push(limit[b]);
        }
    }
    index[rows] = limits.len();
    if limits.len() == rows {
        return (vec![], (0..rows).map(Some).collect());
    }
    count(removed, "rows", (rows - limits.len()) as u64);
    let mut map = Vec::with_capacity(rows);
    for b in 0..blocks {
        let mut by = b;
        while !keep[by] && implied_by[by] != by {
            by = implied_by[by];
        }
        map.resize(starts.get(b + 1).copied().unwrap_or(rows), renamed[by]);
    }
    let mut changed = vec![];
    for (node, n) in g.nodes.iter_mut().enumerate().filter(|(_, n)| n.alive) {
        let before = n.segments.len();
        for s in &mut n.segments {
            (s.from, s.to) = (index[s.from], index[s.to]);
        }
        n.segments.retain(|s| s.from < s.to);
        merge_equal(&mut n.segments);
        if n.segments.len() < before {
            changed.push(node);
        }
    }
    g.pending = vec![0; limits.len() + 1];
    g.limits = limits;
    (changed, map)
}

/// Joins neighbouring segments of equal amounts.
fn merge_equal(segments: &mut Vec<super::graph::Segment>) {
    segments.dedup_by(|next, last| {
        let joins = last.to == next.from && last.amounts == next.amounts;
        if joins {
            last.to = next.to;
        }
        joins
    });
}
