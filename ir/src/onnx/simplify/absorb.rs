//! Transposes become part of the contractions around them.
//!
//! - A transpose of a contraction that nothing else uses is a contraction with another result term.
//! - A transpose moves behind an operator that it meets with scalars only, so that a contraction behind reads through it.
//! - Contractions read through transposes of operands ([`Builder::einsum`] does).

use crate::builder::Builder;
use crate::graph::{Graph, Node, ValueId};
use crate::op::OpError;
use crate::ops::einsum::equation;
use crate::rewrite::{RewriteError, rebuild};

/// See the module.
pub(super) fn absorb(graph: &Graph) -> Result<Graph, RewriteError> {
    let uses = uses(graph);
    rebuild(graph, |b, n, ins| node(graph, &uses, b, n, ins), |_, _, v| Ok(v))
}

/// Per value, how often nodes and outputs use it.
pub(super) fn uses(graph: &Graph) -> Vec<usize> {
    let mut uses: Vec<usize> = graph.uses().iter().map(Vec::len).collect();
    graph.outputs.iter().for_each(|o| uses[o.value.index()] += 1);
    graph.states.iter().filter_map(|s| s.write).for_each(|v| uses[v.index()] += 1);
    uses
}

fn node(graph: &Graph, uses: &[usize], b: &mut Builder, n: &Node, ins: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
    let producer = |b: &Builder, v: ValueId| b.graph().producer(v).map(|p| b.graph().node(p).clone());
    let perm = |n: &Node| -> Vec<usize> { n.op.get_ints("perm").iter().map(|&d| d as usize).collect() };
    match n.op.name() {
        "Einsum" => {
            let e = equation(&n.op)?;
            Ok(vec![b.einsum(&e.to_string(), ins[0], ins[1])?])
        }
        "Transpose" => {
            if uses[n.inputs[0].index()] == 1
                && let Some(product) = producer(b, ins[0]).filter(|p| p.op.name() == "Einsum")
            {
                let mut e = equation(&product.op)?;
                e.z = perm(n).iter().map(|&d| e.z[d]).collect();
                return Ok(vec![b.einsum(&e.to_string(), product.inputs[0], product.inputs[1])?]);
            }
            Ok(vec![b.transpose(ins[0], &perm(n))?])
        }
        _ => {
            // Its one operand with dims is a transpose that nothing else uses.
            let wide: Vec<usize> = (0..ins.len()).filter(|&i| b.ty(ins[i]).rank() > 0).collect();
            if let ([at], [out]) = (&wide[..], &n.outputs[..])
                && graph.ty(*out).dims == b.ty(ins[*at]).dims
                && n.op.def.attrs.is_empty()
                && uses[n.inputs[*at].index()] == 1
                && let Some(t) = producer(b, ins[*at]).filter(|p| p.op.name() == "Transpose")
            {
                let mut before = ins.to_vec();
                before[*at] = t.inputs[0];
                let out = b.emit1(n.op.clone(), &before)?;
                return Ok(vec![b.transpose(out, &perm(&t))?]);
            }
            b.emit(n.op.clone(), ins)
        }
    }
}
