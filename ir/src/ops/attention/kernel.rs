//! Attention in blocks of query rows: scores of a block and all visible keys are held at a time, never all of them.

use std::ops::Range;

use crate::dtype::DType;
use crate::op::{KernelError, Op};
use crate::ops::real::{Real, by_float};
use crate::tensor::{View, ViewMut};

/// Query rows per block.
const ROWS: usize = 32;

/// Sizes on (local) tensors, and what a query sees.
struct Sizes {
    b: usize,
    h: usize,
    hk: usize,
    s: usize,
    t: usize,
    d: usize,
    e: usize,
    causal: bool,
    /// Index among the keys of local query 0.
    first: i64,
    window: i64,
    scale: f64,
}

impl Sizes {
    fn of(op: &Op, q: &View<'_>, k: &View<'_>, v: &View<'_>) -> Sizes {
        let ([b, h, s, d], [hk, t]) = ([0, 1, 2, 3].map(|i| q.dims()[i]), [1, 2].map(|i| k.dims()[i]));
        Sizes {
            b,
            h,
            hk,
            s,
            t,
            d,
            e: v.dims()[3],
            causal: op.get_flag("causal"),
            first: q.origin[2] as i64 + op.get_int("offset"),
            window: op.get_int("window"),
            scale: op.get_float("scale"),
        }
    }
    /// The keys that local query `i` may see.
    fn keys(&self, i: usize) -> Range<usize> {
        if !self.causal {
            return 0..self.t;
        }
        let last = self.first + i as i64;
        let end = (last + 1).clamp(0, self.t as i64);
        let start = if self.window > 0 { (last - self.window + 1).clamp(0, end) } else { 0 };
        start as usize..end as usize
    }
    /// The keys that any of these queries may see.
    fn keys_of(&self, rows: &Range<usize>) -> Range<usize> {
        let end = self.keys(rows.end - 1).end;
        self.keys(rows.start).start.min(end)..end
    }
    /// Blocks of rows of every head: (index of head in q, of head in k, rows).
    fn blocks(&self) -> impl Iterator<Item = (usize, usize, Range<usize>)> + use<> {
        let (h, hk, s, heads) = (self.h, self.hk, self.s, self.b * self.h);
        let group = h / hk;
        (0..heads).flat_map(move |head| {
            let key_head = head / h * hk + head % h / group;
            (0..s).step_by(ROWS).map(move |r| (head, key_head, r..(r + ROWS).min(s)))
        })
    }
}

/// A mask as read by a kernel: what to add to a score.
struct Mask<'a, T> {
    visible: Option<&'a [u8]>,
    bias: Option<&'a [T]>,
    /// Strides of batch, head, row, key; 0 where it broadcasts.
    by: [usize; 4],
}

impl<'a, T: Real> Mask<'a, T> {
    fn of(mask: Option<&View<'a>>) -> Mask<'a, T> {
        let Some(m) = mask else { return Mask { visible: None, bias: None, by: [0; 4] } };
        let strides = crate::ops::real::strides(m.dims());
        let by = [0, 1, 2, 3].map(|i| if m.dims()[i] == 1 { 0 } else { strides[i] });
        match m.dtype() {
            DType::Bool => Mask { visible: Some(m.as_slice()), bias: None, by },
            _ => Mask { visible: None, bias: Some(m.as_slice()), by },
        }
    }
    /// The element for batch, head, row and key.
    fn at(&self, place: [usize; 4]) -> usize {
        place.iter().zip(self.by).map(|(p, by)| p * by).sum()
    }
    /// Applies it to scores of keys from `first` on.
    fn apply(&self, place: [usize; 4], scores: &mut [T]) {
        let at = self.at(place);
        if let Some(bias) = self.bias {
            for (j, s) in scores.iter_mut().enumerate() {
                *s += bias[at + j * self.by[3]];
            }
        }
        if let Some(visible) = self.visible {
            for (j, s) in scores.iter_mut().enumerate() {
                if visible[at + j * self.by[3]] == 0 {
                    *s = T::NEG_INFINITY;
                }
            }
        }
    }
}

/// `c (+)= a b` with strides (row, column), bounds checked.
fn multiply<T: Real>(
    [m, n, k]: [usize; 3],
    (c, c_by): (&mut [T], [usize; 2]),
    add: bool,
    (a, a_by): (&[T], [usize; 2]),
    (b, b_by): (&[T], [usize; 2]),
) {
    let end = |r: usize, c: usize, by: [usize; 2]| if r * c == 0 { 0 } else { (r - 1) * by[0] + (c - 1) * by[1] + 1 };
    assert!(end(m, n, c_by) <= c.len() && end(m, k, a_by) <= a.len() && end(k, n, b_by) <= b.len(), "in bounds");
    // SAFETY: every element addressed lies below the ends checked above.
    unsafe { T::gemm([m, n, k], c.as_mut_ptr(), c_by, add, a.as_ptr(), a_by, b.as_ptr(), b_by) }
}

/// Scores of a block: scaled products with keys, mask applied, -inf where the causal mask hides.
#[allow(clippy::too_many_arguments)]
fn scores<T: Real>(
    z: &Sizes,
    head: usize,
    rows: &Range<usize>,
    keys: &Range<usize>,
    q: &[T],
    k: &[T],
    mask: &Mask<'_, T>,
    scores: &mut [T],
) {
    let n = keys.len();
    let q = &q[(head * z.s + rows.start) * z.d..];
    multiply([rows.len(), n, z.d], (scores, [n, 1]), false, (q, [z.d, 1]), (&k[keys.start * z.d..], [1, z.d]));
    let scale = T::of(z.scale);
    for (i, row) in rows.clone().zip(scores.chunks_exact_mut(n)) {
        row.iter_mut().for_each(|s| *s *= scale);
        mask.apply([head / z.h, head % z.h, i, keys.start], row);
        let seen = z.keys(i);
        row[..seen.start.max(keys.start) - keys.start].fill(T::NEG_INFINITY);
        row[seen.end.clamp(keys.start, keys.end) - keys.start..].fill(T::NEG_INFINITY);
    }
}

pub(super) fn forward(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let z = Sizes::of(op, &inputs[0], &inputs[1], &inputs[2]);
    let [out, lse] = outputs else { return Err(KernelError("Attention has 2 results".into())) };
    by_float!(op, inputs[0].dtype(), T => {
        forward_of::<T>(&z, inputs, out.as_mut_slice(), lse.as_mut_slice());
        Ok(())
    })
}

fn forward_of<T: Real>(z: &Sizes, inputs: &[View<'_>], out: &mut [T], lse: &mut [T]) {
    let [q, k, v] = [0, 1, 2].map(|i| inputs[i].as_slice::<T>());
    let mask = Mask::of(inputs.get(3));
    let mut block = vec![T::ZERO; ROWS * z.t];
    for (head, key_head, rows) in z.blocks() {
        let keys = z.keys_of(&rows);
        let n = keys.len();
        let at = head * z.s + rows.start;
        let out = &mut out[at * z.e..][..rows.len() * z.e];
        let lse = &mut lse[at..][..rows.len()];
        if n == 0 {
            out.fill(T::ZERO);
            lse.fill(T::NEG_INFINITY);
            continue;
        }
        let weights = &mut block[..rows.len() * n];
        scores(z, head, &rows, &keys, q, &k[key_head * z.t * z.d..], &mask, weights);
        for (w, lse) in weights.chunks_exact_mut(n).zip(lse) {
            let max = T::largest(w);
            if max == T::NEG_INFINITY {
                w.fill(T::ZERO);
                *lse = max;
                continue;
            }
            w.iter_mut().for_each(|w| *w = (*w - max).fast_exp());
            let sum = T::sum(w);
            let inverse = T::ONE / sum;
            w.iter_mut().for_each(|w| *w *= inverse);
            *lse = max + T::of(sum.f64().ln());
        }
        let v = &v[(key_head * z.t + keys.start) * z.e..];
        multiply([rows.len(), z.e, n], (out, [z.e, 1]), false, (weights, [n, 1]), (v, [z.e, 1]));
    }
}

pub(super) fn backward(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let z = Sizes::of(op, &inputs[0], &inputs[1], &inputs[2]);
    let [dq, dk, dv, dmask @ ..] = outputs else {
        return Err(KernelError("AttentionGrad has at least 3 results".into()));
    };
    by_float!(op, inputs[0].dtype(), T => {
        let dmask = dmask.first_mut().map(ViewMut::as_mut_slice);
        backward_of::<T>(&z, inputs, [dq.as_mut_slice(), dk.as_mut_slice(), dv.as_mut_slice()], dmask);
        Ok(())
    })
}

/// With weights `p`: `dv = p' dout`, `dmask = p (dout v' - delta)`, `ds = dmask scale`, `dq = ds k`, `dk = ds' q`.
fn backward_of<T: Real>(z: &Sizes, inputs: &[View<'_>], [dq, dk, dv]: [&mut [T]; 3], mut dmask: Option<&mut [T]>) {
    let [q, k, v, delta, lse, dout] = [0, 1, 2, 3, 4, 5].map(|i| inputs[i].as_slice::<T>());
    let mask = Mask::of(inputs.get(6));
    let mut block = vec![T::ZERO; ROWS * z.t];
    let mut back = vec![T::ZERO; ROWS * z.t];
    let scale = T::of(z.scale);
    dk.fill(T::ZERO);
    dv.fill(T::ZERO);
    if let Some(d) = &mut dmask {
        d.fill(T::ZERO);
    }
    for (head, key_head, rows) in z.blocks() {
        let keys = z.keys_of(&rows);
        let (m, n) = (rows.len(), keys.len());
        let at = head * z.s + rows.start;
        let dq = &mut dq[at * z.d..][..m * z.d];
        if n == 0 {
            dq.fill(T::ZERO);
            continue;
        }
        let (weights, back) = (&mut block[..m * n], &mut back[..m * n]);
        scores(z, head, &rows, &keys, q, &k[key_head * z.t * z.d..], &mask, weights);
        let key_at = key_head * z.t + keys.start;
        let (delta, dout, lse) = (&delta[at..][..m], &dout[at * z.e..][..m * z.e], &lse[at..][..m]);
        for (w, lse) in weights.chunks_exact_mut(n).zip(lse) {
            if *lse == T::NEG_INFINITY {
                w.fill(T::ZERO);
            } else {
                w.iter_mut().for_each(|w| *w = (*w - *lse).fast_exp());
            }
        }
        multiply([n, z.e, m], (&mut dv[key_at * z.e..], [z.e, 1]), true, (weights, [1, n]), (dout, [z.e, 1]));
        multiply([m, n, z.e], (back, [n, 1]), false, (dout, [z.e, 1]), (&v[key_at * z.e..], [1, z.e]));
        for ((i, delta), (w, back)) in rows.zip(delta).zip(weights.chunks_exact(n).zip(back.chunks_exact_mut(n))) {
            for (w, b) in w.iter().zip(&mut *back) {
                *b = *w * (*b - *delta);
            }
            if let Some(d) = &mut dmask {
                let at = mask.at([head / z.h, head % z.h, i, keys.start]);
                for (j, b) in back.iter().enumerate() {
                    d[at + j * mask.by[3]] += *b;
                }
            }
            back.iter_mut().for_each(|b| *b *= scale);
        }
        multiply([m, z.d, n], (dq, [z.d, 1]), false, (back, [n, 1]), (&k[key_at * z.d..], [z.d, 1]));
        multiply([n, z.d, m], (&mut dk[key_at * z.d..], [z.d, 1]), true, (back, [1, n]), (&q[at * z.d..], [z.d, 1]));
    }
}
