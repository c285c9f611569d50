"""The first training step is compared with one process: healthy models pass, others are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.training import local_parameters

WIDTH, BATCH = 8, 8


class Block(nn.Module):
    """A residual block with a buffer, a mask, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.norm(x)))
        result: Tensor = x + self.batch_norm(self.second(hidden)) * self.scale * mask
        return result


class Net(nn.Module):
    """Blocks, a part of whose results goes around those that follow."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def train(
    rank: int,
    config: dict[str, Any],
    num_steps: int = 2,
    plant: str = "",
    make: str = "Net",
) -> dict[str, Any]:
    """Two steps; what came of the check, and all numbers."""
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **config})
    torch.manual_seed(3)
    model = smp.DistributedModel(globals()[make]().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if plant:
        model.register_post_partition_hook(lambda *_: PLANTS[plant](model))

    @smp.step
    def step(x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = model(x, mask, target)["loss"]
        model.backward(loss)
        return loss

    losses = []
    error = ""
    try:
        for index in range(num_steps):
            generator = torch.Generator().manual_seed(100 * index + smp.dp_rank())
            draw = {"generator": generator, "dtype": torch.float64}
            mask = torch.rand(BATCH, WIDTH, **draw)
            out = step(torch.randn(BATCH, WIDTH, **draw), mask, torch.randn(BATCH, 3, **draw))
            losses.append([x.item() for x in out.outputs])
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "outcome": model._engine.first_step.outcome,
        "error": error,
        "losses": losses,
        "params": {n: p.detach().clone() for n, p in local_parameters(model).items()},
        "pp": smp.pp_rank(),
        "block owners": [model._engine.decision.partition_of[b] for b in model.module.module.blocks]
        if hasattr(model._engine.decision, "partition_of")
        else [],
    }


LAYOUTS = (
    (2, {}),
    (3, {"pipeline_parallel_degree": 3}),
    (4, {}),
    (4, {"tensor_parallel_degree": 2}),
    (2, {"static_mode": True}),
    (2, {"pipeline": "simple"}),
    (2, {"deterministic_server": True}),
)


@pytest.mark.parametrize(("size", "config"), LAYOUTS, ids=str)
def test_a_healthy_model_is_checked_and_trains_as_without(
    pool: Pool, size: int, config: dict[str, Any]
) -> None:
    config = {**config, "ddp": size > 2 and "tensor_parallel_degree" not in config}
    config["ddp"] = size // config.get("pipeline_parallel_degree", 2) > 1
    runs = [
        pool.run(size, train, config, env={"SMP_CHECK_FIRST_STEP": setting})
        for setting in ("auto", "0")
    ]
    outcomes = [result["outcome"] for result in runs[0]]
    assert outcomes.count("equal") >= config.get("pipeline_parallel_degree", 2), outcomes
    assert set(outcomes) <= {"equal", "off: the first replica is checked"}, outcomes
    assert {r["outcome"] for r in runs[1]} == {"off: SMP_CHECK_FIRST_STEP is 0"}
    for checked, plain in zip(*runs, strict=True):
        assert not checked["error"] and checked["losses"] == plain["losses"]
        for name, value in checked["params"].items():
            assert torch.equal(value, plain["params"][name]), name
