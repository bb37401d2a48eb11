//! What is wrong with a model file or its bindings: all problems at once.

use std::fmt;
use std::path::PathBuf;

/// Names listed per problem before the rest is only counted.
const LISTED: usize = 5;

/// Everything that keeps a model from being imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportErrors {
    /// The model file.
    pub path: PathBuf,
    /// Each problem, in the order of the file.
    pub problems: Vec<Problem>,
}

/// One problem: what, where, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The file cannot be read.
    Unreadable(String),
    /// The file breaks the ONNX format.
    Malformed {
        /// The part of the file.
        place: String,
        /// What is wrong.
        why: String,
    },
    /// An operator that is not in the operator table.
    Unsupported {
        /// Domain; empty for ONNX itself.
        domain: String,
        /// Operator.
        op: String,
        /// Opset version of the domain.
        opset: i64,
        /// The nodes that apply it.
        nodes: Vec<String>,
        /// Why it is not supported.
        why: String,
    },
    /// A node that cannot be lowered with its operands and attributes.
    Node {
        /// The node's name.
        node: String,
        /// Its operator.
        op: String,
        /// What is wrong.
        why: String,
    },
    /// A symbol of the inputs without a binding.
    Unbound {
        /// The symbol.
        symbol: String,
        /// Where it occurs.
        places: Vec<String>,
    },
    /// A binding for a symbol that the model does not have.
    NoSuchSymbol {
        /// The name bound.
        symbol: String,
        /// The model's symbols.
        valid: Vec<String>,
    },
    /// A dim that is no size under the bindings.
    Dim {
        /// The input and dim.
        place: String,
        /// What is wrong.
        why: String,
    },
}

/// The first few names, and how many more there are.
pub(crate) fn listed(names: &[String]) -> String {
    let shown = names.iter().take(LISTED).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The name of an operator with its domain.
pub(crate) fn operator(domain: &str, op: &str) -> String {
    if domain.is_empty() { op.to_string() } else { format!("{domain}.{op}") }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Unreadable(why) => write!(f, "the file cannot be read: {why}"),
            Problem::Malformed { place, why } => write!(f, "{place}: {why}"),
            Problem::Unsupported { domain, op, opset, nodes, why } => {
                let (op, n) = (operator(domain, op), nodes.len());
                write!(f, "operator {op} (opset {opset}) in {n} node{}", if n == 1 { "" } else { "s" })?;
                write!(f, " ({}): {why}", listed(nodes))
            }
            Problem::Node { node, op, why } => write!(f, "node `{node}` ({op}): {why}"),
            Problem::Unbound { symbol, places } => {
                write!(f, "size `{symbol}` ({}) is not set: give --dim {symbol}=N", places.join("; "))
            }
            Problem::NoSuchSymbol { symbol, valid } if valid.is_empty() => {
                write!(f, "size `{symbol}` is set, but all sizes of this model are fixed: leave out --dim {symbol}")
            }
            Problem::NoSuchSymbol { symbol, valid } => {
                write!(f, "size `{symbol}` is set, but the model has no such size; it has {}", listed(valid))
            }
            Problem::Dim { place, why } => write!(f, "{place}: {why}; choose other values for --dim"),
        }
    }
}

impl fmt::Display for ImportErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.problems[..] {
            [one] => write!(f, "{path} cannot be imported: {one}")?,
            many => {
                write!(f, "{path} cannot be imported, {} problems:", many.len())?;
                for problem in many {
                    write!(f, "\n  - {problem}")?;
                }
            }
        }
        if self.problems.iter().any(|p| matches!(p, Problem::Unsupported { .. })) {
            write!(
                f,
                "\nOperators that are not supported: export the model again so that they do not occur (without fused operators of \
                 that domain, or with another opset), or ask for them to be added to the operator table."
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for ImportErrors {}
