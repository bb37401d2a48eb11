//! `run`: executes a plan on virtual CPU ranks.

use std::sync::Arc;
use std::time::Instant;

use autoshard_ir::convert;
use autoshard_planner::plan::forward_graph;
use autoshard_planner::request::{PrecisionChoice, RecomputeChoice};
use autoshard_runtime::checkpoint::{self, Checkpoint};
use autoshard_runtime::session::{Options, Session};
use autoshard_runtime::tensors;
use autoshard_runtime::trace::Recorder;
use autoshard_runtime::weights::Weights;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::loaded::{Loaded, compile};
use crate::{draw, files, show};

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    if args.steps == 0 {
        return Err(Failure::usage("--steps must be 1 or more"));
    }
    let loaded = Loaded::open(&args.plan)?;
    let seed = args.weights.seed(args.inputs.as_ref())?;
    let mut others = vec![&*args.plan];
    others.extend(loaded.model.files());
    others.extend(args.inputs.as_deref());
    for output in args.outputs.iter().chain(&args.trace) {
        files::check_output(output, &others)?;
        others.push(output);
    }
    if let Some(path) = &args.outputs {
        tensors::check_name(path).map_err(Failure::usage)?;
    }
    if let Some(dir) = &args.checkpoint {
        files::check_folder(dir)?;
    }
    let (graph, assignment) = loaded.resolve()?;
    let job = compile(&graph, &assignment)?;
    let weights = if args.weights.random_weights { Weights::Random(seed) } else { Weights::Files };
    let recorder = args.trace.as_ref().map(|_| Arc::new(Recorder::default()));
    let observer = recorder.clone().map(|r| r as Arc<dyn autoshard_runtime::trace::Observer>);
    let mut session = Session::new(job, &Options { weights, observer, ..Options::default() }).map_err(Failure::new)?;
    if let Some(dir) = &args.resume {
        Checkpoint::open(dir).and_then(|c| c.load(&mut session)).map_err(Failure::new)?;
    }
    let inputs = match &args.inputs {
        Some(path) => tensors::read(path).map_err(Failure::new)?,
        None => {
            let plan = &loaded.plan;
            let whole =
                forward_graph(&loaded.model, &plan.workload, plan.workload.global_batch).map_err(Failure::new)?;
            let whole = plan.workload.step(&whole, &[], 1, RecomputeChoice::None).map_err(Failure::new)?.graph;
            draw::inputs(&whole, seed)
        }
    };
    let bar = if args.json { ProgressBar::hidden() } else { ProgressBar::new(args.steps as u64) };
    bar.set_style(ProgressStyle::with_template("step {pos}/{len} [{bar:30}] {msg} {elapsed}").expect("a fixed text"));
    let mut losses = Vec::new();
    let mut outputs = std::collections::BTreeMap::new();
    let started = Instant::now();
    let mut seconds = Vec::with_capacity(args.steps.min(1 << 16));
    for _ in 0..args.steps {
        let begun = Instant::now();
        outputs = session.step(&inputs).map_err(Failure::new)?;
        seconds.push(begun.elapsed().as_secs_f64());
        if let Some(loss) = outputs.get(autoshard_ir::train::LOSS).filter(|t| t.dims().is_empty()) {
            let value = convert::to_f64(loss.dtype(), loss.bytes())[0];
            bar.set_message(format!("loss {value:.5}"));
            losses.push(value);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let per_step = started.elapsed().as_secs_f64() / args.steps as f64;
    // First what cost most.
    if let Some(dir) = &args.checkpoint {
        checkpoint::save(&mut session, dir).map_err(Failure::new)?;
    }
    if let Some(path) = &args.outputs {
        tensors::write(path, &outputs).map_err(Failure::new)?;
    }
    if let (Some(path), Some(recorder)) = (&args.trace, &recorder) {
        let mut text = Vec::new();
        recorder.write(&mut text).map_err(Failure::new)?;
        files::write(path, &text)?;
    }
    let samples = loaded.plan.workload.global_batch as f64 / per_step;
    if args.json {
        let doc = serde_json::json!({
            "steps": args.steps, "seconds_per_step": per_step, "seconds_of_steps": seconds, "samples_per_second": samples, "loss": losses,
            "predicted_seconds_per_step": loaded.plan.predicted.step_time_s,
        });
        println!("{doc:#}");
        return Ok(());
    }
    println!(
        "{} step{} in {} on {} virtual rank{}: {} each, {:.1} samples/s",
        args.steps,
        if args.steps == 1 { "" } else { "s" },
        match loaded.plan.workload.precision {
            PrecisionChoice::Fp32 => "fp32",
            PrecisionChoice::Bf16 => "bf16",
            PrecisionChoice::Fp16 => "fp16",
        },
        session.job().ranks.len(),
        if session.job().ranks.len() == 1 { "" } else { "s" },
        show::seconds(per_step),
        samples
    );
    println!(
        "predicted on {} x{}: {} per step",
        loaded.plan.cluster.name,
        loaded.plan.cluster.gpus,
        show::seconds(loaded.plan.predicted.step_time_s)
    );
    if let (Some(first), Some(last)) = (losses.first(), losses.last()) {
        println!("loss {first:.5} at the first step, {last:.5} at the last");
    }
    if let Some(step) = losses.iter().position(|l| !l.is_finite()) {
        println!("note: the loss is {} at step {}: look at the inputs and the labels", losses[step], step + 1);
    }
    Ok(())
}
