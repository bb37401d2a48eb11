//! ONNX files made by hand.

// Each test uses a part.
#![allow(dead_code)]

use autoshard_ir::onnx::proto::onnx::tensor_proto::DataLocation;
use autoshard_ir::onnx::proto::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, tensor_shape_proto, type_proto,
};
use autoshard_ir::onnx::{Bindings, Model};
use autoshard_ir::{Graph, Tensor, interp};
use protobuf::Message;

pub fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    let mut o = OperatorSetIdProto::new();
    o.set_domain(domain.to_string());
    o.set_version(version);
    o
}

/// `dims`: numbers are sizes, `?` an unnamed dim, all else symbols.
pub fn info(name: &str, elem: i32, dims: &[&str]) -> ValueInfoProto {
    let mut shape = TensorShapeProto::new();
    for d in dims {
        let mut dim = tensor_shape_proto::Dimension::new();
        match d.parse() {
            Ok(n) => dim.set_dim_value(n),
            Err(_) if *d == "?" => {}
            Err(_) => dim.set_dim_param((*d).to_string()),
        }
        shape.dim.push(dim);
    }
    let mut tensor = type_proto::Tensor::new();
    tensor.set_elem_type(elem);
    tensor.shape = Some(shape).into();
    let mut ty = TypeProto::new();
    ty.set_tensor_type(tensor);
    let mut v = ValueInfoProto::new();
    v.set_name(name.to_string());
    v.type_ = Some(ty).into();
    v
}

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let mut n = NodeProto::new();
    n.set_name(format!("{}_{}", op.to_lowercase(), outputs.first().unwrap_or(&"")));
    n.set_op_type(op.to_string());
    n.input = inputs.iter().map(ToString::to_string).collect();
    n.output = outputs.iter().map(ToString::to_string).collect();
    n
}

pub fn floats(name: &str, dims: &[i64], xs: &[f32]) -> TensorProto {
    let mut t = TensorProto::new();
    t.set_name(name.to_string());
    t.dims = dims.to_vec();
    t.set_data_type(1);
    t.float_data = xs.to_vec();
    t
}

pub fn integers(name: &str, dims: &[i64], xs: &[i64]) -> TensorProto {
    let mut t = TensorProto::new();
    t.set_name(name.to_string());
    t.dims = dims.to_vec();
    t.set_data_type(7);
    t.int64_data = xs.to_vec();
    t
}

pub fn external(name: &str, dims: &[i64], entries: &[(&str, &str)]) -> TensorProto {
    let mut t = floats(name, dims, &[]);
    t.data_location = Some(DataLocation::EXTERNAL.into());
    for (k, v) in entries {
        let mut e = StringStringEntryProto::new();
        e.set_key(k.to_string());
        e.set_value(v.to_string());
        t.external_data.push(e);
    }
    t
}

pub fn attr(name: &str, set: impl Fn(&mut AttributeProto)) -> AttributeProto {
    let mut a = AttributeProto::new();
    a.set_name(name.to_string());
    set(&mut a);
    a
}

/// `y = x @ w` with `x[batch, 3]`, `w[3, 2]`.
pub fn model() -> ModelProto {
    let mut g = GraphProto::new();
    g.set_name("g".to_string());
    g.input.push(info("x", 1, &["batch", "3"]));
    g.output.push(info("y", 1, &["batch", "2"]));
    g.initializer.push(floats("w", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    g.node.push(node("MatMul", &["x", "w"], &["y"]));
    let mut m = ModelProto::new();
    m.set_ir_version(8);
    m.opset_import.push(opset("", 17));
    m.graph = Some(g).into();
    m
}

pub fn import(m: &ModelProto, bindings: &Bindings) -> Result<Graph, String> {
    let bytes = m.write_to_bytes().expect("a message");
    let model = Model::from_bytes("m.onnx", bytes).map_err(|e| e.to_string())?;
    model.instantiate(bindings).map_err(|e| e.to_string())
}

pub fn graph(m: &mut ModelProto) -> &mut GraphProto {
    m.graph.mut_or_insert_default()
}

/// The weights of a graph, in the order of its states.
pub fn weights(g: &Graph) -> Vec<std::sync::Arc<Tensor>> {
    g.states
        .iter()
        .map(|s| match &s.init {
            autoshard_ir::graph::Init::Weight(w) => {
                std::sync::Arc::new(w.read(&w.dims().iter().map(|&d| 0..d).collect::<Vec<_>>()).unwrap())
            }
            autoshard_ir::graph::Init::Zeros => unreachable!("only weights here"),
        })
        .collect()
}

/// What a graph with one input `x[2, 3]` gives for 0, 1, 2, ...
pub fn run(g: &Graph) -> Vec<f32> {
    let inputs: Vec<Tensor> = g
        .inputs
        .iter()
        .map(|i| {
            Tensor::f32(g.ty(i.value).dims.clone(), &(0..g.ty(i.value).numel()).map(|x| x as f32).collect::<Vec<_>>())
        })
        .collect();
    let states = weights(g);
    interp::run(g, &inputs, &states).unwrap().outputs[0].as_slice::<f32>().to_vec()
}
