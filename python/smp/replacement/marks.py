"""Marks the modules that the user wants to be distributed, with their options."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp import nn as smp_nn
from smp.initial.delay import delay_param_initialization
from smp.modules.creation import CreationMarks
from smp.nn import huggingface
from smp.replacement.plans import check_plan
from smp.tensor_parallel import registry
from smp.world import runtime

#: Options of v1 that scripts pass and that change nothing here: fused operators are used wherever
#: they compute the same, and the word embedding of a split language model is always split.
WITHOUT_EFFECT = frozenset(
    {"fused_softmax", "fused_dropout", "fused_bias_gelu", "distribute_embedding"}
)


@dataclass(frozen=True)
class Mark:
    """A wish of the user's for one module.

    Attributes:
        enabled: whether it is to be distributed.
        options: keyword arguments for its distributed form; those it does not take are ignored.
        plan: the user's plan for the outermost modules with this mark, or None.
    """

    enabled: bool
    options: Mapping[str, Any]
    plan: Mapping[str, str] | None = None


_marks: CreationMarks[Mark] = CreationMarks()


def mark_of(module: nn.Module) -> Mark | None:
    """Returns the mark of a module, or None."""
    return _marks.get(module)


@contextlib.contextmanager
def tensor_parallelism(
    enabled: bool = True, *, plan: Mapping[str, str] | None = None, **options: Any
) -> Iterator[None]:
    """Marks modules that are created inside to be split over the tensor-parallel ranks.

    They are replaced when the model is wrapped in `DistributedModel`. Where marked modules are
    nested, the outermost one with a distributed form is replaced (see
    :func:`smp.tp_register`). The innermost context wins. The function works as a decorator, too.

    Args:
        enabled: False keeps modules that are created inside as they are.
        plan: split of the modules that are created inside: words by path, ``*`` for one component,
            as ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``. Paths are relative to
            the outermost module that is created inside. The plan wins over registered forms and
            over the model's own plan; parts that it does not name stay whole. See
            docs/tensor_parallelism.md for the words.
        options: arguments for ``__init__`` of the distributed modules, instead of those taken
            from the original ones. ``fused_softmax``, ``fused_dropout``, ``fused_bias_gelu`` and
            ``distribute_embedding`` are accepted and have no effect: fused operators are used
            wherever they compute the same, and word embeddings of split language models are
            always split.

    Raises:
        ValueError: an option is an argument of no distributed module (the text names the nearest
            one), or a word of the plan is unknown (the text lists the known ones).
    """
    huggingface.register_available()
    _check_options(options)
    with _marks.marking(Mark(enabled, options, _checked(plan))):
        yield
        huggingface.register_available()  # imported inside


def set_tensor_parallelism(
    module: nn.Module,
    enabled: bool = True,
    *,
    plan: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Marks an existing module and everything below it, any time before it is wrapped.

    Args:
        module: part of a model, or all of it.
        enabled: False switches the whole subtree off.
        plan: see :func:`tensor_parallelism`; paths are relative to the module.
        options: see :func:`tensor_parallelism`.

    Raises:
        ValueError: ``module`` is not a module, or as in :func:`tensor_parallelism`.
        RuntimeError: the module is part of a wrapped model.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{_C.rank_prefix()}set_tensor_parallelism: expected an nn.Module, got "
            f"{type(module).__name__}; call it once for each module of a list"
        )
    _check_options(options)
    current = _run()
    wrapped = [] if current is None else current.wrapped.models
    if any(isinstance(m, nn.Module) and module in set(m.modules()) for m in wrapped):
        raise RuntimeError(
            f"{_C.rank_prefix()}set_tensor_parallelism: the module is part of a DistributedModel "
            "already; call it before the model is wrapped"
        )
    mark = Mark(enabled, options, _checked(plan))
    for part in module.modules():
        _marks[part] = mark


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Sets everything that matters while a model is made, in one context.

    Args:
        tensor_parallelism: see ``enabled`` of :func:`smp.tensor_parallelism`.
        dtype: default dtype inside; the current one if not given.
        tensor_parallel_config: options for distributed modules; ignored without
            ``tensor_parallelism``. The option ``zero_init``, a bool, is always used: parameters
            never exist whole, each rank makes only its shards. It has an effect with
            ``sharded_data_parallel_degree`` > 1.

    Raises:
        ValueError: as in :func:`smp.tensor_parallelism`, even without ``tensor_parallelism``.

    Initial values depend only on the seed and on names, see :func:`smp.delay_param_initialization`.
    With the configuration key ``delayed_parameter_initialization``, and with ``zero_init``,
    parameters are allocated and initialised where they are needed.
    """
    delays = _delays(bool(tensor_parallel_config.pop("zero_init", False)))
    before = torch.get_default_dtype()
    with _tensor_parallelism(tensor_parallelism, **tensor_parallel_config):
        with delay_param_initialization(delays):
            torch.set_default_dtype(before if dtype is None else dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def _run() -> runtime.Runtime | None:
    return runtime.current() if runtime.is_initialized() else None


def _checked(plan: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if plan is None:
        return None
    try:
        return check_plan(plan)
    except ValueError as error:
        raise ValueError(f"{_C.rank_prefix()}tensor parallelism: {error}") from None


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses options that no distributed module takes, those of users' classes included."""
    ours = (getattr(smp_nn, name) for name in smp_nn.__all__)
    classes = registry.distributed_classes() | {
        cls for cls in ours if inspect.isclass(cls) and issubclass(cls, nn.Module)
    }
    names = {name for cls in classes for name in inspect.signature(cls).parameters}
    known = WITHOUT_EFFECT | {name for name in names if not name.startswith("_")}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, sorted(known), n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {sorted(known)}"
            raise ValueError(
                f"{_C.rank_prefix()}tensor parallelism has no option '{option}'; {hint}. Those of "
                "your own modules are known once smp.tp_register has been called for their class"
            )


def _delays(zero_init: bool) -> bool:
    """Returns whether parameters are made only when the model is partitioned."""
    current = _run()
    if current is None:
        return False
    config = current.rank.config
    shards = zero_init and config.sharded_data_parallel_degree > 1
    return config.delayed_parameter_initialization or shards


_tensor_parallelism = tensor_parallelism  # an argument of `model_creation` hides the name


def is_candidate(module: nn.Module) -> bool:
    """Returns whether a module is marked and its class has a distributed form."""
    mark = mark_of(module)
    return mark is not None and mark.enabled and registry.registration_of(module) is not None
