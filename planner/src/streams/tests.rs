//! Sections whose time has a closed form.

use proptest::prelude::*;

use super::*;

const DP: Communicator = 1;
const TP: Communicator = 2;

fn total(s: &Section) -> f64 {
    let played = s.play();
    s.compute.iter().sum::<f64>() + played.waited_s + played.lost_s
}

fn transfer(communicator: Communicator, seconds: f64, from: usize, awaited: Option<usize>) -> Transfer {
    Transfer { communicator, seconds, from, after: None, awaited, blocks: false }
}

/// Layers that each wait for a gather, which may begin when the layer before the one before is done.
fn gathered(layers: usize, compute: f64, gather: f64) -> Section {
    Section {
        compute: vec![compute; layers],
        transfers: (0..layers).map(|l| transfer(DP, gather, l.saturating_sub(1), Some(l))).collect(),
    }
}

fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a}, not {b}");
}

#[test]
fn short_gathers_hide_but_for_the_first() {
    for (layers, compute, gather) in [(1, 2.0, 1.0), (4, 2.0, 1.0), (32, 1.0, 0.25)] {
        let s = gathered(layers, compute, gather);
        let beside = (layers - 1) as f64 * gather;
        near(total(&s), gather + layers as f64 * compute + CONTENTION * beside);
        near(s.play().hidden_s, beside);
        near(s.play().waited_s, gather);
    }
}

#[test]
fn long_gathers_bound_the_time() {
    for (layers, compute, gather) in [(1, 1.0, 2.0), (4, 1.0, 2.0), (32, 1.0, 1.5)] {
        let s = gathered(layers, compute, gather);
        // One gather after the other, and the last layer.
        near(total(&s), layers as f64 * gather + compute);
    }
}

#[test]
fn reductions_leave_the_last_exposed() {
    // A gradient is made by each entry; nothing in the section waits.
    for (layers, compute, reduce) in [(1, 2.0, 1.0), (4, 2.0, 1.0), (32, 1.0, 0.25)] {
        let s = Section {
            compute: vec![compute; layers],
            transfers: (0..layers).map(|l| transfer(DP, reduce, l + 1, None)).collect(),
        };
        near(total(&s), layers as f64 * compute + CONTENTION * (layers - 1) as f64 * reduce + reduce);
        near(s.play().waited_s, reduce);
    }
}

#[test]
fn contention_counts_once_per_second_of_hidden_communication() {
    let s = Section { compute: vec![10.0, 1.0], transfers: vec![transfer(DP, 4.0, 0, None)] };
    let played = s.play();
    near(played.hidden_s, 4.0);
    near(played.lost_s, 4.0 * CONTENTION);
    near(played.waited_s, 0.0);
    // Of two communicators each takes its part.
    let s = Section { compute: vec![10.0], transfers: vec![transfer(DP, 4.0, 0, None), transfer(TP, 2.0, 0, None)] };
    near(s.play().lost_s, 6.0 * CONTENTION);
}

#[test]
fn communicators_run_beside_each_other() {
    let both = |a, b| Section {
        compute: vec![1.0],
        transfers: vec![transfer(a, 3.0, 0, Some(0)), transfer(b, 2.0, 0, Some(0))],
    };
    near(total(&both(DP, TP)), 4.0);
    near(both(DP, TP).play().hidden_s, 2.0);
    near(total(&both(DP, DP)), 6.0);
}

#[test]
fn what_the_compute_stream_issues_hides_nothing() {
    let issued = |communicator, seconds, at| Transfer { blocks: true, ..transfer(communicator, seconds, at, Some(at)) };
    let s = Section {
        compute: vec![1.0, 2.0, 3.0],
        transfers: vec![issued(DP, 0.5, 1), issued(TP, 0.25, 1), issued(COPIES, 0.25, 2), issued(DP, 1.0, 3)],
    };
    assert_eq!(s.play(), Played { waited_s: 2.0, lost_s: 0.0, hidden_s: 0.0 });
}

#[test]
fn a_chain_waits_for_its_parts() {
    // Gathered over one communicator, then over the other.
    let second = Transfer { after: Some(0), ..transfer(TP, 2.0, 0, Some(1)) };
    let s = Section { compute: vec![1.0, 1.0], transfers: vec![transfer(DP, 3.0, 0, None), second] };
    // What the first entry loses ends before the second may begin.
    near(total(&s), 3.0 + 2.0 + 1.0);
}

#[test]
fn parts_take_what_the_whole_takes_where_nothing_reaches_over_the_cut() {
    let s = Section {
        compute: vec![2.0, 1.0, 1.0, 2.0],
        transfers: vec![transfer(DP, 0.5, 0, Some(1)), transfer(DP, 0.5, 2, Some(3)), transfer(DP, 0.25, 4, None)],
    };
    let (a, b) = s.split(2);
    near(total(&a) + total(&b), total(&s));
    assert_eq!((a.transfers.len(), b.transfers.len()), (1, 2));
}

fn section() -> impl Strategy<Value = Section> {
    let transfers = prop::collection::vec(
        (1u32..4, 0.0f64..3.0, 0usize..8, prop::option::of(0usize..8), 0usize..12, any::<bool>()),
        0..12,
    );
    (prop::collection::vec(0.0f64..3.0, 0..8), transfers).prop_map(|(compute, list)| Section {
        compute,
        transfers: list
            .into_iter()
            .enumerate()
            .map(|(i, (communicator, seconds, from, awaited, after, blocks))| {
                let after = (after < i).then_some(after);
                Transfer { communicator, seconds, from, after, awaited, blocks }
            })
            .collect(),
    })
}

proptest! {
    /// Whatever depends on what: all is done, nothing faster than its busiest stream, nor slower than all one after the other.
    #[test]
    fn times_lie_between_streams_and_sums(s in section()) {
        let played = s.play();
        let compute: f64 = s.compute.iter().sum();
        let all: f64 = s.transfers.iter().map(|t| t.seconds).sum();
        let end = compute + played.waited_s + played.lost_s;
        prop_assert!((played.waited_s + played.hidden_s - all).abs() < 1e-9);
        prop_assert!(played.lost_s <= CONTENTION * played.hidden_s + 1e-9);
        prop_assert!(end <= compute + all + 1e-9);
        for c in 1..4 {
            let busy: f64 = s.transfers.iter().filter(|t| t.communicator == c).map(|t| t.seconds).sum();
            prop_assert!(end >= busy - 1e-9);
        }
        prop_assert!(end >= compute - 1e-12);
    }
}
