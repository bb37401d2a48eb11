//! Weights that an exporter wrote twice: the legacy PyTorch exporter stores a tied projection as a transposed copy of the
//! embedding. Trained apart they would be two parameters, which is another model.
//!
//! Two float initializers of the model file are one weight when one is a table of embeddings, the other an operand of a
//! product, and their elements agree bit by bit, directly or transposed, in at least two dims, and are not all alike.
//! Weights that merely start alike (layers copied from one, experts copied from a dense layer) are not tied. External data
//! is not opened for this: planning reads no weight.

use std::collections::{BTreeMap, HashMap};

use super::model::domain;
use super::proto::onnx::{FunctionProto, NodeProto};
use crate::weights::{WeightRef, WeightStorage};

/// What a name is an operand of, as it is, transposed, reshaped or cast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Uses {
    /// Of lookups, as the table.
    looked_up: bool,
    /// Of products.
    multiplied: bool,
}

impl Uses {
    fn add(&mut self, more: Uses) {
        self.looked_up |= more.looked_up;
        self.multiplied |= more.multiplied;
    }
    /// Whether one is a table and the other is multiplied.
    fn pair(self, other: Uses) -> bool {
        (self.looked_up && other.multiplied) || (self.multiplied && other.looked_up)
    }
}

/// The local function that a node calls, with the order of its nodes.
type Calls<'a> = dyn Fn(&NodeProto) -> Option<(&'a FunctionProto, &'a [usize])> + 'a;

/// The uses of every name in a list of nodes, in the calls of local functions too.
pub(super) fn uses<'a>(nodes: &'a [NodeProto], order: &[usize], calls: &Calls<'a>) -> HashMap<String, Uses> {
    within(nodes, order, calls, &mut HashMap::new())
}

/// Uses of functions' operands that are known; those of one being looked at are none yet.
type Known = HashMap<*const FunctionProto, Vec<Uses>>;

fn within<'a>(nodes: &'a [NodeProto], order: &[usize], calls: &Calls<'a>, known: &mut Known) -> HashMap<String, Uses> {
    let mut found: HashMap<String, Uses> = HashMap::new();
    let mut origin: HashMap<&str, &str> = HashMap::new();
    for node in order.iter().map(|&at| &nodes[at]) {
        let of_call = calls(node).map(|(f, order)| operands(f, order, calls, known));
        for (i, name) in node.input.iter().enumerate() {
            let name = origin.get(name.as_str()).copied().unwrap_or(name);
            let uses = match (domain(node.domain()), node.op_type()) {
                ("", "Gather") => Uses { looked_up: i == 0, multiplied: false },
                ("", "MatMul" | "Gemm" | "Einsum") | ("com.microsoft", "FusedMatMul") => {
                    Uses { looked_up: false, multiplied: i < 2 }
                }
                ("", "Identity" | "Transpose" | "Reshape" | "Cast" | "CastLike") if i == 0 => {
                    if let Some(out) = node.output.first() {
                        origin.insert(out, name);
                    }
                    continue;
                }
                _ => of_call.as_ref().and_then(|uses| uses.get(i)).copied().unwrap_or_default(),
            };
            found.entry(name.to_string()).or_default().add(uses);
        }
    }
    found
}

/// The uses of a function's operands.
fn operands<'a>(f: &'a FunctionProto, order: &[usize], calls: &Calls<'a>, known: &mut Known) -> Vec<Uses> {
    let key = std::ptr::from_ref(f);
    if let Some(uses) = known.get(&key) {
        return uses.clone();
    }
    known.insert(key, Vec::new());
    let inside = within(&f.node, order, calls, known);
    let uses: Vec<Uses> = f.input.iter().map(|name| inside.get(name).copied().unwrap_or_default()).collect();
    known.insert(key, uses.clone());
    uses
}

/// Another initializer that holds the same weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Original {
    /// Its name: the first in the file.
    pub name: String,
    /// Whether the later one is its transpose.
    pub transposed: bool,
}

/// Sizes in order, first and last element: all the same for a transpose.
type Key<'a> = (Vec<usize>, &'a [u8], &'a [u8]);

/// The originals of copies, by the copy's name. `order` is that of the file, `bytes` the file's at `path`.
pub(super) fn find<'a>(
    order: impl Iterator<Item = &'a str>,
    initializers: &HashMap<String, Result<WeightRef, String>>,
    uses: &HashMap<String, Uses>,
    path: &std::path::Path,
    bytes: &[u8],
) -> BTreeMap<String, Original> {
    let mut found = BTreeMap::new();
    let mut seen: HashMap<Key<'_>, Vec<(&WeightRef, &[u8])>> = HashMap::new();
    for name in order {
        let (Some(Ok(w)), Some(own)) = (initializers.get(name), uses.get(name)) else { continue };
        let size = w.ty.dtype.size();
        let Some(data) = elements(w, path, bytes).filter(|d| d.len() == w.ty.bytes() && d.len() > size) else {
            continue;
        };
        if !w.ty.dtype.is_float() || w.ty.rank() < 2 || data[size..] == data[..data.len() - size] {
            continue;
        }
        let mut dims = w.ty.dims.clone();
        dims.sort_unstable();
        let earlier = seen.entry((dims, &data[..size], &data[data.len() - size..])).or_default();
        let original = earlier.iter().find_map(|(o, theirs)| {
            let pair = uses.get(&o.initializer).is_some_and(|u| u.pair(*own));
            if !pair || o.ty.dtype != w.ty.dtype {
                return None;
            }
            let transposed = !(o.ty.dims == w.ty.dims && *theirs == data);
            let same = !transposed || turned(&o.ty.dims, theirs, &w.ty.dims, data, size);
            same.then(|| Original { name: o.initializer.clone(), transposed })
        });
        match original {
            Some(o) => {
                found.insert(name.to_string(), o);
            }
            None => earlier.push((w, data)),
        }
    }
    found
}

fn elements<'a>(w: &'a WeightRef, path: &std::path::Path, bytes: &'a [u8]) -> Option<&'a [u8]> {
    match &w.storage {
        WeightStorage::Inline(t) => Some(t.bytes()),
        WeightStorage::File { path: p, offset, length } if p == path => {
            let end = offset.checked_add(*length)?;
            bytes.get(usize::try_from(*offset).ok()?..usize::try_from(end).ok()?)
        }
        WeightStorage::File { .. } => None,
    }
}

/// Whether `y` is the transpose of the matrix `x`.
fn turned(x_dims: &[usize], x: &[u8], y_dims: &[usize], y: &[u8], size: usize) -> bool {
    let (&[rows, columns], &[a, b]) = (x_dims, y_dims) else { return false };
    (rows, columns) == (b, a)
        && x.chunks_exact(size).enumerate().all(|(i, e)| {
            let at = (i % columns) * rows + i / columns;
            y[at * size..][..size] == *e
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn copies_and_transposes_are_tied_to_the_first() {
        let t = |dims: &[usize], x: &[f32]| Tensor::f32(dims, x);
        let named = [
            ("a", t(&[2, 3], &[1., 2., 3., 4., 5., 6.])),
            ("another table", t(&[2, 3], &[1., 2., 3., 4., 5., 6.])),
            ("same", t(&[2, 3], &[1., 2., 3., 4., 5., 6.])),
            ("turned", t(&[3, 2], &[1., 4., 2., 5., 3., 6.])),
            ("reshaped", t(&[3, 2], &[1., 2., 3., 4., 5., 6.])),
            ("other", t(&[2, 3], &[1., 2., 3., 4., 0., 6.])),
            ("square", t(&[2, 2], &[1., 2., 3., 4.])),
            ("square turned", t(&[2, 2], &[1., 3., 2., 4.])),
            ("ones", t(&[2, 3], &[1.; 6])),
            ("more ones", t(&[2, 3], &[1.; 6])),
            ("bias", t(&[3], &[1., 2., 3.])),
            ("same bias", t(&[3], &[1., 2., 3.])),
        ];
        let weights = named
            .iter()
            .map(|(n, t)| {
                let w = WeightRef::whole(*n, t.ty().clone(), WeightStorage::Inline(t.clone().into()));
                (n.to_string(), Ok(w))
            })
            .collect();
        let table = |n: &str| ["a", "square", "ones", "bias", "another table"].contains(&n);
        let uses =
            named.iter().map(|(n, _)| (n.to_string(), Uses { looked_up: table(n), multiplied: !table(n) })).collect();
        let found = find(named.iter().map(|(n, _)| *n), &weights, &uses, std::path::Path::new("m"), &[]);
        let list: Vec<String> = found.iter().map(|(n, o)| format!("{n}: {} {}", o.name, o.transposed)).collect();
        assert_eq!(list, ["same: a false", "square turned: square true", "turned: a true"]);
    }
}
