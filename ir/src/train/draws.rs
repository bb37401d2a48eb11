//! Random draws (`Dropout`) of a training step: what makes them a function of seed, step and the element's index in the
//! whole batch, so that micro-batches, shards and recomputed copies draw what the unsharded step draws.
//!
//! - The *seed* tells the nodes of a model apart: the importer numbers them.
//! - The *step* is an operand: the count of steps, a state that the update counts up ([`with_step`]).
//! - The *batch dim* is an attribute: along it, the kernel is told where the micro-batch lies in the whole batch
//!   ([`batch_dims`]). A draw without it that depends on the batch is no micro-batchable node ([`super::micro_batchable`]).

use crate::builder::Builder;
use crate::dtype::DType;
use crate::graph::{Graph, Init, Node, StateId, StateKind};
use crate::op::AttrKind;
use crate::tensor::Type;
use crate::train::Optimizer;
use crate::train::micro_batch::{Batch, batches};

/// Whether a node draws random numbers.
fn draws(n: &Node) -> bool {
    n.op.def.attr_of(AttrKind::Seed).is_some()
}

/// Whether a graph draws random numbers.
pub fn any(graph: &Graph) -> bool {
    graph.nodes.iter().any(draws)
}

/// The batch dim of each draw of a forward graph, in order; `None` where it is the same for the whole batch, or needs all
/// of it. The graph must be of a batch larger than one.
pub fn batch_dims(graph: &Graph) -> Vec<Option<usize>> {
    let of = batches(graph);
    let dim = |n: &Node| if let Batch::Dim(d) = of[n.outputs[0].index()] { Some(d) } else { None };
    graph.nodes.iter().filter(|n| draws(n)).map(dim).collect()
}

/// The batch dims that draws were told, in order.
pub fn told(graph: &Graph) -> Vec<Option<usize>> {
    graph.nodes.iter().filter(|n| draws(n)).map(|n| n.op.batch_dim()).collect()
}

/// Tells draws their batch dims, as many as there are draws.
pub fn with_batch_dims(mut graph: Graph, dims: &[Option<usize>]) -> Graph {
    for (n, dim) in graph.nodes.iter_mut().filter(|n| draws(n)).zip(dims) {
        if let (Some(name), Some(d)) = (n.op.def.attr_of(AttrKind::BatchDim), dim) {
            n.op = n.op.clone().int(name, *d as i64);
        }
    }
    graph
}

/// Gives draws that have none the count of steps as their last operand.
pub(super) fn with_step(graph: Graph, optimizer: &Optimizer) -> Graph {
    let lacks = |n: &Node| draws(n) && n.inputs.len() == 1;
    if !graph.nodes.iter().any(lacks) {
        return graph;
    }
    let mut b = Builder::resume(graph);
    let step = step_state(&mut b, optimizer);
    let mut graph = b.finish();
    let step = graph.state(step).read;
    graph.nodes.iter_mut().filter(|n| lacks(n)).for_each(|n| n.inputs.push(step));
    graph
}

/// The state that counts steps, 0 before the first; the update writes it.
pub(super) fn step_state(b: &mut Builder, optimizer: &Optimizer) -> StateId {
    let name = match optimizer {
        Optimizer::AdamW(_) => "adam.step",
        Optimizer::Sgd(_) => "sgd.step",
    };
    let known = b.graph().state_ids().find(|&s| b.graph().state(s).name == name);
    known.unwrap_or_else(|| b.state(name, StateKind::Optimizer, Type::new(DType::F32, []), Init::Zeros, None))
}
