"""A rank of a few that measure the ways between them: ``python -m smp_cli.doctor.link <kind>``."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import smp
import smp._C as _C
from smp.world import runtime
from smp_cli.doctor import machine

_SMALL_BYTES, _LARGE_BYTES = 8, 16 << 20
_SMALL_REPEATS, _LARGE_REPEATS = 200, 8
_LIMIT_S = 40.0
_RATE_REPEATS = 5
_WIDTHS = {"cpu": 768, "cuda": 8192}  # of products
_MOVED_BYTES = 256 << 20


def messages() -> dict[str, object]:
    """Round trip of a small message and bandwidth of a large one, through the mailbox."""
    smp.init({"pipeline_parallel_degree": 2})
    current = runtime.current()
    assert current.rank.mailbox is not None and current.rank.board is not None
    probe = _C.LinkProbe(current.rank.mailbox, current.rank.board)
    smp.barrier()
    result: dict[str, object] = {}
    if smp.rank() == 0:
        small = probe.measure(1, _SMALL_BYTES, _SMALL_REPEATS, _LIMIT_S)
        large = probe.measure(1, _LARGE_BYTES, _LARGE_REPEATS, _LIMIT_S)
        result = {
            "shared": current.rank.mailbox.stats()["shared_memory_messages_sent"] > 0,
            "round trip us": statistics.median(both for _, both in small) * 1e6,
            # Each byte goes there and back.
            "bytes per s": 2 * _LARGE_BYTES / min(both for _, both in large),
        }
    smp.barrier()
    del probe
    return result


def nccl() -> dict[str, object]:
    """The same for all-reduce between two GPUs."""
    smp.init({"ddp": True})
    group = smp.get_dp_process_group()

    def measure(num_bytes: int, repeats: int) -> float:
        data = torch.ones(num_bytes // 4, device=runtime.current().rank.device)
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            dist.all_reduce(data, group=group)
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - started_s)
        return statistics.median(samples)

    measure(_SMALL_BYTES, 5)  # connects
    small, large = measure(_SMALL_BYTES, _SMALL_REPEATS), measure(_LARGE_BYTES, _LARGE_REPEATS)
    return {
        "operation": "all_reduce",
        "round trip us": small * 1e6,
        "bytes per s": _LARGE_BYTES / large,
    }


def lanes() -> dict[str, object]:
    """Which lane each pair of ranks has, and how fast a tensor of the device gets there and back.

    Its size in bytes is an argument of the command.
    """
    num_bytes = int(sys.argv[2])
    smp.init({"pipeline_parallel_degree": int(os.environ["SMP_WORLD_SIZE"])})
    rank = runtime.current().rank
    assert rank.mailbox is not None and rank.board is not None and rank.exchange is not None
    probe = _C.LinkProbe(rank.mailbox, rank.board)
    measured = []
    for source, destination, lane, why in rank.mailbox.lanes():
        if source > destination:
            continue
        smp.barrier()
        if rank.global_rank == source:
            samples = probe.measure(
                destination, num_bytes, _LARGE_REPEATS, _LIMIT_S, str(rank.device)
            )
            bytes_per_s = 2 * num_bytes / min(both for _, both in samples)
            measured.append([source, destination, lane, why, bytes_per_s])
    smp.barrier()
    del probe
    missed = smp.metrics.server_stats()
    answer = {
        "pairs": measured,
        # Other tensors than those of the lane that is named.
        "missed": missed["lane_times_full"] + missed["lane_times_too_large"],
    }
    everybody = list(range(smp.size()))
    answers = [
        json.loads(a) for a in rank.exchange.all_gather(everybody, json.dumps(answer).encode())
    ]
    return {
        "pairs": [pair for one in answers for pair in one["pairs"]],
        "missed": sum(one["missed"] for one in answers),
    }


_KINDS = {
    "messages": messages,
    "nccl": nccl,
    "lanes": lanes,
    "rates": machine.rates,
    "training": machine.training,
    "sums": machine.sums,
    "pipeline": lambda: machine.pipeline(sys.argv[2]),
    "calls": machine.calls,
}


def main() -> None:
    """Measures; rank 0 prints the result."""
    result = _KINDS[sys.argv[1]]()
    first = smp.rank() == 0
    smp.shutdown()
    if first:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
