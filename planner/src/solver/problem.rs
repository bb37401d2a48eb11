//! The optimisation problem: nodes that each take one strategy, edges that price pairs of strategies, rows that limit usage.
//!
//! Costs are integers, multiples of a *quantum* stated by the problem, so that sums are exact in any order and a bound can be
//! compared with a cost. [`Problem::seconds`] counts in 2^-40 s (0.9 ps; sums up to 24 days fit), [`Problem::integers`] in ones.
//! Sums of whole problems are [`Total`]s of 128 bits.
//!
//! Invariants, checked by [`Problem::check`]: indices are in range, every node has at least one strategy, matrices have the sizes
//! of their nodes, and costs and usages are small enough that no intermediate sum overflows.

use std::ops::Range;
use std::sync::Arc;

/// A cost in quanta. [`FORBIDDEN`] marks what must not be chosen.
pub type Cost = i64;
/// A sum of costs over a problem, in quanta.
pub type Total = i128;
/// The cost of a strategy or of a pair that must not be chosen.
pub const FORBIDDEN: Cost = Cost::MAX;
/// Largest sum of absolute costs (and of usages) that a problem may have: leaves two bits for intermediate sums.
pub(crate) const RANGE: i128 = 1 << 61;

/// A dense matrix of costs, row-major; rows are strategies of the edge's first node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    costs: Vec<Cost>,
}

impl Matrix {
    /// A matrix from its entries in row-major order.
    ///
    /// Errors when the number of entries is not `rows * cols`.
    pub fn new(rows: usize, cols: usize, costs: Vec<Cost>) -> Result<Matrix, MalformedProblem> {
        if costs.len() != rows * cols {
            return Err(MalformedProblem(format!(
                "a {rows} x {cols} matrix needs {} costs, got {}",
                rows * cols,
                costs.len()
            )));
        }
        Ok(Matrix { rows, cols, costs })
    }

    /// A matrix from a function of (row, column).
    pub fn from_fn(rows: usize, cols: usize, mut cost: impl FnMut(usize, usize) -> Cost) -> Matrix {
        let mut costs = Vec::with_capacity(rows * cols);
        for i in 0..rows {
            for j in 0..cols {
                costs.push(cost(i, j));
            }
        }
        Matrix { rows, cols, costs }
    }

    /// Number of strategies of the first node.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of strategies of the second node.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The cost of a pair.
    #[inline]
    pub fn get(&self, i: usize, j: usize) -> Cost {
        self.costs[i * self.cols + j]
    }

    /// The costs of one row.
    #[inline]
    pub fn row(&self, i: usize) -> &[Cost] {
        &self.costs[i * self.cols..(i + 1) * self.cols]
    }

    /// All costs, row-major.
    pub fn costs(&self) -> &[Cost] {
        &self.costs
    }

    /// The matrix of the reversed edge.
    pub fn transposed(&self) -> Matrix {
        Matrix::from_fn(self.cols, self.rows, |i, j| self.get(j, i))
    }
}

/// A node: the cost of each of its strategies, and the one it is fixed to, if any.
#[derive(Clone, Debug)]
pub struct Node {
    /// Cost per strategy.
    pub costs: Vec<Cost>,
    /// The strategy that must be taken.
    pub fixed: Option<usize>,
}

/// An edge: a cost for every pair of strategies of two different nodes.
#[derive(Clone, Debug)]
pub struct Edge {
    /// First node: its strategies are the rows of the matrix.
    pub u: usize,
    /// Second node.
    pub v: usize,
    /// Cost per pair; equal matrices are best shared.
    pub costs: Arc<Matrix>,
}

/// What a node uses of every row in a range, per strategy.
#[derive(Clone, Debug)]
pub struct Usage {
    /// The node.
    pub node: usize,
    /// The rows used.
    pub rows: Range<usize>,
    /// Amount per strategy, the same in each of the rows.
    pub amounts: Arc<[i64]>,
}

/// A strategy selection problem. See the module for units and invariants.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Size of one cost unit in the user's unit.
    pub(crate) quantum: f64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) edges: Vec<Edge>,
    /// Limit per row.
    pub(crate) limits: Vec<i64>,
    pub(crate) usages: Vec<Usage>,
    /// Sets of nodes that take the same strategy.
    pub(crate) groups: Vec<Vec<usize>>,
    pub(crate) warm_start: Option<Vec<usize>>,
    pub(crate) invalid: Option<String>,
}

/// What is wrong with a problem, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed problem: {0}")]
pub struct MalformedProblem(pub String);

impl Problem {
    /// An empty problem whose costs are given in `quantum` units.
    pub fn with_quantum(quantum: f64) -> Problem {
        Problem {
            quantum,
            nodes: vec![],
            edges: vec![],
            limits: vec![],
            usages: vec![],
            groups: vec![],
            warm_start: None,
            invalid: None,
        }
    }

    /// An empty problem with costs in seconds, counted in 2^-40 s.
    pub fn seconds() -> Problem {
        Problem::with_quantum(1.0 / (1u64 << 40) as f64)
    }

    /// An empty problem with integer costs.
    pub fn integers() -> Problem {
        Problem::with_quantum(1.0)
    }

    /// A cost in the user's unit as a number of quanta, to the nearest; infinity is [`FORBIDDEN`]. A NaN, or a finite cost too
    /// large for the quantum, makes the problem malformed when solved.
    pub fn quanta(&mut self, cost: f64) -> Cost {
        if cost == f64::INFINITY {
            return FORBIDDEN;
        }
        let quanta = (cost / self.quantum).round();
        if quanta.is_nan() || quanta.abs() >= RANGE as f64 {
            let message = format!("cost {cost} is not a number or too large for a quantum of {:e}", self.quantum);
            self.invalid.get_or_insert(message);
            return 0;
        }
        quanta as Cost
    }

    /// A sum of quanta in the user's unit.
    pub fn value(&self, total: Total) -> f64 {
        total as f64 * self.quantum
    }

    /// Adds a node with costs in the user's unit (infinity: forbidden) and gives its index.
    pub fn add_node(&mut self, costs: impl IntoIterator<Item = f64>) -> usize {
        let costs = costs.into_iter().map(|c| self.quanta(c)).collect();
        self.add_node_quanta(costs)
    }

    /// Adds a node with costs in quanta and gives its index.
    pub fn add_node_quanta(&mut self, costs: Vec<Cost>) -> usize {
        self.nodes.push(Node { costs, fixed: None });
        self.nodes.len() - 1
    }

    /// Adds an edge with costs in the user's unit from a function of (strategy of `u`, strategy of `v`).
    pub fn add_edge(&mut self, u: usize, v: usize, mut cost: impl FnMut(usize, usize) -> f64) {
        let (Some(a), Some(b)) = (self.nodes.get(u), self.nodes.get(v)) else {
            self.invalid.get_or_insert(format!("edge {u}-{v}: there are only {} nodes", self.nodes.len()));
            return;
        };
        let (rows, cols) = (a.costs.len(), b.costs.len());
        let matrix = Matrix::from_fn(rows, cols, |i, j| self.quanta(cost(i, j)));
        self.add_edge_quanta(u, v, Arc::new(matrix));
    }

    /// Adds an edge with a matrix in quanta, which may be shared between edges. Edges may repeat; their costs add up.
    pub fn add_edge_quanta(&mut self, u: usize, v: usize, costs: Arc<Matrix>) {
        self.edges.push(Edge { u, v, costs });
    }

    /// Adds a row: the usages of it must sum to at most `limit`. Gives its index.
    pub fn add_row(&mut self, limit: i64) -> usize {
        self.limits.push(limit);
        self.limits.len() - 1
    }

    /// States what a node uses, per strategy, in every row of a range. Repeated calls add up.
    pub fn add_usage(&mut self, node: usize, rows: Range<usize>, amounts: impl Into<Arc<[i64]>>) {
        self.usages.push(Usage { node, rows, amounts: amounts.into() });
    }

    /// Fixes the choice of a node.
    pub fn fix(&mut self, node: usize, strategy: usize) {
        match self.nodes.get_mut(node) {
            Some(n) if strategy < n.costs.len() => n.fixed = Some(strategy),
            _ => drop(
                self.invalid
                    .get_or_insert(format!("node {node} cannot be fixed to strategy {strategy}: no such choice")),
            ),
        }
    }

    /// Excludes a strategy of a node.
    pub fn forbid(&mut self, node: usize, strategy: usize) {
        match self.nodes.get_mut(node).and_then(|n| n.costs.get_mut(strategy)) {
            Some(cost) => *cost = FORBIDDEN,
            None => drop(
                self.invalid
                    .get_or_insert(format!("node {node} cannot be forbidden strategy {strategy}: no such choice")),
            ),
        }
    }

    /// Requires that all these nodes take the strategy of the same index.
    pub fn add_group(&mut self, nodes: Vec<usize>) {
        self.groups.push(nodes);
    }

    /// Gives a choice to start from. It may be infeasible; it can only help.
    pub fn set_warm_start(&mut self, choice: Vec<usize>) {
        self.warm_start = Some(choice);
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The edges.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// The limit of each row.
    pub fn limits(&self) -> &[i64] {
        &self.limits
    }

    /// The usages.
    pub fn usages(&self) -> &[Usage] {
        &self.usages
    }

    /// Checks the invariants of the module.
    pub fn check(&self) -> Result<(), MalformedProblem> {
        let fail = |message: String| Err(MalformedProblem(message));
        if let Some(message) = &self.invalid {
            return fail(message.clone());
        }
        if !(self.quantum > 0.0 && self.quantum.is_finite()) {
            return fail(format!("the quantum {} is not a positive number", self.quantum));
        }
        let (n, rows) = (self.nodes.len(), self.limits.len());
        let magnitude =
            |costs: &[Cost]| costs.iter().filter(|&&c| c != FORBIDDEN).map(|c| i128::from(*c).abs()).max().unwrap_or(0);
        let mut sum = 0i128;
        for (i, node) in self.nodes.iter().enumerate() {
            if node.costs.is_empty() {
                return fail(format!("node {i} has no strategy"));
            }
            sum += magnitude(&node.costs);
        }
        for (k, e) in self.edges.iter().enumerate() {
            if e.u >= n || e.v >= n || e.u == e.v {
                return fail(format!("edge {k} joins {} and {}, but must join two different nodes of {n}", e.u, e.v));
            }
            let (a, b) = (self.nodes[e.u].costs.len(), self.nodes[e.v].costs.len());
            if (e.costs.rows, e.costs.cols) != (a, b) {
                return fail(format!(
                    "edge {k} has a {} x {} matrix for {a} x {b} strategies",
                    e.costs.rows, e.costs.cols
                ));
            }
            sum += magnitude(&e.costs.costs);
        }
        if sum >= RANGE {
            return fail(format!("costs sum to {sum} quanta, more than 2^61: use a larger quantum"));
        }
        let mut used = 0i128;
        for (k, usage) in self.usages.iter().enumerate() {
            if usage.node >= n || usage.rows.end > rows || usage.rows.start > usage.rows.end {
                return fail(format!("usage {k}: node {} or rows {:?} out of range", usage.node, usage.rows));
            }
            if usage.amounts.len() != self.nodes[usage.node].costs.len() {
                return fail(format!("usage {k} of node {}: {} amounts", usage.node, usage.amounts.len()));
            }
            used += usage.amounts.iter().map(|a| i128::from(*a).abs()).max().unwrap_or(0);
        }
        if used >= RANGE || self.limits.iter().any(|l| i128::from(*l).abs() >= RANGE) {
            return fail("usages or limits exceed 2^61: use a larger unit".into());
        }
        for (k, group) in self.groups.iter().enumerate() {
            if group.iter().any(|&i| i >= n) {
                return fail(format!("group {k} has a node out of range"));
            }
            if group.windows(2).any(|w| self.nodes[w[0]].costs.len() != self.nodes[w[1]].costs.len()) {
                return fail(format!("the nodes of group {k} have different numbers of strategies"));
            }
        }
        if let Some(start) = &self.warm_start
            && (start.len() != n || start.iter().zip(&self.nodes).any(|(&s, node)| s >= node.costs.len()))
        {
            return fail("the warm start does not name one strategy per node".into());
        }
        Ok(())
    }

    /// The cost of a choice, or none when it takes something forbidden, fixed otherwise or unequal within a group. Limits of
    /// rows are not looked at.
    pub fn cost(&self, choice: &[usize]) -> Option<Total> {
        let mut total: Total = 0;
        for (node, &s) in self.nodes.iter().zip(choice) {
            if node.costs[s] == FORBIDDEN || node.fixed.is_some_and(|f| f != s) {
                return None;
            }
            total += Total::from(node.costs[s]);
        }
        for e in &self.edges {
            let c = e.costs.get(choice[e.u], choice[e.v]);
            if c == FORBIDDEN {
                return None;
            }
            total += Total::from(c);
        }
        let equal = |group: &Vec<usize>| group.windows(2).all(|w| choice[w[0]] == choice[w[1]]);
        self.groups.iter().all(equal).then_some(total)
    }

    /// What a choice uses of each row.
    pub fn usage(&self, choice: &[usize]) -> Vec<i64> {
        let mut steps = vec![0i64; self.limits.len() + 1];
        for usage in &self.usages {
            let amount = usage.amounts[choice[usage.node]];
            steps[usage.rows.start] += amount;
            steps[usage.rows.end] -= amount;
        }
        let mut sum = 0;
        steps.pop();
        for step in &mut steps {
            sum += *step;
            *step = sum;
        }
        steps
    }

    /// Whether the choice keeps every limit.
    pub fn fits(&self, choice: &[usize]) -> bool {
        self.usage(choice).iter().zip(&self.limits).all(|(u, l)| u <= l)
    }

    /// The cost of a choice that is allowed and fits, none for others.
    pub fn objective(&self, choice: &[usize]) -> Option<Total> {
        self.cost(choice).filter(|_| self.fits(choice))
    }
}
