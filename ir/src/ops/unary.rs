//! Elementwise functions of one operand, and the fused gradients of activations.
//!
//! Kernels know f32 and f64 (and integers where ONNX does). Gradients of smooth functions are written in terms of the
//! result where that is cheaper (`Exp`, `Tanh`, ...); activations have a fused gradient operator each, so that the
//! backward pass reads and writes memory once.
//!
//! Read next: [`super::binary`].

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use super::real::Real;
use super::support::{map1, map2, never, no_kernel, operands};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View, ViewMut};

/// `1 / (1 + e^-x)`: where the power overflows the result is 0, as it should be.
pub(crate) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).fast_exp())
}

/// Coefficients of the tanh form of GELU: `sqrt(2 / pi)` and 0.044715 (Hendrycks and Gimpel, arXiv:1606.08415).
const GELU_TANH: (f64, f64) = (0.797_884_560_802_865_4, 0.044715);

fn gelu<T: Real>(x: T, tanh: bool) -> T {
    let (one, half) = (T::of(1.0), T::of(0.5));
    if tanh {
        let inner = T::of(GELU_TANH.0) * (x + T::of(GELU_TANH.1) * x * x * x);
        half * x * (one + inner.fast_tanh())
    } else {
        half * x * (one + (x * T::of(FRAC_1_SQRT_2)).erf())
    }
}

/// Derivative of [`gelu`].
fn gelu_slope<T: Real>(x: T, tanh: bool) -> T {
    let (one, half) = (T::of(1.0), T::of(0.5));
    if tanh {
        let t = (T::of(GELU_TANH.0) * (x + T::of(GELU_TANH.1) * x * x * x)).fast_tanh();
        let inner = T::of(GELU_TANH.0) * (one + T::of(3.0 * GELU_TANH.1) * x * x);
        half * (one + t) + half * x * (one - t * t) * inner
    } else {
        let density = (-(half * x * x)).fast_exp() * T::of(1.0 / (2.0 * PI).sqrt());
        half * (one + (x * T::of(FRAC_1_SQRT_2)).erf()) + x * density
    }
}

/// Derivative of `x * sigmoid(x)`.
fn silu_slope<T: Real>(x: T) -> T {
    let (s, one) = (sigmoid(x), T::of(1.0));
    s * (one + x * (one - s))
}

fn infer_float(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [x] = operands::<1>(inputs)?;
    if !x.dtype.is_float() {
        return Err(OpError(format!("takes floats, not {x}")));
    }
    Ok(vec![x.clone()])
}

fn infer_number(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [x] = operands::<1>(inputs)?;
    if x.dtype == DType::Bool {
        return Err(OpError(format!("takes numbers, not {x}")));
    }
    Ok(vec![x.clone()])
}

fn infer_slope(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [x, dy] = operands::<2>(inputs)?;
    if !x.dtype.is_float() || x != dy {
        return Err(OpError(format!("takes two floats of one type, not {x} and {dy}")));
    }
    Ok(vec![x.clone()])
}

fn factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    FactorRule::elementwise(inputs, outputs)
}

fn linear_factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    FactorRule::elementwise(inputs, outputs).linear_in([0])
}

fn slope_factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    FactorRule::elementwise(inputs, outputs).linear_in([1])
}

fn sample(op: Op, low: f64, high: f64) -> Vec<Sample> {
    let of = |dims: &[usize]| Sample { op: op.clone(), inputs: vec![SampleInput::f32_in(dims, low, high)] };
    vec![of(&[4, 6]), of(&[])]
}

/// Lowers an ONNX operator to the canonical one of the same name without attributes.
macro_rules! same_name {
    ($op:ident, $name:literal, $since:literal) => {
        OnnxRule {
            domain: "",
            op: $name,
            since: $since,
            lower: |cx| {
                let x = cx.input(0)?;
                Ok(vec![cx.emit(Op::new(&$op), &[x])?])
            },
        }
    };
}
pub(crate) use same_name;

/// A function of floats: name, documentation, FLOPs per element, function, factor rule, gradient, range of samples, and
/// further import rules.
macro_rules! unary {
    ($op:ident $method:ident $name:literal: $doc:literal, flops $flops:literal, $f:expr, $factors:ident,
     grad $grad:expr, in $low:literal..$high:literal $(, onnx [$($rule:expr),*])?) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[same_name!($op, $name, 1) $(, $($rule),*)?],
            infer: infer_float,
            factors: $factors,
            work: |_, i, o| Work::memory(i, o, $flops),
            identity: never,
            gradient: $grad,
            kernel: |op, ins, outs| {
                match ins[0].dtype() {
                    DType::F32 => map1::<f32, f32>(&ins[0], &mut outs[0], $f),
                    DType::F64 => map1::<f64, f64>(&ins[0], &mut outs[0], $f),
                    d => return Err(no_kernel(op, d)),
                }
                Ok(())
            },
            samples: || sample(Op::new(&$op), $low, $high),
        };
        impl Builder {
            #[doc = $doc]
            pub fn $method(&mut self, x: ValueId) -> Result<ValueId, OpError> {
                self.emit1(Op::new(&$op), &[x])
            }
        }
    };
}

/// The same for signed numbers, integers too.
macro_rules! signed {
    ($op:ident $method:ident $name:literal: $doc:literal, $float:expr, $int:expr, $factors:ident, grad $grad:expr) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[same_name!($op, $name, 1)],
            infer: infer_number,
            factors: $factors,
            work: |_, i, o| Work::memory(i, o, 1.0),
            identity: never,
            gradient: $grad,
            kernel: |op, ins, outs| {
                match ins[0].dtype() {
                    DType::F32 => map1::<f32, f32>(&ins[0], &mut outs[0], $float),
                    DType::F64 => map1::<f64, f64>(&ins[0], &mut outs[0], $float),
                    DType::I64 => map1::<i64, i64>(&ins[0], &mut outs[0], $int),
                    DType::I32 => map1::<i32, i32>(&ins[0], &mut outs[0], $int),
                    DType::I8 => map1::<i8, i8>(&ins[0], &mut outs[0], $int),
                    d => return Err(no_kernel(op, d)),
                }
                Ok(())
            },
            samples: || {
                let mut all = sample(Op::new(&$op), 0.1, 1.0);
                all.extend(sample(Op::new(&$op), -1.0, -0.1));
                all.push(Sample { op: Op::new(&$op), inputs: vec![SampleInput::i64_in([6], -5, 5)] });
                all
            },
        };
        impl Builder {
            #[doc = $doc]
            pub fn $method(&mut self, x: ValueId) -> Result<ValueId, OpError> {
                self.emit1(Op::new(&$op), &[x])
            }
        }
    };
}

/// Gradient of a function of one operand, from a closure `(builder, x, y, dy) -> dx`.
macro_rules! chain {
    ($f:expr) => {
        Gradient::Rule(|cx: &mut GradCx<'_>| {
            let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
            let f: fn(&mut Builder, ValueId, ValueId, ValueId) -> Result<ValueId, OpError> = $f;
            Ok(vec![Some(f(cx.b, cx.inputs[0], cx.outputs[0], dy)?)])
        })
    };
}

signed!(NEG neg "Neg": "Negation.", |x| -x, |x| x.wrapping_neg(), linear_factors,
    grad chain!(|b, _, _, dy| b.neg(dy)));
signed!(ABS abs "Abs": "Absolute value.", |x| x.abs(), |x| x.wrapping_abs(), factors, grad chain!(|b, x, _, dy| {
    let s = b.sign(x)?;
    b.mul(dy, s)
}));
signed!(SIGN sign "Sign": "-1, 0 or 1.", |x| if x == 0.0 || x.is_nan() { x } else { x.signum() }, |x| x.signum(), factors,
    grad Gradient::None);

unary!(EXP exp "Exp": "`e^x`.", flops 10.0, Real::fast_exp, factors,
    grad chain!(|b, _, y, dy| b.mul(dy, y)), in -1.0..1.0);
unary!(LOG log "Log": "Natural logarithm.", flops 10.0, |x| x.ln(), factors,
    grad chain!(|b, x, _, dy| b.div(dy, x)), in 0.5..2.0);
unary!(SQRT sqrt "Sqrt": "Square root.", flops 4.0, |x| x.sqrt(), factors, grad chain!(|b, _, y, dy| {
    let half = b.scalar_like(y, 0.5)?;
    let d = b.div(dy, y)?;
    b.mul(d, half)
}), in 0.5..2.0);
unary!(RECIPROCAL reciprocal "Reciprocal": "`1 / x`.", flops 4.0, |x| 1.0 / x, factors, grad chain!(|b, _, y, dy| {
    let d = b.mul(dy, y)?;
    let d = b.mul(d, y)?;
    b.neg(d)
}), in 0.5..2.0);
unary!(ERF erf "Erf": "Error function.", flops 20.0, Real::erf, factors, grad chain!(|b, x, _, dy| {
    let scale = b.scalar_like(x, 2.0 / PI.sqrt())?;
    let square = b.mul(x, x)?;
    let minus = b.neg(square)?;
    let density = b.exp(minus)?;
    let d = b.mul(dy, density)?;
    b.mul(d, scale)
}), in -1.0..1.0);
unary!(SIN sin "Sin": "Sine.", flops 10.0, |x| x.sin(), factors, grad chain!(|b, x, _, dy| {
    let c = b.cos(x)?;
    b.mul(dy, c)
}), in -3.0..3.0);
unary!(COS cos "Cos": "Cosine.", flops 10.0, |x| x.cos(), factors, grad chain!(|b, x, _, dy| {
    let s = b.sin(x)?;
    let d = b.mul(dy, s)?;
    b.neg(d)
}), in -3.0..3.0);
unary!(FLOOR floor "Floor": "Largest integer not above.", flops 1.0, |x| x.floor(), factors,
    grad Gradient::None, in -3.0..3.0);
unary!(CEIL ceil "Ceil": "Smallest integer not below.", flops 1.0, |x| x.ceil(), factors,
    grad Gradient::None, in -3.0..3.0);
unary!(ROUND round "Round": "Nearest integer, ties to even.", flops 1.0, |x| x.round_ties_even(), factors,
    grad Gradient::None, in -3.0..3.0);
unary!(TANH tanh "Tanh": "Hyperbolic tangent.", flops 15.0, Real::fast_tanh, factors,
    grad chain!(|b, _, y, dy| b.emit1(Op::new(&TANH_GRAD), &[y, dy])), in -2.0..2.0);
unary!(SIGMOID sigmoid "Sigmoid": "`1 / (1 + e^-x)`.", flops 12.0, sigmoid, factors,
    grad chain!(|b, _, y, dy| b.emit1(Op::new(&SIGMOID_GRAD), &[y, dy])), in -2.0..2.0);
unary!(RELU relu "Relu": "`max(x, 0)`.", flops 1.0, |x| if x > 0.0 || x.is_nan() { x } else { 0.0 }, factors,
    grad chain!(|b, _, y, dy| b.emit1(Op::new(&RELU_GRAD), &[y, dy])), in 0.1..1.0,
    onnx [OnnxRule { domain: "", op: "LeakyRelu", since: 6, lower: import_leaky_relu },
        OnnxRule { domain: "", op: "PRelu", since: 7, lower: import_p_relu },
        OnnxRule { domain: "", op: "Elu", since: 6, lower: import_elu },
        OnnxRule { domain: "", op: "HardSigmoid", since: 6, lower: import_hard_sigmoid },
        OnnxRule { domain: "", op: "HardSwish", since: 14, lower: import_hard_swish }]);
unary!(SILU silu "Silu": "`x * sigmoid(x)`, also named Swish.", flops 13.0, |x| x * sigmoid(x), factors,
    grad chain!(|b, x, _, dy| b.emit1(Op::new(&SILU_GRAD), &[x, dy])), in -2.0..2.0,
    onnx [OnnxRule { domain: "", op: "Swish", since: 24, lower: import_swish },
        OnnxRule { domain: "com.microsoft", op: "QuickGelu", since: 1, lower: import_quick_gelu }]);
unary!(SOFTPLUS softplus "Softplus": "`log(1 + e^x)`.", flops 20.0,
    |x| if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }, factors, grad chain!(|b, x, _, dy| {
    let s = b.sigmoid(x)?;
    b.mul(dy, s)
}), in -2.0..2.0);

/// The fused gradient of a function: `(x or y, dy) -> dx`, linear in `dy`.
macro_rules! slope {
    ($op:ident $name:literal: $doc:literal, of $forward:literal, flops $flops:literal, $f:expr) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[],
            infer: infer_slope,
            factors: slope_factors,
            work: |_, i, o| Work::memory(i, o, $flops),
            identity: never,
            gradient: Gradient::Internal($forward),
            kernel: |op, ins, outs| {
                match ins[0].dtype() {
                    DType::F32 => map2::<f32, f32, f32>(&ins[0], &ins[1], &mut outs[0], $f),
                    DType::F64 => map2::<f64, f64, f64>(&ins[0], &ins[1], &mut outs[0], $f),
                    d => return Err(no_kernel(op, d)),
                }
                Ok(())
            },
            samples: || {
                vec![Sample { op: Op::new(&$op), inputs: vec![SampleInput::f32([4, 6]), SampleInput::f32([4, 6])] }]
            },
        };
    };
}

slope!(TANH_GRAD "TanhGrad": "Gradient of Tanh, from its result.", of "backward of Tanh", flops 3.0,
    |y, dy| dy * (1.0 - y * y));
slope!(SIGMOID_GRAD "SigmoidGrad": "Gradient of Sigmoid, from its result.", of "backward of Sigmoid", flops 3.0,
    |y, dy| dy * y * (1.0 - y));
slope!(RELU_GRAD "ReluGrad": "Gradient of Relu, from its result.", of "backward of Relu", flops 1.0,
    |y, dy| if y > 0.0 { dy } else { 0.0 });
slope!(SILU_GRAD "SiluGrad": "Gradient of Silu.", of "backward of Silu", flops 16.0, |x, dy| dy * silu_slope(x));

fn gelu_op(def: &'static OpDef, tanh: bool) -> Op {
    Op::new(def).with("approximate", crate::op::Attr::Str(if tanh { "tanh" } else { "none" }.into()))
}

fn is_tanh(op: &Op) -> bool {
    matches!(op.attr("approximate"), Some(crate::op::Attr::Str(s)) if s == "tanh")
}

fn gelu_work(op: &Op, inputs: &[Type], outputs: &[Type], flops: f64) -> Work {
    Work { variant: if is_tanh(op) { "tanh" } else { "" }, ..Work::memory(inputs, outputs, flops) }
}

/// Gaussian error linear unit.
pub static GELU: OpDef = OpDef {
    name: "Gelu",
    doc: "Gaussian error linear unit, exact or with the tanh approximation.",
    attrs: &[("approximate", AttrKind::Str)],
    onnx: &[
        OnnxRule { domain: "", op: "Gelu", since: 20, lower: import_gelu },
        OnnxRule { domain: "com.microsoft", op: "Gelu", since: 1, lower: import_gelu },
        OnnxRule { domain: "com.microsoft", op: "BiasGelu", since: 1, lower: import_bias_gelu },
        OnnxRule { domain: "com.microsoft", op: "FastGelu", since: 1, lower: import_fast_gelu },
    ],
    infer: infer_float,
    factors,
    work: |op, i, o| gelu_work(op, i, o, 20.0),
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let op = gelu_op(&GELU_GRAD, is_tanh(cx.op));
        Ok(vec![Some(cx.b.emit1(op, &[cx.inputs[0], dy])?)])
    }),
    kernel: |op: &Op, ins: &[View<'_>], outs: &mut [ViewMut<'_>]| -> Result<(), KernelError> {
        let tanh = is_tanh(op);
        match ins[0].dtype() {
            DType::F32 => map1::<f32, f32>(&ins[0], &mut outs[0], |x| gelu(x, tanh)),
            DType::F64 => map1::<f64, f64>(&ins[0], &mut outs[0], |x| gelu(x, tanh)),
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || [true, false].into_iter().flat_map(|t| sample(gelu_op(&GELU, t), -2.0, 2.0)).collect(),
};

/// Gradient of Gelu.
pub static GELU_GRAD: OpDef = OpDef {
    name: "GeluGrad",
    doc: "Gradient of Gelu.",
    attrs: &[("approximate", AttrKind::Str)],
    onnx: &[],
    infer: infer_slope,
    factors: slope_factors,
    work: |op, i, o| gelu_work(op, i, o, 30.0),
    identity: never,
    gradient: Gradient::Internal("backward of Gelu"),
    kernel: |op, ins, outs| {
        let tanh = is_tanh(op);
        match ins[0].dtype() {
            DType::F32 => map2::<f32, f32, f32>(&ins[0], &ins[1], &mut outs[0], |x, dy| dy * gelu_slope(x, tanh)),
            DType::F64 => map2::<f64, f64, f64>(&ins[0], &ins[1], &mut outs[0], |x, dy| dy * gelu_slope(x, tanh)),
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || {
        let of =
            |t| Sample { op: gelu_op(&GELU_GRAD, t), inputs: vec![SampleInput::f32([4, 6]), SampleInput::f32([4, 6])] };
        vec![of(true), of(false)]
    },
};

impl Builder {
    /// Gaussian error linear unit, exact or with the tanh approximation.
    pub fn gelu(&mut self, x: ValueId, tanh: bool) -> Result<ValueId, OpError> {
        self.emit1(gelu_op(&GELU, tanh), &[x])
    }
    /// A scalar constant of the element type of a value.
    pub fn scalar_like(&mut self, v: ValueId, x: f64) -> Result<ValueId, OpError> {
        let dtype = self.ty(v).dtype;
        Ok(self.scalar(dtype, x))
    }
}

fn import_gelu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let tanh = match cx.attr_str("approximate").unwrap_or("none") {
        "none" => false,
        "tanh" => true,
        other => return Err(OpError(format!("approximate `{other}` is none of none, tanh"))),
    };
    let x = cx.input(0)?;
    Ok(vec![cx.b.gelu(x, tanh)?])
}

fn with_bias(cx: &mut ImportCx<'_>) -> Result<ValueId, OpError> {
    let x = cx.input(0)?;
    match cx.try_input(1) {
        Some(bias) => cx.b.add(x, bias),
        None => Ok(x),
    }
}

fn import_bias_gelu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = with_bias(cx)?;
    Ok(vec![cx.b.gelu(x, false)?])
}

fn import_fast_gelu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = with_bias(cx)?;
    Ok(vec![cx.b.gelu(x, true)?])
}

/// `x * sigmoid(alpha * x)`.
fn swish(cx: &mut ImportCx<'_>, alpha: f64) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    if alpha == 1.0 {
        return Ok(vec![cx.b.silu(x)?]);
    }
    let a = cx.b.scalar_like(x, alpha)?;
    let ax = cx.b.mul(x, a)?;
    let s = cx.b.sigmoid(ax)?;
    Ok(vec![cx.b.mul(x, s)?])
}

fn import_swish(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let alpha = cx.attr_float("alpha", 1.0);
    swish(cx, alpha.into())
}

fn import_quick_gelu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let alpha = cx.attr_float("alpha", 1.702);
    swish(cx, alpha.into())
}

/// `x` where it is positive, else `f(x)`.
fn positive_or(b: &mut Builder, x: ValueId, other: ValueId) -> Result<ValueId, OpError> {
    let zero = b.scalar_like(x, 0.0)?;
    let positive = b.greater(x, zero)?;
    b.where_(positive, x, other)
}

fn import_leaky_relu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let alpha = cx.attr_float("alpha", 0.01);
    let alpha = cx.b.scalar_like(x, alpha.into())?;
    let scaled = cx.b.mul(x, alpha)?;
    Ok(vec![positive_or(cx.b, x, scaled)?])
}

fn import_p_relu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, slope) = (cx.input(0)?, cx.input(1)?);
    let scaled = cx.b.mul(x, slope)?;
    Ok(vec![positive_or(cx.b, x, scaled)?])
}

fn import_elu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let alpha = cx.attr_float("alpha", 1.0);
    let (alpha, one, zero) = (cx.b.scalar_like(x, alpha.into())?, cx.b.scalar_like(x, 1.0)?, cx.b.scalar_like(x, 0.0)?);
    // Powers of what is positive are not used, but would make gradients infinite.
    let positive = cx.b.greater(x, zero)?;
    let negative = cx.b.where_(positive, zero, x)?;
    let power = cx.b.exp(negative)?;
    let below = cx.b.sub(power, one)?;
    let below = cx.b.mul(below, alpha)?;
    Ok(vec![positive_or(cx.b, x, below)?])
}

/// `clip(alpha x + beta, 0, 1)`
fn hard_sigmoid(b: &mut Builder, x: ValueId, alpha: f64, beta: f64) -> Result<ValueId, OpError> {
    let (alpha, beta) = (b.scalar_like(x, alpha)?, b.scalar_like(x, beta)?);
    let (zero, one) = (b.scalar_like(x, 0.0)?, b.scalar_like(x, 1.0)?);
    let y = b.mul(x, alpha)?;
    let y = b.add(y, beta)?;
    let y = b.max(y, zero)?;
    b.min(y, one)
}

fn import_hard_sigmoid(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let (alpha, beta) = (cx.attr_float("alpha", 0.2), cx.attr_float("beta", 0.5));
    Ok(vec![hard_sigmoid(cx.b, x, alpha.into(), beta.into())?])
}

fn import_hard_swish(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let gate = hard_sigmoid(cx.b, x, 1.0 / 6.0, 0.5)?;
    Ok(vec![cx.b.mul(x, gate)?])
}
