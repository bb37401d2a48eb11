//! Timing operators as `run` executes them: on the same device, with all ranks of the machine busy.
//!
//! Every rank is a thread with a device of its own. All time the same case at the same moment, several times in a row, in two passes
//! over all cases: a disturbance hits a few samples of many cases, not all samples of one. Operands rotate through memory, as those
//! of a step do, so that a case is not read from the nearest cache.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use autoshard_ir::op::{SampleInput, Work};
use autoshard_ir::tensor::ALIGN;
use autoshard_ir::{Op, Tensor, Type, convert};
use autoshard_runtime::device::{Device, Layout, Shard, Span};
use autoshard_runtime::random::Stream;
use autoshard_runtime::session::Options;

use super::fit::quantile;

/// An operator on operands of certain types.
pub struct Case {
    /// The operator.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<SampleInput>,
    /// Types of its results.
    pub outputs: Vec<Type>,
}

impl Case {
    /// The case of a whole tensor; none where operands do not fit.
    pub fn whole(op: Op, inputs: Vec<SampleInput>) -> Option<Case> {
        let types: Vec<Type> = inputs.iter().map(|i| i.ty.clone()).collect();
        let outputs = op.infer(&types).ok()?;
        Some(Case { op, inputs, outputs })
    }
    /// What the cost model is told of it.
    pub fn work(&self) -> Work {
        let types: Vec<Type> = self.inputs.iter().map(|i| i.ty.clone()).collect();
        self.op.work(&types, &self.outputs)
    }
    /// Bytes of all operands and results, as they lie in memory.
    pub fn bytes(&self) -> usize {
        let types = self.inputs.iter().map(|i| &i.ty).chain(&self.outputs);
        types.map(|t| t.bytes().next_multiple_of(ALIGN)).sum::<usize>().max(ALIGN)
    }
}

/// A measured time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timed {
    /// Seconds of one call: the median.
    pub seconds: f64,
    /// From the lower to the upper quartile, as a fraction of the median.
    pub spread: f64,
    /// How many samples there are.
    pub samples: usize,
}

impl Timed {
    /// Of samples.
    pub fn of(mut samples: Vec<f64>) -> Timed {
        let [low, seconds, high] = [0.25, 0.5, 0.75].map(|part| quantile(&mut samples, part));
        Timed { seconds, spread: (high - low) / seconds.max(f64::MIN_POSITIVE), samples: samples.len() }
    }
}

/// Passes over all cases.
pub const PASSES: usize = 2;
/// Samples of a case in a pass, of one rank.
const SAMPLES: usize = 5;
/// A sample repeats its case for at least so long: far more than reading the clock.
const SAMPLE: Duration = Duration::from_micros(400);
/// Memory of a rank.
const ARENA: usize = 64 << 20;
/// Operands rotate through so much of it: more than a core's own caches hold, less than all share.
const ROTATED: usize = 8 << 20;
/// Most places that they rotate through.
const PLACES: usize = 256;

/// The device of one rank, with a case laid out in it.
struct Bench {
    device: Box<dyn Device>,
}

impl Bench {
    fn new(rank: usize) -> Result<Bench, String> {
        let options = Options::default();
        let layout = Layout { arena: ARENA as u64, staging: 0, poison: options.poison };
        let device = (options.device.open)(rank, layout).map_err(|e| e.to_string())?;
        Ok(Bench { device })
    }

    /// Spans of operands and results at each place, operands filled.
    fn lay_out(&mut self, case: &Case) -> Result<Vec<Vec<Span>>, String> {
        let bytes = case.bytes();
        if bytes > ARENA {
            return Err(format!("{} needs {bytes} bytes of {ARENA}", case.op));
        }
        let places = ROTATED.div_ceil(bytes).clamp(1, PLACES).min(ARENA / bytes);
        let drawn: Vec<Tensor> = case.inputs.iter().enumerate().map(|(i, input)| draw(input, i as u64)).collect();
        let mut offset = 0;
        let mut laid = Vec::with_capacity(places);
        for _ in 0..places {
            let types = case.inputs.iter().map(|i| &i.ty).chain(&case.outputs);
            let spans: Vec<Span> = types
                .map(|ty| {
                    let span = Span { offset, bytes: ty.bytes() };
                    offset += ty.bytes().next_multiple_of(ALIGN);
                    span
                })
                .collect();
            for (span, tensor) in spans.iter().zip(&drawn) {
                self.device.upload(tensor.bytes(), *span).map_err(|e| e.to_string())?;
            }
            laid.push(spans);
        }
        Ok(laid)
    }

    fn call(&mut self, case: &Case, spans: &[Span]) -> Result<(), String> {
        let (from, to) = spans.split_at(case.inputs.len());
        // What the executor makes of a sum over micro-batches.
        if case.op.name() == "Accumulate"
            && let ([input], [output]) = (from, to)
        {
            return self.device.accumulate(&case.inputs[0].ty, *input, *output).map_err(|e| e.to_string());
        }
        let shard = |(ty, span): (_, &Span)| whole(ty, *span);
        let inputs: Vec<Shard<'_>> = case.inputs.iter().map(|i| &i.ty).zip(from).map(shard).collect();
        let outputs: Vec<Shard<'_>> = case.outputs.iter().zip(to).map(shard).collect();
        self.device.compute(&case.op, &inputs, &outputs).map_err(|e| format!("{}: {e}", case.op))
    }

    /// Seconds of a call, several times.
    fn time(&mut self, case: &Case, barrier: &Barrier) -> Result<Vec<f64>, String> {
        let laid = self.lay_out(case);
        // Others may be at it, whatever became of this one.
        barrier.wait();
        let laid = laid?;
        let mut next = 0;
        let mut batch = |calls: usize| -> Result<Duration, String> {
            let started = Clock::now();
            for _ in 0..calls {
                self.call(case, &laid[next])?;
                next = (next + 1) % laid.len();
            }
            Ok(started.elapsed())
        };
        // All places once, so that results have memory; then how many calls fill a sample.
        let first = batch(laid.len())?.as_secs_f64() / laid.len() as f64;
        let calls = (SAMPLE.as_secs_f64() / first.max(1e-8)).ceil().clamp(1.0, 1e5) as usize;
        (0..SAMPLES).map(|_| Ok(batch(calls)?.as_secs_f64() / calls as f64)).collect()
    }
}

/// The time that this thread computes: while another program has its core, it stands still. Kernels are one thread's work, so on an
/// idle machine it is the time that passes.
struct Clock {
    cpu: Option<Duration>,
    wall: Instant,
}

impl Clock {
    fn now() -> Clock {
        Clock { cpu: Clock::cpu(), wall: Instant::now() }
    }
    fn elapsed(&self) -> Duration {
        let cpu = self.cpu.zip(Clock::cpu()).map(|(before, now)| now.saturating_sub(before));
        cpu.unwrap_or_else(|| self.wall.elapsed())
    }
    #[cfg(unix)]
    fn cpu() -> Option<Duration> {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `t` is a valid place to write to.
        let got = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
        (got == 0).then(|| Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0)))
    }
    #[cfg(not(unix))]
    fn cpu() -> Option<Duration> {
        None
    }
}

/// Zeros, for as many dims as any sample has.
static ORIGIN: [usize; 16] = [0; 16];

/// An unsharded tensor.
fn whole(ty: &Type, span: Span) -> Shard<'_> {
    Shard { span, ty, origin: &ORIGIN[..ty.rank().min(ORIGIN.len())], global: &ty.dims }
}

/// Elements uniform in the range; whole numbers where the type has only those.
fn draw(input: &SampleInput, seed: u64) -> Tensor {
    let mut stream = Stream(seed);
    let mut tensor = Tensor::zeros(input.ty.clone());
    let (low, high) = input.range;
    let integer = !input.ty.dtype.is_float();
    let elements = (0..input.ty.numel()).map(|_| low + stream.uniform() * (high - low));
    let elements = elements.map(|x| if integer { x.floor() } else { x });
    convert::from_f64(input.ty.dtype, elements, tensor.bytes_mut());
    tensor
}

/// Times all cases on that many ranks at once; `done` is called after each case of each pass. An error where a case cannot run.
pub fn time(cases: &[Case], ranks: usize, done: &(dyn Fn() + Sync)) -> Vec<Result<Timed, String>> {
    let found: Vec<Mutex<Result<Vec<f64>, String>>> = cases.iter().map(|_| Mutex::new(Ok(Vec::new()))).collect();
    let barrier = Barrier::new(ranks);
    let rank = |rank: usize| {
        let mut bench = Bench::new(rank);
        for _ in 0..PASSES {
            for (case, found) in cases.iter().zip(&found) {
                let samples = match &mut bench {
                    // A kernel that panics is a case that cannot run; the wait inside comes first.
                    Ok(b) => catch_unwind(AssertUnwindSafe(|| b.time(case, &barrier)))
                        .unwrap_or_else(|_| Err(format!("{} panics", case.op))),
                    Err(e) => {
                        barrier.wait();
                        Err(e.clone())
                    }
                };
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                match (&mut *found, samples) {
                    (Ok(all), Ok(more)) => all.extend(more),
                    (_, Err(e)) => *found = Err(e),
                    (Err(_), _) => {}
                }
                drop(found);
                if rank == 0 {
                    done();
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for r in 1..ranks {
            let rank = &rank;
            scope.spawn(move || rank(r));
        }
        rank(0);
    });
    found.into_iter().map(|m| m.into_inner().unwrap_or_else(PoisonError::into_inner).map(Timed::of)).collect()
}
