//! Arithmetic of two operands with numpy broadcasting. Both operands have one element type, which is the result's.
//!
//! Integer arithmetic wraps; integer division truncates towards zero, as in ONNX. `Max` and `Min` pass NaN on.
//!
//! Read next: [`super::compare`].

use super::support::{broadcast_dims, map2, never, no_kernel, operands};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View};

/// Result type of an operator on two numbers.
fn infer(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [a, b] = operands::<2>(inputs)?;
    if a.dtype != b.dtype || a.dtype == DType::Bool {
        return Err(OpError(format!("takes two numbers of one element type, not {a} and {b}")));
    }
    Ok(vec![Type::new(a.dtype, broadcast_dims(&a.dims, &b.dims)?)])
}

/// Instances that broadcast in every way.
pub(super) fn samples(op: Op, low: f64, high: f64) -> Vec<Sample> {
    let of = |a: &[usize], b: &[usize]| Sample {
        op: op.clone(),
        inputs: vec![SampleInput::f32_in(a, low, high), SampleInput::f32_in(b, low, high)],
    };
    vec![
        of(&[4, 6], &[4, 6]),
        of(&[2, 4, 6], &[6]),
        of(&[6], &[2, 4, 6]),
        of(&[4, 6], &[]),
        of(&[2, 1, 6], &[4, 1]),
        of(&[2, 4, 6], &[2, 1, 6]),
        of(&[], &[]),
        of(&[0, 3], &[3]),
        Sample { op: op.clone(), inputs: vec![SampleInput::i64_in([6], 1, 9), SampleInput::i64_in([2, 1], 1, 4)] },
    ]
}

/// Gradient rule from a closure `(cx, dy, operand index) -> gradient of that operand before undoing broadcasting`.
macro_rules! grad2 {
    ($f:expr) => {
        Gradient::Rule(|cx: &mut GradCx<'_>| {
            let Some(dy) = cx.grads[0] else { return Ok(vec![None, None]) };
            let f: fn(&mut GradCx<'_>, ValueId, usize) -> Result<ValueId, OpError> = $f;
            let mut out = vec![None, None];
            for (i, slot) in out.iter_mut().enumerate() {
                if cx.wanted[i] {
                    let g = f(cx, dy, i)?;
                    let dims = cx.b.dims(cx.inputs[i]);
                    *slot = Some(cx.b.sum_to(g, &dims)?);
                }
            }
            Ok(out)
        })
    };
}

/// An operator on two numbers: name, documentation, functions of floats and of integers, linear operand sets, gradient,
/// range of samples, import rules.
macro_rules! binary {
    ($op:ident $method:ident $name:literal: $doc:literal, float $float:expr, int $int:expr, linear [$($set:expr),*],
     grad $grad:expr, in $low:literal..$high:literal, onnx [$($rule:expr),*]) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[$($rule),*],
            infer,
            factors: |_, i, o| FactorRule::elementwise(i, o)$(.linear_in($set))*,
            work: |_, i, o| Work::memory(i, o, 1.0),
            identity: never,
            gradient: $grad,
            kernel: |op, ins, outs| {
                macro_rules! go {
                    ($t:ty, $f:expr) => { map2::<$t, $t, $t>(&ins[0], &ins[1], &mut outs[0], $f) };
                }
                match ins[0].dtype() {
                    DType::F32 => go!(f32, $float),
                    DType::F64 => go!(f64, $float),
                    DType::I64 => go!(i64, $int),
                    DType::I32 => go!(i32, $int),
                    DType::I8 => go!(i8, $int),
                    DType::U8 => go!(u8, $int),
                    d => return Err(no_kernel(op, d)),
                }
                Ok(())
            },
            samples: || samples(Op::new(&$op), $low, $high),
        };
        impl Builder {
            #[doc = $doc]
            pub fn $method(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
                self.emit1(Op::new(&$op), &[x, y])
            }
        }
    };
}

/// An import rule from a builder method of two operands.
macro_rules! rule2 {
    ($name:literal, $since:literal, $method:ident) => {
        OnnxRule {
            domain: "",
            op: $name,
            since: $since,
            lower: |cx| {
                let (x, y) = (cx.input(0)?, cx.input(1)?);
                Ok(vec![cx.b.$method(x, y)?])
            },
        }
    };
}
pub(super) use rule2;

binary!(ADD add "Add": "Addition.", float |x, y| x + y, int |x, y| x.wrapping_add(y), linear [[0, 1]],
    grad grad2!(|_, dy, _| Ok(dy)), in -1.0..1.0,
    onnx [rule2!("Add", 7, add), OnnxRule { domain: "", op: "Sum", since: 8, lower: |cx| chain(cx, Builder::add) }]);
binary!(SUB sub "Sub": "Subtraction.", float |x, y| x - y, int |x, y| x.wrapping_sub(y), linear [[0, 1]],
    grad grad2!(|cx, dy, i| if i == 0 { Ok(dy) } else { cx.b.neg(dy) }), in -1.0..1.0, onnx [rule2!("Sub", 7, sub)]);
binary!(MUL mul "Mul": "Multiplication.", float |x, y| x * y, int |x, y| x.wrapping_mul(y), linear [[0], [1]],
    grad grad2!(|cx, dy, i| { let other = cx.inputs[1 - i]; cx.b.mul(dy, other) }), in -1.0..1.0,
    onnx [rule2!("Mul", 7, mul)]);
binary!(MAX max "Max": "The larger; the gradient of ties goes to both evenly.",
    float |x, y| if x > y || x.is_nan() { x } else { y }, int |x, y| x.max(y), linear [],
    grad grad2!(|cx, dy, i| extremum_grad(cx, dy, i)), in -1.0..1.0,
    onnx [OnnxRule { domain: "", op: "Max", since: 8, lower: |cx| chain(cx, Builder::max) }]);
binary!(MIN min "Min": "The smaller; the gradient of ties goes to both evenly.",
    float |x, y| if x < y || x.is_nan() { x } else { y }, int |x, y| x.min(y), linear [],
    grad grad2!(|cx, dy, i| extremum_grad(cx, dy, i)), in -1.0..1.0,
    onnx [OnnxRule { domain: "", op: "Min", since: 8, lower: |cx| chain(cx, Builder::min) },
        OnnxRule { domain: "", op: "Clip", since: 6, lower: import_clip },
        OnnxRule { domain: "", op: "Mean", since: 8, lower: import_mean }]);

/// Gradient of Max and Min for operand `i`: where the result is that operand, half where it is both.
fn extremum_grad(cx: &mut GradCx<'_>, dy: ValueId, i: usize) -> Result<ValueId, OpError> {
    let (this, other) = (cx.inputs[i], cx.inputs[1 - i]);
    let half = cx.b.scalar_like(dy, 0.5)?;
    let zero = cx.b.scalar_like(dy, 0.0)?;
    let tie = cx.b.equal(this, other)?;
    let shared = cx.b.mul(dy, half)?;
    let chosen = cx.b.equal(this, cx.outputs[0])?;
    let whole = cx.b.where_(tie, shared, dy)?;
    cx.b.where_(chosen, whole, zero)
}

/// Division.
pub static DIV: OpDef = OpDef {
    name: "Div",
    doc: "Division; of integers truncating towards zero.",
    attrs: &[],
    onnx: &[rule2!("Div", 7, div)],
    infer,
    // Truncation is not linear.
    factors: |_, i, o| {
        let rule = FactorRule::elementwise(i, o);
        if o[0].dtype.is_float() { rule.linear_in([0]) } else { rule }
    },
    work: |_, i, o| Work::memory(i, o, 4.0),
    identity: never,
    gradient: grad2!(|cx, dy, i| {
        let y = cx.inputs[1];
        let d = cx.b.div(dy, y)?;
        if i == 0 {
            return Ok(d);
        }
        let d = cx.b.mul(d, cx.outputs[0])?;
        cx.b.neg(d)
    }),
    kernel: |op, ins, outs| {
        let (a, b, out) = (&ins[0], &ins[1], &mut outs[0]);
        match a.dtype() {
            DType::F32 => map2::<f32, f32, f32>(a, b, out, |x, y| x / y),
            DType::F64 => map2::<f64, f64, f64>(a, b, out, |x, y| x / y),
            DType::I64 => checked(op, b, 0i64, || map2::<i64, i64, i64>(a, b, out, |x, y| x.wrapping_div(y)))?,
            DType::I32 => checked(op, b, 0i32, || map2::<i32, i32, i32>(a, b, out, |x, y| x.wrapping_div(y)))?,
            DType::I8 => checked(op, b, 0i8, || map2::<i8, i8, i8>(a, b, out, |x, y| x.wrapping_div(y)))?,
            DType::U8 => checked(op, b, 0u8, || map2::<u8, u8, u8>(a, b, out, |x, y| x / y))?,
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || samples(Op::new(&DIV), 0.5, 2.0),
};

/// Runs `f` unless an element of the divisor is zero.
fn checked<T: bytemuck::Pod + PartialEq>(
    op: &Op,
    divisor: &View<'_>,
    zero: T,
    f: impl FnOnce(),
) -> Result<(), KernelError> {
    if divisor.as_slice::<T>().contains(&zero) {
        return Err(KernelError(format!("{}: integer division by zero", op.name())));
    }
    f();
    Ok(())
}

/// Remainder.
pub static MOD: OpDef = OpDef {
    name: "Mod",
    doc: "Remainder with the sign of the divisor, or with `fmod` of the dividend.",
    attrs: &[("fmod", AttrKind::Bool)],
    onnx: &[OnnxRule {
        domain: "",
        op: "Mod",
        since: 10,
        lower: |cx| {
            let op = Op::new(&MOD).flag("fmod", cx.attr_int("fmod", 0) != 0);
            let (x, y) = (cx.input(0)?, cx.input(1)?);
            Ok(vec![cx.emit(op, &[x, y])?])
        },
    }],
    infer,
    factors: |_, i, o| FactorRule::elementwise(i, o),
    work: |_, i, o| Work::memory(i, o, 4.0),
    identity: never,
    // x = q y + r with q constant almost everywhere: dr/dx = 1, dr/dy = -q = -(x - r) / y.
    gradient: grad2!(|cx, dy, i| {
        if i == 0 {
            return Ok(dy);
        }
        let whole = cx.b.sub(cx.outputs[0], cx.inputs[0])?;
        let q = cx.b.div(whole, cx.inputs[1])?;
        cx.b.mul(dy, q)
    }),
    kernel: |op, ins, outs| {
        let (a, b, out) = (&ins[0], &ins[1], &mut outs[0]);
        let fmod = op.get_flag("fmod");
        macro_rules! int {
            ($t:ty) => {
                checked(op, b, 0 as $t, || {
                    map2::<$t, $t, $t>(a, b, out, |x, y| {
                        let r = x.wrapping_rem(y);
                        if !fmod && r != 0 && (r < 0) != (y < 0) { r.wrapping_add(y) } else { r }
                    })
                })?
            };
        }
        macro_rules! float {
            ($t:ty) => {
                map2::<$t, $t, $t>(a, b, out, |x, y| {
                    let r = x % y;
                    if !fmod && r != 0.0 && (r < 0.0) != (y < 0.0) { r + y } else { r }
                })
            };
        }
        match a.dtype() {
            DType::F32 => float!(f32),
            DType::F64 => float!(f64),
            DType::I64 => int!(i64),
            DType::I32 => int!(i32),
            DType::I8 => int!(i8),
            DType::U8 => checked(op, b, 0u8, || map2::<u8, u8, u8>(a, b, out, |x, y| x % y))?,
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || {
        let of = |fmod, input: fn(&[usize]) -> SampleInput, divisor: fn(&[usize]) -> SampleInput| Sample {
            op: Op::new(&MOD).flag("fmod", fmod),
            inputs: vec![input(&[4, 6]), divisor(&[6])],
        };
        let mut all = Vec::new();
        for fmod in [false, true] {
            all.push(of(fmod, |d| SampleInput::i64_in(d, -9, 9), |d| SampleInput::i64_in(d, 1, 5)));
            all.push(of(fmod, |d| SampleInput::i64_in(d, -9, 9), |d| SampleInput::i64_in(d, -5, 0)));
            all.push(of(fmod, |d| SampleInput::f32_in(d, -9.0, 9.0), |d| SampleInput::f32_in(d, 1.0, 2.0)));
        }
        all
    },
};

/// Power.
pub static POW: OpDef = OpDef {
    name: "Pow",
    doc: "Power.",
    attrs: &[],
    onnx: &[OnnxRule {
        domain: "",
        op: "Pow",
        since: 7,
        lower: |cx| {
            let (x, y) = (cx.input(0)?, cx.input(1)?);
            let dtype = cx.b.ty(x).dtype;
            // The exponent may have another element type (since opset 12); the result has the base's. A float power of
            // an integer is computed in f64, which holds integers up to 2^53, and truncated.
            if cx.b.ty(y).dtype.is_float() && !dtype.is_float() {
                let (x, y) = (cx.b.cast(x, DType::F64)?, cx.b.cast(y, DType::F64)?);
                let p = cx.b.pow(x, y)?;
                return Ok(vec![cx.b.cast(p, dtype)?]);
            }
            let y = cx.b.cast(y, dtype)?;
            Ok(vec![cx.b.pow(x, y)?])
        },
    }],
    infer,
    factors: |_, i, o| FactorRule::elementwise(i, o),
    work: |_, i, o| Work::memory(i, o, 20.0),
    identity: never,
    gradient: grad2!(|cx, dy, i| {
        let (x, y) = (cx.inputs[0], cx.inputs[1]);
        if i == 0 {
            let one = cx.b.scalar_like(y, 1.0)?;
            let lower = cx.b.sub(y, one)?;
            let p = cx.b.pow(x, lower)?;
            let mut p = cx.b.mul(y, p)?;
            // x^0 is constant, also at 0, where x^-1 is infinite.
            if zeros(cx.b, y) {
                let zero = cx.b.scalar_like(y, 0.0)?;
                let flat = cx.b.equal(y, zero)?;
                p = cx.b.where_(flat, zero, p)?;
            }
            return cx.b.mul(dy, p);
        }
        let l = cx.b.log(x)?;
        let mut p = cx.b.mul(cx.outputs[0], l)?;
        // 0^y stays 0, or 1, as y grows; its logarithm is infinite.
        if zeros(cx.b, x) {
            let zero = cx.b.scalar_like(x, 0.0)?;
            let flat = cx.b.equal(x, zero)?;
            p = cx.b.where_(flat, zero, p)?;
        }
        cx.b.mul(dy, p)
    }),
    kernel: |op, ins, outs| {
        let (a, b, out) = (&ins[0], &ins[1], &mut outs[0]);
        macro_rules! int {
            ($t:ty) => {{
                if b.as_slice::<$t>().iter().any(|&y| y < 0) {
                    return Err(KernelError("Pow: a negative power of an integer is no integer".into()));
                }
                map2::<$t, $t, $t>(a, b, out, |x, y| x.wrapping_pow(u32::try_from(y).unwrap_or(u32::MAX)))
            }};
        }
        match a.dtype() {
            DType::F32 => map2::<f32, f32, f32>(a, b, out, f32::powf),
            DType::F64 => map2::<f64, f64, f64>(a, b, out, f64::powf),
            DType::I64 => int!(i64),
            DType::I32 => int!(i32),
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || samples(Op::new(&POW), 0.5, 2.0),
};

/// Whether a value may hold zeros.
fn zeros(b: &Builder, v: ValueId) -> bool {
    b.graph().constant(v).is_none_or(|t| crate::convert::to_f64(t.dtype(), t.bytes()).contains(&0.0))
}

impl Builder {
    /// Division; of integers truncating towards zero.
    pub fn div(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&DIV), &[x, y])
    }
    /// Power. Constant exponents 1, 2, 3, 0.5, -0.5 and -1 of floats become multiplications and roots.
    pub fn pow(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        let plain = self.ty(x).dtype.is_float() && self.graph().constant(x).is_none() && self.ty(y).numel() == 1;
        let fits = broadcast_dims(&self.dims(x), &self.dims(y))? == self.dims(x);
        if let (true, Some(t)) = (plain && fits, self.graph().constant(y).cloned()) {
            let e = crate::convert::to_f64(t.dtype(), t.bytes())[0];
            if e == 1.0 {
                return Ok(x);
            } else if e == 2.0 {
                return self.mul(x, x);
            } else if e == 3.0 {
                let square = self.mul(x, x)?;
                return self.mul(square, x);
            } else if e == 0.5 {
                return self.sqrt(x);
            } else if e == -0.5 {
                let root = self.sqrt(x)?;
                return self.reciprocal(root);
            } else if e == -1.0 {
                return self.reciprocal(x);
            }
        }
        self.emit1(Op::new(&POW), &[x, y])
    }
}

/// An ONNX operator of any number of operands as a chain.
fn chain(
    cx: &mut ImportCx<'_>,
    f: fn(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>,
) -> Result<Vec<ValueId>, OpError> {
    let mut acc = cx.input(0)?;
    for i in 1..cx.inputs.len() {
        let x = cx.input(i)?;
        acc = f(cx.b, acc, x)?;
    }
    Ok(vec![acc])
}

/// Bounds are attributes up to opset 10 and optional operands since. At a bound the gradient is the operand's, as in
/// PyTorch, where `Max` and `Min` would share it.
fn import_clip(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let mut x = cx.input(0)?;
    for (i, name, beyond) in [(1, "min", Builder::less as fn(&mut _, _, _) -> _), (2, "max", Builder::greater)] {
        let bound = match (cx.try_input(i), cx.try_attr_float(name)) {
            (Some(bound), _) => bound,
            (None, Some(bound)) => cx.b.scalar_like(x, bound.into())?,
            (None, None) => continue,
        };
        let beyond: ValueId = beyond(cx.b, x, bound)?;
        x = cx.b.where_(beyond, bound, x)?;
    }
    Ok(vec![x])
}

fn import_mean(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let sum = chain(cx, Builder::add)?[0];
    let n = cx.b.scalar_like(sum, cx.inputs.len() as f64)?;
    Ok(vec![cx.b.div(sum, n)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn run(op: Op, a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
        let out = op.infer(&[a.ty().clone(), b.ty().clone()]).map_err(|e| e.0)?;
        let mut r = crate::interp::apply(&op, &[a, b], &out).map_err(|e| e.0)?;
        Ok(r.remove(0))
    }

    #[test]
    fn integer_division_truncates_and_remainder_follows_the_divisor() {
        let (a, b) = (Tensor::i64([4], &[7, -7, 7, -7]), Tensor::i64([4], &[2, 2, -2, -2]));
        assert_eq!(run(Op::new(&DIV), &a, &b).unwrap().as_slice::<i64>(), [3, -3, -3, 3]);
        assert_eq!(run(Op::new(&MOD), &a, &b).unwrap().as_slice::<i64>(), [1, 1, -1, -1]);
        let fmod = Op::new(&MOD).flag("fmod", true);
        assert_eq!(run(fmod, &a, &b).unwrap().as_slice::<i64>(), [1, -1, 1, -1]);
        assert!(run(Op::new(&DIV), &a, &Tensor::i64([], &[0])).unwrap_err().contains("by zero"));
    }

    /// Where a power does not change, its gradient is 0, not 0 times infinity.
    #[test]
    fn powers_of_zero_have_gradients() {
        let mut b = Builder::new("power");
        let ty = Type::new(DType::F32, [2]);
        let read = |b: &mut Builder, name: &str| {
            let kind = crate::graph::StateKind::Parameter;
            let s = b.state(name, kind, ty.clone(), crate::graph::Init::Zeros, None);
            b.graph().state(s).read
        };
        let (x, y) = (read(&mut b, "x"), read(&mut b, "y"));
        let p = b.pow(x, y).unwrap();
        let loss = b.reduce_sum(p, &[0], false).unwrap();
        b.output("loss", loss, None);
        let options = crate::train::TrainOptions { gradient_outputs: true, ..Default::default() };
        let step = crate::train::train_step(&b.finish(), &options).unwrap();
        let values = [Tensor::f32([2], &[0.0, 2.0]), Tensor::f32([2], &[0.0, 3.0])].map(std::sync::Arc::new);
        let zeros = |v| std::sync::Arc::new(Tensor::zeros(step.ty(v).clone()));
        let states: Vec<_> = (step.states.iter().enumerate())
            .map(|(i, s)| values.get(i).cloned().unwrap_or_else(|| zeros(s.read)))
            .collect();
        let out = crate::interp::run(&step, &[], &states).unwrap().outputs;
        assert_eq!(out[1].as_slice::<f32>(), [0.0, 12.0]);
        assert_eq!(out[2].as_slice::<f32>()[0], 0.0);
    }

    #[test]
    fn nan_passes_through_max() {
        let (a, b) = (Tensor::f32([2], &[f32::NAN, 1.0]), Tensor::f32([2], &[1.0, f32::NAN]));
        assert!(run(Op::new(&MAX), &a, &b).unwrap().as_slice::<f32>().iter().all(|x| x.is_nan()));
        assert!(run(Op::new(&MIN), &a, &b).unwrap().as_slice::<f32>().iter().all(|x| x.is_nan()));
    }

    #[test]
    fn broadcasting_is_numpys() {
        let (a, b) = (Tensor::f32([2, 1], &[1.0, 2.0]), Tensor::f32([3], &[10.0, 20.0, 30.0]));
        let y = run(Op::new(&ADD), &a, &b).unwrap();
        assert_eq!(y.dims(), [2, 3]);
        assert_eq!(y.as_slice::<f32>(), [11.0, 21.0, 31.0, 12.0, 22.0, 32.0]);
        assert!(run(Op::new(&ADD), &Tensor::f32([2], &[0.0; 2]), &b).is_err());
    }
}
