//! Checks that a graph keeps its invariants. Runs between passes, in release builds too: one walk over the graph.
//!
//! Rules, each violation of which is reported with its place:
//! - **Arenas**: ids are in range, and `Value::def` and the table it points to agree (so each value is defined once).
//! - **Order**: operands of a node are defined by nodes before it.
//! - **Types**: results have the types that the operator's shape rule gives; constants have the type of their tensor.
//! - **Sections**: `Forward` uses no `Backward`, neither uses `Update`. What `Update` takes from the per-micro-batch
//!   sections are results of `Accumulate` nodes, which only `Update` uses; of the inputs it takes those that are the
//!   same for all micro-batches.
//! - **Service**: `of` names an earlier `Forward` node, and is set on `Backward` nodes only.
//! - **States**: names are unique, a written value has the type of the one read and, in a training step, is made in
//!   `Update` (or is what some state holds); `of` is set on optimizer states only and names a parameter.
//! - **Inputs and outputs**: names are unique, batch dims exist, what `Update` makes has no batch dim.

use std::collections::BTreeSet;
use std::fmt;

use crate::graph::{Def, Graph, NodeId, Section, StateId, StateKind, ValueId};
use crate::tensor::Type;

/// The operator whose results may pass from per-micro-batch sections to `Update`.
pub const ACCUMULATE: &str = "Accumulate";

/// Where an invariant does not hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A value, with its name.
    Value(ValueId, String),
    /// A node, with its name and operator.
    Node(NodeId, String, String),
    /// A state, with its name.
    State(StateId, String),
    /// An input, with its name.
    Input(usize, String),
    /// An output, with its name.
    Output(usize, String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Value(id, name) if name.is_empty() => write!(f, "value {id}"),
            Place::Value(id, name) => write!(f, "value {id} ({name})"),
            Place::Node(id, name, op) if name.is_empty() => write!(f, "node {id} ({op})"),
            Place::Node(id, name, op) => write!(f, "node {id} ({name}, {op})"),
            Place::State(id, name) => write!(f, "state {id} ({name})"),
            Place::Input(i, name) => write!(f, "input {i} ({name})"),
            Place::Output(i, name) => write!(f, "output {i} ({name})"),
        }
    }
}

/// An invariant that does not hold: where, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct Violation {
    /// Where.
    pub place: Place,
    /// Why.
    pub reason: String,
}

/// Checks a graph.
///
/// # Errors
/// Every violation, in the order of values, nodes, states, inputs, outputs.
pub fn verify(graph: &Graph) -> Result<(), Vec<Violation>> {
    let mut check = Check { graph, found: Vec::new() };
    check.values();
    check.nodes();
    check.states();
    check.ports();
    if check.found.is_empty() { Ok(()) } else { Err(check.found) }
}

/// Violations as one text, a line each.
pub fn report(violations: &[Violation]) -> String {
    violations.iter().map(Violation::to_string).collect::<Vec<_>>().join("\n")
}

struct Check<'a> {
    graph: &'a Graph,
    found: Vec<Violation>,
}

impl Check<'_> {
    fn say(&mut self, place: Place, reason: impl Into<String>) {
        self.found.push(Violation { place, reason: reason.into() });
    }
    fn node_place(&self, id: NodeId) -> Place {
        let n = self.graph.node(id);
        Place::Node(id, n.name.clone(), n.op.name().into())
    }
    fn exists(&self, v: ValueId) -> bool {
        v.index() < self.graph.values.len()
    }

    fn values(&mut self) {
        let g = self.graph;
        for id in g.value_ids() {
            let v = g.value(id);
            let place = || Place::Value(id, v.name.clone());
            match &v.def {
                Def::Input(i) if g.inputs.get(*i).is_none_or(|x| x.value != id) => {
                    self.say(place(), format!("says it is input {i}, whose value is another"));
                }
                Def::State(s) if g.states.get(s.index()).is_none_or(|x| x.read != id) => {
                    self.say(place(), format!("says it is the content of state {s}, which reads another value"));
                }
                Def::Const(t) if *t.ty() != v.ty => {
                    self.say(place(), format!("has type {}, its tensor has {}", v.ty, t.ty()));
                }
                Def::Node(n, i) if g.nodes.get(n.index()).and_then(|x| x.outputs.get(*i)) != Some(&id) => {
                    self.say(place(), format!("says it is result {i} of node {n}, whose result is another"));
                }
                _ => {}
            }
        }
    }

    fn nodes(&mut self) {
        let g = self.graph;
        for id in g.node_ids() {
            let n = g.node(id);
            for (i, &v) in n.outputs.iter().enumerate() {
                if !self.exists(v) {
                    self.say(self.node_place(id), format!("result {i} is {v}, which does not exist"));
                } else if !matches!(g.value(v).def, Def::Node(m, j) if m == id && j == i) {
                    self.say(self.node_place(id), format!("result {i} is {v}, which something else defines"));
                }
            }
            self.service(id);
            let mut sound = true;
            for (i, &v) in n.inputs.iter().enumerate() {
                if !self.exists(v) {
                    self.say(self.node_place(id), format!("operand {i} is {v}, which does not exist"));
                    sound = false;
                    continue;
                }
                if let Some(p) = g.producer(v).filter(|p| *p >= id) {
                    let reason = format!("operand {i} ({v}) is defined by node {p}, which does not come before it");
                    self.say(self.node_place(id), reason);
                }
                if let Some(reason) = self.crossing(v, n.section) {
                    self.say(self.node_place(id), format!("operand {i} ({v}) {reason}"));
                }
            }
            if n.is_accumulate() && n.section == Section::Update {
                self.say(self.node_place(id), "accumulates over micro-batches in the Update section, which runs once");
            }
            if sound {
                self.types(id);
            }
        }
    }

    fn service(&mut self, id: NodeId) {
        let g = self.graph;
        let n = g.node(id);
        let Some(of) = n.of else { return };
        if n.section != Section::Backward {
            self.say(self.node_place(id), format!("serves {of}, but is not in the Backward section"));
        } else if g.nodes.get(of.index()).is_none_or(|f| f.section != Section::Forward) || of >= id {
            self.say(self.node_place(id), format!("serves {of}, which is not an earlier Forward node"));
        }
    }

    /// Why a node of `section` may not use `v`.
    fn crossing(&self, v: ValueId, section: Section) -> Option<String> {
        let g = self.graph;
        let from = match &g.value(v).def {
            Def::Const(_) | Def::State(_) => return None,
            Def::Input(i) => {
                let batch = g.inputs.get(*i).is_some_and(|x| x.batch_dim.is_some());
                return (batch && section == Section::Update)
                    .then(|| "is an input that differs between micro-batches, used in the Update section".into());
            }
            Def::Node(p, _) => g.nodes.get(p.index())?,
        };
        let sum = from.is_accumulate();
        if from.section == Section::Update {
            return (section != Section::Update).then(|| "is made in the Update section, after this one".into());
        }
        if section == Section::Update {
            return (!sum).then(|| {
                format!("comes from the {:?} section ({}) without an Accumulate", from.section, from.op.name())
            });
        }
        if sum {
            return Some("is a sum over micro-batches, which only the Update section may use".into());
        }
        (section == Section::Forward && from.section == Section::Backward)
            .then(|| "is made in the Backward section, after this one".into())
    }

    fn types(&mut self, id: NodeId) {
        let g = self.graph;
        let n = g.node(id);
        match n.op.infer(&g.input_types(n)) {
            Err(e) => self.say(self.node_place(id), format!("operands do not fit: {e}")),
            Ok(types) if types.len() != n.outputs.len() => {
                let reason = format!("has {} results, its operator gives {}", n.outputs.len(), types.len());
                self.say(self.node_place(id), reason);
            }
            Ok(types) => {
                for (i, (v, ty)) in n.outputs.iter().zip(types).enumerate() {
                    if self.exists(*v) && *g.ty(*v) != ty {
                        let reason = format!("result {i} ({v}) has type {}, its operator gives {ty}", g.ty(*v));
                        self.say(self.node_place(id), reason);
                    }
                }
            }
        }
    }

    fn states(&mut self) {
        let g = self.graph;
        let training = g.nodes.iter().any(|n| n.section == Section::Update);
        let mut names = BTreeSet::new();
        for id in g.state_ids() {
            let s = g.state(id);
            let place = || Place::State(id, s.name.clone());
            if !names.insert(&s.name) {
                self.say(place(), "has the name of another state");
            }
            if !self.exists(s.read) || !matches!(g.value(s.read).def, Def::State(x) if x == id) {
                self.say(place(), format!("reads {}, which is not its content", s.read));
                continue;
            }
            match s.of {
                Some(of) if s.kind == StateKind::Parameter => {
                    self.say(place(), format!("is a parameter, yet belongs to {of}"));
                }
                Some(of) if g.states.get(of.index()).is_none_or(|p| p.kind != StateKind::Parameter) => {
                    self.say(place(), format!("belongs to {of}, which is not a parameter"));
                }
                _ => {}
            }
            let Some(w) = s.write else { continue };
            if !self.exists(w) {
                self.say(place(), format!("writes {w}, which does not exist"));
                continue;
            }
            let (read, write): (&Type, &Type) = (g.ty(s.read), g.ty(w));
            if read != write {
                self.say(place(), format!("reads {read}, but writes {write} ({w})"));
            }
            let made = g.producer(w).and_then(|p| g.nodes.get(p.index())).map(|n| n.section);
            if training && made.is_some_and(|x| x != Section::Update) {
                self.say(place(), format!("is written from outside the Update section ({w})"));
            }
        }
    }

    fn ports(&mut self) {
        let g = self.graph;
        let mut names = BTreeSet::new();
        for (i, x) in g.inputs.iter().enumerate() {
            let place = || Place::Input(i, x.name.clone());
            if !names.insert(&x.name) {
                self.say(place(), "has the name of another input");
            }
            if !self.exists(x.value) || !matches!(g.value(x.value).def, Def::Input(j) if j == i) {
                self.say(place(), format!("is {}, which is not its value", x.value));
            } else if let Some(d) = x.batch_dim.filter(|d| *d >= g.ty(x.value).rank()) {
                self.say(place(), format!("is cut along dim {d}, but has type {}", g.ty(x.value)));
            }
        }
        let mut names = BTreeSet::new();
        for (i, x) in g.outputs.iter().enumerate() {
            let place = || Place::Output(i, x.name.clone());
            if !names.insert(&x.name) {
                self.say(place(), "has the name of another output");
            }
            if !self.exists(x.value) {
                self.say(place(), format!("is {}, which does not exist", x.value));
                continue;
            }
            let Some(d) = x.batch_dim else { continue };
            if d >= g.ty(x.value).rank() {
                self.say(place(), format!("is joined along dim {d}, but has type {}", g.ty(x.value)));
            }
            let made = g.producer(x.value).and_then(|p| g.nodes.get(p.index())).map(|n| n.section);
            if made == Some(Section::Update) {
                self.say(place(), "is made in the Update section, once per step, yet has a batch dim");
            }
        }
    }
}
