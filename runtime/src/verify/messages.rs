//! Runs the schedules of all stages on their sends and receives. Channels are ordered and never full: a send never
//! waits, a receive waits for its message, which must be the next of its channel.

use std::collections::VecDeque;

use super::{Report, Rule};
use crate::comm::Tag;
use crate::program::{Buffer, BufferId, Instr, Job, List, Slot};

/// A send or receive when it runs.
#[derive(Clone, Copy)]
struct Step {
    list: List,
    index: usize,
    tag: Tag,
    other: usize,
    buffer: BufferId,
    sends: bool,
}

/// Sends and receives of a list.
fn steps(instrs: &[Instr], list: List, micro_batch: Option<usize>) -> impl Iterator<Item = Step> + '_ {
    instrs.iter().enumerate().filter_map(move |(index, instr)| {
        let (other, tag, buffer, sends) = match instr {
            Instr::Send { input, to, tag } => (*to, *tag, *input, true),
            Instr::Recv { output, from, tag } => (*from, *tag, *output, false),
            _ => return None,
        };
        Some(Step { list, index, tag: Tag::of(list, micro_batch, tag), other, buffer, sends })
    })
}

pub(super) fn check(job: &Job, report: &mut Report) {
    let stages = job.stages.len();
    let runs: Vec<Vec<Step>> = job
        .stages
        .iter()
        .map(|p| {
            let mut run: Vec<Step> = steps(&p.prologue, List::Prologue, None).collect();
            for slot in &p.schedule {
                match *slot {
                    Slot::Forward { micro_batch: m, .. } => run.extend(steps(&p.forward, List::Forward, Some(m))),
                    Slot::Backward { micro_batch: m, .. } => run.extend(steps(&p.backward, List::Backward, Some(m))),
                    Slot::Update => run.extend(steps(&p.update, List::Update, None)),
                }
            }
            run
        })
        .collect();
    let mut at = vec![0; stages];
    let mut channels: Vec<VecDeque<Step>> = vec![VecDeque::new(); stages * stages];
    let mut blocked_by_order = false;
    loop {
        let mut moved = false;
        for s in 0..stages {
            while let Some(step) = runs[s].get(at[s]) {
                if step.sends {
                    channels[s * stages + step.other].push_back(*step);
                } else {
                    let channel = &mut channels[step.other * stages + s];
                    let Some(message) = channel.front() else { break };
                    if message.tag != step.tag {
                        let reason = format!(
                            "receives {:?} from stage {}, whose next message is {:?}, sent by {}[{}]",
                            step.tag, step.other, message.tag, message.list, message.index
                        );
                        report.add(Rule::Messages, Some(s), Some((step.list, step.index)), reason);
                        blocked_by_order = true;
                        break;
                    }
                    let sent = job.stages[step.other].buffer(message.buffer);
                    let received = job.stages[s].buffer(step.buffer);
                    if !alike(sent, received) {
                        let reason = format!(
                            "receives `{}` {} into `{}` {}, or their shards differ",
                            sent.name, sent.ty, received.name, received.ty
                        );
                        report.add(Rule::Messages, Some(s), Some((step.list, step.index)), reason);
                    }
                    channel.pop_front();
                }
                at[s] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    if blocked_by_order {
        return;
    }
    for s in 0..stages {
        let Some(step) = runs[s].get(at[s]) else { continue };
        let place = Some((step.list, step.index));
        let later = runs[step.other][at[step.other]..].iter().find(|o| o.sends && o.other == s && o.tag == step.tag);
        match later {
            Some(send) => {
                let reason = format!(
                    "waits for {:?} of stage {}, which sends it in {}[{}] but waits itself before: a deadlock",
                    step.tag, step.other, send.list, send.index
                );
                report.add(Rule::Deadlock, Some(s), place, reason);
            }
            None => {
                let reason = format!("waits for {:?}, which stage {} does not send", step.tag, step.other);
                report.add(Rule::Messages, Some(s), place, reason);
            }
        }
    }
    if (0..stages).any(|s| at[s] < runs[s].len()) {
        return; // What is left in channels then follows.
    }
    for (c, channel) in channels.iter().enumerate() {
        for m in channel {
            let reason = format!("sends {:?} to stage {}, which does not receive it", m.tag, c % stages);
            report.add(Rule::Messages, Some(c / stages), Some((m.list, m.index)), reason);
        }
    }
}

fn alike(a: &Buffer, b: &Buffer) -> bool {
    a.ty == b.ty && a.global == b.global && a.shards == b.shards
}
