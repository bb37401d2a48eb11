//! Watching a run: hooks on every instruction, and a recorder that writes traces for Chrome and Perfetto.
//!
//! The format is that of Chrome's trace events: complete events (`"ph": "X"`), times in microseconds, one thread per rank,
//! one process per pipeline stage.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::json;

use crate::program::{Instr, Place, Program, Rank};

/// What is called while ranks run, on the threads of the ranks.
pub trait Observer: Send + Sync {
    /// A rank has loaded its states and constants.
    fn loaded(&self, _rank: Rank) {}
    /// An instruction is about to run.
    fn before(&self, _rank: Rank, _place: Place, _instr: &Instr) {}
    /// An instruction has run.
    fn after(&self, _rank: Rank, _place: Place, _instr: &Instr, _program: &Program, _start: Instant, _end: Instant) {}
    /// A rank has run `done` of the `of` entries of its schedule.
    fn slot_done(&self, _rank: Rank, _done: usize, _of: usize) {}
}

/// Calls several observers, in order.
pub struct Observers(pub Vec<std::sync::Arc<dyn Observer>>);

impl Observer for Observers {
    fn loaded(&self, rank: Rank) {
        self.0.iter().for_each(|o| o.loaded(rank));
    }
    fn before(&self, rank: Rank, place: Place, instr: &Instr) {
        self.0.iter().for_each(|o| o.before(rank, place, instr));
    }
    fn after(&self, rank: Rank, place: Place, instr: &Instr, program: &Program, start: Instant, end: Instant) {
        self.0.iter().for_each(|o| o.after(rank, place, instr, program, start, end));
    }
    fn slot_done(&self, rank: Rank, done: usize, of: usize) {
        self.0.iter().for_each(|o| o.slot_done(rank, done, of));
    }
}

/// One instruction that a rank ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which rank.
    pub rank: Rank,
    /// Where in its program.
    pub place: Place,
    /// The operator or collective.
    pub name: &'static str,
    /// The node that it came from; the buffer, for others than `Compute`.
    pub source: String,
    /// `compute`, `collective`, `send-recv`, `copy` or `view` (nothing is done). Times of collectives, sends and receives
    /// include waiting.
    pub category: &'static str,
    /// Bytes of the buffers it writes (of those it reads, if it writes none); 0 for views.
    pub bytes: u64,
    /// Since the recorder was made, in microseconds.
    pub start_us: f64,
    /// In microseconds.
    pub duration_us: f64,
}

/// Records every instruction of every rank.
pub struct Recorder {
    zero: Instant,
    events: Mutex<Vec<Event>>,
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder { zero: Instant::now(), events: Mutex::default() }
    }
}

impl Observer for Recorder {
    fn after(&self, rank: Rank, place: Place, instr: &Instr, program: &Program, start: Instant, end: Instant) {
        let (reads, writes) = (instr.reads(), instr.writes());
        let buffers = if writes.is_empty() { &reads } else { &writes };
        let view = program.view(instr).is_some();
        let category = match instr {
            _ if view => "view",
            Instr::Compute { .. } | Instr::Accumulate { .. } => "compute",
            i if i.is_collective() => "collective",
            i if i.communicates() => "send-recv",
            _ => "copy",
        };
        let source = match instr {
            Instr::Compute { name, .. } => name.clone(),
            _ => buffers.first().map(|b| program.buffer(*b).name.clone()).unwrap_or_default(),
        };
        let us = |t: Instant| t.saturating_duration_since(self.zero).as_secs_f64() * 1e6;
        let event = Event {
            rank,
            place,
            name: instr.mnemonic(),
            source,
            category,
            bytes: if view { 0 } else { buffers.iter().map(|b| program.buffer(*b).bytes()).sum() },
            start_us: us(start),
            duration_us: us(end) - us(start),
        };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl Recorder {
    /// What was recorded so far, by rank and time.
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        events.sort_by(|a, b| a.rank.cmp(&b.rank).then(a.start_us.total_cmp(&b.start_us)));
        events
    }

    /// Writes the trace as JSON, one event per line.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write(&self, mut out: impl Write) -> std::io::Result<()> {
        let events = self.events();
        let mut lines = Vec::new();
        let mut named: Vec<(usize, Rank)> = events.iter().map(|e| (e.place.stage, e.rank)).collect();
        named.dedup();
        let mut last = None;
        for (stage, rank) in named {
            if last != Some(stage) {
                let args = json!({ "name": format!("stage {stage}") });
                lines.push(json!({ "ph": "M", "name": "process_name", "pid": stage, "tid": rank.0, "args": args }));
                last = Some(stage);
            }
            let args = json!({ "name": format!("rank {}", rank.0) });
            lines.push(json!({ "ph": "M", "name": "thread_name", "pid": stage, "tid": rank.0, "args": args }));
        }
        for e in &events {
            let args = json!({
                "source": e.source, "list": e.place.list.name(), "index": e.place.index,
                "micro_batch": e.place.micro_batch, "bytes": e.bytes,
            });
            lines.push(json!({
                "ph": "X", "name": e.name, "cat": e.category, "pid": e.place.stage, "tid": e.rank.0,
                "ts": e.start_us, "dur": e.duration_us, "args": args,
            }));
        }
        writeln!(out, "{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
        for (i, line) in lines.iter().enumerate() {
            writeln!(out, "{line}{}", if i + 1 < lines.len() { "," } else { "" })?;
        }
        writeln!(out, "]}}")?;
        out.flush()
    }
}
