//! Mixture of experts: a matrix gathered per row, times the row.

use egg::Id;

use super::super::rule::{Match, Rule, rule};
use crate::ops::einsum::equation;
use crate::ops::experts::expert_mat_mul;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        rule("experts-by-tuple", "(Einsum ?e (Reshape ?r (GatherND ?g ?w ?index)) ?x)", experts),
        rule("experts-by-flat-tuple", "(Einsum ?e (GatherND ?g ?w ?index) ?x)", experts),
        rule("experts", "(Einsum ?e (Gather ?g ?w ?index) ?x)", experts),
        rule("experts-reshaped", "(Einsum ?e (Reshape ?r (Gather ?g ?w ?index)) ?x)", experts),
    ]
}

/// `rows n k, rows k -> rows n` in any order, where other dims have size 1.
fn experts(m: &mut Match<'_>) -> Option<Id> {
    let (e, g) = (equation(&m.op("?e")?).ok()?, m.op("?g")?);
    let (w, index, x) = (m.id("?w"), m.id("?index"), m.id("?x"));
    let (w_dims, x_dims, index_dims) = (m.dims(w)?, m.dims(x)?, m.dims(index)?);
    let &[_, rows_of, columns_of] = &w_dims[..] else { return None };
    // One index per row, of the first dim.
    let one_each = match g.name() {
        "GatherND" => g.get_int("batch_dims") == 0 && index_dims.last() == Some(&1),
        _ => g.get_int("axis") == 0,
    };
    // The gathered matrices come last in the first operand, its rows first.
    let lead = e.x.len().checked_sub(2)?;
    let (rows, matrix) = e.x.split_at(lead);
    let role = e.roles();
    let size = |letter: u8| e.y.iter().position(|&l| l == letter).map(|d| x_dims[d]);
    let row_sizes: Vec<usize> = rows.iter().map(|&l| size(l)).collect::<Option<_>>()?;
    let count: usize = row_sizes.iter().product();
    if !one_each || !rows.iter().all(|l| role.batch.contains(l)) || index_dims.iter().product::<usize>() != count {
        return None;
    }
    let (n, k, turned) = match (role.k.contains(&matrix[0]), role.k.contains(&matrix[1])) {
        (false, true) => (matrix[0], matrix[1], false),
        (true, false) => (matrix[1], matrix[0], true),
        _ => return None,
    };
    let (n_size, k_size) = if turned { (columns_of, rows_of) } else { (rows_of, columns_of) };
    // What x has besides must be of size 1.
    let rest = e.y.iter().filter(|l| !rows.contains(l) && **l != k);
    if role.k.len() != 1 || rest.clone().any(|&l| size(l) != Some(1)) || size(k) != Some(k_size) {
        return None;
    }
    let order: Vec<usize> =
        (rows.iter().chain([&k]).chain(rest)).map(|l| e.y.iter().position(|y| y == l)).collect::<Option<_>>()?;
    let x = m.transpose(x, &order)?;
    let x = m.reshape(x, &[&row_sizes[..], &[k_size]].concat())?;
    let index = m.reshape(index, &row_sizes)?;
    let y = m.add(&expert_mat_mul(turned), &[x, w, index])?;
    // Back to the order of the result, with its dims of size 1.
    let all: Vec<u8> = rows
        .iter()
        .copied()
        .chain([n])
        .chain(e.y.iter().copied().filter(|l| e.z.contains(l) && !rows.contains(l)))
        .collect();
    let mut sizes = row_sizes;
    sizes.push(n_size);
    sizes.resize(all.len(), 1);
    let y = m.reshape(y, &sizes)?;
    let back: Vec<usize> = e.z.iter().map(|l| all.iter().position(|a| a == l)).collect::<Option<_>>()?;
    m.transpose(y, &back)
}
