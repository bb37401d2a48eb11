//! `profile`: measures this machine and writes its cluster file.

use std::time::{Duration, Instant};

use autoshard_cost_models::Cluster;
use autoshard_cost_models::compute::OperatorCost;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::ProfileArgs;
use crate::failure::Failure;
use crate::profile::host::Host;
use crate::profile::{self, Profile};
use crate::{files, show};

/// Runs the command.
pub fn run(args: &ProfileArgs) -> Result<(), Failure> {
    files::check_output(&args.output, &[])?;
    let host = Host::read().ok_or_else(|| {
        Failure::new("this system does not say how much memory it has: profile reads /proc of Linux")
            .help("write a cluster file by hand: `autoshard clusters cpu > cluster.toml`")
    })?;
    let ranks = args.ranks.unwrap_or(host.cores);
    if ranks == 0 || ranks > host.cores {
        return Err(Failure::usage(format!("--ranks {ranks}: this machine has {} cores to run ranks on", host.cores)));
    }
    let started = Instant::now();
    let cases = profile::cases();
    let bar = if args.quiet || args.json { ProgressBar::hidden() } else { ProgressBar::new(0) };
    bar.set_length(profile::steps(&cases, ranks) as u64);
    bar.set_style(ProgressStyle::with_template("measuring [{bar:30}] {pos}/{len} {elapsed}").expect("a fixed text"));
    bar.enable_steady_tick(Duration::from_millis(200));
    let name = files::with_suffix(&args.output, "").with_extension("");
    let name = name.file_name().map_or("cluster".into(), |n| n.to_string_lossy().into_owned());
    let found = profile::measure(name, host, ranks, &cases, &|| bar.inc(1));
    bar.finish_and_clear();
    let found = found.map_err(|e| Failure::new(format!("measuring failed: {e}")))?;
    let text = profile::cluster::file(&found).to_toml().map_err(Failure::new)?;
    // A file that plan would refuse is not written.
    Cluster::parse(&text, "what was measured").map_err(|e| {
        Failure::new(e).help("other programs may have disturbed the measurement: run it again on an idle machine")
    })?;
    files::write(&args.output, text.as_bytes())?;
    if args.json {
        println!("{:#}", document(&found));
        return Ok(());
    }
    print!("{}", summary(&found));
    println!("\nmeasured in {}, wrote {}", show::seconds(started.elapsed().as_secs_f64()), args.output.display());
    Ok(())
}

/// Operators that most of a step is made of.
const SHOWN: [&str; 12] = [
    "Add",
    "Gelu tanh",
    "GeluGrad tanh",
    "Silu",
    "LayerNorm",
    "LayerNormGrad",
    "RmsNorm",
    "Softmax",
    "ReduceSum",
    "CrossEntropyParts",
    "Transpose",
    "AdamW",
];

/// What was measured, on one screen.
fn summary(p: &Profile) -> String {
    let mut rows = vec![["figure", "value", "unit", "fit within", "of"].map(String::from).to_vec()];
    let within = |error: f64| format!("{:.0} %", 100.0 * error);
    let mut row = |name: &str, value: f64, unit: &str, error: Option<f64>, of: usize| {
        let digits = if value >= 100.0 { 0 } else { 2 };
        let error = error.map_or(String::new(), within);
        rows.push(vec![
            name.into(),
            format!("{value:.digits$}"),
            unit.into(),
            error,
            if of > 0 { of.to_string() } else { String::new() },
        ]);
    };
    let error = |name: &str| p.costs.errors.get(name).copied().unwrap_or((0.0, 0));
    let (e, n) = error("Einsum");
    row("large matrix products", p.costs.peak * 1e-9, "GFLOP/s", Some(e), n);
    row("memory, read and written", p.copy.bandwidth * 1e-9, "GB/s", None, 0);
    for name in ["Attention causal", "AttentionGrad causal"] {
        if let Some(rate) = p.costs.operators.get(name).and_then(|c| c.scores_g_s) {
            let (e, n) = error(name);
            row(&format!("{name}: scores"), rate * 1e3, "M/s", Some(e), n);
        }
    }
    for name in SHOWN {
        if let Some(OperatorCost { gb_s: Some(rate), .. }) = p.costs.operators.get(name) {
            let (e, n) = error(name);
            row(name, *rate, "GB/s", Some(e), n);
        }
    }
    for (kind, line) in &p.collectives {
        let m = &line.measured;
        row(&format!("{}: latency", kind.name()), m.latency_us, "µs", Some(line.error), line.cases);
        row(&format!("{}: bandwidth", kind.name()), m.bandwidth_gb_s, "GB/s", None, 0);
    }
    let mut text = format!(
        "{}: {} ranks at once, {} of memory free\n{} operators on {} sizes; samples spread by {} (median)\n\n",
        p.host.name,
        p.ranks,
        show::bytes(p.host.available.0),
        p.costs.operators.len(),
        p.cases,
        show::percent(p.costs.spread)
    );
    text += &show::columns(&rows);
    if p.costs.spread > 0.2 {
        text += "note: samples differ a lot: other programs run on this machine; measure again when it is idle\n";
    }
    for failed in &p.costs.failed {
        text += &format!("not measured: {failed}\n");
    }
    text
}

fn document(p: &Profile) -> serde_json::Value {
    let operators = p.costs.operators.iter().map(|(name, c)| {
        let (error, cases) = p.costs.errors.get(name).copied().unwrap_or((0.0, 0));
        let value = serde_json::json!({
            "call_us": c.call_us, "gb_s": c.gb_s, "gflops": c.gflops, "scores_g_s": c.scores_g_s,
            "median_fit_error": error, "cases": cases,
        });
        (name.clone(), value)
    });
    let collectives = p.collectives.iter().map(|(kind, l)| {
        let value = serde_json::json!({
            "latency_us": l.measured.latency_us, "bandwidth_gb_s": l.measured.bandwidth_gb_s,
            "median_fit_error": l.error, "median_spread": l.spread, "cases": l.cases,
        });
        (kind.name().to_string(), value)
    });
    serde_json::json!({
        "processor": p.host.name, "date": p.date, "ranks": p.ranks, "memory_bytes": p.host.memory.0,
        "available_bytes": p.host.available.0, "matmul_gflops": p.costs.peak * 1e-9,
        "copy_gb_s": p.copy.bandwidth * 1e-9, "median_spread": p.costs.spread, "samples": p.samples,
        "operators": operators.collect::<serde_json::Map<_, _>>(),
        "collectives": collectives.collect::<serde_json::Map<_, _>>(),
        "not_measured": p.costs.failed,
    })
}
