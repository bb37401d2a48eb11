//! Whole initializers from their parts: import may make several parameters of one initializer, each a region of it, yet
//! checkpoints and reports speak of the initializer.

use std::collections::BTreeMap;

use crate::graph::{Init, State};
use crate::tensor::{Tensor, Type};
use crate::weights::WeightRef;

/// Why parts do not make up an initializer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssembleError {
    /// A part has not the sizes of its region.
    #[error("a part of `{initializer}` has type {found}, its region is of {expected}")]
    Part {
        /// The initializer.
        initializer: String,
        /// Of the region.
        expected: Type,
        /// Of the part.
        found: Type,
    },
    /// Parts overlap, differ in element type or whole sizes, or leave elements out.
    #[error("the parts of `{initializer}` do not make up a whole {ty}: {reason}")]
    Whole {
        /// The initializer.
        initializer: String,
        /// Its type.
        ty: Type,
        /// Why.
        reason: String,
    },
}

/// Joins parts to whole initializers, by name. The element type is that of the parts, which may be another than that of the
/// file (gradients of half-precision weights are f32).
///
/// # Errors
/// Parts that do not fit their region, overlap, or leave a gap.
pub fn assemble<'a>(
    parts: impl IntoIterator<Item = (&'a WeightRef, &'a Tensor)>,
) -> Result<BTreeMap<String, Tensor>, AssembleError> {
    let mut whole: BTreeMap<String, (Tensor, Vec<bool>)> = BTreeMap::new();
    for (w, part) in parts {
        let dims: Vec<usize> = w.region.iter().map(ExactSizeIterator::len).collect();
        let name = &w.initializer;
        if part.dims() != dims {
            let (expected, found) = (Type::new(part.dtype(), dims), part.ty().clone());
            return Err(AssembleError::Part { initializer: name.clone(), expected, found });
        }
        let ty = Type::new(part.dtype(), w.ty.dims.clone());
        let (full, done) =
            whole.entry(name.clone()).or_insert_with(|| (Tensor::zeros(ty.clone()), vec![false; ty.numel()]));
        let fail =
            |reason: &str| AssembleError::Whole { initializer: name.clone(), ty: ty.clone(), reason: reason.into() };
        if *full.ty() != ty {
            return Err(fail("they differ in type"));
        }
        let size = part.dtype().size();
        for (i, element) in part.bytes().chunks_exact(size).enumerate() {
            let at = offset(i, &dims, w);
            if std::mem::replace(&mut done[at], true) {
                return Err(fail("they overlap"));
            }
            full.bytes_mut()[at * size..][..size].copy_from_slice(element);
        }
    }
    whole
        .into_iter()
        .map(|(name, (full, done))| match done.iter().all(|d| *d) {
            true => Ok((name, full)),
            false => {
                let missing = done.iter().filter(|d| !**d).count();
                let (ty, reason) = (full.ty().clone(), format!("{missing} elements are in none"));
                Err(AssembleError::Whole { initializer: name, ty, reason })
            }
        })
        .collect()
}

/// What a parameter's content (or its gradient) is of which initializers: its own part, and its copies in the file. Empty
/// for states that no initializer fills.
pub fn parts_of(state: &State, content: &Tensor) -> Vec<(WeightRef, Tensor)> {
    let Init::Weight(own) = &state.init else { return Vec::new() };
    let copies = state.tied.iter().map(|t| {
        let content = if t.transposed { transposed(content) } else { content.clone() };
        (t.weight.clone(), content)
    });
    std::iter::once((own.clone(), content.clone())).chain(copies).collect()
}

/// The transpose of a matrix.
fn transposed(x: &Tensor) -> Tensor {
    let dims: Vec<usize> = x.dims().iter().rev().copied().collect();
    let mut y = Tensor::zeros(Type::new(x.dtype(), dims.clone()));
    let (size, rows) = (x.dtype().size(), dims.last().copied().unwrap_or(1));
    let columns = dims.first().copied().unwrap_or(1).max(1);
    for (i, e) in x.bytes().chunks_exact(size).enumerate() {
        let at = (i % columns) * rows + i / columns;
        y.bytes_mut()[at * size..][..size].copy_from_slice(e);
    }
    y
}

/// The index in the initializer of element `i` of a part.
fn offset(mut i: usize, dims: &[usize], w: &WeightRef) -> usize {
    let (mut at, mut stride) = (0, 1);
    for d in (0..dims.len()).rev() {
        at += (w.region[d].start + i % dims[d]) * stride;
        i /= dims[d];
        stride *= w.ty.dims[d];
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::weights::WeightStorage;

    fn part(rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> (WeightRef, Tensor) {
        let elements: Vec<f32> = rows.clone().flat_map(|r| columns.clone().map(move |c| (10 * r + c) as f32)).collect();
        let dims = [rows.len(), columns.len()];
        let storage = WeightStorage::File { path: "absent".into(), offset: 0, length: 48 };
        let ty = Type::new(DType::F32, [2, 6]);
        (WeightRef { initializer: "w".into(), ty, region: vec![rows, columns], storage }, Tensor::f32(dims, &elements))
    }
    fn join(parts: &[(WeightRef, Tensor)]) -> Result<BTreeMap<String, Tensor>, AssembleError> {
        assemble(parts.iter().map(|(w, t)| (w, t)))
    }

    #[test]
    fn parts_make_up_the_whole() {
        let whole = join(&[part(0..2, 4..6), part(0..2, 0..1), part(0..1, 1..4), part(1..2, 1..4)]).unwrap();
        let expected: Vec<f32> = vec![0., 1., 2., 3., 4., 5., 10., 11., 12., 13., 14., 15.];
        assert_eq!(whole["w"], Tensor::f32([2, 6], &expected));
    }

    #[test]
    fn copies_in_the_file_are_parts_too() {
        let g = crate::text::parse(
            r#"graph "g" { states { %0 = parameter "w" : f32[2,3] = weight "w" f32[2,3][0:2,0:3] file "m" 0 24
                 turned weight "t" f32[3,2][0:3,0:2] file "m" 24 24 copy weight "c" f32[2,3][0:2,0:3] file "m" 48 24 } }"#,
        )
        .unwrap();
        assert_eq!(crate::text::print(&crate::text::parse(&crate::text::print(&g)).unwrap()), crate::text::print(&g));
        let content = Tensor::f32([2, 3], &[1., 2., 3., 4., 5., 6.]);
        let whole = join(&parts_of(&g.states[0], &content)).unwrap();
        assert_eq!((&whole["w"], &whole["c"]), (&content, &content));
        assert_eq!(whole["t"], Tensor::f32([3, 2], &[1., 4., 2., 5., 3., 6.]));
    }

    #[test]
    fn gaps_overlaps_and_wrong_sizes_are_errors() {
        let mut odd = part(0..2, 0..6);
        odd.0.region[1] = 0..5;
        let texts = [join(&[part(0..2, 0..5)]), join(&[part(0..2, 0..4), part(0..2, 3..6)]), join(&[odd])]
            .map(|r| r.unwrap_err().to_string());
        insta::assert_snapshot!(texts.join("\n"), @r"
        the parts of `w` do not make up a whole f32[2,6]: 2 elements are in none
        the parts of `w` do not make up a whole f32[2,6]: they overlap
        a part of `w` has type f32[2,6], its region is of f32[2,5]
        ");
    }
}
