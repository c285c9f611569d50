"""Operations that the engine leaves to the rank with the data, as a model's trace sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smp.partition import trace_flops
from smp.partition.costs import Trace
from smp.partition.trace import trace
from smp.pipeline import functions
from smp.tensor_parallel import regions

F = nn.functional


def traced(model: nn.Module, *args: Tensor) -> Trace:
    return trace(model, args, {}, device=torch.device("cpu"))


class OwnCode(nn.Module):
    """A linear layer, then ``function`` of its result in the code of the root."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
        return self.function(self.linear(x), labels, soft)


#: Functions that the engine runs where their first argument is.
LEFT_AWAY: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda y, labels, soft: F.gelu(y),
    "relu": lambda y, labels, soft: y.relu(),
    "silu": lambda y, labels, soft: F.silu(y),
    "tanh": lambda y, labels, soft: torch.tanh(y),
    "sigmoid": lambda y, labels, soft: y.sigmoid(),
    "softmax": lambda y, labels, soft: F.softmax(y, -1),
    "dropout": lambda y, labels, soft: F.dropout(y, 0.3),
    "leaky_relu": lambda y, labels, soft: F.leaky_relu(y),
    "elu": lambda y, labels, soft: F.elu(y),
    "mish": lambda y, labels, soft: F.mish(y),
    "softplus": lambda y, labels, soft: F.softplus(y),
    "log_softmax": lambda y, labels, soft: F.log_softmax(y, -1),
    "cross_entropy": lambda y, labels, soft: F.cross_entropy(y.view(-1, 4).float(), labels),
    "cross_entropy of smoothed labels": lambda y, labels, soft: F.cross_entropy(
        y, labels, label_smoothing=0.1
    ),
    "cross_entropy of probabilities": lambda y, labels, soft: F.cross_entropy(y, soft),
    "l1_loss": lambda y, labels, soft: F.l1_loss(y, soft),
    "kl_div": lambda y, labels, soft: F.kl_div(F.log_softmax(y, -1), soft, reduction="batchmean"),
    "nll_loss": lambda y, labels, soft: F.nll_loss(y, labels),
    "mse_loss": lambda y, labels, soft: F.mse_loss(y, soft),
    "smooth_l1_loss": lambda y, labels, soft: F.smooth_l1_loss(y, soft),
    "binary_cross_entropy": lambda y, labels, soft: F.binary_cross_entropy(y.sigmoid(), soft),
    "binary_cross_entropy_with_logits": lambda y, labels, soft: F.binary_cross_entropy_with_logits(
        y, soft
    ),
    "float": lambda y, labels, soft: y.to(torch.bfloat16).float(),
    "contiguous": lambda y, labels, soft: y.t().contiguous(),
    "to": lambda y, labels, soft: y.to(torch.float64),
    "clone": lambda y, labels, soft: y.clone(),
    "mean": lambda y, labels, soft: y.flatten().mean(),
    "sum": lambda y, labels, soft: (y + y * 0.5 - y * y).sum(-1),
    "views": lambda y, labels, soft: y[..., :-1].transpose(0, 1).reshape(2, -1).sum(),
}
#: Functions that need the data in the code.
READ: dict[str, Callable[..., Tensor]] = {
    "function": lambda y, labels, soft: torch.cos(y),
    "sum with what the caller made": lambda y, labels, soft: y + soft,
    "sum of different shapes": lambda y, labels, soft: y + y[:1],
    "sum with a number": lambda y, labels, soft: y + 1,
    "matrix product": lambda y, labels, soft: y @ y.t(),
}


#: The function that models call as `cross_entropy` on split logits: the trace sees that call.
BEHIND_CROSS_ENTROPY = regions.vocabulary_cross_entropy


def test_every_function_of_the_engine_is_known_to_the_trace() -> None:
    shipped = {name for f, name in functions.SHIPPED.items() if f is not BEHIND_CROSS_ENTROPY}
    assert shipped <= set(LEFT_AWAY)


def test_losses_of_the_trace_are_those_of_the_engine() -> None:
    losses = {f for f in functions.SHIPPED if "loss" in f.__name__ or "entropy" in f.__name__}
    losses.remove(BEHIND_CROSS_ENTROPY)
    assert losses | {F.kl_div} == trace_flops.LOSSES


@pytest.mark.parametrize("name", LEFT_AWAY)
def test_what_the_engine_ships_is_made_and_paid_for_where_its_data_are(name: str) -> None:
    result = traced(
        OwnCode(LEFT_AWAY[name]), torch.randn(8, 4), torch.arange(8) % 4, torch.rand(8, 4)
    )
    (made,) = (i for i, v in enumerate(result.values) if v.producer == 1)
    assert result.values[made].consumers == ()
    away = [v for v in result.values if v.sources]
    homes = {made}
    for i, value in enumerate(result.values):
        if value.sources:
            assert value.sources[-1] in homes, "labels and sums go to the data"
            homes.add(i)
    own = result.costs[0]
    assert away and sum(v.flops for v in away) == own.forward_flops + own.backward_flops > 0
    assert sum(v.activation_bytes for v in away) == own.activation_bytes


@pytest.mark.parametrize("name", READ)
def test_what_needs_data_in_the_code_reads_them(name: str) -> None:
    result = traced(OwnCode(READ[name]), torch.randn(8, 4), torch.arange(8), torch.rand(8, 4))
    (made,) = (v for v in result.values if v.producer == 1)
    assert made.consumers == (0,)


def test_what_the_code_above_has_made_does_not_go_away_for_arithmetic() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.b(self.act(self.a(x)) + mask) + x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.first(x), torch.cos(x))

    result = traced(Outer(), torch.randn(8, 4))
    names = [name for name, _ in result.modules[0].named_modules()]
    made = {names[v.producer]: v for v in result.values if v.sources}
    assert set(made) == {"inner.act", "inner"}
    assert [names[c] for c in made["inner.act"].consumers] == ["inner"], "added to the mask here"
    first, b = (
        next(i for i, v in enumerate(result.values) if names[v.producer] == name)
        for name in ("first", "inner.b")
    )
    assert made["inner"].sources == (first, b)
