//! Rotary position embedding as models write it: `x cos + (-b | a) sin`.

use egg::Id;

use super::super::rule::{Match, Rule, rule};
use crate::op::Op;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        rule("rotary", "(Add (Mul ?x ?c) (Mul (Concat ?d (Neg (Slice ?h ?x)) (Slice ?l ?x)) ?s))", |m| {
            let x = m.id("?x");
            let dims = m.dims(x)?;
            let (last, size) = (dims.len().checked_sub(1)?, *dims.last()?);
            let (concat, high, low) = (m.op("?d")?, m.op("?h")?, m.op("?l")?);
            let part = |op: &Op, from: usize, to: usize| {
                op.get_int("dim") == last as i64 && op.get_int("start") == from as i64 && op.get_int("end") == to as i64
            };
            if concat.get_int("dim") != last as i64 || !part(&low, 0, size / 2) || !part(&high, size / 2, size) {
                return None;
            }
            let angles = [m.id("?c"), m.id("?s")];
            let [c, s] = angles.map(|a| with_rank(m, a, dims.len()));
            let op = Op::new(crate::ops::find("RotaryEmbedding")?).flag("interleaved", false).flag("transposed", false);
            m.add(&op, &[x, c?, s?])
        }),
        rule("rotary-of-transpose", "(RotaryEmbedding ?r (Transpose ?p ?x) ?c ?s)", |m| {
            let (r, p, x) = (m.op("?r")?, m.perm("?p")?, m.id("?x"));
            if p.last().is_none_or(|&d| d + 1 != p.len()) {
                return None;
            }
            let mut back = vec![0; p.len()];
            p.iter().enumerate().for_each(|(i, &d)| back[d] = i);
            let (c, s) = (m.id("?c"), m.id("?s"));
            let (c, s) = (m.transpose(c, &back)?, m.transpose(s, &back)?);
            let turned = m.add(&r, &[x, c, s])?;
            m.transpose(turned, &p)
        }),
    ]
}

/// With leading dims of size 1, up to a rank.
fn with_rank(m: &mut Match<'_>, x: Id, rank: usize) -> Option<Id> {
    let dims = m.dims(x)?;
    let missing = rank.checked_sub(dims.len())?;
    let dims: Vec<usize> = std::iter::repeat_n(1, missing).chain(dims).collect();
    m.reshape(x, &dims)
}
