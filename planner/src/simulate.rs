//! The judge of an assignment: times of every stage from the graph, the schedule played event by event, and memory at the
//! fullest moment.
//!
//! Inside a stage, computation and communication follow each other (no overlap yet). Every version of a value that is
//! needed in a section is made once in it, as [`crate::reshard::versions`] says.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use autoshard_cost_models::{Bytes, Category, MemoryBreakdown};
use autoshard_ir::Type;
use autoshard_ir::blocks::Blocks;
use autoshard_ir::factor::FactorRule;
use autoshard_ir::graph::{Def, Graph, NodeId, Section, StateKind, ValueId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::assignment::{Assignment, Schedule, StageId};
use crate::formulate::{Pace, crossings, kept};
use crate::reshard::{local_bytes, versions};
use crate::space::ACCUMULATE;
use crate::spec::{Spec, Strategy};
use crate::stages::Stages;
use crate::times::Times;
use crate::views::Views;

/// Seconds that a stage spends, once per micro-batch or once per step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Spent {
    /// Operators.
    pub compute_s: f64,
    /// Resharding.
    pub communication_s: f64,
}

impl Spent {
    /// Both.
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
    /// Per step.
    pub update: Spent,
    /// Per micro-batch, the part of the backward's operators that makes forward results anew.
    #[serde(default)]
    pub recompute_s: f64,
    /// Sends to other stages, seconds per forward of a micro-batch.
    pub send_forward_s: f64,
    /// The same per backward.
    pub send_backward_s: f64,
    /// Idle seconds of a step.
    pub idle_s: f64,
    /// By category.
    pub memory: MemoryBreakdown,
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
    let pace = Pace { micro_batches: a.micro_batches, schedule: a.schedule };
    let mut sim =
        Simulation { graph, blocks, a, rules: HashMap::new(), computed: HashMap::new(), made: HashMap::new() };
    let mut found: Vec<StagePrediction> = (0..a.stages).map(|s| sim.stage(s, times)).collect();
    for (n, out, to) in crossings(graph, &stages) {
        let spec = sim.result(n, out);
        let bytes = local_bytes(&spec, graph.ty(graph.node(n).outputs[out]), &a.mesh);
        let stage = &mut found[a.stage[n.index()].0 as usize];
        let time = to.len() as f64 * times.send(bytes, a.stages);
        match graph.node(n).section {
            Section::Forward => stage.send_forward_s += time,
            Section::Backward => stage.send_backward_s += time,
            Section::Update => stage.update.communication_s += time,
        }
    }
    sim.memory(&stages, &pace, &mut found);
    let played = play(&found, &pace);
    let update = found.iter().map(|s| s.update.total()).fold(0.0, f64::max);
    for (s, end) in found.iter_mut().zip(&played.busy) {
        s.idle_s = played.end + update - end - s.update.total();
    }
    Prediction { step_time_s: played.end + update, stages: found }
}

type Versions = std::rc::Rc<Vec<(Spec, f64)>>;

struct Simulation<'a> {
    graph: &'a Graph,
    blocks: &'a Blocks,
    a: &'a Assignment,
    rules: HashMap<u32, FactorRule>,
    computed: HashMap<(u32, Strategy), f64>,
    made: HashMap<(Spec, Vec<Spec>, Type), Versions>,
}

impl Simulation<'_> {
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
        let t = times.compute(&node.op, &ins, &outs);
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
        let timed: Vec<(Spec, f64)> = list
            .iter()
            .map(|v| {
                let via = v.source.map_or(&key.0, |s| &list[s].spec);
                (v.spec.clone(), times.steps(via, &v.steps, ty))
            })
            .collect();
        let found = Versions::new(timed);
        self.made.insert(key, found.clone());
        found
    }

    fn stage(&mut self, stage: usize, times: &Times<'_>) -> StagePrediction {
        let mut found = StagePrediction::default();
        let graph = self.graph;
        let mut wanted: BTreeMap<(Section, ValueId), Vec<Spec>> = BTreeMap::new();
        for id in graph.node_ids().filter(|n| self.a.stage[n.index()].0 as usize == stage) {
            let n = graph.node(id);
            let t = self.compute(id, times);
            found.section(n.section).compute_s += t;
            if n.section == Section::Backward && self.is_copy(id) {
                found.recompute_s += t;
            }
            for (at, v) in n.inputs.iter().enumerate() {
                let spec = self.operand(id, at);
                wanted.entry((n.section, *v)).or_default().push(spec);
            }
        }
        for o in &graph.outputs {
            if let Some(p) = graph.producer(o.value).filter(|p| self.a.stage[p.index()].0 as usize == stage)
                && let Some(spec) = self.produced(o.value)
            {
                let whole = Spec { partial: Vec::new(), ..spec };
                wanted.entry((graph.node(p).section, o.value)).or_default().push(whole);
            }
        }
        for s in graph.state_ids().filter(|s| self.a.home[s.index()].0 as usize == stage) {
            if let Some(w) = graph.state(s).write {
                wanted.entry((Section::Update, w)).or_default().push(self.a.storage[s.index()].clone());
            }
        }
        for ((section, v), specs) in wanted {
            let Some(from) = self.produced(v) else { continue };
            let list = self.versions(from, specs, graph.ty(v), times);
            found.section(section).communication_s += list.iter().map(|v| v.1).sum::<f64>();
        }
        found
    }

    fn memory(&mut self, stages: &Stages, pace: &Pace, found: &mut [StagePrediction]) {
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
        for (v, stage) in kept(graph, stages, backward.into_iter()) {
            let Some(spec) = self.produced(v) else { continue };
            let bytes = local_bytes(&spec, graph.ty(v), &a.mesh) * pace.in_flight(stage, a.stages) as u64;
            let storage = views.storage(StageId(stage as u16), v, &spec);
            if !self.lasts(&storage) && framed[stage].insert(storage) {
                found[stage].memory.add(Category::Activations, Bytes(bytes));
            }
        }
        for id in graph.node_ids().filter(|&n| graph.node(n).op.name() == ACCUMULATE) {
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
                if n.op.name() != ACCUMULATE && !framed.contains(&storage) {
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

/// Something that a stage does, for pictures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Event {
    /// Which stage.
    pub stage: usize,
    /// `forward`, `backward` or `update`.
    pub kind: &'static str,
    /// For which micro-batch; 0 in the update.
    pub micro_batch: usize,
    /// Seconds from the start of the step.
    pub start_s: f64,
    /// Seconds from the start of the step.
    pub end_s: f64,
}

/// What stages do in a step, as [`simulate`] played it.
pub fn timeline(stages: &[StagePrediction], schedule: Schedule, micro_batches: usize) -> Vec<Event> {
    let played = play(stages, &Pace { schedule, micro_batches });
    let mut events = played.events;
    for (stage, s) in stages.iter().enumerate() {
        if s.update.total() > 0.0 {
            let (start_s, end_s) = (played.end, played.end + s.update.total());
            events.push(Event { stage, kind: "update", micro_batch: 0, start_s, end_s });
        }
    }
    events.retain(|e| e.end_s > e.start_s);
    events
}

/// The forwards and backwards of a step, played.
struct Played {
    /// In the order in which they were found to be possible.
    events: Vec<Event>,
    /// When the last one ends.
    end: f64,
    /// Seconds that each stage is busy.
    busy: Vec<f64>,
}

/// One entry of a stage's order.
#[derive(Clone, Copy)]
enum Run {
    Forward(usize),
    Backward(usize),
}

/// In which order a stage runs forwards and backwards.
fn order(stage: usize, stages: usize, pace: &Pace) -> Vec<Run> {
    let m = pace.micro_batches;
    let ahead = match pace.schedule {
        Schedule::GPipe => m,
        Schedule::OneF1B => m.min(stages - stage),
    };
    let mut list: Vec<Run> = (0..ahead).map(Run::Forward).collect();
    for i in 0..m {
        list.push(Run::Backward(i));
        if ahead + i < m {
            list.push(Run::Forward(ahead + i));
        }
    }
    list
}

fn play(stages: &[StagePrediction], pace: &Pace) -> Played {
    let p = stages.len();
    let orders: Vec<Vec<Run>> = (0..p).map(|s| order(s, p, pace)).collect();
    let forward: Vec<f64> = stages.iter().map(|s| s.forward.total()).collect();
    let backward: Vec<f64> = stages.iter().map(|s| s.backward.total()).collect();
    let none = f64::NAN;
    let mut ended = vec![[vec![none; pace.micro_batches], vec![none; pace.micro_batches]]; p];
    let mut next = vec![0; p];
    let mut clock = vec![0.0; p];
    let mut events = Vec::new();
    loop {
        let mut moved = false;
        for s in 0..p {
            while let Some(run) = orders[s].get(next[s]) {
                let (ready, time, slot) = match *run {
                    Run::Forward(m) if s == 0 => (0.0, forward[s], (0, m)),
                    Run::Forward(m) => (ended[s - 1][0][m] + stages[s - 1].send_forward_s, forward[s], (0, m)),
                    Run::Backward(m) if s + 1 == p => (ended[s][0][m], backward[s], (1, m)),
                    Run::Backward(m) => (ended[s + 1][1][m] + stages[s + 1].send_backward_s, backward[s], (1, m)),
                };
                if ready.is_nan() {
                    break;
                }
                let start_s = f64::max(clock[s], ready);
                clock[s] = start_s + time;
                let kind = if slot.0 == 0 { "forward" } else { "backward" };
                events.push(Event { stage: s, kind, micro_batch: slot.1, start_s, end_s: clock[s] });
                ended[s][slot.0][slot.1] = clock[s];
                next[s] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let m = pace.micro_batches as f64;
    Played {
        events,
        end: clock.into_iter().fold(0.0, f64::max),
        busy: (0..p).map(|s| m * (forward[s] + backward[s])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uniform(p: usize, m: usize, schedule: Schedule) -> f64 {
        let one = StagePrediction {
            forward: Spent { compute_s: 1.0, communication_s: 0.0 },
            backward: Spent { compute_s: 2.0, communication_s: 0.0 },
            ..Default::default()
        };
        play(&vec![one; p], &Pace { micro_batches: m, schedule }).end
    }

    /// Both schedules take `(m + p - 1)` times forward and backward when stages are equal and sends are free.
    #[test]
    fn equal_stages_have_the_known_bubble() {
        for (p, m) in [(1, 1), (1, 4), (2, 4), (4, 4), (4, 16), (3, 2), (8, 1)] {
            for schedule in [Schedule::GPipe, Schedule::OneF1B] {
                assert_eq!(uniform(p, m, schedule), 3.0 * (m + p - 1) as f64, "p={p} m={m} {schedule:?}");
            }
        }
    }

    #[test]
    fn every_stage_runs_every_micro_batch_once() {
        for schedule in [Schedule::GPipe, Schedule::OneF1B] {
            for s in 0..4 {
                let list = order(s, 4, &Pace { micro_batches: 6, schedule });
                let forwards: Vec<usize> =
                    list.iter().filter_map(|r| if let Run::Forward(m) = r { Some(*m) } else { None }).collect();
                let backwards: Vec<usize> =
                    list.iter().filter_map(|r| if let Run::Backward(m) = r { Some(*m) } else { None }).collect();
                assert_eq!((forwards, backwards), ((0..6).collect(), (0..6).collect()));
            }
        }
    }
}
