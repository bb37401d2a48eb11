//! Reading what `nvidia-smi topo -m` printed, saved to a file, as a cluster of one node.
//!
//! The matrix says how each pair of GPUs is joined: `NV#` by that many NVLinks, else by PCI Express through one switch (`PIX`),
//! several (`PXB`), a host bridge (`PHB`), the bridges of a NUMA node (`NODE`) or the links between sockets (`SYS`). It names no
//! GPU: the file must also hold the output of `nvidia-smi -L` or of `nvidia-smi --query-gpu=name --format=csv`, or the caller says which
//! device of the library it is.
//!
//! Tiers are nested: GPUs joined by NVLinks, GPUs below one host bridge, GPUs of one socket, all. What the matrix has of them becomes
//! a tier where its domains are of one size and hold neighbouring GPUs (as ranks are laid out); domains that are not are left out,
//! so that their members count as joined by the slower tier around them, and the cluster's title says so. GPUs that NVLinks join, but not all
//! pairs directly, are a mesh. Bandwidths are those of the device's generation, each with its source.
//!
//! Read next: [`crate::library`], which asks here when a file is no TOML.

mod build;
mod parse;

pub use build::cluster;
pub use parse::{Link, Topology, is_topology, topology};
