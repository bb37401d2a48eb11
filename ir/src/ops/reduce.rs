//! Reductions over dims: sum, largest, smallest, product, and the index of the largest or smallest.
//!
//! A reduced dim is a factor that the result lacks, so that parts combine by the same reduction (products and indices
//! keep theirs whole). Sums are accumulated in f64.
//!
//! Read next: [`crate::train`], which sums gradients.

use super::real::stat_dtype;
use super::support::{Loops, RuleMaker, dim_attr, dim_name, never, no_kernel, operands, strides};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::{ImportCx, OnnxRule};
use crate::op::{AttrKind, GradCx, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::tensor::{Type, View, ViewMut};

const ATTRS: &[(&str, AttrKind)] = &[("dims", AttrKind::Ints), ("keep", AttrKind::Bool)];

fn reduced_dims(op: &Op, rank: usize) -> Result<Vec<bool>, OpError> {
    let mut reduced = vec![false; rank];
    for &d in op.get_ints("dims") {
        let slot = usize::try_from(d).ok().and_then(|d| reduced.get_mut(d));
        let slot = slot.ok_or_else(|| OpError(format!("cannot reduce dim {d} of {rank} dims")))?;
        if std::mem::replace(slot, true) {
            return Err(OpError(format!("dim {d} is reduced twice")));
        }
    }
    Ok(reduced)
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let [x] = operands::<1>(inputs)?;
    if x.dtype == DType::Bool {
        return Err(OpError(format!("takes numbers, not {x}")));
    }
    let reduced = reduced_dims(op, x.rank())?;
    let keep = op.get_flag("keep");
    let dims: Vec<usize> =
        (0..x.rank()).filter_map(|d| if !reduced[d] { Some(x.dims[d]) } else { keep.then_some(1) }).collect();
    Ok(vec![Type::new(x.dtype, dims)])
}

/// Per dim of the operand, its dim in the result unless it is reduced.
fn result_dims(op: &Op, rank: usize) -> Vec<Option<usize>> {
    let (dims, keep) = (op.get_ints("dims"), op.get_flag("keep"));
    let mut at = 0;
    (0..rank)
        .map(|d| {
            let reduced = dims.contains(&(d as i64));
            let to = at;
            at += usize::from(!reduced || keep);
            (!reduced).then_some(to)
        })
        .collect()
}

fn rule(op: &Op, inputs: &[Type], outputs: &[Type], reduce: Option<ReduceKind>) -> FactorRule {
    let mut rule = RuleMaker::new(inputs, outputs);
    for (d, to) in result_dims(op, inputs[0].rank()).into_iter().enumerate() {
        let size = inputs[0].dims[d];
        match to {
            Some(to) => rule.factor(dim_name(d), size, &[(0, d)], &[(0, to)]),
            None if reduce.is_some() => rule.factor(dim_name(d), size, &[(0, d)], &[]),
            None => {}
        }
    }
    rule.finish(reduce.unwrap_or(ReduceKind::Sum))
}

/// Whether elements that lie side by side are folded into one.
fn along_rows(op: &Op, rank: usize) -> bool {
    result_dims(op, rank).last().is_none_or(|to| to.is_none())
}

/// Strides in the result, per dim of the operand: 0 along reduced dims.
fn result_strides(op: &Op, x: &View<'_>, out: &[usize]) -> Vec<isize> {
    let own = strides(out);
    result_dims(op, x.dims().len()).into_iter().map(|to| to.map_or(0, |d| own[d])).collect()
}

/// An associative reduction: the accumulator's start, how it takes an element, and how two accumulators join.
struct Fold<A, T> {
    start: A,
    step: fn(A, T) -> A,
    join: fn(A, A) -> A,
    finish: fn(A) -> T,
}

impl<A: Copy, T: bytemuck::Pod> Fold<A, T> {
    /// Folds every element into its result's accumulator.
    #[inline(always)]
    fn run(self, op: &Op, x: &View<'_>, out: &mut ViewMut<'_>) {
        let to = result_strides(op, x, out.dims());
        let loops = Loops::new(x.dims(), [&strides(x.dims()), &to]);
        let (n, along) = (loops.row, loops.step[1]);
        let src = x.as_slice::<T>();
        let mut acc = vec![self.start; out.ty.numel()];
        loops.rows(|[f, t]| {
            let row = &src[f..f + n];
            if along == 0 {
                acc[t] = (self.join)(acc[t], self.row(row));
            } else {
                for (a, &x) in acc[t..t + n].iter_mut().zip(row) {
                    *a = (self.step)(*a, x);
                }
            }
        });
        for (o, a) in out.as_mut_slice::<T>().iter_mut().zip(acc) {
            *o = (self.finish)(a);
        }
    }
    /// Folds a contiguous row, in eight independent lanes.
    #[inline(always)]
    fn row(&self, row: &[T]) -> A {
        let mut lanes = [self.start; 8];
        let chunks = row.chunks_exact(8);
        let tail = chunks.remainder();
        for c in chunks {
            for (a, &x) in lanes.iter_mut().zip(c) {
                *a = (self.step)(*a, x);
            }
        }
        let all = lanes.into_iter().reduce(self.join).unwrap_or(self.start);
        tail.iter().fold(all, |a, &x| (self.step)(a, x))
    }
}

fn samples(op: fn() -> Op) -> Vec<Sample> {
    let with = |dims: &[i64], keep| op().ints("dims", dims.iter().copied()).flag("keep", keep);
    let of = |from: &[usize], dims: &[i64], keep| Sample {
        op: with(dims, keep),
        inputs: vec![SampleInput::f32_in(from, 0.5, 1.5)],
    };
    let mut all = vec![
        of(&[4, 6], &[1], false),
        of(&[4, 6], &[0], true),
        of(&[2, 4, 6], &[0, 1], false),
        of(&[2, 4, 6], &[0, 2], true),
        of(&[6], &[0], false),
    ];
    all.push(Sample { op: with(&[1], false), inputs: vec![SampleInput::i64_in([2, 6], 1, 5)] });
    all
}

/// A reduction: name, documentation, combination of parts, folds per element type, gradient, import rules.
macro_rules! reduce {
    ($op:ident $method:ident $name:literal: $doc:literal, combine $combine:expr, linear $linear:literal,
     f32 $f32:expr, f64 $f64:expr, int $int:ident, grad $grad:expr, onnx [$($rule:expr),*]) => {
        #[doc = $doc]
        pub static $op: OpDef = OpDef {
            name: $name,
            doc: $doc,
            attrs: ATTRS,
            onnx: &[$($rule),*],
            infer,
            factors: |op, i, o| {
                let rule = rule(op, i, o, $combine);
                if $linear { rule.linear_in([0]) } else { rule }
            },
            work: |op, i, o| {
                let variant = if along_rows(op, i[0].rank()) { "" } else { "across" };
                Work { flops: i[0].numel() as f64, variant, ..Work::memory(i, o, 0.0) }
            },
            identity: |op, _, _| op.get_ints("dims").is_empty().then_some(0),
            gradient: $grad,
            kernel: |op, ins, outs| {
                let (x, out) = (&ins[0], &mut outs[0]);
                match x.dtype() {
                    DType::F32 => $f32.run(op, x, out),
                    DType::F64 => $f64.run(op, x, out),
                    DType::I64 => $int!(i64).run(op, x, out),
                    DType::I32 => $int!(i32).run(op, x, out),
                    DType::I8 => $int!(i8).run(op, x, out),
                    DType::U8 => $int!(u8).run(op, x, out),
                    d => return Err(no_kernel(op, d)),
                }
                Ok(())
            },
            samples: || samples(|| Op::new(&$op)),
        };
        impl Builder {
            #[doc = $doc]
            #[doc = ""]
            #[doc = "Over `dims`; with `keep` they stay, of size 1."]
            pub fn $method(&mut self, x: ValueId, dims: &[usize], keep: bool) -> Result<ValueId, OpError> {
                let mut sorted = dims.to_vec();
                sorted.sort_unstable();
                self.emit1(Op::new(&$op).ints("dims", sorted.iter().map(|&d| d as i64)).flag("keep", keep), &[x])
            }
        }
    };
}

/// `f(cx, reduced operand)` for an import rule that takes axes as an attribute or an operand.
macro_rules! rule {
    ($name:literal, $f:expr) => {
        OnnxRule { domain: "", op: $name, since: 1, lower: |cx| import(cx, $f) }
    };
}

macro_rules! sum_int {
    ($t:ty) => {
        Fold::<$t, $t> { start: 0, step: |a, x| a.wrapping_add(x), join: |a, b| a.wrapping_add(b), finish: |a| a }
    };
}
macro_rules! prod_int {
    ($t:ty) => {
        Fold::<$t, $t> { start: 1, step: |a, x| a.wrapping_mul(x), join: |a, b| a.wrapping_mul(b), finish: |a| a }
    };
}
macro_rules! max_int {
    ($t:ty) => {
        Fold::<$t, $t> { start: <$t>::MIN, step: |a, x| a.max(x), join: |a, b| a.max(b), finish: |a| a }
    };
}
macro_rules! min_int {
    ($t:ty) => {
        Fold::<$t, $t> { start: <$t>::MAX, step: |a, x| a.min(x), join: |a, b| a.min(b), finish: |a| a }
    };
}
macro_rules! max_float {
    ($t:ty) => {
        Fold::<$t, $t> {
            start: <$t>::NEG_INFINITY,
            step: |a, x| if x > a || x.is_nan() { x } else { a },
            join: |a, b| if b > a || b.is_nan() { b } else { a },
            finish: |a| a,
        }
    };
}
macro_rules! min_float {
    ($t:ty) => {
        Fold::<$t, $t> {
            start: <$t>::INFINITY,
            step: |a, x| if x < a || x.is_nan() { x } else { a },
            join: |a, b| if b < a || b.is_nan() { b } else { a },
            finish: |a| a,
        }
    };
}

reduce!(REDUCE_SUM reduce_sum "ReduceSum": "Sum over dims.", combine Some(ReduceKind::Sum), linear true,
f32 Fold::<f64, f32> { start: 0.0, step: |a, x| a + f64::from(x), join: |a, b| a + b, finish: |a| a as f32 },
f64 Fold::<f64, f64> { start: 0.0, step: |a, x| a + x, join: |a, b| a + b, finish: |a| a },
int sum_int,
grad Gradient::Rule(|cx| {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    Ok(vec![Some(spread(cx, dy)?)])
}),
onnx [
    rule!("ReduceSum", Builder::reduce_sum),
    rule!("ReduceMean", Builder::reduce_mean),
    rule!("ReduceL1", |b, x, dims, keep| {
        let a = b.abs(x)?;
        b.reduce_sum(a, dims, keep)
    }),
    rule!("ReduceL2", |b, x, dims, keep| in_stat_dtype(b, x, |b, x| {
        let square = b.mul(x, x)?;
        let sum = b.reduce_sum(square, dims, keep)?;
        b.sqrt(sum)
    })),
    rule!("ReduceSumSquare", |b, x, dims, keep| in_stat_dtype(b, x, |b, x| {
        let square = b.mul(x, x)?;
        b.reduce_sum(square, dims, keep)
    })),
    rule!("ReduceLogSum", |b, x, dims, keep| in_stat_dtype(b, x, |b, x| {
        let sum = b.reduce_sum(x, dims, keep)?;
        b.log(sum)
    })),
    rule!("ReduceLogSumExp", |b, x, dims, keep| in_stat_dtype(b, x, |b, x| log_sum_exp(b, x, dims, keep))),
    OnnxRule { domain: "", op: "GlobalAveragePool", since: 1, lower: |cx| {
        let x = cx.input(0)?;
        let spatial: Vec<usize> = (2..cx.b.ty(x).rank()).collect();
        Ok(vec![cx.b.reduce_mean(x, &spatial, true)?])
    } }
]);
reduce!(REDUCE_MAX reduce_max "ReduceMax": "Largest over dims; ties share the gradient evenly.",
    combine Some(ReduceKind::Max), linear false, f32 max_float!(f32), f64 max_float!(f64), int max_int,
    grad Gradient::Rule(extremum_grad), onnx [rule!("ReduceMax", Builder::reduce_max)]);
reduce!(REDUCE_MIN reduce_min "ReduceMin": "Smallest over dims; ties share the gradient evenly.",
    combine Some(ReduceKind::Min), linear false, f32 min_float!(f32), f64 min_float!(f64), int min_int,
    grad Gradient::Rule(extremum_grad), onnx [rule!("ReduceMin", Builder::reduce_min)]);
reduce!(REDUCE_PROD reduce_prod "ReduceProd": "Product over dims; the gradient needs operands other than 0.",
    combine None, linear false,
    f32 Fold::<f64, f32> { start: 1.0, step: |a, x| a * f64::from(x), join: |a, b| a * b, finish: |a| a as f32 },
    f64 Fold::<f64, f64> { start: 1.0, step: |a, x| a * x, join: |a, b| a * b, finish: |a| a },
    int prod_int,
    grad Gradient::Rule(|cx| {
        let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
        let scaled = cx.b.mul(dy, cx.outputs[0])?;
        let wide = spread(cx, scaled)?;
        Ok(vec![Some(cx.b.div(wide, cx.inputs[0])?)])
    }),
    onnx [rule!("ReduceProd", Builder::reduce_prod)]);

/// A result-shaped value under the operand's sizes.
fn spread(cx: &mut GradCx<'_>, v: ValueId) -> Result<ValueId, OpError> {
    let dims = cx.b.dims(cx.inputs[0]);
    let reduced = cx.op.get_ints("dims");
    let kept: Vec<usize> =
        dims.iter().enumerate().map(|(d, &n)| if reduced.contains(&(d as i64)) { 1 } else { n }).collect();
    let v = cx.b.reshape(v, &kept)?;
    cx.b.expand(v, &dims)
}

fn extremum_grad(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None]) };
    let reduced: Vec<usize> = cx.op.get_ints("dims").iter().map(|&d| d as usize).collect();
    let dtype = cx.b.ty(dy).dtype;
    let best = spread(cx, cx.outputs[0])?;
    let chosen = cx.b.equal(cx.inputs[0], best)?;
    let chosen = cx.b.cast(chosen, dtype)?;
    let ties = cx.b.reduce_sum(chosen, &reduced, cx.op.get_flag("keep"))?;
    let share = cx.b.div(dy, ties)?;
    let share = spread(cx, share)?;
    Ok(vec![Some(cx.b.mul(chosen, share)?)])
}

/// `f` of half floats in the element type of statistics, so that sums on the way to a small result do not overflow.
pub(super) fn in_stat_dtype(
    b: &mut Builder,
    x: ValueId,
    f: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId, OpError>,
) -> Result<ValueId, OpError> {
    let dtype = b.ty(x).dtype;
    if !dtype.is_float() {
        return f(b, x);
    }
    let wide = b.cast(x, stat_dtype(dtype))?;
    let y = f(b, wide)?;
    b.cast(y, dtype)
}

fn log_sum_exp(b: &mut Builder, x: ValueId, dims: &[usize], keep: bool) -> Result<ValueId, OpError> {
    let max = b.reduce_max(x, dims, true)?;
    // Of nothing but -inf it is -inf, where the difference of both would be NaN.
    let (lowest, zero) = (b.scalar_like(x, f64::NEG_INFINITY)?, b.scalar_like(x, 0.0)?);
    let hidden = b.equal(max, lowest)?;
    let max = b.where_(hidden, zero, max)?;
    let shifted = b.sub(x, max)?;
    let e = b.exp(shifted)?;
    let sum = b.reduce_sum(e, dims, keep)?;
    let log = b.log(sum)?;
    let sizes = b.dims(log);
    let max = b.reshape(max, &sizes)?;
    b.add(log, max)
}

fn import(
    cx: &mut ImportCx<'_>,
    f: fn(&mut Builder, ValueId, &[usize], bool) -> Result<ValueId, OpError>,
) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let rank = cx.b.ty(x).rank();
    let axes = cx.try_ints(1)?.or_else(|| cx.attr_ints("axes").map(<[i64]>::to_vec)).unwrap_or_default();
    let keep = cx.attr_int("keepdims", 1) != 0;
    let noop = cx.attr_int("noop_with_empty_axes", 0) != 0;
    let dims = match axes.is_empty() {
        // Over no dim, so that what is done per element (squares, absolute values) is still done.
        true if noop => Vec::new(),
        true => (0..rank).collect(),
        false => cx.axes(&axes, rank)?,
    };
    Ok(vec![f(cx.b, x, &dims, keep)?])
}

impl Builder {
    /// Mean over dims: the sum, divided by the number of elements.
    pub fn reduce_mean(&mut self, x: ValueId, dims: &[usize], keep: bool) -> Result<ValueId, OpError> {
        let sizes = self.dims(x);
        let n: usize = dims.iter().map(|&d| sizes.get(d).copied().unwrap_or(1)).product();
        if self.ty(x).dtype.is_float() {
            in_stat_dtype(self, x, |b, x| {
                let sum = b.reduce_sum(x, dims, keep)?;
                let scale = b.scalar_like(x, 1.0 / n as f64)?;
                b.mul(sum, scale)
            })
        } else {
            let sum = self.reduce_sum(x, dims, keep)?;
            let n = self.scalar_like(x, n as f64)?;
            self.div(sum, n)
        }
    }
    /// Undoes broadcasting to the sizes of `x`: sums over the dims along which a value of sizes `dims` was repeated.
    pub fn sum_to(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, OpError> {
        let from = self.dims(x);
        if from == dims {
            return Ok(x);
        }
        let lead = from
            .len()
            .checked_sub(dims.len())
            .ok_or_else(|| OpError(format!("sizes {from:?} do not come from broadcasting {dims:?}")))?;
        let repeated: Vec<usize> =
            (0..from.len()).filter(|&d| d < lead || (dims[d - lead] == 1 && from[d] != 1)).collect();
        let sum = self.reduce_sum(x, &repeated, false)?;
        self.reshape(sum, dims)
    }
}

/// Index of an extremum.
pub static ARG_MAX: OpDef = OpDef {
    name: "ArgMax",
    doc: "Index of the largest (or smallest) element along a dim, the first (or last) of equal ones.",
    attrs: &[("dim", AttrKind::Int), ("keep", AttrKind::Bool), ("smallest", AttrKind::Bool), ("last", AttrKind::Bool)],
    onnx: &[
        OnnxRule { domain: "", op: "ArgMax", since: 1, lower: |cx| import_arg(cx, false) },
        OnnxRule { domain: "", op: "ArgMin", since: 1, lower: |cx| import_arg(cx, true) },
    ],
    infer: |op, inputs| {
        let [x] = operands::<1>(inputs)?;
        let d = dim_attr(op, "dim", x.rank())?;
        if x.dims[d] == 0 {
            return Err(OpError(format!("{x} has no element along dim {d}")));
        }
        let mut dims = x.dims.clone();
        if op.get_flag("keep") {
            dims[d] = 1;
        } else {
            dims.remove(d);
        }
        Ok(vec![Type::new(DType::I64, dims)])
    },
    factors: |op, inputs, outputs| {
        let mut rule = RuleMaker::new(inputs, outputs);
        let at = op.get_int("dim") as usize;
        for (d, &size) in inputs[0].dims.iter().enumerate().filter(|&(d, _)| d != at) {
            let to = if d > at && !op.get_flag("keep") { d - 1 } else { d };
            rule.factor(dim_name(d), size, &[(0, d)], &[(0, to)]);
        }
        rule.finish(ReduceKind::Sum)
    },
    work: |_, i, o| Work { flops: i[0].numel() as f64, ..Work::memory(i, o, 0.0) },
    identity: never,
    gradient: Gradient::None,
    kernel: |op, ins, outs| {
        let (x, out) = (&ins[0], &mut outs[0]);
        match x.dtype() {
            DType::F32 => arg_extremum::<f32>(op, x, out),
            DType::F64 => arg_extremum::<f64>(op, x, out),
            DType::I64 => arg_extremum::<i64>(op, x, out),
            DType::I32 => arg_extremum::<i32>(op, x, out),
            d => return Err(no_kernel(op, d)),
        }
        Ok(())
    },
    samples: || {
        let of = |dims: &[usize], dim, keep, smallest, last| Sample {
            op: Op::new(&ARG_MAX).int("dim", dim).flag("keep", keep).flag("smallest", smallest).flag("last", last),
            inputs: vec![SampleInput::i64_in(dims, 0, 4)],
        };
        vec![
            of(&[4, 6], 1, false, false, false),
            of(&[4, 6], 0, true, true, true),
            of(&[2, 4, 6], 1, false, false, true),
        ]
    },
};

fn arg_extremum<T: bytemuck::Pod + PartialOrd>(op: &Op, x: &View<'_>, out: &mut ViewMut<'_>) {
    let at = op.get_int("dim") as usize;
    let (n, inner): (usize, usize) = (x.dims()[at], x.dims()[at + 1..].iter().product());
    let (smallest, last) = (op.get_flag("smallest"), op.get_flag("last"));
    let src = x.as_slice::<T>();
    for (i, o) in out.as_mut_slice::<i64>().iter_mut().enumerate() {
        let base = i / inner * n * inner + i % inner;
        let mut best = 0;
        for k in 1..n {
            let (new, old) = (src[base + k * inner], src[base + best * inner]);
            let better = if smallest { new < old } else { new > old };
            if better || (last && new == old) {
                best = k;
            }
        }
        *o = best as i64;
    }
}

fn import_arg(cx: &mut ImportCx<'_>, smallest: bool) -> Result<Vec<ValueId>, OpError> {
    let x = cx.input(0)?;
    let d = crate::onnx::import::axis(cx.attr_int("axis", 0), cx.b.ty(x).rank())?;
    let op = Op::new(&ARG_MAX)
        .int("dim", d as i64)
        .flag("keep", cx.attr_int("keepdims", 1) != 0)
        .flag("smallest", smallest)
        .flag("last", cx.attr_int("select_last_index", 0) != 0);
    Ok(vec![cx.emit(op, &[x])?])
}
