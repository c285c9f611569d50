#!/usr/bin/env bash
# Tests against other releases of what smp works with.
# Usage: scripts/compat.sh <torch version>
#          builds and tests in a venv and a tree of links of its own, so that
#          the development build stays as it is
#        scripts/compat.sh transformers <version> [--setup]
#          puts that transformers and what it needs into a folder of its own,
#          beside .venv, and, without --setup, runs the model families
#          and the Trainer with it
set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: make compat TORCH=2.6.0, or scripts/compat.sh transformers 4.30.2"

test_transformers() {
  local version=$1
  local folder=.venv-transformers-$version
  local pins=requirements/other/transformers-$version.txt
  local python=${PYTHON:-$PWD/.venv/bin/python}
  [[ -f $pins ]] || { echo "no $pins; $usage" >&2; exit 1; }
  local wanted
  wanted=$(sha256sum < "$pins")
  if [[ ! -f $folder/.smp_ready || $(cat "$folder/.smp_ready") != "$wanted" ]]
  then
    echo "setting up $folder"
    rm -rf "$folder"
    # Without dependencies: torch, numpy and the like come from .venv.
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps \
      --target "$folder" -r "$pins"
    echo "$wanted" > "$folder/.smp_ready"
  fi
  [[ ${2:-} != --setup ]] || return 0
  PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pytest tests/dist/test_families.py \
    tests/dist/test_planned_head_elsewhere.py -k "${version//./_}"
  PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pytest tests/clients/test_trainer_older.py
}

if [[ ${1:-} == transformers ]]; then
  test_transformers "${2:?"$usage"}" "${3:-}"
  exit
fi

torch=${1:?"$usage"}
venv=.venv-compat-$torch
build=build/compat-$torch

scripts/setup_venv.sh "$venv" all "$torch"
export PATH="$PWD/$venv/bin:$PATH"

rm -rf "$build/python"
mkdir -p "$build"
cp -rs "$PWD/python" "$build/python"
rm -f "$build"/python/smp/_C.{so,pyi} "$build"/python/smp/_build_info.py

scripts/build.sh "$build" "$PWD/$venv/bin/python" \
  -DSMP_PYTHON_DIR="$PWD/$build/python/smp"
ctest --test-dir "$build" --output-on-failure
SMP_TEST_INSTALLED=1 PYTHONPATH="$PWD/$build/python" \
  "$venv/bin/python" -m pytest tests
