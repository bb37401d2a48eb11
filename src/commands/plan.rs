//! `plan`: decides how to split a model, compiles the decision to know its memory to the byte, writes the plan.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use autoshard_cost_models::Cluster;
use autoshard_cost_models::library::Origin;
use autoshard_ir::onnx::Model;
use autoshard_planner::constraints::Objective;
use autoshard_planner::plan::{ModelEntry, Plan, forward_graph};
use autoshard_planner::request::{Mode, PlanRequest, RecomputeChoice};
use autoshard_planner::search::{Certificate, Found, SearchError, search};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::{files, loaded, show, workload};

/// How often a plan whose arena is larger than its estimate is planned again with less memory.
const ROUNDS: usize = 4;

/// The cluster that is assumed.
const CLUSTER: &str = "dgx-h100";

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let started = Instant::now();
    let output = args.output.clone().unwrap_or_else(|| files::with_suffix(&args.model, ".plan.json"));
    let name = args.workload.cluster.as_deref().unwrap_or(CLUSTER);
    files::check_output(&output, &[&args.model, Path::new(name)])?;
    let model = loaded::model(&args.model)?;
    files::check_output(&output, &model.files().into_iter().collect::<Vec<_>>())?;
    let (cluster, origin) = Cluster::load_with(name, args.workload.device.as_deref())
        .and_then(|(c, origin)| Ok((c.with_gpus(args.gpus)?, origin)))
        .map_err(|e| Failure::usage(e).help("`autoshard clusters` lists the clusters that are known"))?;
    let (request, mut notes) = workload::request(&model, &cluster, args)?;
    if args.workload.cluster.is_none() {
        notes.insert(0, format!("{} GPUs of {CLUSTER} (--cluster)", args.gpus));
    }
    if let Origin::Matrix(_) = origin {
        notes.insert(0, format!("cluster {}", cluster.title));
    }
    let interrupt = Arc::new(AtomicBool::new(false));
    let flag = interrupt.clone();
    let bar = if args.quiet || args.json { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let shown = bar.clone();
    // A second Ctrl-C ends the program at once.
    let _ = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        shown.println(
            "stopping with the best plan so far, once the configuration in work is done; Ctrl-C again ends at once",
        );
    });
    bar.set_style(
        ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {pos}/{len} {elapsed}").expect("a fixed text"),
    );
    bar.enable_steady_tick(Duration::from_millis(100));
    let plan = decide(&model, &cluster, &request, &interrupt, &bar, &args.model, notes);
    bar.finish_and_clear();
    let mut plan = plan?;
    plan.cluster.definition = origin.text();
    let text = plan.to_json().map_err(Failure::new)?;
    files::write(&output, text.as_bytes())?;
    if args.json {
        println!("{}", text.trim_end());
    } else {
        print!("{}", summary(&plan, Some(started.elapsed())));
        println!("\nwrote {}", output.display());
    }
    Ok(())
}

fn decide(
    model: &Model,
    cluster: &Cluster,
    request: &PlanRequest,
    interrupt: &Arc<AtomicBool>,
    bar: &ProgressBar,
    path: &Path,
    notes: Vec<String>,
) -> Result<Plan, Failure> {
    let started = Instant::now();
    let source = |batch: usize| forward_graph(model, &request.workload, batch).map_err(|e| e.to_string());
    let limit = request.constraints.memory_limit.unwrap_or(u64::MAX).min(cluster.usable_memory().0);
    let mut within = limit;
    let mut excess = 0;
    // What the first round proves holds for all plans within the limit; later ones look at fewer.
    let mut first: Option<Certificate> = None;
    for _ in 0..ROUNDS {
        let mut round = request.clone();
        round.constraints.memory_limit = Some(within);
        // A round needs some time to find a plan at all.
        let left = request.time_limit_s - started.elapsed().as_secs_f64();
        round.time_limit_s = left.max(request.time_limit_s / ROUNDS as f64);
        let progress = |done: usize, all: usize, best: Option<f64>| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
            bar.set_message(best.map_or("searching".into(), |t| format!("best so far {}", show::seconds(t))));
        };
        let mut found = match search(&source, cluster, &round, Some(interrupt.clone()), &progress) {
            Ok(found) => found,
            // Of a limit that nobody asked for.
            Err(SearchError::Memory { .. }) if first.is_some() => break,
            Err(e) => return Err(failure(e)),
        };
        let memory = peaks(&found)?;
        let peak = memory.iter().copied().max().unwrap_or(0);
        let proven = first.get_or_insert_with(|| found.certificate.clone());
        if peak > limit {
            // The estimate was too low: leave it that much less, and a little more.
            excess = peak - limit;
            within = within.saturating_sub(excess + excess / 8);
            if within == 0 {
                break;
            }
            continue;
        }
        let certificate = &mut found.certificate;
        certificate.bound = proven.bound.min(certificate.objective);
        certificate.cut_short |= proven.cut_short;
        return Ok(write_down(found, request, cluster, model, path, notes, limit, memory));
    }
    Err(Failure::infeasible(format!(
        "no plan fits into {} per GPU: the best found needs {} more than that when compiled",
        show::bytes(limit),
        show::bytes(excess)
    ))
    .help("more GPUs, a smaller --global-batch or --micro-batch, or --zero 3"))
}

/// Bytes on a rank of each stage: of the compiled program, or where there can be none as estimated.
fn peaks(found: &Found) -> Result<Vec<u64>, Failure> {
    let best = &found.best;
    if best.assignment.only_estimate().is_some() {
        return Ok(best.prediction.stages.iter().map(|s| s.memory.allocated().0).collect());
    }
    let job = loaded::compile(&best.step.graph, &best.assignment)?;
    Ok(autoshard_codegen::memory::memory(&job).iter().map(|m| m.total()).collect())
}

#[expect(clippy::too_many_arguments, reason = "one call, with everything a plan is made of")]
fn write_down(
    found: Found,
    request: &PlanRequest,
    cluster: &Cluster,
    model: &Model,
    path: &Path,
    notes: Vec<String>,
    limit: u64,
    peaks: Vec<u64>,
) -> Plan {
    let mut request = request.clone();
    request.constraints.memory_limit = Some(limit).filter(|l| *l < cluster.usable_memory().0);
    let entry = ModelEntry {
        path: path.display().to_string(),
        sha256: model.sha256().to_string(),
        parameters: found.best.step.graph.parameter_count(),
    };
    let mut plan = Plan::new(&found, &request, cluster, entry, None, notes);
    plan.cluster.memory_limit_bytes = limit;
    plan.predicted.peak_memory_bytes = peaks;
    plan
}

fn failure(e: SearchError) -> Failure {
    match e {
        SearchError::Memory { .. } => Failure::infeasible(e)
            .help("more GPUs, a smaller --global-batch, or a larger --memory-limit; `--objective memory` shows the least that is possible"),
        SearchError::Pins(_) => Failure::infeasible(e).help("drop some of --tp, --pp, --dp, --ep, --cp, --micro-batch, or change --global-batch"),
        other => Failure::new(other),
    }
}

/// What no plan of the searched space takes less than.
pub fn bound(plan: &Plan) -> String {
    match plan.search.objective {
        Objective::Memory => show::bytes(plan.search.bound_s as u64),
        Objective::StepTime => show::seconds(plan.search.bound_s),
    }
}

/// What throughput counts: tokens where inputs are sequences of them, else samples.
pub fn unit(plan: &Plan) -> &'static str {
    let per_step = plan.predicted.tokens_per_s * plan.predicted.step_time_s;
    if per_step > plan.workload.global_batch as f64 + 0.5 { "tokens" } else { "samples" }
}

/// The plan on one screen.
pub fn summary(plan: &Plan, wall: Option<Duration>) -> String {
    let w = &plan.workload;
    let mode = match w.mode {
        Mode::Train => "training",
        Mode::Infer => "inference",
    };
    let dims: Vec<String> = w.dims.iter().map(|(n, v)| format!("{n}={v}")).collect();
    let mesh: Vec<String> = plan.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    let p = &plan.pipeline;
    let peak = plan.predicted.peak_memory_bytes.iter().max().copied().unwrap_or(0);
    let limit = plan.cluster.memory_limit_bytes;
    let s = &plan.search;
    let b = &plan.predicted.breakdown;
    let mut rows = vec![
        vec!["model".into(), format!("{}, {} parameters", plan.model.path, show::count(plan.model.parameters as f64))],
        vec![
            "workload".into(),
            format!("{mode}, batch {}{}{}", w.global_batch, if dims.is_empty() { "" } else { ", " }, dims.join(", ")),
        ],
        vec!["cluster".into(), format!("{}, {} GPUs", plan.cluster.name, plan.cluster.gpus)],
        vec![
            "plan".into(),
            format!(
                "{}; {} micro-batch{} of {} per data-parallel rank{}",
                mesh.join(" "),
                p.micro_batches,
                if p.micro_batches == 1 { "" } else { "es" },
                p.micro_batch_size,
                if p.stages > 1 { format!(", {}", p.schedule.name()) } else { String::new() }
            ),
        ],
        vec!["storage".into(), storage(plan)],
        vec![
            "time".into(),
            format!(
                "{} per step: compute {}, communication {}, bubble {}, optimizer {}",
                show::seconds(plan.predicted.step_time_s),
                show::seconds(b.compute_s),
                show::seconds(b.communication_s),
                show::seconds(b.bubble_s),
                show::seconds(b.optimizer_s)
            ),
        ],
        vec![
            "".into(),
            format!(
                "{} {}/s, {:.1} TFLOP/s per GPU, {} of peak",
                show::count(plan.predicted.tokens_per_s),
                unit(plan),
                plan.predicted.tflops_per_gpu,
                show::percent(plan.predicted.mfu)
            ),
        ],
        vec![
            "memory".into(),
            format!(
                "{} of {} on the fullest GPU ({})",
                show::bytes(peak),
                show::bytes(limit),
                show::percent(peak as f64 / limit.max(1) as f64)
            ),
        ],
        vec![
            "proof".into(),
            format!(
                "no plan of the searched space takes less than {}: gap {}; {} of {} configurations solved{}{}",
                bound(plan),
                show::percent(s.gap),
                s.solved,
                s.candidates,
                wall.map_or(String::new(), |w| format!(" in {}", show::seconds(w.as_secs_f64()))),
                match (s.cut_short, s.gap > 0.05) {
                    (true, _) => ", cut short",
                    (false, true) => ", all that could be better; the bound leaves out sends and waits between stages",
                    _ => "",
                }
            ),
        ],
    ];
    if w.mode == Mode::Train {
        let storage = rows.iter().position(|r| r[0] == "storage").map_or(0, |at| at + 1);
        rows.insert(storage, vec!["recompute".into(), recompute(plan)]);
    }
    for (i, a) in plan.alternatives.iter().take(3).enumerate() {
        let slower = a.step_time_s / plan.predicted.step_time_s - 1.0;
        rows.push(vec![
            if i == 0 { "next best".into() } else { String::new() },
            format!(
                "{}: {} ({:+.1} %), {}",
                a.configuration,
                show::seconds(a.step_time_s),
                100.0 * slower,
                show::bytes(a.peak_memory_bytes)
            ),
        ]);
    }
    for (i, n) in plan.notes.iter().enumerate() {
        rows.push(vec![if i == 0 { "assumed".into() } else { String::new() }, n.clone()]);
    }
    show::columns(&rows)
}

/// What the backward pass makes anew.
pub fn recompute(plan: &Plan) -> String {
    let what = match plan.recompute {
        RecomputeChoice::None => return "none: activations are kept for the backward pass".into(),
        RecomputeChoice::Selective => "selective: what is cheap is computed again in the backward pass",
        RecomputeChoice::Full => "full: repeated blocks are computed again in the backward pass",
        RecomputeChoice::Layers => "layers: whole repeated blocks are computed again in the backward pass",
    };
    format!(
        "{what}, {} of the compute",
        show::percent(plan.predicted.breakdown.recompute_s / plan.predicted.breakdown.compute_s.max(f64::MIN_POSITIVE))
    )
}

/// Whether a state is an optimizer's, by its name.
fn of_optimizer(name: &str) -> bool {
    ["adam.step", "sgd.step"].contains(&name)
        || ["adam.m/", "adam.v/", "sgd.momentum/"].iter().any(|p| name.starts_with(p))
}

/// How much of parameters and optimizer states is sharded over which axis.
pub fn storage(plan: &Plan) -> String {
    let part = |optimizer: bool, axis: &str| {
        let (mut all, mut sharded) = (0, 0);
        for s in plan.states.iter().filter(|s| of_optimizer(&s.name) == optimizer) {
            all += s.count;
            if s.storage.split(['[', ']', ',', '+', ' ']).any(|w| w == axis) {
                sharded += s.count;
            }
        }
        (all, sharded)
    };
    let mut words = Vec::new();
    for (what, optimizer) in [("parameters", false), ("optimizer states", true)] {
        for axis in ["tp", "dp", "ep", "cp"] {
            let (all, sharded) = part(optimizer, axis);
            if sharded > 0 {
                words.push(format!("{sharded} of {all} {what} sharded over {axis}"));
            }
        }
    }
    if words.is_empty() { "all states replicated".into() } else { words.join(", ") }
}
