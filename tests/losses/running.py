"""Runs losses in a layout, and compares them with one process on the whole batch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.losses.case import (
    DIFFERENT,
    EQUAL,
    EQUAL_WARNED,
    ERROR,
    REFUSED,
    SAMPLES,
    WARNED,
    Batch,
    Case,
)

MICROBATCHES = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "dp 2": (2, {}),
    "sdp 2": (
        2,
        {
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 0.0,
        },
    ),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "pp 2 x dp 2": (4, {"pipeline_parallel_degree": 2}),
}


@dataclass(frozen=True)
class Result:
    """A result of one loss in one layout.

    Attributes:
        name: name of the case.
        layout: layout of the ranks.
        has_weight: the step function was given a weight.
        outcome: equal, warned, refused, or a defect.
        error: largest difference of a gradient, relative to the largest gradient.
        words: first words of what was logged or raised.
    """

    name: str
    layout: str
    has_weight: bool
    outcome: str
    error: float = 0.0
    words: str = ""


def made(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.model().double().train()


def alone(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and state after a step of SGD in one process: the script that people have."""
    model = made(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = case.loss(model, **case.batch())
    loss.backward()
    optimizer.step()
    return float(loss.detach()), dict(model.state_dict())


def part_of(case: Case, batch: Batch, number: int, count: int) -> Batch:
    """Returns what the batch of one replica of several is."""
    per_rank = SAMPLES // count
    first = number * per_rank

    def part(value: Any, axis: int) -> Any:
        if isinstance(value, Tensor) and value.dim() > axis:
            times, rest = divmod(value.shape[axis], SAMPLES)
            if times and not rest:
                return value.narrow(axis, first * times, per_rank * times)
        if isinstance(value, list | tuple) and len(value) == SAMPLES:
            return value[first : first + per_rank]
        return value.part(first, first + per_rank) if hasattr(value, "part") else value

    return {
        name: value if name in case.whole else part(value, case.axes.get(name, 0))
        for name, value in batch.items()
    }


class _Heard(logging.Handler):
    """Keeps warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _hearing() -> Iterator[list[str]]:
    heard, logger = _Heard(), logging.getLogger("smp")
    logger.addHandler(heard)
    try:
        yield heard.texts
    finally:
        logger.removeHandler(heard)


def run(pool: Pool, layout: str, chosen: list[tuple[str, bool]]) -> list[Result]:
    """Runs cases, with or without their weight, in one go on the ranks of a layout."""
    size = LAYOUTS[layout][0]
    results: list[Result] = pool.run(size, run_cases, layout, chosen, timeout=30 + 5 * len(chosen))[
        0
    ]
    return results


def run_cases(rank: int, layout: str, chosen: list[tuple[str, bool]]) -> list[Result]:
    """Runs cases one after the other; results of rank 0 count."""
    from tests.losses.catalogue import CASES

    torch.set_num_threads(1)
    place = os.environ["SMP_RENDEZVOUS"]
    results = []
    for number, (name, has_weight) in enumerate(chosen):
        os.environ["SMP_RENDEZVOUS"] = f"{place}-{number}"
        results.append(run_case(CASES[name], layout, has_weight))
    return results


def run_case(case: Case, layout: str, has_weight: bool) -> Result:
    import smp

    key = (case.name, layout, has_weight)
    try:
        with _hearing() as heard:
            loss, state = _train(case, LAYOUTS[layout][1], has_weight)
    except Exception as error:
        text = str(error).split("] ", 1)[-1]
        known = isinstance(error, ValueError | RuntimeError) and "smp" in type(error).__module__
        stuck = "deadlock" in text or "disagree in a split layer" in text
        refused = (known or "global_rank" in str(error)) and not stuck
        words = f"{type(error).__name__}: {text}"[:300]
        return Result(*key, REFUSED if refused else ERROR, words=words)
    finally:
        smp.shutdown()
    expected_loss, expected = alone(case)
    missing = sorted(expected.keys() - state.keys())
    if missing:
        return Result(*key, ERROR, words=f"not in the state: {missing}"[:300])
    error = _error(state, expected, dict(made(case).state_dict()))
    error = max(error, abs(loss - expected_loss) / max(abs(expected_loss), 1e-9))
    words = " | ".join(text for text in heard if "microbatches" in text or "batch" in text)[:300]
    if error <= case.tolerance:
        return Result(*key, EQUAL_WARNED if words else EQUAL, error, words)
    return Result(*key, WARNED if words else DIFFERENT, error, words)


def _train(case: Case, config: Mapping[str, Any], has_weight: bool) -> tuple[float, Any]:
    import smp

    smp.init({"microbatches": MICROBATCHES, "ddp": True, **config})
    plain = made(case)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(plain, True)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    options: dict[str, Any] = {"weight": case.weigh} if has_weight else {}

    @smp.step(input_split_axes=case.axes, non_split_inputs=case.whole, **options)
    def train(**batch: Any) -> Tensor:
        loss = case.loss(model, **batch)
        model.backward(loss)
        return loss

    own = part_of(case, case.batch(), smp.dp_rank(), smp.dp_size())
    mean = train(**own).reduce_mean().detach().double()
    optimizer.step()
    losses = smp.allgather(float(mean), smp.WORLD)
    return sum(losses) / len(losses), plain_names(model.state_dict(), made(case))


def plain_names(state: dict[str, Tensor], plain: nn.Module) -> dict[str, Tensor]:
    """Returns a state with the names of the plain model, where smp.nn has taken its place."""
    from smp.world.wrapped import module_manager

    for to_plain, _ in module_manager.translate_functions:
        if not {name for name, _ in plain.named_parameters()} <= state.keys():
            state = to_plain(state)
    return state


def _error(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], begin: Mapping[str, Tensor]
) -> float:
    """Returns the largest difference, by the largest change of a step."""
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    largest = max(float((expected[n] - begin[n]).abs().max()) for n in floats)
    assert largest > 0
    return max(float((state[n] - expected[n]).abs().max()) for n in floats) / largest
