//! Cross-entropy over a class dim that may be split (vocabulary-parallel loss), and ONNX's loss operators.
//!
//! `CrossEntropyParts(x[.., v], labels[..])` gives the normaliser `lse = log(sum(exp(x)))` and the logit of the label,
//! `picked`, both per row and in at least f32: of a part of the classes they are parts of the whole's, to be combined by
//! log-sum-exp and by sum. A label outside the classes at hand picks 0. The loss per row is `lse - picked`.
//!
//! A mean is emitted as `Div(sum, count)` of two scalars, both computed from the labels, so that a training step can
//! add each over ranks and micro-batches before dividing.

use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_index, expect_operands, stat_dtype};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::never;
use crate::tensor::{Tensor, Type, View, ViewMut};

/// Normaliser and label's logit.
pub static CROSS_ENTROPY_PARTS: OpDef = OpDef {
    name: "CrossEntropyParts",
    doc: "log(sum(exp(x))) over the last dim, and x at the label",
    attrs: &[],
    onnx: &[
        OnnxRule { domain: "", op: "SoftmaxCrossEntropyLoss", since: 12, lower: import_cross_entropy },
        OnnxRule { domain: "", op: "NegativeLogLikelihoodLoss", since: 12, lower: import_nll },
    ],
    infer,
    factors,
    work: |_, i, o| Work { flops: 4.0 * i[0].numel() as f64, ..Work::memory(i, o, 0.0) },
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

/// Gradient of [`CROSS_ENTROPY_PARTS`].
pub static CROSS_ENTROPY_GRAD: OpDef = OpDef {
    name: "CrossEntropyGrad",
    doc: "gradient of CrossEntropyParts: exp(x - lse) * g_lse, plus g_picked at the label",
    attrs: &[],
    onnx: &[],
    infer: infer_grad,
    factors: factors_grad,
    work: |_, i, o| Work::memory(i, o, 4.0),
    identity: never,
    gradient: Gradient::Internal("backward of CrossEntropyParts"),
    kernel: kernel_grad,
    samples: samples_grad,
};

fn check(op: &Op, x: &Type, labels: &Type) -> Result<Type, OpError> {
    expect_float(op.name(), "x", x)?;
    expect_index(op.name(), "labels", labels)?;
    match x.dims.split_last() {
        Some((0, _)) => Err(OpError(format!("{} of {x}: there are no classes", op.name()))),
        Some((_, rows)) if rows == labels.dims => Ok(Type::new(stat_dtype(x.dtype), rows)),
        _ => Err(OpError(format!("{}: labels {labels} are not one per row of {x}", op.name()))),
    }
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[2])?;
    let stat = check(op, &inputs[0], &inputs[1])?;
    Ok(vec![stat.clone(), stat])
}

fn infer_grad(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[5])?;
    let [x, lse, labels, g_lse, g_picked] = inputs else { unreachable!("counted above") };
    let stat = check(op, x, labels)?;
    if [lse, g_lse, g_picked].iter().any(|t| **t != stat) {
        return Err(OpError(format!("CrossEntropyGrad of {x} needs {stat}, not {lse}, {g_lse}, {g_picked}")));
    }
    Ok(vec![x.clone()])
}

fn factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let dims = &inputs[0].dims;
    let v = dims.len() - 1;
    RuleBuilder::new(inputs, outputs)
        .dims(0..v, dims, &[0, 1], &[0, 1])
        .factor("classes", dims[v], &[(0, v)], &[])
        .build(&[ReduceKind::LogSumExp, ReduceKind::Sum])
}

fn factors_grad(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let dims = &inputs[0].dims;
    let v = dims.len() - 1;
    RuleBuilder::new(inputs, outputs)
        .dims(0..v, dims, &[0, 1, 2, 3, 4], &[0])
        .factor("classes", dims[v], &[(0, v)], &[(0, v)])
        .build(&[])
        .linear_in([3, 4])
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    if cx.grads.iter().all(Option::is_none) {
        return Ok(vec![None, None]);
    }
    let (x, labels, lse) = (cx.inputs[0], cx.inputs[1], cx.outputs[0]);
    let ty = cx.b.ty(lse).clone();
    let mut grads = Vec::new();
    for g in cx.grads {
        grads.push(match g {
            Some(g) => *g,
            None => {
                let zero = cx.b.scalar(ty.dtype, 0.0);
                cx.b.expand(zero, &ty.dims)?
            }
        });
    }
    let dx = cx.b.emit1(Op::new(&CROSS_ENTROPY_GRAD), &[x, lse, labels, grads[0], grads[1]])?;
    Ok(vec![Some(dx), None])
}

/// Per row, the label as an index into the classes at hand, if there.
fn local_labels<'a>(labels: &View<'a>, x: &View<'_>) -> Box<dyn Iterator<Item = Option<usize>> + 'a> {
    let (first, count) = match (x.origin.last(), x.dims().last()) {
        (Some(&o), Some(&d)) => (o as i64, d as i64),
        _ => (0, 0),
    };
    let at = move |label: i64| (first..first + count).contains(&label).then(|| (label - first) as usize);
    match labels.dtype() {
        DType::I32 => Box::new(labels.as_slice::<i32>().iter().map(move |&l| at(l.into()))),
        _ => Box::new(labels.as_slice::<i64>().iter().map(move |&l| at(l))),
    }
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let ([x, labels], [lse, picked]) = (inputs, outputs) else {
        return Err(KernelError("CrossEntropyParts has 2 operands and 2 results".into()));
    };
    let classes = x.global.last().copied().unwrap_or(0) as i64;
    let beyond = match labels.dtype() {
        DType::I32 => labels.as_slice::<i32>().iter().map(|&l| i64::from(l)).find(|l| *l >= classes),
        _ => labels.as_slice::<i64>().iter().copied().find(|l| *l >= classes),
    };
    if let Some(label) = beyond {
        return Err(KernelError(format!("label {label} is none of {classes} classes")));
    }
    by_float!(op, x.dtype(), T => {
        let v = x.dims().last().copied().unwrap_or(1).max(1);
        let mut exps = vec![T::ZERO; v];
        let outs = lse.as_mut_slice::<T>().iter_mut().zip(picked.as_mut_slice::<T>());
        let rows = x.as_slice::<T>().chunks_exact(v);
        for ((row, label), (lse, picked)) in rows.zip(local_labels(labels, x)).zip(outs) {
            *picked = label.map_or(T::ZERO, |l| row[l]);
            let max = T::largest(row);
            if max == T::NEG_INFINITY {
                *lse = max;
                continue;
            }
            for (e, x) in exps.iter_mut().zip(row) {
                *e = (*x - max).fast_exp();
            }
            *lse = max + T::sum(&exps).ln();
        }
        Ok(())
    })
}

fn kernel_grad(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let ([x, lse, labels, g_lse, g_picked], [dx]) = (inputs, outputs) else {
        return Err(KernelError("CrossEntropyGrad has 5 operands and 1 result".into()));
    };
    by_float!(op, x.dtype(), T => {
        let v = x.dims().last().copied().unwrap_or(1).max(1);
        let stats = lse.as_slice::<T>().iter().zip(g_lse.as_slice::<T>()).zip(g_picked.as_slice::<T>());
        let rows = x.as_slice::<T>().chunks_exact(v).zip(dx.as_mut_slice::<T>().chunks_exact_mut(v));
        for (((row, dx), label), ((lse, gl), gp)) in rows.zip(local_labels(labels, x)).zip(stats) {
            for (d, x) in dx.iter_mut().zip(row) {
                *d = (*x - *lse).fast_exp() * *gl;
            }
            if let Some(l) = label {
                dx[l] += *gp;
            }
        }
        Ok(())
    })
}

impl Builder {
    /// Where labels are that one.
    pub(crate) fn is_label(&mut self, labels: ValueId, label: i64) -> Result<ValueId, OpError> {
        let wide = self.constant(Tensor::i64([], &[label]));
        let dtype = self.ty(labels).dtype;
        // An i32 label cannot be beyond i32.
        if dtype == DType::I32 && i32::try_from(label).is_err() {
            let dims = self.dims(labels);
            let never = self.scalar(DType::Bool, 0.0);
            return self.expand(never, &dims);
        }
        let label = self.cast(wide, dtype)?;
        self.equal(labels, label)
    }
    /// Labels with class 0 in place of those that are `ignored`, if their label is beyond the classes.
    pub(crate) fn labels_or_class(
        &mut self,
        labels: ValueId,
        ignored: ValueId,
        label: i64,
        classes: usize,
    ) -> Result<ValueId, OpError> {
        if label < classes as i64 {
            return Ok(labels);
        }
        let zero = self.scalar(self.ty(labels).dtype, 0.0);
        self.where_(ignored, zero, labels)
    }
}

/// A loss operator's operands with the class dim last.
struct Loss {
    /// Per label, whether it counts.
    valid: ValueId,
    /// Per label, its weight: 0 where it does not count.
    weight: Option<ValueId>,
    /// Scores with classes last, and the permutation that got them there.
    x: ValueId,
    perm: Vec<usize>,
    labels: ValueId,
}

fn operands(cx: &mut ImportCx<'_>) -> Result<Loss, OpError> {
    let (x, labels) = (cx.input(0)?, cx.input(1)?);
    let (rank, dims) = (cx.b.ty(x).rank(), cx.b.dims(x));
    if rank < 2 {
        return Err(OpError(format!("scores need a batch and a class dim, but are {}", cx.b.ty(x))));
    }
    let perm: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    let x = cx.b.transpose(x, &perm)?;
    let label_type = cx.b.ty(labels).dtype;
    // Without ignore_index every label must be a class; negative ones are then the only ones that can be told apart.
    let zero = cx.b.scalar(label_type, 0.0);
    let (valid, labels) = match cx.try_attr_int("ignore_index") {
        Some(ignore) => {
            let same = cx.b.is_label(labels, ignore)?;
            let labels = cx.b.labels_or_class(labels, same, ignore, dims[1])?;
            (cx.b.not(same)?, labels)
        }
        None => (cx.b.greater_or_equal(labels, zero)?, labels),
    };
    let weight = match cx.try_input(2) {
        None => None,
        Some(w) => {
            if cx.b.dims(w) != [dims[1]] {
                return Err(OpError(format!("weights {} are not one per class of {}", cx.b.ty(w), dims[1])));
            }
            let safe = cx.b.where_(valid, labels, zero)?;
            let w = cx.b.gather(w, safe, 0)?;
            let zero = cx.b.scalar(cx.b.ty(w).dtype, 0.0);
            Some(cx.b.where_(valid, w, zero)?)
        }
    };
    Ok(Loss { valid, weight, x, perm, labels })
}

/// Weighs and reduces the loss of each label.
fn reduce(cx: &mut ImportCx<'_>, loss: &Loss, each: ValueId) -> Result<ValueId, OpError> {
    let stat = cx.b.ty(each).dtype;
    let result = cx.b.ty(loss.x).dtype;
    let zero = cx.b.scalar(stat, 0.0);
    let mut each = cx.b.where_(loss.valid, each, zero)?;
    let weight = match loss.weight {
        Some(w) => {
            let w = cx.b.cast(w, stat)?;
            each = cx.b.mul(each, w)?;
            w
        }
        None => cx.b.cast(loss.valid, stat)?,
    };
    let all: Vec<usize> = (0..cx.b.ty(each).rank()).collect();
    let reduced = match cx.attr_str("reduction").unwrap_or("mean") {
        "none" => each,
        "sum" => cx.b.reduce_sum(each, &all, false)?,
        "mean" => {
            let (sum, count) = (cx.b.reduce_sum(each, &all, false)?, cx.b.reduce_sum(weight, &all, false)?);
            cx.b.div(sum, count)?
        }
        other => return Err(OpError(format!("reduction `{other}` is none of none, sum, mean"))),
    };
    cx.b.cast(reduced, result)
}

fn import_cross_entropy(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let loss = operands(cx)?;
    let (lse, picked) = cx.b.cross_entropy_parts(loss.x, loss.labels)?;
    let each = cx.b.sub(lse, picked)?;
    let mut outs = vec![reduce(cx, &loss, each)?];
    if cx.outputs.get(1) == Some(&true) {
        let last = loss.perm.len() - 1;
        let log_prob = cx.b.log_softmax(loss.x, last)?;
        let mut back = vec![0; loss.perm.len()];
        loss.perm.iter().enumerate().for_each(|(i, &p)| back[p] = i);
        outs.push(cx.b.transpose(log_prob, &back)?);
    }
    Ok(outs)
}

/// Scores are log-probabilities here: only the label's is needed.
fn import_nll(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let loss = operands(cx)?;
    let (_, picked) = cx.b.cross_entropy_parts(loss.x, loss.labels)?;
    let each = cx.b.neg(picked)?;
    Ok(vec![reduce(cx, &loss, each)?])
}

impl Builder {
    /// Normaliser and label's logit of each row: `(lse, picked)`; the loss is `lse - picked`.
    ///
    /// # Errors
    /// Labels that are no integers, or not one per row.
    pub fn cross_entropy_parts(&mut self, x: ValueId, labels: ValueId) -> Result<(ValueId, ValueId), OpError> {
        let outs = self.emit(Op::new(&CROSS_ENTROPY_PARTS), &[x, labels])?;
        Ok((outs[0], outs[1]))
    }
}

fn samples() -> Vec<Sample> {
    let case = |rows: &[usize], v: usize| Sample {
        op: Op::new(&CROSS_ENTROPY_PARTS),
        inputs: vec![
            SampleInput::f32_in([rows, &[v]].concat(), -2.0, 2.0),
            SampleInput::i64_in(rows, -1, v as i64), // -1: ignored
        ],
    };
    vec![case(&[6], 12), case(&[4, 6], 6)]
}

fn samples_grad() -> Vec<Sample> {
    let case = |rows: &[usize], v: usize| Sample {
        op: Op::new(&CROSS_ENTROPY_GRAD),
        inputs: vec![
            SampleInput::f32_in([rows, &[v]].concat(), -2.0, 2.0),
            SampleInput::f32_in(rows, 2.0, 3.0),
            SampleInput::i64_in(rows, -1, v as i64),
            SampleInput::f32(rows),
            SampleInput::f32(rows),
        ],
    };
    vec![case(&[6], 12), case(&[4, 6], 6)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_beyond_the_classes_is_an_error() {
        let op = Op::new(&CROSS_ENTROPY_PARTS);
        let x = Tensor::f32([2, 3], &[0.0; 6]);
        let run = |labels: [i64; 2]| {
            let labels = Tensor::i64([2], &labels);
            let types = op.infer(&[x.ty().clone(), labels.ty().clone()]).unwrap();
            crate::interp::apply(&op, &[&x, &labels], &types)
        };
        assert!(run([2, -100]).is_ok());
        assert!(run([2, 3]).unwrap_err().0.contains("label 3 is none of 3 classes"));
    }
}
