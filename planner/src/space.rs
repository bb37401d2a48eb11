//! The space of plans of one step graph on one mesh: per class of nodes its allowed strategies, per class of states its
//! allowed storage specs, per input the specs it may be fed in. All constraints but memory are filters here.

use std::collections::BTreeSet;

use autoshard_ir::Type;
use autoshard_ir::graph::{Def, Graph, NodeId, Section, StateId, StateKind};
use autoshard_ir::op::Family;

use crate::constraints::Constraints;
use crate::mesh::{AxisId, AxisName, Mesh};
use crate::request::StepGraph;
use crate::roles::Tag;
use crate::routes::Routes;
use crate::spec::{Spec, Use};
use crate::strategies::{Choice, Strategies, of_node};

/// The space. Vectors are by class (nodes, states) and by input.
pub struct Space {
    /// Strategies of each node class, from the factor rule alone.
    pub strategies: Vec<Strategies>,
    /// Those that the constraints allow.
    pub choices: Vec<Vec<Choice>>,
    /// Storage specs of each state class.
    pub storage: Vec<Vec<Spec>>,
    /// Specs that each input may be fed in.
    pub inputs: Vec<Vec<Spec>>,
    /// Constraints that could not be kept to the letter.
    pub notes: Vec<String>,
}

/// Constraints leave an operator or a state without a choice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has no choice left: {why}")]
pub struct NoChoice {
    /// The operator or state.
    pub what: String,
    /// The reason.
    pub why: String,
}

impl Space {
    /// The space of a graph on a mesh under constraints.
    ///
    /// # Errors
    /// Constraints that leave a node without strategy.
    pub fn new(step: &StepGraph, mesh: &Mesh, constraints: &Constraints) -> Result<Space, NoChoice> {
        let StepGraph { graph, blocks, tags, routes, .. } = step;
        if mesh.find(AxisName::Ep).is_some() && !routes.any() {
            let why = "the model has no products by experts; leave out --ep".to_string();
            return Err(NoChoice { what: "expert parallelism".into(), why });
        }
        let route = |class| mesh.find(AxisName::Ep).and_then(|_| routes.of(class));
        let all = blocks.nodes.iter().enumerate();
        let strategies: Vec<Strategies> =
            all.map(|(class, members)| of_node(graph, graph.node(members[0]), mesh, route(class))).collect();
        let mut space =
            Space { strategies, choices: Vec::new(), storage: Vec::new(), inputs: Vec::new(), notes: Vec::new() };
        let mut stuck = BTreeSet::new();
        for (class, members) in blocks.nodes.iter().enumerate() {
            let filter = Filter { graph, mesh, constraints, routes, tags: &tags[class], routed: routes.always(class) };
            let choices = filter.node(members[0], &space.strategies[class], &mut stuck);
            if choices.is_empty() {
                let n = graph.node(members[0]);
                let why = "the constraints exclude every strategy".to_string();
                return Err(NoChoice { what: format!("operator {} ({})", n.op.name(), n.name), why });
            }
            space.choices.push(choices);
        }
        if let Some(cp) = mesh.find(AxisName::Cp) {
            let splits = |(members, choices): (&Vec<NodeId>, &Vec<Choice>)| {
                let filter = Filter { graph, mesh, constraints, routes, tags: &[], routed: false };
                filter.is_product(members[0])
                    && choices.iter().all(|c| matches!(c.strategy.0[cp.0 as usize], Use::Split(_)))
            };
            if !blocks.nodes.iter().zip(&space.choices).any(splits) {
                let why = format!("no matrix product has a sequence that divides by {}", mesh.size(cp));
                return Err(NoChoice { what: "context parallelism".into(), why });
            }
        }
        for members in &blocks.states {
            space.storage.push(storage(graph, members[0], mesh, constraints, routes, &mut stuck));
        }
        space.inputs = graph.inputs.iter().map(|x| specs(graph.ty(x.value), mesh)).collect();
        if !stuck.is_empty() {
            let names: Vec<&str> = stuck.iter().map(String::as_str).collect();
            let some = names[..names.len().min(3)].join(", ");
            let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
            space.notes.push(format!("not sharded over dp by ZeRO, no dim divides: {some}{more}"));
        }
        Ok(space)
    }
}

/// Every spec of a type without partial sums.
pub fn specs(ty: &Type, mesh: &Mesh) -> Vec<Spec> {
    let mut all = vec![Spec::replicated(ty.rank())];
    for axis in mesh.ids() {
        let sharded: Vec<Spec> = all
            .iter()
            .flat_map(|s| {
                (0..ty.rank()).map(move |d| {
                    let mut s = s.clone();
                    s.dims[d].push(axis);
                    s
                })
            })
            .filter(|s| s.local(ty, mesh).is_some())
            .collect();
        all.extend(sharded);
    }
    all
}

/// Those that are wanted, or all where none is.
fn prefer<T>(all: Vec<T>, wanted: impl Fn(&T) -> bool) -> Vec<T> {
    let (yes, no): (Vec<T>, Vec<T>) = all.into_iter().partition(wanted);
    if yes.is_empty() { no } else { yes }
}

/// The axes over which a ZeRO pin shards: those whose ranks have the same parameters.
fn data_axes(mesh: &Mesh, experts: bool) -> Vec<AxisId> {
    let name = |a: &AxisId| mesh.axis(*a).name;
    mesh.ids().filter(|a| name(a).is_data() && !(experts && name(a) == AxisName::Ep)).collect()
}

/// Of ways to keep matrices of experts, those in which each rank along `ep` has its own.
fn own_experts<T>(all: Vec<T>, spec: impl Fn(&T) -> &Spec, mesh: &Mesh) -> Vec<T> {
    let Some(ep) = mesh.find(AxisName::Ep) else { return all };
    prefer(all, |c| spec(c).dims.first().is_some_and(|d| d.contains(&ep)))
}

/// Keeps what a ZeRO pin demands: sharded over as many data axes as one of them can be, or over none. Also whether one can,
/// where there is such an axis.
fn zero<T: Clone>(all: Vec<T>, spec: impl Fn(&T) -> &Spec, axes: &[AxisId], wanted: bool) -> (Vec<T>, bool) {
    let over = |c: &T| axes.iter().filter(|a| spec(c).divides(**a)).count();
    let most = if wanted { all.iter().map(over).max().unwrap_or(0) } else { 0 };
    (all.into_iter().filter(|c| over(c) == most).collect(), most > 0 || !wanted || axes.is_empty())
}

fn storage(
    graph: &Graph,
    s: StateId,
    mesh: &Mesh,
    constraints: &Constraints,
    routes: &Routes,
    stuck: &mut BTreeSet<String>,
) -> Vec<Spec> {
    let state = graph.state(s);
    let ty = graph.ty(state.read);
    let experts = routes.is_matrices(state.read);
    let mut all = specs(ty, mesh);
    if experts {
        all = own_experts(all, |s| s, mesh);
    }
    let Some(pin) = constraints.zero else { return all };
    let wanted = pin >= if state.kind == StateKind::Optimizer { 1 } else { 3 };
    let (kept, met) = zero(all, |s| s, &data_axes(mesh, experts), wanted);
    if !met && ty.numel() > 1 {
        stuck.insert(state.name.clone());
    }
    kept
}

struct Filter<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    constraints: &'a Constraints,
    routes: &'a Routes,
    tags: &'a [Option<Tag>],
    /// Whether it does nothing but work on routed rows.
    routed: bool,
}

impl Filter<'_> {
    fn node(&self, id: NodeId, strategies: &Strategies, stuck: &mut BTreeSet<String>) -> Vec<Choice> {
        let n = self.graph.node(id);
        let mut all = strategies.list.clone();
        if n.section == Section::Update {
            return all;
        }
        let experts = n.outputs.first().is_some_and(|v| self.routes.is_matrices(*v));
        let data = data_axes(self.mesh, experts);
        if experts && (self.graph.casts_state(n) || n.is_accumulate()) {
            all = own_experts(all, |c| &c.outputs[0], self.mesh);
        }
        let pin = self.constraints.zero;
        if self.graph.casts_state(n) {
            // Parameters are gathered after the cast, in fewer bytes; under a pin of ZeRO 3 they are not kept gathered.
            let Some(pin) = pin else { return all };
            return zero(all, |c| &c.outputs[0], &data, pin >= 3).0;
        }
        if n.is_accumulate() {
            let Some(pin) = pin else { return all };
            let ty = self.graph.ty(n.outputs[0]);
            let (kept, met) = zero(all, |c| &c.outputs[0], &data, pin >= 2);
            if !met && ty.numel() > 1 {
                stuck.insert(n.name.clone());
            }
            return kept;
        }
        let all: Vec<Choice> = all.into_iter().filter(|c| self.customary(c)).collect();
        let all = if self.routed { prefer(all, |c| self.routes_on(c, AxisName::Ep)) } else { all };
        let all = if self.constraints.weights_stay && self.family(id) == Family::MatMul {
            prefer(all, |c| !self.splits(c, AxisName::Tp, Tag::Sequence))
        } else {
            all
        };
        // Data parallelism is not left to ranks that all compute the same.
        let all = prefer(all, |c| self.splits(c, AxisName::Dp, Tag::Batch));
        let all = prefer(all, |c| self.splits(c, AxisName::Ep, Tag::Batch) || self.routes_on(c, AxisName::Ep));
        let all = prefer(all, |c| self.splits(c, AxisName::Cp, Tag::Sequence));
        let all = if self.is_product(id) { prefer(all, |c| !self.idle_on_tp(c)) } else { all };
        if self.constraints.sequence_parallel != Some(true) || !self.splits_tokens(id, strategies) {
            return all;
        }
        prefer(all, |c| !self.idle_on_tp(c))
    }

    /// Whether an axis splits what has a tag.
    fn splits(&self, c: &Choice, axis: AxisName, tag: Tag) -> bool {
        let splits = |u: &Use| matches!(u, Use::Split(f) if self.tags[f.0 as usize] == Some(tag));
        c.strategy.0.iter().zip(&self.mesh.axes).any(|(u, a)| a.name == axis && splits(u))
    }

    /// Whether the rows lie with their experts along an axis.
    fn routes_on(&self, c: &Choice, axis: AxisName) -> bool {
        c.strategy.0.iter().zip(&self.mesh.axes).any(|(u, a)| a.name == axis && matches!(u, Use::Route(_)))
    }

    fn family(&self, id: NodeId) -> Family {
        let n = self.graph.node(id);
        n.op.work(&self.graph.input_types(n), &self.graph.output_types(n)).family
    }

    /// Whether this is a product: what `tp` is meant to split.
    fn is_product(&self, id: NodeId) -> bool {
        matches!(self.family(id), Family::MatMul | Family::Conv | Family::Attention)
    }

    /// Whether axes split what they customarily split, see [`crate::roles`].
    fn customary(&self, c: &Choice) -> bool {
        c.strategy.0.iter().zip(&self.mesh.axes).all(|(u, axis)| {
            let f = match u {
                Use::Split(f) => f,
                Use::Route(_) => return matches!(axis.name, AxisName::Ep | AxisName::Tp),
                Use::Replicate | Use::Linear(_) => return true,
            };
            let tag = self.tags[f.0 as usize];
            match axis.name {
                AxisName::Dp | AxisName::Ep => tag == Some(Tag::Batch),
                AxisName::Cp => tag == Some(Tag::Sequence),
                AxisName::Tp if tag == Some(Tag::Sequence) => self.constraints.sequence_parallel != Some(false),
                AxisName::Tp => tag != Some(Tag::Batch),
            }
        })
    }

    /// Whether this is an operator that sequence parallelism is meant for: bound by memory, with a sequence to split.
    fn splits_tokens(&self, id: NodeId, strategies: &Strategies) -> bool {
        let n = self.graph.node(id);
        let reads_activations = n.inputs.iter().any(|&v| matches!(self.graph.value(v).def, Def::Node(..)));
        self.family(id) == Family::Memory
            && reads_activations
            && self.tags.iter().take(strategies.rule.factors.len()).any(|t| *t == Some(Tag::Sequence))
    }

    fn idle_on_tp(&self, c: &Choice) -> bool {
        c.strategy.0.iter().zip(&self.mesh.axes).any(|(u, a)| a.name == AxisName::Tp && *u == Use::Replicate)
    }
}
