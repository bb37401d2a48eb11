//! `verify`: one step sharded on virtual ranks against one step of the unsharded model.

use std::collections::BTreeMap;
use std::sync::Arc;

use autoshard_ir::graph::{Graph, Init, StateKind};
use autoshard_ir::{Tensor, convert, interp};
use autoshard_planner::plan::forward_graph;
use autoshard_planner::request::{Mode, RecomputeChoice};
use autoshard_runtime::session::{Options, Session};
use autoshard_runtime::weights::Weights;

use crate::args::VerifyArgs;
use crate::compare::{Line, distance, largest, noise, widened};
use crate::failure::Failure;
use crate::loaded::{Loaded, compile};
use crate::{draw, show};

/// Runs the command.
pub fn run(args: &VerifyArgs) -> Result<(), Failure> {
    if !(0.0..1.0).contains(&args.tolerance) {
        return Err(Failure::usage(format!("--tolerance {} is not at least 0 and below 1", args.tolerance)));
    }
    let mut loaded = Loaded::open(&args.plan)?;
    let seed = args.weights.seed(args.inputs.as_ref())?;
    loaded.plan.workload.gradient_outputs = loaded.plan.workload.mode == Mode::Train;
    let lines = verify(&loaded, args, seed)?;
    // Not `>`: an error that is not a number fails too.
    let within = |l: &Line| l.error <= args.tolerance;
    let failed: Vec<&Line> = lines.iter().filter(|l| !l.noise && !within(l)).collect();
    if args.json {
        let doc = serde_json::json!({
            "plan": args.plan.display().to_string(), "tolerance": args.tolerance, "passed": failed.is_empty(), "tensors": lines,
        });
        println!("{doc:#}");
    } else {
        print!("{}", table(&lines));
    }
    if failed.is_empty() {
        if !args.json {
            let ranks: usize = loaded.plan.mesh.axes.iter().map(|a| a.size).product();
            println!(
                "\n{} ranks compute what the unsharded model computes: {} tensors within {:e}",
                ranks,
                lines.iter().filter(|l| !l.noise).count(),
                args.tolerance
            );
        }
        return Ok(());
    }
    let worst: Vec<String> = failed.iter().take(8).map(|l| format!("{} {}: {:.2e}", l.kind, l.name, l.error)).collect();
    Err(Failure::new(format!(
        "{} of {} tensors differ by more than {:e}:\n  {}",
        failed.len(),
        lines.len(),
        args.tolerance,
        worst.join("\n  ")
    )))
}

fn has_nan(t: &Tensor) -> bool {
    t.dtype().is_float() && convert::to_f64(t.dtype(), t.bytes()).iter().any(|x| x.is_nan())
}

/// The worst line of each kind.
fn table(lines: &[Line]) -> String {
    let mut rows = vec![["", "tensors", "largest error", "of"].map(String::from).to_vec()];
    for kind in ["output", "gradient", "parameter", "optimizer"] {
        let of: Vec<&Line> = lines.iter().filter(|l| l.kind == kind && !l.noise).collect();
        let Some(worst) = of.iter().max_by(|a, b| a.error.total_cmp(&b.error)) else { continue };
        rows.push(vec![format!("{kind}s"), of.len().to_string(), format!("{:.2e}", worst.error), worst.name.clone()]);
    }
    let exempt = lines.iter().filter(|l| l.noise).count();
    let mut text = show::columns(&rows);
    if exempt > 0 {
        text += &format!(
            "{exempt} tensors are exempt: their gradient is pure rounding noise, which Adam turns into full steps, and which is\n\
             all there is of a parameter that begins at zero\n"
        );
    }
    text
}

/// The first content of every state of a graph.
fn first_states(graph: &Graph, weights: Weights) -> Result<Vec<Arc<Tensor>>, Failure> {
    graph
        .states
        .iter()
        .map(|s| {
            let init = match &s.init {
                Init::Weight(w) => Some(w),
                Init::Zeros => None,
            };
            weights.whole(&s.name, init, graph.ty(s.read)).map(Arc::new).map_err(Failure::new)
        })
        .collect()
}

fn verify(loaded: &Loaded, args: &VerifyArgs, seed: u64) -> Result<Vec<Line>, Failure> {
    let weights = if args.weights.random_weights { Weights::Random(seed) } else { Weights::Files };
    let plan = &loaded.plan;
    let (graph, assignment) = loaded.resolve()?;
    let job = compile(&widened(&graph), &assignment)?;
    let file = forward_graph(&loaded.model, &plan.workload, plan.workload.global_batch).map_err(Failure::new)?;
    let whole = widened(&plan.workload.step(&file, &[], 1, RecomputeChoice::None).map_err(Failure::new)?.graph);

    let inputs = match &args.inputs {
        Some(path) => autoshard_runtime::tensors::read(path).map_err(Failure::new)?,
        None => draw::inputs(&whole, seed),
    };
    let mut session = Session::new(job, &Options { weights, ..Options::default() }).map_err(Failure::new)?;
    let got = session.step(&inputs).map_err(Failure::new)?;
    let states = first_states(&whole, weights)?;
    let ordered: Vec<Tensor> = whole
        .inputs
        .iter()
        .map(|i| inputs.get(&i.name).cloned().ok_or_else(|| Failure::new(format!("input `{}` is missing", i.name))))
        .collect::<Result<_, _>>()?;
    let want = interp::run(&whole, &ordered, &states).map_err(Failure::new)?;

    if let Some((o, _)) = whole.outputs.iter().zip(&want.outputs).find(|(_, t)| has_nan(t)) {
        return Err(Failure::new(format!(
            "the unsharded model itself gives output `{}` elements that are no numbers (NaN): nothing can be compared",
            o.name
        ))
        .help("look for NaN among the inputs, or for a loss of which no label is valid"));
    }
    let named: BTreeMap<&str, &Tensor> =
        whole.outputs.iter().zip(&want.outputs).map(|(o, t)| (o.name.as_str(), t)).collect();
    let gradients: BTreeMap<&str, &Tensor> =
        named.iter().filter_map(|(n, t)| Some((n.strip_prefix("grad/")?, *t))).collect();
    let scale = largest(gradients.values().copied());
    let is_noise = |parameter: &str| gradients.get(parameter).is_some_and(|g| noise(g, scale));
    let mut lines = Vec::new();
    for (name, want) in &named {
        let Some(got) = got.get(*name) else {
            return Err(Failure::new(format!("the sharded run gives no output `{name}`")));
        };
        let gradient = name.strip_prefix("grad/");
        let error = distance(got, want);
        let noise = gradient.is_some_and(is_noise);
        lines.push(Line {
            kind: if gradient.is_some() { "gradient" } else { "output" },
            name: name.to_string(),
            error,
            noise,
        });
    }
    let after = session.states().map_err(Failure::new)?;
    for (s, want) in whole.states.iter().zip(&want.states) {
        if s.write.is_none() {
            continue;
        }
        let Some(got) = after.get(&s.name) else {
            return Err(Failure::new(format!("the sharded run keeps no state `{}`", s.name)));
        };
        let of = s.of.map_or(&s.name, |p| &whole.state(p).name);
        let kind = if s.kind == StateKind::Parameter { "parameter" } else { "optimizer" };
        lines.push(Line { kind, name: s.name.clone(), error: distance(got, want), noise: is_noise(of) });
    }
    Ok(lines)
}
