//! Prints graphs.

use std::fmt::{self, Write};

use crate::graph::{Def, Graph, Init, NodeId, Section, StateId, StateKind, ValueId};
use crate::weights::{WeightRef, WeightStorage};

use super::literal;

/// The textual form of a graph. Values that nothing defines (a broken graph) are left out.
pub fn print(graph: &Graph) -> String {
    let mut out = String::new();
    write_graph(&mut out, graph).expect("writing to a string cannot fail");
    out
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(self))
    }
}

/// The keyword of a section's blocks.
pub(super) fn section_word(s: Section) -> &'static str {
    match s {
        Section::Forward => "forward",
        Section::Backward => "backward",
        Section::Update => "update",
    }
}

fn write_graph(out: &mut String, g: &Graph) -> fmt::Result {
    writeln!(out, "graph {:?} {{", g.name)?;
    block(out, "inputs", g.inputs.iter(), |out, x| {
        let label = label(g, x.value, &x.name);
        write!(out, "{label} = {:?} : {}{}", x.name, g.ty(x.value), batch(x.batch_dim))
    })?;
    block(out, "states", g.state_ids(), |out, id| state(out, g, id))?;
    let constants: Vec<ValueId> = g.value_ids().filter(|v| matches!(g.value(*v).def, Def::Const(_))).collect();
    block(out, "constants", constants.into_iter(), |out, v| {
        let Def::Const(t) = &g.value(v).def else { return Ok(()) };
        write!(out, "{} : {} = {}", label(g, v, ""), t.ty(), literal::show(t))
    })?;
    let ids: Vec<NodeId> = g.node_ids().collect();
    for run in ids.chunk_by(|a, b| g.node(*a).section == g.node(*b).section) {
        block(out, section_word(g.node(run[0]).section), run.iter(), |out, id| node(out, g, *id))?;
    }
    block(out, "outputs", g.outputs.iter(), |out, x| write!(out, "{:?} = {}{}", x.name, x.value, batch(x.batch_dim)))?;
    out.push_str("}\n");
    Ok(())
}

fn block<T>(
    out: &mut String,
    word: &str,
    items: impl Iterator<Item = T>,
    mut item: impl FnMut(&mut String, T) -> fmt::Result,
) -> fmt::Result {
    let mut items = items.peekable();
    if items.peek().is_none() {
        return Ok(());
    }
    writeln!(out, "  {word} {{")?;
    for x in items {
        out.push_str("    ");
        item(out, x)?;
        out.push('\n');
    }
    writeln!(out, "  }}")
}

/// `%3`, with the value's name where it is not `usual`.
fn label(g: &Graph, v: ValueId, usual: &str) -> String {
    let name = &g.value(v).name;
    if name == usual { v.to_string() } else { format!("{v} {name:?}") }
}

fn batch(dim: Option<usize>) -> String {
    dim.map_or(String::new(), |d| format!(" batch {d}"))
}

fn state(out: &mut String, g: &Graph, id: StateId) -> fmt::Result {
    let s = g.state(id);
    let word = match (s.kind, s.trainable) {
        (StateKind::Parameter, true) => "parameter",
        (StateKind::Parameter, false) => "frozen",
        (StateKind::Optimizer, _) => "optimizer",
    };
    write!(out, "{} = {word} {:?} : {} = ", label(g, s.read, &s.name), s.name, g.ty(s.read))?;
    match &s.init {
        Init::Zeros => out.push_str("zeros"),
        Init::Weight(w) => weight(out, w)?,
    }
    if let Some(of) = s.of {
        write!(out, " of {:?}", g.state(of).name)?;
    }
    for t in &s.tied {
        out.push_str(if t.transposed { " turned " } else { " copy " });
        weight(out, &t.weight)?;
    }
    if let Some(w) = s.write {
        write!(out, " -> {w}")?;
    }
    Ok(())
}

fn weight(out: &mut String, w: &WeightRef) -> fmt::Result {
    let region: Vec<String> = w.region.iter().map(|r| format!("{}:{}", r.start, r.end)).collect();
    write!(out, "weight {:?} {}[{}] ", w.initializer, w.ty, region.join(","))?;
    match &w.storage {
        WeightStorage::File { path, offset, length } => {
            write!(out, "file {:?} {offset} {length}", path.to_string_lossy())
        }
        WeightStorage::Inline(t) => write!(out, "inline {}", literal::show(t)),
    }
}

fn node(out: &mut String, g: &Graph, id: NodeId) -> fmt::Result {
    let n = g.node(id);
    let results: Vec<String> = n.outputs.iter().map(|&v| label(g, v, "")).collect();
    let operands: Vec<String> = n.inputs.iter().map(ValueId::to_string).collect();
    let types: Vec<String> = n.outputs.iter().map(|&v| g.ty(v).to_string()).collect();
    write!(out, "{} = {}({}) : {}", results.join(", "), n.op, operands.join(", "), types.join(", "))?;
    if let Some(of) = n.of {
        write!(out, " of {of}")?;
    }
    if !n.name.is_empty() {
        write!(out, "  {:?}", n.name)?;
    }
    if !n.scope.is_empty() {
        write!(out, " in {:?}", n.scope)?;
    }
    Ok(())
}
