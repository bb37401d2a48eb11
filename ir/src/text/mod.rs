//! The textual form of graphs: [`print`] and [`parse`]. What was printed and parsed prints as the same text.
//!
//! ```text
//! graph "mlp" {
//!   inputs {
//!     %0 = "x" : f32[4,8] batch 0
//!   }
//!   states {
//!     %1 = parameter "w" : f32[8,2] = weight "w" f32[8,6][0:8,2:4] file "mlp.onnx" 512 192 -> %9
//!     %2 = optimizer "adam.m/w" : f32[8,2] = zeros of "w" -> %10
//!     %3 = frozen "table" : f32[2] = [0.5, 1.5]
//!   }
//!   constants {
//!     %4 : f32[] = 0.125
//!     %5 : f32[2,12] = splat(1.0)
//!   }
//!   forward {
//!     %6 = Einsum{eq="bk,kn->bn"}(%0, %1) : f32[4,2]  "/fc/MatMul" in "fc"
//!   }
//!   backward {
//!     %7 = Einsum{eq="bk,bn->kn"}(%0, %6) : f32[8,2] of n0
//!   }
//!   outputs {
//!     "y" = %6 batch 0
//!   }
//! }
//! ```
//!
//! - Sections of nodes are blocks in the order of node ids; the same section may occur in several blocks.
//! - `%` names a value: digits or a word. When all names of a file are numbers and they are 0, 1, 2, ... without a
//!   gap, they become the value ids; otherwise ids follow the order of definition. Node ids follow the order of nodes.
//! - Behind a parameter's content, `copy weight ...` and `turned weight ...` name other initializers with the same elements,
//!   in the same order or transposed ([`crate::graph::State::tied`]).
//! - The type of a node's result may be left out when writing by hand; when given it must be what the operator gives.
//! - A definition may carry a name, `%6 "hidden" = ...`, that of [`crate::graph::Value::name`], where it is not that of
//!   its input or state.
//! - Tensors: a number, `true`, `false` (scalars), `splat(x)`, `[x, y, ...]` in row-major order, or `hex "..."` (bytes,
//!   little endian). Printed as lists up to [`LIST_LIMIT`] elements, as hex up to [`HEX_LIMIT`] bytes; larger ones are
//!   printed as `elided "..."`, with a digest, which does not parse.
//! - Comments run from `#` to the end of the line.
//!
//! Parsing checks names, syntax and types; sections and the rest are for [`crate::verify`].

mod lexer;
mod literal;
mod parser;
mod printer;

pub use parser::{ParseError, parse};
pub use printer::print;

/// Tensors with at most so many elements are printed as lists.
pub const LIST_LIMIT: usize = 32;
/// Tensors with at most so many bytes are printed as hex; larger ones are elided.
pub const HEX_LIMIT: usize = 1 << 16;
