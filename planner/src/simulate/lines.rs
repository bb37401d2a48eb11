//! In which order a stage runs the nodes of a section, and how far ahead parameters are gathered.
//!
//! Order is that of the graph, with two exceptions: a sum over micro-batches follows what makes its operand at once, as gradients are
//! accumulated as they arise; and a cast of a parameter runs where its gather may begin, since it is gathered as cast.
//! Where gradients by weights have passes of their own ([`crate::weights`]), they come last.
//!
//! Parameters are gathered by *unit*, one unit ahead (PyTorch's FSDP keeps at most two gathered: `limit_all_gathers`, and
//! `BackwardPrefetch.BACKWARD_PRE`). Units are repeated blocks; a stretch that does not repeat is cut where its parameters exceed what
//! DeepSpeed gathers ahead (`stage3_prefetch_bucket_size`).

use std::collections::HashMap;

use autoshard_ir::blocks::Blocks;
use autoshard_ir::graph::{Def, Graph, NodeId, Section, ValueId};

use crate::assignment::Assignment;
use crate::kernels::Classes;

/// Elements of parameters: the default of DeepSpeed's `stage3_prefetch_bucket_size`.
const AHEAD: usize = 50_000_000;

/// The nodes of a stage in a section.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    /// In order: entries of the compute stream.
    pub(super) nodes: Vec<NodeId>,
    /// By entry, where the unit before its own begins: gathers for it may begin there.
    pub(super) window: Vec<usize>,
    /// The first entry that is for gradients by weights in a pass of its own.
    pub(super) weights: usize,
}

/// Of all stages.
pub(super) struct Lines {
    /// By stage, its nodes in the order of the graph.
    pub(super) here: Vec<Vec<NodeId>>,
    /// By stage and section.
    pub(super) lines: Vec<[Line; 3]>,
    /// By node, as often as which section it runs.
    pub(super) section: Vec<Section>,
    /// By node, its entry in its line.
    pub(super) entry: Vec<usize>,
    /// By node, whether it only puts gradients together that nothing in the backward pass reads: see [`gathers`].
    pub(super) gathers: Vec<bool>,
}

/// Whether a node casts a state: in the backward pass, a copy of one that does.
pub(super) fn casts_state(graph: &Graph, n: NodeId) -> bool {
    let node = graph.node(n);
    node.op.name() == "Cast" && node.inputs.iter().all(|v| matches!(graph.value(*v).def, Def::State(_)))
}

/// Backward nodes that only cast or add gradients, or sum them over micro-batches, for the update: frameworks do that on what
/// the reduction of a bucket leaves, so that the rest of the backward pass does not wait for it.
fn gathers(graph: &Graph) -> Vec<bool> {
    let uses = graph.uses();
    let mut found = vec![false; graph.nodes.len()];
    // Readers come after what they read.
    for id in graph.node_ids().rev() {
        let n = graph.node(id);
        let is = n.is_accumulate() || matches!(n.op.name(), "Cast" | "Add");
        let late = |r: &NodeId| graph.node(*r).section == Section::Update || found[r.index()];
        let mut readers = n.outputs.iter().flat_map(|v| &uses[v.index()]);
        found[id.index()] = n.section == Section::Backward && is && readers.all(late);
    }
    found
}

impl Lines {
    /// Of an assignment. `weights`: see [`crate::weights`].
    pub(super) fn new(graph: &Graph, blocks: &Blocks, a: &Assignment, classes: &Classes, weights: &[bool]) -> Lines {
        let section: Vec<Section> = graph
            .node_ids()
            .map(|n| classes.pace(blocks.node_class[n.index()] as usize).unwrap_or(graph.node(n).section))
            .collect();
        let mut here = vec![Vec::new(); a.stages];
        graph.node_ids().for_each(|n| here[a.stage[n.index()].0 as usize].push(n));
        let units = units(graph, blocks);
        let mut entry = vec![0; graph.nodes.len()];
        let mut line = |nodes: &[NodeId], of: Section| {
            let nodes: Vec<NodeId> = nodes.iter().copied().filter(|n| section[n.index()] == of).collect();
            let line = Line::new(graph, nodes, &units, weights, of);
            line.nodes.iter().enumerate().for_each(|(at, n)| entry[n.index()] = at);
            line
        };
        let lines = here
            .iter()
            .map(|nodes| [Section::Forward, Section::Backward, Section::Update].map(|of| line(nodes, of)))
            .collect();
        Lines { here, lines, section, entry, gathers: gathers(graph) }
    }
    /// The line of a stage in a section.
    pub(super) fn line(&self, stage: usize, section: Section) -> &Line {
        &self.lines[stage][section as usize]
    }
    /// Whether a node runs in a stage as often as a section.
    pub(super) fn runs(&self, a: &Assignment, n: NodeId, stage: usize, section: Section) -> bool {
        a.stage[n.index()].0 as usize == stage && self.section[n.index()] == section
    }
}

impl Line {
    fn new(graph: &Graph, nodes: Vec<NodeId>, units: &[u32], weights: &[bool], section: Section) -> Line {
        let ahead = |n: &NodeId| section != Section::Update && casts_state(graph, *n);
        let (casts, mut rest): (Vec<NodeId>, Vec<NodeId>) = nodes.into_iter().partition(ahead);
        let slot = |n: NodeId| {
            let node = graph.node(n);
            let maker = node.inputs.first().and_then(|v| graph.producer(*v)).filter(|_| node.is_accumulate());
            maker.filter(|p| graph.node(*p).section == section).unwrap_or(n)
        };
        rest.sort_by_key(|n| (weights[n.index()], slot(*n), *n));
        // Units, numbered in the order in which the line reaches them.
        let (mut starts, mut number, mut unit) = (Vec::new(), HashMap::new(), 0);
        let of: Vec<usize> = rest
            .iter()
            .enumerate()
            .map(|(at, n)| {
                let node = graph.node(*n);
                let forward = if node.section == Section::Forward { Some(*n) } else { node.of };
                unit = forward.and_then(|f| units.get(f.index())).copied().unwrap_or(unit);
                *number.entry(unit).or_insert_with(|| {
                    starts.push(at);
                    starts.len() - 1
                })
            })
            .collect();
        let begins = |at: usize| of.get(at).map_or(0, |unit: &usize| starts[unit.saturating_sub(1)]);
        // Casts, before the entry at which the gather for their first reader may begin.
        let mut first: HashMap<ValueId, usize> = HashMap::new();
        for (at, n) in rest.iter().enumerate() {
            graph.node(*n).inputs.iter().for_each(|v| _ = first.entry(*v).or_insert(at));
        }
        let read = |n: &NodeId| graph.node(*n).outputs.iter().filter_map(|v| first.get(v)).min();
        let mut casts: Vec<(usize, NodeId)> =
            casts.into_iter().map(|n| (read(&n).map_or(0, |at| begins(*at)), n)).collect();
        casts.sort();
        let mut line = Line { weights: 0, ..Line::default() };
        let mut moved = Vec::with_capacity(rest.len());
        let mut casts = casts.into_iter().peekable();
        for (at, n) in rest.iter().enumerate() {
            while let Some((_, cast)) = casts.next_if(|(before, _)| *before <= at) {
                line.nodes.push(cast);
                line.window.push(line.nodes.len() - 1);
            }
            moved.push(line.nodes.len());
            line.nodes.push(*n);
            line.window.push(moved[begins(at)]);
            if !weights[n.index()] {
                line.weights = line.nodes.len();
            }
        }
        for (_, cast) in casts {
            line.nodes.push(cast);
            line.window.push(line.nodes.len() - 1);
        }
        if line.nodes.iter().all(|n| !weights[n.index()]) {
            line.weights = line.nodes.len();
        }
        line
    }
}

/// The unit of each forward node.
fn units(graph: &Graph, blocks: &Blocks) -> Vec<u32> {
    let forward = graph.nodes.iter().take_while(|n| n.section == Section::Forward).count();
    let mut inside = vec![false; forward];
    let mut begins = vec![false; forward + 1];
    for r in &blocks.runs {
        (0..=r.count).for_each(|block| begins[r.start + block * r.period] = true);
        inside[r.start..r.end()].iter_mut().for_each(|i| *i = true);
    }
    let mut seen = vec![false; graph.states.len()];
    let (mut unit, mut elements) = (0, 0);
    let mut found = Vec::with_capacity(forward);
    for (at, n) in graph.nodes[..forward].iter().enumerate() {
        let mut more = 0;
        for v in &n.inputs {
            if let Def::State(s) = graph.value(*v).def
                && !std::mem::replace(&mut seen[s.index()], true)
            {
                more += graph.ty(*v).numel();
            }
        }
        elements += more;
        if begins[at] || (!inside[at] && elements > AHEAD && elements > more) {
            unit += 1;
            elements = more;
        }
        found.push(unit);
    }
    found
}
