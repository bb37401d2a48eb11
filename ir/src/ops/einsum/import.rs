//! MatMul, Gemm and Einsum of ONNX as contractions of two tensors.

use super::Equation;
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::OpError;

pub(super) const RULES: &[OnnxRule] = &[
    OnnxRule { domain: "", op: "MatMul", since: 1, lower: matmul },
    OnnxRule { domain: "", op: "Gemm", since: 1, lower: gemm },
    OnnxRule { domain: "", op: "Einsum", since: 12, lower: einsum },
    OnnxRule { domain: "com.microsoft", op: "FusedMatMul", since: 1, lower: fused_matmul },
];

fn matmul(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, y) = (cx.input(0)?, cx.input(1)?);
    Ok(vec![product(cx, x, y, false, false)?])
}

fn fused_matmul(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, y) = (cx.input(0)?, cx.input(1)?);
    if cx.attr_int("transBatchA", 0) != 0 || cx.attr_int("transBatchB", 0) != 0 {
        return Err(OpError(
            "transBatchA and transBatchB are not supported; export without ONNX Runtime fusions".into(),
        ));
    }
    let z = product(cx, x, y, cx.attr_int("transA", 0) != 0, cx.attr_int("transB", 0) != 0)?;
    Ok(vec![scale(cx, z, cx.attr_float("alpha", 1.0))?])
}

/// numpy's matmul, with the last two dims of an operand optionally swapped.
fn product(
    cx: &mut ImportCx<'_>,
    mut x: ValueId,
    mut y: ValueId,
    trans_x: bool,
    trans_y: bool,
) -> Result<ValueId, OpError> {
    let (xd, yd) = (cx.b.dims(x), cx.b.dims(y));
    if xd.is_empty() || yd.is_empty() {
        return Err(OpError(format!("MatMul of a scalar: operands are {} and {}", cx.b.ty(x), cx.b.ty(y))));
    }
    // Batch letters, from the last batch dim outwards.
    const BATCH: &[u8] = b"hbacdefgijlmopqruvwxyz";
    let (xb, yb) = (xd.len().saturating_sub(2), yd.len().saturating_sub(2));
    let batch = xb.max(yb);
    if batch > BATCH.len() {
        return Err(OpError(format!("MatMul of {} dims; at most {} are supported", batch + 2, BATCH.len() + 2)));
    }
    // One batch dim is `b`; of two, the inner is `h`.
    let letter = |from_end: usize| if batch == 1 { b'b' } else { BATCH[from_end] };
    let (mut tx, mut ty, mut tz) = (Vec::new(), Vec::new(), Vec::new());
    let (mut keep_x, mut keep_y) = (Vec::new(), Vec::new());
    for from_end in (0..batch).rev() {
        let l = letter(from_end);
        let size = |dims: &[usize], b: usize| (from_end < b).then(|| dims[b - 1 - from_end]);
        let (sx, sy) = (size(&xd, xb), size(&yd, yb));
        // A dim of size 1 against a larger one is reshaped away.
        let use_x = sx.is_some_and(|s| s != 1 || sy.is_none_or(|o| o == 1));
        let use_y = sy.is_some_and(|s| s != 1 || sx.is_none_or(|o| o == 1));
        if use_x {
            tx.push(l);
            keep_x.extend(sx);
        }
        if use_y {
            ty.push(l);
            keep_y.extend(sy);
        }
        tz.push(l);
    }
    for (v, dims, b, keep) in [(&mut x, &xd, xb, &mut keep_x), (&mut y, &yd, yb, &mut keep_y)] {
        if keep.len() != b {
            keep.extend(&dims[b..]);
            *v = cx.b.reshape(*v, keep)?;
        }
    }
    if xd.len() == 1 {
        tx.push(b'k');
    } else {
        tx.extend(if trans_x { *b"ks" } else { *b"sk" });
        tz.push(b's');
    }
    if yd.len() == 1 {
        ty.push(b'k');
    } else {
        // `t` for the columns of a batched product, by which attention scores read `bhsk,bhkt->bhst`.
        let n = if yb == 0 { b'n' } else { b't' };
        ty.extend(if trans_y { [n, b'k'] } else { [b'k', n] });
        tz.push(n);
    }
    cx.b.einsum(&Equation { x: tx, y: ty, z: tz }.to_string(), x, y)
}

fn scale(cx: &mut ImportCx<'_>, v: ValueId, by: f32) -> Result<ValueId, OpError> {
    if by == 1.0 {
        return Ok(v);
    }
    let dtype = cx.b.ty(v).dtype;
    let by = cx.b.scalar(dtype, f64::from(by));
    cx.b.mul(v, by)
}

fn gemm(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    for (v, what) in [(a, "A"), (b, "B")] {
        if cx.b.ty(v).rank() != 2 {
            return Err(OpError(format!("Gemm needs 2 dims, but {what} is {}", cx.b.ty(v))));
        }
    }
    let tx = if cx.attr_int("transA", 0) != 0 { "ks" } else { "sk" };
    let ty = if cx.attr_int("transB", 0) != 0 { "nk" } else { "kn" };
    let z = cx.b.einsum(&format!("{tx},{ty}->sn"), a, b)?;
    let z = scale(cx, z, cx.attr_float("alpha", 1.0))?;
    let beta = cx.attr_float("beta", 1.0);
    match cx.try_input(2) {
        Some(c) if beta != 0.0 => {
            let c = scale(cx, c, beta)?;
            let sum = cx.b.add(z, c)?;
            if cx.b.dims(sum) != cx.b.dims(z) {
                return Err(OpError(format!("C, {}, does not broadcast to the product {}", cx.b.ty(c), cx.b.ty(z))));
            }
            Ok(vec![sum])
        }
        _ => Ok(vec![z]),
    }
}

/// Any number of operands, `...`, implicit results, broadcasting sizes of 1. Several operands contract from the left.
fn einsum(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let text: String = cx.attr_str("equation").unwrap_or_default().chars().filter(|c| !c.is_whitespace()).collect();
    let bad = |why: String| OpError(format!("equation `{text}` {why}"));
    let (ins, out) = match text.split_once("->") {
        Some((ins, out)) => (ins, Some(out)),
        None => (text.as_str(), None),
    };
    let terms: Vec<&str> = ins.split(',').collect();
    if terms.len() != cx.inputs.len() {
        return Err(bad(format!("has {} terms for {} operands", terms.len(), cx.inputs.len())));
    }
    // `...` stands for letters that the equation does not use, aligned at the last.
    let free: Vec<u8> = (b'A'..=b'Z').chain(b'a'..=b'z').filter(|&l| !text.as_bytes().contains(&l)).collect();
    let mut values = Vec::new();
    let mut letters = Vec::new();
    let mut dots: usize = 0;
    for (i, term) in terms.iter().enumerate() {
        let v = cx.input(i)?;
        let rank = cx.b.ty(v).rank();
        let named = term.replace("...", "").len();
        if rank < named || (rank > named && !term.contains("...")) {
            return Err(bad(format!("has {named} dims for operand {i}, which is {}", cx.b.ty(v))));
        }
        let more = rank - named;
        if more > free.len() {
            return Err(bad("stands for too many dims".into()));
        }
        dots = dots.max(more);
        let rest: String = free[..more].iter().rev().map(|&l| l as char).collect();
        letters.push(term.replace("...", &rest).into_bytes());
        values.push(v);
    }
    let rest: String = free[..dots].iter().rev().map(|&l| l as char).collect();
    let out: Vec<u8> = match out {
        Some(out) => out.replace("...", &rest).into_bytes(),
        None => {
            let mut once: Vec<u8> = letters.concat();
            once.sort_unstable();
            let all = once.clone();
            once.dedup();
            once.retain(|l| all.iter().filter(|a| *a == l).count() == 1 && !rest.as_bytes().contains(l));
            [rest.into_bytes(), once].concat()
        }
    };
    for t in letters.iter().chain([&out]) {
        if let Some(l) = t.iter().find(|l| !l.is_ascii_alphabetic()) {
            return Err(bad(format!("contains `{}`, which is no letter", *l as char)));
        }
        if let Some(l) = t.iter().find(|l| t.iter().filter(|m| m == l).count() > 1) {
            return Err(bad(format!("takes a diagonal (`{}` twice in one term), which is not supported", *l as char)));
        }
    }
    if let Some(l) = out.iter().find(|l| !letters.iter().any(|t| t.contains(l))) {
        return Err(bad(format!("has `{}` in the result only", *l as char)));
    }
    // Size 1 against a larger size of the same letter: reshaped away.
    let mut sizes = [1; 128];
    for (t, &v) in letters.iter().zip(&values) {
        for (&l, d) in t.iter().zip(cx.b.dims(v)) {
            sizes[l as usize] = sizes[l as usize].max(d);
        }
    }
    for (t, v) in letters.iter_mut().zip(&mut values) {
        let dims = cx.b.dims(*v);
        let keep: Vec<usize> = (0..t.len()).filter(|&d| dims[d] != 1 || sizes[t[d] as usize] == 1).collect();
        if keep.len() < t.len() {
            let to: Vec<usize> = keep.iter().map(|&d| dims[d]).collect();
            *v = cx.b.reshape(*v, &to)?;
            *t = keep.iter().map(|&d| t[d]).collect();
        }
    }
    let (mut t, mut v) = (letters[0].clone(), values[0]);
    for i in 1..values.len() {
        let later = |l: &u8| out.contains(l) || letters[i + 1..].iter().any(|t| t.contains(l));
        let z: Vec<u8> = if i + 1 == values.len() {
            out.clone()
        } else {
            let mut z: Vec<u8> = t.clone();
            z.extend(letters[i].iter().filter(|l| !t.contains(l)));
            z.retain(later);
            z
        };
        let e = Equation { x: t, y: letters[i].clone(), z: z.clone() };
        v = cx.b.einsum(&e.to_string(), v, values[i])?;
        t = z;
    }
    if values.len() == 1 {
        let gone: Vec<usize> = (0..t.len()).filter(|&d| !out.contains(&t[d])).collect();
        t.retain(|l| out.contains(l));
        v = cx.b.reduce_sum(v, &gone, false)?;
        let perm: Vec<usize> = out
            .iter()
            .map(|l| t.iter().position(|m| m == l).expect("letters of the result are in the operand"))
            .collect();
        v = cx.b.transpose(v, &perm)?;
    }
    Ok(vec![v])
}
