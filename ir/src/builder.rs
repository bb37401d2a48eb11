//! Makes graphs: appends nodes, with types inferred, constants folded, no-ops skipped and equal nodes shared.
//!
//! Everything that makes or rewrites a graph goes through [`Builder::emit`], so that no pass has to clean up after
//! another. Constants are folded by the operators' own kernels, up to [`FOLD_LIMIT`] elements.

use std::collections::HashMap;
use std::sync::Arc;

use crate::graph::{Def, Graph, Init, Input, Node, NodeId, Output, Section, State, StateId, StateKind, Value, ValueId};
use crate::op::{Op, OpError};
use crate::tensor::{Tensor, Type};

/// Constants with more elements are left as nodes, to be computed when running.
pub const FOLD_LIMIT: usize = 1 << 22;

/// A graph under construction.
#[derive(Default)]
pub struct Builder {
    graph: Graph,
    shared: HashMap<(Op, Vec<ValueId>, Section), Vec<ValueId>>,
    constants: HashMap<(Type, Vec<u8>), ValueId>,
    /// Section of the nodes to come.
    section: Option<Section>,
    /// Forward node that the nodes to come serve.
    pub of: Option<NodeId>,
    /// Name of the nodes to come.
    pub name: String,
    /// Module path of the nodes to come.
    pub scope: String,
}

impl Builder {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Builder {
        Builder { graph: Graph { name: name.into(), ..Graph::default() }, ..Builder::default() }
    }
    /// Goes on with an existing graph.
    pub fn resume(graph: Graph) -> Builder {
        let mut b = Builder { graph, ..Builder::default() };
        for id in b.graph.node_ids() {
            let n = b.graph.node(id);
            b.shared.entry((n.op.clone(), n.inputs.clone(), n.section)).or_insert_with(|| n.outputs.clone());
        }
        for id in b.graph.value_ids() {
            if let Def::Const(t) = &b.graph.value(id).def {
                b.constants.entry((t.ty().clone(), t.bytes().to_vec())).or_insert(id);
            }
        }
        b
    }
    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }
    /// The graph so far, to set names, states' writes and outputs.
    pub fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }
    /// The finished graph.
    pub fn finish(self) -> Graph {
        self.graph
    }
    /// The type of a value.
    pub fn ty(&self, v: ValueId) -> &Type {
        self.graph.ty(v)
    }
    /// The sizes of a value.
    pub fn dims(&self, v: ValueId) -> Vec<usize> {
        self.graph.ty(v).dims.clone()
    }
    /// Sets the section of the nodes to come (at first `Forward`).
    pub fn enter(&mut self, section: Section) {
        self.section = Some(section);
    }
    /// The section of the nodes to come.
    pub fn section(&self) -> Section {
        self.section.unwrap_or(Section::Forward)
    }

    fn value(&mut self, name: String, ty: Type, def: Def) -> ValueId {
        let id = ValueId(self.graph.values.len() as u32);
        self.graph.values.push(Value { name, ty, def });
        id
    }
    /// A new input.
    pub fn input(&mut self, name: impl Into<String>, ty: Type, batch_dim: Option<usize>) -> ValueId {
        let name = name.into();
        let index = self.graph.inputs.len();
        let value = self.value(name.clone(), ty, Def::Input(index));
        self.graph.inputs.push(Input { name, value, batch_dim });
        value
    }
    /// A new state; parameters of a float type are trainable until the caller says otherwise.
    pub fn state(
        &mut self,
        name: impl Into<String>,
        kind: StateKind,
        ty: Type,
        init: Init,
        of: Option<StateId>,
    ) -> StateId {
        let name = name.into();
        let id = StateId(self.graph.states.len() as u32);
        let trainable = kind == StateKind::Parameter && ty.dtype.is_float();
        let read = self.value(name.clone(), ty, Def::State(id));
        self.graph.states.push(State { name, kind, read, write: None, init, of, trainable, tied: Vec::new() });
        id
    }
    /// A constant.
    pub fn constant(&mut self, t: Tensor) -> ValueId {
        let key = (t.ty().clone(), t.bytes().to_vec());
        if let Some(&v) = self.constants.get(&key) {
            return v;
        }
        let v = self.value(String::new(), t.ty().clone(), Def::Const(Arc::new(t)));
        self.constants.insert(key, v);
        v
    }
    /// A scalar constant of any element type (converted from f64).
    pub fn scalar(&mut self, dtype: crate::dtype::DType, x: f64) -> ValueId {
        let t = crate::convert::scalar(dtype, x);
        self.constant(t)
    }
    /// A new output.
    pub fn output(&mut self, name: impl Into<String>, value: ValueId, batch_dim: Option<usize>) {
        self.graph.outputs.push(Output { name: name.into(), value, batch_dim });
    }

    /// Applies an operator. Returns its results: existing values where the operator does nothing on these operands, is
    /// already applied to them in this section, or has constant operands only.
    ///
    /// # Errors
    /// Operands that do not fit, with the reason; the caller knows the place.
    pub fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let types: Vec<Type> = inputs.iter().map(|&v| self.ty(v).clone()).collect();
        let outs = op.infer(&types)?;
        if let Some(huge) = outs.iter().find(|t| !t.is_sane()) {
            return Err(OpError(format!("the result would be {huge}: more than 2^48 elements")));
        }
        if let [out] = &outs[..]
            && let Some(i) = (op.def.identity)(&op, &types, out)
        {
            return Ok(vec![inputs[i]]);
        }
        let section = self.section();
        let key = (op, inputs.to_vec(), section);
        if let Some(found) = self.shared.get(&key) {
            return Ok(found.clone());
        }
        let (op, ..) = &key;
        // A constant accumulated over micro-batches is as many times the constant.
        let small = op.name() != crate::verify::ACCUMULATE && outs.iter().all(|t| t.numel() <= FOLD_LIMIT);
        let constants: Option<Vec<Arc<Tensor>>> = inputs.iter().map(|&v| self.graph.constant(v).cloned()).collect();
        if let (Some(constants), true) = (constants, small) {
            let results = crate::interp::apply(op, &constants, &outs).map_err(|e| OpError(e.0))?;
            let folded: Vec<ValueId> = results.into_iter().map(|t| self.constant(t)).collect();
            self.shared.insert(key, folded.clone());
            return Ok(folded);
        }
        let outputs = self.append(op.clone(), inputs, outs);
        self.shared.insert(key, outputs.clone());
        Ok(outputs)
    }
    /// Applies an operator in a node of its own, which no other application shares.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn emit_apart(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let types: Vec<Type> = inputs.iter().map(|&v| self.ty(v).clone()).collect();
        let outs = op.infer(&types)?;
        Ok(self.append(op, inputs, outs))
    }
    fn append(&mut self, op: Op, inputs: &[ValueId], outs: Vec<Type>) -> Vec<ValueId> {
        let id = NodeId(self.graph.nodes.len() as u32);
        let outputs: Vec<ValueId> =
            outs.into_iter().enumerate().map(|(i, ty)| self.value(String::new(), ty, Def::Node(id, i))).collect();
        self.graph.nodes.push(Node {
            name: self.name.clone(),
            scope: self.scope.clone(),
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            section: self.section(),
            of: self.of,
        });
        outputs
    }
    /// [`emit`](Self::emit) of an operator with one result.
    pub fn emit1(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        Ok(self.emit(op, inputs)?[0])
    }
}
