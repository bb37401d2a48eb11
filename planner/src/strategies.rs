//! The strategies of an operator on a mesh, from its factor rule alone.
//!
//! Each axis replicates, splits a factor, or passes partial sums through (a `linear` set); any axis may do any of them, and
//! where rows may lie with their experts ([`crate::routes`]) that too. A combination is legal when
//! - every split factor is divided evenly by the axes that split it, and so is every dim it drives;
//! - every result that lacks a split factor can combine parts (`combine`);
//! - no operand or result is sharded twice by one axis;
//! - no result is partial in two ways at once (a sum over one axis, a maximum over another), since those do not commute.
//!
//! Of strategies with equal specs of all operands and results, one is kept: the one that comes first, where replicating
//! comes before splitting. Nothing is padded: what does not divide is listed in [`Strategies::unavailable`] with the sizes
//! that would.

use autoshard_ir::factor::{FactorId, FactorRule};
use autoshard_ir::graph::{Graph, Node};
use autoshard_ir::{Op, Type};

use crate::mesh::{AxisId, Mesh};
use crate::spec::{Route, Spec, Strategy, Use};

/// A strategy with the specs that follow from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The strategy.
    pub strategy: Strategy,
    /// The spec that each operand must have.
    pub inputs: Vec<Spec>,
    /// The spec that each result has.
    pub outputs: Vec<Spec>,
}

/// Why an axis cannot split a factor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The axis.
    pub axis: AxisId,
    /// The factor.
    pub factor: &'static str,
    /// Its size.
    pub size: usize,
    /// The size of the axis.
    pub axis_size: usize,
    /// Axis sizes that would do: the first few, of at most 1024 ranks.
    pub valid: Vec<usize>,
    /// The reason.
    pub reason: Reason,
}

/// See [`Unavailable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The factor's size is no multiple of the axis's.
    Indivisible,
    /// A result lacks the factor, and its parts cannot be combined.
    NoCombine,
    /// An operand or result has two dims driven by the factor.
    Repeated,
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Unavailable { factor, size, axis_size, .. } = self;
        match self.reason {
            Reason::Indivisible => {
                write!(
                    f,
                    "factor {factor} of size {size} does not divide by {axis_size}; valid sizes: {:?}",
                    self.valid
                )
            }
            Reason::NoCombine => {
                write!(f, "factor {factor} cannot be split: a result lacks it and has no way to combine parts")
            }
            Reason::Repeated => write!(f, "factor {factor} cannot be split: it drives two dims of one tensor"),
        }
    }
}

/// What an operator may do on a mesh.
#[derive(Debug, Clone)]
pub struct Strategies {
    /// The factor rule that all follows from.
    pub rule: FactorRule,
    /// Legal strategies; the first replicates everything.
    pub list: Vec<Choice>,
    /// Single splits that are impossible.
    pub unavailable: Vec<Unavailable>,
}

/// Every legal strategy of an operator on operands and results of these (unsharded) types.
pub fn strategies(op: &Op, inputs: &[Type], outputs: &[Type], mesh: &Mesh) -> Strategies {
    from_rule(op.factors(inputs, outputs), inputs, outputs, mesh, None)
}

/// [`strategies`] of a node, which may work on routed rows in that way.
pub fn of_node(graph: &Graph, node: &Node, mesh: &Mesh, route: Option<Route>) -> Strategies {
    let (inputs, outputs) = (graph.input_types(node), graph.output_types(node));
    from_rule(node.op.factors(&inputs, &outputs), &inputs, &outputs, mesh, route)
}

/// [`strategies`] of a factor rule.
pub fn from_rule(rule: FactorRule, inputs: &[Type], outputs: &[Type], mesh: &Mesh, route: Option<Route>) -> Strategies {
    let factors = || (0..rule.factors.len()).map(|f| FactorId(f as u8));
    let mut unavailable = Vec::new();
    let mut per_axis: Vec<Vec<Use>> = Vec::new();
    for axis in mesh.ids() {
        let mut uses = vec![Use::Replicate];
        for f in factors() {
            match refuse(&rule, f, mesh.size(axis), inputs, outputs) {
                None => uses.push(Use::Split(f)),
                Some(reason) => unavailable.push(Unavailable {
                    axis,
                    factor: rule.factor(f).name,
                    size: rule.factor(f).size,
                    axis_size: mesh.size(axis),
                    valid: valid_sizes(&rule, f, inputs, outputs),
                    reason,
                }),
            }
        }
        uses.extend((0..rule.linear.len()).map(|s| Use::Linear(s as u8)));
        uses.extend(route.map(Use::Route));
        per_axis.push(uses);
    }
    let mut list: Vec<Choice> = Vec::new();
    for uses in product(&per_axis) {
        let strategy = Strategy(uses);
        if factors().any(|f| !divides(&rule, f, strategy.parts(f, mesh), inputs, outputs)) {
            continue;
        }
        let choice = Choice {
            inputs: (0..inputs.len()).map(|i| strategy.input_spec(&rule, i)).collect(),
            outputs: (0..outputs.len()).map(|i| strategy.output_spec(&rule, i)).collect(),
            strategy,
        };
        let commutes = |s: &Spec| s.partial.windows(2).all(|w| w[0].1 == w[1].1);
        let fits = |(s, ty): (&Spec, &Type)| s.local(ty, mesh).is_some();
        let legal = choice.outputs.iter().all(commutes)
            && choice.inputs.iter().zip(inputs).chain(choice.outputs.iter().zip(outputs)).all(fits);
        if legal && !list.iter().any(|c| c.inputs == choice.inputs && c.outputs == choice.outputs) {
            list.push(choice);
        }
    }
    Strategies { rule, list, unavailable }
}

/// Why a factor cannot be split into `parts`, if it cannot.
fn refuse(rule: &FactorRule, f: FactorId, parts: usize, inputs: &[Type], outputs: &[Type]) -> Option<Reason> {
    let repeated = |dims: &Vec<Option<FactorId>>| dims.iter().filter(|d| **d == Some(f)).count() > 1;
    let stuck = |(dims, combine): (&Vec<Option<FactorId>>, &Option<_>)| combine.is_none() && !dims.contains(&Some(f));
    if rule.inputs.iter().chain(&rule.outputs).any(repeated) {
        Some(Reason::Repeated)
    } else if rule.outputs.iter().zip(&rule.combine).any(stuck) {
        Some(Reason::NoCombine)
    } else if !divides(rule, f, parts, inputs, outputs) {
        Some(Reason::Indivisible)
    } else {
        None
    }
}

fn divides(rule: &FactorRule, f: FactorId, parts: usize, inputs: &[Type], outputs: &[Type]) -> bool {
    let slots = rule.inputs.iter().zip(inputs).chain(rule.outputs.iter().zip(outputs));
    rule.factor(f).size % parts == 0
        && slots.flat_map(|(dims, ty)| dims.iter().zip(&ty.dims)).all(|(d, size)| *d != Some(f) || size % parts == 0)
}

fn valid_sizes(rule: &FactorRule, f: FactorId, inputs: &[Type], outputs: &[Type]) -> Vec<usize> {
    const LARGEST: usize = 1024;
    let size = rule.factor(f).size;
    (2..=size.min(LARGEST)).filter(|&n| divides(rule, f, n, inputs, outputs)).take(16).collect()
}

/// All combinations, the last position fastest.
fn product(choices: &[Vec<Use>]) -> Vec<Vec<Use>> {
    choices.iter().fold(vec![Vec::new()], |all, uses| {
        all.iter().flat_map(|head| uses.iter().map(|u| [&head[..], &[*u]].concat())).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::AxisName;
    use autoshard_ir::DType;
    use autoshard_ir::factor::ReduceKind;

    fn mesh(dp: usize, tp: usize) -> Mesh {
        Mesh::new([(AxisName::Dp, dp), (AxisName::Tp, tp)])
    }
    fn f32(dims: &[usize]) -> Type {
        Type::new(DType::F32, dims)
    }
    fn matmul(b: usize, k: usize, n: usize, mesh: &Mesh) -> Strategies {
        let (ins, outs) = ([f32(&[b, k]), f32(&[k, n])], [f32(&[b, n])]);
        let mut rule = FactorRule::replicate(&ins, &outs);
        use autoshard_ir::factor::Factor;
        rule.factors = [("b", b), ("k", k), ("n", n)].map(|(name, size)| Factor { name, size }).to_vec();
        let f = |i| Some(FactorId(i));
        rule.inputs = vec![vec![f(0), f(1)], vec![f(1), f(2)]];
        rule.outputs = vec![vec![f(0), f(2)]];
        rule.combine = vec![Some(ReduceKind::Sum)];
        from_rule(rule.linear_in([0]).linear_in([1]), &ins, &outs, mesh, None)
    }
    fn shown(s: &Strategies, mesh: &Mesh) -> Vec<String> {
        let show = |specs: &[Spec]| specs.iter().map(|s| s.show(mesh)).collect::<Vec<_>>().join(" ");
        s.list.iter().map(|c| format!("{} -> {}", show(&c.inputs), show(&c.outputs))).collect()
    }

    #[test]
    fn a_matrix_product_on_one_axis() {
        let m = mesh(1, 2);
        assert_eq!(
            shown(&matmul(4, 6, 8, &m), &m),
            [
                "[_, _] [_, _] -> [_, _]",
                "[tp, _] [_, _] -> [tp, _]",
                "[_, tp] [tp, _] -> [_, _] partial{tp:sum}",
                "[_, _] [_, tp] -> [_, tp]",
                "[_, _] partial{tp:sum} [_, _] -> [_, _] partial{tp:sum}",
                "[_, _] [_, _] partial{tp:sum} -> [_, _] partial{tp:sum}",
            ]
        );
    }

    #[test]
    fn two_axes_may_split_one_factor_and_must_divide_it_together() {
        let m = mesh(2, 2);
        let both = |b| shown(&matmul(b, 6, 8, &m), &m).contains(&"[dp+tp, _] [_, _] -> [dp+tp, _]".to_string());
        assert!(both(4));
        assert!(!both(2));
    }

    #[test]
    fn what_does_not_divide_is_listed_with_valid_sizes() {
        let m = mesh(1, 4);
        let s = matmul(4, 6, 8, &m);
        assert_eq!(s.unavailable.len(), 1);
        let u = &s.unavailable[0];
        assert_eq!((u.factor, u.size, u.axis_size, &u.valid[..]), ("k", 6, 4, &[2, 3, 6][..]));
        assert_eq!(u.to_string(), "factor k of size 6 does not divide by 4; valid sizes: [2, 3, 6]");
    }

    #[test]
    fn a_result_without_a_way_to_combine_forbids_the_split() {
        let (ins, outs) = ([f32(&[4])], [f32(&[])]);
        let mut rule = FactorRule::elementwise(&ins, &ins);
        rule.outputs = vec![vec![]];
        rule.combine = vec![None];
        let s = from_rule(rule, &ins, &outs, &mesh(2, 1), None);
        assert_eq!(s.list.len(), 1);
        assert_eq!(s.unavailable[0].reason, Reason::NoCombine);
    }
}
