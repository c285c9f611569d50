"""Sums over several hosts: by hosts, beside a ring over all ranks, and beside the bound.

    python benchmarks/hosts.py                    # JSON lines on the standard output
    python benchmarks/hosts.py --mbit 200 --layouts 2x2 --mib 16
    python benchmarks/hosts.py --transports gloo tcp --layouts 2x1 1x4 --ways flat

Hosts are namespaces of this machine (`tests/hosts/network.py`, which needs root); each sends at
most so many Mbit/s to the others. The bound is what one rank per host would have to send, at that
speed. All ways and transports take turns, in jobs of their own; a sum takes from a barrier until
the slowest rank has it. Bytes are those of the interface, with all headers. On one host (1x4) the
ranks share no memory, and what they send goes over its loopback, which has no limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class Contender:
    """A way over a transport, and what was measured of it."""

    transport: str
    way: str
    seconds: list[float] = field(default_factory=list)
    """Of each sum, on its slowest rank."""
    sent_mb: float = 0.0
    """By the host that sends the most, per sum of the last job."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(
    pool: Pool, hosts: int, per_host: int, contender: Contender, args: argparse.Namespace
) -> None:
    """Measures one job."""
    env = {"SMP_TRANSPORT": contender.transport, **({"SMP_SHM": "0"} if hosts == 1 else {})}
    with Network(hosts, mbit=args.mbit) as network:
        results: list[Summed] = HostRanks(network, pool, per_host).run(
            hosts * per_host,
            sum_replicas,
            contender.way,
            args.mib << 20,
            args.repeats,
            timeout=300.0,
            env=env,
        )
    assert bool(results[0].by_hosts) == (contender.way == "hierarchical")
    sent = max(result.measured.across.sent for result in results)
    contender.seconds += [max(times) for times in zip(*(r.seconds for r in results), strict=True)]
    contender.sent_mb = sent / args.repeats / 1e6


def compare(pool: Pool, hosts: int, per_host: int, args: argparse.Namespace) -> None:
    """Prints a line for each way over each transport."""
    contenders = {key: Contender(*key) for key in itertools.product(args.transports, args.ways)}
    for _ in range(args.jobs):
        for contender in contenders.values():
            measure(pool, hosts, per_host, contender, args)
    for (transport, way), contender in contenders.items():
        line = {
            "benchmark": "hosts",
            "way": way,
            "hosts": hosts,
            "per_host": per_host,
            "transport": transport,
            "mib": args.mib,
            "mbit": args.mbit,
            "median_s": contender.median_s,
            "min_s": min(contender.seconds),
            "max_s": max(contender.seconds),
            **beside_bound(contender, hosts, args),
            **beside_others(contender, contenders),
            "num_sums": len(contender.seconds),
            **environment.describe(),
        }
        print(json.dumps(line), flush=True)


def beside_bound(contender: Contender, hosts: int, args: argparse.Namespace) -> dict[str, float]:
    """The bound of a layout, which one host does not have."""
    num_bytes = (args.mib << 20) * 2 * (hosts - 1) / hosts
    if num_bytes == 0:
        return {}
    bound_s = num_bytes * 8 / (args.mbit * 1e6)
    return {
        "bound_s": bound_s,
        "ratio_to_bound": contender.median_s / bound_s,
        "sent_mb": contender.sent_mb,
        "sent_to_bound": contender.sent_mb * 1e6 / num_bytes,
    }


def beside_others(
    contender: Contender, contenders: dict[tuple[str, str], Contender]
) -> dict[str, float]:
    """Returns times of the ring on this transport and Gloo on this way, divided by this time."""
    flat = contenders.get((contender.transport, "flat"))
    gloo = contenders.get(("gloo", contender.way))
    return {
        **({"flat_over_this": flat.median_s / contender.median_s} if flat else {}),
        **({"gloo_over_this": gloo.median_s / contender.median_s} if gloo else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "2x4", "4x2"])
    parser.add_argument("--transports", nargs="+", default=["gloo"], choices=["gloo", "tcp"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--mib", type=int, default=64, help="of the tensor")
    parser.add_argument("--mbit", type=float, default=1000.0, help="that a host can send")
    parser.add_argument("--repeats", type=int, default=5, help="sums of a job")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    pool = Pool()
    try:
        for layout in args.layouts:
            hosts, per_host = map(int, layout.split("x"))
            compare(pool, hosts, per_host, args)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
