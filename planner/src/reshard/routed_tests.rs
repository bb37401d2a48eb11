//! Resharding of rows that lie with their experts, against simulated data movement: every element is tracked on every rank.
//!
//! A rank has a box of the whole, of which it holds the rows that are routed to it. Where rows go is drawn: nothing may depend on it.

use super::*;
use crate::mesh::AxisName;
use autoshard_ir::DType;

/// What a rank has.
#[derive(Clone)]
struct Held {
    /// By dim, from where on and how far it reaches.
    ranges: Vec<(usize, usize)>,
    /// By element of the whole.
    data: Vec<Option<i64>>,
}

struct World<'a> {
    mesh: &'a Mesh,
    ty: &'a Type,
}

impl World<'_> {
    fn coordinate(&self, rank: usize, a: AxisId) -> usize {
        rank / self.mesh.stride(a) % self.mesh.size(a)
    }
    /// Ranks that differ from one on some axes only, the first axis slowest; and its place among them.
    fn group(&self, rank: usize, axes: &[AxisId]) -> (Vec<usize>, usize) {
        let same = |r: &usize| {
            let others = self.mesh.ids().filter(|a| !axes.contains(a));
            others.into_iter().all(|a| self.coordinate(*r, a) == self.coordinate(rank, a))
        };
        let ranks: Vec<usize> = (0..self.mesh.ranks()).filter(same).collect();
        let at = ranks.iter().position(|r| *r == rank).unwrap();
        (ranks, at)
    }
    /// Whether the expert of an element's row lies with a rank along an axis.
    fn routed(&self, element: usize, rank: usize, a: AxisId) -> bool {
        let row = element / self.ty.dims[1..].iter().product::<usize>();
        (row * 7 + row / 3 + 5 * a.0 as usize) % self.mesh.size(a) == self.coordinate(rank, a)
    }
    fn inside(&self, ranges: &[(usize, usize)], element: usize) -> bool {
        let mut rest = element;
        (0..self.ty.rank()).rev().all(|d| {
            let at = rest % self.ty.dims[d];
            rest /= self.ty.dims[d];
            (ranges[d].0..ranges[d].0 + ranges[d].1).contains(&at)
        })
    }
    fn value(element: usize) -> i64 {
        1000 + 7 * element as i64
    }
    fn elements(&self) -> std::ops::Range<usize> {
        0..self.ty.numel()
    }

    /// Numbers that lie as a spec says; of a partial sum the first rank has all.
    fn place(&self, spec: &Spec) -> Vec<Held> {
        let partial: Vec<AxisId> = spec.partial.iter().map(|p| p.0).collect();
        let held = |rank| {
            let range = |(d, axes): (usize, &Vec<AxisId>)| {
                let block = axes.iter().fold(0, |b, &a| b * self.mesh.size(a) + self.coordinate(rank, a));
                let size = self.ty.dims[d] / spec.parts(d, self.mesh);
                (block * size, size)
            };
            let ranges: Vec<(usize, usize)> = spec.dims.iter().enumerate().map(range).collect();
            let first = self.group(rank, &partial).1 == 0;
            let number = |e: usize| {
                let here = self.inside(&ranges, e) && spec.routed.iter().all(|&a| self.routed(e, rank, a));
                here.then_some(if first { Self::value(e) } else { 0 })
            };
            Held { data: self.elements().map(number).collect(), ranges }
        };
        (0..self.mesh.ranks()).map(held).collect()
    }

    /// Whether they do.
    fn lies(&self, spec: &Spec, held: &[Held]) -> bool {
        let partial: Vec<AxisId> = spec.partial.iter().map(|p| p.0).collect();
        let placed = self.place(spec);
        (0..self.mesh.ranks()).all(|rank| {
            let group = self.group(rank, &partial).0;
            held[rank].ranges == placed[rank].ranges
                && self.elements().all(|e| {
                    let sum = group.iter().filter_map(|&r| held[r].data[e]).sum::<i64>();
                    held[rank].data[e].is_some() == placed[rank].data[e].is_some()
                        && (held[rank].data[e].is_none() || sum == Self::value(e))
                })
        })
    }

    /// What a step does.
    fn step(&self, before: &[Held], kind: &StepKind) -> Vec<Held> {
        let after = |rank: usize| {
            let (ranks, at) = self.group(rank, kind.axes());
            let (n, mine) = (ranks.len(), &before[rank]);
            let cut = |ranges: &[(usize, usize)], d: usize| {
                let mut ranges = ranges.to_vec();
                let size = ranges[d].1 / n;
                ranges[d] = (ranges[d].0 + at * size, size);
                ranges
            };
            let joined = |d: usize| {
                let mut ranges = mine.ranges.clone();
                ranges[d] = (before[ranks[0]].ranges[d].0, n * ranges[d].1);
                ranges
            };
            let sum = |e: usize| {
                let all: Vec<i64> = ranks.iter().filter_map(|&r| before[r].data[e]).collect();
                (!all.is_empty()).then(|| all.iter().sum::<i64>())
            };
            let own = |e: usize| mine.data[e];
            let to_me = |e: usize| kind.axes().iter().all(|&a| self.routed(e, rank, a));
            let (ranges, number): (Vec<(usize, usize)>, Box<dyn Fn(usize) -> Option<i64>>) = match kind {
                StepKind::Slice { dim, .. } => (cut(&mine.ranges, *dim), Box::new(own)),
                StepKind::AllGather { dim, .. } => (joined(*dim), Box::new(sum)),
                StepKind::AllReduce { .. } => (mine.ranges.clone(), Box::new(sum)),
                StepKind::ReduceScatter { dim, .. } => (cut(&mine.ranges, *dim), Box::new(sum)),
                StepKind::AllToAll { gather, split, .. } => (cut(&joined(*gather), *split), Box::new(sum)),
                StepKind::ZeroUnlessFirst { .. } => {
                    (mine.ranges.clone(), Box::new(|e| own(e).map(|x| if at == 0 { x } else { 0 })))
                }
                StepKind::Dispatch { dim, .. } => (joined(*dim), Box::new(|e| sum(e).filter(|_| to_me(e)))),
                StepKind::Combine { dim, .. } => (cut(&mine.ranges, *dim), Box::new(sum)),
                StepKind::KeepRows { .. } => (mine.ranges.clone(), Box::new(|e| own(e).filter(|_| to_me(e)))),
                StepKind::PlaceRows { .. } => (mine.ranges.clone(), Box::new(|e| sum(e).map(|_| own(e).unwrap_or(0)))),
            };
            let data = self.elements().map(|e| number(e).filter(|_| self.inside(&ranges, e))).collect();
            Held { ranges, data }
        };
        (0..self.mesh.ranks()).map(after).collect()
    }
}

#[test]
fn routed_rows_lie_as_the_specs_say_after_every_step() {
    for (sizes, dims) in [(&[2, 2][..], &[8, 4][..]), (&[3, 2], &[6, 6]), (&[2, 2, 2], &[8, 2])] {
        let names = [AxisName::Dp, AxisName::Ep, AxisName::Tp];
        let mesh = Mesh::new(names.into_iter().zip(sizes.iter().copied()));
        let ty = Type::new(DType::F32, dims);
        let world = World { mesh: &mesh, ty: &ty };
        let all = super::tests::all_specs(&ty, &mesh, ReduceKind::Sum);
        assert!(all.iter().any(|s| !s.routed.is_empty()));
        for from in &all {
            for to in &all {
                let steps = reshard(from, to, &ty, &mesh).unwrap();
                let mut held = world.place(from);
                assert!(world.lies(from, &held));
                for s in &steps {
                    held = world.step(&held, &s.kind);
                    assert!(world.lies(&s.spec, &held), "{} to {}: {s:?}", from.show(&mesh), to.show(&mesh));
                }
                assert_eq!(steps.last().map_or(from, |s| &s.spec), to);
            }
        }
    }
}

/// What tokens take: each goes to the expert's rank and back, in blocks of a dim, without detours.
#[test]
fn tokens_are_dispatched_and_combined_at_once() {
    let mesh = Mesh::new([(AxisName::Dp, 2), (AxisName::Ep, 4)]);
    let ty = Type::new(DType::Bf16, [64, 16]);
    let lies = Spec { dims: vec![vec![AxisId(0), AxisId(1)], vec![]], partial: vec![], routed: vec![] };
    let routed = Spec { dims: vec![vec![AxisId(0)], vec![]], partial: vec![], routed: vec![AxisId(1)] };
    let names = |from: &Spec, to: &Spec| {
        let steps = reshard(from, to, &ty, &mesh).unwrap();
        steps.iter().map(|s| format!("{} {}", s.kind.name(), s.spec.show(&mesh))).collect::<Vec<_>>()
    };
    assert_eq!(names(&lies, &routed), ["all-to-all (dispatch) [dp, _] routed{ep}"]);
    assert_eq!(names(&routed, &lies), ["all-to-all (combine) [dp+ep, _]"]);
    // A rank has 8 rows of 16 numbers of 2 bytes, and sends three of four.
    let steps = reshard(&lies, &routed, &ty, &mesh).unwrap();
    let (before, after) = (local_bytes(&lies, &ty, &mesh), local_bytes(&routed, &ty, &mesh));
    assert_eq!((before, after), (256, 256));
    assert_eq!(bytes_sent(&steps[0].kind, before, after, 4), 192);
}
