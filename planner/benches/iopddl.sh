#!/bin/sh
# Runs every instance of a folder and prints the table that iopddl.md records.
# usage: planner/benches/iopddl.sh FOLDER [SECONDS [THREADS]]
# With IOPDDL set to a program built before, that one is run.
set -eu
if [ -z "${IOPDDL:-}" ]; then
    cargo build --release -q -p autoshard-planner --example iopddl
    IOPDDL=${CARGO_TARGET_DIR:-target}/release/examples/iopddl
fi
first=1
for file in "$1"/*.json.gz; do
    if [ "$first" = 1 ]; then lines=1; first=0; else lines=3; fi
    # One process per instance: the peak of memory is the process's.
    "$IOPDDL" --seconds "${2:-300}" --threads "${3:-2}" "$file" | tail -n +"$lines"
done
