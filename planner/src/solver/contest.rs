//! Reads instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl).
//!
//! ```json
//! {"problem": {"name": "A", "usage_limit": 100,
//!   "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[15, 55], [10, 20]], "usages": [[60, 30], [60, 30]]},
//!   "edges": {"nodes": [[0, 1]], "costs": [[0, 7, 7, 0]]}}}
//! ```
//! A node uses its amount at every time of its interval, `from <= t < to`. Costs of 10^18 and more are forbidden. Matrices are row-major
//! over the strategies of the first node. `usage_limit` may be missing.

use super::problem::{Cost, FORBIDDEN, Matrix, Problem};
use serde::Deserialize;
use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

/// From this cost on a choice is forbidden.
const FORBIDDEN_FROM: i128 = 1_000_000_000_000_000_000;

/// Why a file is no instance, and where.
#[derive(Debug, thiserror::Error)]
pub enum ContestError {
    /// Not JSON of the expected form.
    #[error("not an instance: {0}")]
    Json(#[from] serde_json::Error),
    /// Parts that do not fit together.
    #[error("{at}: {what}")]
    Shape {
        /// Which element.
        at: String,
        /// What is wrong with it.
        what: String,
    },
}

#[derive(Deserialize)]
struct File {
    problem: Instance,
}

#[derive(Deserialize)]
struct Instance {
    #[serde(default)]
    name: String,
    usage_limit: Option<i64>,
    nodes: Nodes,
    edges: Edges,
}

#[derive(Deserialize)]
struct Nodes {
    intervals: Vec<(i64, i64)>,
    costs: Vec<Vec<Number>>,
    #[serde(default)]
    usages: Vec<Vec<i64>>,
}

#[derive(Deserialize)]
struct Edges {
    nodes: Vec<(usize, usize)>,
    costs: Vec<Vec<Number>>,
}

/// A cost: an integer, forbidden from 10^18 on.
struct Number(Cost);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Number, D::Error> {
        struct Visit;
        impl serde::de::Visitor<'_> for Visit {
            type Value = Number;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an integer cost")
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Number, E> {
                Ok(Number(if i128::from(v) >= FORBIDDEN_FROM { FORBIDDEN } else { v as Cost }))
            }
            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<Number, E> {
                Ok(Number(if i128::from(v) >= FORBIDDEN_FROM { FORBIDDEN } else { v }))
            }
            /// Integers beyond 64 bits arrive as floats: only those that are forbidden anyway are taken.
            fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Number, E> {
                if v >= FORBIDDEN_FROM as f64 {
                    return Ok(Number(FORBIDDEN));
                }
                Err(E::custom(format!("cost {v} is not an integer")))
            }
        }
        d.deserialize_any(Visit)
    }
}

/// Reads an instance and its name.
pub fn read(input: impl Read) -> Result<(String, Problem), ContestError> {
    let File { problem: instance } = serde_json::from_reader(std::io::BufReader::with_capacity(1 << 16, input))?;
    let shape = |at: String, what: String| ContestError::Shape { at, what };
    let mut p = Problem::integers();
    let n = instance.nodes.costs.len();
    if instance.nodes.intervals.len() != n {
        return Err(shape("nodes".into(), format!("{} intervals for {n} costs", instance.nodes.intervals.len())));
    }
    for costs in instance.nodes.costs {
        if costs.is_empty() {
            return Err(shape(format!("node {}", p.nodes().len()), "no strategies".into()));
        }
        p.add_node_quanta(costs.into_iter().map(|c| c.0).collect());
    }
    if instance.edges.nodes.len() != instance.edges.costs.len() {
        let what = format!("{} pairs of nodes for {} matrices", instance.edges.nodes.len(), instance.edges.costs.len());
        return Err(shape("edges".into(), what));
    }
    // Most matrices of an instance are equal to another: keep each once.
    let mut shared: HashMap<Arc<Matrix>, ()> = HashMap::new();
    for (k, (&(u, v), costs)) in instance.edges.nodes.iter().zip(instance.edges.costs).enumerate() {
        if u >= n || v >= n {
            return Err(shape(format!("edge {k}"), format!("joins nodes {u} and {v} of {n}")));
        }
        let (rows, cols) = (p.nodes()[u].costs.len(), p.nodes()[v].costs.len());
        let costs: Vec<Cost> = costs.into_iter().map(|c| c.0).collect();
        let matrix = Matrix::new(rows, cols, costs).map_err(|e| shape(format!("edge {k}"), e.0))?;
        if u == v {
            // An edge from a node to itself is part of the node's own cost.
            let own: Vec<Cost> = (0..rows).map(|i| super::graph::plus(p.nodes[u].costs[i], matrix.get(i, i))).collect();
            p.nodes[u].costs = own;
            continue;
        }
        let matrix = Arc::new(matrix);
        let matrix = match shared.get_key_value(&matrix) {
            Some((known, ())) => known.clone(),
            None => {
                shared.insert(matrix.clone(), ());
                matrix
            }
        };
        p.add_edge_quanta(u, v, matrix);
    }
    let Some(limit) = instance.usage_limit else { return Ok((instance.name, p)) };
    // Usage can only peak where an interval starts: these times are the rows.
    if instance.nodes.usages.len() != n {
        return Err(shape("nodes".into(), format!("{} usages for {n} costs", instance.nodes.usages.len())));
    }
    let mut times: Vec<i64> = instance.nodes.intervals.iter().filter(|(a, b)| a < b).map(|i| i.0).collect();
    times.sort_unstable();
    times.dedup();
    for _ in &times {
        p.add_row(limit);
    }
    for (node, (&(from, to), amounts)) in instance.nodes.intervals.iter().zip(instance.nodes.usages).enumerate() {
        if amounts.len() != p.nodes()[node].costs.len() {
            return Err(shape(
                format!("node {node}"),
                format!("{} usages for {} costs", amounts.len(), p.nodes()[node].costs.len()),
            ));
        }
        let rows = times.partition_point(|&t| t < from)..times.partition_point(|&t| t < to);
        if !rows.is_empty() && amounts.iter().any(|&a| a != 0) {
            p.add_usage(node, rows, amounts);
        }
    }
    Ok((instance.name, p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solver::{Options, solve};

    const EXAMPLE: &str = r#"{"problem": {"name": "A", "usage_limit": 100,
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[15, 55], [10, 1000000000000000000]], "usages": [[60, 30], [60, 30]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 7, 7, 0]]}}}"#;

    #[test]
    fn reads_and_solves() {
        let (name, p) = read(EXAMPLE.as_bytes()).unwrap();
        assert_eq!((name.as_str(), p.limits().len()), ("A", 2));
        let s = solve(&p, &Options::default()).unwrap();
        assert_eq!((s.choice, s.objective, s.bound), (vec![1, 0], 55 + 10 + 7, 72));
    }

    #[test]
    fn errors_say_where() {
        let error =
            |from: &str, to: &str| read(EXAMPLE.replacen(from, to, 1).as_bytes()).expect_err("malformed").to_string();
        assert_eq!(error("[0, 7, 7, 0]", "[0, 7, 7]"), "edge 0: a 2 x 2 matrix needs 4 costs, got 3");
        assert_eq!(error("[[0, 1]]", "[[0, 2]]"), "edge 0: joins nodes 0 and 2 of 2");
        assert_eq!(error("[60, 30]]", "[60]]"), "node 1: 1 usages for 2 costs");
        // The column depends on the features of serde_json, which other crates of a build may switch on.
        assert!(error("15", "1.5").starts_with("not an instance: cost 1.5 is not an integer at line 2 column "));
        assert!(error("}}}", "").starts_with("not an instance: EOF"));
    }
}
