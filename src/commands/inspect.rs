//! `inspect`: what a model file holds.

use std::collections::BTreeMap;

use autoshard_ir::onnx::Bindings;

use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::{loaded, show, workload};

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let model = loaded::model(&args.model)?;
    let port = |p: &autoshard_ir::onnx::Port| {
        let dims =
            p.dims.as_ref().map_or("?".into(), |d| d.iter().map(|x| x.to_string()).collect::<Vec<_>>().join(", "));
        format!("{} {}[{dims}]", p.name, p.dtype.map_or("?", |d| d.name()))
    };
    let unsupported: Vec<String> = model.unsupported().iter().map(|p| p.to_string()).collect();
    // Without any size only what the file says is shown.
    let wanted = args.graph || !args.dim.is_empty() || model.symbols().is_empty();
    let graph = if wanted {
        let sizes = workload::dims(&model, &args.dim, None)?;
        match model.instantiate(&Bindings(sizes)) {
            Ok(graph) => Some(graph),
            Err(_) if !unsupported.is_empty() && !args.graph => None,
            Err(e) => return Err(Failure::new(e)),
        }
    } else {
        None
    };
    if let Some(g) = graph.as_ref().filter(|_| args.graph) {
        print!("{}", autoshard_ir::text::print(g));
        return Ok(());
    }
    let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
    for n in graph.iter().flat_map(|g| &g.nodes) {
        *operators.entry(n.op.name()).or_default() += 1;
    }
    let blocks = graph.as_ref().map(autoshard_ir::blocks::find);
    if args.json {
        let doc = serde_json::json!({
            "path": args.model.display().to_string(),
            "sha256": model.sha256(),
            "opsets": model.opsets(),
            "symbols": model.symbols().iter().map(|s| serde_json::json!({"name": s.name, "places": s.places})).collect::<Vec<_>>(),
            "inputs": model.signature().inputs.iter().map(port).collect::<Vec<_>>(),
            "outputs": model.signature().outputs.iter().map(port).collect::<Vec<_>>(),
            "unsupported": unsupported,
            "parameters": graph.as_ref().map(|g| g.parameter_count()),
            "operators": operators,
        });
        println!("{doc:#}");
        return Ok(());
    }
    let list = |xs: Vec<String>| xs.join("\n            ");
    println!("model       {}", args.model.display());
    println!("sha256      {}", model.sha256());
    let opsets: Vec<String> =
        model.opsets().iter().map(|(d, v)| format!("{} {v}", if d.is_empty() { "ai.onnx" } else { d })).collect();
    println!("opsets      {}", opsets.join(", "));
    println!("inputs      {}", list(model.signature().inputs.iter().map(port).collect()));
    println!("outputs     {}", list(model.signature().outputs.iter().map(port).collect()));
    for s in model.symbols() {
        let batch = if model.batch_symbol() == Some(&s.name) { ", the batch" } else { "" };
        println!("symbol      {} in {}{batch}", s.name, s.places.join(", "));
    }
    match (&graph, blocks) {
        (Some(g), Some(b)) => {
            println!("parameters  {} in {} tensors", show::count(g.parameter_count() as f64), g.states.len());
            let names: Vec<String> = operators.iter().map(|(n, c)| format!("{n} {c}")).collect();
            println!("operators   {} nodes: {}", g.nodes.len(), names.join(", "));
            println!("blocks      {} distinct of {} nodes", b.nodes.len(), g.nodes.len());
        }
        _ if wanted => println!("            parameters, operators and blocks need every operator to be supported"),
        _ => println!("            give a size for every symbol by --dim to see parameters, operators and blocks"),
    }
    if unsupported.is_empty() {
        println!("unsupported none");
    } else {
        println!("unsupported {}", list(unsupported));
    }
    Ok(())
}
