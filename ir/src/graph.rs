//! The graph: values and nodes in arenas, states, inputs, outputs, sections.
//!
//! Sizes are integers: symbols of an ONNX file are bound before its graph is built (see [`crate::onnx`]), and a file is
//! parsed once and instantiated per micro-batch size.
//!
//! Invariants (checked by [`crate::verify`]):
//! - SSA: each value is defined once; node ids are a topological order, that is a node's inputs are defined by nodes
//!   before it. Passes keep this by building a new graph.
//! - Types of outputs are what the operator's shape rule says.
//! - A `Backward` node is used by no `Forward` node, an `Update` node by neither.
//!
//! A training step in three sections: `Forward` and `Backward` run once per micro-batch, `Update` once per step. The
//! only values that pass from the per-micro-batch sections to `Update` are outputs of `Accumulate` nodes (the sum over
//! micro-batches) and states.
//!
//! Read next: [`crate::op`] (what a node does), [`crate::builder`] (how to make graphs).

use std::sync::Arc;

use crate::op::Op;
use crate::tensor::{Tensor, Type};
use crate::weights::WeightRef;

macro_rules! id {
    ($(#[$m:meta])* $name:ident, $p:literal) => {
        $(#[$m])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u32);
        impl $name {
            /// As an index into the arena.
            pub fn index(self) -> usize { self.0 as usize }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, concat!($p, "{}"), self.0) }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, "{self}") }
        }
    };
}
id!(/** A value of a graph. */ ValueId, "%");
id!(/** A node of a graph. */ NodeId, "n");
id!(/** A state of a graph: a parameter, or an optimizer's state. */ StateId, "s");

/// A graph. See the module for its invariants.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Name, for people.
    pub name: String,
    /// All values, by [`ValueId`].
    pub values: Vec<Value>,
    /// All nodes, by [`NodeId`], in topological order.
    pub nodes: Vec<Node>,
    /// All states, by [`StateId`].
    pub states: Vec<State>,
    /// What the caller feeds, per micro-batch.
    pub inputs: Vec<Input>,
    /// What the caller gets back.
    pub outputs: Vec<Output>,
}

/// An SSA value.
#[derive(Debug, Clone)]
pub struct Value {
    /// Name in the source file where there is one; not unique.
    pub name: String,
    /// Element type and sizes.
    pub ty: Type,
    /// What defines it.
    pub def: Def,
}

/// What defines a value.
#[derive(Debug, Clone)]
pub enum Def {
    /// The input of that index.
    Input(usize),
    /// The content of a state at the start of the step.
    State(StateId),
    /// A constant (small: large ones stay nodes).
    Const(Arc<Tensor>),
    /// Output `index` of a node.
    Node(NodeId, usize),
}

/// An application of an operator.
#[derive(Debug, Clone)]
pub struct Node {
    /// Name for people: the source node's name, or where it came from.
    pub name: String,
    /// Module path in the source model (`model.layers.3.mlp`), empty when unknown.
    pub scope: String,
    /// The operator and its attributes.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// When it runs.
    pub section: Section,
    /// For backward nodes: the forward node that they serve.
    pub of: Option<NodeId>,
}

impl Node {
    /// Whether it is the sum of its operand over micro-batches.
    pub fn is_accumulate(&self) -> bool {
        self.op.name() == crate::verify::ACCUMULATE
    }
}

/// When a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// Once per micro-batch.
    Forward,
    /// Once per micro-batch, after its forward.
    Backward,
    /// Once per step, after all micro-batches.
    Update,
}

/// What the caller feeds.
#[derive(Debug, Clone)]
pub struct Input {
    /// Name in the source file.
    pub name: String,
    /// Its value.
    pub value: ValueId,
    /// The dim along which micro-batches are cut; `None`: the same for all micro-batches.
    pub batch_dim: Option<usize>,
}

/// What the caller gets.
#[derive(Debug, Clone)]
pub struct Output {
    /// Name in the source file, or `grad/NAME` and the like.
    pub name: String,
    /// Its value.
    pub value: ValueId,
    /// The dim along which micro-batches are joined; `None`: of `Update`, or equal for all micro-batches.
    pub batch_dim: Option<usize>,
}

/// Something kept on the devices between steps.
#[derive(Debug, Clone)]
pub struct State {
    /// Unique name: the initializer's, or `adam.m/NAME` and the like.
    pub name: String,
    /// What it is.
    pub kind: StateKind,
    /// Its value at the start of a step.
    pub read: ValueId,
    /// Its value at the end; `None`: never changes.
    pub write: Option<ValueId>,
    /// Its first content.
    pub init: Init,
    /// For optimizer state: the parameter it belongs to.
    pub of: Option<StateId>,
    /// Whether training changes it: a parameter that the model learns, not a buffer (running statistics, tables).
    pub trainable: bool,
    /// Other initializers of the model file that hold the same weight.
    pub tied: Vec<Tied>,
}

/// A copy of a parameter in the model file.
#[derive(Debug, Clone, PartialEq)]
pub struct Tied {
    /// The copy.
    pub weight: WeightRef,
    /// Whether it is the parameter's transpose.
    pub transposed: bool,
}

/// What a state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// A parameter; trained when it has a `write`.
    Parameter,
    /// State of the optimizer: a moment, the step count.
    Optimizer,
}

/// The first content of a state.
#[derive(Debug, Clone)]
pub enum Init {
    /// Read from a model file.
    Weight(WeightRef),
    /// Zeros.
    Zeros,
}

impl Graph {
    /// The value of that id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }
    /// The type of that value.
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.values[id.index()].ty
    }
    /// The node of that id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }
    /// The state of that id.
    pub fn state(&self, id: StateId) -> &State {
        &self.states[id.index()]
    }
    /// All node ids, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + ExactSizeIterator + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }
    /// All value ids.
    pub fn value_ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + ExactSizeIterator + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }
    /// All state ids.
    pub fn state_ids(&self) -> impl DoubleEndedIterator<Item = StateId> + ExactSizeIterator + use<> {
        (0..self.states.len() as u32).map(StateId)
    }
    /// The node that defines a value, if one does.
    pub fn producer(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).def {
            Def::Node(n, _) => Some(n),
            _ => None,
        }
    }
    /// The constant that a value is, if it is one.
    pub fn constant(&self, id: ValueId) -> Option<&Arc<Tensor>> {
        match &self.value(id).def {
            Def::Const(t) => Some(t),
            _ => None,
        }
    }
    /// The types of a node's operands.
    pub fn input_types(&self, n: &Node) -> Vec<Type> {
        n.inputs.iter().map(|&v| self.ty(v).clone()).collect()
    }
    /// The types of a node's results.
    pub fn output_types(&self, n: &Node) -> Vec<Type> {
        n.outputs.iter().map(|&v| self.ty(v).clone()).collect()
    }
    /// Per value, the nodes that use it (a node twice when it uses it twice), in order.
    pub fn uses(&self) -> Vec<Vec<NodeId>> {
        let mut uses = vec![Vec::new(); self.values.len()];
        for id in self.node_ids() {
            for &v in &self.node(id).inputs {
                uses[v.index()].push(id);
            }
        }
        uses
    }
    /// Which forward nodes depend on no state (masks, positions).
    pub fn stateless(&self) -> Vec<bool> {
        let mut free = vec![false; self.nodes.len()];
        for id in self.node_ids() {
            let n = self.node(id);
            let operand = |v: &_| match self.value(*v).def {
                Def::State(_) => false,
                Def::Node(p, _) => free[p.index()],
                Def::Input(_) | Def::Const(_) => true,
            };
            free[id.index()] = n.section == Section::Forward && n.inputs.iter().all(operand);
        }
        free
    }
    /// Whether a forward node casts a state: a parameter to the compute precision.
    pub fn casts_state(&self, n: &Node) -> bool {
        let state = |v: &ValueId| matches!(self.value(*v).def, Def::State(_));
        n.section == Section::Forward && n.op.name() == "Cast" && n.inputs.iter().all(state)
    }
    /// The number of elements of all parameters.
    pub fn parameter_count(&self) -> u64 {
        self.states.iter().filter(|s| s.kind == StateKind::Parameter).map(|s| self.ty(s.read).numel() as u64).sum()
    }
}
