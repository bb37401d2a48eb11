//! Activation recomputation: backward nodes read copies of forward nodes, made in the backward pass, so that forward
//! results need not be kept from forward to backward (Chen et al. 2016; the terms *full* and *selective* are those of
//! Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
//!
//! Which nodes are copied is decided per class of [`crate::blocks`], by a rule that looks at the graph alone; see
//! [`choose`]. This module makes the copies:
//!
//! - A copy is a `Backward` node with the operator of a forward node `f`, `of = f`, and the operands of `f` or copies of
//!   them. Nothing else marks it: [`originals`] finds copies by this. It belongs to the class of `f`, so it is split as
//!   `f` is, and a step with copies has the decisions of the step without.
//! - Copies are emitted just before the first backward node that needs them. Node order is the order of execution, so a
//!   block is recomputed when the backward pass reaches it, and its copies are gone when the next one is.
//! - A node is copied for backward nodes of its own *region* and pipeline stage only. Regions are the blocks of runs,
//!   and the stretches between runs. A value that leaves its region is always kept: it is the checkpoint from which
//!   another region is recomputed. Without this rule one copy could drag in the whole forward pass.
//! - Nodes that depend on no state (masks, positions) are not copied: they run in every stage, and layers share them.
//!
//! Random numbers are a function of seed, step and element, so a copy of a `Dropout` drops what the original drops.

mod choose;
mod flow;

use std::collections::{BTreeMap, BTreeSet};

use crate::blocks::Blocks;
use crate::builder::Builder;
use crate::graph::{Def, Graph, NodeId, Section, ValueId};
use crate::op::OpError;
use crate::rewrite::{self, RewriteError};

/// What is recomputed in the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing: all that the backward pass reads is kept.
    #[default]
    None,
    /// What is cheap, where it lowers the bytes kept: operators bound by memory, and the scores of attention spelled out.
    Selective,
    /// The blocks of all runs, from what enters them: as much of them as the backward pass needs.
    Full,
    /// The same, each block as a whole: as checkpoint functions of frameworks do, which run a layer's forward again.
    Layers,
}

/// Lets the backward pass of a step read copies. `blocks` are those of the step; `stage_of` gives the pipeline stage of each forward node (empty: one
/// stage). The forward nodes keep their ids. A graph in which nothing is worth it comes back as it was.
///
/// # Errors
/// None in practice: every node is emitted on the types it had.
pub fn apply(step: &Graph, blocks: &Blocks, what: Recompute, stage_of: &[u16]) -> Result<Graph, RewriteError> {
    let regions = Regions::new(step, blocks);
    let chosen = match what {
        Recompute::None => return Ok(step.clone()),
        Recompute::Selective => choose::selective(step, blocks, &regions),
        Recompute::Full | Recompute::Layers => choose::full(step, blocks, &regions),
    };
    if !chosen.contains(&true) {
        return Ok(step.clone());
    }
    let mut copier = Copier {
        graph: step,
        regions: &regions,
        chosen: &chosen,
        whole: what == Recompute::Layers,
        stage_of,
        new_values: vec![None; step.values.len()],
        new_nodes: vec![None; step.nodes.len()],
        copies: BTreeMap::new(),
    };
    rewrite::rebuild(step, |b, n, ins| copier.node(b, n, ins), |_, _, v| Ok(v))
}

/// For each node that is a copy, the forward node that it repeats.
pub fn originals(graph: &Graph) -> Vec<Option<NodeId>> {
    let mut found = vec![None; graph.nodes.len()];
    // What a value is a copy of; itself, where it is none.
    let mut of: Vec<ValueId> = graph.value_ids().collect();
    for id in graph.node_ids() {
        let n = graph.node(id);
        let (Section::Backward, Some(f)) = (n.section, n.of) else { continue };
        let original = graph.node(f);
        let operands = n.inputs.iter().map(|v| of[v.index()]);
        if n.op == original.op && operands.eq(original.inputs.iter().copied()) {
            found[id.index()] = Some(f);
            for (copy, v) in n.outputs.iter().zip(&original.outputs) {
                of[copy.index()] = *v;
            }
        }
    }
    found
}

/// The values that are kept from forward to backward: forward results and inputs that backward nodes read. Sums over
/// micro-batches aside, which are taken as they arise.
pub fn kept(graph: &Graph) -> Vec<ValueId> {
    let mut read = vec![false; graph.values.len()];
    for n in graph.nodes.iter().filter(|n| n.section == Section::Backward && !n.is_accumulate()) {
        n.inputs.iter().for_each(|v| read[v.index()] = true);
    }
    let stays = |v: &ValueId| match graph.value(*v).def {
        Def::Input(_) => true,
        Def::Node(p, _) => graph.node(p).section == Section::Forward,
        Def::State(_) | Def::Const(_) => false,
    };
    graph.value_ids().filter(|v| read[v.index()] && stays(v)).collect()
}

/// Where forward nodes lie, and which values leave.
struct Regions {
    /// By forward node: its region, and whether that is a block of a run.
    of: Vec<(u32, bool)>,
    /// By value: made by a forward node, and read from outside its region, or by the sums over micro-batches.
    leaves: Vec<bool>,
}

impl Regions {
    fn new(graph: &Graph, blocks: &Blocks) -> Regions {
        let forward = graph.nodes.iter().take_while(|n| n.section == Section::Forward).count();
        let mut of = Vec::with_capacity(forward);
        let mut region = 0;
        for r in &blocks.runs {
            of.resize(r.start, (region, false));
            for _ in 0..r.count {
                region += 1;
                of.resize(of.len() + r.period, (region, true));
            }
            region += 1;
        }
        of.resize(forward, (region, false));
        let mut leaves = vec![false; graph.values.len()];
        for id in graph.node_ids() {
            let n = graph.node(id);
            let reader = match n.section {
                Section::Forward => Some(id),
                Section::Backward if !n.is_accumulate() => n.of,
                _ => None,
            };
            let here = reader.map(|r| of[r.index()].0);
            for v in &n.inputs {
                if let Some(p) = graph.producer(*v).filter(|p| p.index() < forward) {
                    leaves[v.index()] |= here != Some(of[p.index()].0);
                }
            }
        }
        // One member that leaves is enough for its class: all are treated alike.
        for members in &blocks.nodes {
            for out in 0..graph.node(members[0]).outputs.len() {
                let values = || members.iter().map(|m| graph.node(*m).outputs[out].index());
                if values().any(|v| leaves[v]) {
                    values().for_each(|v| leaves[v] = true);
                }
            }
        }
        Regions { of, leaves }
    }
}

/// The pass's state while the graph is rebuilt. Node and value ids are those of the old graph unless said otherwise.
struct Copier<'a> {
    graph: &'a Graph,
    regions: &'a Regions,
    chosen: &'a [bool],
    /// Whether regions are copied as a whole.
    whole: bool,
    stage_of: &'a [u16],
    /// By value: that of the new graph.
    new_values: Vec<Option<ValueId>>,
    /// By forward node: that of the new graph.
    new_nodes: Vec<Option<NodeId>>,
    /// By value: its copy in the new graph.
    copies: BTreeMap<ValueId, ValueId>,
}

impl Copier<'_> {
    fn node(&mut self, b: &mut Builder, n: &crate::graph::Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        if n.section == Section::Forward {
            let results = b.emit(n.op.clone(), operands)?;
            for (old, new) in n.inputs.iter().zip(operands).chain(n.outputs.iter().zip(&results)) {
                self.new_values[old.index()] = Some(*new);
            }
            if let Some(id) = n.outputs.first().and_then(|v| self.graph.producer(*v)) {
                self.new_nodes[id.index()] = results.first().and_then(|v| b.graph().producer(*v));
            }
            return Ok(results);
        }
        let mut operands = operands.to_vec();
        if let (Section::Backward, Some(of), true) = (n.section, n.of, !n.is_accumulate()) {
            let mut wanted: Vec<NodeId> = n.inputs.iter().filter_map(|&v| self.source(v, of)).collect();
            if self.whole && !wanted.is_empty() {
                wanted.extend(self.beside(of));
            }
            self.copy(b, wanted)?;
            for (operand, &v) in operands.iter_mut().zip(&n.inputs) {
                if self.source(v, of).is_some()
                    && let Some(copy) = self.copies.get(&v)
                {
                    *operand = *copy;
                }
            }
        }
        b.emit(n.op.clone(), &operands)
    }

    /// The node whose copy gives `v` to a node that serves, or is a copy of, `reader`; none where `v` is kept.
    fn source(&self, v: ValueId, reader: NodeId) -> Option<NodeId> {
        let p = self.graph.producer(v).filter(|p| self.chosen.get(p.index()) == Some(&true))?;
        let same_region = self.regions.of[p.index()].0 == self.regions.of[reader.index()].0;
        let near = same_region && self.stage(p) == self.stage(reader);
        (near && !self.regions.leaves[v.index()]).then_some(p)
    }

    /// All nodes that are copied in the region and stage of a node.
    fn beside(&self, of: NodeId) -> impl Iterator<Item = NodeId> + use<'_> {
        let (regions, region) = (&self.regions.of, self.regions.of[of.index()].0);
        let first = regions[..of.index()].partition_point(|(r, _)| *r < region);
        let end = regions.partition_point(|(r, _)| *r <= region);
        let ids = (first..end).filter(|i| self.chosen[*i]).map(|i| NodeId(i as u32));
        ids.filter(move |n| self.stage(*n) == self.stage(of))
    }

    fn stage(&self, n: NodeId) -> u16 {
        self.stage_of.get(n.index()).copied().unwrap_or(0)
    }

    /// Copies nodes, and what they need, in the order of the forward pass.
    fn copy(&mut self, b: &mut Builder, mut open: Vec<NodeId>) -> Result<(), OpError> {
        let graph = self.graph;
        // Ordered by id: operands first.
        let mut list: BTreeSet<NodeId> = BTreeSet::new();
        while let Some(id) = open.pop() {
            let done = graph.node(id).outputs.iter().any(|v| self.copies.contains_key(v));
            if !done && list.insert(id) {
                open.extend(graph.node(id).inputs.iter().filter_map(|&v| self.source(v, id)));
            }
        }
        let before = (b.of, std::mem::take(&mut b.name), std::mem::take(&mut b.scope));
        for id in list {
            let n = graph.node(id);
            let value = |v: &ValueId| {
                let copy = self.source(*v, id).and_then(|_| self.copies.get(v));
                copy.or(self.new_values[v.index()].as_ref()).copied()
            };
            let operands: Option<Vec<ValueId>> = n.inputs.iter().map(value).collect();
            let operands = operands.ok_or_else(|| OpError("it is recomputed before its operands are there".into()))?;
            b.of = self.new_nodes[id.index()];
            b.name.clone_from(&n.name);
            b.scope.clone_from(&n.scope);
            // Apart: a gradient may apply the same operator to the same operands, and stays a node of its own class.
            let results = b.emit_apart(n.op.clone(), &operands)?;
            self.copies.extend(n.outputs.iter().copied().zip(results));
        }
        (b.of, b.name, b.scope) = before;
        Ok(())
    }
}
