//! Expert parallelism: where rows may lie with their experts.
//!
//! Ranks along `ep` hold different experts and have different samples. Before the first product with matrices of experts each
//! row (a token, once per expert that it is routed to) goes to the rank of its expert, behind the last one back; what lies
//! between works on rows alone and does not care where they are. So such operators have one more use of a mesh axis,
//! [`Use::Route`](crate::spec::Use::Route):
//! - products by experts and their gradients;
//! - row-wise operators between two of them, which always take it, and those that read nothing but routed rows (the sum of two
//!   gradients, a cast), which may.
//!
//! How rows get there is [`crate::reshard`]'s. How many a rank gets depends on the data; the planner takes them to be
//! balanced. The runtime has no exchange of rows yet: such plans are estimates.

use autoshard_ir::blocks::Blocks;
use autoshard_ir::factor::{FactorId, FactorRule};
use autoshard_ir::graph::{Def, Graph, NodeId, Section};
use autoshard_ir::op::Family;

use crate::spec::Route;

/// What expert parallelism finds in a graph.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    /// By class of nodes: how it works on routed rows, and whether it lies between products by experts.
    classes: Vec<Option<(Route, bool)>>,
    /// By value: whether it holds matrices of experts, by experts in its first dim (or something of the same shape: gradients, optimizer states).
    matrices: Vec<bool>,
}

impl Routes {
    /// Of a step graph.
    pub fn new(graph: &Graph, blocks: &Blocks) -> Routes {
        if !graph.nodes.iter().any(|n| is_expert(n.op.name())) {
            return Routes { classes: vec![None; blocks.nodes.len()], matrices: vec![false; graph.values.len()] };
        }
        let between = Between::new(graph);
        let class = |members: &Vec<NodeId>| {
            let routes: Vec<_> = members.iter().map(|n| between.route(*n)).collect();
            let (first, inside) = routes[0]?;
            // Members of a class do alike.
            let all = routes.iter().all(|r| r.is_some_and(|r| r.0 == first));
            all.then(|| (first, inside && routes.iter().flatten().all(|r| r.1)))
        };
        Routes { classes: blocks.nodes.iter().map(class).collect(), matrices: matrices(graph) }
    }
    /// How a class of nodes works on routed rows, if it can.
    pub fn of(&self, class: usize) -> Option<Route> {
        self.classes[class].map(|r| r.0)
    }
    /// Whether a class of nodes does nothing but work on routed rows.
    pub fn always(&self, class: usize) -> bool {
        self.classes[class].is_some_and(|r| r.1)
    }
    /// Whether a value holds matrices of experts.
    pub fn is_matrices(&self, value: autoshard_ir::graph::ValueId) -> bool {
        self.matrices[value.index()]
    }
    /// Whether there are experts.
    pub fn any(&self) -> bool {
        self.classes.iter().any(Option::is_some)
    }
}

const PRODUCT: &str = "ExpertMatMul";
const GRADIENT: &str = "ExpertMatMulGrad";

fn is_expert(op: &str) -> bool {
    matches!(op, PRODUCT | GRADIENT)
}

/// Row-wise operators, and which of them lie behind, and before, products by experts.
struct Between<'a> {
    graph: &'a Graph,
    /// By node, of row-wise operators the factor of the rows.
    rows: Vec<Option<FactorId>>,
    behind: Vec<bool>,
    before: Vec<bool>,
    /// Whether all that a node reads of its own shape comes from products by experts and nodes like itself.
    only: Vec<bool>,
}

impl<'a> Between<'a> {
    fn new(graph: &'a Graph) -> Between<'a> {
        let n = graph.nodes.len();
        let mut found = Between {
            graph,
            rows: vec![None; n],
            behind: vec![false; n],
            before: vec![false; n],
            only: vec![false; n],
        };
        let mut given = vec![false; graph.values.len()];
        graph.outputs.iter().for_each(|o| given[o.value.index()] = true);
        for id in graph.node_ids() {
            let node = graph.node(id);
            if is_expert(node.op.name()) {
                (found.behind[id.index()], found.only[id.index()]) =
                    (node.op.name() == PRODUCT, node.op.name() == PRODUCT);
                continue;
            }
            let rule = node.op.factors(&graph.input_types(node), &graph.output_types(node));
            let rows = row_wise(graph, id, &rule);
            if node.section == Section::Update || node.outputs.iter().any(|v| given[v.index()]) || rows.is_none() {
                continue;
            }
            found.rows[id.index()] = rows;
            let whole = graph.ty(node.outputs[0]).rank();
            let mut full = node.inputs.iter().filter(|v| graph.ty(**v).rank() == whole);
            let from =
                |v: &autoshard_ir::graph::ValueId, of: &[bool]| graph.producer(*v).is_some_and(|p| of[p.index()]);
            found.behind[id.index()] = node.inputs.iter().any(|v| from(v, &found.behind));
            found.only[id.index()] = full.all(|v| from(v, &found.only)) && found.behind[id.index()];
        }
        let uses = graph.uses();
        let ids: Vec<NodeId> = graph.node_ids().collect();
        for id in ids.into_iter().rev().filter(|id| found.rows[id.index()].is_some()) {
            let readers = graph.node(id).outputs.iter().flat_map(|v| &uses[v.index()]);
            let mut readers = readers.filter(|r| r.index() != id.index());
            found.before[id.index()] = readers.any(|r| found.before[r.index()] || is_expert(graph.node(*r).op.name()));
        }
        found
    }

    /// How a node works on routed rows, and whether it always does.
    fn route(&self, id: NodeId) -> Option<(Route, bool)> {
        let n = self.graph.node(id);
        if is_expert(n.op.name()) {
            let rule = n.op.factors(&self.graph.input_types(n), &self.graph.output_types(n));
            let experts =
                (0..rule.factors.len()).map(|f| FactorId(f as u8)).find(|f| rule.factor(*f).name == "experts");
            // The third operand gives each row its expert.
            let rows = rule.inputs[2].iter().flatten().next();
            return Some((Route { rows: *rows?, experts: Some(experts?) }, true));
        }
        let rows = self.rows[id.index()]?;
        let at = id.index();
        let inside = self.behind[at] && self.before[at];
        (inside || self.only[at]).then_some((Route { rows, experts: None }, inside))
    }
}

/// The factor of the first dim, of an operator that makes each element of its results from elements at the same place.
fn row_wise(graph: &Graph, id: NodeId, rule: &FactorRule) -> Option<FactorId> {
    let n = graph.node(id);
    let first = rule.outputs.first()?;
    // Rows, and at least what tells tokens from the experts of one token.
    if first.len() < 3 || n.op.work(&graph.input_types(n), &graph.output_types(n)).family != Family::Memory {
        return None;
    }
    let same = |slots: &Vec<Option<FactorId>>| {
        let lead = first.len().checked_sub(slots.len());
        lead.is_some_and(|lead| slots.iter().zip(&first[lead..]).all(|(a, b)| a.is_none() || a == b))
    };
    let whole = |(slots, v): (&Vec<Option<FactorId>>, &autoshard_ir::graph::ValueId)| {
        slots == first || graph.ty(*v).rank() < first.len() || matches!(graph.value(*v).def, Def::Const(_))
    };
    let all = rule.inputs.iter().chain(&rule.outputs).all(same);
    (all && rule.inputs.iter().zip(&n.inputs).all(whole)).then_some(first[0]).flatten()
}

/// Values that hold matrices of experts: operands and gradients of products by experts, and what has their shape where parameters are cast,
/// accumulated and updated.
fn matrices(graph: &Graph) -> Vec<bool> {
    let mut found = vec![false; graph.values.len()];
    for n in &graph.nodes {
        match n.op.name() {
            PRODUCT => found[n.inputs[1].index()] = true,
            GRADIENT => found[n.outputs[0].index()] = true,
            _ => {}
        }
    }
    let nodes: Vec<NodeId> = graph
        .node_ids()
        .filter(|&id| {
            let n = graph.node(id);
            n.section == Section::Update || n.is_accumulate() || graph.casts_state(n)
        })
        .collect();
    // States tie what is read to what is written; an update reads all of a parameter's states.
    loop {
        let before = found.iter().filter(|f| **f).count();
        for id in &nodes {
            let n = graph.node(*id);
            let all = || n.inputs.iter().chain(&n.outputs);
            if let Some(known) = all().find(|v| found[v.index()]) {
                let dims = &graph.ty(*known).dims;
                let alike: Vec<_> = all().filter(|v| graph.ty(**v).dims == *dims).collect();
                alike.into_iter().for_each(|v| found[v.index()] = true);
            }
        }
        for s in &graph.states {
            if let Some(w) = s.write {
                let known = found[s.read.index()] || found[w.index()];
                (found[s.read.index()], found[w.index()]) = (known, known);
            }
        }
        if found.iter().filter(|f| **f).count() == before {
            return found;
        }
    }
}
