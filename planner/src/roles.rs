//! Which dims are the batch and which the sequence: found by following the inputs' dims through the factor rules.
//!
//! An input's batch dim is tagged batch, its other dims sequence; a factor that drives a tagged dim of an operand has that
//! tag, and so have the dims that it drives in results. Constants and states have no tags.
//!
//! Tags give mesh axes their customary meaning: outside the update, `dp` splits batch factors only, `cp` sequence factors only,
//! and `tp` all but batch factors.
//! Every plan that breaks this rule for all operators at once is one of another mesh, so little is lost and the problem
//! gets much smaller. Where `dp` can split the batch and `cp` the sequence they do, and `tp` splits every product that it can: ranks that
//! all compute the same are no parallelism, however cheap. `Update` nodes, casts of parameters, accumulated gradients and storage
//! may be split by any axis: that is ZeRO.

use autoshard_ir::blocks::Blocks;
use autoshard_ir::factor::FactorRule;
use autoshard_ir::graph::Graph;

/// The meaning of a dim or factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tag {
    /// Independent samples.
    Batch,
    /// Tokens of a sample (or rows and columns of an image).
    Sequence,
}

/// Per class of nodes, the tags of its factors: those of its first member.
pub type Tags = Vec<Vec<Option<Tag>>>;

/// Tags of every class's factors.
pub fn tags(graph: &Graph, blocks: &Blocks) -> Tags {
    let rules: Vec<FactorRule> = blocks
        .nodes
        .iter()
        .map(|members| {
            let n = graph.node(members[0]);
            n.op.factors(&graph.input_types(n), &graph.output_types(n))
        })
        .collect();
    let mut dims: Vec<Vec<Option<Tag>>> = graph.values.iter().map(|v| vec![None; v.ty.rank()]).collect();
    for x in &graph.inputs {
        for (d, tag) in dims[x.value.index()].iter_mut().enumerate() {
            *tag = Some(if x.batch_dim == Some(d) { Tag::Batch } else { Tag::Sequence });
        }
    }
    let mut found = vec![Vec::new(); blocks.nodes.len()];
    for id in graph.node_ids() {
        let class = blocks.node_class[id.index()] as usize;
        let (n, rule) = (graph.node(id), &rules[class]);
        let mut factors = vec![None; rule.factors.len()];
        for (slots, v) in rule.inputs.iter().zip(&n.inputs) {
            for (slot, tag) in slots.iter().zip(&dims[v.index()]) {
                if let (Some(f), Some(tag)) = (slot, tag) {
                    let known: &mut Option<Tag> = &mut factors[f.0 as usize];
                    *known = Some(known.map_or(*tag, |k| k.min(*tag)));
                }
            }
        }
        for (slots, v) in rule.outputs.iter().zip(&n.outputs) {
            for (d, slot) in slots.iter().enumerate() {
                if let Some(f) = slot {
                    dims[v.index()][d] = factors[f.0 as usize];
                }
            }
        }
        if blocks.nodes[class][0] == id {
            found[class] = factors;
        }
    }
    found
}
