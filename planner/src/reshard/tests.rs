//! Resharding against simulated data movement: every rank's numbers are tracked through the steps.

use super::*;
use crate::mesh::AxisName;
use autoshard_ir::DType;
use proptest::prelude::*;

fn mesh(sizes: &[usize]) -> Mesh {
    let names = [AxisName::Dp, AxisName::Tp, AxisName::Dp];
    Mesh::new(names.into_iter().zip(sizes.iter().copied()))
}

/// A box of a tensor: per dim its range, and numbers in row-major order.
#[derive(Clone, PartialEq, Debug)]
struct Part {
    dims: Vec<usize>,
    data: Vec<i64>,
}

impl Part {
    fn cut(&self, dim: usize, parts: usize, which: usize) -> Part {
        let size = self.dims[dim] / parts;
        let (outer, inner) = (numel(&self.dims[..dim]), numel(&self.dims[dim + 1..]));
        let mut out = Part { dims: self.dims.clone(), data: Vec::new() };
        out.dims[dim] = size;
        for o in 0..outer {
            let at = (o * self.dims[dim] + which * size) * inner;
            out.data.extend(&self.data[at..at + size * inner]);
        }
        out
    }
    fn join(parts: &[Part], dim: usize) -> Part {
        let mut out = parts[0].clone();
        out.dims[dim] *= parts.len();
        out.data.clear();
        let block = numel(&parts[0].dims[dim..]);
        for o in 0..numel(&parts[0].dims[..dim]) {
            for p in parts {
                out.data.extend(&p.data[o * block..(o + 1) * block]);
            }
        }
        out
    }
    fn combine(parts: &[Part], kind: ReduceKind) -> Part {
        let mut out = parts[0].clone();
        for p in &parts[1..] {
            for (x, y) in out.data.iter_mut().zip(&p.data) {
                *x = if kind == ReduceKind::Sum { *x + y } else { (*x).max(*y) };
            }
        }
        out
    }
}

fn numel(dims: &[usize]) -> usize {
    dims.iter().product()
}
fn coordinate(mesh: &Mesh, rank: usize, a: AxisId) -> usize {
    rank / mesh.stride(a) % mesh.size(a)
}
/// The ranks that differ from `rank` on `axes` only, the first axis slowest; and this rank's place among them.
fn group(mesh: &Mesh, rank: usize, axes: &[AxisId]) -> (Vec<usize>, usize) {
    let mut ranks = vec![rank];
    for &a in axes {
        let base = |r: usize| r - coordinate(mesh, r, a) * mesh.stride(a);
        ranks = ranks.iter().flat_map(|&r| (0..mesh.size(a)).map(move |c| base(r) + c * mesh.stride(a))).collect();
    }
    let at = ranks.iter().position(|r| *r == rank).unwrap();
    (ranks, at)
}

/// What a step does to the numbers, as the runtime defines it. `None` where sizes do not divide.
fn step(mesh: &Mesh, before: &[Part], kind: &StepKind) -> Option<Vec<Part>> {
    let cut = |p: &Part, dim: usize, n: usize, at: usize| (p.dims[dim] % n == 0).then(|| p.cut(dim, n, at));
    (0..before.len())
        .map(|rank| {
            let (ranks, at) = group(mesh, rank, kind.axes());
            let all: Vec<Part> = ranks.iter().map(|&r| before[r].clone()).collect();
            Some(match kind {
                StepKind::Slice { dim, .. } => cut(&before[rank], *dim, ranks.len(), at)?,
                StepKind::AllGather { dim, .. } => Part::join(&all, *dim),
                StepKind::AllReduce { kind, .. } => Part::combine(&all, *kind),
                StepKind::ReduceScatter { dim, kind, .. } => cut(&Part::combine(&all, *kind), *dim, ranks.len(), at)?,
                StepKind::AllToAll { gather, split, .. } => {
                    let cuts: Option<Vec<Part>> = all.iter().map(|p| cut(p, *split, ranks.len(), at)).collect();
                    Part::join(&cuts?, *gather)
                }
                StepKind::Dispatch { .. }
                | StepKind::Combine { .. }
                | StepKind::KeepRows { .. }
                | StepKind::PlaceRows { .. } => unreachable!("none of the specs has routed rows"),
                StepKind::ZeroUnlessFirst { .. } => {
                    let mut p = before[rank].clone();
                    if at > 0 {
                        p.data.fill(0);
                    }
                    p
                }
            })
        })
        .collect()
}

/// The box that a rank holds of the whole.
fn shard(mesh: &Mesh, spec: &Spec, whole: &Part, rank: usize) -> Part {
    let mut p = whole.clone();
    for (d, axes) in spec.dims.iter().enumerate() {
        let block = axes.iter().fold(0, |b, &a| b * mesh.size(a) + coordinate(mesh, rank, a));
        p = p.cut(d, spec.parts(d, mesh), block);
    }
    p
}

fn whole(ty: &Type) -> Part {
    Part { dims: ty.dims.clone(), data: (0..ty.numel() as i64).map(|i| 1000 + i * 7).collect() }
}

/// Numbers that lie as the spec says: partial ones differ on every rank and combine to the whole.
fn place(mesh: &Mesh, spec: &Spec, whole: &Part) -> Vec<Part> {
    let axes: Vec<AxisId> = spec.partial.iter().map(|p| p.0).collect();
    let place = |rank| {
        let mut p = shard(mesh, spec, whole, rank);
        let (ranks, at) = group(mesh, rank, &axes);
        if let Some((_, kind)) = spec.partial.first() {
            for (i, x) in p.data.iter_mut().enumerate() {
                let noise = (i * 31 % 17 + at * 5) as i64 + 1;
                *x = match kind {
                    ReduceKind::Sum if at + 1 < ranks.len() => noise,
                    ReduceKind::Sum => *x - (0..at).map(|k| (i * 31 % 17 + k * 5) as i64 + 1).sum::<i64>(),
                    _ if at == i % ranks.len() => *x,
                    _ => *x - noise,
                };
            }
        }
        p
    };
    (0..mesh.ranks()).map(place).collect()
}

/// Whether the numbers lie as the spec says.
fn lies(mesh: &Mesh, spec: &Spec, whole: &Part, parts: &[Part]) -> bool {
    let axes: Vec<AxisId> = spec.partial.iter().map(|p| p.0).collect();
    (0..mesh.ranks()).all(|rank| {
        let all: Vec<Part> = group(mesh, rank, &axes).0.iter().map(|&r| parts[r].clone()).collect();
        let kind = spec.partial.first().map_or(ReduceKind::Sum, |p| p.1);
        parts[rank].dims == shard(mesh, spec, whole, rank).dims
            && Part::combine(&all, kind) == shard(mesh, spec, whole, rank)
    })
}

/// All specs of a type on a mesh without routed rows.
fn specs(ty: &Type, mesh: &Mesh, kind: ReduceKind) -> Vec<Spec> {
    all_specs(ty, mesh, kind).into_iter().filter(|s| s.routed.is_empty()).collect()
}

/// All specs of a type on a mesh.
pub(super) fn all_specs(ty: &Type, mesh: &Mesh, kind: ReduceKind) -> Vec<Spec> {
    let roles = ty.rank() + SHARD as usize;
    let search = Search { ty, mesh, kind, frozen: Vec::new(), routes: Vec::new() };
    (0..roles.pow(mesh.axes.len() as u32))
        .map(|mut n| {
            let digits: Roles = mesh.axes.iter().map(|_| (n % roles, n /= roles).0 as u8).collect();
            search.decode(&digits)
        })
        .filter(|s| s.local(ty, mesh).is_some())
        .collect()
}

fn f32(dims: &[usize]) -> Type {
    Type::new(DType::F32, dims)
}

fn holds(ty: &Type, mesh: &Mesh, from: &Spec, to: &Spec) {
    let steps = match reshard(from, to, ty, mesh) {
        Ok(steps) => steps,
        Err(e) => {
            assert!(matches!(e, ReshardError::Partial { .. }), "{e}");
            return;
        }
    };
    let whole = whole(ty);
    let mut parts = place(mesh, from, &whole);
    assert!(lies(mesh, from, &whole, &parts));
    for s in &steps {
        parts = step(mesh, &parts, &s.kind).expect("sizes divide");
        assert!(lies(mesh, &s.spec, &whole, &parts), "{} to {}: {s:?}", from.show(mesh), to.show(mesh));
    }
    let end = steps.last().map_or(from, |s| &s.spec);
    assert_eq!(end, to);
}

#[test]
fn data_lies_as_the_specs_say_after_every_step() {
    let meshes: &[(&[usize], &[usize])] =
        &[(&[2, 2], &[4, 8]), (&[2, 3], &[12, 6]), (&[4, 2], &[8, 3]), (&[2, 2, 2], &[8, 8]), (&[2], &[2])];
    for (sizes, dims) in meshes {
        let (mesh, ty) = (mesh(sizes), f32(dims));
        for kind in [ReduceKind::Sum, ReduceKind::Max] {
            for from in specs(&ty, &mesh, kind) {
                for to in specs(&ty, &mesh, kind) {
                    holds(&ty, &mesh, &from, &to);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: proptest::test_runner::RngSeed::Fixed(7), ..Default::default() })]
    #[test]
    fn data_lies_right_on_drawn_shapes(
        a in 1usize..4, b in 1usize..4, c in 1usize..3, dims in prop::collection::vec(1usize..13, 1..4), pick in any::<(u16, u16)>()
    ) {
        let (mesh, ty) = (mesh(&[a, b, c]), f32(&dims));
        let all = specs(&ty, &mesh, ReduceKind::Sum);
        holds(&ty, &mesh, &all[pick.0 as usize % all.len()], &all[pick.1 as usize % all.len()]);
    }
}

/// The cheapest way over all single steps that move the numbers rightly, found without the search's own rules.
#[test]
fn no_sequence_of_right_steps_is_cheaper() {
    for (sizes, dims, scale) in
        [(&[2, 2][..], &[4, 8][..], 1), (&[2, 3], &[12, 6], 1 << 16), (&[4, 2], &[8, 8], 1 << 20)]
    {
        let mesh = mesh(sizes);
        // Small numbers to move, with weights of a larger type: the last dim is not cut.
        let (small, large) = (f32(dims), f32(&[dims, &[scale]].concat()));
        let specs = specs(&small, &mesh, ReduceKind::Sum);
        let whole = whole(&small);
        let widen = |s: &Spec| Spec { dims: [&s.dims[..], &[vec![]]].concat(), ..s.clone() };
        let placed: Vec<Vec<Part>> = specs.iter().map(|s| place(&mesh, s, &whole)).collect();
        let n = specs.len();
        let mut best = vec![vec![u64::MAX; n]; n];
        let sets = subsets(&(0..mesh.axes.len()).collect::<Vec<_>>());
        let mut kinds = Vec::new();
        for set in &sets {
            let axes = || set.iter().map(|&a| AxisId(a as u8)).collect::<Vec<_>>();
            kinds.push(StepKind::AllReduce { kind: ReduceKind::Sum, axes: axes() });
            kinds.push(StepKind::ZeroUnlessFirst { axes: axes() });
            for dim in 0..small.rank() {
                kinds.push(StepKind::Slice { dim, axes: axes() });
                kinds.push(StepKind::AllGather { dim, axes: axes() });
                kinds.push(StepKind::ReduceScatter { dim, kind: ReduceKind::Sum, axes: axes() });
                for split in (0..small.rank()).filter(|s| *s != dim) {
                    kinds.push(StepKind::AllToAll { gather: dim, split, axes: axes() });
                }
            }
        }
        for i in 0..n {
            best[i][i] = 0;
            for kind in &kinds {
                let Some(after) = step(&mesh, &placed[i], kind) else { continue };
                for j in (0..n).filter(|&j| lies(&mesh, &specs[j], &whole, &after)) {
                    let bytes = |s: &Spec| local_bytes(&widen(s), &large, &mesh);
                    best[i][j] = best[i][j].min(step_weight(kind, bytes(&specs[i]), bytes(&specs[j]), &mesh));
                }
            }
        }
        let encode = |s| Search::new(s, s, &small, ReduceKind::Sum, &mesh).1;
        let roles: Vec<Roles> = specs.iter().map(encode).collect();
        let single = best.clone();
        for i in 0..n {
            for j in 0..n {
                let fixed = Search::new(&specs[i], &specs[j], &small, ReduceKind::Sum, &mesh).0.frozen;
                let allowed = |k: usize| (0..fixed.len()).all(|a| !fixed[a] || roles[k][a] == roles[i][a]);
                let mut cost = vec![u64::MAX; n];
                cost[i] = 0;
                while let Some((k, l)) = (0..n)
                    .flat_map(|k| (0..n).map(move |l| (k, l)))
                    .find(|&(k, l)| allowed(k) && allowed(l) && cost[k].saturating_add(single[k][l]) < cost[l])
                {
                    cost[l] = cost[k] + single[k][l];
                }
                best[i][j] = cost[j];
            }
        }
        for i in 0..n {
            for j in 0..n {
                // The last dim must not help the search out.
                let mut frozen = large.clone();
                frozen.dims[small.rank()] = scale;
                let steps = reshard(&specs[i], &specs[j], &small, &mesh).unwrap();
                assert!(!steps.is_empty() || i == j);
                let search = reshard(&widen(&specs[i]), &widen(&specs[j]), &frozen, &mesh).unwrap();
                let got = weight(&widen(&specs[i]), &search, &frozen, &mesh);
                assert!(got <= best[i][j], "{} to {}", specs[i].show(&mesh), specs[j].show(&mesh));
                if search.iter().all(|s| s.spec.dims[small.rank()].is_empty()) {
                    assert_eq!(got, best[i][j], "{} to {}", specs[i].show(&mesh), specs[j].show(&mesh));
                }
            }
        }
    }
}

fn axes(ids: &[u8]) -> Vec<AxisId> {
    ids.iter().map(|&i| AxisId(i)).collect()
}
fn spec(dims: &[&[u8]], sum: &[u8]) -> Spec {
    Spec {
        dims: dims.iter().map(|d| axes(d)).collect(),
        partial: sum.iter().map(|&a| (AxisId(a), ReduceKind::Sum)).collect(),
        routed: Vec::new(),
    }
}
fn names(from: &Spec, to: &Spec, ty: &Type, mesh: &Mesh) -> Vec<String> {
    let steps = reshard(from, to, ty, mesh).unwrap();
    steps.iter().map(|s| format!("{} {}", s.kind.name(), s.spec.show(mesh))).collect()
}

#[test]
fn common_ways() {
    let (m, ty) = (mesh(&[2, 4]), f32(&[1024, 4096]));
    let case = |from: Spec, to: Spec| names(&from, &to, &ty, &m).join("; ");
    assert_eq!(case(spec(&[&[], &[]], &[1]), spec(&[&[], &[]], &[])), "all-reduce [_, _]");
    assert_eq!(case(spec(&[&[], &[]], &[1]), spec(&[&[1], &[]], &[])), "reduce-scatter [tp, _]");
    assert_eq!(case(spec(&[&[1], &[]], &[]), spec(&[&[], &[]], &[])), "all-gather [_, _]");
    assert_eq!(case(spec(&[&[1], &[]], &[]), spec(&[&[], &[1]], &[])), "all-to-all [_, tp]");
    assert_eq!(case(spec(&[&[], &[]], &[]), spec(&[&[0, 1], &[]], &[])), "slice [dp+tp, _]");
    assert_eq!(case(spec(&[&[0, 1], &[]], &[]), spec(&[&[0], &[]], &[])), "all-gather [dp, _]");
    assert_eq!(case(spec(&[&[], &[]], &[]), spec(&[&[], &[]], &[0])), "zero-unless-first [_, _] partial{dp:sum}");
    // The outer axis cannot be gathered alone.
    assert_eq!(
        case(spec(&[&[0, 1], &[]], &[]), spec(&[&[1], &[]], &[])),
        "all-to-all [_, dp+tp]; all-to-all [tp, dp]; all-gather [tp, _]"
    );
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let (m, ty) = (mesh(&[2, 4]), f32(&[6, 8]));
    let say = |from: &Spec, to: &Spec| reshard(from, to, &ty, &m).unwrap_err().to_string();
    let r = Spec::replicated(2);
    insta::assert_snapshot!(
        [
            say(&r, &spec(&[&[1], &[]], &[])),
            say(&r, &Spec::replicated(3)),
            say(&r, &spec(&[&[], &[1, 0]], &[])),
            say(&r, &spec(&[&[], &[1]], &[1])),
            say(&r, &spec(&[&[], &[7]], &[])),
            say(&r, &Spec { partial: vec![(AxisId(0), ReduceKind::Max)], ..r.clone() }),
            say(
                &Spec { partial: vec![(AxisId(0), ReduceKind::Max)], ..r.clone() },
                &Spec { partial: vec![(AxisId(0), ReduceKind::Sum)], ..r.clone() }
            ),
        ]
        .join("\n"),
        @r"
    target spec [tp, _] does not fit f32[6,8]: dim 0 of size 6 cannot be cut into 4 equal parts
    target spec [_, _, _] does not fit f32[6,8]: it has 3 dims, the value 2
    target spec [_, tp+dp] does not fit f32[6,8]: its axes are not in the mesh's order
    target spec [_, tp] partial{tp:sum} does not fit f32[6,8]: axis tp occurs twice
    target spec Spec { dims: [[], [AxisId(7)]], partial: [], routed: [] } does not fit f32[6,8]: the mesh has no axis 7
    cannot reshard [_, _] to [_, _] partial{dp:max}: only a sum can be made partial
    cannot reshard [_, _] partial{dp:max} to [_, _] partial{dp:sum}: they are partial in different ways
    "
    );
}

#[test]
fn a_value_gathered_for_several_uses_is_gathered_once() {
    let (m, ty) = (mesh(&[2, 4]), f32(&[1024, 4096]));
    let from = spec(&[&[1], &[]], &[]);
    let wanted = [Spec::replicated(2), from.clone(), spec(&[&[], &[1]], &[]), Spec::replicated(2)];
    let made = versions(&from, &wanted, &ty, &m).unwrap();
    let show: Vec<_> = made.iter().map(|v| (v.spec.show(&m), v.source, v.steps.len())).collect();
    assert_eq!(show, [("[_, _]".to_string(), None, 1), ("[_, tp]".to_string(), Some(0), 1)]);
}

#[test]
fn the_cache_agrees() {
    let (m, ty) = (mesh(&[2, 2]), f32(&[4, 8]));
    let mut cache = Resharder::new(m.clone());
    for kind in [ReduceKind::Sum, ReduceKind::LogSumExp] {
        for from in specs(&ty, &m, kind) {
            for to in specs(&ty, &m, kind) {
                assert_eq!(cache.steps(&from, &to, &ty), reshard(&from, &to, &ty, &m));
            }
        }
    }
}
