//! The judge of an assignment: times of every stage from the graph, the schedule played event by event
//! ([`crate::timeline`]), and memory at the fullest moment.
//!
//! Every version of a value that is needed in a section is made once in it, as [`crate::reshard::versions`] says. Casts of
//! parameters run once in a step of several micro-batches. What a stage does inside a section is played on streams ([`crate::streams`]):
//! `sections` says what waits for what, under what [`crate::execution`] lets overlap.

mod lines;
mod sections;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use autoshard_cost_models::{Bytes, Category, MemoryBreakdown};
use autoshard_ir::Type;
use autoshard_ir::blocks::Blocks;
use autoshard_ir::factor::FactorRule;
use autoshard_ir::graph::{Def, Graph, NodeId, Section, StateKind, ValueId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::assignment::{Assignment, StageId};
use crate::formulate::{Pace, crossings, kept, step_long};
use crate::kernels::{Classes, once};
use crate::reshard::{local_bytes, travels, versions};
use crate::spec::{Spec, Strategy};
use crate::stages::Stages;
use crate::timeline::play;
use crate::times::{Piece, Times, total};
use crate::views::Views;
use crate::weights::{by_weights, later};
use lines::Lines;

/// Seconds that a stage spends, once per micro-batch or once per step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Spent {
    /// Operators.
    pub compute_s: f64,
    /// Resharding, as far as computation waits for it, and what computation loses to the rest.
    pub communication_s: f64,
    /// Resharding that nothing waits for: beside computation, or beside other resharding.
    #[serde(default)]
    pub hidden_s: f64,
}

impl Spent {
    /// What passes until the next section can begin.
    pub fn total(&self) -> f64 {
        self.compute_s + self.communication_s
    }
}

/// A stage: its times, and the memory of one of its ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StagePrediction {
    /// Per micro-batch.
    pub forward: Spent,
    /// Per micro-batch.
    pub backward: Spent,
    /// Per step: the update, and casts of parameters that serve all micro-batches.
    pub update: Spent,
    /// Per micro-batch, the part of the backward's operators that makes forward results anew.
    #[serde(default)]
    pub recompute_s: f64,
    /// Per micro-batch, the part of the backward that is gradients by weights, where these have a pass of their own.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub weights_s: f64,
    /// Sends to other stages, seconds per forward of a micro-batch.
    pub send_forward_s: f64,
    /// The same per backward.
    pub send_backward_s: f64,
    /// Idle seconds of a step.
    pub idle_s: f64,
    /// By category.
    pub memory: MemoryBreakdown,
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

/// What a step takes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// Seconds of a step.
    pub step_time_s: f64,
    /// By stage.
    pub stages: Vec<StagePrediction>,
}

impl Prediction {
    /// Bytes allocated on a rank of the fullest stage.
    pub fn peak(&self) -> u64 {
        self.stages.iter().map(|s| s.memory.allocated().0).max().unwrap_or(0)
    }
}

/// What the memory of a state counts as.
pub(crate) fn category(kind: StateKind) -> Category {
    match kind {
        StateKind::Parameter => Category::Weights,
        StateKind::Optimizer => Category::Optimizer,
    }
}

/// Predicts a step of an assignment that comes from classes: members of a class share their strategy.
pub fn simulate(graph: &Graph, blocks: &Blocks, a: &Assignment, times: &mut Times<'_>) -> Prediction {
    let stages =
        Stages { count: a.stages, node: a.stage.clone(), everywhere: a.everywhere.clone(), home: a.home.clone() };
    let execution = times.execution();
    let pace = Pace { micro_batches: a.micro_batches, schedule: a.schedule, chunks: execution.chunks };
    let mut sim = Simulation::new(graph, blocks, a, times);
    let weights = by_weights(graph, a);
    let lines = Lines::new(graph, blocks, a, &sim.classes, &weights);
    let mut found: Vec<StagePrediction> = (0..a.stages).map(|s| sim.stage(s, &lines, times)).collect();
    let readers = graph.uses();
    let once = once(graph, pace.micro_batches);
    let mut late = vec![true; graph.values.len()];
    for n in graph.nodes.iter().filter(|n| n.section != Section::Update) {
        n.inputs.iter().for_each(|v| late[v.index()] = false);
    }
    for (n, out, to) in crossings(graph, &stages) {
        let time = to.iter().map(|to| sim.sent(n, out, StageId(*to), &readers, times)).sum::<f64>();
        let stage = &mut found[a.stage[n.index()].0 as usize];
        match graph.node(n).section {
            // Sums over all micro-batches go once, and casts of parameters.
            _ if late[graph.node(n).outputs[out].index()] || once[n.index()] => stage.update.communication_s += time,
            Section::Forward => stage.send_forward_s += time,
            Section::Backward => stage.send_backward_s += time,
            Section::Update => stage.update.communication_s += time,
        }
    }
    sim.memory(&stages, &pace, &weights, &mut found);
    let played = play(&found, &pace);
    let update = found.iter().map(|s| s.update.total()).fold(0.0, f64::max);
    for (s, end) in found.iter_mut().zip(&played.busy) {
        s.idle_s = played.end + update - end - s.update.total();
    }
    Prediction { step_time_s: played.end + update, stages: found }
}

/// Seconds that a node of each class takes once, under the strategy of its first member.
pub fn class_seconds(graph: &Graph, blocks: &Blocks, a: &Assignment, times: &Times<'_>) -> Vec<f64> {
    let mut sim = Simulation::new(graph, blocks, a, times);
    blocks.nodes.iter().map(|members| sim.compute(members[0], times)).collect()
}

/// A version of a value, timed.
struct Made {
    spec: Spec,
    /// The version that it is made from; none: the value as produced.
    source: Option<usize>,
    pieces: Vec<Piece>,
}

type Versions = std::rc::Rc<Vec<Made>>;

struct Simulation<'a> {
    graph: &'a Graph,
    blocks: &'a Blocks,
    a: &'a Assignment,
    classes: Classes,
    rules: HashMap<u32, FactorRule>,
    computed: HashMap<(u32, Strategy), f64>,
    made: HashMap<(Spec, Vec<Spec>, Type), Versions>,
}

impl<'a> Simulation<'a> {
    fn new(graph: &'a Graph, blocks: &'a Blocks, a: &'a Assignment, times: &Times<'_>) -> Simulation<'a> {
        let classes = Classes::new(graph, blocks, times.execution().kernels, a.micro_batches);
        Simulation { graph, blocks, a, classes, rules: HashMap::new(), computed: HashMap::new(), made: HashMap::new() }
    }
    fn rule(&mut self, n: NodeId) -> &FactorRule {
        let (graph, class) = (self.graph, self.blocks.node_class[n.index()]);
        self.rules.entry(class).or_insert_with(|| {
            let n = graph.node(n);
            n.op.factors(&graph.input_types(n), &graph.output_types(n))
        })
    }
    fn result(&mut self, n: NodeId, out: usize) -> Spec {
        let strategy = &self.a.strategy[n.index()];
        strategy.output_spec(self.rule(n), out)
    }
    fn operand(&mut self, n: NodeId, at: usize) -> Spec {
        let strategy = &self.a.strategy[n.index()];
        strategy.input_spec(self.rule(n), at)
    }
    /// The spec that a value is produced in; constants are whole.
    fn produced(&mut self, v: ValueId) -> Option<Spec> {
        match self.graph.value(v).def {
            Def::Node(p, out) => Some(self.result(p, out)),
            Def::State(s) => Some(self.a.storage[s.index()].clone()),
            Def::Input(i) => Some(self.a.inputs[i].clone()),
            Def::Const(_) => None,
        }
    }
    /// Seconds until a result has arrived in a stage, whole if it was sent in parts.
    fn sent(&mut self, n: NodeId, out: usize, to: StageId, readers: &[Vec<NodeId>], times: &Times<'_>) -> f64 {
        let (graph, a) = (self.graph, self.a);
        let v = graph.node(n).outputs[out];
        let (ty, made) = (graph.ty(v), self.result(n, out));
        let first = readers[v.index()].iter().find(|r| a.stage[r.index()] == to);
        let at = first.and_then(|r| Some((*r, graph.node(*r).inputs.iter().position(|x| *x == v)?)));
        let wanted = at.map_or_else(|| made.clone(), |(r, operand)| self.operand(r, operand));
        let whole = made.combined();
        let travels = travels(&made, &wanted, ty, &a.mesh);
        let gathered = if travels.dims == wanted.dims || travels == whole {
            0.0
        } else {
            versions(&travels, &[whole], ty, &a.mesh)
                .map_or(0.0, |list| list.iter().map(|v| total(&times.steps(&travels, &v.steps, ty))).sum())
        };
        times.send(local_bytes(&travels, ty, &a.mesh), a.stages) + gathered
    }
    /// Whether a backward node is in the class of forward nodes.
    fn is_copy(&self, n: NodeId) -> bool {
        let class = self.blocks.node_class[n.index()] as usize;
        self.blocks.nodes[class].first().is_some_and(|f| self.graph.node(*f).section == Section::Forward)
    }
    fn compute(&mut self, n: NodeId, times: &Times<'_>) -> f64 {
        let class = self.blocks.node_class[n.index()];
        let strategy = self.a.strategy[n.index()].clone();
        if let Some(t) = self.computed.get(&(class, strategy.clone())) {
            return *t;
        }
        let node = self.graph.node(n);
        let local = |spec: Spec, ty: Type| spec.local(&ty, &self.a.mesh).unwrap_or(ty);
        let rule = node.op.factors(&self.graph.input_types(node), &self.graph.output_types(node));
        let ins: Vec<Type> = self
            .graph
            .input_types(node)
            .into_iter()
            .enumerate()
            .map(|(i, ty)| local(strategy.input_spec(&rule, i), ty))
            .collect();
        let outs: Vec<Type> = self
            .graph
            .output_types(node)
            .into_iter()
            .enumerate()
            .map(|(i, ty)| local(strategy.output_spec(&rule, i), ty))
            .collect();
        let t = times.compute(&node.op, &ins, &outs, self.classes.fused(class as usize));
        self.computed.insert((class, strategy), t);
        t
    }
    /// The versions of a value that are needed, with the seconds to make each.
    fn versions(&mut self, from: Spec, mut wanted: Vec<Spec>, ty: &Type, times: &Times<'_>) -> Versions {
        wanted.sort();
        wanted.dedup();
        let key = (from, wanted, ty.clone());
        if let Some(found) = self.made.get(&key) {
            return found.clone();
        }
        let list = versions(&key.0, &key.1, ty, times.mesh()).unwrap_or_default();
        let timed: Vec<Made> = list
            .iter()
            .map(|v| {
                let via = v.source.map_or(&key.0, |s| &list[s].spec);
                Made { spec: v.spec.clone(), source: v.source, pieces: times.steps(via, &v.steps, ty) }
            })
            .collect();
        let found = Versions::new(timed);
        self.made.insert(key, found.clone());
        found
    }

    fn memory(&mut self, stages: &Stages, pace: &Pace, weights: &[bool], found: &mut [StagePrediction]) {
        let graph = self.graph;
        let a = self.a;
        for s in graph.state_ids() {
            let state = graph.state(s);
            let bytes = local_bytes(&a.storage[s.index()], graph.ty(state.read), &a.mesh);
            found[a.home[s.index()].0 as usize].memory.add(category(state.kind), Bytes(bytes));
        }
        let mut backward = vec![false; graph.values.len()];
        for n in graph.nodes.iter().filter(|n| n.section == Section::Backward) {
            for v in &n.inputs {
                backward[v.index()] = true;
            }
        }
        let mut views = Views::new(graph, self.blocks, a);
        let mut framed: Vec<BTreeSet<(ValueId, Spec)>> = vec![BTreeSet::new(); a.stages];
        let once = once(graph, pace.micro_batches);
        let kept = kept(graph, stages, &once, backward.into_iter());
        // Gradients by weights that wait for their pass need activations, and gradients that the rest of the backward has made.
        let later = later(graph, a, weights);
        let in_flight = |v: ValueId, s: usize| {
            let more = if later.contains(&(v, s)) { pace.weights_behind(s) } else { 0 };
            (pace.in_flight(s, a.stages) + more).min(pace.micro_batches) as u64
        };
        let kept = kept.into_iter().map(|(v, s)| (v, s, in_flight(v, s), Category::Activations));
        let between = later
            .iter()
            .filter(|(v, _)| graph.producer(*v).is_some_and(|p| graph.node(p).section == Section::Backward));
        let between = between
            .map(|&(v, s)| (v, s, (1 + pace.weights_behind(s)).min(pace.micro_batches) as u64, Category::Activations));
        let kept = kept.chain(between);
        let long = step_long(graph, stages, &once).into_iter().map(|(v, s)| (v, s, 1, Category::Weights));
        for (v, stage, count, category) in long.chain(kept) {
            let Some(spec) = self.produced(v) else { continue };
            let bytes = local_bytes(&spec, graph.ty(v), &a.mesh) * count;
            let storage = views.storage(StageId(stage as u16), v, &spec);
            if !self.lasts(&storage) && framed[stage].insert(storage) {
                found[stage].memory.add(category, Bytes(bytes));
            }
        }
        for id in graph.node_ids().filter(|&n| graph.node(n).is_accumulate()) {
            let bytes = local_bytes(&self.result(id, 0), graph.ty(graph.node(id).outputs[0]), &a.mesh);
            found[a.stage[id.index()].0 as usize].memory.add(Category::Gradients, Bytes(bytes));
        }
        for (stage, framed) in framed.iter().enumerate() {
            let scratch = [Section::Forward, Section::Backward, Section::Update]
                .map(|section| self.scratch(StageId(stage as u16), section, framed, &mut views));
            found[stage].memory.add(Category::Workspace, Bytes(scratch.into_iter().max().unwrap_or(0)));
        }
    }

    /// Whether memory outlives the step: that of a state as it is kept, or of a constant.
    fn lasts(&self, (v, spec): &(ValueId, Spec)) -> bool {
        match self.graph.value(*v).def {
            Def::State(s) => self.a.storage[s.index()] == *spec,
            Def::Const(_) => true,
            Def::Node(..) | Def::Input(_) => false,
        }
    }

    /// Bytes at the fullest moment of a section, of values and versions that live only inside it.
    fn scratch(
        &mut self,
        stage: StageId,
        section: Section,
        framed: &BTreeSet<(ValueId, Spec)>,
        views: &mut Views<'_>,
    ) -> u64 {
        let graph = self.graph;
        let a = self.a;
        let here: Vec<NodeId> =
            graph.node_ids().filter(|&n| a.stage[n.index()] == stage && graph.node(n).section == section).collect();
        // First and last position of every value in every spec; views by what they are views of.
        let mut spans: BTreeMap<(ValueId, Spec), (usize, usize)> = BTreeMap::new();
        for (at, &id) in here.iter().enumerate() {
            let n = graph.node(id);
            for (i, &v) in n.inputs.iter().enumerate() {
                let Some(from) = self.produced(v) else { continue };
                let used = views.storage(stage, v, &self.operand(id, i));
                // What is kept elsewhere takes scratch only in another spec.
                let made = self.produced(used.0).is_some_and(|s| s == used.1);
                let local = graph.producer(used.0).is_some_and(|p| graph.node(p).section == section);
                if (local || !made) && !framed.contains(&used) && !self.lasts(&used) {
                    spans.entry(used).or_insert((at, at)).1 = at;
                }
                if let Some(span) = spans.get_mut(&views.storage(stage, v, &from)) {
                    span.1 = at;
                }
            }
            for (i, &v) in n.outputs.iter().enumerate() {
                let storage = views.storage(stage, v, &self.result(id, i));
                if !n.is_accumulate() && !framed.contains(&storage) {
                    let own = storage.0 == v;
                    match spans.get_mut(&storage) {
                        Some(span) => span.1 = at,
                        None if own => drop(spans.insert(storage, (at, at))),
                        // A view of what another section or the whole step keeps.
                        None => {}
                    }
                }
            }
        }
        let mut change = vec![0i64; here.len() + 1];
        for ((v, spec), (first, last)) in spans {
            let bytes = local_bytes(&spec, graph.ty(v), &a.mesh) as i64;
            change[first] += bytes;
            change[last + 1] -= bytes;
        }
        let mut now = 0;
        change
            .into_iter()
            .map(|c| {
                now += c;
                now
            })
            .max()
            .unwrap_or(0) as u64
    }
}

impl StagePrediction {
    fn section(&mut self, s: Section) -> &mut Spent {
        match s {
            Section::Forward => &mut self.forward,
            Section::Backward => &mut self.backward,
            Section::Update => &mut self.update,
        }
    }
}
