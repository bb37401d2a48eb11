//! Which fused forms are found in the models: the table of snapshots says at a glance what a change of rules does.
//!
//! What the forms compute is checked elsewhere: against ONNX Runtime in `core_models`, by spelling in `src/fuse/tests.rs`.

mod recorded;

use std::collections::BTreeMap;
use std::fmt::Write;

use autoshard_ir::onnx::{Bindings, Model};
use autoshard_ir::{DType, Graph};
use recorded::{bindings, files, models, more_models, npz};

/// What fused forms are made of. None of these should be left where a form was meant.
const PARTS: [&str; 8] = ["Erf", "Exp", "IsNaN", "Neg", "Reciprocal", "Sigmoid", "Softmax", "Sqrt"];
const FORMS: [&str; 7] = ["Attention", "ExpertMatMul", "Gelu", "LayerNorm", "RmsNorm", "RotaryEmbedding", "Silu"];

fn count(graph: &Graph, what: impl Fn(&autoshard_ir::Op) -> bool) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for n in graph.nodes.iter().filter(|n| what(&n.op)) {
        // Scales and epsilons are the model's.
        let shown = match (n.op.name(), n.op.to_string().split_once(", ")) {
            ("Attention", Some((_, settings))) => format!("Attention{{{settings}"),
            ("Gelu", _) => n.op.to_string(),
            (name, _) => name.to_string(),
        };
        *counts.entry(shown).or_insert(0) += 1;
    }
    counts
}

#[test]
fn forms_of_the_core_models() {
    let mut table = String::new();
    for path in files(&models(), ".onnx") {
        let model = Model::open(&path).expect("a core model");
        let graph = model.instantiate(&bindings(&model, &npz(&path.with_extension("npz")), "in0")).expect("imports");
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let _ = writeln!(table, "{name}: {} nodes", graph.nodes.len());
        for (form, n) in count(&graph, |op| FORMS.contains(&op.name())) {
            let _ = writeln!(table, "  {n} {form}");
        }
        for (part, n) in count(&graph, |op| PARTS.contains(&op.name())) {
            let _ = writeln!(table, "  left: {n} {part}");
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn no_mask_of_all_pairs_is_made_for_long_sequences() {
    let Some(large) = more_models("large") else { return };
    let sizes = Bindings::from([("batch", 1), ("sequence", 8192)]);
    for name in ["llama3-8b-loss", "llama3-8b-loss-opset23", "mixtral-8x7b-loss"] {
        let model = Model::open(large.join(format!("{name}.onnx"))).expect("a model");
        let graph = model.instantiate(&sizes).expect("imports");
        let wide = |v: &&autoshard_ir::graph::Value| {
            v.ty.dtype != DType::I64 && v.ty.dims.iter().filter(|d| **d == 8192).count() > 1
        };
        let found: Vec<String> = graph.values.iter().filter(wide).map(|v| format!("{} {}", v.name, v.ty)).collect();
        assert!(found.is_empty(), "{name}: {found:?}");
    }
}
