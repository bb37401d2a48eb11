//! ONNX's Attention, in its 3-D and 4-D layouts, with a key-value cache.

use super::Attention;
use crate::graph::ValueId;
use crate::onnx::import::ImportCx;
use crate::op::OpError;

pub(super) fn attention(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    if cx.attr_float("softcap", 0.0) != 0.0 {
        return Err(OpError("softcap is not supported; export with attention decomposed (opset 22 or below)".into()));
    }
    if cx.outputs.get(3) == Some(&true) {
        return Err(OpError("output qk_matmul_output is not supported; export without naming it".into()));
    }
    if cx.try_input(6).is_some() {
        return Err(OpError("operand nonpad_kv_seqlen is not supported; pass a mask instead".into()));
    }
    let flat = cx.b.ty(cx.input(0)?).rank() == 3;
    let heads = |name: &str| -> Result<usize, OpError> {
        usize::try_from(cx.attr_int(name, 0))
            .ok()
            .filter(|&h| h > 0)
            .ok_or_else(|| OpError(format!("{name} is needed for operands of 3 dims")))
    };
    let (q, mut k, mut v) = if flat {
        let (h, hk) = (heads("q_num_heads")?, heads("kv_num_heads")?);
        (by_head(cx, 0, h)?, by_head(cx, 1, hk)?, by_head(cx, 2, hk)?)
    } else {
        (cx.input(0)?, cx.input(1)?, cx.input(2)?)
    };
    let mut offset = 0;
    match (cx.try_input(4), cx.try_input(5)) {
        (Some(past_k), Some(past_v)) => {
            offset = *cx.b.dims(past_k).get(2).ok_or_else(|| OpError("past_key needs 4 dims".into()))?;
            k = cx.b.concat(&[past_k, k], 2)?;
            v = cx.b.concat(&[past_v, v], 2)?;
        }
        (None, None) => {}
        _ => return Err(OpError("past_key and past_value must both be given".into())),
    }
    let mask = match cx.try_input(3) {
        Some(mask) => {
            let mut dims = cx.b.dims(mask);
            while dims.len() < 4 {
                dims.insert(0, 1);
            }
            Some(cx.b.reshape(mask, &dims)?)
        }
        None => None,
    };
    let size = cx.b.dims(q).get(3).copied().unwrap_or(1).max(1);
    let scale = cx.try_attr_float("scale").map_or(1.0 / (size as f64).sqrt(), f64::from);
    let settings = Attention { scale, causal: cx.attr_int("is_causal", 0) != 0, offset, ..Attention::default() };
    let (mut out, _) = cx.b.attention(&settings, [q, k, v], mask)?;
    if flat {
        out = cx.b.transpose(out, &[0, 2, 1, 3])?;
        let d = cx.b.dims(out);
        out = cx.b.reshape(out, &[d[0], d[1], d[2] * d[3]])?;
    }
    Ok(vec![out, k, v])
}

/// `[b, s, h * d]` as `[b, h, s, d]`.
fn by_head(cx: &mut ImportCx<'_>, operand: usize, heads: usize) -> Result<ValueId, OpError> {
    let x = cx.input(operand)?;
    let d = cx.b.dims(x);
    if d.len() != 3 || d[2] % heads != 0 {
        return Err(OpError(format!("operand {operand}, {}, is not [batch, sequence, {heads} heads]", cx.b.ty(x))));
    }
    let x = cx.b.reshape(x, &[d[0], d[1], heads, d[2] / heads])?;
    cx.b.transpose(x, &[0, 2, 1, 3])
}
