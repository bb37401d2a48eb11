//! `cargo bench --bench profile`: `profile` measures this machine, and `plan` with its cluster file predicts what `run` takes: both
//! side by side, within 20% or it fails. `profile.md` beside it has results.
//!
//! Timing needs a machine of its own that does not change its speed: what other programs take is watched, and a probe is timed before
//! and after. What is disturbed is measured again, and a machine that has become faster or slower is profiled again. One that is never
//! steady ends it, with that reason.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use autoshard_cost_models::Cluster;
use autoshard_ir::graph::Section;
use autoshard_ir::onnx::Model;
use autoshard_ir::op::Attr;
use autoshard_ir::{Op, Tensor, Type, blocks, convert, interp, ops};
use autoshard_planner::plan::Plan;
use autoshard_planner::simulate::class_seconds;
use autoshard_planner::times::Times;
use autoshard_runtime::session::{Options, Session};
use autoshard_runtime::trace::Recorder;
use autoshard_runtime::weights::Weights;
use common::{model, works};

/// What is allowed.
const TOLERANCE: f64 = 0.2;
/// How often a measurement on a busy machine is taken again.
const TRIES: usize = 12;
/// Cores that other programs may take.
const DISTURBANCE: f64 = 0.06;
/// How long other programs are waited for, each time.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much the machine may change its speed.
const DRIFT: f64 = 0.06;

/// A model and sizes at which a step takes tens of milliseconds on one rank.
const MODELS: [(&str, &[&str]); 4] = [
    ("gpt2-loss-dyn.onnx", &["--global-batch", "16", "--dim", "sequence=64"]),
    ("llama-loss-dyn.onnx", &["--global-batch", "16", "--dim", "sequence=64"]),
    ("bert-mlm-loss-dyn.onnx", &["--global-batch", "16", "--dim", "sequence=64"]),
    ("vit-loss-dyn.onnx", &["--global-batch", "32"]),
];

/// How ranks work together.
const SPLITS: [&[&str]; 4] =
    [&["--gpus", "1"], &["--gpus", "2", "--dp", "2"], &["--gpus", "2", "--tp", "2"], &["--gpus", "2", "--pp", "2"]];

/// Seconds that processors were busy, or taken by a hypervisor, since the machine started.
fn busy() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let ticks: Vec<f64> = text.lines().next().unwrap().split_whitespace().skip(1).map(|w| w.parse().unwrap()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal
    let ticks: f64 = [0, 1, 2, 5, 6, 7].iter().map(|i| ticks[*i]).sum();
    // SAFETY: asks for a constant.
    ticks / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64
}

/// Seconds that this process and those it started (and waited for) were busy.
fn own() -> f64 {
    let of = |who| {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: a valid place to write to; zeros are a valid `rusage`.
        let u = unsafe {
            libc::getrusage(who, usage.as_mut_ptr());
            usage.assume_init()
        };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
        seconds(u.ru_utime) + seconds(u.ru_stime)
    };
    of(libc::RUSAGE_SELF) + of(libc::RUSAGE_CHILDREN)
}

/// Seconds that fixed work takes on that many threads at once: kernels bound by arithmetic, by exponentials and by memory. Says how
/// fast the machine is now: clocks, and other machines on the same processor, change that.
fn probe(threads: usize) -> f64 {
    let ones = |dims: &[usize]| Tensor::f32(dims, &vec![1.0; dims.iter().product()]);
    let op = |name: &str| Op::new(ops::find(name).unwrap());
    let product = op("Einsum").with("eq", Attr::Str("mk,kn->mn".into()));
    let works = [
        (product, vec![ones(&[256, 64]), ones(&[64, 256])]),
        (op("Silu"), vec![ones(&[1 << 16])]),
        (op("Add"), vec![ones(&[1 << 18]); 2]),
    ];
    let work = || {
        let mut seconds: Vec<f64> = (0..9)
            .map(|_| {
                let started = Instant::now();
                for (op, inputs) in &works {
                    let types: Vec<Type> = inputs.iter().map(|t| t.ty().clone()).collect();
                    let outputs = op.infer(&types).unwrap();
                    for _ in 0..3 {
                        interp::apply(op, inputs, &outputs).unwrap();
                    }
                }
                started.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().map(|t| t.join().unwrap()).sum::<f64>() / threads as f64
    })
}

/// A measurement, and the circumstances of it.
struct Measured<T> {
    found: T,
    /// Of [`probe`], the mean of before and after.
    probe: f64,
}

/// Measures, and says what was in the way: other programs, or a machine that changed its speed meanwhile.
fn measured<T>(threads: usize, measure: impl FnOnce() -> T) -> Result<Measured<T>, String> {
    quiet()?;
    let before = probe(threads);
    let (others, started) = (busy() - own(), Instant::now());
    let found = measure();
    let part = (busy() - own() - others) / started.elapsed().as_secs_f64();
    let after = probe(threads);
    let change = (after / before - 1.0).abs();
    if part > DISTURBANCE {
        return Err(format!("other programs take {part:.2} cores"));
    }
    if change > DRIFT {
        return Err(format!("the machine changed its speed by {:.0}% meanwhile", change * 100.0));
    }
    Ok(Measured { found, probe: (before + after) / 2.0 })
}

/// Waits until other programs leave the machine alone for a second.
fn quiet() -> Result<(), String> {
    let waited = Instant::now();
    while waited.elapsed() < PATIENCE {
        let before = busy() - own();
        std::thread::sleep(Duration::from_secs(1));
        if busy() - own() - before < DISTURBANCE {
            return Ok(());
        }
    }
    Err(format!("other programs were never idle for a second in {PATIENCE:?}"))
}

/// The machine, profiled: again, where it is no longer as fast as it was.
struct Machine {
    cluster: String,
    probe: f64,
    threads: usize,
}

impl Machine {
    fn profile(&mut self) -> Result<(), String> {
        let m = measured(self.threads, || works(&["profile", "-q", "-o", &self.cluster]))?;
        println!("{}", m.found);
        self.probe = m.probe;
        Ok(())
    }

    /// Seconds of a step, measured and predicted, while the machine is as fast as when it was profiled.
    fn step(&mut self, plan: &str, flags: &[&str]) -> Result<(f64, f64), String> {
        works(&[&["plan", flags[0], "--cluster", &self.cluster, "-q", "-o", plan], &flags[1..]].concat());
        let m = measured(self.threads, || step(plan))?;
        let change = m.probe / self.probe - 1.0;
        if change.abs() > DRIFT {
            self.profile()?;
            return Err(format!("the machine's work took {:+.0}% of the time when it was profiled", change * 100.0));
        }
        Ok(m.found)
    }
}

/// Again, after a pause, while something is in the way. On a machine on which it always is this ends.
fn patiently<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let mut reasons = Vec::new();
    for _ in 0..TRIES {
        match attempt() {
            Ok(found) => return found,
            Err(why) => reasons.push(why),
        }
        println!("{what}: again, since {}", reasons[reasons.len() - 1]);
    }
    panic!("{what} could not be measured on this machine: {}", reasons.join("; "));
}

/// The median of the seconds that steps take, after the first, and what was predicted.
fn step(plan: &str) -> (f64, f64) {
    let text = works(&["run", plan, "--steps", "25", "--random-weights", "--json"]);
    let doc: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut seconds: Vec<f64> =
        doc["seconds_of_steps"].as_array().unwrap()[1..].iter().map(|s| s.as_f64().unwrap()).collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], doc["predicted_seconds_per_step"].as_f64().unwrap())
}

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let threads = std::thread::available_parallelism().unwrap().get().min(2);
    let mut machine = Machine { cluster: at("here.toml"), probe: 0.0, threads };
    patiently("profile", || machine.profile());
    let ranks = Cluster::load(&machine.cluster).unwrap().devices_per_node;
    let splits = if ranks >= 2 { &SPLITS[..] } else { &SPLITS[..1] };
    let mut table =
        format!("{:<24} {:<16} {:>12} {:>12} {:>7}\n", "model", "split", "predicted ms", "measured ms", "error");
    let mut wrong = Vec::new();
    for (name, sizes) in MODELS {
        for split in splits {
            let file = model(name);
            let flags = [&[file.as_str()], sizes, split].concat();
            let (took, predicted) = patiently(name, || machine.step(&at("p.json"), &flags));
            let error = predicted / took - 1.0;
            let line = format!(
                "{:<24} {:<16} {:>12.2} {:>12.2} {:>+6.1}%",
                name,
                split[1..].join(" "),
                predicted * 1e3,
                took * 1e3,
                error * 100.0
            );
            println!("{line}");
            writeln!(table, "{line}").unwrap();
            if error.abs() > TOLERANCE {
                wrong.push(line);
            }
        }
        let plan = at("p.json");
        works(
            &[&["plan", &model(name), "--cluster", &machine.cluster, "-q", "-o", &plan, "--gpus", "1"], sizes].concat(),
        );
        println!("{}", by_operator(&plan, &model(name), &machine.cluster));
    }
    println!("{table}");
    assert!(wrong.is_empty(), "more than {:.0}% off:\n{}\nof\n{table}", TOLERANCE * 100.0, wrong.join("\n"));
}

/// Seconds of a step by operator on one rank, predicted and measured: where errors of steps come from.
fn by_operator(plan: &str, file: &str, cluster: &str) -> String {
    let model = Model::open(Path::new(file)).unwrap();
    let parsed = Plan::from_json(&std::fs::read_to_string(plan).unwrap()).unwrap();
    let (graph, assignment) = parsed.resolve(&model).unwrap();
    let cluster = Cluster::load(cluster).unwrap().with_gpus(1).unwrap();
    let blocks = blocks::find(&graph);
    let times = Times::new(&cluster, &assignment.mesh);
    let seconds = class_seconds(&graph, &blocks, &assignment, &times);
    let mut by_name: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for id in graph.node_ids() {
        let n = graph.node(id);
        // One micro-batch: sums over them are what they are made of.
        if !(n.is_accumulate() && n.section != Section::Update) {
            by_name.entry(n.op.name()).or_default()[0] += seconds[blocks.node_class[id.index()] as usize];
        }
    }
    let job = autoshard_codegen::compile(&graph, &assignment).unwrap();
    let recorder = Arc::new(Recorder::default());
    let options = Options { weights: Weights::Random(0), observer: Some(recorder.clone()), ..Options::default() };
    let mut session = Session::new(job, &options).unwrap();
    let types: Vec<_> = session.job().inputs.iter().map(|p| (p.name.clone(), p.ty.clone())).collect();
    // Ones: no padding, and indices of every table.
    let ones = |ty: Type| {
        let mut t = Tensor::zeros(ty.clone());
        convert::from_f64(ty.dtype, (0..ty.numel()).map(|_| 1.0), t.bytes_mut());
        t
    };
    let inputs = types.into_iter().map(|(n, ty)| (n, ones(ty))).collect();
    let steps = 6;
    for _ in 0..steps {
        session.step(&inputs).unwrap();
    }
    for e in recorder.events() {
        by_name.entry(e.name).or_default()[1] += e.duration_us * 1e-6 / steps as f64;
    }
    let whole: f64 = by_name.values().map(|[_, m]| m).sum();
    let mut rows: Vec<_> = by_name.into_iter().filter(|(_, [p, m])| p.max(*m) > 0.005 * whole).collect();
    rows.sort_by(|a, b| b.1[1].total_cmp(&a.1[1]));
    let mut text = format!("  {:<20} {:>12} {:>12}\n", "operator", "predicted ms", "measured ms");
    for (name, [p, m]) in rows {
        writeln!(text, "  {name:<20} {:>12.2} {:>12.2}", p * 1e3, m * 1e3).unwrap();
    }
    text
}
