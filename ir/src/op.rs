//! What an operator is: the entry of the operator table, its attributes, its rules.
//!
//! [`OpDef`] is the only registry of operators: shape rule, factor rule, work, gradient, kernel, ONNX import rules, and
//! sample instances from which the property tests are made. An operator is one file under [`crate::ops`] and one line
//! of [`crate::ops::TABLE`].
//!
//! Conventions:
//! - Operands are never optional: an operator with variants has an attribute, or another number of operands.
//! - Attributes hold no size of a dim that can be sharded, except where the kernel ignores it in favour of the local
//!   sizes of its output view (`Reshape`, `Expand`, gradients that say the sizes of their result): the same `Op` serves the unsharded tensor and every shard.
//! - Kernels of float operators are written for f32: [`Op::run`] converts other float types around them.
//!
//! Read next: [`crate::factor`], then any file of [`crate::ops`].

use std::fmt;

use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::OnnxRule;
use crate::tensor::{Type, View, ViewMut};

/// The value of an attribute. Numbers are equal when their bits are, as they are hashed.
#[derive(Debug, Clone)]
pub enum Attr {
    /// An integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// An element type.
    DType(DType),
    /// A word.
    Str(String),
}

impl PartialEq for Attr {
    fn eq(&self, other: &Attr) -> bool {
        match (self, other) {
            (Attr::Int(x), Attr::Int(y)) => x == y,
            (Attr::Ints(x), Attr::Ints(y)) => x == y,
            (Attr::Float(x), Attr::Float(y)) => x.to_bits() == y.to_bits(),
            (Attr::Bool(x), Attr::Bool(y)) => x == y,
            (Attr::DType(x), Attr::DType(y)) => x == y,
            (Attr::Str(x), Attr::Str(y)) => x == y,
            _ => false,
        }
    }
}

impl Eq for Attr {}

impl std::hash::Hash for Attr {
    fn hash<H: std::hash::Hasher>(&self, h: &mut H) {
        std::mem::discriminant(self).hash(h);
        match self {
            Attr::Int(x) => x.hash(h),
            Attr::Ints(x) => x.hash(h),
            Attr::Float(x) => x.to_bits().hash(h),
            Attr::Bool(x) => x.hash(h),
            Attr::DType(x) => x.hash(h),
            Attr::Str(x) => x.hash(h),
        }
    }
}

/// The kind of value an attribute takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttrKind {
    /// [`Attr::Int`].
    Int,
    /// [`Attr::Ints`].
    Ints,
    /// [`Attr::Float`].
    Float,
    /// [`Attr::Bool`].
    Bool,
    /// [`Attr::DType`].
    DType,
    /// [`Attr::Str`].
    Str,
    /// An integer that tells random draws apart: the blocks of a model are the same but for it.
    Seed,
    /// The dim of the first result along which micro-batches lie, if they do. In a run of several, that result's origin and
    /// unsharded sizes are those in the whole batch.
    BatchDim,
}

/// An operator with its attributes: what a node does.
#[derive(Clone)]
pub struct Op {
    /// The table's entry.
    pub def: &'static OpDef,
    attrs: Vec<(&'static str, Attr)>,
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        std::ptr::eq(self.def, other.def) && self.attrs == other.attrs
    }
}
impl Eq for Op {}
impl std::hash::Hash for Op {
    fn hash<H: std::hash::Hasher>(&self, h: &mut H) {
        self.def.name.hash(h);
        self.attrs.hash(h);
    }
}
impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
impl fmt::Display for Op {
    /// `Transpose{perm=[0,2,1]}`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.def.name)?;
        if self.attrs.is_empty() {
            return Ok(());
        }
        f.write_str("{")?;
        for (i, (name, attr)) in self.attrs.iter().enumerate() {
            write!(f, "{}{name}=", if i == 0 { "" } else { ", " })?;
            match attr {
                Attr::Int(x) => write!(f, "{x}")?,
                Attr::Ints(x) => write!(f, "{}", format!("{x:?}").replace(' ', ""))?,
                Attr::Float(x) => write!(f, "{x:?}")?,
                Attr::Bool(x) => write!(f, "{x}")?,
                Attr::DType(x) => write!(f, "{x}")?,
                Attr::Str(x) => write!(f, "{x:?}")?,
            }
        }
        f.write_str("}")
    }
}

impl Op {
    /// The operator without attributes; add them by [`with`](Self::with).
    pub fn new(def: &'static OpDef) -> Op {
        Op { def, attrs: Vec::new() }
    }
    /// With an attribute, which the entry must list, set. Panics otherwise: a slip in this crate's own text.
    pub fn with(mut self, name: &str, value: Attr) -> Op {
        let spec = self.def.attrs.iter().position(|(n, _)| *n == name);
        let Some(at) = spec else { panic!("{} has no attribute `{name}`", self.def.name) };
        let name = self.def.attrs[at].0;
        self.attrs.retain(|(n, _)| *n != name);
        self.attrs.push((name, value));
        let order = |n: &str| self.def.attrs.iter().position(|(m, _)| *m == n);
        self.attrs.sort_by_key(|(n, _)| order(n));
        self
    }
    /// With an integer attribute.
    pub fn int(self, name: &str, x: i64) -> Op {
        self.with(name, Attr::Int(x))
    }
    /// With a list attribute.
    pub fn ints(self, name: &str, x: impl IntoIterator<Item = i64>) -> Op {
        self.with(name, Attr::Ints(x.into_iter().collect()))
    }
    /// With a number attribute.
    pub fn float(self, name: &str, x: f64) -> Op {
        self.with(name, Attr::Float(x))
    }
    /// With a truth attribute.
    pub fn flag(self, name: &str, x: bool) -> Op {
        self.with(name, Attr::Bool(x))
    }
    /// With an element type attribute.
    pub fn dtype(self, name: &str, x: DType) -> Op {
        self.with(name, Attr::DType(x))
    }
    /// The operator's name.
    pub fn name(&self) -> &'static str {
        self.def.name
    }
    /// All attributes, in the entry's order.
    pub fn attrs(&self) -> &[(&'static str, Attr)] {
        &self.attrs
    }
    /// An attribute, if set.
    pub fn attr(&self, name: &str) -> Option<&Attr> {
        self.attrs.iter().find(|(n, _)| *n == name).map(|(_, a)| a)
    }
    /// An integer attribute; 0 when unset.
    pub fn get_int(&self, name: &str) -> i64 {
        if let Some(Attr::Int(x)) = self.attr(name) { *x } else { 0 }
    }
    /// A list attribute; empty when unset.
    pub fn get_ints(&self, name: &str) -> &[i64] {
        if let Some(Attr::Ints(x)) = self.attr(name) { x } else { &[] }
    }
    /// A number attribute; 0 when unset.
    pub fn get_float(&self, name: &str) -> f64 {
        if let Some(Attr::Float(x)) = self.attr(name) { *x } else { 0.0 }
    }
    /// A truth attribute; false when unset.
    pub fn get_flag(&self, name: &str) -> bool {
        matches!(self.attr(name), Some(Attr::Bool(true)))
    }
    /// An element type attribute.
    pub fn get_dtype(&self, name: &str) -> Option<DType> {
        if let Some(Attr::DType(x)) = self.attr(name) { Some(*x) } else { None }
    }

    /// The operator but for its seed: what the same node of every repeated block is.
    pub fn seedless(&self) -> Op {
        let mut op = self.clone();
        let seed = self.def.attr_of(AttrKind::Seed);
        op.attrs.retain(|(n, _)| Some(*n) != seed);
        op
    }
    /// See [`AttrKind::BatchDim`].
    pub fn batch_dim(&self) -> Option<usize> {
        let name = self.def.attr_of(AttrKind::BatchDim)?;
        self.attr(name).map(|_| self.get_int(name) as usize)
    }

    /// The types of the results.
    pub fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        (self.def.infer)(self, inputs)
    }
    /// What could be split.
    pub fn factors(&self, inputs: &[Type], outputs: &[Type]) -> FactorRule {
        (self.def.factors)(self, inputs, outputs)
    }
    /// The work it does on operands of these (local) types.
    pub fn work(&self, inputs: &[Type], outputs: &[Type]) -> Work {
        (self.def.work)(self, inputs, outputs)
    }
    /// Whether its one result is the bytes of its one operand, of these (local) types: then it needs neither memory nor time.
    /// Says so by its work, [`Work::FREE`].
    pub fn is_view(&self, inputs: &[Type], outputs: &[Type]) -> bool {
        let ([from], [to]) = (inputs, outputs) else { return false };
        from.bytes() == to.bytes() && self.work(inputs, outputs).family == Family::Free
    }
}

/// An entry of the operator table.
pub struct OpDef {
    /// Name: that of ONNX where ONNX has the operator.
    pub name: &'static str,
    /// One line for the table of supported operators.
    pub doc: &'static str,
    /// Attributes it takes, in printing order.
    pub attrs: &'static [(&'static str, AttrKind)],
    /// ONNX operators that lower to this one (perhaps with others around it).
    pub onnx: &'static [OnnxRule],
    /// Types of the results, or why the operands do not fit.
    pub infer: fn(&Op, &[Type]) -> Result<Vec<Type>, OpError>,
    /// Factor rule, of operand and result types that fit.
    pub factors: fn(&Op, &[Type], &[Type]) -> FactorRule,
    /// Work, of local operand and result types; [`Work::FREE`] where the result is the operand's bytes.
    pub work: fn(&Op, &[Type], &[Type]) -> Work,
    /// The operand that the result equals, when the operator does nothing (`Reshape` to the same sizes).
    pub identity: fn(&Op, &[Type], &Type) -> Option<usize>,
    /// How gradients pass.
    pub gradient: Gradient,
    /// Reference kernel, see the module's conventions.
    pub kernel: Kernel,
    /// Small instances with operand types, for the property tests.
    pub samples: fn() -> Vec<Sample>,
}

impl OpDef {
    /// The attribute of a kind, if there is one.
    pub fn attr_of(&self, kind: AttrKind) -> Option<&'static str> {
        self.attrs.iter().find(|(_, k)| *k == kind).map(|(n, _)| *n)
    }
}

/// Computes results from operands.
pub type Kernel = fn(&Op, &[View<'_>], &mut [ViewMut<'_>]) -> Result<(), KernelError>;

/// How gradients pass through an operator.
pub enum Gradient {
    /// Results do not depend smoothly on any operand: integers, comparisons, constants.
    None,
    /// Builds the gradients of operands.
    Rule(fn(&mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError>),
    /// Never differentiated: the operator occurs only in backward and update graphs. Says which.
    Internal(&'static str),
}

/// What a gradient rule sees: a forward node and the gradients of its results.
pub struct GradCx<'a> {
    /// The forward operator.
    pub op: &'a Op,
    /// Forward operands.
    pub inputs: &'a [ValueId],
    /// Forward results.
    pub outputs: &'a [ValueId],
    /// Gradient of each result, where one arrives.
    pub grads: &'a [Option<ValueId>],
    /// Which operands need a gradient.
    pub wanted: &'a [bool],
    /// Where backward nodes go.
    pub b: &'a mut Builder,
}

/// What it takes to execute an operator once, on given sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Which efficiency curve applies.
    pub family: Family,
    /// Floating-point operations, a multiply-add counting 2.
    pub flops: f64,
    /// Bytes read and written in device memory.
    pub bytes: f64,
    /// For matrix products: batch, m, n, k.
    pub gemm: Option<[usize; 4]>,
    /// For attention: scores that a kernel makes, each of which needs an exponential: pairs of a query and a key that it sees, and
    /// what a causal mask hides of the last block of each query.
    pub scores: f64,
    /// Which path of its kernel it takes, where there are several that differ in speed; empty: the only one.
    pub variant: &'static str,
}

/// Families of operators with a common efficiency curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Matrix products.
    MatMul,
    /// Convolutions.
    Conv,
    /// Fused attention.
    Attention,
    /// Bound by memory: elementwise, reductions, norms, copies.
    Memory,
    /// Indexed access: embedding lookups and their gradients.
    Gather,
    /// No work at all on a device: the only result is the bytes of the only operand.
    Free,
}

impl Work {
    /// Work bound by memory: operands read once, results written once, `flops` per element of the first result.
    pub fn memory(inputs: &[Type], outputs: &[Type], flops_per_element: f64) -> Work {
        let bytes: usize = inputs.iter().chain(outputs).map(Type::bytes).sum();
        let elements = outputs.first().map_or(0, Type::numel);
        let flops = flops_per_element * elements as f64;
        Work { family: Family::Memory, flops, bytes: bytes as f64, gemm: None, scores: 0.0, variant: "" }
    }
    /// No work.
    pub const FREE: Work = Work { family: Family::Free, flops: 0.0, bytes: 0.0, gemm: None, scores: 0.0, variant: "" };
}

/// A small instance of an operator, for tests: operands are drawn at random, reproducibly.
pub struct Sample {
    /// The operator.
    pub op: Op,
    /// Operand types, with the range that elements are drawn from.
    pub inputs: Vec<SampleInput>,
}

/// An operand of a [`Sample`].
pub struct SampleInput {
    /// Its type.
    pub ty: Type,
    /// Elements are uniform in this range (integers: low inclusive, high exclusive).
    pub range: (f64, f64),
}

impl SampleInput {
    /// f32 in [-1, 1).
    pub fn f32(dims: impl Into<Vec<usize>>) -> SampleInput {
        SampleInput { ty: Type::new(DType::F32, dims), range: (-1.0, 1.0) }
    }
    /// f32 in a range.
    pub fn f32_in(dims: impl Into<Vec<usize>>, low: f64, high: f64) -> SampleInput {
        SampleInput { ty: Type::new(DType::F32, dims), range: (low, high) }
    }
    /// i64 in a range.
    pub fn i64_in(dims: impl Into<Vec<usize>>, low: i64, high: i64) -> SampleInput {
        SampleInput { ty: Type::new(DType::I64, dims), range: (low as f64, high as f64) }
    }
    /// Truth values.
    pub fn bool(dims: impl Into<Vec<usize>>) -> SampleInput {
        SampleInput { ty: Type::new(DType::Bool, dims), range: (0.0, 2.0) }
    }
}

/// Why operands do not fit an operator, or a gradient does not exist. The caller adds the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpError(pub String);

/// Why a kernel could not compute: values out of range, unsupported element types.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct KernelError(pub String);

#[cfg(test)]
mod tests {
    use super::Attr;

    /// Equal attributes have equal hashes: by bits, so that -0 is another padding than 0, and NaN the same as itself.
    #[test]
    fn numbers_are_compared_by_their_bits() {
        assert_ne!(Attr::Float(0.0), Attr::Float(-0.0));
        assert_eq!(Attr::Float(f64::NAN), Attr::Float(f64::NAN));
    }
}
