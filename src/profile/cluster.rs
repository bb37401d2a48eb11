//! The cluster file of what was measured.

use std::collections::BTreeMap;

use autoshard_cost_models::compute::{Coefficients, OperatorCost, Tile};
use autoshard_cost_models::hardware::{
    Architecture, ClusterFile, Device, Figure, Format, LinkKind, MeasuredCollective, Peak, Tier,
};

use super::Profile;

/// Four digits: more were never measured.
fn round(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

fn figure(value: f64, source: &str) -> Figure {
    Figure { value: round(value), source: Some(source.into()) }
}

/// As users write it.
pub fn file(p: &Profile) -> ClusterFile {
    let ranks = p.ranks;
    let gib = |bytes: autoshard_cost_models::Bytes| bytes.as_f64() / (1u64 << 30) as f64 / ranks as f64;
    let memory = gib(p.host.memory);
    let taken = gib(p.host.memory) - gib(p.host.available);
    let operators = p.costs.operators.iter().map(|(name, c)| (name.clone(), rounded(c))).collect();
    let peak = Peak { dense_tflops: round(p.costs.peak * 1e-12), sparse_tflops: None, source: Some("profile".into()) };
    let device = Device {
        name: format!("rank of {}", p.host.name),
        architecture: Architecture::Cpu,
        processors: figure(1.0, "a rank computes on one core"),
        peak: BTreeMap::from([(Format::Fp32, peak)]),
        memory_gib: figure(memory, "MemTotal of /proc/meminfo, shared evenly"),
        memory_bandwidth_gb_s: figure(p.copy.bandwidth * 1e-9, "profile"),
        // A full machine still has a plan to show: run says what is free.
        reserve_gib: figure(taken.clamp(0.0, 0.9 * memory), "profile: what other programs used"),
        matmul_efficiency: None,
        compute: Some(Coefficients {
            launch_us: round(p.copy.call_s * 1e6),
            matmul: 1.0,
            sustained: 1.0,
            attention: fraction(p, "Attention"),
            conv: fraction(p, "Conv"),
            stream: 1.0,
            gather: p.gather().map_or(1.0, |g| round(g * 1e9 / p.copy.bandwidth)),
            tile_us: round(p.costs.tile_s * 1e6),
            tiles: vec![Tile { rate: 1.0, ..p.costs.tile.clone() }],
            operators,
            half_gb_s: p.half_gb_s.map(round),
        }),
        note: Some("peak fp32: the rate that large matrix products approach; compute: see [sources]".into()),
    };
    let measured = p.collectives.iter().map(|(kind, line)| {
        let m = &line.measured;
        let (latency_us, bandwidth_gb_s) = (round(m.latency_us), round(m.bandwidth_gb_s));
        (*kind, MeasuredCollective { latency_us, bandwidth_gb_s, source: Some("profile".into()) })
    });
    let tier = Tier {
        name: "memory".into(),
        kind: LinkKind::Memory,
        devices: (ranks > 1).then_some(ranks),
        bandwidth_gb_s: figure(p.copy.bandwidth * 1e-9, "profile: copies; collectives see `measured`"),
        groups: Vec::new(),
        all_to_all_gb_s: None,
        efficiency: Figure { value: 1.0, source: Some("measured as reached".into()) },
        latency_us: Figure { value: 0.0, source: Some("in `measured`".into()) },
        in_switch: None,
        measured: measured.collect(),
    };
    let profile = format!(
        "measured by autoshard profile {} on {} ({} build), {} ranks at once: medians of {} samples in {} passes, \
         coefficients fitted to {} operators on {} sizes",
        env!("CARGO_PKG_VERSION"),
        p.date,
        if cfg!(debug_assertions) { "debug" } else { "release" },
        ranks,
        p.samples,
        super::bench::PASSES,
        p.costs.operators.len(),
        p.cases,
    );
    ClusterFile {
        name: p.name.clone(),
        title: format!("{} rank{} on {}, measured {}", ranks, if ranks == 1 { "" } else { "s" }, p.host.name, p.date),
        device: device.name.clone(),
        devices: vec![device],
        devices_per_node: ranks,
        max_nodes: Some(1),
        tier: vec![tier],
        sources: BTreeMap::from([("profile".into(), profile.clone()), ("compute".into(), profile)]),
    }
}

fn rounded(c: &OperatorCost) -> OperatorCost {
    OperatorCost {
        call_us: round(c.call_us),
        gb_s: c.gb_s.map(round),
        gflops: c.gflops.map(round),
        scores_g_s: c.scores_g_s.map(round),
    }
}

/// Of the peak, for operators of the family that were not measured.
fn fraction(p: &Profile, name: &str) -> f64 {
    let rate = p.costs.operators.get(name).and_then(|c| c.gflops);
    rate.map_or(0.5, |g| round((g * 1e9 / p.costs.peak).min(1.0)))
}
