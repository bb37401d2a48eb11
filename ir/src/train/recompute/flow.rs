//! A minimum cut by Dinic's algorithm, for networks of values: see [`super::choose`].
//!
//! Every vertex has a width, and may be *given* (hang on the source), *hang* on others, and be *wanted* (by the sink). The cut
//! is the set of vertices of least width that separates source and sink; of several that which lies nearest to the sink.

use std::collections::VecDeque;

/// More than all widths together.
const UNBOUNDED: u64 = 1 << 62;

struct Arc {
    to: usize,
    left: u64,
}

/// A network. A vertex has two ends, `2 v` where it is entered and `2 v + 1` where it is left, with its width between.
pub(super) struct Network {
    /// In pairs: an arc, and its reverse.
    arcs: Vec<Arc>,
    /// Arcs that leave each end.
    leaving: Vec<Vec<usize>>,
    source: usize,
    sink: usize,
}

impl Network {
    /// Of that many vertices, without widths.
    pub(super) fn new(vertices: usize) -> Network {
        let (source, sink) = (2 * vertices, 2 * vertices + 1);
        Network { arcs: Vec::new(), leaving: vec![Vec::new(); 2 * vertices + 2], source, sink }
    }
    fn arc(&mut self, from: usize, to: usize, width: u64) {
        for (from, to, left) in [(from, to, width), (to, from, 0)] {
            self.leaving[from].push(self.arcs.len());
            self.arcs.push(Arc { to, left });
        }
    }
    /// Sets the width of a vertex, once.
    pub(super) fn width(&mut self, v: usize, width: u64) {
        self.arc(2 * v, 2 * v + 1, width);
    }
    /// A vertex hangs on the source.
    pub(super) fn given(&mut self, v: usize) {
        self.arc(self.source, 2 * v, UNBOUNDED);
    }
    /// A vertex hangs on another.
    pub(super) fn hang(&mut self, v: usize, on: usize) {
        self.arc(2 * on + 1, 2 * v, UNBOUNDED);
    }
    /// The sink hangs on a vertex.
    pub(super) fn wanted(&mut self, v: usize) {
        self.arc(2 * v + 1, self.sink, UNBOUNDED);
    }

    /// Which vertices lie wholly beyond the cut: wanted in some way, but not in the cut.
    pub(super) fn cut(mut self) -> Vec<bool> {
        while let Some(level) = self.levels() {
            let mut next = vec![0; self.leaving.len()];
            while self.push(&level, &mut next) {}
        }
        // What can still reach the sink, backwards from it.
        let mut beyond = vec![false; self.leaving.len()];
        beyond[self.sink] = true;
        let mut open = vec![self.sink];
        while let Some(at) = open.pop() {
            for &a in &self.leaving[at] {
                let from = self.arcs[a].to;
                if self.arcs[a ^ 1].left > 0 && !beyond[from] {
                    beyond[from] = true;
                    open.push(from);
                }
            }
        }
        (0..self.source / 2).map(|v| beyond[2 * v] && beyond[2 * v + 1]).collect()
    }

    /// Distances from the source over arcs with room; none when the sink is out of reach.
    fn levels(&self) -> Option<Vec<usize>> {
        let mut level = vec![usize::MAX; self.leaving.len()];
        level[self.source] = 0;
        let mut open = VecDeque::from([self.source]);
        while let Some(at) = open.pop_front() {
            for &a in &self.leaving[at] {
                let Arc { to, left } = self.arcs[a];
                if left > 0 && level[to] == usize::MAX {
                    level[to] = level[at] + 1;
                    open.push_back(to);
                }
            }
        }
        (level[self.sink] < usize::MAX).then_some(level)
    }

    /// Sends flow along one shortest path; false when there is none left. `next` is the first arc of each end worth trying.
    fn push(&mut self, level: &[usize], next: &mut [usize]) -> bool {
        let mut path: Vec<usize> = Vec::new();
        let mut at = self.source;
        while at != self.sink {
            let open = self.leaving[at][next[at]..].iter().copied().find(|&a| {
                let usable = self.arcs[a].left > 0 && level[self.arcs[a].to] == level[at] + 1;
                next[at] += usize::from(!usable);
                usable
            });
            match (open, path.last()) {
                (Some(a), _) => {
                    path.push(a);
                    at = self.arcs[a].to;
                }
                (None, None) => return false,
                (None, Some(&a)) => {
                    path.pop();
                    at = self.arcs[a ^ 1].to;
                    next[at] += 1;
                }
            }
        }
        let room = path.iter().map(|&a| self.arcs[a].left).min().unwrap_or(0);
        for a in path {
            self.arcs[a].left -= room;
            self.arcs[a ^ 1].left += room;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Widths, operands, given, wanted; which vertices lie beyond the cut.
    fn cut(widths: &[u64], hang: &[(usize, usize)], given: &[usize], wanted: &[usize]) -> Vec<usize> {
        let mut n = Network::new(widths.len());
        widths.iter().enumerate().for_each(|(v, w)| n.width(v, *w));
        hang.iter().for_each(|(v, on)| n.hang(*v, *on));
        given.iter().for_each(|v| n.given(*v));
        wanted.iter().for_each(|v| n.wanted(*v));
        n.cut().iter().enumerate().filter_map(|(v, b)| b.then_some(v)).collect()
    }

    #[test]
    fn keeps_the_narrow_end_of_a_chain() {
        assert_eq!(cut(&[1, 2, 3], &[(1, 0), (2, 1)], &[0], &[1, 2]), [1, 2]);
        assert_eq!(cut(&[5, 2, 3], &[(1, 0), (2, 1)], &[0], &[1, 2]), [2]);
        assert_eq!(cut(&[9, 4, 3], &[(1, 0), (2, 1)], &[0], &[2]), [] as [usize; 0]);
    }

    #[test]
    fn of_equal_cuts_that_with_least_to_recompute() {
        assert_eq!(cut(&[2, 2, 2], &[(1, 0), (2, 1)], &[0], &[2]), [] as [usize; 0]);
    }

    #[test]
    fn what_hangs_on_nothing_is_free() {
        assert_eq!(cut(&[7], &[], &[], &[0]), [0]);
    }

    /// Against all subsets, on random networks.
    #[test]
    fn the_cut_is_the_least_of_all() {
        let mut x = 1u64;
        let mut draw = |n: u64| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 33) % n
        };
        for _ in 0..300 {
            let n = 7;
            let widths: Vec<u64> = (0..n).map(|_| draw(9)).collect();
            let given: Vec<usize> = (0..n).filter(|v| *v < 2 || draw(4) == 0).collect();
            let hang: Vec<(usize, usize)> = (0..n)
                .filter(|v| !given.contains(v))
                .flat_map(|v| (0..v).map(move |on| (v, on)))
                .filter(|_| draw(3) == 0)
                .collect();
            let wanted: Vec<usize> = (0..n).filter(|_| draw(2) == 0).collect();
            // What must be kept if the vertices of `made` are made from what they hang on; none if impossible.
            let kept = |made: &[usize]| -> Option<u64> {
                if made.iter().any(|v| given.contains(v)) {
                    return None;
                }
                let read = hang.iter().filter(|(v, _)| made.contains(v)).map(|(_, on)| *on).chain(wanted.clone());
                let keep: std::collections::BTreeSet<usize> = read.filter(|v| !made.contains(v)).collect();
                Some(keep.into_iter().map(|v| widths[v]).sum())
            };
            let all = (0..1usize << n).map(|set| (0..n).filter(|v| set >> v & 1 == 1).collect::<Vec<_>>());
            let least = all.filter_map(|made| kept(&made)).min();
            assert_eq!(kept(&cut(&widths, &hang, &given, &wanted)), least);
        }
    }
}
