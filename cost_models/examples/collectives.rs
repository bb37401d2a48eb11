//! Compares the collective model with published timings:
//!
//! ```text
//! cargo run -p autoshard-cost-models --example collectives -- collectives.csv [--rows] [--only PREFIX]
//! ```
//!
//! Prints, per source, collective and size class, the number of rows, the median absolute error of time and the median bias (positive:
//! predicted too slow). Rows are left out only where the hardware is not stated, or nothing but a headline figure without a
//! size is given; those counts are printed too.

use std::collections::BTreeMap;
use std::process::ExitCode;

use autoshard_cost_models::{Bytes, Cluster, CollectiveKind, Group, Seconds};
use autoshard_ir::DType;
use autoshard_ir::op::{Family, Work};

/// Row id prefix, and the cluster that was measured; None with the reason why rows are not used.
const SOURCES: &[(&str, Result<&str, &str>)] = &[
    ("a100_8_nvl", Ok("dgx-a100")),
    ("a100_sendrecv", Ok("dgx-a100")),
    ("aceso_p2p", Ok("dgx1-v100-32gb")),
    ("aceso_v100", Ok("dgx1-v100-32gb")),
    ("azure_a100", Ok("ndm-a100-v4")),
    ("azure_h100", Ok("dgx-h100")),
    ("b200_8", Ok("dgx-b200")),
    ("b200_gpucount", Ok("dgx-b200")),
    ("galv_bw", Err("hardware not stated")),
    ("galv_sp", Err("hardware not stated")),
    ("gen_4n", Err("hardware not stated")),
    ("gtc24", Err("no size")),
    ("gtc24_multi", Err("no size")),
    ("h100pcie_2", Err("two cards with an NVLink bridge: no such cluster")),
    ("h200_8_nvl", Ok("dgx-h200")),
    ("h200_coll16g", Ok("dgx-h200")),
    ("h200_gpucount", Ok("dgx-h200")),
    ("mi200", Ok("mi250x-node")),
    ("mi300x", Ok("nd-mi300x-v5")),
    ("p2p", Err("no size")),
    ("t4_8", Err("placement of 8 ranks on T4 hosts not stated")),
];

/// One record of a CSV file, quotes resolved.
fn record(line: &str) -> Vec<String> {
    let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(std::mem::take(&mut field)),
            c => field.push(c),
        }
    }
    fields.push(field);
    fields
}

fn kind_of(name: &str) -> Option<CollectiveKind> {
    Some(match name {
        "all_reduce" => CollectiveKind::AllReduce,
        "all_gather" => CollectiveKind::AllGather,
        "reduce_scatter" => CollectiveKind::ReduceScatter,
        "all_to_all" => CollectiveKind::AllToAll,
        "sendrecv" | "p2p" => CollectiveKind::SendRecv,
        _ => return None,
    })
}

/// Some sources timed the list forms of `torch.distributed.all_gather` and `reduce_scatter`, which copy the whole buffer, shard by
/// shard, out of or into a flat one.
fn list_copies(cluster: &Cluster, source: &str, kind: CollectiveKind, n: usize, bytes: f64) -> Seconds {
    let lists = source == "aceso_v100" || source == "mi200";
    if !lists || !matches!(kind, CollectiveKind::AllGather | CollectiveKind::ReduceScatter) {
        return Seconds::ZERO;
    }
    let shard = Work { family: Family::Memory, bytes: 2.0 * bytes / n as f64, ..Work::FREE };
    cluster.op_time(&shard, DType::F32) * n as f64
}

fn median(xs: &mut [f64]) -> f64 {
    xs.sort_by(f64::total_cmp);
    let n = xs.len();
    if n % 2 == 1 { xs[n / 2] } else { 0.5 * (xs[n / 2 - 1] + xs[n / 2]) }
}

fn main() -> ExitCode {
    match report() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn report() -> Result<(), String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("which file? usage: collectives FILE.csv [--rows] [--only PREFIX]")?;
    let rows = args.iter().any(|a| a == "--rows");
    let only = args.iter().position(|a| a == "--only").and_then(|i| args.get(i + 1));
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let mut lines = text.lines();
    let header = record(lines.next().ok_or("the file is empty")?);
    let mut errors: BTreeMap<(String, &str, &str), Vec<f64>> = BTreeMap::new();
    let mut left_out: BTreeMap<(String, &str), usize> = BTreeMap::new();
    let mut clusters: BTreeMap<&str, Cluster> = BTreeMap::new();
    for line in lines {
        let fields = record(line);
        let get =
            |name: &str| header.iter().position(|h| h == name).and_then(|i| fields.get(i)).map_or("", |s| s.as_str());
        let number = |name: &str| get(name).parse::<f64>().ok();
        let source = get("id").rsplit_once('-').map_or(get("id"), |(s, _)| s).to_string();
        if only.is_some_and(|o| !source.starts_with(o.as_str())) {
            continue;
        }
        let cluster = match SOURCES.iter().find(|(s, _)| *s == source) {
            Some((_, Ok(name))) => *name,
            Some((_, Err(reason))) => {
                *left_out.entry((source, reason)).or_default() += 1;
                continue;
            }
            None => {
                *left_out.entry((source, "source not known to this benchmark")).or_default() += 1;
                continue;
            }
        };
        let (Some(kind), Some(n), Some(bytes)) = (kind_of(get("collective")), number("gpus"), number("msg_bytes"))
        else {
            *left_out.entry((source, "no size, or a collective without a model")).or_default() += 1;
            continue;
        };
        let n = n as usize;
        // Turning NVLS off is not a question that the planner asks.
        if get("algo").contains("NVLS_ENABLE=0") {
            *left_out.entry((source, "NVLS turned off by hand")).or_default() += 1;
            continue;
        }
        let measured = number("time_us")
            .or_else(|| number("algbw_GBps").map(|b| bytes / b * 1e-3))
            .or_else(|| number("busbw_GBps").map(|b| bytes * kind.wire_fraction(n) / b * 1e-3));
        let Some(measured) = measured.filter(|t| *t > 0.0) else {
            *left_out.entry((source, "no time")).or_default() += 1;
            continue;
        };
        let whole = match clusters.get(cluster) {
            Some(c) => c,
            None => clusters.entry(cluster).or_insert(Cluster::load(cluster).map_err(|e| e.to_string())?),
        };
        if get("interconnect").contains("inter-node") {
            *left_out
                .entry((source, "one pair alone on a node's network; the model answers all pairs at once"))
                .or_default() += 1;
            continue;
        }
        let group = Group::contiguous(n);
        let Some(estimate) = whole.collective_estimate(kind, Bytes(bytes as u64), group) else { continue };
        let time = estimate.time + list_copies(whole, &source, kind, n, bytes);
        let error = time.as_micros() / measured - 1.0;
        if rows {
            println!(
                "{source} {} n={n} {:>9} measured {measured:10.1} us, predicted {:10.1} us ({:+5.0}%) {:?} {:?}",
                kind.name(),
                Bytes(bytes as u64).to_string(),
                time.as_micros(),
                100.0 * error,
                estimate.algorithm,
                estimate.protocol
            );
        }
        let class = if bytes >= (1 << 20) as f64 { ">=1MiB" } else { "<1MiB" };
        for kind in [kind.name(), "(all)"] {
            errors.entry((source.clone(), kind, class)).or_default().push(error);
        }
    }
    println!("{:<16} {:<15} {:>7} {:>6} {:>8} {:>8}", "source", "collective", "size", "rows", "median", "bias");
    for ((source, kind, class), errors) in &mut errors {
        let bias = median(errors);
        let mut absolute: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
        println!(
            "{source:<16} {kind:<15} {class:>7} {:>6} {:>7.1}% {:>+7.1}%",
            errors.len(),
            100.0 * median(&mut absolute),
            100.0 * bias
        );
    }
    for ((source, reason), count) in &left_out {
        println!("left out: {count} rows of {source}: {reason}");
    }
    Ok(())
}
