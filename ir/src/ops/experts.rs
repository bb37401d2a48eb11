//! `ExpertMatMul`: each row times the matrix of the expert it is routed to, and its gradient by the matrices.
//!
//! Operands: `x[.., k]`, `w[experts, n, k]` (where `turned`, `w[experts, k, n]`) and `expert[..]`, an index per row. Result
//! `[.., n]`. Exporters write it as a gather of whole matrices per row and a product with them; here rows are sorted by expert,
//! and each matrix is read once.
//!
//! Rows, `n`, `k` and the experts can be split; a rank gives zeros for the rows of experts that it does not hold, so results
//! of split experts are partial sums.

use crate::factor::{FactorRule, ReduceKind};
use crate::graph::ValueId;
use crate::op::{AttrKind, Family, GradCx, Gradient, KernelError, Op, OpDef, OpError, Sample, SampleInput, Work};
use crate::ops::gather::{locate, read_indices};
use crate::ops::real::{Real, by_float, expect_float, expect_index, expect_operands};
use crate::ops::rules::RuleBuilder;
use crate::ops::support::never;
use crate::tensor::{Type, View, ViewMut};

/// Rows times the matrices of their experts.
pub static EXPERT_MAT_MUL: OpDef = OpDef {
    name: "ExpertMatMul",
    doc: "each row times the matrix of its expert: x, w, expert per row",
    attrs: &[("turned", AttrKind::Bool)],
    onnx: &[],
    infer,
    factors,
    work: |op, i, o| work(i, o, &i[1], op),
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel,
    samples,
};

/// Gradient of [`EXPERT_MAT_MUL`] by the matrices.
pub static EXPERT_MAT_MUL_GRAD: OpDef = OpDef {
    name: "ExpertMatMulGrad",
    doc: "gradient of ExpertMatMul by the matrices: of x, dy, expert per row",
    attrs: &[("turned", AttrKind::Bool), ("experts", AttrKind::Int)],
    onnx: &[],
    infer: infer_grad,
    factors: factors_grad,
    work: |op, i, o| work(i, o, &o[0], op),
    identity: never,
    gradient: Gradient::Internal("backward of ExpertMatMul"),
    kernel: kernel_grad,
    samples: samples_grad,
};

/// The operator.
pub(crate) fn expert_mat_mul(turned: bool) -> Op {
    Op::new(&EXPERT_MAT_MUL).flag("turned", turned)
}

/// The dim of the matrices that is the last of the result.
pub(crate) fn columns(op: &Op) -> usize {
    inner(op)[0]
}

/// Which dims of the matrices `n` and `k` are.
fn inner(op: &Op) -> [usize; 2] {
    if op.get_flag("turned") { [2, 1] } else { [1, 2] }
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[3])?;
    let [x, w, expert] = [&inputs[0], &inputs[1], &inputs[2]];
    expect_float(op.name(), "x", x)?;
    expect_index(op.name(), "expert", expert)?;
    let bad = |why: &str| OpError(format!("{} of {x}, {w}, {expert}: {why}", op.name()));
    let Some((&k, rows)) = x.dims.split_last() else { return Err(bad("x has no dims")) };
    if w.rank() != 3 || w.dtype != x.dtype {
        return Err(bad("w needs 3 dims [experts, n, k] and the element type of x"));
    }
    let [n_at, k_at] = inner(op);
    if w.dims[k_at] != k {
        return Err(bad("contracted sizes differ"));
    }
    if expert.dims != rows {
        return Err(bad("each row of x needs an expert"));
    }
    let dims: Vec<usize> = rows.iter().copied().chain([w.dims[n_at]]).collect();
    Ok(vec![Type::new(x.dtype, dims)])
}

fn infer_grad(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    expect_operands(op.name(), inputs, &[3])?;
    let [x, dy, expert] = [&inputs[0], &inputs[1], &inputs[2]];
    expect_float(op.name(), "x", x)?;
    expect_index(op.name(), "expert", expert)?;
    let experts = usize::try_from(op.get_int("experts")).unwrap_or(0);
    let rows = |t: &Type| t.dims[..t.rank().saturating_sub(1)].to_vec();
    if x.rank() == 0 || dy.rank() == 0 || rows(x) != expert.dims || rows(dy) != expert.dims || x.dtype != dy.dtype {
        return Err(OpError(format!("{} of {x}, {dy}, {expert}: rows differ", op.name())));
    }
    let mut dims = [experts, 0, 0];
    let [n_at, k_at] = inner(op);
    dims[n_at] = dy.dims[dy.rank() - 1];
    dims[k_at] = x.dims[x.rank() - 1];
    Ok(vec![Type::new(x.dtype, dims)])
}

fn factors(op: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let (rows, [n_at, k_at]) = (i[2].rank(), inner(op));
    let w = &i[1].dims;
    RuleBuilder::new(i, o)
        .dims(0..rows, &i[0].dims, &[0, 2], &[0])
        .factor("n", w[n_at], &[(1, n_at)], &[(0, rows)])
        .factor("k", w[k_at], &[(0, rows), (1, k_at)], &[])
        .factor("experts", w[0], &[(1, 0)], &[])
        .build(&[ReduceKind::Sum])
        .linear_in([0])
        .linear_in([1])
}

fn factors_grad(op: &Op, i: &[Type], o: &[Type]) -> FactorRule {
    let (rows, [n_at, k_at]) = (i[2].rank(), inner(op));
    let w = &o[0].dims;
    RuleBuilder::new(i, o)
        .factor("n", w[n_at], &[(1, rows)], &[(0, n_at)])
        .factor("k", w[k_at], &[(0, rows)], &[(0, k_at)])
        .factor("experts", w[0], &[], &[(0, 0)])
        .dims(0..rows, &i[0].dims, &[0, 1, 2], &[])
        .build(&[ReduceKind::Sum])
        .linear_in([0])
        .linear_in([1])
}

/// A product of all rows, with matrices in as many parts as there are experts.
fn work(i: &[Type], o: &[Type], w: &Type, op: &Op) -> Work {
    let [n_at, k_at] = inner(op);
    let (rows, n, k, experts) = (i[2].numel(), w.dims[n_at], w.dims[k_at], w.dims[0].max(1));
    // As many matrices as are used.
    let used = experts.min(rows.max(1));
    Work {
        family: Family::MatMul,
        flops: 2.0 * rows as f64 * n as f64 * k as f64,
        gemm: Some([used, rows.div_ceil(used), n, k]),
        ..Work::memory(i, o, 0.0)
    }
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dy) = cx.grads[0] else { return Ok(vec![None; 3]) };
    let [x, w, expert] = [cx.inputs[0], cx.inputs[1], cx.inputs[2]];
    let turned = cx.op.get_flag("turned");
    let mut grads = vec![None; 3];
    if cx.wanted[0] {
        grads[0] = Some(cx.b.emit1(expert_mat_mul(!turned), &[dy, w, expert])?);
    }
    if cx.wanted[1] {
        let experts = cx.b.dims(w)[0] as i64;
        let op = Op::new(&EXPERT_MAT_MUL_GRAD).flag("turned", turned).int("experts", experts);
        grads[1] = Some(cx.b.emit1(op, &[x, dy, expert])?);
    }
    Ok(grads)
}

/// The rows of each local expert. `first` is the first of them, of `all` in the unsharded tensor.
fn by_expert(
    op: &Op,
    expert: &View<'_>,
    local: usize,
    first: usize,
    all: usize,
) -> Result<Vec<Vec<usize>>, KernelError> {
    let mut rows = vec![Vec::new(); local];
    for (row, &index) in read_indices(op, expert)?.iter().enumerate() {
        if let Some(e) = locate(op, index, all, first, local)? {
            rows[e].push(row);
        }
    }
    Ok(rows)
}

/// The rows of `x` in that order, one behind the other.
fn collect<T: Real>(x: &[T], rows: &[usize], size: usize) -> Vec<T> {
    rows.iter().flat_map(|&r| x[r * size..][..size].iter().copied()).collect()
}

fn kernel(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let [x, w, expert] = inputs else { return Err(KernelError("ExpertMatMul takes 3 operands".into())) };
    let rows = by_expert(op, expert, w.dims()[0], w.origin[0], w.global[0])?;
    let [n_at, k_at] = inner(op);
    let (n, k) = (w.dims()[n_at], w.dims()[k_at]);
    // Strides of a matrix as (k, n).
    let w_by = if op.get_flag("turned") { [n, 1] } else { [1, k] };
    by_float!(op, x.dtype(), T => {
        let (x, w, y) = (x.as_slice::<T>(), w.as_slice::<T>(), outputs[0].as_mut_slice::<T>());
        y.fill(T::ZERO);
        for (e, rows) in rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let (xs, matrix) = (collect(x, rows, k), &w[e * n * k..][..n * k]);
            let mut ys = vec![T::ZERO; rows.len() * n];
            if k > 0 && n > 0 {
                // SAFETY: the three slices hold m k, k n and m n elements, which these strides address.
                unsafe {
                    T::gemm([rows.len(), n, k], ys.as_mut_ptr(), [n, 1], false, xs.as_ptr(), [k, 1], matrix.as_ptr(), w_by);
                }
            }
            for (i, &r) in rows.iter().enumerate() {
                y[r * n..][..n].copy_from_slice(&ys[i * n..][..n]);
            }
        }
        Ok(())
    })
}

fn kernel_grad(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
    let [x, dy, expert] = inputs else { return Err(KernelError("ExpertMatMulGrad takes 3 operands".into())) };
    let out = &mut outputs[0];
    let rows = by_expert(op, expert, out.ty.dims[0], out.origin[0], out.global[0])?;
    let [n_at, k_at] = inner(op);
    let (n, k) = (out.ty.dims[n_at], out.ty.dims[k_at]);
    let w_by = if op.get_flag("turned") { [1, n] } else { [k, 1] };
    by_float!(op, x.dtype(), T => {
        let (x, dy, dw) = (x.as_slice::<T>(), dy.as_slice::<T>(), out.as_mut_slice::<T>());
        dw.fill(T::ZERO);
        for (e, rows) in rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let (xs, ys, matrix) = (collect(x, rows, k), collect(dy, rows, n), &mut dw[e * n * k..][..n * k]);
            if n > 0 && k > 0 {
                // SAFETY: as in the forward kernel: m n, m k and n k elements.
                unsafe {
                    T::gemm([n, k, rows.len()], matrix.as_mut_ptr(), w_by, false, ys.as_ptr(), [1, n], xs.as_ptr(), [k, 1]);
                }
            }
        }
        Ok(())
    })
}

fn samples() -> Vec<Sample> {
    let case = |turned: bool, rows: &[usize], [e, n, k]: [usize; 3]| Sample {
        op: expert_mat_mul(turned),
        inputs: vec![
            SampleInput::f32([rows, &[k]].concat()),
            SampleInput::f32(if turned { [e, k, n] } else { [e, n, k] }),
            SampleInput::i64_in(rows, 0, e as i64),
        ],
    };
    vec![case(false, &[2, 6], [4, 6, 2]), case(true, &[2, 4, 2], [6, 2, 4]), case(false, &[12], [3, 2, 2])]
}

fn samples_grad() -> Vec<Sample> {
    let case = |turned: bool, rows: &[usize], [e, n, k]: [usize; 3]| Sample {
        op: Op::new(&EXPERT_MAT_MUL_GRAD).flag("turned", turned).int("experts", e as i64),
        inputs: vec![
            SampleInput::f32([rows, &[k]].concat()),
            SampleInput::f32([rows, &[n]].concat()),
            SampleInput::i64_in(rows, 0, e as i64),
        ],
    };
    vec![case(false, &[2, 6], [4, 6, 2]), case(true, &[12], [6, 2, 4])]
}
