"""Ranks whose own samples choose different split layers of one shape are told, not mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of
from tests.reference.models import randomise_

WIDTH = 8
PLAN = {"experts.*": "colwise_gather_output"}


class Routed(nn.Module):
    """A batch goes to one of two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts[int(x[0, 0] > 0)]
        return torch.tanh(chosen(x)).square().mean()


def losses_of(
    rank: int, signs: list[list[float]], settings: dict[str, Any], plan: dict[str, str] | None
) -> list[float]:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True, **settings})
    plain = randomise_(Routed().double(), 1)
    if plan is None:
        smp.set_tensor_parallelism(plain)
    else:
        smp.set_tensor_parallelism(plain, plan=plan)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    losses = [train_step(batch(sign)).reduce_mean().item() for sign in signs[rank]]
    assert all(p.shape[-1] < WIDTH or p.shape[0] < WIDTH for p in model.parameters() if p.dim() > 1)
    return losses


def batch(sign: float) -> Tensor:
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[:, 0] = sign
    return x


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("plan", [None, PLAN], ids=["all", "plan"])
@pytest.mark.parametrize("optimize", ["memory", "speed"])
def test_layers_that_differ_between_ranks_are_named(
    pool: Pool, optimize: str, plan: dict[str, str] | None
) -> None:
    message = r"disagree in a split layer .*in 'experts\.1'.*in 'experts\.0'"
    signs = [[1.0, 1.0], [1.0, -1.0]]
    with pytest.raises(RankFailure, match=message):
        pool.run(2, losses_of, signs, {"optimize": optimize}, plan)


class Mapped(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.func.vmap(self.experts[0])(x)).square().mean()


class Dual(Routed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            return self.experts[0](dual).square().mean()  # type: ignore[no-any-return]


class Ragged(Routed):
    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
        return self.experts[0](ragged).values().square().mean()  # type: ignore[no-any-return]


def call_once(rank: int, kind: type[Routed], settings: dict[str, Any]) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True, **settings})
    plain = kind()
    smp.set_tensor_parallelism(plain)
    smp.DistributedModel(plain)(torch.ones(3, WIDTH))


@pytest.mark.parametrize("settings", [{}, {"prescaled_batch": True}], ids=["own", "common"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Mapped, r"is called inside of a transform of torch\.func"),
        (Dual, r"is called inside of a transform of torch\.func"),
        (Ragged, "is given a nested tensor, and its ranks cannot exchange those; pad them"),
    ],
)
def test_a_split_layer_in_a_transform_or_of_nested_tensors_is_refused(
    pool: Pool, kind: type[Routed], reason: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(RankFailure, match=rf"the split layer 'experts\.0' {reason}"):
        pool.run(2, call_once, kind, settings)


@pytest.mark.parametrize("settings", [{}, {"prescaled_batch": True}], ids=["own", "common"])
def test_layers_that_all_ranks_choose_are_those_of_one_process(
    pool: Pool, settings: dict[str, Any]
) -> None:
    signs = [[1.0, -1.0, 1.0]] * 2
    plain = randomise_(Routed().double(), 1)
    expected = [plain(batch(sign)).item() for sign in signs[0]]
    for losses in pool.run(2, losses_of, signs, settings, None):
        assert losses == pytest.approx(expected, rel=1e-12)
