"""Containers among the arguments of calls and of checkpoints, and the changes made to them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.activations.recompute import recompute
from smp.modules.argument_containers import ArgumentContainers, copies


@dataclass
class State:
    x: Any = None
    seen: list[Any] = field(default_factory=list)


class Closed:
    """A class whose objects are not looked into."""

    __slots__ = ("value",)


def on_a_copy(arguments: Any, function: Callable[[Any], Any]) -> Any:
    """Lets a function change a copy, and changes the original as the copy was changed."""
    given = ArgumentContainers(arguments)
    copied = pickle.loads(pickle.dumps(arguments))
    there = ArgumentContainers(copied)
    assert len(there.containers) == len(given.containers)
    result = function(copied)
    result, changes = pickle.loads(pickle.dumps((there.with_references(result), there.changes())))
    return given.settle(changes, result)


def change_list(a: Any) -> Any:
    a["l"].append(4)
    a["l"][0] = "new"
    del a["l"][1]
    return a["l"]


def change_dict(a: Any) -> Any:
    a["d"]["n"] += 1
    a["d"].pop("gone")
    a["d"].update(new=[a["l"], {"deep": a["d"]}])
    return {"back": (a["d"],)}


def change_order(a: Any) -> Any:
    a["o"].move_to_end("a")
    a["f"]["x"].append(1)
    a["q"].appendleft(0)
    a["s"].add("new")
    a["s"].discard(1)
    return a["o"], a["q"]


def change_object(a: Any) -> Any:
    a["st"].x = a["ns"]
    a["st"].seen.append(a["l"])
    a["ns"].more = 3
    del a["ns"].less
    return a["st"]


def make_arguments() -> dict[str, Any]:
    shared = [1, 2, 3]
    return {
        "l": shared,
        "again": (shared, {"k": shared}),
        "d": {"n": 0, "gone": 1, "kept": 2},
        "o": OrderedDict(a=1, b=2),
        "f": defaultdict(list),
        "q": deque([1, 2], maxlen=3),
        "s": {1, 2},
        "st": State(),
        "ns": SimpleNamespace(less=1),
    }


@pytest.mark.parametrize("change", [change_list, change_dict, change_order, change_object])
def test_originals_become_what_copies_became(change: Callable[[Any], Any]) -> None:
    arguments = make_arguments()
    before = dict(arguments)
    expected = copy.deepcopy(arguments)
    expected_result = change(expected)
    result = on_a_copy(arguments, change)
    assert all(arguments[name] is value for name, value in before.items())
    assert arguments.pop("s") == expected.pop("s")  # in any order
    assert repr(arguments) == repr(expected) and repr(result) == repr(expected_result)
    assert arguments["again"][0] is arguments["l"] is arguments["again"][1]["k"]


def test_results_that_are_arguments_are_the_callers() -> None:
    arguments = make_arguments()
    result = on_a_copy(arguments, lambda a: (a["l"], [a["d"], {"s": a["st"]}], a["q"]))
    assert result[0] is arguments["l"] and result[1][0] is arguments["d"]
    assert result[1][1]["s"] is arguments["st"] and result[2] is arguments["q"]


def test_items_that_stay_are_the_callers() -> None:
    arguments = {"l": [Closed(), 1], "d": {"k": Closed()}}
    first, second = arguments["l"][0], arguments["d"]["k"]  # type: ignore[index]

    def change(a: Any) -> None:
        a["l"].insert(0, a["d"].pop("k"))
        a["d"]["moved"] = a["l"][1]

    on_a_copy(arguments, change)
    assert arguments["l"][0] is second and arguments["l"][1] is first  # type: ignore[index]
    assert arguments["d"] == {"moved": first}


def test_changes_of_containers_do_not_show_in_what_was_taken_apart() -> None:
    arguments = make_arguments()
    given = ArgumentContainers(arguments)
    before = pickle.dumps(given.apart(arguments))
    for change in (change_list, change_dict, change_order, change_object):
        change(arguments)
    assert pickle.dumps(given.apart(arguments)) == before
    made = copies(given.templates(), *given.apart(arguments))
    assert made["l"] == [1, 2, 3] and made["l"] is made["again"][0] is not arguments["l"]
    assert made["q"].maxlen == 3 and made["f"].default_factory is list


def test_other_sets_are_refused() -> None:
    given = ArgumentContainers([elements := {1}])
    elements.add(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use a list or a dict"):
        given.changes()


# ---- checkpoints


class Filler(nn.Module):
    """Changes everything that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: list[int] = []

    def forward(self, x: Tensor, out: list[Tensor], batch: dict[str, Any], *, also: Any) -> Any:
        self.calls.append(1)
        assert also["list"] is out
        h = torch.tanh(self.linear(x)) + sum(out)
        out.append(h)
        batch["x"] = batch.pop("old") * h
        batch["given"] = x
        batch.setdefault("names", set()).add("filler")
        batch["n"] += 1
        return out, h.mean()


def fill(checkpoints: bool) -> list[Tensor]:
    torch.manual_seed(3)
    layers = nn.ModuleList(Filler() for _ in range(2)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out: list[Tensor] = []
    batch: dict[str, Any] = {"n": 0, "old": x * 2.0}
    for layer in layers:
        args, kwargs = (x, out, batch), {"also": {"list": out}}
        if checkpoints:
            result, mean = recompute(layer, args, kwargs, modules=(layer,))
        else:
            result, mean = layer(*args, **kwargs)
        assert result is out and batch["given"] is x
        batch["old"] = batch.pop("x") + mean
    assert len(out) == 2 and batch["n"] == 2 and batch["names"] == {"filler"}
    loss = batch["old"].square().sum() + sum(h.abs().sum() for h in out)
    loss.backward()
    assert len(out) == 2 and batch["n"] == 2
    assert [len(layer.calls) for layer in layers] == [1 + checkpoints] * 2
    grads = [parameter.grad for parameter in layers.parameters()]
    return [loss.detach(), x.grad, *grads]  # type: ignore[list-item]


def test_checkpoints_fill_the_callers_containers_once() -> None:
    for ours, theirs in zip(fill(True), fill(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.abs().max() > 0


def test_checkpoints_let_go_of_what_they_have_filled() -> None:
    linear = nn.Linear(4, 4)
    out: list[Tensor] = []

    def block(x: Tensor, out: list[Tensor]) -> Tensor:
        out.append(linear(x))
        return out[0] * 2.0

    result = recompute(block, (torch.ones(2, 4, requires_grad=True), out), modules=(linear,))
    gone = weakref.ref(out[0])
    del result, out
    gc.collect()
    assert gone() is None


def test_tensors_put_into_objects_by_checkpoints_are_refused() -> None:
    linear, state = nn.Linear(4, 4), SimpleNamespace(loss=None)

    def block(x: Tensor, state: Any) -> Tensor:
        state.loss = linear(x).mean()
        return x * 2.0

    with pytest.raises(ValueError, match="put tensors into an argument of class SimpleNamespace"):
        recompute(block, (torch.ones(2, 4, requires_grad=True), state), modules=(linear,))
