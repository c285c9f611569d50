"""Functions that the library puts around forwards: order, undoing, and users' own forwards."""

import copy
import inspect
import pickle
from collections.abc import Callable

import torch
from torch import nn

from smp.modules.forwards import Forward, WrapperKind, is_wrapped, wrap_forward


def _calling(log: list[str], name: str) -> Callable[[Forward], Forward]:
    def wrapper(inner: Forward) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            log.append(name)
            return inner(x)

        return forward

    return wrapper


def test_order_is_that_of_the_places() -> None:
    module, log = nn.Linear(2, 2), []
    undo_remote = wrap_forward(module, WrapperKind.REMOTE, _calling(log, "remote"))
    undo = wrap_forward(module, WrapperKind.PARAMETERS, _calling(log, "parameters"))
    wrap_forward(module, WrapperKind.CHECKPOINT, _calling(log, "checkpoint"))
    x = torch.ones(1, 2)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert log == ["remote", "checkpoint", "parameters"]
    undo_remote()
    undo()
    undo()
    assert is_wrapped(module, WrapperKind.CHECKPOINT) and not is_wrapped(module, WrapperKind.REMOTE)
    log.clear()
    module(x)
    assert log == ["checkpoint"]


def test_undoing_leaves_nothing_behind() -> None:
    module = nn.Linear(2, 2)
    before = dict(module.__dict__)
    wrap_forward(module, WrapperKind.REMOTE, _calling([], "a"))()
    assert module.__dict__ == before


def test_a_forward_of_the_instance_comes_back() -> None:
    module = nn.Linear(2, 2)
    own = module.forward
    module.forward = own  # type: ignore[method-assign]
    undo = wrap_forward(module, WrapperKind.CHECKPOINT, _calling([], "a"))
    assert module.forward is not own
    assert inspect.signature(module.forward) == inspect.signature(own)
    undo()
    assert module.forward is own


def test_a_forward_that_the_user_sets_later_stays_outermost() -> None:
    module, log = nn.Linear(2, 2), []
    undo = wrap_forward(module, WrapperKind.CHECKPOINT, _calling(log, "checkpoint"))
    inner = module.forward

    def users(x: torch.Tensor) -> torch.Tensor:
        log.append("user")
        return inner(x)

    module.forward = users  # type: ignore[method-assign]
    wrap_forward(module, WrapperKind.REMOTE, _calling(log, "remote"))
    module(torch.ones(1, 2))
    assert log == ["user", "remote", "checkpoint"]
    undo()
    assert module.forward is users


def test_a_copy_has_a_chain_of_its_own() -> None:
    module, log = nn.Linear(2, 2), []
    wrap_forward(module, WrapperKind.CHECKPOINT, _calling(log, "original"))
    other = copy.deepcopy(module)
    wrap_forward(other, WrapperKind.CHECKPOINT, _calling(log, "copy"))
    module(torch.ones(1, 2))
    assert log == ["original"]
    other.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.ones(2)})
    assert torch.equal(other(torch.ones(1, 2)), torch.ones(1, 2))
    assert log == ["original", "copy"]


def test_copies_are_plain() -> None:
    module, log = nn.Linear(2, 2), []
    wrap_forward(module, WrapperKind.REMOTE, _calling(log, "original"))
    copy.deepcopy(module)(torch.ones(1, 2))
    assert log == []


def test_pickles_are_plain() -> None:
    module, log = nn.Linear(2, 2), []
    wrap_forward(module, WrapperKind.REMOTE, _calling(log, "original"))
    other = pickle.loads(pickle.dumps(module))
    x = torch.ones(1, 2)
    assert torch.equal(other(x), nn.functional.linear(x, module.weight, module.bias))
    assert log == []
    wrap_forward(other, WrapperKind.CHECKPOINT, _calling(log, "copy"))
    other(x)
    assert log == ["copy"]
