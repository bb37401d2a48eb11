//! Wall time and peak memory of `plan` on full-size graphs whose weights are absent, from 8 to 1024 GPUs.
//!
//! `cargo bench --bench plan_large [-- DIR [SECONDS]]` prints one line per model and cluster; DIR (default
//! `../shared/models/large`) holds the graphs. Results with commit and machine are kept in `benches/plan_large.md`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Model, its dims, global batch.
const MODELS: &[(&str, &[&str], usize)] = &[
    ("bert-large-loss", &["sequence=512"], 2048),
    ("gpt2-xl-loss", &["sequence=1024"], 2048),
    ("llama3-8b-loss", &["sequence=4096"], 2048),
    ("llama3-8b-loss-opset23", &["sequence=4096"], 2048),
    ("llama3-8b-logits", &["sequence=4096"], 2048),
    ("t5-11b-loss", &["sequence=512", "decoder_sequence=512"], 2048),
    ("mixtral-8x7b-loss", &["sequence=1024"], 2048),
    ("llama3-70b-loss", &["sequence=4096"], 2048),
    ("gpt3-175b-loss", &["sequence=2048"], 2048),
    ("llama3.1-405b-loss", &["sequence=4096"], 2048),
];

const GPUS: &[usize] = &[8, 64, 1024];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let dir = args.first().map_or_else(|| PathBuf::from("../shared/models/large"), PathBuf::from);
    let limit = args.get(1).map_or("60", String::as_str);
    if !dir.exists() {
        println!("no graphs in {}: nothing measured", dir.display());
        return;
    }
    println!("| model | GPUs | wall s | peak MiB | outcome |");
    println!("|---|---|---|---|---|");
    for (model, dims, batch) in MODELS {
        for gpus in GPUS {
            let (wall, peak, outcome) = plan(&dir.join(format!("{model}.onnx")), dims, *batch, *gpus, limit);
            println!("| {model} | {gpus} | {wall:.1} | {peak} | {outcome} |");
        }
    }
}

fn plan(model: &Path, dims: &[&str], batch: usize, gpus: usize, limit: &str) -> (f64, u64, String) {
    let out = std::env::temp_dir().join(format!("autoshard-bench-{}.json", std::process::id()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_autoshard"));
    command.arg("plan").arg(model).args(["--gpus", &gpus.to_string(), "--global-batch", &batch.to_string()]);
    command.args(["--quiet", "--time-limit", limit, "-o"]).arg(&out);
    command.args(dims.iter().flat_map(|d| ["--dim", d]));
    let started = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    let done = loop {
        let high = std::fs::read_to_string(&status).ok().and_then(|text| {
            text.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        });
        peak = peak.max(high.unwrap_or(0) / 1024);
        if let Ok(Some(done)) = child.try_wait() {
            break done;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let wall = started.elapsed().as_secs_f64();
    let shown = child.wait_with_output().map(|o| (o.stdout, o.stderr)).unwrap_or_default();
    let (text, said) = (String::from_utf8_lossy(&shown.0), String::from_utf8_lossy(&shown.1));
    let _ = std::fs::remove_file(&out);
    let line =
        |name: &str| text.lines().find_map(|l| Some(l.strip_prefix(name)?.trim().to_string())).unwrap_or_default();
    let outcome = match done.code() {
        Some(0) => format!("{}; {}", line("plan"), line("proof")),
        Some(3) => "does not fit".into(),
        _ => said.split_whitespace().filter(|w| *w != "×").collect::<Vec<_>>().join(" "),
    };
    (wall, peak, outcome)
}
