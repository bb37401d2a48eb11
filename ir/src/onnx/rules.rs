//! The operator table's import rules by ONNX operator.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::import::OnnxRule;

type Index = HashMap<(&'static str, &'static str), Vec<&'static OnnxRule>>;

static INDEX: LazyLock<Index> = LazyLock::new(|| {
    let mut index: Index = HashMap::new();
    for rule in crate::ops::onnx_rules() {
        index.entry((rule.domain, rule.op)).or_default().push(rule);
    }
    index
});

/// The rule for an operator at an opset version: that with the largest `since` not above it, of equals the first.
///
/// # Errors
/// Why there is none.
pub fn rule(domain: &str, op: &str, opset: i64) -> Result<&'static OnnxRule, String> {
    let rules = INDEX.get(&(domain, op)).map_or(&[][..], Vec::as_slice);
    if let Some(found) = rules.iter().rev().filter(|r| r.since <= opset).max_by_key(|r| r.since) {
        return Ok(found);
    }
    Err(match rules.iter().map(|r| r.since).min() {
        Some(since) => format!("it is supported from opset {since} on"),
        None if domain.is_empty() && matches!(op, "Loop" | "Scan") => "loops are not supported".to_string(),
        None => "it is not supported".to_string(),
    })
}
