//! Graphs before and after simplification compute the same; what each pass is for is gone.

use std::sync::Arc;

use super::simplify;
use crate::builder::Builder;
use crate::graph::{Graph, Init, StateKind, ValueId};
use crate::op::OpError;
use crate::tensor::{Tensor, Type, numel};
use crate::weights::{WeightRef, WeightStorage};
use crate::{DType, interp, verify};

/// Pseudo-random elements in [-1, 1).
fn random(dims: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let xs: Vec<f32> = (0..numel(dims))
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::f32(dims, &xs)
}

fn parameter(b: &mut Builder, name: &str, dims: &[usize]) -> ValueId {
    let t = random(dims, name.len() as u64 + numel(dims) as u64);
    let w = WeightRef::whole(name, t.ty().clone(), WeightStorage::Inline(Arc::new(t.clone())));
    let id = b.state(name, StateKind::Parameter, t.ty().clone(), Init::Weight(w), None);
    b.graph().state(id).read
}

fn outputs(g: &Graph) -> Vec<Tensor> {
    let types = g.inputs.iter().map(|i| g.ty(i.value));
    let inputs: Vec<Tensor> = types
        .enumerate()
        .map(|(i, ty)| match ty.dtype {
            DType::F32 => random(&ty.dims, i as u64 + 7),
            _ => Tensor::i64(ty.dims.clone(), &(0..ty.numel() as i64).map(|x| x * 5 % 8).collect::<Vec<_>>()),
        })
        .collect();
    let states: Vec<Arc<Tensor>> = g
        .states
        .iter()
        .map(|s| match &s.init {
            Init::Weight(w) => Arc::new(w.read(&w.dims().iter().map(|&d| 0..d).collect::<Vec<_>>()).unwrap()),
            Init::Zeros => unreachable!("only parameters here"),
        })
        .collect();
    interp::run(g, &inputs, &states).unwrap().outputs
}

/// Simplifies what `build` makes of `x[b,s,h]` and integers `i[b,s]`; checks that outputs are the same; gives the
/// operators that are left.
fn simplified(
    dims: [usize; 3],
    build: impl Fn(&mut Builder, ValueId, ValueId) -> Result<Vec<ValueId>, OpError>,
) -> Graph {
    let mut b = Builder::new("test");
    let x = b.input("x", Type::new(DType::F32, dims), Some(0));
    let i = b.input("i", Type::new(DType::I64, &dims[..2]), Some(0));
    let outs = build(&mut b, x, i).unwrap();
    for (at, v) in outs.into_iter().enumerate() {
        b.output(format!("out{at}"), v, None);
    }
    let before = b.finish();
    let after = simplify(&before).unwrap();
    verify::verify(&after).unwrap();
    for (found, expected) in outputs(&after).iter().zip(outputs(&before)) {
        assert_eq!(found.ty(), expected.ty());
        for (a, b) in found.as_slice::<f32>().iter().zip(expected.as_slice::<f32>()) {
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} {b}");
        }
    }
    after
}

fn ops(g: &Graph) -> Vec<String> {
    g.nodes.iter().map(|n| n.op.to_string()).collect()
}

#[test]
fn a_projection_of_merged_rows_is_lifted_and_taken_apart() {
    for dims in [[2, 3, 8], [1, 3, 8]] {
        let g = simplified(dims, |b, x, _| {
            let [batch, sequence, h] = dims;
            let rows = b.reshape(x, &[batch * sequence, h])?;
            let (w, bias) = (parameter(b, "w", &[h, 12]), parameter(b, "bias", &[12]));
            let y = b.einsum("mk,kn->mn", rows, w)?;
            let y = b.add(y, bias)?;
            let y = b.reshape(y, &[batch, sequence, 12])?;
            let q = b.slice(y, 2, 0, 4)?;
            let k = b.slice(y, 2, 4, 8)?;
            let v = b.slice(y, 2, 8, 12)?;
            let qk = b.mul(q, k)?;
            Ok(vec![b.add(qk, v)?])
        });
        assert_eq!(ops(&g).iter().filter(|o| o.starts_with("Reshape") || o.starts_with("Slice")).count(), 0);
        let names: Vec<&str> = g.states.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["w[:,0:4]", "bias[0:4]", "w[:,4:8]", "bias[4:8]", "w[:,8:12]", "bias[8:12]"]);
    }
}

#[test]
fn chains_of_row_operators_are_lifted_through() {
    let g = simplified([2, 3, 8], |b, x, i| {
        let rows = b.reshape(x, &[6, 8])?;
        let (w, scale) = (parameter(b, "w", &[8, 8]), parameter(b, "scale", &[8]));
        let y = b.layer_norm(rows, scale, None, 1, 1e-5)?;
        let y = b.einsum("mk,nk->mn", y, w)?;
        let y = b.tanh(y)?;
        let y = b.add(rows, y)?;
        let y = b.softmax(y, 1)?;
        let labels = b.reshape(i, &[6])?;
        let (lse, picked) = b.cross_entropy_parts(y, labels)?;
        let each = b.sub(lse, picked)?;
        let loss = b.reduce_sum(each, &[0], false)?;
        let logits = b.reshape(y, &[2, 3, 8])?;
        let left = b.slice(y, 1, 0, 3)?;
        let kept = b.reduce_max(left, &[1], true)?;
        Ok(vec![loss, logits, kept])
    });
    // The one output that is of merged rows is reshaped at the end.
    let all = ops(&g);
    assert_eq!(all.iter().filter(|o| o.starts_with("Reshape")).count(), 1, "{all:?}");
    assert!(all.iter().any(|o| o == "ReduceSum{dims=[0,1], keep=false}"), "{all:?}");
}

#[test]
fn heads_merged_with_the_batch_stay_apart() {
    let g = simplified([2, 3, 8], |b, x, _| {
        let heads = b.reshape(x, &[2, 3, 2, 4])?;
        let heads = b.transpose(heads, &[0, 2, 1, 3])?;
        let merged = b.reshape(heads, &[4, 3, 4])?;
        let keys = b.transpose(merged, &[0, 2, 1])?;
        let half = b.scalar(DType::F32, 0.5);
        let keys = b.mul(keys, half)?;
        let scores = b.einsum("bqd,bdk->bqk", merged, keys)?;
        let scores = b.softmax(scores, 2)?;
        let context = b.einsum("bqk,bkd->bqd", scores, merged)?;
        let context = b.reshape(context, &[2, 2, 3, 4])?;
        let context = b.transpose(context, &[0, 2, 1, 3])?;
        Ok(vec![b.reshape(context, &[2, 3, 8])?])
    });
    let all = ops(&g);
    assert_eq!(all.iter().filter(|o| o.starts_with("Transpose")).count(), 0, "{all:?}");
    assert_eq!(all.iter().filter(|o| o.starts_with("Reshape")).count(), 2, "{all:?}");
}

#[test]
fn heads_merged_along_with_rows_are_lifted() {
    let g = simplified([2, 3, 8], |b, x, _| {
        let heads = b.reshape(x, &[2, 3, 2, 4])?;
        let turned = b.transpose(heads, &[0, 1, 3, 2])?;
        let rows = b.reshape(turned, &[6, 8])?;
        let w = parameter(b, "w", &[8, 5]);
        let y = b.einsum("sk,kn->sn", rows, w)?;
        Ok(vec![b.reshape(y, &[2, 3, 5])?])
    });
    let all = ops(&g);
    assert!(all.iter().any(|o| o == "Einsum{eq=\"bsk,kn->bsn\"}"), "{all:?}");
    assert_eq!(all.iter().filter(|o| o.starts_with("Reshape")).count(), 2, "{all:?}");
}

#[test]
fn a_gather_of_all_rows_in_order_is_a_reshape() {
    let g = simplified([2, 3, 8], |b, x, _| {
        let rows = b.reshape(x, &[6, 8])?;
        let all = b.constant(Tensor::i64([2, 1, 3], &[0, 1, 2, 3, 4, 5]));
        let most = b.constant(Tensor::i64([2, 1, 3], &[0, 1, 2, 3, 5, 4]));
        Ok(vec![b.gather(rows, all, 0)?, b.gather(rows, most, 0)?])
    });
    assert_eq!(ops(&g).iter().filter(|o| o.starts_with("Gather")).count(), 1);
}

#[test]
fn what_mixes_rows_gets_the_value_proper() {
    simplified([2, 3, 8], |b, x, i| {
        let rows = b.reshape(x, &[6, 8])?;
        let table = b.tanh(rows)?;
        let ids = b.reshape(i, &[6])?;
        let three = b.constant(Tensor::i64([], &[3]));
        let ids = b.min(ids, three)?;
        let looked_up = b.gather(table, ids, 0)?;
        let turned = b.transpose(table, &[1, 0])?;
        let gram = b.einsum("ab,bc->ac", turned, table)?;
        let sliced = b.slice(table, 0, 1, 5)?;
        let columns = b.reduce_sum(table, &[0], true)?;
        let both = b.add(looked_up, columns)?;
        Ok(vec![both, gram, sliced])
    });
}

#[test]
fn slices_that_do_not_tile_keep_the_parameter_whole() {
    let g = simplified([2, 3, 8], |b, x, _| {
        let w = parameter(b, "w", &[8, 12]);
        let y = b.einsum("bsk,kn->bsn", x, w)?;
        let left = b.slice(y, 2, 0, 4)?;
        let right = b.slice(y, 2, 6, 12)?;
        Ok(vec![left, right])
    });
    assert_eq!(g.states.len(), 1);
}

#[test]
fn an_operator_without_operands_beside_a_fused_product() {
    let g = simplified([2, 3, 8], |b, x, _| {
        let w = parameter(b, "w", &[8, 8]);
        let y = b.einsum("bsk,kn->bsn", x, w)?;
        let (l, r) = (b.slice(y, 2, 0, 4)?, b.slice(y, 2, 4, 8)?);
        // Too many elements to become a constant.
        let indices = b.iota(&[crate::builder::FOLD_LIMIT + 1], 0)?;
        let indices = b.slice(indices, 0, 0, 4)?;
        let indices = b.cast(indices, DType::F32)?;
        let sum = b.add(l, indices)?;
        Ok(vec![b.mul(sum, r)?])
    });
    assert!(ops(&g).iter().any(|o| o.starts_with("Iota")));
}
