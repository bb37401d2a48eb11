//! `Iota`: indices along a dim; and ONNX operators whose results are known when planning.
//!
//! Read next: [`super::gather`].

use super::support::{RuleMaker, copy_work, dim_name, usizes};
use crate::builder::Builder;
use crate::convert::{from_f64, to_f64};
use crate::dtype::DType;
use crate::factor::ReduceKind;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxAttr, OnnxRule};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample};
use crate::tensor::{Tensor, Type};

/// Indices along a dim.
pub static IOTA: OpDef = OpDef {
    name: "Iota",
    doc: "The index along one dim, as i64.",
    attrs: &[("dims", AttrKind::Ints), ("dim", AttrKind::Int)],
    onnx: &[
        OnnxRule { domain: "", op: "Range", since: 11, lower: import_range },
        OnnxRule { domain: "", op: "Constant", since: 1, lower: import_constant },
        OnnxRule { domain: "", op: "Shape", since: 1, lower: import_shape },
        OnnxRule { domain: "", op: "Size", since: 1, lower: import_size },
        OnnxRule { domain: "", op: "EyeLike", since: 9, lower: import_eye },
        OnnxRule { domain: "", op: "NonZero", since: 9, lower: import_non_zero },
    ],
    infer: |op, inputs| {
        if !inputs.is_empty() {
            return Err(OpError(format!("takes no operand, not {}", inputs.len())));
        }
        let dims = usizes(op, "dims")?;
        super::support::dim_attr(op, "dim", dims.len())?;
        Ok(vec![Type::new(DType::I64, dims)])
    },
    factors: |_, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        for (d, &size) in outputs[0].dims.iter().enumerate() {
            rule.factor(dim_name(d), size, &[], &[(0, d)]);
        }
        rule.finish(ReduceKind::Sum)
    },
    work: copy_work,
    identity: super::support::never,
    gradient: Gradient::None,
    kernel: |op, _, outs| {
        let out = &mut outs[0];
        let d = op.get_int("dim") as usize;
        let (n, first) = (out.dims()[d], out.origin[d]);
        let inner: usize = out.dims()[d + 1..].iter().product();
        if n * inner > 0 {
            for block in out.as_mut_slice::<i64>().chunks_exact_mut(n * inner) {
                for (i, row) in block.chunks_exact_mut(inner).enumerate() {
                    row.fill((first + i) as i64);
                }
            }
        }
        Ok(())
    },
    samples: || {
        let of = |dims: &[i64], dim| Sample {
            op: Op::new(&IOTA).ints("dims", dims.iter().copied()).int("dim", dim),
            inputs: vec![],
        };
        vec![of(&[12], 0), of(&[4, 6], 0), of(&[2, 4, 6], 1), of(&[0], 0)]
    },
};

impl Builder {
    /// The index along dim `dim` of a tensor of sizes `dims`, as i64.
    pub fn iota(&mut self, dims: &[usize], dim: usize) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&IOTA).ints("dims", dims.iter().map(|&d| d as i64)).int("dim", dim as i64), &[])
    }
}

fn import_range(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let dtype = cx.b.ty(cx.input(0)?).dtype;
    let mut ends = [0.0; 3];
    for (i, end) in ends.iter_mut().enumerate() {
        let t = cx.constant(i)?;
        let one = to_f64(t.dtype(), t.bytes());
        *end = *one.first().ok_or_else(|| OpError(format!("operand {i} is empty")))?;
    }
    let [start, limit, delta] = ends;
    let count = ((limit - start) / delta).ceil().max(0.0);
    if delta == 0.0 || !count.is_finite() {
        return Err(OpError(format!("no range from {start} to {limit} in steps of {delta}")));
    }
    let index = cx.b.iota(&[count as usize], 0)?;
    let index = cx.b.cast(index, dtype)?;
    let (start_v, delta_v) = (cx.input(0)?, cx.input(2)?);
    let scaled = if delta == 1.0 { index } else { cx.b.mul(index, delta_v)? };
    let moved = if start == 0.0 { scaled } else { cx.b.add(scaled, start_v)? };
    // Operands may be of sizes [1] instead of scalars.
    Ok(vec![cx.b.reshape(moved, &[count as usize])?])
}

fn import_constant(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    for (name, attr) in cx.attrs.iter() {
        let t = match (name.as_str(), attr) {
            ("value", OnnxAttr::Tensor(t)) => Tensor::clone(t),
            ("value_int", OnnxAttr::Int(x)) => Tensor::i64([], &[*x]),
            ("value_ints", OnnxAttr::Ints(x)) => Tensor::i64([x.len()], x),
            ("value_float", OnnxAttr::Float(x)) => Tensor::f32([], &[*x]),
            ("value_floats", OnnxAttr::Floats(x)) => Tensor::f32([x.len()], x),
            ("value_string" | "value_strings" | "sparse_value", _) => {
                return Err(OpError(format!("constants of kind `{name}` are not supported")));
            }
            _ => continue,
        };
        return Ok(vec![cx.b.constant(t)]);
    }
    Err(OpError("no attribute holds a value".into()))
}

fn import_shape(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let dims = cx.b.dims(cx.input(0)?);
    let n = dims.len() as i64;
    let at = |x: i64| if x < 0 { x + n } else { x }.clamp(0, n) as usize;
    let (start, end) = (at(cx.attr_int("start", 0)), at(cx.attr_int("end", n)));
    let dims: Vec<i64> = dims.get(start..end).unwrap_or_default().iter().map(|&d| d as i64).collect();
    Ok(vec![cx.b.constant(Tensor::i64([dims.len()], &dims))])
}

fn import_size(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let n = cx.b.ty(cx.input(0)?).numel() as i64;
    Ok(vec![cx.b.constant(Tensor::i64([], &[n]))])
}

fn import_eye(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.b.ty(cx.input(0)?).clone();
    let dtype = match cx.attrs.get("dtype") {
        Some(OnnxAttr::Int(code)) => super::cast::onnx_dtype(*code)?,
        _ => x.dtype,
    };
    if x.rank() != 2 {
        return Err(OpError(format!("takes a matrix, not {x}")));
    }
    let (rows, columns) = (cx.b.iota(&[x.dims[0], 1], 0)?, cx.b.iota(&[1, x.dims[1]], 1)?);
    let k = cx.b.scalar(DType::I64, cx.attr_int("k", 0) as f64);
    let diagonal = cx.b.add(rows, k)?;
    let on = cx.b.equal(diagonal, columns)?;
    Ok(vec![cx.b.cast(on, dtype)?])
}

fn import_non_zero(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let t = cx.constant(0)?;
    let at: Vec<usize> =
        to_f64(t.dtype(), t.bytes()).iter().enumerate().filter(|(_, x)| **x != 0.0).map(|p| p.0).collect();
    let (rank, n) = (t.dims().len(), at.len());
    let mut out = Tensor::zeros(Type::new(DType::I64, [rank, n]));
    let strides = super::support::strides(t.dims());
    let all = (0..rank).flat_map(|d| {
        let (stride, size) = (strides[d] as usize, t.dims()[d]);
        at.iter().map(move |&i| (i / stride % size) as f64)
    });
    from_f64(DType::I64, all, out.bytes_mut());
    Ok(vec![cx.b.constant(out)])
}
