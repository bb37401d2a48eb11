//! Specs: how a value lies on a mesh. And strategies: how an operator is split over it.
//!
//! A spec gives per tensor dim the mesh axes that shard it (contiguous blocks, first axis outermost) and the axes over
//! which the value is partial. On the other axes it is replicated. A strategy gives per mesh axis one factor of the
//! operator, or none; specs of operands and results follow from the factor rule.
//!
//! A value that is *routed* over an axis has each of its rows on the rank that holds the row's expert, and on no other
//! ([`crate::routes`]); ranks are taken to have equally many.
//!
//! Canonical form: axes of a dim, of `partial` and of `routed` ascend; no axis occurs twice.

use autoshard_ir::Type;
use autoshard_ir::factor::{FactorId, FactorRule, ReduceKind};

use crate::mesh::{AxisId, Mesh};

/// How a value lies on a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spec {
    /// Per dim, the axes that shard it.
    pub dims: Vec<Vec<AxisId>>,
    /// Axes over which it is partial, and how to combine.
    pub partial: Vec<(AxisId, ReduceKind)>,
    /// Axes over which rows lie with their experts.
    pub routed: Vec<AxisId>,
}

impl Spec {
    /// Replicated everywhere.
    pub fn replicated(rank: usize) -> Spec {
        Spec { dims: vec![Vec::new(); rank], partial: Vec::new(), routed: Vec::new() }
    }
    /// The same, with partial values combined.
    pub fn combined(&self) -> Spec {
        Spec { partial: Vec::new(), ..self.clone() }
    }
    /// Into how many parts a dim is cut.
    pub fn parts(&self, dim: usize, mesh: &Mesh) -> usize {
        self.dims[dim].iter().map(|&a| mesh.size(a)).product()
    }
    /// Whether a rank has a part along that axis: of a dim, or of the rows.
    pub fn divides(&self, axis: AxisId) -> bool {
        self.dims.iter().flatten().chain(&self.routed).any(|a| *a == axis)
    }
    /// The local type of a value; `None` where a dim does not divide. Routed rows come off the first dim that they divide.
    pub fn local(&self, ty: &Type, mesh: &Mesh) -> Option<Type> {
        let mut local = ty.clone();
        for (d, size) in local.dims.iter_mut().enumerate() {
            let parts = self.parts(d, mesh);
            if *size % parts != 0 {
                return None;
            }
            *size /= parts;
        }
        for axis in &self.routed {
            let n = mesh.size(*axis);
            *local.dims.iter_mut().find(|size| **size % n == 0)? /= n;
        }
        Some(local)
    }
    /// As shown to people: `[dp, _, tp]`, `partial{tp:sum}` behind it where partial, `routed{ep}` where routed.
    pub fn show(&self, mesh: &Mesh) -> String {
        let axis = |a: &AxisId| mesh.axis(*a).name.name();
        let dims: Vec<String> = self
            .dims
            .iter()
            .map(|axes| if axes.is_empty() { "_".into() } else { axes.iter().map(axis).collect::<Vec<_>>().join("+") })
            .collect();
        let mut text = format!("[{}]", dims.join(", "));
        if !self.partial.is_empty() {
            let parts: Vec<String> = self.partial.iter().map(|(a, k)| format!("{}:{}", axis(a), k.name())).collect();
            text += &format!(" partial{{{}}}", parts.join(", "));
        }
        if !self.routed.is_empty() {
            text += &format!(" routed{{{}}}", self.routed.iter().map(axis).collect::<Vec<_>>().join(", "));
        }
        text
    }
}

/// What one mesh axis does in an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Use {
    /// Nothing: all its ranks compute the same.
    Replicate,
    /// It splits a factor.
    Split(FactorId),
    /// Operands of that `linear` set are partial sums, and so are the results.
    Linear(u8),
    /// Its ranks hold different experts, and rows lie with theirs: see [`Route`].
    Route(Route),
}

/// What an operator on routed rows splits: operands and results with the experts' dim have some of the experts, others
/// with the rows' dim are routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// The first of the rows' dims.
    pub rows: FactorId,
    /// The experts; none where they do not occur.
    pub experts: Option<FactorId>,
}

impl Use {
    /// The factor whose dims it cuts into blocks.
    pub fn cuts(self) -> Option<FactorId> {
        match self {
            Use::Split(f) => Some(f),
            Use::Route(route) => route.experts,
            Use::Replicate | Use::Linear(_) => None,
        }
    }
}

/// How an operator is split: one use per mesh axis.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Strategy(pub Vec<Use>);

impl Strategy {
    /// Everything replicated.
    pub fn replicate(mesh: &Mesh) -> Strategy {
        Strategy(vec![Use::Replicate; mesh.axes.len()])
    }

    /// Into how many parts a factor is cut.
    pub fn parts(&self, factor: FactorId, mesh: &Mesh) -> usize {
        self.0.iter().zip(&mesh.axes).filter(|(u, _)| u.cuts() == Some(factor)).map(|(_, a)| a.size).product()
    }

    fn dims_spec(&self, dims: &[Option<FactorId>]) -> Spec {
        let mut spec = Spec::replicated(dims.len());
        for (a, u) in self.0.iter().enumerate() {
            let axis = AxisId(a as u8);
            let mut cut = false;
            if let Some(f) = u.cuts() {
                for (d, _) in dims.iter().enumerate().filter(|(_, slot)| **slot == Some(f)) {
                    spec.dims[d].push(axis);
                    cut = true;
                }
            }
            if let Use::Route(route) = u
                && !cut
                && dims.contains(&Some(route.rows))
            {
                spec.routed.push(axis);
            }
        }
        spec
    }

    /// The spec that an operand must have.
    pub fn input_spec(&self, rule: &FactorRule, operand: usize) -> Spec {
        let mut spec = self.dims_spec(&rule.inputs[operand]);
        for (a, u) in self.0.iter().enumerate() {
            if let Use::Linear(set) = u
                && rule.linear[*set as usize].contains(&operand)
            {
                spec.partial.push((AxisId(a as u8), ReduceKind::Sum));
            }
        }
        spec
    }

    /// The spec that a result has.
    pub fn output_spec(&self, rule: &FactorRule, result: usize) -> Spec {
        let mut spec = self.dims_spec(&rule.outputs[result]);
        for (a, u) in self.0.iter().enumerate() {
            let axis = AxisId(a as u8);
            match u {
                Use::Linear(_) => spec.partial.push((axis, ReduceKind::Sum)),
                Use::Split(f) if !rule.outputs[result].contains(&Some(*f)) => {
                    if let Some(kind) = rule.combine[result] {
                        spec.partial.push((axis, kind));
                    }
                }
                _ => {}
            }
        }
        spec
    }
}
