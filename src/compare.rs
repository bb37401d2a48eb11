//! Comparing a sharded run with the unsharded model: the check behind `verify`.
//!
//! Both run in f32, whatever the plan's compute precision: what is checked is the plan's splitting, to rounding, and half
//! precision would hide faults of the size of its own rounding.

use std::sync::Arc;

use autoshard_ir::convert;
use autoshard_ir::graph::{Def, Graph};
use autoshard_ir::op::{Attr, Op};
use autoshard_ir::train::{is_noise, rms};
use autoshard_ir::{DType, Tensor};

/// A graph with half floats widened to f32, node by node: ids stay, so an assignment of the one is one of the other.
pub fn widened(graph: &Graph) -> Graph {
    let half = |d: DType| matches!(d, DType::F16 | DType::Bf16);
    let mut g = graph.clone();
    for v in &mut g.values {
        if half(v.ty.dtype) {
            v.ty.dtype = DType::F32;
            if let Def::Const(t) = &v.def {
                v.def = Def::Const(Arc::new(convert::cast(t, DType::F32)));
            }
        }
    }
    for n in &mut g.nodes {
        n.op = n.op.attrs().iter().fold(Op::new(n.op.def), |new, (name, attr)| match attr {
            Attr::DType(d) if half(*d) => new.with(name, Attr::DType(DType::F32)),
            other => new.with(name, other.clone()),
        });
    }
    g
}

/// How far two tensors are apart, relative to the norm of the second: 0 is equal; infinite for types that differ, for
/// numbers that are not finite in one of them alone, and for anything else than zeros where the second is all zeros.
pub fn distance(got: &Tensor, want: &Tensor) -> f64 {
    if got.ty() != want.ty() {
        return f64::INFINITY;
    }
    let (a, b) = (convert::to_f64(got.dtype(), got.bytes()), convert::to_f64(want.dtype(), want.bytes()));
    let (mut off, mut norm) = (0.0, 0.0);
    for (x, y) in a.iter().zip(&b) {
        if x == y || (x.is_nan() && y.is_nan()) {
            norm += if y.is_finite() { y * y } else { 0.0 };
            continue;
        }
        off += (x - y) * (x - y);
        norm += y * y;
    }
    if off == 0.0 {
        0.0
    } else if off.is_finite() && norm > 0.0 {
        (off / norm).sqrt()
    } else {
        f64::INFINITY
    }
}

/// One line of a comparison.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Line {
    /// `output`, `gradient`, `parameter`, `optimizer`.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// See [`distance`]; `null` in JSON where it is infinite.
    pub error: f64,
    /// Its gradient is pure rounding noise (see `autoshard_ir::train::is_noise`), which Adam turns into full steps.
    pub noise: bool,
}

/// The largest root mean square of some gradients, for [`is_noise`].
pub fn largest<'a>(gradients: impl Iterator<Item = &'a Tensor>) -> f64 {
    gradients.map(rms).fold(0.0, f64::max)
}

/// Whether a gradient is noise.
pub fn noise(gradient: &Tensor, largest: f64) -> bool {
    is_noise(rms(gradient), largest)
}
