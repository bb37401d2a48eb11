//! Collective times against hand computation, and what must hold of them whatever the figures.

use autoshard_cost_models::collective::Algorithm;
use autoshard_cost_models::{Bytes, Cluster, CollectiveKind, Group};
use proptest::prelude::*;

fn cluster(name: &str, gpus: usize) -> Cluster {
    Cluster::load(name).and_then(|c| c.with_gpus(gpus)).unwrap_or_else(|e| panic!("{e}"))
}

/// Large messages tend to the bandwidth bound, worked out by hand from nominal bandwidth and efficiency.
#[test]
fn large_messages_reach_the_bandwidth_bound() {
    use CollectiveKind::*;
    const S: f64 = 64e9;
    let nv3 = 300e9 * 0.78;
    let nic = 25e9 * 0.92;
    let table = [
        // 8 A100 in a node: a ring sends 2 * 7/8 of the buffer.
        (AllReduce, 8, 1, S * 1.75 / nv3),
        (AllGather, 8, 1, S * 0.875 / nv3),
        (ReduceScatter, 4, 1, S * 0.75 / nv3),
        (Broadcast, 8, 1, S / nv3),
        (SendRecv, 2, 1, S / nv3),
        // Each rank sends 7/8 of its eighth; pairwise exchanges reach 0.85 of the ring's rate.
        (AllToAll, 8, 1, S * 7.0 / 64.0 / (nv3 * 0.85)),
        // 2 nodes, 8 members each: shards of an eighth cross the network, 2 * 1/2 of them per rank. The node's phase is slower
        // than the network's: 1.75 S / 234 GB/s against S/8 / 23 GB/s.
        (AllReduce, 16, 1, S * 1.75 / nv3),
        // 4 members, one in each of 4 nodes: a ring over the network at the rate of one NIC.
        (AllReduce, 4, 8, S * 1.5 / nic),
        (AllGather, 4, 8, S * 0.75 / nic),
        // Across nodes, alone per NIC.
        (SendRecv, 2, 8, S / nic),
        // 2 members in each of 4 nodes (stride 4): halves cross the network, 2 * 3/4 of them per rank.
        (AllReduce, 8, 4, S / 2.0 * 1.5 / nic),
    ];
    let c = cluster("dgx-a100", 32);
    for (kind, size, stride, expected) in table {
        let time = c.collective_time(kind, Bytes(S as u64), Group::new(size, stride)).0;
        assert!(
            (time / expected - 1.0).abs() < 0.01,
            "{} {size} x {stride}: {time} s, by hand {expected} s",
            kind.name()
        );
    }
}

/// The switches of 8 H200 reduce: each link carries S + S/8, at 0.69 of 450 GB/s. Groups of 4 stay on the ring.
#[test]
fn switches_reduce_where_they_can() {
    let c = cluster("dgx-h200", 8);
    let s = Bytes(64_000_000_000);
    let eight = c.collective_estimate(CollectiveKind::AllReduce, s, Group::contiguous(8)).unwrap();
    assert_eq!(eight.algorithm, Algorithm::InSwitch);
    let expected = 64e9 * 1.125 / (450e9 * 0.69);
    assert!((eight.time.0 / expected - 1.0).abs() < 0.01, "{} against {expected} s", eight.time);
    let four = c.collective_estimate(CollectiveKind::AllReduce, s, Group::contiguous(4)).unwrap();
    assert_ne!(four.algorithm, Algorithm::InSwitch);
}

#[test]
fn nothing_to_do_takes_no_time() {
    let c = cluster("dgx-a100", 8);
    for kind in CollectiveKind::ALL {
        assert_eq!(c.collective_time(kind, Bytes(1 << 20), Group::contiguous(1)).0, 0.0);
        assert_eq!(c.collective_time(kind, Bytes(0), Group::contiguous(8)).0, 0.0);
    }
}

/// A small all-reduce is bound by latency: far above bandwidth, and tens of microseconds.
#[test]
fn small_messages_cost_latency() {
    let c = cluster("dgx-h100", 16);
    let inside = c.collective_time(CollectiveKind::AllReduce, Bytes(1024), Group::contiguous(8)).as_micros();
    let across = c.collective_time(CollectiveKind::AllReduce, Bytes(1024), Group::contiguous(16)).as_micros();
    assert!((10.0..60.0).contains(&inside), "{inside} us");
    assert!(across > inside && across < 200.0, "{across} us");
}

/// Clusters whose tiers get slower outwards.
const ORDERED: [&str; 6] = ["dgx-a100", "dgx-h100", "dgx-b200", "p4d.24xlarge", "gb200-nvl72", "g4dn.12xlarge"];

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: proptest::test_runner::RngSeed::Fixed(4), cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn time_grows_with_bytes(name in prop::sample::select(autoshard_cost_models::library::names().collect::<Vec<_>>()), kind in prop::sample::select(CollectiveKind::ALL.to_vec()), size in 2usize..=8, bytes in 1u64..1 << 34, more in 1u64..1 << 30) {
        let c = Cluster::load(name).unwrap();
        let group = Group::contiguous(size.min(c.gpus()));
        let small = c.collective_time(kind, Bytes(bytes), group);
        let large = c.collective_time(kind, Bytes(bytes + more), group);
        prop_assert!(small.0 > 0.0 && small.0.is_finite());
        prop_assert!(large >= small, "{} {:?}: {small} for {bytes}, {large} for {}", name, kind, bytes + more);
    }

    #[test]
    fn a_wider_tier_is_never_faster(name in prop::sample::select(ORDERED.to_vec()), kind in prop::sample::select(CollectiveKind::ALL.to_vec()), power in 1u32..=2, bytes in 1u64..1 << 34) {
        let size = 1usize << power;
        let whole = Cluster::load(name).unwrap();
        let domain = whole.tiers[0].devices.unwrap();
        let c = whole.with_gpus(domain * size * whole.devices_per_node).unwrap();
        let inside = c.collective_time(kind, Bytes(bytes), Group::contiguous(size));
        let outside = c.collective_time(kind, Bytes(bytes), Group::new(size, domain));
        prop_assert!(outside >= inside, "{name} {kind:?} {size}: {inside} inside, {outside} across");
    }

    #[test]
    fn a_reduce_scatter_costs_no_more_than_an_all_reduce(name in prop::sample::select(ORDERED.to_vec()), size in 2usize..=4, bytes in 1u64..1 << 34) {
        // Reduce-scatter moves half of what an all-reduce moves: never more time than it.
        let c = Cluster::load(name).unwrap();
        let group = Group::contiguous(size);
        let whole = c.collective_time(CollectiveKind::AllReduce, Bytes(bytes), group);
        let half = c.collective_time(CollectiveKind::ReduceScatter, Bytes(bytes), group);
        // The tree in the low-latency protocol has no counterpart for reduce-scatter, where latency alone counts.
        prop_assume!(bytes > 1 << 22);
        prop_assert!(half <= whole, "{name} {size}: {half} against {whole}");
    }
}

/// What was measured inside a domain holds there, and only for the kinds that were.
#[test]
fn measured_collectives_are_lines() {
    use autoshard_cost_models::hardware::MeasuredCollective;
    let mut c = Cluster::load("dgx-h100").unwrap().with_gpus(16).unwrap();
    let model = c.clone();
    let line = MeasuredCollective { latency_us: 7.0, bandwidth_gb_s: 2.0, source: None };
    c.tiers[0].measured.insert(CollectiveKind::AllGather, line);
    let time = |c: &Cluster, kind, n| c.collective_time(kind, Bytes(8_000_000), Group::contiguous(n)).as_micros();
    // 2 doublings, and three quarters of the buffer.
    assert!((time(&c, CollectiveKind::AllGather, 4) - (14.0 + 3000.0)).abs() < 1e-6);
    assert_eq!(time(&c, CollectiveKind::AllReduce, 4), time(&model, CollectiveKind::AllReduce, 4));
    assert_eq!(time(&c, CollectiveKind::AllGather, 16), time(&model, CollectiveKind::AllGather, 16));
}
