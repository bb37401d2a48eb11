//! `GatherND`: entries at index tuples, and its gradient.
//!
//! The last dim of the indices holds tuples that index the operand's dims after `batch_dims` common ones. Indexed dims can be
//! split as in [`super::gather`]. Constant indices that merely enumerate the operand (as exporters write broadcast masks) become
//! a reshape and an expansion, which keep the batch shardable.
//!
//! Read next: [`super::reduce`].

use super::gather::{check_indices, gather_work, locate, read_indices, scatter_work};
use super::support::{RuleMaker, dim_name, never, no_kernel, operands, strides, usizes};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::OnnxRule;
use crate::op::{AttrKind, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput};
use crate::tensor::{Tensor, Type, View, ViewMut, numel};

/// How dims of operand, indices and result correspond.
struct Layout {
    /// Common leading dims.
    batch: usize,
    /// Dims of the operand that a tuple indexes.
    depth: usize,
    /// Dims of the indices without the tuples'.
    outer: usize,
}

impl Layout {
    fn of(op: &Op, data: &[usize], indices: &[usize]) -> Result<Layout, OpError> {
        let bad = || OpError(format!("indices of sizes {indices:?} do not index an operand of sizes {data:?}"));
        let batch = usize::try_from(op.get_int("batch_dims")).map_err(|_| bad())?;
        let (&depth, lead) = indices.split_last().ok_or_else(bad)?;
        if depth == 0 || batch + depth > data.len() || batch > lead.len() || data[..batch] != lead[..batch] {
            return Err(bad());
        }
        Ok(Layout { batch, depth, outer: lead.len() })
    }
    fn indexed(&self) -> std::ops::Range<usize> {
        self.batch..self.batch + self.depth
    }
    /// Factors, forward (data, indices -> result) or of the gradient (indices, gradient -> data).
    fn factors(&self, (inputs, outputs): (&[Type], &[Type]), forward: bool) -> FactorRule {
        const INDEX: [&str; 5] = ["i0", "i1", "i2", "i3", "i4"];
        const ENTRIES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];
        let (data, indices) = if forward { (&inputs[0], &inputs[1]) } else { (&outputs[0], &inputs[0]) };
        let mut rule = RuleMaker::new(inputs, outputs);
        for (d, &size) in data.dims.iter().enumerate() {
            if d < self.batch {
                rule.factor(dim_name(d), size, &[(0, d), (1, d)], &[(0, d)]);
            } else if self.indexed().contains(&d) {
                let name = ENTRIES.get(d).copied().unwrap_or("n5+");
                match forward {
                    true if data.dtype == DType::Bool => {}
                    true => rule.factor(name, size, &[(0, d)], &[]),
                    false => rule.factor(name, size, &[], &[(0, d)]),
                }
            } else {
                let to = d - self.indexed().end + self.outer;
                if forward {
                    rule.factor(dim_name(d), size, &[(0, d)], &[(0, to)]);
                } else {
                    rule.factor(dim_name(d), size, &[(1, to)], &[(0, d)]);
                }
            }
        }
        for d in self.batch..self.outer {
            let name = INDEX.get(d).copied().unwrap_or("i5+");
            if forward {
                rule.factor(name, indices.dims[d], &[(1, d)], &[(0, d)]);
            } else {
                rule.factor(name, indices.dims[d], &[(0, d), (1, d)], &[]);
            }
        }
        rule.finish(ReduceKind::Sum)
    }
    /// Per tuple, the row (of the dims after the indexed ones) it names, where this rank holds it.
    fn rows(
        &self,
        op: &Op,
        indices: &View<'_>,
        (dims, global, origin): (&[usize], &[usize], &[usize]),
    ) -> Result<Vec<Option<usize>>, KernelError> {
        let values = read_indices(op, indices)?;
        let per_batch: usize = indices.dims()[self.batch..self.outer].iter().product();
        let mut out = Vec::with_capacity(values.len() / self.depth);
        for (k, tuple) in values.chunks_exact(self.depth).enumerate() {
            let mut row = Some(k / per_batch);
            for (d, &i) in self.indexed().zip(tuple) {
                let at = locate(op, i, global[d], origin[d], dims[d])?;
                row = row.zip(at).map(|(row, at)| row * dims[d] + at);
            }
            out.push(row);
        }
        Ok(out)
    }
}

/// Entries at index tuples.
pub static GATHER_ND: OpDef = OpDef {
    name: "GatherND",
    doc: "Entries of the operand at index tuples, after `batch_dims` common dims.",
    attrs: &[("batch_dims", AttrKind::Int)],
    onnx: &[OnnxRule {
        domain: "",
        op: "GatherND",
        since: 11,
        lower: |cx| {
            let (x, indices) = (cx.input(0)?, cx.input(1)?);
            let batch = usize::try_from(cx.attr_int("batch_dims", 0))
                .map_err(|_| OpError("`batch_dims` is negative".into()))?;
            Ok(vec![cx.b.gather_nd(x, indices, batch)?])
        },
    }],
    infer: |op, inputs| {
        let [data, indices] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let at = Layout::of(op, &data.dims, &indices.dims)?;
        let dims = [&indices.dims[..at.outer], &data.dims[at.indexed().end..]].concat();
        Ok(vec![Type::new(data.dtype, dims)])
    },
    factors: |op, inputs, outputs| match Layout::of(op, &inputs[0].dims, &inputs[1].dims) {
        Ok(at) => {
            let rule = at.factors((inputs, outputs), true);
            if inputs[0].dtype == DType::Bool { rule } else { rule.linear_in([0]) }
        }
        Err(_) => FactorRule::replicate(inputs, outputs),
    },
    work: gather_work,
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None, None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        let op = Op::new(&GATHER_ND_GRAD)
            .int("batch_dims", cx.op.get_int("batch_dims"))
            .ints("dims", dims.iter().map(|&d| d as i64));
        Ok(vec![Some(cx.b.emit1(op, &[cx.inputs[1], dy])?), None])
    }),
    kernel: |op, ins, outs| {
        let (data, out) = (&ins[0], &mut outs[0]);
        let at = Layout::of(op, data.dims(), ins[1].dims()).map_err(|e| KernelError(e.0))?;
        let rows = at.rows(op, &ins[1], (data.dims(), &data.global, &data.origin))?;
        let width = numel(&data.dims()[at.indexed().end..]) * data.dtype().size();
        for (k, row) in rows.into_iter().enumerate() {
            let to = &mut out.data[k * width..][..width];
            match row {
                Some(r) => to.copy_from_slice(&data.data[r * width..][..width]),
                None => to.fill(0),
            }
        }
        Ok(())
    },
    samples: || {
        let of = |data: &[usize], indices: &[usize], batch: i64, n: i64| Sample {
            op: Op::new(&GATHER_ND).int("batch_dims", batch),
            inputs: vec![SampleInput::f32(data), SampleInput::i64_in(indices, -n, n)],
        };
        vec![of(&[4, 6, 2], &[6, 2], 0, 4), of(&[4, 6, 2], &[4, 3, 1], 1, 6), of(&[6, 4], &[2, 4, 1], 0, 6)]
    },
};

/// Gradient of GatherND.
pub static GATHER_ND_GRAD: OpDef = OpDef {
    name: "GatherNDGrad",
    doc: "Gradient of GatherND: adds entries into zeros of sizes `dims`, at index tuples.",
    attrs: &[("batch_dims", AttrKind::Int), ("dims", AttrKind::Ints)],
    onnx: &[],
    infer: |op, inputs| {
        let [indices, dy] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let dims = usizes(op, "dims")?;
        let at = Layout::of(op, &dims, &indices.dims)?;
        if dy.dims != [&indices.dims[..at.outer], &dims[at.indexed().end..]].concat() {
            return Err(OpError(format!("{dy} is no gradient of entries at {indices} of sizes {dims:?}")));
        }
        Ok(vec![Type::new(dy.dtype, dims)])
    },
    factors: |op, inputs, outputs| match Layout::of(op, &outputs[0].dims, &inputs[0].dims) {
        Ok(at) => at.factors((inputs, outputs), false).linear_in([1]),
        Err(_) => FactorRule::replicate(inputs, outputs),
    },
    work: scatter_work,
    identity: never,
    gradient: Gradient::Internal("backward of GatherND"),
    kernel: |op, ins, outs| match ins[1].dtype() {
        DType::F32 => scatter::<f32>(op, ins, &mut outs[0]),
        DType::F64 => scatter::<f64>(op, ins, &mut outs[0]),
        d => Err(no_kernel(op, d)),
    },
    samples: || {
        let of = |indices: &[usize], dy: &[usize], dims: &[i64], batch: i64, n: i64| Sample {
            op: Op::new(&GATHER_ND_GRAD).int("batch_dims", batch).ints("dims", dims.iter().copied()),
            inputs: vec![SampleInput::i64_in(indices, -n, n), SampleInput::f32(dy)],
        };
        vec![of(&[6, 2], &[6, 2], &[4, 6, 2], 0, 4), of(&[4, 3, 1], &[4, 3, 2], &[4, 6, 2], 1, 6)]
    },
};

fn scatter<T: bytemuck::Pod + std::ops::AddAssign>(
    op: &Op,
    ins: &[View<'_>],
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let at = Layout::of(op, out.dims(), ins[0].dims()).map_err(|e| KernelError(e.0))?;
    let rows = at.rows(op, &ins[0], (out.dims(), &out.global, &out.origin))?;
    let width = numel(&out.dims()[at.indexed().end..]);
    let dy = ins[1].as_slice::<T>();
    out.data.fill(0);
    let out = out.as_mut_slice::<T>();
    for (k, row) in rows.into_iter().enumerate() {
        if let Some(r) = row {
            for (t, &g) in out[r * width..][..width].iter_mut().zip(&dy[k * width..][..width]) {
                *t += g;
            }
        }
    }
    Ok(())
}

/// Where constant index tuples enumerate the indexed dims (of sizes `sizes`) in order, repeated along other dims of the
/// indices: per outer dim of the indices, its size or 1 where it only repeats.
fn enumeration(indices: &Tensor, sizes: &[usize]) -> Option<Vec<usize>> {
    let (&depth, outer) = indices.dims().split_last()?;
    let values = crate::convert::cast(indices, DType::I64);
    let weights = strides(sizes);
    let total = numel(sizes);
    let mut flat = Vec::with_capacity(numel(outer));
    for tuple in values.as_slice::<i64>().chunks_exact(depth.max(1)) {
        let mut at = 0;
        for ((&i, &n), &w) in tuple.iter().zip(sizes).zip(&weights) {
            let i = if i < 0 { i + n as i64 } else { i };
            if i < 0 || i >= n as i64 {
                return None;
            }
            at += i as usize * w as usize;
        }
        flat.push(at);
    }
    if flat.is_empty() {
        return None;
    }
    // A dim along which the first step changes nothing repeats; the others must count.
    let own = strides(outer);
    let counted: Vec<usize> =
        outer.iter().zip(&own).map(|(&n, &s)| if n > 1 && flat[s as usize] != flat[0] { n } else { 1 }).collect();
    if numel(&counted) != total {
        return None;
    }
    let steps = super::support::broadcast_strides(&counted, outer);
    let expected =
        |k: usize| -> usize { (0..outer.len()).map(|d| k / own[d] as usize % outer[d] * steps[d] as usize).sum() };
    flat.iter().enumerate().all(|(k, &at)| at == expected(k)).then_some(counted)
}

impl Builder {
    /// Entries at index tuples, after `batch` common dims.
    pub fn gather_nd(&mut self, x: ValueId, indices: ValueId, batch: usize) -> Result<ValueId, OpError> {
        let op = Op::new(&GATHER_ND).int("batch_dims", batch as i64);
        let out = op.infer(&[self.ty(x).clone(), self.ty(indices).clone()])?;
        if let (0, Some(t)) = (batch, self.graph().constant(indices).cloned()) {
            let (dims, depth) = (self.dims(x), t.dims().last().copied().unwrap_or(0));
            if let Some(counted) = enumeration(&t, &dims[..depth]) {
                let x = self.reshape(x, &[&counted, &dims[depth..]].concat())?;
                return self.expand(x, &out[0].dims);
            }
        }
        self.emit1(op, &[x, indices])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;

    /// Tuples (b, k) for result sizes [2, 1, 4, 3] of an operand [2, 3].
    fn mask_indices() -> Tensor {
        let mut all = Vec::new();
        for b in 0..2 {
            for _ in 0..4 {
                for k in 0..3 {
                    all.extend([b, k]);
                }
            }
        }
        Tensor::i64([2, 1, 4, 3, 2], &all)
    }

    #[test]
    fn enumerating_indices_become_an_expansion() {
        assert_eq!(enumeration(&mask_indices(), &[2, 3]), Some(vec![2, 1, 1, 3]));
        assert_eq!(enumeration(&Tensor::i64([3, 1], &[0, 2, 1]), &[3]), None);
        assert_eq!(enumeration(&Tensor::i64([2, 1], &[0, 1]), &[3]), None);
        assert_eq!(enumeration(&Tensor::i64([3, 1], &[0, 1, 9]), &[3]), None);

        let mut b = Builder::new("t");
        let x = b.input("x", Type::new(DType::F32, [2, 3]), None);
        let i = b.constant(mask_indices());
        let y = b.gather_nd(x, i, 0).unwrap();
        b.output("y", y, None);
        let g = b.finish();
        assert!(g.nodes.iter().all(|n| n.op.name() != "GatherND"));
        let x = Tensor::f32([2, 3], &[0., 1., 2., 3., 4., 5.]);
        let y = crate::interp::run(&g, std::slice::from_ref(&x), &[]).unwrap().outputs.remove(0);
        let plain = crate::interp::apply(&Op::new(&GATHER_ND), &[x, mask_indices()], &[y.ty().clone()]).unwrap();
        assert_eq!(y, plain[0]);
    }
}
