#!/usr/bin/env bash
# From a fresh clone to a run on two processes that is compared with one.
# Usage: scripts/demo.sh <folder of the build> <python>
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
python=$2
timeline=build/demo/timeline.html
part() { printf '\n=== %d:%02d  %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Kernels for a device take a while to compile, and no device is here to run
# them. A build that has them keeps them.
cache=$build/CMakeCache.txt
if [[ ! -e /dev/nvidiactl ]] && ! grep -qs '^SMP_CUDA:[A-Z]*=\(auto\|on\)' "$cache"; then
  export SMP_CUDA=off
fi
part "1 of 2: packages into .venv, and the extension into $build"
scripts/setup_and_build.sh run "$build" --target _C

part "2 of 2: training a small GPT-J on two processes, then in one to compare"
mkdir -p "$(dirname "$timeline")"
PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
  examples/gptj/finetune.py --steps 60 --check --trace "$timeline"

part "done"
cat << TEXT
1. An unmodified GPT-J was cut in two automatically and trained in pipelined microbatches by two processes.
2. Losses and gradients of three steps equal those of one process; the check above has the differences.
3. What each process did in the last steps, planned above executed: $PWD/$timeline
4. The script is examples/gptj/finetune.py; docs/quickstart.md starts with yours, docs/limits.md says what does not work.
5. "make test" builds the rest and runs the tests; ARCHITECTURE.md shows the rooms of the code.
TEXT
