"""Sums over several hosts: by hosts, beside a ring of Gloo over all ranks, and beside the bound.

    python benchmarks/hosts.py                    # JSON lines on the standard output
    python benchmarks/hosts.py --mbit 200 --layouts 2x2 --mib 16

Hosts are namespaces of this machine (`tests/hosts/network.py`, which needs root); each sends at
most so many Mbit/s to the others. The bound is what one rank per host would have to send, at that
speed. Both ways take turns, in jobs of their own; a sum takes from a barrier until the slowest rank
has it. Bytes are those of the interface, with all headers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SMP_DEVICE", "cpu")
REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO))

import environment  # noqa: E402

from tests.dist.pool import Pool  # noqa: E402
from tests.hosts.network import Network  # noqa: E402
from tests.hosts.ranks import HostRanks  # noqa: E402
from tests.hosts.traffic import Summed, sum_replicas  # noqa: E402

WAYS = ("hierarchical", "flat")


def measure(
    pool: Pool, hosts: int, per_host: int, way: str, transport: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Of one job: seconds of each sum on its slowest rank, bytes that a host has sent per sum."""
    with Network(hosts, mbit=args.mbit) as network:
        results: list[Summed] = HostRanks(network, pool, per_host).run(
            hosts * per_host,
            sum_replicas,
            way,
            args.mib << 20,
            args.repeats,
            timeout=300.0,
            env={"SMP_TRANSPORT": transport},
        )
    assert bool(results[0].by_hosts) == (way == "hierarchical")
    sent = max(result.measured.across.sent for result in results)
    return {
        "seconds": [max(times) for times in zip(*(r.seconds for r in results), strict=True)],
        "sent_mb": sent / args.repeats / 1e6,
    }


def compare(
    pool: Pool, hosts: int, per_host: int, transport: str, args: argparse.Namespace
) -> None:
    """Prints a line for each way."""
    bytes_of_bound = (args.mib << 20) * 2 * (hosts - 1) / hosts
    bound_s = bytes_of_bound * 8 / (args.mbit * 1e6)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent_mb: dict[str, float] = {}
    for _ in range(args.jobs):
        for way in WAYS:
            job = measure(pool, hosts, per_host, way, transport, args)
            seconds[way] += job["seconds"]
            sent_mb[way] = job["sent_mb"]
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for way in WAYS:
        line = {
            "benchmark": "hosts",
            "way": way,
            "hosts": hosts,
            "per_host": per_host,
            "transport": transport,
            "mib": args.mib,
            "mbit": args.mbit,
            "median_s": medians[way],
            "min_s": min(seconds[way]),
            "max_s": max(seconds[way]),
            "bound_s": bound_s,
            "ratio_to_bound": medians[way] / bound_s,
            "flat_over_this": medians["flat"] / medians[way],
            "sent_mb": sent_mb[way],
            "sent_to_bound": sent_mb[way] * 1e6 / bytes_of_bound,
            "num_sums": len(seconds[way]),
            **environment.describe(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "2x4", "4x2"])
    parser.add_argument("--transports", nargs="+", default=["gloo"], choices=["gloo", "tcp"])
    parser.add_argument("--mib", type=int, default=64, help="of the tensor")
    parser.add_argument("--mbit", type=float, default=1000.0, help="that a host can send")
    parser.add_argument("--repeats", type=int, default=5, help="sums of a job")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    pool = Pool()
    try:
        for layout in args.layouts:
            hosts, per_host = map(int, layout.split("x"))
            for transport in args.transports:
                compare(pool, hosts, per_host, transport, args)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
