//! Conversion between element types.
//!
//! Integers convert to integers modulo their width; floats to integers truncate and saturate; anything to bool is
//! `x != 0`. This is the one kernel that sees half floats.
//!
//! Read next: [`super::reshape`].

use half::{bf16, f16};

use super::support::operands;
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxAttr, OnnxRule};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View, ViewMut};

/// An element that converts.
trait Element: bytemuck::Pod {
    /// Integers and truth values pass through i64, floats through f64: both without loss.
    const INTEGER: bool;
    fn to_f64(self) -> f64;
    fn to_i64(self) -> i64;
    fn from_f64(x: f64) -> Self;
    fn from_i64(x: i64) -> Self;
}

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Element for $t {
            const INTEGER: bool = true;
            fn to_f64(self) -> f64 { self as f64 }
            fn to_i64(self) -> i64 { self as i64 }
            fn from_f64(x: f64) -> Self { x as $t }
            fn from_i64(x: i64) -> Self { x as $t }
        }
    )*};
}
macro_rules! float {
    ($($t:ty: $to:expr, $from:expr, $from_int:expr);*) => {$(
        impl Element for $t {
            const INTEGER: bool = false;
            fn to_f64(self) -> f64 { $to(self) }
            fn to_i64(self) -> i64 { $to(self) as i64 }
            fn from_f64(x: f64) -> Self { $from(x) }
            fn from_i64(x: i64) -> Self { $from_int(x) }
        }
    )*};
}
integer!(i64, i32, i8, u8);
float!(f64: |x| x, |x| x, |x| x as f64;
    f32: f64::from, |x| x as f32, |x| x as f32;
    f16: f16::to_f64, f16::from_f64, |x| f16::from_f64(x as f64);
    bf16: bf16::to_f64, bf16::from_f64, |x| bf16::from_f64(x as f64));

/// A truth value in a byte.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct Truth(u8);

impl Element for Truth {
    const INTEGER: bool = true;
    fn to_f64(self) -> f64 {
        f64::from(u8::from(self.0 != 0))
    }
    fn to_i64(self) -> i64 {
        i64::from(self.0 != 0)
    }
    fn from_f64(x: f64) -> Truth {
        Truth(u8::from(x != 0.0))
    }
    fn from_i64(x: i64) -> Truth {
        Truth(u8::from(x != 0))
    }
}

fn convert<S: Element, D: Element>(x: &View<'_>, out: &mut ViewMut<'_>) {
    for (o, &x) in out.as_mut_slice::<D>().iter_mut().zip(x.as_slice::<S>()) {
        *o = if S::INTEGER { D::from_i64(x.to_i64()) } else { D::from_f64(x.to_f64()) };
    }
}

fn convert_from<S: Element>(x: &View<'_>, out: &mut ViewMut<'_>) {
    match out.dtype() {
        DType::F64 => convert::<S, f64>(x, out),
        DType::F32 => convert::<S, f32>(x, out),
        DType::F16 => convert::<S, f16>(x, out),
        DType::Bf16 => convert::<S, bf16>(x, out),
        DType::I64 => convert::<S, i64>(x, out),
        DType::I32 => convert::<S, i32>(x, out),
        DType::I8 => convert::<S, i8>(x, out),
        DType::U8 => convert::<S, u8>(x, out),
        DType::Bool => convert::<S, Truth>(x, out),
    }
}

/// Conversion to another element type.
pub static CAST: OpDef = OpDef {
    name: "Cast",
    doc: "Conversion to another element type.",
    attrs: &[("to", AttrKind::DType)],
    onnx: &[
        OnnxRule { domain: "", op: "Cast", since: 6, lower: import_cast },
        OnnxRule {
            domain: "",
            op: "CastLike",
            since: 15,
            lower: |cx| {
                let (x, like) = (cx.input(0)?, cx.input(1)?);
                let to = cx.b.ty(like).dtype;
                Ok(vec![cx.b.cast(x, to)?])
            },
        },
    ],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let to = op.get_dtype("to").ok_or_else(|| OpError("needs the element type `to`".into()))?;
        Ok(vec![Type::new(to, x.dims.clone())])
    },
    factors: |_, i, o| {
        let rule = FactorRule::elementwise(i, o);
        if i[0].dtype.is_float() && o[0].dtype.is_float() { rule.linear_in([0]) } else { rule }
    },
    work: |_, i, o| Work::memory(i, o, 0.0),
    identity: |_, inputs, out| (inputs[0].dtype == out.dtype).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let from = cx.b.ty(cx.inputs[0]).dtype;
        Ok(vec![if from.is_float() { Some(cx.b.cast(dy, from)?) } else { None }])
    }),
    kernel: |_, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        match x.dtype() {
            DType::F64 => convert_from::<f64>(x, out),
            DType::F32 => convert_from::<f32>(x, out),
            DType::F16 => convert_from::<f16>(x, out),
            DType::Bf16 => convert_from::<bf16>(x, out),
            DType::I64 => convert_from::<i64>(x, out),
            DType::I32 => convert_from::<i32>(x, out),
            DType::I8 => convert_from::<i8>(x, out),
            DType::U8 => convert_from::<u8>(x, out),
            DType::Bool => convert_from::<Truth>(x, out),
        }
        Ok(())
    },
    samples: || {
        let of = |to, input: SampleInput| Sample { op: Op::new(&CAST).dtype("to", to), inputs: vec![input] };
        vec![
            of(DType::F64, SampleInput::f32([4, 6])),
            of(DType::I64, SampleInput::f32_in([4, 6], -3.0, 3.0)),
            of(DType::Bool, SampleInput::i64_in([6], -1, 2)),
            of(DType::F32, SampleInput::bool([6])),
            of(DType::I32, SampleInput::i64_in([], -5, 5)),
        ]
    },
};

impl Builder {
    /// Converts to an element type; nothing where it already has it.
    pub fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&CAST).dtype("to", to), &[x])
    }
}

/// The element type of ONNX's `TensorProto.DataType` number.
pub(crate) fn onnx_dtype(code: i64) -> Result<DType, OpError> {
    Ok(match code {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::Bf16,
        other => return Err(OpError(format!("ONNX element type {other} is not supported"))),
    })
}

fn import_cast(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let Some(OnnxAttr::Int(to)) = cx.attrs.get("to") else {
        return Err(OpError("attribute `to` is missing".into()));
    };
    let (to, x) = (onnx_dtype(*to)?, cx.input(0)?);
    Ok(vec![cx.b.cast(x, to)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn cast(t: &Tensor, to: DType) -> Tensor {
        let out = Type::new(to, t.dims());
        crate::interp::apply(&Op::new(&CAST).dtype("to", to), &[t], &[out]).unwrap().remove(0)
    }

    #[test]
    fn integers_wrap_and_floats_truncate() {
        let big = Tensor::i64([3], &[i64::MAX, (1 << 32) + 5, -1]);
        assert_eq!(cast(&big, DType::I32).as_slice::<i32>(), [-1, 5, -1]);
        assert_eq!(cast(&big, DType::Bool).bytes(), [1, 1, 1]);
        let x = Tensor::f32([4], &[1.9, -1.9, 0.25, f32::INFINITY]);
        assert_eq!(cast(&x, DType::I64).as_slice::<i64>(), [1, -1, 0, i64::MAX]);
        assert_eq!(cast(&x, DType::Bool).bytes(), [1, 1, 1, 1]);
        let h = cast(&x, DType::Bf16);
        assert_eq!(cast(&h, DType::F32).as_slice::<f32>()[2], 0.25);
    }
}
