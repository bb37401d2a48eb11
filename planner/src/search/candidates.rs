//! The points of the outer space: stages, mesh, micro-batches, schedule, recomputation.

use autoshard_cost_models::Cluster;

use super::SearchError;
use crate::assignment::Schedule;
use crate::formulate::Pace;
use crate::mesh::{AxisName, Mesh, divisors};
use crate::request::{Mode, PlanRequest, RecomputeChoice};

/// A point of the outer space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Pipeline stages.
    pub stages: usize,
    /// The mesh of a stage.
    pub mesh: Mesh,
    /// Micro-batches and schedule.
    pub pace: Pace,
    /// What the backward pass makes anew.
    pub recompute: RecomputeChoice,
}

impl Candidate {
    /// As shown: `pp=2 dp=4 tp=1, 8 micro-batches, recompute full`; with `cp=2` where there is context parallelism, and
    /// `ep=2` where of the ranks along `dp` so many hold different experts.
    pub fn show(&self) -> String {
        let m = self.pace.micro_batches;
        let (ep, cp) = (self.mesh.along(AxisName::Ep), self.mesh.along(AxisName::Cp));
        format!(
            "pp={} dp={}{}{} tp={}, {m} micro-batch{}{}",
            self.stages,
            self.mesh.data_parallel(),
            if ep > 1 { format!(" ep={ep}") } else { String::new() },
            if cp > 1 { format!(" cp={cp}") } else { String::new() },
            self.mesh.along(AxisName::Tp),
            if m == 1 { "" } else { "es" },
            match self.recompute {
                RecomputeChoice::None => String::new(),
                some => format!(", recompute {}", some.name()),
            }
        )
    }
}

/// Numbers of micro-batches worth trying: divisors of the samples per data-parallel rank, at most this many.
const MICRO_BATCHES: usize = 6;

/// The numbers of micro-batches that are tried when none is pinned: divisors of the samples that a data-parallel rank has
/// per step, evenly spread in their order when there are many; with one stage, more than one is only good for memory.
pub fn micro_batches(per_rank: usize) -> Vec<usize> {
    let all = divisors(per_rank);
    if all.len() <= MICRO_BATCHES {
        return all;
    }
    let last = all.len() - 1;
    (0..MICRO_BATCHES).map(|i| all[(i * last + (MICRO_BATCHES - 1) / 2) / (MICRO_BATCHES - 1)]).collect()
}

/// All candidates, with what is recomputed as pinned, or with nothing: see [`variants`].
///
/// # Errors
/// Pins that leave none, with the reason.
pub fn candidates(cluster: &Cluster, request: &PlanRequest) -> Result<Vec<Candidate>, SearchError> {
    let (n, pins, batch) = (cluster.gpus(), &request.constraints, request.workload.global_batch);
    let refuse = |text: String| Err(SearchError::Pins(text));
    for (name, size) in [("tp", pins.tp), ("pp", pins.pp), ("dp", pins.dp), ("cp", pins.cp), ("ep", pins.ep)] {
        if let Some(size) = size.filter(|s| *s == 0 || n % s != 0) {
            return refuse(format!("{name}={size} does not divide {n} GPUs"));
        }
    }
    if let Some(problem) = pins.execution.problem() {
        return refuse(problem);
    }
    if pins.schedule == Some(Schedule::ZeroBubble) && pins.execution.chunks > 1 {
        return refuse("the zero-bubble schedule has one chunk per stage".into());
    }
    if batch == 0 {
        return refuse("the batch is empty".into());
    }
    let divisors = divisors(n);
    let mut found = Vec::new();
    let mut reasons = Vec::new();
    for &pp in divisors.iter().filter(|d| pins.pp.is_none_or(|p| p == **d)) {
        let inner = divisors.iter().filter(|d| (n / pp) % **d == 0);
        let inner =
            inner.flat_map(|&tp| divisors.iter().filter(move |d| (n / pp / tp) % **d == 0).map(move |&cp| (tp, cp)));
        for (tp, cp) in inner {
            let dp = n / pp / tp / cp;
            let within = tp <= cluster.devices_per_node.max(1) || pins.tp.is_some();
            let pinned = |pin: Option<usize>, size| pin.is_some_and(|p| p != size);
            if pinned(pins.tp, tp) || pinned(pins.cp, cp) || pinned(pins.dp, dp) || !within {
                continue;
            }
            // Where samples can be split over these ranks, that takes no more time than splitting sequences.
            let all = pins.pp.and(pins.tp).and(pins.dp).is_some();
            let samples = dp * cp * pins.micro_batch.unwrap_or(1).max(1);
            if pins.cp.is_none() && cp > 1 && (all || batch.is_multiple_of(samples)) {
                continue;
            }
            // Of the ranks along `dp`, those with different experts; all that there are, if `tp` makes up the rest.
            let ep = pins.ep.unwrap_or(1);
            let ep = if dp.is_multiple_of(ep) { ep } else { ep / tp };
            if pins.ep.is_some_and(|all| dp % ep.max(1) != 0 || (ep != all && ep * tp != all)) {
                let all = pins.ep.unwrap_or(1);
                reasons.push(format!("ep={all} divides neither dp={dp} nor is it a divisor of dp times tp={tp}"));
                continue;
            }
            if batch % dp != 0 {
                reasons.push(format!("a batch of {batch} is no multiple of dp={dp}"));
                continue;
            }
            let per_rank = batch / dp;
            let counts = match (pins.micro_batch, request.workload.mode) {
                (Some(size), _) if size == 0 || per_rank % size != 0 => {
                    reasons.push(format!(
                        "{per_rank} samples per dp={dp} rank are no multiple of micro-batches of {size}"
                    ));
                    continue;
                }
                (Some(size), _) => vec![per_rank / size],
                (None, Mode::Infer) if pp == 1 => vec![1],
                (None, _) => micro_batches(per_rank),
            };
            let schedule = pins.schedule.unwrap_or(Schedule::OneF1B);
            for micro_batches in counts {
                found.push(Candidate {
                    stages: pp,
                    mesh: Mesh::new([
                        (AxisName::Dp, dp / ep),
                        (AxisName::Ep, ep),
                        (AxisName::Cp, cp),
                        (AxisName::Tp, tp),
                    ]),
                    pace: Pace { micro_batches, schedule, chunks: pins.execution.chunks },
                    recompute: pins.recompute.unwrap_or_default(),
                });
            }
        }
    }
    if found.is_empty() {
        reasons.sort();
        reasons.dedup();
        let pinned: Vec<String> = [("pp", pins.pp), ("dp", pins.dp), ("cp", pins.cp), ("tp", pins.tp)]
            .iter()
            .filter_map(|(name, p)| p.map(|p| format!("{name}={p}")))
            .collect();
        let mesh = if pinned.is_empty() { "any mesh".into() } else { pinned.join(" ") };
        match (pins.pp, pins.dp, pins.tp) {
            (Some(pp), Some(dp), Some(tp)) if pp * dp * tp * pins.cp.unwrap_or(1) != n => {
                let ranks = pp * dp * tp * pins.cp.unwrap_or(1);
                reasons.insert(0, format!("{mesh} makes {ranks} ranks, there are {n} GPUs"));
            }
            _ if reasons.is_empty() => reasons.push(format!("{mesh} is not possible on {n} GPUs")),
            _ => reasons.insert(0, format!("{mesh} on {n} GPUs")),
        }
        return refuse(reasons.join("; "));
    }
    Ok(found)
}

/// Whether the search may choose what is recomputed.
pub(super) fn may_recompute(request: &PlanRequest) -> bool {
    request.workload.mode == Mode::Train && request.constraints.recompute.is_none()
}

/// The candidates that differ from one without recomputation in that alone.
pub(super) fn variants(c: &Candidate) -> [Candidate; 2] {
    [RecomputeChoice::Selective, RecomputeChoice::Full].map(|recompute| Candidate { recompute, ..c.clone() })
}
