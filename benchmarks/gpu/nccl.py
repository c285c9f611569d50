"""Part `nccl`: several ranks on one GPU that NCCL takes for hosts: order, and the end of a peer."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.processes import TimedOut, words_of
from benchmarks.gpu.ranks import host_of_its_own, results_of, run_ranks
from benchmarks.gpu.rows import Row
from tests.dist.grid.cells import Cell
from tests.dist.grid.judging import check
from tests.dist.grid.training import train_cell

#: Layouts with one communicator, and with several that are used at once; the cheapest first.
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
#: Seconds after which a layout hangs, for each of its ranks: kernels that wait for those of other
#: processes take turns on the GPU.
RANK_S = 60.0
#: In which the survivors of a killed rank have to raise.
ABORT_S = 60.0
#: Whether a rank survives the end of its peer depends on which of two threads is faster, so one
#: kill shows little.
KILLS = 20
#: Kills before the layouts of more than two ranks.
FIRST_KILLS = 3


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
    kind = figures.device.kind
    begin = time.monotonic()
    limit_s = min(limit_of(cell), figures.left_s() - 5.0)
    ended = run_ranks(train, cell.world_size, [cell], limit_s, lambda r: variables(kind, r))
    check(cell, results_of(ended))
    seconds = time.monotonic() - begin
    note = "losses, gradients and parameters as in one process"
    figures.add(f"{cell}: seconds", seconds, "s", note=note)


def limit_of(cell: Cell) -> float:
    """Seconds after which a layout hangs."""
    return RANK_S * cell.world_size


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


def abort(figures: Figures, kill: int) -> None:
    """Measures how long a rank waits for a rank that was killed."""
    kind = figures.device.kind
    name = f"kill {kill}: seconds until the other rank raises"
    limit_s = min(ABORT_S + 40.0, figures.left_s() - 5.0)
    survivor, killed = run_ranks(
        train_until_killed, 2, [], limit_s, lambda rank: variables(kind, rank)
    )
    if killed.status != -signal.SIGKILL or killed.hung:
        figures.fail(name, f"rank 1 was to kill itself: {words_of(killed.status)}")
        return
    if survivor.hung:
        raise TimedOut(f"rank 0 was still waiting after {limit_s:.0f} s")
    result = survivor.result
    if result is None or result["error"] is None:
        figures.fail(name, f"rank 0 raised nothing and ended with {words_of(survivor.status)}")
        return
    note = f"{result['error']}: {result['text'].splitlines()[0][:160]}"
    figures.add(name, result["s"], "s", bound=Limit(most=ABORT_S), note=note)
    # Also the end of the process has to go by without the dead rank.
    figures.add(
        f"kill {kill}: status of the other rank",
        survivor.status,
        "",
        bound=Limit(most=0, least=0),
        note=words_of(survivor.status),
    )


def rows(part: str, is_dry: bool) -> list[Row]:
    cells = [
        Row(str(cell), functools.partial(order, cell=cell), 30.0, limit_of(cell) + 60.0)
        for cell in (DRY_CELLS if is_dry else CELLS)
    ]
    kills = [
        Row(f"kill {kill}", functools.partial(abort, kill=kill), 45.0, ABORT_S + 60.0)
        for kill in range(1, KILLS + 1)
    ]
    num_pairs = sum(cell.world_size == 2 for cell in CELLS)
    return [*cells[:num_pairs], *kills[:FIRST_KILLS], *cells[num_pairs:], *kills[FIRST_KILLS:]]
