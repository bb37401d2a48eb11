//! A step graph on a mesh as a strategy selection problem ([`crate::solver`]).
//!
//! **Nodes** of the problem: classes of operators, of states (storage specs) and inputs; and, for a value that several
//! operators of a section read, the *version* of it that they share (an all-gathered activation is gathered once). Repeated
//! blocks share their variables: costs and memory count with the number of members.
//!
//! **Costs** are seconds. With `M` micro-batches and `P` stages, forward and backward count [`pace`](Pace::weight) times and
//! the update `1 / P` times. That is never more than the simulated time ([`crate::simulate`]): stage `s` runs `M` times its
//! time `t[s]` and waits for the stages before it, so a step takes at least `M * t[s] + t[0] + .. + t[s-1]` for every `s`;
//! whatever the split of a sum of times `W` over stages, the largest of those is at least `W / (1 - (1 - 1/M)^P)`. Sends between
//! stages do not count. A value that is needed in several specs is made once in each, all from the value as produced or
//! all from one of them ([`crate::reshard::versions`]); of `n` readers, each costs `1 / (n - 1)` of what its spec takes from the shared
//! version. That is never more either: from the version that the rest is made from, at most `n - 1` readers differ; from
//! the value as produced, at most `n - 1` read any one other spec, unless all read it, which is then the version. Outputs and written
//! states are readers like others. So the optimum is a lower bound on the simulated time of every plan of the mesh.
//!
//! **Rows**: per stage, bytes that are surely allocated together: states by storage spec, accumulated gradients, and the
//! values kept from forward to backward times the micro-batches in flight, of views of one memory ([`crate::views`]) one. What lives only inside a section is not in
//! the rows; the search takes it off the limit when the simulation shows that it matters.

use std::collections::{BTreeMap, BTreeSet};

use autoshard_cost_models::{Bytes, Category, MemoryBreakdown};
use autoshard_ir::blocks::Blocks;
use autoshard_ir::graph::{Def, Graph, NodeId, Section, ValueId};
use autoshard_ir::{Op, Type};

use crate::assignment::{Assignment, Schedule};
use crate::kernels::{Classes, Fused, once};
use crate::mesh::Mesh;
use crate::reshard::local_bytes;
use crate::simulate::category;
use crate::solver::{FORBIDDEN, Matrix, Problem};
use crate::space::Space;
use crate::spec::Spec;
use crate::stages::Stages;
use crate::strategies::Choice;
use crate::times::Times;
use crate::views;

/// How often things run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Order of forwards and backwards.
    pub schedule: Schedule,
    /// Interleaved parts of the model on each stage; 1: none.
    pub chunks: usize,
}

impl Pace {
    /// Forwards of stage `s` of `stages` before its first backward, of chunks where there are several (Narayanan et al. 2021,
    /// section 2.2).
    pub fn ahead(&self, s: usize, stages: usize) -> usize {
        let all = self.micro_batches * self.chunks;
        match self.schedule {
            Schedule::GPipe => all,
            Schedule::OneF1B if self.chunks > 1 => all.min(2 * (stages - s - 1) + (self.chunks - 1) * stages + 1),
            Schedule::OneF1B | Schedule::ZeroBubble => all.min(stages - s),
        }
    }
    /// Micro-batches by which gradients by weights are behind the rest of the backward of stage `s`, where they have passes of
    /// their own: with those ahead, all stages keep as many micro-batches (Qi et al. 2024, section 2.1).
    pub fn weights_behind(&self, s: usize) -> usize {
        if self.schedule == Schedule::ZeroBubble { s } else { 0 }
    }
    /// Micro-batches whose activations stage `s` of `stages` keeps at once; a chunk has a part of the stage's.
    pub fn in_flight(&self, s: usize, stages: usize) -> usize {
        self.ahead(s, stages).div_ceil(self.chunks)
    }
}

impl Pace {
    /// How much of a step one second of all stages' forwards and backwards is, at least: see the module.
    pub fn weight(&self, stages: usize) -> f64 {
        let m = self.micro_batches as f64;
        if self.schedule == Schedule::ZeroBubble {
            // The busiest stage. One micro-batch passes all stages without its gradients by weights.
            return m / stages as f64;
        }
        if self.chunks > 1 {
            // The busiest stage; and all of the model for one micro-batch.
            return (m / stages as f64).max(1.0);
        }
        1.0 / (1.0 - (1.0 - 1.0 / m).powi(stages as i32))
    }
}

/// Where a value comes from, by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Source {
    Node(u32, u32),
    State(u32),
    Input(u32),
}

impl Source {
    /// Its variable, with so many classes of nodes and of states.
    fn variable(self, nodes: usize, states: usize) -> usize {
        match self {
            Source::Node(c, _) => c as usize,
            Source::State(c) => nodes + c as usize,
            Source::Input(i) => nodes + states + i as usize,
        }
    }
    /// The specs that it gives, by choice.
    fn specs(self, space: &Space) -> Vec<&Spec> {
        match self {
            Source::Node(c, out) => space.choices[c as usize].iter().map(|c| &c.outputs[out as usize]).collect(),
            Source::State(c) => space.storage[c as usize].iter().collect(),
            Source::Input(i) => space.inputs[i as usize].iter().collect(),
        }
    }
}

/// A problem, and how to read its solutions.
pub struct Formulation {
    /// To be solved. Nodes: operator classes, state classes, inputs, then versions; rows: stages.
    pub problem: Problem,
    node_classes: usize,
    state_classes: usize,
    /// Per variable and choice, bytes of operands and results, of the version: what lives for a moment.
    passing: Vec<Vec<u64>>,
}

/// What is formulated.
pub struct Step<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// Its classes.
    pub blocks: &'a Blocks,
    /// Where everything runs.
    pub stages: &'a Stages,
    /// How often.
    pub pace: Pace,
}

/// The variables under construction: costs in seconds.
struct Draft {
    costs: Vec<Vec<f64>>,
    edges: BTreeMap<(usize, usize), Vec<f64>>,
}

impl Draft {
    /// Adds to the cost of every pair of choices of two variables; of one variable, to the cost of its choices.
    fn pair(&mut self, u: usize, v: usize, mut cost: impl FnMut(usize, usize) -> f64) {
        let (rows, cols) = (self.costs[u].len(), self.costs[v].len());
        if u == v {
            for (i, c) in self.costs[u].iter_mut().enumerate() {
                *c += cost(i, i);
            }
            return;
        }
        let swap = u > v;
        let key = if swap { (v, u) } else { (u, v) };
        let matrix = self.edges.entry(key).or_insert_with(|| vec![0.0; rows * cols]);
        for i in 0..rows {
            for j in 0..cols {
                matrix[if swap { j * rows + i } else { i * cols + j }] += cost(i, j);
            }
        }
    }
}

/// What needs a value in a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Reader {
    /// A class of operators, as that operand.
    Operand(u32, u32),
    /// The class of states that it is written to.
    Write(u32),
    /// The graph's outputs: as produced, with partial values combined.
    Output,
}

/// Readers of a value in one section.
type Readers = Vec<Reader>;

impl Formulation {
    /// Formulates a step. `limits` are bytes per stage.
    pub fn new(step: &Step<'_>, space: &Space, times: &mut Times<'_>, limits: &[u64]) -> Formulation {
        let mut formulation = Formulation::costs(step, space, times, None);
        formulation.rows(step, space, times.mesh(), limits);
        formulation
    }

    /// Formulates the time of some classes alone, and of what passes between them, without regard to memory.
    pub fn part(step: &Step<'_>, space: &Space, times: &mut Times<'_>, counts: &[bool]) -> Formulation {
        Formulation::costs(step, space, times, Some(counts))
    }

    fn costs(step: &Step<'_>, space: &Space, times: &mut Times<'_>, counts: Option<&[bool]>) -> Formulation {
        let Step { graph, blocks, stages, pace } = step;
        let mesh = times.mesh();
        let weights = Weights::new(pace, stages.count);
        let classes = Classes::new(graph, blocks, times.execution().kernels, pace.micro_batches);
        let counted = |class: u32| if counts.is_none_or(|c| c[class as usize]) { 1.0 } else { 0.0 };
        let (nc, sc) = (space.choices.len(), space.storage.len());
        let mut draft = Draft { costs: Vec::new(), edges: BTreeMap::new() };

        for (class, members) in blocks.nodes.iter().enumerate() {
            let n = graph.node(members[0]);
            let (ins, outs) = (graph.input_types(n), graph.output_types(n));
            let often = classes.pace(class).map_or(0.0, |section| weights.of(section));
            let weight = often * members.len() as f64 * counted(class as u32);
            let cost = |c: &Choice| weight * compute(times, &n.op, c, &ins, &outs, classes.fused(class));
            draft.costs.push(space.choices[class].iter().map(cost).collect());
        }
        draft.costs.extend(space.storage.iter().map(|specs| vec![0.0; specs.len()]));
        draft.costs.extend(space.inputs.iter().map(|specs| vec![0.0; specs.len()]));
        let mut passing = passing(graph, blocks, space, mesh);
        passing.extend(draft.costs[nc..].iter().map(|costs| vec![0; costs.len()]));

        let variable = |s: Source| s.variable(nc, sc);
        let made = |s: Source| s.specs(space);

        // Values with the same source and readers count together.
        let mut uses = uses(graph, blocks, Some(&classes));
        if counts.is_none() {
            ends(graph, blocks, &mut uses);
        }
        let mut groups: BTreeMap<(Source, Section, Readers), (f64, ValueId)> = BTreeMap::new();
        for (v, by_section) in uses.iter().enumerate() {
            let v = ValueId(v as u32);
            let Some(source) = source(graph, blocks, v) else { continue };
            for (section, readers) in by_section {
                let mut readers = readers.clone();
                // An output that is never partial is there as produced.
                if made(source).iter().all(|s| s.partial.is_empty()) {
                    readers.retain(|r| *r != Reader::Output);
                }
                if !readers.is_empty() {
                    groups.entry((source, *section, readers)).or_insert((0.0, v)).0 += 1.0;
                }
            }
        }
        for ((source, section, readers), (count, v)) in &groups {
            let made_by = match source {
                Source::Node(class, _) => counted(*class),
                Source::State(_) | Source::Input(_) if counts.is_some() => 0.0,
                _ => 1.0,
            };
            let (ty, weight) = (graph.ty(*v), weights.of(*section) * count * made_by);
            let (from, u) = (made(*source), variable(*source));
            let forward = |class: u32| graph.node(blocks.nodes[class as usize][0]).section == Section::Forward;
            let kept = *section == Section::Backward && matches!(source, Source::Node(class, _) if forward(*class));
            let whole: Vec<Spec> = from.iter().map(|s| s.combined()).collect();
            // The variable that decides what a reader wants, and its specs by choice.
            let wants = |reader: &Reader| -> (usize, Vec<&Spec>) {
                match *reader {
                    Reader::Operand(class, at) => {
                        let specs = space.choices[class as usize].iter().map(|c| &c.inputs[at as usize]);
                        (class as usize, specs.collect())
                    }
                    Reader::Write(class) => (nc + class as usize, space.storage[class as usize].iter().collect()),
                    Reader::Output => (u, whole.iter().collect()),
                }
            };
            let counts = |reader: &Reader| if let Reader::Operand(class, _) = reader { counted(*class) } else { 1.0 };
            if let [reader] = &readers[..] {
                let (decides, specs) = wants(reader);
                let table = Table::new(times, &from, &specs, ty, weight * counts(reader), kept);
                draft.pair(u, decides, |i, j| table.get(i, j));
                continue;
            }
            let mut shared: Vec<&Spec> = readers.iter().flat_map(|r| wants(r).1).chain(from.iter().copied()).collect();
            shared.sort();
            shared.dedup();
            let version = draft.costs.len();
            draft.costs.push(vec![0.0; shared.len()]);
            passing.push(shared.iter().map(|s| local_bytes(s, ty, mesh)).collect());
            let any = readers.iter().map(counts).fold(0.0, f64::max);
            let table = Table::new(times, &from, &shared, ty, weight * any, kept);
            draft.pair(u, version, |i, j| table.get(i, j));
            let share = weight / (readers.len() - 1) as f64;
            for reader in readers {
                let (decides, specs) = wants(reader);
                let table = Table::new(times, &shared, &specs, ty, share * counts(reader), kept);
                draft.pair(version, decides, |i, j| table.get(i, j));
            }
        }

        let mut problem = Problem::seconds();
        for costs in draft.costs {
            problem.add_node(costs);
        }
        for ((u, v), costs) in draft.edges {
            let cols = problem.nodes()[v].costs.len();
            problem.add_edge(u, v, |i, j| costs[i * cols + j]);
        }
        Formulation { problem, node_classes: nc, state_classes: sc, passing }
    }

    fn rows(&mut self, step: &Step<'_>, space: &Space, mesh: &Mesh, limits: &[u64]) {
        let uses = uses(step.graph, step.blocks, None);
        let usage = usage(step, &views::choices(step.graph, step.blocks, space, mesh), &uses);
        for stage in 0..step.stages.count {
            let limit = limits.get(stage).or(limits.last()).copied().unwrap_or(UNLIMITED);
            self.problem.add_row(row_limit(limit));
        }
        let (nc, sc) = (self.node_classes, self.state_classes);
        for ((source, stage), held) in usage {
            let amounts: Vec<i64> = held.bytes(source, space, mesh).map(|b| b as i64).collect();
            self.problem.add_usage(source.variable(nc, sc), stage..stage + 1, amounts);
        }
    }

    /// Changes the limits, bytes per stage.
    pub fn set_limits(&mut self, limits: &[u64]) {
        for (row, limit) in self.problem.limits.iter_mut().zip(limits) {
            *row = row_limit(*limit);
        }
    }

    /// The same choices with the bytes of all rows as the objective, and what is forbidden still forbidden: its optimum is
    /// what all stages hold together at least.
    pub fn least_rows(&self) -> Formulation {
        self.memory(None)
    }

    /// The same, but of choices with nearly equal rows those are better that pass small values between operators.
    pub fn least_memory(&self) -> Formulation {
        // Rows first: what passes counts little, so that sums of it seldom outweigh them.
        const PASSING: u64 = 16;
        self.memory(Some(PASSING))
    }

    /// Rows, and where `passing` says so, one part in so many of what passes between operators.
    fn memory(&self, passing: Option<u64>) -> Formulation {
        let old = &self.problem;
        // A unit that keeps sums over thousands of nodes in range.
        const KIB: i64 = 1024;
        let mut costs: Vec<Vec<i64>> = old
            .nodes()
            .iter()
            .map(|n| n.costs.iter().map(|&c| if c == FORBIDDEN { FORBIDDEN } else { 0 }).collect())
            .collect();
        for usage in old.usages() {
            for (cost, amount) in costs[usage.node].iter_mut().zip(usage.amounts.iter()) {
                if *cost != FORBIDDEN {
                    *cost += amount / KIB;
                }
            }
        }
        if let Some(part) = passing {
            for (costs, bytes) in costs.iter_mut().zip(&self.passing) {
                for (cost, bytes) in costs.iter_mut().zip(bytes).filter(|(c, _)| **c != FORBIDDEN) {
                    *cost += (bytes / (KIB as u64 * part)) as i64;
                }
            }
        }
        let mut problem = Problem::with_quantum(KIB as f64);
        for costs in costs {
            problem.add_node_quanta(costs);
        }
        for e in old.edges().iter().filter(|e| e.costs.costs().contains(&FORBIDDEN)) {
            let only = |i, j| if e.costs.get(i, j) == FORBIDDEN { FORBIDDEN } else { 0 };
            let matrix = Matrix::from_fn(e.costs.rows(), e.costs.cols(), only);
            problem.add_edge_quanta(e.u, e.v, std::sync::Arc::new(matrix));
        }
        problem.limits = old.limits.clone();
        problem.usages = old.usages.clone();
        Formulation { problem, passing: self.passing.clone(), ..*self }
    }

    /// The assignment that a choice stands for.
    pub fn assignment(&self, step: &Step<'_>, space: &Space, mesh: &Mesh, choice: &[usize]) -> Assignment {
        let (nc, sc) = (self.node_classes, self.state_classes);
        let strategy = |class: &u32| space.choices[*class as usize][choice[*class as usize]].strategy.clone();
        let storage = |class: &u32| space.storage[*class as usize][choice[nc + *class as usize]].clone();
        Assignment {
            mesh: mesh.clone(),
            stages: step.stages.count,
            stage: step.stages.node.clone(),
            everywhere: step.stages.everywhere.clone(),
            strategy: step.blocks.node_class.iter().map(strategy).collect(),
            storage: step.blocks.state_class.iter().map(storage).collect(),
            home: step.stages.home.clone(),
            inputs: space.inputs.iter().enumerate().map(|(i, specs)| specs[choice[nc + sc + i]].clone()).collect(),
            schedule: step.pace.schedule,
            micro_batches: step.pace.micro_batches,
        }
    }
}

/// A limit that never binds, and that the solver can still add up.
pub const UNLIMITED: u64 = 1 << 60;

fn row_limit(bytes: u64) -> i64 {
    bytes.min(UNLIMITED) as i64
}

/// The least bytes on a rank of everything that rows can hold: the same for all ways of recomputation.
pub struct LeastBytes {
    /// By class of nodes and result: of choices that make it, and of those that make it a view.
    results: Vec<Vec<[Option<u64>; 2]>>,
    /// By class of states.
    states: Vec<u64>,
    inputs: Vec<u64>,
    /// See [`views::choices`].
    views: Vec<Vec<bool>>,
}

impl LeastBytes {
    /// Of everything at its smallest.
    pub fn new(graph: &Graph, blocks: &Blocks, space: &Space, mesh: &Mesh) -> LeastBytes {
        let views = views::choices(graph, blocks, space, mesh);
        let least =
            |specs: &mut dyn Iterator<Item = &Spec>, v: ValueId| specs.map(|s| local_bytes(s, graph.ty(v), mesh)).min();
        let results = |class: usize| {
            let of = |(out, &v): (usize, &ValueId)| {
                [false, true].map(|view| {
                    let choices = space.choices[class].iter().zip(&views[class]).filter(|(_, is)| **is == view);
                    least(&mut choices.map(|(c, _)| &c.outputs[out]), v)
                })
            };
            graph.node(blocks.nodes[class][0]).outputs.iter().enumerate().map(of).collect()
        };
        LeastBytes {
            results: (0..blocks.nodes.len()).map(results).collect(),
            states: blocks
                .states
                .iter()
                .zip(&space.storage)
                .map(|(members, specs)| least(&mut specs.iter(), graph.state(members[0]).read).unwrap_or(0))
                .collect(),
            inputs: graph
                .inputs
                .iter()
                .zip(&space.inputs)
                .map(|(x, specs)| least(&mut specs.iter(), x.value).unwrap_or(0))
                .collect(),
            views,
        }
    }
}

/// Per stage, the least that the rows of any choice hold, by category: every source at its smallest.
pub fn least_rows(step: &Step<'_>, bytes: &LeastBytes) -> Vec<MemoryBreakdown> {
    let mut least = vec![MemoryBreakdown::default(); step.stages.count];
    for ((source, stage), held) in usage(step, &bytes.views, &uses(step.graph, step.blocks, None)) {
        let (bytes, category) = match source {
            Source::Node(c, out) => {
                let accumulates = step.graph.node(step.blocks.nodes[c as usize][0]).is_accumulate();
                let category = if accumulates { Category::Gradients } else { Category::Activations };
                let [made, view] = bytes.results[c as usize][out as usize];
                let made = made.map(|b| b * (held.always + held.unless_view));
                let view = view.map(|b| b * held.always);
                (made.into_iter().chain(view).min().unwrap_or(0), category)
            }
            Source::State(c) => {
                let kind = step.graph.state(step.blocks.states[c as usize][0]).kind;
                (bytes.states[c as usize] * held.always, category(kind))
            }
            Source::Input(i) => (bytes.inputs[i as usize] * held.always, Category::Activations),
        };
        least[stage].add(category, Bytes(bytes));
    }
    least
}

/// How often sections count, see the module.
struct Weights {
    micro: f64,
    update: f64,
}

impl Weights {
    fn new(pace: &Pace, stages: usize) -> Weights {
        Weights { micro: pace.weight(stages), update: 1.0 / stages as f64 }
    }
    fn of(&self, section: Section) -> f64 {
        if section == Section::Update { self.update } else { self.micro }
    }
}

/// Times from each of some specs to each of others.
struct Table {
    cols: usize,
    costs: Vec<f64>,
}

impl Table {
    /// `kept`: the value was made in the forward pass. Rows of it that lie with their experts are taken to be kept there too.
    fn new(times: &mut Times<'_>, from: &[&Spec], to: &[&Spec], ty: &Type, weight: f64, kept: bool) -> Table {
        let mut known: BTreeMap<(&Spec, &Spec), f64> = BTreeMap::new();
        let mut costs = Vec::with_capacity(from.len() * to.len());
        for f in from {
            for t in to {
                let price = || match times.reshard(f, t, ty) {
                    Some(_) if kept && !t.routed.is_empty() => 0.0,
                    Some(time) => time * weight,
                    None => f64::INFINITY,
                };
                costs.push(*known.entry((*f, *t)).or_insert_with(price));
            }
        }
        Table { cols: to.len(), costs }
    }
    fn get(&self, i: usize, j: usize) -> f64 {
        self.costs[i * self.cols + j]
    }
}

/// Seconds that a node takes once under a strategy.
pub(crate) fn compute(times: &Times<'_>, op: &Op, c: &Choice, ins: &[Type], outs: &[Type], fused: &Fused) -> f64 {
    // Strategies are made of specs that divide.
    let local = |specs: &[Spec], types: &[Type]| -> Vec<Type> {
        specs.iter().zip(types).map(|(s, t)| s.local(t, times.mesh()).unwrap_or_else(|| t.clone())).collect()
    };
    times.compute(op, &local(&c.inputs, ins), &local(&c.outputs, outs), fused)
}

fn source(graph: &Graph, blocks: &Blocks, v: ValueId) -> Option<Source> {
    match graph.value(v).def {
        Def::Node(n, out) => Some(Source::Node(blocks.node_class[n.index()], out as u32)),
        Def::State(s) => Some(Source::State(blocks.state_class[s.index()])),
        Def::Input(i) => Some(Source::Input(i as u32)),
        Def::Const(_) => None,
    }
}

/// Per class and choice, bytes of a node's operands and results on one rank; a view passes nothing on.
fn passing(graph: &Graph, blocks: &Blocks, space: &Space, mesh: &Mesh) -> Vec<Vec<u64>> {
    let bytes =
        |specs: &[Spec], types: &[Type]| -> u64 { specs.iter().zip(types).map(|(s, t)| local_bytes(s, t, mesh)).sum() };
    let views = views::choices(graph, blocks, space, mesh);
    let of = |((members, choices), views): ((&Vec<NodeId>, &Vec<Choice>), &Vec<bool>)| {
        let n = graph.node(members[0]);
        let (ins, outs) = (graph.input_types(n), graph.output_types(n));
        let all = |c: &Choice| bytes(&c.inputs, &ins) + bytes(&c.outputs, &outs);
        choices.iter().zip(views).map(|(c, view)| if *view { 0 } else { all(c) }).collect()
    };
    blocks.nodes.iter().zip(&space.choices).zip(&views).map(of).collect()
}

/// Per section, the readers of a value. Those that run once in a step count as the update's.
type Uses = BTreeMap<Section, Readers>;

fn uses(graph: &Graph, blocks: &Blocks, classes: Option<&Classes>) -> Vec<Uses> {
    let mut uses = vec![Uses::new(); graph.values.len()];
    for id in graph.node_ids() {
        let n = graph.node(id);
        let class = blocks.node_class[id.index()] as usize;
        let section = classes.and_then(|c| c.pace(class)).unwrap_or(n.section);
        for (operand, v) in n.inputs.iter().enumerate() {
            let reader = Reader::Operand(class as u32, operand as u32);
            uses[v.index()].entry(section).or_default().push(reader);
        }
    }
    sort(&mut uses);
    uses
}

/// Adds the outputs, in the section that makes them, and the states written, in the update.
fn ends(graph: &Graph, blocks: &Blocks, uses: &mut [Uses]) {
    for o in &graph.outputs {
        if let Some(n) = graph.producer(o.value) {
            uses[o.value.index()].entry(graph.node(n).section).or_default().push(Reader::Output);
        }
    }
    for (s, state) in graph.states.iter().enumerate() {
        if let Some(w) = state.write {
            uses[w.index()].entry(Section::Update).or_default().push(Reader::Write(blocks.state_class[s]));
        }
    }
    sort(uses);
}

fn sort(uses: &mut [Uses]) {
    for readers in uses.iter_mut().flat_map(|u| u.values_mut()) {
        readers.sort();
        readers.dedup();
    }
}

/// Values that leave their stage: the node, its result, and to which other stages.
pub(crate) fn crossings(graph: &Graph, stages: &Stages) -> Vec<(NodeId, usize, Vec<u16>)> {
    let mut to: BTreeMap<(NodeId, usize), Vec<u16>> = BTreeMap::new();
    for id in graph.node_ids().filter(|_| stages.count > 1) {
        let here = stages.node[id.index()];
        for v in &graph.node(id).inputs {
            if let Def::Node(p, out) = graph.value(*v).def
                && stages.node[p.index()] != here
                && !stages.everywhere[p.index()]
                && !stages.everywhere[id.index()]
            {
                let list = to.entry((p, out)).or_default();
                if !list.contains(&here.0) {
                    list.push(here.0);
                }
            }
        }
    }
    to.into_iter().map(|((n, out), list)| (n, out, list)).collect()
}

/// How often a source is allocated in a stage.
struct Held {
    ty: Type,
    /// Whatever is chosen.
    always: u64,
    /// Unless the choice makes it a view.
    unless_view: u64,
    /// By choice, whether it does.
    views: Vec<bool>,
}

impl Held {
    /// Bytes in all, by choice.
    fn bytes<'a>(&'a self, source: Source, space: &'a Space, mesh: &'a Mesh) -> impl Iterator<Item = u64> + 'a {
        source.specs(space).into_iter().enumerate().map(move |(i, spec)| {
            let view = self.views.get(i).is_some_and(|v| *v);
            local_bytes(spec, &self.ty, mesh) * (self.always + if view { 0 } else { self.unless_view })
        })
    }
}

/// What is allocated together for sure, per source and stage.
fn usage(step: &Step<'_>, views: &[Vec<bool>], uses: &[Uses]) -> BTreeMap<(Source, usize), Held> {
    let Step { graph, blocks, stages, pace } = step;
    let mut usage: BTreeMap<(Source, usize), Held> = BTreeMap::new();
    let mut add = |v: ValueId, stage: usize, count: usize, repeated: bool| {
        let Some(source) = source(graph, blocks, v) else { return };
        let held = usage.entry((source, stage)).or_insert_with(|| Held {
            ty: graph.ty(v).clone(),
            always: 0,
            unless_view: 0,
            views: if let Source::Node(c, _) = source { views[c as usize].clone() } else { Vec::new() },
        });
        *(if repeated { &mut held.unless_view } else { &mut held.always }) += count as u64;
    };
    for s in graph.state_ids() {
        add(graph.state(s).read, stages.home[s.index()].0 as usize, 1, false);
    }
    let once = once(graph, pace.micro_batches);
    for (v, stage) in step_long(graph, stages, &once) {
        add(v, stage, 1, false);
    }
    let kept = kept(graph, stages, &once, uses.iter().map(|u| u.contains_key(&Section::Backward)));
    let may = |n: NodeId| views[blocks.node_class[n.index()] as usize].contains(&true);
    let repeated = views::repeated(graph, stages, &kept, may);
    for ((v, stage), repeated) in kept.into_iter().zip(repeated) {
        add(v, stage, pace.in_flight(stage, stages.count), repeated);
    }
    for id in graph.node_ids() {
        let n = graph.node(id);
        if n.is_accumulate() {
            add(n.outputs[0], stages.node[id.index()].0 as usize, 1, false);
        }
    }
    usage
}

/// Results of what runs once, with the stages that have them for the whole step: where they are made and where they are read.
pub(crate) fn step_long(graph: &Graph, stages: &Stages, once: &[bool]) -> Vec<(ValueId, usize)> {
    let mut places = BTreeSet::new();
    for id in graph.node_ids() {
        let (n, stage) = (graph.node(id), stages.node[id.index()].0 as usize);
        if once[id.index()] {
            places.extend(n.outputs.iter().map(|v| (*v, stage)));
        }
        let of_once = |v: &&ValueId| graph.producer(**v).is_some_and(|p| once[p.index()]);
        places.extend(n.inputs.iter().filter(of_once).map(|v| (*v, stage)));
    }
    places.into_iter().collect()
}

/// Values kept from forward to backward, with the stages that keep them. `needed`: per value, whether backward reads it.
pub(crate) fn kept(
    graph: &Graph,
    stages: &Stages,
    once: &[bool],
    needed: impl Iterator<Item = bool>,
) -> Vec<(ValueId, usize)> {
    let mut places: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    let candidates: Vec<bool> = needed
        .zip(&graph.values)
        .map(|(needed, v)| {
            needed
                && match v.def {
                    Def::Node(n, _) => graph.node(n).section == Section::Forward && !once[n.index()],
                    Def::Input(_) => true,
                    Def::State(_) | Def::Const(_) => false,
                }
        })
        .collect();
    for id in graph.node_ids() {
        let n = graph.node(id);
        if n.section != Section::Backward {
            continue;
        }
        let stage = stages.node[id.index()].0 as usize;
        for v in n.inputs.iter().filter(|v| candidates[v.index()]) {
            let list = places.entry(*v).or_default();
            if !list.contains(&stage) {
                list.push(stage);
            }
        }
    }
    places.into_iter().flat_map(|(v, list)| list.into_iter().map(move |s| (v, s))).collect()
}
