#!/usr/bin/env bash
# Checks format and types; `--fix` formats instead.
# Usage: scripts/lint.sh <python> [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
fix=${2:-}
# The tools of this python's environment come before others of the same name.
PATH=$(dirname "$python"):$PATH
failed=0
code=(python tests benchmarks examples website cmake setup.py)

mapfile -t cpp < <(find csrc tests/cpp tests/fuzz benchmarks \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) | sort)
pinned=$(sed -n 's/^clang-format==//p' requirements/tools.txt)
found=$(clang-format --version 2> /dev/null |
  sed 's/.*version \([0-9.]*\).*/\1/' || true)

if [[ $found != "$pinned" ]]; then
  # Another release formats differently, so its verdict would be noise.
  echo "SKIPPED clang-format: $pinned is pinned, found '${found:-none}'"
elif [[ $fix == --fix ]]; then
  clang-format -i "${cpp[@]}"
else
  clang-format --dry-run --Werror "${cpp[@]}" || failed=1
fi

if [[ $fix == --fix ]]; then
  "$python" -m ruff check --quiet --fix "${code[@]}" || true
  "$python" -m ruff format --quiet "${code[@]}"
  exit 0
fi
"$python" -m ruff check "${code[@]}" || failed=1
"$python" -m ruff format --check "${code[@]}" || failed=1
# The build writes it.
if [[ -f python/smp/_C.pyi ]]; then
  "$python" -m mypy python/smp python/smp_cli tests/api/step_types.py || failed=1
else
  echo "python/smp/_C.pyi is missing: build with requirements/tools.txt" >&2
  failed=1
fi
exit "$failed"
