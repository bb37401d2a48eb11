//! Which operators of the backward pass make gradients by weights: those that a zero-bubble schedule runs in a pass of their own
//! (W; the rest of the backward is B. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
//!
//! B is what gradients by activations need: what is sent to another stage, and what the gradient of another operator that depends on the
//! inputs is made from. W is the rest: its results reach sums over micro-batches alone. So the first stage has a B too, though it
//! sends nothing: gradients by its activations go down its layers.

use std::collections::BTreeSet;

use autoshard_ir::graph::{Def, Graph, NodeId, Section, ValueId};
use autoshard_ir::train::recompute::originals;

use crate::assignment::{Assignment, Schedule};

/// By node, whether it runs in the pass of gradients by weights. None does where the schedule has no such pass.
pub(crate) fn by_weights(graph: &Graph, a: &Assignment) -> Vec<bool> {
    let mut found = vec![false; graph.nodes.len()];
    if a.schedule != Schedule::ZeroBubble {
        return found;
    }
    let depends = depends(graph);
    let copies = originals(graph);
    let uses = graph.uses();
    // Readers come after what they read.
    for id in graph.node_ids().rev() {
        let n = graph.node(id);
        if n.section != Section::Backward {
            continue;
        }
        let needed = |r: &NodeId| {
            let reader = graph.node(*r);
            if reader.section != Section::Backward || reader.is_accumulate() {
                return false;
            }
            let another = reader.of != n.of && reader.of.is_some_and(|f| depends[f.index()]);
            let sent = a.stage[r.index()] != a.stage[id.index()];
            // What is computed again is no gradient.
            sent || !found[r.index()] || (another && copies[id.index()].is_none())
        };
        found[id.index()] = !n.outputs.iter().flat_map(|v| &uses[v.index()]).any(needed);
    }
    found
}

/// Values that the pass of gradients by weights reads, with the stages where, and that are made before it.
pub(crate) fn later(graph: &Graph, a: &Assignment, weights: &[bool]) -> BTreeSet<(ValueId, usize)> {
    let mut found = BTreeSet::new();
    for id in graph.node_ids().filter(|n| weights[n.index()]) {
        for v in &graph.node(id).inputs {
            if graph.producer(*v).is_none_or(|p| !weights[p.index()]) {
                found.insert((*v, a.stage[id.index()].0 as usize));
            }
        }
    }
    found
}

/// Which forward nodes depend on inputs.
fn depends(graph: &Graph) -> Vec<bool> {
    let mut found = vec![false; graph.nodes.len()];
    for id in graph.node_ids() {
        let n = graph.node(id);
        let operand = |v: &ValueId| match graph.value(*v).def {
            Def::Node(p, _) => found[p.index()],
            Def::Input(_) => true,
            Def::State(_) | Def::Const(_) => false,
        };
        found[id.index()] = n.section == Section::Forward && n.inputs.iter().any(operand);
    }
    found
}
