"""`smp.save_checkpoint` of a whole job, blocking and in the background, against plain writes.

Each rank writes its part of the state, which takes 12 bytes per parameter over all ranks: sharded
parameters and the moments of AdamW. ``plain`` writes as many bytes with ``write`` and one
``fsync``, all ranks at once. The stall of a save in the background is the time for which training
waits on the rank where that is longest: until the call returns, and in the training step that comes
next, before the update, while the optimizer's state is still being copied. It is a share of the
time that a save takes while nothing else runs.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import _status_mb as status_mb
from torch import Tensor, distributed, nn
from workers import Worker

import smp

WIDTH = 2880
FOLDER = Path(__file__).resolve().parents[1] / "build" / "bench" / "saved"
PIECE = bytes(32 << 20)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds until all ranks are done, and the growth of resident memory at its peak in MB."""
    distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    resident = status_mb("VmRSS")
    begin = time.monotonic()
    action()
    distributed.barrier()
    return time.monotonic() - begin, status_mb("VmHWM") - resident


def write_plain(num_bytes: int) -> None:
    path = FOLDER / f"plain{smp.rank()}"
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, num_bytes, len(PIECE)):
            file.write(PIECE[: num_bytes - begin])
        os.fsync(file.fileno())
    path.unlink()


def most(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return float(tensor)


def main() -> None:
    worker = Worker("checkpoint_save")
    size = int(os.environ["WORLD_SIZE"])
    worker.start({"sharded_data_parallel_degree": size, "sdp_param_persistence_threshold": 0})
    num_layers = round(worker.config.get("gb", 2.0) * 1e9 / 12 / WIDTH**2)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-6))

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    def train() -> None:
        train_step(torch.ones(1, WIDTH))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    handles: list[Any] = []

    def save(tag: str, blocking: bool) -> None:
        handle = smp.save_checkpoint(
            FOLDER, tag, model=model, optimizer=optimizer, blocking=blocking,
            num_kept_partial_checkpoints=1,
        )  # fmt: skip
        handles.append(handle)

    def finish() -> None:
        handles[-1].wait()
        distributed.barrier()

    def save_behind(tag: str) -> None:
        save(tag, False)
        finish()

    if smp.rank() == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
    distributed.barrier()
    train()
    step_s = most(min(timed(train)[0] for _ in range(3)))
    num_bytes = 12 * num_layers * WIDTH**2 // size
    seconds: dict[str, list[float]] = {"plain": [], "blocking": [], "background": []}
    calls: list[float] = []
    stalls: list[float] = []
    steps: list[float] = []  # while a save goes on
    _, first_mb = timed(lambda: save_behind("first"))  # its memory is used again by later ones
    extra = {"blocking": 0.0, "background": most(first_mb)}
    for repeat in range(worker.repeats):
        seconds["plain"].append(most(timed(lambda: write_plain(num_bytes))[0]))
        taken, grown = timed(functools.partial(save, f"blocking{repeat}", True))
        seconds["blocking"].append(most(taken))
        extra["blocking"] = max(extra["blocking"], most(grown))
        taken, grown = timed(functools.partial(save_behind, f"background{repeat}"))
        taken = most(taken)
        seconds["background"].append(taken)
        extra["background"] = max(extra["background"], most(grown))
        distributed.barrier()
        save(f"trained{repeat}", False)
        called_s = handles[-1].stall_s()
        steps.append(most(timed(train)[0]))
        finish()
        calls.append(most(called_s) / taken)
        stalls.append(most(handles[-1].stall_s()) / taken)
    plain = statistics.median(seconds["plain"])
    of_training = {
        "call": statistics.median(calls),
        "stall": statistics.median(stalls),
        "step_during_save_s": statistics.median(steps),
    }
    for name in ("blocking", "background"):
        median = statistics.median(seconds[name])
        worker.emit(
            name,
            {
                "median_s": median,
                "gb_per_s": num_bytes * size / median / 1e9,
                "bandwidth_to_plain": plain / median,
                "extra_mb": extra[name],
                "rank_state_mb": num_bytes / 2**20,
                "step_s": step_s,
                **(of_training if name == "background" else {}),
            },
        )
    smp.barrier()
    if smp.rank() == 0:
        shutil.rmtree(FOLDER)
    smp.shutdown()


if __name__ == "__main__":
    main()
