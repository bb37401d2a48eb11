//! `LayerNorm` and `RmsNorm` over trailing dims, which stay whole, and their gradients.
//!
//! Operands are `x`, `scale` and for LayerNorm optionally `bias`, the latter of the sizes of the normalised dims `axis..`.
//! Statistics are not kept for the backward pass but computed again from `x`.

use crate::builder::Builder;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, dot, expect_float, expect_operands, stat_dtype};
use crate::ops::rules::RuleBuilder;

use crate::ops::support::{dim_attr, never};
use crate::tensor::{Type, View, ViewMut};

const ATTRS: &[(&str, AttrKind)] = &[("axis", AttrKind::Int), ("epsilon", AttrKind::Float)];

/// Layer normalisation.
pub static LAYER_NORM: OpDef = OpDef {
    name: "LayerNorm",
    doc: "(x - mean) / sqrt(variance + epsilon) * scale (+ bias) over the dims from axis on",
    attrs: ATTRS,
    onnx: &[OnnxRule { domain: "", op: "LayerNormalization", since: 17, lower: import_layer_norm }],
    infer: |op, i| infer(op, i, &[2, 3]),
    factors: |op, i, o| factors(op, i, o, &[0]),
    work: |_, i, o| Work::memory(i, o, 8.0),
    identity: never,
    gradient: Gradient::Rule(layer_norm_gradient),
    kernel: layer_norm_kernel,
    samples: || {
        let mut all = samples(&LAYER_NORM, &[false, true]);
        all.extend(samples(&LAYER_NORM, &[false, true, true]));
        all
    },
};

/// Gradients of layer normalisation.
pub static LAYER_NORM_GRAD: OpDef = OpDef {
    name: "LayerNormGrad",
    doc: "gradients of LayerNorm: of x, scale, dy those of x, scale, bias",
    attrs: ATTRS,
    onnx: &[],
    infer: |op, i| infer_grad(op, i, 3),
    factors: |op, i, o| factors(op, i, o, &[0, 2]).linear_in([2]),
    work: |_, i, o| Work::memory(i, o, 14.0),
    identity: never,
    gradient: Gradient::Internal("backward of LayerNorm"),
    kernel: layer_norm_grad_kernel,
    samples: || samples(&LAYER_NORM_GRAD, &[false, true, false]),
};

/// Root-mean-square normalisation.
pub static RMS_NORM: OpDef = OpDef {
    name: "RmsNorm",
    doc: "x / sqrt(mean(x^2) + epsilon) * scale over the dims from axis on",
    attrs: ATTRS,
    onnx: &[
        OnnxRule { domain: "", op: "RMSNormalization", since: 23, lower: import_rms_norm },
        OnnxRule { domain: "", op: "SimplifiedLayerNormalization", since: 1, lower: import_rms_norm },
        OnnxRule { domain: "com.microsoft", op: "SimplifiedLayerNormalization", since: 1, lower: import_rms_norm },
    ],
    infer: |op, i| infer(op, i, &[2]),
    factors: |op, i, o| factors(op, i, o, &[0]),
    work: |_, i, o| Work::memory(i, o, 5.0),
    identity: never,
    gradient: Gradient::Rule(rms_norm_gradient),
    kernel: rms_norm_kernel,
    samples: || samples(&RMS_NORM, &[false, true]),
};

/// Gradients of root-mean-square normalisation.
pub static RMS_NORM_GRAD: OpDef = OpDef {
    name: "RmsNormGrad",
    doc: "gradients of RmsNorm: of x, scale, dy those of x and scale",
    attrs: ATTRS,
    onnx: &[],
    infer: |op, i| infer_grad(op, i, 2),
    factors: |op, i, o| factors(op, i, o, &[0, 2]).linear_in([2]),
    work: |_, i, o| Work::memory(i, o, 10.0),
    identity: never,
    gradient: Gradient::Internal("backward of RmsNorm"),
    kernel: rms_norm_grad_kernel,
    samples: || samples(&RMS_NORM_GRAD, &[false, true, false]),
};

fn check(op: &Op, x: &Type, parameters: &[Type]) -> Result<(), OpError> {
    expect_float(op.name(), "its operand", x)?;
    let axis = dim_attr(op, "axis", x.rank())?;
    for p in parameters {
        if p.dims != x.dims[axis..] {
            return Err(OpError(format!("{} of {x} from dim {axis} on does not fit scale or bias {p}", op.name())));
        }
        same_width(op, x, p)?;
    }
    Ok(())
}

/// Half floats may mix with f32, since kernels widen them; f64 may not.
fn same_width(op: &Op, x: &Type, other: &Type) -> Result<(), OpError> {
    expect_float(op.name(), "an operand", other)?;
    if stat_dtype(x.dtype) == stat_dtype(other.dtype) {
        return Ok(());
    }
    Err(OpError(format!("{} of {x} with {other}: element types do not mix; cast one", op.name())))
}

fn infer(op: &Op, inputs: &[Type], counts: &[usize]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, counts)?;
    check(op, &inputs[0], &inputs[1..])?;
    Ok(vec![inputs[0].clone()])
}

fn infer_grad(op: &Op, inputs: &[Type], results: usize) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[3])?;
    check(op, &inputs[0], &inputs[1..2])?;
    if inputs[2].dims != inputs[0].dims {
        return Err(OpError(format!("{}: the gradient {} is not of the sizes of {}", op.name(), inputs[2], inputs[0])));
    }
    same_width(op, &inputs[0], &inputs[2])?;
    let mut outs = vec![inputs[1].clone(); results];
    outs[0] = inputs[0].clone();
    Ok(outs)
}

/// Dims before the axis split; the gradients of parameters are sums over them.
fn factors(op: &Op, inputs: &[Type], outputs: &[Type], operands: &[usize]) -> FactorRule {
    let leading = 0..op.get_int("axis") as usize;
    RuleBuilder::new(inputs, outputs).dims(leading, &inputs[0].dims, operands, &[0]).build(&[ReduceKind::Sum; 3])
}

fn grad_op(def: &'static OpDef, op: &Op) -> Op {
    Op::new(def).int("axis", op.get_int("axis")).float("epsilon", op.get_float("epsilon"))
}

fn norm_gradient(cx: &mut GradCx<'_>, def: &'static OpDef) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None; cx.inputs.len()]) };
    let grads = cx.b.emit(grad_op(def, cx.op), &[cx.inputs[0], cx.inputs[1], dy])?;
    Ok(cx.wanted.iter().zip(grads).map(|(w, g)| w.then_some(g)).collect())
}

fn layer_norm_gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    norm_gradient(cx, &LAYER_NORM_GRAD)
}

fn rms_norm_gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    norm_gradient(cx, &RMS_NORM_GRAD)
}

/// The length of a normalised row.
fn row_length(op: &Op, x: &View<'_>) -> usize {
    x.dims()[op.get_int("axis") as usize..].iter().product()
}

/// Mean and `1 / sqrt(variance + epsilon)` of a row.
fn statistics<T: Real>(row: &[T], epsilon: T) -> (T, T) {
    let n = T::of(row.len() as f64);
    let mean = T::sum(row) / n;
    let mut centred = [T::ZERO; 16];
    let chunks = row.chunks_exact(16);
    let mut variance = T::ZERO;
    for &x in chunks.remainder() {
        variance += (x - mean) * (x - mean);
    }
    for c in chunks {
        for (lane, &x) in centred.iter_mut().zip(c) {
            *lane += (x - mean) * (x - mean);
        }
    }
    variance = (variance + T::sum(&centred)) / n;
    (mean, T::ONE / (variance + epsilon).sqrt())
}

fn layer_norm_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => {
        let n = row_length(op, &inputs[0]).max(1);
        let epsilon = T::of(op.get_float("epsilon"));
        let scale = inputs[1].as_slice::<T>();
        let bias = inputs.get(2).map(View::as_slice::<T>);
        let y = outputs[0].as_mut_slice::<T>();
        for (x, y) in inputs[0].as_slice::<T>().chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let (mean, inv) = statistics(x, epsilon);
            for ((y, x), s) in y.iter_mut().zip(x).zip(scale) {
                *y = (*x - mean) * inv * *s;
            }
            if let Some(bias) = bias {
                y.iter_mut().zip(bias).for_each(|(y, b)| *y += *b);
            }
        }
        Ok(())
    })
}

/// With `h = (x - mean) * inv` and `g = dy * scale`: `dx = inv * (g - mean(g) - h * mean(g * h))`.
fn layer_norm_grad_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => {
        let n = row_length(op, &inputs[0]).max(1);
        let epsilon = T::of(op.get_float("epsilon"));
        let scale = inputs[1].as_slice::<T>();
        let [dx, dscale, dbias] = outputs else { return Err(KernelError("LayerNormGrad has 3 results".into())) };
        let (mut sums, mut biases) = (vec![0.0; n], vec![0.0; n]);
        let (mut h, mut g) = (vec![T::ZERO; n], vec![T::ZERO; n]);
        let rows = inputs[0].as_slice::<T>().chunks_exact(n).zip(inputs[2].as_slice::<T>().chunks_exact(n));
        for ((x, dy), dx) in rows.zip(dx.as_mut_slice::<T>().chunks_exact_mut(n)) {
            let (mean, inv) = statistics(x, epsilon);
            for i in 0..n {
                h[i] = (x[i] - mean) * inv;
                g[i] = dy[i] * scale[i];
                sums[i] += (dy[i] * h[i]).f64();
                biases[i] += dy[i].f64();
            }
            let count = T::of(n as f64);
            let (mean_g, mean_gh) = (T::sum(&g) / count, dot(&g, &h) / count);
            for i in 0..n {
                dx[i] = inv * (g[i] - mean_g - h[i] * mean_gh);
            }
        }
        write_sums::<T>(dscale, &sums);
        write_sums::<T>(dbias, &biases);
        Ok(())
    })
}

fn write_sums<T: Real>(out: &mut ViewMut<'_>, sums: &[f64]) {
    out.as_mut_slice::<T>().iter_mut().zip(sums).for_each(|(o, s)| *o = T::of(*s));
}

fn inverse_rms<T: Real>(x: &[T], epsilon: T) -> T {
    T::ONE / (dot(x, x) / T::of(x.len() as f64) + epsilon).sqrt()
}

fn rms_norm_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => {
        let n = row_length(op, &inputs[0]).max(1);
        let epsilon = T::of(op.get_float("epsilon"));
        let scale = inputs[1].as_slice::<T>();
        let y = outputs[0].as_mut_slice::<T>();
        for (x, y) in inputs[0].as_slice::<T>().chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let inv = inverse_rms(x, epsilon);
            for ((y, x), s) in y.iter_mut().zip(x).zip(scale) {
                *y = *x * inv * *s;
            }
        }
        Ok(())
    })
}

/// With `h = x * inv` and `g = dy * scale`: `dx = inv * (g - h * mean(g * h))`.
fn rms_norm_grad_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => {
        let n = row_length(op, &inputs[0]).max(1);
        let epsilon = T::of(op.get_float("epsilon"));
        let scale = inputs[1].as_slice::<T>();
        let [dx, dscale] = outputs else { return Err(KernelError("RmsNormGrad has 2 results".into())) };
        let mut sums = vec![0.0; n];
        let (mut h, mut g) = (vec![T::ZERO; n], vec![T::ZERO; n]);
        let rows = inputs[0].as_slice::<T>().chunks_exact(n).zip(inputs[2].as_slice::<T>().chunks_exact(n));
        for ((x, dy), dx) in rows.zip(dx.as_mut_slice::<T>().chunks_exact_mut(n)) {
            let inv = inverse_rms(x, epsilon);
            for i in 0..n {
                h[i] = x[i] * inv;
                g[i] = dy[i] * scale[i];
                sums[i] += (dy[i] * h[i]).f64();
            }
            let mean_gh = dot(&g, &h) / T::of(n as f64);
            for i in 0..n {
                dx[i] = inv * (g[i] - h[i] * mean_gh);
            }
        }
        write_sums::<T>(dscale, &sums);
        Ok(())
    })
}

/// A scale or bias at exactly the normalised sizes.
fn fit(cx: &mut ImportCx<'_>, v: ValueId, x: ValueId, axis: usize) -> Result<ValueId, OpError> {
    let dims = cx.b.dims(x)[axis..].to_vec();
    // Leading dims of size 1 say nothing.
    let mut own = cx.b.dims(v);
    while own.len() > dims.len() && own[0] == 1 {
        own.remove(0);
    }
    let v = cx.b.reshape(v, &own)?;
    cx.b.expand(v, &dims)
}

fn import_layer_norm(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let rank = cx.b.ty(x).rank();
    let axis = axis(cx.attr_int("axis", -1), rank)?;
    let epsilon = f64::from(cx.attr_float("epsilon", 1e-5));
    let scale = cx.input(1)?;
    let scale = fit(cx, scale, x, axis)?;
    let bias = cx.try_input(2).map(|b| fit(cx, b, x, axis)).transpose()?;
    let mut outs = vec![cx.b.layer_norm(x, scale, bias, axis, epsilon)?];
    if cx.outputs.iter().skip(1).any(|&named| named) {
        let over: Vec<usize> = (axis..rank).collect();
        // Statistics of half floats are f32.
        let wide = cx.b.cast(x, stat_dtype(cx.b.ty(x).dtype))?;
        let mean = cx.b.reduce_mean(wide, &over, true)?;
        let centred = cx.b.sub(wide, mean)?;
        let square = cx.b.mul(centred, centred)?;
        let variance = cx.b.reduce_mean(square, &over, true)?;
        outs.extend([mean, inverse_root(cx.b, variance, epsilon)?]);
    }
    Ok(outs)
}

/// `1 / sqrt(x + epsilon)`
pub(super) fn inverse_root(b: &mut Builder, x: ValueId, epsilon: f64) -> Result<ValueId, OpError> {
    let dtype = b.ty(x).dtype;
    let (epsilon, one) = (b.scalar(dtype, epsilon), b.scalar(dtype, 1.0));
    let sum = b.add(x, epsilon)?;
    let root = b.sqrt(sum)?;
    b.div(one, root)
}

fn import_rms_norm(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let rank = cx.b.ty(x).rank();
    let axis = axis(cx.attr_int("axis", -1), rank)?;
    let epsilon = f64::from(cx.attr_float("epsilon", 1e-5));
    let scale = cx.input(1)?;
    let scale = fit(cx, scale, x, axis)?;
    let mut outs = vec![cx.b.rms_norm(x, scale, axis, epsilon)?];
    if cx.outputs.get(1) == Some(&true) {
        let over: Vec<usize> = (axis..rank).collect();
        let wide = cx.b.cast(x, stat_dtype(cx.b.ty(x).dtype))?;
        let square = cx.b.mul(wide, wide)?;
        let mean = cx.b.reduce_mean(square, &over, true)?;
        outs.push(inverse_root(cx.b, mean, epsilon)?);
    }
    Ok(outs)
}

impl Builder {
    /// Layer normalisation over the dims from `axis` on.
    ///
    /// # Errors
    /// Scale or bias not of the normalised sizes, elements that are not floats.
    pub fn layer_norm(
        &mut self,
        x: ValueId,
        scale: ValueId,
        bias: Option<ValueId>,
        axis: usize,
        epsilon: f64,
    ) -> Result<ValueId, OpError> {
        let op = Op::new(&LAYER_NORM).int("axis", axis as i64).float("epsilon", epsilon);
        let operands: Vec<ValueId> = [x, scale].into_iter().chain(bias).collect();
        self.emit1(op, &operands)
    }
    /// Root-mean-square normalisation over the dims from `axis` on.
    ///
    /// # Errors
    /// Scale not of the normalised sizes, elements that are not floats.
    pub fn rms_norm(&mut self, x: ValueId, scale: ValueId, axis: usize, epsilon: f64) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&RMS_NORM).int("axis", axis as i64).float("epsilon", epsilon), &[x, scale])
    }
}

/// Operands by whether they are of the parameters' sizes.
fn samples(def: &'static OpDef, operands: &[bool]) -> Vec<Sample> {
    let case = |dims: &[usize], axis: usize| Sample {
        op: Op::new(def).int("axis", axis as i64).float("epsilon", 1e-5),
        inputs: operands
            .iter()
            .map(|&p| if p { SampleInput::f32_in(&dims[axis..], 0.5, 1.5) } else { SampleInput::f32(dims) })
            .collect(),
    };
    vec![case(&[4, 6, 12], 2), case(&[6, 4, 6], 1)]
}
