//! Weights that an exporter wrote twice: the legacy PyTorch exporter stores a tied projection as a transposed copy of the
//! embedding. Trained apart they would be two parameters, which is another model.
//!
//! Two float initializers of the model file are one weight when their elements agree bit by bit, directly or transposed, in
//! at least two dims, and are not all alike (norms start as ones, and are not tied). External data is not opened for this:
//! planning reads no weight.

use std::collections::{BTreeMap, HashMap};

use crate::weights::{WeightRef, WeightStorage};

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
    path: &std::path::Path,
    bytes: &[u8],
) -> BTreeMap<String, Original> {
    let mut found = BTreeMap::new();
    let mut seen: HashMap<Key<'_>, Vec<(&WeightRef, &[u8])>> = HashMap::new();
    for name in order {
        let Some(Ok(w)) = initializers.get(name) else { continue };
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
            if o.ty.dtype != w.ty.dtype {
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
        let found = find(named.iter().map(|(n, _)| *n), &weights, std::path::Path::new("m"), &[]);
        let list: Vec<String> = found.iter().map(|(n, o)| format!("{n}: {} {}", o.name, o.transposed)).collect();
        assert_eq!(list, ["same: a false", "square turned: square true", "turned: a true"]);
    }
}
