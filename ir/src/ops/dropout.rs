//! `Dropout` in training: random numbers are a function of seed, step and the element's index in the unsharded tensor of the
//! whole batch, so shards of any kind and micro-batches drop the same elements ([`crate::train::draws`]).

use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_operands, strides};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::never;
use crate::tensor::{Tensor, Type, View, ViewMut};

/// Drops elements at random and scales the others by `1 / (1 - ratio)`. Operands: x, and optionally the step (a scalar),
/// which varies the choice. Results: y, and the mask of kept elements. `batch` is the dim of micro-batches, where known.
pub static DROPOUT: OpDef = OpDef {
    name: "Dropout",
    doc: "zeros at random elements, the others scaled by 1 / (1 - ratio); and which were kept",
    attrs: &[("ratio", AttrKind::Float), ("seed", AttrKind::Seed), ("batch", AttrKind::BatchDim)],
    onnx: &[OnnxRule { domain: "", op: "Dropout", since: 1, lower: import }],
    infer,
    factors,
    work: |_, i, o| Work::memory(i, o, 4.0),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[1, 2])?;
    expect_float(op.name(), "its operand", &inputs[0])?;
    let ratio = op.get_float("ratio");
    if !(0.0..1.0).contains(&ratio) {
        return Err(OpError(format!("Dropout with ratio {ratio}; it must be at least 0 and below 1")));
    }
    if op.batch_dim().is_some_and(|d| d >= inputs[0].rank()) {
        return Err(OpError(format!("Dropout of {} has no dim `batch`, {}", inputs[0], op.get_int("batch"))));
    }
    if let Some(step) = inputs.get(1).filter(|t| t.rank() != 0) {
        return Err(OpError(format!("Dropout takes the step as a scalar, not {step}")));
    }
    Ok(vec![inputs[0].clone(), Type::new(DType::Bool, &inputs[0].dims[..])])
}

fn factors(_: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    RuleBuilder::new(i, o).dims(0..i[0].rank(), &i[0].dims, &[0], &[0, 1]).build(&[])
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let mut grads = vec![None; cx.inputs.len()];
    if let Some(dy) = cx.grads[0] {
        let dtype = cx.b.ty(dy).dtype;
        let scale = cx.b.scalar(dtype, 1.0 / (1.0 - cx.op.get_float("ratio")));
        let zero = cx.b.scalar(dtype, 0.0);
        let scaled = cx.b.mul(dy, scale)?;
        grads[0] = Some(cx.b.where_(cx.outputs[1], scaled, zero)?);
    }
    Ok(grads)
}

/// The finaliser of splitmix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let [y, mask] = outputs else { return Err(KernelError("Dropout has 2 results".into())) };
    let x = &inputs[0];
    let ratio = op.get_float("ratio");
    let step = inputs.get(1).map_or(0.0, |s| crate::convert::to_f64(s.dtype(), s.data).first().copied().unwrap_or(0.0));
    let key = mix(mix(op.get_int("seed") as u64 ^ 0x9e37_79b9_7f4a_7c15).wrapping_add(step as u64));
    // Kept when a number uniform in [0, 2^32) is not below this.
    let below = (ratio * 4_294_967_296.0) as u64;
    let by = strides(&y.global);
    let row = x.dims().last().copied().unwrap_or(1);
    if x.ty.numel() == 0 {
        return Ok(());
    }
    by_float!(op, x.dtype(), T => {
        let scale = T::of(1.0 / (1.0 - ratio));
        let origin = y.origin.clone();
        let rows = x.as_slice::<T>().chunks_exact(row).zip(y.as_mut_slice::<T>().chunks_exact_mut(row));
        let mut at = origin.clone();
        for ((x_row, y), mask) in rows.zip(mask.as_mut_slice::<u8>().chunks_exact_mut(row)) {
            let first: usize = at.iter().zip(&by).map(|(a, b)| a * b).sum();
            for (i, ((x, y), mask)) in x_row.iter().zip(y).zip(mask).enumerate() {
                let number = mix(key.wrapping_add(((first + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 32;
                let kept = number >= below;
                *mask = kept.into();
                *y = if kept { *x * scale } else { T::ZERO };
            }
            for d in (0..at.len().saturating_sub(1)).rev() {
                at[d] += 1;
                if at[d] < origin[d] + x.dims()[d] {
                    break;
                }
                at[d] = origin[d];
            }
        }
        Ok(())
    })
}

/// Outside training it does nothing.
fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    // Each node draws its own numbers, unless its seed is given.
    let own = cx.b.graph().nodes.iter().filter(|n| std::ptr::eq(n.op.def, &DROPOUT)).count() as i64;
    let seed = cx.attr_int("seed", own);
    let (mut ratio, mut training) = (f64::from(cx.attr_float("ratio", 0.5)), false);
    if cx.opset < 7 {
        training = cx.attr_int("is_test", 0) == 0;
    }
    let number = |t: &Tensor| crate::convert::to_f64(t.dtype(), t.bytes()).first().copied();
    if cx.opset >= 12 {
        if cx.try_input(2).is_some() {
            let mode = cx.constant(2).map_err(|_| {
                OpError("training_mode is computed from the input data; export with it fixed to true or false".into())
            })?;
            training = number(&mode) == Some(1.0);
        }
        if training && cx.try_input(1).is_some() {
            ratio = number(&*cx.constant(1)?).unwrap_or(ratio);
        }
    }
    if !training || ratio == 0.0 {
        let dims = cx.b.dims(x);
        let kept = cx.b.scalar(DType::Bool, 1.0);
        let mut outs = vec![x];
        if cx.outputs.get(1) == Some(&true) {
            outs.push(cx.b.expand(kept, &dims)?);
        }
        return Ok(outs);
    }
    let (y, mask) = cx.b.dropout(x, ratio, seed, None)?;
    Ok(vec![y, mask])
}

impl Builder {
    /// Dropout: the result and the mask of kept elements.
    ///
    /// # Errors
    /// A ratio outside `[0, 1)`, elements that are not floats.
    pub fn dropout(
        &mut self,
        x: ValueId,
        ratio: f64,
        seed: i64,
        step: Option<ValueId>,
    ) -> Result<(ValueId, ValueId), OpError> {
        let operands: Vec<ValueId> = [x].into_iter().chain(step).collect();
        let outs = self.emit(Op::new(&DROPOUT).float("ratio", ratio).int("seed", seed), &operands)?;
        Ok((outs[0], outs[1]))
    }
}

fn samples() -> Vec<Sample> {
    let op = |ratio, seed| Op::new(&DROPOUT).float("ratio", ratio).int("seed", seed);
    vec![
        Sample { op: op(0.25, 7), inputs: vec![SampleInput::f32([4, 6, 6])] },
        Sample { op: op(0.5, 1), inputs: vec![SampleInput::f32([6, 4]), SampleInput::f32_in([], 3.0, 3.5)] },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_right_share_and_the_mean() {
        let n = 1 << 16;
        let x = Tensor::f32([256, 256], &vec![1.0; n]);
        for (ratio, seed) in [(0.1, 0), (0.5, 1), (0.9, 2)] {
            let op = Op::new(&DROPOUT).float("ratio", ratio).int("seed", seed);
            let types = op.infer(&[x.ty().clone()]).unwrap();
            let y = crate::interp::apply(&op, &[&x], &types).unwrap();
            let kept = y[1].as_slice::<u8>().iter().filter(|&&k| k == 1).count() as f64 / n as f64;
            assert!((kept - (1.0 - ratio)).abs() < 0.01, "{ratio}: {kept}");
            let mean = y[0].as_slice::<f32>().iter().map(|&y| f64::from(y)).sum::<f64>() / n as f64;
            assert!((mean - 1.0).abs() < 0.05, "{ratio}: {mean}");
        }
    }

    #[test]
    fn seeds_and_steps_choose_other_elements() {
        let x = Tensor::f32([64], &[1.0; 64]);
        let mask = |seed, step: f32| {
            let op = Op::new(&DROPOUT).float("ratio", 0.5).int("seed", seed);
            let step = Tensor::f32([], &[step]);
            let types = op.infer(&[x.ty().clone(), step.ty().clone()]).unwrap();
            crate::interp::apply(&op, &[&x, &step], &types).unwrap().remove(1)
        };
        assert_eq!(mask(1, 1.0), mask(1, 1.0));
        assert_ne!(mask(1, 1.0), mask(2, 1.0));
        assert_ne!(mask(1, 1.0), mask(1, 2.0));
    }
}
