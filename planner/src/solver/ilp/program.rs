//! The integer program: one-hot nodes, tight edges, rows; built by good_lp for any of its solvers.
//!
//! A node has a binary `s_k` per strategy, summing to one. An edge has a continuous `e_ij` per allowed pair with
//! `sum_j e_ij = s_i` and `sum_i e_ij = s_j`; this describes the convex hull of a single edge. Costs are at least zero: the
//! least of every node and edge is taken off.

use super::super::problem::{Cost, FORBIDDEN, Problem, Total};
use super::Cut;
use good_lp::variable::ProblemVariables;
use good_lp::{Expression, SolverModel, Variable, constraint, variable, variables};

/// The scaled objective ranges up to about this much, so that a tolerance of 1e-7 is below 1e-12 of it.
const OBJECTIVE_SCALE: f64 = 1e5;

/// Expression, limit, and whether it is an equation.
type Row = (Expression, f64, bool);

/// A program, before a solver is chosen.
pub(super) struct Program<'a> {
    pub(super) problem: &'a Problem,
    pub(super) vars: ProblemVariables,
    pub(super) objective: Expression,
    pub(super) rows: Vec<Row>,
    /// Per node and strategy its variable; none where it is not allowed.
    pub(super) hot: Vec<Vec<Option<Variable>>>,
    /// What was taken off the costs.
    pub(super) constant: Total,
    /// Units of the objective per quantum.
    pub(super) scale: f64,
    /// Values of all variables at the choice to start from, in their order.
    pub(super) start: Option<Vec<f64>>,
}

impl<'a> Program<'a> {
    /// Formulates a problem with some of its rows, for choices that cost less than the cut-off. `None`: a node or an edge has
    /// no choice.
    pub(super) fn new(
        problem: &'a Problem,
        cuts: &[Cut],
        cutoff: Option<Total>,
        start: Option<&[usize]>,
    ) -> Option<Program<'a>> {
        let mut constant: Total = 0;
        let mut range = 0;
        let mut least = |costs: &[Cost]| {
            let allowed = || costs.iter().copied().filter(|&c| c != FORBIDDEN);
            let low = allowed().min()?;
            constant += Total::from(low);
            range = range.max(allowed().max().map_or(0, |high| high - low));
            Some(low)
        };
        let node_least: Vec<Cost> = problem.nodes.iter().map(|n| least(&n.costs)).collect::<Option<_>>()?;
        let edge_least: Vec<Cost> = problem.edges.iter().map(|e| least(e.costs.costs())).collect::<Option<_>>()?;
        let scale = OBJECTIVE_SCALE / range.max(1) as f64;

        let mut vars = variables!();
        let mut values: Vec<f64> = vec![];
        let mut objective = Expression::with_capacity(problem.nodes.len());
        let mut add = |definition: good_lp::VariableDefinition, cost: Cost, taken: bool| {
            let value = if taken { 1.0 } else { 0.0 };
            let definition = if start.is_some() { definition.initial(value) } else { definition };
            let var = vars.add(definition);
            values.push(value);
            if cost != 0 {
                objective.add_mul(cost as f64 * scale, var);
            }
            var
        };
        let mut hot: Vec<Vec<Option<Variable>>> = Vec::with_capacity(problem.nodes.len());
        for (i, (node, low)) in problem.nodes.iter().zip(&node_least).enumerate() {
            let allowed = |k: usize| node.costs[k] != FORBIDDEN && node.fixed.is_none_or(|f| f == k);
            let taken = |k: usize| start.is_some_and(|s| s[i] == k);
            let mut var = |k: usize| allowed(k).then(|| add(variable().binary(), node.costs[k] - low, taken(k)));
            hot.push((0..node.costs.len()).map(&mut var).collect());
        }
        let mut rows: Vec<Row> = hot.iter().map(|node| (node.iter().flatten().sum(), 1.0, true)).collect();
        for (e, low) in problem.edges.iter().zip(&edge_least) {
            let mut marginal: Vec<Expression> = hot[e.u].iter().map(|v| negated(*v)).collect();
            let mut other: Vec<Expression> = hot[e.v].iter().map(|v| negated(*v)).collect();
            for i in 0..e.costs.rows() {
                for j in 0..e.costs.cols() {
                    let cost = e.costs.get(i, j);
                    if cost != FORBIDDEN && hot[e.u][i].is_some() && hot[e.v][j].is_some() {
                        let taken = start.is_some_and(|s| (s[e.u], s[e.v]) == (i, j));
                        let var = add(variable().min(0.0), cost - low, taken);
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
        if let Some(cutoff) = cutoff {
            rows.push((objective.clone(), (cutoff - constant) as f64 * scale, false));
        }
        let start = start.map(|_| values);
        Some(Program { problem, vars, objective, rows, hot, constant, scale, start })
    }

    /// Adds rows to a solver's model of [`Self::vars`] and [`Self::objective`].
    pub(super) fn add(rows: Vec<Row>, model: &mut impl SolverModel) {
        for (sum, limit, equal) in rows {
            model.add_constraint(if equal { constraint!(sum == limit) } else { constraint!(sum <= limit) });
        }
    }
}

/// Per node the strategy of the largest value, if these go together.
pub(super) fn chosen(
    problem: &Problem,
    hot: &[Vec<Option<Variable>>],
    value: &mut dyn FnMut(Variable) -> f64,
) -> Option<Vec<usize>> {
    let mut largest = |node: &Vec<Option<Variable>>| {
        let mut pick = (0, f64::NEG_INFINITY);
        for (k, var) in node.iter().enumerate().filter_map(|(k, v)| v.map(|v| (k, v))) {
            let x = value(var);
            if x > pick.1 {
                pick = (k, x);
            }
        }
        pick.0
    };
    let choice: Vec<usize> = hot.iter().map(&mut largest).collect();
    problem.cost(&choice).is_some().then_some(choice)
}

/// `-v`, or nothing where the variable does not exist.
fn negated(var: Option<Variable>) -> Expression {
    let mut e = Expression::with_capacity(4);
    if let Some(var) = var {
        e.add_mul(-1.0, var);
    }
    e
}
