//! Compiles the ONNX messages.

fn main() {
    println!("cargo:rerun-if-changed=proto/onnx.proto");
    protobuf_codegen::Codegen::new()
        .pure()
        .include("proto")
        .input("proto/onnx.proto")
        .customize(protobuf_codegen::Customize::default().tokio_bytes(true).gen_mod_rs(true))
        .cargo_out_dir("onnx_proto")
        .run_from_script();
}
