//! `diff`: what differs between two plans, in choices and in cost.

use std::collections::{BTreeMap, VecDeque};

use autoshard_planner::plan::{OperatorEntry, Plan, StateEntry};

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
    let key = |o: &OperatorEntry| [o.section.clone(), o.name.clone(), o.op.clone()];
    let title = |o: &OperatorEntry| format!("{} {} x{}", o.op.split('{').next().unwrap_or(&o.op), o.name, o.count);
    let operators = |p: &Plan| -> Vec<Choice<[String; 3]>> {
        p.operators.iter().map(|o| Choice { key: key(o), title: title(o), what: show::strategy(&o.strategy) }).collect()
    };
    let states = |p: &Plan| -> Vec<Choice<String>> {
        let title = |s: &StateEntry| format!("storage of {} x{}", s.name, s.count);
        p.states.iter().map(|s| Choice { key: s.name.clone(), title: title(s), what: s.storage.clone() }).collect()
    };
    let mut lines = vec![["operator", "left", "right"].map(String::from).to_vec()];
    lines.extend(differing(operators(a), operators(b)));
    lines.extend(differing(states(a), states(b)));
    out += "\n";
    out += &if lines.len() == 1 { "all operators and states are split alike\n".into() } else { show::columns(&lines) };
    out
}

/// A choice of a plan.
struct Choice<K> {
    key: K,
    title: String,
    what: String,
}

/// Choices that differ. Keys may repeat: the first of one plan is compared with the first of the other, and so on.
fn differing<K: Ord>(left: Vec<Choice<K>>, right: Vec<Choice<K>>) -> Vec<Vec<String>> {
    let mut rest: BTreeMap<K, VecDeque<usize>> = BTreeMap::new();
    let mut others: Vec<Option<(String, String)>> = Vec::new();
    for (i, c) in right.into_iter().enumerate() {
        rest.entry(c.key).or_default().push_back(i);
        others.push(Some((c.title, c.what)));
    }
    let mut lines = Vec::new();
    for c in left {
        let found = rest.get_mut(&c.key).and_then(VecDeque::pop_front).and_then(|i| others[i].take());
        let other = found.map_or("absent".into(), |(_, what)| what);
        if other != c.what {
            lines.push(vec![c.title, c.what, other]);
        }
    }
    lines.extend(others.into_iter().flatten().map(|(title, what)| vec![title, "absent".into(), what]));
    lines
}
