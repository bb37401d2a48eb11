//! The update: what a step does once, after all micro-batches.
//!
//! Per trained parameter `NAME`: the gradient (sum over micro-batches and stages, divided by the loss's count), clipped
//! when asked, then the optimizer's operator, which writes the parameter and its states `adam.m/NAME`, `adam.v/NAME` or
//! `sgd.momentum/NAME`. AdamW counts steps in one more state, `adam.step` (`sgd.step` where there is dropout). Parameters that the loss does not reach are
//! left alone, as PyTorch does with parameters without gradient.

use crate::builder::Builder;
use crate::dtype::DType;
use crate::graph::{Init, Section, StateId, StateKind, ValueId};
use crate::op::OpError;
use crate::ops::optimizer::{AdamW, Sgd};
use crate::tensor::Type;

use super::autodiff::Gradients;
use super::{LOSS, TrainOptions, draws};

/// How parameters follow their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// Adam, with weight decay apart from the gradient or in it.
    AdamW(AdamW),
    /// Stochastic gradient descent; without momentum it has no state.
    Sgd(Sgd),
}

impl Default for Optimizer {
    /// AdamW with the defaults of PyTorch.
    fn default() -> Optimizer {
        let (beta1, beta2) = (0.9, 0.999);
        Optimizer::AdamW(AdamW { lr: 1e-3, beta1, beta2, epsilon: 1e-8, weight_decay: 0.01, decoupled: true })
    }
}

/// Sums over micro-batches, which `Update` starts from.
#[derive(Debug, Clone)]
pub struct Totals {
    /// Per state, the accumulated gradient of each stage that uses it.
    pub gradients: Vec<(StateId, Vec<ValueId>)>,
    /// The loss's sum.
    pub sum: ValueId,
    /// The loss's count; `None`: gradients are not divided.
    pub count: Option<ValueId>,
}

/// Appends the `Accumulate` nodes.
///
/// # Errors
/// None in practice.
pub fn accumulate(
    b: &mut Builder,
    gradients: &Gradients,
    sum: ValueId,
    count: Option<ValueId>,
) -> Result<Totals, OpError> {
    b.enter(Section::Backward);
    let mut totals = Totals { gradients: Vec::new(), sum, count };
    for (&s, by_stage) in gradients {
        let mut values = Vec::new();
        for c in by_stage.values() {
            b.of = Some(c.of);
            b.name = format!("grad/{}", b.graph().state(s).name);
            b.scope = b.graph().node(c.of).scope.clone();
            values.push(b.accumulate(c.value)?);
        }
        totals.gradients.push((s, values));
    }
    b.scope = LOSS.into();
    b.name = super::loss::SUM.into();
    b.of = b.graph().producer(sum);
    totals.sum = b.accumulate(sum)?;
    if let Some(count) = count {
        // A count without a node of its own (a constant) belongs to the stage of the loss.
        b.name = super::loss::COUNT.into();
        b.of = b.graph().producer(count).or(b.of);
        totals.count = Some(b.accumulate(count)?);
    }
    b.of = None;
    Ok(totals)
}

/// Appends the `Update` nodes, the states of the optimizer, and the outputs. `scale` is the factor that gradients (not the
/// loss) carry.
///
/// # Errors
/// None in practice.
pub fn append(b: &mut Builder, totals: &Totals, options: &TrainOptions, scale: f64) -> Result<(), OpError> {
    b.enter(Section::Update);
    (b.of, b.name, b.scope) = (None, LOSS.into(), "update".into());
    let loss = match totals.count {
        Some(count) => b.div(totals.sum, count)?,
        None => totals.sum,
    };
    let divisor = match (totals.count, scale == 1.0) {
        (Some(count), true) => Some(count),
        (Some(count), false) => {
            let scale = b.scalar(DType::F32, scale);
            Some(b.mul(count, scale)?)
        }
        (None, true) => None,
        (None, false) => Some(b.scalar(DType::F32, scale)),
    };
    let mut gradients: Vec<(StateId, ValueId)> = Vec::new();
    for (s, parts) in &totals.gradients {
        b.name = format!("grad/{}", b.graph().state(*s).name);
        let mut sum = b.cast(parts[0], DType::F32)?;
        for &p in &parts[1..] {
            let p = b.cast(p, DType::F32)?;
            sum = b.add(sum, p)?;
        }
        if let Some(d) = divisor {
            sum = b.div(sum, d)?;
        }
        gradients.push((*s, sum));
    }
    let reported = gradients.clone();
    if let Some(limit) = options.clip_norm {
        clip(b, &mut gradients, limit)?;
    }
    let step = match &options.optimizer {
        Optimizer::Sgd(_) if !draws::any(b.graph()) => None,
        _ => Some(step_count(b, &options.optimizer)?),
    };
    for &(s, grad) in &gradients {
        parameter(b, s, grad, &options.optimizer, step)?;
    }
    let others = std::mem::take(&mut b.graph_mut().outputs);
    b.output(LOSS, loss, None);
    b.graph_mut().outputs.extend(others);
    if options.gradient_outputs {
        for (s, grad) in reported {
            let name = format!("grad/{}", b.graph().state(s).name);
            b.output(name, grad, None);
        }
    }
    Ok(())
}

/// Multiplies all gradients by `min(1, limit / (norm + 1e-6))`, where `norm` is that of all together
/// (`torch.nn.utils.clip_grad_norm_`).
fn clip(b: &mut Builder, gradients: &mut [(StateId, ValueId)], limit: f64) -> Result<(), OpError> {
    b.name = "clip".into();
    let mut total: Option<ValueId> = None;
    for &(_, g) in gradients.iter() {
        let square = b.mul(g, g)?;
        let dims: Vec<usize> = (0..b.ty(g).rank()).collect();
        let sum = b.reduce_sum(square, &dims, false)?;
        total = Some(match total {
            Some(t) => b.add(t, sum)?,
            None => sum,
        });
    }
    let Some(total) = total else { return Ok(()) };
    let norm = b.sqrt(total)?;
    let tiny = b.scalar(DType::F32, 1e-6);
    let norm = b.add(norm, tiny)?;
    let limit = b.scalar(DType::F32, limit);
    let factor = b.div(limit, norm)?;
    let one = b.scalar(DType::F32, 1.0);
    let factor = b.min(factor, one)?;
    for (_, g) in gradients {
        *g = b.mul(*g, factor)?;
    }
    Ok(())
}

/// The count of steps, counted up: 1 in the first step.
fn step_count(b: &mut Builder, optimizer: &Optimizer) -> Result<ValueId, OpError> {
    let s = draws::step_state(b, optimizer);
    b.name = b.graph().state(s).name.clone();
    let one = b.scalar(DType::F32, 1.0);
    let old = b.graph().state(s).read;
    let new = b.add(old, one)?;
    b.graph_mut().states[s.index()].write = Some(new);
    Ok(new)
}

/// One parameter's step, in f32 whatever the parameter's type.
fn parameter(
    b: &mut Builder,
    s: StateId,
    grad: ValueId,
    optimizer: &Optimizer,
    step: Option<ValueId>,
) -> Result<(), OpError> {
    let (name, read) = (b.graph().state(s).name.clone(), b.graph().state(s).read);
    let ty = b.ty(read).clone();
    b.name = format!("update/{name}");
    let old = b.cast(read, DType::F32)?;
    let moment = |b: &mut Builder, prefix: &str| {
        let ty = Type::new(DType::F32, ty.dims.clone());
        let id = b.state(format!("{prefix}/{name}"), StateKind::Optimizer, ty, Init::Zeros, Some(s));
        (id, b.graph().state(id).read)
    };
    let new = match (optimizer, step) {
        (Optimizer::AdamW(settings), Some(step)) => {
            let ((m_id, m), (v_id, v)) = (moment(b, "adam.m"), moment(b, "adam.v"));
            let [new, m, v] = b.adamw(settings, [old, grad, m, v], step, None)?;
            b.graph_mut().states[m_id.index()].write = Some(m);
            b.graph_mut().states[v_id.index()].write = Some(v);
            new
        }
        (Optimizer::AdamW(_), None) => return Err(OpError("AdamW without a step count".into())),
        (Optimizer::Sgd(settings), _) if settings.momentum != 0.0 => {
            let (id, buffer) = moment(b, "sgd.momentum");
            let (new, buffer) = b.sgd(settings, old, grad, Some(buffer))?;
            b.graph_mut().states[id.index()].write = buffer;
            new
        }
        (Optimizer::Sgd(settings), _) => b.sgd(settings, old, grad, None)?.0,
    };
    let new = b.cast(new, ty.dtype)?;
    b.graph_mut().states[s.index()].write = Some(new);
    Ok(())
}
