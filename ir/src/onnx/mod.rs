//! ONNX in: the messages, the parsed model, and its lowering to a graph.
//!
//! - [`model`]: a file parsed and checked once; [`Model::instantiate`] binds its symbols and makes a graph.
//! - [`dim`]: sizes as expressions over symbols. [`tensors`]: types and elements. [`error`]: all problems at once.
//! - [`order`]: definitions, uses, and an order in which nodes can be lowered.
//! - [`lower`]: walks the nodes and applies the operators' import rules, whose view is [`import`]; [`rules`] finds them.
//! - [`trainable`]: which initializers are parameters. [`simplify`]: undoes habits of exporters.
//!
//! Read next: [`model`], [`lower`].

pub mod dim;
pub mod error;
pub mod import;
pub mod lower;
pub mod model;
pub mod order;
#[doc(hidden)]
pub mod proto;
pub mod rules;
pub mod simplify;
pub mod tensors;
mod tied;
pub mod trainable;

pub use dim::Dim;
pub use error::{ImportErrors, Problem};
pub use model::{Bindings, Model, Port, Signature, Symbol};
