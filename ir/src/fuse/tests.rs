//! Each form in the spellings of exporters: found, and equal in value and gradient-relevant corners (rows that see nothing).

use std::sync::Arc;

use super::{Forms, fuse};
use crate::builder::Builder;
use crate::graph::{Graph, Init, StateKind, ValueId};
use crate::op::{Op, OpError};
use crate::tensor::{Tensor, Type};
use crate::{DType, interp, verify};

/// Pseudo-random elements in [-1, 1).
fn random(dims: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let n: usize = dims.iter().product();
    let xs: Vec<f32> = (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::f32(dims, &xs)
}

struct Case {
    b: Builder,
}

impl Case {
    fn new() -> Case {
        Case { b: Builder::new("case") }
    }
    fn input(&mut self, dims: &[usize]) -> ValueId {
        let name = format!("x{}", self.b.graph().inputs.len());
        self.b.input(name, Type::new(DType::F32, dims), None)
    }
    fn mask(&mut self, dims: &[usize]) -> ValueId {
        self.b.input("mask", Type::new(DType::Bool, dims), None)
    }
    fn parameter(&mut self, dims: &[usize]) -> ValueId {
        let name = format!("w{}", self.b.graph().states.len());
        let id = self.b.state(name, StateKind::Parameter, Type::new(DType::F32, dims), Init::Zeros, None);
        self.b.graph().state(id).read
    }
    fn op(&mut self, name: &str, args: &[ValueId]) -> ValueId {
        let op = Op::new(crate::ops::find(name).expect("an operator"));
        self.b.emit1(op, args).expect("operands fit")
    }
    fn number(&mut self, x: f64) -> ValueId {
        self.b.scalar(DType::F32, x)
    }
    fn ok(x: Result<ValueId, OpError>) -> ValueId {
        x.expect("operands fit")
    }
    /// The graph's operators after fusing; the values are compared on the way.
    fn fused(mut self, out: ValueId) -> String {
        self.b.output("y", out, None);
        let graph = self.b.finish();
        let fused = fuse(&graph, Forms::ALL).expect("fuses");
        assert_eq!(verify::verify(&fused), Ok(()));
        let (want, got) = (run(&graph), run(&fused));
        for (w, g) in want.as_slice::<f32>().iter().zip(got.as_slice::<f32>()) {
            assert!((w - g).abs() <= 2e-5 * (1.0 + w.abs()), "{w} became {g}");
        }
        fused.nodes.iter().map(|n| n.op.to_string()).collect::<Vec<_>>().join(" ")
    }
}

fn run(graph: &Graph) -> Tensor {
    let inputs: Vec<Tensor> = (graph.inputs.iter().enumerate())
        .map(|(i, x)| {
            let ty = graph.ty(x.value);
            match ty.dtype {
                DType::Bool => {
                    let bits: Vec<u8> = (0..ty.numel()).map(|e| u8::from(e * 7 % 5 < 3)).collect();
                    Tensor::from_bytes(ty.clone(), &bits).expect("as many")
                }
                _ => random(&ty.dims, i as u64 + 7),
            }
        })
        .collect();
    let states: Vec<Arc<Tensor>> = graph.states.iter().map(|s| Arc::new(random(&graph.ty(s.read).dims, 3))).collect();
    interp::run(graph, &inputs, &states).expect("runs").outputs.swap_remove(0)
}

#[test]
fn activations() {
    let mut c = Case::new();
    let x = c.input(&[4, 6]);
    let s = c.op("Sigmoid", &[x]);
    let y = c.op("Mul", &[s, x]);
    assert_eq!(c.fused(y), "Silu");

    // 0.5 x (1 + erf(x / sqrt 2)), in the order of the legacy exporter.
    let mut c = Case::new();
    let x = c.input(&[4, 6]);
    let (root, one, half) = (c.number(std::f64::consts::SQRT_2), c.number(1.0), c.number(0.5));
    let e = c.op("Div", &[x, root]);
    let e = c.op("Erf", &[e]);
    let e = c.op("Add", &[e, one]);
    let y = c.op("Mul", &[x, e]);
    let y = c.op("Mul", &[y, half]);
    assert_eq!(c.fused(y), "Gelu{approximate=\"none\"}");

    for factored in [false, true] {
        let mut c = Case::new();
        let x = c.input(&[4, 6]);
        let (k, r, one, half) = (c.number(0.044715), c.number(0.797_884_6), c.number(1.0), c.number(0.5));
        let square = c.op("Mul", &[x, x]);
        let inner = if factored {
            let a = c.op("Mul", &[k, square]);
            let a = c.op("Add", &[one, a]);
            c.op("Mul", &[x, a])
        } else {
            let cube = c.op("Mul", &[x, square]);
            let a = c.op("Mul", &[cube, k]);
            c.op("Add", &[x, a])
        };
        let t = c.op("Mul", &[r, inner]);
        let t = c.op("Tanh", &[t]);
        let t = c.op("Add", &[one, t]);
        let h = c.op("Mul", &[half, x]);
        let y = c.op("Mul", &[h, t]);
        assert_eq!(c.fused(y), "Gelu{approximate=\"tanh\"}", "factored: {factored}");
    }
}

#[test]
fn a_gelu_with_other_coefficients_stays() {
    let mut c = Case::new();
    let x = c.input(&[4, 6]);
    let (root, one, half) = (c.number(0.6), c.number(1.0), c.number(0.5));
    let e = c.op("Mul", &[x, root]);
    let e = c.op("Erf", &[e]);
    let e = c.op("Add", &[e, one]);
    let y = c.op("Mul", &[x, e]);
    let y = c.op("Mul", &[y, half]);
    assert!(c.fused(y).contains("Erf"));
}

/// `x / sqrt(mean(x^2) + eps)`
fn normalised(c: &mut Case, x: ValueId, n: usize) -> ValueId {
    let (n, eps) = (c.number(1.0 / n as f64), c.number(1e-5));
    let rank = c.b.dims(x).len();
    let square = c.op("Mul", &[x, x]);
    let mean = Case::ok(c.b.reduce_sum(square, &[rank - 1], true));
    let mean = c.op("Mul", &[mean, n]);
    let sum = c.op("Add", &[mean, eps]);
    let root = c.op("Sqrt", &[sum]);
    c.op("Div", &[x, root])
}

#[test]
fn norms() {
    let mut c = Case::new();
    let (x, w) = (c.input(&[2, 3, 8]), c.parameter(&[8]));
    let y = normalised(&mut c, x, 8);
    let y = c.op("Mul", &[w, y]);
    let fused = c.fused(y);
    assert!(fused.starts_with("RmsNorm{") && fused.matches('{').count() == 1, "{fused}");

    let mut c = Case::new();
    let (x, w) = (c.input(&[2, 3, 8]), c.parameter(&[8]));
    let n = c.number(0.125);
    let sum = Case::ok(c.b.reduce_sum(x, &[2], true));
    let mean = c.op("Mul", &[sum, n]);
    let centred = c.op("Sub", &[x, mean]);
    let y = normalised(&mut c, centred, 8);
    let y = c.op("Mul", &[y, w]);
    let y = c.op("Add", &[y, w]);
    let fused = c.fused(y);
    assert!(fused.starts_with("LayerNorm{") && fused.matches('{').count() == 1, "{fused}");
}

#[test]
fn a_norm_over_inner_dims_stays() {
    let mut c = Case::new();
    let x = c.input(&[2, 3, 8]);
    let (n, eps) = (c.number(1.0 / 3.0), c.number(1e-5));
    let square = c.op("Mul", &[x, x]);
    let mean = Case::ok(c.b.reduce_sum(square, &[1], true));
    let mean = c.op("Mul", &[mean, n]);
    let sum = c.op("Add", &[mean, eps]);
    let root = c.op("Sqrt", &[sum]);
    let y = c.op("Div", &[x, root]);
    assert!(!c.fused(y).contains("Norm"));
}

#[test]
fn rotary() {
    let mut c = Case::new();
    let x = c.input(&[2, 4, 6, 8]);
    let (cos, sin) = (c.b.constant(random(&[1, 1, 6, 8], 5)), c.b.constant(random(&[6, 8], 6)));
    let (a, b) = (Case::ok(c.b.slice(x, 3, 0, 4)), Case::ok(c.b.slice(x, 3, 4, 8)));
    let b = c.op("Neg", &[b]);
    let turned = Case::ok(c.b.concat(&[b, a], 3));
    let (l, r) = (c.op("Mul", &[x, cos]), c.op("Mul", &[turned, sin]));
    let y = c.op("Add", &[l, r]);
    assert_eq!(c.fused(y), "RotaryEmbedding{interleaved=false, transposed=false}");
}

/// What hides scores, in the spellings of exporters.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Hide {
    Nothing,
    /// A constant triangle.
    Causal,
    /// A triangle and a padding mask, `low` added where they hide.
    CausalAndPadding,
    /// Scores replaced.
    Window,
    /// A constant row for all queries: padding that is part of the file.
    Padding,
    /// A triangle of one kind of number, then one of the other.
    Mixed,
    /// A bias of numbers.
    Bias,
}

fn attention(hide: Hide, low: f64, guarded: bool, groups: usize) -> String {
    let (b, h, s, d) = (2, 4, 6, 8);
    let mut c = Case::new();
    let (q, k, v) = (c.input(&[b, s, h, d]), c.input(&[b, s, h / groups, d]), c.input(&[b, s, h / groups, d]));
    let turn = |c: &mut Case, x| Case::ok(c.b.transpose(x, &[0, 2, 1, 3]));
    let (q, mut k, mut v) = (turn(&mut c, q), turn(&mut c, k), turn(&mut c, v));
    if groups > 1 {
        for x in [&mut k, &mut v] {
            *x = Case::ok(c.b.reshape(*x, &[b, h / groups, 1, s, d]));
            *x = Case::ok(c.b.expand(*x, &[b, h / groups, groups, s, d]));
        }
        v = Case::ok(c.b.reshape(v, &[b, h, s, d]));
        k = Case::ok(c.b.transpose(k, &[0, 1, 2, 4, 3]));
        k = Case::ok(c.b.reshape(k, &[b, h, d, s]));
    } else {
        k = Case::ok(c.b.transpose(k, &[0, 1, 3, 2]));
    }
    let root = c.number(0.6);
    let (q, k) = (c.op("Mul", &[q, root]), c.op("Mul", &[k, root]));
    let mut scores = Case::ok(c.b.einsum("bhsk,bhkt->bhst", q, k));
    let (zero, low) = (c.number(0.0), c.number(low));
    let triangle = |c: &mut Case, window: usize| {
        let seen: Vec<u8> = (0..s * s).map(|e| u8::from(e % s <= e / s && e % s + window > e / s)).collect();
        c.b.constant(Tensor::from_bytes(Type::new(DType::Bool, [1, 1, s, s]), &seen).expect("as many"))
    };
    match hide {
        Hide::Nothing => {}
        Hide::Causal => {
            let seen = triangle(&mut c, s);
            let bias = c.op("Where", &[seen, zero, low]);
            scores = c.op("Add", &[scores, bias]);
        }
        Hide::CausalAndPadding => {
            let padding = c.mask(&[b, 1, 1, s]);
            let seen = triangle(&mut c, s);
            let seen = c.op("And", &[padding, seen]);
            let bias = c.op("Where", &[seen, zero, low]);
            scores = c.op("Add", &[scores, bias]);
        }
        Hide::Window => {
            let seen = triangle(&mut c, 3);
            let hidden = c.op("Not", &[seen]);
            scores = c.op("Where", &[hidden, low, scores]);
        }
        Hide::Padding => {
            let hidden = [0.0, 0.0, 0.0, f32::MIN, f32::MIN, f32::MIN];
            let bias = c.b.constant(Tensor::f32([1, 1, 1, s], &hidden));
            scores = c.op("Add", &[scores, bias]);
        }
        Hide::Mixed => {
            let infinite = c.number(f64::NEG_INFINITY);
            let (wide, narrow) = (triangle(&mut c, s), triangle(&mut c, 3));
            let narrow = c.op("Not", &[narrow]);
            scores = c.op("Where", &[wide, scores, infinite]);
            scores = c.op("Where", &[narrow, low, scores]);
        }
        Hide::Bias => {
            let bias = c.input(&[h, s, s]);
            scores = c.op("Add", &[scores, bias]);
        }
    }
    let softmax = Op::new(&crate::ops::softmax::SOFTMAX).int("axis", 3);
    let mut weights = Case::ok(c.b.emit1(softmax, &[scores]));
    if guarded {
        let nan = c.op("IsNaN", &[weights]);
        weights = c.op("Where", &[nan, zero, weights]);
    }
    let y = Case::ok(c.b.einsum("bhst,bhte->bshe", weights, v));
    c.fused(y)
}

#[test]
fn attentions() {
    let lowest = f64::from(f32::MIN);
    let cases = [
        (Hide::Nothing, lowest, false, 1, "causal=false, offset=0, window=0, layout"),
        (Hide::Nothing, lowest, true, 2, "causal=false, offset=0, window=0, layout"),
        (Hide::Causal, lowest, false, 1, "causal=true, offset=0, window=0, uniform=true, layout"),
        (Hide::Causal, f64::NEG_INFINITY, true, 4, "causal=true, offset=0, window=0, layout"),
        (Hide::CausalAndPadding, lowest, true, 2, "causal=true, offset=0, window=0, uniform=true, layout"),
        (Hide::CausalAndPadding, f64::NEG_INFINITY, true, 1, "causal=true, offset=0, window=0, layout"),
        (Hide::Window, lowest, false, 2, "causal=true, offset=0, window=3, uniform=true, layout"),
        (Hide::Bias, lowest, false, 1, "causal=false, offset=0, window=0, layout"),
        (Hide::Causal, -1e4, false, 1, "causal=true, offset=0, window=0, layout"),
        (Hide::Window, -3e4, false, 2, "causal=true, offset=0, window=3, layout"),
    ];
    for (hide, low, guarded, groups, settings) in cases {
        let fused = attention(hide, low, guarded, groups);
        let want = format!("Attention{{scale=0.36000001430511475, {settings}=\"bshd\"}}");
        let rest = fused.replace(&want, "");
        assert!(
            fused.contains(&want) && rest.trim_start_matches("Reshape{dims=[1,4,6,6]}").trim().is_empty(),
            "{hide:?}: {fused}"
        );
    }
}

/// Deep models are rewritten a stretch at a time, and the mask of all layers lies outside: rules look into it.
#[test]
fn a_mask_far_from_its_layers_is_causal() {
    // Too large to be folded into a constant.
    let (s, d, layers) = (2100, 8, 80);
    let mut c = Case::new();
    let mut x = c.input(&[1, 1, s, d]);
    let positions = Case::ok(c.b.iota(&[s], 0));
    let counts = [[s, 1], [1, s]].map(|dims| Case::ok(c.b.reshape(positions, &dims)));
    let hidden = c.op("Less", &counts);
    let (low, zero) = (c.number(-3e4), c.number(0.0));
    let mask = c.op("Where", &[hidden, low, zero]);
    for _ in 0..layers {
        let scores = Case::ok(c.b.einsum("bhsk,bhtk->bhst", x, x));
        let scores = c.op("Add", &[scores, mask]);
        let softmax = Op::new(&crate::ops::softmax::SOFTMAX).int("axis", 3);
        let weights = Case::ok(c.b.emit1(softmax, &[scores]));
        let y = Case::ok(c.b.einsum("bhst,bhte->bhse", weights, x));
        let (y, z) = (c.op("Tanh", &[y]), c.op("Sin", &[x]));
        x = c.op("Add", &[y, z]);
    }
    c.b.output("y", x, None);
    let graph = c.b.finish();
    assert!(graph.nodes.len() > 320, "{} nodes are one stretch", graph.nodes.len());
    let fused = fuse(&graph, Forms::ALL).expect("fuses");
    let causal = fused.nodes.iter().filter(|n| n.op.name() == "Attention" && n.op.get_flag("causal")).count();
    assert_eq!(causal, layers);
    assert!(fused.nodes.iter().all(|n| n.op.name() != "Where"), "the mask is still there");
}

#[test]
fn a_row_of_padding_is_no_band() {
    let fused = attention(Hide::Padding, 0.0, false, 1);
    assert!(fused.contains("Attention") && fused.contains("causal=false"), "{fused}");
}

#[test]
fn what_hides_in_two_ways_is_not_said_to_hide_in_one() {
    let fused = attention(Hide::Mixed, f64::from(f32::MIN), false, 1);
    assert!(!fused.contains("window=3"), "{fused}");
}

#[test]
fn a_number_that_may_not_hide_stays_a_bias() {
    // -100 beside scores of some size leaves weights that are not 0.
    let fused = attention(Hide::CausalAndPadding, -100.0, false, 1);
    assert!(fused.contains("causal=false") && fused.contains("Where"), "{fused}");
    // Where padding hides rows as a whole, numbers that are not low enough leave them the weights of their scores.
    let fused = attention(Hide::CausalAndPadding, -1e4, false, 1);
    assert!(fused.contains("causal=false") && fused.contains("Where"), "{fused}");
    let fused = attention(Hide::Causal, -9e3, false, 1);
    assert!(fused.contains("causal=false"), "{fused}");
}

#[test]
fn equal_blocks_are_rewritten_alike() {
    let mut c = Case::new();
    let mut x = c.input(&[2, 3, 8]);
    for _ in 0..6 {
        let w = c.parameter(&[8, 8]);
        let n = normalised(&mut c, x, 8);
        let p = Case::ok(c.b.einsum("bsk,kn->bsn", n, w));
        let s = c.op("Sigmoid", &[p]);
        let a = c.op("Mul", &[p, s]);
        x = c.op("Add", &[x, a]);
    }
    let fused = c.fused(x);
    assert_eq!(fused.matches("Silu").count(), 6, "{fused}");
    assert_eq!(fused.matches("RmsNorm").count(), 6, "{fused}");
}

#[test]
fn tiles_are_no_repeated_heads() {
    // As Tile is lowered: a new first dim, expanded, and merged; one of them was once taken for grouped queries.
    let mut c = Case::new();
    let x = c.input(&[2, 3]);
    let y = Case::ok(c.b.reshape(x, &[1, 2, 3]));
    let y = Case::ok(c.b.expand(y, &[4, 2, 3]));
    let y = Case::ok(c.b.reshape(y, &[8, 3]));
    assert!(c.fused(y).contains("Expand"));
}
