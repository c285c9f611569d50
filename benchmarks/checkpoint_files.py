"""Measures speed and memory of writing checkpoint files, next to the speed of the disk.

``python benchmarks/checkpoint_files.py --folder DISK`` starts processes that write their part of a
state at the same time: with ``write`` and ``fsync`` of the same bytes (``plain``), with
``archive.write``, with ``torch.save``, with the latter without its checksums, and with the latter
into the file writer of ``archive.write``, for the checksums of a manifest. They take turns; a
repeat begins with an idle disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from smp import _C
from smp.checkpoint import archive

_WRITE_BYTES = 32 << 20

State = dict[str, torch.Tensor]


def make_state(num_bytes: int) -> State:
    """Tensors as of a model with its optimizer: large ones, and for each a small one."""
    large = 16 << 20
    state: State = {}
    while sum(t.nbytes for t in state.values()) + large <= num_bytes:
        idx = len(state) // 2
        state[f"layers.{idx}.weight"] = torch.full((large // 4,), float(idx))
        state[f"layers.{idx}.bias"] = torch.full((1024,), float(idx))
    return state


def write_plain(path: Path, state: State) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in state.values():
        view = memoryview(tensor.numpy()).cast("B")
        for begin in range(0, len(view), _WRITE_BYTES):
            piece = view[begin : begin + _WRITE_BYTES]
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    os.fsync(descriptor)
    os.close(descriptor)


def write_archive(path: Path, state: State) -> None:
    archive.write(path, state)


def write_torch(path: Path, state: State) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_torch_unchecked(path: Path, state: State) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_torch(path, state)
    finally:
        torch.serialization.set_crc32_options(True)


class _Sink:
    """A file for ``torch.save`` that fills a file writer."""

    def __init__(self, writer: _C.FileWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> int:
        self._writer.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass


def write_torch_into_writer(path: Path, state: State) -> None:
    options = archive.WriteOptions()
    writer = _C.FileWriter(
        str(path), options.buffer_bytes, options.num_buffers, options.chunk_bytes
    )
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, _Sink(writer))  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(True)
    writer.finish()


CONTENDERS: dict[str, Callable[[Path, State], None]] = {
    "plain": write_plain,
    "archive": write_archive,
    "torch_save": write_torch,
    "torch_unchecked": write_torch_unchecked,
    "torch_into_writer": write_torch_into_writer,
}


def _status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def measure(path: Path, state: State, write: Callable[[Path, State], None]) -> dict[str, float]:
    """Seconds, CPU seconds, and the growth of resident memory at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    resident = _status_mb("VmRSS")
    cpu = time.process_time()
    begin = time.monotonic()
    write(path, state)
    return {
        "begin": begin,
        "end": time.monotonic(),
        "cpu_s": time.process_time() - cpu,
        "extra_mb": _status_mb("VmHWM") - resident,
    }


def work(rank: int, folder: Path, num_bytes: int, barrier: Any, orders: Any, results: Any) -> None:
    torch.set_num_threads(1)
    state = make_state(num_bytes)
    while (name := orders.get()) is not None:
        path = folder / f"{name}_{rank}.pt"
        barrier.wait()
        result = measure(path, state, CONTENDERS[name])
        result["num_bytes"] = path.stat().st_size
        barrier.wait()
        path.unlink()
        results.put(result)


def run(folder: Path, num_processes: int, num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    orders = [context.SimpleQueue() for _ in range(num_processes)]
    results = context.SimpleQueue()
    processes = [
        context.Process(
            target=work,
            args=(rank, folder, num_bytes // num_processes, barrier, orders[rank], results),
        )
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    rows = []
    for repeat in range(-1, repeats):  # the first warms up
        for name in CONTENDERS:
            os.sync()
            for order in orders:
                order.put(name)
            ranks = [results.get() for _ in processes]
            seconds = max(r["end"] for r in ranks) - min(r["begin"] for r in ranks)
            row = {
                "contender": name,
                "repeat": repeat,
                "gb_per_s": sum(r["num_bytes"] for r in ranks) / seconds / 1e9,
                "cpu_s": sum(r["cpu_s"] for r in ranks),
                "extra_mb": max(r["extra_mb"] for r in ranks),
            }
            if repeat >= 0:
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    for order in orders:
        order.put(None)
    for process in processes:
        process.join()
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeats; ratios are of the same repeat."""
    result: dict[str, Any] = {}
    plain = [row["gb_per_s"] for row in rows if row["contender"] == "plain"]
    for name in CONTENDERS:
        own = [row for row in rows if row["contender"] == name]
        rates = [row["gb_per_s"] for row in own]
        result[name] = {
            "gb_per_s": round(statistics.median(rates), 3),
            "ratio_to_plain": round(
                statistics.median(a / b for a, b in zip(rates, plain, strict=True)), 3
            ),
            "cpu_s": round(statistics.median(row["cpu_s"] for row in own), 2),
            "extra_mb": round(max(row["extra_mb"] for row in own)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--gb", type=float, default=2.0, help="of all processes together")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    num_bytes = int(arguments.gb * 1e9)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_files_", dir=arguments.folder))
    try:
        if shutil.disk_usage(folder).free < 3 * num_bytes:
            sys.exit(f"{folder} has too little free space for files of {arguments.gb} GB")
        rows = run(folder, arguments.processes, num_bytes, arguments.repeats)
    finally:
        shutil.rmtree(folder)
    config = {"gb": arguments.gb, "processes": arguments.processes, "repeats": arguments.repeats}
    print(
        json.dumps(
            {
                "benchmark": "checkpoint_files",
                "config": config,
                **environment.describe(),
                **summary(rows),
            }
        )
    )


if __name__ == "__main__":
    main()
