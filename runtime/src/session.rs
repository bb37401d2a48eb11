//! A run: all ranks of a job, on devices and communicators of one kind each. The one interface of `run` and `verify`.
//!
//! [`Session::new`] verifies the job, refuses what does not fit in memory, and loads states; [`Session::step`] runs one
//! step. States stay on the devices in between, and are read and replaced as unsharded tensors. Ranks that live in this
//! process run as threads; the failure of one ends all, and the session after it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use autoshard_ir::graph::StateKind;
use autoshard_ir::{Tensor, Type, convert};

use crate::boxes;
use crate::comm::{self, CommError, CommKind, Failure, World};
use crate::device::{self, DeviceError, DeviceKind};
use crate::executor::{Executor, Permits, StepIo, layout};
use crate::memory;
use crate::program::{Job, Port, StateSlot};
use crate::trace::Observer;
use crate::verify::{Violation, verify};
use crate::weights::Weights;

/// How a job is run.
#[derive(Clone)]
pub struct Options {
    /// Where parameters come from.
    pub weights: Weights,
    /// How many ranks of this process compute at once; `None`: all. Useful where ranks are more than cores.
    pub threads: Option<usize>,
    /// The kind of device.
    pub device: &'static DeviceKind,
    /// The kind of communicator.
    pub comm: &'static CommKind,
    /// Watches every instruction.
    pub observer: Option<Arc<dyn Observer>>,
    /// Bytes that arenas may take in all; `None`: what the device says is free.
    pub memory: Option<u64>,
    /// See [`World::watchdog`].
    pub watchdog: Duration,
    /// See [`device::Layout::poison`].
    pub poison: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            weights: Weights::Files,
            threads: None,
            device: &device::TABLE[0],
            comm: &comm::TABLE[0],
            observer: None,
            memory: None,
            watchdog: Duration::from_secs(60),
            poison: cfg!(debug_assertions),
        }
    }
}

/// Why a session could not be made, or a step not be run.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The job breaks rules of the verifier.
    #[error("the program is not valid, a fault of the compiler:\n  {}", .0.iter().map(Violation::to_string).collect::<Vec<_>>().join("\n  "))]
    Invalid(Vec<Violation>),
    /// It does not fit in memory.
    #[error(
        "{ranks} ranks need {} of memory ({} on the largest), and {} are free; use fewer ranks, a smaller batch or a smaller model",
        memory::show(*.needed), memory::show(*.largest), memory::show(*.free)
    )]
    Memory {
        /// Ranks in this process.
        ranks: usize,
        /// Bytes for all of them.
        needed: u64,
        /// Bytes for the one that needs most.
        largest: u64,
        /// Bytes free.
        free: u64,
    },
    /// A device could not be opened.
    #[error("device of rank {rank}: {source}")]
    Device {
        /// For which rank.
        rank: u32,
        /// Why.
        source: DeviceError,
    },
    /// Ranks could not be connected.
    #[error(transparent)]
    Comm(CommError),
    /// An input is missing, unknown, or of another type.
    #[error("input `{name}`: {reason}")]
    Input {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A state is unknown, or of another type.
    #[error("state `{name}`: {reason}")]
    State {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A rank failed.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl std::error::Error for Failure {}

/// All ranks of a job that live in this process.
pub struct Session {
    job: Arc<Job>,
    executors: Vec<Executor>,
    steps: u64,
    failed: Option<Failure>,
}

/// The unsharded type of what a port takes or gives in a step: all micro-batches.
pub fn step_type(job: &Job, port: &Port) -> Type {
    let mut ty = port.ty.clone();
    if let Some(d) = port.batch_dim {
        ty.dims[d] *= job.micro_batches;
    }
    ty
}

impl Session {
    /// Verifies the job, opens devices and communicators, and loads states.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn new(job: Job, options: &Options) -> Result<Session, SessionError> {
        verify(&job).map_err(SessionError::Invalid)?;
        let world = World { ranks: job.ranks.len(), watchdog: options.watchdog };
        let comms = (options.comm.connect)(world).map_err(SessionError::Comm)?;
        let layouts: Vec<device::Layout> = job.stages.iter().map(|p| layout(p, options.poison)).collect();
        let per_stage = job.ranks_per_stage();
        // By rank: its stage and its index there.
        let mut places = vec![(0, 0); job.ranks.len()];
        for (i, rank) in job.ranks.iter().enumerate() {
            places[rank.0 as usize] = (i / per_stage, i % per_stage);
        }
        let need = |rank: usize| layouts[places[rank].0].arena + layouts[places[rank].0].staging;
        let local = comms.iter().map(|c| need(c.rank().0 as usize));
        let (needed, largest) = local.fold((0, 0u64), |(sum, most), n| (sum + n, most.max(n)));
        if let Some(free) = options.memory.or_else(options.device.available)
            && needed > free
        {
            return Err(SessionError::Memory { ranks: comms.len(), needed, largest, free });
        }
        let permits = options.threads.map(|n| Arc::new(Permits::new(n)));
        let job = Arc::new(job);
        let mut executors = Vec::new();
        for (local, comm) in comms.into_iter().enumerate() {
            let rank = comm.rank().0;
            let (stage, r) = places[rank as usize];
            let device =
                (options.device.open)(local, layouts[stage]).map_err(|source| SessionError::Device { rank, source })?;
            let (permits, observer) = (permits.clone(), options.observer.clone());
            executors.push(
                Executor::new(job.clone(), stage, r, device, comm, permits, observer).map_err(SessionError::Comm)?,
            );
        }
        let mut session = Session { job, executors, steps: 0, failed: None };
        session.all(|e| e.load(options.weights))?;
        Ok(session)
    }

    /// The job that is run.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Steps run, counted on from a checkpoint.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of steps run: for checkpoints.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Refuses a session in which a rank failed: its states may be half updated.
    fn whole(&self) -> Result<(), SessionError> {
        self.failed.clone().map_or(Ok(()), |f| Err(f.into()))
    }

    /// Runs something on all ranks, each in a thread of its own. A failure or panic of one ends all.
    fn all(&mut self, f: impl Fn(&mut Executor) -> Result<(), Failure> + Sync) -> Result<(), SessionError> {
        self.whole()?;
        let guarded = |e: &mut Executor| {
            let result = catch_unwind(AssertUnwindSafe(|| f(e)));
            match result {
                Ok(Ok(())) => Ok(()),
                // The first failure counts, whoever says it.
                Ok(Err(failure)) => Err(e.end(failure)),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("of unknown cause");
                    Err(e.fail(format!("panic: {text}")))
                }
            }
        };
        let mut failures = Vec::new();
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .executors
                .iter_mut()
                .map(|e| {
                    let rank = e.rank();
                    let name = format!("rank-{}", rank.0);
                    // Kernels of unoptimised builds want more stack than the default of 2 MiB.
                    let builder = std::thread::Builder::new().name(name).stack_size(8 << 20);
                    // The executor goes to the thread or, where none could be started, stays here.
                    let slot = Arc::new(Mutex::new(Some(e)));
                    let mine = slot.clone();
                    let take = |s: &Mutex<Option<_>>| s.lock().unwrap_or_else(PoisonError::into_inner).take();
                    let spawned = builder.spawn_scoped(scope, move || take(&mine).map_or(Ok(()), guarded));
                    spawned.map_err(|error| {
                        let cause = format!("no thread could be started: {error}");
                        let failure = Failure { rank, at: None, cause };
                        take(&slot).map_or(failure.clone(), |e: &mut Executor| e.end(failure))
                    })
                })
                .collect();
            for t in threads {
                match t.map(|t| t.join()) {
                    Ok(Ok(Ok(()))) => {}
                    Ok(Ok(Err(failure))) | Err(failure) => failures.push(failure),
                    // Panics are caught inside.
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                }
            }
        });
        match failures.into_iter().next() {
            None => Ok(()),
            Some(f) => {
                self.failed = Some(f.clone());
                Err(f.into())
            }
        }
    }

    /// Runs one step: all micro-batches, and the update. Inputs and outputs are unsharded, by name.
    ///
    /// # Errors
    /// Inputs that are missing, unknown or of another type; the failure of a rank, after which every step fails.
    pub fn step(&mut self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>, SessionError> {
        let job = self.job.clone();
        let error = |name: &str, reason: String| SessionError::Input { name: name.into(), reason };
        if let Some(name) = inputs.keys().find(|n| !job.inputs.iter().any(|p| p.name == **n)) {
            let names: Vec<&str> = job.inputs.iter().map(|p| p.name.as_str()).collect();
            return Err(error(name, format!("the model has no such input, only {}", names.join(", "))));
        }
        let mut by_port = Vec::new();
        for p in &job.inputs {
            let want = step_type(&job, p);
            match inputs.get(&p.name) {
                Some(t) if *t.ty() == want => by_port.push(t),
                Some(t) => return Err(error(&p.name, format!("is {}, expected {want}", t.ty()))),
                None => return Err(error(&p.name, format!("is missing, expected {want}"))),
            }
        }
        let outputs = job.outputs.iter().map(|p| Mutex::new(Tensor::zeros(step_type(&job, p)))).collect();
        let io = StepIo { inputs: by_port, outputs };
        self.all(|e| e.step(&io))?;
        self.steps += 1;
        let outputs = io.outputs.into_iter().map(|m| m.into_inner().unwrap_or_else(PoisonError::into_inner));
        Ok(job.outputs.iter().map(|p| p.name.clone()).zip(outputs).collect())
    }

    /// All states and their unsharded types, by name.
    pub fn state_types(&self) -> BTreeMap<String, Type> {
        let of = |slot: &StateSlot, p: &crate::program::Program| {
            let b = p.buffer(slot.buffer);
            (slot.name.clone(), Type::new(b.ty.dtype, b.global.clone()))
        };
        self.job.stages.iter().flat_map(|p| p.states.iter().map(move |s| of(s, p))).collect()
    }

    /// What every state is, by name.
    pub fn state_kinds(&self) -> BTreeMap<String, StateKind> {
        self.job.stages.iter().flat_map(|p| p.states.iter().map(|s| (s.name.clone(), s.kind))).collect()
    }

    fn slot(&self, name: &str) -> Result<(usize, usize), SessionError> {
        let found = self.job.stages.iter().enumerate().find_map(|(stage, p)| {
            let at = p.states.iter().position(|s| s.name == name)?;
            Some((stage, at))
        });
        found.ok_or_else(|| SessionError::State { name: name.into(), reason: "there is no such state".into() })
    }

    /// A state, unsharded.
    ///
    /// # Errors
    /// An unknown name; an earlier failure; what the device says.
    pub fn state(&mut self, name: &str) -> Result<Tensor, SessionError> {
        self.whole()?;
        let (stage, at) = self.slot(name)?;
        let job = self.job.clone();
        let slot = &job.stages[stage].states[at];
        let b = job.stages[stage].buffer(slot.buffer);
        let mut whole = Tensor::zeros(Type::new(b.ty.dtype, b.global.clone()));
        for e in self.executors.iter_mut().filter(|e| e.stage() == stage) {
            let rank = e.rank().0;
            e.get(slot, &mut whole).map_err(|source| SessionError::Device { rank, source })?;
        }
        Ok(whole)
    }

    /// All states, unsharded, by name.
    ///
    /// # Errors
    /// What the device says.
    pub fn states(&mut self) -> Result<BTreeMap<String, Tensor>, SessionError> {
        let names: Vec<String> = self.state_types().into_keys().collect();
        names.into_iter().map(|n| Ok((n.clone(), self.state(&n)?))).collect()
    }

    /// Replaces a state. `read` gives boxes of it; it is asked for what the ranks keep.
    ///
    /// # Errors
    /// An unknown name; an earlier failure; a box of another type; what `read` and the device say.
    pub fn replace_state(
        &mut self,
        name: &str,
        mut read: impl FnMut(&[Range<usize>]) -> Result<Tensor, String>,
    ) -> Result<(), SessionError> {
        self.whole()?;
        let (stage, at) = self.slot(name)?;
        let job = self.job.clone();
        let slot = &job.stages[stage].states[at];
        let local = &job.stages[stage].buffer(slot.buffer).ty;
        let error = |reason: String| SessionError::State { name: name.into(), reason };
        let mut last: Option<(Vec<Range<usize>>, Tensor)> = None;
        for e in self.executors.iter_mut().filter(|e| e.stage() == stage) {
            let region = e.region(slot);
            if last.as_ref().is_none_or(|(r, _)| *r != region) {
                last = Some((region.clone(), read(&region).map_err(error)?));
            }
            let Some((_, part)) = &last else { continue };
            if part.ty() != local {
                return Err(error(format!("the box {region:?} is {}, expected {local}", part.ty())));
            }
            let rank = e.rank().0;
            e.set(slot, part.bytes()).map_err(|source| SessionError::Device { rank, source })?;
        }
        Ok(())
    }

    /// Replaces states by unsharded tensors, by name; the others stay. Other float types are converted.
    ///
    /// # Errors
    /// Unknown names and other sizes, before anything is replaced; what the device says.
    pub fn load_states(&mut self, states: &BTreeMap<String, Tensor>) -> Result<(), SessionError> {
        let types = self.state_types();
        for (name, t) in states {
            let error = |reason: String| SessionError::State { name: name.clone(), reason };
            let want = types.get(name).ok_or_else(|| error("there is no such state".into()))?;
            let convertible = t.dtype() == want.dtype || (t.dtype().is_float() && want.dtype.is_float());
            if t.dims() != want.dims || !convertible {
                return Err(error(format!("is {}, expected {want}", t.ty())));
            }
        }
        for (name, t) in states {
            let want = &types[name];
            let converted = (t.dtype() != want.dtype).then(|| convert::cast(t, want.dtype));
            let t = converted.as_ref().unwrap_or(t);
            self.replace_state(name, |region| Ok(boxes::part(t, region)))?;
        }
        Ok(())
    }
}
