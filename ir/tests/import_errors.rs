//! What is wrong with a model is said all at once, with the place, the reason and what to do; and what files may say in
//! several forms is read in each.

mod proto;

use autoshard_ir::onnx::proto::onnx::attribute_proto::AttributeType;
use autoshard_ir::onnx::proto::onnx::{FunctionProto, GraphProto, ModelProto, NodeProto};
use autoshard_ir::onnx::{Bindings, Model};
use protobuf::Message;

use proto::{attr, external, floats, graph, import, info, integers, model, node, opset, run};

fn error(change: impl Fn(&mut ModelProto, &mut Vec<NodeProto>)) -> String {
    let mut m = model();
    let mut nodes = std::mem::take(&mut m.graph.mut_or_insert_default().node);
    change(&mut m, &mut nodes);
    m.graph.mut_or_insert_default().node = nodes;
    import(&m, &[("batch", 2)].into()).expect_err("an error")
}

#[test]
fn malformed_files() {
    let open = |bytes: &[u8]| Model::from_bytes("m.onnx", bytes.to_vec()).expect_err("an error").to_string();
    let good = model().write_to_bytes().unwrap();
    let texts = [
        ("not ONNX", open(b"<!doctype html>")),
        ("cut off", open(&good[..good.len() - 5])),
        ("no graph", open(&[8, 8])),
        ("no opset", error(|m, _| m.opset_import.clear())),
        ("defined twice", error(|_, n| n.push(n[0].clone()))),
        (
            "initializer twice",
            error(|m, _| {
                let w = graph(m).initializer[0].clone();
                graph(m).initializer.push(w);
            }),
        ),
        (
            "undefined names",
            error(|_, n| {
                n[0].input[0] = "gone".into();
                n.push(node("Relu", &["lost"], &["z"]));
            }),
        ),
        (
            "cycle",
            error(|_, n| {
                n.push(node("Add", &["a", "x"], &["b"]));
                n.push(node("Add", &["b", "x"], &["a"]));
            }),
        ),
        ("output", error(|m, _| graph(m).output.push(info("nothing", 1, &[])))),
        ("no outputs", error(|m, _| graph(m).output.clear())),
        ("negative dim of an input", error(|m, _| graph(m).input[0] = info("x", 1, &["-7"]))),
        ("element type of an input", error(|m, _| graph(m).input[0] = info("x", 8, &["batch"]))),
        ("negative size", error(|m, _| graph(m).initializer[0].dims = vec![-3, -2])),
        ("absurd sizes", error(|m, _| graph(m).initializer[0].dims = vec![1 << 40, 1 << 40, 0])),
        ("elements missing", error(|m, _| graph(m).initializer[0].float_data.truncate(2))),
        (
            "bytes missing",
            error(|m, _| {
                graph(m).initializer[0].float_data.clear();
                graph(m).initializer[0].set_raw_data(vec![0; 23].into());
            }),
        ),
        ("strings", error(|m, _| graph(m).initializer[0].set_data_type(8))),
        (
            "outside the folder",
            error(|m, _| {
                graph(m).initializer[0] = external("w", &[3, 2], &[("location", "../w.bin")]);
            }),
        ),
        (
            "external length",
            error(|m, _| {
                graph(m).initializer[0] = external("w", &[3, 2], &[("location", "w.bin"), ("length", "7")]);
            }),
        ),
        (
            "external offset",
            error(|m, _| {
                graph(m).initializer[0] =
                    external("w", &[3, 2], &[("location", "w.bin"), ("offset", "18446744073709551615")]);
            }),
        ),
    ];
    insta::assert_snapshot!(
        texts.map(|(what, text)| format!("{what}:\n    {}", text.replace('\n', "\n    "))).join("\n")
    );
}

#[test]
fn everything_unsupported_is_listed_at_once() {
    let text = error(|m, n| {
        m.opset_import.push(opset("com.acme", 3));
        for i in 0..7 {
            let mut fancy = node("Fancy", &["x"], &[&format!("f{i}")]);
            fancy.set_domain("com.acme".into());
            n.push(fancy);
        }
        n.push(node("Loop", &["x"], &["l"]));
        n.push(node("Nonsense", &["x"], &["q"]));
    });
    insta::assert_snapshot!(text);
}

#[test]
fn nodes_that_do_not_fit_are_listed_without_what_follows_from_them() {
    let text = error(|_, n| {
        n[0].input[1] = "x".into();
        n.push(node("Relu", &["y"], &["after"]));
        n.push(node("Reshape", &["x", "x"], &["r"]));
        n.push(node("Concat", &["x"], &["c"]));
    });
    insta::assert_snapshot!(text);
}

#[test]
fn bindings_are_checked_all_at_once() {
    let mut m = model();
    graph(&mut m).input.push(info("mask", 1, &["batch", "past + sequence", "?"]));
    graph(&mut m).input.push(info("half", 1, &["sequence/2"]));
    graph(&mut m).input.push(info("huge", 1, &["batch", "281474976710656"]));
    let text = import(&m, &[("batch", 2), ("sequence", 3), ("sequenze", 8)].into()).unwrap_err();
    insta::assert_snapshot!(text);
    let bytes = m.write_to_bytes().unwrap();
    let model = Model::from_bytes("m.onnx", bytes).unwrap();
    insta::assert_snapshot!(format!("{:#?}\nbatch: {:?}", model.symbols(), model.batch_symbol()));
    let mut fixed = model_of_fixed_sizes();
    graph(&mut fixed).set_name("fixed".into());
    insta::assert_snapshot!(import(&fixed, &[("batch", 2)].into()).unwrap_err());
}

fn model_of_fixed_sizes() -> ModelProto {
    let mut m = model();
    graph(&mut m).input[0] = info("x", 1, &["2", "3"]);
    m
}

#[test]
fn a_file_that_is_not_there_or_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path| {
        Model::open(path).unwrap_err().to_string().replace(&dir.path().display().to_string(), "DIR")
    };
    let empty = dir.path().join("empty.onnx");
    std::fs::write(&empty, []).unwrap();
    insta::assert_snapshot!([open(&dir.path().join("absent.onnx")), open(dir.path()), open(&empty)].join("\n"));
}

const PRODUCT: [f32; 4] = [13.0, 16.0, 40.0, 52.0];

#[test]
fn weights_in_every_place_are_read() {
    let xs = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let bytes: Vec<u8> = xs.iter().flat_map(|x| x.to_le_bytes()).collect();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("w.bin"), [&[9; 5][..], &bytes].concat()).unwrap();
    let mut raw = floats("w", &[3, 2], &[]);
    raw.set_raw_data(bytes.into());
    let places = [("location", "w.bin"), ("offset", "5"), ("length", "24")];
    for t in [floats("w", &[3, 2], &xs), raw, external("w", &[3, 2], &places)] {
        let mut m = model();
        graph(&mut m).initializer[0] = t;
        let path = dir.path().join("m.onnx");
        std::fs::write(&path, m.write_to_bytes().unwrap()).unwrap();
        let g = Model::open(&path).unwrap().instantiate(&[("batch", 2)].into()).unwrap();
        assert_eq!(g.states.len(), 1);
        assert_eq!(run(&g), PRODUCT);
    }
}

#[test]
fn nodes_in_any_order_and_initializers_listed_as_inputs() {
    let mut m = model();
    let g = graph(&mut m);
    g.node[0].output[0] = "p".into();
    g.node.insert(0, node("Identity", &["p"], &["y"]));
    g.input.push(info("w", 1, &["3", "2"]));
    let g = import(&m, &[("batch", 2)].into()).unwrap();
    assert_eq!(g.inputs.len(), 1);
    assert_eq!(run(&g), PRODUCT);
}

#[test]
fn local_functions_are_unfolded() {
    let mut m = model();
    m.opset_import.push(opset("local", 1));
    // f(a, b, absent) = max(a @ b, bound), with the attribute `low` of the call; g calls f.
    let mut f = FunctionProto::new();
    f.set_name("f".into());
    f.set_domain("local".into());
    f.input = vec!["a".into(), "b".into(), "absent".into()];
    f.output = vec!["r".into()];
    f.attribute.push("low".into());
    f.opset_import.push(opset("", 17));
    let mut low = node("Constant", &[], &["bound"]);
    low.attribute.push(attr("value_float", |a| {
        a.set_ref_attr_name("low".into());
        a.set_type(AttributeType::FLOAT);
    }));
    f.node = vec![low, node("MatMul", &["a", "b"], &["p"]), node("Max", &["p", "bound"], &["r"])];
    let mut call = node("f", &["u", "v"], &["w2"]);
    call.set_domain("local".into());
    call.attribute.push(attr("low", |a| {
        a.set_f(15.0);
        a.set_type(AttributeType::FLOAT);
    }));
    let mut g = FunctionProto::new();
    g.set_name("g".into());
    g.set_domain("local".into());
    g.input = vec!["u".into(), "v".into()];
    g.output = vec!["w2".into()];
    g.opset_import = vec![opset("", 17), opset("local", 1)];
    g.node.push(call);
    m.functions = vec![f, g];
    let mut outer = node("g", &["x", "w"], &["y"]);
    outer.set_domain("local".into());
    graph(&mut m).node = vec![outer];
    let found = import(&m, &[("batch", 2)].into()).unwrap();
    assert_eq!(run(&found), [15.0, 16.0, 40.0, 52.0]);
    assert!(found.nodes.iter().all(|n| n.name.starts_with("g_y/f_w2/")), "{:?}", found.nodes[0].name);

    // A function that calls itself has an end.
    m.functions[1].node[0].set_op_type("g".into());
    insta::assert_snapshot!(import(&m, &[("batch", 2)].into()).unwrap_err());
}

fn branches(condition: &str) -> ModelProto {
    let mut m = model();
    let branch = |op: &str| {
        let mut g = GraphProto::new();
        g.set_name(op.to_string());
        g.initializer.push(floats("half", &[], &[0.5]));
        g.node.push(node(op, &["p", "half"], &["out"]));
        g.output.push(info("out", 1, &[]));
        g
    };
    let g = graph(&mut m);
    g.node[0].output[0] = "p".into();
    g.initializer.push(integers("two", &[], &[2]));
    g.node.push(node("Shape", &["x"], &["shape"]));
    g.node.push(node("Size", &["shape"], &["rank"]));
    g.node.push(node("Equal", &["rank", "two"], &["is_matrix"]));
    g.node.push(node("ReduceMax", &["x"], &["top"]));
    g.node.push(node("Greater", &["top", "top"], &["unknown"]));
    let mut choose = node("If", &[condition], &["y"]);
    for (name, op) in [("then_branch", "Mul"), ("else_branch", "Sub")] {
        choose.attribute.push(attr(name, |a| {
            a.g = Some(branch(op)).into();
            a.set_type(AttributeType::GRAPH);
        }));
    }
    g.node.push(choose);
    m
}

#[test]
fn a_branch_that_sizes_decide_is_taken() {
    let found = import(&branches("is_matrix"), &[("batch", 2)].into()).unwrap();
    assert_eq!(run(&found), PRODUCT.map(|x| x / 2.0));
    insta::assert_snapshot!(import(&branches("unknown"), &[("batch", 2)].into()).unwrap_err());
}

#[test]
fn an_attribute_that_no_rule_knows_is_not_ignored() {
    let mut m = model();
    let mut a = attr("left_window_size", |a| a.set_i(3));
    a.type_ = Some(AttributeType::INT.into());
    m.graph.mut_or_insert_default().node[0].attribute.push(a);
    insta::assert_snapshot!(import(&m, &Bindings::from([("batch", 2)])).expect_err("what it asks for is not done"));
}
