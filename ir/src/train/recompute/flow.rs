//! A minimum cut of a network of values: see [`super::choose`].
//!
//! Every vertex has a width, and may be *given* (hang on the source), *hang* on others, and be *wanted* (by the sink). The cut
//! is the set of vertices of least width that separates source and sink; of several that which lies nearest to the sink.

use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

/// More than all widths together.
const UNBOUNDED: u64 = 1 << 62;

/// A network. A vertex has two ends, `2 v` where it is entered and `2 v + 1` where it is left, with its width between.
pub(super) struct Network {
    graph: DiGraph<(), u64>,
    source: NodeIndex,
    sink: NodeIndex,
}

impl Network {
    /// Of that many vertices, without widths.
    pub(super) fn new(vertices: usize) -> Network {
        let mut graph = DiGraph::new();
        (0..2 * vertices).for_each(|_| _ = graph.add_node(()));
        let (source, sink) = (graph.add_node(()), graph.add_node(()));
        Network { graph, source, sink }
    }
    fn entered(v: usize) -> NodeIndex {
        NodeIndex::new(2 * v)
    }
    fn left(v: usize) -> NodeIndex {
        NodeIndex::new(2 * v + 1)
    }
    /// Sets the width of a vertex, once.
    pub(super) fn width(&mut self, v: usize, width: u64) {
        self.graph.add_edge(Self::entered(v), Self::left(v), width);
    }
    /// A vertex hangs on the source.
    pub(super) fn given(&mut self, v: usize) {
        self.graph.add_edge(self.source, Self::entered(v), UNBOUNDED);
    }
    /// A vertex hangs on another.
    pub(super) fn hang(&mut self, v: usize, on: usize) {
        self.graph.add_edge(Self::left(on), Self::entered(v), UNBOUNDED);
    }
    /// The sink hangs on a vertex.
    pub(super) fn wanted(&mut self, v: usize) {
        self.graph.add_edge(Self::left(v), self.sink, UNBOUNDED);
    }

    /// Which vertices lie wholly beyond the cut: wanted in some way, but not in the cut.
    pub(super) fn cut(self) -> Vec<bool> {
        let (_, flows) = dinics(&self.graph, self.source, self.sink);
        // What can still reach the sink, backwards from it: along edges with room, and against edges with flow.
        let mut beyond = vec![false; self.graph.node_count()];
        beyond[self.sink.index()] = true;
        let mut open = vec![self.sink];
        while let Some(at) = open.pop() {
            let incoming = self.graph.edges_directed(at, petgraph::Incoming);
            let incoming = incoming.filter(|e| flows[e.id().index()] < *e.weight()).map(|e| e.source());
            let outgoing = self.graph.edges(at).filter(|e| flows[e.id().index()] > 0).map(|e| e.target());
            for from in incoming.chain(outgoing) {
                if !std::mem::replace(&mut beyond[from.index()], true) {
                    open.push(from);
                }
            }
        }
        (0..self.source.index() / 2).map(|v| beyond[2 * v] && beyond[2 * v + 1]).collect()
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
