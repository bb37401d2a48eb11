//! The rules, by what they are about. Most say what exporters write for a fused form, after those of [`arithmetic`] and
//! [`layout`] have made their spellings meet.

mod activation;
mod arithmetic;
mod attention;
mod experts;
mod layout;
mod norm;
mod rotary;

use super::rule::Rule;

/// Every rule.
pub(super) fn all() -> Vec<Rule> {
    [
        arithmetic::rules(),
        layout::rules(),
        activation::rules(),
        norm::rules(),
        rotary::rules(),
        attention::rules(),
        experts::rules(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
