#!/usr/bin/env bash
# A wheel for the torch of an environment, and its trial in an empty one.
# Usage: scripts/wheel.sh build <python>
#          compiles, looks at the libraries, and puts the wheel into dist/,
#          tagged with the oldest manylinux whose glibc it fits
#        scripts/wheel.sh check <python>
#          a venv in build/wheel-check with torch and the wheel alone:
#          `smp doctor`, the quickstart, and what another torch is told
# Libraries that come with torch and Open MPI are not copied into the wheel: it
# has to use theirs.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "scripts/wheel.sh: $*" >&2; exit 1; }

# RUNPATHs name places beside the package, and nothing of this machine.
check_libraries() {
  local library path
  for library in "$1"/smp/*.so; do
    path=$(readelf -d "$library" | sed -n 's/.*R[UN]*PATH.*\[\(.*\)\]/\1/p')
    # shellcheck disable=SC2016 # the loader's own variable
    [[ ":$path:" == *':$ORIGIN/../torch/lib:'* ]] ||
      fail "$library does not look for torch beside the package: '$path'"
    # shellcheck disable=SC2016
    [[ -z $(tr : '\n' <<< "$path" | grep -v '^\$ORIGIN' || true) ]] ||
      fail "$library looks for libraries in folders of this machine: '$path'"
  done
}

build() {
  local python=$1 work=build/wheel tools=.venv-wheel torch
  rm -rf "$work"
  "$python" -m pip wheel . --no-build-isolation --no-deps -w "$work/plain"
  "$python" -m zipfile -e "$work"/plain/*.whl "$work/content"
  check_libraries "$work/content"
  [[ -x $tools/bin/auditwheel ]] || "$python" -m venv "$tools"
  "$tools/bin/python" -m pip --disable-pip-version-check --quiet install \
    --no-deps --require-hashes -r requirements/locked/wheel.txt
  torch=$("$python" -c 'import pathlib, torch
print(pathlib.Path(torch.__file__).parent / "lib")')
  # smp_C.so is the extension itself, as the MPI adapter calls it.
  PATH="$PWD/$tools/bin:$PATH" LD_LIBRARY_PATH=$torch \
    auditwheel repair --wheel-dir "$work/tagged" \
    --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp.so.*' \
    --exclude 'libmpi.so.*' --exclude smp_C.so "$work"/plain/*.whl
  mkdir -p dist
  rm -f dist/smp_train-*.whl
  mv "$work"/tagged/*.whl dist/
  ls -l dist/*.whl
}

check() {
  local python=$1 venv=$PWD/build/wheel-check release
  # Of a checkout that is named there pip takes its metadata for the package.
  unset PYTHONPATH LD_LIBRARY_PATH
  release=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # What training scripts import comes first, so that nothing is looked for
  # elsewhere when the wheel does.
  scripts/setup_venv.sh "${venv#"$PWD/"}" run "$release"
  rm "$venv"/lib/python*/site-packages/smp_checkout.pth
  "$venv/bin/python" -m pip --disable-pip-version-check install --no-index dist/smp_train-*.whl
  PATH="$venv/bin:$PATH" "$venv/bin/python" scripts/quickstart.py
}

case ${1:-} in
  build | check) "$1" "${2:?"name a python"}" ;;
  *) fail "say build or check, and a python" ;;
esac
