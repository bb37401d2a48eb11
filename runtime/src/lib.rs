//! Programs, and what executes them: devices, communicators, weights, checkpoints, launch.
//!
//! [`program`] is the contract with codegen: codegen targets it, as a compiler targets a machine. Nothing here knows
//! how a plan was found.

pub mod program;
