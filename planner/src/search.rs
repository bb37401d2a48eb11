//! The outer search: over pipeline stages, meshes, micro-batches, schedules and recomputation, with the ILP inside.
//!
//! **The space.** With `N` ranks: every `pp * dp * tp = N`, `tp` within one node and innermost (unless pinned), every
//! number of micro-batches of [`micro_batches`], one cut into stages per (pp, micro-batch) by [`crate::pipeline`], one schedule
//! (1F1B unless pinned; GPipe keeps more activations and is never faster here), in training every way of recomputation
//! ([`RecomputeChoice`]), and everything that [`crate::space`] allows. A model that couples the samples of a batch is not cut
//! into micro-batches ([`cuts`]). Repeated blocks are planned alike, and so are a node and
//! its copy in the backward pass.
//!
//! **The order.** Each candidate first gets a bound from the least time of every operator alone, and from the least that ranks do for
//! their samples ([`spread`]); candidates are solved from the least bound on, until no bound is below the best plan found.
//! (Without any plan after half of the time, those come first that take the least memory: then the order depends on the clock.)
//! A solved candidate is simulated: the simulation judges, the
//! ILP's proven bound enters the certificate.
//!
//! **Memory.** The ILP's rows hold what is surely allocated. If the simulated peak exceeds the limit, what lives only
//! inside a section, and memory that could have been shared by views but is not, is taken off the limit and the candidate is
//! solved again; its bound stays that of the first solve.
//!
//! **Recomputation.** Since a copy is split as its original is, a decision for a step with copies is one for the step
//! without, which then does less of the same work. So the optimum without copies and without regard to memory is a lower
//! bound for all ways of recomputation, and it comes first: if it fits, no copy can gain anything, and the candidate's
//! variants are done with, unbuilt. If it does not, they wait in the queue with that bound. Candidates whose states alone
//! do not fit have no variants: copies save activations only.
//!
//! Read next: [`candidates`], [`crate::formulate`], [`crate::simulate`].

pub mod candidates;
mod cuts;
mod next_best;
mod outcome;
mod queue;
mod spread;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use autoshard_cost_models::compute::Kernel;
use autoshard_cost_models::{Bytes, Category, Cluster};
use autoshard_ir::graph::{Graph, Section, ValueId};
use autoshard_ir::op::Work;
use autoshard_ir::train::TrainError;
use autoshard_ir::{DType, NodeId};

use crate::assignment::Schedule;
use crate::constraints::{Constraints, Objective};
use crate::formulate::{Formulation, LeastBytes, Pace, Step, UNLIMITED, compute, least_rows};
use crate::kernels::Classes;
use crate::mesh::{Mesh, divisors};
use crate::pipeline::cut;
use crate::request::{PlanRequest, RecomputeChoice, StepGraph};
use crate::simulate::simulate;
use crate::solver::{Options, SolveError, solve};
use crate::space::Space;
use crate::strategies::Choice;
use crate::times::Times;
use candidates::{may_recompute, variants};
use cuts::{Cuts, few};
use queue::{Queue, Waiting};
use spread::Spread;

pub use candidates::{Candidate, candidates, micro_batches};
pub use next_best::{NextBest, NextBests};
pub use outcome::{Alternative, Certificate, Chosen, Closest, Found, SearchError, Solved};

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

/// Told after every candidate: solved so far, of how many, and the best time yet.
pub type Progress<'a> = dyn Fn(usize, usize, Option<f64>) + 'a;

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
    whole: BTreeMap<(usize, RecomputeChoice), Rc<StepGraph>>,
    /// Some steps cut into stages, by batch and stages, in order of making.
    cut: Vec<((usize, usize, RecomputeChoice), Rc<StepGraph>)>,
    /// What classes take at least by batch and mesh, or which has no choice.
    least: BTreeMap<(usize, Mesh), Rc<Result<Least, String>>>,
    /// What groups of ranks do for their samples, by samples, and ranks along `cp` and `tp`.
    spreads: BTreeMap<(usize, usize, usize), Option<Rc<Spread>>>,
    /// What micro-batches do to the step, once it is known.
    cuts: Option<Rc<Cuts>>,
    /// Whether a search without any plan may take longer.
    extends: bool,
}

/// What the search knows so far.
struct Tally {
    best: Option<Box<Solved>>,
    /// No candidate that is done with gives less.
    bound: f64,
    alternatives: BTreeMap<(usize, Mesh), Alternative>,
    closest: Option<Closest>,
    impossible: Vec<String>,
    solved: usize,
    cut_short: bool,
}

impl Tally {
    fn excess(&mut self, e: Closest) {
        if self.closest.as_ref().is_none_or(|c| e.excess < c.excess) {
            self.closest = Some(e);
        }
    }
}

/// The least that each class of a one-stage step takes on a mesh: the same for all ways of recomputation.
struct Least {
    /// Seconds of one member.
    seconds: Vec<f64>,
    /// As often as which section it runs, see [`Classes::pace`].
    paces: Vec<Option<Section>>,
    bytes: LeastBytes,
}

/// What is known of a candidate without solving it.
enum Quick {
    /// What it takes at least: seconds, for least memory bytes; and bytes in any case.
    Bound(f64, u64),
    /// What is surely allocated does not fit; if that is for its activations, what other ways of recomputation take at
    /// least.
    Excess(Closest, Option<f64>),
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

impl Outcome {
    fn name(&self) -> &'static str {
        match self {
            Outcome::Solved(..) => "solved",
            Outcome::Worse(_) => "worse",
            Outcome::Excess(..) => "excess",
            Outcome::Impossible(_) => "impossible",
            Outcome::Undecided => "undecided",
        }
    }
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
            least: BTreeMap::new(),
            spreads: BTreeMap::new(),
            cuts: None,
            extends: true,
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

    fn memory(&self) -> bool {
        self.request.objective == Objective::Memory
    }

    fn run(&mut self, progress: &Progress<'_>) -> Result<Found, SearchError> {
        let all = candidates(self.cluster, self.request)?;
        let total = all.len() * if may_recompute(self.request) { 1 + RecomputeChoice::OTHERS } else { 1 };
        let mut queue = Queue::default();
        let mut t = Tally {
            best: None,
            bound: f64::INFINITY,
            alternatives: BTreeMap::new(),
            closest: None,
            impossible: Vec::new(),
            solved: 0,
            cut_short: false,
        };
        let configurations = all.len();
        for c in all {
            // With something to solve, time that is up ends the measuring; nothing is known of the rest.
            if self.interrupted() || (self.stopped() && queue.len() > 0) {
                t.cut_short = true;
                t.bound = 0.0;
                break;
            }
            self.measure(c, 0.0, &mut queue, &mut t)?;
        }
        let memory = self.memory();
        let value = |s: &Solved| if memory { s.prediction.peak() as f64 } else { s.prediction.step_time_s };
        let (mut extended, mut done) = (false, 0);
        // Without any plan after half the time, what most likely fits comes first.
        let half = Instant::now() + self.deadline.saturating_duration_since(Instant::now()) / 2;
        loop {
            let late = t.best.is_none() && Instant::now() >= half;
            let next = if late { queue.take_smallest() } else { queue.take() };
            let Some(Waiting { bound, candidate: c, measured, memory: least_memory, .. }) = next else { break };
            let least = t.best.as_ref().map(|b| value(b));
            if t.best.is_none() && !extended && self.extends && !self.interrupted() && self.stopped() {
                extended = true;
                self.extend();
            }
            if self.stopped() || (extended && t.best.is_some()) {
                t.cut_short = true;
                t.bound = t.bound.min(bound).min(queue.least());
                break;
            }
            if least.is_some_and(|l| bound >= l * (1.0 - self.request.gap)) {
                t.bound = t.bound.min(bound);
                break;
            }
            if !measured {
                self.measure(c, bound, &mut queue, &mut t)?;
                continue;
            }
            let (outcome, others) = self.candidate(&c, bound, if memory { None } else { least })?;
            for v in others.iter().flat_map(|_| variants(&c)) {
                queue.push(others.unwrap_or(bound), v, false, least_memory / 2);
            }
            tracing::debug!(candidate = c.show(), bound, others, outcome = outcome.name(), "candidate");
            self.count(&c, bound, outcome, &mut t);
            done += 1;
            progress(done, done + queue.len(), t.best.as_ref().map(|b| b.prediction.step_time_s));
        }
        let Some(mut best) = t.best else {
            return Err(match t.closest {
                _ if t.cut_short => SearchError::Stopped,
                Some(closest) => {
                    let more = format!("{} more memory per GPU", Bytes(closest.excess));
                    SearchError::Memory { limit: self.limit, closest, relaxations: vec![more] }
                }
                None => match self.refused.pop_first() {
                    Some((_, why)) if t.impossible.len() == configurations => SearchError::Graph(why),
                    _ => SearchError::Pins(few(&t.impossible)),
                },
            });
        };
        if let Some(why) = self.cuts.as_ref().and_then(|c| c.coupled.as_ref()) {
            best.notes.push(format!("the batch is not cut into micro-batches: {why}"));
        }
        let objective = value(&best);
        let mut alternatives: Vec<Alternative> = t
            .alternatives
            .into_values()
            .filter(|a| (a.candidate.stages, &a.candidate.mesh) != (best.candidate.stages, &best.candidate.mesh))
            .collect();
        alternatives.sort_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
        let certificate = Certificate {
            objective,
            bound: t.bound.min(objective),
            candidates: total,
            solved: t.solved,
            cut_short: t.cut_short,
        };
        let next_bests = self.next_bests(&best);
        Ok(Found { best: *best, certificate, alternatives, next_bests, memory_limit: self.limit })
    }

    /// Puts a candidate into the queue with its own bound, which is at least `floor`; or its variants, if it cannot fit.
    fn measure(&mut self, c: Candidate, floor: f64, queue: &mut Queue, t: &mut Tally) -> Result<(), SearchError> {
        match self.quick(&c)? {
            Quick::Bound(bound, memory) => queue.push(bound.max(floor), c, true, memory),
            Quick::Excess(e, others) => {
                let memory = self.limit + e.excess;
                t.excess(e);
                if let Some(bound) = others.filter(|_| self.has_variants(&c)) {
                    variants(&c).into_iter().for_each(|v| queue.push(bound, v, false, memory / 2));
                }
            }
            Quick::Impossible(why) => t.impossible.push(format!("{}: {why}", c.show())),
        }
        Ok(())
    }

    fn has_variants(&self, c: &Candidate) -> bool {
        may_recompute(self.request) && c.recompute == RecomputeChoice::None
    }

    /// Takes down what came of a candidate, of which no plan takes less than `quick`.
    fn count(&self, c: &Candidate, quick: f64, outcome: Outcome, t: &mut Tally) {
        let memory = self.memory();
        // Least memory: all stages together hold at least what is proven, so the fullest its share.
        let least = |proven: f64| if memory { proven / c.stages as f64 } else { proven };
        match outcome {
            Outcome::Solved(plan, proven) => {
                t.solved += 1;
                t.bound = t.bound.min(least(proven).max(quick));
                let (time, peak) = (plan.prediction.step_time_s, plan.prediction.peak());
                let entry = Alternative { candidate: c.clone(), step_time_s: time, peak_bytes: peak };
                let slot = t.alternatives.entry((c.stages, c.mesh.clone())).or_insert_with(|| entry.clone());
                if time < slot.step_time_s {
                    *slot = entry;
                }
                let better = t
                    .best
                    .as_ref()
                    .is_none_or(|b| if memory { peak < b.prediction.peak() } else { time < b.prediction.step_time_s });
                if better {
                    t.best = Some(plan);
                }
            }
            Outcome::Worse(proven) => {
                t.solved += 1;
                t.bound = t.bound.min(proven);
            }
            Outcome::Excess(e, proven) => {
                t.solved += usize::from(proven.is_some());
                t.bound = t.bound.min(proven.map_or(f64::INFINITY, least));
                t.excess(e);
            }
            Outcome::Impossible(why) => t.impossible.push(format!("{}: {why}", c.show())),
            Outcome::Undecided => {
                t.cut_short = true;
                t.bound = t.bound.min(quick);
            }
        }
    }

    fn graph(&mut self, batch: usize) -> Result<&Graph, SearchError> {
        if !self.graphs.contains_key(&batch) {
            let graph = self.source.graph(batch).map_err(SearchError::Graph)?;
            self.graphs.insert(batch, graph);
        }
        Ok(&self.graphs[&batch])
    }

    fn whole(&mut self, batch: usize, recompute: RecomputeChoice) -> Result<Rc<StepGraph>, SearchError> {
        if let Some(step) = self.whole.get(&(batch, recompute)) {
            return Ok(step.clone());
        }
        let fail = |e: TrainError| SearchError::Graph(e.to_string());
        let step = Rc::new(match recompute {
            RecomputeChoice::None => {
                let workload = &self.request.workload;
                workload.step(self.graph(batch)?, &[], 1, recompute).map_err(fail)?
            }
            some => self.whole(batch, RecomputeChoice::None)?.recompute(some).map_err(fail)?,
        });
        self.whole.insert((batch, recompute), step.clone());
        Ok(step)
    }

    /// A bound from the least time of every operator alone; or, from the least memory of every state alone, that the
    /// candidate cannot fit.
    fn quick(&mut self, c: &Candidate) -> Result<Quick, SearchError> {
        let batch = self.request.workload.global_batch / c.pace.micro_batches;
        if let Some(why) = self.refused.get(&batch) {
            return Ok(Quick::Impossible(why.clone()));
        }
        let step = match self.whole(batch, c.recompute) {
            // Values may become too large for a graph at one batch and not at another.
            Err(SearchError::Graph(why)) => {
                self.refused.insert(batch, why.clone());
                return Ok(Quick::Impossible(why));
            }
            other => other?,
        };
        if c.pace.micro_batches > 1 {
            let cuts = self.cuts()?;
            if let Some(why) = &cuts.coupled {
                return Ok(Quick::Impossible(format!("the batch cannot be cut into micro-batches: {why}")));
            }
            if cuts.normalization != step.normalization {
                let why = format!("micro-batches of {batch} do not show over what the loss is a mean");
                return Ok(Quick::Impossible(why));
            }
        }
        if c.recompute != RecomputeChoice::None && step.copies == 0 {
            let what = match c.recompute {
                RecomputeChoice::Full | RecomputeChoice::Layers => "the model has no repeated blocks",
                _ => "that would keep no fewer bytes",
            };
            return Ok(Quick::Impossible(format!("nothing is worth recomputing: {what}")));
        }
        let key = (batch, c.mesh.clone());
        if !self.least.contains_key(&key) {
            let least = self.least(&step, &c.mesh, &c.pace);
            self.least.insert(key.clone(), Rc::new(least));
        }
        let least = self.least[&key].clone();
        let least = match &*least {
            Ok(least) => least,
            Err(why) => return Ok(Quick::Impossible(why.clone())),
        };
        // In one stage with one micro-batch in flight; the fullest of several stages holds at least its share.
        let pace = Pace { micro_batches: 1, ..c.pace };
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace };
        let mut memory = least_rows(&view, &least.bytes).swap_remove(0);
        memory.0.values_mut().for_each(|b| b.0 /= c.stages as u64);
        let (mut micro, mut update) = (0.0, 0.0);
        let apart = if c.stages > 1 { sums_of_states(&step.graph) } else { Vec::new() };
        for ((members, seconds), pace) in step.blocks.nodes.iter().zip(&least.seconds).zip(&least.paces) {
            let members = members.iter().filter(|m| apart.get(m.index()) != Some(&true));
            let time = seconds * members.count() as f64;
            match pace {
                Some(Section::Update) => update += time,
                Some(_) => micro += time,
                None => {}
            }
        }
        if memory.total().0 <= self.limit && !self.memory() {
            let samples = batch / c.mesh.data_parallel();
            if let Some(spread) = self.spread(samples, &c.mesh)?.filter(|s| s.fits(&step)) {
                let others = step.blocks.nodes.iter().zip(&least.seconds).zip(spread.counts.iter().zip(&least.paces));
                let others = others
                    .filter(|(_, (counts, pace))| !**counts && pace.is_some_and(|section| section != Section::Update));
                let others: f64 = others.map(|((members, seconds), _)| seconds * members.len() as f64).sum();
                micro = micro.max(spread.seconds + others);
            }
        }
        // Rounding of the ILP's costs must not put its bound below this one.
        let seconds = (micro * c.pace.weight(c.stages) + update / c.stages as f64) * (1.0 - 1e-6);
        let activations = memory.get(Category::Activations).0;
        let states = memory.total().0 - activations;
        if memory.total().0 > self.limit {
            let others = if self.memory() { states as f64 } else { seconds };
            return Ok(Quick::Excess(Closest::new(c, &memory, self.limit), (states <= self.limit).then_some(others)));
        }
        let total = memory.total().0;
        Ok(Quick::Bound(if self.memory() { total as f64 } else { seconds }, total))
    }

    fn least(&self, step: &StepGraph, mesh: &Mesh, pace: &Pace) -> Result<Least, String> {
        let space = Space::new(step, mesh, &self.request.constraints).map_err(|e| e.to_string())?;
        let times = self.times(mesh);
        let classes = Classes::new(&step.graph, &step.blocks, times.execution().kernels, pace.micro_batches);
        let seconds = |(class, (members, choices)): (usize, (&Vec<NodeId>, &Vec<Choice>))| {
            let n = step.graph.node(members[0]);
            let (ins, outs) = (step.graph.input_types(n), step.graph.output_types(n));
            let fused = classes.fused(class);
            choices.iter().map(|c| compute(&times, &n.op, c, &ins, &outs, fused)).fold(f64::INFINITY, f64::min)
        };
        Ok(Least {
            seconds: step.blocks.nodes.iter().zip(&space.choices).enumerate().map(seconds).collect(),
            paces: (0..step.blocks.nodes.len()).map(|class| classes.pace(class)).collect(),
            bytes: LeastBytes::new(&step.graph, &step.blocks, &space, mesh),
        })
    }

    /// The step graph of a candidate, or why it cannot be cut.
    fn step(&mut self, c: &Candidate) -> Result<Result<Rc<StepGraph>, String>, SearchError> {
        let batch = self.request.workload.global_batch / c.pace.micro_batches;
        if c.stages == 1 {
            return Ok(Ok(self.whole(batch, c.recompute)?));
        }
        let key = (batch, c.stages, c.recompute);
        if let Some((_, step)) = self.cut.iter().find(|(k, _)| *k == key) {
            return Ok(Ok(step.clone()));
        }
        let fail = |e: TrainError| SearchError::Graph(e.to_string());
        if c.recompute != RecomputeChoice::None {
            let plain = match self.step(&Candidate { recompute: RecomputeChoice::None, ..c.clone() })? {
                Ok(plain) => plain,
                Err(why) => return Ok(Err(why)),
            };
            let step = Rc::new(plain.recompute(c.recompute).map_err(fail)?);
            self.keep(key, &step);
            return Ok(Ok(step));
        }
        let (request, cluster) = (self.request, self.cluster);
        let graph = self.graph(batch)?;
        let forward = request.workload.forward(graph).map_err(fail)?;
        let time = node_times(&forward, cluster, c);
        let stages = match cut(&forward, forward.nodes.len(), &time, c.stages) {
            Ok(stages) => stages,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let step = Rc::new(request.workload.step(graph, &stages, c.stages, c.recompute).map_err(fail)?);
        self.keep(key, &step);
        Ok(Ok(step))
    }

    fn times<'m>(&self, mesh: &'m Mesh) -> Times<'m>
    where
        'a: 'm,
    {
        Times::new(self.cluster, mesh).executing(self.request.constraints.execution)
    }

    fn keep(&mut self, key: (usize, usize, RecomputeChoice), step: &Rc<StepGraph>) {
        // Graphs of deep models are large.
        const KEPT: usize = 8;
        if self.cut.len() == KEPT {
            self.cut.remove(0);
        }
        self.cut.push((key, step.clone()));
    }

    /// Cuts, formulates, solves and simulates a candidate, of which no plan takes less than `quick`. Also, if other ways of
    /// recomputation may help it, what those take at least.
    fn candidate(
        &mut self,
        c: &Candidate,
        quick: f64,
        cutoff: Option<f64>,
    ) -> Result<(Outcome, Option<f64>), SearchError> {
        let step = match self.step(c)? {
            Ok(step) => step,
            Err(why) => return Ok((Outcome::Impossible(why), None)),
        };
        let space = match Space::new(&step, &c.mesh, &self.request.constraints) {
            Ok(space) => space,
            Err(e) => return Ok((Outcome::Impossible(e.to_string()), None)),
        };
        let varies = self.has_variants(c);
        let memory = self.memory();
        // For least memory, what is proven of one way says nothing of another.
        let mut others = varies.then_some(if memory { 0.0 } else { quick });
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace: c.pace };
        let fullest = least_rows(&view, &LeastBytes::new(&step.graph, &step.blocks, &space, &c.mesh))
            .into_iter()
            .max_by_key(|m| m.total());
        if let Some(memory) = fullest.filter(|m| m.total().0 > self.limit) {
            let fits = memory.total().0 - memory.get(Category::Activations).0 <= self.limit;
            return Ok((Outcome::Excess(Closest::new(c, &memory, self.limit), None), others.filter(|_| fits)));
        }
        let mut times = self.times(&c.mesh);
        let mut limits = vec![self.limit; c.stages];
        let mut formulation = Formulation::new(&view, &space, &mut times, &limits);
        let until = self.share();
        let cutoff = cutoff.map(|t| i128::from(formulation.problem.quanta(t)));
        let mut proven = None;
        // First without regard to memory, if that can spare the variants.
        let mut unlimited = varies && !memory;
        if memory {
            // Proven is what is held; what passes only tells choices apart.
            let rows = formulation.least_rows().problem;
            proven = Some(solve(&rows, &self.options(until)).map_or(0.0, |s| rows.value(s.bound)));
            formulation = formulation.least_memory();
        } else if unlimited {
            formulation.set_limits(&vec![UNLIMITED; c.stages]);
        }
        const ROUNDS: usize = 5;
        for _ in 0..ROUNDS + usize::from(unlimited) {
            let options = Options { cutoff, ..self.options(until) };
            let solution = match solve(&formulation.problem, &options) {
                Ok(solution) => solution,
                Err(SolveError::CutOff { bound }) => {
                    let bound = formulation.problem.value(bound);
                    let worse = Outcome::Worse(proven.unwrap_or(bound));
                    return Ok((worse, others.filter(|_| !unlimited)));
                }
                Err(SolveError::Infeasible(_)) => break,
                Err(SolveError::NoChoice { .. }) => return Ok((Outcome::Undecided, others)),
                Err(e) => return Err(SearchError::Graph(format!("{}: {e}", c.show()))),
            };
            let value = |x| formulation.problem.value(x);
            let bound = if unlimited { value(solution.bound) } else { *proven.get_or_insert(value(solution.bound)) };
            let assignment = formulation.assignment(&view, &space, &c.mesh, &solution.choice);
            let prediction = simulate(&step.graph, &step.blocks, &assignment, &mut times);
            let mut fits = true;
            let rows = formulation.problem.usage(&solution.choice);
            for ((limit, stage), row) in limits.iter_mut().zip(&prediction.stages).zip(rows) {
                let used = stage.memory.allocated().0;
                if used > self.limit {
                    fits = false;
                    if !unlimited {
                        let outside = used.saturating_sub(row.max(0) as u64);
                        *limit = limit.saturating_sub(1).min(self.limit.saturating_sub(outside));
                    }
                }
            }
            if fits {
                let ilp_objective_s = value(solution.objective);
                let solution = (!memory).then_some(Chosen { limits, choice: solution.choice });
                let candidate = c.clone();
                let solved =
                    Solved { candidate, assignment, prediction, ilp_objective_s, solution, notes: space.notes, step };
                return Ok((Outcome::Solved(Box::new(solved), bound), others.filter(|_| !unlimited)));
            }
            if unlimited {
                others = Some(bound.max(quick));
                unlimited = false;
            }
            formulation.set_limits(&limits);
            if self.stopped() {
                return Ok((Outcome::Undecided, others));
            }
        }
        // What is the least it could do with?
        formulation.set_limits(&vec![UNLIMITED; c.stages]);
        let least = formulation.least_memory();
        let Ok(solution) = solve(&least.problem, &self.options(until)) else {
            return Ok((Outcome::Impossible("the constraints contradict each other".into()), None));
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
                solution: None,
                notes: space.notes,
                step,
            };
            return Ok((Outcome::Solved(Box::new(solved), proven.unwrap_or(0.0)), others));
        }
        Ok((Outcome::Excess(Closest::new(c, &memory, self.limit), proven), others))
    }

    /// Until when a candidate may be solved: a hard one must not take the time of all others.
    fn share(&self) -> Instant {
        let share = Duration::from_secs_f64((self.request.time_limit_s / 5.0).clamp(1.0, 1e5));
        self.deadline.min(Instant::now() + share)
    }

    fn options(&self, until: Instant) -> Options {
        Options {
            time_limit: until.saturating_duration_since(Instant::now()),
            relative_gap: self.request.gap,
            seed: self.request.seed,
            interrupt: self.interrupt.clone(),
            explain: false,
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
        if let Some(r) = pins.recompute {
            without(format!("without --recompute {}", r.name()), &|c| c.recompute = None);
        }
        if matches!(pins.schedule, Some(Schedule::GPipe | Schedule::ZeroBubble)) {
            without("with --schedule 1f1b".into(), &|c| c.schedule = Some(Schedule::OneF1B));
        }
        if pins.tp.is_some() || pins.pp.is_some() || pins.dp.is_some() || pins.cp.is_some() {
            without("without the pins of the mesh".into(), &|c| (c.tp, c.pp, c.dp, c.cp) = (None, None, None, None));
        }
        // The search itself splits sequences only where samples cannot be split.
        let cp = divisors(self.cluster.gpus()).into_iter().rfind(|d| *d <= self.cluster.devices_per_node);
        if let Some(cp) = cp.filter(|cp| *cp > 1 && pins.cp.is_none()) {
            without(format!("with --cp {cp}"), &|c| c.cp = Some(cp));
        }
        let mut found = Vec::new();
        // All together no longer than the search itself.
        let time_limit_s = (self.request.time_limit_s / tries.len().max(1) as f64).min(10.0);
        for (name, constraints) in tries {
            let request = PlanRequest { constraints, gap: 1.0, time_limit_s, ..self.request.clone() };
            let mut inner = Search::new(self.source, self.cluster, &request, self.interrupt.clone());
            inner.extends = false;
            if let Ok(plan) = inner.run(&|_, _, _| {}) {
                found.push(format!("{name} ({})", plan.best.candidate.show()));
            }
        }
        found
    }
}

/// Sums of what several uses of a state contribute to its gradient. With several stages such a sum may be one of the
/// update, once per step.
fn sums_of_states(graph: &Graph) -> Vec<bool> {
    let uses = graph.uses();
    let accumulated = |v: &ValueId| {
        let readers = &uses[v.index()];
        !readers.is_empty() && readers.iter().all(|n| graph.node(*n).is_accumulate())
    };
    // Sums of more than two are chains.
    let mut found = vec![false; graph.nodes.len()];
    for id in graph.node_ids().rev() {
        let n = graph.node(id);
        let inner = |v: &ValueId| {
            let readers = &uses[v.index()];
            !readers.is_empty() && readers.iter().all(|n| found[n.index()])
        };
        let is = n.section == Section::Backward && n.op.name() == "Add";
        found[id.index()] = is && n.outputs.iter().all(|v| accumulated(v) || inner(v));
    }
    found
}

/// The time of each forward node with its backward, if all ranks of a stage shared its work evenly: for balancing stages.
fn node_times(graph: &Graph, cluster: &Cluster, c: &Candidate) -> Vec<f64> {
    let share = c.mesh.ranks() as f64;
    let free = graph.stateless();
    let time = |id: NodeId| {
        let n = graph.node(id);
        let work = n.op.work(&graph.input_types(n), &graph.output_types(n));
        let part = |whole: f64| whole / share;
        let (flops, bytes, scores) = (part(work.flops), part(work.bytes), part(work.scores));
        let work = Work { flops, bytes, scores, gemm: None, ..work };
        let dtype = n.inputs.iter().chain(&n.outputs).map(|&v| graph.ty(v).dtype).find(|d| d.is_float());
        if free[id.index()] {
            0.0
        } else {
            cluster.kernel_time(&work, dtype.unwrap_or(DType::F32), Kernel::of(n.op.name())).0
        }
    };
    graph.node_ids().map(time).collect()
}

#[cfg(test)]
mod tests;
