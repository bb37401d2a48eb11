//! Latency of small problems: random ones of about a hundred nodes with about ten strategies, and those that planning some models posed.
//!
//! `cargo bench --workspace --features autoshard-planner/microlp --bench solver [-- COUNT]` prints quantiles of the wall time of one call,
//! per kind of problem and method; those of integer programs on every tenth problem, with 5 s for each. `COUNT` is the number of random problems per kind. The real ones are in `planner.jsonl.gz`: one problem per line, as
//! the planner passed it to the solver with its cut-off, from the model named in the line (training, batch of 64, on DGX H100).

use autoshard_planner::solver::{Matrix, Method, Options, Phase, Problem, SolveError, solve};
use std::error::Error;
use std::io::BufRead;
use std::sync::Arc;
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

/// A problem and the cut-off it was posed with.
type Posed = (Problem, Option<i128>);

/// The problems that the planner posed.
fn planner() -> Result<Vec<Posed>, Box<dyn Error>> {
    let file = std::fs::File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/planner.jsonl.gz"))?;
    let mut problems = vec![];
    for line in std::io::BufReader::new(flate2::read::GzDecoder::new(file)).lines() {
        let p: Line = serde_json::from_str(&line?)?;
        let mut problem = Problem::with_quantum(p.quantum);
        let sizes: Vec<usize> = p.nodes.iter().map(Vec::len).collect();
        for costs in p.nodes {
            problem.add_node_quanta(costs);
        }
        for (u, v, m) in p.edges {
            let matrix = Matrix::new(sizes[u], sizes[v], p.matrices[m].clone())?;
            problem.add_edge_quanta(u, v, Arc::new(matrix));
        }
        for limit in p.limits {
            problem.add_row(limit);
        }
        for (node, from, to, amounts) in p.usages {
            problem.add_usage(node, from..to, amounts);
        }
        problems.push((problem, p.cutoff.map(i128::from)));
    }
    Ok(problems)
}

/// A line of the file.
#[derive(serde::Deserialize)]
struct Line {
    quantum: f64,
    cutoff: Option<i64>,
    nodes: Vec<Vec<i64>>,
    matrices: Vec<Vec<i64>>,
    edges: Vec<(usize, usize, usize)>,
    limits: Vec<i64>,
    usages: Vec<(usize, usize, usize, Vec<i64>)>,
}

/// Prints quantiles of times in milliseconds.
fn row(name: &str, label: &str, mut times: Vec<f64>, proven: usize) {
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times.get(((times.len().max(1) - 1) as f64 * q).round() as usize).copied().unwrap_or(f64::NAN);
    println!(
        "| {name} | {label} | {:.2} | {:.2} | {:.2} | {:.2} | {proven}/{} |",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        times.len()
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let count: u64 = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(250);
    println!("| problem | method | median ms | 90% | 99% | max | proven |");
    println!("|---|---|---|---|---|---|---|");
    let random = |rows: usize, tightness: f64| -> Vec<Posed> {
        (0..count).map(|seed| (layered(seed, 100, 10, rows, tightness), None)).collect()
    };
    let kinds = [
        ("100 x 10, no memory row", random(0, 0.0)),
        ("100 x 10, 1 row, loose", random(1, 0.5)),
        ("100 x 10, 1 row, tight", random(1, 0.15)),
        ("100 x 10, 4 rows, tight", random(4, 0.15)),
        ("posed by the planner", planner()?),
    ];
    for (name, problems) in kinds {
        let methods = [
            (Method::Auto, "all", 1),
            (Method::Ilp, "HiGHS after reductions", 10),
            #[cfg(feature = "microlp")]
            (Method::Microlp, "microlp after reductions", 10),
        ];
        for (method, label, share) in methods {
            let (mut times, mut proven) = (vec![], 0);
            // What reductions take alone, and how often they leave nothing.
            let (mut reducing, mut reduced) = (vec![], 0);
            for (p, cutoff) in problems.iter().step_by(share) {
                let options =
                    Options { method, cutoff: *cutoff, time_limit: Duration::from_secs(5), ..Options::default() };
                let start = Instant::now();
                let result = solve(p, &options);
                times.push(start.elapsed().as_secs_f64() * 1e3);
                proven += usize::from(match &result {
                    Ok(s) => s.optimal(),
                    Err(SolveError::Infeasible(_) | SolveError::CutOff { .. }) => true,
                    Err(_) => false,
                });
                if let Ok(s) = result {
                    let spent = s.statistics.seconds.iter().find(|(phase, _)| *phase == Phase::Reduce);
                    reducing.push(1e3 * spent.map_or(0.0, |(_, seconds)| *seconds));
                    reduced += usize::from(s.statistics.core_nodes == 0);
                }
            }
            row(name, label, times, proven);
            if method == Method::Auto {
                row(name, "reductions alone", reducing, reduced);
            }
        }
    }
    Ok(())
}
