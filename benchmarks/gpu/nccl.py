"""Part `nccl`: several ranks on one GPU that NCCL takes for hosts: order, and the end of a peer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.ranks import host_of_its_own, results_of, run_ranks
from tests.dist.grid.cells import Cell
from tests.dist.grid.judging import check
from tests.dist.grid.training import train_cell

#: Layouts with one communicator, and with several that are used at once.
CELLS = (
    Cell(1, 1, 2, "none", "fp32", "none", False),
    Cell(1, 2, 1, "none", "fp32", "none", False),
    Cell(1, 1, 2, "sdp2", "bf16", "none", False),
    Cell(1, 2, 2, "state", "bf16", "each", False),
    Cell(1, 2, 2, "sdp2", "fp32", "none", False),
    Cell(2, 1, 2, "sdp2", "bf16", "none", False),
    Cell(2, 2, 1, "none", "bf16", "none", False),
)
DRY_CELLS = CELLS[:1]
CELL_S = 90.0
#: In which the survivors of a killed rank have to raise.
ABORT_S = 60.0


def variables(kind: str, rank: int) -> dict[str, str]:
    """Returns the environment variables of a rank on a host of its own."""
    return {"SMP_DEVICE": kind, "SMP_CHECK_FIRST_STEP": "0", **host_of_its_own(rank)}


def train(rank: int, cell: Cell) -> Any:
    """Trains as one rank of the grid; returns the rank's record."""
    import smp

    record = train_cell(rank, cell)
    smp.shutdown()
    return record


def order(figures: Figures, cell: Cell) -> None:
    """A layout trains like one process, so all ranks used their communicators in one order."""
    name = f"{cell}: seconds"
    if not figures.has_time(name, 30.0):
        return
    kind = figures.device.kind
    begin = time.monotonic()
    limit_s = min(CELL_S, figures.left_s() - 5.0)
    with figures.measuring(name):
        ended = run_ranks(train, cell.world_size, [cell], limit_s, lambda r: variables(kind, r))
        check(cell, results_of(ended))
        seconds = time.monotonic() - begin
        figures.add(name, seconds, "s", note="losses, gradients and parameters as in one process")


def train_until_killed(rank: int) -> dict[str, Any]:
    """Rank 1 kills itself before its part of a reduction; the others train until they notice."""
    import smp

    smp.init({"ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Linear(64, 64))
    device = "cpu" if os.environ["SMP_DEVICE"] == "cpu" else "cuda"
    x = torch.randn(4, 64, device=device)

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    begin = 0.0
    try:
        for index in range(1000):
            if index == 3:
                smp.barrier()
                begin = time.monotonic()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            # Asks for the reduction, and waits for it on the host as well.
            float(step(x).reduce_mean())
            model.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "s": time.monotonic() - begin}
    return {"error": None}


def abort(figures: Figures) -> None:
    """Measures how long a rank waits for a rank that was killed."""
    kind = figures.device.kind
    name = "after a kill: seconds until the other rank raises"
    limit_s = min(ABORT_S + 40.0, figures.left_s() - 5.0)
    with figures.measuring(name):
        ended = run_ranks(train_until_killed, 2, [], limit_s, lambda r: variables(kind, r))
        survivor, killed = ended
        if killed.status != -signal.SIGKILL:
            figures.fail(name, f"rank 1 was to be killed and ended with status {killed.status}")
            return
        if survivor.hung:
            figures.fail(name, f"rank 0 was still waiting after {limit_s:.0f} s")
            return
        result = survivor.result
        if result is None or result["error"] is None:
            figures.fail(name, f"rank 0 raised nothing and ended with status {survivor.status}")
            return
        note = f"{result['error']}: {result['text'].splitlines()[0][:160]}"
        figures.add(name, result["s"], "s", bound=Limit(most=ABORT_S), note=note)
        # Also the end of the process has to go by without the dead rank.
        figures.add("after a kill: status of the other rank", survivor.status, "", note="0: none")


def body(figures: Figures) -> None:
    abort(figures)
    for cell in DRY_CELLS if figures.device.is_dry else CELLS:
        order(figures, cell)
