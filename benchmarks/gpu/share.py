"""Part `share`: two pipeline ranks on one GPU, and what a hop of 134 MB over each lane takes."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.ranks import host_of_its_own, results_of, run_ranks
from benchmarks.gpu.rows import Row

#: Seconds after which ranks hang.
RANKS_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a microbatch in bf16, and of the measurement."""

    batch: int = 8
    seq: int = 2048
    hidden: int = 4096
    microbatches: int = 4
    steps: int = 8

    @property
    def hop_bytes(self) -> int:
        return 2 * self.batch * self.seq * self.hidden


TINY = Sizes(2, 8, 16, 4, 2)
#: The safe one first: what it has measured stays if another one fails.
LANES = ("host", "ipc", "nccl")


class Scale(nn.Module):
    """Next to no work on a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mean(nn.Module):
    """A last stage that returns a mean, so that no large tensor comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).float().mean()


class Chain(nn.Module):
    """A model with one hop forward, and one back with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Scale(), Mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def train(rank: int, sizes: Sizes, num_stages: int) -> dict[str, Any]:
    """Seconds of a step with and without backward, and the losses; of one stage or two."""
    import smp

    if "SMP_TEST_LANES" in os.environ:
        import smp_testing  # noqa: F401 - has the lanes that it asks for

    config = {"pipeline_parallel_degree": num_stages, "microbatches": sizes.microbatches}
    smp.init({**config, "auto_partition": False, "default_partition": 0})
    device = "cpu" if os.environ["SMP_DEVICE"] == "cpu" else "cuda"
    chain = Chain().bfloat16()
    smp.set_partition(chain.last, num_stages - 1)
    model = smp.DistributedModel(chain)

    @smp.step
    def backward(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    @smp.step
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    torch.manual_seed(4)
    shape = (sizes.microbatches * sizes.batch, sizes.seq, sizes.hidden)
    x = torch.randn(shape, device=device).bfloat16()
    result: dict[str, Any] = {}
    for name, step in (("backward", backward), ("forward", forward)):
        seconds = []
        for index in range(sizes.steps + 2):
            smp.barrier()
            begin = time.perf_counter()
            outputs = step(x).outputs
            losses = [float(loss) for loss in outputs]  # waits for the device
            if index >= 2:
                seconds.append(time.perf_counter() - begin)
        result[name] = sorted(seconds)[len(seconds) // 2]
        result[f"{name} losses"] = losses
    grads = [p.grad for p in model.local_parameters()]
    result["grads"] = sorted(float(g) for g in grads if g is not None)
    result["stats"] = dict(smp.metrics.server_stats())
    return result


def measure(figures: Figures, sizes: Sizes, alone: dict[str, Any], lane: str) -> None:
    """Two ranks, whose tensors take ``lane``."""
    limit_s = min(RANKS_S, figures.left_s() - 5.0)

    def variables(rank: int) -> dict[str, str]:
        common = variables_of(figures.device.kind)
        return common | lane_variables(lane, figures.device.is_dry, rank)

    two = results_of(run_ranks(train, 2, [sizes, 2], limit_s, variables))
    for way, num_hops in (("forward", 1), ("backward", 2)):
        same = two[0][f"{way} losses"] == alone[f"{way} losses"]
        name = f"{way}, {lane}: losses other than in one process"
        figures.add(name, int(not same), "", bound=Limit(most=0))
        hop = (two[0][way] - alone[way]) / sizes.microbatches / num_hops
        figures.add(
            f"{way}: a hop of {sizes.hop_bytes / 1e6:.0f} MB over {lane}",
            hop * 1e3,
            "ms",
            note=rate(sizes.hop_bytes, hop),
            step_ms=two[0][way] * 1e3,
            one_process_ms=alone[way] * 1e3,
            stats=two[0]["stats"],
        )
    grads = sorted(two[0]["grads"] + two[1]["grads"])
    same = grads == alone["grads"] and len(grads) == 2
    name = f"{lane}: gradients other than in one process"
    figures.add(name, int(not same), "", bound=Limit(most=0))
    sent, missed = (
        sum(rank["stats"][name] for rank in two for name in names)
        for names in (("lane_tensors_sent",), ("lane_times_full", "lane_times_too_large"))
    )
    figures.add(f"{lane}: tensors sent", sent, "", bound=Limit(least=1))
    figures.add(f"{lane}: of them with no free slot", missed, "")


def rate(hop_bytes: int, seconds: float) -> str:
    """Describes the rate of a hop; smp's work around a hop can take longer than the hop."""
    if seconds <= 0:
        return "not longer than the step of one process"
    return f"{hop_bytes / seconds / 1e9:.3g} GB/s, with what smp does around it"


def variables_of(kind: str) -> dict[str, str]:
    """Returns the environment variables of a rank."""
    return {"SMP_DEVICE": kind, "SMP_SHARE_GPU": "1", "SMP_CHECK_FIRST_STEP": "0"}


def lane_variables(lane: str, is_dry: bool, rank: int) -> dict[str, str]:
    """Returns variables of a rank whose tensors take ``lane``; a dry run's lanes are on the CPU.

    NCCL refuses two ranks on one device of a host, so each of its ranks gets a host of its own.
    """
    variables = {"SMP_LANE": lane}
    if is_dry:
        variables["SMP_TEST_LANES"] = "1:100:4:ring:meet"
    return variables | (host_of_its_own(rank) if lane == "nccl" else {})


@functools.cache
def measured_alone(kind: str, sizes: Sizes) -> dict[str, Any]:
    """Returns what one process measures, once in a process of rows."""
    variables = variables_of(kind)
    [alone] = results_of(run_ranks(train, 1, [sizes, 1], RANKS_S, lambda rank: variables))
    found: dict[str, Any] = alone
    return found


def lane_row(figures: Figures, lane: str) -> None:
    """Measures one lane."""
    sizes = TINY if figures.device.is_dry else Sizes()
    measure(figures, sizes, measured_alone(figures.device.kind, sizes), lane)


def rows(part: str, is_dry: bool) -> list[Row]:
    return [
        Row(lane, functools.partial(lane_row, lane=lane), 30.0, 2 * RANKS_S + 20.0)
        for lane in LANES
    ]
