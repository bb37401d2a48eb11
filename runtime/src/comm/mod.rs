//! Communicators: how ranks exchange data, and how the failure of one ends all.
//!
//! Each rank owns a [`Communicator`]. A group is an ordered set of ranks; all of its members open it and call its
//! collectives in the same order. Collectives are deterministic: a reduction combines in the group's order, whatever the
//! timing, and all members get the same bits.
//!
//! To add a communicator (`mpi`, `nccl`): one file here that implements [`Communicator`], and one line in [`TABLE`].

pub mod reduce;
pub mod threads;

use std::time::Duration;

use autoshard_ir::Type;
use autoshard_ir::factor::ReduceKind;

use crate::device::Mem;
use crate::program::{List, Place, Rank};

/// A kind of communicator.
pub struct CommKind {
    /// Connects all ranks, and returns the communicators of those that live in this process.
    pub connect: fn(World) -> Connected,
}

/// Communicators of the ranks that live in this process, by rank.
pub type Connected = Result<Vec<Box<dyn Communicator>>, CommError>;

/// Every kind of communicator; the first is the one that is used.
pub static TABLE: &[CommKind] = &[threads::KIND];

/// What is to be connected.
#[derive(Debug, Clone, Copy)]
pub struct World {
    /// The number of ranks.
    pub ranks: usize,
    /// When all ranks wait and nothing has moved for this long, the run is ended. A rank that computes may take its time.
    pub watchdog: Duration,
}

/// A group opened by [`Communicator::open_group`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group(pub usize);

/// What a message is for: a receive takes the message of its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tag {
    /// Sent in the prologue.
    Prologue(u32),
    /// Sent for that micro-batch.
    MicroBatch(usize, u32),
    /// Sent in the update.
    Update(u32),
}

impl Tag {
    /// Of the message with that number of a list, when it runs for that micro-batch.
    pub fn of(list: List, micro_batch: Option<usize>, number: u32) -> Tag {
        match (list, micro_batch) {
            (List::Prologue, _) => Tag::Prologue(number),
            (_, Some(m)) => Tag::MicroBatch(m, number),
            (_, None) => Tag::Update(number),
        }
    }
}

/// What one rank uses to exchange data with others. Memory that is passed must not overlap, except that the output of
/// `all_reduce` may be its input.
pub trait Communicator: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Makes a group known. All members call this with the same members in the same order.
    ///
    /// # Errors
    /// A group without this rank; what the transport says.
    fn open_group(&mut self, members: &[Rank]) -> Result<Group, CommError>;

    /// Says what this rank does next, for messages about ranks that wait for it.
    ///
    /// # Errors
    /// [`CommError::Aborted`] once another rank has failed.
    fn enter(&mut self, place: Option<Place>) -> Result<(), CommError>;

    /// Combines the inputs of all members; each gets the whole.
    ///
    /// # Errors
    /// Another rank's failure; ranks that are stuck; members that do not call the same.
    fn all_reduce(
        &mut self,
        group: Group,
        ty: &Type,
        kind: ReduceKind,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError>;

    /// Joins the inputs (of type `shard`) along `dim`, in the group's order.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather(&mut self, group: Group, shard: &Type, dim: usize, input: Mem, output: Mem) -> Result<(), CommError>;

    /// Combines the inputs of all members; each gets its part (of type `shard`) along `dim`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(
        &mut self,
        group: Group,
        shard: &Type,
        dim: usize,
        kind: ReduceKind,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError>;

    /// Cuts the inputs (of type `ty`) along `split`, one part per member, and joins the parts received along `gather`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_to_all(
        &mut self,
        group: Group,
        ty: &Type,
        gather: usize,
        split: usize,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError>;

    /// Sends to a rank; does not wait for its receive.
    ///
    /// # Errors
    /// Another rank's failure.
    fn send(&mut self, to: Rank, tag: Tag, input: Mem) -> Result<(), CommError>;

    /// Receives the message of that tag from a rank.
    ///
    /// # Errors
    /// Another rank's failure; ranks that are stuck; a message of another length.
    fn recv(&mut self, from: Rank, tag: Tag, output: Mem) -> Result<(), CommError>;

    /// Says that this rank ended its step. While no rank computes any more, waiting for it is in vain.
    fn leave(&mut self);

    /// Ends all ranks: what they wait in, and whatever they call next, fails with this failure, or with an earlier one.
    /// Returns the one that counts.
    fn abort(&mut self, failure: Failure) -> Failure;
}

/// The failure of a rank, which ended the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Which rank.
    pub rank: Rank,
    /// What it was doing: the place and the instruction; `None` outside of instructions (loading).
    pub at: Option<(Place, String)>,
    /// Why it failed.
    pub cause: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.rank.0)?;
        if let Some((place, what)) = &self.at {
            write!(f, ", {place}, {what}")?;
        }
        write!(f, ": {}", self.cause)
    }
}

/// Why a call of a communicator failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A rank failed, perhaps this one.
    #[error("ended because {0}")]
    Aborted(Failure),
    /// Nothing moves any more.
    #[error("{0}")]
    Stuck(String),
    /// Members of a group called different things, or memory does not fit: a program that the verifier would refuse.
    #[error("{0}")]
    Mismatch(String),
}
