//! Optimizer updates and the sum over micro-batches: elementwise, so any dim can be split, which is what ZeRO does.

use crate::builder::Builder;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::op::{AttrKind, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_operands};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::never;
use crate::tensor::{Type, View, ViewMut};

/// The sum over micro-batches.
pub static ACCUMULATE: OpDef = OpDef {
    name: "Accumulate",
    doc: "the sum of its operand over micro-batches (of one micro-batch: the operand)",
    attrs: &[],
    onnx: &[],
    infer: |op, i| {
        expect_operands(op.name(), i, &[1])?;
        Ok(i.to_vec())
    },
    factors: |op, i, o| elementwise(op, i, o).linear_in([0]),
    work: |_, i, o| Work::memory(i, o, 1.0),
    identity: never,
    gradient: Gradient::Internal("between micro-batches and update"),
    kernel: |_, inputs, outputs| {
        outputs[0].data.copy_from_slice(inputs[0].data);
        Ok(())
    },
    samples: || vec![Sample { op: Op::new(&ACCUMULATE), inputs: vec![SampleInput::f32([4, 6])] }],
};

/// A step of Adam or AdamW.
pub static ADAMW: OpDef = OpDef {
    name: "AdamW",
    doc: "a step of AdamW (decoupled) or Adam as PyTorch does it: of param, grad, m, v, step (from 1), and optionally lr",
    attrs: &[
        ("lr", AttrKind::Float),
        ("beta1", AttrKind::Float),
        ("beta2", AttrKind::Float),
        ("epsilon", AttrKind::Float),
        ("weight_decay", AttrKind::Float),
        ("decoupled", AttrKind::Bool),
    ],
    onnx: &[],
    infer: infer_adamw,
    factors: elementwise,
    work: |_, i, o| Work::memory(i, o, 16.0),
    identity: never,
    gradient: Gradient::Internal("update"),
    kernel: adamw_kernel,
    samples: adamw_samples,
};

/// A step of stochastic gradient descent.
pub static SGD: OpDef = OpDef {
    name: "Sgd",
    doc: "a step of SGD as PyTorch does it: of param, grad, and with momentum the buffer",
    attrs: &[
        ("lr", AttrKind::Float),
        ("momentum", AttrKind::Float),
        ("weight_decay", AttrKind::Float),
        ("nesterov", AttrKind::Bool),
    ],
    onnx: &[],
    infer: infer_sgd,
    factors: elementwise,
    work: |_, i, o| Work::memory(i, o, 6.0),
    identity: never,
    gradient: Gradient::Internal("update"),
    kernel: sgd_kernel,
    samples: sgd_samples,
};

/// One factor per dim of the first operand; scalars are whole.
fn elementwise(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let dims = &inputs[0].dims;
    let full: Vec<usize> = (0..inputs.len()).filter(|&i| inputs[i].rank() == dims.len()).collect();
    let results: Vec<usize> = (0..outputs.len()).collect();
    RuleBuilder::new(inputs, outputs).dims(0..dims.len(), dims, &full, &results).build(&[])
}

fn same_sizes(op: &Op, inputs: &[Type], count: usize) -> Result<(), OpError> {
    for t in &inputs[..count] {
        expect_float(op.name(), "an operand", t)?;
        if t.dims != inputs[0].dims {
            return Err(OpError(format!("{} of {}: an operand is {t}", op.name(), inputs[0])));
        }
    }
    if let Some(t) = inputs[count..].iter().find(|t| t.rank() != 0 || !t.dtype.is_float()) {
        return Err(OpError(format!("{} takes step and lr as float scalars, not {t}", op.name())));
    }
    Ok(())
}

fn infer_adamw(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[5, 6])?;
    same_sizes(op, inputs, 4)?;
    Ok(vec![inputs[0].clone(), inputs[2].clone(), inputs[3].clone()])
}

fn infer_sgd(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[2, 3])?;
    same_sizes(op, inputs, inputs.len())?;
    Ok(inputs.iter().enumerate().filter(|(i, _)| *i != 1).map(|(_, t)| t.clone()).collect())
}

fn scalar(v: &View<'_>) -> f64 {
    crate::convert::to_f64(v.dtype(), v.data).first().copied().unwrap_or(0.0)
}

/// Operands that a kernel reads side by side must be of one type after widening.
fn one_type(op: &Op, views: &[View<'_>]) -> Result<(), KernelError> {
    match views.iter().find(|v| v.dtype() != views[0].dtype()) {
        Some(v) => Err(KernelError(format!("{} of {} cannot mix in {}", op.name(), views[0].ty, v.ty))),
        None => Ok(()),
    }
}

/// `torch.optim.AdamW` (and `Adam` when not decoupled), without amsgrad.
fn adamw_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    one_type(op, &inputs[..4])?;
    let [param, m, v] = outputs else { return Err(KernelError("AdamW has 3 results".into())) };
    let step = scalar(&inputs[4]);
    let lr = inputs.get(5).map_or(op.get_float("lr"), scalar);
    let (beta1, beta2) = (op.get_float("beta1"), op.get_float("beta2"));
    let decay = op.get_float("weight_decay");
    let decoupled = op.get_flag("decoupled");
    let correction1 = 1.0 - beta1.powf(step);
    let correction2 = (1.0 - beta2.powf(step)).sqrt();
    by_float!(op, inputs[0].dtype(), T => {
        let keep = T::of(if decoupled { 1.0 - lr * decay } else { 1.0 });
        let coupled = T::of(if decoupled { 0.0 } else { decay });
        let (from_m, to_m) = (T::of(beta1), T::of(1.0 - beta1));
        let (from_v, to_v) = (T::of(beta2), T::of(1.0 - beta2));
        let (rate, root, epsilon) = (T::of(lr / correction1), T::of(correction2), T::of(op.get_float("epsilon")));
        let old = inputs[0].as_slice::<T>().iter().zip(inputs[1].as_slice::<T>());
        let moments = inputs[2].as_slice::<T>().iter().zip(inputs[3].as_slice::<T>());
        let new = m.as_mut_slice::<T>().iter_mut().zip(v.as_mut_slice::<T>());
        for ((p, (new_m, new_v)), ((&old, &g), (&m, &v))) in
            param.as_mut_slice::<T>().iter_mut().zip(new).zip(old.zip(moments))
        {
            let g = g + coupled * old;
            let m = from_m * m + to_m * g;
            let v = from_v * v + to_v * g * g;
            *p = old * keep - rate * m / (v.sqrt() / root + epsilon);
            (*new_m, *new_v) = (m, v);
        }
        Ok(())
    })
}

/// `torch.optim.SGD` without dampening; its buffer starts as the first gradient, which zeros give too.
fn sgd_kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    one_type(op, inputs)?;
    by_float!(op, inputs[0].dtype(), T => {
        let (lr, momentum) = (T::of(op.get_float("lr")), T::of(op.get_float("momentum")));
        let decay = T::of(op.get_float("weight_decay"));
        let old = inputs[0].as_slice::<T>().iter().zip(inputs[1].as_slice::<T>());
        match (outputs, inputs.get(2)) {
            ([param, buffer], Some(before)) => {
                let nesterov = op.get_flag("nesterov");
                let new = param.as_mut_slice::<T>().iter_mut().zip(buffer.as_mut_slice::<T>());
                for (((p, buffer), before), (&old, &g)) in new.zip(before.as_slice::<T>()).zip(old) {
                    let g = g + decay * old;
                    *buffer = momentum * *before + g;
                    *p = old - lr * if nesterov { g + momentum * *buffer } else { *buffer };
                }
            }
            ([param, ..], _) => {
                for (p, (&old, &g)) in param.as_mut_slice::<T>().iter_mut().zip(old) {
                    *p = old - lr * (g + decay * old);
                }
            }
            _ => return Err(KernelError("Sgd has at least 1 result".into())),
        }
        Ok(())
    })
}

/// Settings of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Weight decay apart from the gradient (AdamW) rather than in it (Adam).
    pub decoupled: bool,
}

/// Settings of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Nesterov's variant.
    pub nesterov: bool,
}

impl AdamW {
    /// The operator.
    pub fn op(&self) -> Op {
        Op::new(&ADAMW)
            .float("lr", self.lr)
            .float("beta1", self.beta1)
            .float("beta2", self.beta2)
            .float("epsilon", self.epsilon)
            .float("weight_decay", self.weight_decay)
            .flag("decoupled", self.decoupled)
    }
}

impl Sgd {
    /// The operator.
    pub fn op(&self) -> Op {
        Op::new(&SGD)
            .float("lr", self.lr)
            .float("momentum", self.momentum)
            .float("weight_decay", self.weight_decay)
            .flag("nesterov", self.nesterov)
    }
}

impl Builder {
    /// The sum of a value over micro-batches.
    ///
    /// # Errors
    /// None in practice.
    pub fn accumulate(&mut self, x: ValueId) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&ACCUMULATE), &[x])
    }
    /// A step of AdamW: the new `[param, m, v]` of `[param, grad, m, v]`, the step count (a float scalar, 1 at the first
    /// step), and a learning rate that replaces the setting.
    ///
    /// # Errors
    /// Operands of different sizes.
    pub fn adamw(
        &mut self,
        settings: &AdamW,
        [param, grad, m, v]: [ValueId; 4],
        step: ValueId,
        lr: Option<ValueId>,
    ) -> Result<[ValueId; 3], OpError> {
        let operands: Vec<ValueId> = [param, grad, m, v, step].into_iter().chain(lr).collect();
        let outs = self.emit(settings.op(), &operands)?;
        Ok([outs[0], outs[1], outs[2]])
    }
    /// A step of SGD: the new parameter, and the new momentum buffer where one is given.
    ///
    /// # Errors
    /// Operands of different sizes.
    pub fn sgd(
        &mut self,
        settings: &Sgd,
        param: ValueId,
        grad: ValueId,
        buffer: Option<ValueId>,
    ) -> Result<(ValueId, Option<ValueId>), OpError> {
        let operands: Vec<ValueId> = [param, grad].into_iter().chain(buffer).collect();
        let outs = self.emit(settings.op(), &operands)?;
        Ok((outs[0], outs.get(1).copied()))
    }
}

fn adamw_samples() -> Vec<Sample> {
    let case = |dims: &[usize], decoupled: bool, with_lr: bool| {
        let settings = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, decoupled };
        let mut inputs = vec![SampleInput::f32(dims), SampleInput::f32(dims), SampleInput::f32(dims)];
        inputs.push(SampleInput::f32_in(dims, 0.1, 1.0));
        inputs.push(SampleInput::f32_in([], 3.0, 3.5));
        if with_lr {
            inputs.push(SampleInput::f32_in([], 0.01, 0.02));
        }
        Sample { op: settings.op(), inputs }
    };
    vec![case(&[4, 6], true, false), case(&[12], false, true), case(&[], true, false)]
}

fn sgd_samples() -> Vec<Sample> {
    let case = |operands: usize, momentum: f64, nesterov: bool| Sample {
        op: Sgd { lr: 0.1, momentum, weight_decay: 0.01, nesterov }.op(),
        inputs: (0..operands).map(|_| SampleInput::f32([4, 6])).collect(),
    };
    vec![case(2, 0.0, false), case(3, 0.9, false), case(3, 0.9, true)]
}
