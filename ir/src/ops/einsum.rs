//! `Einsum`: contraction of two tensors, the one form of every matrix product.
//!
//! `eq="bsk,kn->bsn"`: one letter per dim. Every letter of an operand occurs in the other operand or in the result (others
//! are summed before, by [`Builder::einsum`]), none twice in one term. So the gradients are contractions of the same form:
//! of `xy->z`, those of `x` and `y` are `zy->x` and `xz->y`, and each letter is a factor.
//!
//! Read next: `kernel` (loops around matrix products), `import` (MatMul, Gemm and Einsum of ONNX).

mod import;
mod kernel;

use crate::builder::Builder;
use crate::factor::{Factor, FactorId, FactorRule, ReduceKind};
use crate::graph::{Def, ValueId};
use crate::op::{Attr, AttrKind, Family, GradCx, Gradient, Op, OpDef, OpError, Sample, SampleInput, Work};

use crate::ops::support::never;
use crate::tensor::Type;

/// Contraction of two tensors.
pub static EINSUM: OpDef = OpDef {
    name: "Einsum",
    doc: "contraction of two tensors: all matrix products",
    attrs: &[("eq", AttrKind::Str)],
    onnx: import::RULES,
    infer,
    factors,
    work,
    identity: never,
    gradient: Gradient::Rule(gradient),
    kernel: kernel::kernel,
    samples,
};

/// The terms of an equation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Equation {
    pub x: Vec<u8>,
    pub y: Vec<u8>,
    pub z: Vec<u8>,
}

/// Letters of a contraction by the role they play, each in the order of the term that rules it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Roles {
    /// In both operands and the result (order of the result).
    pub batch: Vec<u8>,
    /// In the first operand and the result.
    pub m: Vec<u8>,
    /// In the second operand and the result.
    pub n: Vec<u8>,
    /// In both operands only (order of the first).
    pub k: Vec<u8>,
}

impl Equation {
    /// Parses `"bsk,kn->bsn"`.
    pub fn parse(text: &str) -> Result<Equation, OpError> {
        let bad = |why: &str| OpError(format!("contraction `{text}` {why}"));
        let (ins, z) = text.split_once("->").ok_or_else(|| bad("has no `->`"))?;
        let (x, y) = ins.split_once(',').ok_or_else(|| bad("does not have two operands"))?;
        let term = |t: &str| -> Result<Vec<u8>, OpError> {
            let letters: Vec<u8> = t.bytes().collect();
            for (i, l) in letters.iter().enumerate() {
                if !l.is_ascii_alphabetic() {
                    return Err(bad(&format!("contains `{}`, which is no letter", *l as char)));
                }
                if letters[..i].contains(l) {
                    return Err(bad(&format!("has `{}` twice in one term", *l as char)));
                }
            }
            Ok(letters)
        };
        let e = Equation { x: term(x)?, y: term(y)?, z: term(z)? };
        for l in e.x.iter().chain(&e.y).chain(&e.z) {
            if [&e.x, &e.y, &e.z].iter().filter(|t| t.contains(l)).count() < 2 {
                return Err(bad(&format!("has `{}` in one term only", *l as char)));
            }
        }
        Ok(e)
    }

    pub fn roles(&self) -> Roles {
        let pick = |from: &[u8], with: &[u8], without: &[u8]| -> Vec<u8> {
            from.iter().copied().filter(|l| with.contains(l) && !without.contains(l)).collect()
        };
        Roles {
            batch: self.z.iter().copied().filter(|l| self.x.contains(l) && self.y.contains(l)).collect(),
            m: pick(&self.z, &self.x, &self.y),
            n: pick(&self.z, &self.y, &self.x),
            k: pick(&self.x, &self.y, &self.z),
        }
    }
}

impl std::fmt::Display for Equation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let t = |t: &[u8]| String::from_utf8_lossy(t).into_owned();
        write!(f, "{},{}->{}", t(&self.x), t(&self.y), t(&self.z))
    }
}

/// The equation of a node, which was checked when it was made.
pub(crate) fn equation(op: &Op) -> Result<Equation, OpError> {
    match op.attr("eq") {
        Some(Attr::Str(text)) => Equation::parse(text),
        _ => Err(OpError("Einsum has no equation".into())),
    }
}

/// The size of each letter, by the dims of terms that must agree.
fn sizes(terms: &[(&[u8], &[usize])]) -> Result<[usize; 128], OpError> {
    let mut sizes = [usize::MAX; 128];
    for (letters, dims) in terms {
        for (&l, &d) in letters.iter().zip(*dims) {
            let s = &mut sizes[l as usize & 127];
            if *s != usize::MAX && *s != d {
                return Err(OpError(format!("contracted sizes differ: `{}` is {s} and {d}", l as char)));
            }
            *s = d;
        }
    }
    Ok(sizes)
}

fn infer(op: &Op, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
    let e = equation(op)?;
    let [x, y] = inputs else { return Err(OpError(format!("Einsum takes 2 operands, not {}", inputs.len()))) };
    for (ty, term) in [(x, &e.x), (y, &e.y)] {
        super::real::expect_float("Einsum", "an operand", ty)?;
        if ty.rank() != term.len() {
            return Err(OpError(format!("operand {ty} does not have the {} dims of `{e}`", term.len())));
        }
    }
    if x.dtype != y.dtype {
        return Err(OpError(format!("operands have different element types: {x} and {y}; cast one")));
    }
    let s = sizes(&[(&e.x, &x.dims), (&e.y, &y.dims)])
        .map_err(|why| OpError(format!("operands {x} and {y} do not fit `{e}`: {why}")))?;
    let dims: Vec<usize> = e.z.iter().map(|&l| s[l as usize]).collect();
    Ok(vec![Type::new(x.dtype, dims)])
}

/// One-letter names, for factors.
fn letter_name(l: u8) -> &'static str {
    const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz";
    let i = if l >= b'a' { (l - b'a') as usize + 27 } else { (l - b'A') as usize };
    &LETTERS[i..i + 1]
}

fn factors(op: &Op, inputs: &[Type], outputs: &[Type]) -> FactorRule {
    let mut rule = FactorRule::replicate(inputs, outputs);
    let Ok(e) = equation(op) else { return rule };
    let mut ids: Vec<u8> = Vec::new();
    let [x, y] = &mut rule.inputs[..] else { return rule };
    for (slots, letters, dims) in
        [(x, &e.x, &inputs[0].dims), (y, &e.y, &inputs[1].dims), (&mut rule.outputs[0], &e.z, &outputs[0].dims)]
    {
        for (d, (&l, &size)) in letters.iter().zip(dims).enumerate() {
            if size == 1 {
                continue;
            }
            let id = ids.iter().position(|&i| i == l).unwrap_or_else(|| {
                ids.push(l);
                rule.factors.push(Factor { name: letter_name(l), size });
                ids.len() - 1
            });
            slots[d] = Some(FactorId(id as u8));
        }
    }
    rule.combine[0] = ids.iter().any(|l| !e.z.contains(l)).then_some(ReduceKind::Sum);
    rule.linear_in([0]).linear_in([1])
}

fn work(op: &Op, inputs: &[Type], outputs: &[Type]) -> Work {
    let mut work = Work::memory(inputs, outputs, 0.0);
    let Ok(e) = equation(op) else { return work };
    let Ok(s) = sizes(&[(&e.x, &inputs[0].dims), (&e.y, &inputs[1].dims)]) else { return work };
    let size = |letters: &[u8]| -> usize { letters.iter().map(|&l| s[l as usize]).product() };
    let r = e.roles();
    let gemm = [size(&r.batch), size(&r.m), size(&r.n), size(&r.k)];
    work.family = Family::MatMul;
    work.flops = 2.0 * gemm.iter().map(|&d| d as f64).product::<f64>();
    work.gemm = Some(gemm);
    work
}

fn gradient(cx: &mut GradCx<'_>) -> Result<Vec<Option<ValueId>>, OpError> {
    let Some(dz) = cx.grads[0] else { return Ok(vec![None, None]) };
    let Equation { x, y, z } = equation(cx.op)?;
    let mut grads = vec![None, None];
    if cx.wanted[0] {
        let e = Equation { x: z.clone(), y: y.clone(), z: x.clone() };
        grads[0] = Some(cx.b.einsum(&e.to_string(), dz, cx.inputs[1])?);
    }
    if cx.wanted[1] {
        let e = Equation { x, y: z, z: y };
        grads[1] = Some(cx.b.einsum(&e.to_string(), cx.inputs[0], dz)?);
    }
    Ok(grads)
}

impl Builder {
    /// Contracts two tensors: `einsum("bsk,kn->bsn", x, y)`. Letters that only one operand has and the result lacks are
    /// summed out first; an operand that is a transpose is read in its original order.
    ///
    /// # Errors
    /// Equations that do not parse, or do not fit the operands.
    pub fn einsum(&mut self, eq: &str, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        let (ins, z) = eq.split_once("->").ok_or_else(|| OpError(format!("contraction `{eq}` has no `->`")))?;
        let (tx, ty) =
            ins.split_once(',').ok_or_else(|| OpError(format!("contraction `{eq}` does not have two operands")))?;
        let (tx, x) = self.read_directly(tx.bytes().collect(), x);
        let (ty, y) = self.read_directly(ty.bytes().collect(), y);
        let (tx, x) = self.sum_out(tx, x, |l| ty.contains(&l) || z.as_bytes().contains(&l))?;
        let (ty, y) = self.sum_out(ty, y, |l| tx.contains(&l) || z.as_bytes().contains(&l))?;
        let e = Equation { x: tx, y: ty, z: z.bytes().collect() };
        self.emit1(Op::new(&EINSUM).with("eq", Attr::Str(e.to_string())), &[x, y])
    }

    /// Reads through transposes, letters reordered.
    fn read_directly(&self, mut letters: Vec<u8>, mut v: ValueId) -> (Vec<u8>, ValueId) {
        while let Def::Node(n, 0) = self.graph().value(v).def {
            let node = self.graph().node(n);
            let perm = node.op.get_ints("perm");
            if node.op.name() != "Transpose" || perm.len() != letters.len() {
                break;
            }
            let mut before = letters.clone();
            for (&from, &l) in perm.iter().zip(&letters) {
                before[from as usize] = l;
            }
            (letters, v) = (before, node.inputs[0]);
        }
        (letters, v)
    }

    fn sum_out(
        &mut self,
        letters: Vec<u8>,
        v: ValueId,
        keep: impl Fn(u8) -> bool,
    ) -> Result<(Vec<u8>, ValueId), OpError> {
        let gone: Vec<usize> = (0..letters.len()).filter(|&d| !keep(letters[d])).collect();
        if gone.is_empty() || letters.len() != self.ty(v).rank() {
            return Ok((letters, v));
        }
        let v = self.reduce_sum(v, &gone, false)?;
        Ok((letters.into_iter().filter(|&l| keep(l)).collect(), v))
    }
}

fn samples() -> Vec<Sample> {
    let case = |eq: &str, x: &[usize], y: &[usize]| Sample {
        op: Op::new(&EINSUM).with("eq", Attr::Str(eq.into())),
        inputs: vec![SampleInput::f32(x), SampleInput::f32(y)],
    };
    vec![
        case("bsk,kn->bsn", &[2, 6, 4], &[4, 12]),
        case("bsk,nk->bsn", &[2, 6, 4], &[12, 4]),
        case("bhsd,bhtd->bhst", &[2, 6, 4, 4], &[2, 6, 6, 4]),
        case("bshd,bthd->bhst", &[2, 4, 6, 4], &[2, 6, 6, 4]),
        case("bhst,bthd->bshd", &[2, 6, 4, 6], &[2, 6, 6, 4]),
        case("bsk,bsn->kn", &[2, 6, 4], &[2, 6, 12]),
        case("bhsd,hdn->bsn", &[2, 6, 4, 2], &[6, 2, 4]),
        case("k,k->", &[6], &[6]),
        case("sk,k->s", &[6, 4], &[4]),
        case("i,j->ji", &[6], &[4]),
        case("ab,ab->ba", &[6, 4], &[6, 4]),
        case("bsk,kn->bsn", &[1, 6, 1], &[1, 4]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    /// Pseudo-random elements.
    fn random(dims: &[usize], seed: u64) -> Tensor {
        let mut state = seed | 1;
        let xs: Vec<f32> = (0..dims.iter().product())
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect();
        Tensor::f32(dims, &xs)
    }

    /// The definition: a sum over all letters.
    fn naive(e: &Equation, x: &Tensor, y: &Tensor, out: &Type) -> Vec<f64> {
        let s = sizes(&[(&e.x, x.dims()), (&e.y, y.dims())]).unwrap();
        let mut letters = e.z.clone();
        letters.extend(e.x.iter().copied().filter(|l| !e.z.contains(l)));
        let mut z = vec![0.0; out.numel()];
        let total: usize = letters.iter().map(|&l| s[l as usize]).product();
        for i in 0..total {
            let (mut rest, mut at) = (i, [0; 128]);
            for &l in letters.iter().rev() {
                at[l as usize] = rest % s[l as usize];
                rest /= s[l as usize];
            }
            let place = |t: &[u8]| t.iter().fold(0, |p, &l| p * s[l as usize] + at[l as usize]);
            let (a, b) = (x.as_slice::<f32>()[place(&e.x)], y.as_slice::<f32>()[place(&e.y)]);
            z[place(&e.z)] += f64::from(a) * f64::from(b);
        }
        z
    }

    #[test]
    fn kernel_is_the_definition() {
        for (i, s) in samples().into_iter().enumerate() {
            let (x, y) = (random(&s.inputs[0].ty.dims, i as u64), random(&s.inputs[1].ty.dims, 77 + i as u64));
            let types = s.op.infer(&[x.ty().clone(), y.ty().clone()]).unwrap();
            let z = crate::interp::apply(&s.op, &[&x, &y], &types).unwrap();
            let want = naive(&equation(&s.op).unwrap(), &x, &y, &types[0]);
            for (a, b) in z[0].as_slice::<f32>().iter().zip(&want) {
                assert!((f64::from(*a) - b).abs() < 1e-5, "{}: {a} is not {b}", s.op);
            }
        }
    }

    #[test]
    fn equations_that_are_refused() {
        for (eq, why) in [
            ("ab,bc", "no `->`"),
            ("ab->a", "two operands"),
            ("aab,b->a", "`a` twice"),
            ("ab,c->bc", "`a` in one term only"),
            ("ab,bc->acx", "`x` in one term only"),
            ("a1,1->a", "`1`, which is no letter"),
        ] {
            let e = Equation::parse(eq).unwrap_err().to_string();
            assert!(e.contains(why), "{eq}: {e}");
        }
    }

    #[test]
    fn work_counts_multiply_adds() {
        let op = Op::new(&EINSUM).with("eq", Attr::Str("bhsd,bhtd->bhst".into()));
        let ty = |d: &[usize]| Type::new(crate::DType::F32, d);
        let ins = [ty(&[2, 3, 5, 7]), ty(&[2, 3, 11, 7])];
        let w = op.work(&ins, &op.infer(&ins).unwrap());
        assert_eq!(w.gemm, Some([6, 5, 11, 7]));
        assert_eq!(w.flops, 2.0 * 6.0 * 5.0 * 11.0 * 7.0);
    }
}
