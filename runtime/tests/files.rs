//! Files of tensors: what NumPy wrote, what we wrote, and what is not one.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use autoshard_ir::{DType, Tensor, Type, convert};
use autoshard_runtime::tensors;
use common::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

#[test]
fn reads_what_numpy_writes() {
    let t = tensors::read(&data("numpy.npz")).unwrap();
    let x = Tensor::f32([2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(t["in0/x"], x);
    assert_eq!(t["fortran"], x);
    assert_eq!(t["i"], Tensor::i64([1, 2], &[1, -2]));
    assert_eq!(t["b"], Tensor::from_slice(DType::Bool, [2], &[1u8, 0]));
    assert_eq!(convert::to_f64(DType::F16, t["h"].bytes()), [1.5]);
    assert!(t["h"].dims().is_empty());
    assert_eq!(t["empty"].ty(), &Type::new(DType::F64, [0, 3]));
    assert_eq!(t.len(), 6);
}

#[test]
fn round_trips_every_element_type() {
    let dir = tempfile::tempdir().unwrap();
    let all: BTreeMap<String, Tensor> = DType::ALL
        .into_iter()
        .flat_map(|d| [vec![], vec![3], vec![2, 0], vec![2, 3, 4]].map(|dims| Type::new(d, dims)))
        .map(|ty| (format!("{ty}/x"), numbers(&ty, 1)))
        .collect();
    for name in ["x.npz", "x.safetensors"] {
        let path = dir.path().join(name);
        tensors::write(&path, &all).unwrap();
        let back = tensors::read(&path).unwrap();
        for (name, t) in &all {
            // NumPy has no bfloat16.
            let widened = t.dtype() == DType::Bf16 && path.extension().unwrap() == "npz";
            let want = if widened { convert::cast(t, DType::F32) } else { t.clone() };
            assert_eq!(back[name], want, "{name}");
        }
        assert_eq!(back.len(), all.len());
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing temporary is left");
}

#[test]
fn bad_files_give_errors_that_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let good = std::fs::read(data("numpy.npz")).unwrap();
    let cut = dir.path().join("cut.npz");
    std::fs::write(&cut, &good[..good.len() / 2]).unwrap();
    for (path, part) in [
        (dir.path().join("absent.npz"), "absent.npz: No such file"),
        (dir.path().join("x.txt"), "ends in .npz or .safetensors"),
        (cut, "is not an .npz file"),
        (data("numpy-bad.npz"), "`s`: has elements of NumPy type <U4, which is not known"),
        (data("numpy-big-endian.npz"), "`s`: has elements of NumPy type >f4, which is not known"),
    ] {
        let e = tensors::read(&path).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
    }
    // Any one byte changed, anywhere: an error or tensors, never a panic.
    for i in 0..good.len() {
        let mut bytes = good.clone();
        bytes[i] ^= 0x5a;
        let path = dir.path().join("changed.npz");
        std::fs::write(&path, bytes).unwrap();
        let _ = tensors::read(&path);
    }
    let nowhere = dir.path().join("no/such/x.npz");
    assert!(tensors::write(&nowhere, &BTreeMap::new()).unwrap_err().to_string().contains("x.npz"));
}
