//! SiLU and GELU, and casts around them that their kernels do inside.

use std::f64::consts::FRAC_1_SQRT_2;

use egg::Id;

use super::super::rule::{Match, Rule, equal, rule};
use crate::op::{Attr, Op};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        equal("silu", "(Mul ?x (Sigmoid ?x))", "(Silu ?x)"),
        rule("silu-by-exp", "(Div ?x (Add (Exp (Neg ?x)) ?one))", |m| {
            m.is("?one", 1.0)?;
            let x = m.id("?x");
            m.apply("Silu", &[x])
        }),
        rule("gelu-by-erf", "(Mul (Mul ?x (Add (Erf (Mul ?x ?c)) ?one)) ?half)", |m| {
            let x = m.id("?x");
            m.is_about("?c", FRAC_1_SQRT_2, x)?;
            gelu(m, "none")
        }),
        rule(
            "gelu-by-tanh",
            "(Mul (Mul ?x (Add (Tanh (Mul (Add ?x (Mul (Mul (Mul ?x ?x) ?x) ?k)) ?c)) ?one)) ?half)",
            gelu_by_tanh,
        ),
        rule(
            "gelu-by-tanh-factored",
            "(Mul (Mul ?x (Add (Tanh (Mul (Mul ?x (Add (Mul (Mul ?x ?x) ?k) ?one)) ?c)) ?one)) ?half)",
            gelu_by_tanh,
        ),
        equal("cast-gelu", "(Cast ?to (Gelu ?a (Cast ?wide ?x)))", "(Gelu ?a ?x)"),
        equal("cast-silu", "(Cast ?to (Silu (Cast ?wide ?x)))", "(Silu ?x)"),
    ]
}

/// Coefficients as in [`crate::ops::unary`].
fn gelu_by_tanh(m: &mut Match<'_>) -> Option<Id> {
    let x = m.id("?x");
    m.is_about("?k", 0.044715, x)?;
    m.is_about("?c", (2.0 / std::f64::consts::PI).sqrt(), x)?;
    gelu(m, "tanh")
}

fn gelu(m: &mut Match<'_>, approximate: &str) -> Option<Id> {
    m.is("?one", 1.0)?;
    m.is("?half", 0.5)?;
    let x = m.id("?x");
    let op = Op::new(crate::ops::find("Gelu")?).with("approximate", Attr::Str(approximate.into()));
    m.add(&op, &[x])
}
