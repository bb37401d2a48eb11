//! `TopK`: the largest or smallest elements along a dim, which stays whole, and their indices.

use std::cmp::Ordering;

use super::gather::GATHER_ELEMENTS_GRAD;
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{around, expect_operands};
use crate::ops::rules::RuleBuilder;

use crate::ops::support::{dim_attr, never, no_kernel};
use crate::tensor::{Type, View, ViewMut};

/// The `k` largest (or smallest) elements along a dim, sorted, and their indices (i64). Equal elements: lowest index
/// first. NaN counts as larger than any number.
pub static TOP_K: OpDef = OpDef {
    name: "TopK",
    doc: "the k largest or smallest elements along a dim, sorted, and their indices",
    attrs: &[("axis", AttrKind::Int), ("k", AttrKind::Int), ("largest", AttrKind::Bool)],
    onnx: &[
        OnnxRule { domain: "", op: "TopK", since: 1, lower: import },
        OnnxRule { domain: "", op: "TopK", since: 10, lower: import },
    ],
    infer,
    factors,
    work: |_, i, o| Work::memory(i, o, 0.0),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[1])?;
    let x = &inputs[0];
    let axis = dim_attr(op, "axis", x.rank())?;
    let size = x.dims[axis];
    let k = usize::try_from(op.get_int("k")).ok().filter(|&k| k <= size).ok_or_else(|| {
        OpError(format!("TopK of k = {} elements along dim {axis} of {x}, which has {size}", op.get_int("k")))
    })?;
    let mut dims = x.dims.clone();
    dims[axis] = k;
    Ok(vec![Type::new(x.dtype, dims.clone()), Type::new(DType::I64, dims)])
}

fn factors(op: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let axis = op.get_int("axis") as usize;
    let others = (0..inputs[0].rank()).filter(|&d| d != axis);
    RuleBuilder::new(inputs, outputs).dims(others, &inputs[0].dims, &[0], &[0, 1]).build(&[])
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    let dims = cx.b.dims(cx.inputs[0]);
    let op =
        Op::new(&GATHER_ELEMENTS_GRAD).int("axis", cx.op.get_int("axis")).ints("dims", dims.iter().map(|&d| d as i64));
    Ok(vec![Some(cx.b.emit1(op, &[cx.outputs[1], dy])?)])
}

fn select<T: bytemuck::Pod>(
    op: &Op,
    x: &View<'_>,
    outputs: &mut [ViewMut<'_>],
    compare: impl Fn(&T, &T) -> Ordering,
) -> Result<(), KernelError> {
    let [values, indices] = outputs else { return Err(KernelError("TopK has 2 results".into())) };
    let (outer, size, inner) = around(x.dims(), op.get_int("axis") as usize);
    let k = op.get_int("k") as usize;
    let largest = op.get_flag("largest");
    let (x, values, indices) = (x.as_slice::<T>(), values.as_mut_slice::<T>(), indices.as_mut_slice::<i64>());
    let mut order: Vec<usize> = Vec::with_capacity(size);
    for o in 0..outer {
        for i in 0..inner {
            let at = |s: usize| &x[(o * size + s) * inner + i];
            let by = |a: &usize, b: &usize| {
                let order = compare(at(*a), at(*b));
                (if largest { order.reverse() } else { order }).then(a.cmp(b))
            };
            order.clear();
            order.extend(0..size);
            if k > 0 && k < size {
                order.select_nth_unstable_by(k - 1, by);
            }
            order.truncate(k);
            order.sort_unstable_by(by);
            for (j, &s) in order.iter().enumerate() {
                values[(o * k + j) * inner + i] = *at(s);
                indices[(o * k + j) * inner + i] = s as i64;
            }
        }
    }
    Ok(())
}

/// Numbers as usual, NaN above them.
fn floats<T: PartialOrd>(a: &T, b: &T) -> Ordering {
    #[allow(clippy::eq_op)]
    let nan = |x: &T| x.partial_cmp(x).is_none();
    a.partial_cmp(b).unwrap_or_else(|| nan(a).cmp(&nan(b)))
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let x = &inputs[0];
    match x.dtype() {
        DType::F32 => select::<f32>(op, x, outputs, floats),
        DType::F64 => select::<f64>(op, x, outputs, floats),
        DType::I64 => select::<i64>(op, x, outputs, Ord::cmp),
        DType::I32 => select::<i32>(op, x, outputs, Ord::cmp),
        DType::I8 => select::<i8>(op, x, outputs, Ord::cmp),
        DType::U8 => select::<u8>(op, x, outputs, Ord::cmp),
        other => Err(no_kernel(op, other)),
    }
}

fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let k = if cx.opset < 10 { cx.attr_int("k", 0) } else { cx.ints(1)?.first().copied().unwrap_or(0) };
    let axis = axis(cx.attr_int("axis", -1), cx.b.ty(x).rank())?;
    let largest = cx.attr_int("largest", 1) != 0;
    let (values, indices) = cx.b.top_k(x, axis, k, largest)?;
    Ok(vec![values, indices])
}

impl Builder {
    /// The `k` largest or smallest elements along a dim, sorted, and their indices.
    ///
    /// # Errors
    /// More elements than there are.
    pub fn top_k(&mut self, x: ValueId, axis: usize, k: i64, largest: bool) -> Result<(ValueId, ValueId), OpError> {
        let op = Op::new(&TOP_K).int("axis", axis as i64).int("k", k).flag("largest", largest);
        let outs = self.emit(op, &[x])?;
        Ok((outs[0], outs[1]))
    }
}

fn samples() -> Vec<Sample> {
    let case = |dims: &[usize], axis, k, largest| Sample {
        op: Op::new(&TOP_K).int("axis", axis).int("k", k).flag("largest", largest),
        inputs: vec![SampleInput::f32(dims)],
    };
    vec![case(&[4, 6, 12], 2, 3, true), case(&[4, 6, 6], 1, 2, false), case(&[6], 0, 6, true)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn ties_keep_the_lower_index_and_nan_is_largest() {
        let x = Tensor::f32([6], &[1.0, 3.0, f32::NAN, 3.0, -1.0, 3.0]);
        let op = Op::new(&TOP_K).int("axis", 0).int("k", 3).flag("largest", true);
        let types = op.infer(&[x.ty().clone()]).unwrap();
        let y = crate::interp::apply(&op, &[&x], &types).unwrap();
        assert_eq!(y[1].as_slice::<i64>(), [2, 1, 3]);
        let op = op.flag("largest", false);
        let y = crate::interp::apply(&op, &[&x], &types).unwrap();
        assert_eq!(y[1].as_slice::<i64>(), [4, 0, 1]);
    }
}
