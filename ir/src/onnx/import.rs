//! What an operator's ONNX import rule sees and does.
//!
//! A rule lowers one ONNX node to canonical operators by emitting into the builder. Dims are bound and constants folded
//! while lowering, so `Shape` is a constant, and so are shape arithmetic and most shape operands.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::builder::Builder;
use crate::graph::ValueId;
use crate::op::{Op, OpError};
use crate::tensor::Tensor;

/// How an ONNX operator is lowered. Of several rules for one operator, that with the largest `since` not above the
/// file's opset version holds.
pub struct OnnxRule {
    /// `""` for the default domain, else `com.microsoft` and the like.
    pub domain: &'static str,
    /// The ONNX operator.
    pub op: &'static str,
    /// The first opset version it is valid for.
    pub since: i64,
    /// Emits the canonical form; returns the node's outputs, as many as the node has (trailing ones may be left out when
    /// the node does not name them).
    pub lower: fn(&mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError>,
}

/// An ONNX attribute.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum OnnxAttr {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
    Floats(Vec<f32>),
    Str(String),
    Strs(Vec<String>),
    Tensor(Arc<Tensor>),
    /// Subgraphs and the rest.
    Other(&'static str),
}

/// The attributes of a node, which remember what a rule asked for: what no rule asks for must not be ignored in silence.
pub struct Attrs<'a> {
    all: &'a BTreeMap<String, OnnxAttr>,
    asked: RefCell<BTreeSet<String>>,
}

/// Attributes that change nothing here: what training frameworks note for themselves (momentum of running
/// statistics), precisions of intermediate results, which are f32 at least, and orders that are kept anyway.
const HARMLESS: [&str; 9] = [
    "consumed_inputs",
    "momentum",
    "qk_matmul_output_mode",
    "saturate",
    "softmax_precision",
    "sorted",
    "spatial",
    "stash_type",
    "storage_order",
];

impl<'a> Attrs<'a> {
    /// Of a node.
    pub fn new(all: &'a BTreeMap<String, OnnxAttr>) -> Attrs<'a> {
        Attrs { all, asked: RefCell::default() }
    }
    /// What `read` makes of an attribute. One of another kind counts as not asked for.
    fn read<T>(&self, name: &str, read: impl FnOnce(&'a OnnxAttr) -> Option<T>) -> Option<T> {
        let value = read(self.all.get(name)?)?;
        self.asked.borrow_mut().insert(name.to_string());
        Some(value)
    }
    /// An attribute, if the node has it.
    pub fn get(&self, name: &str) -> Option<&'a OnnxAttr> {
        self.asked.borrow_mut().insert(name.to_string());
        self.all.get(name)
    }
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&'a String, &'a OnnxAttr)> {
        self.asked.borrow_mut().extend(self.all.keys().cloned());
        self.all.iter()
    }
    /// Those that nothing asked for and that are not harmless.
    pub fn ignored(&self) -> Vec<&'a str> {
        let asked = self.asked.borrow();
        let names = self.all.keys().map(String::as_str);
        names.filter(|n| !asked.contains(*n) && !HARMLESS.contains(n)).collect()
    }
}

/// An ONNX node being lowered.
pub struct ImportCx<'a> {
    /// Where to emit.
    pub b: &'a mut Builder,
    /// ONNX operator name.
    pub op_type: &'a str,
    /// Opset version of the node's domain.
    pub opset: i64,
    /// Operands; `None` for omitted ones.
    pub inputs: &'a [Option<ValueId>],
    /// Attributes.
    pub attrs: &'a Attrs<'a>,
    /// For each output, whether the node names it.
    pub outputs: &'a [bool],
}

impl ImportCx<'_> {
    /// A required operand.
    pub fn input(&self, i: usize) -> Result<ValueId, OpError> {
        self.try_input(i).ok_or_else(|| OpError(format!("operand {i} is missing")))
    }
    /// An optional operand.
    pub fn try_input(&self, i: usize) -> Option<ValueId> {
        self.inputs.get(i).copied().flatten()
    }
    /// The constant that an operand is.
    pub fn constant(&self, i: usize) -> Result<Arc<Tensor>, OpError> {
        let v = self.input(i)?;
        self.b.graph().constant(v).cloned().ok_or_else(|| {
            OpError(format!(
                "operand {i} must be known when planning, but depends on the input data; sizes that depend on data are not supported"
            ))
        })
    }
    /// The integers that an operand is; floats are truncated.
    pub fn ints(&self, i: usize) -> Result<Vec<i64>, OpError> {
        let t = self.constant(i)?;
        // Not through f64, which i64 does not fit.
        if t.dtype() == crate::dtype::DType::I64 {
            return Ok(t.as_slice::<i64>().to_vec());
        }
        Ok(crate::convert::cast(&t, crate::dtype::DType::I64).as_slice::<i64>().to_vec())
    }
    /// The integers that an optional operand is.
    pub fn try_ints(&self, i: usize) -> Result<Option<Vec<i64>>, OpError> {
        self.try_input(i).map(|_| self.ints(i)).transpose()
    }
    /// An integer attribute, if the node has it.
    pub fn try_attr_int(&self, name: &str) -> Option<i64> {
        self.attrs.read(name, |a| if let OnnxAttr::Int(x) = a { Some(*x) } else { None })
    }
    /// An integer attribute.
    pub fn attr_int(&self, name: &str, default: i64) -> i64 {
        self.try_attr_int(name).unwrap_or(default)
    }
    /// A float attribute, if the node has it.
    pub fn try_attr_float(&self, name: &str) -> Option<f32> {
        self.attrs.read(name, |a| if let OnnxAttr::Float(x) = a { Some(*x) } else { None })
    }
    /// A float attribute.
    pub fn attr_float(&self, name: &str, default: f32) -> f32 {
        self.try_attr_float(name).unwrap_or(default)
    }
    /// A list attribute.
    pub fn attr_ints(&self, name: &str) -> Option<&[i64]> {
        self.attrs.read(name, |a| if let OnnxAttr::Ints(x) = a { Some(&x[..]) } else { None })
    }
    /// A word attribute.
    pub fn attr_str(&self, name: &str) -> Option<&str> {
        self.attrs.read(name, |a| if let OnnxAttr::Str(x) = a { Some(x.as_str()) } else { None })
    }
    /// A tensor attribute.
    pub fn attr_tensor(&self, name: &str) -> Option<&Arc<Tensor>> {
        self.attrs.read(name, |a| if let OnnxAttr::Tensor(x) = a { Some(x) } else { None })
    }
    /// An attribute or operand of axes, made non-negative for a rank.
    pub fn axes(&self, axes: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
        axes.iter().map(|&a| axis(a, rank)).collect()
    }
    /// Applies a canonical operator with one result.
    pub fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        self.b.emit1(op, inputs)
    }
}

/// An axis made non-negative.
pub fn axis(a: i64, rank: usize) -> Result<usize, OpError> {
    let r = rank as i64;
    if (-r..r).contains(&a) {
        Ok(a.rem_euclid(r.max(1)) as usize)
    } else {
        Err(OpError(format!("axis {a} is out of range for {rank} dims")))
    }
}
