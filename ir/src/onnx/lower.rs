//! Lowers a model's nodes to a graph, for given sizes.
//!
//! Nodes are visited in topological order, each lowered by the rule of its operator. Calls of local functions, and the
//! branch that a constant condition of `If` takes, are lowered in place, with names of their own. A node that fails is reported; those
//! that use its results are passed over, so that each report is a cause.
//!
//! Initializers: floats with dims become states, to be trained as [`super::trainable`] decides afterwards; integers, truth values and
//! scalars become constants, unless they are large or their file is absent.
//!
//! Nodes carry the name of the ONNX node they come from, and its module path: the last but one of
//! `pkg.torch.onnx.name_scopes`, else the name up to its last slash; a node with neither has that of the node before.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use protobuf::EnumOrUnknown;

use super::dim::DimError;
use super::error::{Problem, operator};
use super::import::{Attrs, ImportCx, OnnxAttr};
use super::model::{Bindings, Model, domain, function_opsets, opset, refers};
use super::order::{node_name, order};
use super::proto::onnx::attribute_proto::AttributeType;
use super::proto::onnx::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use super::rules;
use super::simplify::{simplify, take_apart};
use super::tensors::{self, Source};
use super::trainable;
use crate::builder::{Builder, FOLD_LIMIT};
use crate::dtype::DType;
use crate::fuse::{Forms, fuse};
use crate::graph::{Def, Graph, Init, StateKind, Tied, ValueId};
use crate::op::OpError;
use crate::rewrite::RewriteError;
use crate::tensor::{Tensor, Type};
use crate::train::draws;
use crate::weights::{WeightRef, WeightStorage};

/// Nodes lowered for one file, functions unfolded: more is an attack.
const MAX_NODES: usize = 1 << 21;
/// Calls of functions within functions, and branches within branches.
const MAX_DEPTH: usize = 32;
/// Quantised weights with more elements stay states.
const SMALL: usize = 4096;

/// What a name stands for while lowering.
#[derive(Clone, Copy)]
enum Slot {
    Value(ValueId),
    /// A node before failed, and is reported.
    Failed,
}

/// Where a name is defined.
enum Place<'m> {
    /// In a frame.
    Slot(Slot),
    /// As an initializer of the main graph.
    Initializer(&'m str, &'m Result<WeightRef, String>),
}

/// Names and versions of one list of nodes.
struct Frame<'a> {
    values: HashMap<&'a str, Slot>,
    /// The frame around, for branches.
    outer: Option<&'a Frame<'a>>,
    opsets: Cow<'a, BTreeMap<String, i64>>,
    /// For functions: attributes of the call.
    attrs: BTreeMap<String, OnnxAttr>,
    /// For functions: what precedes names.
    prefix: String,
    depth: usize,
    /// The functions being unfolded.
    calls: Vec<&'a FunctionProto>,
}

struct Lowering<'m> {
    model: &'m Model,
    b: Builder,
    problems: Vec<Problem>,
    initializers: HashMap<&'m str, Slot>,
    nodes: usize,
    scope: String,
}

/// See [`Model::instantiate`].
pub(super) fn instantiate(model: &Model, bindings: &Bindings, forms: Forms) -> Result<Graph, Vec<Problem>> {
    let mut problems = model.unsupported();
    let inputs = bind(model, bindings, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut name = model.proto.graph.name().to_string();
    if name.is_empty() {
        name = model.path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    }
    let mut low = Lowering {
        model,
        b: Builder::new(name),
        problems,
        initializers: HashMap::new(),
        nodes: 0,
        scope: String::new(),
    };
    let mut frame = Frame {
        values: HashMap::new(),
        outer: None,
        opsets: Cow::Borrowed(model.opsets()),
        attrs: BTreeMap::new(),
        prefix: String::new(),
        depth: 0,
        calls: Vec::new(),
    };
    for (port, ty) in model.signature().inputs.iter().zip(inputs) {
        let value = low.b.input(&port.name, ty, model.batch_dim(port));
        frame.values.insert(&port.name, Slot::Value(value));
    }
    low.list(&model.proto.graph.node, &model.order, &mut frame);
    for port in &model.signature().outputs {
        match low.resolve(&port.name, &frame, "output", "output") {
            Some(Slot::Value(v)) => {
                let dim = model.batch_dim(port).filter(|&d| d < low.b.ty(v).rank());
                low.b.output(&port.name, v, dim);
            }
            Some(Slot::Failed) => {}
            None => low.problem(&port.name, "output", "nothing defines it"),
        }
    }
    if !low.problems.is_empty() {
        return Err(low.problems);
    }
    let internal = |e: RewriteError| vec![Problem::Malformed { place: "the graph".to_string(), why: e.to_string() }];
    let graph = trainable::settle(low.b.finish(), |w| small_constant(model, w)).map_err(internal)?;
    let fused = fuse(&simplify(&graph).map_err(internal)?, forms).map_err(internal)?;
    let graph = take_apart(&fused).map_err(internal)?;
    let dims = if draws::any(&graph) { batch_dims_of_draws(model, bindings, forms, &graph) } else { Vec::new() };
    Ok(draws::with_batch_dims(graph, &dims))
}

/// Along which dim the batch lies in each random draw. A batch of one does not show it: then a batch of two is asked.
fn batch_dims_of_draws(model: &Model, bindings: &Bindings, forms: Forms, graph: &Graph) -> Vec<Option<usize>> {
    match model.batch_symbol() {
        Some(batch) if bindings.0.get(batch) == Some(&1) => {
            let mut two = bindings.clone();
            two.0.insert(batch.to_string(), 2);
            instantiate(model, &two, forms).map(|g| draws::told(&g)).unwrap_or_default()
        }
        _ => draws::batch_dims(graph),
    }
}

/// The types of the inputs under bindings; reports every symbol that is missing, unknown or no size.
fn bind(model: &Model, bindings: &Bindings, problems: &mut Vec<Problem>) -> Vec<Type> {
    let symbols = model.symbols();
    for symbol in symbols.iter().filter(|s| !bindings.0.contains_key(&s.name)) {
        problems.push(Problem::Unbound { symbol: symbol.name.clone(), places: symbol.places.clone() });
    }
    for name in bindings.0.keys().filter(|n| symbols.iter().all(|s| s.name != **n)) {
        let valid = symbols.iter().map(|s| s.name.clone()).collect();
        problems.push(Problem::NoSuchSymbol { symbol: name.clone(), valid });
    }
    let mut types = Vec::new();
    for port in &model.signature().inputs {
        let mut dims = Vec::new();
        for (at, dim) in port.dims.iter().flatten().enumerate() {
            match dim.eval(&bindings.0) {
                Ok(n) => dims.push(n as i64),
                Err(DimError::Unbound(_)) => dims.push(1), // reported above
                Err(DimError::NoSize(why)) => {
                    problems.push(Problem::Dim { place: format!("input `{}`, dim {at}", port.name), why });
                    dims.push(1);
                }
            }
        }
        // An input without a supported element type was refused when the file was opened.
        match tensors::typed_dims(port.dtype.unwrap_or(DType::F32), &dims) {
            Ok(ty) => types.push(ty),
            Err(why) => problems.push(Problem::Dim { place: format!("input `{}`", port.name), why }),
        }
    }
    types
}

/// The elements of an initializer, when they are in the file or in an external file that exists.
fn elements(model: &Model, w: &WeightRef) -> Result<Option<Tensor>, String> {
    let t = match &w.storage {
        WeightStorage::Inline(t) => Some(Tensor::clone(t)),
        WeightStorage::File { path, offset, length } if *path == model.path => {
            let end = offset.saturating_add(*length);
            let bytes = model.bytes.get(*offset as usize..end as usize).ok_or("its bytes are not within the file")?;
            Tensor::from_bytes(w.ty.clone(), bytes)
        }
        WeightStorage::File { path, .. } if !path.exists() => None,
        WeightStorage::File { .. } => Some(w.read(&w.region.clone()).map_err(|e| e.to_string())?),
    };
    t.map(tensors::bools).transpose()
}

/// The elements of a table that is not trained, when it is small enough to be a constant and at hand.
fn small_constant(model: &Model, w: &WeightRef) -> Option<Tensor> {
    (w.ty.numel() <= FOLD_LIMIT).then(|| elements(model, w).ok().flatten()).flatten()
}

/// The module path of a node, where it says one.
fn scope_of(node: &NodeProto) -> Option<String> {
    if let Some(scopes) = node.metadata_props.iter().find(|p| p.key() == "pkg.torch.onnx.name_scopes") {
        // A printed Python list of paths, each within the one before; the last is the operator itself.
        let paths: Vec<&str> = scopes.value().trim_matches(['[', ']']).split(", ").collect();
        let within = paths.len().checked_sub(2).map_or("", |at| paths[at].trim_matches(['\'', '"']));
        return Some(if within.starts_with("_empty_nn_module_stack") { String::new() } else { within.to_string() });
    }
    let (path, _) = node.name().strip_prefix('/')?.rsplit_once('/').unwrap_or(("", ""));
    Some(path.replace('/', "."))
}

impl<'m> Lowering<'m> {
    fn problem(&mut self, node: &str, op: &str, why: impl Into<String>) {
        self.problems.push(Problem::Node { node: node.to_string(), op: op.to_string(), why: why.into() });
    }

    /// Where a name is defined, as seen from a frame.
    fn lookup(&self, name: &str, frame: &Frame<'_>) -> Option<Place<'m>> {
        let mut at = Some(frame);
        while let Some(f) = at {
            if let Some(slot) = f.values.get(name) {
                return Some(Place::Slot(*slot));
            }
            if f.outer.is_none() && f.depth > 0 {
                return None; // a function does not see the names of its caller
            }
            at = f.outer;
        }
        self.model.initializers.get_key_value(name).map(|(name, found)| Place::Initializer(name, found))
    }

    /// What a name stands for; initializers become values at their first use.
    fn resolve(&mut self, name: &str, frame: &Frame<'_>, node: &str, op: &str) -> Option<Slot> {
        let (name, found) = match self.lookup(name, frame)? {
            Place::Slot(slot) => return Some(slot),
            Place::Initializer(name, found) => (name, found),
        };
        if let Some(slot) = self.initializers.get(name) {
            return Some(*slot);
        }
        let original = self.model.tied.get(name).filter(|_| found.is_ok());
        let made = match original {
            Some(o) => match self.resolve(&o.name, frame, node, op)? {
                Slot::Value(v) if o.transposed => self.b.transpose(v, &[1, 0]).map_err(|e| e.0),
                Slot::Value(v) => Ok(v),
                Slot::Failed => return Some(Slot::Failed),
            },
            None => found.clone().and_then(|w| self.initializer(&w)),
        };
        let slot = match made {
            Ok(v) => Slot::Value(v),
            Err(why) => {
                self.problem(node, op, format!("initializer `{name}`: {why}"));
                Slot::Failed
            }
        };
        self.initializers.insert(name, slot);
        Some(slot)
    }

    fn initializer(&mut self, w: &WeightRef) -> Result<ValueId, String> {
        let (ty, n) = (&w.ty, w.ty.numel());
        let constant = match ty.dtype {
            _ if ty.rank() == 0 => true,
            DType::I64 | DType::I32 | DType::Bool => n <= FOLD_LIMIT,
            DType::I8 | DType::U8 => n <= SMALL,
            DType::F64 | DType::F32 | DType::F16 | DType::Bf16 => n == 0,
        };
        if constant && let Some(t) = elements(self.model, w)? {
            return Ok(self.b.constant(t));
        }
        let state = self.b.state(&w.initializer, StateKind::Parameter, ty.clone(), Init::Weight(w.clone()), None);
        let learned = ty.dtype.is_float() && ty.rank() > 0 && !self.model.tables.contains(&w.initializer);
        let copies = self.model.tied.iter().filter(|(_, o)| o.name == w.initializer);
        let tied = copies.filter_map(|(name, o)| {
            let weight = self.model.initializers.get(name)?.clone().ok()?;
            Some(Tied { weight, transposed: o.transposed })
        });
        let tied = tied.collect();
        let slot = &mut self.b.graph_mut().states[state.index()];
        slot.trainable = learned;
        slot.tied = tied;
        Ok(self.b.graph().state(state).read)
    }

    /// Lowers a list of nodes.
    fn list<'a>(&mut self, nodes: &'a [NodeProto], order: &[usize], frame: &mut Frame<'a>)
    where
        'm: 'a,
    {
        for &at in order {
            let node = &nodes[at];
            let name = format!("{}{}", frame.prefix, node_name(node, at));
            let op = operator(domain(node.domain()), node.op_type());
            self.nodes += 1;
            if self.nodes == MAX_NODES {
                self.problem(&name, &op, format!("more than {MAX_NODES} nodes, functions unfolded"));
            }
            let results = if self.nodes < MAX_NODES { self.node(node, &name, &op, frame) } else { None };
            for (i, out) in node.output.iter().enumerate().filter(|(_, out)| !out.is_empty()) {
                let slot = match results.as_ref().map(|r| r.get(i)) {
                    Some(Some(&slot)) => slot,
                    Some(None) => {
                        self.problem(&name, &op, format!("result {i} (`{out}`) is not supported"));
                        Slot::Failed
                    }
                    None => Slot::Failed,
                };
                if let Slot::Value(v) = slot {
                    self.name_value(v, out, &frame.prefix);
                }
                frame.values.insert(out, slot);
            }
        }
    }

    fn name_value(&mut self, v: ValueId, name: &str, prefix: &str) {
        let value = &mut self.b.graph_mut().values[v.index()];
        if value.name.is_empty() && matches!(value.def, Def::Node(..)) {
            value.name = format!("{prefix}{name}");
        }
    }

    /// Lowers a node; `None` when it failed, which is reported, or uses what failed.
    fn node<'a>(&mut self, node: &'a NodeProto, name: &str, op: &str, frame: &Frame<'a>) -> Option<Vec<Slot>>
    where
        'm: 'a,
    {
        if let Some(scope) = scope_of(node) {
            self.scope = scope;
        }
        // Before operands: what a tied weight needs is emitted at its first use.
        self.b.name = name.to_string();
        self.b.scope = self.scope.clone();
        let mut inputs = Vec::with_capacity(node.input.len());
        let mut failed = false;
        for input in &node.input {
            inputs.push(match input.as_str() {
                "" => None,
                input => match self.resolve(input, frame, name, op) {
                    Some(Slot::Value(v)) => Some(v),
                    Some(Slot::Failed) => {
                        failed = true;
                        None
                    }
                    None => {
                        self.problem(name, op, format!("it uses `{input}`, which nothing defines"));
                        failed = true;
                        None
                    }
                },
            });
        }
        if failed {
            return None;
        }
        let space = domain(node.domain());
        if space.is_empty() && node.op_type() == "If" {
            return self.branch(node, name, op, &inputs, frame);
        }
        let version = opset(&frame.opsets, node.domain());
        let attrs = match self.attributes(&node.attribute, frame) {
            Ok(attrs) => attrs,
            Err(why) => {
                self.problem(name, op, why);
                return None;
            }
        };
        let rule = match rules::rule(space, node.op_type(), version) {
            Ok(rule) => rule,
            Err(_) if self.model.function(node).is_some() => return self.call(node, name, op, &inputs, attrs, frame),
            Err(why) => {
                let (domain, op) = (space.to_string(), node.op_type().to_string());
                self.problems.push(Problem::Unsupported {
                    domain,
                    op,
                    opset: version,
                    nodes: vec![name.to_string()],
                    why,
                });
                return None;
            }
        };
        let outputs: Vec<bool> = node.output.iter().map(|o| !o.is_empty()).collect();
        let attrs = Attrs::new(&attrs);
        let mut cx = ImportCx {
            b: &mut self.b,
            op_type: node.op_type(),
            opset: version,
            inputs: &inputs,
            attrs: &attrs,
            outputs: &outputs,
        };
        match (rule.lower)(&mut cx) {
            Ok(_) if !attrs.ignored().is_empty() => {
                let names = attrs.ignored().join("`, `");
                self.problem(
                    name,
                    op,
                    format!("attribute `{names}` is not supported, or of a kind that it cannot be; export without it"),
                );
                None
            }
            Ok(results) => Some(results.into_iter().map(Slot::Value).collect()),
            Err(OpError(why)) => {
                self.problem(name, op, why);
                None
            }
        }
    }

    /// Lowers the branch that a constant condition takes.
    fn branch<'a>(
        &mut self,
        node: &'a NodeProto,
        name: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        frame: &Frame<'a>,
    ) -> Option<Vec<Slot>>
    where
        'm: 'a,
    {
        let condition = inputs.first().copied().flatten().and_then(|v| self.b.graph().constant(v).cloned());
        let Some(taken) = condition.and_then(|t| t.bytes().first().map(|&x| x != 0)) else {
            let why = "its condition depends on the input data, and branches are not supported; export the model for one case";
            let (domain, op) = (String::new(), op.to_string());
            let opset = opset(&frame.opsets, "");
            let why = why.to_string();
            self.problems.push(Problem::Unsupported { domain, op, opset, nodes: vec![name.to_string()], why });
            return None;
        };
        let wanted = if taken { "then_branch" } else { "else_branch" };
        let Some(graph) = node.attribute.iter().find(|a| a.name() == wanted).and_then(|a| a.g.as_ref()) else {
            self.problem(name, op, format!("it has no {wanted}"));
            return None;
        };
        self.subgraph(graph, name, op, frame)
    }

    fn subgraph(&mut self, graph: &GraphProto, name: &str, op: &str, frame: &Frame<'_>) -> Option<Vec<Slot>> {
        if frame.depth >= MAX_DEPTH {
            self.problem(name, op, format!("more than {MAX_DEPTH} branches or calls within each other"));
            return None;
        }
        let source = Source { path: &self.model.path, bytes: &self.model.bytes };
        let mut values = HashMap::new();
        for t in &graph.initializer {
            match tensors::attribute(t, &source) {
                Ok(found) => values.insert(t.name(), Slot::Value(self.b.constant(found))),
                Err(why) => {
                    self.problem(name, op, format!("initializer `{}`: {why}", t.name()));
                    return None;
                }
            };
        }
        let order = match order(&graph.node, &|name| values.contains_key(name) || self.lookup(name, frame).is_some()) {
            Ok(order) => order,
            Err(problems) => {
                problems.into_iter().for_each(|why| self.problem(name, op, why));
                return None;
            }
        };
        let mut inner = Frame {
            values,
            outer: Some(frame),
            opsets: Cow::Borrowed(&*frame.opsets),
            attrs: frame.attrs.clone(),
            prefix: format!("{name}/"),
            depth: frame.depth + 1,
            calls: frame.calls.clone(),
        };
        self.list(&graph.node, &order, &mut inner);
        self.results(graph.output.iter().map(|o| o.name()), &inner, name, op)
    }

    /// Lowers a call of a local function.
    fn call(
        &mut self,
        node: &NodeProto,
        name: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        mut attrs: BTreeMap<String, OnnxAttr>,
        frame: &Frame<'_>,
    ) -> Option<Vec<Slot>> {
        let model = self.model;
        let (function, order) = model.function(node)?;
        if frame.calls.iter().any(|f| std::ptr::eq(*f, function)) {
            self.problem(name, op, "the function calls itself");
            return None;
        }
        if frame.depth >= MAX_DEPTH {
            self.problem(name, op, format!("more than {MAX_DEPTH} branches or calls within each other"));
            return None;
        }
        let source = Source { path: &model.path, bytes: &model.bytes };
        for default in &function.attribute_proto {
            match attribute(default, &source) {
                Ok(value) => {
                    attrs.entry(default.name().to_string()).or_insert(value);
                }
                Err(why) => {
                    self.problem(name, op, why);
                    return None;
                }
            }
        }
        let formal = function.input.iter().zip(inputs.iter().copied().chain(std::iter::repeat(None)));
        let values = formal.filter_map(|(f, v)| Some((f.as_str(), Slot::Value(v?)))).collect();
        let mut inner = Frame {
            values,
            outer: None,
            opsets: Cow::Owned(function_opsets(function)),
            attrs,
            prefix: format!("{name}/"),
            depth: frame.depth + 1,
            calls: frame.calls.iter().copied().chain([function]).collect(),
        };
        // Operands that the call leaves out are left out where the body uses them.
        let left_out: BTreeSet<&str> = function.input.iter().map(String::as_str).collect();
        let left_out: BTreeSet<&str> = left_out.into_iter().filter(|f| !inner.values.contains_key(f)).collect();
        if left_out.is_empty() {
            self.list(&function.node, order, &mut inner);
        } else {
            let mut nodes = function.node.clone();
            for input in nodes.iter_mut().flat_map(|n| n.input.iter_mut()) {
                if left_out.contains(input.as_str()) {
                    input.clear();
                }
            }
            return self.call_body(&nodes, order, inner, function.output.iter().map(String::as_str), name, op);
        }
        self.results(function.output.iter().map(String::as_str), &inner, name, op)
    }

    /// Lowers nodes that live only during the call.
    fn call_body<'n>(
        &mut self,
        nodes: &[NodeProto],
        order: &[usize],
        frame: Frame<'_>,
        outputs: impl Iterator<Item = &'n str>,
        name: &str,
        op: &str,
    ) -> Option<Vec<Slot>> {
        let mut inner = Frame { values: frame.values.into_iter().collect(), ..frame };
        self.list(nodes, order, &mut inner);
        self.results(outputs, &inner, name, op)
    }

    fn results<'n>(
        &mut self,
        names: impl Iterator<Item = &'n str>,
        frame: &Frame<'_>,
        name: &str,
        op: &str,
    ) -> Option<Vec<Slot>> {
        let mut found = Vec::new();
        for out in names {
            let Some(slot) = self.resolve(out, frame, name, op) else {
                self.problem(name, op, format!("its result `{out}` is not defined"));
                return None;
            };
            found.push(slot);
        }
        Some(found)
    }

    /// A node's attributes; those of an enclosing function put in.
    fn attributes(&self, attrs: &[AttributeProto], frame: &Frame<'_>) -> Result<BTreeMap<String, OnnxAttr>, String> {
        let source = Source { path: &self.model.path, bytes: &self.model.bytes };
        let mut found = BTreeMap::new();
        for a in attrs {
            let value = match refers(a) {
                Some(outer) => match frame.attrs.get(outer) {
                    Some(value) => value.clone(),
                    None => continue, // left out by the caller
                },
                None => attribute(a, &source)?,
            };
            found.insert(a.name().to_string(), value);
        }
        Ok(found)
    }
}

/// The value of an attribute.
fn attribute(a: &AttributeProto, source: &Source<'_>) -> Result<OnnxAttr, String> {
    let text = |s: &[u8]| String::from_utf8_lossy(s).into_owned();
    // Old files leave out the type: it is that of the field that is set.
    let ty = match a.type_.map(|t: EnumOrUnknown<AttributeType>| t.enum_value()) {
        Some(Ok(AttributeType::UNDEFINED)) | None => match () {
            () if a.f.is_some() => AttributeType::FLOAT,
            () if a.i.is_some() => AttributeType::INT,
            () if a.s.is_some() => AttributeType::STRING,
            () if a.t.is_some() => AttributeType::TENSOR,
            () if a.g.is_some() => AttributeType::GRAPH,
            () if !a.floats.is_empty() => AttributeType::FLOATS,
            () if !a.strings.is_empty() => AttributeType::STRINGS,
            () => AttributeType::INTS,
        },
        Some(Ok(ty)) => ty,
        Some(Err(number)) => return Err(format!("attribute `{}` has the unknown type {number}", a.name())),
    };
    Ok(match ty {
        AttributeType::FLOAT => OnnxAttr::Float(a.f()),
        AttributeType::INT => OnnxAttr::Int(a.i()),
        AttributeType::STRING => OnnxAttr::Str(text(a.s())),
        AttributeType::FLOATS => OnnxAttr::Floats(a.floats.clone()),
        AttributeType::INTS => OnnxAttr::Ints(a.ints.clone()),
        AttributeType::STRINGS => OnnxAttr::Strs(a.strings.iter().map(|s| text(s)).collect()),
        AttributeType::TENSOR => {
            let t = a.t.as_ref().ok_or_else(|| format!("attribute `{}` has no tensor", a.name()))?;
            let t = tensors::attribute(t, source).map_err(|why| format!("attribute `{}`: {why}", a.name()))?;
            OnnxAttr::Tensor(Arc::new(t))
        }
        AttributeType::GRAPH | AttributeType::GRAPHS => OnnxAttr::Other("a subgraph"),
        _ => OnnxAttr::Other("a sparse tensor or a type"),
    })
}
