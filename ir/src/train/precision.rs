//! Mixed precision, as a rewrite of the forward graph: activations in a 16-bit type, parameters kept in f32.
//!
//! Parameters stay f32 states (the master weights) and are cast where used, once per section. Which type a node computes
//! in follows the habits of PyTorch's autocast:
//! - What depends on no trainable parameter (position tables, masks) stays f32, as does everything that is not f32.
//! - Matrix products, convolutions and attention compute in 16 bits.
//! - The operators of [`WIDE`] compute in f32. So do losses: cross-entropy takes logits of any type, and gives f32.
//! - Others compute in f32 when an activation among their operands is f32, else in 16 bits.
//!
//! Operands are cast to the node's type; outputs of the graph are cast back to the type they had. Statistics inside
//! normalisation and softmax kernels are f32 in any case. Gradients follow from the casts: that of a parameter is f32.

use crate::builder::Builder;
use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::op::{Family, Op, OpError};
use crate::rewrite;

use super::TrainError;
use super::autodiff::depends_on_trainable;

/// Operators that compute in f32: long sums, and functions that amplify rounding.
pub const WIDE: [&str; 7] = ["CumSum", "Exp", "Log", "Pow", "Reciprocal", "ReduceSum", "Sqrt"];

/// In which type activations are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// As in the file.
    F32,
    /// bfloat16: the range of f32.
    Bf16,
    /// IEEE half precision: gradients are multiplied by `loss_scale` on their way, so that small ones do not vanish.
    /// The factor applies to the gradient of the loss's *sum*, whose elements do not shrink with the batch.
    F16 {
        /// Static factor, at best a power of two.
        loss_scale: f64,
    },
}

impl Precision {
    /// The type of activations; `None`: as they are.
    pub fn compute(&self) -> Option<DType> {
        match self {
            Precision::F32 => None,
            Precision::Bf16 => Some(DType::Bf16),
            Precision::F16 { .. } => Some(DType::F16),
        }
    }
    /// The factor of gradients on their way.
    pub fn loss_scale(&self) -> f64 {
        if let Precision::F16 { loss_scale } = self { *loss_scale } else { 1.0 }
    }
}

/// Rewrites a forward graph to a compute precision; outputs keep their types.
///
/// # Errors
/// An operator that refuses the type; a loss scale that is not positive.
pub fn rewrite(graph: &Graph, precision: &Precision) -> Result<Graph, TrainError> {
    let scale = precision.loss_scale();
    if !(scale.is_finite() && scale > 0.0) {
        return Err(TrainError::Options(format!("the loss scale must be a positive number, not {scale}")));
    }
    let Some(low) = precision.compute() else { return Ok(graph.clone()) };
    let active = depends_on_trainable(graph);
    let emit = |b: &mut Builder, n: &Node, ins: &[ValueId]| {
        let float = |v: ValueId| graph.ty(v).dtype == DType::F32;
        if n.op.name() == "Cast" || !n.inputs.iter().any(|v| active[v.index()] && float(*v)) {
            return b.emit(n.op.clone(), ins);
        }
        let wide = match n.op.work(&graph.input_types(n), &graph.output_types(n)).family {
            Family::MatMul | Family::Conv | Family::Attention => false,
            _ if WIDE.contains(&n.op.name()) => true,
            _ => n.inputs.iter().zip(ins).any(|(old, new)| {
                active[old.index()] && graph.producer(*old).is_some() && b.ty(*new).dtype == DType::F32
            }),
        };
        let to = if wide { DType::F32 } else { low };
        let ins: Vec<ValueId> = n
            .inputs
            .iter()
            .zip(ins)
            .map(|(old, &new)| if float(*old) { cast(b, new, to, active[old.index()]) } else { Ok(new) })
            .collect::<Result<_, _>>()?;
        b.emit(n.op.clone(), &ins)
    };
    Ok(rewrite::rebuild(graph, emit, |b, old, new| cast(b, new, graph.ty(old).dtype, true))?)
}

/// A value in another float type. Values that are not `active` are masks and tables: half precision would turn the
/// lowest f32, which masks use, to minus infinity, and a row masked throughout to NaN.
fn cast(b: &mut Builder, v: ValueId, to: DType, active: bool) -> Result<ValueId, OpError> {
    if b.ty(v).dtype == to {
        return Ok(v);
    }
    let mut v = v;
    if to == DType::F16 && !active {
        let lowest = b.scalar(b.ty(v).dtype, -65504.0);
        v = super::autodiff::emit(b, "Max", &[v, lowest])?;
    }
    let def = crate::ops::find("Cast").ok_or_else(|| OpError("the operator table has no Cast".into()))?;
    b.emit1(Op::new(def).dtype("to", to), &[v])
}
