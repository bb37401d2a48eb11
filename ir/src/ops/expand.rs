//! `Expand`: a value repeated along dims of size 1, and what lowers to it: filled tensors, tiles.
//!
//! Read next: [`super::concat`].

use super::support::{StridedCopy, broadcast_dims, broadcast_strides, copy_work, operands, strides, usizes};
use crate::builder::Builder;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput};
use crate::tensor::{Tensor, Type};

/// Repetition along dims of size 1.
pub static EXPAND: OpDef = OpDef {
    name: "Expand",
    doc: "Repeats along dims of size 1 and new leading dims.",
    attrs: &[("dims", AttrKind::Ints)],
    onnx: &[
        OnnxRule { domain: "", op: "Expand", since: 8, lower: import_expand },
        OnnxRule { domain: "", op: "Tile", since: 6, lower: import_tile },
        OnnxRule { domain: "", op: "ConstantOfShape", since: 9, lower: import_constant_of_shape },
    ],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let dims = usizes(op, "dims")?;
        if broadcast_dims(&x.dims, &dims)? != dims {
            return Err(OpError(format!("{x} cannot be expanded to sizes {dims:?}")));
        }
        Ok(vec![Type::new(x.dtype, dims)])
    },
    factors: |_, i, o| FactorRule::elementwise(i, o).linear_in([0]),
    work: copy_work,
    identity: |_, inputs, out| (inputs[0].dims == out.dims).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        Ok(vec![Some(cx.b.sum_to(dy, &dims)?)])
    }),
    kernel: |_, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        let dims = out.ty.dims.clone();
        let (from, to) = (broadcast_strides(x.dims(), &dims), strides(&dims));
        StridedCopy { width: x.dtype().size(), dims: &dims, from: (0, &from), to: (0, &to) }.run(x.data, out.data);
        Ok(())
    },
    samples: || {
        let of = |from: &[usize], to: &[usize]| Sample {
            op: Op::new(&EXPAND).ints("dims", to.iter().map(|&d| d as i64)),
            inputs: vec![SampleInput::f32(from)],
        };
        vec![
            of(&[4, 1], &[4, 6]),
            of(&[6], &[2, 4, 6]),
            of(&[2, 1, 6], &[2, 4, 6]),
            of(&[], &[4, 6]),
            of(&[1, 1], &[0, 3]),
        ]
    },
};

impl Builder {
    /// Repeats along dims of size 1 and new leading dims.
    pub fn expand(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&EXPAND).ints("dims", dims.iter().map(|&d| d as i64)), &[x])
    }
}

/// Sizes that an operand gives.
fn sizes(values: &[i64]) -> Result<Vec<usize>, OpError> {
    let one =
        |&v: &i64| usize::try_from(v).map_err(|_| OpError(format!("sizes {values:?} hold {v}, which is negative")));
    values.iter().map(one).collect()
}

fn import_expand(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, wanted) = (cx.input(0)?, cx.ints(1)?);
    // Sizes broadcast both ways in ONNX: a wanted 1 keeps the operand's size.
    let dims = broadcast_dims(&cx.b.dims(x), &sizes(&wanted)?)?;
    Ok(vec![cx.b.expand(x, &dims)?])
}

fn import_constant_of_shape(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let dims = sizes(&cx.ints(0)?)?;
    let fill = match cx.attr_tensor("value") {
        Some(t) => Tensor::from_bytes(Type::new(t.dtype(), []), t.bytes())
            .ok_or_else(|| OpError("`value` must hold one element".into()))?,
        None => Tensor::f32([], &[0.0]),
    };
    let fill = cx.b.constant(fill);
    Ok(vec![cx.b.expand(fill, &dims)?])
}

fn import_tile(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, repeats) = (cx.input(0)?, sizes(&cx.ints(1)?)?);
    let dims = cx.b.dims(x);
    if repeats.len() != dims.len() {
        return Err(OpError(format!("{} repeats for {} dims", repeats.len(), dims.len())));
    }
    // Each repeated dim as a pair (repeats, size): [d] -> [1, d] -> [r, d] -> [r * d].
    let (mut split, mut wide) = (Vec::new(), Vec::new());
    for (&d, &r) in dims.iter().zip(&repeats) {
        if r != 1 && d != 1 {
            split.push(1);
            wide.push(r);
        }
        split.push(d);
        wide.push(if d == 1 { r } else { d });
    }
    let x = cx.b.reshape(x, &split)?;
    let x = cx.b.expand(x, &wide)?;
    let all: Vec<usize> = dims.iter().zip(&repeats).map(|(&d, &r)| d.saturating_mul(r)).collect();
    Ok(vec![cx.b.reshape(x, &all)?])
}
