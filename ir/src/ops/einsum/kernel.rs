//! Contraction as matrix products inside loops.
//!
//! Letters of each role (`m`, `n`, `k`) are merged into one loop of a matrix product as far as the strides of both tensors
//! that have them allow; the letters left over, outermost first, become loops around it, like those of `batch`. Nothing is
//! copied: the matrix product takes any stride.

use super::{Equation, equation, sizes};
use crate::op::{KernelError, Op};
use crate::ops::real::{Real, by_float, strides};
use crate::tensor::{View, ViewMut};

pub(super) fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let e = equation(op).map_err(|e| KernelError(e.0))?;
    let [x, y] = inputs else { return Err(KernelError("Einsum takes 2 operands".into())) };
    let z = &mut outputs[0];
    by_float!(op, x.dtype(), T => {
        let dims = z.ty.dims.clone();
        contract::<T>(&e, (x.dims(), x.as_slice()), (y.dims(), y.as_slice()), (&dims, z.as_mut_slice()))
    })
}

/// A letter as a loop: its size and its strides in `x`, `y`, `z`.
#[derive(Clone, Copy)]
struct Loop {
    size: usize,
    by: [usize; 3],
}

/// Splits letters of one role into outer loops and one inner loop, the innermost letters merged as far as strides allow.
fn merge(letters: &[Loop]) -> (Vec<Loop>, Loop) {
    let mut inner = Loop { size: 1, by: [0; 3] };
    let letters: Vec<Loop> = letters.iter().copied().filter(|l| l.size != 1).collect();
    let mut rest = letters.len();
    while rest > 0 {
        let l = letters[rest - 1];
        if inner.size == 1 {
            inner = l;
        } else if (0..3).all(|t| l.by[t] == inner.by[t] * inner.size) {
            inner.size *= l.size;
        } else {
            break;
        }
        rest -= 1;
    }
    (letters[..rest].to_vec(), inner)
}

/// `z = contraction of x and y`, all row-major. Sizes must agree, as the shape rule holds.
pub(crate) fn contract<T: Real>(
    e: &Equation,
    (xd, x): (&[usize], &[T]),
    (yd, y): (&[usize], &[T]),
    (zd, z): (&[usize], &mut [T]),
) -> Result<(), KernelError> {
    let size = sizes(&[(&e.x, xd), (&e.y, yd), (&e.z, zd)]).map_err(|e| KernelError(e.0))?;
    if z.is_empty() {
        return Ok(());
    }
    if x.is_empty() || y.is_empty() {
        z.fill(T::ZERO);
        return Ok(());
    }
    let (xs, ys, zs) = (strides(xd), strides(yd), strides(zd));
    let as_loop = |&l: &u8| {
        let by = |term: &[u8], s: &[usize]| term.iter().position(|&t| t == l).map_or(0, |d| s[d]);
        Loop { size: size[l as usize], by: [by(&e.x, &xs), by(&e.y, &ys), by(&e.z, &zs)] }
    };
    let roles = e.roles();
    let loops = |letters: &[u8]| letters.iter().map(as_loop).collect::<Vec<_>>();
    let (m_outer, m) = merge(&loops(&roles.m));
    let (n_outer, n) = merge(&loops(&roles.n));
    let (k_outer, k) = merge(&loops(&roles.k));
    let mut outer = loops(&roles.batch);
    outer.extend(m_outer);
    outer.extend(n_outer);
    let terms: usize = k_outer.iter().map(|l| l.size).product();
    outer.extend(k_outer);
    outer.retain(|l| l.size != 1);
    let rounds: usize = outer.iter().map(|l| l.size).product();

    let mut index = vec![0; outer.len()];
    let mut at = [0usize; 3];
    for round in 0..rounds {
        // SAFETY: offsets and strides address elements of x, y and z only, since every index stays below its letter's size
        // and slices hold the product of their sizes; z is borrowed mutably and written by one product at a time.
        unsafe {
            T::gemm(
                [m.size, n.size, k.size],
                z.as_mut_ptr().add(at[2]),
                [m.by[2], n.by[2]],
                round % terms != 0,
                x.as_ptr().add(at[0]),
                [m.by[0], k.by[0]],
                y.as_ptr().add(at[1]),
                [k.by[1], n.by[1]],
            );
        }
        for d in (0..outer.len()).rev() {
            index[d] += 1;
            for (a, by) in at.iter_mut().zip(outer[d].by) {
                *a += by;
            }
            if index[d] < outer[d].size {
                break;
            }
            for (a, by) in at.iter_mut().zip(outer[d].by) {
                *a -= by * outer[d].size;
            }
            index[d] = 0;
        }
    }
    Ok(())
}
