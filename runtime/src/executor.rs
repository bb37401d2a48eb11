//! Executes a program on one rank: loads states and constants, runs the lists in the order of the schedule.
//!
//! An executor owns its rank's device and communicator. Views carry the place of a shard in the unsharded tensor, from the
//! buffer's shards and the rank's coordinates. Read next: [`crate::session`], which runs the executors of all ranks.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use autoshard_ir::Tensor;

use crate::boxes;
use crate::comm::{CommError, Communicator, Failure, Group, Tag};
use crate::device::cpu::staging_bytes;
use crate::device::{Device, DeviceError, Layout, Mem, Shard, Span};
use crate::program::{Axis, BufferId, Instr, Job, List, Place, Program, Rank, Slot, StateSlot};
use crate::trace::Observer;
use crate::weights::Weights;

/// What the ranks of a step share: the caller's inputs, and the outputs under assembly. Both by port.
pub struct StepIo<'a> {
    /// Whole inputs, all micro-batches.
    pub inputs: Vec<&'a Tensor>,
    /// Whole outputs; every element is written by one rank.
    pub outputs: Vec<Mutex<Tensor>>,
}

/// Limits how many ranks compute at once, where ranks are more than cores.
#[derive(Debug)]
pub struct Permits {
    free: Mutex<usize>,
    returned: Condvar,
}

impl Permits {
    /// That many permits, at least one.
    pub fn new(n: usize) -> Permits {
        Permits { free: Mutex::new(n.max(1)), returned: Condvar::new() }
    }
    fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Return<'a>(&'a Permits);
        impl Drop for Return<'_> {
            fn drop(&mut self) {
                *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                self.0.returned.notify_one();
            }
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        drop(free);
        let _return = Return(self);
        f()
    }
}

/// Why an instruction failed.
enum Fault {
    /// This rank failed.
    Here(String),
    /// Another did.
    Elsewhere(Failure),
}

impl From<DeviceError> for Fault {
    fn from(e: DeviceError) -> Fault {
        Fault::Here(e.to_string())
    }
}
impl From<CommError> for Fault {
    fn from(e: CommError) -> Fault {
        match e {
            CommError::Aborted(f) => Fault::Elsewhere(f),
            e => Fault::Here(e.to_string()),
        }
    }
}

/// The arena and staging that a stage's program needs on each of its ranks.
pub fn layout(p: &Program, poison: bool) -> Layout {
    // Whether buffers overlap does not depend on the frame.
    let spans = |ids: &[BufferId]| ids.iter().map(|b| span(p, *b, 0)).collect::<Vec<_>>();
    let staging = List::ALL
        .iter()
        .flat_map(|l| p.list(*l))
        .map(|i| match i {
            Instr::Compute { inputs, outputs, .. } if p.view(i).is_none() => {
                staging_bytes(spans(inputs).into_iter(), spans(outputs).into_iter())
            }
            _ => 0,
        })
        .max();
    Layout { arena: p.arena_bytes(), staging: staging.unwrap_or(0), poison }
}

fn span(p: &Program, id: BufferId, frame: usize) -> Span {
    Span { offset: p.address(id, frame) as usize, bytes: p.buffer(id).ty.bytes() }
}

/// What an instruction is, for people: operator and node, or collective, axes and buffer.
pub fn describe(job: &Job, program: &Program, instr: &Instr) -> String {
    match instr {
        Instr::Compute { name, op, .. } if name.is_empty() => op.to_string(),
        Instr::Compute { name, op, .. } => format!("{op} ({name})"),
        _ => {
            let mut text = instr.mnemonic().to_string();
            if let Instr::AllReduce { kind, .. } | Instr::ReduceScatter { kind, .. } = instr {
                text += &format!(" {}", kind.name());
            }
            if !instr.axes().is_empty() {
                text += &format!(" over {}", job.axis_names(instr.axes()));
            }
            match instr {
                Instr::Send { to, tag, .. } => text += &format!(" to stage {to} (tag {tag})"),
                Instr::Recv { from, tag, .. } => text += &format!(" from stage {from} (tag {tag})"),
                _ => {}
            }
            let buffers = [instr.reads(), instr.writes()].concat();
            if let Some(b) = buffers.first() {
                text += &format!(" of `{}`", program.buffer(*b).name);
            }
            text
        }
    }
}

/// One rank of a run.
pub struct Executor {
    job: Arc<Job>,
    stage: usize,
    coordinates: Vec<usize>,
    device: Box<dyn Device>,
    comm: Box<dyn Communicator>,
    groups: BTreeMap<Vec<Axis>, Group>,
    /// By buffer: where this rank's shard begins in the unsharded tensor.
    origins: Vec<Vec<usize>>,
    permits: Option<Arc<Permits>>,
    observer: Option<Arc<dyn Observer>>,
    /// Where it is, for the message of a panic.
    now: Option<Place>,
    /// How often each list has run in this step.
    runs: [usize; 4],
    /// For cutting inputs and joining outputs.
    host: Vec<u8>,
}

impl Executor {
    /// An executor for the `r`-th rank of a stage, of a verified job.
    ///
    /// # Errors
    /// Groups that cannot be opened.
    pub fn new(
        job: Arc<Job>,
        stage: usize,
        r: usize,
        device: Box<dyn Device>,
        mut comm: Box<dyn Communicator>,
        permits: Option<Arc<Permits>>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Result<Executor, CommError> {
        let coordinates = job.coordinates(r);
        let program = &job.stages[stage];
        let mut groups = BTreeMap::new();
        // In the order of the lists, which all ranks of the stage share.
        for instr in List::ALL.iter().flat_map(|l| program.list(*l)).filter(|i| i.is_collective()) {
            if !groups.contains_key(instr.axes()) {
                let members = job.group(stage, instr.axes(), &coordinates);
                groups.insert(instr.axes().to_vec(), comm.open_group(&members)?);
            }
        }
        let origins = program.buffers.iter().map(|b| job.origin(b, &coordinates)).collect();
        let host = Vec::new();
        let (now, runs) = (None, [0; 4]);
        Ok(Executor { job, stage, coordinates, device, comm, groups, origins, permits, observer, now, runs, host })
    }

    /// The rank that it is.
    pub fn rank(&self) -> Rank {
        self.comm.rank()
    }

    /// Its pipeline stage.
    pub fn stage(&self) -> usize {
        self.stage
    }

    fn program(&self) -> &Program {
        &self.job.stages[self.stage]
    }

    /// Writes constants, and the first content of states.
    ///
    /// # Errors
    /// A failure of this rank: a parameter that could not be read.
    pub fn load(&mut self, weights: Weights) -> Result<(), Failure> {
        let job = self.job.clone();
        let program = &job.stages[self.stage];
        let failure = |rank, cause: String| Failure { rank, at: None, cause };
        let rank = self.rank();
        for (id, tensor) in &program.constants {
            let b = program.buffer(*id);
            let part = boxes::part(tensor, &boxes::ranges(&self.origins[id.0 as usize], &b.ty.dims));
            self.device.upload(part.bytes(), span(program, *id, 0)).map_err(|e| failure(rank, e.to_string()))?;
        }
        for slot in &program.states {
            let b = program.buffer(slot.buffer);
            let ty = autoshard_ir::Type::new(b.ty.dtype, b.global.clone());
            let region = boxes::ranges(&self.origins[slot.buffer.0 as usize], &b.ty.dims);
            let part =
                weights.read(&slot.name, slot.init.as_ref(), &ty, &region).map_err(|e| failure(rank, e.to_string()))?;
            self.set(slot, part.bytes()).map_err(|e| failure(rank, e.to_string()))?;
        }
        if let Some(o) = &self.observer {
            o.loaded(rank);
        }
        Ok(())
    }

    /// Replaces this rank's shard of a state.
    ///
    /// # Errors
    /// A wrong length; what the device says.
    pub fn set(&mut self, slot: &StateSlot, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = span(self.program(), slot.buffer, 0);
        self.device.upload(bytes, to)
    }

    /// The box of the unsharded state that this rank keeps.
    pub fn region(&self, slot: &StateSlot) -> Vec<std::ops::Range<usize>> {
        boxes::ranges(&self.origins[slot.buffer.0 as usize], &self.program().buffer(slot.buffer).ty.dims)
    }

    /// Writes this rank's shard of a state into the unsharded tensor, if it is the first of its replicas.
    ///
    /// # Errors
    /// What the device says.
    pub fn get(&mut self, slot: &StateSlot, whole: &mut Tensor) -> Result<(), DeviceError> {
        if !self.delivers(slot.buffer) {
            return Ok(());
        }
        let job = self.job.clone();
        let program = &job.stages[self.stage];
        let ty = &program.buffer(slot.buffer).ty;
        self.host.resize(ty.bytes(), 0);
        self.device.download(span(program, slot.buffer, 0), &mut self.host)?;
        let dims = whole.dims().to_vec();
        let origin = &self.origins[slot.buffer.0 as usize];
        boxes::paste(&self.host, &ty.dims, whole.bytes_mut(), &dims, origin, ty.dtype.size());
        Ok(())
    }

    /// True on the first of the ranks that hold the same shard of a buffer.
    fn delivers(&self, id: BufferId) -> bool {
        let shards = &self.program().buffer(id).shards;
        let sharded = |a: usize| shards.iter().flatten().any(|s| s.0 as usize == a);
        self.coordinates.iter().enumerate().all(|(a, c)| *c == 0 || sharded(a))
    }

    /// Runs one step.
    ///
    /// # Errors
    /// The first failure of any rank. The rank that fails ends all others.
    pub fn step(&mut self, io: &StepIo<'_>) -> Result<(), Failure> {
        let job = self.job.clone();
        self.runs = [0; 4];
        self.now = None;
        let result = self.slots(&job, io);
        let result = match result {
            Ok(()) => Ok(()),
            Err(Fault::Elsewhere(f)) => Err(f),
            Err(Fault::Here(cause)) => Err(self.fail(cause)),
        };
        self.comm.leave();
        result
    }

    /// Ends all ranks because this one failed, where it is now. Returns the failure that counts: the first.
    pub fn fail(&mut self, cause: String) -> Failure {
        let program = self.program();
        let at = self.now.map(|p| (p, describe(&self.job, program, &program.list(p.list)[p.index])));
        let failure = Failure { rank: self.rank(), at, cause };
        self.end(failure)
    }

    /// Ends all ranks by this failure, or an earlier one, which is returned.
    pub fn end(&mut self, failure: Failure) -> Failure {
        self.comm.abort(failure)
    }

    fn slots(&mut self, job: &Arc<Job>, io: &StepIo<'_>) -> Result<(), Fault> {
        let program = &job.stages[self.stage];
        self.list(job, List::Prologue, None, 0, io)?;
        for (done, slot) in program.schedule.iter().enumerate() {
            match *slot {
                Slot::Forward { micro_batch, frame } => self.list(job, List::Forward, Some(micro_batch), frame, io)?,
                Slot::Backward { micro_batch, frame } => {
                    self.list(job, List::Backward, Some(micro_batch), frame, io)?
                }
                Slot::Update => self.list(job, List::Update, None, 0, io)?,
            }
            if let Some(o) = &self.observer {
                o.slot_done(self.comm.rank(), done + 1, program.schedule.len());
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        job: &Arc<Job>,
        list: List,
        micro_batch: Option<usize>,
        frame: usize,
        io: &StepIo<'_>,
    ) -> Result<(), Fault> {
        let program = &job.stages[self.stage];
        for (index, instr) in program.list(list).iter().enumerate() {
            let place = Place { stage: self.stage, list, micro_batch, index };
            self.now = Some(place);
            self.comm.enter(Some(place))?;
            match self.observer.clone() {
                None => self.instr(job, place, instr, frame, io)?,
                Some(o) => {
                    let rank = self.comm.rank();
                    o.before(rank, place, instr);
                    let start = Instant::now();
                    self.instr(job, place, instr, frame, io)?;
                    o.after(rank, place, instr, program, start, Instant::now());
                }
            }
        }
        self.runs[list as usize] += 1;
        Ok(())
    }

    fn instr(
        &mut self,
        job: &Arc<Job>,
        place: Place,
        instr: &Instr,
        frame: usize,
        io: &StepIo<'_>,
    ) -> Result<(), Fault> {
        let p = &job.stages[self.stage];
        let at = |id: &BufferId| span(p, *id, frame);
        let ty = |id: &BufferId| &p.buffer(*id).ty;
        match instr {
            _ if p.view(instr).is_some() => {}
            Instr::Compute { op, inputs, outputs, .. } => {
                let Executor { device, origins, permits, .. } = self;
                let shard = |id: &BufferId| Shard {
                    span: at(id),
                    ty: ty(id),
                    origin: &origins[id.0 as usize],
                    global: &p.buffer(*id).global,
                };
                let inputs: Vec<Shard<'_>> = inputs.iter().map(shard).collect();
                let mut outputs: Vec<Shard<'_>> = outputs.iter().map(shard).collect();
                let whole = op.batch_dim().zip(place.micro_batch).zip(outputs.first().copied());
                let whole = whole.map(|((d, m), of)| {
                    let (mut origin, mut global) = (of.origin.to_vec(), of.global.to_vec());
                    origin[d] += m * global[d];
                    global[d] *= job.micro_batches;
                    (origin, global)
                });
                if let (Some((origin, global)), Some(first)) = (&whole, outputs.first_mut()) {
                    (first.origin, first.global) = (origin, global);
                }
                let mut run = || device.compute(op, &inputs, &outputs);
                match permits {
                    Some(permits) => permits.with(run)?,
                    None => run()?,
                }
            }
            Instr::Accumulate { input, output } if self.runs[place.list as usize] == 0 => {
                self.device.copy(at(input), at(output))?;
            }
            Instr::Accumulate { input, output } => self.device.accumulate(ty(input), at(input), at(output))?,
            Instr::Copy { input, output } => self.device.copy(at(input), at(output))?,
            Instr::ZeroUnlessFirst { buffer, axes } => {
                if job.position(axes, &self.coordinates) != 0 {
                    self.device.zero(at(buffer))?;
                }
            }
            Instr::Slice { input, output, dim, axes } => {
                let mut origin = vec![0; ty(output).rank()];
                origin[*dim] = job.position(axes, &self.coordinates) * ty(output).dims[*dim];
                self.device.slice(at(input), &ty(input).dims, &origin, at(output), ty(output))?;
            }
            Instr::AllReduce { input, output, kind, axes } => {
                let (group, from, to) = self.collective(axes, at(input), at(output))?;
                self.comm.all_reduce(group, ty(input), *kind, from, to)?;
            }
            Instr::AllGather { input, output, dim, axes } => {
                let (group, from, to) = self.collective(axes, at(input), at(output))?;
                self.comm.all_gather(group, ty(input), *dim, from, to)?;
            }
            Instr::ReduceScatter { input, output, dim, kind, axes } => {
                let (group, from, to) = self.collective(axes, at(input), at(output))?;
                self.comm.reduce_scatter(group, ty(output), *dim, *kind, from, to)?;
            }
            Instr::AllToAll { input, output, gather, split, axes } => {
                let (group, from, to) = self.collective(axes, at(input), at(output))?;
                self.comm.all_to_all(group, ty(input), *gather, *split, from, to)?;
            }
            Instr::Send { input, to, tag } => {
                let to = job.rank_of(*to, &self.coordinates);
                let mem = self.mem(at(input))?;
                self.comm.send(to, Tag::of(place.list, place.micro_batch, *tag), mem)?;
            }
            Instr::Recv { output, from, tag } => {
                let from = job.rank_of(*from, &self.coordinates);
                let mem = self.mem(at(output))?;
                self.comm.recv(from, Tag::of(place.list, place.micro_batch, *tag), mem)?;
            }
            Instr::Feed { port, output } => {
                let mut origin = self.origins[output.0 as usize].clone();
                let port_of = &job.inputs[*port];
                if let (Some(d), Some(m)) = (port_of.batch_dim, place.micro_batch) {
                    origin[d] += m * port_of.ty.dims[d];
                }
                let input = io.inputs[*port];
                let local = ty(output);
                self.host.resize(local.bytes(), 0);
                boxes::cut(input.bytes(), input.dims(), &origin, &mut self.host, &local.dims, local.dtype.size());
                self.device.upload(&self.host, at(output))?;
            }
            Instr::Fetch { input, port } => {
                let mut origin = self.origins[input.0 as usize].clone();
                let port_of = &job.outputs[*port];
                let wanted = match (port_of.batch_dim, place.micro_batch) {
                    (Some(d), Some(m)) => {
                        origin[d] += m * port_of.ty.dims[d];
                        true
                    }
                    // Does not depend on the batch, as codegen holds: the first one's is taken.
                    (_, m) => m.is_none_or(|m| m == 0),
                };
                if wanted && self.delivers(*input) {
                    let local = ty(input);
                    self.host.resize(local.bytes(), 0);
                    self.device.download(at(input), &mut self.host)?;
                    let mut whole = io.outputs[*port].lock().unwrap_or_else(PoisonError::into_inner);
                    let dims = whole.dims().to_vec();
                    boxes::paste(&self.host, &local.dims, whole.bytes_mut(), &dims, &origin, local.dtype.size());
                }
            }
        }
        Ok(())
    }

    fn mem(&mut self, span: Span) -> Result<Mem, Fault> {
        // SAFETY: the memory goes to a call of the communicator that follows at once, and this rank's device does
        // nothing before that returns. The session drops executors, and with them arenas, only after all threads ended.
        Ok(unsafe { self.device.memory(span) }?)
    }

    fn collective(&mut self, axes: &[Axis], input: Span, output: Span) -> Result<(Group, Mem, Mem), Fault> {
        let Some(group) = self.groups.get(axes).copied() else {
            return Err(Fault::Here(format!("no group over axes {axes:?} was opened")));
        };
        if input != output && input.overlaps(&output) {
            return Err(Fault::Here(format!("operand {input:?} and result {output:?} overlap")));
        }
        Ok((group, self.mem(input)?, self.mem(output)?))
    }
}
