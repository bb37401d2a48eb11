//! Latency of small problems, as the planner poses them: about a hundred nodes with about ten strategies.
//!
//! `cargo bench -p autoshard-planner --bench solver [-- COUNT]` prints quantiles of the wall time of one call, per kind of problem and method.

use autoshard_planner::solver::{Method, Options, Problem, SolveError, solve};
use std::time::{Duration, Instant};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn unit(&mut self) -> f64 {
        self.below(1 << 30) as f64 / (1u64 << 30) as f64
    }
}

/// A layered network: operators in a chain with skip connections and parameters, strategies with in and out layouts, resharding between
/// unequal layouts, and memory of `rows` moments at `tightness` between least (0) and most (1).
fn layered(seed: u64, operators: usize, strategies: usize, rows: usize, tightness: f64) -> Problem {
    let r = &mut Random(seed);
    let mut p = Problem::seconds();
    let layouts = 5;
    let mut out: Vec<Vec<usize>> = vec![];
    for _ in 0..operators {
        let k = 2 + r.below(2 * strategies - 3);
        let work = 1e-3 * (0.1 + r.unit());
        p.add_node((0..k).map(|_| work / (1 << r.below(4)) as f64 + 1e-5 * r.unit()).collect::<Vec<f64>>());
        out.push((0..k).map(|_| r.below(layouts)).collect());
    }
    for v in 1..operators {
        let mut sources = vec![v - 1];
        if r.below(3) == 0 {
            sources.push(v.saturating_sub(2 + r.below(8)));
        }
        for u in sources.into_iter().filter(|&u| u != v) {
            let wanted: Vec<usize> =
                out[v].iter().map(|&l| if r.below(4) == 0 { r.below(layouts) } else { l }).collect();
            let bytes = 1e-4 * r.unit();
            let (from, to) = (out[u].clone(), wanted);
            p.add_edge(u, v, |i, j| match (from[i], to[j]) {
                (a, b) if a == b => 0.0,
                (0, _) => 0.2 * bytes,
                (a, b) => bytes * (1.0 + 0.1 * (a + 2 * b) as f64),
            });
        }
    }
    let (mut least, mut most) = (vec![0; rows], vec![0; rows]);
    let mut usages = vec![];
    for (node, layouts) in out.iter().enumerate() {
        let size = 1 + r.below(1 << 28) as i64;
        let amounts: Vec<i64> = layouts.iter().map(|_| size >> r.below(4)).collect();
        let from = if rows == 0 { 0 } else { r.below(rows) };
        let to = if rows == 0 { 0 } else { from + 1 + r.below(rows - from) };
        for row in from..to {
            least[row] += amounts.iter().min().copied().unwrap_or(0);
            most[row] += amounts.iter().max().copied().unwrap_or(0);
        }
        usages.push((node, from..to, amounts));
    }
    for row in 0..rows {
        p.add_row(least[row] + ((most[row] - least[row]) as f64 * tightness) as i64);
    }
    for (node, range, amounts) in usages {
        p.add_usage(node, range, amounts);
    }
    p
}

fn main() {
    let count: u64 = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(100);
    println!("| problem | method | median ms | 90% | 99% | max | proven |");
    println!("|---|---|---|---|---|---|---|");
    let kinds = [
        ("100 x 10, no memory row", 0, 0.0),
        ("100 x 10, 1 row, loose", 1, 0.5),
        ("100 x 10, 1 row, tight", 1, 0.15),
        ("100 x 10, 4 rows, tight", 4, 0.15),
    ];
    for (name, rows, tightness) in kinds {
        for (method, label, share) in
            [(Method::Auto, "all", 1), (Method::WithoutIlp, "without HiGHS", 1), (Method::Ilp, "HiGHS alone", 10)]
        {
            let mut times = vec![];
            let mut proven = 0;
            for seed in 0..count.div_ceil(share) {
                let p = layered(seed, 100, 10, rows, tightness);
                let options = Options { method, time_limit: Duration::from_secs(5), ..Options::default() };
                let start = Instant::now();
                let result = solve(&p, &options);
                times.push(start.elapsed().as_secs_f64() * 1e3);
                proven += u64::from(
                    matches!(&result, Ok(s) if s.optimal()) || matches!(result, Err(SolveError::Infeasible(_))),
                );
            }
            times.sort_by(f64::total_cmp);
            let at = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
            println!(
                "| {name} | {label} | {:.2} | {:.2} | {:.2} | {:.2} | {proven}/{} |",
                at(0.5),
                at(0.9),
                at(0.99),
                at(1.0),
                times.len()
            );
        }
    }
}
