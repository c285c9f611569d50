"""The check of the loss in later steps, and of state that depends on how the batch is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.test_batch_check import (
    LAYOUTS,
    LENGTH,
    WIDTH,
    Case,
    Config,
    Net,
    batch,
    check_case,
    classes,
    flat,
    mean,
    padded,
    tokens,
)


class MomentumEncoder(nn.Module):
    """Averages weights in its forward, which begin as these weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(query, 0.5)
            target = self.key(x)
        return self.query(x) + target


class Clamped(nn.Module):
    """Keeps its weights within bounds, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data.clamp_(-0.1, 0.1)
        return self.inner(x)


class Counting(nn.Module):
    """Divides gradients by how often a code occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.codes((x[..., 0] > 0).long())


class Balancing(nn.Module):
    """Moves a bias by the loads of experts, which no loss of this step shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            load = (x.detach() > 0).flatten(0, -2).float().mean(0)
            self.bias += 0.01 * (load.mean() - load).sign()
        return x


LEFT: dict[str, Case] = {
    "average of weights": (
        lambda: Net(MomentumEncoder),
        flat,
        mean,
        "write 'between.key.bias', 'between.key.weight'",
    ),
    "balance of experts": (lambda: Net(Balancing), flat, mean, "write 'between.bias'"),
    "frequencies": (lambda: Net(Counting), flat, mean, "'between.codes' divides gradients"),
    "bounds of weights": (lambda: Net(Clamped), flat, mean, ""),
}


def check_left(rank: int, config: Config, name: str) -> tuple[list[str], list[str], list[float]]:
    return check_case(LEFT[name], config, num_steps=4)


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("layout", ["one process", "pipeline", "split"])
def test_state_that_depends_on_the_number_of_microbatches_is_told_once(
    pool: Pool, layout: str, name: str
) -> None:
    size, config = LAYOUTS[layout]
    results = pool.run(size, check_left, {"auto_partition": False, **config}, name)
    words = LEFT[name][3]
    told = [line for _, lines, _ in results for line in lines]
    assert len(told) == bool(words) and all(words in line for line in told), told
    start = "differs: " if words else "equal"
    assert all(o.startswith(start) for outcomes, _, _ in results for o in outcomes), results


def padded_later(rank: int, config: Config, first_step: int) -> list[str]:
    """Trains with padding from a step on; returns the outcome behind each step."""
    import smp
    from smp.observe.batch_check.check import BatchCheckObserver
    from smp.world import runtime

    smp.init({"ddp": True, "auto_partition": False, **config})
    net = Net()
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net.last, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = tokens(model, x, y)
        model.backward(loss)
        return loss

    told = []
    for step in range(1, 6):
        train(batch(LENGTH), padded() if step >= first_step else classes(LENGTH))
        optimizer.step()
        told += runtime.current().observers.of_kind(BatchCheckObserver).outcomes.values()
    return [outcome.split(":")[0] for outcome in told]


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
@pytest.mark.parametrize("first_step", [2, 4])
def test_padding_of_later_batches_is_seen(pool: Pool, layout: str, first_step: int) -> None:
    size, config = LAYOUTS[layout]
    expected = ["equal"] * 3 + ["differs"] * 2
    assert pool.run(size, padded_later, config, first_step) == [expected] * size
