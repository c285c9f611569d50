"""``smp.tp_register`` and ``smp.tp_register_with_module``: distributed forms of users' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

import smp._C as _C
from smp.nn import DistributedEmbedding, DistributedLinear, DistributedModule
from smp.tensor_parallel.registry import Arguments, Declined, HookAdapter, Registration, register

_Class = TypeVar("_Class", bound=type[nn.Module])
InitHook = Callable[..., Arguments | Declined | None]


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: InitHook | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Decorates a class so that its modules have ``dist_module`` as their distributed form.

    See :func:`tp_register_with_module` for the arguments.
    """

    def decorate(module_cls: _Class) -> _Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: InitHook | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Registers how marked modules of a class are replaced.

    Without a hook, its arguments are passed on unchanged. Weights are copied where the distributed
    module has parameters of the same names and (whole) shapes. Modules that were made before the
    class was registered stay as they are.

    Args:
        module_cls: class of the original modules; subclasses are not included.
        dist_module: class of the modules that replace them.
        init_hook: function that takes the arguments of the original's ``__init__`` and returns
            ``(args, kwargs)`` for the distributed one, or None to leave that module alone.
        forward_hook: function that takes the arguments of the original's ``forward`` and returns
            ``(args, kwargs)`` for the distributed one.
        return_hook: function that takes the result of the distributed ``forward`` and returns the
            result that callers of the original expect.

    Raises:
        ValueError: ``module_cls`` is no `nn.Module`, or ``dist_module`` no `DistributedModule`.
    """
    for cls, base in ((module_cls, nn.Module), (dist_module, DistributedModule)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ValueError(
                f"{_C.rank_prefix()}tp_register: expected a subclass of {base.__module__}."
                f"{base.__qualname__}, got {cls!r}"
            )
    has_hooks = forward_hook is not None or return_hook is not None
    register(
        Registration(
            module_cls,
            dist_module,
            init_hook,
            adapter=(lambda _: HookAdapter(forward_hook, return_hook)) if has_hooks else None,
        )
    )


def _linear(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Linear)
    return (module.in_features, module.out_features, module.bias is not None), {}


def _embedding(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Embedding)
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return (
        (module.num_embeddings, module.embedding_dim),
        {name: getattr(module, name) for name in options},
    )


def register_builtin() -> None:
    """Registers the modules of PyTorch that have a distributed form."""
    register(Registration(nn.Linear, DistributedLinear, arguments_of=_linear))
    register(Registration(nn.Embedding, DistributedEmbedding, arguments_of=_embedding))


register_builtin()
