//! `CumSum` along a dim, which stays whole, and `Trilu`, which knows where a shard lies.

use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{around, expect_operands};
use crate::ops::rules::RuleBuilder;

use crate::ops::support::{dim_attr, never, no_kernel};
use crate::tensor::{View, ViewMut};

/// Running sum along a dim.
pub static CUM_SUM: OpDef = OpDef {
    name: "CumSum",
    doc: "running sum along a dim, from its start or end, with or without the element itself",
    attrs: &[("axis", AttrKind::Int), ("exclusive", AttrKind::Bool), ("reverse", AttrKind::Bool)],
    onnx: &[OnnxRule { domain: "", op: "CumSum", since: 11, lower: import_cum_sum }],
    infer: |op, i| {
        expect_operands(op.name(), i, &[1])?;
        if !i[0].dtype.is_float() && !matches!(i[0].dtype, DType::I64 | DType::I32) {
            return Err(OpError(format!("CumSum of {}; cast it to a float, i64 or i32", i[0])));
        }
        dim_attr(op, "axis", i[0].rank())?;
        Ok(i.to_vec())
    },
    factors: |op, i, o| {
        let axis = op.get_int("axis") as usize;
        let others = (0..i[0].rank()).filter(|&d| d != axis);
        RuleBuilder::new(i, o).dims(others, &i[0].dims, &[0], &[0]).build(&[]).linear_in([0])
    },
    work: |_, i, o| Work::memory(i, o, 1.0),
    identity: never,
    gradient: Gradient::Rule(cum_sum_gradient),
    kernel: cum_sum_kernel,
    samples: || {
        let case = |dims: &[usize], axis, exclusive, reverse| Sample {
            op: Op::new(&CUM_SUM).int("axis", axis).flag("exclusive", exclusive).flag("reverse", reverse),
            inputs: vec![SampleInput::f32(dims)],
        };
        vec![case(&[4, 6], 1, false, false), case(&[4, 6, 2], 1, true, true), case(&[6], 0, true, false)]
    },
};

/// A triangle of the last two dims, zeros elsewhere.
pub static TRILU: OpDef = OpDef {
    name: "Trilu",
    doc: "the upper or lower triangle of the last two dims from diagonal k, zeros elsewhere",
    attrs: &[("upper", AttrKind::Bool), ("k", AttrKind::Int)],
    onnx: &[OnnxRule { domain: "", op: "Trilu", since: 14, lower: import_trilu }],
    infer: |op, i| {
        expect_operands(op.name(), i, &[1])?;
        if i[0].rank() < 2 {
            return Err(OpError(format!("Trilu needs 2 dims, but its operand is {}", i[0])));
        }
        Ok(i.to_vec())
    },
    factors: |_, i, o| {
        let rule = FactorRule::elementwise(i, o);
        if i[0].dtype == DType::Bool { rule } else { rule.linear_in([0]) }
    },
    work: |_, i, o| Work::memory(i, o, 0.0),
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        Ok(vec![Some(cx.b.emit1(cx.op.clone(), &[dy])?)])
    }),
    kernel: |op, inputs, outputs| match inputs[0].dtype().size() {
        1 => trilu::<u8>(op, &inputs[0], &mut outputs[0]),
        2 => trilu::<u16>(op, &inputs[0], &mut outputs[0]),
        4 => trilu::<u32>(op, &inputs[0], &mut outputs[0]),
        _ => trilu::<u64>(op, &inputs[0], &mut outputs[0]),
    },
    samples: || {
        let case = |dims: &[usize], upper, k| Sample {
            op: Op::new(&TRILU).flag("upper", upper).int("k", k),
            inputs: vec![SampleInput::f32(dims)],
        };
        vec![case(&[4, 6], true, 1), case(&[2, 6, 4], false, 0), case(&[6, 6], false, -2)]
    },
};

fn cum_sum_gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    let op = cx.op.clone().flag("reverse", !cx.op.get_flag("reverse"));
    Ok(vec![Some(cx.b.emit1(op, &[dy])?)])
}

fn cum_sum<T: bytemuck::Pod, S: Copy + Default>(
    op: &Op,
    x: &View<'_>,
    y: &mut ViewMut<'_>,
    add: impl Fn(S, T) -> S,
    of: impl Fn(S) -> T,
) {
    let (outer, size, inner) = around(x.dims(), op.get_int("axis") as usize);
    let (exclusive, reverse) = (op.get_flag("exclusive"), op.get_flag("reverse"));
    let (x, y) = (x.as_slice::<T>(), y.as_mut_slice::<T>());
    for o in 0..outer {
        for i in 0..inner {
            let mut sum = S::default();
            for s in 0..size {
                let at = (o * size + if reverse { size - 1 - s } else { s }) * inner + i;
                let before = sum;
                sum = add(sum, x[at]);
                y[at] = of(if exclusive { before } else { sum });
            }
        }
    }
}

fn cum_sum_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let (x, y) = (&inputs[0], &mut outputs[0]);
    match x.dtype() {
        DType::F32 => cum_sum(op, x, y, |s: f64, x: f32| s + f64::from(x), |s| s as f32),
        DType::F64 => cum_sum(op, x, y, |s: f64, x: f64| s + x, |s| s),
        DType::I64 => cum_sum(op, x, y, |s: i64, x: i64| s.wrapping_add(x), |s| s),
        DType::I32 => cum_sum(op, x, y, |s: i32, x: i32| s.wrapping_add(x), |s| s),
        other => return Err(no_kernel(op, other)),
    }
    Ok(())
}

fn trilu<T: bytemuck::Pod>(op: &Op, x: &View<'_>, y: &mut ViewMut<'_>) -> Result<(), KernelError> {
    let rank = x.dims().len();
    let (rows, columns) = (x.dims()[rank - 2], x.dims()[rank - 1]);
    let (first_row, first_column) = (x.origin[rank - 2] as i64, x.origin[rank - 1] as i64);
    let (upper, k) = (op.get_flag("upper"), op.get_int("k"));
    if columns == 0 || rows == 0 {
        return Ok(());
    }
    let lines = x.as_slice::<T>().chunks_exact(columns).zip(y.as_mut_slice::<T>().chunks_exact_mut(columns));
    for (r, (x, y)) in lines.enumerate() {
        // The first local column at or right of the diagonal, and the first right of it.
        let diagonal = ((r % rows) as i64 + first_row - first_column).saturating_add(k);
        let clamp = |c: i64| c.clamp(0, columns as i64) as usize;
        let keep = if upper { clamp(diagonal)..columns } else { 0..clamp(diagonal.saturating_add(1)) };
        y.fill(T::zeroed());
        y[keep.clone()].copy_from_slice(&x[keep]);
    }
    Ok(())
}

fn import_cum_sum(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let at = cx.ints(1)?.first().copied().ok_or_else(|| OpError("CumSum's axis is empty".into()))?;
    let axis = axis(at, cx.b.ty(x).rank())?;
    let op = Op::new(&CUM_SUM)
        .int("axis", axis as i64)
        .flag("exclusive", cx.attr_int("exclusive", 0) != 0)
        .flag("reverse", cx.attr_int("reverse", 0) != 0);
    Ok(vec![cx.emit(op, &[x])?])
}

fn import_trilu(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let k = cx.try_ints(1)?.and_then(|k| k.first().copied()).unwrap_or(0);
    Ok(vec![cx.b.trilu(x, cx.attr_int("upper", 1) != 0, k)?])
}

impl Builder {
    /// The upper or lower triangle of the last two dims, zeros elsewhere.
    ///
    /// # Errors
    /// Fewer than 2 dims.
    pub fn trilu(&mut self, x: ValueId, upper: bool, k: i64) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&TRILU).flag("upper", upper).int("k", k), &[x])
    }
}
