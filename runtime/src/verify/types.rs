//! What can be seen without running: ids, buffers, types of instructions, the schedule.

use std::collections::{BTreeMap, BTreeSet};

use autoshard_ir::Type;
use autoshard_ir::tensor::ALIGN;

use super::{Report, Rule};
use crate::comm::reduce;
use crate::program::{Axis, Buffer, Instr, Job, List, Region, Slot};

/// Indices into axes, buffers, stages, ports and ranks: everything else may index freely afterwards.
pub(super) fn ids(job: &Job, report: &mut Report) {
    let mut names = BTreeSet::new();
    for (name, size) in &job.axes {
        if !names.insert(name) {
            report.add(Rule::Mesh, None, None, format!("two mesh axes are called `{name}`"));
        }
        if *size == 0 {
            report.add(Rule::Mesh, None, None, format!("mesh axis `{name}` has size 0"));
        }
    }
    if job.stages.is_empty() || job.micro_batches == 0 {
        report.add(Rule::Mesh, None, None, "there must be a stage and a micro-batch".into());
    }
    let expected = job.stages.len() * job.ranks_per_stage();
    let ranks: BTreeSet<u32> = job.ranks.iter().map(|r| r.0).collect();
    if job.ranks.len() != expected || !ranks.iter().copied().eq(0..expected as u32) {
        report.add(Rule::Mesh, None, None, format!("ranks are not a permutation of 0..{expected}"));
    }
    for ports in [&job.inputs, &job.outputs] {
        let mut names = BTreeSet::new();
        for p in ports {
            if !names.insert(&p.name) {
                report.add(Rule::Ports, None, None, format!("two ports are called `{}`", p.name));
            }
            if p.batch_dim.is_some_and(|d| d >= p.ty.rank()) {
                report.add(
                    Rule::Ports,
                    None,
                    None,
                    format!("port `{}` of type {} has no such batch dim", p.name, p.ty),
                );
            }
        }
    }
    for (stage, program) in job.stages.iter().enumerate() {
        for b in &program.buffers {
            let known = b.shards.iter().flatten().all(|a| (a.0 as usize) < job.axes.len());
            if !known || b.shards.len() != b.ty.rank() || b.global.len() != b.ty.rank() {
                let reason = format!("buffer `{}`: shards or global sizes do not fit its dims or the mesh", b.name);
                report.add(Rule::Shards, Some(stage), None, reason);
            }
        }
        let buffers = program.buffers.len();
        let kept = program.states.iter().map(|s| s.buffer).chain(program.constants.iter().map(|c| c.0));
        for b in kept.filter(|b| b.0 as usize >= buffers) {
            report.add(Rule::Mesh, Some(stage), None, format!("a state or constant is in the unknown buffer {}", b.0));
        }
        for list in List::ALL {
            for (i, instr) in program.list(list).iter().enumerate() {
                let at = Some((list, i));
                for b in instr.reads().into_iter().chain(instr.writes()).filter(|b| b.0 as usize >= buffers) {
                    report.add(Rule::Mesh, Some(stage), at, format!("names the unknown buffer {}", b.0));
                }
                let mut seen = BTreeSet::new();
                if !instr.axes().iter().all(|a| (a.0 as usize) < job.axes.len() && seen.insert(*a)) {
                    report.add(Rule::Mesh, Some(stage), at, "works over an unknown axis, or one axis twice".into());
                }
                let (port, of) = match instr {
                    Instr::Feed { port, .. } => (*port, job.inputs.len()),
                    Instr::Fetch { port, .. } => (*port, job.outputs.len()),
                    _ => (0, 1),
                };
                if port >= of {
                    report.add(Rule::Ports, Some(stage), at, format!("names port {port} of {of}"));
                }
                if let Instr::Send { to: other, .. } | Instr::Recv { from: other, .. } = instr
                    && (*other == stage || *other >= job.stages.len())
                {
                    let reason = format!("exchanges a message with stage {other} of {}", job.stages.len());
                    report.add(Rule::Messages, Some(stage), at, reason);
                }
            }
        }
    }
}

pub(super) fn buffers(job: &Job, stage: usize, report: &mut Report) {
    let program = &job.stages[stage];
    for region in [Region::Persistent, Region::Frame, Region::Scratch] {
        let bytes = program.region_bytes(region);
        if !bytes.is_multiple_of(ALIGN as u64) {
            let reason = format!("{region:?} region of {bytes} bytes is not a multiple of {ALIGN}");
            report.add(Rule::Placement, Some(stage), None, reason);
        }
    }
    for b in &program.buffers {
        let limit = program.region_bytes(b.region);
        if !b.offset.is_multiple_of(ALIGN as u64) {
            let reason = format!("buffer `{}` is at offset {}, not a multiple of {ALIGN}", b.name, b.offset);
            report.add(Rule::Placement, Some(stage), None, reason);
        }
        if b.offset.checked_add(b.bytes()).is_none_or(|end| end > limit) {
            let reason = format!(
                "buffer `{}` of {} bytes at offset {} ends behind its {:?} region of {limit} bytes",
                b.name,
                b.bytes(),
                b.offset,
                b.region
            );
            report.add(Rule::Placement, Some(stage), None, reason);
        }
        let mut seen = BTreeSet::new();
        if !b.shards.iter().flatten().all(|a| seen.insert(*a)) {
            let reason = format!("buffer `{}` is sharded twice over one axis", b.name);
            report.add(Rule::Shards, Some(stage), None, reason);
        }
        for d in 0..b.ty.rank() {
            let parts = job.parts(&b.shards[d]);
            if b.ty.dims[d] * parts != b.global[d] {
                let reason = format!(
                    "buffer `{}`: dim {d} has local size {} in {parts} parts, but global size {}",
                    b.name, b.ty.dims[d], b.global[d]
                );
                report.add(Rule::Shards, Some(stage), None, reason);
            }
        }
    }
}

pub(super) fn states(job: &Job, stage: usize, report: &mut Report) {
    let program = &job.stages[stage];
    let mut add = |reason: String| report.add(Rule::States, Some(stage), None, reason);
    for s in &program.states {
        let b = program.buffer(s.buffer);
        if b.region != Region::Persistent {
            add(format!("state `{}` is kept in {:?} memory", s.name, b.region));
        }
        if let Some(w) = &s.init {
            let sizes: Vec<usize> = w.region.iter().map(|r| r.end.saturating_sub(r.start)).collect();
            if sizes != b.global {
                add(format!("state `{}` has sizes {:?}, its initializer's region {sizes:?}", s.name, b.global));
            }
        }
        let same = job.stages.iter().enumerate().flat_map(|(i, p)| p.states.iter().map(move |s| (i, s)));
        for (other, _) in same.filter(|(_, o)| o.name == s.name && !std::ptr::eq(*o, s)).filter(|(i, _)| *i <= stage) {
            add(format!("state `{}` is kept twice, also by stage {other}", s.name));
        }
    }
    for (id, t) in &program.constants {
        let b = program.buffer(*id);
        if b.region != Region::Persistent {
            add(format!("constant `{}` is kept in {:?} memory", b.name, b.region));
        }
        if t.dtype() != b.ty.dtype || t.dims() != b.global {
            add(format!("constant `{}` is {}, its buffer holds {} of {:?}", b.name, t.ty(), b.ty, b.global));
        }
    }
}

fn global(b: &Buffer) -> Type {
    Type::new(b.ty.dtype, b.global.clone())
}

fn show(job: &Job, b: &Buffer) -> String {
    let dims: Vec<String> =
        b.shards.iter().map(|axes| if axes.is_empty() { "_".to_string() } else { job.axis_names(axes) }).collect();
    format!("`{}` {} [{}] of {:?}", b.name, b.ty, dims.join(", "), b.global)
}

/// The buffer that results when `axes` are taken from the inside of `from` (a dim) and put inside of `to`.
fn reshard(job: &Job, b: &Buffer, from: Option<usize>, to: Option<usize>, axes: &[Axis]) -> Result<Buffer, String> {
    let mut out = b.clone();
    let n = job.parts(axes);
    for d in [from, to].into_iter().flatten() {
        if d >= b.ty.rank() {
            return Err(format!("{} has no dim {d}", show(job, b)));
        }
    }
    if let Some(d) = from {
        let Some(rest) = b.shards[d].strip_suffix(axes) else {
            return Err(format!("dim {d} of {} is not sharded innermost by {}", show(job, b), job.axis_names(axes)));
        };
        out.shards[d] = rest.to_vec();
        out.ty.dims[d] *= n;
    } else if let Some(a) = axes.iter().find(|a| b.shards.iter().flatten().any(|s| s == *a)) {
        return Err(format!("{} is not whole on {}", show(job, b), job.axis_names(&[*a])));
    }
    if let Some(d) = to {
        if !out.ty.dims[d].is_multiple_of(n) {
            return Err(format!("dim {d} of {} cannot be cut {n} ways", show(job, b)));
        }
        out.ty.dims[d] /= n;
        out.shards[d].extend_from_slice(axes);
    }
    Ok(out)
}

pub(super) fn instructions(job: &Job, stage: usize, report: &mut Report) {
    let program = &job.stages[stage];
    for list in List::ALL {
        for (index, instr) in program.list(list).iter().enumerate() {
            let at = Some((list, index));
            if let Err((rule, reason)) = instruction(job, stage, list, instr) {
                report.add(rule, Some(stage), at, format!("{}: {reason}", instr.mnemonic()));
            }
            if let Err(reason) = aliases(job, stage, instr) {
                report.add(Rule::Overlap, Some(stage), at, format!("{}: {reason}", instr.mnemonic()));
            }
        }
    }
}

fn same(job: &Job, want: &Buffer, got: &Buffer) -> Result<(), (Rule, String)> {
    if want.ty == got.ty && want.shards == got.shards && want.global == got.global {
        return Ok(());
    }
    Err((Rule::Types, format!("the result should be {} but is {}", show(job, want), show(job, got))))
}

fn instruction(job: &Job, stage: usize, list: List, instr: &Instr) -> Result<(), (Rule, String)> {
    let program = &job.stages[stage];
    let types = |reason: String| (Rule::Types, reason);
    let b = |id| program.buffer(id);
    let combines = |id, kind| {
        let dtype = b(id).ty.dtype;
        if reduce::supports(dtype, kind) { Ok(()) } else { Err(types(format!("{dtype} has no {}", kind.name()))) }
    };
    match instr {
        Instr::Compute { op, inputs, outputs, .. } => {
            let operands: Vec<Type> = inputs.iter().map(|i| global(b(*i))).collect();
            let want = op.infer(&operands).map_err(|e| types(format!("{op} on {operands:?}: {e}")))?;
            let got: Vec<Type> = outputs.iter().map(|o| global(b(*o))).collect();
            if want != got {
                return Err(types(format!("{op} gives {want:?}, its buffers hold {got:?}")));
            }
        }
        Instr::Accumulate { input, output } => same(job, b(*input), b(*output))?,
        Instr::Copy { input, output } => {
            let (n, m) = (b(*input).bytes(), b(*output).bytes());
            if n != m {
                return Err(types(format!("{n} bytes are copied to {m}")));
            }
        }
        Instr::ZeroUnlessFirst { buffer, axes } => {
            reshard(job, b(*buffer), None, None, axes).map_err(types)?;
        }
        Instr::Slice { input, output, dim, axes } => {
            same(job, &reshard(job, b(*input), None, Some(*dim), axes).map_err(types)?, b(*output))?;
        }
        Instr::AllReduce { input, output, kind, axes } => {
            combines(*input, *kind)?;
            same(job, &reshard(job, b(*input), None, None, axes).map_err(types)?, b(*output))?;
        }
        Instr::AllGather { input, output, dim, axes } => {
            same(job, &reshard(job, b(*input), Some(*dim), None, axes).map_err(types)?, b(*output))?;
        }
        Instr::ReduceScatter { input, output, dim, kind, axes } => {
            combines(*input, *kind)?;
            same(job, &reshard(job, b(*input), None, Some(*dim), axes).map_err(types)?, b(*output))?;
        }
        Instr::AllToAll { input, output, gather, split, axes } => {
            if gather == split {
                return Err(types(format!("dim {split} is both gathered and split")));
            }
            same(job, &reshard(job, b(*input), Some(*gather), Some(*split), axes).map_err(types)?, b(*output))?;
        }
        Instr::Send { .. } | Instr::Recv { .. } => {}
        Instr::Feed { port, output: id } | Instr::Fetch { input: id, port } => {
            let feeds = matches!(instr, Instr::Feed { .. });
            let p = if feeds { &job.inputs[*port] } else { &job.outputs[*port] };
            if global(b(*id)) != p.ty {
                return Err((Rule::Ports, format!("port `{}` is {}, not {}", p.name, p.ty, show(job, b(*id)))));
            }
            if p.batch_dim.is_some() && matches!(list, List::Prologue | List::Update) {
                return Err((Rule::Ports, format!("port `{}` belongs to micro-batches", p.name)));
            }
        }
    }
    Ok(())
}

/// Operands and results that share memory where they may not.
fn aliases(job: &Job, stage: usize, instr: &Instr) -> Result<(), String> {
    let program = &job.stages[stage];
    let shares = |a, b| {
        let (x, y) = (program.buffer(a), program.buffer(b));
        x.region == y.region && x.offset < y.offset + y.bytes() && y.offset < x.offset + x.bytes()
    };
    let name = |a| &program.buffer(a).name;
    match instr {
        Instr::Compute { outputs, .. } => {
            for (i, a) in outputs.iter().enumerate() {
                if let Some(b) = outputs[..i].iter().find(|b| shares(*a, **b)) {
                    return Err(format!("results `{}` and `{}` share memory", name(*b), name(*a)));
                }
            }
        }
        Instr::AllReduce { input, output, .. } | Instr::Copy { input, output } => {
            let (x, y) = (program.buffer(*input), program.buffer(*output));
            if shares(*input, *output) && (x.offset != y.offset || x.bytes() != y.bytes()) {
                return Err(format!("`{}` and `{}` share a part of their memory", x.name, y.name));
            }
        }
        Instr::Accumulate { input, output }
        | Instr::Slice { input, output, .. }
        | Instr::AllGather { input, output, .. }
        | Instr::ReduceScatter { input, output, .. }
        | Instr::AllToAll { input, output, .. } => {
            if shares(*input, *output) {
                return Err(format!("`{}` and `{}` share memory", name(*input), name(*output)));
            }
        }
        Instr::ZeroUnlessFirst { .. }
        | Instr::Send { .. }
        | Instr::Recv { .. }
        | Instr::Feed { .. }
        | Instr::Fetch { .. } => {}
    }
    Ok(())
}

pub(super) fn outputs(job: &Job, report: &mut Report) {
    let mut fetched: BTreeMap<usize, usize> = BTreeMap::new();
    let lists = job.stages.iter().flat_map(|p| List::ALL.map(|l| p.list(l)));
    for instr in lists.flatten() {
        if let Instr::Fetch { port, .. } = instr {
            *fetched.entry(*port).or_default() += 1;
        }
    }
    for (i, p) in job.outputs.iter().enumerate() {
        let n = fetched.get(&i).copied().unwrap_or(0);
        if n != 1 {
            report.add(Rule::Ports, None, None, format!("output `{}` is fetched by {n} instructions", p.name));
        }
    }
}

/// Every micro-batch once, in a frame that is free.
pub(super) fn schedule(job: &Job, stage: usize, report: &mut Report) {
    let program = &job.stages[stage];
    let mut add = |reason: String| report.add(Rule::Schedule, Some(stage), None, reason);
    let with_backward =
        !program.backward.is_empty() || program.schedule.iter().any(|s| matches!(s, Slot::Backward { .. }));
    if program.frames == 0 && program.frame_bytes > 0 {
        add("there is no frame".into());
    }
    let mut occupied: Vec<Option<usize>> = vec![None; program.frames];
    let mut forwards = vec![0; job.micro_batches];
    let mut backwards = vec![0; job.micro_batches];
    for (i, slot) in program.schedule.iter().enumerate() {
        match *slot {
            Slot::Forward { micro_batch: m, frame } | Slot::Backward { micro_batch: m, frame }
                if m >= job.micro_batches || frame >= program.frames.max(1) =>
            {
                add(format!(
                    "entry {i} ({slot:?}): there are {} micro-batches and {} frames",
                    job.micro_batches, program.frames
                ));
            }
            Slot::Forward { micro_batch, frame } => {
                forwards[micro_batch] += 1;
                if let Some(Some(other)) = occupied.get(frame) {
                    add(format!("entry {i} ({slot:?}): the frame still holds micro-batch {other}"));
                }
                if with_backward && let Some(f) = occupied.get_mut(frame) {
                    *f = Some(micro_batch);
                }
            }
            Slot::Backward { micro_batch, frame } => {
                backwards[micro_batch] += 1;
                if let Some(f) = occupied.get_mut(frame)
                    && f.take() != Some(micro_batch)
                {
                    add(format!("entry {i} ({slot:?}): the frame does not hold that micro-batch"));
                }
            }
            Slot::Update => {
                if i + 1 != program.schedule.len() {
                    add(format!("entry {i}: the update is not last"));
                }
            }
        }
    }
    let expected = usize::from(with_backward);
    for m in 0..job.micro_batches {
        if forwards[m] != 1 || backwards[m] != expected {
            let (f, b) = (forwards[m], backwards[m]);
            add(format!("micro-batch {m} passes forward {f} times and backward {b} times (not 1 and {expected})"));
        }
    }
    if !program.update.is_empty() && program.schedule.last() != Some(&Slot::Update) {
        add("the update is never run".into());
    }
}
