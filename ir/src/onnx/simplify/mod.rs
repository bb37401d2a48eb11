//! Undoes habits of exporters that hide structure from the planner.
//!
//! - [`lift`]: reshapes that merge leading dims (`[batch, sequence, hidden]` to `[rows, hidden]`) around operators that act per row go
//!   away, so that batch and sequence stay dims of their own.
//! - [`absorb`]: transposes around contractions become part of their equations.
//! - [`parts`]: a product with a fused parameter that is then sliced becomes one product per part of the parameter.
//!
//! Each is a pass from graph to graph that computes the same values (products of parts: the same up to the order of
//! additions within a product). States that nothing uses are dropped.

mod absorb;
mod lift;
mod parts;

use crate::graph::{Def, Graph, StateId};
use crate::rewrite::RewriteError;

/// Applies all passes.
///
/// # Errors
/// None for a graph that keeps its invariants.
pub fn simplify(graph: &Graph) -> Result<Graph, RewriteError> {
    take_apart(&absorb::absorb(&lift::lift(graph)?)?)
}

/// Applies [`parts`] alone, to products that were found since.
///
/// # Errors
/// As [`simplify`].
pub fn take_apart(graph: &Graph) -> Result<Graph, RewriteError> {
    Ok(used_states(parts::parts(graph)?))
}

/// Keeps the states that some node or output uses, in the order of their first use.
fn used_states(mut graph: Graph) -> Graph {
    let mut order: Vec<StateId> = Vec::new();
    let mut new: Vec<Option<StateId>> = vec![None; graph.states.len()];
    let operands = graph.nodes.iter().flat_map(|n| &n.inputs).copied();
    let roots = graph.outputs.iter().map(|o| o.value).chain(graph.states.iter().filter_map(|s| s.write));
    for v in operands.chain(roots) {
        if let Def::State(s) = graph.value(v).def
            && new[s.index()].is_none()
        {
            new[s.index()] = Some(StateId(order.len() as u32));
            order.push(s);
        }
    }
    // Values of states that go are dropped with them: they are used by nothing.
    let mut at = 0;
    let mut values = vec![None; graph.values.len()];
    for (i, value) in graph.values.iter_mut().enumerate() {
        if let Def::State(s) = &mut value.def {
            match new[s.index()] {
                Some(id) => *s = id,
                None => continue,
            }
        }
        values[i] = Some(crate::graph::ValueId(at));
        at += 1;
    }
    let mut keep = values.iter();
    graph.values.retain(|_| keep.next().is_some_and(Option::is_some));
    let map = |v: &mut crate::graph::ValueId| *v = values[v.index()].expect("only unused values go");
    for n in &mut graph.nodes {
        n.inputs.iter_mut().chain(&mut n.outputs).for_each(map);
    }
    graph.inputs.iter_mut().for_each(|x| map(&mut x.value));
    graph.outputs.iter_mut().for_each(|x| map(&mut x.value));
    graph.states = order.iter().map(|s| graph.states[s.index()].clone()).collect();
    for s in &mut graph.states {
        map(&mut s.read);
        s.write.iter_mut().for_each(map);
        s.of = s.of.and_then(|of| new[of.index()]);
    }
    graph
}

#[cfg(test)]
mod tests;
