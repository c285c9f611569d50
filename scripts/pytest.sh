#!/usr/bin/env bash
# The Python tests. Most compute: two at a time, where pytest-xdist is installed. Beside them, and
# ahead of them, run those that wait for limits of seconds and for processes that end, file by file.
# Those that must be alone come afterwards.
# Usage: scripts/pytest.sh <python> [argument of pytest ...]
# Without a file or folder among the arguments all of `tests` (pyproject.toml).
# SMP_SAMPLES=some|others|all says which cases (tests/samples.py);
# SMP_TEST_MARKS="not alone" or alone leaves the other part out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
# Else each of hundreds of processes compiles torch, transformers and the tests anew.
unset PYTHONDONTWRITEBYTECODE

parts=("not alone" alone)
[[ -z ${SMP_TEST_MARKS:-} ]] || parts=("$SMP_TEST_MARKS")
computing=(-n "${SMP_TEST_JOBS:-2}" --dist worksteal)
waiting=(-n "${SMP_TEST_WAITING_JOBS:-2}" --dist loadfile)
# Files in their order, where this release of pytest-xdist can.
[[ $("$python" -m pytest --help 2> /dev/null) != *--no-loadscope-reorder* ]] ||
  waiting+=(--no-loadscope-reorder)
"$python" -c 'import xdist' 2> /dev/null || computing=() waiting=()
status=0
ran=0

say() {
  echo "=== tests that $1 (${SMP_SAMPLES:-some} of the samples)"
}

note() {  # the status of a run: 5 is of one that had nothing to run
  [[ $1 != 5 ]] || return 0
  ran=1
  [[ $1 == 0 ]] || status=$1
}

for part in "${parts[@]}"; do
  code=0
  if [[ $part != "not alone" ]]; then
    say "are $part"
    "$python" -m pytest -m "$part" "$@" || code=$?
    note "$code"
    continue
  fi
  log=$(mktemp)
  # With jobs of its own it does not ignore Ctrl-C, which tests send.
  set -m
  "$python" -m pytest -m waits "${waiting[@]}" "$@" > "$log" 2>&1 &
  beside=$!
  set +m
  trap 'kill -- "-$beside" 2> /dev/null || true; rm -f "$log"' EXIT
  say "compute; beside them those that wait, which are shown afterwards"
  nice -n 19 "$python" -m pytest -m "not alone and not waits" "${computing[@]}" "$@" || code=$?
  note "$code"
  code=0
  wait "$beside" || code=$?
  say "wait"
  cat "$log"
  rm "$log"
  note "$code"
done
[[ $ran == 1 || -n ${SMP_TEST_MARKS:-} ]] || status=5
exit "$status"
