"""Compares the library's cut for uneven devices with all others, on three processes.

``python benchmarks/uneven_devices.py`` trains a chain of equal layers in a pipeline over devices of
speeds 1 : 2 : 1. The steps of all cuts take turns in the same processes. Results: time of the
library's cut over that of the best one, and of the cut for equal devices over the library's; the
same with a limit of memory on the fastest rank, among the cuts that keep it.

Devices are emulated: behind its products, a layer waits as long as a device of the rank's speed
would compute, and the host idles meanwhile, as beside an accelerator. Processes, messages,
schedule and partition are real, and other load of the machine disturbs little.

With ``--quotas`` (as root, on an idle machine) layers do not wait, and control groups of the kernel
let ranks use 0.25, 0.5 and 0.25 of a core. A rank is slow at everything then, also at talking.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from environment import REPO, describe
from run import launch

ROOT = Path("/sys/fs/cgroup")
TIMEOUT_S = 1800
SHARES = (0.25, 0.5, 0.25)
PERIOD_US = 10_000  # of a quota
MOST_OVER_BEST, LEAST_GAIN, LEAST_USED = 1.05, 1.2, 0.9


@contextmanager
def quota(name: str, share: float) -> Iterator[Path]:
    """A control group whose processes may use a share of a core; removed when they have ended.

    Raises:
        OSError: groups cannot be made: this needs root and a hierarchy that can be written.
    """
    quota_us = int(share * PERIOD_US)
    is_second = (ROOT / "cgroup.controllers").exists()
    group = (ROOT if is_second else ROOT / "cpu") / name
    group.mkdir()
    try:
        if is_second:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield group
    finally:
        group.rmdir()


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Times of the library's cuts over those of the best ones, and of the equal cut over them."""
    times = {tuple(map(int, name.split("-"))): ms for name, ms in found["median_ms"].items()}
    equal, chosen, limited = (tuple(found[key]) for key in ("equal", "chosen", "limited"))
    fastest = max(range(len(chosen)), key=chosen.__getitem__)
    # Layers are equal, so the limit is one of their number.
    layer_mb = found["held_mb"][fastest] / chosen[fastest]
    most = int(found["limits_mb"][fastest] / layer_mb)
    allowed = {cut: ms for cut, ms in times.items() if cut[fastest] <= most}
    return {
        "chosen_over_best": times[chosen] / min(times.values()),
        "equal_over_chosen": times[equal] / times[chosen],
        "limited_over_best": times[limited] / min(allowed.values()),
        "equal_over_limited": times[equal] / times[limited],
        "num_cuts": len(times),
        "num_allowed": len(allowed),
        "limited_keeps": float(limited in allowed),
    }


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The result of the worker, in groups of its own."""
    with ExitStack() as stack:
        groups = [
            stack.enter_context(quota(f"smp_uneven_{os.getpid()}_{rank}", share))
            for rank, share in enumerate(SHARES if args.quotas else ())
        ]
        config = {
            "speeds": [share / min(SHARES) for share in SHARES],
            "groups": [str(group) for group in groups],
            "layer_ms": 0.0 if args.quotas else args.layer_ms,
            "rows": 256 if args.quotas else 16,
            "num_layers": args.layers,
            "width": 256,
            "microbatches": args.microbatches,
        }
        arguments = [f"--repeats={args.repeats}", "--warmup=0"]
        (found,) = launch("uneven_worker", len(SHARES), config, os.environ, TIMEOUT_S, arguments)
    return found


def used(found: dict[str, Any]) -> list[float]:
    """The largest part of its quota that each rank got in any cut; 1 on an idle machine."""
    times = found["median_ms"]
    return [
        max(ms / share / times[name] for name, ms in own.items())
        for own, share in zip(found["cpu_ms"], SHARES, strict=True)
    ]


def show(found: dict[str, Any], best: int = 5) -> None:
    times = sorted(found["median_ms"].items(), key=lambda item: item[1])
    print("fastest cuts: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times[:best]))
    for key in ("equal", "chosen", "limited"):
        name = "-".join(map(str, found[key]))
        print(f"{key}: {name}, {found['median_ms'][name]:.0f} ms")
    for key, value in ratios(found).items():
        print(f"    {key}: {value:.4g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quotas", action="store_true", help="of a core, instead of waits")
    parser.add_argument("--layer-ms", type=float, default=24.0, help="forward on a slow device")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=REPO / "build" / "bench" / "uneven_devices.jsonl"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    environment = describe()
    found = measured(args) | {"environment": environment}
    found |= ratios(found)
    args.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    show(found)
    if args.quotas and min(used(found)) < LEAST_USED:
        shares = ", ".join(f"{share:.2f}" for share in used(found))
        print(f"MISSED quotas: others had the cores, ranks got at most {shares} of theirs")
    for name in ("chosen_over_best", "limited_over_best"):
        if found[name] > MOST_OVER_BEST:
            print(f"MISSED {name} {found[name]:.3f} (at most {MOST_OVER_BEST})")
    if found["equal_over_chosen"] < LEAST_GAIN:
        print(f"MISSED equal_over_chosen {found['equal_over_chosen']:.3f} (at least {LEAST_GAIN})")
    print(f"results are in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
