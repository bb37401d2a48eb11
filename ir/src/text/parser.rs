//! Parses graphs.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{
    Def, Graph, Init, Input, Node, NodeId, Output, Section, State, StateId, StateKind, Tied, Value, ValueId,
};
use crate::op::{Attr, AttrKind, Op, OpDef};
use crate::tensor::{Tensor, Type};
use crate::weights::{WeightRef, WeightStorage};

use super::lexer::{Placed, Token, lex};
use super::literal;

/// What does not parse: where (counted from 1), what was expected there, what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: expected {expected}, found {found}")]
pub struct ParseError {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

/// Parses the textual form of a graph.
///
/// # Errors
/// The first place that does not parse, or names what is not there, or has another type than stated.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let tokens = lex(text)?;
    let mut p = Parser { tokens, at: 0, g: Graph::default(), names: BTreeMap::new(), writes: Vec::new() };
    p.graph()?;
    Ok(p.renumbered())
}

/// The result of a step: an error is the place, with what was expected.
type Parsed<T> = Result<T, ParseError>;

struct Parser {
    tokens: Vec<Placed>,
    at: usize,
    g: Graph,
    names: BTreeMap<String, ValueId>,
    /// States' writes, named before the value is defined: state, name, token.
    writes: Vec<(StateId, String, usize)>,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].token
    }
    fn next(&mut self) -> Token {
        let t = self.peek().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        t
    }
    fn error_at<T>(&self, at: usize, expected: impl Into<String>) -> Parsed<T> {
        let p = &self.tokens[at];
        Err(ParseError { line: p.line, column: p.column, expected: expected.into(), found: p.token.show() })
    }
    fn error<T>(&self, expected: impl Into<String>) -> Parsed<T> {
        self.error_at(self.at, expected)
    }
    fn eat(&mut self, mark: &str) -> bool {
        let found = matches!(self.peek(), Token::Mark(m) if *m == mark);
        if found {
            self.next();
        }
        found
    }
    fn expect(&mut self, mark: &str) -> Parsed<()> {
        if self.eat(mark) { Ok(()) } else { self.error(format!("`{mark}`")) }
    }
    fn eat_word(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Token::Word(w) if w == word);
        if found {
            self.next();
        }
        found
    }
    fn word(&mut self, expected: &str) -> Parsed<String> {
        match self.peek().clone() {
            Token::Word(w) => {
                self.next();
                Ok(w)
            }
            _ => self.error(expected),
        }
    }
    fn text(&mut self, expected: &str) -> Parsed<String> {
        match self.peek().clone() {
            Token::Text(t) => {
                self.next();
                Ok(t)
            }
            _ => self.error(expected),
        }
    }
    fn try_text(&mut self) -> Option<String> {
        let Token::Text(t) = self.peek().clone() else { return None };
        self.next();
        Some(t)
    }
    fn number<T: std::str::FromStr>(&mut self, expected: &str) -> Parsed<T> {
        if let Token::Number(n) = self.peek()
            && let Ok(x) = n.parse()
        {
            self.next();
            return Ok(x);
        }
        self.error(expected)
    }
    fn value_name(&mut self) -> Parsed<String> {
        match self.peek().clone() {
            Token::Value(v) => {
                self.next();
                Ok(v)
            }
            _ => self.error("a value (`%name`)"),
        }
    }
    /// A list in marks: `[a, b]`, `(a, b)`.
    fn list<T>(&mut self, open: &str, close: &str, mut item: impl FnMut(&mut Parser) -> Parsed<T>) -> Parsed<Vec<T>> {
        self.expect(open)?;
        let mut items = Vec::new();
        while !self.eat(close) {
            if !items.is_empty() && !self.eat(",") {
                return self.error(format!("`,` or `{close}`"));
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn graph(&mut self) -> Parsed<()> {
        if !self.eat_word("graph") {
            return self.error("`graph`");
        }
        self.g.name = self.text("the graph's name, a string")?;
        self.expect("{")?;
        while !self.eat("}") {
            let at = self.at;
            let block = self.word("a block (inputs, states, constants, forward, backward, update, outputs) or `}`")?;
            self.expect("{")?;
            while !self.eat("}") {
                match block.as_str() {
                    "inputs" => self.input()?,
                    "states" => self.state()?,
                    "constants" => self.constant()?,
                    "forward" => self.node(Section::Forward)?,
                    "backward" => self.node(Section::Backward)?,
                    "update" => self.node(Section::Update)?,
                    "outputs" => self.output()?,
                    _ => {
                        return self
                            .error_at(at, "a block: inputs, states, constants, forward, backward, update or outputs");
                    }
                }
            }
        }
        if *self.peek() != Token::End {
            return self.error("the end of the text: one graph per file");
        }
        for (s, name, at) in std::mem::take(&mut self.writes) {
            match self.names.get(&name) {
                Some(&v) => self.g.states[s.index()].write = Some(v),
                None => return self.error_at(at, "a value that the graph defines"),
            }
        }
        Ok(())
    }

    fn define(&mut self, at: usize, name: String, title: String, ty: Type, def: Def) -> Parsed<ValueId> {
        let id = ValueId(self.g.values.len() as u32);
        if self.names.insert(name, id).is_some() {
            return self.error_at(at, "a value that is not defined yet");
        }
        self.g.values.push(Value { name: title, ty, def });
        Ok(id)
    }
    /// `%name "title"`
    fn label(&mut self) -> Parsed<(usize, String, Option<String>)> {
        let at = self.at;
        let name = self.value_name()?;
        Ok((at, name, self.try_text()))
    }
    fn operand(&mut self) -> Parsed<ValueId> {
        let at = self.at;
        let name = self.value_name()?;
        match self.names.get(&name) {
            Some(&v) => Ok(v),
            None => self.error_at(at, "a value defined before"),
        }
    }
    fn batch(&mut self) -> Parsed<Option<usize>> {
        if self.eat_word("batch") { Ok(Some(self.number("a dim")?)) } else { Ok(None) }
    }

    fn dtype(&mut self) -> Parsed<DType> {
        let at = self.at;
        let word = self.word("an element type")?;
        match DType::parse(&word) {
            Some(d) => Ok(d),
            None => {
                let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
                self.error_at(at, format!("an element type ({})", names.join(", ")))
            }
        }
    }
    fn ty(&mut self) -> Parsed<Type> {
        let at = self.at;
        let dtype = self.dtype()?;
        let dims: Vec<usize> = self.list("[", "]", |p| p.number("a size"))?;
        let bytes = dims.iter().try_fold(dtype.size(), |n, d| n.checked_mul(*d));
        if bytes.is_none_or(|b| b > isize::MAX as usize) {
            return self.error_at(at, "a type whose size fits the address space");
        }
        Ok(Type::new(dtype, dims))
    }

    fn input(&mut self) -> Parsed<()> {
        let (at, name, title) = self.label()?;
        self.expect("=")?;
        let source = self.text("the input's name, a string")?;
        self.expect(":")?;
        let ty = self.ty()?;
        let batch_dim = self.batch()?;
        let index = self.g.inputs.len();
        let value = self.define(at, name, title.unwrap_or(source.clone()), ty, Def::Input(index))?;
        self.g.inputs.push(Input { name: source, value, batch_dim });
        Ok(())
    }

    fn state(&mut self) -> Parsed<()> {
        let (at, name, title) = self.label()?;
        self.expect("=")?;
        let kind_at = self.at;
        let (kind, trainable) = match self.word("`parameter`, `frozen` or `optimizer`")?.as_str() {
            "parameter" => (StateKind::Parameter, true),
            "frozen" => (StateKind::Parameter, false),
            "optimizer" => (StateKind::Optimizer, false),
            _ => return self.error_at(kind_at, "`parameter`, `frozen` or `optimizer`"),
        };
        let source = self.text("the state's name, a string")?;
        self.expect(":")?;
        let ty = self.ty()?;
        self.expect("=")?;
        let init = match self.peek() {
            Token::Word(w) if w == "zeros" => {
                self.next();
                Init::Zeros
            }
            Token::Word(w) if w == "weight" => {
                self.next();
                Init::Weight(self.weight(&ty)?)
            }
            _ => {
                let t = self.tensor(&ty, "`zeros`, `weight` or a tensor")?;
                Init::Weight(WeightRef {
                    initializer: source.clone(),
                    region: ty.dims.iter().map(|&d| 0..d).collect(),
                    ty: ty.clone(),
                    storage: WeightStorage::Inline(Arc::new(t)),
                })
            }
        };
        let mut of = None;
        if self.eat_word("of") {
            let of_at = self.at;
            let owner = self.text("the name of a state, a string")?;
            of = self.g.states.iter().position(|s| s.name == owner).map(|i| StateId(i as u32));
            if of.is_none() {
                return self.error_at(of_at, "the name of a state defined before");
            }
        }
        let mut tied = Vec::new();
        loop {
            let transposed = self.eat_word("turned");
            if !transposed && !self.eat_word("copy") {
                break;
            }
            if !self.eat_word("weight") {
                return self.error("`weight`");
            }
            let dims: Vec<usize> = if transposed { ty.dims.iter().rev().copied().collect() } else { ty.dims.clone() };
            tied.push(Tied { weight: self.weight(&Type::new(ty.dtype, dims))?, transposed });
        }
        let id = StateId(self.g.states.len() as u32);
        if self.eat("->") {
            let write_at = self.at;
            let write = self.value_name()?;
            self.writes.push((id, write, write_at));
        }
        let read = self.define(at, name, title.unwrap_or(source.clone()), ty, Def::State(id))?;
        self.g.states.push(State { name: source, kind, read, write: None, init, of, trainable, tied });
        Ok(())
    }

    /// Behind `weight`: `"init" f32[8,6][0:8,2:4] file "path" 512 192`, or `inline` and a tensor.
    fn weight(&mut self, part: &Type) -> Parsed<WeightRef> {
        let initializer = self.text("the initializer's name, a string")?;
        let ty = self.ty()?;
        let at = self.at;
        let region = self.list("[", "]", |p| {
            let start: usize = p.number("a start")?;
            p.expect(":")?;
            Ok(start..p.number("an end")?)
        })?;
        let fits = region.len() == ty.rank()
            && region.iter().zip(&ty.dims).all(|(r, d)| r.start <= r.end && r.end <= *d)
            && region.iter().map(ExactSizeIterator::len).collect::<Vec<_>>() == part.dims;
        if !fits {
            return self.error_at(at, format!("a region of {ty} with the sizes of {part}"));
        }
        let at = self.at;
        let storage = match self.word("`file` or `inline`")?.as_str() {
            "file" => WeightStorage::File {
                path: self.text("a path, a string")?.into(),
                offset: self.number("a byte offset")?,
                length: self.number("a byte length")?,
            },
            "inline" => WeightStorage::Inline(Arc::new(self.tensor(&ty, "a tensor")?)),
            _ => return self.error_at(at, "`file` or `inline`"),
        };
        Ok(WeightRef { initializer, ty, region, storage })
    }

    fn constant(&mut self) -> Parsed<()> {
        let (at, name, title) = self.label()?;
        self.expect(":")?;
        let ty = self.ty()?;
        self.expect("=")?;
        let t = self.tensor(&ty, "a tensor")?;
        self.define(at, name, title.unwrap_or_default(), ty, Def::Const(Arc::new(t)))?;
        Ok(())
    }

    fn element(&mut self) -> Parsed<String> {
        match self.peek().clone() {
            Token::Number(n) => {
                self.next();
                Ok(n)
            }
            Token::Word(w) if w == "true" || w == "false" => {
                self.next();
                Ok(w)
            }
            _ => self.error("a number, `true` or `false`"),
        }
    }
    fn tensor(&mut self, ty: &Type, expected: &str) -> Parsed<Tensor> {
        let at = self.at;
        let made = match self.peek().clone() {
            Token::Number(_) => literal::of_elements(ty, &[self.element()?]),
            Token::Word(w) if w == "true" || w == "false" => literal::of_elements(ty, &[self.element()?]),
            Token::Word(w) if w == "splat" => {
                self.next();
                self.expect("(")?;
                let e = self.element()?;
                self.expect(")")?;
                literal::of_elements(&Type::new(ty.dtype, []), &[e]).map(|one| {
                    let mut t = Tensor::zeros(ty.clone());
                    t.bytes_mut().chunks_exact_mut(ty.dtype.size()).for_each(|c| c.copy_from_slice(one.bytes()));
                    t
                })
            }
            Token::Word(w) if w == "hex" => {
                self.next();
                let hex = self.text("bytes in hexadecimal, a string")?;
                literal::of_hex(ty, &hex)
            }
            Token::Word(w) if w == "elided" => return self.error("a tensor: this one was too large to print"),
            Token::Mark("[") => {
                let elements = self.list("[", "]", Parser::element)?;
                literal::of_elements(ty, &elements)
            }
            _ => return self.error(expected),
        };
        made.or_else(|expected| self.error_at(at, expected))
    }

    fn node(&mut self, section: Section) -> Parsed<()> {
        let mut labels = vec![self.label()?];
        while self.eat(",") {
            labels.push(self.label()?);
        }
        self.expect("=")?;
        let op_at = self.at;
        let op = self.op()?;
        let inputs = self.list("(", ")", Parser::operand)?;
        let operand_types: Vec<Type> = inputs.iter().map(|&v| self.g.ty(v).clone()).collect();
        let types = match op.infer(&operand_types) {
            Ok(types) => types,
            Err(e) => return self.error_at(op_at, format!("operands that fit ({e})")),
        };
        if types.len() != labels.len() {
            return self.error_at(labels[0].0, format!("{} results of {}", types.len(), op.name()));
        }
        if self.eat(":") {
            for (i, ty) in types.iter().enumerate() {
                if i > 0 {
                    self.expect(",")?;
                }
                let at = self.at;
                if self.ty()? != *ty {
                    return self.error_at(at, format!("{ty}, which {} gives", op.name()));
                }
            }
        }
        let mut of = None;
        if self.eat_word("of") {
            let at = self.at;
            let word = self.word("a node (`n0`, `n1`, ...)")?;
            let known = word.strip_prefix('n').and_then(|n| n.parse::<u32>().ok());
            of = known.filter(|n| (*n as usize) < self.g.nodes.len()).map(NodeId);
            if of.is_none() {
                return self.error_at(at, "a node defined before (`n0`, `n1`, ...)");
            }
        }
        let name = self.try_text().unwrap_or_default();
        let scope = if self.eat_word("in") { self.text("a scope, a string")? } else { String::new() };
        let id = NodeId(self.g.nodes.len() as u32);
        let mut outputs = Vec::new();
        for (i, ((at, label, title), ty)) in labels.into_iter().zip(types).enumerate() {
            outputs.push(self.define(at, label, title.unwrap_or_default(), ty, Def::Node(id, i))?);
        }
        self.g.nodes.push(Node { name, scope, op, inputs, outputs, section, of });
        Ok(())
    }

    /// `Transpose{perm=[0,2,1]}`
    fn op(&mut self) -> Parsed<Op> {
        let at = self.at;
        let name = self.word("an operator")?;
        let Some(def) = crate::ops::find(&name) else { return self.error_at(at, "an operator of the table") };
        let mut op = Op::new(def);
        if matches!(self.peek(), Token::Mark("{")) {
            for (name, attr) in self.list("{", "}", |p| p.attribute(def))? {
                op = op.with(name, attr);
            }
        }
        Ok(op)
    }
    fn attribute(&mut self, def: &'static OpDef) -> Parsed<(&'static str, Attr)> {
        let at = self.at;
        let name = self.word("an attribute")?;
        let Some((name, kind)) = def.attrs.iter().find(|(n, _)| *n == name) else {
            let known: Vec<&str> = def.attrs.iter().map(|(n, _)| *n).collect();
            return self.error_at(at, format!("an attribute of {} ({})", def.name, known.join(", ")));
        };
        self.expect("=")?;
        let attr = match kind {
            AttrKind::Int | AttrKind::Seed | AttrKind::BatchDim => Attr::Int(self.number("an integer")?),
            AttrKind::Ints => Attr::Ints(self.list("[", "]", |p| p.number("an integer"))?),
            AttrKind::Float => Attr::Float(self.number("a number")?),
            AttrKind::Bool => match self.element()?.as_str() {
                "true" => Attr::Bool(true),
                "false" => Attr::Bool(false),
                _ => return self.error_at(self.at - 1, "`true` or `false`"),
            },
            AttrKind::DType => Attr::DType(self.dtype()?),
            AttrKind::Str => Attr::Str(self.text("a string")?),
        };
        Ok((name, attr))
    }

    fn output(&mut self) -> Parsed<()> {
        let name = self.text("the output's name, a string")?;
        self.expect("=")?;
        let value = self.operand()?;
        let batch_dim = self.batch()?;
        self.g.outputs.push(Output { name, value, batch_dim });
        Ok(())
    }

    /// The graph with the value ids that its names give, where they are 0, 1, 2, ... without a gap.
    fn renumbered(self) -> Graph {
        let mut g = self.g;
        let n = g.values.len();
        let mut new = vec![None; n];
        let mut taken = vec![false; n];
        for (name, id) in &self.names {
            let number = name.parse::<usize>().ok().filter(|i| *i < n && i.to_string() == *name && !taken[*i]);
            let Some(number) = number else { return g };
            taken[number] = true;
            new[id.index()] = Some(ValueId(number as u32));
        }
        let map = |v: ValueId| new[v.index()].unwrap_or(v);
        let mut values: Vec<(ValueId, Value)> =
            g.values.into_iter().enumerate().map(|(i, v)| (map(ValueId(i as u32)), v)).collect();
        values.sort_by_key(|(id, _)| *id);
        g.values = values.into_iter().map(|(_, v)| v).collect();
        for n in &mut g.nodes {
            n.inputs.iter_mut().chain(&mut n.outputs).for_each(|v| *v = map(*v));
        }
        g.inputs.iter_mut().for_each(|x| x.value = map(x.value));
        g.outputs.iter_mut().for_each(|x| x.value = map(x.value));
        for s in &mut g.states {
            s.read = map(s.read);
            s.write = s.write.map(map);
        }
        g
    }
}
