//! Devices: an arena of memory and what is computed in it.
//!
//! A [`Device`] belongs to one rank. Its memory is one arena, made when a program is loaded; nothing is allocated for
//! buffers later. Operations name memory by [`Span`]s of the arena, which the device checks, so they are safe to call.
//! Communicators work on the memory itself, by [`Mem`].
//!
//! To add a device (`cuda`): one file here that implements [`Device`], and one line in [`TABLE`].

pub mod cpu;

use autoshard_ir::{Op, Type};

/// A kind of device.
pub struct DeviceKind {
    /// Makes the device of one rank, with its arena. `local` counts the ranks of this host.
    pub open: fn(local: usize, layout: Layout) -> Result<Box<dyn Device>, DeviceError>,
    /// Bytes free for the arenas of all ranks of this host, where that can be known.
    pub available: fn() -> Option<u64>,
}

/// Every kind of device; the first is the one that is used.
pub static TABLE: &[DeviceKind] = &[cpu::KIND];

/// What a device must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the arena.
    pub arena: u64,
    /// Bytes for copies of operands that share memory with results: the most that one instruction needs.
    pub staging: u64,
    /// Fill results with `0xff` before computing them, so that a kernel that leaves elements unwritten, or reads what it
    /// should write, shows.
    pub poison: bool,
}

/// Bytes of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

impl Span {
    /// True when a byte lies in both.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// A shard in the arena: an operand or result of an operator.
#[derive(Debug, Clone, Copy)]
pub struct Shard<'a> {
    /// Where.
    pub span: Span,
    /// Local type.
    pub ty: &'a Type,
    /// Index in the unsharded tensor of the first element.
    pub origin: &'a [usize],
    /// Sizes of the unsharded tensor.
    pub global: &'a [usize],
}

/// Memory of a device, for communicators: host memory of `cpu`, device memory of `cuda`.
///
/// Invariant, promised by whoever makes one: the memory lives as long as the session, and until the call that the `Mem` is
/// passed to returns, nothing but communicators touches it.
#[derive(Debug, Clone, Copy)]
pub struct Mem {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: a `Mem` is an address and a length; its invariant speaks of all threads.
unsafe impl Send for Mem {}
unsafe impl Sync for Mem {}

impl Mem {
    /// Memory at an address.
    ///
    /// # Safety
    /// The invariant of the type.
    pub unsafe fn new(address: *mut u8, bytes: usize) -> Mem {
        Mem { address, bytes }
    }
    /// Its first byte.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What computes: one per rank. All spans must lie in the arena: others are refused with an error.
pub trait Device: Send {
    /// Copies bytes from the host into the arena.
    ///
    /// # Errors
    /// Lengths that differ; what the device says.
    fn upload(&mut self, bytes: &[u8], to: Span) -> Result<(), DeviceError>;

    /// Copies bytes from the arena to the host.
    ///
    /// # Errors
    /// Lengths that differ; what the device says.
    fn download(&mut self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies within the arena; nothing happens when both are the same.
    ///
    /// # Errors
    /// Lengths that differ, spans that overlap in part; what the device says.
    fn copy(&mut self, from: Span, to: Span) -> Result<(), DeviceError>;

    /// Copies a box out of a dense tensor of sizes `from_dims`.
    ///
    /// # Errors
    /// A box that does not fit, spans that overlap; what the device says.
    fn slice(
        &mut self,
        from: Span,
        from_dims: &[usize],
        origin: &[usize],
        to: Span,
        to_ty: &Type,
    ) -> Result<(), DeviceError>;

    /// Fills with zeros.
    ///
    /// # Errors
    /// What the device says.
    fn zero(&mut self, span: Span) -> Result<(), DeviceError>;

    /// `to += from`, elementwise.
    ///
    /// # Errors
    /// Spans that overlap; what the device says.
    fn accumulate(&mut self, ty: &Type, from: Span, to: Span) -> Result<(), DeviceError>;

    /// Applies an operator. Operands may share memory with results.
    ///
    /// # Errors
    /// What the kernel says; results that overlap each other.
    fn compute(&mut self, op: &Op, inputs: &[Shard<'_>], outputs: &[Shard<'_>]) -> Result<(), DeviceError>;

    /// Memory for a communicator, once everything asked for before is done.
    ///
    /// # Errors
    /// A span outside the arena; what the device says.
    ///
    /// # Safety
    /// The device must outlive every use of the memory, and no operation of the device on that memory may run until the
    /// call that the memory is passed to has returned: the invariant of [`Mem`].
    unsafe fn memory(&mut self, span: Span) -> Result<Mem, DeviceError>;
}

/// What a device could not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// What a kernel says.
    #[error(transparent)]
    Kernel(#[from] autoshard_ir::op::KernelError),
    /// Memory that could not be had.
    #[error("{bytes} bytes for the arena could not be allocated")]
    OutOfMemory {
        /// How many were asked for.
        bytes: u64,
    },
    /// A span outside the arena, or spans that may not overlap: a program that the verifier would refuse.
    #[error("{0}")]
    Span(String),
}
