//! Definitions and uses of a list of ONNX nodes, and an order in which they can be lowered.

use std::collections::{BTreeSet, HashMap};

use super::error::listed;
use super::proto::onnx::{GraphProto, NodeProto};

/// A node's name for people: its own, else its first result's, else its place.
pub fn node_name(node: &NodeProto, at: usize) -> String {
    let named = |s: &str| (!s.is_empty()).then(|| s.to_string());
    named(node.name())
        .or_else(|| node.output.iter().find_map(|o| named(o)))
        .unwrap_or_else(|| format!("{}#{at}", node.op_type()))
}

/// The names that a node uses: operands, and what its subgraphs use but do not define.
pub fn uses(node: &NodeProto) -> Vec<&str> {
    let mut found: Vec<&str> = node.input.iter().map(String::as_str).filter(|s| !s.is_empty()).collect();
    for graph in node.attribute.iter().flat_map(|a| a.g.as_ref().into_iter().chain(&a.graphs)) {
        found.extend(free(graph));
    }
    found
}

/// The names that a subgraph uses but does not define.
fn free(graph: &GraphProto) -> Vec<&str> {
    let mut defined: BTreeSet<&str> = graph.input.iter().map(|i| i.name()).collect();
    defined.extend(graph.initializer.iter().map(|t| t.name()));
    defined.extend(graph.node.iter().flat_map(|n| n.output.iter().map(String::as_str)));
    let used = graph.node.iter().flat_map(uses).chain(graph.output.iter().map(|o| o.name()));
    used.filter(|name| !defined.contains(name)).collect()
}

/// The order in which nodes can be lowered: the file's, except where a node uses what a later one defines. `known` are
/// the names defined outside.
///
/// # Errors
/// Names defined twice, names not defined, cycles.
pub fn order<'a>(nodes: &'a [NodeProto], known: &dyn Fn(&str) -> bool) -> Result<Vec<usize>, Vec<String>> {
    let mut problems = Vec::new();
    let mut producer: HashMap<&'a str, usize> = HashMap::new();
    for (at, node) in nodes.iter().enumerate() {
        for out in node.output.iter().map(String::as_str).filter(|s| !s.is_empty()) {
            if known(out) || producer.insert(out, at).is_some() {
                problems.push(format!("`{out}` (result of node `{}`) is defined twice", node_name(node, at)));
            }
        }
    }
    let mut waiting = vec![0usize; nodes.len()];
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        let mut missing = BTreeSet::new();
        for name in uses(node) {
            match producer.get(name) {
                Some(&from) => {
                    waiting[at] += 1;
                    users[from].push(at);
                }
                None if known(name) => {}
                None => {
                    missing.insert(name);
                }
            }
        }
        for name in missing {
            problems.push(format!("node `{}` uses `{name}`, which nothing defines", node_name(node, at)));
        }
    }
    let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|&at| waiting[at] == 0).collect();
    let mut found = Vec::with_capacity(nodes.len());
    while let Some(at) = ready.pop_first() {
        found.push(at);
        for &user in &users[at] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                ready.insert(user);
            }
        }
    }
    if found.len() < nodes.len() && problems.is_empty() {
        let stuck = (0..nodes.len()).filter(|&at| waiting[at] > 0).map(|at| node_name(&nodes[at], at));
        problems.push(format!("nodes depend on each other in a cycle: {}", listed(&stuck.collect::<Vec<_>>())));
    }
    if problems.is_empty() { Ok(found) } else { Err(problems) }
}
