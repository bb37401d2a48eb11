//! ONNX in: the messages, the parsed model, and its lowering to a graph.
//!
//! [`import`] holds what an operator's import rule sees.

pub mod import;
