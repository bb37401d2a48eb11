//! The outer search: over pipeline stages, meshes, micro-batches and schedules, with the ILP inside.
//!
//! **The space.** With `N` ranks: every `pp * dp * tp = N`, `tp` within one node and innermost (unless pinned), every
//! number of micro-batches of [`micro_batches`], one cut into stages per (pp, micro-batch) by [`crate::pipeline`], one schedule
//! (1F1B unless pinned; GPipe keeps more activations and is never faster here), and everything that [`crate::space`] allows.
//! Repeated blocks are planned alike.
//!
//! **The order.** Each candidate first gets a bound from the least time of every operator alone; candidates are solved from the
//! least bound on, until no bound is below the best plan found. A solved candidate is simulated: the simulation judges, the
//! ILP's proven bound enters the certificate.
//!
//! **Memory.** The ILP's rows hold what is surely allocated. If the simulated peak exceeds the limit, what lives only
//! inside a section, and memory that could have been shared by views but is not, is taken off the limit and the candidate is solved again; its bound stays that of the first solve.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use autoshard_cost_models::{Bytes, Category, Cluster, MemoryBreakdown};
use autoshard_ir::graph::{Graph, Section};
use autoshard_ir::op::Work;
use autoshard_ir::{DType, NodeId};

use crate::assignment::{Assignment, Schedule};
use crate::constraints::{Constraints, Objective};
use crate::formulate::{Formulation, Pace, Step, UNLIMITED, compute, least_rows};
use crate::mesh::{AxisName, Mesh};
use crate::pipeline::cut;
use crate::request::{Mode, PlanRequest, StepGraph};
use crate::simulate::{Prediction, simulate};
use crate::solver::{Options, SolveError, solve};
use crate::space::Space;
use crate::times::Times;

/// Where graphs come from: the file, for a batch size.
pub trait GraphSource {
    /// The graph of the file for `batch` samples.
    ///
    /// # Errors
    /// Whatever is in the way, for people.
    fn graph(&self, batch: usize) -> Result<Graph, String>;
}

impl<F: Fn(usize) -> Result<Graph, String>> GraphSource for F {
    fn graph(&self, batch: usize) -> Result<Graph, String> {
        self(batch)
    }
}

/// A point of the outer space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Pipeline stages.
    pub stages: usize,
    /// The mesh of a stage.
    pub mesh: Mesh,
    /// Micro-batches and schedule.
    pub pace: Pace,
}

impl Candidate {
    /// As shown: `pp=2 dp=4 tp=1, 8 micro-batches`.
    pub fn show(&self) -> String {
        let size = |name| self.mesh.find(name).map_or(1, |a| self.mesh.size(a));
        let m = self.pace.micro_batches;
        format!(
            "pp={} dp={} tp={}, {m} micro-batch{}",
            self.stages,
            size(AxisName::Dp),
            size(AxisName::Tp),
            if m == 1 { "" } else { "es" }
        )
    }
}

/// A solved candidate.
pub struct Solved {
    /// Which.
    pub candidate: Candidate,
    /// The step graph.
    pub step: Rc<StepGraph>,
    /// The decision.
    pub assignment: Assignment,
    /// What it takes.
    pub prediction: Prediction,
    /// Objective of the ILP, seconds.
    pub ilp_objective_s: f64,
    /// Constraints that could not be kept to the letter.
    pub notes: Vec<String>,
}

/// The best of a mesh that is not the best of all.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// Which.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Bytes on the fullest rank.
    pub peak_bytes: u64,
}

/// What is proven.
#[derive(Debug, Clone, PartialEq)]
pub struct Certificate {
    /// Simulated seconds of the plan (bytes, for least memory).
    pub objective: f64,
    /// No plan of the searched space takes less.
    pub bound: f64,
    /// Candidates in the space, and how many were solved.
    pub candidates: usize,
    /// See above.
    pub solved: usize,
    /// Whether time ran out or the search was interrupted.
    pub cut_short: bool,
}

impl Certificate {
    /// (objective - bound) / objective.
    pub fn gap(&self) -> f64 {
        if self.objective > 0.0 { ((self.objective - self.bound) / self.objective).max(0.0) } else { 0.0 }
    }
}

/// The outcome of a search.
pub struct Found {
    /// The best plan.
    pub best: Solved,
    /// What is proven of it.
    pub certificate: Certificate,
    /// The best of every other mesh that was solved, best first.
    pub alternatives: Vec<Alternative>,
    /// Bytes a rank may allocate.
    pub memory_limit: u64,
}

/// The nearest to fitting.
#[derive(Debug, Clone, PartialEq)]
pub struct Closest {
    /// Which candidate.
    pub candidate: String,
    /// Bytes too many on the fullest rank.
    pub excess: u64,
    /// What takes most there.
    pub category: Category,
    /// Bytes of it.
    pub category_bytes: u64,
}

impl Closest {
    fn new(c: &Candidate, memory: &MemoryBreakdown, limit: u64) -> Closest {
        let largest = memory.0.iter().filter(|(c, _)| **c != Category::Reserve).max_by_key(|(_, b)| b.0);
        let (category, bytes) = largest.map_or((Category::Weights, 0), |(c, b)| (*c, b.0));
        Closest {
            candidate: c.show(),
            excess: memory.allocated().0.saturating_sub(limit),
            category,
            category_bytes: bytes,
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SearchError {
    /// The graph cannot be made.
    #[error("{0}")]
    Graph(String),
    /// The pins contradict each other, the cluster or the batch.
    #[error("no configuration fits the constraints: {0}")]
    Pins(String),
    /// Nothing fits into memory.
    #[error(
        "no plan fits into {} per GPU; closest is {} with {} too much, of which {} of {}{}",
        Bytes(*.limit), .closest.candidate, Bytes(.closest.excess), Bytes(.closest.category_bytes), .closest.category.name(),
        .relaxations.iter().map(|r| format!("\n  would help: {r}")).collect::<String>()
    )]
    Memory {
        /// Bytes a rank may allocate.
        limit: u64,
        /// The nearest to fitting.
        closest: Closest,
        /// Changes that would help, smallest first.
        relaxations: Vec<String>,
    },
    /// Stopped before any plan was found.
    #[error("stopped before any plan was found; give it more time (--time-limit)")]
    Stopped,
}

/// Told after every candidate: solved so far, of how many, and the best time yet.
pub type Progress<'a> = dyn Fn(usize, usize, Option<f64>) + 'a;

/// Numbers of micro-batches worth trying: divisors of the samples per data-parallel rank, at most this many.
const MICRO_BATCHES: usize = 6;

/// The numbers of micro-batches that are tried when none is pinned: divisors of the samples that a data-parallel rank has
/// per step, evenly spread in their order when there are many; with one stage, more than one is only good for memory.
pub fn micro_batches(per_rank: usize) -> Vec<usize> {
    let all: Vec<usize> = (1..=per_rank).filter(|m| per_rank % m == 0).collect();
    if all.len() <= MICRO_BATCHES {
        return all;
    }
    let last = all.len() - 1;
    (0..MICRO_BATCHES).map(|i| all[(i * last + (MICRO_BATCHES - 1) / 2) / (MICRO_BATCHES - 1)]).collect()
}

/// All candidates.
///
/// # Errors
/// Pins that leave none, with the reason.
pub fn candidates(cluster: &Cluster, request: &PlanRequest) -> Result<Vec<Candidate>, SearchError> {
    let (n, pins, batch) = (cluster.gpus(), &request.constraints, request.workload.global_batch);
    let refuse = |text: String| Err(SearchError::Pins(text));
    for (name, size) in [("tp", pins.tp), ("pp", pins.pp), ("dp", pins.dp)] {
        if let Some(size) = size.filter(|s| *s == 0 || n % s != 0) {
            return refuse(format!("{name}={size} does not divide {n} GPUs"));
        }
    }
    if batch == 0 {
        return refuse("the batch is empty".into());
    }
    let divisors: Vec<usize> = (1..=n).filter(|d| n % d == 0).collect();
    let mut found = Vec::new();
    let mut reasons = Vec::new();
    for &pp in divisors.iter().filter(|d| pins.pp.is_none_or(|p| p == **d)) {
        for &tp in divisors.iter().filter(|d| (n / pp) % **d == 0) {
            let dp = n / pp / tp;
            let within = tp <= cluster.devices_per_node.max(1) || pins.tp.is_some();
            if pins.tp.is_some_and(|p| p != tp) || pins.dp.is_some_and(|p| p != dp) || !within {
                continue;
            }
            if batch % dp != 0 {
                reasons.push(format!("a batch of {batch} is no multiple of dp={dp}"));
                continue;
            }
            let per_rank = batch / dp;
            let counts = match (pins.micro_batch, request.workload.mode) {
                (Some(size), _) if size == 0 || per_rank % size != 0 => {
                    reasons.push(format!(
                        "{per_rank} samples per dp={dp} rank are no multiple of micro-batches of {size}"
                    ));
                    continue;
                }
                (Some(size), _) => vec![per_rank / size],
                (None, Mode::Infer) if pp == 1 => vec![1],
                (None, _) => micro_batches(per_rank),
            };
            let schedule = pins.schedule.unwrap_or(Schedule::OneF1B);
            for micro_batches in counts {
                found.push(Candidate {
                    stages: pp,
                    mesh: Mesh::new([(AxisName::Dp, dp), (AxisName::Tp, tp)]),
                    pace: Pace { micro_batches, schedule },
                });
            }
        }
    }
    if found.is_empty() {
        reasons.sort();
        reasons.dedup();
        let pinned: Vec<String> = [("pp", pins.pp), ("dp", pins.dp), ("tp", pins.tp)]
            .iter()
            .filter_map(|(name, p)| p.map(|p| format!("{name}={p}")))
            .collect();
        let mesh = if pinned.is_empty() { "any mesh".into() } else { pinned.join(" ") };
        match (pins.pp, pins.dp, pins.tp) {
            (Some(pp), Some(dp), Some(tp)) if pp * dp * tp != n => {
                reasons.insert(0, format!("{mesh} makes {} ranks, there are {n} GPUs", pp * dp * tp));
            }
            _ if reasons.is_empty() => reasons.push(format!("{mesh} is not possible on {n} GPUs")),
            _ => reasons.insert(0, format!("{mesh} on {n} GPUs")),
        }
        return refuse(reasons.join("; "));
    }
    Ok(found)
}

/// Finds the best plan.
///
/// # Errors
/// See [`SearchError`].
pub fn search(
    source: &dyn GraphSource,
    cluster: &Cluster,
    request: &PlanRequest,
    interrupt: Option<Arc<AtomicBool>>,
    progress: &Progress<'_>,
) -> Result<Found, SearchError> {
    let mut search = Search::new(source, cluster, request, interrupt);
    match search.run(progress) {
        Err(SearchError::Memory { limit, closest, mut relaxations }) => {
            relaxations.extend(search.relaxations());
            Err(SearchError::Memory { limit, closest, relaxations })
        }
        other => other,
    }
}

struct Search<'a> {
    source: &'a dyn GraphSource,
    cluster: &'a Cluster,
    request: &'a PlanRequest,
    interrupt: Option<Arc<AtomicBool>>,
    deadline: Instant,
    limit: u64,
    /// Graphs of the file by batch.
    graphs: BTreeMap<usize, Graph>,
    /// Batches for which there is no graph, with the reason.
    refused: BTreeMap<usize, String>,
    /// One-stage steps by batch.
    whole: BTreeMap<usize, Rc<StepGraph>>,
    /// Some steps cut into stages, by batch and stages, in order of making.
    cut: Vec<((usize, usize), Rc<StepGraph>)>,
}

/// What is known of a candidate without solving it.
enum Quick {
    /// Seconds it takes at least.
    Bound(f64),
    /// Its states alone do not fit.
    Excess(Closest),
    /// Some operator has no choice.
    Impossible(String),
}

/// What came of a candidate.
enum Outcome {
    Solved(Box<Solved>, f64),
    /// No plan of it can be better than the best: at least that many seconds.
    Worse(f64),
    /// Nothing that fits was found; if the rows alone allow something, its bound.
    Excess(Closest, Option<f64>),
    /// No choice, or too few places to cut.
    Impossible(String),
    /// No plan was found in its share of the time.
    Undecided,
}

impl<'a> Search<'a> {
    fn new(
        source: &'a dyn GraphSource,
        cluster: &'a Cluster,
        request: &'a PlanRequest,
        interrupt: Option<Arc<AtomicBool>>,
    ) -> Search<'a> {
        let usable = cluster.usable_memory().0;
        Search {
            source,
            cluster,
            request,
            interrupt,
            deadline: Instant::now() + Duration::from_secs_f64(request.time_limit_s.clamp(0.0, 1e6)),
            limit: request.constraints.memory_limit.map_or(usable, |l| l.min(usable)),
            graphs: BTreeMap::new(),
            refused: BTreeMap::new(),
            whole: BTreeMap::new(),
            cut: Vec::new(),
        }
    }

    fn interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|i| i.load(Ordering::Relaxed))
    }
    fn stopped(&self) -> bool {
        Instant::now() >= self.deadline || self.interrupted()
    }
    /// Gives a search that has found nothing yet as much time again.
    fn extend(&mut self) {
        let limit = Duration::from_secs_f64(self.request.time_limit_s.clamp(0.0, 1e6));
        self.deadline = self.deadline.max(Instant::now()) + limit;
    }

    fn run(&mut self, progress: &Progress<'_>) -> Result<Found, SearchError> {
        let all = candidates(self.cluster, self.request)?;
        let total = all.len();
        let mut impossible = Vec::new();
        let mut queue: Vec<(f64, usize, Candidate)> = Vec::new();
        let mut closest: Option<Closest> = None;
        for (at, c) in all.into_iter().enumerate() {
            match self.quick(&c)? {
                Quick::Bound(bound) => queue.push((bound, at, c)),
                Quick::Excess(e) if closest.as_ref().is_none_or(|c| e.excess < c.excess) => closest = Some(e),
                Quick::Excess(_) => {}
                Quick::Impossible(why) => impossible.push(format!("{}: {why}", c.show())),
            }
        }
        queue.sort_by(|a, b| (a.0, a.1).partial_cmp(&(b.0, b.1)).unwrap_or(std::cmp::Ordering::Equal));
        let mut best: Option<Box<Solved>> = None;
        let mut bound = f64::INFINITY;
        let mut alternatives: BTreeMap<(usize, Mesh), Alternative> = BTreeMap::new();
        let (mut solved, mut cut_short) = (0, false);
        let memory = self.request.objective == Objective::Memory;
        let mut extended = false;
        for (at, (quick, _, c)) in queue.iter().enumerate() {
            let least = best.as_ref().map(|b| b.prediction.step_time_s);
            if best.is_none() && !extended && !self.interrupted() && self.stopped() {
                extended = true;
                self.extend();
            }
            if self.stopped() || (extended && best.is_some()) {
                cut_short = true;
                bound = bound.min(if memory { 0.0 } else { *quick });
                break;
            }
            if !memory && least.is_some_and(|t| *quick >= t * (1.0 - self.request.gap)) {
                bound = bound.min(*quick);
                break;
            }
            solved += 1;
            match self.candidate(c, if memory { None } else { least })? {
                Outcome::Solved(plan, proven) => {
                    // Least memory: all stages together hold at least what is proven, so the fullest its share.
                    bound = bound.min(if memory { proven / c.stages as f64 } else { proven.max(*quick) });
                    let (time, peak) = (plan.prediction.step_time_s, plan.prediction.peak());
                    let entry = Alternative { candidate: c.clone(), step_time_s: time, peak_bytes: peak };
                    let slot = alternatives.entry((c.stages, c.mesh.clone())).or_insert_with(|| entry.clone());
                    if time < slot.step_time_s {
                        *slot = entry;
                    }
                    let better = best.as_ref().is_none_or(|b| {
                        if memory { peak < b.prediction.peak() } else { time < b.prediction.step_time_s }
                    });
                    if better {
                        best = Some(plan);
                    }
                }
                Outcome::Worse(proven) => bound = bound.min(proven),
                Outcome::Excess(e, proven) => {
                    bound = bound.min(proven.map_or(f64::INFINITY, |p| if memory { p / c.stages as f64 } else { p }));
                    if closest.as_ref().is_none_or(|c| e.excess < c.excess) {
                        closest = Some(e);
                    }
                }
                Outcome::Impossible(why) => impossible.push(format!("{}: {why}", c.show())),
                Outcome::Undecided => {
                    cut_short = true;
                    bound = bound.min(if memory { 0.0 } else { *quick });
                }
            }
            progress(at + 1, queue.len(), best.as_ref().map(|b| b.prediction.step_time_s));
        }
        let Some(best) = best else {
            return Err(match closest {
                _ if cut_short => SearchError::Stopped,
                Some(closest) => {
                    let more = format!("{} more memory per GPU", Bytes(closest.excess));
                    SearchError::Memory { limit: self.limit, closest, relaxations: vec![more] }
                }
                None => match self.refused.pop_first() {
                    Some((_, why)) if impossible.len() == total => SearchError::Graph(why),
                    _ => SearchError::Pins(impossible.join("; ")),
                },
            });
        };
        let objective = if memory { best.prediction.peak() as f64 } else { best.prediction.step_time_s };
        let mut alternatives: Vec<Alternative> = alternatives
            .into_values()
            .filter(|a| (a.candidate.stages, &a.candidate.mesh) != (best.candidate.stages, &best.candidate.mesh))
            .collect();
        alternatives.sort_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
        let certificate = Certificate { objective, bound: bound.min(objective), candidates: total, solved, cut_short };
        Ok(Found { best: *best, certificate, alternatives, memory_limit: self.limit })
    }

    fn graph(&mut self, batch: usize) -> Result<&Graph, SearchError> {
        if !self.graphs.contains_key(&batch) {
            let graph = self.source.graph(batch).map_err(SearchError::Graph)?;
            self.graphs.insert(batch, graph);
        }
        Ok(&self.graphs[&batch])
    }

    fn whole(&mut self, batch: usize) -> Result<(), SearchError> {
        if !self.whole.contains_key(&batch) {
            let workload = &self.request.workload;
            let graph = self.graph(batch)?;
            let step = workload.step(graph, &[], 1).map_err(|e| SearchError::Graph(e.to_string()))?;
            self.whole.insert(batch, Rc::new(step));
        }
        Ok(())
    }

    /// A bound from the least time of every operator alone; or, from the least memory of every state alone, that the
    /// candidate cannot fit.
    fn quick(&mut self, c: &Candidate) -> Result<Quick, SearchError> {
        let batch = self.request.workload.global_batch / c.pace.micro_batches;
        if let Some(why) = self.refused.get(&batch) {
            return Ok(Quick::Impossible(why.clone()));
        }
        match self.whole(batch) {
            // Values may become too large for a graph at one batch and not at another.
            Err(SearchError::Graph(why)) => {
                self.refused.insert(batch, why.clone());
                return Ok(Quick::Impossible(why));
            }
            other => other?,
        }
        let step = &self.whole[&batch];
        let space = match Space::new(step, &c.mesh, &self.request.constraints) {
            Ok(space) => space,
            Err(e) => return Ok(Quick::Impossible(e.to_string())),
        };
        // In one stage with one micro-batch in flight; the fullest of several stages holds at least its share.
        let pace = Pace { micro_batches: 1, ..c.pace };
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace };
        let mut memory = least_rows(&view, &space, &c.mesh).swap_remove(0);
        memory.0.values_mut().for_each(|b| b.0 /= c.stages as u64);
        if memory.total().0 > self.limit {
            return Ok(Quick::Excess(Closest::new(c, &memory, self.limit)));
        }
        let times = Times::new(self.cluster, &c.mesh);
        let (mut micro, mut update) = (0.0, 0.0);
        for (class, members) in step.blocks.nodes.iter().enumerate() {
            let n = step.graph.node(members[0]);
            let (ins, outs) = (step.graph.input_types(n), step.graph.output_types(n));
            let times = space.choices[class].iter().map(|c| compute(&times, &n.op, c, &ins, &outs));
            let time = times.fold(f64::INFINITY, f64::min) * members.len() as f64;
            if n.section == Section::Update { update += time } else { micro += time }
        }
        // Rounding of the ILP's costs must not put its bound below this one.
        Ok(Quick::Bound((micro * c.pace.weight(c.stages) + update / c.stages as f64) * (1.0 - 1e-6)))
    }

    /// The step graph of a candidate, or why it cannot be cut.
    fn step(&mut self, c: &Candidate) -> Result<Result<Rc<StepGraph>, String>, SearchError> {
        let batch = self.request.workload.global_batch / c.pace.micro_batches;
        if c.stages == 1 {
            self.whole(batch)?;
            return Ok(Ok(self.whole[&batch].clone()));
        }
        let key = (batch, c.stages);
        if let Some((_, step)) = self.cut.iter().find(|(k, _)| *k == key) {
            return Ok(Ok(step.clone()));
        }
        let (request, cluster) = (self.request, self.cluster);
        let graph = self.graph(batch)?;
        let fail = |e: autoshard_ir::train::TrainError| SearchError::Graph(e.to_string());
        let forward = request.workload.forward(graph).map_err(fail)?;
        let time = node_times(&forward, cluster, c);
        let stages = match cut(&forward, forward.nodes.len(), &time, c.stages) {
            Ok(stages) => stages,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let step = Rc::new(request.workload.step(graph, &stages, c.stages).map_err(fail)?);
        // Graphs of deep models are large.
        const KEPT: usize = 8;
        if self.cut.len() == KEPT {
            self.cut.remove(0);
        }
        self.cut.push((key, step.clone()));
        Ok(Ok(step))
    }

    /// Cuts, formulates, solves and simulates a candidate.
    fn candidate(&mut self, c: &Candidate, cutoff: Option<f64>) -> Result<Outcome, SearchError> {
        let step = match self.step(c)? {
            Ok(step) => step,
            Err(why) => return Ok(Outcome::Impossible(why)),
        };
        let space = match Space::new(&step, &c.mesh, &self.request.constraints) {
            Ok(space) => space,
            Err(e) => return Ok(Outcome::Impossible(e.to_string())),
        };
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace: c.pace };
        let fullest = least_rows(&view, &space, &c.mesh).into_iter().max_by_key(|m| m.total());
        if let Some(memory) = fullest.filter(|m| m.total().0 > self.limit) {
            return Ok(Outcome::Excess(Closest::new(c, &memory, self.limit), None));
        }
        let mut times = Times::new(self.cluster, &c.mesh);
        let mut limits = vec![self.limit; c.stages];
        let mut formulation = Formulation::new(&view, &space, &mut times, &limits);
        if self.request.objective == Objective::Memory {
            formulation = formulation.least_memory();
        }
        let mut options = self.options();
        options.cutoff = cutoff.map(|t| i128::from(formulation.problem.quanta(t)));
        let mut proven = None;
        const ROUNDS: usize = 5;
        for _ in 0..ROUNDS {
            let solution = match solve(&formulation.problem, &options) {
                Ok(solution) => solution,
                Err(SolveError::CutOff { bound }) => {
                    let bound = formulation.problem.value(bound);
                    return Ok(Outcome::Worse(proven.unwrap_or(bound)));
                }
                Err(SolveError::Infeasible(_)) => break,
                Err(SolveError::NoChoice { .. }) => return Ok(Outcome::Undecided),
                Err(e) => return Err(SearchError::Graph(format!("{}: {e}", c.show()))),
            };
            let value = |x| formulation.problem.value(x);
            let bound = *proven.get_or_insert(value(solution.bound));
            let assignment = formulation.assignment(&view, &space, &c.mesh, &solution.choice);
            let prediction = simulate(&step.graph, &step.blocks, &assignment, &mut times);
            let mut fits = true;
            let rows = formulation.problem.usage(&solution.choice);
            for ((limit, stage), row) in limits.iter_mut().zip(&prediction.stages).zip(rows) {
                let used = stage.memory.allocated().0;
                if used > self.limit {
                    fits = false;
                    let outside = used.saturating_sub(row.max(0) as u64);
                    *limit = limit.saturating_sub(1).min(self.limit.saturating_sub(outside));
                }
            }
            if fits {
                let ilp_objective_s = value(solution.objective);
                let solved =
                    Solved { candidate: c.clone(), assignment, prediction, ilp_objective_s, notes: space.notes, step };
                return Ok(Outcome::Solved(Box::new(solved), bound));
            }
            formulation.set_limits(&limits);
            if self.stopped() {
                return Ok(Outcome::Undecided);
            }
        }
        // What is the least it could do with?
        formulation.set_limits(&vec![UNLIMITED; c.stages]);
        let least = formulation.least_memory();
        options.cutoff = None;
        let Ok(solution) = solve(&least.problem, &options) else {
            return Ok(Outcome::Impossible("the constraints contradict each other".into()));
        };
        let assignment = least.assignment(&view, &space, &c.mesh, &solution.choice);
        let prediction = simulate(&step.graph, &step.blocks, &assignment, &mut times);
        let fullest = prediction.stages.iter().max_by_key(|s| s.memory.allocated()).map(|s| s.memory.clone());
        let memory = fullest.unwrap_or_default();
        if memory.allocated().0 <= self.limit {
            // The workspace grew when the rows shrank: the least-memory plan is the way out.
            let solved = Solved {
                candidate: c.clone(),
                ilp_objective_s: prediction.step_time_s,
                assignment,
                prediction,
                notes: space.notes,
                step,
            };
            return Ok(Outcome::Solved(Box::new(solved), proven.unwrap_or(0.0)));
        }
        Ok(Outcome::Excess(Closest::new(c, &memory, self.limit), proven))
    }

    fn options(&self) -> Options {
        // One hard candidate must not take the time of all others.
        let share = Duration::from_secs_f64((self.request.time_limit_s / 10.0).clamp(1.0, 1e5));
        Options {
            time_limit: self.deadline.saturating_duration_since(Instant::now()).min(share),
            relative_gap: self.request.gap,
            seed: self.request.seed,
            interrupt: self.interrupt.clone(),
            ..Options::default()
        }
    }

    /// Pins without which there would be a plan.
    fn relaxations(&mut self) -> Vec<String> {
        let pins = &self.request.constraints;
        let mut tries: Vec<(String, Constraints)> = Vec::new();
        let mut without = |name: String, change: &dyn Fn(&mut Constraints)| {
            let mut c = pins.clone();
            change(&mut c);
            tries.push((name, c));
        };
        if let Some(z) = pins.zero {
            without(format!("without --zero {z}"), &|c| c.zero = None);
        }
        if let Some(m) = pins.micro_batch {
            without(format!("without --micro-batch {m}"), &|c| c.micro_batch = None);
        }
        if pins.schedule == Some(Schedule::GPipe) {
            without("with --schedule 1f1b".into(), &|c| c.schedule = Some(Schedule::OneF1B));
        }
        if pins.tp.is_some() || pins.pp.is_some() || pins.dp.is_some() {
            without("without the pins of the mesh".into(), &|c| (c.tp, c.pp, c.dp) = (None, None, None));
        }
        let mut found = Vec::new();
        for (name, constraints) in tries {
            let request = PlanRequest { constraints, gap: 1.0, time_limit_s: 10.0, ..self.request.clone() };
            let mut inner = Search::new(self.source, self.cluster, &request, self.interrupt.clone());
            if let Ok(plan) = inner.run(&|_, _, _| {}) {
                found.push(format!("{name} ({})", plan.best.candidate.show()));
            }
        }
        found
    }
}

/// The time of each forward node with its backward, if all ranks of a stage shared its work evenly: for balancing stages.
fn node_times(graph: &Graph, cluster: &Cluster, c: &Candidate) -> Vec<f64> {
    let share = c.mesh.ranks() as f64;
    let free = graph.stateless();
    let time = |id: NodeId| {
        let n = graph.node(id);
        let work = n.op.work(&graph.input_types(n), &graph.output_types(n));
        let work = Work { flops: work.flops / share, bytes: work.bytes / share, gemm: None, ..work };
        let dtype = n.inputs.iter().chain(&n.outputs).map(|&v| graph.ty(v).dtype).find(|d| d.is_float());
        if free[id.index()] { 0.0 } else { cluster.op_time(&work, dtype.unwrap_or(DType::F32)).0 }
    };
    graph.node_ids().map(time).collect()
}

#[cfg(test)]
mod tests;
