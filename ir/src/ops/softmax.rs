//! `Softmax`, `LogSoftmax` and the gradient of softmax, over one dim, which stays whole.

use crate::builder::Builder;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, around, by_float, dot, expect_float, expect_operands};
use crate::ops::rules::RuleBuilder;

use crate::ops::support::{dim_attr, never};
use crate::tensor::{Type, View, ViewMut};

/// Softmax over one dim.
pub static SOFTMAX: OpDef = OpDef {
    name: "Softmax",
    doc: "exp(x) / sum(exp(x)) over one dim",
    attrs: &[("axis", AttrKind::Int)],
    onnx: &[
        OnnxRule { domain: "", op: "Softmax", since: 1, lower: import_flat },
        OnnxRule { domain: "", op: "Softmax", since: 13, lower: import },
    ],
    infer,
    factors,
    work: |_, i, o| Work::memory(i, o, 5.0),
    identity: never,
    gradient: Gradient::Rule(softmax_gradient),
    kernel: softmax_kernel,
    samples: || samples(&SOFTMAX, 1),
};

/// Logarithm of softmax over one dim.
pub static LOG_SOFTMAX: OpDef = OpDef {
    name: "LogSoftmax",
    doc: "x - log(sum(exp(x))) over one dim",
    attrs: &[("axis", AttrKind::Int)],
    onnx: &[
        OnnxRule { domain: "", op: "LogSoftmax", since: 1, lower: import_flat },
        OnnxRule { domain: "", op: "LogSoftmax", since: 13, lower: import },
    ],
    infer,
    factors,
    work: |_, i, o| Work::memory(i, o, 5.0),
    identity: never,
    gradient: Gradient::Rule(log_softmax_gradient),
    kernel: log_softmax_kernel,
    samples: || samples(&LOG_SOFTMAX, 1),
};

/// Gradient of softmax, of its result and that result's gradient.
pub static SOFTMAX_GRAD: OpDef = OpDef {
    name: "SoftmaxGrad",
    doc: "gradient of Softmax: y * (dy - sum(y * dy))",
    attrs: &[("axis", AttrKind::Int)],
    onnx: &[],
    infer,
    factors: |op, i, o| factors(op, i, o).linear_in([1]),
    work: |_, i, o| Work::memory(i, o, 4.0),
    identity: never,
    gradient: Gradient::Internal("backward of Softmax"),
    kernel: grad_kernel,
    samples: || samples(&SOFTMAX_GRAD, 2),
};

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let count = if op.name() == "SoftmaxGrad" { 2 } else { 1 };
    expect_operands(op.name(), inputs, &[count])?;
    expect_float(op.name(), "its operand", &inputs[0])?;
    dim_attr(op, "axis", inputs[0].rank())?;
    if inputs.iter().any(|t| t != &inputs[0]) {
        return Err(OpError(format!("{} of operands {} and {}, which differ", op.name(), inputs[0], inputs[1])));
    }
    Ok(vec![inputs[0].clone()])
}

fn factors(op: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let dims = &inputs[0].dims;
    let axis = op.get_int("axis") as usize;
    let operands: Vec<usize> = (0..inputs.len()).collect();
    let others = (0..dims.len()).filter(|&d| d != axis);
    RuleBuilder::new(inputs, outputs).dims(others, dims, &operands, &[0]).build(&[])
}

fn softmax_gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    let op = Op::new(&SOFTMAX_GRAD).int("axis", cx.op.get_int("axis"));
    Ok(vec![Some(cx.b.emit1(op, &[cx.outputs[0], dy])?)])
}

/// `dx = dy - exp(y) * sum(dy)`.
fn log_softmax_gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    let sum = cx.b.reduce_sum(dy, &[cx.op.get_int("axis") as usize], true)?;
    let p = cx.b.exp(cx.outputs[0])?;
    let back = cx.b.mul(p, sum)?;
    Ok(vec![Some(cx.b.sub(dy, back)?)])
}

/// Calls `f` with each row along the axis: contiguous rows directly, others through a copy.
fn rows<T: Real>(
    op: &Op,
    inputs: &[View<'_>],
    out: &mut ViewMut<'_>,
    mut f: impl FnMut(&[&[T]], &mut [T]),
) -> Result<(), KernelError> {
    let (outer, size, inner) = around(inputs[0].dims(), op.get_int("axis") as usize);
    let ins: Vec<&[T]> = inputs.iter().map(View::as_slice).collect();
    let z = out.as_mut_slice::<T>();
    if inner == 1 {
        for r in 0..outer {
            let at = r * size..(r + 1) * size;
            let rows: Vec<&[T]> = ins.iter().map(|x| &x[at.clone()]).collect();
            f(&rows, &mut z[at]);
        }
        return Ok(());
    }
    let mut copies = vec![vec![T::ZERO; size]; ins.len()];
    let mut row = vec![T::ZERO; size];
    for o in 0..outer {
        for i in 0..inner {
            let at = |s: usize| (o * size + s) * inner + i;
            for (copy, x) in copies.iter_mut().zip(&ins) {
                copy.iter_mut().enumerate().for_each(|(s, c)| *c = x[at(s)]);
            }
            let rows: Vec<&[T]> = copies.iter().map(Vec::as_slice).collect();
            f(&rows, &mut row);
            row.iter().enumerate().for_each(|(s, v)| z[at(s)] = *v);
        }
    }
    Ok(())
}

fn softmax_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => rows::<T>(op, inputs, &mut outputs[0], |x, y| {
        let max = T::largest(x[0]);
        for (y, x) in y.iter_mut().zip(x[0]) {
            *y = (*x - max).fast_exp();
        }
        let scale = T::ONE / T::sum(y);
        y.iter_mut().for_each(|y| *y *= scale);
    }))
}

fn log_softmax_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => rows::<T>(op, inputs, &mut outputs[0], |x, y| {
        let max = T::largest(x[0]);
        for (y, x) in y.iter_mut().zip(x[0]) {
            *y = (*x - max).fast_exp();
        }
        let log = T::sum(y).ln();
        for (y, x) in y.iter_mut().zip(x[0]) {
            *y = (*x - max) - log;
        }
    }))
}

fn grad_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => rows::<T>(op, inputs, &mut outputs[0], |x, dx| {
        let (y, dy) = (x[0], x[1]);
        let mean = dot(y, dy);
        for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = *y * (*dy - mean);
        }
    }))
}

fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let axis = axis(cx.attr_int("axis", -1), cx.b.ty(x).rank())?;
    let def = if cx.op_type == "Softmax" { &SOFTMAX } else { &LOG_SOFTMAX };
    Ok(vec![cx.emit(Op::new(def).int("axis", axis as i64), &[x])?])
}

/// Before opset 13 the dims from the axis on count as one.
fn import_flat(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let dims = cx.b.dims(x);
    let axis = axis(cx.attr_int("axis", 1), dims.len())?;
    let def = if cx.op_type == "Softmax" { &SOFTMAX } else { &LOG_SOFTMAX };
    let mut flat = dims[..axis].to_vec();
    flat.push(dims[axis..].iter().product());
    let y = cx.b.reshape(x, &flat)?;
    let y = cx.emit(Op::new(def).int("axis", axis as i64), &[y])?;
    Ok(vec![cx.b.reshape(y, &dims)?])
}

impl Builder {
    /// Softmax over a dim.
    ///
    /// # Errors
    /// Elements that are not floats, an axis out of range.
    pub fn softmax(&mut self, x: ValueId, axis: usize) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&SOFTMAX).int("axis", axis as i64), &[x])
    }
    /// Logarithm of softmax over a dim.
    ///
    /// # Errors
    /// Elements that are not floats, an axis out of range.
    pub fn log_softmax(&mut self, x: ValueId, axis: usize) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&LOG_SOFTMAX).int("axis", axis as i64), &[x])
    }
}

fn samples(def: &'static OpDef, operands: usize) -> Vec<Sample> {
    let case = |dims: &[usize], axis| Sample {
        op: Op::new(def).int("axis", axis),
        inputs: (0..operands).map(|_| SampleInput::f32_in(dims, -2.0, 2.0)).collect(),
    };
    vec![case(&[4, 6, 12], 2), case(&[4, 6, 4], 1), case(&[6], 0), case(&[6, 1], 1)]
}
