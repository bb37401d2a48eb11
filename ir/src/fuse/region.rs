//! Stretches of a graph that are rewritten one at a time, and what makes two of them the same.
//!
//! A region is a range of forward nodes: a block of a run ([`crate::blocks`]), or what lies between, cut where it is long and
//! around nodes of which more than the first result is used, and random draws, of which no two are the same. Values from outside are anonymous, so that equal blocks give
//! equal keys, except masks: what they are made of is part of the key, and rules may look into it.

use std::collections::HashMap;
use std::ops::Range;

use crate::DType;
use crate::blocks;
use crate::graph::{Def, Graph, NodeId, Section, ValueId};
use crate::op::{AttrKind, Op};
use crate::tensor::Type;

/// Longer stretches are cut.
const LONGEST: usize = 320;

/// The regions of the forward nodes, in order; `used` tells which values something reads.
pub(super) fn regions(graph: &Graph, used: impl Fn(ValueId) -> bool) -> Vec<Range<usize>> {
    let apart = |n: usize| {
        let n = &graph.nodes[n];
        n.outputs[1..].iter().any(|&v| used(v)) || n.op.def.attr_of(AttrKind::Seed).is_some()
    };
    let forward = graph.nodes.iter().take_while(|n| n.section == Section::Forward).count();
    let mut found = Vec::new();
    let mut at = 0;
    // A short graph is one region, so that no form lies across a border.
    let runs = if forward <= LONGEST { Vec::new() } else { blocks::runs(graph) };
    for run in runs {
        cut(&apart, at..run.start, &mut found);
        for block in 0..run.count {
            let start = run.start + block * run.period;
            cut(&apart, start..start + run.period, &mut found);
        }
        at = run.end();
    }
    cut(&apart, at..forward, &mut found);
    found
}

/// Cuts a range around nodes that stand apart, and where it is long.
fn cut(apart: &impl Fn(usize) -> bool, range: Range<usize>, found: &mut Vec<Range<usize>>) {
    let end = range.end;
    let mut start = range.start;
    for at in range {
        let apart = apart(at);
        if apart || at - start == LONGEST {
            found.push(start..at);
            start = at + usize::from(apart);
        }
    }
    found.push(start..end);
    found.retain(|r| !r.is_empty());
}

/// Where an operand of a region comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// The result of the region's node of that index.
    Inside(usize),
    /// The outside value of that index.
    Outside(usize),
}

/// A value from outside, as far as rules may know it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Outside {
    /// Only its type.
    Anonymous(Type),
    /// The value itself: a constant or a mask.
    Known(ValueId),
}

/// What makes regions the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Per node its operator, its operands, and whether its result is used outside.
    pub nodes: Vec<(Op, Vec<Source>, bool)>,
    /// The values from outside, in order of first use.
    pub outside: Vec<Outside>,
}

/// A region: its key, and what the values from outside are.
pub(super) struct Region {
    pub start: usize,
    pub key: Key,
    pub outside: Vec<ValueId>,
}

/// Whether rules may look into a value from outside: a mask.
pub(super) fn is_known(graph: &Graph, v: ValueId) -> bool {
    let Some(n) = graph.producer(v) else { return false };
    let ty = graph.ty(v);
    match ty.rank() {
        _ if ty.dtype == DType::Bool => true,
        // No size of its own along the heads.
        4 => ty.dims[1] == 1,
        // One for all samples, as a choice between numbers.
        2 | 3 => ty.dtype.is_float() && graph.node(n).op.name() == "Where",
        _ => false,
    }
}

impl Region {
    /// Describes a range. `escapes` tells which values are used by other nodes or outputs than those of the range.
    pub fn of(graph: &Graph, range: &Range<usize>, escapes: impl Fn(ValueId) -> bool) -> Region {
        let mut index: HashMap<ValueId, usize> = HashMap::new();
        let mut outside: Vec<ValueId> = Vec::new();
        let mut nodes = Vec::with_capacity(range.len());
        for n in &graph.nodes[range.clone()] {
            let sources = n.inputs.iter().map(|&v| match graph.value(v).def {
                Def::Node(NodeId(p), 0) if range.contains(&(p as usize)) => Source::Inside(p as usize - range.start),
                _ => Source::Outside(*index.entry(v).or_insert_with(|| {
                    outside.push(v);
                    outside.len() - 1
                })),
            });
            let sources = sources.collect();
            nodes.push((n.op.clone(), sources, escapes(n.outputs[0])));
        }
        let known = |&v: &ValueId| match graph.value(v).def {
            Def::Const(_) => Outside::Known(v),
            _ if is_known(graph, v) => Outside::Known(v),
            _ => Outside::Anonymous(graph.ty(v).clone()),
        };
        let key = Key { nodes, outside: outside.iter().map(known).collect() };
        Region { start: range.start, key, outside }
    }
}
