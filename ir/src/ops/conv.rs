//! `Conv` and its gradients: batch and channels can be split, spatial dims stay whole. A bias is a separate `Add`.
//!
//! Weights are `[out, in / groups, kernel..]`. The number of groups is not an attribute but follows from the channels of
//! the input and of the weight, also on a shard: so splitting the groups needs no other operator.
//!
//! Kernels copy windows to columns (im2col) and multiply matrices, per sample and group.

use crate::builder::Builder;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{Family, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_operands};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::{never, usizes};
use crate::ops::window::{CONV_ATTRS, CONV_GRAD_ATTRS, Window, WindowLoops};
use crate::tensor::{Type, View, ViewMut};

/// Convolution.
pub static CONV: OpDef = OpDef {
    name: "Conv",
    doc: "convolution over 1 to 3 spatial dims, with groups, strides, padding and dilations",
    attrs: CONV_ATTRS,
    onnx: &[OnnxRule { domain: "", op: "Conv", since: 1, lower: import }],
    infer,
    factors,
    work: |_, i, o| work(i, o, &o[0], &i[1]),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

/// Gradient of a convolution's input.
pub static CONV_GRAD_INPUT: OpDef = OpDef {
    name: "ConvGradInput",
    doc: "gradient of the input of Conv, of dy and the weight",
    attrs: CONV_GRAD_ATTRS,
    onnx: &[],
    infer: infer_grad,
    factors: factors_grad_input,
    work: |_, i, o| work(i, o, &i[0], &i[1]),
    identity: never,
    gradient: Gradient::Internal("backward of Conv"),
    kernel: kernel_grad_input,
    samples: || samples_grad(&CONV_GRAD_INPUT),
};

/// Gradient of a convolution's weight.
pub static CONV_GRAD_WEIGHT: OpDef = OpDef {
    name: "ConvGradWeight",
    doc: "gradient of the weight of Conv, of the input and dy",
    attrs: CONV_GRAD_ATTRS,
    onnx: &[],
    infer: infer_grad,
    factors: factors_grad_weight,
    work: |_, i, o| work(i, o, &i[1], &o[0]),
    identity: never,
    gradient: Gradient::Internal("backward of Conv"),
    kernel: kernel_grad_weight,
    samples: || samples_grad(&CONV_GRAD_WEIGHT),
};

/// The result's type of an input and a weight.
fn result(op: &Op, x: &Type, w: &Type) -> Result<Type, OpError> {
    expect_float(op.name(), "the input", x)?;
    if x.rank() < 3 || w.rank() != x.rank() {
        return Err(OpError(format!("convolution of {x} with weight {w}: need [n, c, spatial..] and as many dims")));
    }
    if w.dtype != x.dtype {
        return Err(OpError(format!("convolution of {x} with weight {w}: element types differ")));
    }
    let groups = x.dims[1].checked_div(w.dims[1]).unwrap_or(0);
    if groups == 0 || groups * w.dims[1] != x.dims[1] || w.dims[0] % groups != 0 {
        return Err(OpError(format!("convolution of {x} with weight {w}: channels do not fit any number of groups")));
    }
    let places = Window::of(op, Some(&w.dims[2..]))?.places(&x.dims[2..])?;
    Ok(Type::new(x.dtype, [&[x.dims[0], w.dims[0]], &places[..]].concat()))
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[2])?;
    Ok(vec![result(op, &inputs[0], &inputs[1])?])
}

fn infer_grad(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[2])?;
    let dims = usizes(op, "dims")?;
    let out = Type::new(inputs[0].dtype, dims);
    let (x, w, dy) =
        if op.name() == "ConvGradInput" { (&out, &inputs[1], &inputs[0]) } else { (&inputs[0], &out, &inputs[1]) };
    let forward = result(op, x, w)?;
    if forward != *dy {
        return Err(OpError(format!("{}: the gradient is {dy}, the result {forward}", op.name())));
    }
    Ok(vec![out])
}

/// As matrix product per group: places of all samples by output channels by the rest of the weight.
fn work(inputs: &[Type], outputs: &[Type], y: &Type, w: &Type) -> Work {
    let places = y.dims[0] * y.dims[2..].iter().product::<usize>();
    let depth: usize = w.dims[1..].iter().product();
    let flops = 2.0 * places as f64 * w.dims[0] as f64 * depth as f64;
    Work {
        family: Family::Conv,
        flops,
        gemm: Some([1, places, w.dims[0], depth]),
        ..Work::memory(inputs, outputs, 0.0)
    }
}

fn factors(_: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let (x, w) = (&i[0].dims, &i[1].dims);
    let groups = x[1] / w[1];
    let rule = RuleBuilder::new(i, o).factor("n", x[0], &[(0, 0)], &[(0, 0)]);
    if groups == 1 {
        rule.factor("out", w[0], &[(1, 0)], &[(0, 1)]).factor("in", w[1], &[(0, 1), (1, 1)], &[])
    } else {
        rule.factor("groups", groups, &[(0, 1), (1, 0)], &[(0, 1)])
    }
    .build(&[ReduceKind::Sum])
    .linear_in([0])
    .linear_in([1])
}

fn factors_grad_input(_: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let (w, dx) = (&i[1].dims, &o[0].dims);
    let groups = dx[1] / w[1];
    let rule = RuleBuilder::new(i, o).factor("n", dx[0], &[(0, 0)], &[(0, 0)]);
    if groups == 1 {
        rule.factor("out", w[0], &[(0, 1), (1, 0)], &[]).factor("in", w[1], &[(1, 1)], &[(0, 1)])
    } else {
        rule.factor("groups", groups, &[(0, 1), (1, 0)], &[(0, 1)])
    }
    .build(&[ReduceKind::Sum])
    .linear_in([0])
    .linear_in([1])
}

fn factors_grad_weight(_: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let (x, dw) = (&i[0].dims, &o[0].dims);
    let groups = x[1] / dw[1];
    let rule = RuleBuilder::new(i, o).factor("n", x[0], &[(0, 0), (1, 0)], &[]);
    if groups == 1 {
        rule.factor("out", dw[0], &[(1, 1)], &[(0, 0)]).factor("in", dw[1], &[(0, 1)], &[(0, 1)])
    } else {
        rule.factor("groups", groups, &[(0, 1), (1, 1)], &[(0, 0)])
    }
    .build(&[ReduceKind::Sum])
    .linear_in([0])
    .linear_in([1])
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None, None]) };
    let mut grads = vec![None, None];
    for (at, def) in [(0, &CONV_GRAD_INPUT), (1, &CONV_GRAD_WEIGHT)] {
        if !cx.wanted[at] {
            continue;
        }
        let dims = cx.b.dims(cx.inputs[at]);
        let mut op = Op::new(def).ints("dims", dims.iter().map(|&d| d as i64));
        for name in ["strides", "pads", "dilations"] {
            op = op.ints(name, cx.op.get_ints(name).iter().copied());
        }
        let operands = if at == 0 { [dy, cx.inputs[1]] } else { [cx.inputs[0], dy] };
        grads[at] = Some(cx.b.emit1(op, &operands)?);
    }
    Ok(grads)
}

/// Sizes of a convolution on (local) tensors.
struct Sizes {
    samples: usize,
    groups: usize,
    /// Input and output channels of a group.
    inputs: usize,
    outputs: usize,
    window: WindowLoops,
    /// Windows that are the input itself: kernel 1, stride 1, no padding.
    direct: bool,
}

impl Sizes {
    fn of(op: &Op, x: &[usize], w: &[usize], y: &[usize]) -> Result<Sizes, KernelError> {
        let window = Window::of(op, Some(&w[2..])).map_err(|e| KernelError(e.0))?.loops(&x[2..], &y[2..]);
        let groups = (x[1] / w[1].max(1)).max(1);
        let direct = window.kernel == [1; 3] && window.stride == [1; 3] && window.input == window.output;
        Ok(Sizes { samples: x[0], groups, inputs: w[1], outputs: w[0] / groups, window, direct })
    }
    /// Rows of the column matrix.
    fn depth(&self) -> usize {
        self.inputs * self.window.kernel_len()
    }
    fn x_range(&self, n: usize, g: usize) -> std::ops::Range<usize> {
        let len = self.inputs * self.window.input_len();
        let at = (n * self.groups + g) * len;
        at..at + len
    }
    fn y_range(&self, n: usize, g: usize) -> std::ops::Range<usize> {
        let len = self.outputs * self.window.output_len();
        let at = (n * self.groups + g) * len;
        at..at + len
    }
    fn w_range(&self, g: usize) -> std::ops::Range<usize> {
        let len = self.outputs * self.depth();
        g * len..(g + 1) * len
    }

    /// Calls `f(start of input row, start of column row, from, to)` for each row of places (last dim) of the column
    /// matrix; places `from..to` lie in the input, others in the padding. `None`: all in the padding.
    fn column_rows(&self, mut f: impl FnMut(Option<usize>, usize, usize, usize, usize)) {
        let w = &self.window;
        let mut column = 0;
        for c in 0..self.inputs {
            for k0 in 0..w.kernel[0] {
                for k1 in 0..w.kernel[1] {
                    for k2 in 0..w.kernel[2] {
                        let (from, to) = w.row(k2);
                        for o0 in 0..w.output[0] {
                            for o1 in 0..w.output[1] {
                                let row = w.at(0, o0, k0).zip(w.at(1, o1, k1));
                                let row = row.map(|(i0, i1)| ((c * w.input[0] + i0) * w.input[1] + i1) * w.input[2]);
                                f(row, column, from, to, k2);
                                column += w.output[2];
                            }
                        }
                    }
                }
            }
        }
    }

    fn to_columns<T: Real>(&self, x: &[T], columns: &mut [T]) {
        let w = self.window;
        self.column_rows(|row, column, from, to, k2| {
            let out = &mut columns[column..column + w.output[2]];
            let Some(row) = row else { return out.fill(T::ZERO) };
            out[..from].fill(T::ZERO);
            out[to..].fill(T::ZERO);
            if from < to {
                let first = row + from * w.stride[2] + k2 * w.dilation[2] - w.before[2];
                for (o, x) in out[from..to].iter_mut().zip(x[first..].iter().step_by(w.stride[2])) {
                    *o = *x;
                }
            }
        });
    }

    fn add_columns<T: Real>(&self, columns: &[T], x: &mut [T]) {
        let w = self.window;
        self.column_rows(|row, column, from, to, k2| {
            if let (Some(row), true) = (row, from < to) {
                let first = row + from * w.stride[2] + k2 * w.dilation[2] - w.before[2];
                let x = x[first..].iter_mut().step_by(w.stride[2]);
                for (c, x) in columns[column + from..column + to].iter().zip(x) {
                    *x += *c;
                }
            }
        });
    }
}

/// `c (+)= a b` of row-major matrices, `a` and `b` transposed where said.
fn multiply<T: Real>(
    [m, n, k]: [usize; 3],
    c: &mut [T],
    add: bool,
    (a, a_transposed): (&[T], bool),
    (b, b_transposed): (&[T], bool),
) {
    assert!(c.len() >= m * n && a.len() >= m * k && b.len() >= k * n, "matrices hold their elements");
    if k == 0 || m == 0 || n == 0 {
        if !add {
            c.fill(T::ZERO);
        }
        return;
    }
    let a_by = if a_transposed { [1, m] } else { [k, 1] };
    let b_by = if b_transposed { [1, k] } else { [n, 1] };
    // SAFETY: the assertion above.
    unsafe { T::gemm([m, n, k], c.as_mut_ptr(), [n, 1], add, a.as_ptr(), a_by, b.as_ptr(), b_by) }
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let ([x, w], [y]) = (inputs, outputs) else { return Err(KernelError("Conv has 2 operands, 1 result".into())) };
    let s = Sizes::of(op, x.dims(), w.dims(), y.dims())?;
    by_float!(op, x.dtype(), T => {
        let (x, w, y) = (x.as_slice::<T>(), w.as_slice::<T>(), y.as_mut_slice::<T>());
        let (places, depth) = (s.window.output_len(), s.depth());
        let mut columns = vec![T::ZERO; if s.direct { 0 } else { depth * places }];
        for n in 0..s.samples {
            for g in 0..s.groups {
                let x = &x[s.x_range(n, g)];
                if !s.direct {
                    s.to_columns(x, &mut columns);
                }
                let columns = if s.direct { x } else { &columns };
                let y = &mut y[s.y_range(n, g)];
                multiply([s.outputs, places, depth], y, false, (&w[s.w_range(g)], false), (columns, false));
            }
        }
        Ok(())
    })
}

fn kernel_grad_input(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let ([dy, w], [dx]) = (inputs, outputs) else {
        return Err(KernelError("ConvGradInput has 2 operands, 1 result".into()));
    };
    let s = Sizes::of(op, dx.dims(), w.dims(), dy.dims())?;
    by_float!(op, dy.dtype(), T => {
        let (dy, w, dx) = (dy.as_slice::<T>(), w.as_slice::<T>(), dx.as_mut_slice::<T>());
        let (places, depth) = (s.window.output_len(), s.depth());
        let mut columns = vec![T::ZERO; if s.direct { 0 } else { depth * places }];
        if !s.direct {
            dx.fill(T::ZERO);
        }
        for n in 0..s.samples {
            for g in 0..s.groups {
                let (dy, dx) = (&dy[s.y_range(n, g)], &mut dx[s.x_range(n, g)]);
                let into = if s.direct { &mut *dx } else { &mut columns };
                multiply([depth, places, s.outputs], into, false, (&w[s.w_range(g)], true), (dy, false));
                if !s.direct {
                    s.add_columns(&columns, dx);
                }
            }
        }
        Ok(())
    })
}

fn kernel_grad_weight(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let ([x, dy], [dw]) = (inputs, outputs) else {
        return Err(KernelError("ConvGradWeight has 2 operands, 1 result".into()));
    };
    let s = Sizes::of(op, x.dims(), dw.dims(), dy.dims())?;
    by_float!(op, dy.dtype(), T => {
        let (x, dy, dw) = (x.as_slice::<T>(), dy.as_slice::<T>(), dw.as_mut_slice::<T>());
        let (places, depth) = (s.window.output_len(), s.depth());
        let mut columns = vec![T::ZERO; if s.direct { 0 } else { depth * places }];
        dw.fill(T::ZERO);
        for n in 0..s.samples {
            for g in 0..s.groups {
                let x = &x[s.x_range(n, g)];
                if !s.direct {
                    s.to_columns(x, &mut columns);
                }
                let columns = if s.direct { x } else { &columns };
                let (dy, dw) = (&dy[s.y_range(n, g)], &mut dw[s.w_range(g)]);
                multiply([s.outputs, depth, places], dw, true, (dy, false), (columns, true));
            }
        }
        Ok(())
    })
}

fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    let (xd, wd) = (cx.b.dims(x), cx.b.dims(w));
    if xd.len() < 3 || wd.len() != xd.len() {
        return Err(OpError(format!("Conv of {} with weight {}: need [n, c, spatial..]", cx.b.ty(x), cx.b.ty(w))));
    }
    let groups = cx.attr_int("group", 1);
    if groups < 1 || (groups as usize).checked_mul(wd[1]) != Some(xd[1]) {
        return Err(OpError(format!(
            "Conv of {} channels with weight {} does not fit group = {groups}",
            xd[1],
            cx.b.ty(w)
        )));
    }
    if cx.attr_ints("kernel_shape").is_some_and(|k| k.iter().map(|&k| k as usize).ne(wd[2..].iter().copied())) {
        return Err(OpError(format!("kernel_shape is not that of the weight {}", cx.b.ty(w))));
    }
    let window = Window::import(cx, &xd[2..], &wd[2..])?;
    let y = cx.emit(window.set(Op::new(&CONV)), &[x, w])?;
    match cx.try_input(2) {
        Some(bias) => {
            let mut dims = vec![1; xd.len() - 1];
            dims[0] = wd[0];
            let bias = cx.b.reshape(bias, &dims)?;
            Ok(vec![cx.b.add(y, bias)?])
        }
        None => Ok(vec![y]),
    }
}

impl Builder {
    /// Convolution of `[n, c, spatial..]` with `[out, c / groups, kernel..]`; `pads` before all dims, then behind them.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn conv(
        &mut self,
        x: ValueId,
        w: ValueId,
        strides: &[usize],
        pads: &[usize],
        dilations: &[usize],
    ) -> Result<ValueId, OpError> {
        let list = |x: &[usize]| x.iter().map(|&x| x as i64).collect::<Vec<_>>();
        let op = Op::new(&CONV).ints("strides", list(strides)).ints("pads", list(pads));
        self.emit1(op.ints("dilations", list(dilations)), &[x, w])
    }
}

/// Input, weight, strides, pads, dilations of small convolutions.
type Case = (&'static [usize], &'static [usize], &'static [i64], &'static [i64], &'static [i64]);
const CASES: &[Case] = &[
    (&[2, 6, 5, 7], &[4, 6, 3, 3], &[1, 1], &[1, 1, 1, 1], &[1, 1]),
    (&[2, 6, 6, 5], &[12, 6, 3, 2], &[2, 1], &[0, 1, 1, 0], &[1, 2]),
    (&[2, 6, 4, 4], &[12, 1, 3, 3], &[1, 2], &[1, 1, 1, 1], &[1, 1]),
    (&[2, 12, 4, 4], &[6, 2, 1, 1], &[1, 1], &[0, 0, 0, 0], &[1, 1]),
    (&[2, 4, 3, 3], &[6, 4, 1, 1], &[1, 1], &[0, 0, 0, 0], &[1, 1]),
    (&[2, 4, 9], &[6, 4, 3], &[2], &[2, 1], &[2]),
    (&[2, 2, 3, 4, 3], &[2, 2, 2, 2, 2], &[1, 1, 1], &[1, 0, 0, 0, 0, 1], &[1, 1, 1]),
];

fn samples() -> Vec<Sample> {
    CASES
        .iter()
        .map(|&(x, w, strides, pads, dilations)| Sample {
            op: Op::new(&CONV)
                .ints("strides", strides.iter().copied())
                .ints("pads", pads.iter().copied())
                .ints("dilations", dilations.iter().copied()),
            inputs: vec![SampleInput::f32(x), SampleInput::f32(w)],
        })
        .collect()
}

fn samples_grad(def: &'static OpDef) -> Vec<Sample> {
    samples()
        .into_iter()
        .filter_map(|s| {
            let types: Vec<Type> = s.inputs.iter().map(|i| i.ty.clone()).collect();
            let y = s.op.infer(&types).ok()?.remove(0);
            let grad_of_input = std::ptr::eq(def, &CONV_GRAD_INPUT);
            let of = &types[if grad_of_input { 0 } else { 1 }];
            let mut op = Op::new(def).ints("dims", of.dims.iter().map(|&d| d as i64));
            for name in ["strides", "pads", "dilations"] {
                op = op.ints(name, s.op.get_ints(name).iter().copied());
            }
            let operands = if grad_of_input { [&y, &types[1]] } else { [&types[0], &y] };
            Some(Sample { op, inputs: operands.map(|t| SampleInput::f32(&t.dims[..])).into() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn random(ty: &Type, seed: u64) -> Tensor {
        let mut state = seed * 2 + 1;
        let xs: Vec<f32> = (0..ty.numel())
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect();
        Tensor::f32(&ty.dims[..], &xs)
    }

    /// The definition, as a sum over every (place, kernel place) pair.
    fn naive(s: &Sizes, x: &[f32], w: &[f32]) -> Vec<f64> {
        let (win, mut y) = (&s.window, Vec::new());
        for n in 0..s.samples {
            for o in 0..s.groups * s.outputs {
                let g = o / s.outputs;
                for at in win.places() {
                    let mut sum = 0.0;
                    for c in 0..s.inputs {
                        for k in 0..win.kernel_len() {
                            let k3 = [
                                k / (win.kernel[1] * win.kernel[2]),
                                k / win.kernel[2] % win.kernel[1],
                                k % win.kernel[2],
                            ];
                            let place: Option<Vec<usize>> = (0..3).map(|d| win.at(d, at[d], k3[d])).collect();
                            let Some(p) = place else { continue };
                            let i = (p[0] * win.input[1] + p[1]) * win.input[2] + p[2];
                            let x = x[s.x_range(n, g).start + c * win.input_len() + i];
                            sum += f64::from(x) * f64::from(w[(o * s.inputs + c) * win.kernel_len() + k]);
                        }
                    }
                    y.push(sum);
                }
            }
        }
        y
    }

    #[test]
    fn kernel_is_the_definition() {
        for (i, s) in samples().into_iter().enumerate() {
            let (x, w) = (random(&s.inputs[0].ty, i as u64), random(&s.inputs[1].ty, 50 + i as u64));
            let types = s.op.infer(&[x.ty().clone(), w.ty().clone()]).unwrap();
            let y = crate::interp::apply(&s.op, &[&x, &w], &types).unwrap();
            let sizes = Sizes::of(&s.op, x.dims(), w.dims(), y[0].dims()).unwrap();
            for (a, b) in y[0].as_slice::<f32>().iter().zip(naive(&sizes, x.as_slice(), w.as_slice())) {
                assert!((f64::from(*a) - b).abs() < 1e-5, "{}: {a} is not {b}", s.op);
            }
        }
    }

    /// `<dy, conv(x, w)> = <conv_grad_input(dy, w), x> = <conv_grad_weight(x, dy), w>`: the gradients are the adjoints.
    #[test]
    fn gradients_are_adjoint() {
        let dot = |a: &Tensor, b: &Tensor| -> f64 {
            a.as_slice::<f32>().iter().zip(b.as_slice::<f32>()).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        for (((i, s), gx), gw) in
            samples().into_iter().enumerate().zip(samples_grad(&CONV_GRAD_INPUT)).zip(samples_grad(&CONV_GRAD_WEIGHT))
        {
            let (x, w) = (random(&s.inputs[0].ty, i as u64), random(&s.inputs[1].ty, 50 + i as u64));
            let types = s.op.infer(&[x.ty().clone(), w.ty().clone()]).unwrap();
            let dy = random(&types[0], 99 + i as u64);
            let y = &crate::interp::apply(&s.op, &[&x, &w], &types).unwrap()[0];
            let dx = &crate::interp::apply(&gx.op, &[&dy, &w], &[x.ty().clone()]).unwrap()[0];
            let dw = &crate::interp::apply(&gw.op, &[&x, &dy], &[w.ty().clone()]).unwrap()[0];
            let want = dot(&dy, y);
            assert!((dot(dx, &x) - want).abs() < 1e-4 * (1.0 + want.abs()), "{}", s.op);
            assert!((dot(dw, &w) - want).abs() < 1e-4 * (1.0 + want.abs()), "{}", s.op);
        }
    }
}
