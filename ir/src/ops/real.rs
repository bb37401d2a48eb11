//! Float kernels written once for f32 and f64, and small helpers shared by kernels.
//!
//! Kernels take element types by [`Real`]; [`by_float!`] picks the instance for an element type. Half floats never arrive:
//! [`crate::op::Op::run`] widens them.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::dtype::DType;
use crate::op::OpError;
use crate::tensor::Type;

/// f32 or f64.
pub(crate) trait Real:
    bytemuck::Pod
    + PartialOrd
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    /// `e^x` in a form that vectorises.
    fn fast_exp(self) -> Self;
    /// Hyperbolic tangent in a form that vectorises.
    fn fast_tanh(self) -> Self;
    /// The error function in a form that vectorises.
    fn erf(self) -> Self;
    fn sqrt(self) -> Self;
    fn max(self, other: Self) -> Self;
    /// Sum of many, in independent lanes that vectorise.
    fn sum(xs: &[Self]) -> Self {
        lanes(xs, Self::ZERO, |a, b| a + b)
    }
    /// Largest of many; -inf of none.
    fn largest(xs: &[Self]) -> Self {
        lanes(xs, Self::NEG_INFINITY, Self::max)
    }
    /// `c (+)= a b` for `[m, n, k]`; strides are (row, column).
    ///
    /// # Safety
    /// All elements addressed must lie in live allocations, those of `c` borrowed for writing.
    #[allow(clippy::too_many_arguments)]
    unsafe fn gemm(
        size: [usize; 3],
        c: *mut Self,
        c_by: [usize; 2],
        add: bool,
        a: *const Self,
        a_by: [usize; 2],
        b: *const Self,
        b_by: [usize; 2],
    );
}

macro_rules! real {
    ($t:ty, $exp:path, $tanh:path, $erf:path) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = <$t>::NEG_INFINITY;
            #[inline(always)]
            fn of(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn fast_exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn fast_tanh(self) -> Self {
                $tanh(self)
            }
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if other > self { other } else { self }
            }
            unsafe fn gemm(
                [m, n, k]: [usize; 3],
                c: *mut Self,
                c_by: [usize; 2],
                add: bool,
                a: *const Self,
                a_by: [usize; 2],
                b: *const Self,
                b_by: [usize; 2],
            ) {
                let ([cr, cc], [ar, ac], [br, bc]) = (c_by, a_by, b_by);
                let i = |x: usize| x as isize;
                // SAFETY: the caller's promise.
                unsafe {
                    gemm::gemm(
                        m,
                        n,
                        k,
                        c,
                        i(cc),
                        i(cr),
                        add,
                        a,
                        i(ac),
                        i(ar),
                        b,
                        i(bc),
                        i(br),
                        1.0,
                        1.0,
                        false,
                        false,
                        false,
                        gemm::Parallelism::None,
                    );
                }
            }
        }
    };
}
real!(f32, exp_f32, tanh_f32, erf_f32);
real!(f64, f64::exp, f64::tanh, libm::erf);

#[inline(always)]
fn lanes<T: Copy>(xs: &[T], first: T, f: impl Fn(T, T) -> T) -> T {
    const LANES: usize = 16;
    let mut lanes = [first; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(first, |a, &b| f(a, b));
    for c in chunks {
        for (lane, &x) in lanes.iter_mut().zip(c) {
            *lane = f(*lane, x);
        }
    }
    lanes.into_iter().fold(rest, f)
}

/// `exp` to about 1 ulp, by Cody-Waite reduction and the polynomial of Cephes' `expf`, in a form that vectorises. Below
/// -87.3 it is 0.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer.
    // No lower: a result that is not normal costs a hundred times one that is, though it is not taken.
    let c = x.clamp(-87.3, 89.0);
    let n = (c * std::f32::consts::LOG2_E + MAGIC) - MAGIC;
    let r = (c - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let y = p * r * r + r + 1.0;
    // n is in [-127, 128]: two halves keep both powers of two normal.
    let half = (n * 0.5 + MAGIC) - MAGIC;
    let power = |n: f32| f32::from_bits((((n + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32 + 127) << 23) as u32);
    let y = y * power(half) * power(n - half);
    if x < -87.3 { 0.0 } else { y }
}

/// Horner's rule, the highest power first.
#[inline(always)]
fn polynomial<const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    coefficients.into_iter().fold(0.0, |y, c| y * x + c)
}

/// `tanh` to 4e-7 relative, the rational minimax approximation of Eigen and XLA (odd of degree 13 over even of degree 6).
#[inline(always)]
fn tanh_f32(x: f32) -> f32 {
    let c = x.clamp(-7.905_311, 7.905_311);
    let s = c * c;
    let p = polynomial(
        s,
        [-2.760_768_5e-16, 2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619e-4, 4.893_524_6e-3],
    );
    c * p / polynomial(s, [1.198_258_4e-6, 1.185_347e-4, 2.268_434_6e-3, 4.893_525e-3])
}

/// `erf` to 5e-7 relative, the rational minimax approximation of Eigen and XLA.
#[inline(always)]
fn erf_f32(x: f32) -> f32 {
    let c = x.clamp(-4.0, 4.0);
    let s = c * c;
    let p = polynomial(
        s,
        [
            -2.726_142_3e-10,
            2.770_681_4e-8,
            -2.101_024e-6,
            -5.692_506_5e-5,
            -7.349_906_3e-4,
            -2.954_599_8e-3,
            -1.609_603_3e-2,
        ],
    );
    let y = c * p / polynomial(s, [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329_2e-3, -1.426_473_9e-2]);
    // Beyond, f32 has no digit between it and 1: what is missing would be multiplied by x in GELU.
    if x.abs() >= 4.0 { 1f32.copysign(x) } else { y }
}

/// Runs a kernel that is generic over [`Real`] for an element type.
macro_rules! by_float {
    ($op:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::dtype::DType::F64 => {
                type $t = f64;
                $body
            }
            other => Err($crate::ops::support::no_kernel($op, other)),
        }
    };
}
pub(crate) use by_float;

/// The element type of statistics (normalisers, means) of values of that type: at least f32.
pub(crate) fn stat_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Checks the number of operands.
pub(crate) fn expect_operands(op: &str, inputs: &[Type], counts: &[usize]) -> Result<(), OpError> {
    if counts.contains(&inputs.len()) {
        return Ok(());
    }
    let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
    Err(OpError(format!("{op} takes {} operands, not {}", counts.join(" or "), inputs.len())))
}

/// Checks that an operand has float elements.
pub(crate) fn expect_float(op: &str, what: &str, ty: &Type) -> Result<(), OpError> {
    if ty.dtype.is_float() {
        return Ok(());
    }
    Err(OpError(format!("{op} works on float elements, but {what} is {ty}; cast it first")))
}

/// Checks that an operand has integer elements fit for indices.
pub(crate) fn expect_index(op: &str, what: &str, ty: &Type) -> Result<(), OpError> {
    if matches!(ty.dtype, DType::I64 | DType::I32) {
        return Ok(());
    }
    Err(OpError(format!("{op} takes {what} of type i64 or i32, not {ty}")))
}

/// Sum of products, in independent lanes that vectorise.
#[inline]
pub(crate) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    const LANES: usize = 16;
    let mut lanes = [T::ZERO; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let mut rest = T::ZERO;
    for (a, b) in xs.remainder().iter().zip(ys.remainder()) {
        rest += *a * *b;
    }
    for (a, b) in xs.zip(ys) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    lanes.into_iter().fold(rest, |s, l| s + l)
}

/// Row-major strides.
pub(crate) fn strides(dims: &[usize]) -> Vec<usize> {
    let mut s = vec![1; dims.len()];
    for d in (1..dims.len()).rev() {
        s[d - 1] = s[d] * dims[d];
    }
    s
}

/// Sizes before, at and after a dim: a tensor seen as `[outer, size, inner]`.
pub(crate) fn around(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product())
}
