//! Verifies programs: what may be executed without further checks. Returns every violation, with place and reason.
//!
//! The rules, by [`Rule`]:
//! - `Mesh`: axes have names of their own and sizes; ranks are a permutation; ids are in range.
//! - `Placement`: buffers are aligned and within their region.
//! - `Shards`: global sizes divide into local sizes as the axes say; no axis shards twice.
//! - `Types`: operands fit instructions; sizes and shards change as a collective or slice over its axes changes them.
//! - `Ports`: inputs and outputs fit their buffers; every output is fetched by one instruction of one stage.
//! - `States`: states and constants are persistent, of the sizes of their content, names unique, intact after the step.
//! - `Schedule`: every micro-batch passes forward and backward once, in a frame of its own; one update, last.
//! - `Read`: what is read was written before, and not overwritten since by a buffer that shares memory with it. A view is
//!   read only after the instruction that begins it, and until its memory is written.
//! - `Overlap`: operands and results of an instruction share memory only where that is allowed.
//! - `Messages`: sends and receives match, in order and in type.
//! - `Deadlock`: all stages come to their end.

mod dataflow;
mod messages;
mod types;

use std::fmt;

use crate::program::{Job, List};

/// A rule of the verifier. See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Rule {
    Mesh,
    Placement,
    Shards,
    Types,
    Ports,
    States,
    Schedule,
    Read,
    Overlap,
    Messages,
    Deadlock,
}

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// Which stage; `None`: the job as a whole.
    pub stage: Option<usize>,
    /// Which instruction of which list, where it is one.
    pub at: Option<(List, usize)>,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for Violation {
    /// `stage 0, forward[3]: reads ...`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            Some(s) => write!(f, "stage {s}")?,
            None => write!(f, "job")?,
        }
        if let Some((list, index)) = self.at {
            write!(f, ", {list}[{index}]")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Violations under collection.
#[derive(Default)]
struct Report(Vec<Violation>);

impl Report {
    fn add(&mut self, rule: Rule, stage: Option<usize>, at: Option<(List, usize)>, reason: String) {
        let v = Violation { rule, stage, at, reason };
        // Lists run many times: the same finding is one violation.
        if !self.0.contains(&v) {
            self.0.push(v);
        }
    }
}

/// Checks all rules.
///
/// # Errors
/// Every violation found. Rules that build on broken ones are not looked at.
pub fn verify(job: &Job) -> Result<(), Vec<Violation>> {
    let mut report = Report::default();
    types::ids(job, &mut report);
    if report.0.is_empty() {
        for stage in 0..job.stages.len() {
            types::buffers(job, stage, &mut report);
            types::states(job, stage, &mut report);
            types::instructions(job, stage, &mut report);
            types::schedule(job, stage, &mut report);
        }
        types::outputs(job, &mut report);
    }
    if report.0.is_empty() {
        for stage in 0..job.stages.len() {
            dataflow::check(job, stage, &mut report);
        }
        messages::check(job, &mut report);
    }
    if report.0.is_empty() { Ok(()) } else { Err(report.0) }
}
