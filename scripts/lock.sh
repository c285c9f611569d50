#!/usr/bin/env bash
# Writes requirements/locked/*.txt: what requirements/*.txt ask for and all that
# it needs, with versions and the hashes of every file of each release, for
# Linux and the Pythons that these releases support. Run it after a change of
# requirements/*.txt; versions that are locked already stay where they can.
# Usage: scripts/lock.sh [argument of uv pip compile]...   (--upgrade: newest)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-lock
uv=$(sed -n 's/^uv==/&/p' requirements/lock.txt)
[[ -x $venv/bin/uv ]] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$uv"

cd requirements
mkdir -p locked
# lock <file> <requirements>...
lock() {
  "../$venv/bin/uv" pip compile --quiet --universal --python-version "${oldest:-3.11}" \
    --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
    --custom-compile-command scripts/lock.sh "${options[@]}" \
    --output-file "locked/$1.txt" "${@:2}"
}
options=("$@")
lock all torch.txt run.txt test.txt tools.txt
lock site site.txt
oldest=3.10 lock wheel wheel.txt
options=(--constraints locked/all.txt)
lock run torch.txt run.txt
lock cuda cuda.txt
options=(--no-deps "$@")
lock system system.txt
