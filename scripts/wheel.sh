#!/usr/bin/env bash
# A wheel for one release of Python and several of torch, and its trial in empty
# environments. Each extension is compiled beside the torch that it is for.
# Usage: scripts/wheel.sh build <python> [torch version]...
#          compiles for each torch (default: that of requirements/torch.txt),
#          looks at the libraries, and puts one wheel into dist/, tagged with
#          the oldest manylinux whose glibc it fits
#        scripts/wheel.sh check <python> [torch minor release]...
#          for each torch that the wheel has (or for those named) a venv in
#          build/wheel-check with the wheel and what it asks for: `smp doctor` and
#          the quickstart, on two processes; then what another torch is told
# Libraries that come with torch and Open MPI are not copied into the wheel: it
# has to use theirs.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "scripts/wheel.sh: $*" >&2; exit 1; }
pip() { "$1" -m pip --disable-pip-version-check "${@:2}"; }
minor() { cut -d. -f1,2 <<< "$1"; }
tag_of() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# RUNPATHs name places beside the package, and nothing of this machine.
check_libraries() {
  local library path
  for library in "$1"/smp/torch*/*.so; do
    path=$(readelf -d "$library" | sed -n 's/.*R[UN]*PATH.*\[\(.*\)\]/\1/p')
    # shellcheck disable=SC2016 # the loader's own variable
    [[ ":$path:" == *':$ORIGIN/../../torch/lib:'* ]] ||
      fail "$library does not look for torch beside the package: '$path'"
    # shellcheck disable=SC2016
    [[ -z $(tr : '\n' <<< "$path" | grep -v '^\$ORIGIN' || true) ]] ||
      fail "$library looks for libraries in folders of this machine: '$path'"
  done
}

# A wheel of each release, of which one is made: they differ in a folder alone.
# With ccache what includes no torch, such as kernels, is compiled once.
build() {
  local python=$1 tag release defines venv name work=build/wheels
  local releases=("${@:2}")
  ((${#releases[@]})) ||
    releases=("$(sed -n 's/^torch==//p' requirements/torch.txt)")
  tag=$(tag_of "$python")
  rm -rf "$work"
  for release in "${releases[@]}"; do
    venv=.venv-wheel-$tag-$release
    PYTHON=$python scripts/setup_venv.sh "$venv" build "$release"
    pip "$venv/bin/python" --quiet install --no-deps --require-hashes \
      -r requirements/locked/wheel.txt
    # Tables of source lines would be two thirds of the file.
    defines="SMP_INSTALL_DIR=smp/torch$(minor "$release")"
    defines+=";CMAKE_MODULE_LINKER_FLAGS=-Wl,--strip-debug"
    rm -rf build/wheel "$work/plain"
    PATH="$PWD/$venv/bin:$PATH" SMP_WHEEL_TORCH="${releases[*]}" \
      CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} \
      SKBUILD_CMAKE_DEFINE="${SKBUILD_CMAKE_DEFINE:+$SKBUILD_CMAKE_DEFINE;}$defines" \
      pip "$venv/bin/python" wheel . --no-build-isolation --no-deps \
      -w "$work/plain"
    "$venv/bin/python" -m zipfile -e "$work"/plain/*.whl "$work/content"
  done
  check_libraries "$work/content"
  name=$(basename "$work"/plain/*.whl)
  "$venv/bin/python" -c 'import sys
from pathlib import Path
from auditwheel.tools import dir2zip
from auditwheel.wheeltools import rewrite_record
content = Path(sys.argv[1]).resolve()
rewrite_record(content)
dir2zip(content, Path(sys.argv[2]), 6, None)' "$work/content" "$work/$name"
  # smp_C.so is the extension itself, as the MPI adapter calls it.
  PATH="$PWD/$venv/bin:$PATH" \
    LD_LIBRARY_PATH=$(echo "$PWD/$venv"/lib/python*/site-packages/torch/lib) \
    auditwheel repair --wheel-dir "$work/tagged" \
    --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp.so.*' \
    --exclude 'libmpi.so.*' --exclude smp_C.so "$work/$name"
  "$venv/bin/python" -c 'import sys, zipfile
from packaging.metadata import Metadata
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    # Raises if an index would refuse it.
    metadata = Metadata.from_email(wheel.read(name))
    print(metadata.name, metadata.version, *map(str, metadata.requires_dist[:2]))' \
    "$work"/tagged/*.whl
  mkdir -p dist
  rm -f dist/smp_train-*-"$tag"-*.whl
  mv "$work"/tagged/*.whl dist/
  ls -l dist/*.whl
}

check() {
  local python=$1 venv=$PWD/build/wheel-check wheel release said
  local releases=("${@:2}")
  # Of a checkout that is named there pip takes its metadata for the package.
  unset PYTHONPATH LD_LIBRARY_PATH
  wheel=$(echo dist/smp_train-*-"$(tag_of "$python")"-*.whl)
  [[ -f $wheel ]] || fail "no wheel for this Python in dist; run \`make wheel\`"
  ((${#releases[@]})) || mapfile -t releases < <("$python" -m zipfile -l "$wheel" |
    sed -n 's|^smp/torch\([0-9.]*\)/_C.so .*|\1|p')
  for release in "${releases[@]}"; do
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip "$venv/bin/python" --quiet install --no-compile "torch==$release.*" "${wheel}[transformers]"
    PATH="$venv/bin:$PATH" "$venv/bin/python" scripts/quickstart.py
  done
  said=$("$venv/bin/python" -c '
import torch
torch.__version__ = "0.1.0"
import smp' 2>&1) && fail "smp loads beside a torch that it was not built for"
  grep "ImportError: smp was built for torch .*, but torch 0.1.0" <<< "$said" ||
    fail "beside another torch smp says: $said"
}

case ${1:-} in
  build | check) "$1" "${2:?"name a python"}" "${@:3}" ;;
  *) fail "say build or check, and a python" ;;
esac
