//! Plans a model and prints the summary: `cargo run -p autoshard-planner --example plan -- MODEL.onnx GPUS BATCH train|infer [NAME=N ...]`.

use std::time::Instant;

use autoshard_cost_models::Cluster;
use autoshard_ir::onnx::Model;
use autoshard_planner::plan::{ModelEntry, Plan, forward_graph};
use autoshard_planner::request::{PlanRequest, PrecisionChoice, Workload};
use autoshard_planner::search::search;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, gpus, batch, mode, rest @ ..] = &args[..] else {
        return Err("usage: plan MODEL.onnx GPUS BATCH train|infer [NAME=N ...]".into());
    };
    let start = Instant::now();
    let model = Model::open(path)?;
    eprintln!(
        "open {:.2?}; symbols {:?}",
        start.elapsed(),
        model.symbols().iter().map(|s| &s.name).collect::<Vec<_>>()
    );
    let batch: usize = batch.parse()?;
    let mut workload = if mode == "train" { Workload::train(batch) } else { Workload::infer(batch) };
    let mut request_limit = None;
    for pair in rest {
        let (name, value) = pair.split_once('=').ok_or("NAME=N")?;
        match name {
            "precision" => {
                workload.precision = if value == "bf16" { PrecisionChoice::Bf16 } else { PrecisionChoice::Fp32 }
            }
            "time" => request_limit = Some(value.parse::<f64>()?),
            _ => {
                workload.dims.insert(name.into(), value.parse()?);
            }
        }
    }
    let cluster = Cluster::load("dgx-h100")?.with_gpus(gpus.parse()?)?;
    let mut request = PlanRequest::new(workload.clone());
    if let Some(limit) = request_limit {
        request.time_limit_s = limit;
    }
    let source = |b: usize| {
        let t = Instant::now();
        let g = forward_graph(&model, &workload, b).map_err(|e| e.to_string());
        eprintln!("instantiate batch {b}: {:.2?}", t.elapsed());
        g
    };
    let progress = |at: usize, of: usize, best: Option<f64>| eprintln!("{:.2?} {at}/{of} {best:?}", start.elapsed());
    let found = search(&source, &cluster, &request, None, &progress)?;
    let wall = start.elapsed().as_secs_f64();
    let entry = ModelEntry {
        path: path.clone(),
        sha256: model.sha256().into(),
        parameters: found.best.step.graph.parameter_count(),
    };
    let plan = Plan::new(&found, &request, &cluster, entry, None, Vec::new());
    let text = plan.to_json()?;
    let (graph, assignment) = Plan::from_json(&text)?.resolve(&model)?;
    assert_eq!(assignment.strategy, found.best.assignment.strategy);
    assert_eq!(assignment.storage, found.best.assignment.storage);
    println!(
        "{}: {:.4} s, bound {:.4} s, gap {:.1} %, peak {} MiB; {} candidates, {} solved; plan {} KiB, {} nodes in {} classes; wall {wall:.1} s",
        found.best.candidate.show(),
        plan.predicted.step_time_s,
        plan.search.bound_s,
        100.0 * plan.search.gap,
        plan.predicted.peak_memory_bytes.iter().max().unwrap_or(&0) >> 20,
        plan.search.candidates,
        plan.search.solved,
        text.len() >> 10,
        graph.nodes.len(),
        plan.operators.len(),
    );
    println!("{:?}", plan.predicted.breakdown);
    for a in plan.alternatives.iter().take(8) {
        println!("  {} {:.4} s {} MiB", a.configuration, a.step_time_s, a.peak_memory_bytes >> 20);
    }
    Ok(())
}
