"""Measures what each of many ranks costs: seconds to begin, meet, end; sockets, threads, memory.

    python benchmarks/scale.py --processes 16 32            # JSON lines on the standard output
    python benchmarks/scale.py --processes 64 --hosts 8 --config '{"ddp": true, "partitions": 2}'

The processes are forked from a process that has imported everything. So the imports, which take
longer than all that is measured, are paid for once, and `private_mb` is what a rank has beyond
them. With ``--hosts`` ranks believe that they are on so many hosts, and messages between these go
through sockets on the loopback device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which would start threads

import environment
import torch
import torch._dynamo  # which a wrapped model imports
from torch import nn

import smp

_NUM_BARRIERS = 5
_LIMIT_S = 480.0


def resources() -> dict[str, float]:
    """Counts this process's open descriptors, sockets among them, threads and private MB."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    private_kb = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            private_kb += int(line.split()[1])
    return {
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": len(os.listdir("/proc/self/task")),
        "private_mb": private_kb / 1024,
    }


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def train(steps: int) -> None:
    """A tiny model, so that everything that a step opens is open."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    for _ in range(steps):
        step(torch.ones(4, 8))
        optimizer.step()
        optimizer.zero_grad()


def run_rank(config: dict[str, Any], steps: int) -> dict[str, float]:
    """The life of one rank: `smp.init`, barriers, steps, `smp.shutdown`."""
    before = resources()
    result = {"init_s": timed(lambda: smp.init(config))}
    result["barrier_s"] = statistics.median(timed(smp.barrier) for _ in range(_NUM_BARRIERS))
    for name, value in resources().items():
        result[f"init_{name}"] = value - before[name]
    smp.barrier()  # no rank trains while others are being measured
    if steps > 0:
        result["steps_s"] = timed(lambda: train(steps))
        smp.barrier()
        for name, value in resources().items():
            result[f"step_{name}"] = value - before[name]
        smp.barrier()
    result["shutdown_s"] = timed(smp.shutdown)
    return result


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start_rank(rank: int, args: argparse.Namespace, size: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    local_size = max(1, size // args.hosts)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        SMP_LOG_LEVEL=os.environ.get("SMP_LOG_LEVEL", "warning"),
    )
    if args.hosts > 1:
        os.environ["SMP_HOSTNAME"] = f"host{rank // local_size}"
    status = 1
    try:
        result = run_rank(args.config, args.steps)
        (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def measure(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Runs one world of `size` ranks; returns median and maximum over the ranks' figures."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="smp-scale-") as folder:
        pids = [_start_rank(rank, args, size, port, Path(folder)) for rank in range(size)]
        running, failed = set(pids), 0
        deadline = time.monotonic() + _LIMIT_S
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > deadline:
                    for one in running:
                        os.kill(one, signal.SIGKILL)
                time.sleep(0.05)
                continue
            running.discard(pid)
            failed += status != 0
        if failed:
            raise SystemExit(f"{failed} of {size} processes failed")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    result: dict[str, Any] = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        result[name] = round(statistics.median(values), 4)
        result[f"{name}_max"] = round(max(values), 4)
    result["sockets_total"] = sum(rank["init_sockets"] for rank in ranks)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--config", type=json.loads, default={"ddp": True}, help="of smp.init")
    parser.add_argument("--hosts", type=int, default=1, help="hosts that the ranks believe in")
    parser.add_argument("--steps", type=int, default=2, help="of a tiny model; 0: none")
    args = parser.parse_args()
    about = environment.describe()
    for size in args.processes:
        if size % args.hosts != 0:
            parser.error(f"{size} processes are no multiple of {args.hosts} hosts")
        about["load_average"] = os.getloadavg()[0]
        result = measure(args, size)
        line = {
            "benchmark": "scale",
            "num_processes": size,
            "hosts": args.hosts,
            "steps": args.steps,
            "config": args.config,
            **result,
            **about,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
