"""Experts of a model of the user's, spread by a plan of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of
from tests.reference.models import randomise_

WIDTH, INNER, EXPERTS, CHOICES = 8, 6, 5, 2
SPREAD = {
    "layers.*.experts": "ep_dispatch_experts",
    "layers.*.experts.up": "grouped_gemm",
    "layers.*.experts.down": "grouped_gemm",
}
# The layers hold these, so they become blocks, in which all ranks have the samples of all.
BESIDE = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.einsum(
            "nih,nh->ni", self.up[ids.flatten()], x.repeat_interleave(ids.shape[1], 0)
        )
        y = torch.einsum("nhi,ni->nh", self.down[ids.flatten()], hidden.tanh())
        return (y.unflatten(0, ids.shape) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        routed = self.experts(tokens, ids, weights).view_as(x)
        return x + routed + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make() -> Model:
    return randomise_(Model().double(), 3)  # type: ignore[return-value]


def make_input(replica: int) -> Tensor:
    return torch.randn(
        2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(replica)
    )


def gradients(rank: int, plan: dict[str, str], prescaled: bool) -> dict[str, Any]:
    import smp
    from smp.nn.experts import SpreadExperts
    from tests.dist.steps import marked_values

    tp = 2
    smp.init(
        {
            "tensor_parallel_degree": tp, "expert_parallel_degree": tp, "ddp": True,
            "prescaled_batch": prescaled,
        }
    )  # fmt: skip
    plain = make()
    smp.set_tensor_parallelism(plain, plan=plan)
    model = smp.DistributedModel(plain)
    spread = [m for m in plain.modules() if isinstance(m, SpreadExperts)]
    assert len(spread) == 2 and all(m.up.shape[0] in (2, 3) for m in spread)
    train_step = train_step_of(model, own_loss)
    train_step(make_input(0 if prescaled else rank))
    return marked_values(model, "grad")


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("prescaled", [False, True], ids=["own", "common"])
@pytest.mark.parametrize("beside", [{}, BESIDE], ids=["alone", "in_a_block"])
def test_experts_of_the_user_are_spread(
    pool: Pool, beside: dict[str, str], prescaled: bool
) -> None:
    from smp.tensor_parallel import partial

    whole = partial.merge(pool.run(2, gradients, {**SPREAD, **beside}, prescaled))
    expected = make()
    replicas = 1 if prescaled else 2
    for replica in range(replicas):
        (expected(make_input(replica)) / replicas).backward()
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
        torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"layers.*.experts": "ep_dispatch_experts"}, "names no parameters"),
        ({k: v for k, v in SPREAD.items() if not k.endswith("down")}, "parameter 'down' is split"),
    ],
)
def test_a_plan_that_cannot_spread_is_refused(
    pool: Pool, plan: dict[str, str], reason: str
) -> None:
    with pytest.raises(RankFailure, match=reason):
        pool.run(2, gradients, plan, False)
