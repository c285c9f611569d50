#!/usr/bin/env bash
# The Python tests: most of them wait more than they compute, so two at a time
# where pytest-xdist is installed; those that must be alone afterwards.
# Usage: scripts/pytest.sh <python> [argument of pytest ...]
# SMP_SAMPLES=some|others|all says which cases (tests/samples.py).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

if ! "$python" -c 'import xdist' 2> /dev/null; then
  exec "$python" -m pytest tests "$@"
fi

status=0
ran=0
for mark in "not alone" alone; do
  echo "=== tests that are $mark (${SMP_SAMPLES:-some} of the samples)"
  arguments=(-m "$mark")
  [[ $mark == alone ]] || arguments+=(-n "${SMP_TEST_JOBS:-2}" --dist worksteal)
  code=0
  "$python" -m pytest tests "${arguments[@]}" "$@" || code=$?
  [[ $code == 5 ]] && continue  # none of what was asked for has this mark
  ran=1
  [[ $code == 0 ]] || status=$code
done
[[ $ran == 1 ]] || status=5
exit "$status"
