//! Combining elements of several ranks, in rank order: what makes reductions deterministic.
//!
//! Half floats are combined in f32 and rounded once. `LogSumExp` is computed in f64. NaN wins in `Max` and `Min`.
//! Integers wrap. For truth values `Sum` and `Max` are "or", `Min` is "and".

use autoshard_ir::DType;
use autoshard_ir::factor::ReduceKind;
use half::{bf16, f16};

/// Elements combined at a time: all inputs of a block are read before its result is written, so that the result may lie
/// where one of the inputs does.
const BLOCK: usize = 512;

/// An element type, and the type that it is combined in.
trait Element: Copy {
    type Wide: Copy;
    const ZERO: Self::Wide;
    fn widen(self) -> Self::Wide;
    fn narrow(w: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// For floats.
    fn to_f64(w: Self::Wide) -> Option<f64>;
    fn from_f64(x: f64) -> Self;
}

macro_rules! float {
    ($t:ty, $w:ty, $widen:expr, $narrow:expr, $from:expr) => {
        impl Element for $t {
            type Wide = $w;
            const ZERO: $w = 0.0;
            fn widen(self) -> $w {
                $widen(self)
            }
            fn narrow(w: $w) -> Self {
                $narrow(w)
            }
            fn add(a: $w, b: $w) -> $w {
                a + b
            }
            fn max(a: $w, b: $w) -> $w {
                if b > a || b.is_nan() { b } else { a }
            }
            fn min(a: $w, b: $w) -> $w {
                if b < a || b.is_nan() { b } else { a }
            }
            fn to_f64(w: $w) -> Option<f64> {
                Some(w.into())
            }
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
        }
    };
}
float!(f64, f64, |x| x, |x| x, |x| x);
float!(f32, f32, |x| x, |x| x, |x| x as f32);
float!(f16, f32, f16::to_f32, f16::from_f32, f16::from_f64);
float!(bf16, f32, bf16::to_f32, bf16::from_f32, bf16::from_f64);

macro_rules! integer {
    ($t:ty) => {
        impl Element for $t {
            type Wide = $t;
            const ZERO: $t = 0;
            fn widen(self) -> $t {
                self
            }
            fn narrow(w: $t) -> Self {
                w
            }
            fn add(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            fn max(a: $t, b: $t) -> $t {
                a.max(b)
            }
            fn min(a: $t, b: $t) -> $t {
                a.min(b)
            }
            fn to_f64(_: $t) -> Option<f64> {
                None
            }
            fn from_f64(x: f64) -> Self {
                x as $t
            }
        }
    };
}
integer!(i64);
integer!(i32);
integer!(i8);
integer!(u8);

/// A truth value: one byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Truth(u8);

impl Element for Truth {
    type Wide = u8;
    const ZERO: u8 = 0;
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }
    fn narrow(w: u8) -> Self {
        Truth(w)
    }
    fn add(a: u8, b: u8) -> u8 {
        a | b
    }
    fn max(a: u8, b: u8) -> u8 {
        a | b
    }
    fn min(a: u8, b: u8) -> u8 {
        a & b
    }
    fn to_f64(_: u8) -> Option<f64> {
        None
    }
    fn from_f64(x: f64) -> Self {
        Truth(u8::from(x != 0.0))
    }
}

/// True when elements of that type can be combined so: `LogSumExp` needs floats.
pub fn supports(dtype: DType, kind: ReduceKind) -> bool {
    kind != ReduceKind::LogSumExp || dtype.is_float()
}

/// Combines `bytes` bytes of each input, in order, into `output`. There must be at least one input.
///
/// # Safety
/// All addresses are valid for `bytes` bytes, aligned to the element type, and free of data races. `output` is equal to
/// an input or disjoint from all.
pub unsafe fn combine(dtype: DType, kind: ReduceKind, inputs: &[*const u8], output: *mut u8, bytes: usize) {
    let n = bytes / dtype.size();
    // SAFETY: as promised by the caller.
    unsafe {
        match dtype {
            DType::F64 => typed::<f64>(kind, inputs, output, n),
            DType::F32 => typed::<f32>(kind, inputs, output, n),
            DType::F16 => typed::<f16>(kind, inputs, output, n),
            DType::Bf16 => typed::<bf16>(kind, inputs, output, n),
            DType::I64 => typed::<i64>(kind, inputs, output, n),
            DType::I32 => typed::<i32>(kind, inputs, output, n),
            DType::I8 => typed::<i8>(kind, inputs, output, n),
            DType::U8 => typed::<u8>(kind, inputs, output, n),
            DType::Bool => typed::<Truth>(kind, inputs, output, n),
        }
    }
}

/// # Safety
/// See [`combine`].
unsafe fn typed<T: Element>(kind: ReduceKind, inputs: &[*const u8], output: *mut u8, n: usize) {
    let fold = match kind {
        ReduceKind::Sum => T::add,
        ReduceKind::Max => T::max,
        ReduceKind::Min => T::min,
        // SAFETY: as promised by the caller.
        ReduceKind::LogSumExp => return unsafe { log_sum_exp::<T>(inputs, output, n) },
    };
    let mut acc = [T::ZERO; BLOCK];
    let mut start = 0;
    while start < n {
        let len = BLOCK.min(n - start);
        for (i, input) in inputs.iter().enumerate() {
            // SAFETY: valid for `n` elements; nothing writes them while the slice lives, for the result is written later.
            let x = unsafe { std::slice::from_raw_parts(input.cast::<T>().add(start), len) };
            let acc = &mut acc[..len];
            if i == 0 {
                acc.iter_mut().zip(x).for_each(|(a, x)| *a = x.widen());
            } else {
                acc.iter_mut().zip(x).for_each(|(a, x)| *a = fold(*a, x.widen()));
            }
        }
        // SAFETY: valid for `n` elements; no slice of the inputs lives.
        let out = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>().add(start), len) };
        out.iter_mut().zip(&acc).for_each(|(o, a)| *o = T::narrow(*a));
        start += len;
    }
}

/// # Safety
/// See [`combine`].
unsafe fn log_sum_exp<T: Element>(inputs: &[*const u8], output: *mut u8, n: usize) {
    for i in 0..n {
        // SAFETY: valid for `n` elements.
        let x = |input: &*const u8| T::to_f64(unsafe { input.cast::<T>().add(i).read() }.widen()).unwrap_or(0.0);
        let max = inputs.iter().map(x).fold(f64::NEG_INFINITY, |a, b| if b > a || b.is_nan() { b } else { a });
        let y = if max.is_infinite() { max } else { max + inputs.iter().map(|p| (x(p) - max).exp()).sum::<f64>().ln() };
        // SAFETY: valid for `n` elements.
        unsafe { output.cast::<T>().add(i).write(T::from_f64(y)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autoshard_ir::Tensor;

    fn run(kind: ReduceKind, inputs: &[Tensor]) -> Tensor {
        let mut out = Tensor::zeros(inputs[0].ty().clone());
        let addresses: Vec<*const u8> = inputs.iter().map(|t| t.bytes().as_ptr()).collect();
        let n = out.bytes().len();
        // SAFETY: whole tensors of one type.
        unsafe { combine(out.dtype(), kind, &addresses, out.bytes_mut().as_mut_ptr(), n) };
        out
    }

    #[test]
    fn log_sum_exp_of_empty_parts_is_minus_infinity() {
        let inf = f32::NEG_INFINITY;
        let got =
            run(ReduceKind::LogSumExp, &[Tensor::f32([3], &[inf, inf, 100.0]), Tensor::f32([3], &[inf, 1.0, 100.0])]);
        assert_eq!(got.as_slice::<f32>(), [inf, 1.0, 100.0 + std::f32::consts::LN_2]);
    }

    #[test]
    fn nan_is_not_lost() {
        for kind in [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min, ReduceKind::LogSumExp] {
            for at in 0..2 {
                let mut parts = [Tensor::f32([1], &[1.0]), Tensor::f32([1], &[2.0])];
                parts[at] = Tensor::f32([1], &[f32::NAN]);
                assert!(run(kind, &parts).as_slice::<f32>()[0].is_nan(), "{kind:?} {at}");
            }
        }
    }

    #[test]
    fn half_floats_round_once() {
        // In bf16 256 + 1 is 256, so rounding at every step would lose both ones.
        let part = |x: f32| Tensor::from_slice(DType::Bf16, [1], &[bf16::from_f32(x)]);
        let got = run(ReduceKind::Sum, &[part(256.0), part(1.0), part(1.0)]);
        assert_eq!(got.as_slice::<bf16>()[0].to_f32(), 258.0);
    }

    #[test]
    fn truth_and_integers() {
        let t = |x: &[u8]| Tensor::from_slice(DType::Bool, [4], x);
        let parts = [t(&[0, 0, 1, 1]), t(&[0, 1, 0, 1])];
        assert_eq!(run(ReduceKind::Sum, &parts).bytes(), [0, 1, 1, 1]);
        assert_eq!(run(ReduceKind::Min, &parts).bytes(), [0, 0, 0, 1]);
        let i = |x: i64| Tensor::i64([1], &[x]);
        assert_eq!(run(ReduceKind::Sum, &[i(i64::MAX), i(1)]).as_slice::<i64>(), [i64::MIN]);
        assert_eq!(run(ReduceKind::Max, &[i(-5), i(-7)]).as_slice::<i64>(), [-5]);
    }
}
