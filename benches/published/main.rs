//! Predictions of published configurations against what was measured.
//!
//! `cargo bench --bench published [-- [DIR] [--only SOURCE] [--rows] [--fit] [--cross] [--page FILE.html]]`: DIR holds `measurements.csv`
//! (default `../shared/published`). Prints per source how far predictions are off; `--rows` every row, `--fit` coefficients
//! that fit better, `--cross` also how well a source is predicted by a fit to the others; `--architecture NAME` only rows of
//! such devices. Results are kept in `benches/published.md`.

mod fit;
mod page;
mod predict;
mod rows;
mod score;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use autoshard_cost_models::Cluster;
use autoshard_cost_models::hardware::Architecture;
use autoshard_planner::assignment::Assignment;
use autoshard_planner::execution::Execution;
use autoshard_planner::request::StepGraph;
use autoshard_planner::simulate::Prediction;

/// A configuration, planned.
struct Planned {
    case: rows::Case,
    cluster: Cluster,
    step: Rc<StepGraph>,
    assignment: Assignment,
    execution: Execution,
    prediction: Prediction,
}

impl Planned {
    fn time(&self) -> Option<score::Pair> {
        Some((self.prediction.step_time_s, self.case.measured.step_s?))
    }
    fn memory(&self) -> Option<score::Pair> {
        Some((self.prediction.peak() as f64, self.case.measured.peak_bytes?))
    }
    /// Rows that compare plans: same source, model and cluster.
    fn rank_group(&self) -> (String, String, usize) {
        let c = &self.case.config;
        (self.case.source.clone(), format!("{:?}", c.decoder), c.gpus)
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let flag = |name: &str| args.iter().any(|a| a == name);
    let after = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).cloned();
    let dir = args
        .first()
        .filter(|a| !a.starts_with("--"))
        .map_or_else(|| PathBuf::from("../shared/published"), PathBuf::from);
    let file = dir.join("measurements.csv");
    if !file.exists() {
        println!("no {}: nothing measured", file.display());
        return;
    }
    let published = match rows::read(&file) {
        Ok(p) => p,
        Err(e) => return println!("{}: {e}", file.display()),
    };
    println!("{} configurations; rows left out, by rule:", published.cases.len());
    for (rule, count) in &published.excluded {
        println!("  {count:4} {rule}");
    }
    let planned =
        plan_all(published.cases, after("--only").as_deref(), after("--architecture").as_deref(), flag("--rows"));
    table(&planned);
    if flag("--fit") {
        refit(&planned, flag("--cross"));
    }
    if let Some(path) = after("--page")
        && let Err(e) = std::fs::write(&path, page::page(&planned))
    {
        println!("{path}: {e}");
    }
}

fn plan_all(cases: Vec<rows::Case>, only: Option<&str>, architecture: Option<&str>, print: bool) -> Vec<Planned> {
    let folder = std::env::temp_dir().join("autoshard-published");
    let mut models: BTreeMap<rows::Decoder, _> = BTreeMap::new();
    let mut planned = Vec::new();
    for case in cases.into_iter().filter(|c| only.is_none_or(|o| c.source.starts_with(o))) {
        let c = &case.config;
        let of = |name: &str| {
            predict::cluster(c).is_ok_and(|k| format!("{:?}", k.device.architecture).eq_ignore_ascii_case(name))
        };
        if architecture.is_some_and(|name| !of(name)) {
            continue;
        }
        let model = models
            .entry(c.decoder.clone())
            .or_insert_with(|| predict::model(&c.decoder, Path::new("benches/published/decoder.py"), &folder));
        let outcome = model.as_ref().map_err(Clone::clone).and_then(|m| {
            let cluster = predict::cluster(c)?;
            let found = predict::plan(c, m, &cluster)?.best;
            Ok((cluster, found))
        });
        let (cluster, found) = match outcome {
            Ok(x) => x,
            Err(e) => {
                println!("{}: {}", case.measured.ids[0], e.lines().next().unwrap_or_default());
                continue;
            }
        };
        let execution = predict::request(c).constraints.execution;
        let p = Planned {
            cluster,
            step: found.step,
            assignment: found.assignment,
            execution,
            prediction: found.prediction,
            case,
        };
        if print {
            println!("{}", row(&p));
        }
        planned.push(p);
    }
    planned
}

/// A line for people who look for the reason of an error.
fn row(p: &Planned) -> String {
    let (c, d) = (&p.case.config, &p.case.config.decoder);
    let off = |pair: Option<score::Pair>| pair.map_or("-".into(), |(p, m)| format!("{:+.1}%", 100.0 * (p / m - 1.0)));
    let stages = &p.prediction.stages;
    let busiest = stages.iter().max_by(|a, b| {
        f64::total_cmp(&(a.forward.total() + a.backward.total()), &(b.forward.total() + b.backward.total()))
    });
    let s = &stages[stages.len() / 2];
    let b = busiest.unwrap_or(s);
    format!(
        "{:18} {}-{}x{} s{} {}x{} tp{} pp{}v{} dp{} ep{} z{} sp{} b{} B{} {} {} | {:.3} s, measured {:.3}, {} | forward {:.4}+{:.4} backward {:.4}+{:.4} busiest {:.4} x{} update {:.4} idle {:.3} | memory {:.1} GiB {}",
        p.case.measured.ids[0],
        d.family,
        d.layers,
        d.hidden,
        d.sequence,
        c.gpus,
        c.cluster,
        c.tp,
        c.pp,
        c.chunks,
        c.dp,
        c.ep,
        c.zero,
        u8::from(c.sequence_parallel),
        c.micro_batch,
        c.global_batch,
        c.precision,
        c.recompute,
        p.prediction.step_time_s,
        p.case.measured.step_s.unwrap_or(f64::NAN),
        off(p.time()),
        s.forward.compute_s,
        s.forward.communication_s,
        s.backward.compute_s,
        s.backward.communication_s,
        b.forward.total() + b.backward.total(),
        c.global_batch / c.dp / c.micro_batch,
        s.update.total(),
        s.idle_s,
        p.prediction.peak() as f64 / (1u64 << 30) as f64,
        off(p.memory())
    )
}

fn table(planned: &[Planned]) {
    println!(
        "\n| source | rows | time error | bias | tau | worst | memory rows | memory error |\n|---|---|---|---|---|---|---|---|"
    );
    let mut by_source: BTreeMap<&str, Vec<&Planned>> = BTreeMap::new();
    planned.iter().for_each(|p| by_source.entry(&p.case.source).or_default().push(p));
    let percent = |x: f64| if x.is_nan() { "-".into() } else { format!("{:.1} %", 100.0 * x) };
    let line = |name: &str, list: &[&Planned]| {
        let times: Vec<score::Pair> = list.iter().filter_map(|p| p.time()).collect();
        let memory: Vec<score::Pair> = list.iter().filter_map(|p| p.memory()).collect();
        let mut groups: BTreeMap<_, Vec<score::Pair>> = BTreeMap::new();
        list.iter().for_each(|p| groups.entry(p.rank_group()).or_default().extend(p.time()));
        let tau = score::kendall(groups.values());
        let far = |p: &&&Planned| p.time().map_or(0, |(a, b)| ((a / b).ln().abs() * 1e6) as u64);
        let worst = list.iter().max_by_key(far).map_or("-".into(), |p| {
            let (a, b) = p.time().unwrap_or((1.0, 1.0));
            format!("{} {:+.0} %", p.case.measured.ids[0], 100.0 * (a / b - 1.0))
        });
        println!(
            "| {name} | {} | {} | {} | {} | {worst} | {} | {} |",
            times.len(),
            percent(score::mape(&times)),
            percent(score::bias(&times)),
            if tau.is_nan() { "-".into() } else { format!("{tau:.2}") },
            memory.len(),
            percent(score::mape(&memory))
        );
    };
    for (source, list) in &by_source {
        line(source, list);
    }
    line("all", &planned.iter().collect::<Vec<_>>());
}

fn refit(planned: &[Planned], cross: bool) {
    let mut by_architecture: BTreeMap<Architecture, Vec<&Planned>> = BTreeMap::new();
    planned.iter().for_each(|p| by_architecture.entry(p.cluster.device.architecture).or_default().push(p));
    println!("\nfitted; and each source predicted by a fit to the others of its architecture");
    for (architecture, cases) in by_architecture {
        let start = cases[0].cluster.device.coefficients().clone();
        let (best, error) = fit::fit(&cases, &start);
        println!("{}: {:.1} %", fit::show(architecture, &best), 100.0 * error);
        let mut sources: Vec<&str> = cases.iter().map(|p| p.case.source.as_str()).collect();
        sources.sort();
        sources.dedup();
        for source in sources.iter().filter(|_| cross && sources.len() > 1) {
            let (own, others): (Vec<&Planned>, Vec<&Planned>) = cases.iter().partition(|p| p.case.source == *source);
            let (without, _) = fit::fit(&others, &best);
            let pairs = |c: &_| -> Vec<score::Pair> {
                own.iter().filter_map(|p| Some((fit::step_time(p, c), p.case.measured.step_s?))).collect()
            };
            println!(
                "  {source}: fitted {:.1} %, predicted by the others {:.1} %",
                100.0 * score::mape(&pairs(&best)),
                100.0 * score::mape(&pairs(&without))
            );
        }
    }
}
