//! Factor rules in a chain, for operators most of whose dims are factors of their own.

use super::support::{DIM_NAMES, RuleMaker};
use crate::factor::{FactorRule, ReduceKind};
use crate::tensor::Type;

/// A rule under construction: everything whole at first.
pub(crate) struct RuleBuilder<'a>(RuleMaker<'a>);

impl<'a> RuleBuilder<'a> {
    pub fn new(inputs: &'a [Type], outputs: &'a [Type]) -> RuleBuilder<'a> {
        RuleBuilder(RuleMaker::new(inputs, outputs))
    }
    /// Adds a factor that drives these (operand, dim) and (result, dim).
    pub fn factor(
        mut self,
        name: &'static str,
        size: usize,
        inputs: &[(usize, usize)],
        outputs: &[(usize, usize)],
    ) -> RuleBuilder<'a> {
        self.0.factor(name, size, inputs, outputs);
        self
    }
    /// Adds a factor for each of these dims, the same dim of all given operands and results. Dims beyond the last name
    /// stay whole.
    pub fn dims(
        mut self,
        dims: impl IntoIterator<Item = usize>,
        sizes: &[usize],
        inputs: &[usize],
        outputs: &[usize],
    ) -> RuleBuilder<'a> {
        for d in dims.into_iter().take_while(|&d| d < DIM_NAMES.len()) {
            let at = |which: &[usize]| which.iter().map(|&i| (i, d)).collect::<Vec<_>>();
            self = self.factor(DIM_NAMES[d], sizes[d], &at(inputs), &at(outputs));
        }
        self
    }
    /// The rule; a result that lacks a factor combines by its entry of `reduce`.
    pub fn build(self, reduce: &[ReduceKind]) -> FactorRule {
        self.0.finish_each(|o| reduce.get(o).copied())
    }
}
