//! Timing collectives over the communicator that `run` uses, and fitting a latency and a bandwidth to each kind.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use autoshard_cost_models::hardware::MeasuredCollective;
use autoshard_cost_models::{Bytes, CollectiveKind};
use autoshard_ir::factor::ReduceKind;
use autoshard_ir::{DType, Type};
use autoshard_runtime::comm::{CommError, Communicator, Group, Tag, World};
use autoshard_runtime::device::{Device, Layout, Mem, Span};
use autoshard_runtime::program::Rank;
use autoshard_runtime::session::Options;

use super::bench::Timed;
use super::fit::fit;

/// The kinds that programs are made of.
pub const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::SendRecv,
];

/// Bytes of the whole buffer, as [`autoshard_cost_models::Cluster::collective_time`] counts them.
const SIZES: [usize; 4] = [16 << 10, 128 << 10, 1 << 20, 4 << 20];
/// Samples of a kind, size and group.
const SAMPLES: usize = 15;
/// Bytes that a sample moves, by repeating: small messages are repeated more often.
const VOLUME: usize = 2 << 20;
/// The last dim of buffers: rows are copied one by one where they are gathered or cut.
const ROW: usize = 64;

/// A kind, fitted.
pub struct Line {
    /// What the cluster file says.
    pub measured: MeasuredCollective,
    /// Median error of the fit.
    pub error: f64,
    /// Median of the spreads.
    pub spread: f64,
    /// Cases.
    pub cases: usize,
}

/// Sizes of groups that are timed: two, half of the ranks, all.
fn groups(ranks: usize) -> Vec<usize> {
    let mut all: Vec<usize> = [2, ranks / 2, ranks].into_iter().filter(|n| (2..=ranks).contains(n)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// How many cases there are, for a progress bar.
pub fn count(ranks: usize) -> usize {
    groups(ranks).len() * KINDS.len() * SIZES.len()
}

/// Times all kinds on up to that many ranks; `done` is called after each case.
pub fn time(ranks: usize, done: &(dyn Fn() + Sync)) -> Result<BTreeMap<CollectiveKind, Line>, String> {
    let mut rows: BTreeMap<CollectiveKind, Vec<(Vec<f64>, f64)>> = BTreeMap::new();
    let mut spreads: BTreeMap<CollectiveKind, Vec<f64>> = BTreeMap::new();
    for n in groups(ranks) {
        for kind in KINDS {
            for bytes in SIZES {
                let t = Timed::of(sample(kind, bytes, n)?);
                let amounts = kind.measured_amounts(Bytes(whole(bytes, n).bytes() as u64), n);
                rows.entry(kind).or_default().push((amounts.to_vec(), t.seconds));
                spreads.entry(kind).or_default().push(t.spread);
                done();
            }
        }
    }
    let line = |(kind, rows): (CollectiveKind, Vec<(Vec<f64>, f64)>)| {
        let f = fit(&rows);
        let mut spread = spreads.remove(&kind).unwrap_or_default();
        let measured = MeasuredCollective {
            latency_us: f.terms[0] * 1e6,
            // Times that do not grow with bytes: as fast as can be told.
            bandwidth_gb_s: 1e-9 / f.terms[1].max(1e-15),
            source: None,
        };
        let spread = super::fit::quantile(&mut spread, 0.5);
        (kind, Line { measured, error: f.error, spread, cases: rows.len() })
    };
    Ok(rows.into_iter().map(line).collect())
}

/// A buffer of about so many bytes that `n` ranks can cut along its middle dim.
fn whole(bytes: usize, n: usize) -> Type {
    let rows = bytes / (4 * ROW * 4);
    Type::new(DType::F32, [4, rows.next_multiple_of(n), ROW])
}

/// Seconds of a call, several times.
fn sample(kind: CollectiveKind, bytes: usize, n: usize) -> Result<Vec<f64>, String> {
    let options = Options::default();
    let ty = whole(bytes, n);
    let connected = (options.comm.connect)(World { ranks: n, watchdog: Duration::from_secs(10) });
    let mut members = Vec::new();
    for (local, comm) in connected.map_err(|e| e.to_string())?.into_iter().enumerate() {
        let layout = Layout { arena: 2 * ty.bytes().next_multiple_of(64) as u64, staging: 0, poison: false };
        let device = (options.device.open)(local, layout).map_err(|e| e.to_string())?;
        members.push(Member { comm, device });
    }
    let times = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for (r, member) in members.iter_mut().enumerate() {
            let (ty, times, failure) = (&ty, &times, &failure);
            scope.spawn(move || match member.run(kind, ty, n) {
                Ok(found) if r == 0 => *times.lock().unwrap_or_else(|e| e.into_inner()) = found,
                Ok(_) => {}
                // The others notice by their watchdog at the latest.
                Err(e) => *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(e),
            });
        }
    });
    match failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(format!("{} of {bytes} bytes over {n} ranks: {e}", kind.name())),
        None => Ok(times.into_inner().unwrap_or_else(|e| e.into_inner())),
    }
}

/// A rank.
struct Member {
    comm: Box<dyn Communicator>,
    device: Box<dyn Device>,
}

impl Member {
    fn run(&mut self, kind: CollectiveKind, ty: &Type, n: usize) -> Result<Vec<f64>, String> {
        let all: Vec<Rank> = (0..n as u32).map(Rank).collect();
        let group = self.comm.open_group(&all).map_err(|e| e.to_string())?;
        let calls = VOLUME.div_ceil(ty.bytes()).clamp(2, 64);
        let mut samples = Vec::with_capacity(SAMPLES);
        // The first one only warms up.
        for sample in 0..=SAMPLES {
            let started = Instant::now();
            for _ in 0..calls {
                self.call(kind, ty, n, group)?;
            }
            let seconds = started.elapsed().as_secs_f64() / calls as f64;
            if sample > 0 {
                // There and back.
                samples.push(if kind == CollectiveKind::SendRecv { seconds / 2.0 } else { seconds });
            }
        }
        self.comm.leave();
        Ok(samples)
    }

    fn mem(&mut self, second: bool, bytes: usize, whole: usize) -> Result<Mem, String> {
        let offset = if second { whole.next_multiple_of(64) } else { 0 };
        // SAFETY: the memory goes to a call of the communicator that follows at once, and this rank's device does nothing before
        // that returns; devices outlive the threads that use them.
        unsafe { self.device.memory(Span { offset, bytes }) }.map_err(|e| e.to_string())
    }

    fn call(&mut self, kind: CollectiveKind, ty: &Type, n: usize, group: Group) -> Result<(), String> {
        let whole = ty.bytes();
        let mut shard = ty.clone();
        shard.dims[1] /= n;
        let part = shard.bytes();
        let (input, output) = match kind {
            CollectiveKind::AllGather => (part, whole),
            CollectiveKind::ReduceScatter => (whole, part),
            CollectiveKind::AllToAll => (part, part),
            _ => (whole, whole),
        };
        let (input, output) = (self.mem(false, input, whole)?, self.mem(true, output, whole)?);
        let done: Result<(), CommError> = match kind {
            CollectiveKind::AllReduce => self.comm.all_reduce(group, ty, ReduceKind::Sum, input, output),
            CollectiveKind::AllGather => self.comm.all_gather(group, &shard, 1, input, output),
            CollectiveKind::ReduceScatter => self.comm.reduce_scatter(group, &shard, 1, ReduceKind::Sum, input, output),
            CollectiveKind::AllToAll => {
                // Rows are whole on entry, cut on return.
                let (gather, split) = (1, 2);
                self.comm.all_to_all(group, &shard, gather, split, input, output)
            }
            CollectiveKind::SendRecv | CollectiveKind::Broadcast => self.bounce(n, input, output),
        };
        done.map_err(|e| e.to_string())
    }

    /// The first rank sends to the last, which sends back; the others have nothing to do.
    fn bounce(&mut self, n: usize, input: Mem, output: Mem) -> Result<(), CommError> {
        let (me, tag) = (self.comm.rank(), Tag::Prologue(0));
        let (first, last) = (Rank(0), Rank(n as u32 - 1));
        if me == first {
            self.comm.send(last, tag, input)?;
            self.comm.recv(last, tag, output)?;
        } else if me == last {
            self.comm.recv(first, tag, output)?;
            self.comm.send(first, tag, input)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_of_two_and_more() {
        assert_eq!(groups(1), Vec::<usize>::new());
        assert_eq!(groups(2), [2]);
        assert_eq!(groups(3), [2, 3]);
        assert_eq!(groups(16), [2, 8, 16]);
    }

    /// Every kind can be timed, and takes longer for more bytes.
    #[test]
    fn every_kind_is_timed() {
        for kind in KINDS {
            let mean = |bytes| Timed::of(sample(kind, bytes, 2).unwrap()).seconds;
            let (small, large) = (mean(SIZES[0]), mean(16 << 20));
            assert!(small > 0.0 && large > small, "{}: {small}, {large}", kind.name());
        }
    }
}
