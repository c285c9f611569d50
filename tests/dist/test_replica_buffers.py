"""Buffers that forwards write are those of the first replica on all of them, behind each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.harness import forward_step, train_step_of

WIDTH = 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {"microbatches": 2}),
    "pipelines": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sharded": (2, {"sharded_data_parallel_degree": 2}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "pipelines and sharded state": (
        4,
        {"pipeline_parallel_degree": 2, "shard_optimizer_state": True},
    ),
}


class Net(nn.Module):
    """Statistics on both pipeline ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def train(rank: int, config: dict[str, Any]) -> tuple[int, list[dict[str, Tensor]], list[Tensor]]:
    """Returns the replica, and behind each of three steps its buffers and an evaluation."""
    import smp

    smp.init({"ddp": True, "auto_partition": False, **config})
    net = Net()
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net.last, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = train_step_of(model)
    evaluate = forward_step(model)
    same = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9))
    states, outputs = [], []
    for idx in range(3):
        generator = torch.Generator().manual_seed(10 * idx + smp.rdp_rank())
        optimizer.zero_grad()
        step(3 * smp.rdp_rank() + torch.randn(8, WIDTH, generator=generator))
        optimizer.step()
        names = [name for name, _ in net.named_buffers()]
        states.append({n: v.clone() for n, v in model.state_dict().items() if n in names})
        model.eval()
        with torch.no_grad():
            outputs.append(evaluate(same).concat())
        model.train()
    return smp.rdp_rank(), states, outputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_evaluate_and_save_with_equal_buffers(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    results = pool.run(size, train, config)
    assert {replica for replica, _, _ in results} == {0, 1}
    _, first, outputs = results[0]
    assert len({float(state["last.1.running_mean"].sum()) for state in first}) == 3
    for _, states, others in results:
        for own, other in zip(states, first, strict=True):
            assert own.keys() == other.keys() and len(own) == 7
            assert all(torch.equal(own[name], other[name]) for name in own)
        assert all(torch.equal(a, b) for a, b in zip(others, outputs, strict=True))
