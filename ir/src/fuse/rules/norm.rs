//! RMSNorm, and LayerNorm as the RMSNorm of what the mean was taken from; first without scale, which then joins.

use egg::Id;

use super::super::rule::{Match, Rule, rule};
use crate::op::Op;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        rule("rms-norm", "(Mul ?x (Reciprocal (Sqrt (Add (Mul (ReduceSum ?r (Mul ?x ?x)) ?n) ?eps))))", |m| {
            let x = m.id("?x");
            let (ty, axis) = (m.ty(x)?, mean_axis(m, x)?);
            let epsilon = m.number("?eps")?;
            let ones = m.filled(ty.dtype, &ty.dims[axis..], 1.0);
            let op = Op::new(crate::ops::find("RmsNorm")?).int("axis", axis as i64).float("epsilon", epsilon);
            m.add(&op, &[x, ones])
        }),
        rule("layer-norm", "(RmsNorm ?a (Sub ?x (Mul (ReduceSum ?r ?x) ?n)) ?w)", |m| {
            let (x, w, rms) = (m.id("?x"), m.id("?w"), m.op("?a")?);
            if mean_axis(m, x)? as i64 != rms.get_int("axis") {
                return None;
            }
            m.add(&layer_norm(&rms)?, &[x, w])
        }),
        rule("rms-norm-scale", "(Mul (RmsNorm ?a ?x ?one) ?w)", scale),
        rule("layer-norm-scale", "(Mul (LayerNorm ?a ?x ?one) ?w)", scale),
        rule("layer-norm-bias", "(Add (LayerNorm ?a ?x ?w) ?b)", |m| {
            let (x, w, b) = (m.id("?x"), m.id("?w"), m.id("?b"));
            (m.ty(w)? == m.ty(b)?).then_some(())?;
            let op = m.op("?a")?;
            m.add(&op, &[x, w, b])
        }),
        rule("cast-rms-norm", "(Cast ?to (RmsNorm ?a (Cast ?wide ?x) ?one))", narrow),
        rule("cast-layer-norm", "(Cast ?to (LayerNorm ?a (Cast ?wide ?x) ?one))", narrow),
        rule("cast-scaled-rms-norm", "(Cast ?to (RmsNorm ?a (Cast ?wide ?x) (Cast ?wide ?w)))", narrow_all),
        rule("cast-scaled-layer-norm", "(Cast ?to (LayerNorm ?a (Cast ?wide ?x) (Cast ?wide ?w)))", narrow_all),
        rule(
            "cast-whole-layer-norm",
            "(Cast ?to (LayerNorm ?a (Cast ?wide ?x) (Cast ?wide ?w) (Cast ?wide ?b)))",
            |m| {
                let (x, w, b, op) = (m.id("?x"), m.id("?w"), m.id("?b"), m.op("?a")?);
                m.add(&op, &[x, w, b])
            },
        ),
    ]
}

/// The first of the trailing dims that `(Mul (ReduceSum ?r ..) ?n)` is the mean over.
fn mean_axis(m: &Match<'_>, x: Id) -> Option<usize> {
    let (dims, reduce) = (m.dims(x)?, m.op("?r")?);
    let over = reduce.get_ints("dims");
    let axis = dims.len().checked_sub(over.len())?;
    let trailing = over.iter().enumerate().all(|(i, &d)| d as usize == axis + i);
    if over.is_empty() || !trailing || !reduce.get_flag("keep") {
        return None;
    }
    m.is_about("?n", 1.0 / dims[axis..].iter().product::<usize>() as f64, x)?;
    Some(axis)
}

fn layer_norm(rms: &Op) -> Option<Op> {
    let op = Op::new(crate::ops::find("LayerNorm")?);
    Some(op.int("axis", rms.get_int("axis")).float("epsilon", rms.get_float("epsilon")))
}

/// A product with a tensor of the normalised sizes is the scale.
fn scale(m: &mut Match<'_>) -> Option<Id> {
    m.is("?one", 1.0)?;
    let (x, one, w, op) = (m.id("?x"), m.id("?one"), m.id("?w"), m.op("?a")?);
    (m.ty(one)? == m.ty(w)?).then_some(())?;
    m.add(&op, &[x, w])
}

/// Kernels compute in f32 inside, so casts around them are theirs.
fn narrow(m: &mut Match<'_>) -> Option<Id> {
    m.is("?one", 1.0)?;
    let (x, one, op) = (m.id("?x"), m.id("?one"), m.op("?a")?);
    let (dtype, dims) = (m.ty(x)?.dtype, m.dims(one)?);
    let ones = m.filled(dtype, &dims, 1.0);
    m.add(&op, &[x, ones])
}

fn narrow_all(m: &mut Match<'_>) -> Option<Id> {
    let (x, w, op) = (m.id("?x"), m.id("?w"), m.op("?a")?);
    m.add(&op, &[x, w])
}
