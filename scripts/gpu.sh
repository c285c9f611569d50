#!/usr/bin/env bash
# What one GPU has to answer, part after part; see benchmarks/README.md.
# Usage: scripts/gpu.sh <python> <folder of the figures> [part ... | --call number]
#   DEVICE=cuda|cpu   cpu: a dry run at tiny sizes
#   GPU_LIMIT=seconds of each part; where parts are named, or a call, of all of them together
#   GPU_NAME=name     of the page; without one that of the device and the month
#   COMMIT=commit     what the figures are of, where there is no git
# Ends with an error if a part failed, after the others have run.
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1
out=$2
shift 2
device=${DEVICE:-cuda}
limit=530
# Four calls, each with a minute in which its machine starts, take less than half an hour.
[[ ${1:-} == --call ]] && limit=380
limit=${GPU_LIMIT:-$limit}
export PYTHONPATH="$PWD/python:$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Nothing needs the network, and waiting for one that is not there takes minutes.
export HF_HUB_OFFLINE=1
mkdir -p "$out" || exit 2
[[ -w $out ]] || { echo "$out cannot be written; GPU_OUT names another folder" >&2; exit 2; }

listed=$("$python" -m benchmarks.gpu.parts "$@") || exit 2
mapfile -t parts <<< "$listed"
# Every part needs the extension, and the first one after a change builds it.
[[ ${parts[0]} == build ]] || parts=(build "${parts[@]}")

is_named=$#
left=$limit
failed=()
for index in "${!parts[@]}"; do
  part=${parts[$index]}
  seconds=$limit
  if ((is_named)); then
    seconds=$left
    # The build takes what it takes; the others share what is left.
    [[ $part == build ]] || seconds=$((left / (${#parts[@]} - index)))
  fi
  if ((seconds < 12)); then
    echo "FAILED $part: $seconds of $limit s are left for it; see GPU_LIMIT"
    failed+=("$part")
    continue
  fi
  echo "=== $part, at most $seconds s; its log is $out/$part.log"
  begin=$SECONDS
  # It has time to end by itself; then everything that it started is ended.
  timeout --kill-after=10 "$seconds" "$python" -u -m benchmarks.gpu.run "$part" \
    --out "$out" --device "$device" --limit-s "$((seconds - 10))" 2>&1 | tee "$out/$part.log"
  status=${PIPESTATUS[0]}
  left=$((left - (SECONDS - begin)))
  echo "=== $part: $((SECONDS - begin)) s, status $status"
  ((status == 0)) && continue
  failed+=("$part")
  "$python" -m benchmarks.gpu.ended "$part" "$status" --out "$out" --device "$device"
  # Without the extension the others can say nothing.
  [[ $part != build ]] || break
done

"$python" -m benchmarks.gpu.page --out "$out" --name "${GPU_NAME:-}" || failed+=("page")
((${#failed[@]} == 0)) && exit 0
echo "FAILED: ${failed[*]}" >&2
exit 1
