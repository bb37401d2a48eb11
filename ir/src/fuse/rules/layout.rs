//! Transposes, reshapes and repetitions meet and cancel; contractions read through transposes.

use egg::Id;

use super::super::inner;
use super::super::rule::{Match, Rule, rule};
use crate::op::{Attr, Op};
use crate::ops::einsum::{Equation, equation};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        rule("transpose-of-transpose", "(Transpose ?p (Transpose ?q ?x))", |m| {
            let (p, q) = (m.perm("?p")?, m.perm("?q")?);
            let both: Vec<usize> = p.iter().map(|&d| q[d]).collect();
            let x = m.id("?x");
            m.transpose(x, &both)
        }),
        rule("contraction-swaps", "(Einsum ?e ?x ?y)", |m| {
            let Equation { x, y, z } = equation(&m.op("?e")?).ok()?;
            let (a, b) = (m.id("?x"), m.id("?y"));
            contraction(m, Equation { x: y, y: x, z }, [b, a])
        }),
        rule("contraction-of-transpose", "(Einsum ?e (Transpose ?p ?x) ?y)", |m| {
            let mut e = equation(&m.op("?e")?).ok()?;
            let p = m.perm("?p")?;
            let mut before = e.x.clone();
            p.iter().zip(&e.x).for_each(|(&d, &letter)| before[d] = letter);
            e.x = before;
            let (x, y) = (m.id("?x"), m.id("?y"));
            contraction(m, e, [x, y])
        }),
        rule("transpose-of-contraction", "(Transpose ?p (Einsum ?e ?x ?y))", |m| {
            let mut e = equation(&m.op("?e")?).ok()?;
            e.z = m.perm("?p")?.iter().map(|&d| e.z[d]).collect();
            let (x, y) = (m.id("?x"), m.id("?y"));
            contraction(m, e, [x, y])
        }),
        rule("reshape-of-reshape", "(Reshape ?r (Reshape ?s ?x))", |m| {
            let (r, x) = (m.op("?r")?, m.id("?x"));
            let dims: Vec<usize> = r.get_ints("dims").iter().map(|&d| d as usize).collect();
            m.reshape(x, &dims)
        }),
        rule("reshape-before-transpose", "(Reshape ?r (Transpose ?p ?x))", reshape_before_transpose),
        rule("repeat", "(Reshape ?r (Expand ?e (Reshape ?s ?x)))", repeat),
        rule("transpose-of-repeat", "(Transpose ?p (Repeat ?r ?x))", |m| {
            let (p, r, x) = (m.perm("?p")?, m.op("?r")?, m.id("?x"));
            let dim = p.iter().position(|&d| d as i64 == r.get_int("dim"))?;
            let turned = m.transpose(x, &p)?;
            m.add(&inner::repeat(dim, r.get_int("count") as usize), &[turned])
        }),
    ]
}

fn contraction(m: &mut Match<'_>, e: Equation, args: [Id; 2]) -> Option<Id> {
    let op = Op::new(crate::ops::find("Einsum")?).with("eq", Attr::Str(e.to_string()));
    m.add(&op, &args)
}

/// A reshape that merges dims which a transpose keeps side by side can come first.
fn reshape_before_transpose(m: &mut Match<'_>) -> Option<Id> {
    let (p, x) = (m.perm("?p")?, m.id("?x"));
    let from = m.dims(x)?;
    let to: Vec<usize> = m.op("?r")?.get_ints("dims").iter().map(|&d| d as usize).collect();
    // Groups of dims of the transpose that become one dim each.
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut at = 0;
    for &size in &to {
        let mut group = vec![*p.get(at)?];
        let mut product = from[p[at]];
        at += 1;
        while product < size {
            group.push(*p.get(at)?);
            product *= from[p[at]];
            at += 1;
        }
        if product != size || group.windows(2).any(|w| w[1] != w[0] + 1) {
            return None;
        }
        groups.push(group);
    }
    if at != p.len() || groups.iter().all(|g| g.len() == 1) {
        return None;
    }
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|&g| groups[g][0]);
    let merged: Vec<usize> = order.iter().map(|&g| to[g]).collect();
    let perm: Vec<usize> = (0..groups.len()).map(|g| order.iter().position(|&o| o == g)).collect::<Option<_>>()?;
    let merged = m.reshape(x, &merged)?;
    m.transpose(merged, &perm)
}

/// A new dim behind `d`, expanded, and merged into it: each entry of `d` several times in a row.
fn repeat(m: &mut Match<'_>) -> Option<Id> {
    let x = m.id("?x");
    let from = m.dims(x)?;
    let ints = |m: &Match<'_>, var: &str| -> Option<Vec<usize>> {
        Some(m.op(var)?.get_ints("dims").iter().map(|&d| d as usize).collect())
    };
    let (to, wide, thin) = (ints(m, "?r")?, ints(m, "?e")?, ints(m, "?s")?);
    if wide.len() != thin.len() {
        return None;
    }
    let at = (1..thin.len()).find(|&d| thin[d] != wide[d])?;
    let fits = wide.len() == from.len() + 1
        && thin[at] == 1
        && [&thin[..at], &thin[at + 1..]].concat() == from
        && [&wide[..at], &wide[at + 1..]].concat() == from;
    let mut repeated = from;
    *repeated.get_mut(at - 1)? *= wide[at];
    if !fits || to != repeated {
        return None;
    }
    m.add(&inner::repeat(at - 1, wide[at]), &[x])
}
