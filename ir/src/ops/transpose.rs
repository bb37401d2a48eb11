//! `Transpose`: dims in another order.
//!
//! Read next: [`super::slice`].

use super::support::{RuleMaker, StridedCopy, copy_work, dim_name, operands, strides, usizes};
use crate::builder::Builder;
use crate::factor::ReduceKind;
use crate::graph::{Def, ValueId};
use crate::onnx::import::OnnxRule;
use crate::op::{AttrKind, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::Type;

/// Dims in another order.
pub static TRANSPOSE: OpDef = OpDef {
    name: "Transpose",
    doc: "Dims in another order: dim `d` of the result is dim `perm[d]` of the operand.",
    attrs: &[("perm", AttrKind::Ints)],
    onnx: &[OnnxRule {
        domain: "",
        op: "Transpose",
        since: 1,
        lower: |cx| {
            let x = cx.input(0)?;
            let rank = cx.b.ty(x).rank();
            let perm = match cx.attr_ints("perm") {
                Some(p) => cx.axes(p, rank)?,
                None => (0..rank).rev().collect(),
            };
            Ok(vec![cx.b.transpose(x, &perm)?])
        },
    }],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let perm = usizes(op, "perm")?;
        let mut sorted = perm.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..x.rank()) {
            return Err(OpError(format!("{perm:?} is no permutation of the dims of {x}")));
        }
        Ok(vec![Type::new(x.dtype, perm.iter().map(|&d| x.dims[d]).collect::<Vec<_>>())])
    },
    factors: |op, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        for (to, &from) in op.get_ints("perm").iter().enumerate() {
            rule.factor(dim_name(from as usize), outputs[0].dims[to], &[(0, from as usize)], &[(0, to)]);
        }
        rule.finish(ReduceKind::Sum).linear_in([0])
    },
    work: |op, inputs, outputs| {
        if keeps_order(op.get_ints("perm"), &inputs[0].dims) { Work::FREE } else { copy_work(op, inputs, outputs) }
    },
    identity: |op, inputs, _| op.get_ints("perm").iter().copied().eq(0..inputs[0].rank() as i64).then_some(0),
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let perm = cx.op.get_ints("perm");
        let mut inverse = vec![0; perm.len()];
        for (to, &from) in perm.iter().enumerate() {
            inverse[from as usize] = to;
        }
        Ok(vec![Some(cx.b.transpose(dy, &inverse)?)])
    }),
    kernel: |op, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        let own = strides(x.dims());
        let from: Vec<isize> = op.get_ints("perm").iter().map(|&d| own[d as usize]).collect();
        let dims = out.ty.dims.clone();
        let to = strides(&dims);
        StridedCopy { width: x.dtype().size(), dims: &dims, from: (0, &from), to: (0, &to) }.run(x.data, out.data);
        Ok(())
    },
    samples: || {
        let of = |dims: &[usize], perm: &[i64]| Sample {
            op: Op::new(&TRANSPOSE).ints("perm", perm.iter().copied()),
            inputs: vec![SampleInput::f32(dims)],
        };
        vec![
            of(&[4, 6], &[1, 0]),
            of(&[2, 4, 6], &[0, 2, 1]),
            of(&[2, 6, 4, 3], &[0, 2, 1, 3]),
            of(&[2, 6, 4], &[2, 0, 1]),
            of(&[2, 6, 2, 3], &[0, 2, 1, 3]),
            of(&[0, 4], &[1, 0]),
        ]
    },
};

/// Whether only dims of size 1 change their place: of heads sharded to one per rank, say.
fn keeps_order(perm: &[i64], dims: &[usize]) -> bool {
    perm.iter().filter(|&&d| dims[d as usize] != 1).is_sorted()
}

impl Builder {
    /// Dims in another order. A transpose of a transpose is one transpose.
    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> Result<ValueId, OpError> {
        let (mut x, mut perm) = (x, perm.to_vec());
        if let Def::Node(n, _) = self.graph().value(x).def {
            let node = self.graph().node(n);
            if std::ptr::eq(node.op.def, &TRANSPOSE) && perm.iter().all(|&d| d < self.ty(x).rank()) {
                let first = node.op.get_ints("perm");
                perm = perm.iter().map(|&d| first[d] as usize).collect();
                x = node.inputs[0];
            }
        }
        self.emit1(Op::new(&TRANSPOSE).ints("perm", perm.iter().map(|&d| d as i64)), &[x])
    }
}
