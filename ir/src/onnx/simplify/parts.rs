//! A product with a fused parameter, sliced afterwards, becomes one product per part of the parameter.
//!
//! `Slice`s that tile a dim of `Einsum(x, w)` or of `Einsum(x, w) + bias`, where only `w` has that dim's letter, are products with
//! parts of `w` (and sums with parts of `bias`); so are those of the last dim of `ExpertMatMul(x, w, expert)`. Each part is a state of its own, a region of the same initializer, so that
//! query, key and value projections can be split by heads. Only where nothing else uses the product, `w` or `bias`.

use std::collections::BTreeMap;
use std::ops::Range;

use super::absorb::uses;
use crate::builder::Builder;
use crate::graph::{Def, Graph, Init, Node, NodeId, StateId, ValueId};
use crate::op::OpError;
use crate::ops::einsum::equation;
use crate::rewrite::{RewriteError, rebuild};

/// A product to be taken apart.
struct Fused {
    /// The product.
    product: NodeId,
    /// Which operand of it is the parameter.
    at: usize,
    /// The dim of the parameter that is sliced.
    dim: usize,
    /// The sum with the bias, and which operand of it is the bias.
    bias: Option<(NodeId, usize)>,
}

/// The parts that there are, by parameter and range.
type Parts = BTreeMap<(ValueId, usize, usize), ValueId>;

/// See the module.
pub(super) fn parts(graph: &Graph) -> Result<Graph, RewriteError> {
    let fused = find(graph);
    if fused.is_empty() {
        return Ok(graph.clone());
    }
    let mut new: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut states = Parts::new();
    rebuild(
        graph,
        |b, n, ins| {
            n.inputs.iter().zip(ins).for_each(|(&old, &v)| {
                new.insert(old, v);
            });
            match n.inputs.first().and_then(|v| fused.get(v)).filter(|_| n.op.name() == "Slice") {
                Some(f) => slice(graph, b, n, f, &new, &mut states),
                None => b.emit(n.op.clone(), ins),
            }
        },
        |_, _, v| Ok(v),
    )
}

fn slice(
    graph: &Graph,
    b: &mut Builder,
    n: &Node,
    f: &Fused,
    new: &BTreeMap<ValueId, ValueId>,
    states: &mut Parts,
) -> Result<Vec<ValueId>, OpError> {
    let range = n.op.get_int("start") as usize..n.op.get_int("end") as usize;
    let product = graph.node(f.product);
    let named = |b: &mut Builder, of: &Node| {
        b.name = format!("{}[{}:{}]", of.name, range.start, range.end);
        b.scope.clone_from(&of.scope);
    };
    named(b, product);
    let mut ins: Vec<ValueId> = product.inputs.iter().map(|v| new[v]).collect();
    ins[f.at] = part(graph, b, product.inputs[f.at], f.dim, &range, states)?;
    let mut out = b.emit1(product.op.clone(), &ins)?;
    if let Some((sum, at)) = f.bias {
        let sum = graph.node(sum);
        named(b, sum);
        let mut ins = [out, out];
        ins[at] = part(graph, b, sum.inputs[at], 0, &range, states)?;
        out = b.emit1(sum.op.clone(), &ins)?;
    }
    Ok(vec![out])
}

/// The part of a parameter.
fn part(
    graph: &Graph,
    b: &mut Builder,
    parameter: ValueId,
    dim: usize,
    range: &Range<usize>,
    states: &mut Parts,
) -> Result<ValueId, OpError> {
    let key = (parameter, range.start, range.end);
    if let Some(&v) = states.get(&key) {
        return Ok(v);
    }
    let Some((state, w)) = parameter_of(graph, parameter) else {
        return Err(OpError("a part of what is no parameter".to_string()));
    };
    let mut ty = graph.ty(parameter).clone();
    let mut region: Vec<Range<usize>> = ty.dims.iter().map(|&d| 0..d).collect();
    region[dim] = range.clone();
    ty.dims[dim] = range.len();
    let part = w.part(&region);
    let old = graph.state(state);
    let id = b.state(part.name(), old.kind, ty, Init::Weight(part), None);
    b.graph_mut().states[id.index()].trainable = old.trainable;
    let v = b.graph().state(id).read;
    states.insert(key, v);
    Ok(v)
}

/// The state that a value is, when it is a parameter that can be taken apart.
fn parameter_of(graph: &Graph, v: ValueId) -> Option<(StateId, &crate::weights::WeightRef)> {
    let Def::State(id) = graph.value(v).def else { return None };
    match &graph.state(id).init {
        Init::Weight(w) if graph.state(id).write.is_none() && graph.state(id).tied.is_empty() => Some((id, w)),
        _ => None,
    }
}

/// Per value that slices tile, the product it is.
fn find(graph: &Graph) -> BTreeMap<ValueId, Fused> {
    let counts = uses(graph);
    let mut slices: BTreeMap<ValueId, Vec<&Node>> = BTreeMap::new();
    for n in graph.nodes.iter().filter(|n| n.op.name() == "Slice") {
        slices.entry(n.inputs[0]).or_default().push(n);
    }
    let mut found = BTreeMap::new();
    for (v, slices) in slices {
        let all = slices.len() >= 2 && counts[v.index()] == slices.len();
        if let Some(dim) = tiled(graph, v, &slices).filter(|_| all)
            && let Some(f) = product(graph, &counts, v, dim)
        {
            found.insert(v, f);
        }
    }
    found
}

/// The dim that slices tile.
fn tiled(graph: &Graph, v: ValueId, slices: &[&Node]) -> Option<usize> {
    let dim = slices[0].op.get_int("dim");
    let mut ranges: Vec<(i64, i64)> = slices.iter().map(|n| (n.op.get_int("start"), n.op.get_int("end"))).collect();
    ranges.sort_unstable();
    let ends = ranges.iter().map(|r| r.1);
    let starts = ranges.iter().map(|r| r.0).chain([graph.ty(v).dims[dim as usize] as i64]);
    let tile = slices.iter().all(|n| n.op.get_int("dim") == dim) && std::iter::once(0).chain(ends).eq(starts);
    tile.then_some(dim as usize)
}

fn product(graph: &Graph, counts: &[usize], v: ValueId, dim: usize) -> Option<Fused> {
    let once = |v: ValueId| counts[v.index()] == 1;
    let id = graph.producer(v)?;
    let node = graph.node(id);
    if node.op.name() == "Einsum" {
        return contraction(graph, counts, id, dim);
    }
    let last = dim + 1 == graph.ty(v).rank();
    if node.op.name() == "ExpertMatMul" && last {
        let w = node.inputs[1];
        let dim = crate::ops::experts::columns(&node.op);
        return parameter_of(graph, w).filter(|_| once(w)).map(|_| Fused { product: id, at: 1, dim, bias: None });
    }
    if node.op.name() != "Add" || !last {
        return None;
    }
    let at = (0..2).find(|&i| parameter_of(graph, node.inputs[i]).is_some() && graph.ty(node.inputs[i]).rank() == 1)?;
    let (bias, sum) = (node.inputs[at], node.inputs[1 - at]);
    let fits = once(bias) && once(sum) && graph.ty(bias).dims[0] == graph.ty(v).dims[dim];
    let inner = graph.producer(sum).filter(|p| fits && graph.node(*p).op.name() == "Einsum")?;
    let f = contraction(graph, counts, inner, dim)?;
    (graph.ty(sum).dims == graph.ty(v).dims).then_some(Fused { bias: Some((id, at)), ..f })
}

fn contraction(graph: &Graph, counts: &[usize], product: NodeId, dim: usize) -> Option<Fused> {
    let node = graph.node(product);
    let e = equation(&node.op).ok()?;
    let letter = e.z[dim];
    let at = usize::from(e.y.contains(&letter));
    let (own, other) = if at == 1 { (&e.y, &e.x) } else { (&e.x, &e.y) };
    let parameter = node.inputs[at];
    parameter_of(graph, parameter).filter(|_| !other.contains(&letter) && counts[parameter.index()] == 1)?;
    let dim = own.iter().position(|&l| l == letter)?;
    Some(Fused { product, at, dim, bias: None })
}
