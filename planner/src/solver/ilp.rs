//! Solving as an integer program, with rows added when violated.
//!
//! A row enters only when a choice violates it. Solvers of programs hold rows within a relative tolerance; a choice that
//! exploits it is cut off by a cover: of the strategies at least as heavy as those chosen, not all may be taken.
//!
//! Read next: `program`, the formulation; `highs`, and with the feature `microlp` a second solver, solve it.

mod highs;
#[cfg(feature = "microlp")]
mod microlp;
mod program;

use super::problem::{Problem, Total};
use super::result::{Method, Options, SolveError, Statistics};
use program::Program;
use std::time::Instant;

/// The answer of one run.
pub(crate) struct Answer {
    /// The best feasible choice, if one was found.
    pub(crate) choice: Option<Vec<usize>>,
    /// Proven bound; none when no choice is feasible.
    pub(crate) bound: Option<Total>,
}

/// What one program gives.
struct Relaxed {
    /// A choice that costs something, if one was found in time.
    choice: Option<Vec<usize>>,
    /// Proven bound.
    bound: Total,
}

/// One row of the program over strategies: terms (node, strategy, coefficient) and an upper limit.
struct Cut {
    terms: Vec<(usize, usize, f64)>,
    limit: f64,
}

/// Solves the program, adding rows until the choice keeps all limits.
pub(crate) fn run(problem: &Problem, options: &Options, statistics: &mut Statistics) -> Result<Answer, SolveError> {
    let deadline = Instant::now() + options.time_limit;
    let best = problem.warm_start.clone().filter(|c| problem.objective(c).is_some());
    let mut cuts: Vec<Cut> = vec![];
    let mut active = vec![false; problem.limits.len()];
    let mut bound: Option<Total> = None;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).as_secs_f64();
        let Some(program) = Program::new(problem, &cuts, options.cutoff, best.as_deref()) else {
            return Ok(Answer { choice: None, bound: None });
        };
        statistics.ilp_calls += 1;
        let relaxed = match options.method {
            #[cfg(feature = "microlp")]
            Method::Microlp => microlp::relax(program, left.max(1e-3))?,
            Method::Auto | Method::WithoutIlp | Method::Ilp => {
                highs::relax(program, options, left.max(1e-3), statistics)?
            }
        };
        let Some(Relaxed { choice: relaxed, bound: low }) = relaxed else {
            return Ok(Answer { choice: best, bound: options.cutoff });
        };
        bound = bound.max(Some(low));
        let Some(choice) = relaxed else { return Ok(Answer { choice: best, bound }) };
        let violated = violated_rows(problem, &choice);
        if violated.is_empty() {
            let better = best.as_ref().is_none_or(|b| problem.objective(&choice) < problem.objective(b));
            return Ok(Answer { choice: if better { Some(choice) } else { best }, bound });
        }
        if Instant::now() >= deadline || options.interrupted() {
            return Ok(Answer { choice: best, bound });
        }
        for row in violated {
            cuts.push(if std::mem::replace(&mut active[row], true) {
                cover(problem, row, &choice)
            } else {
                usage_row(problem, row)
            });
        }
    }
}

/// The rows a choice violates: of each run of violated rows the worst one.
fn violated_rows(problem: &Problem, choice: &[usize]) -> Vec<usize> {
    let excess: Vec<i64> = problem.usage(choice).iter().zip(&problem.limits).map(|(u, l)| u - l).collect();
    let mut rows = vec![];
    let mut run: Option<usize> = None;
    for (row, &e) in excess.iter().enumerate() {
        if e > 0 {
            run = Some(run.filter(|&r| excess[r] >= e).unwrap_or(row));
        } else {
            rows.extend(run.take());
        }
    }
    rows.extend(run);
    rows
}

/// Amounts per node that use a row.
fn amounts(problem: &Problem, row: usize) -> Vec<(usize, Vec<i64>)> {
    let mut by_node: std::collections::BTreeMap<usize, Vec<i64>> = std::collections::BTreeMap::new();
    for usage in problem.usages.iter().filter(|u| u.rows.contains(&row)) {
        let sum = by_node.entry(usage.node).or_insert_with(|| vec![0; usage.amounts.len()]);
        for (s, a) in sum.iter_mut().zip(usage.amounts.iter()) {
            *s += a;
        }
    }
    by_node.into_iter().collect()
}

/// The usage row, with the least amount of each node moved to the limit and all divided by their common divisor.
fn usage_row(problem: &Problem, row: usize) -> Cut {
    let mut limit = problem.limits[row];
    let mut by_node = amounts(problem, row);
    let mut divisor = 0i64;
    for (_, amounts) in &mut by_node {
        let least = amounts.iter().copied().min().unwrap_or(0);
        limit -= least;
        for a in amounts {
            *a -= least;
            divisor = gcd(divisor, *a);
        }
    }
    let divisor = divisor.max(1);
    let limit = limit.div_euclid(divisor);
    let scale = 1.0 / (limit.abs().max(1) as f64 / 1e3).max(1.0);
    let terms = by_node
        .iter()
        .flat_map(|(node, amounts)| {
            amounts
                .iter()
                .enumerate()
                .filter(|(_, a)| **a != 0)
                .map(move |(k, a)| (*node, k, (*a / divisor) as f64 * scale))
        })
        .collect();
    Cut { terms, limit: limit as f64 * scale }
}

/// Cuts off a choice that violates a row.
fn cover(problem: &Problem, row: usize, choice: &[usize]) -> Cut {
    let mut terms = vec![];
    let mut members = 0;
    for (node, amounts) in amounts(problem, row) {
        let chosen = amounts[choice[node]];
        if amounts.iter().any(|&a| a < chosen) {
            members += 1;
            terms.extend((0..amounts.len()).filter(|&k| amounts[k] >= chosen).map(|k| (node, k, 1.0)));
        }
    }
    Cut { terms, limit: f64::from(members) - 1.0 }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a.abs() } else { gcd(b, a % b) }
}
