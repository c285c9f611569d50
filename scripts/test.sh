#!/usr/bin/env bash
# What `make test` runs once the extension is built: Python tests, and beside
# those that wait most of the time, the compilation of the C++ tests.
# Usage: scripts/test.sh <folder of the build> <python> [argument of pytest ...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
python=$2
shift 2
log=$build/tests.log
status=0
SMP_TEST_MARKS="not alone" scripts/pytest.sh "$python" "$@" || status=$?

# The tests that are alone wait most of the time, and bear a neighbour that
# takes what they leave; the first ones keep both cores busy.
echo "=== compiling the C++ tests beside the last Python tests; see $log"
nice -n 19 scripts/build.sh "$build" "$python" > "$log" 2>&1 &
compilation=$!
trap 'kill "$compilation" 2> /dev/null || true' EXIT
SMP_TEST_MARKS=alone scripts/pytest.sh "$python" "$@" || status=$?

echo "=== C++ tests"
if wait "$compilation"; then
  ctest --test-dir "$build" --output-on-failure --parallel 2 || status=1
else
  cat "$log"
  status=1
fi
exit "$status"
