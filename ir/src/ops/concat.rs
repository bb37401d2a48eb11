//! `Concat`: values one after the other along a dim.
//!
//! Read next: [`super::gather`].

use super::support::{RuleMaker, StridedCopy, copy_work, dim_attr, dim_name, strides};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::ReduceKind;
use crate::graph::ValueId;
use crate::onnx::import::OnnxRule;
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput};
use crate::tensor::Type;

/// Values one after the other along a dim.
pub static CONCAT: OpDef = OpDef {
    name: "Concat",
    doc: "Operands one after the other along a dim.",
    attrs: &[("dim", AttrKind::Int)],
    onnx: &[OnnxRule {
        domain: "",
        op: "Concat",
        since: 4,
        lower: |cx| {
            let xs = (0..cx.inputs.len()).map(|i| cx.input(i)).collect::<Result<Vec<_>, _>>()?;
            let rank = cx.b.ty(cx.input(0)?).rank();
            let Some(crate::onnx::import::OnnxAttr::Int(a)) = cx.attrs.get("axis") else {
                return Err(OpError("attribute `axis` is missing".into()));
            };
            let d = crate::onnx::import::axis(*a, rank)?;
            Ok(vec![cx.b.concat(&xs, d)?])
        },
    }],
    infer: |op, inputs| {
        let Some(first) = inputs.first() else { return Err(OpError("needs at least one operand".into())) };
        let at = dim_attr(op, "dim", first.rank())?;
        let mut dims = first.dims.clone();
        dims[at] = 0;
        for x in inputs {
            let fits = x.dtype == first.dtype
                && x.rank() == first.rank()
                && (0..x.rank()).all(|d| d == at || x.dims[d] == first.dims[d]);
            if !fits {
                return Err(OpError(format!("{first} and {x} do not join along dim {at}")));
            }
            dims[at] += x.dims[at];
        }
        Ok(vec![Type::new(first.dtype, dims)])
    },
    factors: |op, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        let at = op.get_int("dim") as usize;
        for (d, &size) in outputs[0].dims.iter().enumerate().filter(|&(d, _)| d != at) {
            let all: Vec<(usize, usize)> = (0..inputs.len()).map(|i| (i, d)).collect();
            rule.factor(dim_name(d), size, &all, &[(0, d)]);
        }
        let rule = rule.finish(ReduceKind::Sum);
        if inputs[0].dtype == DType::Bool { rule } else { rule.linear_in((0..inputs.len()).collect::<Vec<_>>()) }
    },
    work: copy_work,
    identity: |_, inputs, _| (inputs.len() == 1).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None; cx.inputs.len()]) };
        let at = cx.op.get_int("dim") as usize;
        let mut start = 0;
        let mut out = Vec::with_capacity(cx.inputs.len());
        for (i, &x) in cx.inputs.iter().enumerate() {
            let end = start + cx.b.dims(x)[at];
            out.push(if cx.wanted[i] { Some(cx.b.slice(dy, at, start, end)?) } else { None });
            start = end;
        }
        Ok(out)
    }),
    kernel: |op, ins, outs| {
        let at = op.get_int("dim") as usize;
        let out = &mut outs[0];
        let to = strides(out.dims());
        let mut start = 0;
        for x in ins {
            StridedCopy {
                width: x.dtype().size(),
                dims: x.dims(),
                from: (0, &strides(x.dims())),
                to: (start * to[at] as usize, &to),
            }
            .run(x.data, out.data);
            start += x.dims()[at];
        }
        Ok(())
    },
    samples: || {
        let of = |dims: &[&[usize]], dim| Sample {
            op: Op::new(&CONCAT).int("dim", dim),
            inputs: dims.iter().map(|&d| SampleInput::f32(d)).collect(),
        };
        vec![
            of(&[&[4, 6], &[4, 3]], 1),
            of(&[&[4, 6], &[1, 6], &[2, 6]], 0),
            of(&[&[2, 4, 6], &[2, 0, 6]], 1),
            Sample {
                op: Op::new(&CONCAT).int("dim", 0),
                inputs: vec![SampleInput::i64_in([1], 0, 9), SampleInput::i64_in([3], 0, 9)],
            },
        ]
    },
};

impl Builder {
    /// Values one after the other along a dim. Those without elements are left out.
    pub fn concat(&mut self, xs: &[ValueId], dim: usize) -> Result<ValueId, OpError> {
        let op = Op::new(&CONCAT).int("dim", dim as i64);
        let types: Vec<Type> = xs.iter().map(|&x| self.ty(x).clone()).collect();
        op.infer(&types)?;
        let mut full: Vec<ValueId> = xs.iter().copied().filter(|&x| self.ty(x).dims[dim] > 0).collect();
        if full.is_empty() {
            full.push(xs[0]);
        }
        self.emit1(op, &full)
    }
}
