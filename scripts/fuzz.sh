#!/usr/bin/env bash
# Runs the fuzzers of the C++ core.
# Usage: scripts/fuzz.sh <build folder> <python> <inputs of each> <seed>
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
python=$2
runs=$3
seed=$4
names=(liveness handshake schedule wire)

targets=()
for name in "${names[@]}"; do targets+=(--target "smp_fuzz_$name"); done
scripts/build.sh "$folder" "$python" "${targets[@]}"

for name in "${names[@]}"; do
  # A failure ends the script here; as a part of echo's words it would not.
  said=$("$folder/smp_fuzz_$name" "-runs=$runs" "-seed=$seed" "tests/fuzz/corpus/$name")
  echo "$name: $said"
done
