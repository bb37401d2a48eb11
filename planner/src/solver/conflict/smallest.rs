//! Whether a conflict has fewest members.
//!
//! For every choice, each conflict has a member that the choice does not keep. So no conflict has fewer members than a
//! smallest set that hits all of some collections of constraints not kept; and where such a set conflicts itself, it is a
//! smallest conflict (A. Ignatiev et al., Smallest MUS extraction with minimal hitting set dualization, 2015). The smallest hitting
//! set is a strategy selection too: to take a constraint costs one, and of every collection not all may be left out.

use super::super::drive;
use super::super::problem::Problem;
use super::super::result::{Options, SolveError};
use super::{Answer, Asked, Constraint};
use std::collections::BTreeMap;
use std::time::Instant;

/// Collections after which it gives up.
const ROUNDS: usize = 400;

/// What came of the search.
pub(super) enum Found {
    /// A conflict with fewer members than known, of fewest.
    Smaller(Vec<Constraint>),
    /// None has fewer.
    NoSmaller,
    /// Time or rounds ran out.
    Unknown,
}

/// Looks for a conflict with fewer members than `known`.
pub(super) fn search(asked: &Asked<'_>, all: &[Constraint], known: usize) -> Result<Found, SolveError> {
    let mut collections: Vec<Vec<Constraint>> = vec![];
    for _ in 0..ROUNDS {
        let Some(hits) = hitting_set(asked, &collections)? else { return Ok(Found::Unknown) };
        if hits.len() >= known {
            return Ok(Found::NoSmaller);
        }
        let choice = match asked.choice(&hits)? {
            Answer::Conflict => return Ok(Found::Smaller(hits)),
            Answer::Choice(choice) => choice,
            Answer::Unknown => return Ok(Found::Unknown),
        };
        let Some(collection) = not_kept(asked, all, &choice)? else { return Ok(Found::Unknown) };
        collections.push(collection);
    }
    Ok(Found::Unknown)
}

/// Constraints none of which can be kept with all others: those that a choice does not keep, after keeping as many more as
/// possible.
fn not_kept(asked: &Asked<'_>, all: &[Constraint], choice: &[usize]) -> Result<Option<Vec<Constraint>>, SolveError> {
    let mut open = asked.broken(all, choice);
    let mut refused: Vec<Constraint> = vec![];
    let mut run = 1;
    while !open.is_empty() {
        run = run.min(open.len());
        let left_out = |c: &Constraint| refused.contains(c) || open[run..].binary_search(c).is_ok();
        let kept: Vec<Constraint> = all.iter().filter(|c| !left_out(c)).copied().collect();
        match asked.choice(&kept)? {
            Answer::Choice(choice) => {
                let broken = asked.broken(all, &choice);
                open.drain(..run);
                open.retain(|c| broken.contains(c));
                run *= 2;
            }
            Answer::Conflict if run > 1 => run /= 2,
            Answer::Conflict => refused.push(open.remove(0)),
            Answer::Unknown => return Ok(None),
        }
    }
    Ok(Some(refused))
}

/// A smallest set with a member of every collection; `None` when it is not found in time.
fn hitting_set(asked: &Asked<'_>, collections: &[Vec<Constraint>]) -> Result<Option<Vec<Constraint>>, SolveError> {
    let mut p = Problem::integers();
    let mut nodes: BTreeMap<Constraint, usize> = BTreeMap::new();
    for collection in collections {
        let row = p.add_row(collection.len() as i64 - 1);
        for c in collection {
            let node = *nodes.entry(*c).or_insert_with(|| p.add_node_quanta(vec![0, 1]));
            p.add_usage(node, row..row + 1, vec![1, 0]);
        }
    }
    let time_limit = asked.deadline.saturating_duration_since(Instant::now());
    let options = Options { time_limit, interrupt: asked.options.interrupt.clone(), ..Options::default() };
    match drive::solve(&p, &options) {
        Ok(s) if s.optimal() => {
            Ok(Some(nodes.into_iter().filter(|(_, node)| s.choice[*node] == 1).map(|(c, _)| c).collect()))
        }
        Ok(_) | Err(SolveError::NoChoice { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
