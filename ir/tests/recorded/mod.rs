//! Recorded tensors (`.npz`) and models of the tests.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use autoshard_ir::onnx::{Bindings, Dim, Model};
use autoshard_ir::{DType, Graph, Tensor, Type, interp};

/// The models that the tests need.
pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models")
}

/// More models, where a checkout has them beside it.
pub fn more_models(folder: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/models").join(folder);
    path.is_dir().then_some(path)
}

/// The files of a folder with an ending, sorted.
pub fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder of models");
    let mut found: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
    found.retain(|p| p.to_string_lossy().ends_with(ending));
    found.sort();
    found
}

/// The tensors of an `.npz` file.
pub fn npz(path: &Path) -> BTreeMap<String, Tensor> {
    let mut archive = zip::ZipArchive::new(std::fs::File::open(path).expect("the .npz file")).expect("an archive");
    (0..archive.len())
        .map(|i| {
            let mut entry = archive.by_index(i).expect("an entry");
            let name = entry.name().trim_end_matches(".npy").to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("its bytes");
            (name, npy(&bytes))
        })
        .collect()
}

/// An array in NumPy's format: a magic number, the version, the length of a header, the header (a printed dictionary), the
/// elements.
fn npy(bytes: &[u8]) -> Tensor {
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00", "version 1 of the format");
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..10 + length]).expect("text");
    let after = |key: &str| header.split_once(key).expect("the key").1;
    assert!(after("'fortran_order': ").starts_with("False"));
    let dtype = match after("'descr': '").split('\'').next() {
        Some("<f8") => DType::F64,
        Some("<f4") => DType::F32,
        Some("<f2") => DType::F16,
        Some("<i8") => DType::I64,
        Some("<i4") => DType::I32,
        Some("|i1") => DType::I8,
        Some("|u1") => DType::U8,
        Some("|b1") => DType::Bool,
        other => panic!("element type {other:?}"),
    };
    let shape = after("'shape': (").split(')').next().expect("a shape");
    let dims: Vec<usize> = shape.split(',').filter_map(|d| d.trim().parse().ok()).collect();
    Tensor::from_bytes(Type::new(dtype, dims), &bytes[10 + length..]).expect("an array of its length")
}

/// The sizes that a set of recorded inputs has.
pub fn bindings(model: &Model, arrays: &BTreeMap<String, Tensor>, set: &str) -> Bindings {
    let mut found = BTreeMap::new();
    for port in &model.signature().inputs {
        let Some(t) = arrays.get(&format!("{set}/{}", port.name)) else { continue };
        for (dim, &size) in port.dims.iter().flatten().zip(t.dims()) {
            if let Dim::Symbol(name) = dim {
                found.insert(name.clone(), size);
            }
        }
    }
    Bindings(found)
}

/// The states' first contents.
pub fn states(graph: &Graph) -> Vec<Arc<Tensor>> {
    let read = |s: &autoshard_ir::graph::State| match &s.init {
        autoshard_ir::graph::Init::Weight(w) => {
            let whole: Vec<_> = w.dims().iter().map(|&d| 0..d).collect();
            Arc::new(w.read(&whole).expect("weights"))
        }
        autoshard_ir::graph::Init::Zeros => Arc::new(Tensor::zeros(graph.ty(s.read).clone())),
    };
    graph.states.iter().map(read).collect()
}

/// Runs a graph on a set of recorded inputs.
pub fn run(graph: &Graph, arrays: &BTreeMap<String, Tensor>, set: &str) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|i| arrays[&format!("{set}/{}", i.name)].clone()).collect();
    interp::run(graph, &inputs, &states(graph)).unwrap_or_else(|e| panic!("{e}")).outputs
}

/// How far a tensor is from a reference: norm of the difference over norm of the reference, and largest difference over
/// largest element.
pub fn distance(found: &Tensor, expected: &Tensor) -> (f64, f64) {
    assert_eq!(found.dims(), expected.dims(), "sizes");
    let x = autoshard_ir::convert::to_f64(found.dtype(), found.bytes());
    let y = autoshard_ir::convert::to_f64(expected.dtype(), expected.bytes());
    let norm = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>().sqrt();
    let largest = |xs: &mut dyn Iterator<Item = f64>| xs.fold(0.0f64, |m, x| m.max(x.abs()));
    let mut differences = x.iter().zip(&y).map(|(a, b)| if a == b || (a.is_nan() && b.is_nan()) { 0.0 } else { a - b });
    let difference = norm(&mut differences.clone());
    let worst = largest(&mut differences);
    let at_least = f64::MIN_POSITIVE;
    (
        difference / norm(&mut y.iter().copied().filter(|y| y.is_finite())).max(at_least),
        worst / largest(&mut y.iter().copied()).max(at_least),
    )
}
