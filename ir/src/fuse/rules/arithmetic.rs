//! Order and grouping of sums and products, and where scalar factors stand: outside.

use super::super::rule::{Match, Rule, equal, rule};
use egg::Id;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        equal("add-commutes", "(Add ?a ?b)", "(Add ?b ?a)"),
        equal("mul-commutes", "(Mul ?a ?b)", "(Mul ?b ?a)"),
        equal("and-commutes", "(And ?a ?b)", "(And ?b ?a)"),
        equal("and-associates", "(And (And ?a ?b) ?c)", "(And ?a (And ?b ?c))"),
        rule("scale-of-scaled", "(Mul (Mul ?x ?s) ?t)", |m| {
            let (s, t) = (m.number("?s")?, m.number("?t")?);
            let x = m.id("?x");
            scaled(m, x, s * t)
        }),
        rule("scale-outside-product", "(Mul (Mul ?x ?s) ?y)", |m| {
            let s = m.number("?s")?;
            if m.number("?y").is_some() {
                return None;
            }
            let (x, y) = (m.id("?x"), m.id("?y"));
            let product = m.apply("Mul", &[x, y])?;
            scaled(m, product, s)
        }),
        rule("scale-outside-contraction", "(Einsum ?e (Mul ?x ?s) ?y)", |m| {
            let (e, s) = (m.op("?e")?, m.number("?s")?);
            let (x, y) = (m.id("?x"), m.id("?y"));
            let product = m.add(&e, &[x, y])?;
            scaled(m, product, s)
        }),
        rule("division-by-number", "(Div ?x ?s)", |m| {
            let s = m.number("?s").filter(|s| *s != 0.0)?;
            let x = m.id("?x");
            if !m.ty(x)?.dtype.is_float() {
                return None;
            }
            scaled(m, x, 1.0 / s)
        }),
        equal("division-by-root", "(Div ?x (Sqrt ?y))", "(Mul ?x (Reciprocal (Sqrt ?y)))"),
        rule("one-over", "(Div ?one ?y)", |m| {
            m.is("?one", 1.0)?;
            let y = m.id("?y");
            m.apply("Reciprocal", &[y])
        }),
    ]
}

fn scaled(m: &mut Match<'_>, x: Id, s: f64) -> Option<Id> {
    let dtype = m.ty(x)?.dtype;
    let s = m.scalar(dtype, s);
    m.apply("Mul", &[x, s])
}
