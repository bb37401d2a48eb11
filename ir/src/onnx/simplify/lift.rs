//! Keeps leading dims apart that exporters merge.
//!
//! A value may be carried in *fine form*: a value of more dims, of which the first `k` are one dim of the value proper (row-major, so
//! that a reshape leads from one to the other). A reshape that merges leading dims leaves them apart; where it does nothing else it
//! needs no node. Operators that treat the leading dim as rows are applied to the fine form, and a reshape back
//! to the fine sizes cancels. Any other operator gets the value proper.
//!
//! Which operators: see [`Lift::node`]. Dims of size 1 are no reason to lift: a merge must join two dims larger than 1, or
//! a leading 1 (a batch of one) that no slice made.

use std::cell::RefCell;

use crate::builder::Builder;
use crate::convert::to_f64;
use crate::factor::FactorRule;
use crate::graph::{Def, Graph, Node, ValueId};
use crate::op::{Attr, AttrKind, Op, OpError};
use crate::ops::einsum::equation;
use crate::rewrite::{RewriteError, rebuild};
use crate::tensor::{Type, numel};

/// See the module.
pub(super) fn lift(graph: &Graph) -> Result<Graph, RewriteError> {
    // Per value of the old graph, how many leading dims of its new value are its leading dim.
    let forms = RefCell::new(vec![1; graph.values.len()]);
    rebuild(
        graph,
        |b, n, ins| {
            let mut forms = forms.borrow_mut();
            let ks: Vec<usize> = n.inputs.iter().map(|v| forms[v.index()]).collect();
            let mut lift = Lift { graph, b, n, ins, ks: &ks };
            let (outs, k) = lift.node()?;
            n.outputs.iter().for_each(|v| forms[v.index()] = k);
            Ok(outs)
        },
        |b, old, new| if forms.borrow()[old.index()] > 1 { b.reshape(new, &graph.ty(old).dims) } else { Ok(new) },
    )
}

/// Results, and how many of their leading dims are one dim of the results proper.
type Lifted = Option<(Vec<ValueId>, usize)>;

/// A node of the old graph, with its operands in the new one.
struct Lift<'a> {
    graph: &'a Graph,
    b: &'a mut Builder,
    n: &'a Node,
    ins: &'a [ValueId],
    ks: &'a [usize],
}

impl Lift<'_> {
    fn node(&mut self) -> Result<(Vec<ValueId>, usize), OpError> {
        let lifted = match self.n.op.name() {
            "Reshape" => Some(self.reshape()?),
            "Gather" if self.gathers_all_rows() => Some(self.reshape()?),
            _ if self.ks.iter().all(|&k| k == 1) => None,
            _ if (0..self.ins.len()).any(|i| numel(self.dims(i)) == 0) => None,
            "Einsum" => self.einsum()?,
            "LayerNorm" | "RmsNorm" | "Softmax" | "LogSoftmax" | "TopK" => self.along("axis")?,
            "Slice" | "ArgMax" => self.along("dim")?,
            "Concat" => self.concat()?,
            "Transpose" => self.transpose()?,
            "ReduceSum" | "ReduceMax" | "ReduceMin" | "ReduceProd" => self.reduce()?,
            "Expand" => self.expand()?,
            "Pad" => self.pad()?,
            "Gather" => self.gather()?,
            "CrossEntropyParts" => self.cross_entropy()?,
            _ if self.is_elementwise() => self.elementwise()?,
            _ => None,
        };
        if let Some(lifted) = lifted {
            return Ok(lifted);
        }
        let ins: Vec<ValueId> = (0..self.ins.len()).map(|i| self.proper(i)).collect::<Result<_, _>>()?;
        let outs = match self.n.op.name() {
            "Transpose" => vec![self.b.transpose(ins[0], &perm(&self.n.op))?],
            _ => self.b.emit(self.n.op.clone(), &ins)?,
        };
        Ok((outs, 1))
    }

    /// Sizes proper of an operand.
    fn dims(&self, i: usize) -> &[usize] {
        &self.graph.ty(self.n.inputs[i]).dims
    }
    /// The operand proper.
    fn proper(&mut self, i: usize) -> Result<ValueId, OpError> {
        if self.ks[i] == 1 {
            return Ok(self.ins[i]);
        }
        let dims = self.dims(i).to_vec();
        self.b.reshape(self.ins[i], &dims)
    }
    /// The sizes that an operand in fine form has for its leading dim.
    fn group(&self, i: usize) -> Vec<usize> {
        self.b.ty(self.ins[i]).dims[..self.ks[i]].to_vec()
    }
    /// The operand with its leading dim as these; `None` for parameters, which are not reshaped.
    fn split(&mut self, i: usize, group: &[usize]) -> Result<Option<ValueId>, OpError> {
        if self.ks[i] > 1 && self.group(i) == group {
            return Ok(Some(self.ins[i]));
        }
        if matches!(self.b.graph().value(self.ins[i]).def, Def::State(_)) {
            return Ok(None);
        }
        let dims = [group, &self.dims(i)[1..]].concat();
        Ok(Some(self.b.reshape(self.ins[i], &dims)?))
    }
    fn emit(&mut self, op: Op, ins: &[ValueId], k: usize) -> Result<Lifted, OpError> {
        Ok(Some((self.b.emit(op, ins)?, k)))
    }

    fn reshape(&mut self) -> Result<(Vec<ValueId>, usize), OpError> {
        let to = self.graph.ty(self.n.outputs[0]).dims.clone();
        let (x, k) = (self.ins[0], self.ks[0]);
        let from = self.b.dims(x);
        if to == from {
            return Ok((vec![x], 1));
        }
        if numel(&from) > 0
            && let Some((&first, rest)) = to.split_first()
        {
            // The leading dims whose product is the result's leading dim stay apart; the others become what the result has.
            let merges = (2..=from.len()).find(|&m| numel(&from[..m]) == first);
            let m = merges.filter(|&m| m == k || self.worth_lifting(x, &from[..m]));
            if let Some(m) = m {
                let dims = [&from[..m], rest].concat();
                return Ok((vec![self.b.reshape(x, &dims)?], m));
            }
        }
        Ok((vec![self.b.reshape(x, &to)?], 1))
    }

    fn worth_lifting(&self, x: ValueId, group: &[usize]) -> bool {
        let sliced = || match self.b.graph().producer(x).map(|p| &self.b.graph().node(p).op) {
            Some(op) => op.name() == "Slice" && op.get_int("dim") == 0,
            None => false,
        };
        let is_constant = matches!(self.b.graph().value(x).def, Def::Const(_) | Def::State(_));
        !is_constant && group[1..].iter().any(|&d| d > 1) && (group[0] > 1 || !sliced())
    }

    fn einsum(&mut self) -> Result<Lifted, OpError> {
        let e = equation(&self.n.op)?;
        let mut terms = [e.x, e.y];
        let Some(i) = (0..2).find(|&i| self.ks[i] > 1) else { return Ok(None) };
        let (j, letter) = (1 - i, terms[i][0]);
        let group = self.group(i);
        let shared = terms[j].iter().position(|&l| l == letter);
        let in_result = e.z.iter().position(|&l| l == letter);
        if shared.unwrap_or(0) > 0 || in_result.unwrap_or(0) > 0 {
            return Ok(None);
        }
        let mut ins = [self.ins[i]; 2];
        ins[j] = match shared {
            Some(_) => match self.split(j, &group)? {
                Some(v) => v,
                None => return Ok(None),
            },
            None => self.proper(j)?,
        };
        let used = |l: &u8| terms.iter().flatten().chain(&e.z).any(|u| u == l);
        let letters = b"bhs".iter().copied().chain(b'a'..=b'z').chain(b'A'..=b'Z');
        let mut fresh: Vec<u8> = Vec::new();
        for l in letters.filter(|l| !used(l)) {
            if fresh.len() + 1 < group.len() && !fresh.contains(&l) {
                fresh.push(l);
            }
        }
        if fresh.len() + 1 < group.len() {
            return Ok(None);
        }
        // Named as people would: rows are `[b, s]`, a merged batch is `[b, h]`.
        fresh.insert(if letter == b'b' { 0 } else { fresh.len() }, letter);
        let mut z = e.z.clone();
        for (at, term) in [(Some(0), i), (shared, j)] {
            if at.is_some() {
                terms[term].splice(0..1, fresh.iter().copied());
            }
        }
        if in_result.is_some() {
            z.splice(0..1, fresh.iter().copied());
        }
        let text = |t: &[u8]| String::from_utf8_lossy(t).into_owned();
        let eq = format!("{},{}->{}", text(&terms[0]), text(&terms[1]), text(&z));
        let out = self.b.einsum(&eq, ins[0], ins[1])?;
        Ok(Some((vec![out], if in_result.is_some() { group.len() } else { 1 })))
    }

    /// Operators along an inner dim of their first operand, given by an attribute; the others are operands proper.
    fn along(&mut self, attr: &str) -> Result<Lifted, OpError> {
        let (k, at) = (self.ks[0], self.n.op.get_int(attr));
        if k == 1 || at < 1 {
            return Ok(None);
        }
        let mut ins = vec![self.ins[0]];
        for i in 1..self.ins.len() {
            ins.push(self.proper(i)?);
        }
        self.emit(self.n.op.clone().int(attr, at + k as i64 - 1), &ins, k)
    }

    fn concat(&mut self) -> Result<Lifted, OpError> {
        let at = self.n.op.get_int("dim");
        let Some(first) = self.ks.iter().position(|&k| k > 1).filter(|_| at >= 1) else { return Ok(None) };
        let group = self.group(first);
        let mut ins = Vec::new();
        for i in 0..self.ins.len() {
            let Some(v) = self.split(i, &group)? else { return Ok(None) };
            ins.push(v);
        }
        let k = group.len();
        self.emit(self.n.op.clone().int("dim", at + k as i64 - 1), &ins, k)
    }

    fn transpose(&mut self) -> Result<Lifted, OpError> {
        let (k, perm) = (self.ks[0], perm(&self.n.op));
        if perm.first() != Some(&0) {
            return Ok(None);
        }
        let fine: Vec<usize> = (0..k).chain(perm[1..].iter().map(|p| p + k - 1)).collect();
        Ok(Some((vec![self.b.transpose(self.ins[0], &fine)?], k)))
    }

    fn reduce(&mut self) -> Result<Lifted, OpError> {
        let k = self.ks[0] as i64;
        let dims = self.n.op.get_ints("dims");
        let leading = dims.contains(&0);
        let inner = dims.iter().filter(|&&d| d > 0).map(|d| d + k - 1);
        let fine: Vec<i64> = (0..if leading { k } else { 0 }).chain(inner).collect();
        let kept = !leading || self.n.op.get_flag("keep");
        let ins = [self.ins[0]];
        self.emit(self.n.op.clone().ints("dims", fine), &ins, if kept { k as usize } else { 1 })
    }

    fn expand(&mut self) -> Result<Lifted, OpError> {
        let to = self.graph.ty(self.n.outputs[0]).dims.clone();
        if self.dims(0).len() != to.len() || self.dims(0)[0] != to[0] {
            return Ok(None);
        }
        let fine = [&self.group(0), &to[1..]].concat();
        Ok(Some((vec![self.b.expand(self.ins[0], &fine)?], self.ks[0])))
    }

    fn pad(&mut self) -> Result<Lifted, OpError> {
        let (low, high) = (self.n.op.get_ints("low"), self.n.op.get_ints("high"));
        if low.first() != Some(&0) || high.first() != Some(&0) {
            return Ok(None);
        }
        let k = self.ks[0];
        let fine = |pads: &[i64]| vec![0; k].into_iter().chain(pads[1..].iter().copied()).collect::<Vec<_>>();
        let op = self.n.op.clone().ints("low", fine(low)).ints("high", fine(high));
        let ins = [self.ins[0]];
        self.emit(op, &ins, k)
    }

    /// Whether every row is looked up once, in order: the form in which exporters flatten a mask.
    fn gathers_all_rows(&self) -> bool {
        let Some(indices) = self.graph.constant(self.n.inputs[1]) else { return false };
        let rows = self.dims(0).first().copied().unwrap_or(0);
        let in_order = || to_f64(indices.dtype(), indices.bytes()).into_iter().eq((0..rows).map(|i| i as f64));
        self.n.op.get_int("axis") == 0 && rows > 0 && indices.ty().numel() == rows && in_order()
    }

    fn gather(&mut self) -> Result<Lifted, OpError> {
        let axis = self.n.op.get_int("axis");
        if self.ks[0] > 1 {
            return self.along("axis");
        }
        if axis != 0 {
            return Ok(None);
        }
        let (ins, k) = ([self.ins[0], self.ins[1]], self.ks[1]);
        self.emit(self.n.op.clone(), &ins, k)
    }

    fn cross_entropy(&mut self) -> Result<Lifted, OpError> {
        if self.ks[0] == 1 || self.dims(1).is_empty() {
            return Ok(None);
        }
        let group = self.group(0);
        let Some(labels) = self.split(1, &group)? else { return Ok(None) };
        let ins = [self.ins[0], labels];
        self.emit(self.n.op.clone(), &ins, group.len())
    }

    /// Whether the node combines elements of equal index, with broadcasting.
    fn is_elementwise(&self) -> bool {
        let (op, ins) = (&self.n.op, self.graph.input_types(self.n));
        let outs = self.graph.output_types(self.n);
        let names_dims = |k: AttrKind| matches!(k, AttrKind::Int | AttrKind::Ints);
        let rank = ins.iter().map(Type::rank).max().unwrap_or(0);
        let mut wide = vec![1; rank];
        for t in &ins {
            for (w, &d) in wide.iter_mut().rev().zip(t.dims.iter().rev()) {
                *w = if *w == 1 { d } else { *w };
            }
        }
        let (rule, plain) = (op.factors(&ins, &outs), FactorRule::elementwise(&ins, &outs));
        !op.def.attrs.iter().any(|(_, k)| names_dims(*k))
            && outs.iter().all(|t| t.dims == wide)
            && (&rule.factors, &rule.inputs, &rule.outputs) == (&plain.factors, &plain.inputs, &plain.outputs)
    }

    fn elementwise(&mut self) -> Result<Lifted, OpError> {
        let out = self.graph.ty(self.n.outputs[0]).dims.clone();
        let leads = |lift: &Self, i: usize| lift.dims(i).len() == out.len();
        let fine = |lift: &Self, i: usize| lift.ks[i] > 1;
        let Some(first) = (0..self.ins.len()).find(|&i| fine(self, i) && self.dims(i)[0] == out[0]) else {
            return Ok(None);
        };
        let group = self.group(first);
        let ones = vec![1; group.len()];
        let mut ins = Vec::new();
        for i in 0..self.ins.len() {
            ins.push(if !leads(self, i) {
                if fine(self, i) {
                    return Ok(None); // its leading dim is an inner one here
                }
                self.ins[i]
            } else {
                let group = if self.dims(i)[0] == out[0] { &group } else { &ones };
                match self.split(i, group)? {
                    Some(v) => v,
                    None => return Ok(None),
                }
            });
        }
        self.emit(self.n.op.clone(), &ins, group.len())
    }
}

fn perm(op: &Op) -> Vec<usize> {
    match op.attr("perm") {
        Some(Attr::Ints(p)) => p.iter().map(|&d| d as usize).collect(),
        _ => Vec::new(),
    }
}
