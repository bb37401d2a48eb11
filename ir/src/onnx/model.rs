//! A model file, parsed and checked once.
//!
//! The file stays mapped; weights are references into it or into external files, and are not read. What does not depend
//! on sizes is checked here, and all of it is reported at once.
//!
//! Symbols are those of the *inputs'* dims: sizes of results follow from them. A dim without a name gets one made of the input's
//! name and the dim's index, `pixel_values.2`.
//!
//! The *batch symbol* is the one along which micro-batches are cut: of the symbols that alone are dim 0 of an input, that
//! of most inputs (of equals, the first). An input or output has its batch dim where that symbol occurs in a dim.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use protobuf::Message;
use sha2::{Digest, Sha256};

use super::dim::Dim;
use super::error::{ImportErrors, Problem};
use super::order::{node_name, order};
use super::proto::onnx::tensor_shape_proto::dimension::Value as DimValue;
use super::proto::onnx::type_proto::Value as TypeValue;
use super::proto::onnx::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto};
use super::tensors::{self, Source};
use super::{lower, rules, tied};
use crate::dtype::DType;
use crate::fuse::Forms;
use crate::graph::Graph;
use crate::weights::{WeightRef, WeightStorage};

/// Sizes of symbols.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings(pub BTreeMap<String, usize>);

impl<K: Into<String>, const N: usize> From<[(K, usize); N]> for Bindings {
    fn from(pairs: [(K, usize); N]) -> Bindings {
        Bindings(pairs.into_iter().map(|(k, v)| (k.into(), v)).collect())
    }
}

/// A symbol of the inputs' sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// Its name.
    pub name: String,
    /// Where it occurs: ``input `input_ids`, dim 0``.
    pub places: Vec<String>,
}

/// An input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Element type, where the file says it and tensors here can have it.
    pub dtype: Option<DType>,
    /// Sizes, where the file says them.
    pub dims: Option<Vec<Dim>>,
}

/// What a model takes and gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// What the caller feeds (initializers that are listed as inputs left out).
    pub inputs: Vec<Port>,
    /// What the caller gets.
    pub outputs: Vec<Port>,
}

/// A parsed model file.
pub struct Model {
    pub(super) path: PathBuf,
    pub(super) bytes: Bytes,
    pub(super) proto: ModelProto,
    sha256: String,
    opsets: BTreeMap<String, i64>,
    signature: Signature,
    /// Per initializer, where its elements are, or why they cannot be used.
    pub(super) initializers: HashMap<String, Result<WeightRef, String>>,
    /// Initializers that are never learned because of the operands they are, see [`TABLES`].
    pub(super) tables: BTreeSet<String>,
    /// Initializers that are copies of others.
    pub(super) tied: BTreeMap<String, tied::Original>,
    /// Order in which the main graph's nodes are lowered.
    pub(super) order: Vec<usize>,
    /// Local functions by domain, name and overload, with the order of their nodes.
    pub(super) functions: HashMap<(String, String, String), (usize, Vec<usize>)>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({})", self.path.display())
    }
}

/// The domain's name, ONNX's own being empty.
pub(super) fn domain(name: &str) -> &str {
    if name == "ai.onnx" { "" } else { name }
}

fn opset_imports<'a>(imports: impl Iterator<Item = (&'a str, i64)>) -> BTreeMap<String, i64> {
    imports.map(|(name, version)| (domain(name).to_string(), version)).collect()
}

/// The versions of a function's domains.
pub(super) fn function_opsets(f: &FunctionProto) -> BTreeMap<String, i64> {
    opset_imports(f.opset_import.iter().map(|o| (o.domain(), o.version())))
}

impl Model {
    /// Opens and parses a model file, and checks all that does not depend on sizes.
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ImportErrors> {
        let path = path.as_ref();
        let fail = |problems| ImportErrors { path: path.to_path_buf(), problems };
        let unreadable = |e: std::io::Error| fail(vec![Problem::Unreadable(e.to_string())]);
        let file = File::open(path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if !meta.is_file() {
            return Err(fail(vec![Problem::Unreadable("it is not a file".to_string())]));
        }
        if meta.len() == 0 {
            return Err(fail(vec![malformed("the file", "it is empty")]));
        }
        // SAFETY: the map is read only. A process that cuts the file meanwhile ends this one; nothing outside it is reached.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(unreadable)?;
        Model::parse(path.to_path_buf(), Bytes::from_owner(map)).map_err(fail)
    }

    /// Parses the bytes of a model file; external data is looked for beside `path`.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn from_bytes(path: impl AsRef<Path>, bytes: impl Into<Bytes>) -> Result<Model, ImportErrors> {
        let path = path.as_ref().to_path_buf();
        Model::parse(path.clone(), bytes.into()).map_err(|problems| ImportErrors { path, problems })
    }

    fn parse(path: PathBuf, bytes: Bytes) -> Result<Model, Vec<Problem>> {
        let proto = ModelProto::parse_from_tokio_bytes(&bytes).map_err(|e| {
            vec![malformed("the file", format!("it is no ONNX model, or damaged ({e}); export or copy it again"))]
        })?;
        if proto.graph.is_none() {
            return Err(vec![malformed("the file", "it has no graph; export or copy it again")]);
        }
        let sha256 = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        let mut problems = Vec::new();
        let opsets = opset_imports(proto.opset_import.iter().map(|o| (o.domain(), o.version())));
        if !opsets.contains_key("") {
            problems.push(malformed("the file", "it does not say its opset version"));
        }
        let initializers = initializers(&proto, &Source { path: &path, bytes: &bytes }, &mut problems);
        let signature = signature(&proto.graph, &initializers, &mut problems);
        let order = main_order(&proto, &initializers, &signature, &mut problems);
        let functions = functions(&proto, &mut problems);
        if !problems.is_empty() {
            return Err(problems);
        }
        let tables = tables(&proto.graph.node);
        let names = proto.graph.initializer.iter().map(|t| t.name());
        let calls = |node: &NodeProto| {
            let key = (domain(node.domain()).to_string(), node.op_type().to_string(), node.overload().to_string());
            functions.get(&key).map(|(at, order)| (&proto.functions[*at], &order[..]))
        };
        let uses = tied::uses(&proto.graph.node, &order, &calls);
        let tied = tied::find(names, &initializers, &uses, &path, &bytes);
        Ok(Model { tied, path, bytes, proto, sha256, opsets, signature, initializers, tables, order, functions })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The file, and the external files with its weights.
    pub fn files(&self) -> BTreeSet<&Path> {
        let mut files = BTreeSet::from([self.path()]);
        for w in self.initializers.values().flatten() {
            if let WeightStorage::File { path, .. } = &w.storage {
                files.insert(path);
            }
        }
        files
    }
    /// SHA-256 of the file, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
    /// Opset version of each domain; ONNX's own is empty.
    pub fn opsets(&self) -> &BTreeMap<String, i64> {
        &self.opsets
    }
    /// Inputs and outputs.
    pub fn signature(&self) -> &Signature {
        &self.signature
    }
    /// The messages of the file.
    #[doc(hidden)]
    pub fn proto(&self) -> &ModelProto {
        &self.proto
    }

    /// The symbols to bind, by name.
    pub fn symbols(&self) -> Vec<Symbol> {
        let mut found: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for input in &self.signature.inputs {
            for (at, dim) in input.dims.iter().flatten().enumerate() {
                for symbol in dim.symbols() {
                    let place = match dim {
                        Dim::Symbol(_) => format!("input `{}`, dim {at}", input.name),
                        _ => format!("input `{}`, dim {at}: {dim}", input.name),
                    };
                    found.entry(symbol).or_default().push(place);
                }
            }
        }
        found.into_iter().map(|(name, places)| Symbol { name: name.to_string(), places }).collect()
    }

    /// The symbol along which micro-batches are cut, see the module.
    pub fn batch_symbol(&self) -> Option<&str> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for input in &self.signature.inputs {
            if let Some(Dim::Symbol(name)) = input.dims.as_ref().and_then(|d| d.first()) {
                match counts.iter_mut().find(|(n, _)| n == name) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((name, 1)),
                }
            }
        }
        counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(name, _)| name)
    }

    /// Where an input or output has the batch symbol.
    pub(super) fn batch_dim(&self, port: &Port) -> Option<usize> {
        let symbol = self.batch_symbol()?;
        port.dims.as_ref()?.iter().position(|d| d.symbols().contains(symbol))
    }

    /// Operators that are not in the operator table, with the nodes that apply them.
    pub fn unsupported(&self) -> Vec<Problem> {
        let mut found: BTreeMap<(String, String, i64), (Vec<String>, String)> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut lists = vec![(&self.proto.graph.node, self.opsets.clone(), String::new())];
        while let Some((nodes, opsets, inside)) = lists.pop() {
            for (at, node) in nodes.iter().enumerate() {
                let (space, opset) = (domain(node.domain()), opset(&opsets, node.domain()));
                if space.is_empty() && node.op_type() == "If" {
                    continue; // whether its condition is constant is known only with sizes
                }
                let Err(why) = rules::rule(space, node.op_type(), opset) else { continue };
                if let Some((function, _)) = self.function(node) {
                    if seen.insert((function.domain(), function.name(), function.overload())) {
                        lists.push((&function.node, function_opsets(function), format!("{}/", function.name())));
                    }
                    continue;
                }
                let key = (space.to_string(), node.op_type().to_string(), opset);
                let entry = found.entry(key).or_insert_with(|| (Vec::new(), why));
                entry.0.push(format!("{inside}{}", node_name(node, at)));
            }
        }
        let problem = |((domain, op, opset), (nodes, why))| Problem::Unsupported { domain, op, opset, nodes, why };
        found.into_iter().map(problem).collect()
    }

    /// The local function that a node calls, with the order of its nodes.
    pub(super) fn function(&self, node: &NodeProto) -> Option<(&FunctionProto, &[usize])> {
        let key = (domain(node.domain()).to_string(), node.op_type().to_string(), node.overload().to_string());
        let (at, order) = self.functions.get(&key)?;
        Some((&self.proto.functions[*at], order))
    }

    /// Makes the graph for sizes of the symbols.
    ///
    /// # Errors
    /// Everything in the way: bindings, operators, nodes.
    pub fn instantiate(&self, bindings: &Bindings) -> Result<Graph, ImportErrors> {
        self.instantiate_with(bindings, Forms::ALL)
    }

    /// The same, with a choice of the fused forms that are made.
    ///
    /// # Errors
    /// As [`Model::instantiate`].
    pub fn instantiate_with(&self, bindings: &Bindings, forms: Forms) -> Result<Graph, ImportErrors> {
        lower::instantiate(self, bindings, forms).map_err(|problems| ImportErrors { path: self.path.clone(), problems })
    }
}

/// The opset version of a node's domain; 1 where the file does not say.
pub(super) fn opset(opsets: &BTreeMap<String, i64>, of: &str) -> i64 {
    opsets.get(domain(of)).copied().unwrap_or(1)
}

fn malformed(place: impl Into<String>, why: impl Into<String>) -> Problem {
    Problem::Malformed { place: place.into(), why: why.into() }
}

fn initializers(
    proto: &ModelProto,
    source: &Source<'_>,
    problems: &mut Vec<Problem>,
) -> HashMap<String, Result<WeightRef, String>> {
    let mut found = HashMap::new();
    for (at, t) in proto.graph.initializer.iter().enumerate() {
        if t.name().is_empty() {
            problems.push(malformed(format!("initializer {at}"), "it has no name"));
        } else if found.insert(t.name().to_string(), tensors::reference(t, source)).is_some() {
            problems.push(malformed(format!("initializer `{}`", t.name()), "it is defined twice"));
        }
    }
    for t in &proto.graph.sparse_initializer {
        let why = Err("sparse initializers are not supported; export with dense weights".to_string());
        found.entry(t.values.name().to_string()).or_insert(why);
    }
    found
}

fn signature(
    graph: &GraphProto,
    initializers: &HashMap<String, Result<WeightRef, String>>,
    problems: &mut Vec<Problem>,
) -> Signature {
    let mut names = BTreeSet::new();
    let mut inputs = Vec::new();
    for info in graph.input.iter().filter(|i| !initializers.contains_key(i.name())) {
        if !names.insert(info.name()) {
            problems.push(malformed(format!("input `{}`", info.name()), "it is defined twice"));
        }
        match port("input", info) {
            Ok(port) => inputs.push(port),
            Err(problem) => problems.push(problem),
        }
    }
    let mut names = BTreeSet::new();
    let mut outputs = Vec::new();
    for info in &graph.output {
        if !names.insert(info.name()) {
            problems.push(malformed(format!("output `{}`", info.name()), "it is listed twice"));
        }
        match port("output", info) {
            Ok(port) => outputs.push(port),
            // What the file says of results is not needed: it is inferred.
            Err(_) => outputs.push(Port { name: info.name().to_string(), dtype: None, dims: None }),
        }
    }
    if outputs.is_empty() {
        problems.push(malformed("the graph", "it has no outputs"));
    }
    Signature { inputs, outputs }
}

fn port(what: &str, info: &ValueInfoProto) -> Result<Port, Problem> {
    let name = info.name();
    let place = format!("{what} `{name}`");
    if name.is_empty() {
        return Err(malformed(what, "it has no name"));
    }
    let Some(TypeValue::TensorType(ty)) = &info.type_.value else {
        return Err(malformed(place, "it is no tensor; sequences, maps and optional values are not supported"));
    };
    let dtype = tensors::dtype(ty.elem_type()).map_err(|why| malformed(place.clone(), why))?;
    let dims = match ty.shape.as_ref() {
        None if what == "input" => {
            return Err(malformed(place, "its number of dims is not known; export it with a shape"));
        }
        None => None,
        Some(shape) => {
            let mut dims = Vec::new();
            for (at, d) in shape.dim.iter().enumerate() {
                dims.push(match &d.value {
                    Some(DimValue::DimParam(text)) if !text.trim().is_empty() => Dim::parse(text),
                    // Some writers mark a dim without a name by -1.
                    Some(DimValue::DimValue(x)) if *x != -1 => {
                        if *x < 0 {
                            return Err(malformed(place, format!("dim {at} is {x}")));
                        }
                        Dim::Int(*x)
                    }
                    _ => Dim::Symbol(format!("{name}.{at}")),
                });
            }
            Some(dims)
        }
    };
    Ok(Port { name: name.to_string(), dtype: Some(dtype), dims })
}

fn main_order(
    proto: &ModelProto,
    initializers: &HashMap<String, Result<WeightRef, String>>,
    signature: &Signature,
    problems: &mut Vec<Problem>,
) -> Vec<usize> {
    let inputs: BTreeSet<&str> = proto.graph.input.iter().map(|i| i.name()).collect();
    let known = |name: &str| inputs.contains(name) || initializers.contains_key(name);
    let nodes = &proto.graph.node;
    let defined: BTreeSet<&str> = nodes.iter().flat_map(|n| n.output.iter().map(String::as_str)).collect();
    for output in signature.outputs.iter().filter(|o| !known(&o.name) && !defined.contains(o.name.as_str())) {
        problems.push(malformed(format!("output `{}`", output.name), "nothing defines it"));
    }
    order(nodes, &known).unwrap_or_else(|found| {
        problems.extend(found.into_iter().map(|why| malformed("the graph", why)));
        Vec::new()
    })
}

type Functions = HashMap<(String, String, String), (usize, Vec<usize>)>;

fn functions(proto: &ModelProto, problems: &mut Vec<Problem>) -> Functions {
    let mut found = HashMap::new();
    for (at, f) in proto.functions.iter().enumerate() {
        let place = format!("function `{}`", f.name());
        let inputs: BTreeSet<&str> = f.input.iter().map(String::as_str).collect();
        let order = order(&f.node, &|name| inputs.contains(name)).unwrap_or_else(|found| {
            problems.extend(found.into_iter().map(|why| malformed(place.clone(), why)));
            Vec::new()
        });
        let key = (domain(f.domain()).to_string(), f.name().to_string(), f.overload().to_string());
        if found.insert(key, (at, order)).is_some() {
            problems.push(malformed(place, "it is defined twice"));
        }
    }
    found
}

/// Operands that are tables of the model and never learned: domain, operator, operands.
const TABLES: &[(&str, &str, std::ops::Range<usize>)] =
    &[("", "BatchNormalization", 3..5), ("", "RotaryEmbedding", 1..3)];

/// The names that only such operands have: running statistics, tables of rotary embeddings.
fn tables(nodes: &[NodeProto]) -> BTreeSet<String> {
    let (mut found, mut other) = (BTreeSet::new(), BTreeSet::new());
    for node in nodes {
        let places = TABLES.iter().find(|(d, op, _)| *d == domain(node.domain()) && *op == node.op_type());
        for (i, name) in node.input.iter().enumerate() {
            let is = places.is_some_and(|(.., at)| at.contains(&i));
            if is { &mut found } else { &mut other }.insert(name.clone());
        }
    }
    found.difference(&other).cloned().collect()
}

/// The attribute of the enclosing function that an attribute refers to, if it does.
pub(super) fn refers(a: &AttributeProto) -> Option<&str> {
    a.ref_attr_name.as_deref().filter(|s| !s.is_empty())
}
