#!/usr/bin/env bash
# What `make test` runs once the extension is built: Python tests, and beside
# them, in the time in which they wait, the compilation of the C++ tests.
# Usage: scripts/test.sh <folder of the build> <python> [argument of pytest ...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
python=$2
shift 2
log=$build/tests.log
echo "=== compiling the C++ tests beside the first Python tests; see $log"
nice -n 19 scripts/build.sh "$build" "$python" > "$log" 2>&1 &
compilation=$!
trap 'kill "$compilation" 2> /dev/null || true' EXIT

status=0
SMP_TEST_MARKS="not alone" scripts/pytest.sh "$python" "$@" || status=$?
echo "=== C++ tests"
if wait "$compilation"; then
  ctest --test-dir "$build" --output-on-failure --parallel 2 || status=1
else
  cat "$log"
  status=1
fi
SMP_TEST_MARKS=alone scripts/pytest.sh "$python" "$@" || status=$?
exit "$status"
