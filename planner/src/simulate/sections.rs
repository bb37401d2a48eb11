//! What a stage does in each section, as streams: operators in order ([`super::lines`]), and communication with what it depends on.
//!
//! - [`Overlap::None`]: a reader waits while what it reads is resharded.
//! - Over data parallelism otherwise: parameters are gathered ahead of use; activations are moved once they are made, and their first
//!   reader waits; for gradients that are only put together for the update nobody waits, but each backward ends when its own have arrived, as FSDP's and
//!   DeepSpeed's do. What the update does over data parallelism alone runs beside its neighbours: gradients are reduced as the last
//!   backward makes them, and updated parameters are gathered beside the first forward.
//! - Over tensor parallelism: the reader waits; with [`Overlap::All`] for all but [`DECOMPOSED`] of it.
//!
//! Copies on a rank itself are waited for.

use std::collections::{BTreeMap, HashMap};

use autoshard_ir::graph::{Def, NodeId, Section, ValueId};

use super::lines::{Line, Lines, casts_state};
use super::{Made, Simulation, Spent, StagePrediction};
use crate::execution::Overlap;
use crate::spec::Spec;
use crate::streams::{self, Played, Transfer};
use crate::times::Times;

/// The part of communication over tensor parallelism that products hide which work on the parts that have arrived: the first part
/// must arrive, and small products are slower than one large one. torchtitan's asynchronous TP saves 9, 9 and 12 % of a step
/// (published measurements: titan_atp-007 to 008, 009 to 010, titan-021 to titan_atp-004) of which such communication is predicted to be 32,
/// 35 and 29 %: with what contention takes, parts of 0.32, 0.28 and 0.47.
const DECOMPOSED: f64 = 0.4;

/// Someone who needs a version of a value.
struct Want {
    spec: Spec,
    /// Its entry; none: it is enough at the end of the section.
    at: Option<usize>,
    /// Whether it waits. What only puts gradients together for the update does not.
    waits: bool,
}

/// When a value is there to be moved.
#[derive(Clone, Copy)]
enum Ready {
    /// All the time: it may be moved one unit ahead of its reader.
    Ahead,
    /// The same, once an entry has cast it.
    Cast(usize),
    /// Once an entry has made it: of its parts each may be worked on.
    Made(usize),
    /// Once all entries before are done, whoever reads it.
    From(usize),
}

impl Simulation<'_> {
    /// The times of a stage.
    pub(super) fn stage(&mut self, stage: usize, lines: &Lines, times: &Times<'_>) -> StagePrediction {
        let (graph, a, overlap) = (self.graph, self.a, times.execution().overlap);
        let mut found = StagePrediction::default();
        let mut sections = [Section::Forward, Section::Backward, Section::Update]
            .map(|s| streams::Section { compute: vec![0.0; lines.line(stage, s).nodes.len()], transfers: Vec::new() });
        let mut wanted: BTreeMap<(Section, ValueId), Vec<Want>> = BTreeMap::new();
        for &id in &lines.here[stage] {
            let n = graph.node(id);
            let runs = self.classes.pace(self.blocks.node_class[id.index()] as usize).is_some();
            let t = if runs { self.compute(id, times) } else { 0.0 };
            let (section, entry) = (lines.section[id.index()], lines.entry[id.index()]);
            found.section(section).compute_s += t;
            sections[section as usize].compute[entry] = t;
            if n.section == Section::Backward && self.is_copy(id) {
                found.recompute_s += t;
            }
            for (at, v) in n.inputs.iter().enumerate() {
                let want = Want { spec: self.operand(id, at), at: Some(entry), waits: !lines.gathers[id.index()] };
                wanted.entry((section, *v)).or_default().push(want);
            }
        }
        for o in &graph.outputs {
            if let Some(p) = graph.producer(o.value).filter(|p| a.stage[p.index()].0 as usize == stage)
                && let Some(spec) = self.produced(o.value)
            {
                let key = (graph.node(p).section, o.value);
                wanted.entry(key).or_default().push(Want { spec: spec.combined(), at: None, waits: true });
            }
        }
        let mut written = HashMap::new();
        for s in graph.state_ids().filter(|s| a.home[s.index()].0 as usize == stage) {
            if let Some(w) = graph.state(s).write {
                written.insert(w, graph.state(s).read);
                let want = Want { spec: a.storage[s.index()].clone(), at: None, waits: true };
                wanted.entry((Section::Update, w)).or_default().push(want);
            }
        }
        // Rows that went to their experts in the forward pass are kept there for the backward pass.
        for v in graph.value_ids() {
            let there: Vec<Spec> =
                wanted.get(&(Section::Forward, v)).into_iter().flatten().map(|w| w.spec.clone()).collect();
            if let Some(wants) = wanted.get_mut(&(Section::Backward, v)) {
                wants.retain(|w| w.spec.routed.is_empty() || !there.contains(&w.spec));
            }
        }
        let first = if overlap == Overlap::None { HashMap::new() } else { self.first_readers(stage, lines) };
        // What the update leaves to the last backward and to the first forward.
        let [mut late, mut early] = [Vec::new(), Vec::new()];
        for ((section, v), mut wants) in wanted {
            let Some(from) = self.produced(v) else { continue };
            let specs = wants.iter().map(|w| w.spec.clone()).collect();
            let made = self.versions(from, specs, graph.ty(v), times);
            let maker = graph.producer(v).filter(|p| a.stage[p.index()].0 as usize == stage);
            let own = maker.filter(|p| lines.section[p.index()] == section);
            let line = lines.line(stage, section);
            let movable = overlap != Overlap::None && made.iter().flat_map(|m| &m.pieces).all(|p| p.data);
            if section == Section::Update && movable {
                let of_backward = maker.filter(|p| lines.runs(a, *p, stage, Section::Backward));
                if let Some(p) = of_backward {
                    wants.iter_mut().for_each(|w| w.at = None);
                    let line = lines.line(stage, Section::Backward);
                    transfers(&mut late, &made, &wants, Ready::From(lines.entry[p.index()] + 1), line, overlap);
                    continue;
                }
                if let (Some(read), Some(_)) = (written.get(&v), own) {
                    wants.iter_mut().for_each(|w| w.at = first.get(read).copied());
                    transfers(&mut early, &made, &wants, Ready::From(0), lines.line(stage, Section::Forward), overlap);
                    continue;
                }
            }
            let ready = match own {
                None => Ready::Ahead,
                Some(p) if section != Section::Update && casts_state(graph, p) => {
                    Ready::Cast(lines.entry[p.index()] + 1)
                }
                Some(p) => Ready::Made(lines.entry[p.index()] + 1),
            };
            transfers(&mut sections[section as usize].transfers, &made, &wants, ready, line, overlap);
        }
        let [forward, backward, update] = sections;
        let cut = lines.line(stage, Section::Backward).weights;
        let passes = |backward: &streams::Section| {
            if cut >= backward.compute.len() {
                return (backward.play(), 0.0);
            }
            let (by_activations, by_weights) = backward.split(cut);
            let (a, w) = (by_activations.play(), by_weights.play());
            let own = by_weights.compute.iter().sum::<f64>() + w.waited_s + w.lost_s;
            (add(a, w), own)
        };
        let beside = |section: &streams::Section, more: Vec<Transfer>| {
            let mut section = section.clone();
            let shift = section.transfers.len();
            let shifted = more.into_iter().map(|t| Transfer { after: t.after.map(|i| i + shift), ..t });
            section.transfers.extend(shifted);
            section
        };
        let (of_forward, (of_backward, weights_s)) = (forward.play(), passes(&backward));
        found.forward.take(of_forward);
        found.backward.take(of_backward);
        found.weights_s = weights_s;
        found.update.take(update.play());
        if !late.is_empty() {
            found.update.take(more(passes(&beside(&backward, late)).0, of_backward));
        }
        if !early.is_empty() {
            found.update.take(more(beside(&forward, early).play(), of_forward));
        }
        found
    }

    /// Of the values of states, the entry of the forward line that reads them first, as cast where that is done once in a step.
    fn first_readers(&self, stage: usize, lines: &Lines) -> HashMap<ValueId, usize> {
        let graph = self.graph;
        let mut first: HashMap<ValueId, usize> = HashMap::new();
        for (at, n) in lines.line(stage, Section::Forward).nodes.iter().enumerate() {
            for v in &graph.node(*n).inputs {
                let once = |p: &NodeId| lines.section[p.index()] == Section::Update && casts_state(graph, *p);
                let state = match graph.value(*v).def {
                    Def::State(_) => Some(*v),
                    _ => graph.producer(*v).filter(once).and_then(|p| graph.node(p).inputs.first().copied()),
                };
                state.into_iter().for_each(|s| _ = first.entry(s).or_insert(at));
            }
        }
        first
    }
}

/// Adds the transfers that make the versions of one value.
fn transfers(into: &mut Vec<Transfer>, made: &[Made], wants: &[Want], ready: Ready, line: &Line, overlap: Overlap) {
    let end = line.nodes.len();
    // By version, the first entry that needs it or what is made from it, and the first that waits.
    let mut needs: Vec<(usize, Option<usize>)> = made
        .iter()
        .map(|m| {
            let readers = || wants.iter().filter(|w| w.spec == m.spec);
            let need = readers().map(|w| w.at.unwrap_or(end)).min().unwrap_or(end);
            (need, readers().filter(|w| w.waits).filter_map(|w| w.at).min())
        })
        .collect();
    for i in (0..made.len()).rev() {
        if let Some(source) = made[i].source {
            needs[source].0 = needs[source].0.min(needs[i].0);
        }
    }
    let mut last: Vec<Option<usize>> = Vec::with_capacity(made.len());
    for (m, (need, waits)) in made.iter().zip(needs) {
        let window = line.window.get(need).copied().unwrap_or(0);
        let begins = match ready {
            Ready::Ahead => window,
            Ready::Cast(at) => window.max(at),
            Ready::Made(at) | Ready::From(at) => at,
        };
        let mut after = m.source.and_then(|s| last[s]);
        for p in &m.pieces {
            let mut add = |seconds: f64, from, awaited, blocks| {
                into.push(Transfer { communicator: p.communicator, seconds, from, after, awaited, blocks });
                Some(into.len() - 1)
            };
            let beside = overlap != Overlap::None && p.data;
            let (from, awaited) = if beside { (begins, waits) } else { (need, Some(need)) };
            let parts = overlap == Overlap::All
                && p.communicator != streams::COPIES
                && (!p.data || (matches!(ready, Ready::Made(_)) && waits.is_some()));
            let hides = if parts { DECOMPOSED } else { 0.0 };
            let first = add((1.0 - hides) * p.seconds, from, awaited, !beside);
            if parts {
                add(hides * p.seconds, from, None, false);
            }
            after = first;
        }
        last.push(after);
    }
}

fn add(a: Played, b: Played) -> Played {
    Played { waited_s: a.waited_s + b.waited_s, lost_s: a.lost_s + b.lost_s, hidden_s: a.hidden_s + b.hidden_s }
}

/// What a section takes more with some communication than without; never less, but for rounding.
fn more(with: Played, without: Played) -> Played {
    let exposed = with.waited_s + with.lost_s - without.waited_s - without.lost_s;
    Played { waited_s: exposed.max(0.0), lost_s: 0.0, hidden_s: (with.hidden_s - without.hidden_s).max(0.0) }
}

impl Spent {
    /// Adds what was played, but for the operators.
    fn take(&mut self, played: Played) {
        self.communication_s += played.waited_s + played.lost_s;
        self.hidden_s += played.hidden_s;
    }
}
