//! What crosses pipeline stages: which value, from where to where, in which list, lying how.
//!
//! A value goes directly from its producer's stage to every stage that uses it, once per micro-batch (states: once per
//! step). How it lies while it travels: see [`travels`]. Nodes that run `everywhere` send nothing.

use std::collections::BTreeMap;

use autoshard_ir::graph::{Def, Section};
use autoshard_ir::{Graph, NodeId, ValueId};
use autoshard_planner::assignment::{Assignment, StageId};
use autoshard_planner::kernels;
use autoshard_planner::reshard::travels;
use autoshard_planner::spec::Spec;
use autoshard_runtime::program::List;

use crate::error::CompileError;
use crate::partition::NodeSpecs;

/// One message between two stages.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// How the value lies while it travels.
    pub spec: Spec,
    /// The list that sends and receives it.
    pub list: List,
    /// Unique number; a list sends in the order of tags.
    pub tag: u32,
}

/// All transfers, and which nodes run where.
pub struct Transfers {
    /// Per value, by destination.
    pub of: BTreeMap<ValueId, BTreeMap<StageId, Transfer>>,
    /// Per node, the stages that run it.
    pub runs: Vec<Vec<StageId>>,
    /// Per node, whether it runs once for all micro-batches.
    pub once: Vec<bool>,
}

/// The spec in which a value first lies; `None` for constants, which are written as they are wanted.
pub fn made(graph: &Graph, a: &Assignment, specs: &[NodeSpecs], v: ValueId) -> Option<Spec> {
    match graph.value(v).def {
        Def::State(s) => Some(a.storage(s).clone()),
        Def::Node(n, i) => Some(specs[n.index()].outputs[i].clone()),
        Def::Input(port) => Some(a.inputs[port].clone()),
        Def::Const(_) => None,
    }
}

/// The stage that has a value, and the spec it has there; `None` where every stage makes it by itself.
pub fn home(graph: &Graph, a: &Assignment, specs: &[NodeSpecs], v: ValueId) -> Option<(StageId, Spec)> {
    let stage = match graph.value(v).def {
        Def::State(s) => a.home[s.index()],
        Def::Node(n, _) if !a.everywhere[n.index()] => a.stage[n.index()],
        _ => return None,
    };
    made(graph, a, specs, v).map(|spec| (stage, spec))
}

/// Finds what crosses stages.
pub fn transfers(graph: &Graph, a: &Assignment, specs: &[NodeSpecs]) -> Result<Transfers, CompileError> {
    let uses = graph.uses();
    let mut runs: Vec<Vec<StageId>> = a.stage.iter().map(|&s| vec![s]).collect();
    for id in graph.node_ids().rev() {
        if a.everywhere[id.index()] {
            let mut stages: Vec<StageId> = Vec::new();
            for &v in &graph.node(id).outputs {
                stages.extend(uses[v.index()].iter().flat_map(|c| runs[c.index()].iter().copied()));
                if graph.outputs.iter().any(|o| o.value == v) {
                    stages.push(a.stage[id.index()]);
                }
                stages.extend(graph.states.iter().zip(&a.home).filter(|(s, _)| s.write == Some(v)).map(|(_, h)| *h));
            }
            stages.sort();
            stages.dedup();
            runs[id.index()] = stages;
        }
    }
    // Consumers of every value: stage, and the spec it is wanted in.
    let mut wanted: BTreeMap<ValueId, Vec<(StageId, Spec)>> = BTreeMap::new();
    for id in graph.node_ids() {
        for (i, &v) in graph.node(id).inputs.iter().enumerate() {
            for &s in &runs[id.index()] {
                wanted.entry(v).or_default().push((s, specs[id.index()].inputs[i].clone()));
            }
        }
    }
    for (s, state) in graph.states.iter().enumerate() {
        if let Some(w) = state.write {
            wanted.entry(w).or_default().push((a.home[s], a.storage[s].clone()));
        }
    }
    let once = kernels::once(graph, a.micro_batches);
    let mut of: BTreeMap<ValueId, BTreeMap<StageId, Transfer>> = BTreeMap::new();
    for (v, wants) in wanted {
        let Some((from, made)) = home(graph, a, specs, v) else { continue };
        let list = match graph.value(v).def {
            Def::Node(n, _) => list_of(graph, &once, n),
            _ => List::Prologue,
        };
        for (to, want) in wants {
            if to == from || of.get(&v).is_some_and(|m| m.contains_key(&to)) {
                continue;
            }
            let spec = travels(&made, &want, graph.ty(v), &a.mesh);
            of.entry(v).or_default().insert(to, Transfer { spec, list, tag: 0 });
        }
    }
    number(graph, &mut of);
    Ok(Transfers { of, runs, once })
}

/// Numbers transfers in the order in which lists send them: states by id; sums over micro-batches first in `Update`;
/// then results in the order of their nodes.
fn number(graph: &Graph, of: &mut BTreeMap<ValueId, BTreeMap<StageId, Transfer>>) {
    let order = |v: &ValueId| match graph.value(*v).def {
        Def::State(s) => (0, s.index(), 0),
        Def::Node(n, i) => (if graph.node(n).is_accumulate() { 1 } else { 2 }, n.index(), i),
        _ => (3, 0, 0),
    };
    let mut values: Vec<ValueId> = of.keys().copied().collect();
    values.sort_by_key(order);
    let mut tag = 0;
    for v in values {
        for t in of.get_mut(&v).into_iter().flat_map(|m| m.values_mut()) {
            t.tag = tag;
            tag += 1;
        }
    }
}

/// The list that a node is in: what runs once, in the prologue. An `Accumulate` is in its section's list, but what it gives
/// is there after the last micro-batch only, so it crosses stages in `Update`.
pub fn list_of(graph: &Graph, once: &[bool], n: NodeId) -> List {
    let node = graph.node(n);
    if once[n.index()] {
        return List::Prologue;
    }
    if node.is_accumulate() {
        return List::Update;
    }
    match node.section {
        Section::Forward => List::Forward,
        Section::Backward => List::Backward,
        Section::Update => List::Update,
    }
}
