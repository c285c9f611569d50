"""Checkpointing with tensors in dataclasses and other objects that pytree does not know."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.activations.recompute import recompute
from smp.modules.flat import tensors_in


@dataclass
class Out:
    h: Tensor
    rest: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Tensor
    rest: Any = None


class Plain:
    def __init__(self, h: Tensor, rest: Any = None) -> None:
        self._h = h
        self.rest = rest

    @property
    def h(self) -> Tensor:
        return self._h


class Dict(OrderedDict[str, Any]):
    def __init__(self, h: Tensor, rest: Any = None) -> None:
        super().__init__(rest=rest, h=h)
        self.note = "kept"

    @property
    def h(self) -> Tensor:
        assert list(self) == ["rest", "h"] and self.note == "kept"
        return self["h"]  # type: ignore[no-any-return]


class Default(defaultdict[str, Any]):
    def __init__(self, h: Tensor, rest: Any = None) -> None:
        super().__init__(list, h=h, rest=rest)

    @property
    def h(self) -> Tensor:
        assert self.default_factory is list
        return self["h"]  # type: ignore[no-any-return]


class Tuple(tuple[Any, ...]):
    def __new__(cls, h: Tensor, rest: Any = None) -> Tuple:
        made = super().__new__(cls, (h, rest))
        made.note = "kept"  # type: ignore[attr-defined]
        return made

    @property
    def h(self) -> Tensor:
        assert vars(self) == {"note": "kept"}
        return self[0]  # type: ignore[no-any-return]


class List(list[Any]):
    def __init__(self, h: Tensor, rest: Any = None) -> None:
        super().__init__([h, rest])

    @property
    def h(self) -> Tensor:
        return self[0]  # type: ignore[no-any-return]


class Outer:
    def __init__(self, h: Tensor, rest: Any = None) -> None:
        self.inner = {"out": Out(h, [rest])}
        self.again = [self, self.inner["out"]]  # once more, and a cycle

    @property
    def h(self) -> Tensor:
        assert self.again[0] is self and self.again[1] is self.inner["out"]
        return self.inner["out"].h


KINDS = [Out, Frozen, Plain, Dict, Default, Tuple, List, Outer]


def run(body: Callable[[nn.Linear, Tensor], Tensor]) -> list[Tensor]:
    """Loss and gradients of a linear layer and of what goes into it."""
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.float64)
    x.requires_grad_()
    loss = body(linear, x).square().sum()
    loss.backward()
    assert x.grad is not None and linear.weight.grad is not None
    assert x.grad.abs().max() > 0 and linear.weight.grad.abs().max() > 0
    return [loss.detach(), x.grad, linear.weight.grad]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_results_in_objects_have_gradients(kind: Callable[..., Any]) -> None:
    ids = torch.arange(3)

    def body(linear: nn.Linear, x: Tensor, checkpoints: bool = True) -> Tensor:
        def block(x: Tensor) -> Any:
            return kind(torch.tanh(linear(x)), ids)

        out = recompute(block, (x,), modules=(linear,)) if checkpoints else block(x)
        assert type(out) is kind and any(t is ids for t in tensors_in(out))
        return x + out.h  # type: ignore[no-any-return]

    assert_same(run(body), run(lambda linear, x: body(linear, x, checkpoints=False)))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_in_objects_have_gradients(kind: Callable[..., Any]) -> None:
    def body(linear: nn.Linear, x: Tensor, checkpoints: bool = True) -> Tensor:
        def block(given: Any, *, more: Any) -> Tensor:
            assert type(given) is kind and more["same"] is given
            return torch.tanh(linear(given.h))

        given = kind(x * 2.0, 3)
        kwargs = {"more": {"same": given}}
        if not checkpoints:
            return x + block(given, **kwargs) + given.h
        return x + recompute(block, (given,), kwargs, modules=(linear,)) + given.h  # type: ignore[no-any-return]

    assert_same(run(body), run(lambda linear, x: body(linear, x, checkpoints=False)))


def test_objects_without_gradients_are_those_of_the_caller() -> None:
    linear, seen = nn.Linear(4, 4), []
    mask = Out(torch.ones(4))
    steps = Plain(torch.arange(3))

    def block(x: Tensor, mask: Out, steps: Plain) -> Any:
        seen.append(mask is given[0] and steps is given[1])
        return linear(x) * mask.h, steps

    given = (mask, steps)
    result, same = recompute(block, (torch.ones(2, 4), *given), modules=(linear,))
    result.sum().backward()
    assert seen == [True, True] and same is steps


def test_an_object_with_gradients_is_not_written_to() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def block(state: Out) -> Tensor:
        h: Tensor = linear(state.h)
        state.rest.append(h.mean())  # the caller would never see it
        return h

    state = Out(x * 2.0)
    with pytest.raises(ValueError, match=r"changed an argument of class Out.* return what"):
        recompute(block, (state,), modules=(linear,))
    assert state.rest == []


class Queue(deque[Any]):
    pass


def test_what_cannot_be_made_anew_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="set of tensors, which has no order"):
        recompute(lambda x: {linear(x)}, (x,), modules=(linear,))
    assert recompute(lambda x: (linear(x), {1, 2}), (x,), modules=(linear,))[1] == {1, 2}
    with pytest.raises(ValueError, match=r"tensors in a .*Queue, which cannot be made anew"):
        recompute(lambda x: Queue([linear(x)]), (x,), modules=(linear,))
    with pytest.raises(ValueError, match="dict_values, which cannot be made anew"):
        recompute(lambda x: {"x": linear(x)}.values(), (x,), modules=(linear,))


def test_tensors_are_found_in_nested_results() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)

    class Own:
        def __init__(self) -> None:
            self.inner = [a, {"x": b}]

    assert tensors_in(a) == [a]
    assert [id(t) for t in tensors_in((a, [b, {"k": c}], "text", 3))] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in([Own()])] == [id(a), id(b)]
    assert tensors_in(None) == []
