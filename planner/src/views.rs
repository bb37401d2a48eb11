//! Which values share memory: the result of an operator that only renames bytes ([`autoshard_ir::Op::is_view`]) lies where
//! its operand does, so it is not counted a second time. Codegen does the same with buffers.
//!
//! - [`Views`] is of an assignment, hence exact: for the simulation.
//! - [`choices`] and [`repeated`] are of a space: what is counted already whatever is chosen, for rows that must not hold more
//!   than any plan needs.

use std::collections::{BTreeSet, HashMap};

use autoshard_ir::blocks::Blocks;
use autoshard_ir::graph::{Def, Graph, NodeId, ValueId};
use autoshard_ir::{Op, Type};

use crate::assignment::{Assignment, StageId};
use crate::mesh::Mesh;
use crate::space::Space;
use crate::spec::Spec;
use crate::stages::Stages;
use crate::strategies::Choice;

/// What a node's result is a view of.
#[derive(Debug, Clone)]
struct View {
    /// The operand's spec.
    wanted: Spec,
    /// The result's spec.
    made: Spec,
}

/// The views of an assignment whose classes each have one strategy.
pub struct Views<'a> {
    graph: &'a Graph,
    a: &'a Assignment,
    /// By class of nodes.
    of: HashMap<u32, Option<View>>,
    blocks: &'a Blocks,
}

impl<'a> Views<'a> {
    /// Of an assignment.
    pub fn new(graph: &'a Graph, blocks: &'a Blocks, a: &'a Assignment) -> Views<'a> {
        Views { graph, a, of: HashMap::new(), blocks }
    }

    /// The value and spec in whose memory `v` lies in a stage, when it lies as `spec`.
    pub fn storage(&mut self, stage: StageId, v: ValueId, spec: &Spec) -> (ValueId, Spec) {
        let (mut v, mut spec) = (v, spec.clone());
        while let Def::Node(n, _) = self.graph.value(v).def
            && (self.a.stage[n.index()] == stage || self.a.everywhere[n.index()])
            && let Some(view) = self.view(n)
            && view.made == spec
        {
            spec = view.wanted.clone();
            v = self.graph.node(n).inputs[0];
        }
        (v, spec)
    }

    fn view(&mut self, n: NodeId) -> Option<&View> {
        let (graph, a) = (self.graph, self.a);
        self.of
            .entry(self.blocks.node_class[n.index()])
            .or_insert_with(|| {
                let node = graph.node(n);
                let ([_], [_]) = (&node.inputs[..], &node.outputs[..]) else { return None };
                let (ins, outs) = (graph.input_types(node), graph.output_types(node));
                let (rule, strategy) = (node.op.factors(&ins, &outs), &a.strategy[n.index()]);
                let (wanted, made) = (strategy.input_spec(&rule, 0), strategy.output_spec(&rule, 0));
                is_view(&node.op, (&wanted, &ins), (&made, &outs), &a.mesh).then_some(View { wanted, made })
            })
            .as_ref()
    }
}

fn is_view(op: &Op, from: (&Spec, &[Type]), to: (&Spec, &[Type]), mesh: &Mesh) -> bool {
    let local = |(spec, types): (&Spec, &[Type])| spec.local(types.first()?, mesh);
    match (local(from), local(to)) {
        (Some(from), Some(to)) => op.is_view(&[from], &[to]),
        _ => false,
    }
}

/// Per class of nodes and choice, whether the result is a view of the operand.
pub fn choices(graph: &Graph, blocks: &Blocks, space: &Space, mesh: &Mesh) -> Vec<Vec<bool>> {
    let of = |(members, choices): (&Vec<NodeId>, &Vec<Choice>)| {
        let n = graph.node(members[0]);
        let ([_], [_]) = (&n.inputs[..], &n.outputs[..]) else { return vec![false; choices.len()] };
        let (ins, outs) = (graph.input_types(n), graph.output_types(n));
        choices.iter().map(|c| is_view(&n.op, (&c.inputs[0], &ins), (&c.outputs[0], &outs), mesh)).collect()
    };
    blocks.nodes.iter().zip(&space.choices).map(of).collect()
}

/// Of values with the stages that keep them, which may, as views, lie in the memory of a state or of another one of them.
/// `may` says which nodes some choice makes a view.
pub fn repeated(graph: &Graph, stages: &Stages, kept: &[(ValueId, usize)], may: impl Fn(NodeId) -> bool) -> Vec<bool> {
    let root = |&(v, stage): &(ValueId, usize)| {
        let mut v = v;
        while let Def::Node(n, _) = graph.value(v).def
            && (stages.node[n.index()].0 as usize == stage || stages.everywhere[n.index()])
            && may(n)
        {
            v = graph.node(n).inputs[0];
        }
        (v, stage)
    };
    let mut counted: BTreeSet<(ValueId, usize)> = kept.iter().filter(|k| root(k) == **k).copied().collect();
    let lasts = |v: ValueId| matches!(graph.value(v).def, Def::State(_) | Def::Const(_));
    kept.iter()
        .map(|k| {
            let r = root(k);
            r != *k && (lasts(r.0) || !counted.insert(r))
        })
        .collect()
}
