//! `diff`: what differs between two plans, in choices and in cost.

use std::collections::BTreeMap;

use autoshard_planner::plan::Plan;

use crate::args::DiffArgs;
use crate::failure::Failure;
use crate::{files, show};

/// Runs the command.
pub fn run(args: &DiffArgs) -> Result<(), Failure> {
    let open = |path: &std::path::Path| {
        Plan::from_json(&files::read(path, "plan")?).map_err(|e| Failure::new(format!("{}: {e}", path.display())))
    };
    let (a, b) = (open(&args.left)?, open(&args.right)?);
    print!("{}", text(&a, &b));
    Ok(())
}

fn text(a: &Plan, b: &Plan) -> String {
    let mesh = |p: &Plan| p.mesh.axes.iter().map(|x| format!("{}={}", x.name, x.size)).collect::<Vec<_>>().join(" ");
    let peak = |p: &Plan| show::bytes(p.predicted.peak_memory_bytes.iter().max().copied().unwrap_or(0));
    let figures: [(&str, String, String); 9] = [
        ("model", a.model.path.clone(), b.model.path.clone()),
        (
            "cluster",
            format!("{} x{}", a.cluster.name, a.cluster.gpus),
            format!("{} x{}", b.cluster.name, b.cluster.gpus),
        ),
        ("batch", a.workload.global_batch.to_string(), b.workload.global_batch.to_string()),
        ("mesh", mesh(a), mesh(b)),
        ("micro-batches", a.pipeline.micro_batches.to_string(), b.pipeline.micro_batches.to_string()),
        ("recompute", a.recompute.name().into(), b.recompute.name().into()),
        ("step time", show::seconds(a.predicted.step_time_s), show::seconds(b.predicted.step_time_s)),
        ("peak memory", peak(a), peak(b)),
        ("gap", show::percent(a.search.gap), show::percent(b.search.gap)),
    ];
    let mut rows = vec![vec![String::new(), "left".into(), "right".into(), String::new()]];
    for (name, left, right) in figures {
        let mark = if left == right { "" } else { "differs" };
        rows.push(vec![name.into(), left, right, mark.into()]);
    }
    let mut out = show::columns(&rows);
    let key = |o: &autoshard_planner::plan::OperatorEntry| (o.section.clone(), o.name.clone(), o.op.clone());
    let split = |o: &autoshard_planner::plan::OperatorEntry| {
        let words: Vec<String> = o.strategy.iter().map(|(axis, what)| format!("{axis}: {what}")).collect();
        if words.is_empty() { "replicated".to_string() } else { words.join(", ") }
    };
    let right: BTreeMap<_, _> = b.operators.iter().map(|o| (key(o), split(o))).collect();
    let mut lines = vec![["operator", "left", "right"].map(String::from).to_vec()];
    for o in &a.operators {
        let other = right.get(&key(o)).cloned().unwrap_or_else(|| "absent".into());
        if other != split(o) {
            lines.push(vec![
                format!("{} {} x{}", o.op.split('{').next().unwrap_or(&o.op), o.name, o.count),
                split(o),
                other,
            ]);
        }
    }
    let stored: BTreeMap<_, _> = b.states.iter().map(|s| (s.name.clone(), s.storage.clone())).collect();
    for s in &a.states {
        let other = stored.get(&s.name).cloned().unwrap_or_else(|| "absent".into());
        if other != s.storage {
            lines.push(vec![format!("storage of {} x{}", s.name, s.count), s.storage.clone(), other]);
        }
    }
    out += "\n";
    out += &if lines.len() == 1 { "all operators and states are split alike\n".into() } else { show::columns(&lines) };
    out
}
