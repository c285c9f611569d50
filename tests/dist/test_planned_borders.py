"""Blocks of a plan: what they communicate; results of rows that are read, changed, passed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.pool import Pool, RankFailure
from tests.reference.models import randomise_
from tests.reference.tolerances import assert_close

SAMPLES, LENGTH, WIDTH, INNER = 2, 3, 8, 12
PLAN = {
    "block.up": "colwise",
    "block.gate": "colwise",
    "block.down": "rowwise",
    "block.further": "colwise",
    "block.back": "rowwise",
}


class Double(torch.autograd.Function):
    """Python functions of autograd are no functions that a tensor's class sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Squared(torch.autograd.Function):
    """Keeps what it got."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2 * ctx.saved_tensors[0]


class Feed(nn.Module):
    """Two columns that read the block's argument, and a row with a bias that gives its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def row(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y

    def forward(self, x: Tensor) -> Any:
        return self.row(x)


class Scaled(Feed):
    def forward(self, x: Tensor) -> Any:
        return self.row(x) * 3


class Looked(Feed):
    """Reads the row's result without gradients, and returns it unchanged."""

    def forward(self, x: Tensor) -> Any:
        y = self.row(x)
        with torch.no_grad():
            self.__dict__["largest"] = float(y.abs().max())
        return y


class Changed(Feed):
    def forward(self, x: Tensor) -> Any:
        y = self.row(x)
        y.mul_(y.detach() + 2)
        y[..., 0].zero_()
        return y


class Added(Feed):
    """The argument goes to columns and to what comes behind the row."""

    def forward(self, x: Tensor) -> Any:
        y = x + self.row(x)
        y += self.row(x)
        return y


class ByFunctions(Feed):
    def forward(self, x: Tensor) -> Any:
        return Double.apply(self.row(x)) + Squared.apply(self.row(x))


class Passed(Feed):
    """Further columns read what the first row gives."""

    def __init__(self) -> None:
        super().__init__()
        self.further, self.back = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        y = self.row(x)
        return {"y": self.back(self.further(y).tanh()), "also": (y,)}


class Several(Feed):
    """Gives it twice, and of a shape that is known before it is read."""

    def forward(self, x: Tensor) -> Any:
        y = self.row(x)
        assert y.shape == x.shape and y.dtype == x.dtype and y.dim() == 3
        return [y, y]


class Narrow(Feed):
    """Columns do not read the argument itself."""

    def forward(self, x: Tensor) -> Any:
        return self.row(x.tanh())


KINDS = (Feed, Scaled, Looked, Changed, Added, ByFunctions, Passed, Several, Narrow)


class Around(nn.Module):
    def __init__(self, kind: type[Feed]) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        given = self.block(h)
        if isinstance(given, dict):
            given = [given["y"], *given["also"]]
        results = given if isinstance(given, list) else [given]
        results[0] += 1  # a result is the caller's
        return sum((y.square().mean() for y in results), h.square().mean())


def batch_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def plan_of(kind: type[Feed]) -> dict[str, str]:
    names = {f"block.{name}" for name, _ in kind().named_children()}
    return {path: word for path, word in PLAN.items() if path in names}


def train(rank: int, tp: int) -> list[list[dict[str, Any]]]:
    """Gradients of three steps of each kind of block."""
    import smp
    from tests.dist.split_training import marked_values

    results = []
    smp.init({"tensor_parallel_degree": tp, "ddp": True})
    for kind in KINDS:
        with smp.tensor_parallelism(plan=plan_of(kind)):
            plain = randomise_(Around(kind).double(), 1)
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(x: Tensor, model: Any = model) -> None:
            model.backward(model(x))

        steps = []
        for _ in range(3):
            model.zero_grad()
            train_step(batch_of(rank))
            steps.append(marked_values(model, "grad"))
        results.append(steps)
    return results


@pytest.mark.parametrize("tp", [2, 3])
def test_results_of_rows_may_be_read_changed_and_passed_on(pool: Pool, tp: int) -> None:
    from smp.tensor_parallel import partial

    results = pool.run(tp, train, tp)
    for idx, kind in enumerate(KINDS):
        plain = randomise_(Around(kind).double(), 1)
        for rank in range(tp):
            (plain(batch_of(rank)) / tp).backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        for step in range(3):
            whole = partial.merge([ranks[idx][step] for ranks in results])
            assert_close(whole, expected, torch.float64, f"{kind.__name__} step {step}")


def count(rank: int, kind: type[Feed], prescaled: bool) -> list[tuple[int, int]]:
    """Collectives and bytes of forward and of backward, in the second step."""
    import smp
    from smp.tensor_parallel import regions

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": prescaled, "ddp": True})
    with smp.tensor_parallelism(plan=plan_of(kind)):
        plain = randomise_(Around(kind).double(), 1)
    model = smp.DistributedModel(plain)
    seen: list[tuple[int, int]] = []

    @smp.step
    def train_step(x: Tensor) -> None:
        seen.append(regions.traffic())
        loss = model(x)
        seen.append(regions.traffic())
        model.backward(loss)
        seen.append(regions.traffic())

    for _ in range(3):
        seen.clear()
        train_step(batch_of(0 if prescaled else rank))
    assert len(seen) == 3
    return [
        (b[0] - a[0], (b[1] - a[1]) // (8 * SAMPLES * LENGTH * WIDTH))
        for a, b in zip(seen, seen[1:], strict=False)
    ]


@pytest.mark.parametrize(
    ("kind", "prescaled", "forward", "backward"),
    [
        # One all-gather and one reduce-scatter each way, of the samples of one rank.
        (Feed, False, (2, 2), (2, 2)),
        # One all-reduce each way, of common samples, which sends twice half of them.
        (Feed, True, (1, 1), (1, 1)),
        # A result that is read is summed, and a tensor that is not gathered has a sum: each of the
        # samples of two ranks.
        (Scaled, False, (2, 3), (2, 2)),
        (Narrow, False, (2, 2), (2, 3)),
    ],
)
def test_blocks_communicate_as_often_as_needed(
    pool: Pool,
    kind: type[Feed],
    prescaled: bool,
    forward: tuple[int, int],
    backward: tuple[int, int],
) -> None:
    for result in pool.run(2, count, kind, prescaled):
        assert result == [forward, backward]


class Behind(Feed):
    """Writes as code in C++ would."""

    def forward(self, x: Tensor) -> Any:
        y = self.row(x)
        with torch._C.DisableTorchFunctionSubclass():
            y.mul_(2)
        return y


def write_behind(rank: int) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    with smp.tensor_parallelism(plan=plan_of(Behind)):
        plain = Around(Behind).double()
    smp.DistributedModel(plain)(batch_of(rank))


def test_writing_past_the_class_of_a_late_sum_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="aten.mul_.Tensor got what a layer gives that a plan"):
        pool.run(2, write_behind)


def hooked(rank: int) -> list[float]:
    """A hook of one rank alone reads what a row gives."""
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    with smp.tensor_parallelism(plan=plan_of(Feed)):
        plain = randomise_(Around(Feed).double(), 1)
    seen: list[float] = []
    if rank == 0:
        plain.block.down.register_forward_hook(
            lambda _, __, y: seen.append(float(y.detach().sum()))
        )
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x))

    train_step(batch_of(rank))
    return seen


def test_hooks_of_one_rank_read_the_sum(pool: Pool) -> None:
    (seen,), nothing = pool.run(2, hooked)
    assert nothing == []
    plain = randomise_(Around(Feed).double(), 1)
    y = plain.block(plain.first(torch.cat([batch_of(0), batch_of(1)])))
    assert abs(seen - float(y.detach().sum())) < 1e-9
