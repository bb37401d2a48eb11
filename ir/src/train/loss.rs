//! The loss: found among the outputs or appended, and split into a sum and a count.
//!
//! A mean over a batch is not the mean of the means of its parts when the parts count differently (labels that are
//! ignored). So the step accumulates sum and count apart over micro-batches, and differentiates the sum. [`split`] reads
//! them off the forward graph:
//!
//! | the loss is | sum | count |
//! |---|---|---|
//! | `Div(S, C)`, where `C` depends on no trainable parameter | `S` | `C` |
//! | a sum of elements, `ReduceSum` or `Einsum` | itself | none: sums of parts add up |
//! | a sum of elements times a constant | itself | 1 per micro-batch: the mean over micro-batches of equal size |
//! | a sum of elements that are means over the batch | itself | 1 per micro-batch, likewise |
//! | a constant multiple of one of these, or an `Add` of two with the same count | the same combination | theirs |
//! | anything else | itself | 1 per micro-batch; [`super::micro_batchable`] says what is in the way |

use crate::builder::Builder;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Op, OpError};
use crate::rewrite;
use crate::tensor::Type;

use super::autodiff::depends_on_trainable;
use super::micro_batch::{Batch, batches};
use super::{Prepared, TrainError};

/// Output of the prepared graph: what is differentiated.
pub const SUM: &str = "loss.sum";
/// Output of the prepared graph: what the sum is divided by in the end.
pub const COUNT: &str = "loss.count";

/// What is minimised.
#[derive(Debug, Clone, PartialEq)]
pub enum Loss {
    /// A scalar output of the file.
    Output(String),
    /// The mean over valid labels of the negative log-likelihood, appended to an output of logits `[.., classes]`. Labels
    /// are a new i64 input, of the sizes before the last.
    CrossEntropy {
        /// The output with the logits.
        output: String,
        /// Name of the new input.
        labels: String,
        /// Labels of this value do not count.
        ignore_index: i64,
    },
    /// The mean squared difference, appended to an output. The target is a new input of the output's type.
    Mse {
        /// The output.
        output: String,
        /// Name of the new input.
        target: String,
    },
}

/// How the loss is put together from what micro-batches give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalization {
    /// Sums over micro-batches, divided by the sum of counts.
    Count,
    /// The mean over micro-batches.
    Mean,
    /// The sum over micro-batches.
    Sum,
}

fn find(graph: &Graph, name: &str) -> Result<(ValueId, Option<usize>), TrainError> {
    graph.outputs.iter().find(|o| o.name == name).map(|o| (o.value, o.batch_dim)).ok_or_else(|| TrainError::Unknown {
        what: "output",
        name: name.into(),
        found: graph.outputs.iter().map(|o| o.name.clone()).collect(),
    })
}

/// Appends the loss where it is not there yet. Returns the graph, and the name of the output that is the loss.
///
/// # Errors
/// Names that are not there or taken; outputs that cannot serve.
pub fn attach(forward: &Graph, loss: &Loss) -> Result<(Graph, String), TrainError> {
    let (of, input) = match loss {
        Loss::Output(name) => {
            let (v, _) = find(forward, name)?;
            let ty = forward.ty(v);
            let why = if ty.numel() != 1 {
                format!("it has type {ty}; a loss is a single number")
            } else if !ty.dtype.is_float() {
                format!("it has type {ty}; a loss is a float")
            } else {
                return Ok((forward.clone(), name.clone()));
            };
            return Err(TrainError::Loss { name: name.clone(), reason: why });
        }
        Loss::CrossEntropy { output, labels, .. } => (output, labels),
        Loss::Mse { output, target } => (output, target),
    };
    let (x, batch) = find(forward, of)?;
    let ty = forward.ty(x).clone();
    let refuse = |reason: String| TrainError::Loss { name: of.clone(), reason };
    if !ty.dtype.is_float() {
        return Err(refuse(format!("it has type {ty}; a loss is computed from floats")));
    }
    if forward.inputs.iter().any(|i| i.name == *input) {
        return Err(TrainError::Options(format!(
            "the model has an input `{input}` already: name the loss's input otherwise"
        )));
    }
    if forward.outputs.iter().any(|o| o.name == super::LOSS) {
        return Err(TrainError::Options(format!(
            "the model has an output `{}` already: use it, or rename it before appending a loss",
            super::LOSS
        )));
    }
    let mut b = Builder::resume(forward.clone());
    b.name = super::LOSS.into();
    b.scope = super::LOSS.into();
    let value = match loss {
        Loss::CrossEntropy { ignore_index, .. } => {
            let Some((_, dims)) = ty.dims.split_last() else {
                return Err(refuse("it is a scalar; cross-entropy needs a dim of classes, the last".into()));
            };
            if batch == Some(dims.len()) {
                return Err(refuse("its last dim is the batch; cross-entropy needs the classes there".into()));
            }
            let labels = b.input(input.clone(), Type::new(DType::I64, dims), batch);
            cross_entropy(&mut b, x, labels, *ignore_index)
        }
        _ => {
            let target = b.input(input.clone(), ty, batch);
            mean_square(&mut b, x, target)
        }
    };
    let value = value.map_err(|e| TrainError::Build("the loss", e))?;
    b.output(super::LOSS, value, None);
    Ok((b.finish(), super::LOSS.into()))
}

/// `sum(where(labels != ignore, lse - picked, 0)) / count(labels != ignore)`.
fn cross_entropy(b: &mut Builder, x: ValueId, labels: ValueId, ignore: i64) -> Result<ValueId, OpError> {
    let ignored = b.is_label(labels, ignore)?;
    let classes = b.dims(x).last().copied().unwrap_or(0);
    let labels = b.labels_or_class(labels, ignored, ignore, classes)?;
    let (lse, picked) = b.cross_entropy_parts(x, labels)?;
    let nll = b.sub(lse, picked)?;
    let zero = b.scalar(b.ty(nll).dtype, 0.0);
    let one = b.scalar(b.ty(nll).dtype, 1.0);
    let nll = b.where_(ignored, zero, nll)?;
    let valid = b.where_(ignored, zero, one)?;
    let dims: Vec<usize> = (0..b.dims(labels).len()).collect();
    let sum = b.reduce_sum(nll, &dims, false)?;
    let count = b.reduce_sum(valid, &dims, false)?;
    b.div(sum, count)
}

/// `sum((x - target)^2) / size`, in at least f32.
fn mean_square(b: &mut Builder, x: ValueId, target: ValueId) -> Result<ValueId, OpError> {
    let d = b.sub(x, target)?;
    let d = if b.ty(d).dtype == DType::F64 { d } else { b.cast(d, DType::F32)? };
    let square = b.mul(d, d)?;
    let dims: Vec<usize> = (0..b.dims(x).len()).collect();
    let size = b.ty(x).numel();
    let sum = b.reduce_sum(square, &dims, false)?;
    let size = b.scalar(b.ty(sum).dtype, size as f64);
    b.div(sum, size)
}

/// The loss as a sum and a count.
struct Parts {
    sum: ValueId,
    count: Counted,
}

enum Counted {
    /// A count of its own.
    By(ValueId),
    /// Each micro-batch counts 1.
    Once,
    /// A sum of elements; `scaled` by a constant, which makes a mean of it: nothing else tells what the author meant.
    Sum { scaled: bool },
}

/// Splits the loss, the output `name`, into the outputs [`SUM`] and [`COUNT`], both f32 scalars, and drops what is then
/// needed by nothing.
///
/// # Errors
/// Operators that refuse.
pub fn split(graph: &Graph, name: &str) -> Result<Prepared, TrainError> {
    let (loss, _) = find(graph, name)?;
    let build = |e| TrainError::Build("the loss", e);
    let known = Known { depends: depends_on_trainable(graph), batch: batches(graph) };
    let mut b = Builder::resume(graph.clone());
    (b.name, b.scope) = (super::LOSS.into(), super::LOSS.into());
    let parts = parts(&mut b, &known, loss).map_err(build)?;
    let sum = scalar(&mut b, parts.sum).map_err(build)?;
    let (count, normalization) = match parts.count {
        Counted::By(c) => (Some(scalar(&mut b, c).map_err(build)?), Normalization::Count),
        Counted::Once | Counted::Sum { scaled: true } => (Some(b.scalar(DType::F32, 1.0)), Normalization::Mean),
        Counted::Sum { scaled: false } => (None, Normalization::Sum),
    };
    b.graph_mut().outputs.retain(|o| o.name != name);
    if b.graph().outputs.iter().any(|o| [super::LOSS, SUM, COUNT].contains(&o.name.as_str())) {
        let text =
            format!("the model has another output named {}, {SUM} or {COUNT}, which the step needs", super::LOSS);
        return Err(TrainError::Options(text));
    }
    b.output(SUM, sum, None);
    if let Some(count) = count {
        b.output(COUNT, count, None);
    }
    Ok(Prepared { graph: rewrite::compact(b.finish()), normalization })
}

/// An f32 scalar of a float value with one element.
fn scalar(b: &mut Builder, v: ValueId) -> Result<ValueId, OpError> {
    let v = b.cast(v, DType::F32)?;
    b.reshape(v, &[])
}

/// What is known of the values of the graph.
struct Known {
    /// Whether it depends on a trainable parameter.
    depends: Vec<bool>,
    /// How it relates to the batch.
    batch: Vec<Batch>,
}

impl Known {
    fn depends(&self, v: ValueId) -> bool {
        self.depends.get(v.index()).copied().unwrap_or(false)
    }

    /// Whether some of what a value is a sum of is a sum over the batch times a constant: a mean.
    fn holds_mean(&self, g: &Graph, v: ValueId) -> bool {
        let mut open = vec![v];
        let mut seen = std::collections::BTreeSet::new();
        while let Some(v) = open.pop() {
            let Some(n) = g.producer(v).map(|p| g.node(p)).filter(|_| seen.insert(v)) else { continue };
            let driven: Vec<usize> = (0..n.inputs.len()).filter(|&i| self.depends(n.inputs[i])).collect();
            let constant = |i: &usize| g.constant(n.inputs[*i]).is_some();
            let scales = matches!(n.op.name(), "Mul" | "Div") && (0..n.inputs.len()).any(|i| constant(&i));
            if scales && driven.iter().any(|&i| self.batch[n.inputs[i].index()] == Batch::Sum) {
                return true;
            }
            if n.op.factors(&g.input_types(n), &g.output_types(n)).linear.contains(&driven) {
                open.extend(driven.into_iter().map(|i| n.inputs[i]));
            }
        }
        false
    }
}

fn parts(b: &mut Builder, known: &Known, v: ValueId) -> Result<Parts, OpError> {
    let whole = Parts { sum: v, count: Counted::Once };
    let Some(n) = b.graph().producer(v).map(|p| b.graph().node(p).clone()) else { return Ok(whole) };
    let fixed = |x: ValueId| !known.depends(x);
    let single = |b: &Builder, x: ValueId| b.ty(x).numel() == 1;
    let constant = |b: &Builder, x: ValueId| b.graph().constant(x).is_some() && single(b, x);
    let again = |b: &mut Builder, op: &Op, inputs: &[ValueId], count: Counted| -> Result<Parts, OpError> {
        Ok(Parts { sum: b.emit1(op.clone(), inputs)?, count })
    };
    let scaled =
        |count: Counted| if matches!(count, Counted::Sum { .. }) { Counted::Sum { scaled: true } } else { count };
    match (n.op.name(), &n.inputs[..]) {
        ("Div", &[x, c]) if fixed(c) && single(b, x) && single(b, c) => {
            let inner = parts(b, known, x)?;
            match inner.count {
                Counted::Sum { .. } => Ok(Parts { sum: inner.sum, count: Counted::By(c) }),
                count if constant(b, c) => again(b, &n.op, &[inner.sum, c], count),
                _ => Ok(whole),
            }
        }
        ("Mul", &[x, c]) if constant(b, c) && single(b, x) => {
            let inner = parts(b, known, x)?;
            again(b, &n.op, &[inner.sum, c], scaled(inner.count))
        }
        ("Mul", &[c, x]) if constant(b, c) && single(b, x) => {
            let inner = parts(b, known, x)?;
            again(b, &n.op, &[c, inner.sum], scaled(inner.count))
        }
        ("Neg", &[x]) => {
            let inner = parts(b, known, x)?;
            again(b, &n.op, &[inner.sum], inner.count)
        }
        ("Cast" | "Reshape", &[x]) if b.ty(x).dtype.is_float() && single(b, x) => {
            let inner = parts(b, known, x)?;
            again(b, &n.op, &[inner.sum], inner.count)
        }
        ("Add" | "Sub", &[x, y]) if single(b, x) && single(b, y) => {
            let (x, y) = (parts(b, known, x)?, parts(b, known, y)?);
            match (x.count, y.count) {
                (Counted::By(c), Counted::By(d)) if c == d => again(b, &n.op, &[x.sum, y.sum], Counted::By(c)),
                (Counted::Sum { scaled: s }, Counted::Sum { scaled: t }) if s == t => {
                    again(b, &n.op, &[x.sum, y.sum], Counted::Sum { scaled: s })
                }
                _ => Ok(whole),
            }
        }
        ("ReduceSum" | "Einsum", _) if known.holds_mean(b.graph(), v) => Ok(whole),
        ("ReduceSum" | "Einsum", _) => Ok(Parts { sum: v, count: Counted::Sum { scaled: false } }),
        _ => Ok(whole),
    }
}
