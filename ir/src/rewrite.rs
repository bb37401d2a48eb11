//! Rebuilds a graph node by node, dropping what nothing needs: the frame of every pass that rewrites.
//!
//! [`rebuild`] goes node by node; [`Rebuild`] leaves the order to the pass.
//!
//! Inputs and states are kept, in order and with their ids; nodes are emitted anew through [`Builder::emit`], so a pass
//! may emit other nodes instead. Names, scopes and sections are carried over.

use crate::builder::Builder;
use crate::graph::{Def, Graph, Node, NodeId, ValueId};
use crate::op::OpError;
use crate::train::recompute::originals;

/// A node that a pass could not rebuild.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} ({name}): {reason}")]
pub struct RewriteError {
    /// Its id in the old graph.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: OpError,
}

/// The values that a graph is there for.
pub(crate) fn roots(graph: &Graph) -> impl Iterator<Item = ValueId> {
    graph.outputs.iter().map(|o| o.value).chain(graph.states.iter().filter_map(|s| s.write))
}

/// Which nodes outputs and written states need; and what is recomputed, needed or not, with its operands.
pub fn live(graph: &Graph) -> Vec<bool> {
    let mut live: Vec<bool> = originals(graph).iter().map(Option::is_some).collect();
    for n in roots(graph).filter_map(|v| graph.producer(v)) {
        live[n.index()] = true;
    }
    // One sweep is enough: operands come before their users.
    for id in graph.node_ids().rev() {
        if live[id.index()] {
            for p in graph.node(id).inputs.iter().filter_map(|&v| graph.producer(v)) {
                live[p.index()] = true;
            }
        }
    }
    live
}

/// Rebuilds a graph. `emit` gets each live node with its operands in the new graph, and returns its results there, of any
/// type that the later nodes accept; `finish` may adjust each output (a cast back).
///
/// # Errors
/// The first node for which `emit` fails.
pub fn rebuild(
    graph: &Graph,
    mut emit: impl FnMut(&mut Builder, &Node, &[ValueId]) -> Result<Vec<ValueId>, OpError>,
    finish: impl FnMut(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>,
) -> Result<Graph, RewriteError> {
    let mut rebuild = Rebuild::new(graph);
    let live = live(graph);
    for id in graph.node_ids().filter(|id| live[id.index()]) {
        rebuild.node(id, &mut emit)?;
    }
    rebuild.finish(finish)
}

/// A graph on its way into a new one, for passes that do not go node by node.
pub struct Rebuild<'a> {
    graph: &'a Graph,
    b: Builder,
    /// Old values in the new graph.
    map: Vec<Option<ValueId>>,
    /// Old nodes in the new graph.
    nodes: Vec<Option<NodeId>>,
}

impl<'a> Rebuild<'a> {
    /// Inputs and states, no node yet.
    pub fn new(graph: &'a Graph) -> Rebuild<'a> {
        let mut b = Builder::new(graph.name.clone());
        let mut map: Vec<Option<ValueId>> = vec![None; graph.values.len()];
        for x in &graph.inputs {
            map[x.value.index()] = Some(b.input(x.name.clone(), graph.ty(x.value).clone(), x.batch_dim));
        }
        for s in &graph.states {
            let id = b.state(s.name.clone(), s.kind, graph.ty(s.read).clone(), s.init.clone(), s.of);
            let new = &mut b.graph_mut().states[id.index()];
            new.trainable = s.trainable;
            new.tied.clone_from(&s.tied);
            map[s.read.index()] = Some(b.graph().state(id).read);
        }
        Rebuild { graph, b, map, nodes: vec![None; graph.nodes.len()] }
    }
    /// The old graph.
    pub fn graph(&self) -> &'a Graph {
        self.graph
    }
    /// The new graph's builder.
    pub fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }
    /// An old value in the new graph. Panics when no node before gave it.
    pub fn value(&mut self, v: ValueId) -> ValueId {
        match (&self.graph.value(v).def, self.map[v.index()]) {
            (_, Some(new)) => new,
            (Def::Const(t), None) => *self.map[v.index()].insert(self.b.constant((**t).clone())),
            (_, None) => unreachable!("operands come before the node, as the verifier holds"),
        }
    }
    /// What an old value is in the new graph; it passes on its name.
    pub fn set(&mut self, old: ValueId, new: ValueId) {
        let slot = &mut self.b.graph_mut().values[new.index()];
        if slot.name.is_empty() && matches!(slot.def, Def::Node(..)) {
            slot.name.clone_from(&self.graph.value(old).name);
        }
        self.map[old.index()] = Some(new);
    }
    /// Emits with section, name and scope of an old node.
    ///
    /// # Errors
    /// Where `emit` fails.
    pub fn like<T>(
        &mut self,
        id: NodeId,
        emit: impl FnOnce(&mut Builder) -> Result<T, OpError>,
    ) -> Result<T, RewriteError> {
        let n = self.graph.node(id);
        self.b.enter(n.section);
        self.b.name.clone_from(&n.name);
        self.b.scope.clone_from(&n.scope);
        self.b.of = n.of.and_then(|f| self.nodes[f.index()]);
        emit(&mut self.b).map_err(|reason| RewriteError { node: id, name: n.name.clone(), reason })
    }
    /// Emits a node's results anew.
    ///
    /// # Errors
    /// Where `emit` fails.
    pub fn node(
        &mut self,
        id: NodeId,
        emit: impl FnOnce(&mut Builder, &Node, &[ValueId]) -> Result<Vec<ValueId>, OpError>,
    ) -> Result<(), RewriteError> {
        let n = self.graph.node(id);
        let ins: Vec<ValueId> = n.inputs.iter().map(|&v| self.value(v)).collect();
        let outs = self.like(id, |b| emit(b, n, &ins))?;
        self.nodes[id.index()] = outs.first().and_then(|&v| self.b.graph().producer(v));
        for (&old, &new) in n.outputs.iter().zip(&outs) {
            self.set(old, new);
        }
        Ok(())
    }
    /// Outputs and written states, each adjusted by `finish` from its old and new value.
    ///
    /// # Errors
    /// Where `finish` fails.
    pub fn finish(
        mut self,
        mut finish: impl FnMut(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>,
    ) -> Result<Graph, RewriteError> {
        let graph = self.graph;
        for o in &graph.outputs {
            let v = self.root(o.value, &mut finish)?;
            self.b.output(o.name.clone(), v, o.batch_dim);
        }
        for id in graph.state_ids() {
            if let Some(w) = graph.state(id).write {
                let v = self.root(w, &mut finish)?;
                self.b.graph_mut().states[id.index()].write = Some(v);
            }
        }
        Ok(compact(self.b.finish()))
    }
    fn root(
        &mut self,
        v: ValueId,
        finish: &mut impl FnMut(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>,
    ) -> Result<ValueId, RewriteError> {
        let new = self.value(v);
        let producer = self.graph.producer(v);
        let (name, scope, section) = match producer.map(|p| self.graph.node(p)) {
            Some(n) => (n.name.clone(), n.scope.clone(), n.section),
            None => (String::new(), String::new(), crate::graph::Section::Forward),
        };
        (self.b.name, self.b.scope, self.b.of) = (name, scope, None);
        self.b.enter(section);
        finish(&mut self.b, v, new).map_err(|reason| RewriteError {
            node: producer.unwrap_or(NodeId(0)),
            name: self.graph.value(v).name.clone(),
            reason,
        })
    }
}

/// Drops nodes that neither outputs nor written states need, and constants that nothing uses. Node ids stay up to the first
/// node dropped; value ids change.
pub fn compact(mut graph: Graph) -> Graph {
    let live = live(&graph);
    let mut nodes: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    let mut used = vec![false; graph.values.len()];
    for (new, id) in (0..).zip(graph.node_ids().filter(|id| live[id.index()])) {
        nodes[id.index()] = Some(NodeId(new));
        let n = graph.node(id);
        n.inputs.iter().chain(&n.outputs).for_each(|v| used[v.index()] = true);
    }
    for v in roots(&graph).collect::<Vec<_>>() {
        used[v.index()] = true;
    }
    let mut values: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    let mut kept = Vec::new();
    for (i, mut v) in std::mem::take(&mut graph.values).into_iter().enumerate() {
        match &mut v.def {
            Def::Node(n, _) => match nodes[n.index()] {
                Some(new) => *n = new,
                None => continue,
            },
            Def::Const(_) if !used[i] => continue,
            _ => {}
        }
        values[i] = Some(ValueId(kept.len() as u32));
        kept.push(v);
    }
    graph.values = kept;
    let map = |v: &mut ValueId| *v = values[v.index()].expect("what is used is kept");
    let mut keep = live.iter();
    graph.nodes.retain(|_| *keep.next().expect("one per node"));
    for n in &mut graph.nodes {
        n.inputs.iter_mut().chain(&mut n.outputs).for_each(map);
        n.of = n.of.and_then(|of| nodes[of.index()]);
    }
    graph.inputs.iter_mut().for_each(|x| map(&mut x.value));
    graph.outputs.iter_mut().for_each(|x| map(&mut x.value));
    for s in &mut graph.states {
        map(&mut s.read);
        s.write.iter_mut().for_each(map);
    }
    graph
}
