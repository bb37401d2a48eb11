//! `com.microsoft.MoE`: what ONNX Runtime computes for the variants that its CPU provider has, `fc3` against the same experts with
//! `fc1` and `fc3` in one operand, and what is refused.

mod proto;

use std::sync::Arc;

use autoshard_ir::onnx::Bindings;
use autoshard_ir::onnx::proto::onnx::attribute_proto::AttributeType;
use autoshard_ir::onnx::proto::onnx::{AttributeProto, ModelProto, TensorProto};
use autoshard_ir::{Graph, Tensor, interp};

use proto::{attr, floats, graph, import, info, model, node, opset, weights};

const EXPERTS: usize = 4;
const FFN: usize = 3;
const HIDDEN: usize = 2;
const OPERANDS: [&str; 8] = ["x", "logits", "fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias"];

fn int(name: &str, x: i64) -> AttributeProto {
    attr(name, |a| {
        a.set_i(x);
        a.set_type(AttributeType::INT);
    })
}

fn float(name: &str, x: f32) -> AttributeProto {
    attr(name, |a| {
        a.set_f(x);
        a.set_type(AttributeType::FLOAT);
    })
}

fn activation(name: &str) -> AttributeProto {
    attr("activation_type", |a| {
        a.set_s(name.as_bytes().to_vec().into());
        a.set_type(AttributeType::STRING);
    })
}

/// From -1 to 1, of which no two neighbours are alike; `recorded/moe.py` has the same.
fn numbers(seed: i64, count: usize) -> Vec<f32> {
    let of = |i: i64| (((i + seed) * (i + 3 * seed + 7) * 37 + 11 * seed).rem_euclid(101) - 50) as f64 / 50.0;
    (0..count as i64).map(|i| of(i) as f32).collect()
}

/// A mixture of experts: dims of rows, rows of `fc1` per expert, whether there are biases and `fc3`, attributes.
#[derive(Clone)]
struct Case {
    rows: Vec<usize>,
    wide: usize,
    biases: bool,
    third: bool,
    attributes: Vec<AttributeProto>,
}

impl Case {
    fn new(rows: &[usize], biases: bool, attributes: Vec<AttributeProto>) -> Case {
        Case { rows: rows.to_vec(), wide: FFN, biases, third: false, attributes }
    }
    fn wide(self) -> Case {
        Case { wide: 2 * FFN, ..self }
    }
    fn third(self) -> Case {
        Case { third: true, ..self }
    }
    /// Dims of operands, empty for those that are not given.
    fn dims(&self) -> [Vec<usize>; 8] {
        let given = |is: bool, dims: &[usize]| if is { dims.to_vec() } else { vec![] };
        [
            [&self.rows[..], &[HIDDEN]].concat(),
            vec![self.rows.iter().product(), EXPERTS],
            vec![EXPERTS, self.wide, HIDDEN],
            given(self.biases, &[EXPERTS, self.wide]),
            vec![EXPERTS, HIDDEN, FFN],
            given(self.biases, &[EXPERTS, HIDDEN]),
            given(self.third, &[EXPERTS, FFN, HIDDEN]),
            given(self.third && self.biases, &[EXPERTS, FFN]),
        ]
    }
    fn operands(&self) -> [Vec<f32>; 8] {
        let dims = self.dims();
        std::array::from_fn(|i| numbers(i as i64 + 1, if dims[i].is_empty() { 0 } else { dims[i].iter().product() }))
    }
    fn model(&self, operands: &[Vec<f32>; 8]) -> ModelProto {
        let dims = self.dims();
        let initializer = |i: usize| -> TensorProto {
            floats(OPERANDS[i], &dims[i].iter().map(|&d| d as i64).collect::<Vec<_>>(), &operands[i])
        };
        let sizes = |i: usize| dims[i].iter().map(ToString::to_string).collect::<Vec<_>>();
        let port =
            |name: &str, sizes: Vec<String>| info(name, 1, &sizes.iter().map(String::as_str).collect::<Vec<_>>());
        let names: Vec<&str> = (0..8).map(|i| if dims[i].is_empty() { "" } else { OPERANDS[i] }).collect();
        let mut mixture = node("MoE", &names, &["y"]);
        mixture.set_domain("com.microsoft".into());
        mixture.attribute = self.attributes.clone();
        let mut m = model();
        m.opset_import = vec![opset("", 17), opset("com.microsoft", 1)];
        let g = graph(&mut m);
        g.input = vec![port("x", sizes(0)), port("logits", sizes(1))];
        g.output = vec![port("y", sizes(0))];
        g.initializer = (2..8).filter(|&i| !dims[i].is_empty()).map(initializer).collect();
        g.node = vec![mixture];
        m
    }
    fn import(&self, operands: &[Vec<f32>; 8]) -> Result<Graph, String> {
        import(&self.model(operands), &Bindings::default())
    }
    fn run(&self, operands: &[Vec<f32>; 8]) -> Vec<f32> {
        let g = self.import(operands).unwrap_or_else(|e| panic!("{e}"));
        let dims = self.dims();
        let inputs: Vec<Tensor> = (0..2).map(|i| Tensor::f32(dims[i].clone(), &operands[i])).collect();
        let states: Vec<Arc<Tensor>> = weights(&g);
        interp::run(&g, &inputs, &states).unwrap().outputs[0].as_slice::<f32>().to_vec()
    }
}

fn close(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()))
}

/// As GPT-OSS has them.
fn clamped() -> Vec<AttributeProto> {
    vec![
        activation("swiglu"),
        int("swiglu_fusion", 1),
        float("activation_alpha", 1.702),
        float("activation_beta", 1.0),
        float("swiglu_limit", 1.0),
        int("k", 2),
        int("normalize_routing_weights", 1),
    ]
}

/// `recorded/moe.py` wrote the numbers, with ONNX Runtime 1.32.0.
#[test]
fn mixtures_compute_what_onnx_runtime_recorded() {
    let normalised = || int("normalize_routing_weights", 1);
    let cases: [(Case, &[f32]); 6] = [
        (Case::new(&[3], false, vec![]), &[0.1155491, 0.1371512, -0.4212509, 0.3790243, -0.0273235, 0.009107835]),
        (
            Case::new(&[3], true, vec![activation("gelu"), int("k", 2)]),
            &[0.222307, 0.1776362, 0.4798402, -0.1045923, 0.2784194, -0.02857998],
        ),
        (
            Case::new(&[2, 2], false, vec![activation("silu"), int("k", 2), normalised()]),
            &[0.2404602, 0.07444244, -0.4606831, 0.2748765, 0.08809318, -0.2017008, -0.291268, 0.1252258],
        ),
        (
            Case::new(&[2, 2], true, vec![activation("identity"), int("k", 4), normalised()]),
            &[1.1755, -0.4052583, 0.7207019, -0.3480893, 0.947133, -0.4903206, 0.7369635, -0.544722],
        ),
        (
            Case::new(&[3], false, vec![activation("swiglu"), int("swiglu_fusion", 1), int("k", 3)]).wide(),
            &[0.04839157, 0.03427108, 0.01331018, -0.001113707, -0.01814063, 0.006718608],
        ),
        (
            Case::new(&[2, 2], true, clamped()).wide(),
            &[0.5560635, 0.3218119, 0.1753676, 0.1342615, 0.7761843, 0.4783929, 0.5398717, -1.562808],
        ),
    ];
    for (i, (case, expected)) in cases.into_iter().enumerate() {
        let found = case.run(&case.operands());
        assert!(close(&found, expected), "case {i}: {found:?} is not {expected:?}");
    }
}

/// Gate and linear part in turns are recorded; the same numbers in `fc1` and `fc3`, and one behind the other, are the same experts.
#[test]
fn the_three_places_of_a_linear_part_are_one_function() {
    let with = |fusion: i64| {
        let mut attributes = clamped();
        attributes[1] = int("swiglu_fusion", fusion);
        Case::new(&[2, 2], true, attributes)
    };
    let turns = with(1).wide();
    let operands = turns.operands();
    // Rows of each expert, of `size` numbers: the gate's (0) or those of the linear part (1).
    let part = |xs: &[f32], which: usize, size: usize| -> Vec<f32> {
        xs.chunks(size).skip(which).step_by(2).flatten().copied().collect()
    };
    let mut apart = operands.clone();
    for (from, to, size) in [(2, 6, HIDDEN), (3, 7, 1)] {
        apart[to] = part(&operands[from], 1, size);
        apart[from] = part(&operands[from], 0, size);
    }
    let mut behind = operands.clone();
    for (at, size) in [(2, HIDDEN), (3, 1)] {
        let of = |e: &[f32]| [part(e, 0, size), part(e, 1, size)].concat();
        behind[at] = operands[at].chunks(2 * FFN * size).flat_map(of).collect();
    }
    let expected = turns.run(&operands);
    let found = [with(0).third().run(&apart), with(2).wide().run(&behind)];
    assert!(found.iter().all(|f| close(f, &expected)), "{found:?} is not {expected:?}");
}

/// `silu` with `fc3` is `swiglu` without beta and limit.
#[test]
fn silu_with_a_third_matrix_is_gated() {
    let of = |name: &str| Case::new(&[3], false, vec![activation(name), int("k", 2)]).third();
    let (silu, swiglu) = (of("silu"), of("swiglu"));
    assert!(close(&silu.run(&silu.operands()), &swiglu.run(&swiglu.operands())));
    let without = Case::new(&[3], false, vec![activation("silu"), int("k", 2)]);
    assert!(!close(&silu.run(&silu.operands()), &without.run(&without.operands())));
}

#[test]
fn what_is_not_supported_is_refused() {
    let of = |attributes| Case::new(&[3], true, attributes);
    let cases = [
        ("sparse mixer", of(vec![int("use_sparse_mixer", 1)])),
        ("limit behind the activation", of(vec![int("swiglu_limit_after_activation", 1)])),
        ("activation", of(vec![activation("geglu")])),
        ("no linear part", of(vec![activation("swiglu")])),
        ("two linear parts", of(vec![activation("swiglu"), int("swiglu_fusion", 1)]).wide().third()),
        ("layout", of(vec![activation("swiglu"), int("swiglu_fusion", 3)])),
        ("no expert", of(vec![int("k", 0)])),
        ("too many experts", of(vec![int("k", 5)])),
        ("rows of another size", of(vec![]).wide()),
        ("unknown attribute", of(vec![int("block_size", 32)])),
        ("four dims", Case::new(&[1, 2, 2], true, vec![])),
    ];
    let texts = cases.map(|(what, case)| {
        let error = case.import(&case.operands()).expect_err(what);
        format!("{what}:\n{error}")
    });
    insta::assert_snapshot!(texts.join("\n"));
}
