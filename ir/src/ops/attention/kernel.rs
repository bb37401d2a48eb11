//! Attention in blocks of query rows: scores of a block and all visible keys are held at a time, never all of them.

use std::ops::Range;

use crate::dtype::DType;
use crate::op::{KernelError, Op};
use crate::ops::real::{Real, by_float};

use super::{Attention, Layout};
use crate::tensor::{View, ViewMut};

/// Query rows per block.
pub(super) const ROWS: usize = 32;

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
    uniform: bool,
    layout: Layout,
}

/// Where the rows of one head lie in q, k, v or out.
#[derive(Clone, Copy)]
struct Rows {
    start: usize,
    /// From a row to the next.
    by: usize,
}

impl Rows {
    fn at(self, row: usize) -> usize {
        self.start + row * self.by
    }
}

impl Sizes {
    fn of(op: &Op, q: &View<'_>, k: &View<'_>, v: &View<'_>) -> Sizes {
        let settings = Attention::of(op);
        let layout = settings.layout;
        let ([b, h, s, d], [_, hk, t, _]) = (layout.sizes(q.dims()), layout.sizes(k.dims()));
        Sizes {
            b,
            h,
            hk,
            s,
            t,
            d,
            e: v.dims()[3],
            causal: settings.causal,
            first: q.origin[layout.dims()[2]] as i64 + settings.offset as i64,
            window: settings.window as i64,
            scale: settings.scale,
            uniform: settings.uniform,
            layout,
        }
    }
    /// The rows of a head (counted over the batch) of a tensor with `heads` heads, `length` rows of `size`.
    fn rows(&self, head: usize, heads: usize, length: usize, size: usize) -> Rows {
        match self.layout {
            Layout::Bhsd => Rows { start: head * length * size, by: size },
            Layout::Bshd => {
                let (batch, head) = (head / heads, head % heads);
                Rows { start: (batch * length * heads + head) * size, by: heads * size }
            }
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
        let (at, by) = (self.at(place), self.by[3]);
        if let Some(bias) = self.bias {
            each(scores, &bias[at..], by, |s, bias| s + bias);
        }
        if let Some(visible) = self.visible {
            each(scores, &visible[at..], by, |s, visible| if visible == 0 { T::NEG_INFINITY } else { s });
        }
    }
}

/// Every score with its element of a mask. No branch: where keys are hidden is not to be guessed.
fn each<T: Copy, M: Copy>(scores: &mut [T], mask: &[M], by: usize, f: impl Fn(T, M) -> T) {
    match by {
        1 => scores.iter_mut().zip(mask).for_each(|(s, m)| *s = f(*s, *m)),
        _ => scores.iter_mut().enumerate().for_each(|(j, s)| *s = f(*s, mask[j * by])),
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
    (q, q_rows): (&[T], Rows),
    (k, k_rows): (&[T], Rows),
    mask: &Mask<'_, T>,
    scores: &mut [T],
) {
    let n = keys.len();
    let (q, k) = (&q[q_rows.at(rows.start)..], &k[k_rows.at(keys.start)..]);
    multiply([rows.len(), n, z.d], (scores, [n, 1]), false, (q, [q_rows.by, 1]), (k, [1, k_rows.by]));
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

/// Whether a row of scores has no key that is seen. A score that is NaN is seen, and spoils the row.
fn is_blind<T: Real>(scores: &[T]) -> bool {
    scores.iter().all(|s| *s == T::NEG_INFINITY)
}

/// What a query that sees no key gives.
fn mean<T: Real>(z: &Sizes, v: &[T], v_rows: Rows, out: &mut [T]) {
    out.fill(T::ZERO);
    if z.uniform {
        for j in 0..z.t {
            out.iter_mut().zip(&v[v_rows.at(j)..]).for_each(|(o, v)| *o += *v);
        }
        let share = T::of(1.0 / z.t as f64);
        out.iter_mut().for_each(|o| *o *= share);
    }
}

fn forward_of<T: Real>(z: &Sizes, inputs: &[View<'_>], out: &mut [T], lse: &mut [T]) {
    let [q, k, v] = [0, 1, 2].map(|i| inputs[i].as_slice::<T>());
    let mask = Mask::of(inputs.get(3));
    let mut block = vec![T::ZERO; ROWS * z.t];
    for (head, key_head, rows) in z.blocks() {
        let keys = z.keys_of(&rows);
        let n = keys.len();
        let [k_rows, v_rows] = [z.d, z.e].map(|size| z.rows(key_head, z.hk, z.t, size));
        let out_rows = z.rows(head, z.h, z.s, z.e);
        let lse = &mut lse[head * z.s + rows.start..][..rows.len()];
        let mut blind = vec![true; rows.len()];
        if n > 0 {
            let weights = &mut block[..rows.len() * n];
            let q_rows = z.rows(head, z.h, z.s, z.d);
            scores(z, head, &rows, &keys, (q, q_rows), (k, k_rows), &mask, weights);
            for ((w, lse), blind) in weights.chunks_exact_mut(n).zip(&mut *lse).zip(&mut blind) {
                let max = T::largest(w);
                *blind = max == T::NEG_INFINITY && is_blind(w);
                if *blind {
                    w.fill(T::ZERO);
                    continue;
                }
                w.iter_mut().for_each(|w| *w = (*w - max).fast_exp());
                let sum = T::sum(w);
                let inverse = T::ONE / sum;
                w.iter_mut().for_each(|w| *w *= inverse);
                *lse = max + T::of(sum.f64().ln());
            }
            let (out, v) = (&mut out[out_rows.at(rows.start)..], &v[v_rows.at(keys.start)..]);
            multiply([rows.len(), z.e, n], (out, [out_rows.by, 1]), false, (weights, [n, 1]), (v, [v_rows.by, 1]));
        }
        for ((i, lse), _) in rows.zip(lse).zip(blind).filter(|(_, blind)| *blind) {
            *lse = if z.uniform { T::of((z.t as f64).ln()) } else { T::NEG_INFINITY };
            mean(z, v, v_rows, &mut out[out_rows.at(i)..][..z.e]);
        }
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
    for gradient in [&mut *dq, &mut *dk, &mut *dv].into_iter().chain(dmask.as_deref_mut()) {
        gradient.fill(T::ZERO);
    }
    for (head, key_head, rows) in z.blocks() {
        let at = head * z.s;
        let [q_rows, out_rows] = [z.d, z.e].map(|size| z.rows(head, z.h, z.s, size));
        let [k_rows, v_rows] = [z.d, z.e].map(|size| z.rows(key_head, z.hk, z.t, size));
        let keys = z.keys_of(&rows);
        let (m, n) = (rows.len(), keys.len());
        let (weights, back) = (&mut block[..m * n], &mut back[..m * n]);
        if n > 0 {
            scores(z, head, &rows, &keys, (q, q_rows), (k, k_rows), &mask, weights);
        }
        for (r, i) in rows.clone().enumerate() {
            let w = &mut weights[r * n..][..n];
            if n > 0 && !is_blind(w) {
                w.iter_mut().for_each(|w| *w = (*w - lse[at + i]).fast_exp());
                continue;
            }
            w.fill(T::ZERO);
            if z.uniform {
                let share = T::of(1.0 / z.t as f64);
                for j in 0..z.t {
                    let dv = dv[v_rows.at(j)..].iter_mut();
                    dv.zip(&dout[out_rows.at(i)..][..z.e]).for_each(|(dv, d)| *dv += *d * share);
                }
            }
        }
        if n == 0 {
            continue;
        }
        let dout = (&dout[out_rows.at(rows.start)..], [out_rows.by, 1]);
        let turned = (&*weights, [1, n]);
        multiply([n, z.e, m], (&mut dv[v_rows.at(keys.start)..], [v_rows.by, 1]), true, turned, dout);
        multiply([m, n, z.e], (back, [n, 1]), false, dout, (&v[v_rows.at(keys.start)..], [1, v_rows.by]));
        for (i, (w, back)) in rows.clone().zip(weights.chunks_exact(n).zip(back.chunks_exact_mut(n))) {
            let delta = delta[at + i];
            for (w, b) in w.iter().zip(&mut *back) {
                *b = *w * (*b - delta);
            }
            if let Some(d) = &mut dmask {
                let at = mask.at([head / z.h, head % z.h, i, keys.start]);
                for (j, b) in back.iter().enumerate() {
                    d[at + j * mask.by[3]] += *b;
                }
            }
            back.iter_mut().for_each(|b| *b *= scale);
        }
        let (from_k, from_q) =
            ((&k[k_rows.at(keys.start)..], [k_rows.by, 1]), (&q[q_rows.at(rows.start)..], [q_rows.by, 1]));
        multiply([m, z.d, n], (&mut dq[q_rows.at(rows.start)..], [q_rows.by, 1]), false, (back, [n, 1]), from_k);
        multiply([n, z.d, m], (&mut dk[k_rows.at(keys.start)..], [k_rows.by, 1]), true, (back, [1, n]), from_q);
    }
}

#[cfg(test)]
mod tests {
    use crate::op::Work;
    use crate::ops::attention::{ATTENTION, Attention};
    use crate::tensor::{Tensor, Type};

    #[test]
    fn a_row_of_nan_is_no_row_that_sees_nothing() {
        let op = Attention { scale: 1.0, uniform: true, ..Attention::default() }.op(&ATTENTION);
        let (q, k) = (Tensor::f32([1, 1, 1, 1], &[f32::NAN]), Tensor::f32([1, 1, 2, 1], &[1.0, 2.0]));
        let types = op.infer(&[q.ty().clone(), k.ty().clone(), k.ty().clone()]).unwrap();
        let out = crate::interp::apply(&op, &[&q, &k, &k], &types).unwrap();
        assert!(out.iter().all(|t| t.as_slice::<f32>()[0].is_nan()));
    }

    /// Work counts the pairs of query and key that are seen, whatever hides the others.
    #[test]
    fn work_counts_what_is_seen() {
        let flops = |s: usize, t: usize, a: Attention| {
            let op = a.op(&ATTENTION);
            let [q, k] = [s, t].map(|n| Type::new(crate::DType::F32, [1, 1, n, 1]));
            let types = [q, k.clone(), k];
            let Work { flops, .. } = op.work(&types, &op.infer(&types).unwrap());
            flops / 4.0
        };
        for (s, t, offset, window) in [(8, 8, 0, 0), (8, 8, 0, 3), (4, 12, 8, 0), (4, 12, 8, 10), (1, 9, 8, 0)] {
            let seen = (0..s).map(|i: usize| {
                let end = (i + offset + 1).min(t);
                if window > 0 { end.min(window) } else { end }
            });
            let causal = Attention { scale: 1.0, causal: true, offset, window, ..Attention::default() };
            assert_eq!(flops(s, t, causal), seen.sum::<usize>() as f64, "{s} of {t}, {offset}, {window}");
        }
        assert_eq!(flops(4, 6, Attention { scale: 1.0, ..Attention::default() }), 24.0);
    }
}
