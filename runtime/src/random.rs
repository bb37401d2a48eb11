//! Random numbers, and random weights: what stands in for parameters when their files are absent.
//!
//! An element is a function of (seed, name, its index in the unsharded initializer) alone, so every sharding sees the same
//! values. Matrices and whatever has more dims are normal with deviation [`DEVIATION`]; vectors and scalars (scales,
//! biases, variances) are 1 plus that; integers and truth values are 0.

use autoshard_ir::{DType, Tensor, Type};
use std::ops::Range;

/// Standard deviation of the elements.
pub const DEVIATION: f64 = 0.02;

/// Mixes 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// SplitMix64: a stream of numbers.
pub struct Stream(pub u64);

impl Stream {
    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }
    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The increment of SplitMix64: the golden ratio's fraction of 2^64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The key of a name under a seed: FNV-1a, mixed.
fn key(seed: u64, name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    mix(hash ^ mix(seed.wrapping_add(GOLDEN)))
}

/// A standard normal number for element `index`, by Box and Muller's transformation.
fn normal(key: u64, index: u64) -> f64 {
    let bits = |i: u64| mix(key.wrapping_add(i.wrapping_mul(GOLDEN)));
    let unit = |b: u64| ((b >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let (u, v) = (unit(bits(2 * index)), unit(bits(2 * index + 1)));
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// The elements of a box of the initializer of that name and type, as a dense tensor of element type `dtype`.
pub fn elements(seed: u64, name: &str, initializer: &Type, region: &[Range<usize>], dtype: DType) -> Tensor {
    let dims: Vec<usize> = region.iter().map(|r| r.end - r.start).collect();
    let mut out = Tensor::zeros(Type::new(dtype, dims.clone()));
    if !initializer.dtype.is_float() {
        return out;
    }
    let key = key(seed, name);
    let mean = if initializer.rank() < 2 { 1.0 } else { 0.0 };
    let flat = |i: usize| {
        let (mut rest, mut at, mut stride) = (i, 0, 1);
        for d in (0..dims.len()).rev() {
            at += (region[d].start + rest % dims[d]) * stride;
            rest /= dims[d];
            stride *= initializer.dims[d];
        }
        at as u64
    };
    let n = out.ty().numel();
    autoshard_ir::convert::from_f64(dtype, (0..n).map(|i| mean + DEVIATION * normal(key, flat(i))), out.bytes_mut());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_holds_the_elements_of_the_whole() {
        let ty = Type::new(DType::F32, [4, 6]);
        let whole = elements(7, "w", &ty, &[0..4, 0..6], DType::F32);
        let part = elements(7, "w", &ty, &[1..3, 2..5], DType::F32);
        for (i, x) in part.as_slice::<f32>().iter().enumerate() {
            assert_eq!(*x, whole.as_slice::<f32>()[(1 + i / 3) * 6 + 2 + i % 3]);
        }
        assert_ne!(whole, elements(8, "w", &ty, &[0..4, 0..6], DType::F32));
        assert_ne!(whole, elements(7, "v", &ty, &[0..4, 0..6], DType::F32));
    }

    #[test]
    fn moments_are_as_said() {
        for (dims, mean) in [(vec![200, 300], 0.0), (vec![60_000], 1.0)] {
            let region: Vec<_> = dims.iter().map(|d| 0..*d).collect();
            let t = elements(1, "w", &Type::new(DType::F32, dims), &region, DType::F64);
            let x = t.as_slice::<f64>();
            let n = x.len() as f64;
            let m = x.iter().sum::<f64>() / n;
            let s = (x.iter().map(|x| (x - m).powi(2)).sum::<f64>() / n).sqrt();
            assert!((m - mean).abs() < 4.0 * DEVIATION / n.sqrt(), "mean {m}");
            assert!((s / DEVIATION - 1.0).abs() < 0.02, "deviation {s}");
        }
    }
}
