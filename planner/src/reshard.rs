//! Resharding: the cheapest sequence of steps from one spec of a value to another. The one implementation, used by the
//! planner's costs and by codegen's insertion.
//!
//! # Meaning of a spec
//! A dim sharded by axes `a < b` is cut into `size_a * size_b` contiguous blocks; a rank holds block
//! `coord_a * size_b + coord_b`. So the axes of a dim form a chain from the outermost to the innermost, and:
//! - a slice, a reduce-scatter or the receiving side of an all-to-all cuts the block that a rank holds, so its axes become
//!   the *innermost*: they must come after all axes that the dim already has;
//! - an all-gather, or the giving side of an all-to-all, joins neighbouring blocks only when it takes the *innermost*
//!   axes of the dim.
//!
//! What fits neither (`[tp]` to `[dp+tp]`, `[dp+tp]` to `[tp]`) takes a detour: gather more and slice again, or move an
//! axis to another dim and back. Since axes of a dim ascend, a spec is one role per axis (replicated, partial, routed, shards
//! dim d), and the search runs over those roles.
//!
//! Rows go to the ranks of their experts by an all-to-all of what lay in blocks of a dim, and back; or, where every rank has all
//! of them, each rank keeps those of its experts, and puts them into zeros afterwards: a partial sum.
//!
//! # What cheapest means
//! Bytes that a rank sends, plus [`COLLECTIVE_BYTES`] per collective for its latency; local copies count a sixteenth.
//! Ties go to fewer steps. The links behind an axis do not enter, so that codegen needs no cluster; for the same reason an
//! axis on which the value is replicated (or partial) before and after is left alone: an all-reduce over `tp` could use
//! the links of `dp` too, but those may be slow.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use autoshard_ir::Type;
use autoshard_ir::factor::ReduceKind;

use crate::mesh::{AxisId, Mesh};
use crate::spec::Spec;

/// The latency of a collective, as bytes sent: about 5 microseconds at 200 GB/s.
pub const COLLECTIVE_BYTES: u64 = 1 << 20;

/// Bytes sent through a link cost as much as this many bytes copied in device memory.
const LINK_TO_MEMORY: u64 = 16;

/// One step of a resharding.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// A rank keeps its part of a dim; no communication.
    Slice {
        /// The dim.
        dim: usize,
        /// Axes that shard it afterwards, innermost.
        axes: Vec<AxisId>,
    },
    /// Joins the shards of a dim.
    AllGather {
        /// The dim.
        dim: usize,
        /// Its innermost axes.
        axes: Vec<AxisId>,
    },
    /// Combines partial values, each rank getting its part of a dim.
    ReduceScatter {
        /// The dim.
        dim: usize,
        /// How to combine.
        kind: ReduceKind,
        /// Axes that were partial and shard the dim afterwards, innermost.
        axes: Vec<AxisId>,
    },
    /// Combines partial values, each rank getting the whole.
    AllReduce {
        /// How to combine.
        kind: ReduceKind,
        /// Axes that were partial.
        axes: Vec<AxisId>,
    },
    /// Moves axes from one dim to another.
    AllToAll {
        /// The dim that loses its innermost axes.
        gather: usize,
        /// The dim that gets them, innermost.
        split: usize,
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// Makes a replicated value a partial sum: zeros except on the first rank along the axes.
    ZeroUnlessFirst {
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// Each row of a rank's part goes to the rank of its expert.
    Dispatch {
        /// The dim that loses its innermost axes.
        dim: usize,
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// Each row goes back to where [`StepKind::Dispatch`] took it from.
    Combine {
        /// The dim that gets the axes, innermost.
        dim: usize,
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// A rank keeps the rows of its experts; no communication.
    KeepRows {
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// Makes routed rows a partial sum: zeros for the rows of other ranks.
    PlaceRows {
        /// The axes.
        axes: Vec<AxisId>,
    },
}

impl StepKind {
    /// The axes it works on.
    pub fn axes(&self) -> &[AxisId] {
        match self {
            StepKind::Slice { axes, .. }
            | StepKind::AllGather { axes, .. }
            | StepKind::ReduceScatter { axes, .. }
            | StepKind::AllReduce { axes, .. }
            | StepKind::AllToAll { axes, .. }
            | StepKind::Dispatch { axes, .. }
            | StepKind::Combine { axes, .. }
            | StepKind::KeepRows { axes }
            | StepKind::PlaceRows { axes }
            | StepKind::ZeroUnlessFirst { axes } => axes,
        }
    }
    /// Whether ranks communicate.
    pub fn communicates(&self) -> bool {
        !matches!(
            self,
            StepKind::Slice { .. }
                | StepKind::ZeroUnlessFirst { .. }
                | StepKind::KeepRows { .. }
                | StepKind::PlaceRows { .. }
        )
    }
    /// Whether it has to do with routed rows.
    pub fn is_routing(&self) -> bool {
        matches!(
            self,
            StepKind::Dispatch { .. }
                | StepKind::Combine { .. }
                | StepKind::KeepRows { .. }
                | StepKind::PlaceRows { .. }
        )
    }
    /// As shown to people: `all-gather`, ...
    pub fn name(&self) -> &'static str {
        match self {
            StepKind::Slice { .. } => "slice",
            StepKind::AllGather { .. } => "all-gather",
            StepKind::ReduceScatter { .. } => "reduce-scatter",
            StepKind::AllReduce { .. } => "all-reduce",
            StepKind::AllToAll { .. } => "all-to-all",
            StepKind::ZeroUnlessFirst { .. } => "zero-unless-first",
            StepKind::Dispatch { .. } => "all-to-all (dispatch)",
            StepKind::Combine { .. } => "all-to-all (combine)",
            StepKind::KeepRows { .. } => "keep-rows",
            StepKind::PlaceRows { .. } => "place-rows",
        }
    }
}

/// A step, with the spec of the value after it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// What is done.
    pub kind: StepKind,
    /// The spec afterwards.
    pub spec: Spec,
}

/// Why there is no way from one spec to another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReshardError {
    /// A spec does not fit the value or the mesh.
    #[error("{what} spec {spec} does not fit {ty}: {why}")]
    Unfit {
        /** `source` or `target` */
        what: &'static str,
        /** as shown */
        spec: String,
        /** of the value */
        ty: String,
        /** the reason */
        why: String,
    },
    /// Partial values of several kinds, or of a kind that the source does not have.
    #[error("cannot reshard {from} to {to}: {why}")]
    Partial {
        /** source */
        from: String,
        /** target */
        to: String,
        /** the reason */
        why: String,
    },
}

/// The cheapest steps from `from` to `to` of a value of (unsharded) type `ty`; empty when they are equal.
///
/// # Errors
/// A spec that does not fit the type (rank, canonical order, divisibility), and partial values that cannot be had: of
/// two kinds at once, or of a kind other than sum that the source does not have already.
pub fn reshard(from: &Spec, to: &Spec, ty: &Type, mesh: &Mesh) -> Result<Vec<Step>, ReshardError> {
    if from == to {
        return Ok(Vec::new());
    }
    check("source", from, ty, mesh)?;
    check("target", to, ty, mesh)?;
    let kind = partial_kind(from, to, mesh)?;
    let (search, start, goal) = Search::new(from, to, ty, kind, mesh);
    let reached = search.run(&start, Some(&goal));
    Ok(search.path(&reached, &start, goal))
}

/// A version of a value needed somewhere: how it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its spec.
    pub spec: Spec,
    /// Index of the version that it is made from; `None`: the value as produced.
    pub source: Option<usize>,
    /// How.
    pub steps: Vec<Step>,
}

/// How to make several versions of one value at least cost: all from the value as produced, or all from one of them (an
/// all-gathered activation that several products read is gathered once). In order of dependence; equal specs once, and
/// none for the spec it is produced in.
///
/// # Errors
/// As [`reshard`].
pub fn versions(from: &Spec, wanted: &[Spec], ty: &Type, mesh: &Mesh) -> Result<Vec<Version>, ReshardError> {
    let mut specs: Vec<&Spec> = wanted.iter().filter(|s| *s != from).collect();
    specs.sort();
    specs.dedup();
    let made = |spec: &Spec, via: &Spec, source| -> Result<(u64, Version), ReshardError> {
        let steps = reshard(via, spec, ty, mesh)?;
        Ok((weight(via, &steps, ty, mesh), Version { spec: spec.clone(), source, steps }))
    };
    let mut best: Option<(u64, Vec<Version>)> = None;
    for hub in std::iter::once(None).chain((0..specs.len()).map(Some)) {
        let mut total = 0;
        let mut list = Vec::new();
        if let Some(h) = hub {
            let (w, v) = made(specs[h], from, None)?;
            total += w;
            list.push(v);
        }
        let (via, source) = hub.map_or((from, None), |h| (specs[h], Some(0)));
        let mut possible = true;
        for (_, spec) in specs.iter().enumerate().filter(|(i, _)| Some(*i) != hub) {
            match made(spec, via, source) {
                Ok((w, v)) => {
                    total += w;
                    list.push(v);
                }
                // From a reduced maximum there is no way back to a partial one.
                Err(_) if hub.is_some() => possible = false,
                Err(e) => return Err(e),
            }
        }
        if possible && best.as_ref().is_none_or(|(b, _)| total < *b) {
            best = Some((total, list));
        }
    }
    Ok(best.map(|b| b.1).unwrap_or_default())
}

/// The weight that [`reshard`] minimises.
pub fn weight(from: &Spec, steps: &[Step], ty: &Type, mesh: &Mesh) -> u64 {
    let mut before = from;
    let mut total = 0;
    for s in steps {
        let bytes = |spec: &Spec| local_bytes(spec, ty, mesh);
        total += step_weight(&s.kind, bytes(before), bytes(&s.spec), mesh);
        before = &s.spec;
    }
    total
}

/// How a value that lies as `made` travels to another stage that wants it as `wanted`: without partial sums, in the smaller of
/// both; and if ranks have the same, each sends a part, which the receiving stage gathers over its faster links
/// (Narayanan et al. 2021, section 4.1).
pub fn travels(made: &Spec, wanted: &Spec, ty: &Type, mesh: &Mesh) -> Spec {
    let mut parts = made.combined();
    for axis in mesh.ids().filter(|&a| mesh.size(a) > 1 && !made.divides(a)) {
        // Axes of a dim are in the mesh's order: the new one is the innermost.
        let inner = |d: &usize| parts.dims[*d].last().is_none_or(|last| *last < axis);
        let mut finer = (0..ty.rank()).filter(inner).map(|d| {
            let mut finer = parts.clone();
            finer.dims[d].push(axis);
            finer
        });
        if let Some(finer) = finer.find(|s| s.local(ty, mesh).is_some()) {
            parts = finer;
        }
    }
    // Of equals the first.
    let bytes = |s: &Spec| local_bytes(s, ty, mesh);
    let least = if bytes(wanted) < bytes(made) { wanted.combined() } else { made.combined() };
    if bytes(&parts) < bytes(&least) { parts } else { least }
}

/// Bytes of one rank's part of a value.
pub fn local_bytes(spec: &Spec, ty: &Type, mesh: &Mesh) -> u64 {
    let parts: usize = spec.dims.iter().flatten().chain(&spec.routed).map(|&a| mesh.size(a)).product();
    (ty.bytes() / parts.max(1)) as u64
}

/// Bytes that a rank sends in a collective of `n` ranks whose local value is `before` bytes, and `after` afterwards.
pub fn bytes_sent(kind: &StepKind, before: u64, after: u64, n: u64) -> u64 {
    match kind {
        StepKind::AllGather { .. } => after - after / n,
        StepKind::AllReduce { .. } => 2 * (before - before / n),
        _ if kind.communicates() => before - before / n,
        _ => 0,
    }
}

fn step_weight(kind: &StepKind, before: u64, after: u64, mesh: &Mesh) -> u64 {
    let n: usize = kind.axes().iter().map(|&a| mesh.size(a)).product();
    match kind.communicates() {
        false => after,
        true => LINK_TO_MEMORY * (COLLECTIVE_BYTES + bytes_sent(kind, before, after, n as u64)),
    }
}

fn check(what: &'static str, spec: &Spec, ty: &Type, mesh: &Mesh) -> Result<(), ReshardError> {
    let unfit = |why: String| {
        let show = spec.dims.iter().flatten().chain(spec.partial.iter().map(|p| &p.0)).chain(&spec.routed);
        let known = show.into_iter().all(|a| (a.0 as usize) < mesh.axes.len());
        let spec = if known { spec.show(mesh) } else { format!("{spec:?}") };
        Err(ReshardError::Unfit { what, spec, ty: ty.to_string(), why })
    };
    if spec.dims.len() != ty.rank() {
        return unfit(format!("it has {} dims, the value {}", spec.dims.len(), ty.rank()));
    }
    let mut seen = vec![false; mesh.axes.len()];
    for a in spec.dims.iter().flatten().chain(spec.partial.iter().map(|p| &p.0)).chain(&spec.routed) {
        match seen.get_mut(a.0 as usize) {
            None => return unfit(format!("the mesh has no axis {}", a.0)),
            Some(true) => return unfit(format!("axis {} occurs twice", mesh.axis(*a).name.name())),
            Some(s) => *s = true,
        }
    }
    if spec.dims.iter().any(|d| !d.is_sorted()) || !spec.partial.is_sorted() || !spec.routed.is_sorted() {
        return unfit("its axes are not in the mesh's order".into());
    }
    for (d, &size) in ty.dims.iter().enumerate() {
        let parts = spec.parts(d, mesh);
        if size % parts != 0 {
            return unfit(format!("dim {d} of size {size} cannot be cut into {parts} equal parts"));
        }
    }
    if spec.local(ty, mesh).is_none() {
        return unfit("no dim divides by the ranks that its rows are routed to".into());
    }
    Ok(())
}

fn partial_kind(from: &Spec, to: &Spec, mesh: &Mesh) -> Result<ReduceKind, ReshardError> {
    let no = |why: &str| Err(ReshardError::Partial { from: from.show(mesh), to: to.show(mesh), why: why.into() });
    let mut kinds = from.partial.iter().chain(&to.partial).map(|p| p.1);
    let kind = kinds.next().unwrap_or(ReduceKind::Sum);
    if kinds.any(|k| k != kind) {
        return no("they are partial in different ways");
    }
    if kind != ReduceKind::Sum && !(from.routed.is_empty() && to.routed.is_empty()) {
        return no("routed rows combine to sums only");
    }
    if kind != ReduceKind::Sum && to.partial.iter().any(|p| !from.partial.contains(p)) {
        return no("only a sum can be made partial");
    }
    Ok(kind)
}

/// The role of an axis: replicated, partial, routed, or shards dim `role - SHARD`.
type Role = u8;
const REPLICATED: Role = 0;
const PARTIAL: Role = 1;
const ROUTED: Role = 2;
const SHARD: Role = 3;

/// One role per axis: a spec.
type Roles = Vec<Role>;

/// The cheapest way found to each spec: weight, steps, and the step before.
type Reached = HashMap<Roles, (u64, u32, Option<(Roles, StepKind)>)>;

struct Search<'a> {
    ty: &'a Type,
    mesh: &'a Mesh,
    kind: ReduceKind,
    /// Per axis, whether it stays as it is: on which the value is replicated, or partial, or routed before and after.
    frozen: Vec<bool>,
    /// Per axis, whether it is routed before or after, and so may be in between.
    routes: Vec<bool>,
}

impl<'a> Search<'a> {
    /// With where it starts and what it looks for.
    fn new(from: &Spec, to: &Spec, ty: &'a Type, kind: ReduceKind, mesh: &'a Mesh) -> (Search<'a>, Roles, Roles) {
        let mut search = Search { ty, mesh, kind, frozen: Vec::new(), routes: Vec::new() };
        let (start, goal) = (search.encode(from), search.encode(to));
        search.frozen = start.iter().zip(&goal).map(|(a, b)| a == b && *a < SHARD).collect();
        search.routes = start.iter().zip(&goal).map(|(a, b)| a != b && (*a == ROUTED || *b == ROUTED)).collect();
        (search, start, goal)
    }

    fn encode(&self, spec: &Spec) -> Roles {
        let mut roles = vec![REPLICATED; self.mesh.axes.len()];
        for (d, axes) in spec.dims.iter().enumerate() {
            for a in axes {
                roles[a.0 as usize] = SHARD + d as u8;
            }
        }
        for (a, _) in &spec.partial {
            roles[a.0 as usize] = PARTIAL;
        }
        for a in &spec.routed {
            roles[a.0 as usize] = ROUTED;
        }
        roles
    }

    fn decode(&self, roles: &Roles) -> Spec {
        let mut spec = Spec::replicated(self.ty.rank());
        for (a, &r) in roles.iter().enumerate() {
            match r {
                REPLICATED => {}
                PARTIAL => spec.partial.push((AxisId(a as u8), self.kind)),
                ROUTED => spec.routed.push(AxisId(a as u8)),
                d => spec.dims[(d - SHARD) as usize].push(AxisId(a as u8)),
            }
        }
        spec
    }

    /// Dijkstra from a spec, to one spec or to all. The order of equal ways is fixed by the roles.
    fn run(&self, start: &Roles, goal: Option<&Roles>) -> Reached {
        let mut reached = Reached::new();
        let mut done: HashMap<Roles, ()> = HashMap::new();
        let mut heap = BinaryHeap::new();
        reached.insert(start.clone(), (0, 0, None));
        heap.push(Reverse((0u64, 0u32, start.clone())));
        while let Some(Reverse((weight, steps, roles))) = heap.pop() {
            if done.insert(roles.clone(), ()).is_some() {
                continue;
            }
            if Some(&roles) == goal {
                break;
            }
            let before = self.bytes(&roles);
            for (kind, next) in self.moves(&roles) {
                let w = weight + step_weight(&kind, before, self.bytes(&next), self.mesh);
                let better = reached.get(&next).is_none_or(|(v, s, _)| (w, steps + 1) < (*v, *s));
                if better {
                    heap.push(Reverse((w, steps + 1, next.clone())));
                    reached.insert(next, (w, steps + 1, Some((roles.clone(), kind))));
                }
            }
        }
        reached
    }

    fn path(&self, reached: &Reached, start: &Roles, goal: Roles) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = goal;
        while &at != start {
            // Everything whole on every moving axis is reachable from every spec, and every spec of this search from there.
            let Some((_, _, Some((before, kind)))) = reached.get(&at) else { unreachable!("no way to {at:?}") };
            steps.push(Step { kind: kind.clone(), spec: self.decode(&at) });
            at = before.clone();
        }
        steps.reverse();
        steps
    }

    fn parts(&self, roles: &Roles, dim: usize) -> usize {
        let here = |(r, _): &(&Role, _)| **r == SHARD + dim as u8;
        roles.iter().zip(&self.mesh.axes).filter(here).map(|(_, a)| a.size).product()
    }

    fn bytes(&self, roles: &Roles) -> u64 {
        let shards = |(r, _): &(&Role, _)| **r >= ROUTED;
        let parts: usize = roles.iter().zip(&self.mesh.axes).filter(shards).map(|(_, a)| a.size).product();
        (self.ty.bytes() / parts) as u64
    }

    /// Every step that can be taken, with the roles after it.
    fn moves(&self, roles: &Roles) -> Vec<(StepKind, Roles)> {
        let rank = self.ty.rank();
        let with = |role: Role| roles.iter().enumerate().filter(move |(_, r)| **r == role).map(|(a, _)| a).collect();
        let of_dim: Vec<Vec<usize>> = (0..rank).map(|d| with(SHARD + d as u8)).collect();
        let moving = |role| -> Vec<usize> {
            let all: Vec<usize> = with(role);
            all.into_iter().filter(|&a| !self.frozen[a]).collect()
        };
        let (free, partial, routed) = (moving(REPLICATED), moving(PARTIAL), moving(ROUTED));
        let mut moves = Vec::new();
        let mut go = |set: &[usize], role: Role, kind: &dyn Fn(Vec<AxisId>) -> StepKind| {
            let mut next = roles.clone();
            for &a in set {
                next[a] = role;
            }
            let divides = role < SHARD || {
                let d = (role - SHARD) as usize;
                self.ty.dims[d] % self.parts(&next, d) == 0
            };
            if divides {
                moves.push((kind(set.iter().map(|&a| AxisId(a as u8)).collect()), next));
            }
        };
        let inner = |set: &[usize], dim: usize| of_dim[dim].last().is_none_or(|last| *last < set[0]);
        for set in subsets(&free) {
            for dim in (0..rank).filter(|&d| inner(&set, d)) {
                go(&set, SHARD + dim as u8, &|axes| StepKind::Slice { dim, axes });
            }
            if self.kind == ReduceKind::Sum {
                go(&set, PARTIAL, &|axes| StepKind::ZeroUnlessFirst { axes });
            }
            if set.iter().all(|&a| self.routes[a]) {
                go(&set, ROUTED, &|axes| StepKind::KeepRows { axes });
            }
        }
        for set in subsets(&routed) {
            go(&set, PARTIAL, &|axes| StepKind::PlaceRows { axes });
            for dim in (0..rank).filter(|&d| inner(&set, d)) {
                go(&set, SHARD + dim as u8, &|axes| StepKind::Combine { dim, axes });
            }
        }
        let kind = self.kind;
        for set in subsets(&partial) {
            go(&set, REPLICATED, &|axes| StepKind::AllReduce { kind, axes });
            for dim in (0..rank).filter(|&d| inner(&set, d)) {
                go(&set, SHARD + dim as u8, &|axes| StepKind::ReduceScatter { dim, kind, axes });
            }
        }
        for (gather, axes_of) in of_dim.iter().enumerate().take(rank) {
            for from in 0..axes_of.len() {
                let set = &axes_of[from..];
                go(set, REPLICATED, &|axes| StepKind::AllGather { dim: gather, axes });
                if set.iter().all(|&a| self.routes[a]) {
                    go(set, ROUTED, &|axes| StepKind::Dispatch { dim: gather, axes });
                }
                for split in (0..rank).filter(|&d| d != gather && inner(set, d)) {
                    go(set, SHARD + split as u8, &|axes| StepKind::AllToAll { gather, split, axes });
                }
            }
        }
        moves
    }
}

/// Non-empty subsets, each in ascending order.
fn subsets(of: &[usize]) -> Vec<Vec<usize>> {
    (1..1u32 << of.len())
        .map(|mask| of.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, &a)| a).collect())
        .collect()
}

/// Resharding on one mesh, remembered: all targets of a (source, type) are found in one search.
pub struct Resharder {
    mesh: Mesh,
    found: HashMap<(Spec, Type, ReduceKind, [Vec<bool>; 2]), Reached>,
}

impl Resharder {
    /// For that mesh.
    pub fn new(mesh: Mesh) -> Resharder {
        Resharder { mesh, found: HashMap::new() }
    }
    /// [`reshard`].
    ///
    /// # Errors
    /// As [`reshard`].
    pub fn steps(&mut self, from: &Spec, to: &Spec, ty: &Type) -> Result<Vec<Step>, ReshardError> {
        if from == to {
            return Ok(Vec::new());
        }
        check("target", to, ty, &self.mesh)?;
        let kind = partial_kind(from, to, &self.mesh)?;
        check("source", from, ty, &self.mesh)?;
        let (search, start, goal) = Search::new(from, to, ty, kind, &self.mesh);
        let key = (from.clone(), ty.clone(), kind, [search.frozen.clone(), search.routes.clone()]);
        let reached = self.found.entry(key).or_insert_with(|| search.run(&start, None));
        Ok(search.path(reached, &start, goal))
    }
}

#[cfg(test)]
mod routed_tests;
#[cfg(test)]
mod tests;
