#!/usr/bin/env bash
# Builds and tests against another torch release, in a venv and a tree of links
# of its own, so that the development build stays as it is.
# Usage: scripts/compat.sh <torch version>
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${1:?"usage: make compat TORCH=2.6.0"}
venv=.venv-compat-$torch
build=build/compat-$torch

scripts/setup_venv.sh "$venv" "$torch"
export PATH="$PWD/$venv/bin:$PATH"

rm -rf "$build/python"
mkdir -p "$build"
cp -rs "$PWD/python" "$build/python"
rm -f "$build"/python/smp/_C.so "$build"/python/smp/_build_info.py

scripts/build.sh "$build" "$PWD/$venv/bin/python" \
  -DSMP_PYTHON_DIR="$PWD/$build/python/smp"
ctest --test-dir "$build" --output-on-failure
SMP_TEST_INSTALLED=1 PYTHONPATH="$PWD/$build/python" \
  "$venv/bin/python" -m pytest tests
