//! What runs how often and in which kernel, by class of operators: what times depend on besides strategies.
//!
//! A value between two operators bound by memory of one section stays in registers where kernels are compiled: its reader
//! does not read it, and if all its readers are such it is not written. Casts and accumulations also join the product that
//! makes their operand. Members of a class count alike: a value is passed in registers only if it is so for all of them.

use autoshard_ir::blocks::Blocks;
use autoshard_ir::graph::{Graph, NodeId, Section};
use autoshard_ir::op::Family;

use crate::execution::Kernels;

/// What a class of operators need not read and write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fused {
    /// Operands that come in registers.
    pub inputs: Vec<bool>,
    /// Results that only leave in registers.
    pub outputs: Vec<bool>,
}

impl Fused {
    /// Whether it is part of another operator's kernel.
    pub fn joins(&self) -> bool {
        self.inputs.contains(&true)
    }
}

/// Of every class.
pub struct Classes {
    fused: Vec<Fused>,
    paces: Vec<Option<Section>>,
}

impl Classes {
    /// Of a step.
    pub fn new(graph: &Graph, blocks: &Blocks, kernels: Kernels, micro_batches: usize) -> Classes {
        let family: Vec<Family> = blocks
            .nodes
            .iter()
            .map(|members| {
                let n = graph.node(members[0]);
                n.op.work(&graph.input_types(n), &graph.output_types(n)).family
            })
            .collect();
        let family = |n: NodeId| family[blocks.node_class[n.index()] as usize];
        let joins = |maker: NodeId, reader: NodeId| {
            let (m, r) = (graph.node(maker), graph.node(reader));
            let product = family(maker) == Family::MatMul && (r.op.name() == "Cast" || r.is_accumulate());
            kernels == Kernels::Compiled
                && m.section == r.section
                && family(reader) == Family::Memory
                && (family(maker) == Family::Memory || product)
        };
        let mut output = vec![false; graph.values.len()];
        graph.outputs.iter().for_each(|o| output[o.value.index()] = true);
        graph.states.iter().filter_map(|s| s.write).for_each(|w| output[w.index()] = true);
        let uses = graph.uses();
        let of = |id: &NodeId| {
            let n = graph.node(*id);
            let inputs = n.inputs.iter().map(|&v| graph.producer(v).is_some_and(|p| joins(p, *id))).collect();
            let leaves = |v: &autoshard_ir::graph::ValueId| {
                let readers = &uses[v.index()];
                !output[v.index()] && !readers.is_empty() && readers.iter().all(|&r| joins(*id, r))
            };
            Fused { inputs, outputs: n.outputs.iter().map(leaves).collect() }
        };
        let all = |members: &Vec<NodeId>| {
            let each = members.iter().map(of);
            let both = |a: Vec<bool>, b: Vec<bool>| a.into_iter().zip(b).map(|(a, b)| a && b).collect();
            each.reduce(|a, b| Fused { inputs: both(a.inputs, b.inputs), outputs: both(a.outputs, b.outputs) })
                .unwrap_or_default()
        };
        let once = once(graph, micro_batches);
        let pace = |members: &Vec<NodeId>| {
            let n = graph.node(members[0]);
            match n.is_accumulate() && micro_batches == 1 {
                true => None,
                false if members.iter().all(|n| once[n.index()]) => Some(Section::Update),
                false => Some(n.section),
            }
        };
        Classes { fused: blocks.nodes.iter().map(all).collect(), paces: blocks.nodes.iter().map(pace).collect() }
    }

    /// What a class need not read and write.
    pub fn fused(&self, class: usize) -> &Fused {
        &self.fused[class]
    }
    /// The section as often as which a class runs: its own, the update if it runs [`once`], and none if it does nothing: the sum of
    /// one micro-batch is that micro-batch's.
    pub fn pace(&self, class: usize) -> Option<Section> {
        self.paces[class]
    }
}

/// The nodes that run once in a step, for all micro-batches: casts of parameters to the compute precision. With one
/// micro-batch there is nothing to save.
pub fn once(graph: &Graph, micro_batches: usize) -> Vec<bool> {
    let trains = graph.nodes.iter().any(|n| n.section == Section::Backward);
    graph.nodes.iter().map(|n| trains && micro_batches > 1 && graph.casts_state(n)).collect()
}
