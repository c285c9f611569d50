"""Finds optimizers that need more of a model than a rank has of it.

Adam updates each element by itself, so it does not matter which rank has it. LARS, Muon and
Adafactor need the whole parameter, so do optimizers with 8-bit state, whose elements share scales,
and an optimizer that clips by the norm of all gradients needs all of them; on parts of these they
would train on with other numbers. A trial finds the kind of an optimizer: it updates small tensors
whole and cut, together and alone, and compares the results.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.world.rank import Rank

_STEPS = (3.0, 30.0, 1.0)  # sizes of gradients in three steps
#: Shapes of tensors, and elements of the first part. State in 8 bits is for tensors with thousands
#: of elements, in blocks, between which the second cut is not.
_TRIALS = (((4, 6), 12), ((96, 128), 6239))
_ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
    torch.optim.ASGD, torch.optim.Rprop,
}  # fmt: skip
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Coupling(Enum):
    """The values on which the update of an element depends, besides that element."""

    NONE = "nothing else"
    ELEMENTS = "other elements of its parameter"
    PARAMETERS = "other parameters"


def refuse_parts(rank: Rank, optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError if this rank has too little for an optimizer that is not wrapped.

    The library's own optimizers ask other ranks for the values that they need.
    """
    option = _what_cuts(rank)
    if option is None or _is_ours(optimizer):
        return
    found = coupling(optimizer)
    if found is Coupling.PARAMETERS or (found is Coupling.ELEMENTS and _cuts_parameters(rank)):
        raise _refusal(optimizer, found, option)


def needs_whole_tensors(rank: Rank, optimizer: torch.optim.Optimizer) -> list[bool]:
    """Returns for each group of a wrapped optimizer whether its tensors have to be updated whole.

    The key ``optimizer_state`` decides, with "auto" the trial. Where ranks have whole tensors, and
    for the library's own optimizers, no group needs more than it has.

    Raises:
        ValueError: the optimizer needs several parameters at a time, or whole ones against the key;
            its state is in tensors of a class of its own.
    """
    option, no_group = _what_cuts(rank), [False] * len(optimizer.param_groups)
    if _is_ours(optimizer):
        return no_group
    _refuse_own_tensors(optimizer)
    if option is None:
        return no_group
    found = couplings(optimizer)
    if Coupling.PARAMETERS in found:
        raise _refusal(optimizer, Coupling.PARAMETERS, option)
    if not _cuts_parameters(rank):
        return no_group
    rule = rank.config.optimizer_state
    if rule == "elements" and Coupling.ELEMENTS in found:
        raise _refusal(optimizer, Coupling.ELEMENTS, option)
    return [rule == "tensors" or each is Coupling.ELEMENTS for each in found]


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("smp.")


def _cuts_parameters(rank: Rank) -> bool:
    return rank.sizes["shard"] > 1 or rank.sizes["tp"] > 1


def _refusal(optimizer: torch.optim.Optimizer, found: Coupling, option: str) -> ValueError:
    remedies = [
        "an optimizer that updates each element by itself, such as torch.optim.AdamW",
        "smp.optimizers.FusedLAMB",
    ]
    if found is Coupling.ELEMENTS:
        remedies.insert(0, 'smp.DistributedOptimizer with optimizer_state "auto"')
    return ValueError(
        f"{_C.rank_prefix()}DistributedOptimizer: {type(optimizer).__name__} updates elements "
        f"by {found.value} (found by a trial on small tensors), and with {option} no rank has "
        "all of these, so its updates would differ from those of one process. Use "
        f"{', or '.join(remedies)}, or leave that option out"
    )


def _what_cuts(rank: Rank) -> str | None:
    """Returns the option that leaves only parts to a rank; options that cut parameters first."""
    if rank.sizes["shard"] > 1:
        sharded = rank.config.sharded_data_parallel_degree > 1
        return "sharded_data_parallel_degree" if sharded else "shard_optimizer_state"
    for axis, option in (("tp", "tensor_parallel_degree"), ("pp", "pipeline_parallel_degree")):
        if rank.sizes[axis] > 1:
            return option
    return None


def coupling(optimizer: torch.optim.Optimizer) -> Coupling:
    """Returns the closest coupling of an optimizer's groups (see `couplings`)."""
    return max(couplings(optimizer), key=list(Coupling).index, default=Coupling.NONE)


def couplings(optimizer: torch.optim.Optimizer) -> list[Coupling]:
    """Tries each group of an optimizer without state; its parameters stay unchanged.

    An optimizer that needs a closure gets one, with gradients that depend on the elements alone. An
    optimizer that draws random numbers, or cannot be tried, counts as one without coupling.
    """
    groups = range(len(optimizer.param_groups))
    if type(optimizer) in _ELEMENTWISE:
        return [Coupling.NONE for _ in groups]
    state = torch.get_rng_state()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = [_of_group(optimizer, idx) for idx in groups]
        is_random = not torch.equal(torch.get_rng_state(), state)
        return [Coupling.NONE for _ in groups] if is_random else found
    finally:
        torch.set_rng_state(state)


def _of_group(optimizer: torch.optim.Optimizer, idx: int) -> Coupling:
    if not optimizer.param_groups[idx]["params"]:
        return Coupling.NONE
    trials = (_of_shape(optimizer, idx, shape, cut) for shape, cut in _TRIALS)
    return next((found for found in trials if found is not Coupling.NONE), Coupling.NONE)


def _of_shape(
    optimizer: torch.optim.Optimizer, idx: int, shape: tuple[int, int], cut: int
) -> Coupling:
    numel = shape[0] * shape[1]
    first, second = torch.linspace(-1, 2, numel), torch.linspace(0.3, -0.8, numel)
    whole = [first.view(shape), second.view(shape)]
    try:
        wants_closure, alone = False, [_updated(optimizer, idx, [one]) for one in whole]
    except Exception:
        try:
            wants_closure, alone = True, [_updated(optimizer, idx, [one], True) for one in whole]
        except Exception:
            return Coupling.NONE  # its first step will raise an error of its own
    together = _updated(optimizer, idx, whole, wants_closure)
    if not _are_close(together, [one for [one] in alone]):
        return Coupling.PARAMETERS
    try:
        pieces = _updated(optimizer, idx, list(first.split([cut, numel - cut])), wants_closure)
    except Exception:  # it wants a matrix
        return Coupling.ELEMENTS
    is_close = _are_close([torch.cat(pieces).view(shape)], alone[0])
    return Coupling.NONE if is_close else Coupling.ELEMENTS


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(first, second, strict=True)
    )


def _updated(
    optimizer: torch.optim.Optimizer,
    idx: int,
    values: Sequence[Tensor],
    wants_closure: bool = False,
) -> list[Tensor]:
    """Returns small tensors updated by a copy of the optimizer; their values give the gradients.

    Gradients of a closure depend on the updated values, too.
    """
    return _tried(optimizer, idx, values, wants_closure)[0]


def _tried(
    optimizer: torch.optim.Optimizer, idx: int, values: Sequence[Tensor], wants_closure: bool
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Returns what `_updated` returns, and the copy, with its state."""
    device = optimizer.param_groups[idx]["params"][0].device
    if device.type == "meta":  # the model gets its memory later
        device = torch.device("cpu")
    tensors = [nn.Parameter(value.clone().to(device)) for value in values]
    copied = _copy(optimizer, idx, tensors)
    step: Callable[..., Any] = type(optimizer).step  # without wrappers of a scheduler

    def give_gradients(size: float, moves: bool) -> Tensor:
        for tensor, value in zip(tensors, values, strict=True):
            moved = tensor.detach().cpu() if moves else 0.0
            tensor.grad = (size * torch.sin(7 * value + moved)).to(device)
        return torch.ones((), device=device)

    for size in _STEPS:
        give_gradients(size, moves=False)
        if wants_closure:
            step(copied, functools.partial(give_gradients, size, moves=True))
        else:
            step(copied)
    return [tensor.detach().cpu() for tensor in tensors], copied


def _refuse_own_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError if the state has tensors that cannot be cut, sent and saved."""
    if type(optimizer) in _ELEMENTWISE:
        return
    values = [torch.linspace(-1, 2, shape[0] * shape[1]).view(shape) for shape, _ in _TRIALS]
    random_state = torch.get_rng_state()
    for idx, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        try:
            with torch.compiler.set_stance("force_eager"):
                state = _tried(optimizer, idx, values, False)[1].state
        except Exception:
            continue  # it needs a closure, or its first step will raise an error of its own
        finally:
            torch.set_rng_state(random_state)
        entries = [entry for entry in state.values() if isinstance(entry, dict)]  # or a number
        found = {type(value) for entry in entries for value in entry.values()}
        for kind in found - {Tensor, nn.Parameter, nn.Buffer}:
            if issubclass(kind, Tensor):
                raise ValueError(
                    f"{_C.rank_prefix()}DistributedOptimizer: {type(optimizer).__name__} keeps its "
                    f"state in tensors of the class {kind.__name__} (found by a trial on small "
                    "tensors), which cannot be cut, sent and saved as plain tensors are. Use "
                    'smp.optimizers.FusedAdam(state_dtype="int8" or "bf16") for state in few bytes'
                )


def _copy(
    optimizer: torch.optim.Optimizer, idx: int, tensors: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Returns an optimizer with the options of a group, and without the state of the other one."""
    known: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for group in optimizer.param_groups:
        known |= {id(parameter): tensors[0] for parameter in group["params"]}
        known[id(group["params"])] = tensors
    for name in _HOOKS:
        known[id(getattr(optimizer, name, None))] = OrderedDict()
    known.pop(id(None), None)
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    known[id(optimizer)] = copied
    for name, value in vars(optimizer).items():
        if name != "step":
            vars(copied)[name] = copy.deepcopy(value, known)
    group = copied.param_groups[idx]
    copied.param_groups = [group]
    lr = group.get("lr")
    if lr is not None:  # a warm-up may begin at 0
        group["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
    return copied
