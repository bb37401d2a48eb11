//! ONNX operators that lower to several canonical operators and belong to none of them.

mod moe;

use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::OpError;

use super::norm::inverse_root;
use super::reduce::in_stat_dtype;

/// Their import rules; looked up like those of the operator table.
pub static RULES: &[OnnxRule] = &[
    OnnxRule { domain: "", op: "BatchNormalization", since: 1, lower: batch_normalization },
    OnnxRule { domain: "", op: "GroupNormalization", since: 21, lower: group_normalization },
    OnnxRule { domain: "", op: "InstanceNormalization", since: 1, lower: instance_normalization },
    OnnxRule { domain: "", op: "OneHot", since: 9, lower: one_hot },
    OnnxRule { domain: "", op: "RotaryEmbedding", since: 23, lower: rotary_embedding },
    OnnxRule { domain: "com.microsoft", op: "MoE", since: 1, lower: moe::import },
    OnnxRule { domain: "com.microsoft", op: "SkipLayerNormalization", since: 1, lower: skip_layer_normalization },
    OnnxRule {
        domain: "com.microsoft",
        op: "SkipSimplifiedLayerNormalization",
        since: 1,
        lower: skip_simplified_layer_normalization,
    },
];

/// With fixed statistics: one multiplication and one addition per channel.
fn batch_normalization(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let training = match cx.opset {
        14.. => cx.attr_int("training_mode", 0) != 0,
        7..14 => cx.outputs.iter().skip(1).any(|&named| named),
        _ => cx.attr_int("is_test", 0) == 0,
    };
    if training {
        return Err(OpError(
            "batch statistics (training_mode = 1) are not yet supported; export the model in evaluation mode".into(),
        ));
    }
    let x = cx.input(0)?;
    let epsilon = f64::from(cx.attr_float("epsilon", 1e-5));
    let [scale, bias, mean, variance] = [cx.input(1)?, cx.input(2)?, cx.input(3)?, cx.input(4)?];
    let inverse = inverse_root(cx.b, variance, epsilon)?;
    let factor = cx.b.mul(scale, inverse)?;
    let shift = cx.b.mul(mean, factor)?;
    let shift = cx.b.sub(bias, shift)?;
    per_channel(cx, x, factor, shift)
}

/// `x * factor + shift` with one entry of each per channel (dim 1).
fn per_channel(cx: &mut ImportCx<'_>, x: ValueId, factor: ValueId, shift: ValueId) -> Result<Vec<ValueId>, OpError> {
    let rank = cx.b.ty(x).rank();
    let channels = cx.b.dims(x).get(1).copied().unwrap_or(1);
    let mut dims = vec![1; rank.saturating_sub(1)];
    if let Some(first) = dims.first_mut() {
        *first = channels;
    }
    let (factor, shift) = (cx.b.reshape(factor, &dims)?, cx.b.reshape(shift, &dims)?);
    let dtype = cx.b.ty(x).dtype;
    let (factor, shift) = (cx.b.cast(factor, dtype)?, cx.b.cast(shift, dtype)?);
    let y = cx.b.mul(x, factor)?;
    Ok(vec![cx.b.add(y, shift)?])
}

/// Each of `groups` groups of channels to mean 0 and variance 1, per sample.
fn normalize_groups(cx: &mut ImportCx<'_>, x: ValueId, groups: usize, epsilon: f64) -> Result<ValueId, OpError> {
    let dims = cx.b.dims(x);
    if dims.len() < 2 || groups == 0 || dims[1] % groups != 0 {
        return Err(OpError(format!("{groups} groups do not divide the channels of {}", cx.b.ty(x))));
    }
    let split: Vec<usize> = [&[dims[0], groups, dims[1] / groups], &dims[2..]].concat();
    let over: Vec<usize> = (2..split.len()).collect();
    in_stat_dtype(cx.b, x, |b, x| {
        let y = b.reshape(x, &split)?;
        let mean = b.reduce_mean(y, &over, true)?;
        let centred = b.sub(y, mean)?;
        let square = b.mul(centred, centred)?;
        let variance = b.reduce_mean(square, &over, true)?;
        let inverse = inverse_root(b, variance, epsilon)?;
        let y = b.mul(centred, inverse)?;
        b.reshape(y, &dims)
    })
}

fn group_normalization(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let groups = usize::try_from(cx.attr_int("num_groups", 0)).unwrap_or(0);
    let y = normalize_groups(cx, x, groups, f64::from(cx.attr_float("epsilon", 1e-5)))?;
    per_channel(cx, y, scale, bias)
}

fn instance_normalization(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let channels = cx.b.dims(x).get(1).copied().unwrap_or(0);
    let y = normalize_groups(cx, x, channels, f64::from(cx.attr_float("epsilon", 1e-5)))?;
    per_channel(cx, y, scale, bias)
}

/// `where(indices == iota, on, off)`; indices out of range select nothing, negative ones count from the end.
fn one_hot(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (indices, values) = (cx.input(0)?, cx.input(2)?);
    let depth = cx.constant(1)?;
    let depth = crate::convert::to_f64(depth.dtype(), depth.bytes()).first().copied().unwrap_or(0.0);
    if depth < 1.0 {
        return Err(OpError(format!("OneHot with depth {depth}; it must be at least 1")));
    }
    let depth = depth as usize;
    let dims = cx.b.dims(indices);
    let at = crate::onnx::import::axis(cx.attr_int("axis", -1), dims.len() + 1)?;
    let mut unsqueezed = dims;
    unsqueezed.insert(at, 1);
    let indices = cx.b.reshape(indices, &unsqueezed)?;
    let indices = cx.b.cast(indices, crate::DType::I64)?;
    let zero = cx.b.scalar(crate::DType::I64, 0.0);
    let count = cx.b.scalar(crate::DType::I64, depth as f64);
    let negative = cx.b.less(indices, zero)?;
    let wrapped = cx.b.add(indices, count)?;
    let indices = cx.b.where_(negative, wrapped, indices)?;
    let mut line = vec![1; unsqueezed.len()];
    line[at] = depth;
    let classes = cx.b.iota(&line, at)?;
    let hot = cx.b.equal(indices, classes)?;
    let off = cx.b.slice(values, 0, 0, 1)?;
    let on = cx.b.slice(values, 0, 1, 2)?;
    Ok(vec![cx.b.where_(hot, on, off)?])
}

/// Pairs of entries of each head turned by angles: `(a cos - b sin, a sin + b cos)`.
fn rotary_embedding(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let given = cx.b.dims(x);
    // As [batch, heads, sequence, size].
    let heads = usize::try_from(cx.attr_int("num_heads", 0)).unwrap_or(0);
    let x = match given.len() {
        4 => x,
        3 => {
            if heads == 0 || given[2] % heads != 0 {
                return Err(OpError(format!("num_heads = {heads} does not divide {}", cx.b.ty(x))));
            }
            let split = cx.b.reshape(x, &[given[0], given[1], heads, given[2] / heads])?;
            cx.b.transpose(split, &[0, 2, 1, 3])?
        }
        _ => return Err(OpError(format!("RotaryEmbedding of {}; it needs 3 or 4 dims", cx.b.ty(x)))),
    };
    let d = cx.b.dims(x);
    let turned = match usize::try_from(cx.attr_int("rotary_embedding_dim", 0)).unwrap_or(0) {
        0 => d[3],
        n => n,
    };
    let half = turned / 2;
    if turned % 2 != 0 || turned > d[3] {
        return Err(OpError(format!("rotary_embedding_dim = {turned} does not fit heads of size {}", d[3])));
    }
    let mut angles = [cx.input(1)?, cx.input(2)?];
    for v in &mut angles {
        if let Some(positions) = cx.try_input(3) {
            *v = cx.b.gather(*v, positions, 0)?;
        }
        let t = cx.b.dims(*v);
        if t.len() != 3 || t[2] != half {
            return Err(OpError(format!("cos or sin cache {} does not hold {half} angles per position", cx.b.ty(*v))));
        }
        *v = cx.b.reshape(*v, &[t[0], 1, t[1], half])?;
    }
    let rotated = cx.b.slice(x, 3, 0, turned)?;
    let interleaved = cx.attr_int("interleaved", 0) != 0;
    // Both entries of a pair have its angle.
    for v in &mut angles {
        let t = cx.b.dims(*v);
        let whole = [t[0], 1, t[2], turned];
        *v = if interleaved {
            let pairs = cx.b.reshape(*v, &[t[0], 1, t[2], half, 1])?;
            let pairs = cx.b.expand(pairs, &[t[0], 1, t[2], half, 2])?;
            cx.b.reshape(pairs, &whole)?
        } else {
            cx.b.concat(&[*v, *v], 3)?
        };
    }
    let mut y = cx.b.rotary_embedding(rotated, angles, interleaved)?;
    if turned < d[3] {
        let rest = cx.b.slice(x, 3, turned, d[3])?;
        y = cx.b.concat(&[y, rest], 3)?;
    }
    if given.len() == 3 {
        y = cx.b.transpose(y, &[0, 2, 1, 3])?;
        y = cx.b.reshape(y, &given)?;
    }
    Ok(vec![y])
}

/// LayerNorm of the sum of two tensors (and a bias), which is the fourth output.
fn skip_layer_normalization(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (sum, axis, epsilon) = skip_sum(cx, 4)?;
    let scale = cx.input(2)?;
    let y = cx.b.layer_norm(sum, scale, cx.try_input(3), axis, epsilon)?;
    Ok(vec![y, y, y, sum])
}

/// RmsNorm of the sum of two tensors (and a bias), which is the fourth output.
fn skip_simplified_layer_normalization(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (sum, axis, epsilon) = skip_sum(cx, 3)?;
    let scale = cx.input(2)?;
    let y = cx.b.rms_norm(sum, scale, axis, epsilon)?;
    Ok(vec![y, y, y, sum])
}

/// The sum that a skip norm normalises, with the bias that operand `bias` is; the axis and epsilon, whose default is
/// ONNX Runtime's `kDefaultSkipLayerNormEpsilon`.
fn skip_sum(cx: &mut ImportCx<'_>, bias: usize) -> Result<(ValueId, usize, f64), OpError> {
    if cx.outputs.iter().take(3).skip(1).any(|&named| named) {
        return Err(OpError("outputs mean and inv_std_var are not supported; export without naming them".into()));
    }
    let (x, skip) = (cx.input(0)?, cx.input(1)?);
    let mut sum = cx.b.add(x, skip)?;
    if let Some(bias) = cx.try_input(bias) {
        sum = cx.b.add(sum, bias)?;
    }
    let axis = cx.b.ty(sum).rank().saturating_sub(1);
    Ok((sum, axis, f64::from(cx.attr_float("epsilon", 1e-12))))
}
