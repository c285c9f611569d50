"""Runs a rank that measures pairs of ranks: ``python -m smp_cli.doctor.rank <bytes>``."""

from __future__ import annotations

import json
import os
import statistics
import sys
from itertools import combinations

import smp
import smp._C as _C
from smp.world import runtime

_SMALL_BYTES, _SMALL_REPEATS, _LARGE_REPEATS = 8, 200, 8
_LIMIT_S = 40.0


def measure_pairs(num_bytes: int) -> dict[str, object]:
    """Measures pair after pair, each by its first rank.

    Args:
        num_bytes: size of the tensors whose bandwidth is measured.

    Returns:
        Way, round trip and bandwidth of each pair, and the number of tensors that missed the lane.
    """
    smp.init({"pipeline_parallel_degree": int(os.environ["SMP_WORLD_SIZE"])})
    rank = runtime.current().rank
    assert rank.mailbox is not None and rank.board is not None
    lanes = {(first, second): (lane, why) for first, second, lane, why in rank.mailbox.lanes()}
    probe = _C.LinkProbe(rank.mailbox, rank.board)
    pairs = []
    for first, second in combinations(range(smp.size()), 2):
        smp.barrier()
        if rank.global_rank == first:
            small = probe.measure(second, _SMALL_BYTES, _SMALL_REPEATS, _LIMIT_S)
            large = probe.measure(second, num_bytes, _LARGE_REPEATS, _LIMIT_S, str(rank.device))
            lane, reason = lanes.get((first, second), (_message_way(rank.mailbox), ""))
            pairs.append(
                {
                    "first": first,
                    "second": second,
                    "way": lane,
                    "reason": "" if lane == "ipc" else reason,
                    "round_trip_s": statistics.median(both for _, both in small),
                    # Each byte travels there and back.
                    "bytes_per_s": 2 * num_bytes / min(both for _, both in large),
                }
            )
    smp.barrier()
    del probe
    stats = smp.metrics.server_stats()
    missed = stats["lane_times_full"] + stats["lane_times_too_large"]
    found = smp.allgather((pairs, missed), smp.WORLD)
    return {
        "pairs": [pair for own, _ in found for pair in own],
        "missed": sum(missed for _, missed in found),
    }


def _message_way(mailbox: _C.Mailbox) -> str:
    is_shared = mailbox.stats()["shared_memory_messages_sent"] > 0
    return "shared memory" if is_shared else "tcp"


def main() -> None:
    """Measures the pairs; rank 0 prints the result."""
    found = measure_pairs(int(sys.argv[1]))
    is_first = smp.rank() == 0
    smp.shutdown()
    if is_first:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
