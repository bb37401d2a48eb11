#!/bin/sh
# Runs every instance of a folder and prints the table that iopddl.md records.
# usage: planner/benches/iopddl.sh FOLDER [SECONDS]
set -eu
cargo build --release -q -p autoshard-planner --example iopddl
target=${CARGO_TARGET_DIR:-target}
first=1
for file in "$1"/*.json.gz; do
    if [ "$first" = 1 ]; then lines=1; first=0; else lines=3; fi
    # One process per instance: the peak of memory is the process's.
    "$target/release/examples/iopddl" --seconds "${2:-300}" "$file" | tail -n +"$lines"
done
