//! Builds factor rules dim by dim, for operators that Einstein notation with fixed ranks does not fit.

use crate::factor::{Factor, FactorId, FactorRule, ReduceKind};
use crate::tensor::Type;

/// Names of factors that are merely a dim.
pub(crate) const DIMS: [&str; 8] = ["d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"];

/// A rule under construction: everything whole at first.
pub(crate) struct RuleBuilder {
    rule: FactorRule,
    driven_outputs: Vec<Vec<usize>>,
}

impl RuleBuilder {
    pub fn new(inputs: &[Type], outputs: &[Type]) -> RuleBuilder {
        RuleBuilder { rule: FactorRule::replicate(inputs, outputs), driven_outputs: Vec::new() }
    }
    /// Adds a factor that drives these (operand, dim) and (result, dim). Dropped when its size is 1.
    pub fn factor(
        mut self,
        name: &'static str,
        size: usize,
        inputs: &[(usize, usize)],
        outputs: &[(usize, usize)],
    ) -> RuleBuilder {
        if size > 1 {
            let id = FactorId(self.rule.factors.len() as u8);
            self.rule.factors.push(Factor { name, size });
            for &(i, d) in inputs {
                self.rule.inputs[i][d] = Some(id);
            }
            for &(o, d) in outputs {
                self.rule.outputs[o][d] = Some(id);
            }
            self.driven_outputs.push(outputs.iter().map(|&(o, _)| o).collect());
        }
        self
    }
    /// Adds a factor for each of these dims, the same dim of all given operands and results.
    pub fn dims(
        mut self,
        dims: impl IntoIterator<Item = usize>,
        sizes: &[usize],
        inputs: &[usize],
        outputs: &[usize],
    ) -> RuleBuilder {
        for d in dims.into_iter().take(DIMS.len()) {
            let at = |which: &[usize]| which.iter().map(|&i| (i, d)).collect::<Vec<_>>();
            self = self.factor(DIMS[d], sizes[d], &at(inputs), &at(outputs));
        }
        self
    }
    /// The rule; a result that lacks a factor combines by its entry of `reduce`.
    pub fn build(mut self, reduce: &[ReduceKind]) -> FactorRule {
        for (o, combine) in self.rule.combine.iter_mut().enumerate() {
            if self.driven_outputs.iter().any(|outs| !outs.contains(&o)) {
                *combine = reduce.get(o).copied();
            }
        }
        self.rule
    }
}
