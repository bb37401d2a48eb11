//! Which forward nodes are recomputed: the rules behind [`super::Recompute`].
//!
//! **Full**: every node of every block of a run. What is kept is what enters the blocks (in a transformer, the residual
//! stream: `2 s b h` bytes per layer in half precision), and what lies outside the runs. **Layers**: the same nodes.
//!
//! **Selective**: the choice that keeps the fewest bytes if only cheap nodes may be recomputed; among equal ones, that
//! which recomputes least. Cheap are operators bound by memory ([`Family::Memory`], [`Family::Gather`], [`Family::Free`]: norms,
//! activations, softmax, casts, transposes, lookups), and products of two activations whose result is larger than both
//! operands together (the scores of attention spelled out, whose quadratic size is what Korthikanti et al. recompute).
//! Results of other products, of convolutions and of fused attention are kept.
//!
//! "The fewest bytes" is a minimum cut, as in PyTorch's min-cut partitioner: values are vertices as wide as their bytes; a
//! value that may be recomputed hangs on its operands, any other on the source; what the backward pass reads hangs on
//! the sink. A finite cut is a set of values from which all that is read can be had. So a node is never recomputed where
//! that keeps more than it frees. The network is over classes of nodes: repeated blocks stay alike.

use std::collections::BTreeSet;

use crate::blocks::Blocks;
use crate::graph::{Def, Graph, NodeId, Section, ValueId};
use crate::op::Family;

use super::flow::Network;
use super::{Regions, kept};

/// All that may be recomputed: forward nodes of which something stays in their region, and that depend on a state. Casts of
/// parameters are made once for all micro-batches, and kept.
fn allowed(graph: &Graph, regions: &Regions) -> Vec<bool> {
    let free = graph.stateless();
    let stays = |n: &crate::graph::Node| n.outputs.iter().any(|v| !regions.leaves[v.index()]);
    let may = |n: &crate::graph::Node| stays(n) && !graph.casts_state(n);
    (0..regions.of.len()).map(|i| !free[i] && may(&graph.nodes[i])).collect()
}

/// See the module.
pub(super) fn full(graph: &Graph, blocks: &Blocks, regions: &Regions) -> Vec<bool> {
    let mut chosen = allowed(graph, regions);
    for (c, (_, block)) in chosen.iter_mut().zip(&regions.of) {
        *c &= block;
    }
    alike(blocks, chosen)
}

/// See the module.
pub(super) fn selective(graph: &Graph, blocks: &Blocks, regions: &Regions) -> Vec<bool> {
    let forward = regions.of.len();
    let varies = depends_on_inputs(graph);
    let mut cheap = allowed(graph, regions);
    for (i, c) in cheap.iter_mut().enumerate() {
        *c &= is_cheap(graph, NodeId(i as u32), &varies);
    }
    let cheap = alike(blocks, cheap);

    // Vertices: results of classes, then inputs of the graph.
    let classes = blocks.nodes.iter().take_while(|m| m[0].index() < forward).count();
    let mut first = Vec::with_capacity(classes);
    let mut count = 0;
    for members in &blocks.nodes[..classes] {
        first.push(count);
        count += graph.node(members[0]).outputs.len();
    }
    let vertex = |v: ValueId| match graph.value(v).def {
        Def::Node(n, out) => Some(first[blocks.node_class[n.index()] as usize] + out),
        Def::Input(i) => Some(count + i),
        Def::State(_) | Def::Const(_) => None,
    };
    let mut network = Network::new(count + graph.inputs.len());
    for (class, members) in blocks.nodes[..classes].iter().enumerate() {
        let n = graph.node(members[0]);
        let operands: BTreeSet<usize> =
            members.iter().flat_map(|m| graph.node(*m).inputs.iter().filter_map(|&v| vertex(v))).collect();
        for (out, v) in n.outputs.iter().enumerate() {
            let at = first[class] + out;
            network.width(at, graph.ty(*v).bytes() as u64 * members.len() as u64);
            if cheap[members[0].index()] && !regions.leaves[v.index()] {
                operands.iter().for_each(|&u| network.hang(at, u));
            } else {
                network.given(at);
            }
        }
    }
    for (i, x) in graph.inputs.iter().enumerate() {
        network.width(count + i, graph.ty(x.value).bytes() as u64);
        network.given(count + i);
    }
    let read: BTreeSet<usize> = kept(graph).into_iter().filter_map(vertex).collect();
    read.into_iter().for_each(|at| network.wanted(at));
    let made = network.cut();
    let chosen = (0..forward).map(|i| {
        let results = &graph.nodes[i].outputs;
        cheap[i] && results.iter().any(|&v| !regions.leaves[v.index()] && vertex(v).is_some_and(|at| made[at]))
    });
    alike(blocks, chosen.collect())
}

/// Only where all forward members of a class are chosen.
fn alike(blocks: &Blocks, mut chosen: Vec<bool>) -> Vec<bool> {
    for members in &blocks.nodes {
        let forward = chosen.len();
        let inside = members.iter().map(|m| m.index()).take_while(move |m| *m < forward);
        if inside.clone().any(|m| !chosen[m]) {
            inside.for_each(|m| chosen[m] = false);
        }
    }
    chosen
}

fn is_cheap(graph: &Graph, id: NodeId, varies: &[bool]) -> bool {
    let n = graph.node(id);
    let (ins, outs) = (graph.input_types(n), graph.output_types(n));
    match n.op.work(&ins, &outs).family {
        Family::Memory | Family::Gather | Family::Free => true,
        Family::MatMul => {
            let bytes = |types: &[crate::tensor::Type]| types.iter().map(|t| t.bytes() as u64).sum::<u64>();
            n.inputs.iter().all(|v| varies[v.index()]) && bytes(&outs) > bytes(&ins)
        }
        Family::Conv | Family::Attention => false,
    }
}

/// Which values are activations: not made of parameters and constants alone.
fn depends_on_inputs(graph: &Graph) -> Vec<bool> {
    let mut varies = vec![false; graph.values.len()];
    for x in &graph.inputs {
        varies[x.value.index()] = true;
    }
    for n in graph.nodes.iter().take_while(|n| n.section == Section::Forward) {
        if n.inputs.iter().any(|v| varies[v.index()]) {
            n.outputs.iter().for_each(|v| varies[v.index()] = true);
        }
    }
    varies
}
