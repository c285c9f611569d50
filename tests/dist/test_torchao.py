"""A model that a script has converted with torchao's ``Float8Linear``, without the key `fp8`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.test_fp8 import LAYOUTS, MICROBATCHES, batch, distance, llama, loss_of, pieces
from tests.reference.tolerances import MIXED_TOLERANCE

float8 = pytest.importorskip(
    "torchao.float8",
    reason="torchao is not installed; pip install -r requirements/torchao.txt",
)

Config = dict[str, Any]
TRIED = ("own batches", "pipeline", "replicas", "sharded", "sharded state", "common batch")


def converted() -> nn.Module:
    """Returns a model whose layers, but the head, torchao computes with 8 bits."""
    model = llama().float()
    float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name != "lm_head"
    )
    layers = [type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)]
    assert layers.count("Float8Linear") == 21
    return model


def train(rank: int, config: Config, folder: str, resumes: bool) -> tuple[float, dict[str, Tensor]]:
    """Makes an update, and saves it or has resumed before; returns loss and state."""
    import smp

    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    model = converted()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model, True)
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=1.0))
    if resumes:
        smp.resume_from_checkpoint(folder, tag="first")

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss = loss_of(wrapped, ids)
        wrapped.backward(loss)
        return loss

    is_common = config.get("prescaled_batch", False)
    number, count = (
        (smp.rdp_rank(), smp.rdp_size()) if is_common else (smp.dp_rank(), smp.dp_size())
    )
    mean = step(batch().chunk(count)[number]).reduce_mean().detach()
    optimizer.step()
    losses = smp.allgather(float(mean), smp.WORLD)
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    if not resumes:
        smp.save_checkpoint(folder, "first", model=wrapped, optimizer=optimizer)
    return sum(losses) / len(losses), state


def updated(model: nn.Module, batches: list[Tensor]) -> float:
    """Makes an update of the plain script; returns the loss."""
    model.zero_grad()
    mean = sum((loss_of(model, ids) for ids in batches), start=torch.tensor(0.0)) / len(batches)
    mean.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return mean.item()


@pytest.mark.parametrize("layout", TRIED)
def test_float8_linear_trains_in_any_layout(pool: Pool, layout: str, tmp_path: Path) -> None:
    size, config = LAYOUTS[layout]
    # Layers of torchao are whole on each rank, which has the samples of its replica.
    outside = {k: v for k, v in config.items() if k != "tensor_parallel_degree"}
    plain = converted()
    begin = {name: value.clone() for name, value in plain.state_dict().items()}
    limit = MIXED_TOLERANCE[torch.bfloat16]
    for resumes in (False, True):
        loss = updated(plain, pieces(size, outside))
        want = {name: value - begin[name] for name, value in plain.state_dict().items()}
        for found, state in pool.run(size, train, config, str(tmp_path / "saved"), resumes):
            assert list(state) == list(begin)
            assert found == pytest.approx(loss, rel=limit.losses)
            change = {name: value - begin[name] for name, value in state.items()}
            assert distance(change, want) < limit.changes
