//! Whether a training step may be cut into micro-batches without changing its result.
//!
//! The batch dims of the inputs are followed through the `Forward` nodes by the factor rules. A node keeps micro-batches
//! apart when it splits the batch as a factor. A sum over the batch may only go, through operators that are linear in it,
//! to `Accumulate`: into the loss's sum and count. Everything else (statistics over the batch, a product of two means)
//! would have other values on a part of the batch.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::factor::{FactorId, ReduceKind};
use crate::graph::{Def, Graph, Node, NodeId, Section, ValueId};
use crate::op::{Attr, AttrKind};
use crate::tensor::Tensor;
use crate::{convert, interp};

/// A node or output that needs the whole batch at once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct Reason {
    /// The node in question; none for an output.
    pub node: Option<NodeId>,
    /// Its name and operator, or the output's name.
    pub place: String,
    /// Why.
    pub reason: String,
}

/// How a forward value relates to the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Batch {
    /// The same for all micro-batches.
    Free,
    /// Cut along a dim.
    Dim(usize),
    /// A sum over the batch.
    Sum,
    /// Needs the whole batch; said where it arose.
    Broken,
}

/// Checks a training step (or a forward graph). Sums that reach the outputs of a forward graph are reported. The graph
/// must be of a batch larger than one.
///
/// # Errors
/// Every node and output that needs the whole batch.
pub fn micro_batchable(graph: &Graph) -> Result<(), Vec<Reason>> {
    let mut found = Vec::new();
    let state = followed(graph, &mut found);
    for n in graph.nodes.iter().filter(|n| n.section == Section::Backward && !n.is_accumulate()) {
        for (i, v) in n.inputs.iter().enumerate() {
            // A backward node reads a sum only where the loss was not split: said at the node that is not linear.
            if state[v.index()] == Batch::Sum && found.is_empty() {
                let reason = format!("operand {i} is a sum over the batch, of which a micro-batch has only a part");
                found.push(Reason { node: n.of, place: format!("the gradient of {} ({})", n.name, n.op), reason });
            }
        }
    }
    for id in graph.node_ids() {
        let n = graph.node(id);
        if n.op.def.attr_of(AttrKind::BatchDim).is_some()
            && let Batch::Dim(d) = state[n.outputs[0].index()]
            && n.op.batch_dim() != Some(d)
        {
            let reason = format!("draws by the place in the batch, along dim {d}, which it was not told");
            found.push(Reason { node: Some(id), place: format!("node {id} ({}, {})", n.name, n.op), reason });
        }
    }
    for o in &graph.outputs {
        let reason = match state[o.value.index()] {
            Batch::Sum => "sums over the batch, of which a micro-batch has only a part".into(),
            Batch::Dim(d) if o.batch_dim != Some(d) => match o.batch_dim {
                Some(e) => format!("the batch is dim {d}, but micro-batches are to be joined along dim {e}"),
                None => format!("the batch is dim {d}, but nothing says that micro-batches are joined along it"),
            },
            _ => continue,
        };
        found.push(Reason { node: None, place: format!("output {}", o.name), reason });
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// How the values of a forward graph relate to the batch.
pub(super) fn batches(graph: &Graph) -> Vec<Batch> {
    followed(graph, &mut Vec::new())
}

/// The same, with the nodes that need the whole batch.
fn followed(graph: &Graph, found: &mut Vec<Reason>) -> Vec<Batch> {
    let mut state = vec![Batch::Free; graph.values.len()];
    for x in &graph.inputs {
        if let Some(d) = x.batch_dim {
            state[x.value.index()] = Batch::Dim(d);
        }
    }
    for id in graph.node_ids() {
        let n = graph.node(id);
        if n.section != Section::Forward || n.inputs.iter().all(|v| state[v.index()] == Batch::Free) {
            continue;
        }
        let results = match follow(graph, n, &state) {
            Ok(results) => results,
            Err(reason) => {
                if let Some(reason) = reason {
                    found.push(Reason { node: Some(id), place: format!("node {id} ({}, {})", n.name, n.op), reason });
                }
                vec![Batch::Broken; n.outputs.len()]
            }
        };
        for (v, r) in n.outputs.iter().zip(results) {
            state[v.index()] = r;
        }
    }
    state
}

/// How the results of a node relate to the batch, or why it needs the whole (`None`: said before).
fn follow(graph: &Graph, n: &Node, state: &[Batch]) -> Result<Vec<Batch>, Option<String>> {
    let of = |v: &ValueId| state[v.index()];
    if n.inputs.iter().any(|v| of(v) == Batch::Broken) {
        return Err(None);
    }
    if let Some(dim) = by_index(graph, n, state) {
        return Ok(vec![Batch::Dim(dim)]);
    }
    let rule = n.op.factors(&graph.input_types(n), &graph.output_types(n));
    let sums: Vec<usize> = (0..n.inputs.len()).filter(|&i| of(&n.inputs[i]) == Batch::Sum).collect();
    if !sums.is_empty() {
        let apart = n.inputs.iter().all(|v| matches!(of(v), Batch::Sum | Batch::Free));
        return if apart && rule.linear.contains(&sums) {
            Ok(vec![Batch::Sum; n.outputs.len()])
        } else {
            Err(Some(format!(
                "operand {} is a sum over the batch, and the operator is not linear in it: its value on the whole batch does not follow from those on parts",
                sums[0]
            )))
        };
    }
    let mut factor: Option<FactorId> = None;
    for (i, v) in n.inputs.iter().enumerate() {
        let Batch::Dim(d) = of(v) else { continue };
        let size = graph.ty(*v).dims[d];
        match rule.inputs[i][d] {
            // Dims of size 1 have no factor, so the rule does not say where the batch goes.
            None if size == 1 => {
                return Err(Some("a batch of one does not show which dim is the batch: check at a larger size".into()));
            }
            None => return Err(Some(format!("needs dim {d} of operand {i}, the batch, whole"))),
            Some(f) if factor.is_some_and(|g| g != f) => {
                return Err(Some(format!("pairs every element of the batch with every other (operand {i}, dim {d})")));
            }
            Some(f) => factor = Some(f),
        }
    }
    let Some(f) = factor else { return Ok(vec![Batch::Free; n.outputs.len()]) };
    rule.outputs
        .iter()
        .zip(&rule.combine)
        .map(|(dims, combine)| match (dims.iter().position(|x| *x == Some(f)), combine) {
            (Some(d), _) => Ok(Batch::Dim(d)),
            (None, Some(ReduceKind::Sum)) => Ok(Batch::Sum),
            (None, Some(kind)) => Err(Some(format!("takes the {} over the batch", kind.name()))),
            (None, None) => Err(Some("mixes the elements of the batch".into())),
        })
        .collect()
}

/// `GatherND` and `ScatterND` with constant indices that take every sample to its own place, as exporters write masks
/// and shifted labels: the batch dim of the result.
fn by_index(graph: &Graph, n: &Node, state: &[Batch]) -> Option<usize> {
    let of = |i: usize| state[n.inputs[i].index()];
    let gathers = n.op.name() == "GatherND" && n.op.get_int("batch_dims") == 0;
    let scatters = n.op.name() == "ScatterND" && n.op.attr("reduction") == Some(&Attr::Str("none".into()));
    if !(gathers || scatters) || of(1) != Batch::Free {
        return None;
    }
    let indices = constant(graph, n.inputs[1], &mut BTreeMap::new())?;
    let (&depth, places) = indices.dims().split_last()?;
    let rows = convert::to_f64(indices.dtype(), indices.bytes());
    // Whether coordinate `d` of every index is the place along dim `j` of the indices.
    let own = |d: usize, j: usize| {
        let inner: usize = places[j + 1..].iter().product();
        let sizes = graph.ty(n.inputs[0]).dims[d] == places[j];
        sizes && rows.chunks(depth).enumerate().all(|(at, row)| row[d] == (at / inner % places[j]) as f64)
    };
    match (of(0), n.inputs.get(2).map(|_| of(2))) {
        (Batch::Dim(d), None) if d < depth => (0..places.len()).find(|j| own(d, *j)),
        (Batch::Dim(d), Some(Batch::Free)) if d < depth => (0..places.len()).any(|j| own(d, j)).then_some(d),
        (Batch::Dim(d), Some(Batch::Dim(j))) if d < depth && j < places.len() => Some(d).filter(|d| own(*d, j)),
        (Batch::Free, Some(Batch::Dim(j))) if j < places.len() => (0..depth).find(|d| own(*d, j)),
        _ => None,
    }
}

/// The content of a value that depends on no input and no state.
fn constant(graph: &Graph, v: ValueId, known: &mut BTreeMap<ValueId, Option<Arc<Tensor>>>) -> Option<Arc<Tensor>> {
    if let Some(t) = known.get(&v) {
        return t.clone();
    }
    let t = match &graph.value(v).def {
        Def::Const(t) => Some(t.clone()),
        Def::Node(id, at) => {
            let n = graph.node(*id);
            let operands: Option<Vec<_>> = n.inputs.iter().map(|i| constant(graph, *i, known)).collect();
            let results = operands.and_then(|x| interp::apply(&n.op, &x, &graph.output_types(n)).ok());
            results.map(|mut r| Arc::new(r.swap_remove(*at)))
        }
        Def::Input(_) | Def::State(_) => None,
    };
    known.insert(v, t.clone());
    t
}
