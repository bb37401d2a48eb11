//! Property tests: every method against exhaustive enumeration.

use super::reference::{enumerate, random_problem};
use super::*;
use std::time::Duration;

/// Solves a problem with some reductions and compares with enumeration. Gives whether it is feasible.
fn agrees(seed: u64, nodes: usize, strategies: usize, bits: u32) -> bool {
    let p = random_problem(seed, nodes, strategies);
    let options = Options { reductions: Reductions::from_bits(bits), ..Options::default() };
    match (enumerate(&p), solve(&p, &options)) {
        (Some((cost, _)), Ok(s)) => {
            assert_eq!(p.objective(&s.choice), Some(s.objective), "seed {seed} bits {bits:#b}: the choice");
            assert_eq!(s.objective, cost, "seed {seed} bits {bits:#b}: the cost");
            assert_eq!(s.bound, cost, "seed {seed} bits {bits:#b}: the bound");
            true
        }
        (None, Err(SolveError::Infeasible(c))) => {
            assert!(c.irreducible, "seed {seed} bits {bits:#b}: {c}");
            false
        }
        (expected, got) => panic!("seed {seed} bits {bits:#b}: expected {expected:?}, got {got:?}"),
    }
}

#[test]
fn optimum_equals_enumeration() {
    let feasible = (0..400).filter(|&seed| agrees(seed, 6, 4, 0x7f)).count();
    assert!((150..380).contains(&feasible), "{feasible} of 400 are feasible");
}

#[test]
fn optimum_of_larger_problems_equals_enumeration() {
    let feasible = (2000..2060).filter(|&seed| agrees(seed, 9, 4, 0x7f)).count();
    assert!(feasible > 20, "{feasible} of 60 are feasible");
}

#[test]
fn optimum_is_equal_with_every_subset_of_reductions() {
    for bits in 0..0x80 {
        for seed in 0..4 {
            agrees(1000 + u64::from(bits) * 4 + seed, 5, 4, bits);
        }
    }
}

#[test]
fn integer_program_agrees_with_enumeration() {
    for seed in 0..150 {
        let p = random_problem(seed, 5, 4);
        let reductions = if seed % 2 == 0 { Reductions::NONE } else { Reductions::ALL };
        let options = Options { method: Method::Ilp, reductions, ..Options::default() };
        match (enumerate(&p), solve(&p, &options)) {
            (Some((cost, _)), Ok(s)) => {
                assert_eq!((p.objective(&s.choice), s.objective), (Some(cost), cost), "seed {seed}");
                assert!(s.bound <= cost && s.gap() < 1e-8, "seed {seed}: bound {} of {cost}", s.bound);
            }
            (None, Err(SolveError::Infeasible(_))) => {}
            (expected, got) => panic!("seed {seed}: expected {expected:?}, got {got:?}"),
        }
    }
}

#[test]
fn a_gap_is_kept() {
    let mut early = 0;
    for seed in 0..200 {
        let p = random_problem(seed, 8, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let s = solve(&p, &Options { relative_gap: 0.2, ..Options::default() }).unwrap();
        assert!(
            s.bound <= cost && cost <= s.objective && s.gap() <= 0.2,
            "seed {seed}: {} <= {cost} <= {}",
            s.bound,
            s.objective
        );
        early += usize::from(!s.optimal());
    }
    assert!(early > 0);
}

#[test]
fn cut_off_hides_what_costs_as_much() {
    for seed in 0..60 {
        let p = random_problem(seed, 6, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let with = |cutoff| solve(&p, &Options { cutoff: Some(cutoff), ..Options::default() });
        assert_eq!(with(cost + 1).map(|s| s.objective).ok(), Some(cost), "seed {seed}");
        assert!(matches!(with(cost), Err(SolveError::CutOff { bound }) if bound <= cost), "seed {seed}");
    }
}

#[test]
fn no_time_gives_a_valid_bound() {
    for seed in 0..100 {
        let p = random_problem(seed, 6, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let options = Options { time_limit: Duration::ZERO, reductions: Reductions::NONE, ..Options::default() };
        match solve(&p, &options) {
            Ok(s) => {
                assert!(
                    s.bound <= cost && cost <= s.objective,
                    "seed {seed}: {} <= {cost} <= {}",
                    s.bound,
                    s.objective
                );
                assert_eq!(p.objective(&s.choice), Some(s.objective));
            }
            Err(SolveError::NoChoice { bound }) => assert!(bound <= cost, "seed {seed}: {bound} <= {cost}"),
            Err(e) => panic!("seed {seed}: {e}"),
        }
    }
}

#[test]
fn a_conflict_names_its_members() {
    let mut p = Problem::integers();
    let a = p.add_node_quanta(vec![0, 0]);
    let b = p.add_node_quanta(vec![0, 0]);
    let c = p.add_node_quanta(vec![0, 0]);
    p.add_edge(a, b, |i, j| if i == j { 0.0 } else { f64::INFINITY });
    p.add_edge(b, c, |_, _| 1.0);
    let (slack, tight) = (p.add_row(100), p.add_row(10));
    p.add_usage(a, slack..tight + 1, [6, 1]);
    p.add_usage(c, slack..tight + 1, [5, 5]);
    p.fix(b, 0);
    let Err(SolveError::Infeasible(conflict)) = solve(&p, &Options::default()) else { panic!("infeasible") };
    let expected = Conflict { rows: vec![tight], edges: vec![0], nodes: vec![b], groups: vec![], irreducible: true };
    assert_eq!(conflict, expected);
    assert_eq!(conflict.to_string(), "rows [1], edges [0], nodes [1]");
}

#[test]
fn malformed_problems_say_where() {
    let mut p = Problem::seconds();
    let a = p.add_node([0.0, 1.0]);
    p.add_edge(a, 7, |_, _| 0.0);
    assert_eq!(p.check().unwrap_err().to_string(), "malformed problem: edge 0-7: there are only 1 nodes");
    let mut p = Problem::seconds();
    p.add_node([f64::NAN]);
    assert!(matches!(solve(&p, &Options::default()), Err(SolveError::Malformed(m)) if m.to_string().contains("NaN")));
    let mut p = Problem::integers();
    p.add_node_quanta(vec![1]);
    p.set_warm_start(vec![1]);
    assert!(matches!(solve(&p, &Options::default()), Err(SolveError::Malformed(_))));
}
