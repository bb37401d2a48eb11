//! The program of one pipeline stage: what a rank executes. It is parametric in the rank's coordinates, so all ranks of
//! a stage share one program, and its lists do not grow with the number of ranks or micro-batches.
//!
//! A program has four instruction lists, `prologue` (once per step, first), `forward`, `backward` (both run once per
//! micro-batch) and `update` (once per step, last), and a schedule that says in which order a stage runs them. Buffers lie in one arena:
//!
//! ```text
//! [ persistent | frame 0 | frame 1 | ... | frame n-1 | scratch ]
//! ```
//!
//! `persistent` holds states, constants, accumulators and whatever lives for the whole step; a `frame` holds what one
//! micro-batch in flight keeps from its forward to its backward; `scratch` is reused by every list. Lifetimes inside
//! each region are laid out by codegen; no memory for buffers is allocated after loading.
//!
//! With one micro-batch per step, one frame holds everything that is not persistent, laid out over all four lists: then
//! the prologue, both lists and the update use frame 0, and values pass between them in it.
//!
//! Invariants (checked by [`crate::verify`]): every read is preceded by a write of that buffer, and no write of a buffer
//! that overlaps it comes between; collectives of a list come in the same order on all ranks (they do: ranks share the
//! list); sends and receives over all stages match, in order, and cannot deadlock.
//!
//! Buffers of one place may hold the same bytes under several types. Such a *view* begins with an instruction that moves
//! nothing (see [`Program::view`]): from then on both its operand and its result hold their values, until something is
//! written there.
//!
//! Instructions write all of their outputs. Inputs and outputs of an instruction may share memory only where it says so.
//! Persistent buffers that are neither states nor constants hold nothing at the start of a step.

use autoshard_ir::factor::ReduceKind;
use autoshard_ir::graph::StateKind;
use autoshard_ir::tensor::ALIGN;
use autoshard_ir::weights::WeightRef;
use autoshard_ir::{Op, Type};
use std::sync::Arc;

/// A mesh axis, as an index into [`Job::axes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Axis(pub u8);

/// A buffer, as an index into [`Program::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// A rank of the whole run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

/// All stages of a run.
#[derive(Debug, Clone)]
pub struct Job {
    /// Mesh axes inside a stage, outermost first: name and size.
    pub axes: Vec<(String, usize)>,
    /// The program of each stage; ranks of stage `s` are `rank_of(s, coordinates)`.
    pub stages: Vec<Program>,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// What the caller feeds: global type of one micro-batch, and the dim that micro-batches are cut along.
    pub inputs: Vec<Port>,
    /// What the caller gets.
    pub outputs: Vec<Port>,
    /// `rank[stage * ranks_per_stage + r]`, where `r` counts coordinates with the last axis fastest.
    pub ranks: Vec<Rank>,
}

/// An input or output of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Unsharded type of one micro-batch.
    pub ty: Type,
    /// The dim that micro-batches are cut along or joined along; `None`: the same for all, or once per step.
    pub batch_dim: Option<usize>,
}

/// What the ranks of one stage execute.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// Buffers, by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Once per micro-batch.
    pub forward: Vec<Instr>,
    /// Once per micro-batch, after its forward. Empty for inference.
    pub backward: Vec<Instr>,
    /// Once per step, before the first forward: parameters shared between stages.
    pub prologue: Vec<Instr>,
    /// Once per step, after the last micro-batch.
    pub update: Vec<Instr>,
    /// The order in which the stage runs its lists, for all micro-batches.
    pub schedule: Vec<Slot>,
    /// States kept in `persistent` between steps.
    pub states: Vec<StateSlot>,
    /// Constants written into `persistent` when loading.
    pub constants: Vec<(BufferId, Arc<autoshard_ir::Tensor>)>,
    /// Bytes of the persistent region.
    pub persistent_bytes: u64,
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// The number of frames: micro-batches in flight at once.
    pub frames: usize,
    /// Bytes of the scratch region.
    pub scratch_bytes: u64,
}

/// One entry of a stage's schedule. A frame is occupied from a micro-batch's forward to its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The forward list for micro-batch `micro_batch`, in frame `frame`.
    Forward {
        /// Which.
        micro_batch: usize,
        /// Where.
        frame: usize,
    },
    /// The backward list.
    Backward {
        /// Which.
        micro_batch: usize,
        /// Where.
        frame: usize,
    },
    /// The update list.
    Update,
}

/// Where in the arena a buffer lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// For the whole step.
    Persistent,
    /// From a micro-batch's forward to its backward.
    Frame,
    /// Inside one list.
    Scratch,
}

/// A buffer: a shard of a tensor at a place in the arena.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// For people: the value's name and spec.
    pub name: String,
    /// Local type.
    pub ty: Type,
    /// Unsharded sizes.
    pub global: Vec<usize>,
    /// Per dim, the mesh axes that shard it, outermost first.
    pub shards: Vec<Vec<Axis>>,
    /// Region of the arena.
    pub region: Region,
    /// Byte offset in the region, a multiple of 64.
    pub offset: u64,
}

/// A state kept on the devices between steps.
#[derive(Debug, Clone)]
pub struct StateSlot {
    /// Unique name: the parameter's, or `adam.m/NAME`.
    pub name: String,
    /// Parameter or optimizer state.
    pub kind: StateKind,
    /// Where it is kept.
    pub buffer: BufferId,
    /// First content; `None`: zeros.
    pub init: Option<WeightRef>,
}

/// One instruction. Collectives run among the ranks that differ only in their coordinates on `axes`, in the order of
/// those coordinates (first axis slowest).
#[derive(Debug, Clone, PartialEq)]
pub enum Instr {
    /// Applies an operator to local shards. An output may share memory with inputs; the device then works on a copy, or
    /// does nothing where the output is a view of the input ([`Program::view`]).
    Compute {
        /// Where it came from, for traces.
        name: String,
        /// What to apply.
        op: Op,
        /// Operands.
        inputs: Vec<BufferId>,
        /// Results.
        outputs: Vec<BufferId>,
    },
    /// `output += input` (same type); the first time that its list runs in a step, `output = input`.
    Accumulate {
        /// What to add.
        input: BufferId,
        /// The sum over micro-batches.
        output: BufferId,
    },
    /// Copies a buffer to one of the same size in bytes; nothing happens where both are one place.
    Copy {
        /// From.
        input: BufferId,
        /// To.
        output: BufferId,
    },
    /// Fills a buffer with zeros on all ranks but the first of `axes`: makes a replicated value a partial sum.
    ZeroUnlessFirst {
        /// The buffer.
        buffer: BufferId,
        /// The axes.
        axes: Vec<Axis>,
    },
    /// This rank's part of a dim that is whole on `axes`; no communication.
    Slice {
        /// Whole on the axes.
        input: BufferId,
        /// Sharded.
        output: BufferId,
        /// The dim.
        dim: usize,
        /// The axes that shard it, first axis outermost.
        axes: Vec<Axis>,
    },
    /// Combines partial values; every rank gets the whole.
    AllReduce {
        /// Partial.
        input: BufferId,
        /// Combined; may be the same buffer.
        output: BufferId,
        /// How.
        kind: ReduceKind,
        /// Among which ranks.
        axes: Vec<Axis>,
    },
    /// Joins shards of a dim; every rank gets the whole.
    AllGather {
        /// Sharded.
        input: BufferId,
        /// Whole.
        output: BufferId,
        /// The dim.
        dim: usize,
        /// Among which ranks.
        axes: Vec<Axis>,
    },
    /// Combines partial values; every rank gets its shard of a dim.
    ReduceScatter {
        /// Partial.
        input: BufferId,
        /// Combined and sharded.
        output: BufferId,
        /// The dim.
        dim: usize,
        /// How.
        kind: ReduceKind,
        /// Among which ranks.
        axes: Vec<Axis>,
    },
    /// Moves sharding from one dim to another: the input is sharded on `gather`, the output on `split`.
    AllToAll {
        /// Sharded on `gather`.
        input: BufferId,
        /// Sharded on `split`.
        output: BufferId,
        /// The dim that becomes whole.
        gather: usize,
        /// The dim that becomes sharded.
        split: usize,
        /// Among which ranks.
        axes: Vec<Axis>,
    },
    /// Sends a buffer to the rank with the same coordinates in another stage.
    Send {
        /// What.
        input: BufferId,
        /// To which stage.
        to: usize,
        /// Matches the receive. Unique per ordered pair of stages within the prologue, within the update, and within
        /// forward and backward together (a forward may send what a backward receives: the micro-batch is added when
        /// running). Messages of an ordered pair of stages are received in the order in which they are sent.
        tag: u32,
    },
    /// Receives from the rank with the same coordinates in another stage.
    Recv {
        /// Where to.
        output: BufferId,
        /// From which stage.
        from: usize,
        /// Matches the send.
        tag: u32,
    },
    /// Reads this rank's shard of an input of the current micro-batch.
    Feed {
        /// Index into [`Job::inputs`].
        port: usize,
        /// Where to.
        output: BufferId,
    },
    /// Gives this rank's shard of an output; the runtime joins shards and micro-batches.
    Fetch {
        /// What.
        input: BufferId,
        /// Index into [`Job::outputs`].
        port: usize,
    },
}

/// One of a program's instruction lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum List {
    /// [`Program::prologue`]
    Prologue,
    /// [`Program::forward`]
    Forward,
    /// [`Program::backward`]
    Backward,
    /// [`Program::update`]
    Update,
}

impl List {
    /// All lists, in the order in which a step first reaches them.
    pub const ALL: [List; 4] = [List::Prologue, List::Forward, List::Backward, List::Update];

    /// The name shown to people: `forward`.
    pub const fn name(self) -> &'static str {
        match self {
            List::Prologue => "prologue",
            List::Forward => "forward",
            List::Backward => "backward",
            List::Update => "update",
        }
    }
}

impl std::fmt::Display for List {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An instruction at the moment it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Which stage.
    pub stage: usize,
    /// Which of its lists.
    pub list: List,
    /// For which micro-batch; `None` in the prologue and the update.
    pub micro_batch: Option<usize>,
    /// Index in the list.
    pub index: usize,
}

impl std::fmt::Display for Place {
    /// `stage 1, forward[12] of micro-batch 3`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stage {}, {}[{}]", self.stage, self.list, self.index)?;
        if let Some(m) = self.micro_batch {
            write!(f, " of micro-batch {m}")?;
        }
        Ok(())
    }
}

impl Instr {
    /// The instruction's name, without operands.
    pub fn mnemonic(&self) -> &'static str {
        match self {
            Instr::Compute { op, .. } => op.name(),
            Instr::Accumulate { .. } => "Accumulate",
            Instr::Copy { .. } => "Copy",
            Instr::ZeroUnlessFirst { .. } => "ZeroUnlessFirst",
            Instr::Slice { .. } => "Slice",
            Instr::AllReduce { .. } => "AllReduce",
            Instr::AllGather { .. } => "AllGather",
            Instr::ReduceScatter { .. } => "ReduceScatter",
            Instr::AllToAll { .. } => "AllToAll",
            Instr::Send { .. } => "Send",
            Instr::Recv { .. } => "Recv",
            Instr::Feed { .. } => "Feed",
            Instr::Fetch { .. } => "Fetch",
        }
    }
    /// The buffers it reads, in order. `Accumulate` also reads its output, except for the first micro-batch.
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Instr::Compute { inputs, .. } => inputs.clone(),
            Instr::Accumulate { input, output } => vec![*input, *output],
            Instr::ZeroUnlessFirst { buffer, .. } => vec![*buffer],
            Instr::Copy { input, .. }
            | Instr::Slice { input, .. }
            | Instr::AllReduce { input, .. }
            | Instr::AllGather { input, .. }
            | Instr::ReduceScatter { input, .. }
            | Instr::AllToAll { input, .. }
            | Instr::Send { input, .. }
            | Instr::Fetch { input, .. } => vec![*input],
            Instr::Recv { .. } | Instr::Feed { .. } => Vec::new(),
        }
    }
    /// The buffers it writes, in order.
    pub fn writes(&self) -> Vec<BufferId> {
        match self {
            Instr::Compute { outputs, .. } => outputs.clone(),
            Instr::ZeroUnlessFirst { buffer, .. } => vec![*buffer],
            Instr::Accumulate { output, .. }
            | Instr::Copy { output, .. }
            | Instr::Slice { output, .. }
            | Instr::AllReduce { output, .. }
            | Instr::AllGather { output, .. }
            | Instr::ReduceScatter { output, .. }
            | Instr::AllToAll { output, .. }
            | Instr::Recv { output, .. }
            | Instr::Feed { output, .. } => vec![*output],
            Instr::Send { .. } | Instr::Fetch { .. } => Vec::new(),
        }
    }
    /// The operand and result of an instruction whose result is its operand's bytes, in whatever place.
    pub fn same_bytes(&self, buffers: &[Buffer]) -> Option<(BufferId, BufferId)> {
        let ty = |b: &BufferId| std::slice::from_ref(&buffers[b.0 as usize].ty);
        match self {
            Instr::Copy { input, output } => Some((*input, *output)),
            Instr::Compute { op, inputs, outputs, .. } => match (&inputs[..], &outputs[..]) {
                ([from], [to]) if op.is_view(ty(from), ty(to)) => Some((*from, *to)),
                _ => None,
            },
            _ => None,
        }
    }
    /// Renames every buffer it names.
    pub fn map_buffers(&mut self, rename: impl Fn(BufferId) -> BufferId) {
        match self {
            Instr::Compute { inputs, outputs, .. } => inputs.iter_mut().chain(outputs).for_each(|b| *b = rename(*b)),
            Instr::ZeroUnlessFirst { buffer, .. } => *buffer = rename(*buffer),
            Instr::Accumulate { input, output }
            | Instr::Copy { input, output }
            | Instr::Slice { input, output, .. }
            | Instr::AllReduce { input, output, .. }
            | Instr::AllGather { input, output, .. }
            | Instr::ReduceScatter { input, output, .. }
            | Instr::AllToAll { input, output, .. } => {
                *input = rename(*input);
                *output = rename(*output);
            }
            Instr::Send { input, .. } | Instr::Fetch { input, .. } => *input = rename(*input),
            Instr::Recv { output, .. } | Instr::Feed { output, .. } => *output = rename(*output),
        }
    }
    /// Mesh axes it works over; empty for instructions without.
    pub fn axes(&self) -> &[Axis] {
        match self {
            Instr::ZeroUnlessFirst { axes, .. }
            | Instr::Slice { axes, .. }
            | Instr::AllReduce { axes, .. }
            | Instr::AllGather { axes, .. }
            | Instr::ReduceScatter { axes, .. }
            | Instr::AllToAll { axes, .. } => axes,
            _ => &[],
        }
    }
    /// True for collectives, sends and receives.
    pub fn communicates(&self) -> bool {
        self.is_collective() || matches!(self, Instr::Send { .. } | Instr::Recv { .. })
    }
    /// True for instructions in which all ranks of a group take part.
    pub fn is_collective(&self) -> bool {
        matches!(
            self,
            Instr::AllReduce { .. } | Instr::AllGather { .. } | Instr::ReduceScatter { .. } | Instr::AllToAll { .. }
        )
    }
}

/// The bytes of the arena that a buffer of so many bytes takes: places begin at multiples of [`ALIGN`].
pub fn place_bytes(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ALIGN as u64)
}

impl Buffer {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.ty.bytes() as u64
    }
}

impl Program {
    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.persistent_bytes + self.frame_bytes * self.frames as u64 + self.scratch_bytes
    }
    /// The buffer of that id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }
    /// The operand and result of an instruction that has nothing to do, since its result is its operand's bytes
    /// ([`Op::is_view`], or a copy) and lies in the same place.
    pub fn view(&self, instr: &Instr) -> Option<(BufferId, BufferId)> {
        // The place first: operators are asked only about operands that fit them, as those of codegen do.
        let ([from], [to]) = (&instr.reads()[..], &instr.writes()[..]) else { return None };
        let (a, b) = (self.buffer(*from), self.buffer(*to));
        let one_place = a.bytes() == b.bytes() && a.region == b.region && a.offset == b.offset;
        if one_place { instr.same_bytes(&self.buffers) } else { None }
    }
    /// An instruction list.
    pub fn list(&self, list: List) -> &[Instr] {
        match list {
            List::Prologue => &self.prologue,
            List::Forward => &self.forward,
            List::Backward => &self.backward,
            List::Update => &self.update,
        }
    }
    /// Bytes of a region (of one frame, for frames).
    pub fn region_bytes(&self, region: Region) -> u64 {
        match region {
            Region::Persistent => self.persistent_bytes,
            Region::Frame => self.frame_bytes,
            Region::Scratch => self.scratch_bytes,
        }
    }
    /// Byte offset in the arena of a buffer, in that frame.
    pub fn address(&self, id: BufferId, frame: usize) -> u64 {
        let b = self.buffer(id);
        b.offset
            + match b.region {
                Region::Persistent => 0,
                Region::Frame => self.persistent_bytes + self.frame_bytes * frame as u64,
                Region::Scratch => self.persistent_bytes + self.frame_bytes * self.frames as u64,
            }
    }
}

impl Job {
    /// Ranks of one stage.
    pub fn ranks_per_stage(&self) -> usize {
        self.axes.iter().map(|a| a.1).product()
    }
    /// The number of ranks along these axes together.
    pub fn parts(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|a| self.axes[a.0 as usize].1).product()
    }
    /// Coordinates of the `r`-th rank of a stage: one per axis, the last axis fastest.
    pub fn coordinates(&self, mut r: usize) -> Vec<usize> {
        let mut at = vec![0; self.axes.len()];
        for (c, (_, size)) in at.iter_mut().zip(&self.axes).rev() {
            *c = r % size;
            r /= size;
        }
        at
    }
    /// Which rank of its stage has these coordinates: the inverse of [`coordinates`](Self::coordinates).
    pub fn index_of(&self, coordinates: &[usize]) -> usize {
        self.axes.iter().zip(coordinates).fold(0, |r, ((_, size), c)| r * size + c)
    }
    /// The rank at these coordinates of a stage.
    pub fn rank_of(&self, stage: usize, coordinates: &[usize]) -> Rank {
        self.ranks[stage * self.ranks_per_stage() + self.index_of(coordinates)]
    }
    /// Position of these coordinates among those along `axes`, first axis slowest.
    pub fn position(&self, axes: &[Axis], coordinates: &[usize]) -> usize {
        axes.iter().fold(0, |p, a| p * self.axes[a.0 as usize].1 + coordinates[a.0 as usize])
    }
    /// The group of ranks that a collective over `axes` joins at these coordinates, in the collective's order.
    pub fn group(&self, stage: usize, axes: &[Axis], coordinates: &[usize]) -> Vec<Rank> {
        let mut at = coordinates.to_vec();
        (0..self.parts(axes))
            .map(|mut p| {
                for a in axes.iter().rev() {
                    let size = self.axes[a.0 as usize].1;
                    at[a.0 as usize] = p % size;
                    p /= size;
                }
                self.rank_of(stage, &at)
            })
            .collect()
    }
    /// Where a shard begins in the unsharded tensor, at these coordinates.
    pub fn origin(&self, buffer: &Buffer, coordinates: &[usize]) -> Vec<usize> {
        let dims = buffer.ty.dims.iter().zip(&buffer.shards);
        dims.map(|(size, axes)| size * self.position(axes, coordinates)).collect()
    }
    /// Names of axes, for people: `dp+tp`.
    pub fn axis_names(&self, axes: &[Axis]) -> String {
        let name = |a: &Axis| self.axes.get(a.0 as usize).map_or("?", |(n, _)| n.as_str());
        axes.iter().map(name).collect::<Vec<_>>().join("+")
    }
}
