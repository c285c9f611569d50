"""Measures the speed of export and import of checkpoints, next to the speed of the disk.

``python benchmarks/interchange.py --folder DISK`` trains a step of a model with Adam, saves it,
and lets contenders take turns: ``write`` and ``fsync`` of as many bytes (``plain``), once for the
model alone and once with its optimizer; ``smp ckpt export`` and ``import`` in both formats; and
``smp.save_huggingface``. Each begins with an idle disk and memory that has to come from the host;
sources are in the page cache.

With several ranks (``smp run -n 2 benchmarks/interchange.py``) the model is a pipeline whose ranks
write at once in ``smp.save_huggingface``, next to plain writes of rank 0 alone, and to one file,
which one rank writes.
"""

from __future__ import annotations

import argparse
import json
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
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smp
from benchmarks import environment
from smp.checkpoint import dcp, dcp_import, exporting

_WRITE_BYTES = 32 << 20
#: Longer than Linux waits before it reports free pages to the host (2 s), and the report.
_REPORTING_S = 4
_WIDTH = 2048


def write_plain(path: Path, num_bytes: int) -> None:
    """Writes some bytes of memory, and waits for the disk."""
    data = memoryview(torch.arange(_WRITE_BYTES // 8).numpy()).cast("B")  # type: ignore[arg-type]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    left = num_bytes
    while left:
        left -= os.write(descriptor, data[: min(left, len(data))])
    os.fsync(descriptor)
    os.close(descriptor)


def settle() -> None:
    """Waits until the disk is idle, and free memory is with the host of a virtual machine.

    Getting it back costs more than the writing. Without the wait only some contenders pay for it.
    """
    os.sync()
    time.sleep(_REPORTING_S)


def save(folder: Path, num_bytes: int) -> smp.DistributedModel:
    """Saves a model and its moments, together about so many bytes."""
    num_layers = max(1, num_bytes // (3 * 4 * _WIDTH * _WIDTH))
    net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    train_step(torch.ones(1, _WIDTH))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    smp.save_checkpoint(folder, "last", model=model, optimizer=optimizer)
    return model


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def run(folder: Path, num_bytes: int, repeats: int, only: list[str]) -> list[dict[str, Any]]:
    model = save(folder / "saved", num_bytes)
    source = folder / "saved" / "last_partial"
    dcp.export(source, folder / "dcp")
    exporting.export(source, folder / "hf")
    of_all, of_model = size_of(folder / "dcp"), size_of(folder / "hf")
    target = folder / "new" / "target"
    contenders: dict[str, Callable[[], Any]] = {
        "plain_all": lambda: write_plain(target, of_all),
        "export_dcp": lambda: dcp.export(source, target),
        "import_dcp": lambda: dcp_import.import_folder(folder / "dcp", target),
        "plain_model": lambda: write_plain(target, of_model),
        "export_hf": lambda: exporting.export(source, target),
        "save_huggingface": lambda: smp.save_huggingface(model, target),
    }
    rows = []
    for repeat in range(-1, repeats):  # the first warms up
        for name, act in contenders.items():
            if only and name not in only and not name.startswith("plain"):
                continue
            target.parent.mkdir()
            settle()
            cpu, begin = time.process_time(), time.monotonic()
            act()
            seconds = time.monotonic() - begin
            row = {
                "contender": name,
                "repeat": repeat,
                "gb_per_s": size_of(target) / seconds / 1e9,
                "cpu_s": time.process_time() - cpu,
            }
            shutil.rmtree(target.parent)
            if repeat >= 0:
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def run_ranks(folder: Path, num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Lets all ranks write at once. Collective over them."""
    model = save(folder / "saved", num_bytes)
    target = folder / "new" / "target"
    smp.save_huggingface(model, folder / "hf")
    smp.barrier()
    of_model, is_first = size_of(folder / "hf"), smp.rank() == 0
    of_file = of_model // (4 * smp.size())  # a rank writes several files
    contenders: dict[str, Callable[[], Any]] = {
        "plain_model": lambda: write_plain(target, of_model) if is_first else None,
        "save_huggingface": lambda: smp.save_huggingface(model, target, max_shard_bytes=of_file),
        "save_in_one_file": lambda: smp.save_huggingface(model, target, max_shard_bytes=of_model),
    }
    rows = []
    for repeat in range(-1, repeats):  # the first warms up
        for name, act in contenders.items():
            if is_first:
                target.parent.mkdir()
                settle()
            smp.barrier()
            cpu, begin = time.process_time(), time.monotonic()
            act()
            smp.barrier()
            seconds = time.monotonic() - begin
            if is_first:
                rate, used_s = size_of(target) / seconds / 1e9, time.process_time() - cpu
                shutil.rmtree(target.parent)
                row = {"contender": name, "repeat": repeat, "gb_per_s": rate, "cpu_s": used_s}
                rows += [row] * (repeat >= 0)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeats; ratios are to the plain writes of the same repeat."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row["contender"], []).append(row["gb_per_s"])
    result: dict[str, Any] = {}
    for name, own in rates.items():
        peer = rates["plain_all" if name.endswith(("all", "dcp")) else "plain_model"]
        result[name] = {
            "gb_per_s": round(statistics.median(own), 3),
            "ratio_to_plain": round(
                statistics.median(a / b for a, b in zip(own, peer, strict=True)), 3
            ),
            "cpu_s": round(
                statistics.median(row["cpu_s"] for row in rows if row["contender"] == name), 2
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--gb", type=float, default=1.0, help="of model and optimizer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", nargs="*", default=[], help="contenders beside plain writes; default: all"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes = int(arguments.gb * 1e9)
    num_ranks = int(os.environ.get("SMP_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    if num_ranks > 1 and arguments.only:
        parser.error("--only is for one rank; leave it out with several")
    smp.init({"pipeline_parallel_degree": num_ranks})
    is_first = smp.rank() == 0
    own = tempfile.mkdtemp(prefix="interchange_", dir=arguments.folder) if is_first else ""
    folder = Path(smp.allgather(own, smp.WORLD)[0])
    try:
        if shutil.disk_usage(folder).free < 5 * num_bytes:
            sys.exit(f"{folder} has too little free space for {arguments.gb} GB")
        if num_ranks > 1:
            rows = run_ranks(folder, num_bytes, arguments.repeats)
        else:
            rows = run(folder, num_bytes, arguments.repeats, arguments.only)
    finally:
        smp.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    if not rows:
        return
    config = {
        "num_ranks": num_ranks,
        "gb": arguments.gb,
        "repeats": arguments.repeats,
        "only": arguments.only,
    }
    print(
        json.dumps(
            {
                "benchmark": "interchange",
                "config": config,
                **environment.describe(),
                **summary(rows),
            }
        )
    )


if __name__ == "__main__":
    main()
