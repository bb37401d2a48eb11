//! The messages of an ONNX file, compiled from `proto/onnx.proto`.

#![allow(missing_docs, clippy::all, unused)]

include!(concat!(env!("OUT_DIR"), "/onnx_proto/mod.rs"));
