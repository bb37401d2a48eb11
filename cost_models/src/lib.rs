//! Devices, clusters, and the time and memory that work and collectives take on them.
//!
//! A [`Cluster`] is read from a data file ([`hardware`], embedded ones in [`library`]), scaled to a number of GPUs
//! ([`Cluster::with_gpus`]), and then answers three questions:
//! - [`Cluster::op_time`]: how long an operator takes on one device ([`compute`]);
//! - [`Cluster::collective_time`]: how long a collective over a [`Group`] takes ([`collective`], [`topology`]);
//! - [`Cluster::usable_memory`]: what a rank may allocate ([`memory`]).
//!
//! Invariants: no I/O apart from reading a cluster file; every figure and coefficient is data with its provenance
//! beside it (`hardware/*.toml`, `coefficients/*.toml`); results are pure functions of their arguments.
//!
//! Read next: [`hardware`], [`topology`], [`collective`].

pub mod collective;
pub mod compute;
pub mod error;
pub mod hardware;
pub mod library;
pub mod memory;
pub mod nvidia_smi;
pub mod topology;
pub mod units;

pub use collective::CollectiveKind;
pub use error::ClusterError;
pub use hardware::{Cluster, Device, Tier};
pub use memory::{Category, MemoryBreakdown};
pub use topology::Group;
pub use units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};
