//! `RotaryEmbedding`: pairs of entries of the last dim turned by an angle each (Su et al., arXiv:2104.09864).
//!
//! Operands: `x[.., d]`, and `cos`, `sin`, which have the rank and last dim of `x` and broadcast to it. Entry `i` of the first
//! half of the last dim and entry `i` of the second are a pair: `y = x cos + turn(x) sin` with `turn(a | b) = (-b | a)`;
//! where `interleaved`, neighbours `2i` and `2i + 1` are. With `transposed`, the transpose of that linear map: its gradient.
//!
//! The last dim stays whole.

use crate::builder::Builder;
use crate::factor::FactorRule;
use crate::graph::ValueId;
use crate::op::{AttrKind, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::real::{Real, by_float, expect_float, expect_operands};
use crate::ops::support::{Loops, broadcast_strides, never};
use crate::tensor::{Type, View, ViewMut};

/// Rotary position embedding.
pub static ROTARY_EMBEDDING: OpDef = OpDef {
    name: "RotaryEmbedding",
    doc: "pairs of entries of the last dim turned by angles given as cos and sin",
    attrs: &[("interleaved", AttrKind::Bool), ("transposed", AttrKind::Bool)],
    onnx: &[],
    infer,
    factors,
    work: |_, i, o| Work::memory(i, o, 3.0),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

fn op(interleaved: bool, transposed: bool) -> Op {
    Op::new(&ROTARY_EMBEDDING).flag("interleaved", interleaved).flag("transposed", transposed)
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[3])?;
    let x = &inputs[0];
    expect_float(op.name(), "x", x)?;
    let size = x.dims.last().copied().unwrap_or(1);
    if size % 2 != 0 {
        return Err(OpError(format!("RotaryEmbedding of {x}: its last dim must be even")));
    }
    for (what, t) in [("cos", &inputs[1]), ("sin", &inputs[2])] {
        let fits = t.dtype == x.dtype
            && t.rank() == x.rank()
            && t.dims.last() == x.dims.last()
            && t.dims.iter().zip(&x.dims).all(|(&a, &b)| a == 1 || a == b);
        if !fits {
            return Err(OpError(format!("RotaryEmbedding: {what} {t} must broadcast to {x}, with its last dim")));
        }
    }
    Ok(vec![x.clone()])
}

fn factors(_: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let mut rule = FactorRule::elementwise(inputs, outputs);
    // The pairs of the last dim belong together.
    let last = inputs[0].rank() - 1;
    if let Some(whole) = rule.outputs[0][last] {
        for slot in rule.inputs.iter_mut().chain(&mut rule.outputs).flatten() {
            match slot {
                Some(f) if *f == whole => *slot = None,
                Some(f) if *f > whole => f.0 -= 1,
                _ => {}
            }
        }
        rule.factors.remove(whole.0 as usize);
    }
    rule.linear_in([0])
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None; 3]) };
    let [x, cos, sin] = [cx.inputs[0], cx.inputs[1], cx.inputs[2]];
    let (interleaved, transposed) = (cx.op.get_flag("interleaved"), cx.op.get_flag("transposed"));
    let mut grads = vec![None; 3];
    if cx.wanted[0] {
        grads[0] = Some(cx.b.emit1(op(interleaved, !transposed), &[dy, cos, sin])?);
    }
    if cx.wanted[1] {
        let product = cx.b.mul(dy, x)?;
        grads[1] = Some(sum_to(cx.b, product, cos)?);
    }
    if cx.wanted[2] {
        // `dy . turn(x) sin`, or of the transpose `dy . turn'(x sin)`, by the turn alone.
        let dims = cx.b.dims(x);
        let dtype = cx.b.ty(x).dtype;
        let (zero, one) = (cx.b.scalar(dtype, 0.0), cx.b.scalar(dtype, 1.0));
        let mut line = vec![1; dims.len()];
        line[dims.len() - 1] = dims[dims.len() - 1];
        let (zeros, ones) = (cx.b.expand(zero, &line)?, cx.b.expand(one, &line)?);
        let (turned, other) = if transposed { (dy, x) } else { (x, dy) };
        let turned = cx.b.emit1(op(interleaved, false), &[turned, zeros, ones])?;
        let product = cx.b.mul(turned, other)?;
        grads[2] = Some(sum_to(cx.b, product, sin)?);
    }
    Ok(grads)
}

/// Summed over the dims along which `like` is broadcast.
fn sum_to(b: &mut Builder, x: ValueId, like: ValueId) -> Result<ValueId, OpError> {
    let (from, to) = (b.dims(x), b.dims(like));
    let over: Vec<usize> = (0..from.len()).filter(|&d| to[d] == 1 && from[d] != 1).collect();
    if over.is_empty() { Ok(x) } else { b.reduce_sum(x, &over, true) }
}

impl Builder {
    /// Pairs of entries of the last dim of `x` turned; `cos` and `sin` broadcast to it.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn rotary_embedding(
        &mut self,
        x: ValueId,
        [cos, sin]: [ValueId; 2],
        interleaved: bool,
    ) -> Result<ValueId, OpError> {
        self.emit1(op(interleaved, false), &[x, cos, sin])
    }
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    by_float!(op, inputs[0].dtype(), T => { turn::<T>(op, inputs, &mut outputs[0]); Ok(()) })
}

fn turn<T: Real>(op: &Op, inputs: &[View<'_>], out: &mut ViewMut<'_>) {
    let (interleaved, transposed) = (op.get_flag("interleaved"), op.get_flag("transposed"));
    let dims = inputs[0].dims().to_vec();
    let Some((&size, outer)) = dims.split_last() else { return };
    let half = size / 2;
    let [x, cos, sin] = [0, 1, 2].map(|i| inputs[i].as_slice::<T>());
    let y = out.as_mut_slice::<T>();
    let rows = |i: usize| broadcast_strides(&inputs[i].dims()[..outer.len()], outer);
    // Strides count rows of the last dim.
    let strides = [rows(0), rows(1), rows(2)];
    let mut row = |[at, c, s]: [usize; 3]| {
        let (x, y) = (&x[at * size..][..size], &mut y[at * size..][..size]);
        let (cos, sin) = (&cos[c * size..][..size], &sin[s * size..][..size]);
        for i in 0..half {
            let (i, j) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (a, b) = (x[i], x[j]);
            // The transpose reads the sine of the result it comes from, with the other sign.
            if transposed {
                y[i] = a * cos[i] + b * sin[j];
                y[j] = b * cos[j] - a * sin[i];
            } else {
                y[i] = a * cos[i] - b * sin[i];
                y[j] = b * cos[j] + a * sin[j];
            }
        }
    };
    let count = outer.iter().product::<usize>();
    if count == 0 || size == 0 {
        return;
    }
    let loops = Loops::new(outer, [&strides[0], &strides[1], &strides[2]]);
    loops.rows(|first| {
        for i in 0..loops.row {
            row(std::array::from_fn(|k| first[k] + i * loops.step[k] as usize));
        }
    });
}

fn samples() -> Vec<Sample> {
    let case = |x: &[usize], angles: &[usize], interleaved: bool, transposed: bool| Sample {
        op: op(interleaved, transposed),
        inputs: vec![SampleInput::f32(x), SampleInput::f32(angles), SampleInput::f32(angles)],
    };
    vec![
        case(&[2, 4, 6, 4], &[1, 1, 6, 4], false, false),
        case(&[2, 4, 6, 4], &[2, 1, 6, 4], true, false),
        case(&[2, 4, 2, 6], &[1, 4, 1, 6], false, true),
        case(&[2, 4, 2, 4], &[1, 4, 1, 4], true, true),
        case(&[4, 6], &[4, 6], false, false),
    ]
}
