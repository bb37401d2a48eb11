//! Repeated blocks: which nodes and states of a graph are the same thing again, up to weights.
//!
//! A *run* is a stretch of the forward sequence that repeats with a period: `count` blocks of `period` nodes. Candidates
//! come from the sequence of signatures (operator, attributes but for seeds, types); then every block is compared with the one before,
//! operand by operand, so that a run is an isomorphism and not a resemblance: an operand is produced at the same position of
//! the same block, or of the previous block, or is the same value for all blocks, or is a state in the same role.
//! The first block takes from outside what the others take from their predecessor.
//!
//! *Classes* partition nodes and states: forward nodes by their position in a run (others alone); `Backward` nodes by the
//! class of the forward node they serve and their rank among its derived nodes, copies of forward nodes
//! ([`crate::train::recompute`]) in the class of the original; `Update` nodes by the state or accumulated
//! gradient that they go back to; states by the classes that read them. Members of a class have equal
//! operators, but for seeds, and types. Class ids are dense and in order of their first members.

use std::collections::{BTreeMap, HashMap};

use crate::graph::{Def, Graph, NodeId, Section, StateId, ValueId};
use crate::op::Op;
use crate::tensor::Type;
use crate::train::recompute::originals;

/// A stretch of the forward sequence that repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First node.
    pub start: usize,
    /// Nodes per block.
    pub period: usize,
    /// Blocks.
    pub count: usize,
}

impl Run {
    /// The node after the last.
    pub fn end(&self) -> usize {
        self.start + self.period * self.count
    }
}

/// Runs and classes of a graph.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Runs, in order, disjoint.
    pub runs: Vec<Run>,
    /// The class of each node.
    pub node_class: Vec<u32>,
    /// Members of each node class.
    pub nodes: Vec<Vec<NodeId>>,
    /// The class of each state.
    pub state_class: Vec<u32>,
    /// Members of each state class.
    pub states: Vec<Vec<StateId>>,
}

impl Blocks {
    /// How many members of a class of nodes are copies, made in the backward pass, of the others.
    pub fn copies(&self, graph: &Graph, class: usize) -> usize {
        let members = &self.nodes[class];
        let backward = members.iter().filter(|m| graph.node(**m).section == Section::Backward).count();
        if backward < members.len() { backward } else { 0 }
    }
}

/// Finds runs and classes.
pub fn find(graph: &Graph) -> Blocks {
    classes(graph, runs(graph))
}

/// Finds classes where the runs are known: those of a graph with the same forward nodes.
pub fn classes(graph: &Graph, runs: Vec<Run>) -> Blocks {
    let mut blocks = Blocks { runs, ..Blocks::default() };
    classify(graph, forward(graph), &mut blocks);
    blocks
}

/// The number of forward nodes, which come first.
fn forward(graph: &Graph) -> usize {
    graph.nodes.iter().take_while(|n| n.section == Section::Forward).count()
}

/// Finds runs.
pub fn runs(graph: &Graph) -> Vec<Run> {
    let forward = forward(graph);
    let mut ids: HashMap<(Op, Vec<&Type>, Vec<&Type>), u32> = HashMap::new();
    let signatures: Vec<u32> = graph.nodes[..forward]
        .iter()
        .map(|n| {
            let types = |vs: &[ValueId]| vs.iter().map(|&v| graph.ty(v)).collect::<Vec<_>>();
            let next = ids.len() as u32;
            *ids.entry((n.op.seedless(), types(&n.inputs), types(&n.outputs))).or_insert(next)
        })
        .collect();
    let mut found = Vec::new();
    let mut open = vec![(0, forward)];
    while let Some((low, high)) = open.pop() {
        let Some(run) = best_run(graph, &signatures, low, high) else { continue };
        found.push(run);
        open.push((low, run.start));
        open.push((run.end(), high));
    }
    found.sort_by_key(|r| r.start);
    found
}

/// The verified run that covers most nodes; of nearly equal ones that with the shortest period.
fn best_run(graph: &Graph, signatures: &[u32], low: usize, high: usize) -> Option<Run> {
    const SHIFTS: usize = 64;
    let mut candidates: Vec<(usize, Run)> = Vec::new();
    for period in 1..=(high - low) / 2 {
        let mut at = low;
        while at + period < high {
            if signatures[at] != signatures[at + period] {
                at += 1;
                continue;
            }
            let start = at;
            while at + period < high && signatures[at] == signatures[at + period] {
                at += 1;
            }
            let length = at - start + period;
            // Runs of one node repeated are cheap to plan one by one, and hide longer periods.
            if length >= 2 * period && length >= 8 {
                candidates.push((length, Run { start, period, count: length / period }));
            }
        }
    }
    candidates.sort_by_key(|(length, r)| (std::cmp::Reverse(*length), r.period, r.start));
    let covered = |r: &Run| r.period * r.count;
    let clearly = |more: usize, than: usize| more * 9 > than * 10;
    let mut best: Option<Run> = None;
    for (length, candidate) in candidates {
        if let Some(b) = best {
            if clearly(covered(&b), length) {
                break;
            }
            if candidate.period >= b.period && !clearly(length, covered(&b)) {
                continue;
            }
        }
        // Blocks may begin anywhere in the period: where fewest values pass between them.
        for shift in 0..(length % candidate.period + 1).min(SHIFTS) {
            let Some(run) = verified(graph, Run { start: candidate.start + shift, ..candidate }) else { continue };
            let better = best.is_none_or(|b| {
                let (new, old) = (covered(&run), covered(&b));
                clearly(new, old) || (!clearly(old, new) && rank(graph, &run) < rank(graph, &b))
            });
            if better {
                best = Some(run);
            }
        }
    }
    best
}

/// Shorter periods first, then fewer values between blocks.
fn rank(graph: &Graph, run: &Run) -> (usize, usize) {
    let mut carried: Vec<ValueId> = Vec::new();
    for i in 0..run.period {
        for &v in &graph.nodes[run.start + run.period + i].inputs {
            if let Def::Node(n, _) = graph.value(v).def
                && (run.start..run.start + run.period).contains(&n.index())
                && !carried.contains(&v)
            {
                carried.push(v);
            }
        }
    }
    (run.period, carried.len())
}

/// Where an operand comes from, seen from its block.
#[derive(PartialEq, Eq)]
enum Source {
    Inside(usize, usize),
    Previous(usize, usize),
    /// A state, numbered by first use in the block.
    State(usize),
    Outside(ValueId),
}

fn sources(graph: &Graph, run: &Run, block: usize) -> Vec<Source> {
    let base = run.start + block * run.period;
    let mut states: Vec<StateId> = Vec::new();
    let mut found = Vec::new();
    for n in &graph.nodes[base..base + run.period] {
        for &v in &n.inputs {
            found.push(match graph.value(v).def {
                Def::Node(n, out) if n.index() >= base => Source::Inside(n.index() - base, out),
                Def::Node(n, out) if block > 0 && n.index() >= base - run.period => {
                    Source::Previous(n.index() + run.period - base, out)
                }
                Def::State(s) => Source::State(states.iter().position(|t| *t == s).unwrap_or_else(|| {
                    states.push(s);
                    states.len() - 1
                })),
                _ => Source::Outside(v),
            });
        }
    }
    found
}

/// The longest part of a run whose blocks are the same, if it has at least two.
fn verified(graph: &Graph, run: Run) -> Option<Run> {
    let mut best: Option<Run> = None;
    let mut first = 0;
    while first + 1 < run.count {
        let part = Run { start: run.start + first * run.period, count: run.count - first, ..run };
        let head = sources(graph, &part, 0);
        let model = sources(graph, &part, 1);
        let agrees = |a: &Source, b: &Source| a == b || matches!((a, b), (Source::Outside(_), Source::Previous(..)));
        let mut count = 1;
        if head.len() == model.len() && head.iter().zip(&model).all(|(a, b)| agrees(a, b)) {
            count = 2;
            while count < part.count && sources(graph, &part, count) == model {
                count += 1;
            }
        }
        if count > 1 && best.is_none_or(|b| b.count < count) {
            best = Some(Run { count, ..part });
        }
        first += count;
    }
    best
}

/// What a node of a class is known by.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    /// Position in a run.
    Position(usize, usize),
    /// A node alone.
    Alone(NodeId),
    /// Derived from a class of nodes or states: operator, types, and rank among the like.
    Derived(Section, Owner, &'a Op, Vec<&'a Type>, Vec<&'a Type>, usize),
}

/// What a derived node goes back to: the class of a node or of a state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Owner {
    Node(u32),
    State(u32),
}

/// The same, as one member.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Of {
    Node(NodeId),
    State(StateId),
}

fn classify(graph: &Graph, forward: usize, blocks: &mut Blocks) {
    let mut table: HashMap<Key<'_>, u32> = HashMap::new();
    let mut ranks: HashMap<(Of, Section, &Op, Vec<&Type>), usize> = HashMap::new();
    let mut owners: HashMap<NodeId, Of> = HashMap::new();
    let all = blocks.runs.clone();
    let originals = originals(graph);
    let mut runs = all.iter().enumerate().peekable();
    for id in graph.node_ids() {
        let (i, n) = (id.index(), graph.node(id));
        if i == forward {
            parameters(graph, blocks);
        }
        while runs.next_if(|(_, r)| i >= r.end()).is_some() {}
        if let Some(original) = originals[i] {
            let class = blocks.node_class[original.index()];
            blocks.nodes[class as usize].push(id);
            blocks.node_class.push(class);
            continue;
        }
        let key = if i < forward {
            match runs.peek() {
                Some((at, r)) if i >= r.start => Key::Position(*at, (i - r.start) % r.period),
                _ => Key::Alone(id),
            }
        } else {
            let owner = n.of.map(Of::Node).or_else(|| {
                n.inputs.iter().find_map(|&v| match graph.value(v).def {
                    Def::Node(p, _) => Some(owners.get(&p).copied().unwrap_or(Of::Node(p))),
                    Def::State(s) => Some(Of::State(s)),
                    _ => None,
                })
            });
            if n.section == Section::Update
                && let Some(owner) = owner
            {
                owners.insert(id, owner);
            }
            match owner {
                None => Key::Alone(id),
                Some(owner) => {
                    let types = |vs: &[ValueId]| vs.iter().map(|&v| graph.ty(v)).collect::<Vec<_>>();
                    let (ins, outs) = (types(&n.inputs), types(&n.outputs));
                    let rank = ranks.entry((owner, n.section, &n.op, ins.clone())).or_insert(0);
                    *rank += 1;
                    let class = match owner {
                        Of::Node(n) => Owner::Node(blocks.node_class[n.index()]),
                        Of::State(s) => Owner::State(blocks.state_class[s.index()]),
                    };
                    Key::Derived(n.section, class, &n.op, ins, outs, *rank)
                }
            }
        };
        let next = blocks.nodes.len() as u32;
        let class = *table.entry(key).or_insert(next);
        if class == next {
            blocks.nodes.push(Vec::new());
        }
        blocks.nodes[class as usize].push(id);
        blocks.node_class.push(class);
    }
    if graph.nodes.len() == forward {
        parameters(graph, blocks);
    }
}

/// Classes of states: parameters by their forward readers, others by the parameter they belong to.
fn parameters(graph: &Graph, blocks: &mut Blocks) {
    let mut readers: Vec<Vec<(u32, usize)>> = vec![Vec::new(); graph.states.len()];
    for (i, n) in graph.nodes.iter().enumerate().take(blocks.node_class.len()) {
        for (at, &v) in n.inputs.iter().enumerate() {
            if let Def::State(s) = graph.value(v).def {
                readers[s.index()].push((blocks.node_class[i], at));
            }
        }
    }
    let mut table: BTreeMap<(Option<u32>, Vec<(u32, usize)>, &Type, usize), u32> = BTreeMap::new();
    let mut derived: BTreeMap<(Option<StateId>, &Type), usize> = BTreeMap::new();
    for s in graph.state_ids() {
        let state = graph.state(s);
        let ty = graph.ty(state.read);
        let of = state.of.filter(|o| *o < s).map(|o| blocks.state_class[o.index()]);
        let mut by = std::mem::take(&mut readers[s.index()]);
        by.sort();
        by.dedup();
        // States that nothing tells apart are kept apart.
        let rank = if of.is_some() {
            let rank = derived.entry((state.of, ty)).or_insert(0);
            *rank += 1;
            *rank
        } else if by.is_empty() {
            usize::MAX - s.index()
        } else {
            0
        };
        let next = blocks.states.len() as u32;
        let class = *table.entry((of, by, ty, rank)).or_insert(next);
        if class == next {
            blocks.states.push(Vec::new());
        }
        blocks.states[class as usize].push(s);
        blocks.state_class.push(class);
    }
}
