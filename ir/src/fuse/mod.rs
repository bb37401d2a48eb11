//! Fused forms: attention, norms, activations and rotary embeddings, however an exporter spelled them.
//!
//! Forms are found by equality saturation (`egg`) on one stretch of the graph at a time ([`region`]): its nodes become terms
//! ([`language`]), rules add what is equal to them ([`rules`]), and the cheapest terms are taken ([`extract`]). Equal
//! stretches, the blocks of a model, are rewritten once. The result computes the same up to rounding; masks of any
//! spelling become `causal`, `window` and a mask of what is left.
//!
//! Limits are numbers of terms and rounds, not time, so that the result depends on the graph alone.
//!
//! Read next: [`rule`], then [`rules`].

mod extract;
mod inner;
mod language;
mod region;
mod rule;
mod rules;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use egg::{Id, Language, Runner, SimpleScheduler};

use crate::builder::Builder;
use crate::graph::{Def, Graph, NodeId, ValueId};
use crate::op::{Op, OpError};
use crate::rewrite::{Rebuild, RewriteError};
use crate::tensor::Tensor;
use language::{Classes, Head, Known, Term, add, applied};
use region::{Key, Outside, Region, Source};

/// Rounds of applying all rules.
const ROUNDS: usize = 40;

/// Terms after which no more are added.
const TERMS: usize = 12_000;

/// How far rules look into values from outside, in nodes.
const DEPTH: usize = 8;

/// Which fused forms are made. What the model says by one operator stays one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forms {
    /// Attention by a kernel that keeps no scores; else scores are made, and kept for the backward pass.
    pub attention: bool,
    /// Norms, activations, rotary embeddings: else they are the operators that the model has.
    pub composites: bool,
}

impl Forms {
    /// All of them.
    pub const ALL: Forms = Forms { attention: true, composites: true };
}

/// Rewrites the forward nodes of a graph into fused forms.
///
/// # Errors
/// None for a graph that keeps its invariants.
pub fn fuse(graph: &Graph, forms: Forms) -> Result<Graph, RewriteError> {
    let uses = graph.uses();
    let live = crate::rewrite::live(graph);
    let mut kept = vec![false; graph.values.len()];
    crate::rewrite::roots(graph).for_each(|v| kept[v.index()] = true);
    let ranges = region::regions(graph, |v| kept[v.index()] || !uses[v.index()].is_empty());
    // Of what nothing needs, operands may be gone.
    let needed = |v: ValueId| graph.producer(v).is_some_and(|n| live[n.index()]);
    for v in graph.value_ids().filter(|&v| region::is_known(graph, v) && needed(v)) {
        keep(graph, &mut kept, v, DEPTH);
    }
    let rules = rules::all(forms);
    let mut known: HashMap<Key, Recipe> = HashMap::new();
    let mut rebuild = Rebuild::new(graph);
    let mut ranges = ranges.into_iter().peekable();
    let mut at = 0;
    while at < graph.nodes.len() {
        let Some(range) = ranges.next_if(|r| r.start == at) else {
            if live[at] {
                rebuild.node(NodeId(at as u32), |b, n, ins| b.emit(n.op.clone(), ins))?;
            }
            at += 1;
            continue;
        };
        at = range.end;
        let escapes = |v: ValueId| {
            kept[v.index()] || uses[v.index()].iter().any(|n| live[n.index()] && !range.contains(&n.index()))
        };
        let region = Region::of(graph, &range, escapes);
        let recipe = match known.get(&region.key) {
            Some(recipe) => recipe,
            None => {
                let recipe = solve(graph, &region.key, &rules);
                known.entry(region.key.clone()).or_insert(recipe)
            }
        };
        recipe.apply(&mut rebuild, &region)?;
    }
    rebuild.finish(|_, _, v| Ok(v))
}

/// Marks a value, and what rules may see it made of.
fn keep(graph: &Graph, kept: &mut [bool], v: ValueId, depth: usize) {
    kept[v.index()] = true;
    if let (Some(n), true) = (graph.producer(v), depth > 0) {
        graph.node(n).inputs.iter().for_each(|&v| keep(graph, kept, v, depth - 1));
    }
}

/// What an operand of a step is.
#[derive(Debug, Clone)]
enum Arg {
    Step(usize),
    Outside(usize),
    /// A value of the old graph: a constant, or what a known outside value is made of.
    Value(ValueId),
    /// A constant that a rule made.
    Constant(Arc<Tensor>),
}

/// How a region is written anew: operators in order, each named after a node of the region.
#[derive(Debug, Clone, Default)]
struct Recipe {
    steps: Vec<(Op, Vec<Arg>, usize)>,
    /// Which operand each result that is used outside is, by its node.
    results: Vec<(usize, Arg)>,
}

impl Recipe {
    fn apply(&self, rebuild: &mut Rebuild<'_>, region: &Region) -> Result<(), RewriteError> {
        let mut steps: Vec<ValueId> = Vec::with_capacity(self.steps.len());
        let resolve = |rebuild: &mut Rebuild<'_>, steps: &[ValueId], arg: &Arg| match arg {
            Arg::Step(i) => steps[*i],
            Arg::Outside(i) => rebuild.value(region.outside[*i]),
            Arg::Value(v) => rebuild.value(*v),
            Arg::Constant(t) => rebuild.builder().constant((**t).clone()),
        };
        for (op, args, origin) in &self.steps {
            let args: Vec<ValueId> = args.iter().map(|a| resolve(rebuild, &steps, a)).collect();
            let node = NodeId((region.start + origin) as u32);
            steps.push(
                rebuild
                    .like(node, |b: &mut Builder| -> Result<ValueId, OpError> { Ok(b.emit(op.clone(), &args)?[0]) })?,
            );
        }
        for (node, arg) in &self.results {
            let new = resolve(rebuild, &steps, arg);
            rebuild.set(rebuild.graph().nodes[region.start + node].outputs[0], new);
        }
        Ok(())
    }
}

/// Saturates a region and takes the cheapest terms.
fn solve(graph: &Graph, key: &Key, rules: &[rule::Rule]) -> Recipe {
    let mut classes = Classes::new(Known::default());
    let mut context: BTreeMap<ValueId, (Id, usize)> = BTreeMap::new();
    let mut leaves: HashMap<u32, Arg> = HashMap::new();
    let outside: Vec<Id> = (key.outside.iter().enumerate())
        .map(|(i, o)| match o {
            Outside::Anonymous(ty) => {
                let term = classes.analysis.leaf(ty.clone(), None);
                leaf(&mut classes, &mut leaves, term, Arg::Outside(i))
            }
            Outside::Known(v) => look_into(graph, &mut classes, &mut context, &mut leaves, *v, DEPTH),
        })
        .collect();
    let mut results: Vec<Option<Id>> = Vec::with_capacity(key.nodes.len());
    for (op, sources, _) in &key.nodes {
        let args: Option<Vec<Id>> = sources
            .iter()
            .map(|s| match s {
                Source::Inside(i) => results[*i],
                Source::Outside(i) => Some(outside[*i]),
            })
            .collect();
        results.push(args.and_then(|args| add(&mut classes, op, &args)));
    }
    classes.rebuild();
    let originals: Vec<Term> = classes.classes().flat_map(|c| c.nodes.iter().cloned()).collect();
    let runner = Runner::<Term, Known>::new(Known::default())
        .with_egraph(classes)
        .with_scheduler(SimpleScheduler)
        .with_iter_limit(ROUNDS)
        .with_node_limit(TERMS)
        .with_time_limit(std::time::Duration::from_secs(86_400))
        .run(rules);
    let classes = runner.egraph;
    tracing::debug!(stop = ?runner.stop_reason, rounds = runner.iterations.len(), terms = classes.total_size(), "saturated");
    let own = originals.into_iter().map(|t| t.map_children(|c| classes.find(c))).collect();
    let mut writer = Writer {
        cheapest: extract::cheapest(&classes, &own),
        origins: BTreeMap::new(),
        steps: BTreeMap::new(),
        recipe: Recipe::default(),
        leaves,
        classes: &classes,
    };
    for (i, id) in results.iter().enumerate() {
        if let Some(id) = id {
            writer.origins.entry(classes.find(*id)).or_insert(i);
        }
    }
    let escaping = key.nodes.iter().zip(&results).enumerate();
    let escaping = escaping.filter_map(|(i, ((.., escapes), id))| id.filter(|_| *escapes).map(|id| (i, id)));
    let escaping: Vec<(usize, Id)> = escaping.collect();
    let needed = writer.needed(escaping.iter().map(|(_, id)| *id));
    // In the order of the nodes, as far as they are still there.
    for (i, id) in results.iter().enumerate() {
        if let Some(id) = id.filter(|&id| needed.contains(&classes.find(id))) {
            writer.write(id, i);
        }
    }
    for (i, id) in escaping {
        let arg = writer.write(id, i);
        writer.recipe.results.push((i, arg));
    }
    writer.recipe
}

fn leaf(classes: &mut Classes, leaves: &mut HashMap<u32, Arg>, term: Term, arg: Arg) -> Id {
    if let Head::Leaf(index) = term.head {
        leaves.insert(index, arg);
    }
    classes.add(term)
}

/// A known value as a leaf, equal to the operators that make it; `context` holds those done, and how deep.
fn look_into(
    graph: &Graph,
    classes: &mut Classes,
    context: &mut BTreeMap<ValueId, (Id, usize)>,
    leaves: &mut HashMap<u32, Arg>,
    v: ValueId,
    depth: usize,
) -> Id {
    let ty = graph.ty(v).clone();
    let id = match (context.get(&v), graph.constant(v)) {
        (Some(&(id, done)), _) if done >= depth => return id,
        (Some(&(id, _)), _) => id,
        (None, Some(t)) => {
            let term = classes.analysis.leaf(ty, Some(t.clone()));
            leaf(classes, leaves, term, Arg::Value(v))
        }
        (None, None) => {
            let term = classes.analysis.leaf(ty, None);
            leaf(classes, leaves, term, Arg::Value(v))
        }
    };
    context.insert(v, (id, depth));
    if let Def::Node(n, 0) = graph.value(v).def
        && depth > 0
    {
        let n = graph.node(n);
        let args: Vec<Id> =
            n.inputs.iter().map(|&v| look_into(graph, classes, context, leaves, v, depth - 1)).collect();
        if let Some(made) = add(classes, &n.op, &args) {
            classes.union(id, made);
        }
    }
    id
}

/// Writes the cheapest terms as steps, operands first.
struct Writer<'a> {
    classes: &'a Classes,
    cheapest: BTreeMap<Id, Term>,
    /// The first node of the region whose result a class is.
    origins: BTreeMap<Id, usize>,
    leaves: HashMap<u32, Arg>,
    steps: BTreeMap<Id, Arg>,
    recipe: Recipe,
}

impl Writer<'_> {
    /// The classes that the cheapest terms of these are made of.
    fn needed(&self, roots: impl Iterator<Item = Id>) -> BTreeSet<Id> {
        let mut needed = BTreeSet::new();
        let mut open: Vec<Id> = roots.map(|id| self.classes.find(id)).collect();
        while let Some(id) = open.pop() {
            if needed.insert(id) {
                open.extend(self.cheapest[&id].args.iter().map(|&a| self.classes.find(a)));
            }
        }
        needed
    }
    fn write(&mut self, id: Id, origin: usize) -> Arg {
        let id = self.classes.find(id);
        if let Some(done) = self.steps.get(&id) {
            return done.clone();
        }
        let origin = self.origins.get(&id).copied().unwrap_or(origin);
        let term = self.cheapest.get(&id).expect("the graph's own terms have a cost").clone();
        let arg = match term.head {
            Head::Leaf(index) => match self.leaves.get(&index) {
                Some(arg) => arg.clone(),
                None => {
                    let made = self.classes.analysis.leaves[index as usize].constant.clone();
                    Arg::Constant(made.expect("leaves that rules make are constants"))
                }
            },
            _ => {
                let (op, args) = applied(self.classes, &term).expect("it is not a leaf");
                let args = args.into_iter().map(|a| self.write(a, origin)).collect();
                self.recipe.steps.push((op, args, origin));
                Arg::Step(self.recipe.steps.len() - 1)
            }
        };
        self.steps.insert(id, arg.clone());
        arg
    }
}

#[cfg(test)]
mod tests;
