#!/usr/bin/env bash
# Plans a GPT-2 for 8 GPUs, verifies the plan against the unsharded model, and writes the report.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh
cargo build --workspace --bins --locked --quiet
out=target/demo
mkdir -p "$out"
autoshard="${CARGO_TARGET_DIR:-target}/debug/autoshard"
run() { echo; echo "\$ autoshard $*"; "$autoshard" "$@"; }
run plan tests/models/gpt2-loss-dyn.onnx --gpus 8 --global-batch 16 --dim sequence=16 -o "$out/gpt2.plan.json"
run verify "$out/gpt2.plan.json"
run report "$out/gpt2.plan.json" -o "$out/gpt2.html"
