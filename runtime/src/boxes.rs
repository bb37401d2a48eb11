//! Boxes of dense row-major tensors, as runs of consecutive bytes: how shards are cut out of tensors and put back.
//!
//! Everything that moves a shard (feeds, slices, gathers, checkpoints) goes through [`runs`].

use std::ops::Range;

use autoshard_ir::{Tensor, Type};

/// A box common to two dense tensors, of which it lies at different places.
#[derive(Debug, Clone)]
pub struct BoxCopy<'a> {
    /// Sizes of the box.
    pub dims: &'a [usize],
    /// Sizes of the tensor that is read.
    pub from_dims: &'a [usize],
    /// Where the box begins in it.
    pub from_origin: &'a [usize],
    /// Sizes of the tensor that is written.
    pub to_dims: &'a [usize],
    /// Where the box begins in it.
    pub to_origin: &'a [usize],
    /// Bytes of an element.
    pub element: usize,
}

/// Calls `f(from, to, length)`, in bytes, for runs of consecutive bytes that together are the box. Panics where the box
/// does not lie in both tensors.
pub fn runs(c: &BoxCopy<'_>, mut f: impl FnMut(usize, usize, usize)) {
    let rank = c.dims.len();
    for d in 0..rank {
        assert!(c.from_origin[d] + c.dims[d] <= c.from_dims[d], "box in what is read: {c:?}");
        assert!(c.to_origin[d] + c.dims[d] <= c.to_dims[d], "box in what is written: {c:?}");
    }
    if c.dims.contains(&0) {
        return;
    }
    // Dims from `inner` on are one run: all but the first of them are whole in both tensors.
    let mut inner = rank;
    let mut length = c.element;
    while inner > 0 {
        inner -= 1;
        length *= c.dims[inner];
        if c.dims[inner] != c.from_dims[inner] || c.dims[inner] != c.to_dims[inner] {
            break;
        }
    }
    let strides = |dims: &[usize]| {
        let mut s = vec![c.element; rank];
        for d in (0..rank.saturating_sub(1)).rev() {
            s[d] = s[d + 1] * dims[d + 1];
        }
        s
    };
    let (from_strides, to_strides) = (strides(c.from_dims), strides(c.to_dims));
    let start = |o: &[usize], s: &[usize]| o.iter().zip(s).map(|(o, s)| o * s).sum::<usize>();
    let (mut from, mut to) = (start(c.from_origin, &from_strides), start(c.to_origin, &to_strides));
    let mut at = vec![0; inner];
    loop {
        f(from, to, length);
        let mut d = inner;
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            at[d] += 1;
            from += from_strides[d];
            to += to_strides[d];
            if at[d] < c.dims[d] {
                break;
            }
            from -= from_strides[d] * c.dims[d];
            to -= to_strides[d] * c.dims[d];
            at[d] = 0;
        }
    }
}

/// Copies a box from one tensor's bytes to another's.
pub fn copy(c: &BoxCopy<'_>, from: &[u8], to: &mut [u8]) {
    runs(c, |a, b, n| to[b..b + n].copy_from_slice(&from[a..a + n]));
}

/// Copies a box out of a tensor: `to` becomes the dense box of these sizes that begins at `origin`.
pub fn cut(from: &[u8], from_dims: &[usize], origin: &[usize], to: &mut [u8], dims: &[usize], element: usize) {
    let zero = vec![0; dims.len()];
    copy(&BoxCopy { dims, from_dims, from_origin: origin, to_dims: dims, to_origin: &zero, element }, from, to);
}

/// A box of a tensor.
pub fn part(t: &Tensor, region: &[Range<usize>]) -> Tensor {
    let origin: Vec<usize> = region.iter().map(|r| r.start).collect();
    let dims: Vec<usize> = region.iter().map(|r| r.end - r.start).collect();
    let mut out = Tensor::zeros(Type::new(t.dtype(), dims.clone()));
    cut(t.bytes(), t.dims(), &origin, out.bytes_mut(), &dims, t.dtype().size());
    out
}

/// Copies a dense box into a tensor: the inverse of [`cut`].
pub fn paste(from: &[u8], dims: &[usize], to: &mut [u8], to_dims: &[usize], origin: &[usize], element: usize) {
    let zero = vec![0; dims.len()];
    copy(&BoxCopy { dims, from_dims: dims, from_origin: &zero, to_dims, to_origin: origin, element }, from, to);
}

/// The box as one range per dim.
pub fn ranges(origin: &[usize], dims: &[usize]) -> Vec<Range<usize>> {
    origin.iter().zip(dims).map(|(o, n)| *o..o + n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_and_paste_are_inverse_for_every_box() {
        let dims = [3usize, 4, 2];
        let whole: Vec<u8> = (0..24).collect();
        for (a, b, c) in (0..27).map(|i| (i / 9, i / 3 % 3, i % 3)) {
            let origin = [a.min(2), b, c.min(1)];
            let size = [3 - origin[0], 4 - origin[1], 2 - origin[2]];
            let mut part = vec![0; size.iter().product()];
            cut(&whole, &dims, &origin, &mut part, &size, 1);
            for (i, x) in part.iter().enumerate() {
                let at = [i / (size[1] * size[2]), i / size[2] % size[1], i % size[2]];
                let flat = at.iter().zip(&origin).zip(&dims).fold(0, |f, ((a, o), d)| f * d + a + o);
                assert_eq!(*x as usize, flat);
            }
            let mut back = vec![255; 24];
            paste(&part, &size, &mut back, &dims, &origin, 1);
            assert_eq!(back.iter().filter(|x| **x != 255).count(), part.len());
            assert!(back.iter().zip(&whole).all(|(b, w)| *b == 255 || b == w));
        }
    }

    #[test]
    fn whole_rows_are_one_run() {
        let mut n = 0;
        let c = BoxCopy {
            dims: &[2, 4, 2],
            from_dims: &[3, 4, 2],
            from_origin: &[1, 0, 0],
            to_dims: &[2, 4, 2],
            to_origin: &[0, 0, 0],
            element: 4,
        };
        runs(&c, |_, _, length| {
            n += 1;
            assert_eq!(length, 64);
        });
        assert_eq!(n, 1);
        let scalar = BoxCopy { dims: &[], from_dims: &[], from_origin: &[], to_dims: &[], to_origin: &[], element: 8 };
        runs(&scalar, |a, b, length| assert_eq!((a, b, length), (0, 0, 8)));
    }
}
