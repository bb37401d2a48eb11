//! Operators that exist only while rewriting: steps on the way to a fused form, which no graph contains.
//!
//! - `Scores(q, k, [mask])`: what attention takes the softmax of, with the settings that Attention will have.
//! - `Weights(q, k, [mask])`: their softmax.
//! - `Repeat(x)`: each entry along `dim` `count` times in a row, as exporters spell grouped queries.
//!
//! `q` and `k` are `[batch, heads, sequence, size]`; masks are as Attention takes them.

use crate::DType;
use crate::factor::FactorRule;
use crate::op::{AttrKind, Family, Gradient, KernelError, Op, OpDef, OpError, Work};
use crate::ops::attention::Attention;
use crate::ops::support::never;
use crate::tensor::Type;

type Infer = fn(&Op, &[Type]) -> Result<Vec<Type>, OpError>;

const fn inner(name: &'static str, attrs: &'static [(&'static str, AttrKind)], infer: Infer) -> OpDef {
    OpDef {
        name,
        doc: "a step on the way to a fused form",
        attrs,
        onnx: &[],
        infer,
        factors: |_, i, o| FactorRule::replicate(i, o),
        // Never part of a result.
        work: |_, _, _| Work { family: Family::Memory, flops: f64::INFINITY, bytes: f64::INFINITY, ..Work::FREE },
        identity: never,
        gradient: Gradient::Internal("rewriting"),
        kernel: |op, _, _| Err(KernelError(format!("{} exists only while rewriting", op.name()))),
        samples: Vec::new,
    }
}

const SETTINGS: &[(&str, AttrKind)] = &[
    ("scale", AttrKind::Float),
    ("causal", AttrKind::Bool),
    ("offset", AttrKind::Int),
    ("window", AttrKind::Int),
    ("uniform", AttrKind::Bool),
    ("to", AttrKind::DType),
];

static SCORES: OpDef = inner("Scores", SETTINGS, infer_scores);
static WEIGHTS: OpDef = inner("Weights", SETTINGS, infer_scores);
static REPEAT: OpDef = inner("Repeat", &[("dim", AttrKind::Int), ("count", AttrKind::Int)], infer_repeat);

/// The operator of that name.
pub(super) fn find(name: &str) -> Option<&'static OpDef> {
    [&SCORES, &WEIGHTS, &REPEAT].into_iter().find(|d| d.name == name)
}

/// Whether an operator exists only here.
pub(super) fn is_inner(def: &OpDef) -> bool {
    find(def.name).is_some()
}

/// `Scores` or `Weights` with the settings of attention, of element type `to`.
fn with_settings(def: &'static OpDef, a: &Attention, to: DType) -> Op {
    let op = Op::new(def).float("scale", a.scale).flag("causal", a.causal);
    let op = op.int("offset", a.offset as i64).int("window", a.window as i64);
    op.flag("uniform", a.uniform).dtype("to", to)
}

pub(super) fn scores(a: &Attention, to: DType) -> Op {
    with_settings(&SCORES, a, to)
}

pub(super) fn weights(a: &Attention, to: DType) -> Op {
    with_settings(&WEIGHTS, a, to)
}

pub(super) fn repeat(dim: usize, count: usize) -> Op {
    Op::new(&REPEAT).int("dim", dim as i64).int("count", count as i64)
}

fn infer_scores(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let bad = || OpError(format!("{} does not fit", op.name()));
    let ([q, k], Some(to)) = (inputs.get(..2).ok_or_else(bad)?, op.get_dtype("to")) else { return Err(bad()) };
    if q.rank() != 4 || k.rank() != 4 || q.dims[..2] != k.dims[..2] || q.dims[3] != k.dims[3] {
        return Err(bad());
    }
    let out = [q.dims[0], q.dims[1], q.dims[2], k.dims[2]];
    let fits = |m: &Type| m.rank() == 4 && m.dims.iter().zip(out).all(|(&m, d)| m == 1 || m == d);
    if inputs.len() > 3 || inputs.get(2).is_some_and(|m| !fits(m) || (m.dtype != DType::Bool && m.dtype != q.dtype)) {
        return Err(bad());
    }
    Ok(vec![Type::new(to, out)])
}

fn infer_repeat(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let (dim, count) = (op.get_int("dim") as usize, op.get_int("count") as usize);
    let mut ty = inputs[0].clone();
    let size = ty.dims.get_mut(dim).ok_or_else(|| OpError("Repeat does not fit".into()))?;
    *size *= count;
    Ok(vec![ty])
}
