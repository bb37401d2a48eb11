//! The cheapest terms: one per class, common ones counted once.
//!
//! The cost of a term is the time that its operator takes on a device, in bytes of memory traffic: bytes, and operations
//! by [`BALANCE`]. Choosing the cheapest set of terms is NP-hard; the greedy choice here takes per class the term whose
//! operands, shared ones counted once, cost least, until no class gets cheaper. A term costs more than each of its
//! operands, so the choice has no cycles.

use std::collections::{BTreeMap, BTreeSet};

use egg::{Id, Language};

use super::language::{Classes, Head, Term, applied};
use crate::builder;
use crate::tensor::Type;

/// Operations in the time of moving a byte: what recent accelerators do in half precision, roughly.
const BALANCE: f64 = 200.0;

/// Starting an operator costs as much as moving so many bytes: microseconds at some TB/s.
const LAUNCH: f64 = 4e6;

/// What a term costs that only says the same otherwise (reshapes, constants folded): more than nothing.
const TRIFLE: f64 = 1.0;

/// The chosen term of each class, and the classes it needs with their costs.
struct Choice {
    cost: f64,
    term: Term,
    needs: BTreeMap<Id, f64>,
}

/// The cheapest term of each class that has one; of equally cheap ones, one of those that the graph `own`s.
pub(super) fn cheapest(classes: &Classes, own: &BTreeSet<Term>) -> BTreeMap<Id, Term> {
    let mut ids: Vec<Id> = classes.classes().map(|c| c.id).collect();
    ids.sort_unstable();
    let cost = |id: Id, term: &Term| {
        let foreign = !own.contains(&term.clone().map_children(|c| classes.find(c)));
        own_cost(classes, id, term) + if foreign { TRIFLE } else { 0.0 }
    };
    let costs: BTreeMap<Id, Vec<(f64, &Term)>> =
        ids.iter().map(|&id| (id, classes[id].nodes.iter().map(|t| (cost(id, t), t)).collect())).collect();
    let mut best: BTreeMap<Id, Choice> = BTreeMap::new();
    let mut changed = true;
    while changed {
        changed = false;
        for (&id, terms) in &costs {
            for &(own, term) in terms.iter().filter(|(own, _)| own.is_finite()) {
                let Some(choice) = choose(classes, &best, id, own, term) else { continue };
                let better = best.get(&id).is_none_or(|b| choice.cost < b.cost * (1.0 - 1e-12));
                if better {
                    best.insert(id, choice);
                    changed = true;
                }
            }
        }
    }
    best.into_iter().map(|(id, c)| (id, c.term)).collect()
}

fn choose(classes: &Classes, best: &BTreeMap<Id, Choice>, id: Id, own: f64, term: &Term) -> Option<Choice> {
    let mut needs = BTreeMap::new();
    for &arg in term.children() {
        let arg = classes.find(arg);
        needs.extend(best.get(&arg)?.needs.iter().map(|(k, v)| (*k, *v)));
    }
    if needs.contains_key(&id) {
        return None;
    }
    needs.insert(id, own);
    Some(Choice { cost: needs.values().sum(), term: term.clone(), needs })
}

/// The cost of a term without its operands.
fn own_cost(classes: &Classes, id: Id, term: &Term) -> f64 {
    if !matches!(term.head, Head::Apply(_)) {
        return 0.0;
    }
    let facts = &classes[id].data;
    let Some((op, args)) = applied(classes, term) else { return f64::INFINITY };
    let types: Option<Vec<Type>> = args.iter().map(|&a| classes[a].data.ty.clone()).collect();
    let Some(types) = types else { return f64::INFINITY };
    let Ok(outs) = op.infer(&types) else { return f64::INFINITY };
    if super::inner::is_inner(op.def) {
        return f64::INFINITY;
    }
    if facts.fixed && outs.iter().all(|t| t.numel() <= builder::FOLD_LIMIT) {
        return TRIFLE;
    }
    let work = op.work(&types, &outs);
    let launch = if work.family == crate::op::Family::Free { TRIFLE } else { LAUNCH };
    work.bytes + work.flops / BALANCE + launch
}
