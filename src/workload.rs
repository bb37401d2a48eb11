//! From flags to a request: defaults are filled in and said, all problems of the flags are reported at once.

use std::collections::BTreeMap;

use autoshard_cost_models::Cluster;
use autoshard_cost_models::hardware::Architecture;
use autoshard_ir::onnx::Model;
use autoshard_planner::assignment::Schedule;
use autoshard_planner::constraints::{Constraints, Objective};
use autoshard_planner::execution::{AttentionChoice, Execution, Generation, Kernels, Operators, Overlap, Products};
use autoshard_planner::mesh::divisors;
use autoshard_planner::request::{
    LossChoice, Mode, OptimizerChoice, PlanRequest, PrecisionChoice, RecomputeChoice, Workload,
};

use crate::args::{
    self, AttentionArg, ExecutionArgs, KernelsArg, ObjectiveArg, OperatorsArg, OptimizerArg, OverlapArg, PlanArgs,
    PrecisionArg, ProductsArg, RecomputeArg, ScheduleArg, SearchArgs, Toggle, TpSplitsArg,
};
use crate::failure::Failure;

/// Parses `NAME=N` flags against the symbols of a model; `batch` is bound elsewhere.
pub fn dims(model: &Model, flags: &[String], batch: Option<&str>) -> Result<BTreeMap<String, usize>, Failure> {
    let symbols = model.symbols();
    let known: Vec<&str> = symbols.iter().map(|s| s.name.as_str()).filter(|s| Some(*s) != batch).collect();
    let mut found = BTreeMap::new();
    let mut problems = Vec::new();
    for flag in flags {
        let parsed = flag.split_once('=').and_then(|(n, v)| Some((n.trim(), v.trim().parse::<usize>().ok()?)));
        match parsed {
            None | Some((_, 0)) => {
                problems.push(format!("`--dim {flag}` is not of the form NAME=N with N of 1 or more"))
            }
            Some((n, _)) if Some(n) == batch => {
                problems.push(format!("`--dim {flag}`: `{n}` is the batch; give it by --global-batch"));
            }
            Some((n, _)) if !known.contains(&n) => {
                problems.push(format!("`--dim {flag}`: the model has no symbol `{n}`"));
            }
            Some((n, v)) => {
                if found.insert(n.to_string(), v).is_some_and(|old| old != v) {
                    problems.push(format!("`--dim {n}` is given twice"));
                }
            }
        }
    }
    for s in &symbols {
        if Some(s.name.as_str()) != batch && !found.contains_key(&s.name) {
            problems.push(format!("the size of `{}` is not known ({})", s.name, s.places.join(", ")));
        }
    }
    if problems.is_empty() {
        return Ok(found);
    }
    let want: Vec<String> = known.iter().map(|n| format!("--dim {n}=N")).collect();
    let help =
        if want.is_empty() { "the model has no symbols to bind".into() } else { format!("give {}", want.join(" ")) };
    Err(Failure::usage(problems.join("\n")).help(help))
}

/// The scalar output that is the loss, if the model has one: `loss`, or the only scalar output, of floats.
fn loss_output(model: &Model) -> Option<String> {
    let scalars: Vec<&str> = model
        .signature()
        .outputs
        .iter()
        .filter(|o| o.dims.as_ref().is_some_and(Vec::is_empty) && o.dtype.is_none_or(|d| d.is_float()))
        .map(|o| o.name.as_str())
        .collect();
    scalars
        .iter()
        .find(|n| **n == "loss")
        .or(if scalars.len() == 1 { scalars.first() } else { None })
        .map(|n| n.to_string())
}

/// The request of `plan`, and what was assumed.
pub fn request(model: &Model, cluster: &Cluster, args: &PlanArgs) -> Result<(PlanRequest, Vec<String>), Failure> {
    let (w, s) = (&args.workload, &args.search);
    let mut notes = Vec::new();
    let batch_symbol = model.batch_symbol();
    let dims = dims(model, &w.dim, batch_symbol)?;
    let in_file = loss_output(model);
    let mode = match w.mode {
        Some(args::Mode::Train) => Mode::Train,
        Some(args::Mode::Infer) => Mode::Infer,
        None => {
            let mode = if in_file.is_some() || w.loss.is_some() { Mode::Train } else { Mode::Infer };
            notes.push(match mode {
                Mode::Train => "training, since there is a loss (--mode)".into(),
                Mode::Infer => "inference, since the model has no loss (--mode, --loss)".into(),
            });
            mode
        }
    };
    let first_output = model.signature().outputs.first().map(|o| o.name.clone()).unwrap_or_default();
    let loss = match (&w.loss, &in_file) {
        (None, Some(name)) => LossChoice::Output { output: name.clone() },
        (None, None) if mode == Mode::Train => {
            return Err(Failure::usage("training needs a loss, and the model has no scalar output").help(
                "give --loss cross-entropy or --loss mse to append one to its first output, or --loss output:NAME",
            ));
        }
        (None, None) => LossChoice::Output { output: first_output },
        (Some(text), _) => match text.split_once(':') {
            _ if mode == Mode::Infer => return Err(Failure::usage("--loss has no effect with --mode infer")),
            Some(("output", name)) => LossChoice::Output { output: name.to_string() },
            None if text == "cross-entropy" => {
                LossChoice::CrossEntropy { output: first_output, labels: "labels".into(), ignore_index: -100 }
            }
            None if text == "mse" => LossChoice::Mse { output: first_output, target: "target".into() },
            _ => {
                return Err(Failure::usage(format!("`--loss {text}` is not known"))
                    .help("give output:NAME, cross-entropy or mse"));
            }
        },
    };
    let gpus = cluster.gpus();
    let global_batch = match (w.global_batch, batch_symbol) {
        (Some(0), _) => return Err(Failure::usage("--global-batch must be 1 or more")),
        (Some(b), Some(_)) => b,
        (Some(_), None) => {
            return Err(Failure::usage("--global-batch has no effect: the batch size is fixed in the model")
                .help("export the model with a dynamic batch dim"));
        }
        (None, Some(_)) => {
            let per_gpu = if mode == Mode::Train { 8 } else { 1 };
            notes.push(format!("a global batch of {} (--global-batch)", per_gpu * gpus));
            per_gpu * gpus
        }
        (None, None) => fixed_batch(model),
    };
    let on_cpu = cluster.device.architecture == Architecture::Cpu;
    let precision = match w.precision {
        Some(PrecisionArg::Bf16) => PrecisionChoice::Bf16,
        Some(PrecisionArg::Fp16) => PrecisionChoice::Fp16,
        Some(PrecisionArg::Fp32) => PrecisionChoice::Fp32,
        None => {
            notes.push(format!("{} compute (--precision)", if on_cpu { "fp32" } else { "bf16" }));
            if on_cpu { PrecisionChoice::Fp32 } else { PrecisionChoice::Bf16 }
        }
    };
    let mut workload = Workload::train(global_batch);
    if w.optimizer.is_some() && mode == Mode::Infer {
        return Err(Failure::usage("--optimizer has no effect in inference"));
    }
    if w.optimizer == Some(OptimizerArg::Sgd) {
        workload.optimizer = OptimizerChoice::Sgd { lr: 1e-2, momentum: 0.9, weight_decay: 0.0, nesterov: false };
    }
    if mode == Mode::Train {
        let flag = if w.optimizer.is_none() { " (--optimizer)" } else { "" };
        notes.push(match workload.optimizer {
            OptimizerChoice::Adamw { lr, weight_decay, .. } => {
                format!("AdamW with learning rate {lr}, weight decay {weight_decay}{flag}")
            }
            OptimizerChoice::Sgd { lr, momentum, .. } => format!("SGD with learning rate {lr}, momentum {momentum}"),
        });
    }
    let attention = match args.execution.attention {
        AttentionArg::Fused | AttentionArg::FusedFirst => AttentionChoice::Fused,
        AttentionArg::Scores => AttentionChoice::Scores,
    };
    let operators = match args.execution.operators {
        OperatorsArg::Fused => Operators::Fused,
        OperatorsArg::Graph => Operators::Graph,
    };
    let workload = Workload { mode, dims, precision, loss, attention, operators, ..workload };
    notes.extend(execution(&args.execution).only_estimate());
    if s.schedule == Some(ScheduleArg::ZeroBubble) {
        notes.push(
            "an estimate: the zero-bubble schedule cannot be executed yet, so the memory is not that of a compiled program".into(),
        );
    }
    if s.ep.is_some_and(|n| n > 1) {
        notes.push(
            "an estimate: expert parallelism cannot be executed yet; tokens are taken to be spread evenly over the experts".into(),
        );
    }
    let constraints = constraints(s, &args.execution, cluster, mode, batch_symbol.is_none())?;
    let time_limit_s = s.time_limit.unwrap_or(60.0);
    if !(time_limit_s > 0.0 && time_limit_s.is_finite() && (0.0..1.0).contains(&s.gap)) {
        return Err(Failure::usage("--time-limit must be above 0, and --gap from 0 to below 1"));
    }
    let objective = match s.objective {
        ObjectiveArg::StepTime => Objective::StepTime,
        ObjectiveArg::Memory => Objective::Memory,
    };
    Ok((PlanRequest { workload, constraints, objective, time_limit_s, gap: s.gap, seed: s.seed }, notes))
}

/// The batch of a model whose batch dim is a number.
fn fixed_batch(model: &Model) -> usize {
    let first = model.signature().inputs.iter().find_map(|i| {
        i.dims.as_ref()?.first().and_then(|d| match d {
            autoshard_ir::onnx::Dim::Int(n) => Some(*n),
            _ => None,
        })
    });
    first.and_then(|b| usize::try_from(b).ok()).unwrap_or(1).max(1)
}

fn execution(e: &ExecutionArgs) -> Execution {
    Execution {
        kernels: match e.kernels {
            KernelsArg::Eager => Kernels::Eager,
            KernelsArg::Compiled => Kernels::Compiled,
        },
        attention: match e.attention {
            AttentionArg::FusedFirst => Generation::First,
            AttentionArg::Fused | AttentionArg::Scores => Generation::Second,
        },
        overlap: match e.overlap {
            OverlapArg::None => Overlap::None,
            OverlapArg::Data => Overlap::Data,
            OverlapArg::All => Overlap::All,
        },
        products: match e.products {
            ProductsArg::Same => Products::Same,
            ProductsArg::Fp8 => Products::Fp8,
            ProductsArg::Fp4 => Products::Fp4,
        },
        chunks: e.chunks,
    }
}

fn constraints(
    s: &SearchArgs,
    e: &ExecutionArgs,
    cluster: &Cluster,
    mode: Mode,
    fixed: bool,
) -> Result<Constraints, Failure> {
    let gpus = cluster.gpus();
    let mut problems = Vec::new();
    for (name, size) in [("--tp", s.tp), ("--pp", s.pp), ("--dp", s.dp), ("--cp", s.cp), ("--ep", s.ep)] {
        if let Some(size) = size.filter(|x| *x == 0 || gpus % x != 0) {
            let valid: Vec<String> = divisors(gpus).iter().take(12).map(usize::to_string).collect();
            problems.push(format!("{name} {size} does not divide {gpus} GPUs (possible: {})", valid.join(", ")));
        }
    }
    if s.memory_limit.is_some_and(|g| g.is_nan() || g <= 0.0) {
        problems.push("--memory-limit must be above 0".into());
    }
    // Each divides the number of GPUs; together they may not.
    if problems.is_empty() {
        let pins = [("--tp", s.tp), ("--pp", s.pp), ("--dp", s.dp), ("--cp", s.cp)];
        let pins: Vec<(&str, usize)> = pins.into_iter().filter_map(|(name, size)| Some((name, size?))).collect();
        let product = pins.iter().map(|(_, x)| *x as u128).product::<u128>();
        let said: Vec<String> = pins.iter().map(|(name, x)| format!("{name} {x}")).collect();
        // Without a pin of cp the others may be meant with one.
        let all = s.tp.and(s.pp).and(s.dp).is_some();
        let said = said.join(" x ");
        match gpus as u128 {
            n if all && product != n && s.cp.is_none() && n % product == 0 => {
                problems.push(format!("{said} is {product}, not {gpus} GPUs (with --cp {} it is)", n / product));
            }
            n if all && product != n => problems.push(format!("{said} is {product}, not {gpus} GPUs")),
            n if n % product != 0 => {
                problems.push(format!("{said} makes {product} ranks, which do not divide {gpus} GPUs"));
            }
            _ => {}
        }
    }
    if s.micro_batch == Some(0) {
        problems.push("--micro-batch must be 1 or more".into());
    }
    problems.extend(execution(e).problem().map(|p| format!("--chunks: {p}")));
    let mut without_effect = |flag: &str, applies: bool, why: &str| {
        if applies {
            problems.push(format!("{flag} has no effect {why}"));
        }
    };
    let data = s.dp == Some(1) && s.cp.unwrap_or(1) == 1;
    without_effect("--zero", s.zero.is_some() && data, "with --dp 1");
    without_effect("--zero", s.zero.is_some() && mode == Mode::Infer, "in inference");
    let sequence = s.sequence_parallel != Toggle::Auto;
    without_effect("--sequence-parallel", sequence && s.tp == Some(1), "with --tp 1");
    without_effect("--chunks", e.chunks > 1 && s.pp == Some(1), "with --pp 1");
    without_effect("--chunks", e.chunks > 1 && s.schedule == Some(ScheduleArg::Gpipe), "with --schedule gpipe");
    let zero_bubble = s.schedule == Some(ScheduleArg::ZeroBubble);
    without_effect("--chunks", e.chunks > 1 && zero_bubble, "with --schedule zero-bubble");
    without_effect("--schedule", s.schedule.is_some() && s.pp == Some(1), "with --pp 1");
    without_effect("--schedule", s.schedule.is_some() && mode == Mode::Infer, "in inference");
    if fixed && s.micro_batch.is_some() {
        problems.push("--micro-batch has no effect: the batch size is fixed in the model".into());
    }
    if mode == Mode::Infer && s.recompute.is_some() {
        problems
            .push("--recompute has no effect in inference: there is no backward pass to keep activations for".into());
    }
    if !problems.is_empty() {
        return Err(Failure::usage(problems.join("\n")));
    }
    Ok(Constraints {
        tp: s.tp,
        pp: s.pp,
        dp: s.dp,
        cp: s.cp,
        // One is no axis.
        ep: s.ep.filter(|n| *n > 1),
        zero: s.zero,
        sequence_parallel: match s.sequence_parallel {
            Toggle::On => Some(true),
            Toggle::Off => Some(false),
            Toggle::Auto => None,
        },
        weights_stay: s.tp_splits == TpSplitsArg::Weights,
        micro_batch: s.micro_batch,
        schedule: s.schedule.map(|x| match x {
            ScheduleArg::Gpipe => Schedule::GPipe,
            ScheduleArg::OneF1B => Schedule::OneF1B,
            ScheduleArg::ZeroBubble => Schedule::ZeroBubble,
        }),
        recompute: s.recompute.and_then(|r| match r {
            RecomputeArg::None => Some(RecomputeChoice::None),
            RecomputeArg::Selective => Some(RecomputeChoice::Selective),
            RecomputeArg::Full => Some(RecomputeChoice::Full),
            RecomputeArg::Layers => Some(RecomputeChoice::Layers),
            RecomputeArg::Auto => None,
        }),
        execution: execution(e),
        memory_limit: s.memory_limit.map(|g| (g * (1u64 << 30) as f64) as u64),
    })
}
