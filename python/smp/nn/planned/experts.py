"""Experts of which a rank holds some features, and modules that return a rank's term of a sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.nn.layout import Layout
from smp.nn.module import DistributedModule
from smp.tensor_parallel import regions


class PlannedTerm(DistributedModule):
    """The base of the classes of modules whose results are terms of a sum over the ranks.

    The forward of the former class runs inside. Its inputs are common, and their gradients are
    summed over the ranks.

    Attributes:
        _smp_layout: layout of the model.
        _smp_name: name of the module in the model.
        _smp_inside: the module is in a block, where activations are common.
        _smp_word: word of the plan for the module.
    """

    is_indivisible = True

    _smp_word: str
    _smp_layout: Layout
    _smp_name: str
    _smp_inside: bool


class PlannedIdentity(DistributedModule):
    """The base of the class of an expert that returns its input: ``moe_identity_expert``."""


def term_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that experts of this class get: ``moe_tp_experts``."""
    return _wrapped(cls, PlannedTerm, _sum_of_terms)


def identity_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of a whole expert that divides its input, so that the ranks' sum is one."""
    return _wrapped(cls, PlannedIdentity, _share)


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _wrapped(
    cls: type[nn.Module], base: type[nn.Module], run: Callable[..., Any]
) -> type[nn.Module]:
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _classes:
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, functools.partial(inner, self), args, kwargs)

        members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        members |= {"__doc__": cls.__doc__, "forward": forward}
        _classes[cls, base] = type(cls.__name__, (base, cls), members)
    return _classes[cls, base]


def _sum_of_terms(
    module: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    has_own = module._smp_layout.has_own_batches and not module._smp_inside
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    is_routed = module._smp_word != "moe_tp_experts" or any(
        not x.is_floating_point() for x in tensors
    )
    if has_own and not (is_routed and _have_same_tokens(tensors)):
        raise ValueError(
            f"{_C.rank_prefix()}{module._smp_name}: experts that a plan splits got tensors of "
            f"shapes {[list(x.shape) for x in tensors]}; expected tokens and the numbers of their "
            "experts, with as many tokens along dim 0, or along the first two, in each: those of "
            "all ranks are gathered. With prescaled_batch all ranks have them"
        )

    def common(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        is_real = x.is_floating_point()
        if has_own:
            return regions.gather(x, 0, grad="sum" if is_real else "own")
        return regions.copy(x) if is_real else x

    output = inner(*map(common, args), **{key: common(x) for key, x in kwargs.items()})
    if not isinstance(output, Tensor):
        raise RuntimeError(
            f"{_C.rank_prefix()}{module._smp_name}: experts that a plan splits gave a "
            f"{type(output).__name__}; expected one tensor, which is summed over the ranks. Leave "
            "them out of the plan"
        )
    return regions.reduce_scatter(output, 0) if has_own else regions.reduce(output)


def _have_same_tokens(tensors: list[Tensor]) -> bool:
    """Returns whether each tensor is ``[tokens, *]`` or ``[samples, tokens of each, *]``."""
    if not all(x.dim() for x in tensors):
        return False
    num = max(x.shape[0] for x in tensors)
    return all(num in (x.shape[0], math.prod(x.shape[:2])) for x in tensors)


def _share(
    module: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return inner(args[0] / regions.size(), *args[1:], **kwargs)
