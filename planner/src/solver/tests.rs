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
        programs_agree(seed, Method::Ilp);
        #[cfg(feature = "microlp")]
        programs_agree(seed, Method::Microlp);
    }
}

/// A choice that costs the cut-off or more is none; one that costs a little less is found.
#[test]
fn integer_program_keeps_a_cut_off() {
    for seed in 0..100 {
        let p = random_problem(seed, 5, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let options = |cutoff| Options { method: Method::Ilp, cutoff: Some(cutoff), ..Options::default() };
        let below = 1 + cost.abs() / 1_000_000;
        assert_eq!(solve(&p, &options(cost + below)).unwrap().objective, cost, "seed {seed}");
        match solve(&p, &options(cost - below)) {
            Err(SolveError::CutOff { bound }) => assert!(bound <= cost, "seed {seed}"),
            Err(SolveError::NoChoice { bound }) => assert!(bound <= cost, "seed {seed}"),
            got => panic!("seed {seed}: {got:?}"),
        }
    }
}

fn programs_agree(seed: u64, method: Method) {
    let p = random_problem(seed, 5, 4);
    let reductions = if seed % 2 == 0 { Reductions::NONE } else { Reductions::ALL };
    let options = Options { method, reductions, ..Options::default() };
    match (enumerate(&p), solve(&p, &options)) {
        (Some((cost, _)), Ok(s)) => {
            assert_eq!((p.objective(&s.choice), s.objective), (Some(cost), cost), "seed {seed}");
            assert!(s.bound <= cost && s.gap() < 1e-8, "seed {seed}: bound {} of {cost}", s.bound);
        }
        (None, Err(SolveError::Infeasible(_))) => {}
        (expected, got) => panic!("seed {seed}: expected {expected:?}, got {got:?}"),
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
    let expected = Conflict {
        rows: vec![tight],
        edges: vec![0],
        nodes: vec![b],
        groups: vec![],
        irreducible: true,
        smallest: true,
    };
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

/// A grid of nodes with a few rows: too large for branch and bound at once.
fn grid(side: usize, strategies: usize, seed: u64) -> Problem {
    let mut r = random::Random(seed);
    let mut p = Problem::integers();
    for _ in 0..side * side {
        p.add_node_quanta((0..strategies).map(|_| r.below(1000) as i64).collect());
    }
    for k in 0..side * side {
        let right = (k % side + 1 < side).then_some(k + 1);
        let below = (k + side < side * side).then_some(k + side);
        for other in [right, below].into_iter().flatten() {
            let m = Matrix::from_fn(strategies, strategies, |i, j| if i == j { 0 } else { r.below(600) as i64 });
            p.add_edge_quanta(k, other, std::sync::Arc::new(m));
        }
    }
    let rows = 6;
    for _ in 0..rows {
        p.add_row(side as i64 * side as i64 * 20);
    }
    for k in 0..side * side {
        let from = r.below(rows);
        let amounts: Vec<i64> = (0..strategies).map(|_| r.below(100) as i64).collect();
        p.add_usage(k, from..from + 1 + r.below(rows - from), amounts);
    }
    p
}

#[test]
fn results_are_equal_for_every_thread_count() {
    let small = (0..150).map(|seed| random_problem(seed, 8, 4));
    for (k, p) in small.chain([grid(24, 9, 1)]).enumerate() {
        let with = |threads| {
            // The gap ends the large one, not the limit of time.
            let time_limit = Duration::from_secs(600);
            let options =
                Options { threads, relative_gap: 0.08, method: Method::WithoutIlp, time_limit, ..Options::default() };
            let s = solve(&p, &options).map_err(|e| e.to_string())?;
            Ok::<_, String>((s.choice, s.objective, s.bound, s.statistics.branches))
        };
        let one = with(1);
        for threads in 2..=4 {
            assert_eq!(with(threads), one, "problem {k} with {threads} threads");
        }
    }
}

#[test]
fn neighbourhoods_find_the_same_on_every_number_of_threads() {
    let (g, undo) = reduced(&grid(20, 8, 3), Reductions::ALL);
    let mut start = vec![0; g.nodes.len()];
    assert!(search::descend(&g, &mut start, || false), "the start is feasible");
    let improved = |threads: usize| {
        let options = Options::default();
        let mut solver = exact::Solver::new(&options, std::time::Instant::now() + Duration::from_secs(600));
        let mut best = (g.objective(&start).expect("feasible"), start.clone());
        let mut places = neighbourhood::Places::new(g.nodes.len());
        let until = solver.deadline;
        neighbourhood::improve(&mut solver, &mut places, &g, &mut best, until, Some(20_000_000), threads);
        assert_eq!(g.objective(&best.1), Some(best.0), "the cost kept is that of the choice");
        (best.0, undo.expand(&best.1))
    };
    let one = improved(1);
    assert!(Some(one.0) < g.objective(&start), "something is found");
    assert_eq!(improved(2), one);
    assert_eq!(improved(3), one);
}

/// The working form after some reductions.
fn reduced(p: &Problem, on: Reductions) -> (graph::Graph, graph::Undo) {
    let mut g = graph::Graph::new(p);
    reduce::reduce(&mut g, Reductions { consistency: true, ..on }, &mut vec![], &|| false).expect("feasible");
    g.compact()
}

#[test]
fn undone_choices_cost_and_fit_as_the_reduced_ones_do() {
    let (mut seen, mut random) = (0, random::Random(5));
    for seed in 0..600 {
        let p = random_problem(seed, 7, 4);
        if enumerate(&p).is_none() {
            continue;
        }
        let (g, undo) = reduced(&p, Reductions::from_bits((seed % 128) as u32));
        for _ in 0..20 {
            let choice: Vec<usize> = g.nodes.iter().map(|n| random.below(n.costs.len())).collect();
            if let Some(cost) = g.objective(&choice) {
                seen += 1;
                assert_eq!(p.objective(&undo.expand(&choice)), Some(cost), "seed {seed}");
            }
        }
    }
    assert!(seen > 1000, "only {seen} feasible choices");
}

#[test]
fn a_stopped_reduction_loses_no_optimum() {
    for seed in 0..200 {
        let p = random_problem(seed, 6, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let mut g = graph::Graph::new(&p);
        reduce::reduce(&mut g, Reductions::ALL, &mut vec![], &|| true).expect("feasible");
        let (g, undo) = g.compact();
        let rest = drive::to_problem(&g);
        let (found, choice) = enumerate(&rest).expect("feasible");
        assert_eq!((g.constant + found, p.objective(&undo.expand(&choice))), (cost, Some(cost)), "seed {seed}");
    }
}

#[test]
fn a_short_limit_is_kept_and_gives_a_choice_with_its_gap() {
    // No rows: any choice is feasible. Reducing alone takes longer than the limit.
    let p = {
        let mut p = grid(110, 12, 9);
        p.usages.clear();
        p.limits.clear();
        p
    };
    for limit in [0.05, 0.5] {
        let options = Options { time_limit: Duration::from_secs_f64(limit), ..Options::default() };
        let clock = std::time::Instant::now();
        let s = solve(&p, &options).expect("a choice");
        let took = clock.elapsed().as_secs_f64();
        assert!(took < limit + 3.0, "{took} s for a limit of {limit} s");
        assert_eq!(p.objective(&s.choice), Some(s.objective));
        assert!(s.bound <= s.objective);
    }
}

#[test]
fn an_interrupt_stops_before_the_limit() {
    let flag = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let options = Options { interrupt: Some(flag), ..Options::default() };
    let clock = std::time::Instant::now();
    let out = solve(&grid(60, 10, 2), &options);
    assert!(matches!(out, Ok(_) | Err(SolveError::NoChoice { .. })), "{out:?}");
    assert!(clock.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_warm_start_is_a_seed() {
    let (mut with, mut without) = (0, 0);
    for seed in 0..60 {
        let mut p = random_problem(seed, 9, 4);
        let Ok(plain) = solve(&p, &Options::default()) else { continue };
        p.set_warm_start(plain.choice.clone());
        let warm = solve(&p, &Options::default()).expect("feasible");
        assert_eq!((warm.objective, warm.bound), (plain.objective, plain.bound), "seed {seed}");
        without += plain.statistics.branches;
        with += warm.statistics.branches;
    }
    assert!(with <= without, "{with} branches with the optimum known, {without} without");

    // A large problem stopped at once is no worse than what it started from.
    let mut p = grid(24, 9, 1);
    let known = solve(&p, &Options { relative_gap: 0.08, method: Method::WithoutIlp, ..Options::default() }).unwrap();
    p.set_warm_start(known.choice.clone());
    let s = solve(&p, &Options { time_limit: Duration::from_millis(200), ..Options::default() }).unwrap();
    assert!(s.objective <= known.objective);
    // One of its choices is dropped by reductions, or forbidden: still only a hint.
    p.set_warm_start(vec![8; 24 * 24]);
    let s = solve(&p, &Options { time_limit: Duration::from_millis(500), ..Options::default() }).unwrap();
    assert_eq!(p.objective(&s.choice), Some(s.objective));
}

/// Once strategies were dropped at potentials below zero, as if what a strategy costs above them were above the bound.
#[test]
fn potentials_below_zero_drop_no_optimum() {
    let mut random = random::Random(11);
    let mut checked = 0;
    for seed in 0..400 {
        let p = random_problem(seed, 6, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let (mut g, undo) = reduced(&p, Reductions { elimination: false, contraction: false, ..Reductions::ALL });
        if g.nodes.is_empty() {
            continue;
        }
        let (model, mut dual) = dual::Model::new(&g);
        // Any messages and multipliers give a bound, however bad.
        dual.disturb(|| random.below(2001) as f64 - 1000.0);
        let certified = dual::certify(&model, &mut g, &dual, Some(cost + 1));
        assert!(certified.bound <= cost, "seed {seed}: bound {} of {cost}", certified.bound);
        let rest = drive::to_problem(&g);
        let (found, choice) = enumerate(&rest).expect("the optimum is left");
        assert_eq!(g.constant + found, cost, "seed {seed}");
        assert_eq!(p.objective(&undo.expand(&choice)), Some(cost), "seed {seed}");
        checked += 1;
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn a_bound_is_never_above_the_optimum() {
    for seed in 3000..3300 {
        let p = random_problem(seed, 7, 4);
        let Some((cost, _)) = enumerate(&p) else { continue };
        let (mut g, _) = reduced(&p, Reductions::from_bits((seed % 128) as u32));
        let (model, mut dual) = dual::Model::new(&g);
        dual::ascend(&model, &g, &mut dual, 60, 1e-3, Some(cost as f64), &mut |_, _| dual::Watch::Continue);
        let bound = dual::certify(&model, &mut g, &dual, None).bound;
        assert!(bound <= cost, "seed {seed}: {bound} of {cost}");
    }
}

#[test]
fn a_constraint_that_conflicts_alone_is_named_alone() {
    let mut p = Problem::integers();
    let a = p.add_node_quanta(vec![0, 0]);
    let b = p.add_node_quanta(vec![0, 0]);
    p.add_edge(a, b, |i, j| if i == j { 0.0 } else { f64::INFINITY });
    // The first row conflicts with the edge and the fixed choice, the second with nothing else.
    let (together, alone) = (p.add_row(10), p.add_row(2));
    p.add_usage(a, together..together + 1, [6, 1]);
    p.add_usage(b, together..together + 1, [6, 1]);
    p.fix(a, 0);
    p.add_usage(b, alone..alone + 1, [2, 1]);
    p.add_usage(b, alone..alone + 1, [1, 2]);
    let Err(SolveError::Infeasible(conflict)) = solve(&p, &Options::default()) else { panic!("infeasible") };
    assert_eq!(conflict, Conflict { rows: vec![alone], irreducible: true, smallest: true, ..Conflict::default() });
}

#[test]
fn conflicts_are_irreducible_and_smallest() {
    let (mut sizes, mut larger) = (0, 0);
    for seed in 0..500 {
        let p = random_problem(seed, 6, 3);
        let Err(SolveError::Infeasible(conflict)) = solve(&p, &Options::default()) else { continue };
        let only = |rows: &[usize], edges: &[usize], nodes: &[usize], groups: &[usize]| {
            let mut q = p.clone();
            let free = i64::MAX / 8;
            (0..q.limits.len()).filter(|k| !rows.contains(k)).for_each(|k| q.limits[k] = free);
            q.edges = edges.iter().map(|&k| p.edges[k].clone()).collect();
            q.groups = groups.iter().map(|&k| p.groups[k].clone()).collect();
            for k in (0..q.nodes.len()).filter(|k| !nodes.contains(k)) {
                q.nodes[k] = Node { costs: vec![0; q.nodes[k].costs.len()], fixed: None };
            }
            enumerate(&q).is_some()
        };
        let Conflict { rows, edges, nodes, groups, irreducible, smallest } = &conflict;
        assert!(*irreducible && *smallest, "seed {seed}");
        assert!(!only(rows, edges, nodes, groups), "seed {seed}: {conflict} do not conflict");
        let without = |v: &[usize], k: usize| v.iter().copied().filter(|&x| x != k).collect::<Vec<_>>();
        rows.iter().for_each(|&k| assert!(only(&without(rows, k), edges, nodes, groups), "seed {seed}: row {k}"));
        edges.iter().for_each(|&k| assert!(only(rows, &without(edges, k), nodes, groups), "seed {seed}: edge {k}"));
        nodes.iter().for_each(|&k| assert!(only(rows, edges, &without(nodes, k), groups), "seed {seed}: node {k}"));
        groups.iter().for_each(|&k| assert!(only(rows, edges, nodes, &without(groups, k)), "seed {seed}: group {k}"));
        sizes += 1;
        // No set of fewer constraints conflicts: all of one member less are tried.
        let members = rows.len() + edges.len() + nodes.len() + groups.len();
        let all: Vec<(usize, usize)> = [p.limits.len(), p.edges.len(), p.nodes.len(), p.groups.len()]
            .iter()
            .enumerate()
            .flat_map(|(kind, &n)| (0..n).map(move |k| (kind, k)))
            .collect();
        larger += usize::from(members > 2);
        let mut set: Vec<usize> = (0..members - 1).collect();
        while !set.is_empty() {
            let of = |kind| set.iter().map(|&i| all[i]).filter(|(x, _)| *x == kind).map(|(_, k)| k).collect::<Vec<_>>();
            assert!(only(&of(0), &of(1), &of(2), &of(3)), "seed {seed}: fewer than {conflict}: {set:?}");
            // The next combination.
            let n = all.len();
            let Some(at) = (0..set.len()).rev().find(|&i| set[i] + set.len() - i < n) else { break };
            let next = set[at] + 1;
            (at..set.len()).enumerate().for_each(|(step, i)| set[i] = next + step);
        }
    }
    assert!(sizes > 50 && larger > 5, "{sizes} conflicts, {larger} of more than two members");
}
