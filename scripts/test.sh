#!/usr/bin/env bash
# What `make test` runs once the extension is built: the C++ tests beside the Python tests, since
# both wait a good part of their time, and after them the tests that must be alone.
# Usage: scripts/test.sh <folder of the build> <python> [argument of pytest ...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
python=$2
shift 2
log=$build/tests.log
status=0
echo "=== compiling the C++ tests; see $log"
scripts/build.sh "$build" "$python" > "$log" 2>&1 || {
  cat "$log"
  exit 1
}

echo "=== C++ tests, beside Python tests and shown afterwards"
ctest --test-dir "$build" --output-on-failure --parallel 2 -LE others > "$log" 2>&1 &
compiled=$!
trap 'kill "$compiled" 2> /dev/null || true' EXIT
SMP_TEST_MARKS="not alone" scripts/pytest.sh "$python" "$@" || status=$?
wait "$compiled" || status=1
echo "=== C++ tests"
cat "$log"
SMP_TEST_MARKS=alone scripts/pytest.sh "$python" "$@" || status=$?
exit "$status"
