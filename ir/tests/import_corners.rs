//! Corners of operators, imported and computed: half floats whose sums overflow, attributes of another kind, names in
//! branches of functions, weights that merely start alike, windows of absurd sizes.

mod proto;

use autoshard_ir::onnx::proto::onnx::attribute_proto::AttributeType;
use autoshard_ir::onnx::proto::onnx::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto};
use autoshard_ir::{DType, Graph, Tensor, convert, interp};

use proto::{attr, floats, graph, import, info, integers, model, node, opset, run, weights};

/// A model of constants: `y` of nodes.
fn constants(initializers: Vec<TensorProto>, nodes: Vec<NodeProto>, version: i64) -> ModelProto {
    let mut m = model();
    m.opset_import = vec![opset("", version), opset("com.microsoft", 1)];
    let g = graph(&mut m);
    g.output = vec![info("y", 1, &[])];
    g.initializer = initializers;
    g.node = nodes;
    m
}

fn result(m: &ModelProto) -> Vec<f64> {
    let g = import(m, &[("batch", 2)].into()).unwrap_or_else(|e| panic!("{e}"));
    let inputs: Vec<Tensor> = g.inputs.iter().map(|x| Tensor::zeros(g.ty(x.value).clone())).collect();
    let states = weights(&g);
    let out = interp::run(&g, &inputs, &states).unwrap().outputs.swap_remove(0);
    convert::to_f64(out.dtype(), out.bytes())
}

fn half(name: &str, dims: &[i64], xs: &[f64]) -> TensorProto {
    let mut bytes = vec![0; 2 * xs.len()];
    convert::from_f64(DType::F16, xs.iter().copied(), &mut bytes);
    let mut t = floats(name, dims, &[]);
    t.set_data_type(10);
    t.set_raw_data(bytes.into());
    t
}

fn int(name: &str, x: i64) -> AttributeProto {
    attr(name, |a| {
        a.set_i(x);
        a.set_type(AttributeType::INT);
    })
}

fn ints(name: &str, xs: &[i64]) -> AttributeProto {
    attr(name, |a| {
        a.ints = xs.to_vec();
        a.set_type(AttributeType::INTS);
    })
}

#[test]
fn sums_of_half_floats_on_the_way_to_small_results_do_not_overflow() {
    let cases = [
        ("ReduceMean", vec![20.0; 4096], 20.0),
        ("ReduceL2", vec![300.0, 400.0], 500.0),
        ("ReduceLogSum", vec![60000.0, 60000.0], 120_000f64.ln()),
        ("ReduceLogSumExp", vec![f64::NEG_INFINITY; 2], f64::NEG_INFINITY),
    ];
    for (op, xs, want) in cases {
        let y = result(&constants(vec![half("h", &[xs.len() as i64], &xs)], vec![node(op, &["h"], &["y"])], 13));
        assert!(y[0] == want || (y[0] - want).abs() <= want.abs() * 1e-3, "{op}: {} is not {want}", y[0]);
    }
    let image = half("h", &[1, 1, 112, 112], &vec![6.0; 112 * 112]);
    let y = result(&constants(vec![image], vec![node("GlobalAveragePool", &["h"], &["y"])], 13));
    assert_eq!(y, [6.0]);
    let (scale, bias) = (half("s", &[1], &[1.0]), half("b", &[1], &[0.0]));
    let norm = node("InstanceNormalization", &["h", "s", "b"], &["y"]);
    let y = result(&constants(vec![half("h", &[1, 1, 2], &[-300.0, 300.0]), scale, bias], vec![norm], 13));
    assert_eq!(y, [-1.0, 1.0]);
}

#[test]
fn a_float_power_of_an_integer_is_exact_while_f64_is() {
    let y = constants(
        vec![integers("v", &[1], &[3]), floats("e", &[], &[20.0])],
        vec![node("Pow", &["v", "e"], &["y"])],
        13,
    );
    assert_eq!(result(&y), [3f64.powi(20)]);
}

/// ONNX Runtime's skip norms default to an epsilon of 1e-12, not 1e-5.
#[test]
fn skip_norms_have_the_epsilon_of_onnx_runtime() {
    let mut norm = node("SkipSimplifiedLayerNormalization", &["v", "v", "s"], &["y"]);
    norm.set_domain("com.microsoft".into());
    let v = floats("v", &[1, 2], &[1e-4, 1e-4]);
    let y = result(&constants(vec![v, floats("s", &[2], &[1.0, 1.0])], vec![norm], 17));
    assert!(y.iter().all(|y| (y - 1.0).abs() < 1e-3), "{y:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let mut softmax = node("Softmax", &["x"], &["y"]);
    softmax.attribute.push(attr("axis", |a| {
        a.set_f(1.0);
        a.set_type(AttributeType::FLOAT);
    }));
    let mut gelu = node("Gelu", &["x"], &["y"]);
    gelu.attribute.push(attr("approximate", |a| {
        a.set_s(b"Tanh".to_vec().into());
        a.set_type(AttributeType::STRING);
    }));
    let pool = |kernel: &[i64], pads: &[i64], dilations: &[i64]| {
        let mut n = node("MaxPool", &["image"], &["y"]);
        n.attribute.push(ints("kernel_shape", kernel));
        match pads {
            [] => n.attribute.push(attr("auto_pad", |a| {
                a.set_s(b"SAME_UPPER".to_vec().into());
                a.set_type(AttributeType::STRING);
            })),
            pads => n.attribute.push(ints("pads", pads)),
        }
        n.attribute.push(ints("dilations", dilations));
        n
    };
    let image = |n: i64| vec![floats("image", &[1, 1, n], &vec![0.0; n as usize])];
    let mut split = node("Split", &["x"], &["y", "z"]);
    split.attribute.push(int("axis", 1));
    let cases = [
        ("attribute of another kind", constants(vec![], vec![softmax], 13)),
        ("unknown word", constants(vec![], vec![gelu], 20)),
        ("pool over nothing", constants(image(0), vec![pool(&[2], &[1, 1], &[1])], 13)),
        ("window beyond counting", constants(image(4), vec![pool(&[1 << 62], &[], &[4])], 13)),
        ("axis twice", {
            let axes = integers("axes", &[2], &[0, 0]);
            constants(vec![axes], vec![node("Unsqueeze", &["x", "axes"], &["y"])], 13)
        }),
        ("uneven split", constants(vec![], vec![split], 13)),
    ];
    let texts = cases.map(|(what, m)| format!("{what}:\n{}", import(&m, &[("batch", 2)].into()).unwrap_err()));
    insta::assert_snapshot!(texts.join("\n"));
}

/// A function does not see the names of the main graph, and neither do branches inside it.
#[test]
fn a_branch_in_a_function_may_use_the_name_of_an_initializer() {
    let branch = |op: &str| {
        let mut g = GraphProto::new();
        g.set_name(op.to_string());
        g.node = vec![node(op, &["a"], &["w"]), node("Identity", &["w"], &["out"])];
        g.output.push(info("out", 1, &[]));
        g
    };
    let mut choose = node("If", &["c"], &["r"]);
    for (name, op) in [("then_branch", "Neg"), ("else_branch", "Abs")] {
        choose.attribute.push(attr(name, |a| {
            a.g = Some(branch(op)).into();
            a.set_type(AttributeType::GRAPH);
        }));
    }
    let mut f = FunctionProto::new();
    f.set_name("f".into());
    f.set_domain("local".into());
    f.input = vec!["a".into()];
    f.output = vec!["r".into()];
    f.opset_import.push(opset("", 17));
    f.node = vec![
        node("Shape", &["a"], &["s"]),
        node("Equal", &["s", "s"], &["same"]),
        node("ReduceMin", &["numbers"], &["least"]),
        node("Cast", &["least"], &["c"]),
        choose,
    ];
    f.node[2] = node("ReduceMin", &["as_numbers"], &["least"]);
    let mut to_numbers = node("Cast", &["same"], &["as_numbers"]);
    to_numbers.attribute.push(int("to", 7));
    f.node[3].attribute.push(int("to", 9));
    f.node.insert(2, to_numbers);
    let mut m = model();
    m.opset_import.push(opset("local", 1));
    m.functions.push(f);
    let mut call = node("f", &["p"], &["y"]);
    call.set_domain("local".into());
    graph(&mut m).node[0].output[0] = "p".into();
    graph(&mut m).node.push(call);
    let g = import(&m, &[("batch", 2)].into()).unwrap();
    assert_eq!(run(&g), [-13.0, -16.0, -40.0, -52.0]);
}

fn parameters(g: &Graph) -> usize {
    g.states.len()
}

/// Layers that were copied from one start with equal weights and are trained apart; an embedding and the projection that
/// is its transpose are one weight.
#[test]
fn only_an_embedding_and_its_projection_are_tied() {
    let xs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
    let mut m = model();
    let g = graph(&mut m);
    g.initializer = ["w", "v"].map(|n| floats(n, &[3, 3], &xs)).to_vec();
    g.node = vec![node("MatMul", &["x", "w"], &["h"]), node("MatMul", &["h", "v"], &["y"])];
    assert_eq!(parameters(&import(&m, &[("batch", 2)].into()).unwrap()), 2);

    let mut turned = xs;
    for (i, x) in turned.iter_mut().enumerate() {
        *x = xs[i % 3 * 3 + i / 3];
    }
    let mut m = model();
    let g = graph(&mut m);
    g.initializer = vec![floats("table", &[3, 3], &xs), floats("w", &[3, 3], &turned)];
    g.input = vec![info("ids", 7, &["batch"])];
    g.node = vec![node("Gather", &["table", "ids"], &["h"]), node("MatMul", &["h", "w"], &["y"])];
    assert_eq!(parameters(&import(&m, &[("batch", 2)].into()).unwrap()), 1);
}

/// Three slices of a product, one of them empty, are three parts of the parameter.
#[test]
fn an_empty_part_of_a_parameter_is_a_part_of_its_own() {
    let mut m = model();
    let g = graph(&mut m);
    g.initializer.push(integers("sizes", &[3], &[0, 1, 1]));
    g.node[0].output[0] = "p".into();
    let mut split = node("Split", &["p", "sizes"], &["a", "b", "c"]);
    split.attribute.push(int("axis", 1));
    g.node.push(split);
    g.output = ["a", "b", "c"].map(|n| info(n, 1, &[])).to_vec();
    let g = import(&m, &[("batch", 2)].into()).unwrap();
    let dims: Vec<_> = g.outputs.iter().map(|o| g.ty(o.value).dims.clone()).collect();
    assert_eq!(dims, [[2, 0], [2, 1], [2, 1]]);
}
