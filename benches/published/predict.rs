//! What the planner predicts for a configuration whose choices are all pinned.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use autoshard_cost_models::Cluster;
use autoshard_ir::onnx::Model;
use autoshard_planner::assignment::Schedule;
use autoshard_planner::execution::Execution;
use autoshard_planner::plan::forward_graph;
use autoshard_planner::request::{PlanRequest, PrecisionChoice, RecomputeChoice, Workload};
use autoshard_planner::search::{Found, search};

use crate::rows::{Config, Decoder, Parts};

/// The ONNX graph of a decoder, written by the generator once.
pub fn model(decoder: &Decoder, generator: &Path, folder: &Path) -> Result<Model, String> {
    let d = decoder;
    let name = format!(
        "{}-{}x{}-{}-{}-{}-{}-{}{}.onnx",
        d.family,
        d.layers,
        d.hidden,
        d.heads,
        d.kv_heads,
        d.ffn,
        d.vocab,
        d.sequence,
        flags(&d.parts).concat()
    );
    let path: PathBuf = folder.join(name);
    if !path.exists() {
        std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
        let mut command = Command::new("python3");
        command.arg(generator).args(["--family", d.family, "--loss", "-o"]).arg(&path);
        for (flag, size) in [
            ("--layers", d.layers),
            ("--hidden", d.hidden),
            ("--heads", d.heads),
            ("--vocab", d.vocab),
            ("--kv-heads", d.kv_heads),
            ("--ffn", d.ffn),
            ("--max-seq", d.sequence),
        ] {
            command.args([flag, &size.to_string()]);
        }
        command.args(flags(&d.parts));
        if d.family == "gpt" {
            command.arg("--tied");
        }
        let done = command.output().map_err(|e| e.to_string())?;
        if !done.status.success() {
            return Err(String::from_utf8_lossy(&done.stderr).trim().into());
        }
    }
    Model::open(&path).map_err(|e| e.to_string())
}

/// The generator's flags for what a model has besides the parts of every decoder.
fn flags(p: &Parts) -> Vec<String> {
    let e = p.experts;
    let sizes = [
        ("--head-dim", p.head_dim),
        ("--window", Some(p.window).filter(|w| *w > 0)),
        ("--experts", e.map(|e| e.count)),
        ("--top-k", e.map(|e| e.top_k)),
        ("--expert-ffn", e.map(|e| e.ffn)),
    ];
    let set = [("--qk-norm", p.qk_norm), ("--biases", p.biases), ("--clamped-gate", e.is_some_and(|e| e.clamped_gate))];
    let sizes = sizes.into_iter().filter_map(|(flag, size)| Some([flag.to_string(), size?.to_string()]));
    sizes.flatten().chain(set.into_iter().filter(|s| s.1).map(|s| s.0.to_string())).collect()
}

/// The request that pins all that the row states.
pub fn request(c: &Config) -> PlanRequest {
    let mut workload = Workload::train(c.global_batch);
    workload.dims = BTreeMap::from([("sequence".to_string(), c.decoder.sequence)]);
    (workload.attention, workload.operators) = (c.framework.attention, c.framework.operators);
    workload.precision = match c.precision.as_str() {
        "fp16" => PrecisionChoice::Fp16,
        "bf16" => PrecisionChoice::Bf16,
        _ => PrecisionChoice::Fp32,
    };
    let mut request = PlanRequest::new(workload);
    request.gap = 0.01;
    let pins = &mut request.constraints;
    (pins.tp, pins.pp, pins.dp, pins.cp) = (Some(c.tp), Some(c.pp), Some(c.dp), Some(c.cp));
    pins.ep = Some(c.ep).filter(|ep| *ep > 1);
    pins.weights_stay = true;
    pins.zero = Some(c.zero);
    pins.sequence_parallel = Some(c.sequence_parallel);
    pins.micro_batch = Some(c.micro_batch);
    pins.schedule = Some(Schedule::OneF1B);
    pins.execution = Execution {
        kernels: c.framework.kernels,
        attention: c.framework.generation,
        overlap: c.framework.overlap,
        products: c.framework.products,
        chunks: c.chunks,
    };
    pins.recompute = Some(match c.recompute.as_str() {
        "full" if c.framework.whole_layers => RecomputeChoice::Layers,
        "full" => RecomputeChoice::Full,
        "selective" => RecomputeChoice::Selective,
        _ => RecomputeChoice::None,
    });
    request
}

/// The cluster of a row, with more memory than it has: whether a configuration fits is compared, not decided, here.
pub fn cluster(c: &Config) -> Result<Cluster, String> {
    let mut cluster = Cluster::load(c.cluster).and_then(|k| k.with_gpus(c.gpus)).map_err(|e| e.to_string())?;
    cluster.device.memory_gib.value *= 64.0;
    Ok(cluster)
}

/// Plans a configuration.
pub fn plan(c: &Config, model: &Model, cluster: &Cluster) -> Result<Found, String> {
    let request = request(c);
    let source = |batch: usize| forward_graph(model, &request.workload, batch).map_err(|e| e.to_string());
    search(&source, cluster, &request, None, &|_, _, _| ()).map_err(|e| e.to_string())
}
