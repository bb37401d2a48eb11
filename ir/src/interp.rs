//! Executes operators and whole graphs unsharded, on the host: the reference that sharded runs are compared with.

use std::borrow::Borrow;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Def, Graph};
use crate::op::{KernelError, Op};
use crate::tensor::{Tensor, Type, View, ViewMut};

impl Op {
    /// Runs the kernel on views. Half floats are converted to f32 around kernels, which know only f32.
    ///
    /// # Errors
    /// What the kernel says: values out of range, unsupported element types.
    pub fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let half = |d: DType| matches!(d, DType::F16 | DType::Bf16);
        let any_half = inputs.iter().any(|v| half(v.dtype())) || outputs.iter().any(|v| half(v.dtype()));
        if !any_half || self.def.name == "Cast" {
            return (self.def.kernel)(self, inputs, outputs);
        }
        let widen = |ty: &Type| Type::new(if half(ty.dtype) { DType::F32 } else { ty.dtype }, ty.dims.clone());
        let wide_in: Vec<Option<Tensor>> = inputs
            .iter()
            .map(|v| {
                half(v.dtype()).then(|| {
                    let mut t = Tensor::zeros(widen(&v.ty));
                    let xs = crate::convert::to_f64(v.dtype(), v.data);
                    crate::convert::from_f64(DType::F32, xs.into_iter(), t.bytes_mut());
                    t
                })
            })
            .collect();
        let ins: Vec<View<'_>> = inputs
            .iter()
            .zip(&wide_in)
            .map(|(v, w)| match w {
                Some(t) => View { ty: t.ty().clone(), data: t.bytes(), ..v.clone() },
                None => v.clone(),
            })
            .collect();
        let mut wide_out: Vec<Option<Tensor>> =
            outputs.iter().map(|v| half(v.dtype()).then(|| Tensor::zeros(widen(&v.ty)))).collect();
        {
            let mut outs: Vec<ViewMut<'_>> = outputs
                .iter_mut()
                .zip(&mut wide_out)
                .map(|(v, w)| {
                    let (origin, global) = (v.origin.clone(), v.global.clone());
                    match w {
                        Some(t) => ViewMut { ty: t.ty().clone(), origin, global, data: t.bytes_mut() },
                        None => ViewMut { ty: v.ty.clone(), origin, global, data: v.data },
                    }
                })
                .collect();
            (self.def.kernel)(self, &ins, &mut outs)?;
        }
        for (v, w) in outputs.iter_mut().zip(&wide_out) {
            if let Some(t) = w {
                let xs = crate::convert::to_f64(DType::F32, t.bytes());
                crate::convert::from_f64(v.ty.dtype, xs.into_iter(), v.data);
            }
        }
        Ok(())
    }
}

/// Applies an operator to whole tensors.
///
/// # Errors
/// What the kernel says.
pub fn apply<T: Borrow<Tensor>>(op: &Op, inputs: &[T], outputs: &[Type]) -> Result<Vec<Tensor>, KernelError> {
    let mut results: Vec<Tensor> = outputs.iter().cloned().map(Tensor::zeros).collect();
    let ins: Vec<View<'_>> = inputs.iter().map(|t| t.borrow().view()).collect();
    let mut outs: Vec<ViewMut<'_>> = results.iter_mut().map(Tensor::view_mut).collect();
    op.run(&ins, &mut outs)?;
    drop(outs);
    Ok(results)
}

/// What a run of a graph gives.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The outputs, in the graph's order.
    pub outputs: Vec<Tensor>,
    /// The states after the step, in the graph's order.
    pub states: Vec<Arc<Tensor>>,
}

/// A node that could not be computed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("node {node} ({name}, {op}): {source}")]
pub struct RunError {
    /// Its id.
    pub node: crate::graph::NodeId,
    /// Its name.
    pub name: String,
    /// Its operator.
    pub op: String,
    /// Why.
    pub source: KernelError,
}

/// Runs a whole graph once, as one micro-batch. `inputs` and `states` are in the graph's order and of its types.
///
/// # Errors
/// The first node that could not be computed.
pub fn run(graph: &Graph, inputs: &[Tensor], states: &[Arc<Tensor>]) -> Result<Outcome, RunError> {
    let mut left: Vec<usize> = graph.uses().iter().map(Vec::len).collect();
    for o in &graph.outputs {
        left[o.value.index()] += 1;
    }
    for s in &graph.states {
        if let Some(w) = s.write {
            left[w.index()] += 1;
        }
    }
    let mut values: Vec<Option<Arc<Tensor>>> = vec![None; graph.values.len()];
    for (i, v) in graph.values.iter().enumerate() {
        values[i] = match &v.def {
            Def::Const(t) => Some(t.clone()),
            Def::Input(at) => Some(Arc::new(inputs[*at].clone())),
            Def::State(s) => Some(states[s.index()].clone()),
            Def::Node(..) => None,
        };
    }
    for id in graph.node_ids() {
        let n = graph.node(id);
        let ins: Vec<Arc<Tensor>> = n
            .inputs
            .iter()
            .map(|v| values[v.index()].clone().expect("defined before use, as the verifier holds"))
            .collect();
        let results = apply(&n.op, &ins, &graph.output_types(n)).map_err(|source| RunError {
            node: id,
            name: n.name.clone(),
            op: n.op.to_string(),
            source,
        })?;
        for (v, t) in n.outputs.iter().zip(results) {
            values[v.index()] = (left[v.index()] > 0).then(|| Arc::new(t));
        }
        for v in &n.inputs {
            left[v.index()] -= 1;
            if left[v.index()] == 0 && matches!(graph.value(*v).def, Def::Node(..)) {
                values[v.index()] = None;
            }
        }
    }
    let get = |v: crate::graph::ValueId| values[v.index()].clone().expect("outputs are kept");
    Ok(Outcome {
        outputs: graph.outputs.iter().map(|o| Tensor::clone(&get(o.value))).collect(),
        states: graph.state_ids().map(|s| graph.state(s).write.map_or(states[s.index()].clone(), get)).collect(),
    })
}
