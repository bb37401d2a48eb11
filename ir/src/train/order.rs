//! The order of forward nodes: those that depend on no state (masks, positions, counts of labels) come first.
//!
//! Exporters make a mask where it is first used, in the first layer. Out of the way, that layer is the same as the others,
//! so [`crate::blocks`] finds all of them: they are planned once, and recomputed alike.

use crate::graph::{Def, Graph, NodeId};

/// Moves the stateless nodes of a forward graph to its front; apart from that nodes keep their order.
pub(super) fn stateless_first(mut graph: Graph) -> Graph {
    let free = graph.stateless();
    let (first, rest): (Vec<NodeId>, Vec<NodeId>) = graph.node_ids().partition(|n| free[n.index()]);
    let mut place = vec![NodeId(0); graph.nodes.len()];
    for (new, old) in (0..).zip(first.iter().chain(&rest)) {
        place[old.index()] = NodeId(new);
    }
    for v in &mut graph.values {
        if let Def::Node(n, _) = &mut v.def {
            *n = place[n.index()];
        }
    }
    let mut nodes: Vec<_> = place.iter().zip(graph.nodes).collect();
    nodes.sort_by_key(|(new, _)| **new);
    graph.nodes = nodes.into_iter().map(|(_, n)| n).collect();
    graph
}
