//! Solves instances of the ASPLOS/EuroSys 2025 contest and prints one line per file.
//!
//! `cargo run --release -p autoshard-planner --example iopddl -- [--seconds S] [--threads T] [--seed N] FILE...`, for files `*.json` or `*.json.gz`.

use autoshard_planner::solver::{Options, contest, solve};
use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

/// Lowest cost that any published file gives (teams, the winners' later runs, XLA).
const PUBLISHED: [(&str, i128); 10] = [
    ("A", 6_548_641_531),
    ("B", 532_843),
    ("G", 217_039),
    ("K", 2_242_635_784),
    ("L", 1_970_993_742),
    ("M", 49_928_157_537),
    ("N", 199_470_115_118),
    ("P", 651_833_115_436),
    ("S", 1_521_949_307),
    ("U", 2_443_995_952),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::default();
    let mut files = vec![];
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--seconds" => options.time_limit = Duration::try_from_secs_f64(value()?.parse()?)?,
            "--threads" => options.threads = value()?.parse()?,
            "--seed" => options.seed = value()?.parse()?,
            _ => files.push(arg),
        }
    }
    println!("| instance | cost | best published | bound | gap | read s | solve s | core nodes | peak MB | phases |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for path in files {
        let start = Instant::now();
        let file = File::open(&path).map_err(|e| format!("{path}: {e}"))?;
        let input: Box<dyn Read> =
            if path.ends_with(".gz") { Box::new(flate2::read::GzDecoder::new(file)) } else { Box::new(file) };
        let (name, problem) = contest::read(input).map_err(|e| format!("{path}: {e}"))?;
        let read = start.elapsed();
        let label = name.rsplit('-').next().unwrap_or(&name).to_string();
        let published = PUBLISHED.iter().find(|(n, _)| *n == label).map_or("-".into(), |(_, c)| c.to_string());
        match solve(&problem, &Options { time_limit: options.time_limit.saturating_sub(read), ..options.clone() }) {
            Ok(s) => {
                let phases: Vec<String> = s.statistics.seconds.iter().map(|(p, t)| format!("{p:?} {t:.1}")).collect();
                println!(
                    "| {label} | {} | {published} | {} | {:.4}% | {:.1} | {:.1} | {} | {} | {} |",
                    s.objective,
                    s.bound,
                    100.0 * s.gap(),
                    read.as_secs_f64(),
                    (start.elapsed() - read).as_secs_f64(),
                    s.statistics.core_nodes,
                    peak_megabytes(),
                    phases.join(", ")
                );
                if std::env::var_os("IOPDDL_DETAILS").is_some() {
                    eprintln!("{:?}", s.statistics);
                }
            }
            Err(e) => println!(
                "| {label} | {e} | {published} | | | {:.1} | {:.1} | | {} | |",
                read.as_secs_f64(),
                (start.elapsed() - read).as_secs_f64(),
                peak_megabytes()
            ),
        }
    }
    Ok(())
}

/// The process's peak of resident memory so far, where the system tells.
fn peak_megabytes() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.map_or("-".into(), |kb| (kb / 1024).to_string())
}
