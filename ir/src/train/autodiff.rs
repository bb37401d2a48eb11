//! Reverse-mode differentiation: appends `Backward` nodes to a forward graph.
//!
//! Gradients flow from seeds to the trainable states, through the `Forward` nodes that lie on a path between both and by
//! the operators' own rules ([`crate::op::Gradient`]). A backward node carries `of`, the forward node that it serves, and
//! that node's name and scope. Gradients of a value that is used several times are added as they arrive, which keeps at
//! most one alive. Contributions to a state, and to its cast to the compute precision, are kept apart by pipeline stage.

use std::collections::BTreeMap;

use crate::builder::Builder;
use crate::graph::{Def, Graph, Node, NodeId, Section, StateId, ValueId};
use crate::op::{GradCx, Gradient, Op, OpError};

/// A node through which no gradient can pass.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} ({name}, {op}): {reason}")]
pub struct NoGradient {
    /// Its id in the prepared forward graph.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its operator.
    pub op: String,
    /// Why.
    pub reason: String,
}

/// A contribution to the gradient of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contribution {
    /// The sum of what all uses in one stage contribute.
    pub value: ValueId,
    /// A forward node of that stage which uses the state.
    pub of: NodeId,
}

/// Per state and pipeline stage, the gradient.
pub type Gradients = BTreeMap<StateId, BTreeMap<u16, Contribution>>;

/// Appends the backward graph. `seeds` are values with their gradients; `stage_of` gives a stage per forward node (empty:
/// one stage).
///
/// # Errors
/// All nodes on the way without a gradient.
pub fn differentiate(
    b: &mut Builder,
    seeds: &[(ValueId, ValueId)],
    stage_of: &[u16],
) -> Result<Gradients, Vec<NoGradient>> {
    let needs = depends_on_trainable(b.graph());
    let on_path = on_path(b.graph(), &needs, seeds);
    let forward: Vec<NodeId> = b.graph().node_ids().filter(|n| on_path[n.index()]).collect();
    let mut found: Vec<NoGradient> = forward.iter().filter_map(|&n| internal(b.graph(), n)).collect();
    if !found.is_empty() {
        return Err(found);
    }
    let mut sweep = Sweep { needs, stage_of, grads: BTreeMap::new(), casts: BTreeMap::new(), states: Gradients::new() };
    b.enter(Section::Backward);
    for &(v, g) in seeds {
        if let Err(e) = sweep.arrive(b, v, g, None) {
            found.extend(b.graph().producer(v).map(|n| failure(b.graph(), n, e.0)));
        }
    }
    for &id in forward.iter().rev() {
        if let Err(e) = sweep.node(b, id) {
            found.push(failure(b.graph(), id, e.0));
        }
    }
    (b.of, b.name, b.scope) = (None, String::new(), String::new());
    if found.is_empty() { Ok(sweep.states) } else { Err(found) }
}

fn failure(g: &Graph, node: NodeId, reason: String) -> NoGradient {
    let n = g.node(node);
    NoGradient { node, name: n.name.clone(), op: n.op.to_string(), reason }
}

fn internal(g: &Graph, node: NodeId) -> Option<NoGradient> {
    match g.node(node).op.def.gradient {
        Gradient::Internal(why) => Some(failure(g, node, format!("has no gradient: {why}"))),
        _ => None,
    }
}

/// Which values depend smoothly on a trainable state.
pub fn depends_on_trainable(g: &Graph) -> Vec<bool> {
    let mut depends = vec![false; g.values.len()];
    for s in g.states.iter().filter(|s| s.trainable && g.ty(s.read).dtype.is_float()) {
        depends[s.read.index()] = true;
    }
    for n in &g.nodes {
        if n.section == Section::Forward
            && !matches!(n.op.def.gradient, Gradient::None)
            && n.inputs.iter().any(|v| depends[v.index()])
        {
            for &v in &n.outputs {
                depends[v.index()] = g.ty(v).dtype.is_float();
            }
        }
    }
    depends
}

/// Which nodes lie between trainable states and seeds.
fn on_path(g: &Graph, needs: &[bool], seeds: &[(ValueId, ValueId)]) -> Vec<bool> {
    let mut reached = vec![false; g.values.len()];
    for (v, _) in seeds {
        reached[v.index()] = true;
    }
    let mut nodes = vec![false; g.nodes.len()];
    for id in g.node_ids().rev() {
        let n = g.node(id);
        if n.section == Section::Forward && n.outputs.iter().any(|v| reached[v.index()] && needs[v.index()]) {
            nodes[id.index()] = true;
            for &v in &n.inputs {
                reached[v.index()] |= needs[v.index()];
            }
        }
    }
    nodes
}

struct Sweep<'a> {
    needs: Vec<bool>,
    stage_of: &'a [u16],
    /// Per value, what has arrived, and a forward node in whose stage it lies.
    grads: BTreeMap<ValueId, (ValueId, Option<NodeId>)>,
    /// The same for casts of states, by stage.
    casts: BTreeMap<ValueId, BTreeMap<u16, Contribution>>,
    states: Gradients,
}

impl Sweep<'_> {
    /// Lets the gradients of a node's results pass to its operands.
    fn node(&mut self, b: &mut Builder, id: NodeId) -> Result<(), OpError> {
        let n = b.graph().node(id).clone();
        let by_stage = n.outputs.first().and_then(|v| self.casts.remove(v)).unwrap_or_default();
        for (stage, c) in by_stage {
            // Each stage casts its own contribution.
            let of = if stage == self.stage(id) { id } else { c.of };
            self.back(b, &n, &[Some(c.value)], of)?;
        }
        let grads: Vec<Option<ValueId>> = n.outputs.iter().map(|v| self.grads.remove(v).map(|g| g.0)).collect();
        if grads.iter().all(Option::is_none) {
            return Ok(());
        }
        self.back(b, &n, &grads, id)
    }

    fn stage(&self, n: NodeId) -> u16 {
        self.stage_of.get(n.index()).copied().unwrap_or(0)
    }

    /// Applies the rule of a node, for the forward node `of`.
    fn back(&mut self, b: &mut Builder, n: &Node, grads: &[Option<ValueId>], of: NodeId) -> Result<(), OpError> {
        let Gradient::Rule(rule) = n.op.def.gradient else { return Ok(()) };
        let wanted: Vec<bool> = n.inputs.iter().map(|v| self.needs[v.index()]).collect();
        (b.of, b.name, b.scope) = (Some(of), n.name.clone(), n.scope.clone());
        let mut cx = GradCx { op: &n.op, inputs: &n.inputs, outputs: &n.outputs, grads, wanted: &wanted, b };
        let results = rule(&mut cx)?;
        if results.len() != n.inputs.len() {
            let (got, want) = (results.len(), n.inputs.len());
            return Err(OpError(format!("its gradient rule gave {got} gradients for {want} operands")));
        }
        for (i, grad) in results.into_iter().enumerate() {
            if let (Some(grad), true) = (grad, wanted[i]) {
                self.arrive(b, n.inputs[i], grad, Some(of))?;
            }
        }
        Ok(())
    }

    /// Adds a gradient to those that arrived at `v` before, from the forward node `from`.
    fn arrive(&mut self, b: &mut Builder, v: ValueId, grad: ValueId, from: Option<NodeId>) -> Result<(), OpError> {
        if b.ty(v) != b.ty(grad) {
            let (want, got) = (b.ty(v), b.ty(grad));
            return Err(OpError(format!("its gradient rule gave {got} for an operand of type {want}")));
        }
        match (b.graph().value(v).def.clone(), from) {
            (Def::State(s), Some(of)) => {
                let stage = self.stage(of);
                let value = match self.states.get(&s).and_then(|by_stage| by_stage.get(&stage)) {
                    Some(before) => add(b, before.value, grad)?,
                    None => grad,
                };
                self.states.entry(s).or_default().insert(stage, Contribution { value, of });
            }
            (Def::Node(cast, _), Some(of)) if b.graph().casts_state(b.graph().node(cast)) => {
                let stage = self.stage(of);
                let before = self.casts.get(&v).and_then(|by_stage| by_stage.get(&stage)).copied();
                let value = match before {
                    Some(before) => add(b, before.value, grad)?,
                    None => grad,
                };
                self.casts.entry(v).or_default().insert(stage, Contribution { value, of });
            }
            (def, _) => {
                let (value, at) = match self.grads.get(&v) {
                    Some(&(before, at)) => {
                        // The sum belongs where the value is made; or, to send it rather than its parts, where all of them
                        // come from.
                        if let Def::Node(producer, _) = def {
                            let stages = [at, from].map(|n| n.map(|n| self.stage(n)));
                            let away = stages[0] == stages[1] && stages[0] != Some(self.stage(producer));
                            let producer = from.filter(|_| away).unwrap_or(producer);
                            let n = b.graph().node(producer);
                            let (name, scope) = (n.name.clone(), n.scope.clone());
                            let keep = (b.of, b.name.clone(), b.scope.clone());
                            (b.of, b.name, b.scope) = (Some(producer), name, scope);
                            let sum = add(b, before, grad);
                            (b.of, b.name, b.scope) = keep;
                            (sum?, Some(producer))
                        } else {
                            (add(b, before, grad)?, from)
                        }
                    }
                    None => (grad, from),
                };
                self.grads.insert(v, (value, at));
            }
        }
        Ok(())
    }
}

/// `x + y`.
pub(super) fn add(b: &mut Builder, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
    emit(b, "Add", &[x, y])
}

/// Applies an operator of the table without attributes.
pub(super) fn emit(b: &mut Builder, name: &str, inputs: &[ValueId]) -> Result<ValueId, OpError> {
    let def = crate::ops::find(name).ok_or_else(|| OpError(format!("the operator table has no {name}")))?;
    b.emit1(Op::new(def), inputs)
}
