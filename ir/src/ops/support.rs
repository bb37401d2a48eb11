//! What operator files share: operand checks, factor rules built factor by factor, loops over strided operands.
//!
//! Invariant: [`Loops`] visits elements in row-major order of the shape it was made for.
//!
//! Read next: [`super::unary`], the simplest operators.

use crate::dtype::DType;
use crate::factor::{Factor, FactorId, FactorRule, ReduceKind};
use crate::op::{KernelError, Op, OpError, Work};
use crate::tensor::{Type, View, ViewMut};

/// Names of factors that stand for the dim of that index.
pub(crate) const DIM_NAMES: [&str; 8] = ["d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"];

/// The name of a factor that stands for dim `d`; dims beyond the last name share one.
pub(crate) fn dim_name(d: usize) -> &'static str {
    DIM_NAMES.get(d).copied().unwrap_or("d8+")
}

/// Exactly `N` operands, or an error.
pub(crate) fn operands<const N: usize>(inputs: &[Type]) -> Result<&[Type; N], OpError> {
    inputs.try_into().map_err(|_| OpError(format!("takes {N} operands, not {}", inputs.len())))
}

/// A dim attribute, checked against a rank.
pub(crate) fn dim_attr(op: &Op, name: &str, rank: usize) -> Result<usize, OpError> {
    let d = op.get_int(name);
    usize::try_from(d)
        .ok()
        .filter(|&d| d < rank)
        .ok_or_else(|| OpError(format!("`{name}` is {d}, but the operand has {rank} dims")))
}

/// A list attribute of sizes or dims as non-negative integers.
pub(crate) fn usizes(op: &Op, name: &str) -> Result<Vec<usize>, OpError> {
    let one = |&x: &i64| usize::try_from(x).map_err(|_| OpError(format!("`{name}` holds {x}, which is negative")));
    op.get_ints(name).iter().map(one).collect()
}

/// The sizes that numpy broadcasting gives.
pub(crate) fn broadcast_dims(a: &[usize], b: &[usize]) -> Result<Vec<usize>, OpError> {
    let rank = a.len().max(b.len());
    let at = |x: &[usize], d: usize| if d + x.len() >= rank { x[d + x.len() - rank] } else { 1 };
    (0..rank)
        .map(|d| match (at(a, d), at(b, d)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(OpError(format!("sizes {a:?} and {b:?} do not broadcast"))),
        })
        .collect()
}

/// Work of an operator that copies its result out of operands, reading no more than it writes.
pub(crate) fn copy_work(_: &Op, _: &[Type], outputs: &[Type]) -> Work {
    let bytes: usize = outputs.iter().map(Type::bytes).sum();
    Work { bytes: 2.0 * bytes as f64, ..Work::memory(&[], &[], 0.0) }
}

/// No operator is a no-op by default.
pub(crate) fn never(_: &Op, _: &[Type], _: &Type) -> Option<usize> {
    None
}

/// Builds a factor rule factor by factor.
pub(crate) struct RuleMaker<'a> {
    rule: FactorRule,
    inputs: &'a [Type],
    outputs: &'a [Type],
}

impl<'a> RuleMaker<'a> {
    /// A rule without factors.
    pub fn new(inputs: &'a [Type], outputs: &'a [Type]) -> RuleMaker<'a> {
        RuleMaker { rule: FactorRule::replicate(inputs, outputs), inputs, outputs }
    }
    /// Adds a factor of a size that drives these (operand, dim) and (result, dim). Left out when of size 0 or 1, since
    /// it cannot be split.
    pub fn factor(&mut self, name: &'static str, size: usize, ins: &[(usize, usize)], outs: &[(usize, usize)]) {
        if size <= 1 {
            return;
        }
        debug_assert!(ins.iter().all(|&(i, d)| self.inputs[i].dims[d].is_multiple_of(size)), "{name}");
        debug_assert!(outs.iter().all(|&(i, d)| self.outputs[i].dims[d].is_multiple_of(size)), "{name}");
        let id = FactorId(self.rule.factors.len() as u8);
        self.rule.factors.push(Factor { name, size });
        for &(i, d) in ins {
            self.rule.inputs[i][d] = Some(id);
        }
        for &(i, d) in outs {
            self.rule.outputs[i][d] = Some(id);
        }
    }
    /// The rule; results that lack a factor combine by `reduce`.
    pub fn finish(self, reduce: ReduceKind) -> FactorRule {
        self.finish_each(|_| Some(reduce))
    }
    /// The rule; a result that lacks a factor combines as `reduce` says for it.
    pub fn finish_each(mut self, reduce: impl Fn(usize) -> Option<ReduceKind>) -> FactorRule {
        let n = self.rule.factors.len();
        for (o, (dims, combine)) in self.rule.outputs.iter().zip(&mut self.rule.combine).enumerate() {
            let lacks = (0..n).any(|i| !dims.contains(&Some(FactorId(i as u8))));
            *combine = if lacks { reduce(o) } else { None };
        }
        self.rule
    }
}

/// Row-major strides, in elements.
pub(crate) fn strides(dims: &[usize]) -> Vec<isize> {
    let mut s = vec![1; dims.len()];
    for d in (1..dims.len()).rev() {
        s[d - 1] = s[d] * dims[d] as isize;
    }
    s
}

/// Strides of an operand of sizes `dims` broadcast to sizes `to`: 0 along broadcast dims.
pub(crate) fn broadcast_strides(dims: &[usize], to: &[usize]) -> Vec<isize> {
    let own = strides(dims);
    let lead = to.len() - dims.len();
    (0..to.len()).map(|d| if d < lead || dims[d - lead] == 1 { 0 } else { own[d - lead] }).collect()
}

/// Nested loops over a shape with `N` strided operands. Dims that advance together are merged, so that the innermost
/// loop (a *row*) is as long as possible.
pub(crate) struct Loops<const N: usize> {
    outer: Vec<(usize, [isize; N])>,
    /// Length of a row.
    pub row: usize,
    /// Strides of the operands along a row.
    pub step: [isize; N],
    empty: bool,
}

impl<const N: usize> Loops<N> {
    /// Loops over `dims`, operand `i` advancing by `strides[i][d]` elements along dim `d`.
    pub fn new(dims: &[usize], strides: [&[isize]; N]) -> Loops<N> {
        let mut merged: Vec<(usize, [isize; N])> = Vec::with_capacity(dims.len());
        for (d, &n) in dims.iter().enumerate() {
            if n == 1 {
                continue;
            }
            let step: [isize; N] = std::array::from_fn(|i| strides[i][d]);
            match merged.last_mut() {
                Some((m, outer)) if (0..N).all(|i| outer[i] == step[i] * n as isize) => {
                    *m *= n;
                    *outer = step;
                }
                _ => merged.push((n, step)),
            }
        }
        let (row, step) = merged.pop().unwrap_or((1, [1; N]));
        Loops { outer: merged, row, step, empty: dims.contains(&0) }
    }
    /// Calls `f` per row, with each operand's offset of its first element.
    pub fn rows(&self, mut f: impl FnMut([usize; N])) {
        if self.empty {
            return;
        }
        let mut index = vec![0usize; self.outer.len()];
        let mut at = [0isize; N];
        loop {
            f(at.map(|x| x as usize));
            let mut d = self.outer.len();
            loop {
                if d == 0 {
                    return;
                }
                d -= 1;
                let (n, step) = &self.outer[d];
                index[d] += 1;
                for i in 0..N {
                    at[i] += step[i];
                }
                if index[d] < *n {
                    break;
                }
                for i in 0..N {
                    at[i] -= step[i] * *n as isize;
                }
                index[d] = 0;
            }
        }
    }
}

/// Copies elements of any type from a strided source (`offset` elements in) to a strided region of a destination. Sizes
/// and strides are in elements of `width` bytes.
pub(crate) struct StridedCopy<'a> {
    /// Bytes of an element.
    pub width: usize,
    /// Sizes of the region.
    pub dims: &'a [usize],
    /// Offset and strides of the source.
    pub from: (usize, &'a [isize]),
    /// Offset and strides of the destination.
    pub to: (usize, &'a [isize]),
}

impl StridedCopy<'_> {
    /// Copies.
    pub fn run(&self, src: &[u8], dst: &mut [u8]) {
        match self.width {
            1 => self.typed::<u8>(src, dst),
            2 => self.typed::<u16>(src, dst),
            4 => self.typed::<u32>(src, dst),
            _ => self.typed::<u64>(src, dst),
        }
    }
    fn typed<T: bytemuck::Pod>(&self, src: &[u8], dst: &mut [u8]) {
        let (src, dst): (&[T], &mut [T]) = (bytemuck::cast_slice(src), bytemuck::cast_slice_mut(dst));
        let loops = Loops::new(self.dims, [self.from.1, self.to.1]);
        let (n, [sf, st]) = (loops.row, loops.step);
        loops.rows(|[f, t]| {
            let (f, t) = (f + self.from.0, t + self.to.0);
            match (sf, st) {
                (1, 1) => dst[t..t + n].copy_from_slice(&src[f..f + n]),
                (0, 1) => dst[t..t + n].fill(src[f]),
                _ => {
                    for i in 0..n as isize {
                        dst[(t as isize + i * st) as usize] = src[(f as isize + i * sf) as usize];
                    }
                }
            }
        });
    }
}

/// The element type is not one this kernel knows.
pub(crate) fn no_kernel(op: &Op, dtype: DType) -> KernelError {
    KernelError(format!("{} has no kernel for elements of type {dtype}", op.name()))
}

/// `out[i] = f(x[i])`.
pub(crate) fn map1<A: bytemuck::Pod, O: bytemuck::Pod>(x: &View<'_>, out: &mut ViewMut<'_>, f: impl Fn(A) -> O) {
    for (o, &x) in out.as_mut_slice::<O>().iter_mut().zip(x.as_slice::<A>()) {
        *o = f(x);
    }
}

/// `out[i] = f(a[i], b[i])`, operands broadcast to the result's sizes.
pub(crate) fn map2<A: bytemuck::Pod, B: bytemuck::Pod, O: bytemuck::Pod>(
    a: &View<'_>,
    b: &View<'_>,
    out: &mut ViewMut<'_>,
    f: impl Fn(A, B) -> O,
) {
    let dims = out.ty.dims.clone();
    let (sa, sb) = (broadcast_strides(a.dims(), &dims), broadcast_strides(b.dims(), &dims));
    let loops = Loops::new(&dims, [&sa, &sb, &strides(&dims)]);
    let (n, [ia, ib, _]) = (loops.row, loops.step);
    let (a, b, out) = (a.as_slice::<A>(), b.as_slice::<B>(), out.as_mut_slice::<O>());
    loops.rows(|[ra, rb, ro]| {
        let out = &mut out[ro..ro + n];
        // A row's strides are 0 or 1, since results are contiguous.
        match (ia, ib) {
            (1, 1) => {
                for ((o, &x), &y) in out.iter_mut().zip(&a[ra..ra + n]).zip(&b[rb..rb + n]) {
                    *o = f(x, y);
                }
            }
            (1, 0) => {
                let y = b[rb];
                for (o, &x) in out.iter_mut().zip(&a[ra..ra + n]) {
                    *o = f(x, y);
                }
            }
            (0, 1) => {
                let x = a[ra];
                for (o, &y) in out.iter_mut().zip(&b[rb..rb + n]) {
                    *o = f(x, y);
                }
            }
            _ => {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = f(a[ra + i * ia as usize], b[rb + i * ib as usize]);
                }
            }
        }
    });
}
