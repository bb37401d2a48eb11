//! `Gather` (embedding lookup) and `GatherElements`, with their gradients.
//!
//! The looked-up dim of the table can be split ("vocabulary parallel"): a rank gives zeros for indices that it does not
//! hold, and the result is the sum. Negative indices count from the end of the unsharded dim; indices outside it are
//! errors, on every rank alike.
//!
//! Read next: [`super::gather_nd`].

use std::borrow::Cow;

use super::support::{RuleMaker, dim_attr, dim_name, never, no_kernel, operands, strides, usizes};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule, axis};
use crate::op::{AttrKind, Family, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View, ViewMut};

/// Checks that a type holds indices.
pub(super) fn check_indices(ty: &Type) -> Result<(), OpError> {
    if matches!(ty.dtype, DType::I64 | DType::I32) {
        return Ok(());
    }
    Err(OpError(format!("indices are i64 or i32, not {ty}")))
}

/// Indices as i64.
pub(super) fn read_indices<'a>(op: &Op, v: &View<'a>) -> Result<Cow<'a, [i64]>, KernelError> {
    match v.dtype() {
        DType::I64 => Ok(Cow::Borrowed(v.as_slice())),
        DType::I32 => Ok(v.as_slice::<i32>().iter().map(|&i| i.into()).collect()),
        d => Err(no_kernel(op, d)),
    }
}

/// An index made local: `None` where another rank holds it.
pub(super) fn locate(
    op: &Op,
    i: i64,
    global: usize,
    origin: usize,
    local: usize,
) -> Result<Option<usize>, KernelError> {
    let at = if i < 0 { i + global as i64 } else { i };
    if at < 0 || at >= global as i64 {
        return Err(KernelError(format!("{}: index {i} is out of range for {global} entries", op.name())));
    }
    Ok((at as usize).checked_sub(origin).filter(|&at| at < local))
}

/// Indices that are known already must lie in the table: positions beyond those that a model has learned.
fn within(cx: &ImportCx<'_>, table: ValueId, indices: ValueId, dim: usize) -> Result<(), OpError> {
    let entries = cx.b.dims(table)[dim] as i64;
    let Some(t) = cx.b.graph().constant(indices).filter(|t| check_indices(t.ty()).is_ok()) else { return Ok(()) };
    let t = crate::convert::cast(t, DType::I64);
    match t.as_slice::<i64>().iter().find(|i| !(-entries..entries).contains(*i)) {
        Some(i) => Err(OpError(format!(
            "index {i} into {entries} entries of {}; choose smaller sizes (such as the sequence) for this model",
            cx.b.ty(table)
        ))),
        None => Ok(()),
    }
}

/// Work of lookups: indices, and as many elements read as written.
pub(super) fn gather_work(_: &Op, inputs: &[Type], outputs: &[Type]) -> Work {
    let indices = inputs.iter().filter(|t| check_indices(t).is_ok()).map(Type::bytes).min().unwrap_or(0);
    let bytes = 2.0 * outputs[0].bytes() as f64 + indices as f64;
    Work { family: Family::Gather, bytes, ..Work::memory(&[], &[], 0.0) }
}

/// Work of scattered additions: a zeroed result, and every gradient element read, added and written.
pub(super) fn scatter_work(_: &Op, inputs: &[Type], outputs: &[Type]) -> Work {
    let bytes = outputs[0].bytes() + inputs[0].bytes() + 3 * inputs[1].bytes();
    let flops = inputs[1].numel() as f64;
    Work { family: Family::Gather, flops, bytes: bytes as f64, ..Work::FREE }
}

/// Parts of lookups in truth values do not add up.
fn summable(ty: &Type) -> bool {
    ty.dtype != DType::Bool
}

/// Lookup along a dim.
pub static GATHER: OpDef = OpDef {
    name: "Gather",
    doc: "Entries of a table along a dim, by index (embedding lookup).",
    attrs: &[("axis", AttrKind::Int)],
    onnx: &[OnnxRule {
        domain: "",
        op: "Gather",
        since: 1,
        lower: |cx| {
            let (table, indices) = (cx.input(0)?, cx.input(1)?);
            let d = axis(cx.attr_int("axis", 0), cx.b.ty(table).rank())?;
            within(cx, table, indices, d)?;
            Ok(vec![cx.b.gather(table, indices, d)?])
        },
    }],
    infer: |op, inputs| {
        let [table, indices] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let a = dim_attr(op, "axis", table.rank())?;
        let dims = [&table.dims[..a], &indices.dims, &table.dims[a + 1..]].concat();
        Ok(vec![Type::new(table.dtype, dims)])
    },
    factors: |op, inputs, outputs| {
        let rule = lookup_factors(op, &inputs[0], &inputs[1], (inputs, outputs), true);
        if summable(&inputs[0]) { rule.linear_in([0]) } else { rule }
    },
    work: gather_work,
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None, None]) };
        let (a, table) = (cx.op.get_int("axis"), cx.b.dims(cx.inputs[0]));
        let op = Op::new(&SCATTER_ADD).int("axis", a).int("size", table[a as usize] as i64);
        Ok(vec![Some(cx.b.emit1(op, &[cx.inputs[1], dy])?), None])
    }),
    kernel: |op, ins, outs| {
        let (table, out) = (&ins[0], &mut outs[0]);
        let indices = read_indices(op, &ins[1])?;
        let a = op.get_int("axis") as usize;
        let (outer, n) = (table.dims()[..a].iter().product::<usize>(), table.dims()[a]);
        let row = table.dims()[a + 1..].iter().product::<usize>() * table.dtype().size();
        let at = indices
            .iter()
            .map(|&i| locate(op, i, table.global[a], table.origin[a], n))
            .collect::<Result<Vec<_>, _>>()?;
        for o in 0..outer {
            for (k, at) in at.iter().enumerate() {
                let to = &mut out.data[(o * indices.len() + k) * row..][..row];
                match at {
                    Some(i) => to.copy_from_slice(&table.data[(o * n + i) * row..][..row]),
                    None => to.fill(0),
                }
            }
        }
        Ok(())
    },
    samples: || {
        let of = |table: &[usize], indices: &[usize], a: i64| {
            let n = table[a as usize] as i64;
            Sample {
                op: Op::new(&GATHER).int("axis", a),
                inputs: vec![SampleInput::f32(table), SampleInput::i64_in(indices, -n, n)],
            }
        };
        let i64s = Sample {
            op: Op::new(&GATHER).int("axis", 0),
            inputs: vec![SampleInput::i64_in([6], -9, 9), SampleInput::i64_in([4], 0, 6)],
        };
        vec![of(&[12, 4], &[2, 6], 0), of(&[4, 6, 2], &[4], 1), of(&[4, 6], &[], 1), of(&[6], &[0], 0), i64s]
    },
};

/// Factors of a lookup, forward (table, indices -> result) or of its gradient (indices, gradient -> table).
fn lookup_factors(
    op: &Op,
    table: &Type,
    indices: &Type,
    (inputs, outputs): (&[Type], &[Type]),
    forward: bool,
) -> FactorRule {
    const INDEX: [&str; 4] = ["i0", "i1", "i2", "i3"];
    let a = op.get_int("axis") as usize;
    let mut rule = RuleMaker::new(inputs, outputs);
    let wide = indices.rank();
    for (d, &size) in table.dims.iter().enumerate() {
        let to = if d < a { d } else { d + wide - usize::from(d > a) };
        match (d == a, forward) {
            (true, true) if summable(table) => rule.factor("vocab", size, &[(0, d)], &[]),
            (true, true) => {}
            (true, false) => rule.factor("vocab", size, &[], &[(0, d)]),
            (false, true) => rule.factor(dim_name(d), size, &[(0, d)], &[(0, to)]),
            (false, false) => rule.factor(dim_name(d), size, &[(1, to)], &[(0, d)]),
        }
    }
    for (d, &size) in indices.dims.iter().enumerate() {
        let name = INDEX.get(d).copied().unwrap_or("i4+");
        if forward {
            rule.factor(name, size, &[(1, d)], &[(0, a + d)]);
        } else {
            rule.factor(name, size, &[(0, d), (1, a + d)], &[]);
        }
    }
    rule.finish(ReduceKind::Sum)
}

/// Gradient of Gather.
pub static SCATTER_ADD: OpDef = OpDef {
    name: "ScatterAdd",
    doc: "Gradient of Gather: adds rows into a table of zeros with `size` entries along `axis`, by index.",
    attrs: &[("axis", AttrKind::Int), ("size", AttrKind::Int)],
    onnx: &[],
    infer: |op, inputs| {
        let [indices, dy] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let wide = indices.rank();
        let a = usize::try_from(op.get_int("axis")).ok().filter(|a| a.checked_add(wide).is_some());
        let a = a.ok_or_else(|| OpError(format!("axis {} is out of range", op.get_int("axis"))))?;
        let size = usize::try_from(op.get_int("size")).map_err(|_| OpError("`size` is negative".into()))?;
        if dy.dims.get(a..a + wide) != Some(&indices.dims[..]) {
            return Err(OpError(format!("{dy} does not hold the sizes of {indices} at dim {a}")));
        }
        let dims = [&dy.dims[..a], &[size], &dy.dims[a + wide..]].concat();
        Ok(vec![Type::new(dy.dtype, dims)])
    },
    factors: |op, inputs, outputs| lookup_factors(op, &outputs[0], &inputs[0], (inputs, outputs), false).linear_in([1]),
    work: scatter_work,
    identity: never,
    gradient: Gradient::Internal("backward of Gather"),
    kernel: |op, ins, outs| match ins[1].dtype() {
        DType::F32 => scatter_add::<f32>(op, ins, &mut outs[0]),
        DType::F64 => scatter_add::<f64>(op, ins, &mut outs[0]),
        d => Err(no_kernel(op, d)),
    },
    samples: || {
        let of = |indices: &[usize], dy: &[usize], a: i64, size: i64| Sample {
            op: Op::new(&SCATTER_ADD).int("axis", a).int("size", size),
            inputs: vec![SampleInput::i64_in(indices, -size, size), SampleInput::f32(dy)],
        };
        vec![of(&[2, 6], &[2, 6, 4], 0, 12), of(&[4], &[2, 4, 3], 1, 6), of(&[], &[4], 1, 6)]
    },
};

fn scatter_add<T: bytemuck::Pod + std::ops::AddAssign>(
    op: &Op,
    ins: &[View<'_>],
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let indices = read_indices(op, &ins[0])?;
    let a = op.get_int("axis") as usize;
    let (outer, n) = (out.dims()[..a].iter().product::<usize>(), out.dims()[a]);
    let row: usize = out.dims()[a + 1..].iter().product();
    let (global, origin) = (out.global[a], out.origin[a]);
    let at = indices.iter().map(|&i| locate(op, i, global, origin, n)).collect::<Result<Vec<_>, _>>()?;
    let dy = ins[1].as_slice::<T>();
    out.data.fill(0);
    let out = out.as_mut_slice::<T>();
    for o in 0..outer {
        for (k, at) in at.iter().enumerate() {
            if let Some(i) = at {
                let to = &mut out[(o * n + i) * row..][..row];
                for (t, &g) in to.iter_mut().zip(&dy[(o * indices.len() + k) * row..][..row]) {
                    *t += g;
                }
            }
        }
    }
    Ok(())
}

/// Lookup element by element.
pub static GATHER_ELEMENTS: OpDef = OpDef {
    name: "GatherElements",
    doc: "Per element of the indices, the operand's element at that index along a dim and the same place otherwise.",
    attrs: &[("axis", AttrKind::Int)],
    onnx: &[OnnxRule {
        domain: "",
        op: "GatherElements",
        since: 11,
        lower: |cx| {
            let (x, indices) = (cx.input(0)?, cx.input(1)?);
            let d = axis(cx.attr_int("axis", 0), cx.b.ty(x).rank())?;
            Ok(vec![cx.b.emit1(Op::new(&GATHER_ELEMENTS).int("axis", d as i64), &[x, indices])?])
        },
    }],
    infer: |op, inputs| {
        let [x, indices] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let a = dim_attr(op, "axis", x.rank())?;
        if indices.rank() != x.rank() || (0..x.rank()).any(|d| d != a && indices.dims[d] > x.dims[d]) {
            return Err(OpError(format!("{indices} does not index elements of {x} along dim {a}")));
        }
        Ok(vec![Type::new(x.dtype, indices.dims.clone())])
    },
    factors: |op, inputs, outputs| {
        let a = op.get_int("axis") as usize;
        let mut rule = RuleMaker::new(inputs, outputs);
        for (d, &size) in inputs[1].dims.iter().enumerate() {
            if d == a {
                rule.factor("i", size, &[(1, d)], &[(0, d)]);
                if summable(&inputs[0]) {
                    rule.factor("entries", inputs[0].dims[d], &[(0, d)], &[]);
                }
            } else if inputs[0].dims[d] == size {
                rule.factor(dim_name(d), size, &[(0, d), (1, d)], &[(0, d)]);
            }
        }
        let rule = rule.finish(ReduceKind::Sum);
        if summable(&inputs[0]) { rule.linear_in([0]) } else { rule }
    },
    work: gather_work,
    identity: never,
    gradient: Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None, None]) };
        let dims = cx.b.dims(cx.inputs[0]);
        let op = Op::new(&GATHER_ELEMENTS_GRAD)
            .int("axis", cx.op.get_int("axis"))
            .ints("dims", dims.iter().map(|&d| d as i64));
        Ok(vec![Some(cx.b.emit1(op, &[cx.inputs[1], dy])?), None])
    }),
    kernel: |op, ins, outs| match outs[0].dtype().size() {
        1 => gather_elements::<u8>(op, ins, &mut outs[0]),
        2 => gather_elements::<u16>(op, ins, &mut outs[0]),
        4 => gather_elements::<u32>(op, ins, &mut outs[0]),
        _ => gather_elements::<u64>(op, ins, &mut outs[0]),
    },
    samples: || {
        let of = |x: &[usize], indices: &[usize], a: i64| {
            let n = x[a as usize] as i64;
            Sample {
                op: Op::new(&GATHER_ELEMENTS).int("axis", a),
                inputs: vec![SampleInput::f32(x), SampleInput::i64_in(indices, -n, n)],
            }
        };
        vec![of(&[4, 6], &[4, 3], 1), of(&[6, 4], &[2, 4], 0), of(&[4, 6, 3], &[2, 6, 2], 2)]
    },
};

/// Per element of the indices: the offset of its place in a tensor of sizes `dims`, where this rank holds it.
fn places(
    op: &Op,
    indices: &View<'_>,
    (dims, global, origin): (&[usize], &[usize], &[usize]),
) -> Result<Vec<Option<usize>>, KernelError> {
    let a = op.get_int("axis") as usize;
    let (own, there) = (strides(indices.dims()), strides(dims));
    let values = read_indices(op, indices)?;
    let mut out = Vec::with_capacity(values.len());
    for (k, &i) in values.iter().enumerate() {
        let at = locate(op, i, global[a], origin[a], dims[a])?;
        let rest: usize = (0..dims.len())
            .filter(|&d| d != a)
            .map(|d| k / own[d] as usize % indices.dims()[d] * there[d] as usize)
            .sum();
        out.push(at.map(|at| rest + at * there[a] as usize));
    }
    Ok(out)
}

fn gather_elements<T: bytemuck::Pod>(op: &Op, ins: &[View<'_>], out: &mut ViewMut<'_>) -> Result<(), KernelError> {
    let x = &ins[0];
    let places = places(op, &ins[1], (x.dims(), &x.global, &x.origin))?;
    let src = x.as_slice::<T>();
    for (o, at) in out.as_mut_slice::<T>().iter_mut().zip(places) {
        *o = at.map_or(T::zeroed(), |at| src[at]);
    }
    Ok(())
}

/// Gradient of GatherElements.
pub static GATHER_ELEMENTS_GRAD: OpDef = OpDef {
    name: "GatherElementsGrad",
    doc: "Gradient of GatherElements: adds elements into zeros of sizes `dims`, by index along `axis`.",
    attrs: &[("axis", AttrKind::Int), ("dims", AttrKind::Ints)],
    onnx: &[],
    infer: |op, inputs| {
        let [indices, dy] = operands::<2>(inputs)?;
        check_indices(indices)?;
        let dims = usizes(op, "dims")?;
        let a = dim_attr(op, "axis", dims.len())?;
        if indices.dims != dy.dims || dims.len() != dy.rank() || (0..dims.len()).any(|d| d != a && dims[d] < dy.dims[d])
        {
            return Err(OpError(format!("{indices} and {dy} do not fit sizes {dims:?}")));
        }
        Ok(vec![Type::new(dy.dtype, dims)])
    },
    factors: |op, inputs, outputs| {
        let a = op.get_int("axis") as usize;
        let mut rule = RuleMaker::new(inputs, outputs);
        for (d, &size) in inputs[0].dims.iter().enumerate() {
            if d == a {
                rule.factor("i", size, &[(0, d), (1, d)], &[]);
                rule.factor("entries", outputs[0].dims[d], &[], &[(0, d)]);
            } else if outputs[0].dims[d] == size {
                rule.factor(dim_name(d), size, &[(0, d), (1, d)], &[(0, d)]);
            }
        }
        rule.finish(ReduceKind::Sum).linear_in([1])
    },
    work: scatter_work,
    identity: never,
    gradient: Gradient::Internal("backward of GatherElements"),
    kernel: |op, ins, outs| match ins[1].dtype() {
        DType::F32 => scatter_elements::<f32>(op, ins, &mut outs[0]),
        DType::F64 => scatter_elements::<f64>(op, ins, &mut outs[0]),
        d => Err(no_kernel(op, d)),
    },
    samples: || {
        let of = |indices: &[usize], dims: &[i64], a: i64| {
            let n = dims[a as usize];
            Sample {
                op: Op::new(&GATHER_ELEMENTS_GRAD).int("axis", a).ints("dims", dims.iter().copied()),
                inputs: vec![SampleInput::i64_in(indices, -n, n), SampleInput::f32(indices)],
            }
        };
        vec![of(&[4, 3], &[4, 6], 1), of(&[2, 4], &[6, 4], 0), of(&[2, 6, 2], &[4, 6, 3], 2)]
    },
};

fn scatter_elements<T: bytemuck::Pod + std::ops::AddAssign>(
    op: &Op,
    ins: &[View<'_>],
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let places = places(op, &ins[0], (out.dims(), &out.global, &out.origin))?;
    out.data.fill(0);
    let out = out.as_mut_slice::<T>();
    for (&g, at) in ins[1].as_slice::<T>().iter().zip(places) {
        if let Some(at) = at {
            out[at] += g;
        }
    }
    Ok(())
}

impl Builder {
    /// Entries of a table along a dim, by index.
    pub fn gather(&mut self, table: ValueId, indices: ValueId, axis: usize) -> Result<ValueId, OpError> {
        self.emit1(Op::new(&GATHER).int("axis", axis as i64), &[table, indices])
    }
}
