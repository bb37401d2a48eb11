//! Rebuilds a graph node by node, dropping what nothing needs: the frame of every pass that rewrites.
//!
//! Inputs and states are kept, in order and with their ids; nodes are emitted anew through [`Builder::emit`], so a pass
//! may emit other nodes instead. Names, scopes and sections are carried over.

use crate::builder::Builder;
use crate::graph::{Def, Graph, Node, NodeId, ValueId};
use crate::op::OpError;

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
fn roots(graph: &Graph) -> impl Iterator<Item = ValueId> {
    graph.outputs.iter().map(|o| o.value).chain(graph.states.iter().filter_map(|s| s.write))
}

/// Which nodes outputs and written states need.
pub fn live(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.nodes.len()];
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

type Finish<'a> = &'a mut dyn FnMut(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>;

/// Rebuilds a graph. `emit` gets each live node with its operands in the new graph, and returns its results there, of any
/// type that the later nodes accept; `finish` may adjust each output (a cast back).
///
/// # Errors
/// The first node for which `emit` fails.
pub fn rebuild(
    graph: &Graph,
    mut emit: impl FnMut(&mut Builder, &Node, &[ValueId]) -> Result<Vec<ValueId>, OpError>,
    mut finish: impl FnMut(&mut Builder, ValueId, ValueId) -> Result<ValueId, OpError>,
) -> Result<Graph, RewriteError> {
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
    let live = live(graph);
    let mut nodes: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    let value = |b: &mut Builder, map: &mut [Option<ValueId>], v: ValueId| match (&graph.value(v).def, map[v.index()]) {
        (_, Some(new)) => new,
        (Def::Const(t), None) => *map[v.index()].insert(b.constant((**t).clone())),
        (_, None) => unreachable!("operands come before the node, as the verifier holds"),
    };
    for id in graph.node_ids().filter(|id| live[id.index()]) {
        let n = graph.node(id);
        b.enter(n.section);
        b.name.clone_from(&n.name);
        b.scope.clone_from(&n.scope);
        b.of = n.of.and_then(|f| nodes[f.index()]);
        let ins: Vec<ValueId> = n.inputs.iter().map(|&v| value(&mut b, &mut map, v)).collect();
        let fail = |reason| RewriteError { node: id, name: n.name.clone(), reason };
        let outs = emit(&mut b, n, &ins).map_err(fail)?;
        nodes[id.index()] = outs.first().and_then(|&v| b.graph().producer(v));
        for (&old, &new) in n.outputs.iter().zip(&outs) {
            let name = &graph.value(old).name;
            let slot = &mut b.graph_mut().values[new.index()];
            if slot.name.is_empty() && matches!(slot.def, Def::Node(..)) {
                slot.name.clone_from(name);
            }
            map[old.index()] = Some(new);
        }
    }
    let root = |b: &mut Builder, v: ValueId, finish: Finish<'_>| {
        let new = match &graph.value(v).def {
            Def::Const(t) => b.constant((**t).clone()),
            _ => map[v.index()].expect("roots are live"),
        };
        let (name, scope, section) = match graph.producer(v).map(|p| graph.node(p)) {
            Some(n) => (n.name.clone(), n.scope.clone(), n.section),
            None => (String::new(), String::new(), crate::graph::Section::Forward),
        };
        (b.name, b.scope, b.of) = (name, scope, None);
        b.enter(section);
        finish(b, v, new).map_err(|reason| RewriteError {
            node: graph.producer(v).unwrap_or(NodeId(0)),
            name: graph.value(v).name.clone(),
            reason,
        })
    };
    for o in &graph.outputs {
        let v = root(&mut b, o.value, &mut finish)?;
        b.output(o.name.clone(), v, o.batch_dim);
    }
    for id in graph.state_ids() {
        if let Some(w) = graph.state(id).write {
            let v = root(&mut b, w, &mut finish)?;
            b.graph_mut().states[id.index()].write = Some(v);
        }
    }
    Ok(compact(b.finish()))
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
