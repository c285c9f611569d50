#!/usr/bin/env bash
# Creates or updates the virtual environment that builds the site of the
# documentation. Does nothing when the folder already holds what is asked for.
# Usage: scripts/setup_site.sh <folder> <python>
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
python=$2
wanted=$(sha256sum < requirements/locked/site.txt)
[[ ! -f $venv/.ready || $(< "$venv/.ready") != "$wanted" ]] || exit 0
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
"$python" scripts/install.py "$venv/bin/python" \
  --no-deps --require-hashes -r requirements/locked/site.txt
echo "$wanted" > "$venv/.ready"
