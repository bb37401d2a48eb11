//! Programs as text, for people and golden tests. There is no parser: programs are made by codegen only.

use std::fmt::{Display, Formatter, Result};

use crate::program::{Axis, BufferId, Instr, Job, List, Program, Region, Slot};

struct In<'a, T>(&'a Job, &'a T);

/// An instruction of a program.
struct Line<'a>(&'a Job, &'a Program, &'a Instr);

fn list(ids: &[BufferId]) -> String {
    ids.iter().map(|b| format!("b{}", b.0)).collect::<Vec<_>>().join(", ")
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Line(job, program, instr) = self;
        let on = |a: &[Axis]| job.axis_names(a);
        if let Some((from, to)) = program.view(instr) {
            return write!(f, "b{} = view of b{}", to.0, from.0);
        }
        match instr {
            Instr::Compute { op, inputs, outputs, .. } => write!(f, "{} = {op}({})", list(outputs), list(inputs)),
            Instr::Accumulate { input, output } => write!(f, "b{} += b{}", output.0, input.0),
            Instr::Copy { input, output } => write!(f, "b{} = copy b{}", output.0, input.0),
            Instr::ZeroUnlessFirst { buffer, axes } => write!(f, "b{} = zero unless first of {}", buffer.0, on(axes)),
            Instr::Slice { input, output, dim, axes } => {
                write!(f, "b{} = slice b{} dim {dim} over {}", output.0, input.0, on(axes))
            }
            Instr::AllReduce { input, output, kind, axes } => {
                write!(f, "b{} = all-reduce b{} {} over {}", output.0, input.0, kind.name(), on(axes))
            }
            Instr::AllGather { input, output, dim, axes } => {
                write!(f, "b{} = all-gather b{} dim {dim} over {}", output.0, input.0, on(axes))
            }
            Instr::ReduceScatter { input, output, dim, kind, axes } => {
                write!(f, "b{} = reduce-scatter b{} dim {dim} {} over {}", output.0, input.0, kind.name(), on(axes))
            }
            Instr::AllToAll { input, output, gather, split, axes } => {
                write!(f, "b{} = all-to-all b{} dim {gather} to {split} over {}", output.0, input.0, on(axes))
            }
            Instr::Send { input, to, tag } => write!(f, "send b{} to stage {to} #{tag}", input.0),
            Instr::Recv { output, from, tag } => write!(f, "b{} = receive from stage {from} #{tag}", output.0),
            Instr::Feed { port, output } => write!(f, "b{} = feed {}", output.0, job.inputs[*port].name),
            Instr::Fetch { input, port } => write!(f, "fetch b{} as {}", input.0, job.outputs[*port].name),
        }
    }
}

impl Display for In<'_, Program> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let In(job, p) = self;
        writeln!(
            f,
            "  arena {} = persistent {} + {} frames of {} + scratch {}",
            p.arena_bytes(),
            p.persistent_bytes,
            p.frames,
            p.frame_bytes,
            p.scratch_bytes
        )?;
        let slots: Vec<String> = p
            .schedule
            .iter()
            .map(|s| match s {
                Slot::Forward { micro_batch, frame } => format!("F{micro_batch}@{frame}"),
                Slot::Backward { micro_batch, frame } => format!("B{micro_batch}@{frame}"),
                Slot::Update => "U".into(),
            })
            .collect();
        writeln!(f, "  schedule {}", slots.join(" "))?;
        for (i, b) in p.buffers.iter().enumerate() {
            let region = match b.region {
                Region::Persistent => "persistent",
                Region::Frame => "frame",
                Region::Scratch => "scratch",
            };
            writeln!(f, "  b{i}: {} {region}+{} {}", b.ty, b.offset, b.name)?;
        }
        for list in List::ALL {
            let instrs = p.list(list);
            if !instrs.is_empty() {
                writeln!(f, "  {list}:")?;
            }
            for i in instrs {
                writeln!(f, "    {}", Line(job, p, i))?;
            }
        }
        Ok(())
    }
}

impl Display for Job {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let mesh: Vec<String> = self.axes.iter().map(|(n, s)| format!("{n}={s}")).collect();
        writeln!(
            f,
            "job: {} stages of {{{}}}, {} micro-batches",
            self.stages.len(),
            mesh.join(", "),
            self.micro_batches
        )?;
        for (s, p) in self.stages.iter().enumerate() {
            writeln!(f, "stage {s}:")?;
            write!(f, "{}", In(self, p))?;
        }
        Ok(())
    }
}
