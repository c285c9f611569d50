#!/usr/bin/env bash
# Configures and builds.
# Usage: scripts/build.sh <folder> <python> [--target name]... [-Dname=value]...
# SMP_CUDA=on|off decides whether CUDA sources are compiled; without it they are
# where there is nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
python=$(command -v "$2") || { echo "no such python: $2" >&2; exit 1; }
[[ $python == /* ]] || python=$PWD/$python
shift 2
targets=()
defines=("-DSMP_CUDA=${SMP_CUDA:-auto}")
while (($#)); do
  case $1 in
    --target) targets+=(--target "$2"); shift 2 ;;
    *) defines+=("$1"); shift ;;
  esac
done

generator=()
if [[ ! -f $folder/CMakeCache.txt ]]; then
  if command -v ninja > /dev/null; then
    generator=(-G Ninja)
  else
    generator=(-G "Unix Makefiles")
  fi
fi
cmake -S . -B "$folder" "${generator[@]}" -DPython_EXECUTABLE="$python" \
  --log-level=WARNING "${defines[@]}"
cmake --build "$folder" --parallel "${JOBS:-$(env -u OMP_NUM_THREADS nproc)}" "${targets[@]}"
