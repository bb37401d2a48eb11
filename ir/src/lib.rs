//! The graph of a model: ONNX in, operators, shapes, differentiation, and the unsharded reference execution.
//!
//! This crate knows nothing of meshes, devices or ranks. Per operator it states *what could be split* ([`factor`]).
//!
//! Read in this order: [`tensor`], [`graph`], [`op`], [`factor`], [`ops`], [`builder`], [`onnx`], [`train`].

pub mod assemble;
pub mod blocks;
pub mod builder;
pub mod convert;
pub mod dtype;
pub mod factor;
pub mod fuse;
pub mod graph;
pub mod interp;
pub mod onnx;
pub mod op;
pub mod ops;
pub mod rewrite;
pub mod tensor;
pub mod text;
pub mod train;
pub mod verify;
pub mod weights;

pub use builder::Builder;
pub use dtype::DType;
pub use graph::{Graph, NodeId, Section, StateId, ValueId};
pub use op::{Op, OpDef};
pub use tensor::{Tensor, Type};
