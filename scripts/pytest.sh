#!/usr/bin/env bash
# The Python tests: most of them wait more than they compute, so two at a time
# where pytest-xdist is installed; those that must be alone afterwards.
# Usage: scripts/pytest.sh <python> [argument of pytest ...]
# Without a file or folder among the arguments all of `tests` (pyproject.toml).
# SMP_SAMPLES=some|others|all says which cases (tests/samples.py);
# SMP_TEST_MARKS="not alone" or alone leaves the other half out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
# Else each of hundreds of processes compiles torch, transformers and the tests anew.
unset PYTHONDONTWRITEBYTECODE

beside=(-n "${SMP_TEST_JOBS:-2}" --dist worksteal)
"$python" -c 'import xdist' 2> /dev/null || beside=()
status=0
ran=0
marks=("not alone" alone)
[[ -z ${SMP_TEST_MARKS:-} ]] || marks=("$SMP_TEST_MARKS")
for mark in "${marks[@]}"; do
  echo "=== tests that are $mark (${SMP_SAMPLES:-some} of the samples)"
  arguments=(-m "$mark")
  [[ $mark == alone ]] || arguments+=("${beside[@]}")
  code=0
  "$python" -m pytest "${arguments[@]}" "$@" || code=$?
  [[ $code == 5 ]] && continue  # none of what was asked for has this mark
  ran=1
  [[ $code == 0 ]] || status=$code
done
[[ $ran == 1 || -n ${SMP_TEST_MARKS:-} ]] || status=5
exit "$status"
