//! One section of a stage, played event by event: operators on a compute stream in their order, communication on one
//! stream per communicator.
//!
//! Invariants:
//! - The compute stream runs its entries one after the other; an entry begins when the transfers that it waits for have
//!   arrived.
//! - A communicator runs its transfers one at a time, in the order of the entries that let them begin, then of those that wait
//!   for them: all ranks issue them in that order. The first holds up the rest (NCCL runs the operations of a communicator so).
//! - What the compute stream issues itself ([`Transfer::blocks`]) runs one at a time, whatever the communicators.
//! - Communicators otherwise run beside each other and beside the compute stream, which loses [`CONTENTION`] of its speed to each.
//! - Every transfer ends before the section does.
//!
//! Read next: [`crate::simulate`], which makes sections of a graph.

use std::collections::BTreeMap;

/// What a second of communication takes from computation that runs beside it: its kernels occupy processors and memory.
/// An eighth of an A100's or H100's processors at NCCL's default channels (16 of 108 or 132).
pub const CONTENTION: f64 = 0.125;

/// A communicator: the set of mesh axes that its ranks lie along, as bits by [`crate::mesh::AxisId`]; none of them: [`COPIES`].
pub type Communicator = u32;

/// Copies on a rank itself.
pub const COPIES: Communicator = 0;

/// A collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// On whose stream.
    pub communicator: Communicator,
    /// How long it takes.
    pub seconds: f64,
    /// It may begin when the entries before this one are done.
    pub from: usize,
    /// The transfer before it in [`Section::transfers`] whose result it moves on.
    pub after: Option<usize>,
    /// The first entry that waits for it; none: the end of the section.
    pub awaited: Option<usize>,
    /// Whether the compute stream issues it and does nothing else until it is done: of those one runs at a time.
    pub blocks: bool,
}

/// What a stage does in a section.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Section {
    /// Seconds of the entries of the compute stream.
    pub compute: Vec<f64>,
    /// Communication.
    pub transfers: Vec<Transfer>,
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Played {
    /// Seconds that the compute stream waited for communication, the end of the section included.
    pub waited_s: f64,
    /// Seconds that it took longer for the communication beside it.
    pub lost_s: f64,
    /// Seconds of communication that nothing waited for: beside computation, or beside other communication.
    pub hidden_s: f64,
}

/// A communicator at work.
#[derive(Default)]
struct Stream {
    /// Transfers, in order.
    queue: Vec<usize>,
    /// How many of them are done.
    done: usize,
    /// Whether the next one runs, and what is left of it.
    runs: bool,
    left: f64,
}

impl Section {
    /// Transfers whose bounds agree with what they depend on: none is awaited later, or may begin earlier, than one that
    /// moves its result on, so that the least in order among those not done can always begin.
    fn ordered(&self) -> Vec<(usize, usize)> {
        let end = self.compute.len();
        let mut bounds: Vec<(usize, usize)> =
            self.transfers.iter().map(|t| (t.from.min(end), t.awaited.unwrap_or(end).min(end))).collect();
        let before = |i: usize| self.transfers[i].after.filter(|a| *a < i);
        for i in (0..bounds.len()).rev() {
            if let Some(a) = before(i) {
                bounds[a].1 = bounds[a].1.min(bounds[i].1);
            }
        }
        for i in 0..bounds.len() {
            let from = before(i).map_or(0, |a| bounds[a].0);
            bounds[i].0 = bounds[i].0.min(bounds[i].1).max(from);
        }
        bounds
    }

    /// Plays it.
    pub fn play(&self) -> Played {
        let mut played = Played::default();
        let end = self.compute.len();
        let bounds = self.ordered();
        let mut by: BTreeMap<Communicator, Stream> = BTreeMap::new();
        // Transfers that an entry, or the end, still waits for.
        let mut missing = vec![0u32; end + 1];
        for (i, t) in self.transfers.iter().enumerate() {
            by.entry(t.communicator).or_default().queue.push(i);
            missing[bounds[i].1] += 1;
        }
        let mut streams: Vec<Stream> = by.into_values().collect();
        streams.iter_mut().for_each(|s| s.queue.sort_by_key(|i| (bounds[*i], *i)));
        let mut done = vec![false; self.transfers.len()];
        let mut blocked = false;
        let (mut at, mut left) = (0, self.compute.first().copied().unwrap_or(0.0));
        loop {
            let mut moved = false;
            while at < end && missing[at] == 0 && left <= 0.0 {
                at += 1;
                left = self.compute.get(at).copied().unwrap_or(0.0);
                moved = true;
            }
            for s in &mut streams {
                let Some(&i) = s.queue.get(s.done) else { continue };
                let t = &self.transfers[i];
                let may = bounds[i].0 <= at && !(blocked && t.blocks) && t.after.is_none_or(|a| a >= i || done[a]);
                if !s.runs && may {
                    (s.runs, s.left) = (true, t.seconds);
                    blocked |= t.blocks;
                    moved = true;
                }
                if s.runs && s.left <= 0.0 {
                    (s.runs, done[i]) = (false, true);
                    blocked &= !t.blocks;
                    s.done += 1;
                    missing[bounds[i].1] -= 1;
                    moved = true;
                }
            }
            if moved {
                continue;
            }
            // Nothing changes until an entry or a transfer ends.
            let computes = at < end && missing[at] == 0;
            let running = streams.iter().filter(|s| s.runs).count() as f64;
            let next = streams.iter().filter(|s| s.runs).map(|s| s.left).fold(f64::INFINITY, f64::min);
            if !computes && running == 0.0 {
                // All is done: of transfers that are not, the least in order could begin.
                return played;
            }
            // Never at a standstill, however many communicators there are.
            let speed = (1.0 - CONTENTION * running).max(CONTENTION);
            let ends = computes && left <= next * speed;
            let passed = if ends { left / speed } else { next };
            if computes {
                left = if ends { 0.0 } else { left - passed * speed };
                played.lost_s += passed * (1.0 - speed);
                played.hidden_s += passed * running;
            } else {
                played.waited_s += passed;
                played.hidden_s += passed * (running - 1.0);
            }
            for s in streams.iter_mut().filter(|s| s.runs) {
                s.left = if s.left == next && !ends { 0.0 } else { s.left - passed };
            }
        }
    }

    /// The entries before one, and those from it on, as two sections: transfers go with what waits for them, or where
    /// nothing does with what lets them begin.
    pub fn split(&self, at: usize) -> (Section, Section) {
        let bounds = self.ordered();
        let (first, second) = self.compute.split_at(at.min(self.compute.len()));
        let mut parts = [first, second].map(|c| Section { compute: c.to_vec(), transfers: Vec::new() });
        let mut index = vec![(0, 0); self.transfers.len()];
        for (i, t) in self.transfers.iter().enumerate() {
            let (from, awaited) = bounds[i];
            // What a transfer of the first part moves on stays in it where it can.
            let part = usize::from(if t.awaited.is_some() { awaited >= at } else { from >= at });
            let after = t.after.filter(|a| *a < i).map(|a| index[a]).filter(|(p, _)| *p == part).map(|(_, i)| i);
            let shift = |x: usize| x.saturating_sub(part * at);
            let list = &mut parts[part].transfers;
            index[i] = (part, list.len());
            let awaited = t.awaited.map(|_| shift(awaited));
            list.push(Transfer { from: shift(from), after, awaited, ..*t });
        }
        let [first, second] = parts;
        (first, second)
    }
}

#[cfg(test)]
mod tests;
