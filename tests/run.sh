#!/usr/bin/env bash
# Runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh browser
cargo test --workspace --locked --no-fail-fast "$@"
