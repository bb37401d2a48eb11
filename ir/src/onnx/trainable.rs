//! Which initializers are parameters.
//!
//! An ONNX file does not say what its model learns. The rule here is by structure, never by name. A parameter
//!
//! 1. is a float initializer with at least one dim (scales and epsilons are scalars or `Constant` nodes), and not only an operand
//!    that is a table by definition, such as running statistics;
//! 2. reaches an output *smoothly*: through float operands and results of operators that have a gradient. (A bias that only
//!    selects experts, by indices of `TopK`, does not.)
//! 3. meets *data* before it meets *positions*. Data depends on a float input, or is looked up by indices in a weight.
//!    Positions depend on integer inputs or on constants with dims only. (Rotary frequencies multiply positions: they are a table.)
//!
//! A float initializer that is no parameter becomes a constant when it is small and at hand, so that what follows from it is folded;
//! else it stays a state that is not trained.

use std::collections::BTreeMap;

use crate::graph::{Def, Graph, Init, StateId, ValueId};
use crate::op::Gradient;
use crate::rewrite::{RewriteError, rebuild};
use crate::tensor::Tensor;
use crate::weights::WeightRef;

/// What a value depends on; of several, the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Weights and scalars only.
    Weight,
    /// Integer inputs, constants with dims.
    Position,
    /// Float inputs, looked-up weights.
    Data,
}

/// Operators whose first operand is a table that the others index.
const LOOKUPS: [&str; 3] = ["Gather", "GatherND", "GatherElements"];

fn kinds(g: &Graph) -> Vec<Kind> {
    let of = |v: &crate::graph::Value| match &v.def {
        Def::Input(_) if v.ty.dtype.is_float() => Kind::Data,
        Def::Input(_) => Kind::Position,
        Def::Const(t) if t.ty().rank() > 0 => Kind::Position,
        _ => Kind::Weight,
    };
    let mut kinds: Vec<Kind> = g.values.iter().map(of).collect();
    for n in &g.nodes {
        let lookup = LOOKUPS.contains(&n.op.name());
        let from = n.inputs.iter().take(if lookup { 1 } else { usize::MAX });
        let mut kind = from.map(|v| kinds[v.index()]).max().unwrap_or(Kind::Position);
        if lookup && kind == Kind::Weight && !matches!(g.value(n.inputs[0]).def, Def::Const(_)) {
            kind = Kind::Data;
        }
        for out in &n.outputs {
            kinds[out.index()] = kind;
        }
    }
    kinds
}

/// The states that are parameters, of those that are candidates.
fn parameters(g: &Graph) -> Vec<bool> {
    let kinds = kinds(g);
    // Backwards: which values reach an output smoothly, and which do so by meeting data first.
    let mut smooth = vec![false; g.values.len()];
    let mut learned = vec![false; g.values.len()];
    for o in &g.outputs {
        smooth[o.value.index()] = g.ty(o.value).dtype.is_float();
    }
    for n in g.nodes.iter().rev() {
        if matches!(n.op.def.gradient, Gradient::None) {
            continue;
        }
        let float = |v: &ValueId| g.ty(*v).dtype.is_float();
        let reaches = n.outputs.iter().any(|v| float(v) && smooth[v.index()]);
        let meets = n.outputs.iter().any(|v| match kinds[v.index()] {
            Kind::Data => float(v) && smooth[v.index()],
            Kind::Weight => learned[v.index()],
            Kind::Position => false,
        });
        for v in n.inputs.iter().filter(|v| float(v)) {
            smooth[v.index()] |= reaches;
            learned[v.index()] |= meets;
        }
    }
    g.states.iter().map(|s| s.trainable && learned[s.read.index()]).collect()
}

/// Marks the states that are trained, and makes constants of the others where `constant` has their elements.
///
/// # Errors
/// A node that cannot be folded.
pub(super) fn settle(mut g: Graph, constant: impl Fn(&WeightRef) -> Option<Tensor>) -> Result<Graph, RewriteError> {
    let trained = parameters(&g);
    let mut constants: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    for id in (0..g.states.len() as u32).map(StateId) {
        let state = &mut g.states[id.index()];
        state.trainable = trained[id.index()];
        let Init::Weight(w) = &state.init else { continue };
        if !state.trainable
            && w.ty.dtype.is_float()
            && let Some(t) = constant(w)
        {
            constants.insert(state.read, t);
        }
    }
    rebuild(
        &g,
        |b, n, ins| {
            let pairs = n.inputs.iter().zip(ins);
            let ins: Vec<ValueId> =
                pairs.map(|(old, &new)| constants.get(old).map_or(new, |t| b.constant(t.clone()))).collect();
            b.emit(n.op.clone(), &ins)
        },
        |b, old, new| Ok(constants.get(&old).map_or(new, |t| b.constant(t.clone()))),
    )
}
