//! The rules, by what they are about. Most say what exporters write for a fused form, after those of [`arithmetic`] and
//! [`layout`] have made their spellings meet.

mod activation;
mod arithmetic;
mod attention;
mod experts;
mod layout;
mod norm;
mod rotary;

use super::Forms;
use super::rule::Rule;

/// The rules that make some forms, and those that they rest on.
pub(super) fn all(forms: Forms) -> Vec<Rule> {
    let when = |wanted: bool, rules: fn() -> Vec<Rule>| if wanted { rules() } else { Vec::new() };
    [
        arithmetic::rules(),
        layout::rules(),
        when(forms.composites, activation::rules),
        when(forms.composites, norm::rules),
        when(forms.composites, rotary::rules),
        when(forms.attention, attention::rules),
        experts::rules(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
