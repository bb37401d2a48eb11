//! Every collective on a 2x2x2 mesh, over every set of axes, against a computation on unsharded tensors.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use autoshard_ir::factor::ReduceKind;
use autoshard_ir::{DType, Tensor, Type, convert};
use autoshard_runtime::program::*;
use autoshard_runtime::session::{Options, Session};
use autoshard_runtime::trace::Observer;
use common::*;

const MESH: [(&str, usize); 3] = [("a", 2), ("b", 2), ("c", 2)];

/// Sets of axes, in orders that matter.
const SETS: [&[u8]; 9] = [&[], &[0], &[1], &[2], &[0, 1], &[1, 0], &[0, 2], &[1, 2], &[0, 1, 2]];

/// Sleeps for times that differ between ranks and instructions.
struct Sleepy;

impl Observer for Sleepy {
    fn before(&self, rank: Rank, place: Place, _: &Instr) {
        let x = (u64::from(rank.0) * 31 + place.index as u64 * 17 + 101).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::thread::sleep(Duration::from_micros((x >> 32) % 1500));
    }
}

/// Runs one step, twice: as it comes, and with uneven timing.
fn run(job: Job, inputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let mut session = Session::new(job.clone(), &Options::default()).unwrap();
    let first = session.step(inputs).unwrap();
    let observer: Option<Arc<dyn Observer>> = Some(Arc::new(Sleepy));
    let mut slow = Session::new(job, &Options { observer, ..Options::default() }).unwrap();
    assert_eq!(slow.step(inputs).unwrap(), first, "timing must not change a bit");
    first
}

/// A tensor whose leading dims are the mesh: each rank feeds its own block, so partial values can be made of it, and
/// fetches its own block, so every rank's result is seen.
fn per_rank(ty: &Type) -> Type {
    Type::new(ty.dtype, [&[2, 2, 2], &ty.dims[..]].concat())
}

/// A job that feeds a block per rank, applies one instruction to it, and fetches a block per rank. `local` and `result`
/// are types of blocks; the shards are those that the instruction sees.
fn blocks(
    local: &Type,
    input_shards: &[&[u8]],
    result: &Type,
    result_shards: &[&[u8]],
    instr: impl Fn(BufferId, BufferId) -> Instr,
) -> Job {
    let mut b = JobBuilder::new(&MESH, 1, 1);
    let mesh: [&[u8]; 3] = [&[0], &[1], &[2]];
    let grow = |ty: &Type, shards: &[&[u8]]| {
        let dims: Vec<usize> = ty.dims.iter().zip(shards).map(|(d, s)| d << s.len()).collect();
        Type::new(ty.dtype, dims)
    };
    let whole = |rank: usize| [&mesh[..], &vec![&[] as &[u8]; rank][..]].concat();
    let port = b.input("x", per_rank(local), None);
    let fed = b.buffer(0, "fed", per_rank(local), &whole(local.rank()), Region::Scratch);
    let x = b.buffer(0, "x", grow(local, input_shards), input_shards, Region::Scratch);
    let y = b.buffer(0, "y", grow(result, result_shards), result_shards, Region::Scratch);
    let fetched = b.buffer(0, "fetched", per_rank(result), &whole(result.rank()), Region::Scratch);
    let out = b.output("y", per_rank(result), None);
    b.forward(0, Instr::Feed { port, output: fed });
    b.forward(0, Instr::Copy { input: fed, output: x });
    b.forward(0, instr(x, y));
    b.forward(0, Instr::Copy { input: y, output: fetched });
    b.forward(0, Instr::Fetch { input: fetched, port: out });
    b.finish()
}

/// The block of a rank, of a tensor with a block per rank.
fn block(t: &Tensor, r: usize) -> Tensor {
    let n = t.bytes().len() / 8;
    Tensor::from_bytes(Type::new(t.dtype(), &t.dims()[3..]), &t.bytes()[r * n..][..n]).unwrap()
}

/// Ranks of the group of `r`, in the order of coordinates on the axes, by counting.
fn group(r: usize, axes: &[u8]) -> Vec<usize> {
    let coordinate = |r: usize, a: u8| r >> (2 - a) & 1;
    let mut members: Vec<usize> =
        (0..8).filter(|o| (0..3u8).all(|a| axes.contains(&a) || coordinate(*o, a) == coordinate(r, a))).collect();
    members.sort_by_key(|o| axes.iter().map(|a| coordinate(*o, *a)).collect::<Vec<_>>());
    members
}

fn naive_reduce(kind: ReduceKind, parts: &[Tensor]) -> Tensor {
    let ty = parts[0].ty().clone();
    let columns: Vec<Vec<f64>> = parts.iter().map(|t| convert::to_f64(t.dtype(), t.bytes())).collect();
    let mut out = Tensor::zeros(ty.clone());
    let combined = (0..ty.numel()).map(|i| {
        let x = columns.iter().map(|c| c[i]);
        match kind {
            ReduceKind::Sum => x.sum(),
            ReduceKind::Max => x.fold(f64::NEG_INFINITY, f64::max),
            ReduceKind::Min => x.fold(f64::INFINITY, f64::min),
            ReduceKind::LogSumExp => x.map(f64::exp).sum::<f64>().ln(),
        }
    });
    convert::from_f64(ty.dtype, combined, out.bytes_mut());
    out
}

#[test]
fn all_reduce() {
    let kinds = [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min, ReduceKind::LogSumExp];
    let dtypes = [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::Bool];
    for (i, axes) in SETS.iter().enumerate() {
        for (t, dtype) in dtypes.into_iter().enumerate() {
            // All pairs of axes and types; kinds in turn.
            let kind = kinds[(i + t) % kinds.len()];
            if kind == ReduceKind::LogSumExp && !dtype.is_float() {
                continue;
            }
            // An odd size, so that the parts of the reduction differ in length.
            let ty = Type::new(dtype, [3, 5]);
            let mut job = blocks(&ty, &[&[], &[]], &ty, &[&[], &[]], |input, output| Instr::AllReduce {
                input,
                output,
                kind,
                axes: common::axes(axes),
            });
            if t % 2 == 0 {
                in_place(&mut job);
            }
            let x = numbers(&per_rank(&ty), 1);
            let y = &run(job, &map([("x", x.clone())]))["y"];
            for r in 0..8 {
                let parts: Vec<Tensor> = group(r, axes).into_iter().map(|o| block(&x, o)).collect();
                let (want, got) = (naive_reduce(kind, &parts), block(y, r));
                let what = format!("{kind:?} {dtype} over {axes:?}, rank {r}");
                if kind != ReduceKind::LogSumExp {
                    // Exact sums, rounded once.
                    assert_eq!(got.bytes(), want.bytes(), "{what}");
                    continue;
                }
                // Computed in f64 in another way: one unit in the last place, or a few of f64.
                let epsilon = match dtype {
                    DType::F64 => 1e-14,
                    DType::F32 => f64::from(f32::EPSILON),
                    DType::F16 => 1.0 / 1024.0,
                    _ => 1.0 / 128.0,
                };
                let (a, b) = (convert::to_f64(dtype, want.bytes()), convert::to_f64(dtype, got.bytes()));
                assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= epsilon * a.abs().max(1.0)), "{what}");
            }
        }
    }
}

/// Lets the all-reduce work in the memory of its input.
fn in_place(job: &mut Job) {
    let list = &mut job.stages[0].forward;
    let Instr::AllReduce { input, output, .. } = &mut list[2] else { panic!("an all-reduce") };
    *output = *input;
    let reduced = *input;
    let Instr::Copy { input, .. } = &mut list[3] else { panic!("a copy") };
    *input = reduced;
}

#[test]
fn all_gather() {
    for axes in SETS {
        for dim in 0..3 {
            let n = 1 << axes.len();
            let mut shards: [&[u8]; 3] = [&[], &[], &[]];
            shards[dim] = axes;
            let local = f32s(&[2, 3, 4]);
            let mut whole = local.clone();
            whole.dims[dim] *= n;
            let job = blocks(&local, &shards, &whole, &[&[], &[], &[]], |input, output| Instr::AllGather {
                input,
                output,
                dim,
                axes: common::axes(axes),
            });
            let x = numbers(&per_rank(&local), 2);
            let y = &run(job, &map([("x", x.clone())]))["y"];
            for r in 0..8 {
                let got = block(y, r);
                for (i, o) in group(r, axes).into_iter().enumerate() {
                    let mut region: Vec<_> = whole.dims.iter().map(|d| 0..*d).collect();
                    region[dim] = i * local.dims[dim]..(i + 1) * local.dims[dim];
                    assert_eq!(cut(&got, &region), block(&x, o), "dim {dim} over {axes:?}, rank {r}");
                }
            }
        }
    }
}

#[test]
fn reduce_scatter() {
    for (i, axes) in SETS.iter().enumerate() {
        for dim in 0..2 {
            let n = 1 << axes.len();
            let kind = [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min][i % 3];
            let mut shards: [&[u8]; 2] = [&[], &[]];
            shards[dim] = axes;
            let whole = Type::new([DType::F32, DType::Bf16][(i + dim) % 2], [8, 16]);
            let mut local = whole.clone();
            local.dims[dim] /= n;
            let job = blocks(&whole, &[&[], &[]], &local, &shards, |input, output| Instr::ReduceScatter {
                input,
                output,
                dim,
                kind,
                axes: common::axes(axes),
            });
            let x = numbers(&per_rank(&whole), 3);
            let y = &run(job, &map([("x", x.clone())]))["y"];
            for r in 0..8 {
                let members = group(r, axes);
                let sum = naive_reduce(kind, &members.iter().map(|o| block(&x, *o)).collect::<Vec<_>>());
                let me = members.iter().position(|o| *o == r).unwrap();
                let mut region = vec![0..8, 0..16];
                region[dim] = me * local.dims[dim]..(me + 1) * local.dims[dim];
                assert_eq!(
                    block(y, r).bytes(),
                    cut(&sum, &region).bytes(),
                    "{kind:?}, dim {dim} over {axes:?}, rank {r}"
                );
            }
        }
    }
}

#[test]
fn all_to_all() {
    for axes in SETS {
        for (gather, split) in [(0, 1), (1, 0), (0, 2), (2, 1)] {
            let n = 1 << axes.len();
            let (mut before, mut after): ([&[u8]; 3], [&[u8]; 3]) = ([&[]; 3], [&[]; 3]);
            (before[gather], after[split]) = (axes, axes);
            let local = f32s(&[8, 8, 8]);
            let mut result = local.clone();
            result.dims[gather] *= n;
            result.dims[split] /= n;
            let job = blocks(&local, &before, &result, &after, |input, output| Instr::AllToAll {
                input,
                output,
                gather,
                split,
                axes: common::axes(axes),
            });
            let x = numbers(&per_rank(&local), 4);
            let y = &run(job, &map([("x", x.clone())]))["y"];
            for r in 0..8 {
                let members = group(r, axes);
                let me = members.iter().position(|o| *o == r).unwrap();
                for (i, o) in members.iter().enumerate() {
                    let mut theirs = vec![0..8, 0..8, 0..8];
                    theirs[split] = me * 8 / n..(me + 1) * 8 / n;
                    let mut mine: Vec<_> = result.dims.iter().map(|d| 0..*d).collect();
                    mine[gather] = i * 8..(i + 1) * 8;
                    let (got, want) = (cut(&block(y, r), &mine), cut(&block(&x, *o), &theirs));
                    assert_eq!(got, want, "{gather} from {split} over {axes:?}, rank {r}");
                }
            }
        }
    }
}

#[test]
fn slice_is_the_ranks_part_and_zero_leaves_the_first() {
    for axes in SETS {
        let n = 1 << axes.len();
        let whole = f32s(&[8, 3]);
        let local = f32s(&[8 / n, 3]);
        let job = blocks(&whole, &[&[], &[]], &local, &[axes, &[]], |input, output| Instr::Slice {
            input,
            output,
            dim: 0,
            axes: common::axes(axes),
        });
        let x = numbers(&per_rank(&whole), 5);
        let y = &run(job, &map([("x", x.clone())]))["y"];
        for r in 0..8 {
            let me = group(r, axes).iter().position(|o| *o == r).unwrap();
            assert_eq!(block(y, r), cut(&block(&x, r), &[me * 8 / n..(me + 1) * 8 / n, 0..3]));
        }

        let mut job = blocks(&whole, &[&[], &[]], &whole, &[&[], &[]], |input, output| Instr::Copy { input, output });
        let buffer = BufferId(1);
        job.stages[0].forward.insert(2, Instr::ZeroUnlessFirst { buffer, axes: common::axes(axes) });
        let y = &run(job, &map([("x", x.clone())]))["y"];
        for r in 0..8 {
            let first = group(r, axes)[0] == r;
            assert_eq!(block(y, r), if first { block(&x, r) } else { Tensor::zeros(whole.clone()) });
        }
    }
}
