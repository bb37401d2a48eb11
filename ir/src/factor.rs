//! Factor rules: per operator, what could be split, said without a word about meshes.
//!
//! A *factor* is an independent loop of the operator: `MatMul` has `b i k, k j -> b i j`. Each dim of an operand or
//! result is driven by at most one factor. Splitting a factor `n` ways splits every dim it drives `n` ways (contiguous
//! blocks), and needs `size % n == 0`; a dim may be larger than its factor when the factor is its outer part (`Reshape`
//! of `[b, s]` to `[b*s]`: the result's dim is driven by `b`). A dim without a factor is never split.
//!
//! - A result that lacks a factor which is split is a partial value over those ranks, to be combined as the rule's
//!   `combine` says for that result. A result with `combine: None` must have a dim driven by every factor.
//! - An operand that lacks a split factor is needed whole (replicated) on those ranks.
//! - `linear` lists sets of operands in which the operator is jointly linear: when all operands of a set are partial
//!   sums over some ranks and the others are replicated, so are the results partial sums.
//!
//! From the rule alone follow strategies, specs, local sizes, collectives, costs and tests.

use crate::tensor::Type;

/// Index of a factor in its rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FactorId(pub u8);

/// How partial results combine over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceKind {
    /// Sum.
    Sum,
    /// Largest.
    Max,
    /// Smallest.
    Min,
    /// `log(sum(exp(x)))`, of a normaliser computed over parts.
    LogSumExp,
}

impl ReduceKind {
    /// The name shown to people: `sum`, `max`, `min`, `logsumexp`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceKind::Sum => "sum",
            ReduceKind::Max => "max",
            ReduceKind::Min => "min",
            ReduceKind::LogSumExp => "logsumexp",
        }
    }
}

/// An independent loop of an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Factor {
    /// Short name for people: `b`, `i`, `k`, `heads`, `vocab`.
    pub name: &'static str,
    /// Its size; it can be split into any divisor of it.
    pub size: usize,
}

/// A factor rule. See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FactorRule {
    /// The factors.
    pub factors: Vec<Factor>,
    /// Per operand and dim, the factor that drives it.
    pub inputs: Vec<Vec<Option<FactorId>>>,
    /// Per result and dim, the factor that drives it.
    pub outputs: Vec<Vec<Option<FactorId>>>,
    /// Per result, how parts combine over ranks that split a factor it lacks.
    pub combine: Vec<Option<ReduceKind>>,
    /// Sets of operands in which the operator is jointly linear.
    pub linear: Vec<Vec<usize>>,
}

impl FactorRule {
    /// Everything whole.
    pub fn replicate(inputs: &[Type], outputs: &[Type]) -> FactorRule {
        FactorRule {
            factors: Vec::new(),
            inputs: inputs.iter().map(|t| vec![None; t.rank()]).collect(),
            outputs: outputs.iter().map(|t| vec![None; t.rank()]).collect(),
            combine: vec![None; outputs.len()],
            linear: Vec::new(),
        }
    }

    /// The rule of an elementwise operator with broadcasting: one factor per dim of the result.
    pub fn elementwise(inputs: &[Type], outputs: &[Type]) -> FactorRule {
        const NAMES: [&str; 8] = ["d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"];
        let mut rule = FactorRule::replicate(inputs, outputs);
        let Some(out) = outputs.first() else { return rule };
        for (d, &size) in out.dims.iter().enumerate().take(NAMES.len()) {
            if size <= 1 {
                continue;
            }
            let id = FactorId(rule.factors.len() as u8);
            rule.factors.push(Factor { name: NAMES[d], size });
            for (slot, ty) in rule.outputs.iter_mut().zip(outputs).chain(rule.inputs.iter_mut().zip(inputs)) {
                let from_end = out.rank() - d;
                if ty.rank() >= from_end && ty.dims[ty.rank() - from_end] == size {
                    slot[ty.rank() - from_end] = Some(id);
                }
            }
        }
        rule
    }

    /// With a set of operands in which the operator is jointly linear.
    pub fn linear_in(mut self, operands: impl Into<Vec<usize>>) -> FactorRule {
        self.linear.push(operands.into());
        self
    }
    /// The factor of that id.
    pub fn factor(&self, id: FactorId) -> &Factor {
        &self.factors[id.0 as usize]
    }
}
