"""The check of the first step of pipelines whose ranks compute parts of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smp.observe.verification.first_step import outcome_of
from tests.dist.pool import Pool

WIDTH, LENGTH, BATCH = 8, 6, 4


class Block(nn.Module):
    """A block with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def scaled(block: nn.Module, by: float) -> None:
    own = block.forward
    block.forward = lambda x: own(x) * by  # type: ignore[method-assign]


def scale_tokens_of_a_rank(net: Any) -> None:
    import smp

    if smp.pp_rank() == 1 and smp.cp_rank() == 1:
        scaled(net.blocks[2], 1.001)


def scale_all_tokens(net: Any) -> None:
    import smp

    if smp.pp_rank() == 1:
        scaled(net.blocks[2], 1.001)


def scale_gradients_of_a_rank(net: Any) -> None:
    import smp

    if smp.pp_rank() == 1 and smp.cp_rank() == 1:
        linear = net.blocks[2].out
        linear.forward = lambda x: functional.linear(x, linear.weight.detach(), linear.bias)


PLANTS: dict[str, tuple[Callable[[Any], None] | None, str]] = {
    "none": (None, ""),
    "a rank's tokens": (scale_tokens_of_a_rank, "output 0 differs"),
    "all tokens": (scale_all_tokens, "output 0 differs"),
    "a rank's gradients": (scale_gradients_of_a_rank, "gradient of 'blocks.2.out.weight'"),
}


def train(rank: int, config: dict[str, Any], plant: str) -> dict[str, Any]:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "context_parallel_degree": 2, **config})
    torch.manual_seed(3)
    net = Net().double()
    for module in (*net.blocks[2:], net.head):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    change = PLANTS[plant][0]
    if change is not None:
        change(net)

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        model.backward(loss)
        return loss

    error, losses = "", []
    try:
        for index in range(2):
            generator = torch.Generator().manual_seed(100 * index + smp.dp_rank())
            x = torch.randn(BATCH, LENGTH, 3, generator=generator, dtype=torch.float64)
            losses += [float(out) for out in step(x).outputs]
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    blocks = model._engine.sequences.blocks
    return {
        "outcome": outcome_of(model),
        "error": error,
        "losses": losses,
        "num_cut": sum(block.num_cut for block in blocks),
        "replica": smp.rdp_rank(),
    }


MANUAL = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "ddp": True}


@pytest.mark.parametrize(
    ("size", "config"),
    [(4, {}), (8, {"tensor_parallel_degree": 2}), (8, {}), (8, {"shard_optimizer_state": True})],
    ids=str,
)
@pytest.mark.sample(keep=2)
def test_a_healthy_model_is_equal_and_trains_as_without(
    pool: Pool, size: int, config: dict[str, Any]
) -> None:
    runs = [
        pool.run(size, train, {**MANUAL, **config}, "none", env={"SMP_CHECK_FIRST_STEP": setting})
        for setting in ("auto", "0")
    ]
    for checked, plain in zip(*runs, strict=True):
        assert not checked["error"] and checked["losses"] == plain["losses"]
        first = "equal" if checked["replica"] == 0 else "off: the first replica is checked"
        assert checked["outcome"] == first and plain["outcome"] == "off: SMP_CHECK_FIRST_STEP is 0"
    assert sum(result["num_cut"] for result in runs[0]) >= 16, "no rank had a part of the tokens"


@pytest.mark.parametrize("plant", [name for name in PLANTS if name != "none"])
def test_a_planted_difference_is_refused_on_all_ranks(pool: Pool, plant: str) -> None:
    for result in pool.run(4, train, MANUAL, plant):
        assert result["error"].startswith("FirstStepDifference"), (plant, result)
        assert PLANTS[plant][1] in result["error"], (plant, result["error"])
