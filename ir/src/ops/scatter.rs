//! `ScatterND` and `ScatterElements`: elements of a tensor replaced, or combined with updates, at given indices.
//!
//! Indexed dims stay whole. Negative indices count from the end; indices out of range are errors. Where updates replace
//! elements, indices must not repeat (as ONNX demands), else the last one holds.

use super::gather::{check_indices, locate, read_indices};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{Attr, AttrKind, Family, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::gather::GATHER_ELEMENTS;
use crate::ops::real::expect_operands;
use crate::ops::rules::RuleBuilder;

use crate::ops::support::{DIM_NAMES, dim_attr, never, no_kernel};
use crate::tensor::{Type, View, ViewMut};

/// Rows at index tuples.
pub static SCATTER_ND: OpDef = OpDef {
    name: "ScatterND",
    doc: "data with rows at index tuples replaced by updates, or combined with them",
    attrs: &[("reduction", AttrKind::Str)],
    onnx: &[OnnxRule { domain: "", op: "ScatterND", since: 11, lower: import_nd }],
    infer: infer_nd,
    factors: factors_nd,
    work: scatter_work,
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: |op, inputs, outputs| kernel(op, inputs, outputs, combine_nd),
    samples: samples_nd,
};

/// Elements at indices along a dim.
pub static SCATTER_ELEMENTS: OpDef = OpDef {
    name: "ScatterElements",
    doc: "data with elements at indices along a dim replaced by updates, or combined with them",
    attrs: &[("axis", AttrKind::Int), ("reduction", AttrKind::Str)],
    onnx: &[
        OnnxRule { domain: "", op: "Scatter", since: 9, lower: import_elements },
        OnnxRule { domain: "", op: "ScatterElements", since: 11, lower: import_elements },
    ],
    infer: infer_elements,
    factors: factors_elements,
    work: scatter_work,
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: |op, inputs, outputs| kernel(op, inputs, outputs, combine_elements),
    samples: samples_elements,
};

/// How updates meet elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScatterReduction {
    /// The update replaces the element.
    Replace,
    /// Sum.
    Add,
    /// Product.
    Mul,
    /// Larger of both.
    Max,
    /// Smaller of both.
    Min,
}

impl ScatterReduction {
    const ALL: [(&'static str, ScatterReduction); 5] = [
        ("none", ScatterReduction::Replace),
        ("add", ScatterReduction::Add),
        ("mul", ScatterReduction::Mul),
        ("max", ScatterReduction::Max),
        ("min", ScatterReduction::Min),
    ];
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, r)| *r == self).map_or("none", |(n, _)| n)
    }
    fn parse(name: &str) -> Result<ScatterReduction, OpError> {
        let found = Self::ALL.iter().find(|(n, _)| *n == name);
        found.map(|(_, r)| *r).ok_or_else(|| OpError(format!("reduction `{name}` is none of none, add, mul, max, min")))
    }
    fn of(op: &Op) -> Result<ScatterReduction, OpError> {
        match op.attr("reduction") {
            Some(Attr::Str(name)) => Self::parse(name),
            _ => Ok(ScatterReduction::Replace),
        }
    }
}

fn check<'a>(op: &Op, inputs: &'a [Type]) -> Result<[&'a Type; 3], OpError> {
    expect_operands(op.name(), inputs, &[3])?;
    let reduction = ScatterReduction::of(op)?;
    let [data, indices, updates] = [&inputs[0], &inputs[1], &inputs[2]];
    check_indices(indices)?;
    if data.dtype != updates.dtype {
        return Err(OpError(format!("{} of {updates} into {data}: element types differ", op.name())));
    }
    if data.dtype == DType::Bool && reduction != ScatterReduction::Replace {
        return Err(OpError(format!("{} of truth values cannot combine by {}", op.name(), reduction.name())));
    }
    Ok([data, indices, updates])
}

fn infer_nd(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [data, indices, updates] = check(op, inputs)?;
    let bad = || OpError(format!("ScatterND of {updates} at {indices} into {data}: sizes do not fit"));
    let (&depth, tuples) = indices.dims.split_last().ok_or_else(bad)?;
    let rest = data.dims.get(depth..).ok_or_else(bad)?;
    if updates.dims != [tuples, rest].concat() {
        return Err(bad());
    }
    Ok(vec![data.clone()])
}

fn infer_elements(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [data, indices, updates] = check(op, inputs)?;
    let axis = dim_attr(op, "axis", data.rank())?;
    let fits = |d: usize| d == axis || indices.dims[d] <= data.dims[d];
    if indices.dims != updates.dims || indices.rank() != data.rank() || !(0..data.rank()).all(fits) {
        return Err(OpError(format!("ScatterElements of {updates} at {indices} into {data}: sizes do not fit")));
    }
    Ok(vec![data.clone()])
}

/// Replacing and adding are linear in data and updates together.
fn with_linear(op: &Op, rule: FactorRule, data: &Type) -> FactorRule {
    let linear = matches!(ScatterReduction::of(op), Ok(ScatterReduction::Replace | ScatterReduction::Add));
    if linear && data.dtype.is_float() { rule.linear_in([0, 2]) } else { rule }
}

fn factors_nd(op: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let (data, indices) = (&inputs[0], &inputs[1]);
    let depth = indices.dims.last().copied().unwrap_or(0);
    let tuples = indices.rank().saturating_sub(1);
    let mut rule = RuleBuilder::new(inputs, outputs);
    for d in (depth..data.rank()).take_while(|&d| d < DIM_NAMES.len()) {
        rule = rule.factor(DIM_NAMES[d], data.dims[d], &[(0, d), (2, tuples + d - depth)], &[(0, d)]);
    }
    with_linear(op, rule.build(&[]), data)
}

fn factors_elements(op: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let axis = op.get_int("axis") as usize;
    let (data, indices) = (&inputs[0], &inputs[1]);
    let whole = |d: &usize| *d != axis && data.dims[*d] == indices.dims[*d];
    let dims = (0..data.rank()).filter(whole);
    with_linear(op, RuleBuilder::new(inputs, outputs).dims(dims, &data.dims, &[0, 1, 2], &[0]).build(&[]), data)
}

fn scatter_work(_: &Op, inputs: &[Type], outputs: &[Type]) -> Work {
    Work { family: Family::Gather, ..Work::memory(inputs, outputs, 0.0) }
}

/// Of updates: what arrives where they went. Of data: what arrives, save where it was replaced.
fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None; 3]) };
    let (indices, updates) = (cx.inputs[1], cx.inputs[2]);
    let reduction = ScatterReduction::of(cx.op)?;
    if !matches!(reduction, ScatterReduction::Replace | ScatterReduction::Add) {
        return Err(OpError(format!("{} with reduction `{}` has no gradient", cx.op.name(), reduction.name())));
    }
    let data = match (cx.wanted[0], reduction) {
        (false, _) => None,
        (true, ScatterReduction::Add) => Some(dy),
        (true, _) => {
            let dtype = cx.b.ty(dy).dtype;
            let zero = cx.b.scalar(dtype, 0.0);
            let dims = cx.b.dims(updates);
            let zeros = cx.b.expand(zero, &dims)?;
            Some(cx.b.emit1(cx.op.clone(), &[dy, indices, zeros])?)
        }
    };
    let updates = match (cx.wanted[2], cx.op.name()) {
        (false, _) => None,
        (true, "ScatterND") => Some(cx.b.gather_nd(dy, indices, 0)?),
        (true, _) => {
            let op = Op::new(&GATHER_ELEMENTS).int("axis", cx.op.get_int("axis"));
            Some(cx.b.emit1(op, &[dy, indices])?)
        }
    };
    Ok(vec![data, None, updates])
}

/// Copies data and combines updates into it, at the pairs (element of data, element of updates) that `places` gives.
fn kernel(
    op: &Op,
    inputs: &[View<'_>],
    outputs: &mut [ViewMut<'_>],
    places: fn(&Op, &[View<'_>], &mut dyn FnMut(usize, usize)) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    use ScatterReduction as R;
    let out = &mut outputs[0];
    out.data.copy_from_slice(inputs[0].data);
    let reduction = ScatterReduction::of(op).map_err(|e| KernelError(e.0))?;
    macro_rules! apply {
        ($t:ty, $f:expr) => {{
            let (z, u) = (out.as_mut_slice::<$t>(), inputs[2].as_slice::<$t>());
            let f: fn($t, $t) -> $t = $f;
            places(op, inputs, &mut |to, from| z[to] = f(z[to], u[from]))
        }};
    }
    // As `Add`, `Mul`, `Max` and `Min` do: integers wrap, NaN passes on.
    macro_rules! floats {
        ($t:ty) => {
            match reduction {
                R::Add => apply!($t, |a, b| a + b),
                R::Mul => apply!($t, |a, b| a * b),
                R::Max => apply!($t, |a, b| if b > a || b.is_nan() { b } else { a }),
                R::Min => apply!($t, |a, b| if b < a || b.is_nan() { b } else { a }),
                R::Replace => apply!($t, |_, b| b),
            }
        };
    }
    macro_rules! integers {
        ($t:ty) => {
            match reduction {
                R::Add => apply!($t, |a, b| a.wrapping_add(b)),
                R::Mul => apply!($t, |a, b| a.wrapping_mul(b)),
                R::Max => apply!($t, |a, b| a.max(b)),
                R::Min => apply!($t, |a, b| a.min(b)),
                R::Replace => apply!($t, |_, b| b),
            }
        };
    }
    match (reduction, inputs[0].dtype()) {
        (R::Replace, d) if d.size() == 1 => apply!(u8, |_, b| b),
        (_, DType::F32) => floats!(f32),
        (_, DType::F64) => floats!(f64),
        (_, DType::I64) => integers!(i64),
        (_, DType::I32) => integers!(i32),
        (_, other) => Err(no_kernel(op, other)),
    }
}

fn combine_nd(op: &Op, inputs: &[View<'_>], f: &mut dyn FnMut(usize, usize)) -> Result<(), KernelError> {
    let (data, indices) = (&inputs[0], &inputs[1]);
    let depth = indices.dims().last().copied().unwrap_or(0);
    let width: usize = data.dims()[depth..].iter().product();
    let tuples: usize = indices.dims()[..indices.dims().len() - 1].iter().product();
    let indices = read_indices(op, indices)?;
    for t in 0..tuples {
        let mut row = 0;
        for (d, &i) in indices[t * depth..(t + 1) * depth].iter().enumerate() {
            let size = data.dims()[d];
            row = row * size + locate(op, i, size, 0, size)?.unwrap_or(0);
        }
        for e in 0..width {
            f(row * width + e, t * width + e);
        }
    }
    Ok(())
}

fn combine_elements(op: &Op, inputs: &[View<'_>], f: &mut dyn FnMut(usize, usize)) -> Result<(), KernelError> {
    let axis = op.get_int("axis") as usize;
    let (data, indices) = (inputs[0].dims(), inputs[1].dims());
    let values = read_indices(op, &inputs[1])?;
    let mut at = vec![0; indices.len()];
    for (from, &i) in values.iter().enumerate() {
        let mut to = 0;
        for (d, &size) in data.iter().enumerate() {
            let place = if d == axis { locate(op, i, size, 0, size)?.unwrap_or(0) } else { at[d] };
            to = to * size + place;
        }
        f(to, from);
        for d in (0..at.len()).rev() {
            at[d] += 1;
            if at[d] < indices[d] {
                break;
            }
            at[d] = 0;
        }
    }
    Ok(())
}

fn reduction(cx: &ImportCx<'_>) -> Result<ScatterReduction, OpError> {
    ScatterReduction::parse(cx.attr_str("reduction").unwrap_or("none"))
}

fn import_nd(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (data, indices, updates) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let reduction = reduction(cx)?;
    Ok(vec![cx.b.scatter_nd(data, indices, updates, reduction)?])
}

fn import_elements(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (data, indices, updates) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let reduction = reduction(cx)?;
    let axis = axis(cx.attr_int("axis", 0), cx.b.ty(data).rank())?;
    Ok(vec![cx.b.scatter_elements(data, indices, updates, axis, reduction)?])
}

impl Builder {
    /// Data with rows at index tuples combined with updates.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn scatter_nd(
        &mut self,
        data: ValueId,
        indices: ValueId,
        updates: ValueId,
        reduction: ScatterReduction,
    ) -> Result<ValueId, OpError> {
        let op = Op::new(&SCATTER_ND).with("reduction", Attr::Str(reduction.name().into()));
        self.emit1(op, &[data, indices, updates])
    }
    /// Data with elements at indices along a dim combined with updates.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn scatter_elements(
        &mut self,
        data: ValueId,
        indices: ValueId,
        updates: ValueId,
        axis: usize,
        reduction: ScatterReduction,
    ) -> Result<ValueId, OpError> {
        let op = Op::new(&SCATTER_ELEMENTS).int("axis", axis as i64);
        self.emit1(op.with("reduction", Attr::Str(reduction.name().into())), &[data, indices, updates])
    }
}

/// Updates that replace go to one place each, so that the result does not depend on their order.
fn samples_nd() -> Vec<Sample> {
    let case = |data: &[usize], indices: &[usize], updates: &[usize], n: i64, reduction: ScatterReduction| Sample {
        op: Op::new(&SCATTER_ND).with("reduction", Attr::Str(reduction.name().into())),
        inputs: vec![SampleInput::f32(data), SampleInput::i64_in(indices, -n, n), SampleInput::f32(updates)],
    };
    vec![
        case(&[4, 6], &[1, 1], &[1, 6], 4, ScatterReduction::Replace),
        case(&[4, 6, 2], &[3, 2], &[3, 2], 4, ScatterReduction::Add),
        case(&[6, 12], &[2, 2, 1], &[2, 2, 12], 6, ScatterReduction::Add),
    ]
}

fn samples_elements() -> Vec<Sample> {
    let case = |data: &[usize], indices: &[usize], axis: usize, reduction: ScatterReduction| Sample {
        op: Op::new(&SCATTER_ELEMENTS).int("axis", axis as i64).with("reduction", Attr::Str(reduction.name().into())),
        inputs: vec![
            SampleInput::f32(data),
            SampleInput::i64_in(indices, -(data[axis] as i64), data[axis] as i64),
            SampleInput::f32(indices),
        ],
    };
    vec![
        case(&[4, 6], &[4, 1], 1, ScatterReduction::Replace),
        case(&[4, 6, 2], &[4, 3, 2], 1, ScatterReduction::Add),
        case(&[6, 4], &[3, 4], 0, ScatterReduction::Add),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    /// The examples of the ONNX specification.
    #[test]
    fn examples_of_the_specification() {
        let op = |def, name: &str| Op::new(def).with("reduction", Attr::Str(name.into()));
        let data = Tensor::f32([8], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let (indices, updates) = (Tensor::i64([4, 1], &[4, 3, 1, 7]), Tensor::f32([4], &[9.0, 10.0, 11.0, 12.0]));
        let run = |op: &Op, x: [&Tensor; 3]| crate::interp::apply(op, &x, &[x[0].ty().clone()]).unwrap().remove(0);
        let y = run(&op(&SCATTER_ND, "none"), [&data, &indices, &updates]);
        assert_eq!(y.as_slice::<f32>(), [1.0, 11.0, 3.0, 10.0, 9.0, 6.0, 7.0, 12.0]);

        let data = Tensor::f32([1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let (indices, updates) = (Tensor::i64([1, 2], &[1, 1]), Tensor::f32([1, 2], &[1.1, 2.1]));
        let y = run(&op(&SCATTER_ELEMENTS, "add").int("axis", 1), [&data, &indices, &updates]);
        let want = [1.0, 5.2, 3.0, 4.0, 5.0];
        assert!(y.as_slice::<f32>().iter().zip(want).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6));
        let indices = Tensor::i64([1, 2], &[1, -2]);
        let y = run(&op(&SCATTER_ELEMENTS, "none").int("axis", 1), [&data, &indices, &updates]);
        assert_eq!(y.as_slice::<f32>(), [1.0, 1.1, 3.0, 2.1, 5.0]);
    }

    #[test]
    fn integers_wrap_and_nan_passes_on() {
        let at = Tensor::i64([1, 1], &[0]);
        let run = |name: &str, x: &Tensor, u: &Tensor| {
            let op = Op::new(&SCATTER_ND).with("reduction", Attr::Str(name.into()));
            crate::interp::apply(&op, &[x, &at, u], &[x.ty().clone()]).unwrap().remove(0)
        };
        let (x, u) = (Tensor::i64([1], &[i64::MAX]), Tensor::i64([1], &[2]));
        assert_eq!(run("add", &x, &u).as_slice::<i64>(), [i64::MIN + 1]);
        assert_eq!(run("mul", &x, &u).as_slice::<i64>(), [-2]);
        let (x, u) = (Tensor::f32([1], &[1.0]), Tensor::f32([1], &[f32::NAN]));
        for name in ["max", "min"] {
            assert!(run(name, &x, &u).as_slice::<f32>()[0].is_nan(), "{name}");
        }
    }

    #[test]
    fn an_index_out_of_range_is_an_error() {
        let op = Op::new(&SCATTER_ND).with("reduction", Attr::Str("none".into()));
        let (data, indices) = (Tensor::f32([2], &[0.0; 2]), Tensor::i64([1, 1], &[2]));
        let e = crate::interp::apply(&op, &[&data, &indices, &Tensor::f32([1], &[1.0])], &[data.ty().clone()]);
        assert!(e.unwrap_err().0.contains("index 2 is out of range"));
    }
}
