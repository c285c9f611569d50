"""Models in float64 that compute parts in float32 are equal to one process within float32.

And models that amplify rounding until nothing else is left: nothing can be said of these parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smp.observe.verification.first_step import outcome_of
from tests.dist.pool import Pool

CHANNELS, LENGTH = 96, 33


class RoundingNorm(nn.Module):
    """Takes the mean square in float32, as the norms of diffusers and timm do."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + 1e-8) * self.weight * self.factor


class Net(nn.Module):
    """Normalises over channels that are not the last dimension, so its norms get strided views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, CHANNELS, 3)
        self.norms = nn.ModuleList(RoundingNorm() for _ in range(2))
        self.last = nn.Conv1d(CHANNELS, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = norm(x.movedim(1, -1)).movedim(-1, 1)
        return self.last(x)  # type: ignore[no-any-return]


class Chaos(nn.Module):
    """The logistic map, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        value = torch.sigmoid(x * self.weight)
        for _ in range(100):
            value = 3.99 * value * (1 - value)
        return value


class Amplifying(Net):
    """A model with two outputs: that of `Net` through a convolution, and chaos made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.chaos = Chaos()
        self.tail = nn.Conv1d(3, 3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return self.tail(x), self.chaos(x.detach())


def train(rank: int, planted: bool, amplifies: bool = False) -> tuple[str, str, float]:
    """Returns the outcome of the check, its error, and the first loss."""
    import smp

    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    smp.init(config | {"auto_partition": False, "default_partition": 0})
    torch.manual_seed(3)
    plain = (Amplifying() if amplifies else Net()).double()
    for module in (*plain.norms, plain.last):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(plain)
    if planted and smp.pp_rank() == 1:
        plain.norms[1].factor = 1.001  # type: ignore[assignment]

    @smp.step
    def step(x: Tensor) -> Tensor:
        output = model(x)
        outputs = output if amplifies else (output,)
        loss: Tensor = torch.stack([part.square().mean() for part in outputs]).sum()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 3, LENGTH, generator=generator, dtype=torch.float64)
    error, loss = "", 0.0
    try:
        loss = step(batch).outputs[0].item()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return outcome_of(model), error, loss


def test_another_order_of_sums_in_float32_is_no_difference(pool: Pool) -> None:
    torch.manual_seed(3)
    plain = Net().double()
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 3, LENGTH, generator=generator, dtype=torch.float64)
    alone = float(plain(batch[:2]).detach().square().mean())
    for outcome, error, loss in pool.run(2, train, False):
        assert not error and outcome == "equal", (outcome, error)
        assert abs(loss - alone) < 1e-6 * alone
        assert loss != alone, "the sums were in one order: this tests nothing"


def test_more_than_rounding_is_a_difference(pool: Pool) -> None:
    for outcome, error, _ in pool.run(2, train, True):
        assert error.startswith("FirstStepDifference") and "'norms.1'" in error, (outcome, error)


def test_a_model_that_amplifies_rounding_is_not_refused(pool: Pool) -> None:
    for outcome, error, _ in pool.run(2, train, False, True):
        assert not error, error
        assert outcome.startswith("inconclusive: one process makes as much of other last digits")


def test_what_does_not_amplify_is_compared_all_the_same(pool: Pool) -> None:
    for outcome, error, _ in pool.run(2, train, True, True):
        assert error.startswith("FirstStepDifference"), (outcome, error)
