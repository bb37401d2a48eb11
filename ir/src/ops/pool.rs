//! `MaxPool`, `AveragePool` and their gradients: batch and channels can be split, spatial dims stay whole.

use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_operands};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::{never, usizes};
use crate::ops::window::{POOL_ATTRS, POOL_GRAD_ATTRS, Window, WindowLoops};
use crate::tensor::{Type, View, ViewMut};

/// Largest element of each window; padding never counts.
pub static MAX_POOL: OpDef = OpDef {
    name: "MaxPool",
    doc: "largest element of each window",
    attrs: POOL_ATTRS,
    onnx: &[
        OnnxRule { domain: "", op: "MaxPool", since: 1, lower: import },
        OnnxRule { domain: "", op: "GlobalMaxPool", since: 1, lower: import_global_max },
    ],
    infer,
    factors,
    work: pool_work,
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: max_kernel,
    samples: || samples(&MAX_POOL),
};

/// Gradient of [`MAX_POOL`], of its operand and the result's gradient: to the first of the largest elements.
pub static MAX_POOL_GRAD: OpDef = OpDef {
    name: "MaxPoolGrad",
    doc: "gradient of MaxPool, of its operand and dy",
    attrs: POOL_ATTRS,
    onnx: &[],
    infer: |op, i| {
        expect_operands(op.name(), i, &[2])?;
        let y = result(op, &i[0])?;
        if y != i[1] {
            return Err(OpError(format!("MaxPoolGrad: the gradient is {}, the result {y}", i[1])));
        }
        Ok(vec![i[0].clone()])
    },
    factors: |op, i, o| factors(op, i, o).linear_in([1]),
    work: pool_work,
    identity: never,
    gradient: Gradient::Internal("backward of MaxPool"),
    kernel: max_grad_kernel,
    samples: || {
        let with_dy = |s: Sample| {
            let y = s.op.infer(&[s.inputs[0].ty.clone()]).ok()?.remove(0);
            let mut op = Op::new(&MAX_POOL_GRAD);
            for (name, value) in s.op.attrs() {
                op = op.with(name, value.clone());
            }
            let x = SampleInput::f32(&s.inputs[0].ty.dims[..]);
            Some(Sample { op, inputs: vec![x, SampleInput::f32(y.dims)] })
        };
        samples(&MAX_POOL).into_iter().filter_map(with_dy).collect()
    },
};

/// Mean of each window.
pub static AVERAGE_POOL: OpDef = OpDef {
    name: "AveragePool",
    doc: "mean of each window, counting padding only where `count_pad` says",
    attrs: POOL_ATTRS,
    onnx: &[OnnxRule { domain: "", op: "AveragePool", since: 1, lower: import }],
    infer,
    factors: |op, i, o| factors(op, i, o).linear_in([0]),
    work: pool_work,
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: average_kernel,
    samples: || samples(&AVERAGE_POOL),
};

/// Gradient of [`AVERAGE_POOL`].
pub static AVERAGE_POOL_GRAD: OpDef = OpDef {
    name: "AveragePoolGrad",
    doc: "gradient of AveragePool, of dy",
    attrs: POOL_GRAD_ATTRS,
    onnx: &[],
    infer: |op, i| {
        expect_operands(op.name(), i, &[1])?;
        let x = Type::new(i[0].dtype, usizes(op, "dims")?);
        let y = result(op, &x)?;
        if y != i[0] {
            return Err(OpError(format!("AveragePoolGrad: the gradient is {}, the result {y}", i[0])));
        }
        Ok(vec![x])
    },
    factors: |op, i, o| factors(op, i, o).linear_in([0]),
    work: pool_work,
    identity: never,
    gradient: Gradient::Internal("backward of AveragePool"),
    kernel: average_grad_kernel,
    samples: || {
        let of_dy = |s: Sample| {
            let x = &s.inputs[0].ty;
            let y = s.op.infer(std::slice::from_ref(x)).ok()?.remove(0);
            Some(Sample { op: average_grad_op(&s.op, &x.dims), inputs: vec![SampleInput::f32(y.dims)] })
        };
        samples(&AVERAGE_POOL).into_iter().filter_map(of_dy).collect()
    },
};

fn result(op: &Op, x: &Type) -> Result<Type, OpError> {
    expect_float(op.name(), "its operand", x)?;
    let window = Window::of(op, None)?;
    if x.rank() != 2 + window.kernel.len() {
        return Err(OpError(format!("{} of {x}: a kernel of {} dims does not fit", op.name(), window.kernel.len())));
    }
    if x.dims[2..].contains(&0) {
        return Err(OpError(format!("{} of {x}: a spatial dim is empty", op.name())));
    }
    if (0..window.kernel.len()).any(|d| window.before[d] >= window.reach(d) || window.behind[d] >= window.reach(d)) {
        return Err(OpError(format!("{op}: padding as large as the window; some windows would hold padding only")));
    }
    let places = window.places(&x.dims[2..])?;
    Ok(Type::new(x.dtype, [&x.dims[..2], &places[..]].concat()))
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[1])?;
    Ok(vec![result(op, &inputs[0])?])
}

fn factors(_: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let operands: Vec<usize> = (0..i.len()).collect();
    let at = |d: usize| operands.iter().map(|&i| (i, d)).collect::<Vec<_>>();
    RuleBuilder::new(i, o)
        .factor("n", o[0].dims[0], &at(0), &[(0, 0)])
        .factor("c", o[0].dims[1], &at(1), &[(0, 1)])
        .build(&[])
}

fn pool_work(op: &Op, i: &[Type], o: &[Type]) -> Work {
    let kernel: f64 = op.get_ints("kernel").iter().map(|&k| k as f64).product();
    Work::memory(i, o, kernel)
}

fn average_grad_op(op: &Op, dims: &[usize]) -> Op {
    let mut grad = Op::new(&AVERAGE_POOL_GRAD);
    for (name, value) in op.attrs() {
        grad = grad.with(name, value.clone());
    }
    grad.ints("dims", dims.iter().map(|&d| d as i64))
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    if cx.op.name() == "AveragePool" {
        let op = average_grad_op(cx.op, &cx.b.dims(cx.inputs[0]));
        return Ok(vec![Some(cx.b.emit1(op, &[dy])?)]);
    }
    let mut op = Op::new(&MAX_POOL_GRAD);
    for (name, value) in cx.op.attrs() {
        op = op.with(name, value.clone());
    }
    Ok(vec![Some(cx.b.emit1(op, &[cx.inputs[0], dy])?)])
}

fn loops(op: &Op, x: &[usize], y: &[usize]) -> Result<WindowLoops, KernelError> {
    Ok(Window::of(op, None).map_err(|e| KernelError(e.0))?.loops(&x[2..], &y[2..]))
}

/// The place of the largest element of a window (the first, and any NaN before others).
fn largest<T: Real>(w: &WindowLoops, o: [usize; 3], x: &[T]) -> Option<usize> {
    let mut best: Option<usize> = None;
    w.window(o, |i| {
        if best.is_none_or(|b| x[i] > x[b] || (x[i].f64().is_nan() && !x[b].f64().is_nan())) {
            best = Some(i);
        }
    });
    best
}

fn max_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let w = loops(op, inputs[0].dims(), outputs[0].dims())?;
    by_float!(op, inputs[0].dtype(), T => {
        let x = inputs[0].as_slice::<T>().chunks_exact(w.input_len());
        for (x, y) in x.zip(outputs[0].as_mut_slice::<T>().chunks_exact_mut(w.output_len())) {
            for (y, o) in y.iter_mut().zip(w.places()) {
                *y = largest(&w, o, x).map_or(T::NEG_INFINITY, |i| x[i]);
            }
        }
        Ok(())
    })
}

fn max_grad_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let w = loops(op, inputs[0].dims(), inputs[1].dims())?;
    by_float!(op, inputs[0].dtype(), T => {
        let x = inputs[0].as_slice::<T>().chunks_exact(w.input_len());
        let dy = inputs[1].as_slice::<T>().chunks_exact(w.output_len());
        for ((x, dy), dx) in x.zip(dy).zip(outputs[0].as_mut_slice::<T>().chunks_exact_mut(w.input_len())) {
            dx.fill(T::ZERO);
            for (dy, o) in dy.iter().zip(w.places()) {
                if let Some(i) = largest(&w, o, x) {
                    dx[i] += *dy;
                }
            }
        }
        Ok(())
    })
}

/// Elements that the window at `o` divides by.
fn count(w: &WindowLoops, o: [usize; 3], count_pad: bool) -> usize {
    (0..3)
        .map(|d| {
            let inside = |k: usize| {
                let i = o[d] * w.stride[d] + k * w.dilation[d];
                if count_pad { i < w.before[d] + w.input[d] + w.behind[d] } else { w.at(d, o[d], k).is_some() }
            };
            (0..w.kernel[d]).filter(|&k| inside(k)).count()
        })
        .product::<usize>()
        .max(1)
}

fn average_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let w = loops(op, inputs[0].dims(), outputs[0].dims())?;
    let pad = op.get_flag("count_pad");
    by_float!(op, inputs[0].dtype(), T => {
        let x = inputs[0].as_slice::<T>().chunks_exact(w.input_len());
        for (x, y) in x.zip(outputs[0].as_mut_slice::<T>().chunks_exact_mut(w.output_len())) {
            for (y, o) in y.iter_mut().zip(w.places()) {
                let mut sum = T::ZERO;
                w.window(o, |i| sum += x[i]);
                *y = sum / T::of(count(&w, o, pad) as f64);
            }
        }
        Ok(())
    })
}

fn average_grad_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let w = loops(op, outputs[0].dims(), inputs[0].dims())?;
    let pad = op.get_flag("count_pad");
    by_float!(op, inputs[0].dtype(), T => {
        let dy = inputs[0].as_slice::<T>().chunks_exact(w.output_len());
        for (dy, dx) in dy.zip(outputs[0].as_mut_slice::<T>().chunks_exact_mut(w.input_len())) {
            dx.fill(T::ZERO);
            for (dy, o) in dy.iter().zip(w.places()) {
                let part = *dy / T::of(count(&w, o, pad) as f64);
                w.window(o, |i| dx[i] += part);
            }
        }
        Ok(())
    })
}

fn pool_op(def: &'static OpDef, window: &Window, count_pad: bool) -> Op {
    window
        .set(Op::new(def).ints("kernel", window.kernel.iter().map(|&k| k as i64)))
        .flag("ceil", window.ceil)
        .flag("count_pad", count_pad)
}

fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let dims = cx.b.dims(x);
    if cx.outputs.get(1) == Some(&true) {
        return Err(OpError("MaxPool's output Indices is not supported; export without unpooling".into()));
    }
    let kernel: Vec<usize> = cx
        .attr_ints("kernel_shape")
        .ok_or_else(|| OpError("kernel_shape is missing".into()))?
        .iter()
        .map(|&k| usize::try_from(k).map_err(|_| OpError(format!("kernel_shape holds {k}"))))
        .collect::<Result<_, _>>()?;
    if dims.len() != kernel.len() + 2 {
        return Err(OpError(format!("kernel_shape {kernel:?} does not fit {}", cx.b.ty(x))));
    }
    let window = Window::import(cx, &dims[2..], &kernel)?;
    let def = if cx.op_type == "MaxPool" { &MAX_POOL } else { &AVERAGE_POOL };
    let count_pad = cx.attr_int("count_include_pad", 0) != 0;
    Ok(vec![cx.emit(pool_op(def, &window, count_pad), &[x])?])
}

fn import_global_max(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let spatial: Vec<usize> = (2..cx.b.ty(x).rank()).collect();
    Ok(vec![cx.b.reduce_max(x, &spatial, true)?])
}

fn samples(def: &'static OpDef) -> Vec<Sample> {
    let case = |dims: &[usize], kernel: &[usize], strides: &[usize], pads: &[usize], ceil: bool, count_pad: bool| {
        let n = kernel.len();
        let window = Window {
            kernel: kernel.to_vec(),
            strides: strides.to_vec(),
            before: pads[..n].to_vec(),
            behind: pads[n..].to_vec(),
            dilations: vec![1; n],
            ceil,
        };
        Sample { op: pool_op(def, &window, count_pad), inputs: vec![SampleInput::f32(dims)] }
    };
    vec![
        case(&[2, 6, 7, 6], &[3, 3], &[2, 2], &[1, 1, 1, 1], false, false),
        case(&[2, 6, 6, 5], &[2, 3], &[2, 2], &[0, 0, 0, 1], true, true),
        case(&[4, 2, 9], &[3], &[1], &[1, 0], false, true),
        case(&[2, 2, 4, 4, 4], &[2, 2, 2], &[2, 2, 2], &[0; 6], false, false),
    ]
}
