"""Mixtures as users write them: experts are modules of their own, and the forward picks tokens.

Each form chooses in another way. All have a counter, and an auxiliary loss in an attribute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.reference.models import randomise_

WIDTH, INNER, EXPERTS, CHOICES, TOKENS = 8, 6, 5, 2, 7


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(hidden)))
        return y


class Mixture(nn.Module):
    """A base of all forms: a gate that chooses experts, and its counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.register_buffer("counts", torch.zeros(EXPERTS, dtype=torch.int64))
        self.auxiliary: Tensor | None = None
        self.loads: list[int] = []

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, ids = scores.topk(CHOICES, -1)
        counts = ids.flatten().bincount(minlength=EXPERTS)
        self.counts += counts
        self.loads.append(int(counts.max()))
        self.auxiliary = (scores.mean(0) * counts / ids.numel()).sum()
        return weights / weights.sum(-1, keepdim=True), ids


class Loop(Mixture):
    """Experts without tokens are left out, as Mixtral was written."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            if row.numel() == 0:
                continue
            y.index_add_(0, row, expert(tokens[row]) * weights[row, choice, None])
        return y.view_as(x)


class Masks(Mixture):
    """Every expert is called, choice by choice, and experts have names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{idx}": Expert() for idx in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for choice in range(CHOICES):
            for number in range(EXPERTS):
                chosen = ids[:, choice] == number
                result = self.experts[f"expert_{number}"](hidden=tokens[chosen])
                y[chosen] += weights[chosen, choice, None] * result
        return y.view_as(x)


class Sparing(Mixture):
    """Tokens with a negative first feature get no expert; there may be no others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x.flatten(0, 1))
        weights, ids = weights.view(*x.shape[:2], -1), ids.view(*x.shape[:2], -1)
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            chosen = (ids == number) & (x[..., :1] > 0)
            sample, place, choice = chosen.nonzero(as_tuple=True)
            if len(sample):
                result = self.experts[number](x[sample, place])
                result *= weights[sample, place, choice, None]
                y = y.index_put((sample, place), result, accumulate=True)
        return y


class Dense(Mixture):
    """A mixture in which all experts see all tokens, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x.flatten(0, 1))
        share = torch.zeros(*weights.shape[:1], EXPERTS, dtype=x.dtype)
        share = share.scatter(1, ids, weights).view(*x.shape[:2], EXPERTS)
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return (results * share.unsqueeze(-2)).sum(-1)


class Greedy(Loop):
    """Changes what it is given, as Switch Transformers does where routers have noise."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 1.5
        return super().forward(x)


class Shared(Loop):
    """A loop with an expert for all tokens, in layers that a plan may split.

    A plan gives such a module the samples of all ranks, so it has no loss of its own tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.down(self.up(x).relu())
        self.auxiliary = None
        return y


class Table(nn.ModuleDict):
    """A dictionary with a forward, as transformers 5 has for Switch Transformers."""

    def __init__(self) -> None:
        super().__init__({f"expert_{idx}": Expert() for idx in range(EXPERTS)})

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in ids.unique().tolist():
            row, choice = torch.where(ids == number)
            y.index_add_(0, row, self[f"expert_{number}"](x[row]) * weights[row, choice, None])
        return y


class WithTable(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Table()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.route(tokens)
        y: Tensor = self.experts(tokens, ids, weights)
        return y.view_as(x)


FORMS: dict[str, Callable[[], Mixture]] = {
    "loop": Loop, "masks": Masks, "sparing": Sparing, "dense": Dense, "table": WithTable,
    "greedy": Greedy, "shared": Shared,
}  # fmt: skip


class Model(nn.Module):
    """Two layers and the mean square of what they make, with the auxiliary losses."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(FORMS[form]() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.first(x.abs()) if self.first.weight.requires_grad else x
        for layer in self.layers:
            x = x + layer(x.clone())
        loss = x.square().mean()
        for layer in self.layers:
            loss = loss if layer.auxiliary is None else loss + 0.3 * layer.auxiliary
        return {"loss": loss}


def make_model(form: str, favourite: bool = False) -> Model:
    """Makes a float64 model of random values; ``favourite``: the first experts get all tokens."""
    model = randomise_(Model(form).double(), 3)
    assert isinstance(model, Model)
    if favourite:
        for layer in model.layers:
            layer.gate.bias.data.copy_(torch.arange(EXPERTS, 0, -1) * 30.0)
    if form == "sparing":
        model.first.requires_grad_(False)
    return model


def make_batch(form: str, replica: int, step: int) -> dict[str, Tensor]:
    """Makes a batch; in that of ``sparing`` no token of the second replica gets an expert."""
    generator = torch.Generator().manual_seed(10 * replica + step)
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    if form == "sparing":
        x[..., 0] = x[..., 0].abs() * (-1 if replica == 1 else 1)
    return {"x": x}
