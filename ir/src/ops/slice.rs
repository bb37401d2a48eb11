//! `Slice`: a range of one dim. Strided and reversed slices are gathers with constant indices.
//!
//! The sliced dim can be split too: ranks hold parts of the range, zeros elsewhere, and the result is their sum.
//!
//! Read next: [`super::pad`], its gradient.

use super::support::{RuleMaker, StridedCopy, copy_work, dim_attr, dim_name, operands, strides};
use crate::builder::{Builder, FOLD_LIMIT};
use crate::dtype::DType;
use crate::factor::ReduceKind;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput};
use crate::tensor::{Tensor, Type};

/// A range of a dim.
pub static SLICE: OpDef = OpDef {
    name: "Slice",
    doc: "Indices `start..end` of one dim.",
    attrs: &[("dim", AttrKind::Int), ("start", AttrKind::Int), ("end", AttrKind::Int)],
    onnx: &[
        OnnxRule { domain: "", op: "Slice", since: 1, lower: import_slice },
        OnnxRule { domain: "", op: "Split", since: 1, lower: import_split },
    ],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let d = dim_attr(op, "dim", x.rank())?;
        let (start, end) = (op.get_int("start"), op.get_int("end"));
        if !(0 <= start && start <= end && end <= x.dims[d] as i64) {
            return Err(OpError(format!("no indices {start}..{end} along dim {d} of {x}")));
        }
        let mut dims = x.dims.clone();
        dims[d] = (end - start) as usize;
        Ok(vec![Type::new(x.dtype, dims)])
    },
    factors: |op, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        let at = op.get_int("dim") as usize;
        for (d, &size) in inputs[0].dims.iter().enumerate() {
            if d != at {
                rule.factor(dim_name(d), size, &[(0, d)], &[(0, d)]);
            } else if inputs[0].dtype != DType::Bool {
                rule.factor("sliced", size, &[(0, d)], &[]);
            }
        }
        let rule = rule.finish(ReduceKind::Sum);
        if inputs[0].dtype == DType::Bool { rule } else { rule.linear_in([0]) }
    },
    work: copy_work,
    identity: |_, inputs, out| (inputs[0].dims == out.dims).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        let mut pads = vec![(0, 0); dims.len()];
        let d = cx.op.get_int("dim") as usize;
        pads[d] = (cx.op.get_int("start"), dims[d] as i64 - cx.op.get_int("end"));
        Ok(vec![Some(cx.b.pad(dy, &pads, 0.0)?)])
    }),
    kernel: |op, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        let d = op.get_int("dim") as usize;
        let (start, end) = (op.get_int("start") as usize, op.get_int("end") as usize);
        let (held, held_end) = (x.origin[d], x.origin[d] + x.dims()[d]);
        let (low, high) = (start.max(held), end.min(held_end));
        if (low, high) != (start, end) {
            out.data.fill(0);
        }
        if low < high {
            let mut dims = out.ty.dims.clone();
            let (from, to) = (strides(x.dims()), strides(&dims));
            dims[d] = high - low;
            StridedCopy {
                width: x.dtype().size(),
                dims: &dims,
                from: ((low - held) * from[d] as usize, &from),
                to: ((low - start) * to[d] as usize, &to),
            }
            .run(x.data, out.data);
        }
        Ok(())
    },
    samples: || {
        let of = |dims: &[usize], dim, start, end| Sample {
            op: Op::new(&SLICE).int("dim", dim).int("start", start).int("end", end),
            inputs: vec![SampleInput::f32(dims)],
        };
        vec![
            of(&[4, 6], 1, 1, 3),
            of(&[4, 6], 0, 3, 4),
            of(&[2, 12, 3], 1, 0, 6),
            of(&[6], 0, 2, 2),
            Sample {
                op: Op::new(&SLICE).int("dim", 0).int("start", 1).int("end", 5),
                inputs: vec![SampleInput::bool([6, 2])],
            },
        ]
    },
};

impl Builder {
    /// Indices `start..end` of a dim.
    pub fn slice(&mut self, x: ValueId, dim: usize, start: usize, end: usize) -> Result<ValueId, OpError> {
        let op = Op::new(&SLICE).int("dim", dim as i64).int("start", start as i64).int("end", end as i64);
        self.emit1(op, &[x])
    }
}

/// One axis of an ONNX slice, made plain: the first index taken, and how many are.
fn taken(size: usize, start: i64, end: i64, step: i64) -> Result<(i64, u64), OpError> {
    let n = size as i64;
    let from_front = |i: i64| if i < 0 { i.saturating_add(n) } else { i };
    let (start, length) = match step {
        0 => return Err(OpError("a slice has step 0".into())),
        1.. => {
            let (start, end) = (from_front(start).clamp(0, n), from_front(end).clamp(0, n));
            (start, end - start)
        }
        _ => {
            let (start, end) = (from_front(start).clamp(-1, n - 1), from_front(end).clamp(-1, n - 1));
            (start, start - end)
        }
    };
    Ok((start, (length.max(0) as u64).div_ceil(step.unsigned_abs())))
}

fn import_slice(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let mut x = cx.input(0)?;
    let list = |cx: &ImportCx<'_>, i: usize, name: &str| -> Result<Option<Vec<i64>>, OpError> {
        Ok(cx.try_ints(i)?.or_else(|| cx.attr_ints(name).map(<[i64]>::to_vec)))
    };
    let starts = list(cx, 1, "starts")?.ok_or_else(|| OpError("starts are missing".into()))?;
    let ends = list(cx, 2, "ends")?.ok_or_else(|| OpError("ends are missing".into()))?;
    let axes = list(cx, 3, "axes")?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = cx.try_ints(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err(OpError(format!(
            "{} starts, {} ends, {} axes, {} steps: not of one length",
            starts.len(),
            ends.len(),
            axes.len(),
            steps.len()
        )));
    }
    let axes = cx.axes(&axes, cx.b.ty(x).rank())?;
    for (i, &d) in axes.iter().enumerate() {
        let size = cx.b.dims(x)[d];
        let (first, count) = taken(size, starts[i], ends[i], steps[i])?;
        x = match (steps[i], count as usize) {
            (_, 0) => cx.b.slice(x, d, 0, 0)?,
            (1, count) => cx.b.slice(x, d, first as usize, first as usize + count)?,
            (_, count) if count > FOLD_LIMIT => {
                return Err(OpError(format!("a slice with step {} takes {count} indices, too many", steps[i])));
            }
            (step, count) => {
                let indices: Vec<i64> = (0..count as i64).map(|k| first + k * step).collect();
                let indices = cx.b.constant(Tensor::i64([count], &indices));
                cx.b.gather(x, indices, d)?
            }
        };
    }
    Ok(vec![x])
}

fn import_split(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let d = crate::onnx::import::axis(cx.attr_int("axis", 0), cx.b.ty(x).rank())?;
    let size = cx.b.dims(x)[d];
    let parts: Vec<i64> = match cx.try_ints(1)?.or_else(|| cx.attr_ints("split").map(<[i64]>::to_vec)) {
        Some(parts) => parts,
        None => {
            let count = usize::try_from(cx.attr_int("num_outputs", cx.outputs.len() as i64)).unwrap_or(0);
            if count == 0 || count > cx.outputs.len() {
                return Err(OpError(format!("splits into {count} parts, but has {} results", cx.outputs.len())));
            }
            if cx.opset < 18 && size % count != 0 {
                return Err(OpError(format!("{count} parts do not divide the {size} of dim {d}; say their sizes")));
            }
            // The last part is smaller where the size does not divide.
            let each = size.div_ceil(count);
            (0..count).map(|i| size.saturating_sub(i * each).min(each) as i64).collect()
        }
    };
    let whole = parts.iter().try_fold(0i64, |sum, &p| sum.checked_add(p));
    if parts.iter().any(|&p| p < 0) || whole != Some(size as i64) {
        return Err(OpError(format!("parts {parts:?} do not add up to the {size} of dim {d}")));
    }
    let mut start = 0;
    let mut outs = Vec::with_capacity(parts.len());
    for p in parts {
        outs.push(cx.b.slice(x, d, start, start + p as usize)?);
        start += p as usize;
    }
    Ok(outs)
}

#[cfg(test)]
mod tests {
    use super::taken;

    #[test]
    fn slices_take_what_numpy_takes() {
        let take = |size, start, end, step| {
            let (first, count) = taken(size, start, end, step).unwrap();
            (0..count as i64).map(|k| first + k * step).collect::<Vec<_>>()
        };
        assert_eq!(take(5, 1, i64::MAX, 1), [1, 2, 3, 4]);
        assert_eq!(take(5, -2, i64::MAX, 1), [3, 4]);
        assert_eq!(take(5, -1, i64::MIN, -1), [4, 3, 2, 1, 0]);
        assert_eq!(take(5, 4, 0, -2), [4, 2]);
        assert_eq!(take(5, 0, 5, 2), [0, 2, 4]);
        assert_eq!(take(5, 3, 1, 1), [0i64; 0]);
        assert_eq!(take(0, 0, 5, 1), [0i64; 0]);
        assert_eq!(take(0, 0, i64::MIN, -1), [0i64; 0]);
        assert!(taken(5, 0, 5, 0).is_err());
    }
}
