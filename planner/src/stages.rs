//! On which pipeline stage every node of a step graph runs, and every state lives, given the stages of the forward nodes.
//!
//! - A backward node runs where its forward node does; one without runs where its last operand comes from.
//! - A state lives where it is first used: tied weights have one home, and other stages get their copy from it.
//!   Optimizer states live with their parameter; others where they are first read.
//! - An update node runs where the state lives that its results end in; if there is no or more than one, where its
//!   first operand comes from.
//! - Forward nodes that depend on no state (masks, position ids) run in every stage that needs them.

use autoshard_ir::graph::{Def, Graph, NodeId, Section, StateId};

use crate::assignment::StageId;

/// Places of nodes and states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    /// The number of stages.
    pub count: usize,
    /// Of each node.
    pub node: Vec<StageId>,
    /// Whether a node runs in every stage that needs it.
    pub everywhere: Vec<bool>,
    /// Of each state.
    pub home: Vec<StageId>,
}

/// Places everything; `forward` gives the stage of each forward node, the first nodes of the graph.
pub fn place(graph: &Graph, forward: &[StageId], count: usize) -> Stages {
    let everywhere = if count > 1 { graph.stateless() } else { vec![false; graph.nodes.len()] };
    let mut node = vec![StageId(0); graph.nodes.len()];
    let mut home: Vec<Option<StageId>> = vec![None; graph.states.len()];
    let states = |n: NodeId| {
        graph.node(n).inputs.iter().filter_map(|&v| match graph.value(v).def {
            Def::State(s) => Some(s),
            _ => None,
        })
    };
    let operand = |node: &[StageId], n: NodeId, last: bool| {
        let mut from = graph.node(n).inputs.iter().filter_map(|&v| graph.producer(v)).map(|p| node[p.index()]);
        if last { from.max() } else { from.next() }
    };
    for id in graph.node_ids() {
        let n = graph.node(id);
        node[id.index()] = match (n.section, n.of) {
            (Section::Forward, _) => forward.get(id.index()).copied().unwrap_or_default(),
            (Section::Backward, Some(of)) => node[of.index()],
            (Section::Backward, None) => operand(&node, id, true).unwrap_or_default(),
            (Section::Update, _) => continue,
        };
        for s in states(id) {
            home[s.index()].get_or_insert(node[id.index()]);
        }
    }
    // What an update node's results end in, from the last node to the first.
    let mut ends: Vec<Option<Option<StateId>>> = vec![None; graph.values.len()];
    let join = |a: Option<Option<StateId>>, b: Option<Option<StateId>>| match (a, b) {
        (None, x) | (x, None) => x,
        (Some(x), Some(y)) => Some(if x == y { x } else { None }),
    };
    let root = |s: StateId| graph.state(s).of.unwrap_or(s);
    for s in graph.state_ids() {
        if let Some(w) = graph.state(s).write {
            ends[w.index()] = join(ends[w.index()], Some(Some(root(s))));
        }
    }
    let updates: Vec<NodeId> = graph.node_ids().filter(|&n| graph.node(n).section == Section::Update).collect();
    let mut goal: Vec<Option<StateId>> = vec![None; graph.nodes.len()];
    for &id in updates.iter().rev() {
        let n = graph.node(id);
        let end = n.outputs.iter().map(|v| ends[v.index()]).fold(None, join);
        goal[id.index()] = end.flatten();
        for v in &n.inputs {
            ends[v.index()] = join(ends[v.index()], end);
        }
    }
    for id in updates {
        let at = goal[id.index()].and_then(|s| home[s.index()]);
        let here = at.or_else(|| operand(&node, id, false)).unwrap_or_default();
        node[id.index()] = here;
        for s in states(id) {
            let of = graph.state(s).of.and_then(|o| home[o.index()]);
            home[s.index()].get_or_insert(of.unwrap_or(here));
        }
    }
    for s in graph.state_ids() {
        if home[s.index()].is_none() {
            home[s.index()] = graph.state(s).of.and_then(|o| home[o.index()]);
        }
    }
    Stages { count, node, everywhere, home: home.into_iter().map(Option::unwrap_or_default).collect() }
}

impl Stages {
    /// Everything in one stage.
    pub fn single(graph: &Graph) -> Stages {
        place(graph, &[], 1)
    }
}
