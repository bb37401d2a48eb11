//! Programs, and what executes them: devices, communicators, weights, checkpoints, launch.
//!
//! [`program`] is the contract with codegen: codegen targets it, as a compiler targets a machine. Nothing here knows
//! how a plan was found.
//!
//! Read in this order: [`program`], [`verify`], [`session`], [`executor`], [`device`], [`comm`].

pub mod boxes;
pub mod checkpoint;
pub mod comm;
pub mod device;
pub mod executor;
pub mod files;
pub mod memory;
pub mod program;
pub mod random;
pub mod session;
mod show;
pub mod tensors;
pub mod trace;
pub mod verify;
pub mod weights;
