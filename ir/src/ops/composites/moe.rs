//! `MoE` of ONNX Runtime: a mixture of experts behind a router, as products by experts.
//!
//! Operands: `x[rows.., h]` (one or two dims of rows), router logits `[all rows, experts]`, and per expert the matrices
//! `fc1[experts, f, h]`, `fc2[experts, h, f]` and optionally `fc3[experts, f, h]`, each with an optional bias. A row takes
//! the `k` experts of the largest `softmax(logits)`, weighted by it, and where `normalize_routing_weights` is set by its share in
//! their sum. An expert gives `fc2(act(fc1 x))`, with `fc3` `fc2(act(fc1 x) * fc3 x)`.
//!
//! `swiglu` has a gate `g` and a linear part `l`: `g * sigmoid(alpha g) * (l + beta)`, clamped before to `g <= limit` and
//! `|l| <= limit` where a limit is given. `swiglu_fusion` says where they are: 0, in `fc1` and `fc3`; 1, in turns in the rows of `fc1`; 2, one behind
//! the other in them. (Source: the operator's schema in ONNX Runtime 1.32. Where logits tie it takes the last experts, this the first.)
//!
//! Rows keep their dims, so that batch and sequence can be split; a bias is looked up by expert, as an embedding is by token.

use super::super::experts::expert_mat_mul;
use super::super::real::stat_dtype;
use crate::graph::ValueId;
use crate::onnx::import::ImportCx;
use crate::op::OpError;

/// What happens between the products of an expert.
enum Activation {
    Relu,
    Gelu,
    Silu,
    Identity,
    SwiGlu(SwiGlu),
}

/// Settings of `swiglu`.
struct SwiGlu {
    parts: Parts,
    alpha: f64,
    beta: f64,
    limit: Option<f64>,
}

/// Where gate and linear part of `swiglu` are.
enum Parts {
    Separate,
    InTurns,
    Halves,
}

/// The import rule.
pub(super) fn import(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let activation = activation(cx)?;
    let (x, rows) = (cx.input(0)?, rows(cx)?);
    let (weights, expert) = route(cx, &rows)?;
    let k = cx.b.dims(expert)[rows.len()];
    // Each row once per expert that it is routed to.
    let h = cx.b.dims(x)[rows.len()];
    let once = cx.b.reshape(x, &[&rows[..], &[1, h]].concat())?;
    let routed = cx.b.expand(once, &[&rows[..], &[k, h]].concat())?;
    let first = product(cx, routed, expert, 2)?;
    let third = cx.try_input(6).map(|_| product(cx, routed, expert, 6)).transpose()?;
    let inner = activate(cx, &activation, first, third)?;
    let y = product(cx, inner, expert, 4)?;
    let letters = ["t", "bs"][rows.len() - 1];
    Ok(vec![cx.b.einsum(&format!("{letters}kh,{letters}k->{letters}h"), y, weights)?])
}

fn activation(cx: &ImportCx<'_>) -> Result<Activation, OpError> {
    // Exporters state all attributes, whatever the activation.
    let (alpha, beta) = (cx.attr_float("activation_alpha", 1.0), cx.attr_float("activation_beta", 0.0));
    let (limit, fusion) = (cx.try_attr_float("swiglu_limit"), cx.attr_int("swiglu_fusion", 0));
    for (name, what) in [
        ("use_sparse_mixer", "routing by sparse mixer"),
        ("swiglu_limit_after_activation", "clamping behind the activation"),
    ] {
        if cx.attr_int(name, 0) != 0 {
            return Err(OpError(format!("{what} ({name} = 1) is not supported; export without it")));
        }
    }
    if cx.try_input(7).is_some() && cx.try_input(6).is_none() {
        return Err(OpError("operand 7, the bias of fc3, needs operand 6, the matrices of fc3".into()));
    }
    let found = match cx.attr_str("activation_type").unwrap_or("relu") {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "silu" => Activation::Silu,
        "identity" => Activation::Identity,
        "swiglu" => {
            let parts = match fusion {
                0 => Parts::Separate,
                1 => Parts::InTurns,
                2 => Parts::Halves,
                other => return Err(OpError(format!("swiglu_fusion = {other} is none of 0, 1, 2"))),
            };
            if matches!(parts, Parts::Separate) != cx.try_input(6).is_some() {
                return Err(OpError(format!(
                    "swiglu takes its linear part from fc3 where swiglu_fusion = 0, else from fc1: swiglu_fusion = {fusion}, and fc3 is {}",
                    if cx.try_input(6).is_some() { "given" } else { "missing" }
                )));
            }
            Activation::SwiGlu(SwiGlu { parts, alpha: alpha.into(), beta: beta.into(), limit: limit.map(f64::from) })
        }
        other => {
            return Err(OpError(format!(
                "activation_type `{other}` is none of relu, gelu, silu, swiglu, identity; export with one of them"
            )));
        }
    };
    Ok(found)
}

/// The dims of `x` before its last.
fn rows(cx: &ImportCx<'_>) -> Result<Vec<usize>, OpError> {
    let (x, logits) = (cx.b.ty(cx.input(0)?), cx.b.ty(cx.input(1)?));
    if !matches!(x.rank(), 2 | 3) {
        return Err(OpError(format!("x is {x}, but needs 2 dims [rows, hidden] or 3 [batch, sequence, hidden]")));
    }
    let rows = x.dims[..x.rank() - 1].to_vec();
    if logits.rank() != 2 || logits.dims[0] != rows.iter().product::<usize>() {
        return Err(OpError(format!(
            "router logits are {logits}, but need 2 dims [rows, experts] with the rows of x, {x}"
        )));
    }
    Ok(rows)
}

/// Weights and indices, both `[rows.., k]`, of the experts of each row.
fn route(cx: &mut ImportCx<'_>, rows: &[usize]) -> Result<(ValueId, ValueId), OpError> {
    let logits = cx.input(1)?;
    let (experts, k) = (cx.b.dims(logits)[1], cx.attr_int("k", 1));
    if !(1..=experts as i64).contains(&k) {
        return Err(OpError(format!("k = {k} experts per row of {experts}; k must be from 1 to {experts}")));
    }
    // Shares of many experts are small: in f32 at least, as ONNX Runtime has them.
    let dtype = cx.b.ty(logits).dtype;
    let logits = cx.b.cast(logits, stat_dtype(dtype))?;
    let logits = cx.b.reshape(logits, &[rows, &[experts]].concat())?;
    let axis = rows.len();
    let shares = cx.b.softmax(logits, axis)?;
    let (mut weights, expert) = cx.b.top_k(shares, axis, k, true)?;
    if cx.attr_int("normalize_routing_weights", 0) != 0 {
        let sum = cx.b.reduce_sum(weights, &[axis], true)?;
        weights = cx.b.div(weights, sum)?;
    }
    Ok((cx.b.cast(weights, dtype)?, expert))
}

/// Routed rows times the matrices that operand `at` is, and the bias behind it.
fn product(cx: &mut ImportCx<'_>, x: ValueId, expert: ValueId, at: usize) -> Result<ValueId, OpError> {
    let w = cx.input(at)?;
    let y = cx.b.emit1(expert_mat_mul(false), &[x, w, expert])?;
    let Some(bias) = cx.try_input(at + 1) else { return Ok(y) };
    let (dims, of) = (cx.b.dims(w), cx.b.ty(bias));
    if of.dims != dims[..2] {
        return Err(OpError(format!(
            "operand {} is {of}, but the bias of {} has dims {:?}",
            at + 1,
            cx.b.ty(w),
            &dims[..2]
        )));
    }
    let bias = cx.b.gather(bias, expert, 0)?;
    cx.b.add(y, bias)
}

fn activate(
    cx: &mut ImportCx<'_>,
    activation: &Activation,
    first: ValueId,
    third: Option<ValueId>,
) -> Result<ValueId, OpError> {
    let y = match activation {
        Activation::SwiGlu(s) => return swiglu(cx, s, first, third),
        Activation::Relu => cx.b.relu(first)?,
        // ONNX Runtime's experts have the tanh approximation.
        Activation::Gelu => cx.b.gelu(first, true)?,
        Activation::Silu => cx.b.silu(first)?,
        Activation::Identity => first,
    };
    third.map_or(Ok(y), |third| cx.b.mul(y, third))
}

fn swiglu(cx: &mut ImportCx<'_>, s: &SwiGlu, first: ValueId, third: Option<ValueId>) -> Result<ValueId, OpError> {
    let (mut gate, mut linear) = match third {
        Some(third) => (first, third),
        None => halves(cx, first, matches!(s.parts, Parts::InTurns))?,
    };
    if let Some(limit) = s.limit {
        let (most, least) = (cx.b.scalar_like(gate, limit)?, cx.b.scalar_like(gate, -limit)?);
        gate = cx.b.min(gate, most)?;
        linear = cx.b.min(linear, most)?;
        linear = cx.b.max(linear, least)?;
    }
    let swish = if s.alpha == 1.0 {
        cx.b.silu(gate)?
    } else {
        let alpha = cx.b.scalar_like(gate, s.alpha)?;
        let scaled = cx.b.mul(gate, alpha)?;
        let open = cx.b.sigmoid(scaled)?;
        cx.b.mul(gate, open)?
    };
    if s.beta != 0.0 {
        let beta = cx.b.scalar_like(linear, s.beta)?;
        linear = cx.b.add(linear, beta)?;
    }
    cx.b.mul(swish, linear)
}

/// Gate and linear part of what has both in its last dim, in turns or one behind the other.
fn halves(cx: &mut ImportCx<'_>, both: ValueId, in_turns: bool) -> Result<(ValueId, ValueId), OpError> {
    let mut dims = cx.b.dims(both);
    let last = dims.len() - 1;
    if dims[last] % 2 != 0 {
        return Err(OpError(format!(
            "fc1 has {} rows per expert, which are no pairs of gate and linear part",
            dims[last]
        )));
    }
    dims[last] /= 2;
    let size = dims[last];
    if !in_turns {
        return Ok((cx.b.slice(both, last, 0, size)?, cx.b.slice(both, last, size, 2 * size)?));
    }
    let pairs = cx.b.reshape(both, &[&dims[..], &[2]].concat())?;
    let mut part = |i: usize| {
        let one = cx.b.slice(pairs, last + 1, i, i + 1)?;
        cx.b.reshape(one, &dims)
    };
    Ok((part(0)?, part(1)?))
}
