//! Runs a stage's schedule on what buffers hold, instead of on values: what is read must have been written, and not
//! overwritten since. That covers both the order of instructions and the layout: buffers may share memory as long as
//! nobody reads what another has overwritten. A view ([`Program::view`]) writes nothing: after it operand and result both
//! hold their values.
//!
//! Scratch holds nothing at the start of a list, a frame nothing at the start of a forward (with one micro-batch per step:
//! at the start of the step), persistent memory at the start of a step states and constants only.

use super::{Report, Rule};
use crate::program::{BufferId, Instr, Job, List, Program, Region, Slot};

/// What a buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Nothing was written.
    Nothing,
    /// Its value.
    Value,
    /// It was overwritten by that instruction.
    Overwritten(BufferId, List, usize),
}

struct Run<'a> {
    stage: usize,
    program: &'a Program,
    /// By buffer: others of the same region that share memory with it.
    shares: Vec<Vec<BufferId>>,
    /// Persistent and scratch buffers.
    common: Vec<Content>,
    /// By frame: its buffers.
    frames: Vec<Vec<Content>>,
    runs: [usize; 4],
    /// Frames are used by all lists.
    single: bool,
}

/// By buffer, the others that share memory with it: buffers of a region in order of offset, compared with those before
/// that reach beyond it.
fn sharing(program: &Program) -> Vec<Vec<BufferId>> {
    let mut shares = vec![Vec::new(); program.buffers.len()];
    for region in [Region::Persistent, Region::Frame, Region::Scratch] {
        let of_region = |i: &usize| program.buffers[*i].region == region && program.buffers[*i].bytes() > 0;
        let mut order: Vec<usize> = (0..program.buffers.len()).filter(of_region).collect();
        order.sort_by_key(|i| program.buffers[*i].offset);
        let mut open: Vec<usize> = Vec::new();
        for i in order {
            let start = program.buffers[i].offset;
            open.retain(|j| program.buffers[*j].offset + program.buffers[*j].bytes() > start);
            for j in &open {
                shares[i].push(BufferId(*j as u32));
                shares[*j].push(BufferId(i as u32));
            }
            open.push(i);
        }
    }
    shares
}

pub(super) fn check(job: &Job, stage: usize, report: &mut Report) {
    let program = &job.stages[stage];
    let n = program.buffers.len();
    let mut run = Run {
        stage,
        program,
        shares: sharing(program),
        common: vec![Content::Nothing; n],
        frames: vec![vec![Content::Nothing; n]; program.frames.max(1)],
        runs: [0; 4],
        single: job.micro_batches == 1,
    };
    let kept = program.states.iter().map(|s| s.buffer).chain(program.constants.iter().map(|c| c.0));
    let kept: Vec<BufferId> = kept.collect();
    for id in &kept {
        if let Some(other) = run.shares[id.0 as usize].iter().find(|o| kept.contains(o)) {
            let name = |b: BufferId| &program.buffer(b).name;
            let reason = format!("`{}` and `{}` are kept in the same memory", name(*id), name(*other));
            report.add(Rule::States, Some(stage), None, reason);
        }
        run.common[id.0 as usize] = Content::Value;
    }
    run.list(List::Prologue, 0, report);
    for slot in &program.schedule {
        match *slot {
            Slot::Forward { frame, .. } => {
                if !run.single {
                    run.frames[frame].fill(Content::Nothing);
                }
                run.list(List::Forward, frame, report);
            }
            Slot::Backward { frame, .. } => run.list(List::Backward, frame, report),
            Slot::Update => run.list(List::Update, 0, report),
        }
    }
    for id in &kept {
        if let Content::Overwritten(by, list, index) = run.common[id.0 as usize] {
            let reason = format!(
                "`{}` must outlive the step but is overwritten by `{}`",
                program.buffer(*id).name,
                program.buffer(by).name
            );
            report.add(Rule::States, Some(stage), Some((list, index)), reason);
        }
    }
}

impl Run<'_> {
    fn content(&mut self, id: BufferId, frame: usize) -> &mut Content {
        match self.program.buffer(id).region {
            Region::Frame => &mut self.frames[frame][id.0 as usize],
            Region::Persistent | Region::Scratch => &mut self.common[id.0 as usize],
        }
    }

    fn list(&mut self, list: List, frame: usize, report: &mut Report) {
        let program = self.program;
        for (i, b) in program.buffers.iter().enumerate() {
            if b.region == Region::Scratch {
                self.common[i] = Content::Nothing;
            }
        }
        let frames = self.single || matches!(list, List::Forward | List::Backward);
        for (index, instr) in program.list(list).iter().enumerate() {
            let at = Some((list, index));
            let (mut reads, writes) = (instr.reads(), instr.writes());
            if let Instr::Accumulate { input, .. } = instr
                && self.runs[list as usize] == 0
            {
                reads = vec![*input];
            }
            for id in reads.iter().chain(&writes) {
                if program.buffer(*id).region == Region::Frame && !frames {
                    let reason = format!("`{}` is in a frame, and no micro-batch is there", program.buffer(*id).name);
                    report.add(Rule::Read, Some(self.stage), at, reason);
                }
            }
            for id in reads {
                let name = &program.buffer(id).name;
                match *self.content(id, frame) {
                    Content::Value => {}
                    Content::Nothing => {
                        report.add(Rule::Read, Some(self.stage), at, format!("reads `{name}`, which was not written"));
                    }
                    Content::Overwritten(by, l, i) => {
                        let by = &program.buffer(by).name;
                        let reason = format!("reads `{name}`, whose memory {l}[{i}] overwrote with `{by}`");
                        report.add(Rule::Read, Some(self.stage), at, reason);
                    }
                }
            }
            if let Some((_, to)) = program.view(instr) {
                *self.content(to, frame) = Content::Value;
                continue;
            }
            for id in writes {
                for k in 0..self.shares[id.0 as usize].len() {
                    let other = self.shares[id.0 as usize][k];
                    let content = self.content(other, frame);
                    if *content == Content::Value {
                        *content = Content::Overwritten(id, list, index);
                    }
                }
                *self.content(id, frame) = Content::Value;
            }
        }
        self.runs[list as usize] += 1;
    }
}
