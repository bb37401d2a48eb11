//! `Reshape`: the same elements in the same order, under other sizes.
//!
//! A split of an outer dim stays contiguous through a reshape only where it is the leading part of a group of dims with
//! equal products on both sides; there both sides share a factor of the size that divides both leading dims.
//!
//! Read next: [`super::transpose`].

use super::support::{RuleMaker, dim_name, operands, usizes};
use crate::builder::Builder;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::{Def, ValueId};
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, numel};

/// The same elements under other sizes.
pub static RESHAPE: OpDef = OpDef {
    name: "Reshape",
    doc: "The same elements, row-major, under other sizes.",
    attrs: &[("dims", AttrKind::Ints)],
    onnx: &[
        OnnxRule { domain: "", op: "Reshape", since: 5, lower: import_reshape },
        OnnxRule { domain: "", op: "Squeeze", since: 1, lower: import_squeeze },
        OnnxRule { domain: "", op: "Unsqueeze", since: 1, lower: import_unsqueeze },
        OnnxRule { domain: "", op: "Flatten", since: 1, lower: import_flatten },
        OnnxRule { domain: "", op: "Identity", since: 1, lower: |cx| Ok(vec![cx.input(0)?]) },
    ],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let dims = usizes(op, "dims")?;
        let wanted = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if wanted != Some(x.numel()) {
            return Err(OpError(format!("{x} has {} elements, which do not fill sizes {dims:?}", x.numel())));
        }
        Ok(vec![Type::new(x.dtype, dims)])
    },
    factors,
    work: |_, _, _| Work::FREE,
    identity: |_, inputs, out| (inputs[0].dims == out.dims).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        Ok(vec![Some(cx.b.reshape(dy, &dims)?)])
    }),
    kernel: |_, ins, outs| {
        outs[0].data.copy_from_slice(ins[0].data);
        Ok(())
    },
    samples: || {
        let of = |from: &[usize], to: &[usize]| Sample {
            op: Op::new(&RESHAPE).ints("dims", to.iter().map(|&d| d as i64)),
            inputs: vec![SampleInput::f32(from)],
        };
        vec![
            of(&[4, 6, 2], &[24, 2]),
            of(&[24, 2], &[4, 6, 2]),
            of(&[6, 4], &[4, 6]),
            of(&[4, 12], &[4, 2, 6]),
            of(&[4, 1, 6], &[4, 6, 1, 1]),
            of(&[2, 3, 4], &[6, 2, 2]),
            of(&[1], &[]),
            of(&[0, 4], &[2, 0]),
        ]
    },
};

fn factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let mut rule = RuleMaker::new(inputs, outputs);
    let (from, to) = (&inputs[0].dims, &outputs[0].dims);
    if numel(from) > 0 {
        for (i, j) in leading_pairs(from, to) {
            rule.factor(dim_name(i), gcd(from[i], to[j]), &[(0, i)], &[(0, j)]);
        }
    }
    rule.finish(ReduceKind::Sum).linear_in([0])
}

/// The leading dims of the smallest groups of dims with equal products, of sizes with equal products; dims of size 1
/// belong to no group.
fn leading_pairs(from: &[usize], to: &[usize]) -> Vec<(usize, usize)> {
    let real = |dims: &[usize]| -> Vec<usize> { (0..dims.len()).filter(|&d| dims[d] != 1).collect() };
    let (a, b) = (real(from), real(to));
    let (mut i, mut j) = (0, 0);
    let mut pairs = Vec::new();
    while i < a.len() && j < b.len() {
        pairs.push((a[i], b[j]));
        let (mut p, mut q) = (from[a[i]], to[b[j]]);
        while p != q {
            // Products of all dims are equal, so the smaller side has dims left.
            if p < q {
                i += 1;
                p *= from[a[i]];
            } else {
                j += 1;
                q *= to[b[j]];
            }
        }
        (i, j) = (i + 1, j + 1);
    }
    pairs
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Builder {
    /// The same elements under other sizes. A reshape of a reshape is one reshape.
    pub fn reshape(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, OpError> {
        let mut x = x;
        if let Def::Node(n, _) = self.graph().value(x).def {
            let node = self.graph().node(n);
            if std::ptr::eq(node.op.def, &RESHAPE) {
                x = node.inputs[0];
            }
        }
        self.emit1(Op::new(&RESHAPE).ints("dims", dims.iter().map(|&d| d as i64)), &[x])
    }
    /// With a dim of size 1 inserted at `dim` of the result.
    pub fn unsqueeze(&mut self, x: ValueId, dim: usize) -> Result<ValueId, OpError> {
        let mut dims = self.dims(x);
        dims.insert(dim.min(dims.len()), 1);
        self.reshape(x, &dims)
    }
}

fn import_reshape(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let (x, wanted) = (cx.input(0)?, cx.ints(1)?);
    let dims = resolve(&cx.b.dims(x), &wanted, cx.attr_int("allowzero", 0) != 0)?;
    Ok(vec![cx.b.reshape(x, &dims)?])
}

/// ONNX's target sizes made plain: 0 keeps the operand's size (unless `allow_zero`), -1 takes what is left.
pub(crate) fn resolve(from: &[usize], wanted: &[i64], allow_zero: bool) -> Result<Vec<usize>, OpError> {
    let mut dims = Vec::with_capacity(wanted.len());
    let mut free = None;
    for (d, &w) in wanted.iter().enumerate() {
        dims.push(match w {
            -1 if free.is_some() => return Err(OpError(format!("sizes {wanted:?} hold -1 twice"))),
            -1 => {
                free = Some(d);
                1
            }
            0 if !allow_zero => *from.get(d).ok_or_else(|| {
                OpError(format!("size 0 at {d} copies a dim, but the operand has {} dims", from.len()))
            })?,
            w => usize::try_from(w).map_err(|_| OpError(format!("sizes {wanted:?} hold {w}, which is negative")))?,
        });
    }
    if let Some(d) = free {
        let (all, known) = (numel(from), numel(&dims));
        if known == 0 || all % known != 0 {
            return Err(OpError(format!("{all} elements of sizes {from:?} do not fill sizes {wanted:?}")));
        }
        dims[d] = all / known;
    }
    Ok(dims)
}

/// Axes, an attribute up to opset 12 and an operand since.
fn axes_of(cx: &ImportCx<'_>) -> Result<Option<Vec<i64>>, OpError> {
    Ok(cx.try_ints(1)?.or_else(|| cx.attr_ints("axes").map(<[i64]>::to_vec)))
}

fn import_squeeze(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let dims = cx.b.dims(x);
    let drop: Vec<usize> = match axes_of(cx)? {
        Some(axes) => cx.axes(&axes, dims.len())?,
        None => (0..dims.len()).filter(|&d| dims[d] == 1).collect(),
    };
    if let Some(&d) = drop.iter().find(|&&d| dims[d] != 1) {
        return Err(OpError(format!("dim {d} of sizes {dims:?} is not 1 and cannot be squeezed")));
    }
    let kept: Vec<usize> = (0..dims.len()).filter(|d| !drop.contains(d)).map(|d| dims[d]).collect();
    Ok(vec![cx.b.reshape(x, &kept)?])
}

fn import_unsqueeze(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let axes = axes_of(cx)?.ok_or_else(|| OpError("axes are missing".into()))?;
    let mut dims = cx.b.dims(x);
    let mut at = cx.axes(&axes, dims.len() + axes.len())?;
    at.sort_unstable();
    if at.windows(2).any(|w| w[0] == w[1]) {
        return Err(OpError(format!("axes {axes:?} repeat")));
    }
    for d in at {
        // Within the result's rank, and those below are in place already.
        dims.insert(d, 1);
    }
    Ok(vec![cx.b.reshape(x, &dims)?])
}

fn import_flatten(cx: &mut ImportCx<'_>) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let dims = cx.b.dims(x);
    let at = cx.attr_int("axis", 1);
    let at = if at == dims.len() as i64 { dims.len() } else { axis(at, dims.len())? };
    Ok(vec![cx.b.reshape(x, &[numel(&dims[..at]), numel(&dims[at..])])?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_share_their_leading_dims() {
        assert_eq!(leading_pairs(&[4, 6, 2], &[24, 2]), [(0, 0), (2, 1)]);
        assert_eq!(leading_pairs(&[6, 4], &[4, 6]), [(0, 0)]);
        assert_eq!(leading_pairs(&[2, 1, 12], &[1, 2, 3, 4]), [(0, 1), (2, 2)]);
        assert_eq!(leading_pairs(&[], &[1, 1]), []);
    }

    #[test]
    fn onnx_sizes_resolve() {
        assert_eq!(resolve(&[2, 3, 4], &[0, -1], false).unwrap(), [2, 12]);
        assert_eq!(resolve(&[0, 4], &[0, 2], true).unwrap(), [0, 2]);
        assert_eq!(resolve(&[], &[], false).unwrap(), [0usize; 0]);
        for bad in [&[-1, -1][..], &[5, -1], &[-2, 12], &[2, 3, 4, 0]] {
            assert!(resolve(&[2, 3, 4], bad, false).is_err(), "{bad:?}");
        }
    }
}
