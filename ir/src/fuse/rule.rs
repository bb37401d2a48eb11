//! How rules are written: a pattern, and what the matched class equals besides.
//!
//! A rule may be wrong only in what it says of values: a right side that does not fit its operands, or has another type than
//! the left, is not united with it.

use egg::{Applier, ENodeOrVar, Id, Pattern, PatternAst, Rewrite, Subst, Symbol};

use super::language::{Classes, Facts, Known, Term, add, applied};
use crate::DType;
use crate::op::Op;
use crate::tensor::{Tensor, Type};

pub(super) type Rule = Rewrite<Term, Known>;

/// A match of a pattern.
pub(super) struct Match<'a> {
    classes: &'a mut Classes,
    subst: &'a Subst,
}

impl Match<'_> {
    /// The class that a variable stands for. Panics on a name that the pattern lacks: a slip in this crate's own text.
    pub fn id(&self, var: &str) -> Id {
        let var = var.parse().expect("a variable");
        self.subst[var]
    }
    /// What is known of a class.
    pub fn facts(&self, id: Id) -> &Facts {
        &self.classes[id].data
    }
    /// The type of a class.
    pub fn ty(&self, id: Id) -> Option<Type> {
        self.facts(id).ty.clone()
    }
    /// The sizes of a class.
    pub fn dims(&self, id: Id) -> Option<Vec<usize>> {
        Some(self.facts(id).ty.as_ref()?.dims.clone())
    }
    /// The number that all elements of a variable are.
    pub fn number(&self, var: &str) -> Option<f64> {
        self.facts(self.id(var)).number
    }
    /// The variable if all its elements are within a millionth of a number.
    pub fn is(&self, var: &str, number: f64) -> Option<()> {
        let x = self.number(var)?;
        ((x - number).abs() <= 1e-6 * number.abs()).then_some(())
    }
    /// The same, within what the element type of `like` can tell.
    pub fn is_about(&self, var: &str, number: f64, like: Id) -> Option<()> {
        let x = self.number(var)?;
        let unit = match self.ty(like)?.dtype {
            DType::Bf16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            _ => 1e-6,
        };
        ((x - number).abs() <= unit * number.abs()).then_some(())
    }
    /// The attributes that a variable stands for, as an operator without operands.
    pub fn op(&self, var: &str) -> Option<Op> {
        let settings = self.facts(self.id(var)).settings?;
        Some(self.classes.analysis.settings[settings as usize].clone())
    }
    /// Attributes of a list of dims.
    pub fn perm(&self, var: &str) -> Option<Vec<usize>> {
        Some(self.op(var)?.get_ints("perm").iter().map(|&d| d as usize).collect())
    }
    /// Adds an operator; none where it does not fit.
    pub fn add(&mut self, op: &Op, args: &[Id]) -> Option<Id> {
        add(self.classes, op, args)
    }
    /// Adds an operator of the table without attributes.
    pub fn apply(&mut self, name: &str, args: &[Id]) -> Option<Id> {
        let op = Op::new(crate::ops::find(name)?);
        self.add(&op, args)
    }
    /// Adds a transpose, or nothing where the order stays.
    pub fn transpose(&mut self, x: Id, perm: &[usize]) -> Option<Id> {
        if perm.iter().enumerate().all(|(i, &p)| i == p) {
            return Some(x);
        }
        let op = Op::new(crate::ops::find("Transpose")?).ints("perm", perm.iter().map(|&p| p as i64));
        self.add(&op, &[x])
    }
    /// Adds a reshape, or nothing where the sizes stay.
    pub fn reshape(&mut self, x: Id, dims: &[usize]) -> Option<Id> {
        if self.dims(x)? == dims {
            return Some(x);
        }
        let op = Op::new(crate::ops::find("Reshape")?).ints("dims", dims.iter().map(|&d| d as i64));
        self.add(&op, &[x])
    }
    /// Adds a constant.
    pub fn constant(&mut self, t: Tensor) -> Id {
        let term = self.classes.analysis.constant(t);
        self.classes.add(term)
    }
    /// Adds a scalar constant.
    pub fn scalar(&mut self, dtype: DType, x: f64) -> Id {
        self.constant(crate::convert::scalar(dtype, x))
    }
    /// Adds a constant of equal elements.
    pub fn filled(&mut self, dtype: DType, dims: &[usize], x: f64) -> Id {
        let mut t = Tensor::zeros(Type::new(dtype, dims));
        let n = t.ty().numel();
        crate::convert::from_f64(dtype, std::iter::repeat_n(x, n), t.bytes_mut());
        self.constant(t)
    }
}

/// A rule whose right side is computed.
pub(super) fn rule(name: &str, left: &str, make: fn(&mut Match<'_>) -> Option<Id>) -> Rule {
    new(name, left, make)
}

/// A rule whose right side is a pattern.
pub(super) fn equal(name: &str, left: &str, right: &str) -> Rule {
    let right: Pattern<Term> = right.parse().expect("patterns are this crate's own text");
    new(name, left, move |m: &mut Match<'_>| build(m.classes, m.subst, &right.ast))
}

fn new(name: &str, left: &str, make: impl Fn(&mut Match<'_>) -> Option<Id> + Send + Sync + 'static) -> Rule {
    let left: Pattern<Term> = left.parse().expect("patterns are this crate's own text");
    Rewrite::new(name, left, Right { make }).expect("right sides name no variable to egg")
}

/// The right side of a rule.
struct Right<F> {
    make: F,
}

impl<F: Fn(&mut Match<'_>) -> Option<Id>> Applier<Term, Known> for Right<F> {
    fn apply_one(
        &self,
        classes: &mut Classes,
        class: Id,
        subst: &Subst,
        _: Option<&PatternAst<Term>>,
        name: Symbol,
    ) -> Vec<Id> {
        let made = (self.make)(&mut Match { classes, subst });
        let Some(made) = made.filter(|&m| classes[m].data.ty == classes[class].data.ty) else { return Vec::new() };
        if classes.union_trusted(class, made, name) { vec![class] } else { Vec::new() }
    }
}

/// The class of a pattern with its variables replaced; none where types do not fit.
fn build(classes: &mut Classes, subst: &Subst, pattern: &PatternAst<Term>) -> Option<Id> {
    let mut ids: Vec<Id> = Vec::with_capacity(pattern.len());
    for node in pattern {
        ids.push(match node {
            ENodeOrVar::Var(v) => subst[*v],
            ENodeOrVar::ENode(t) => {
                let args = t.args.iter().map(|&a| ids[usize::from(a)]).collect();
                let (op, args) = applied(classes, &Term { head: t.head, args })?;
                add(classes, &op, &args)?
            }
        });
    }
    ids.last().copied()
}
