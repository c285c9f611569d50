#!/usr/bin/env bash
# Sets up .venv and builds; what the compiler does not need is downloaded while
# it works. With NO_VENV=1 everything comes from the machine's PYTHON.
# Usage: scripts/setup_and_build.sh <run|all> <folder> [argument of build.sh]...
set -euo pipefail
cd "$(dirname "$0")/.."

level=$1
shift
if [[ -n ${NO_VENV:-} ]]; then
  exec scripts/build.sh "$1" "${PYTHON:-python3}" "${@:2}"
fi

scripts/setup_venv.sh .venv build
scripts/setup_venv.sh .venv "$level" &
rest=$!
trap 'kill "$rest" 2> /dev/null || true' EXIT
PATH="$PWD/.venv/bin:$PATH" scripts/build.sh "$1" "$PWD/.venv/bin/python" "${@:2}"
wait "$rest"
