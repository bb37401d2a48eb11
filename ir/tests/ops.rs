//! Properties that every entry of the operator table must have, tested on its samples. Nothing here knows an operator by
//! name: a new line in the table is tested by being there.
//!
//! - Entries are complete, and their factor rules consistent with the types.
//! - Every split that a factor rule allows gives the unsharded result, alone and in pairs; so do partial sums passed
//!   through operands that a rule calls linear.
//! - Gradient rules agree with central differences.
//! - Operands that do not fit are refused with an error, not a panic.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use autoshard_ir::convert::{from_f64, to_f64};
use autoshard_ir::factor::{FactorId, FactorRule, ReduceKind};
use autoshard_ir::op::{Family, GradCx, Gradient, Sample};
use autoshard_ir::ops::TABLE;
use autoshard_ir::tensor::{View, ViewMut};
use autoshard_ir::{Builder, DType, Op, Tensor, Type, interp};

/// Reproducible numbers (splitmix64, Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
    fn tensor(&mut self, ty: &Type, (low, high): (f64, f64)) -> Tensor {
        let integer = !ty.dtype.is_float();
        let xs: Vec<f64> = (0..ty.numel())
            .map(|_| low + self.unit() * (high - low))
            .map(|x| if integer { x.floor() } else { x })
            .collect();
        tensor(ty.clone(), &xs)
    }
}

fn tensor(ty: Type, xs: &[f64]) -> Tensor {
    let mut t = Tensor::zeros(ty);
    from_f64(t.dtype(), xs.iter().copied(), t.bytes_mut());
    t
}

fn values(t: &Tensor) -> Vec<f64> {
    to_f64(t.dtype(), t.bytes())
}

/// A sample with its operands drawn.
struct Case {
    /// `Name{attrs} (types)`, for messages.
    what: String,
    op: Op,
    inputs: Vec<Tensor>,
    outputs: Vec<Type>,
    rule: FactorRule,
}

impl Case {
    fn types(&self) -> Vec<Type> {
        self.inputs.iter().map(|t| t.ty().clone()).collect()
    }
    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        interp::apply(&self.op, inputs, &self.outputs).map_err(|e| format!("{}: {e}", self.what))
    }
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for def in TABLE {
        for (n, Sample { op, inputs }) in (def.samples)().into_iter().enumerate() {
            let types: Vec<Type> = inputs.iter().map(|i| i.ty.clone()).collect();
            let shown: Vec<String> = types.iter().map(Type::to_string).collect();
            let what = format!("{op} ({})", shown.join(", "));
            let outputs = op.infer(&types).unwrap_or_else(|e| panic!("{what}: {e}"));
            let rule = op.factors(&types, &outputs);
            let mut random = Random(n as u64);
            let inputs = inputs.iter().map(|i| random.tensor(&i.ty, i.range)).collect();
            all.push(Case { what, op, inputs, outputs, rule });
        }
    }
    all
}

/// Panics with every failure at once.
fn report(failures: Vec<String>) {
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn entries_are_complete() {
    let mut failures = Vec::new();
    let (mut names, mut imports) = (BTreeSet::new(), BTreeSet::new());
    for def in TABLE {
        let mut fail = |why: &str| failures.push(format!("{}: {why}", def.name));
        if !names.insert(def.name) {
            fail("is there twice");
        }
        if def.doc.len() < 4 {
            fail("has no documentation");
        }
        let attrs: BTreeSet<&str> = def.attrs.iter().map(|(n, _)| *n).collect();
        if attrs.len() != def.attrs.len() {
            fail("has an attribute twice");
        }
        for r in def.onnx {
            if !imports.insert((r.domain, r.op, r.since)) {
                fail(&format!("imports {} of opset {}, which another rule does", r.op, r.since));
            }
        }
        let samples = (def.samples)();
        if samples.is_empty() {
            fail("has no sample");
        }
        let float = samples.iter().any(|s| s.inputs.iter().any(|i| i.ty.dtype.is_float()));
        if matches!(def.gradient, Gradient::Rule(_)) && !float {
            fail("has a gradient, but no sample with a float operand");
        }
        if samples.iter().any(|s| !std::ptr::eq(s.op.def, *def)) {
            fail("has a sample of another operator");
        }
    }
    report(failures);
}

#[test]
fn rules_fit_their_types() {
    let mut failures = Vec::new();
    for c in cases() {
        let mut fail = |why: String| failures.push(format!("{}: {why}", c.what));
        let r = &c.rule;
        let shapes = |types: &[Type]| types.iter().map(Type::rank).collect::<Vec<_>>();
        let ranks = |dims: &[Vec<Option<FactorId>>]| dims.iter().map(Vec::len).collect::<Vec<_>>();
        if ranks(&r.inputs) != shapes(&c.types()) || ranks(&r.outputs) != shapes(&c.outputs) {
            fail("the rule has other ranks than the types".into());
            continue;
        }
        if r.combine.len() != c.outputs.len() {
            fail("the rule has other results than the operator".into());
            continue;
        }
        for (i, factor) in r.factors.iter().enumerate() {
            let id = Some(FactorId(i as u8));
            let mut drives = 0;
            for (dims, ty) in r.inputs.iter().zip(&c.types()).chain(r.outputs.iter().zip(&c.outputs)) {
                let at: Vec<usize> = (0..dims.len()).filter(|&d| dims[d] == id).collect();
                drives += at.len();
                if at.len() > 1 {
                    fail(format!("factor {} drives two dims of one value", factor.name));
                }
                if at.iter().any(|&d| ty.dims[d] % factor.size != 0) {
                    fail(format!("factor {} of size {} does not divide {ty}", factor.name, factor.size));
                }
            }
            if drives == 0 {
                fail(format!("factor {} drives nothing", factor.name));
            }
            if factor.size < 2 {
                fail(format!("factor {} of size {} cannot be split", factor.name, factor.size));
            }
            for (dims, combine) in r.outputs.iter().zip(&r.combine) {
                if !dims.contains(&id) && combine.is_none() {
                    fail(format!("a result lacks factor {} and does not say how parts combine", factor.name));
                }
            }
        }
        for set in &r.linear {
            if set.is_empty() || set.iter().any(|&i| i >= c.inputs.len()) {
                fail(format!("{set:?} is no set of operands"));
            } else if set.iter().any(|&i| c.inputs[i].dtype() == DType::Bool) {
                fail(format!("truth values cannot be partial sums, as {set:?} says"));
            }
        }
        let work = c.op.work(&c.types(), &c.outputs);
        let sized = c.outputs.iter().any(|t| t.numel() > 0) && work.family != Family::Free;
        if !(work.flops >= 0.0 && work.bytes >= 0.0) || (sized && work.bytes == 0.0) {
            fail(format!("work is {work:?}"));
        }
    }
    report(failures);
}

/// One split: a factor and how many ways.
type Split = (FactorId, usize);

/// The part of a value at coordinates (one per split): origin and sizes.
fn part(ty: &Type, dims: &[Option<FactorId>], splits: &[Split], at: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let (mut origin, mut size) = (vec![0; ty.rank()], ty.dims.clone());
    for (&(f, ways), &k) in splits.iter().zip(at) {
        for d in 0..ty.rank() {
            if dims[d] == Some(f) {
                size[d] /= ways;
                origin[d] = k * size[d];
            }
        }
    }
    (origin, size)
}

/// Flat indices of the elements of a box, row-major.
fn box_indices(global: &[usize], origin: &[usize], size: &[usize]) -> Vec<usize> {
    let n: usize = size.iter().product();
    (0..n)
        .map(|mut k| {
            let (mut flat, mut stride) = (0, 1);
            for d in (0..size.len()).rev() {
                flat += (origin[d] + k % size[d]) * stride;
                k /= size[d];
                stride *= global[d];
            }
            flat
        })
        .collect()
}

fn combine(kind: ReduceKind, parts: &[f64]) -> f64 {
    match kind {
        ReduceKind::Sum => parts.iter().sum(),
        ReduceKind::Max => parts.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ReduceKind::Min => parts.iter().copied().fold(f64::INFINITY, f64::min),
        ReduceKind::LogSumExp => {
            let max = parts.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            max + parts.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
        }
    }
}

/// Runs the operator on parts and puts the parts of each result together.
fn sharded(c: &Case, splits: &[Split]) -> Result<Vec<Vec<f64>>, String> {
    let ranks: usize = splits.iter().map(|s| s.1).product();
    // Per result and element: what each rank that holds it says.
    let mut said: Vec<Vec<Vec<f64>>> = c.outputs.iter().map(|t| vec![Vec::new(); t.numel()]).collect();
    for rank in 0..ranks {
        let (mut rest, mut at) = (rank, Vec::new());
        for &(_, ways) in splits {
            at.push(rest % ways);
            rest /= ways;
        }
        let local: Vec<(Tensor, Vec<usize>)> = c
            .inputs
            .iter()
            .zip(&c.rule.inputs)
            .map(|(t, dims)| {
                let (origin, size) = part(t.ty(), dims, splits, &at);
                let xs = values(t);
                let mine: Vec<f64> = box_indices(t.dims(), &origin, &size).iter().map(|&i| xs[i]).collect();
                (tensor(Type::new(t.dtype(), size), &mine), origin)
            })
            .collect();
        let views: Vec<View<'_>> = local
            .iter()
            .zip(&c.inputs)
            .map(|((t, origin), whole)| View { origin: origin.clone(), global: whole.dims().to_vec(), ..t.view() })
            .collect();
        let places: Vec<(Vec<usize>, Vec<usize>)> =
            c.outputs.iter().zip(&c.rule.outputs).map(|(ty, dims)| part(ty, dims, splits, &at)).collect();
        let mut results: Vec<Tensor> = c
            .outputs
            .iter()
            .zip(&places)
            .map(|(ty, (_, size))| {
                // Memory is not cleared in arenas: a kernel must write every element.
                let mut t = Tensor::zeros(Type::new(ty.dtype, size.clone()));
                t.bytes_mut().fill(0x5a);
                t
            })
            .collect();
        let mut outs: Vec<ViewMut<'_>> = results
            .iter_mut()
            .zip(&c.outputs)
            .zip(&places)
            .map(|((t, whole), (origin, _))| ViewMut {
                origin: origin.clone(),
                global: whole.dims.clone(),
                ..t.view_mut()
            })
            .collect();
        c.op.run(&views, &mut outs).map_err(|e| e.to_string())?;
        let types = |side: &mut dyn Iterator<Item = &Tensor>| side.map(|t| t.ty().clone()).collect::<Vec<_>>();
        let (ins, outs) = (types(&mut local.iter().map(|l| &l.0)), types(&mut results.iter()));
        if c.op.is_view(&ins, &outs) && local[0].0.bytes() != results[0].bytes() {
            return Err(format!("of {ins:?} it calls itself a view, but its result is not its operand's bytes"));
        }
        for ((said, t), (ty, (origin, size))) in said.iter_mut().zip(&results).zip(c.outputs.iter().zip(&places)) {
            for (i, x) in box_indices(&ty.dims, origin, size).into_iter().zip(values(t)) {
                said[i].push(x);
            }
        }
    }
    let mut all = Vec::new();
    for ((said, kind), dims) in said.iter().zip(&c.rule.combine).zip(&c.rule.outputs) {
        let lacked: usize = splits.iter().filter(|(f, _)| !dims.contains(&Some(*f))).map(|s| s.1).product();
        let mut whole = Vec::with_capacity(said.len());
        for parts in said {
            if parts.len() != lacked {
                return Err(format!("{} ranks hold an element, {lacked} should", parts.len()));
            }
            whole.push(match kind {
                _ if lacked == 1 => parts[0],
                Some(kind) => combine(*kind, parts),
                None => return Err("parts do not combine".into()),
            });
        }
        all.push(whole);
    }
    Ok(all)
}

/// The first difference beyond rounding.
fn difference(got: &[f64], want: &Tensor, tolerance: f64) -> Option<String> {
    let want = values(want);
    let differs = |(a, b): (&f64, &f64)| {
        !(a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + a.abs().max(b.abs())))
    };
    let i = got.iter().zip(&want).position(differs)?;
    Some(format!("element {i} is {}, not {}", got[i], want[i]))
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        DType::Bf16 => 2e-2,
        _ => 0.0,
    }
}

/// The tolerance of a computation: that of its coarsest float type.
fn coarsest(c: &Case, out: &Type) -> f64 {
    if !out.dtype.is_float() {
        return 0.0;
    }
    let inputs = c.inputs.iter().map(|t| tolerance(t.dtype()));
    inputs.fold(tolerance(out.dtype), f64::max)
}

#[test]
fn every_split_gives_the_unsharded_result() {
    let mut failures = Vec::new();
    let (mut known, mut split) = (BTreeSet::new(), BTreeSet::new());
    for c in cases() {
        let whole = match c.run(&c.inputs) {
            Ok(whole) => whole,
            Err(e) => {
                failures.push(e);
                continue;
            }
        };
        known.extend(c.rule.factors.iter().map(|f| (c.op.name(), f.name)));
        let ids: Vec<FactorId> = (0..c.rule.factors.len()).map(|i| FactorId(i as u8)).collect();
        let fits = |f: FactorId, ways: usize| c.rule.factor(f).size.is_multiple_of(ways);
        let mut plans: Vec<Vec<Split>> = vec![vec![]];
        for &f in &ids {
            plans.extend([2, 3].into_iter().filter(|&w| fits(f, w)).map(|w| vec![(f, w)]));
            for &g in &ids {
                if f < g {
                    let pairs = [(2, 2), (2, 3), (3, 2)];
                    plans.extend(
                        pairs.into_iter().filter(|p| fits(f, p.0) && fits(g, p.1)).map(|p| vec![(f, p.0), (g, p.1)]),
                    );
                }
            }
        }
        for splits in plans {
            let names: Vec<String> = splits.iter().map(|&(f, w)| format!("{}/{w}", c.rule.factor(f).name)).collect();
            split.extend(splits.iter().map(|&(f, _)| (c.op.name(), c.rule.factor(f).name)));
            match sharded(&c, &splits) {
                Err(e) => failures.push(format!("{} split {names:?}: {e}", c.what)),
                Ok(got) => {
                    for (i, (got, want)) in got.iter().zip(&whole).enumerate() {
                        if let Some(why) = difference(got, want, coarsest(&c, want.ty())) {
                            failures.push(format!("{} split {names:?}, result {i}: {why}", c.what));
                        }
                    }
                }
            }
        }
    }
    for (op, factor) in known.difference(&split) {
        failures.push(format!("{op}: no sample has a factor {factor} that 2 or 3 divide"));
    }
    report(failures);
}

#[test]
fn linear_operands_pass_partial_sums() {
    let mut failures = Vec::new();
    for c in cases() {
        let Ok(whole) = c.run(&c.inputs) else { continue };
        for set in &c.rule.linear {
            let mut random = Random(7);
            let (mut first, mut second) = (c.inputs.clone(), c.inputs.clone());
            for &i in set {
                let ty = c.inputs[i].ty().clone();
                first[i] = random.tensor(&ty, (-2.0, 2.0));
                let rest: Vec<f64> =
                    values(&c.inputs[i]).iter().zip(values(&first[i])).map(|(x, part)| x - part).collect();
                second[i] = tensor(ty, &rest);
            }
            match (c.run(&first), c.run(&second)) {
                (Ok(a), Ok(b)) => {
                    for (i, want) in whole.iter().enumerate() {
                        let sum: Vec<f64> = values(&a[i]).iter().zip(values(&b[i])).map(|(x, y)| x + y).collect();
                        if let Some(why) = difference(&sum, want, coarsest(&c, want.ty())) {
                            failures.push(format!("{} is not linear in {set:?}, result {i}: {why}", c.what));
                        }
                    }
                }
                (a, b) => failures.extend([a.err(), b.err()].into_iter().flatten()),
            }
        }
    }
    report(failures);
}

/// Gradients by the rule and by central differences, in floats of one type: of all results to all operands, or, where an
/// operator refuses some (a normaliser kept for the backward pass has no gradient), each that it does not refuse.
fn check_gradient(c: &Case, float: DType, step: f64, tolerance: f64) -> Result<(), String> {
    let results: Vec<usize> = (0..c.outputs.len()).filter(|&r| c.outputs[r].dtype.is_float()).collect();
    let operands: Vec<usize> = (0..c.inputs.len()).filter(|&i| c.inputs[i].dtype().is_float()).collect();
    let refusal = match check_gradient_of(c, &results, &operands, float, step, tolerance) {
        Err(e) if e.starts_with(REFUSED) => e,
        other => return other,
    };
    let mut answered = false;
    for r in results {
        for &i in &operands {
            match check_gradient_of(c, &[r], &[i], float, step, tolerance) {
                Err(e) if e.starts_with(REFUSED) => {}
                Err(e) => return Err(e),
                Ok(()) => answered = true,
            }
        }
    }
    if answered { Ok(()) } else { Err(refusal) }
}

const REFUSED: &str = "refused: ";

/// The same for some results (`of`) and some operands (`to`).
fn check_gradient_of(
    c: &Case,
    of: &[usize],
    to: &[usize],
    float: DType,
    step: f64,
    tolerance: f64,
) -> Result<(), String> {
    let Gradient::Rule(rule) = c.op.def.gradient else { return Ok(()) };
    let widen =
        |t: &Tensor| if t.dtype().is_float() { tensor(Type::new(float, t.dims()), &values(t)) } else { t.clone() };
    let inputs: Vec<Tensor> = c.inputs.iter().map(widen).collect();
    let types: Vec<Type> = inputs.iter().map(|t| t.ty().clone()).collect();
    let outputs = c.op.infer(&types).map_err(|e| e.to_string())?;
    let wanted: Vec<bool> = (0..types.len()).map(|i| to.contains(&i)).collect();
    let apply = |inputs: &[Tensor]| interp::apply(&c.op, inputs, &outputs).map_err(|e| e.to_string());
    apply(&inputs)?;

    let mut b = Builder::new("gradient");
    let ins: Vec<_> = types.iter().map(|t| b.input("x", t.clone(), None)).collect();
    let outs = b.emit(c.op.clone(), &ins).map_err(|e| e.to_string())?;
    if outs.iter().any(|v| b.graph().producer(*v).is_none()) {
        return Ok(());
    }
    let mut random = Random(3);
    let weights: Vec<Option<Tensor>> =
        outputs.iter().enumerate().map(|(r, t)| of.contains(&r).then(|| random.tensor(t, (-1.0, 1.0)))).collect();
    let grads: Vec<_> = weights.iter().map(|w| w.as_ref().map(|w| b.input("dy", w.ty().clone(), None))).collect();
    let mut cx = GradCx { op: &c.op, inputs: &ins, outputs: &outs, grads: &grads, wanted: &wanted, b: &mut b };
    let dxs = rule(&mut cx).map_err(|e| format!("{REFUSED}{e}"))?;
    if dxs.len() != ins.len() {
        return Err(format!("the gradient rule answers for {} operands of {}", dxs.len(), ins.len()));
    }
    for (dx, ty) in dxs.iter().zip(&types) {
        if let Some(dx) = dx {
            if b.ty(*dx) != ty {
                return Err(format!("the gradient of {ty} is {}", b.ty(*dx)));
            }
            b.output("dx", *dx, None);
        }
    }
    let feeds: Vec<Tensor> = inputs.iter().cloned().chain(weights.iter().flatten().cloned()).collect();
    let mut answers = interp::run(&b.finish(), &feeds, &[]).map_err(|e| e.to_string())?.outputs.into_iter();

    let loss = |inputs: &[Tensor]| -> Result<f64, String> {
        let ys = apply(inputs)?;
        let terms = ys.iter().zip(&weights).filter_map(|(y, w)| w.as_ref().map(|w| (values(y), values(w))));
        Ok(terms.map(|(y, w)| y.iter().zip(w).map(|(y, w)| y * w).sum::<f64>()).sum())
    };
    for (i, (x, dx)) in inputs.iter().zip(&dxs).enumerate() {
        let got = dx.as_ref().and_then(|_| answers.next()).map(|t| values(&t));
        if !wanted[i] {
            continue;
        }
        let got = got.unwrap_or_else(|| vec![0.0; x.ty().numel()]);
        let xs = values(x);
        for k in 0..xs.len() {
            let at = |delta: f64| {
                let mut moved = xs.clone();
                moved[k] += delta;
                let mut all = inputs.clone();
                all[i] = tensor(x.ty().clone(), &moved);
                loss(&all)
            };
            let want = (at(step)? - at(-step)?) / (2.0 * step);
            let close = (got[k] - want).abs() <= tolerance * (1.0 + want.abs());
            if !close {
                return Err(format!("gradient of operand {i}, element {k} is {}, by differences {want}", got[k]));
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_agree_with_differences() {
    let mut failures = Vec::new();
    for c in cases() {
        // Kernels without an f64 variant are compared in f32, where differences are coarse.
        let fine = check_gradient(&c, DType::F64, 1e-5, 1e-6);
        let knows_f64 = fine.as_ref().err().is_none_or(|e| !e.contains("no kernel"));
        let result = if knows_f64 { fine } else { check_gradient(&c, DType::F32, 1e-2, 1e-2) };
        if let Err(e) = result {
            failures.push(format!("{}: {e}", c.what));
        }
    }
    report(failures);
}

#[test]
fn operands_that_do_not_fit_give_errors() {
    let mut failures = Vec::new();
    for c in cases() {
        let types = c.types();
        let mut wrong: Vec<Vec<Type>> = vec![vec![], [&types[..], &types[..]].concat()];
        for i in 0..types.len() {
            let mut with = |ty: Type| {
                let mut all = types.clone();
                all[i] = ty;
                wrong.push(all);
            };
            let ty = &types[i];
            with(Type::new(ty.dtype, []));
            with(Type::new(ty.dtype, [&ty.dims[..], &[5]].concat()));
            with(Type::new(ty.dtype, ty.dims.iter().map(|d| d + 1).collect::<Vec<_>>()));
            with(Type::new(ty.dtype, vec![0; ty.rank()]));
            for other in DType::ALL {
                with(Type::new(other, ty.dims.clone()));
            }
            wrong.push(types[..i].to_vec());
        }
        for types in wrong {
            // What is accepted must go on to have a rule and a work.
            let tried = catch_unwind(AssertUnwindSafe(|| {
                if let Ok(outs) = c.op.infer(&types) {
                    c.op.factors(&types, &outs);
                    c.op.work(&types, &outs);
                }
            }));
            if tried.is_err() {
                let shown: Vec<String> = types.iter().map(Type::to_string).collect();
                failures.push(format!("{} panics on ({})", c.op, shown.join(", ")));
            }
        }
        if catch_unwind(AssertUnwindSafe(|| Op::new(c.op.def).infer(&types).is_ok())).is_err() {
            failures.push(format!("{} panics without attributes", c.op.name()));
        }
    }
    report(failures);
}
