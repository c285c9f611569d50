"""Models whose code does what few models do: the numbers of one process, or a true reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.reference.tolerances import assert_close

MICROBATCHES = 2


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def plain_gradients(make: Any, **options: Any) -> dict[str, Tensor]:
    """Mean over microbatches, in one process."""
    torch.manual_seed(0)
    model = make(**options)
    for piece in batch().chunk(MICROBATCHES):
        (model(piece) / MICROBATCHES).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(
    rank: int, make: Any, config: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """Of this rank's parameters after one step, and how many calls went to another rank."""
    import smp

    smp.init({"microbatches": MICROBATCHES, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(make(**options))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    train_step(batch())
    grads = {
        name.removeprefix("module."): p.grad.clone()
        for name, p in model.local_named_parameters()
        if p.grad is not None
    }
    calls = smp.metrics.server_stats()["remote_calls"] if smp.pp_size() > 1 else 0
    smp.shutdown()
    return grads, int(calls)


def check_equal(pool: Pool, make: Any, pp: int = 2, **options: Any) -> None:
    config = {"pipeline_parallel_degree": pp, "ddp": False}
    parts = pool.run(pp, gradients, make, config, options)
    assert sum(calls for _, calls in parts) > 0, "all of it ran on one rank"
    got = {name: grad for part, _ in parts for name, grad in part.items()}
    expected = plain_gradients(make, **options)
    assert {n: g.dtype for n, g in got.items()} == {n: g.dtype for n, g in expected.items()}
    assert_close(got, expected, torch.float32, make.__name__)


# ---- forwards that convert their layers ----------------------------------------------


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float64)
        return self.classifier(x.double()).softmax(-1).to(x.dtype)


class Mixture(nn.Module):
    """Two routers that cast, and experts; values decide what runs if asked for."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.routers = nn.ModuleList(Router() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.reads_values = reads_values

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for idx, router in enumerate(self.routers):
            weights = router(x)
            if self.reads_values and float(x.detach().abs().sum()) < 0:
                weights = weights * 2
            experts = list(self.experts)[3 * idx : 3 * idx + 3]
            x = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
        return x.pow(2).mean()


@pytest.mark.parametrize("reads_values", [False, True])
def test_routers_that_cast_their_classifier_train_like_one_process(
    pool: Pool, reads_values: bool
) -> None:
    # With values read the trace runs for real, and must not leave its casts to rank 0 alone.
    check_equal(pool, Mixture, reads_values=reads_values)


def test_a_parameter_that_is_cast_in_a_step_without_a_trace_is_refused(pool: Pool) -> None:
    outcomes = pool.outcomes(2, gradients, Mixture, {"ddp": True}, {})
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert "routers.0.classifier.weight" in outcome.message
        assert "model.get_submodule('routers.0.classifier').to(torch.float64)" in outcome.message
