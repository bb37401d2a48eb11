//! Comparisons, logic and selection, with numpy broadcasting.
//!
//! Read next: [`super::cast`].

use super::binary::rule2;
use super::support::{Loops, broadcast_dims, broadcast_strides, map1, map2, never, no_kernel, operands, strides};
use super::unary::same_name;
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::OnnxRule;
use crate::op::{Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View, ViewMut};

fn infer_compare(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [a, b] = operands::<2>(inputs)?;
    if a.dtype != b.dtype {
        return Err(OpError(format!("takes operands of one element type, not {a} and {b}")));
    }
    Ok(vec![Type::new(DType::Bool, broadcast_dims(&a.dims, &b.dims)?)])
}

fn infer_logic(_: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [a, b] = operands::<2>(inputs)?;
    if a.dtype != DType::Bool || b.dtype != DType::Bool {
        return Err(OpError(format!("takes truth values, not {a} and {b}")));
    }
    Ok(vec![Type::new(DType::Bool, broadcast_dims(&a.dims, &b.dims)?)])
}

/// A comparison.
macro_rules! compare {
    ($op:ident $method:ident $name:literal: $doc:literal, $f:expr, since $since:literal) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[rule2!($name, $since, $method)],
            infer: infer_compare,
            factors: |_, i, o| FactorRule::elementwise(i, o),
            work: |_, i, o| Work::memory(i, o, 1.0),
            identity: never,
            gradient: Gradient::None,
            kernel: |_, ins, outs| {
                macro_rules! go {
                    ($t:ty) => {
                        map2::<$t, $t, u8>(&ins[0], &ins[1], &mut outs[0], |x, y| u8::from($f(&x, &y)))
                    };
                }
                match ins[0].dtype() {
                    DType::F32 => go!(f32),
                    DType::F64 => go!(f64),
                    DType::F16 => go!(half::f16),
                    DType::Bf16 => go!(half::bf16),
                    DType::I64 => go!(i64),
                    DType::I32 => go!(i32),
                    DType::I8 => go!(i8),
                    DType::U8 | DType::Bool => go!(u8),
                }
                Ok(())
            },
            samples: || {
                let of = |input: fn(&[usize]) -> SampleInput| Sample {
                    op: Op::new(&$op),
                    inputs: vec![input(&[2, 4, 6]), input(&[4, 1])],
                };
                vec![of(|d| SampleInput::i64_in(d, 0, 4)), of(|d| SampleInput::f32(d)), of(|d| SampleInput::bool(d))]
            },
        };
        impl Builder {
            #[doc = $doc]
            pub fn $method(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
                self.emit1(Op::new(&$op), &[x, y])
            }
        }
    };
}

compare!(EQUAL equal "Equal": "`x == y`", PartialEq::eq, since 7);
compare!(LESS less "Less": "`x < y`", PartialOrd::lt, since 7);
compare!(LESS_OR_EQUAL less_or_equal "LessOrEqual": "`x <= y`", PartialOrd::le, since 12);
compare!(GREATER greater "Greater": "`x > y`", PartialOrd::gt, since 7);
compare!(GREATER_OR_EQUAL greater_or_equal "GreaterOrEqual": "`x >= y`", PartialOrd::ge, since 12);

/// An operator on truth values.
macro_rules! logic {
    ($op:ident $method:ident $name:literal: $doc:literal, $f:expr, bitwise $bitwise:literal) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: &[],
            onnx: &[rule2!($name, 7, $method), rule2!($bitwise, 18, $method)],
            infer: infer_logic,
            factors: |_, i, o| FactorRule::elementwise(i, o),
            work: |_, i, o| Work::memory(i, o, 1.0),
            identity: never,
            gradient: Gradient::None,
            kernel: |_, ins, outs| {
                map2::<u8, u8, u8>(&ins[0], &ins[1], &mut outs[0], $f);
                Ok(())
            },
            samples: || {
                let of = |a: &[usize], b: &[usize]| Sample {
                    op: Op::new(&$op),
                    inputs: vec![SampleInput::bool(a), SampleInput::bool(b)],
                };
                vec![of(&[4, 6], &[4, 6]), of(&[2, 1, 6], &[4, 1])]
            },
        };
        impl Builder {
            #[doc = $doc]
            pub fn $method(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
                self.emit1(Op::new(&$op), &[x, y])
            }
        }
    };
}

logic!(AND and "And": "Both.", |x, y| x & y, bitwise "BitwiseAnd");
logic!(OR or "Or": "At least one.", |x, y| x | y, bitwise "BitwiseOr");
logic!(XOR xor "Xor": "Exactly one.", |x, y| x ^ y, bitwise "BitwiseXor");

/// Negation of truth values.
pub static NOT: OpDef = OpDef {
    name: "Not",
    doc: "Negation of truth values.",
    attrs: &[],
    onnx: &[same_name!(NOT, "Not", 1), same_name!(NOT, "BitwiseNot", 18)],
    infer: |_, inputs| {
        let [x] = operands::<1>(inputs)?;
        if x.dtype != DType::Bool {
            return Err(OpError(format!("takes truth values, not {x}")));
        }
        Ok(vec![x.clone()])
    },
    factors: |_, i, o| FactorRule::elementwise(i, o),
    work: |_, i, o| Work::memory(i, o, 1.0),
    identity: never,
    gradient: Gradient::None,
    kernel: |_, ins, outs| {
        map1::<u8, u8>(&ins[0], &mut outs[0], |x| u8::from(x == 0));
        Ok(())
    },
    samples: || vec![Sample { op: Op::new(&NOT), inputs: vec![SampleInput::bool([4, 6])] }],
};

/// Which elements are not a number.
pub static IS_NAN: OpDef = OpDef {
    name: "IsNaN",
    doc: "Which elements are not a number.",
    attrs: &[],
    onnx: &[same_name!(IS_NAN, "IsNaN", 9)],
    infer: |_, inputs| {
        let [x] = operands::<1>(inputs)?;
        if !x.dtype.is_float() {
            return Err(OpError(format!("takes floats, not {x}")));
        }
        Ok(vec![Type::new(DType::Bool, x.dims.clone())])
    },
    factors: |_, i, o| FactorRule::elementwise(i, o),
    work: |_, i, o| Work::memory(i, o, 1.0),
    identity: never,
    gradient: Gradient::None,
    kernel: |op, ins, outs| {
        match ins[0].dtype() {
            DType::F32 => map1::<f32, u8>(&ins[0], &mut outs[0], |x| x.is_nan().into()),
            DType::F64 => map1::<f64, u8>(&ins[0], &mut outs[0], |x| x.is_nan().into()),
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || vec![Sample { op: Op::new(&IS_NAN), inputs: vec![SampleInput::f32([4, 6])] }],
};

/// Selection.
pub static WHERE: OpDef = OpDef {
    name: "Where",
    doc: "Elements of the second operand where the first is true, of the third elsewhere.",
    attrs: &[],
    onnx: &[OnnxRule {
        domain: "",
        op: "Where",
        since: 9,
        lower: |cx| {
            let (c, x, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
            Ok(vec![cx.b.where_(c, x, y)?])
        },
    }],
    infer: |_, inputs| {
        let [c, x, y] = operands::<3>(inputs)?;
        if c.dtype != DType::Bool || x.dtype != y.dtype {
            return Err(OpError(format!("takes a bool and two operands of one element type, not {c}, {x} and {y}")));
        }
        Ok(vec![Type::new(x.dtype, broadcast_dims(&c.dims, &broadcast_dims(&x.dims, &y.dims)?)?)])
    },
    factors: |_, i, o| {
        let rule = FactorRule::elementwise(i, o);
        if o[0].dtype == DType::Bool { rule } else { rule.linear_in([1, 2]) }
    },
    work: |_, i, o| Work::memory(i, o, 1.0),
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None; 3]) };
        let zero = cx.b.scalar_like(dy, 0.0)?;
        let mut out = vec![None; 3];
        for i in [1, 2] {
            if cx.wanted[i] {
                let (x, y) = if i == 1 { (dy, zero) } else { (zero, dy) };
                let g = cx.b.where_(cx.inputs[0], x, y)?;
                let dims = cx.b.dims(cx.inputs[i]);
                out[i] = Some(cx.b.sum_to(g, &dims)?);
            }
        }
        Ok(out)
    }),
    kernel: |_, ins, outs| {
        match outs[0].dtype().size() {
            1 => select::<u8>(ins, &mut outs[0]),
            2 => select::<u16>(ins, &mut outs[0]),
            4 => select::<u32>(ins, &mut outs[0]),
            _ => select::<u64>(ins, &mut outs[0]),
        }
        Ok(())
    },
    samples: || {
        let of = |c: &[usize], x: &[usize], y: &[usize]| Sample {
            op: Op::new(&WHERE),
            inputs: vec![SampleInput::bool(c), SampleInput::f32(x), SampleInput::f32(y)],
        };
        vec![
            of(&[4, 6], &[4, 6], &[4, 6]),
            of(&[4, 1], &[2, 4, 6], &[]),
            of(&[2, 1, 6], &[], &[4, 6]),
            Sample {
                op: Op::new(&WHERE),
                inputs: vec![SampleInput::bool([6]), SampleInput::i64_in([2, 6], 0, 9), SampleInput::i64_in([], 0, 9)],
            },
        ]
    },
};

fn select<T: bytemuck::Pod>(ins: &[View<'_>], out: &mut ViewMut<'_>) {
    let dims = out.ty.dims.clone();
    let [sc, sx, sy] = [0, 1, 2].map(|i| broadcast_strides(ins[i].dims(), &dims));
    let loops = Loops::new(&dims, [&sc, &sx, &sy, &strides(&dims)]);
    let (n, [ic, ix, iy, _]) = (loops.row, loops.step);
    let (c, x, y, out) = (ins[0].data, ins[1].as_slice::<T>(), ins[2].as_slice::<T>(), out.as_mut_slice::<T>());
    loops.rows(|[rc, rx, ry, ro]| {
        let out = &mut out[ro..ro + n];
        match (ic, ix, iy) {
            (1, 1, 1) => {
                for (((o, &c), &x), &y) in out.iter_mut().zip(&c[rc..rc + n]).zip(&x[rx..rx + n]).zip(&y[ry..ry + n]) {
                    *o = if c != 0 { x } else { y };
                }
            }
            (1, 1, 0) => {
                let y = y[ry];
                for ((o, &c), &x) in out.iter_mut().zip(&c[rc..rc + n]).zip(&x[rx..rx + n]) {
                    *o = if c != 0 { x } else { y };
                }
            }
            (0, ..) if ix == 1 || iy == 1 => {
                let (src, at, step) = if c[rc] != 0 { (x, rx, ix) } else { (y, ry, iy) };
                if step == 1 { out.copy_from_slice(&src[at..at + n]) } else { out.fill(src[at]) }
            }
            _ => {
                for (i, o) in out.iter_mut().enumerate() {
                    let taken = c[rc + i * ic as usize] != 0;
                    *o = if taken { x[rx + i * ix as usize] } else { y[ry + i * iy as usize] };
                }
            }
        }
    });
}

impl Builder {
    /// `x` where `condition` is true, else `y`.
    pub fn where_(&mut self, condition: ValueId, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&WHERE), &[condition, x, y])
    }
    /// Negation of truth values.
    pub fn not(&mut self, x: ValueId) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&NOT), &[x])
    }
}
