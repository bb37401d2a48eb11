//! Graphs as terms of `egg`, and what is known of each class of equal terms.
//!
//! A term applies an operator of the table, or one of the few that exist only here ([`super::inner`]). An operator that takes
//! attributes has them as its first operand, so that patterns can name them: `(Transpose ?perm ?x)`. Terms have one result:
//! for operators with more, it is the first.
//!
//! Known of a class: its type, the constant it is, and for sizes and masks what they look like along rows and columns
//! ([`Band`]). All terms of a class have one type; [`super::rule`] sees to it.

use std::collections::HashMap;
use std::sync::Arc;

use egg::{Analysis, DidMerge, EGraph, FromOp, Id, Language};

use crate::DType;
use crate::op::{Op, OpDef};
use crate::tensor::{Tensor, Type};

/// A graph of classes of equal terms.
pub(super) type Classes = EGraph<Term, Known>;

/// An operator, compared by name.
#[derive(Clone, Copy)]
pub(super) struct Def(pub &'static OpDef);

impl PartialEq for Def {
    fn eq(&self, other: &Def) -> bool {
        self.0.name == other.0.name
    }
}
impl Eq for Def {}
impl std::hash::Hash for Def {
    fn hash<H: std::hash::Hasher>(&self, h: &mut H) {
        self.0.name.hash(h);
    }
}
impl PartialOrd for Def {
    fn partial_cmp(&self, other: &Def) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Def {
    fn cmp(&self, other: &Def) -> std::cmp::Ordering {
        self.0.name.cmp(other.0.name)
    }
}
impl std::fmt::Debug for Def {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name)
    }
}

/// What a term is, apart from its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Head {
    /// A value from outside, or a constant: an index of [`Known::leaves`].
    Leaf(u32),
    /// Attributes: an index of [`Known::settings`].
    Settings(u32),
    /// An operator.
    Apply(Def),
}

/// A term.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Term {
    pub head: Head,
    pub args: Vec<Id>,
}

impl Language for Term {
    type Discriminant = Head;
    fn discriminant(&self) -> Head {
        self.head
    }
    fn matches(&self, other: &Term) -> bool {
        self.head == other.head && self.args.len() == other.args.len()
    }
    fn children(&self) -> &[Id] {
        &self.args
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.args
    }
}

impl std::fmt::Display for Term {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.head)
    }
}

/// A pattern names an operator that does not exist: a slip in this crate's own text.
#[derive(Debug, thiserror::Error)]
#[error("no operator {0}")]
pub(super) struct NoOperator(String);

impl FromOp for Term {
    type Error = NoOperator;
    fn from_op(op: &str, children: Vec<Id>) -> Result<Term, NoOperator> {
        let def = super::inner::find(op).or_else(|| crate::ops::find(op)).ok_or_else(|| NoOperator(op.into()))?;
        Ok(Term { head: Head::Apply(Def(def)), args: children })
    }
}

/// A value from outside, or a constant.
#[derive(Debug, Clone)]
pub(super) struct Leaf {
    pub ty: Type,
    pub constant: Option<Arc<Tensor>>,
}

/// Elements `[.., i, j]` of a mask: true where `low <= j - i <= high`, whatever the other dims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Band {
    pub low: i64,
    pub high: i64,
}

impl Band {
    /// Everything.
    pub const ALL: Band = Band { low: i64::MIN, high: i64::MAX };

    fn and(self, other: Band) -> Band {
        Band { low: self.low.max(other.low), high: self.high.min(other.high) }
    }
    /// What it leaves out, where that is a band.
    fn not(self) -> Option<Band> {
        match self {
            Band { low: i64::MIN, high } if high < i64::MAX => Some(Band { low: high + 1, high: i64::MAX }),
            Band { low, high: i64::MAX } if low > i64::MIN => Some(Band { low: i64::MIN, high: low - 1 }),
            _ => None,
        }
    }
}

/// Integers that count along one dim: `first` at index 0, then up by 1. The dim is counted from the end, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    dim: usize,
    first: i64,
}

/// What is known of a class.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The type; attributes have none.
    pub ty: Option<Type>,
    /// The attributes it is.
    pub settings: Option<u32>,
    /// It depends on constants alone.
    pub fixed: bool,
    /// The constant it is, unless that is large.
    pub constant: Option<Arc<Tensor>>,
    /// The number that all its elements are.
    pub number: Option<f64>,
    /// The mask it is.
    pub band: Option<Band>,
    /// What it hides or outweighs when it is added: all but a band; and what it adds there.
    pub hides: Option<(Band, f64)>,
    /// The indices it holds.
    pub count: Option<Count>,
}

impl Facts {
    fn of_constant(t: &Arc<Tensor>) -> Facts {
        Facts {
            ty: Some(t.ty().clone()),
            fixed: true,
            number: number_of(t),
            band: band_of(t),
            hides: hides(t),
            count: count_of(t),
            constant: Some(t.clone()),
            settings: None,
        }
    }
}

/// Constants with more elements are not computed while rewriting.
const SMALL: usize = 4096;

/// What terms refer to by index.
#[derive(Default)]
pub(super) struct Known {
    pub leaves: Vec<Leaf>,
    pub settings: Vec<Op>,
    settings_ids: HashMap<Op, u32>,
    constants: HashMap<(Type, Vec<u8>), u32>,
}

impl Known {
    /// A value from outside.
    pub fn leaf(&mut self, ty: Type, constant: Option<Arc<Tensor>>) -> Term {
        self.leaves.push(Leaf { ty, constant });
        Term { head: Head::Leaf(self.leaves.len() as u32 - 1), args: Vec::new() }
    }
    /// A constant that a rule makes.
    pub fn constant(&mut self, t: Tensor) -> Term {
        let key = (t.ty().clone(), t.bytes().to_vec());
        let index = self.constants.get(&key).copied().unwrap_or_else(|| {
            self.leaves.push(Leaf { ty: t.ty().clone(), constant: Some(Arc::new(t)) });
            let index = self.leaves.len() as u32 - 1;
            self.constants.insert(key, index);
            index
        });
        Term { head: Head::Leaf(index), args: Vec::new() }
    }
    /// Attributes.
    pub fn settings(&mut self, op: Op) -> Term {
        let next = self.settings.len() as u32;
        let index = *self.settings_ids.entry(op.clone()).or_insert(next);
        if index == next {
            self.settings.push(op);
        }
        Term { head: Head::Settings(index), args: Vec::new() }
    }
}

/// The operator that a term applies, and its operands.
pub(super) fn applied(classes: &Classes, term: &Term) -> Option<(Op, Vec<Id>)> {
    let Head::Apply(Def(def)) = term.head else { return None };
    if def.attrs.is_empty() {
        return Some((Op::new(def), term.args.clone()));
    }
    let (first, rest) = term.args.split_first()?;
    let settings = classes[*first].data.settings?;
    Some((classes.analysis.settings[settings as usize].clone(), rest.to_vec()))
}

/// Adds an operator applied to classes; none where they do not fit.
pub(super) fn add(classes: &mut Classes, op: &Op, args: &[Id]) -> Option<Id> {
    let types: Option<Vec<Type>> = args.iter().map(|&a| classes[a].data.ty.clone()).collect();
    op.infer(&types?).ok()?;
    let mut operands = Vec::with_capacity(args.len() + 1);
    if !op.def.attrs.is_empty() {
        let settings = classes.analysis.settings(op.clone());
        operands.push(classes.add(settings));
    }
    operands.extend(args);
    Some(classes.add(Term { head: Head::Apply(Def(op.def)), args: operands }))
}

impl Analysis<Term> for Known {
    type Data = Facts;

    fn make(classes: &mut Classes, term: &Term, _: Id) -> Facts {
        match term.head {
            Head::Settings(s) => Facts { settings: Some(s), ..Facts::default() },
            Head::Leaf(l) => {
                let leaf = &classes.analysis.leaves[l as usize];
                match &leaf.constant {
                    Some(t) => Facts::of_constant(t),
                    None => Facts { ty: Some(leaf.ty.clone()), ..Facts::default() },
                }
            }
            Head::Apply(_) => applied(classes, term).map(|(op, args)| derive(classes, &op, &args)).unwrap_or_default(),
        }
    }

    fn merge(&mut self, to: &mut Facts, from: Facts) -> DidMerge {
        debug_assert!(to.ty.is_none() || from.ty.is_none() || to.ty == from.ty, "{to:?} and {from:?} were united");
        fn option<T>(to: &mut Option<T>, from: Option<T>) -> DidMerge {
            let did = DidMerge(to.is_none() && from.is_some(), to.is_some() && from.is_none());
            if to.is_none() {
                *to = from;
            }
            did
        }
        let did = option(&mut to.ty, from.ty)
            | option(&mut to.settings, from.settings)
            | option(&mut to.constant, from.constant)
            | option(&mut to.number, from.number)
            | option(&mut to.band, from.band)
            | option(&mut to.hides, from.hides)
            | option(&mut to.count, from.count)
            | DidMerge(from.fixed && !to.fixed, to.fixed && !from.fixed);
        to.fixed |= from.fixed;
        did
    }

    fn modify(classes: &mut Classes, id: Id) {
        if let Some(t) = classes[id].data.constant.clone()
            && !classes[id].nodes.iter().any(|n| matches!(n.head, Head::Leaf(_)))
        {
            let term = classes.analysis.constant((*t).clone());
            let leaf = classes.add(term);
            classes.union(id, leaf);
        }
    }
}

/// What is known of an operator's result.
fn derive(classes: &Classes, op: &Op, args: &[Id]) -> Facts {
    let facts: Vec<&Facts> = args.iter().map(|&a| &classes[a].data).collect();
    let types: Option<Vec<Type>> = facts.iter().map(|f| f.ty.clone()).collect();
    let Some(Ok(outs)) = types.as_ref().map(|t| op.infer(t)) else { return Facts::default() };
    let Some(ty) = outs.first().cloned() else { return Facts::default() };
    let operands: Option<Vec<Arc<Tensor>>> = facts.iter().map(|f| f.constant.clone()).collect();
    if let Some(operands) = operands.filter(|o| !o.is_empty() && outs.len() == 1 && ty.numel() <= SMALL)
        && !super::inner::is_inner(op.def)
        && let Ok(mut results) = crate::interp::apply(op, &operands, &outs)
        && let Some(t) = results.pop()
    {
        return Facts::of_constant(&Arc::new(t));
    }
    let fixed = !facts.is_empty() && facts.iter().all(|f| f.fixed);
    let (band, count) = (band(op, &facts, &ty), moved_count(op, &facts, &ty));
    Facts { ty: Some(ty), fixed, band, count, ..Facts::default() }
}

/// The mask that an operator makes of what it is given.
fn band(op: &Op, facts: &[&Facts], ty: &Type) -> Option<Band> {
    if ty.dtype != DType::Bool {
        return None;
    }
    let keeps_rows = |f: &Facts| {
        let from = f.ty.as_ref()?;
        let tail = |t: &Type| t.dims[t.rank().saturating_sub(2)..].to_vec();
        let same = tail(from) == tail(ty) || f.band == Some(Band::ALL);
        f.band.filter(|_| same)
    };
    // `a <= b` with a and b counting along the rows and the columns.
    let compared = |slack: i64, swap: bool| {
        let (a, b) = (facts[usize::from(swap)].count?, facts[usize::from(!swap)].count?);
        match (a.dim, b.dim) {
            (1, 2) => Some(Band { low: i64::MIN, high: b.first - a.first - slack }),
            (2, 1) => Some(Band { low: a.first - b.first + slack, high: i64::MAX }),
            _ => None,
        }
    };
    match op.name() {
        "LessOrEqual" => compared(0, false),
        "Less" => compared(1, false),
        "Greater" => compared(1, true),
        "And" => Some(facts[0].band?.and(facts[1].band?)),
        "Not" => facts[0].band?.not(),
        "Reshape" | "Expand" => keeps_rows(facts[0]),
        _ => None,
    }
}

/// Counts through operators that only move them.
fn moved_count(op: &Op, facts: &[&Facts], ty: &Type) -> Option<Count> {
    let count = facts.first()?.count?;
    let from = facts[0].ty.as_ref()?;
    let size = *from.dims.get(from.rank().checked_sub(count.dim)?)?;
    match op.name() {
        // Of one long dim, wherever it goes.
        "Reshape" if from.numel() == size => {
            let at = ty.dims.iter().position(|&d| d == size)?;
            Some(Count { dim: ty.rank() - at, ..count })
        }
        "Cast" if !ty.dtype.is_float() && ty.dtype != DType::Bool => Some(count),
        _ => None,
    }
}

/// The number that all elements are.
fn number_of(t: &Tensor) -> Option<f64> {
    let size = t.dtype().size();
    let first = t.bytes().get(..size)?;
    // Compared as bytes first: most constants differ early.
    if t.bytes().chunks_exact(size).any(|x| x != first) {
        return None;
    }
    crate::convert::to_f64(t.dtype(), first).first().copied()
}

/// The band that a constant mask is.
fn band_of(t: &Tensor) -> Option<Band> {
    (t.dtype() == DType::Bool).then(|| band_in(t.dims(), t.bytes(), |&b| b != 0)).flatten()
}

/// Added to a score, such a number leaves of it nothing: f32 has no digits for both.
pub(super) const HIDES: f64 = -1e30;

/// Added to some scores of a row and not to others, such a number leaves those without weight in f32 (`exp(-104)` is 0 there),
/// unless scores of one row lie more than 9,896 apart: 10,000 is what GPT-2 wrote, and no row is hidden as a whole.
pub(super) const OUTWEIGHS: f64 = -1e4;

/// The band outside of which a constant hides what it is added to, or outweighs it.
fn hides(t: &Tensor) -> Option<(Band, f64)> {
    if !t.dtype().is_float() || t.dims().len() < 2 {
        return None;
    }
    let size = t.dtype().size();
    let zero = vec![0; size];
    // All that is not 0 must be one number; compared as bytes, for constants can be large.
    let mut rest = t.bytes().chunks_exact(size).filter(|x| *x != zero);
    let first = rest.next()?;
    let low = *crate::convert::to_f64(t.dtype(), first).first()?;
    if low > OUTWEIGHS || !rest.all(|x| x == first) {
        return None;
    }
    let cells: Vec<&[u8]> = t.bytes().chunks_exact(size).collect();
    Some((band_in(t.dims(), &cells, |x| *x == zero)?, low))
}

/// The band of elements that are `seen`.
fn band_in<T>(dims: &[usize], elements: &[T], seen: impl Fn(&T) -> bool) -> Option<Band> {
    if elements.iter().all(&seen) {
        return Some(Band::ALL);
    }
    let [.., rows, columns] = *dims else { return None };
    // One row or column stands for all that it is broadcast to.
    if rows < 2 || columns < 2 {
        return None;
    }
    // The narrowest band that holds all that is seen, then whether it holds nothing else.
    let mut band = Band { low: i64::MAX, high: i64::MIN };
    for (row, line) in elements.chunks_exact(columns).enumerate() {
        let i = (row % rows) as i64;
        if let (Some(first), Some(last)) = (line.iter().position(&seen), line.iter().rposition(&seen)) {
            band.low = band.low.min(first as i64 - i);
            band.high = band.high.max(last as i64 - i);
        }
    }
    // Where it reaches the border, the widest band is meant.
    let wide = Band {
        low: if band.low <= 1 - rows as i64 { i64::MIN } else { band.low },
        high: if band.high >= columns as i64 - 1 { i64::MAX } else { band.high },
    };
    let holds = elements.chunks_exact(columns).enumerate().all(|(row, line)| {
        let i = (row % rows) as i64;
        line.iter().zip(0i64..).all(|(x, j)| seen(x) == (wide.low <= j - i && j - i <= wide.high))
    });
    holds.then_some(wide)
}

/// The count that constant indices are.
fn count_of(t: &Tensor) -> Option<Count> {
    if t.dtype().is_float() || t.dtype() == DType::Bool || t.dims().is_empty() {
        return None;
    }
    let at = t.dims().iter().position(|&d| d > 1)?;
    if t.dims()[at] != t.ty().numel() {
        return None;
    }
    let xs = crate::convert::to_f64(t.dtype(), t.bytes());
    let first = *xs.first()?;
    let counts = xs.iter().enumerate().all(|(i, &x)| x == first + i as f64);
    counts.then_some(Count { dim: t.dims().len() - at, first: first as i64 })
}
