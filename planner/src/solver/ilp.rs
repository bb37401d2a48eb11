//! The integer program: one-hot nodes, tight edges, rows added when violated; built by good_lp, solved by HiGHS.
//!
//! A node has a binary `s_k` per strategy, summing to one. An edge has a continuous `e_ij` per allowed pair with
//! `sum_j e_ij = s_i` and `sum_i e_ij = s_j`; this describes the convex hull of a single edge. A row enters only when a
//! choice violates it. HiGHS holds rows within a relative tolerance; a choice that exploits it is cut off by a cover:
//! of the strategies at least as heavy as those chosen, not all may be taken.
//!
//! HiGHS computes in floating point. Every reduced cost of the LP is right within its tolerance, and the values of one node's
//! (or one edge's) columns sum to one, so a bound is lowered by the tolerance times the number of nodes and edges before it
//! is called proven.

use super::problem::{FORBIDDEN, Problem, Total};
use super::result::{Options, SolveError, Statistics};
use good_lp::{Expression, SolverModel, Variable, constraint, variable, variables};
use highs::{HighsModelStatus, HighsSolutionStatus};
use std::time::Instant;

/// HiGHS's tolerance on reduced costs, in units of the scaled objective.
const DUAL_TOLERANCE: f64 = 1e-7;
/// The scaled objective ranges up to about this much, so that the tolerance is below 1e-12 of it.
const OBJECTIVE_SCALE: f64 = 1e5;

/// The answer of one run.
pub(crate) struct Answer {
    /// The best feasible choice, if one was found.
    pub(crate) choice: Option<Vec<usize>>,
    /// Proven bound; none when no choice is feasible.
    pub(crate) bound: Option<Total>,
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
        let step = relax(problem, options, &cuts, best.as_deref(), left.max(1e-3), statistics)?;
        let Some((relaxed, low)) = step else { return Ok(Answer { choice: None, bound: None }) };
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

/// A relaxed choice, if any was found in time, and a proven bound.
type Relaxed = (Option<Vec<usize>>, Total);

/// Solves the program with the given rows. `None` says that it has no solution.
fn relax(
    problem: &Problem,
    options: &Options,
    cuts: &[Cut],
    start: Option<&[usize]>,
    seconds: f64,
    statistics: &mut Statistics,
) -> Result<Option<Relaxed>, SolveError> {
    let least = |costs: &mut dyn Iterator<Item = i64>| costs.filter(|&c| c != FORBIDDEN).min();
    let mut constant: Total = 0;
    let mut node_least = vec![0i64; problem.nodes.len()];
    let mut edge_least = vec![0i64; problem.edges.len()];
    let mut range = 0i64;
    for (node, low) in problem.nodes.iter().zip(&mut node_least) {
        let Some(l) = least(&mut node.costs.iter().copied()) else { return Ok(None) };
        *low = l;
        constant += Total::from(l);
        range = range.max(node.costs.iter().filter(|&&c| c != FORBIDDEN).map(|c| c - l).max().unwrap_or(0));
    }
    for (e, low) in problem.edges.iter().zip(&mut edge_least) {
        let Some(l) = least(&mut e.costs.costs().iter().copied()) else { return Ok(None) };
        *low = l;
        constant += Total::from(l);
        range = range.max(e.costs.costs().iter().filter(|&&c| c != FORBIDDEN).map(|c| c - l).max().unwrap_or(0));
    }
    let scale = OBJECTIVE_SCALE / range.max(1) as f64;

    let mut vars = variables!();
    let mut objective = Expression::with_capacity(problem.nodes.len());
    let hot: Vec<Vec<Option<Variable>>> = problem
        .nodes
        .iter()
        .enumerate()
        .map(|(i, node)| {
            let allowed = |k: usize| node.costs[k] != FORBIDDEN && node.fixed.is_none_or(|f| f == k);
            (0..node.costs.len())
                .map(|k| {
                    allowed(k).then(|| {
                        let mut definition = variable().binary();
                        if let Some(start) = start {
                            definition = definition.initial(if start[i] == k { 1.0 } else { 0.0 });
                        }
                        let var = vars.add(definition);
                        objective.add_mul((node.costs[k] - node_least[i]) as f64 * scale, var);
                        var
                    })
                })
                .collect()
        })
        .collect();
    let mut rows: Vec<(Expression, f64, bool)> = vec![];
    for node in &hot {
        let sum: Expression = node.iter().flatten().sum();
        rows.push((sum, 1.0, true));
    }
    for (e, low) in problem.edges.iter().zip(&edge_least) {
        let mut marginal: Vec<Expression> = hot[e.u].iter().map(|v| negated(*v)).collect();
        let mut other: Vec<Expression> = hot[e.v].iter().map(|v| negated(*v)).collect();
        for i in 0..e.costs.rows() {
            for j in 0..e.costs.cols() {
                let cost = e.costs.get(i, j);
                if cost != FORBIDDEN && hot[e.u][i].is_some() && hot[e.v][j].is_some() {
                    let mut definition = variable().min(0.0);
                    if let Some(start) = start {
                        definition = definition.initial(if (start[e.u], start[e.v]) == (i, j) { 1.0 } else { 0.0 });
                    }
                    let var = vars.add(definition);
                    if cost != *low {
                        objective.add_mul((cost - low) as f64 * scale, var);
                    }
                    marginal[i].add_mul(1.0, var);
                    other[j].add_mul(1.0, var);
                }
            }
        }
        rows.extend(marginal.into_iter().chain(other).map(|sum| (sum, 0.0, true)));
    }
    for group in &problem.groups {
        for pair in group.windows(2) {
            for (a, b) in hot[pair[0]].iter().zip(&hot[pair[1]]) {
                let mut difference = negated(*b);
                if let Some(a) = a {
                    difference.add_mul(1.0, *a);
                }
                rows.push((difference, 0.0, true));
            }
        }
    }
    for cut in cuts {
        let mut sum = Expression::with_capacity(cut.terms.len());
        for &(node, k, c) in &cut.terms {
            if let Some(var) = hot[node][k] {
                sum.add_mul(c, var);
            }
        }
        rows.push((sum, cut.limit, false));
    }
    let mut model = vars.minimise(objective).using(good_lp::highs);
    for (sum, limit, equal) in rows {
        model.add_constraint(if equal { constraint!(sum == limit) } else { constraint!(sum <= limit) });
    }
    statistics.ilp_calls += 1;

    // good_lp's own `solve` keeps the bound to itself, so the model is run here.
    let initial: Option<Vec<f64>> = start.map(|s| initial_values(problem, &hot, s));
    let mut inner = model.try_into_inner().map_err(|e| SolveError::Backend(e.to_string()))?;
    inner.make_quiet();
    let tolerance = 1e-9;
    inner.set_option("time_limit", seconds);
    inner.set_option("threads", options.threads.max(1) as i32);
    inner.set_option("random_seed", (options.seed & 0x7fff_ffff) as i32);
    inner.set_option("mip_rel_gap", options.relative_gap.max(0.0));
    inner.set_option("mip_abs_gap", tolerance);
    inner.set_option("dual_feasibility_tolerance", DUAL_TOLERANCE);
    if let Some(values) = &initial {
        inner.set_solution(Some(values), None, None, None);
    }
    let solved = inner.try_solve().map_err(|e| SolveError::Backend(format!("{e:?}")))?;
    let info = |name: &std::ffi::CStr| solved.double_info_value(name).unwrap_or(f64::NEG_INFINITY);
    statistics.branches += solved.int_info_value(c"mip_node_count").unwrap_or(0).max(0) as u64;
    match solved.status() {
        HighsModelStatus::Infeasible | HighsModelStatus::UnboundedOrInfeasible => return Ok(None),
        HighsModelStatus::Optimal
        | HighsModelStatus::ReachedTimeLimit
        | HighsModelStatus::ReachedInterrupt
        | HighsModelStatus::ReachedIterationLimit
        | HighsModelStatus::ReachedSolutionLimit => {}
        other => return Err(SolveError::Backend(format!("status {other:?}"))),
    }
    // Costs are at least 0 in the program, so 0 is a bound too.
    let margin = DUAL_TOLERANCE * (problem.nodes.len() + problem.edges.len()) as f64;
    let low = ((info(c"mip_dual_bound") - margin).max(0.0) / scale).min(2f64.powi(62));
    let bound = constant + low.ceil() as Total;
    let choice = (solved.primal_solution_status() == HighsSolutionStatus::Feasible).then(|| {
        let values = solved.get_solution();
        let values = values.columns();
        let mut next = 0;
        hot.iter()
            .map(|node| {
                let mut pick = (0, f64::NEG_INFINITY);
                for (k, var) in node.iter().enumerate() {
                    if var.is_some() {
                        if values[next] > pick.1 {
                            pick = (k, values[next]);
                        }
                        next += 1;
                    }
                }
                pick.0
            })
            .collect::<Vec<usize>>()
    });
    Ok(Some((choice.filter(|c| problem.cost(c).is_some()), bound)))
}

/// `-v`, or nothing where the variable does not exist.
fn negated(var: Option<Variable>) -> Expression {
    let mut e = Expression::with_capacity(4);
    if let Some(var) = var {
        e.add_mul(-1.0, var);
    }
    e
}

/// Values of all columns at a choice, in the order in which they were added.
fn initial_values(problem: &Problem, hot: &[Vec<Option<Variable>>], choice: &[usize]) -> Vec<f64> {
    let mut values = vec![];
    for (node, &c) in hot.iter().zip(choice) {
        values.extend(node.iter().enumerate().filter(|(_, v)| v.is_some()).map(|(k, _)| f64::from(u8::from(k == c))));
    }
    for e in &problem.edges {
        for i in 0..e.costs.rows() {
            for j in 0..e.costs.cols() {
                if e.costs.get(i, j) != FORBIDDEN && hot[e.u][i].is_some() && hot[e.v][j].is_some() {
                    values.push(f64::from(u8::from((choice[e.u], choice[e.v]) == (i, j))));
                }
            }
        }
    }
    values
}
