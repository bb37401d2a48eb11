//! Which operators are timed on which operands, and the costs fitted to them.
//!
//! Matrix products, attention and convolutions on operands as transformers have them: every layout of forward and backward. All
//! other operators of the table on their own samples, enlarged: a new operator is measured by being there.

use std::collections::BTreeMap;

use autoshard_cost_models::compute::{OperatorCost, Tile};
use autoshard_ir::op::{Attr, Family, OpDef, Sample, SampleInput};
use autoshard_ir::ops::{self, TABLE};
use autoshard_ir::{DType, Op, Type};

use super::bench::{Case, Timed};
use super::fit::{Fit, fit, quantile};

/// Bytes that enlarged samples move: one where calls count, one where bytes do.
const SIZES: [f64; 2] = [16e3, 512e3];
/// Bytes of operands and results that an enlarged sample has at most.
const LARGEST: usize = 8 << 20;
/// Samples of an operator that are enlarged.
const FEW: usize = 4;

/// Every case.
pub fn cases() -> Vec<Case> {
    let mut all = products();
    all.extend(attention());
    all.extend(convolutions());
    for def in TABLE {
        all.extend(enlarged(def));
    }
    all
}

/// Whether an operator has cases of its own.
fn special(name: &str) -> bool {
    ["Einsum", "Attention", "AttentionGrad", "Conv", "ConvGradInput", "ConvGradWeight"].contains(&name)
}

fn einsum(eq: &str, x: [usize; 2], y: [usize; 2], batch: usize) -> Option<Case> {
    // The first letter of a term of three is the batch.
    let dims = |term: &str, [a, b]: [usize; 2]| -> Vec<usize> {
        if term.len() == 3 { vec![batch, a / batch, b] } else { vec![a, b] }
    };
    let (ins, _) = eq.split_once("->")?;
    let (tx, ty) = ins.split_once(',')?;
    let op = Op::new(ops::find("Einsum")?).with("eq", Attr::Str(eq.into()));
    Case::whole(op, vec![SampleInput::f32(dims(tx, x)), SampleInput::f32(dims(ty, y))])
}

/// A projection, its gradient of the operand, and that of the weight, of several tokens and widths.
fn products() -> Vec<Case> {
    let mut all = Vec::new();
    for tokens in [64, 256, 1024] {
        for (k, n) in [(16, 64), (64, 16), (64, 64), (64, 256), (256, 64), (32, 128), (256, 256), (512, 512)] {
            if tokens * k * n > 1024 * 256 * 256 {
                continue;
            }
            let batch = 8;
            all.extend(einsum("bsk,kn->bsn", [tokens, k], [k, n], batch));
            all.extend(einsum("bsk,nk->bsn", [tokens, k], [n, k], batch));
            all.extend(einsum("bsn,kn->bsk", [tokens, n], [k, n], batch));
            all.extend(einsum("bsk,bsn->kn", [tokens, k], [tokens, n], batch));
        }
    }
    all.extend(einsum("bsk,kn->bsn", [512, 512], [512, 512], 8));
    all
}

fn attention() -> Vec<Case> {
    let mut all = Vec::new();
    let stated = |def: &'static OpDef, causal: bool| {
        let op = Op::new(def).float("scale", 0.25).flag("causal", causal).int("offset", 0).int("window", 0);
        op.with("layout", Attr::Str("bshd".into()))
    };
    let (Some(forward), Some(backward)) = (ops::find("Attention"), ops::find("AttentionGrad")) else { return all };
    let f32 = |dims: [usize; 4]| SampleInput::f32(dims);
    // Masks that hide nothing, as those of sequences without padding. Short sequences tell what a row costs.
    let heads = 4;
    for (causal, masked) in [(true, true), (true, false), (false, true), (false, false)] {
        for (b, groups, s, d) in [
            (16, 4, 8, 32),
            (16, 4, 20, 16),
            (4, 4, 32, 16),
            (16, 2, 32, 8),
            (4, 1, 64, 8),
            (16, 4, 64, 16),
            (4, 4, 64, 64),
            (4, 1, 128, 8),
            (4, 4, 128, 32),
            (4, 4, 128, 64),
        ] {
            let (q, k) = ([b, s, heads, d], [b, s, groups, d]);
            let mask = || masked.then(|| SampleInput { range: (1.0, 2.0), ..SampleInput::bool([b, 1, 1, s]) });
            let inputs = [f32(q), f32(k), f32(k)].into_iter().chain(mask()).collect();
            all.extend(Case::whole(stated(forward, causal), inputs));
            let stats = [b, heads, s];
            let (delta, lse) = (SampleInput::f32(stats), SampleInput::f32_in(stats, 4.0, 5.0));
            let inputs = [f32(q), f32(k), f32(k), delta, lse, f32(q)].into_iter().chain(mask()).collect();
            all.extend(Case::whole(stated(backward, causal), inputs));
        }
    }
    all
}

/// Patches, 3 x 3 and 1 x 1 kernels, with their gradients.
fn convolutions() -> Vec<Case> {
    let mut all = Vec::new();
    // Samples, channels, side, channels of the result, side of the kernel, stride, padding.
    for [n, c, side, o, kernel, stride, pad] in [
        [4, 3, 32, 64, 4, 4, 0],
        [16, 3, 32, 64, 8, 8, 0],
        [32, 3, 32, 32, 4, 4, 0],
        [32, 3, 48, 64, 8, 8, 0],
        [2, 16, 16, 16, 3, 1, 1],
        [2, 16, 16, 32, 3, 2, 1],
        [2, 64, 8, 64, 3, 1, 1],
        [2, 64, 8, 64, 1, 1, 0],
    ] {
        let window = |op: Op| {
            let twice = |x: usize| [x as i64; 2];
            op.ints("strides", twice(stride)).ints("pads", [pad as i64; 4]).ints("dilations", [1, 1])
        };
        let (x, w) = (SampleInput::f32([n, c, side, side]), SampleInput::f32([o, c, kernel, kernel]));
        let Some(def) = ops::find("Conv") else { continue };
        let (x_dims, w_dims) = (x.ty.dims.clone(), w.ty.dims.clone());
        let Some(forward) = Case::whole(window(Op::new(def)), vec![x, w]) else { continue };
        let y = forward.outputs[0].dims.clone();
        all.push(forward);
        for (name, of, operands) in
            [("ConvGradInput", &x_dims, [&y, &w_dims]), ("ConvGradWeight", &w_dims, [&x_dims, &y])]
        {
            let Some(def) = ops::find(name) else { continue };
            let op = window(Op::new(def).ints("dims", of.iter().map(|&d| d as i64)));
            all.extend(Case::whole(op, operands.map(|d| SampleInput::f32(d.clone())).into()));
        }
    }
    all
}

/// The first samples of an operator that have something to enlarge, each in every size.
fn enlarged(def: &'static OpDef) -> Vec<Case> {
    let work = |s: &Sample| {
        let types: Vec<Type> = s.inputs.iter().map(|i| i.ty.clone()).collect();
        s.op.infer(&types).ok().map(|outputs| s.op.work(&types, &outputs))
    };
    let measured = |s: &Sample| {
        let large = s.inputs.iter().any(|i| i.ty.numel() > 1) || s.inputs.is_empty();
        large && work(s).is_some_and(|w| matches!(w.family, Family::Memory | Family::Gather))
    };
    if special(def.name) {
        return Vec::new();
    }
    let samples = || (def.samples)().into_iter().filter(measured);
    // Floats are what steps are made of.
    let float = |s: &Sample| s.inputs.iter().any(|i| i.ty.dtype == DType::F32);
    let floats = samples().filter(float).take(FEW).count();
    let few: Vec<Sample> = samples().filter(|s| floats == 0 || float(s)).take(FEW).collect();
    few.iter().flat_map(|s| SIZES.iter().filter_map(|bytes| enlarge(s, *bytes))).collect()
}

/// The sample with all sizes multiplied by the factor that brings its bytes near to a number, but not beyond. Where an attribute
/// ties sizes down, only those are multiplied that can be split, which no attribute does.
fn enlarge(s: &Sample, bytes: f64) -> Option<Case> {
    let mut found = None;
    for factor in 1.. {
        let Some(case) = all_dims(s, factor).or_else(|| split_dims(s, factor)) else { break };
        let moved = case.work().bytes;
        // Tables of which few rows are read grow without work.
        if (moved > bytes || case.bytes() > LARGEST) && found.is_some() {
            break;
        }
        // Nothing grows any more, or not with the factor.
        let grown = found.as_ref().is_none_or(|f: &Case| moved > f.work().bytes);
        found = Some(case);
        if !grown || factor >= 1 << 12 {
            break;
        }
    }
    found
}

fn multiplied(input: &SampleInput, dims: Vec<usize>) -> SampleInput {
    SampleInput { ty: Type::new(input.ty.dtype, dims), range: input.range }
}

fn all_dims(s: &Sample, factor: usize) -> Option<Case> {
    let times = |d: &usize| if *d > 1 { d * factor } else { *d };
    let inputs = s.inputs.iter().map(|i| multiplied(i, i.ty.dims.iter().map(times).collect())).collect();
    Case::whole(s.op.clone(), inputs)
}

fn split_dims(s: &Sample, factor: usize) -> Option<Case> {
    let types: Vec<Type> = s.inputs.iter().map(|i| i.ty.clone()).collect();
    let outputs = s.op.infer(&types).ok()?;
    let rule = s.op.factors(&types, &outputs);
    let times = |dims: &[usize], by: &[Option<autoshard_ir::factor::FactorId>]| -> Vec<usize> {
        dims.iter().zip(by).map(|(d, f)| if f.is_some() { d * factor } else { *d }).collect()
    };
    let inputs = s.inputs.iter().zip(&rule.inputs).map(|(i, by)| multiplied(i, times(&i.ty.dims, by))).collect();
    let outputs = outputs.iter().zip(&rule.outputs).map(|(o, by)| Type::new(o.dtype, times(&o.dims, by))).collect();
    Some(Case { op: s.op.clone(), inputs, outputs })
}

/// What was fitted.
pub struct Costs {
    /// Rate of large matrix products, FLOP/s.
    pub peak: f64,
    /// Prologue and epilogue of a tile, seconds.
    pub tile_s: f64,
    /// The kernel's tile.
    pub tile: Tile,
    /// By operator.
    pub operators: BTreeMap<String, OperatorCost>,
    /// By operator: median error of the fit over its cases, and how many there were.
    pub errors: BTreeMap<String, (f64, usize)>,
    /// Median of the spreads of all cases.
    pub spread: f64,
    /// Cases that could not run.
    pub failed: Vec<String>,
}

/// Tiles that matrix products of CPUs are made of: rows and columns that fit the registers.
const TILES: [[usize; 2]; 6] = [[8, 32], [6, 16], [12, 4], [24, 4], [4, 24], [16, 6]];

fn rate(seconds_per: f64) -> Option<f64> {
    // Beyond 1e15 per second a term is no more than rounding.
    (seconds_per > 1e-15).then(|| 1e-9 / seconds_per)
}

/// Fits costs to what was timed.
pub fn costs(cases: &[Case], timed: &[Result<Timed, String>]) -> Result<Costs, String> {
    let mut by_name: BTreeMap<String, Vec<(&Case, Timed)>> = BTreeMap::new();
    let mut failed = Vec::new();
    let mut spreads = Vec::new();
    for (case, t) in cases.iter().zip(timed) {
        match t {
            Ok(t) => {
                spreads.push(t.spread);
                let variant = case.work().variant;
                let name =
                    if variant.is_empty() { case.op.name().into() } else { format!("{} {variant}", case.op.name()) };
                by_name.entry(name).or_default().push((case, *t));
            }
            Err(e) => failed.push(e.clone()),
        }
    }
    let products = by_name.remove("Einsum").unwrap_or_default();
    let (tile, fitted) = TILES
        .iter()
        .map(|&[m, n]| (Tile { m, n, rate: 1.0 }, product_fit(&products, [m, n])))
        .min_by(|a, b| a.1.error.total_cmp(&b.1.error))
        .ok_or("no tile")?;
    let [call, flop, tile_s, byte] = fitted.terms[..] else {
        return Err(format!("no matrix product could be timed: {}", failed.join("; ")));
    };
    if flop <= 0.0 {
        return Err("the times of matrix products do not grow with their arithmetic".into());
    }
    let mut operators = BTreeMap::new();
    let mut errors = BTreeMap::new();
    let product = OperatorCost { call_us: call * 1e6, gb_s: rate(byte), ..OperatorCost::default() };
    operators.insert("Einsum".to_string(), product);
    errors.insert("Einsum".to_string(), (fitted.error, products.len()));
    for (name, list) in by_name {
        let arithmetic = special(name.split(' ').next().unwrap_or_default());
        let row = |(case, t): &(&Case, Timed)| {
            let w = case.work();
            let amounts = if arithmetic { vec![1.0, w.bytes, w.flops, w.scores] } else { vec![1.0, w.bytes] };
            (amounts, t.seconds)
        };
        let f = fit(&list.iter().map(row).collect::<Vec<_>>());
        let term = |i: usize| f.terms.get(i).copied().unwrap_or(0.0);
        let cost = OperatorCost {
            call_us: term(0) * 1e6,
            gb_s: rate(term(1)),
            gflops: rate(term(2)),
            scores_g_s: rate(term(3)),
        };
        operators.insert(name.clone(), cost);
        errors.insert(name, (f.error, list.len()));
    }
    let spread = quantile(&mut spreads, 0.5);
    Ok(Costs { peak: 1.0 / flop, tile_s, tile, operators, errors, spread, failed })
}

/// Terms: calls, arithmetic of whole tiles, tiles, bytes.
fn product_fit(products: &[(&Case, Timed)], [tm, tn]: [usize; 2]) -> Fit {
    let row = |(case, t): &(&Case, Timed)| {
        let w = case.work();
        let [batch, m, n, k] = w.gemm.unwrap_or_default();
        let tiles = (batch * m.div_ceil(tm) * n.div_ceil(tn)) as f64;
        (vec![1.0, tiles * 2.0 * (tm * tn * k) as f64, tiles, w.bytes], t.seconds)
    };
    fit(&products.iter().map(row).collect::<Vec<_>>())
}
