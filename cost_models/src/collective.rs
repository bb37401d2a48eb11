//! Time of collectives: latency and bandwidth, by algorithm, size and placement.
//!
//! The least over the algorithms that a communication library (NCCL) chooses from:
//! - **ring**, flat over all tiers; several rings run at once, one per member of a node, so that crossing a tier has
//!   the bandwidth of all members of the group inside one domain of it;
//! - **tree** (all-reduce), chains inside a node and a double binary tree over nodes;
//! - **in-switch** (NVLS; all-reduce, all-gather, reduce-scatter) inside a domain whose switches reduce and multicast;
//! - **hierarchical** (all-reduce, all-gather, reduce-scatter), phases per tier on ever smaller shards, pipelined: the slowest phase
//!   counts; inside a domain with the in-switch algorithm where there is one.
//!
//! Each runs in one of three protocols that trade latency for bandwidth. A transfer of wire volume `V` per rank at
//! rate `B` takes `launch + base + hops + V / B + min(V / B, fill)`: `fill` is the time to fill the bounded buffers of a pipeline.
//! Where a tier states what a kind was measured to take ([`crate::hardware::MeasuredCollective`]), that holds for groups inside one
//! of its domains.
//!
//! Coefficients, and where they come from: `coefficients/collectives.toml`; the benchmark `collectives` compares with published
//! timings.
//!
//! Results grow with bytes, and never shrink when a group moves to a wider tier.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::{Architecture, Cluster, LinkKind, Tier};
use crate::topology::Group;
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// A collective operation. See [`Cluster::collective_time`] for what `bytes` means for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// Every rank gets the reduction of all buffers.
    AllReduce,
    /// Every rank gets all shards.
    AllGather,
    /// Every rank gets its shard of the reduction.
    ReduceScatter,
    /// The tensor is resharded: every rank sends a part of its shard to every other.
    AllToAll,
    /// Every rank gets the buffer of one.
    Broadcast,
    /// One message between neighbours of the group.
    SendRecv,
}

impl CollectiveKind {
    /// Every kind.
    pub const ALL: [CollectiveKind; 6] = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
        CollectiveKind::Broadcast,
        CollectiveKind::SendRecv,
    ];
    /// As shown.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::SendRecv => "send-recv",
        }
    }
    /// What each rank of a group of `n` sends over its link in a ring (or pairwise), as a fraction of `bytes`.
    pub fn wire_fraction(self, n: usize) -> f64 {
        let n = n as f64;
        match self {
            CollectiveKind::AllReduce => 2.0 * (n - 1.0) / n,
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => (n - 1.0) / n,
            CollectiveKind::AllToAll => (n - 1.0) / (n * n),
            CollectiveKind::Broadcast | CollectiveKind::SendRecv => 1.0,
        }
    }
    /// What a measured collective takes its latency and its bandwidth for, in a group of `n`
    /// ([`crate::hardware::MeasuredCollective`]): doublings of the group, and the bytes that a rank sends.
    pub fn measured_amounts(self, bytes: Bytes, n: usize) -> [f64; 2] {
        let doublings = if self == CollectiveKind::SendRecv { 1.0 } else { (n as f64).log2().ceil() };
        [doublings, bytes.as_f64() * self.wire_fraction(n)]
    }
}

/// How a collective is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Algorithm {
    Ring,
    Tree,
    InSwitch,
    Hierarchical,
    Pairwise,
}

/// Wire protocol of a communication library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// 8-byte stores with a flag each: least latency.
    Ll,
    /// 128-byte stores with a flag each; NVLink only.
    Ll128,
    /// Bulk copies with fences: full bandwidth.
    Simple,
}

/// A predicted time and how it comes about.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CollectiveEstimate {
    /// The time.
    pub time: Seconds,
    /// The fastest algorithm.
    pub algorithm: Algorithm,
    /// In its fastest protocol.
    pub protocol: Protocol,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Coefficients {
    launch_us: BTreeMap<Architecture, f64>,
    /// Of the rate of a ring, what pairwise exchanges reach; 1 where absent.
    all_to_all_fraction: BTreeMap<LinkKind, f64>,
    protocol: BTreeMap<Protocol, ProtocolCoefficients>,
    /// Per link and protocol, what one step costs. A protocol that a link lacks is not used on it.
    hop_us: BTreeMap<LinkKind, BTreeMap<Protocol, HopCoefficients>>,
    /// Wire volume that fills the buffers of one step of a ring, by link.
    fill_mb_per_step: BTreeMap<LinkKind, f64>,
    in_switch: InSwitchCoefficients,
    #[serde(rename = "sources")]
    _sources: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProtocolCoefficients {
    bandwidth_fraction: f64,
    base_us: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HopCoefficients {
    ring: f64,
    tree: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InSwitchCoefficients {
    base_us: f64,
    fill_mb: f64,
}

static COEFFICIENTS: LazyLock<Coefficients> = LazyLock::new(|| {
    // Embedded and read by every test of this file: it parses.
    toml::from_str(include_str!("../coefficients/collectives.toml")).expect("embedded coefficients/collectives.toml")
});

/// One tier that a group crosses.
struct Level<'a> {
    tier: &'a Tier,
    /// Inner domains joined into one.
    fan: f64,
    /// Of a ring over the whole group, how many steps cross this tier.
    edges: f64,
    /// Members of the group in one inner domain.
    members: f64,
}

impl Level<'_> {
    /// Per member, in a ring or tree.
    fn bandwidth(&self) -> f64 {
        self.tier.effective_bandwidth((self.members * self.fan).ceil() as usize).0
    }
    /// Seconds to fill the buffers of a ring inside this level that passes every rank `passes` times. Fitted on up to 8 ranks in one
    /// node; not extrapolated to longer rings.
    fn fill(&self, passes: f64) -> f64 {
        let steps = passes * (self.fan - 1.0).min(7.0);
        let mb = COEFFICIENTS.fill_mb_per_step.get(&self.tier.kind).copied().unwrap_or(0.0);
        steps * mb * 1e6 / self.bandwidth()
    }
    /// Per member, when every pair exchanges messages.
    fn all_to_all_bandwidth(&self) -> f64 {
        if let Some(stated) = &self.tier.all_to_all_gb_s {
            return self.bandwidth().min(stated.value * 1e9 * self.tier.efficiency.value);
        }
        let fraction = COEFFICIENTS.all_to_all_fraction.get(&self.tier.kind).copied().unwrap_or(1.0);
        self.bandwidth() * fraction
    }
}

impl Cluster {
    /// How long a collective over each group of a mesh axis takes, all such groups communicating at once.
    ///
    /// `bytes` is the size of the full, unsharded buffer of one group: for an all-gather the gathered tensor, for a
    /// reduce-scatter its input on one rank, for an all-reduce and a broadcast the buffer, for an all-to-all the tensor whose
    /// shards (`bytes / size` per rank) are exchanged, for send-recv the message. A group of one rank takes no time.
    pub fn collective_time(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        self.collective_estimate(kind, bytes, group).map_or(Seconds::ZERO, |e| e.time)
    }

    /// As [`collective_time`](Self::collective_time), with the algorithm; None for a group of one rank or no bytes.
    pub fn collective_estimate(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Option<CollectiveEstimate> {
        if group.size <= 1 || bytes.0 == 0 {
            return None;
        }
        if let Some(measured) = self.measured(kind, bytes, group) {
            return Some(measured);
        }
        let model = Model { levels: self.levels(group), kind, bytes: bytes.as_f64(), size: group.size };
        let launch = Seconds::micros(COEFFICIENTS.launch_us[&self.device.architecture]);
        let mut best: Option<CollectiveEstimate> = None;
        for (protocol, c) in &COEFFICIENTS.protocol {
            let candidates = [
                (Algorithm::Ring, model.ring(*protocol, c)),
                (Algorithm::Pairwise, model.pairwise(*protocol, c)),
                (Algorithm::Tree, model.tree(*protocol, c)),
                (Algorithm::InSwitch, model.in_switch(*protocol)),
                (Algorithm::Hierarchical, model.hierarchical(*protocol, c)),
            ];
            for (algorithm, time) in candidates {
                let Some(time) = time else { continue };
                let time = time + launch;
                if best.is_none_or(|b| time.0 < b.time.0) {
                    best = Some(CollectiveEstimate { time, algorithm, protocol: *protocol });
                }
            }
        }
        best
    }

    /// Of a group inside one domain of a tier on which the kind was measured.
    fn measured(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Option<CollectiveEstimate> {
        let levels = self.levels(group);
        let [Level { tier, .. }] = levels[..] else { return None };
        let line = tier.measured.get(&kind)?;
        let [steps, wire] = kind.measured_amounts(bytes, group.size);
        let algorithm = match kind {
            CollectiveKind::AllToAll | CollectiveKind::SendRecv => Algorithm::Pairwise,
            _ => Algorithm::Ring,
        };
        let time = Seconds::micros(line.latency_us * steps) + Seconds(wire / (line.bandwidth_gb_s * 1e9));
        Some(CollectiveEstimate { time, algorithm, protocol: Protocol::Simple })
    }

    /// The bandwidth that bounds a flat ring over the group, per rank: nominal bandwidths times efficiencies. None for a group of one.
    pub fn ring_bandwidth(&self, group: Group) -> Option<BytesPerSecond> {
        ring_bandwidth(&self.levels(group)).map(BytesPerSecond)
    }

    fn levels(&self, group: Group) -> Vec<Level<'_>> {
        let mut inner = group.size;
        let mut levels = Vec::with_capacity(self.tiers.len());
        for (tier, outer) in self.tiers.iter().zip(self.spans(group)) {
            // A worst-placed group may touch more wide domains than its best tier would need: never fewer inside than outside.
            let outer = outer.min(inner);
            if outer < inner {
                levels.push(Level {
                    tier,
                    fan: inner as f64 / outer as f64,
                    edges: (inner - outer) as f64,
                    members: group.size as f64 / inner as f64,
                });
            }
            inner = outer;
        }
        levels
    }
}

fn ring_bandwidth(levels: &[Level<'_>]) -> Option<f64> {
    levels.iter().map(|l| l.bandwidth() * l.members).reduce(f64::min)
}

struct Model<'a> {
    levels: Vec<Level<'a>>,
    kind: CollectiveKind,
    bytes: f64,
    size: usize,
}

/// `volume` at `bandwidth`, and the time to fill the pipeline: as long as the transfer itself for small volumes, `fill` at most.
fn transfer(volume: f64, bandwidth: f64, fill: f64) -> f64 {
    let time = volume / bandwidth;
    time + time.min(fill)
}

impl Model<'_> {
    /// What one step over that level costs, in seconds; None when the link does not have the protocol.
    fn hop(&self, level: &Level<'_>, protocol: Protocol, tree: bool) -> Option<f64> {
        let hop = COEFFICIENTS.hop_us.get(&level.tier.kind)?.get(&protocol)?;
        Some((if tree { hop.tree } else { hop.ring } + level.tier.latency_us.value) * 1e-6)
    }

    /// Of a ring or tree over all levels: what the innermost level takes to fill, at its own rate.
    fn fill(&self, passes: f64) -> f64 {
        self.levels.first().map_or(0.0, |level| level.fill(passes))
    }

    fn ring(&self, protocol: Protocol, c: &ProtocolCoefficients) -> Option<Seconds> {
        use CollectiveKind::*;
        let passes = match self.kind {
            AllReduce => 2.0,
            AllGather | ReduceScatter | Broadcast => 1.0,
            AllToAll | SendRecv => return None,
        };
        let mut hops = 0.0;
        for level in &self.levels {
            hops += passes * level.edges * self.hop(level, protocol, false)?;
        }
        let volume = self.bytes * self.kind.wire_fraction(self.size);
        let bandwidth = ring_bandwidth(&self.levels)? * c.bandwidth_fraction;
        Some(Seconds(c.base_us * 1e-6 + hops + transfer(volume, bandwidth, self.fill(passes))))
    }

    /// Point-to-point messages: the traffic that leaves a domain shares the links of its members.
    fn pairwise(&self, protocol: Protocol, c: &ProtocolCoefficients) -> Option<Seconds> {
        let outermost = self.levels.last()?;
        let (mut latency, mut slowest) = (0.0, 0.0_f64);
        match self.kind {
            CollectiveKind::SendRecv => {
                latency += self.hop(outermost, protocol, false)?;
                for level in &self.levels {
                    let pair = level.tier.effective_bandwidth(2).0;
                    slowest = slowest.max(transfer(
                        self.bytes,
                        level.bandwidth().min(pair) * c.bandwidth_fraction,
                        level.fill(1.0 / (level.fan - 1.0).clamp(1.0, 7.0)),
                    ));
                }
            }
            CollectiveKind::AllToAll => {
                let n = self.size as f64;
                for level in &self.levels {
                    latency += level.edges * self.hop(level, protocol, false)?;
                    // Of each rank's shard, what goes to members outside of its inner domain.
                    let volume = self.bytes / n * (n - level.members) / n;
                    slowest = slowest.max(transfer(
                        volume,
                        level.all_to_all_bandwidth() * c.bandwidth_fraction,
                        level.fill(1.0),
                    ));
                }
            }
            _ => return None,
        }
        Some(Seconds(c.base_us * 1e-6 + latency + slowest))
    }

    /// Up and down a double binary tree: every byte passes each link twice.
    fn tree(&self, protocol: Protocol, c: &ProtocolCoefficients) -> Option<Seconds> {
        if self.kind != CollectiveKind::AllReduce {
            return None;
        }
        let mut hops = 0.0;
        for (i, level) in self.levels.iter().enumerate() {
            let steps = if i == 0 && self.levels.len() > 1 { level.fan - 1.0 } else { level.fan.log2().ceil() };
            hops += 2.0 * steps * self.hop(level, protocol, true)?;
        }
        let bandwidth = ring_bandwidth(&self.levels)? * c.bandwidth_fraction;
        Some(Seconds(c.base_us * 1e-6 + hops + transfer(2.0 * self.bytes, bandwidth, self.fill(2.0))))
    }

    /// What the switches of the innermost level sustain, with the share of `bytes` on each link; None without such switches.
    fn switch_time(&self) -> Option<f64> {
        let level = self.levels.first()?;
        let switch = level.tier.in_switch.as_ref()?;
        if level.fan < switch.min_devices.value {
            return None;
        }
        let k = level.fan;
        let share = match self.kind {
            // Each device's link carries the buffer once and its shard once more.
            CollectiveKind::AllReduce => 1.0 + 1.0 / k,
            // The whole buffer but the own shard arrives (all-gather) or leaves (reduce-scatter).
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => (k - 1.0) / k,
            _ => return None,
        };
        let bandwidth = level.tier.bandwidth().0 * switch.efficiency.value;
        Some(transfer(share * self.bytes, bandwidth, COEFFICIENTS.in_switch.fill_mb * 1e6 / bandwidth))
    }

    fn in_switch(&self, protocol: Protocol) -> Option<Seconds> {
        if self.levels.len() != 1 || protocol != Protocol::Simple {
            return None;
        }
        Some(Seconds(COEFFICIENTS.in_switch.base_us * 1e-6 + self.switch_time()?))
    }

    /// Reduce-scatter inside, the collective on shards outside, all-gather inside; phases overlap.
    fn hierarchical(&self, protocol: Protocol, c: &ProtocolCoefficients) -> Option<Seconds> {
        use CollectiveKind::*;
        if self.levels.len() < 2 || !matches!(self.kind, AllReduce | AllGather | ReduceScatter) {
            return None;
        }
        let passes = if self.kind == AllReduce { 2.0 } else { 1.0 };
        let (mut latency, mut slowest) = (c.base_us * 1e-6, 0.0_f64);
        let mut shards = 1.0;
        for (i, level) in self.levels.iter().enumerate() {
            let hop = self.hop(level, protocol, true)?;
            let volume = passes * (level.fan - 1.0) / level.fan * self.bytes / shards;
            let ring = transfer(volume, level.bandwidth() * c.bandwidth_fraction, level.fill(passes));
            let (time, hops) = match self.switch_time() {
                Some(time) if i == 0 && protocol == Protocol::Simple && time < ring => (time, 1.0),
                _ => (ring, (level.fan - 1.0).min(2.0 * level.fan.log2().ceil())),
            };
            latency += passes * hops * hop;
            slowest = slowest.max(time);
            shards *= level.fan;
        }
        Some(Seconds(latency + slowest))
    }
}
