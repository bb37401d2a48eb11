//! The stated rule by which tensors whose gradient is pure rounding noise are exempt from comparisons.
//!
//! Some parameters have a gradient of exactly zero in real arithmetic: an attention's key bias shifts all scores of a row
//! alike, which softmax ignores. In floating point what remains is rounding noise, which differs between any two ways
//! to compute it, and which Adam turns into full steps because it divides by the gradient's own size.

/// A gradient tensor is noise when its root mean square is below this part of the largest one's among all parameters.
/// Rounding errors of f32 are 6e-8 of the summands; sums of hundreds of terms lose about a digit more. A gradient that
/// small, were it real, would be known to no digit. In the recorded models noise is at 1e-9, the smallest real gradient
/// at 1e-3.
pub const NOISE: f64 = 1e-6;

/// Root mean square of a tensor's elements, of any type.
pub fn rms(t: &crate::tensor::Tensor) -> f64 {
    let xs = crate::convert::to_f64(t.dtype(), t.bytes());
    let n = xs.len().max(1) as f64;
    (xs.iter().map(|x| x * x).sum::<f64>() / n).sqrt()
}

/// Whether a gradient of that [root mean square](rms) is pure rounding noise, where `largest` is the largest root mean
/// square among the gradients of all parameters of the model. Used by every comparison of parameters and gradients.
pub fn is_noise(rms: f64, largest: f64) -> bool {
    rms <= NOISE * largest
}
