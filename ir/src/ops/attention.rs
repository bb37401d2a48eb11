//! `Attention`: softmax(q k' scale + mask) v per head, fused, with causal masks, sliding windows and grouped queries.
//!
//! Operands: `q[b,h,s,d]`, `k[b,hk,t,d]`, `v[b,hk,t,e]` with `hk` dividing `h` (each key head serves `h / hk` query heads in a
//! row), and optionally a mask of 4 dims that broadcasts to `[b,h,s,t]`: truth values (true: visible) or numbers to add.
//! Results: `out[b,h,s,e]`, and `lse[b,h,s]`, the log of each row's normaliser, kept for the backward pass.
//!
//! Causal: query `i` sees keys `j <= i + offset` (`offset`: the length of the cache); with a window, also `j > i + offset - window`.
//! Both are absolute indices: a shard of the queries knows its origin. A row that sees no key gives zeros; or, where `uniform`
//! says so, weighs all keys alike: softmax of scores that a large negative number was added to does that.
//!
//! With `layout="bshd"`, q, k, v, the result and their gradients have the sequence before the heads, as projections leave
//! them; masks and `lse` do not.
//!
//! Batch, heads and query rows can be split; keys stay whole.

mod import;
mod kernel;

use crate::builder::Builder;
use crate::dtype::DType;
use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::onnx::import::OnnxRule;
use crate::op::{Attr, AttrKind, Family, GradCx, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{expect_float, expect_operands, stat_dtype};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::never;
use crate::tensor::Type;

const ATTRS: &[(&str, AttrKind)] = &[
    ("scale", AttrKind::Float),
    ("causal", AttrKind::Bool),
    ("offset", AttrKind::Int),
    ("window", AttrKind::Int),
    ("uniform", AttrKind::Bool),
    ("layout", AttrKind::Str),
];

/// Also whether the mask's gradient is a result.
const GRAD_ATTRS: &[(&str, AttrKind)] = &[
    ("scale", AttrKind::Float),
    ("causal", AttrKind::Bool),
    ("offset", AttrKind::Int),
    ("window", AttrKind::Int),
    ("uniform", AttrKind::Bool),
    ("layout", AttrKind::Str),
    ("mask_grad", AttrKind::Bool),
];

/// Fused attention.
pub static ATTENTION: OpDef = OpDef {
    name: "Attention",
    doc: "softmax(q k' scale + mask) v per head: causal, sliding window, grouped queries, bias or mask",
    attrs: ATTRS,
    onnx: &[OnnxRule { domain: "", op: "Attention", since: 23, lower: import::attention }],
    infer,
    factors,
    work: |op, i, o| work(op, i, o, 2.0),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: kernel::forward,
    samples,
};

/// Gradients of attention: of q, k, v, delta, lse, dout (and mask) those of q, k, v (and mask, where `mask_grad` says),
/// with `delta = sum(out * dout) - dlse` per row.
pub static ATTENTION_GRAD: OpDef = OpDef {
    name: "AttentionGrad",
    doc: "gradients of Attention: of q, k, v, delta, lse, dout (and mask) those of q, k, v (and mask)",
    attrs: GRAD_ATTRS,
    onnx: &[],
    infer: infer_grad,
    factors: factors_grad,
    work: |op, i, o| work(op, i, o, 5.0),
    identity: never,
    gradient: Gradient::Internal("backward of Attention"),
    kernel: kernel::backward,
    samples: samples_grad,
};

/// The order of the dims of q, k, v and the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// `[batch, heads, sequence, size]`
    #[default]
    Bhsd,
    /// `[batch, sequence, heads, size]`
    Bshd,
}

impl Layout {
    fn of(op: &Op) -> Layout {
        if matches!(op.attr("layout"), Some(Attr::Str(l)) if l == "bshd") { Layout::Bshd } else { Layout::Bhsd }
    }
    /// Where batch, heads, sequence and size are.
    const fn dims(self) -> [usize; 4] {
        match self {
            Layout::Bhsd => [0, 1, 2, 3],
            Layout::Bshd => [0, 2, 1, 3],
        }
    }
    /// The sizes of batch, heads, sequence and size. Panics where there are not 4 dims.
    fn sizes(self, dims: &[usize]) -> [usize; 4] {
        self.dims().map(|d| dims[d])
    }
}

/// Settings of attention.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Attention {
    /// Factor of the scores, usually `1 / sqrt(d)`.
    pub scale: f64,
    /// Keys behind the query are hidden.
    pub causal: bool,
    /// Index of the first query among the keys.
    pub offset: usize,
    /// With `causal`, keys `window` or more before the query are hidden; 0: none are.
    pub window: usize,
    /// A query that sees no key weighs all keys alike.
    pub uniform: bool,
    /// Order of the dims.
    pub layout: Layout,
}

impl Attention {
    pub(crate) fn op(&self, def: &'static OpDef) -> Op {
        let op = Op::new(def)
            .float("scale", self.scale)
            .flag("causal", self.causal)
            .int("offset", self.offset as i64)
            .int("window", self.window as i64);
        let op = if self.uniform { op.flag("uniform", true) } else { op };
        if self.layout == Layout::Bshd { op.with("layout", Attr::Str("bshd".into())) } else { op }
    }
    pub(crate) fn of(op: &Op) -> Attention {
        Attention {
            scale: op.get_float("scale"),
            causal: op.get_flag("causal"),
            offset: op.get_int("offset").max(0) as usize,
            window: op.get_int("window").max(0) as usize,
            uniform: op.get_flag("uniform"),
            layout: Layout::of(op),
        }
    }
}

/// Checks q, k, v, mask; gives the types of out and lse.
fn check(op: &Op, q: &Type, k: &Type, v: &Type, mask: Option<&Type>) -> Result<[Type; 2], OpError> {
    let bad = |why: &str| OpError(format!("{} of {q}, {k}, {v}: {why}", op.name()));
    expect_float(op.name(), "q", q)?;
    if [q, k, v].iter().any(|t| t.rank() != 4 || t.dtype != q.dtype) {
        return Err(bad("q, k and v need 4 dims [batch, heads, sequence, size] and one element type"));
    }
    let layout = Layout::of(op);
    let ([b, h, s, d], [kb, hk, t, kd]) = (layout.sizes(&q.dims), layout.sizes(&k.dims));
    if b != kb || k.dims[..3] != v.dims[..3] || d != kd {
        return Err(bad("sizes do not fit"));
    }
    if hk == 0 || h % hk != 0 {
        return Err(bad(&format!("{hk} key heads do not divide {h} query heads")));
    }
    if let Some(m) = mask {
        let fits = m.rank() == 4 && m.dims.iter().zip([b, h, s, t]).all(|(&m, d)| m == 1 || m == d);
        if !fits || (m.dtype != DType::Bool && m.dtype != q.dtype) {
            return Err(bad(&format!("mask {m} must broadcast to [{b},{h},{s},{t}] and be bool or {}", q.dtype)));
        }
    }
    let out = layout.sizes(&[b, h, s, v.dims[3]]);
    Ok([Type::new(q.dtype, out), Type::new(stat_dtype(q.dtype), [b, h, s])])
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[3, 4])?;
    Ok(check(op, &inputs[0], &inputs[1], &inputs[2], inputs.get(3))?.into())
}

fn infer_grad(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[6, 7])?;
    let [out, lse] = check(op, &inputs[0], &inputs[1], &inputs[2], inputs.get(6))?;
    if inputs[3] != lse || inputs[4] != lse || inputs[5] != out {
        return Err(OpError(format!(
            "AttentionGrad: delta {}, lse {}, dout {} are not of types {lse}, {lse}, {out}",
            inputs[3], inputs[4], inputs[5]
        )));
    }
    let mut grads = inputs[..3].to_vec();
    if op.get_flag("mask_grad") {
        grads.extend(inputs.get(6).filter(|m| m.dtype.is_float()).cloned());
        if grads.len() == 3 {
            return Err(OpError("AttentionGrad: only a mask of numbers has a gradient".into()));
        }
    }
    Ok(grads)
}

/// Operands, or results, by the dims they have.
#[derive(Default)]
struct Sides<'a> {
    /// With the query's batch, heads and rows, in the layout.
    rows: &'a [usize],
    /// With the keys' batch and heads, in the layout.
    keys: &'a [usize],
    /// `[b, h, s]`
    stats: &'a [usize],
    /// Of the mask's sizes.
    mask: Option<usize>,
}

impl Sides<'_> {
    /// The (operand, dim) pairs that batch (0), heads (1) or rows (2) drive.
    fn at(&self, types: &[Type], layout: Layout, d: usize, size: usize, with_keys: bool) -> Vec<(usize, usize)> {
        let keys = if with_keys { self.keys } else { &[] };
        let mask = self.mask.filter(|&m| types[m].dims[d] == size);
        let laid = self.rows.iter().chain(keys).map(|&i| (i, layout.dims()[d]));
        laid.chain(self.stats.iter().copied().chain(mask).map(|i| (i, d))).collect()
    }
}

fn rule<'a>(op: &Op, i: &'a [Type], o: &'a [Type], ins: &Sides<'_>, outs: &Sides<'_>) -> RuleBuilder<'a> {
    let layout = Layout::of(op);
    let ([b, h, s, _], [_, hk, ..]) = (layout.sizes(&i[0].dims), layout.sizes(&i[1].dims));
    // With one key head for all, every rank has it, and query heads split alone.
    let grouped = hk > 1;
    let pairs =
        |d: usize, size: usize, keys: bool| (ins.at(i, layout, d, size, keys), outs.at(o, layout, d, size, keys));
    let (batch, heads, rows) = (pairs(0, b, true), pairs(1, h, grouped), pairs(2, s, false));
    RuleBuilder::new(i, o)
        .factor("b", b, &batch.0, &batch.1)
        .factor("heads", if grouped { hk } else { h }, &heads.0, &heads.1)
        .factor("s", s, &rows.0, &rows.1)
}

fn factors(op: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let ins = Sides { rows: &[0], keys: &[1, 2], mask: (i.len() > 3).then_some(3), ..Sides::default() };
    rule(op, i, o, &ins, &Sides { rows: &[0], stats: &[1], ..Sides::default() }).build(&[])
}

fn factors_grad(op: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let ins = Sides { rows: &[0, 5], keys: &[1, 2], stats: &[3, 4], mask: (i.len() > 6).then_some(6) };
    let outs = Sides { rows: &[0], keys: &[1, 2], stats: &[], mask: (o.len() > 3).then_some(3) };
    rule(op, i, o, &ins, &outs).build(&[ReduceKind::Sum; 4]).linear_in([3, 5])
}

/// Keys that a query sees on average over the last `s` queries of the unsharded tensor, whose last one sees all `t`. Of shards
/// of the queries the last has most to do, and the others wait for it.
fn mean_seen(a: &Attention, s: f64, t: f64) -> f64 {
    if !a.causal {
        return t;
    }
    let offset = (a.offset as f64).min(t);
    let queries = (t - offset).max(1.0);
    let width = if a.window > 0 { (a.window as f64).min(t) } else { t };
    // Query i of them sees min(offset + i, width), counted from 1: rising, then level.
    let seen_by_first = |n: f64| {
        let rising = (width - offset).clamp(0.0, n);
        rising * (offset + (rising + 1.0) / 2.0) + (n - rising) * width
    };
    let s = s.clamp(1.0, queries);
    (seen_by_first(queries) - seen_by_first(queries - s)) / s
}

/// `products` matrix products of the size of the scores that are seen.
fn work(op: &Op, inputs: &[Type], outputs: &[Type], products: f64) -> Work {
    let layout = Layout::of(op);
    let ([b, h, s, d], [_, _, t, e]) = (layout.sizes(&inputs[0].dims), layout.sizes(&inputs[2].dims));
    let pairs = (b * h * s) as f64 * mean_seen(&Attention::of(op), s as f64, t as f64);
    let size = (d + e) as f64 / 2.0;
    let flops = 2.0 * products * pairs * size;
    let causal = op.get_flag("causal");
    // A block of queries sees all keys that its last one sees: the others see half a block less on average.
    let hidden = if causal { (b * h * s) as f64 * s.min(kernel::ROWS).saturating_sub(1) as f64 / 2.0 } else { 0.0 };
    let scores = (pairs + hidden).min((b * h * s * t) as f64);
    let plain = if op.name() == ATTENTION.name { 3 } else { 6 };
    let variant = match (causal, inputs.len() > plain) {
        (false, false) => "",
        (true, false) => "causal",
        (false, true) => "masked",
        (true, true) => "causal masked",
    };
    Work { family: Family::Attention, flops, scores, variant, ..Work::memory(inputs, outputs, 0.0) }
}

fn grad_op(op: &Op) -> Op {
    let mut grad = Op::new(&ATTENTION_GRAD);
    for (name, value) in op.attrs() {
        grad = grad.with(name, value.clone());
    }
    grad
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let (out, lse) = (cx.outputs[0], cx.outputs[1]);
    let (row_type, out_type) = (cx.b.ty(lse).clone(), cx.b.ty(out).clone());
    if cx.grads.iter().all(Option::is_none) {
        return Ok(vec![None; cx.inputs.len()]);
    }
    let zeros = |b: &mut Builder, ty: &Type| {
        let zero = b.scalar(ty.dtype, 0.0);
        b.expand(zero, &ty.dims)
    };
    let (dout, mut delta) = match cx.grads[0] {
        Some(dout) => {
            let (wide_out, wide_dout) = (cx.b.cast(out, row_type.dtype)?, cx.b.cast(dout, row_type.dtype)?);
            let product = cx.b.mul(wide_out, wide_dout)?;
            let delta = cx.b.reduce_sum(product, &[3], false)?;
            (dout, if Layout::of(cx.op) == Layout::Bshd { cx.b.transpose(delta, &[0, 2, 1])? } else { delta })
        }
        None => (zeros(cx.b, &out_type)?, zeros(cx.b, &row_type)?),
    };
    if let Some(dlse) = cx.grads[1] {
        delta = cx.b.sub(delta, dlse)?;
    }
    let mut op = grad_op(cx.op);
    if cx.wanted.get(3) == Some(&true) {
        op = op.flag("mask_grad", true);
    }
    let mut operands = vec![cx.inputs[0], cx.inputs[1], cx.inputs[2], delta, lse, dout];
    operands.extend(cx.inputs.get(3));
    let grads = cx.b.emit(op, &operands)?;
    Ok((0..cx.inputs.len()).map(|i| grads.get(i).copied().filter(|_| cx.wanted[i])).collect())
}

impl Builder {
    /// Fused attention: the result, and the log of each row's normaliser.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn attention(
        &mut self,
        settings: &Attention,
        [q, k, v]: [ValueId; 3],
        mask: Option<ValueId>,
    ) -> Result<(ValueId, ValueId), OpError> {
        let operands: Vec<ValueId> = [q, k, v].into_iter().chain(mask).collect();
        let outs = self.emit(settings.op(&ATTENTION), &operands)?;
        Ok((outs[0], outs[1]))
    }
}

fn samples() -> Vec<Sample> {
    let plain = Attention { scale: 0.5, ..Attention::default() };
    let causal = Attention { causal: true, ..plain };
    let rows_first = Attention { layout: Layout::Bshd, ..causal };
    let case = |a: Attention, q: [usize; 4], k: [usize; 3], mask: Option<SampleInput>| {
        let [hk, t, e] = k;
        let operands = [q, [q[0], hk, t, q[3]], [q[0], hk, t, e]];
        let mut inputs = Vec::from(operands.map(|dims| SampleInput::f32(a.layout.sizes(&dims))));
        inputs.extend(mask);
        Sample { op: a.op(&ATTENTION), inputs }
    };
    vec![
        case(plain, [2, 6, 4, 4], [6, 6, 2], None),
        case(causal, [2, 12, 6, 4], [6, 6, 4], None),
        case(causal, [2, 6, 6, 4], [1, 6, 4], Some(SampleInput::f32([1, 1, 6, 6]))),
        case(Attention { offset: 2, window: 3, ..causal }, [2, 2, 6, 4], [2, 8, 4], None),
        case(plain, [2, 4, 6, 4], [2, 6, 4], Some(SampleInput::f32([2, 4, 6, 6]))),
        case(plain, [2, 2, 4, 2], [2, 6, 2], Some(SampleInput::bool([2, 1, 1, 6]))),
        case(rows_first, [2, 6, 4, 4], [2, 4, 2], None),
        case(Attention { uniform: true, ..rows_first }, [2, 4, 6, 4], [2, 6, 4], Some(SampleInput::bool([2, 1, 6, 6]))),
        case(
            Attention { uniform: true, causal: false, ..rows_first },
            [2, 2, 4, 2],
            [2, 2, 2],
            Some(SampleInput::bool([2, 1, 1, 2])),
        ),
    ]
}

/// Normalisers large enough that weights stay below 1; the operator is a function of any `delta` and `lse`.
fn samples_grad() -> Vec<Sample> {
    samples()
        .into_iter()
        .filter_map(|s| {
            let types: Vec<Type> = s.inputs.iter().map(|i| i.ty.clone()).collect();
            let outs = s.op.infer(&types).ok()?;
            let mut op = grad_op(&s.op);
            if types.get(3).is_some_and(|m| m.dtype.is_float()) {
                op = op.flag("mask_grad", true);
            }
            let mut given = s.inputs.into_iter();
            let mut inputs: Vec<SampleInput> = given.by_ref().take(3).collect();
            inputs.push(SampleInput::f32(&outs[1].dims[..]));
            inputs.push(SampleInput::f32_in(&outs[1].dims[..], 2.0, 3.0));
            inputs.push(SampleInput::f32(&outs[0].dims[..]));
            inputs.extend(given);
            Some(Sample { op, inputs })
        })
        .collect()
}
