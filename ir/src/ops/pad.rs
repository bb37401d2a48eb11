//! `Pad`: a constant around. Reflecting and edge padding are gathers with constant indices.
//!
//! Read next: [`super::iota`].

use super::support::{RuleMaker, StridedCopy, copy_work, dim_name, operands, strides};
use crate::builder::{Builder, FOLD_LIMIT};
use crate::dtype::DType;
use crate::factor::ReduceKind;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput};
use crate::tensor::{MAX_ELEMENTS, Tensor, Type};

/// A constant around.
pub static PAD: OpDef = OpDef {
    name: "Pad",
    doc: "A constant before and after each dim: `low` and `high` elements.",
    attrs: &[("low", AttrKind::Ints), ("high", AttrKind::Ints), ("value", AttrKind::Float)],
    onnx: &[OnnxRule { domain: "", op: "Pad", since: 2, lower: import_pad }],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let (low, high) = (op.get_ints("low"), op.get_ints("high"));
        if low.len() != x.rank() || high.len() != x.rank() || low.iter().chain(high).any(|&p| p < 0) {
            return Err(OpError(format!("pads {low:?} and {high:?} do not fit {x}")));
        }
        let dims: Vec<usize> =
            (0..x.rank()).map(|d| x.dims[d].saturating_add(low[d] as usize).saturating_add(high[d] as usize)).collect();
        Ok(vec![Type::new(x.dtype, dims)])
    },
    factors: |op, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        for (d, &size) in outputs[0].dims.iter().enumerate() {
            // The result of a padded dim can be split: each rank takes its part of the whole operand.
            let own: &[(usize, usize)] = if inputs[0].dims[d] == size { &[(0, d)] } else { &[] };
            rule.factor(dim_name(d), size, own, &[(0, d)]);
        }
        let rule = rule.finish(ReduceKind::Sum);
        let linear = op.get_float("value") == 0.0 && inputs[0].dtype != DType::Bool;
        if linear { rule.linear_in([0]) } else { rule }
    },
    work: copy_work,
    identity: |_, inputs, out| (inputs[0].dims == out.dims).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(mut dy) = cx.grads[0] else { return Ok(vec![None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        for (d, (&low, &size)) in cx.op.get_ints("low").iter().zip(&dims).enumerate() {
            dy = cx.b.slice(dy, d, low as usize, low as usize + size)?;
        }
        Ok(vec![Some(dy)])
    }),
    kernel: |op, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        let fill = crate::convert::scalar(x.dtype(), op.get_float("value"));
        for o in out.data.chunks_exact_mut(fill.bytes().len()) {
            o.copy_from_slice(fill.bytes());
        }
        let (from, to) = (strides(x.dims()), strides(out.dims()));
        let (mut f, mut t) = (0, 0);
        let mut dims = Vec::with_capacity(x.dims().len());
        for (d, &low) in op.get_ints("low").iter().enumerate() {
            // Where the operand's part lies in the result, and what of it the result's part holds.
            let first = x.origin[d] + low as usize;
            let start = first.max(out.origin[d]);
            let end = (first + x.dims()[d]).min(out.origin[d] + out.dims()[d]);
            if start >= end {
                return Ok(());
            }
            f += (start - first) * from[d] as usize;
            t += (start - out.origin[d]) * to[d] as usize;
            dims.push(end - start);
        }
        StridedCopy { width: x.dtype().size(), dims: &dims, from: (f, &from), to: (t, &to) }.run(x.data, out.data);
        Ok(())
    },
    samples: || {
        let of = |dims: &[usize], low: &[i64], high: &[i64], value| Sample {
            op: pad_op(low.iter().copied(), high.iter().copied(), value),
            inputs: vec![SampleInput::f32(dims)],
        };
        vec![of(&[4, 3], &[0, 1], &[0, 2], 0.0), of(&[2, 4, 4], &[0, 1, 2], &[0, 1, 0], 1.5), of(&[0], &[2], &[2], 3.0)]
    },
};

fn pad_op(low: impl IntoIterator<Item = i64>, high: impl IntoIterator<Item = i64>, value: f64) -> Op {
    Op::new(&PAD).ints("low", low).ints("high", high).float("value", value)
}

impl Builder {
    /// `value` around: per dim, how many elements before and after; negative ones cut.
    pub fn pad(&mut self, x: ValueId, pads: &[(i64, i64)], value: f64) -> Result<ValueId, OpError> {
        let mut x = x;
        let dims = self.dims(x);
        if pads.len() != dims.len() {
            return Err(OpError(format!("{} pads for {} dims", pads.len(), dims.len())));
        }
        for (d, &(low, high)) in pads.iter().enumerate() {
            if low < 0 || high < 0 {
                let (start, end) = ((-low).max(0), dims[d] as i64 - (-high).max(0));
                if start > end {
                    return Err(OpError(format!("pads ({low}, {high}) cut more than the {} of dim {d}", dims[d])));
                }
                x = self.slice(x, d, start as usize, end as usize)?;
            }
        }
        self.emit1(pad_op(pads.iter().map(|p| p.0.max(0)), pads.iter().map(|p| p.1.max(0)), value), &[x])
    }
}

fn import_pad(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let mut x = cx.input(0)?;
    let rank = cx.b.ty(x).rank();
    let pads = cx.try_ints(1)?.or_else(|| cx.attr_ints("pads").map(<[i64]>::to_vec));
    let pads = pads.ok_or_else(|| OpError("pads are missing".into()))?;
    let axes = match cx.try_ints(3)? {
        Some(axes) => cx.axes(&axes, rank)?,
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(OpError(format!("{} pads for {} axes", pads.len(), axes.len())));
    }
    if let Some(p) = pads.iter().find(|p| p.unsigned_abs() > MAX_ELEMENTS as u64) {
        return Err(OpError(format!("a pad of {p} is beyond any size")));
    }
    let mut each = vec![(0, 0); rank];
    for (i, &d) in axes.iter().enumerate() {
        each[d] = (pads[i], pads[axes.len() + i]);
    }
    let mode = cx.attr_str("mode").unwrap_or("constant").to_string();
    if mode == "constant" {
        let value = match cx.try_input(2) {
            Some(_) => {
                let t = cx.constant(2)?;
                crate::convert::to_f64(t.dtype(), t.bytes()).first().copied().unwrap_or(0.0)
            }
            None => cx.attr_float("value", 0.0).into(),
        };
        return Ok(vec![cx.b.pad(x, &each, value)?]);
    }
    for (d, &(low, high)) in each.iter().enumerate() {
        if (low, high) == (0, 0) {
            continue;
        }
        let n = cx.b.dims(x)[d] as i64;
        if n + low + high > FOLD_LIMIT as i64 {
            return Err(OpError(format!("padding dim {d} of {n} by {low} and {high} takes too many indices")));
        }
        let taken = (-low..n + high).map(|i| source(&mode, i, n)).collect::<Result<Vec<i64>, _>>()?;
        let taken = cx.b.constant(Tensor::i64([taken.len()], &taken));
        x = cx.b.gather(x, taken, d)?;
    }
    Ok(vec![x])
}

/// Which of `n` elements stands at position `i` under a padding mode.
fn source(mode: &str, i: i64, n: i64) -> Result<i64, OpError> {
    if n == 0 {
        return Err(OpError(format!("mode `{mode}` has nothing to pad an empty dim with")));
    }
    match mode {
        "edge" => Ok(i.clamp(0, n - 1)),
        "wrap" => Ok(i.rem_euclid(n)),
        "reflect" if n == 1 => Ok(0),
        "reflect" => {
            let k = i.rem_euclid(2 * (n - 1));
            Ok(if k < n { k } else { 2 * (n - 1) - k })
        }
        other => Err(OpError(format!("padding mode `{other}` is not supported"))),
    }
}

#[cfg(test)]
mod tests {
    use super::source;

    #[test]
    fn modes_take_what_numpy_takes() {
        let row = |mode, low: i64, n: i64, high: i64| -> Vec<i64> {
            (-low..n + high).map(|i| source(mode, i, n).unwrap()).collect()
        };
        assert_eq!(row("reflect", 2, 4, 3), [2, 1, 0, 1, 2, 3, 2, 1, 0]);
        assert_eq!(row("edge", 2, 3, 1), [0, 0, 0, 1, 2, 2]);
        assert_eq!(row("wrap", 2, 3, 1), [1, 2, 0, 1, 2, 0]);
        assert!(source("other", 0, 3).is_err());
    }
}
