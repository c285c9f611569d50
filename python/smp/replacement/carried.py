"""Finds what a module carries beside its arguments and values; its distributed form lacks it."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.initial.delay import on_meta
from smp.tensor_parallel import registry
from smp.tensor_parallel.registry import Arguments, Registration

# Tables and attributes that PyTorch, transformers and smp keep for themselves; the distributed
# form has its own or needs none.
_TABLES = ("_parameters", "_buffers", "_modules")
_BOOKKEEPING = frozenset(
    {
        "training",  # compared over all parts
        "_is_hf_initialized",
        "_use_kernels",
        "_weight_conversions",
        "_output_capturing_hooks_installed",
        "_require_grads_hook",
        "_require_grads_hooks",
        "gradient_checkpointing",  # see take_over_checkpointing
        "_gradient_checkpointing_func",
    }
)
_PARAMETER_BOOKKEEPING = frozenset({"_is_hf_initialized"})
# Hooks of transformers on modules of a family: adapters refuse what these would record, and
# inputs that require gradients change no values.
_FAMILY_HOOKS = ("install_output_capuring_hook.", "PreTrainedModel.enable_input_require_grads.")
_HOOK_TABLES = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_state_dict_hooks": "a state-dict hook",
    "_state_dict_pre_hooks": "a state-dict pre-hook",
    "_load_state_dict_pre_hooks": "a hook on loading state dicts",
    "_load_state_dict_post_hooks": "a hook on loading state dicts",
}
_FLAGS_OF_HOOKS = ("_forward_hooks_", "_forward_pre_hooks_", "_is_full_backward_hook")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


@dataclass
class Carried:
    """The state of a module beside its arguments and values.

    Attributes:
        lost: reason why a distributed form would behave differently; None if it would not.
        attributes: values set on the module itself, which are copied.
    """

    lost: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


def carried_by(module: nn.Module, registration: Registration, arguments: Arguments) -> Carried:
    """Inspects a whole module that is to be replaced.

    Args:
        module: instance of a registered class.
        registration: registration of its class.
        arguments: arguments of its ``__init__``.
    """
    result = Carried()
    result.lost = (
        _lost_of_parameters(module)
        or _lost_hooks(module, registration)
        or _lost_code(module)
        or _lost_modes(module)
    )
    # Classes of users are not constructed a second time: their __init__ may have side effects.
    if result.lost is None and registration.is_complete:
        fresh = _made_alike(module, arguments, torch.get_default_dtype())
        result.lost = _lost_of_structure(module, fresh)
        # A module made in 16 bits, as by `from_pretrained(dtype=...)`, has other buffer values.
        for dtype in {p.dtype for p in module.parameters()} & {torch.float16, torch.bfloat16}:
            if result.lost is not None:
                fresh = _made_alike(module, arguments, dtype)
                result.lost = _lost_of_structure(module, fresh)
        if result.lost is not None:
            former = _made_alike(module, _with_former(arguments), torch.get_default_dtype())
            # Scripts may set another activation function in the configuration after the model is
            # made: only the distributed form is to use it.
            if _lost_of_structure(module, former) is None:
                result.lost = None
        result.attributes = {
            key: value
            for key, value in module.__dict__.items()
            if key not in fresh.__dict__ and not _is_kept(key)
        }
    return result


# ---- parameters


def _lost_of_parameters(module: nn.Module) -> str | None:
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"its parameters are of several dtypes ({names})"
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"its parameter '{name}' is a {type(parameter).__name__}"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"there is a hook on its parameter '{name}'"
        for key in parameter.__dict__:
            if not _is_ours(key) and key not in _PARAMETER_BOOKKEEPING:
                return f"its parameter '{name}' has an attribute '{key}'"
    return None


# ---- hooks


def _lost_hooks(module: nn.Module, registration: Registration) -> str | None:
    own = registry.own_hooks_of(module)
    for name, part in module.named_modules():
        for table, what in _HOOK_TABLES.items():
            for hook in part.__dict__.get(table, {}).values():
                if id(hook) not in own and not _may_go(hook, registration):
                    return f"there is {what} on {_place(name)} ({_name_of(hook)})"
    return None


def _name_of(hook: Any) -> str:
    """Returns the name of a hook in its source: its function, or the class of a callable object."""
    function = inspect.unwrap(getattr(hook, "hook", hook))
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _may_go(hook: Any, registration: Registration) -> bool:
    function = inspect.unwrap(getattr(hook, "hook", hook))  # hooks of state dicts are wrapped
    source = getattr(function, "__module__", None) or ""
    if source.startswith("smp."):
        return True
    if registration.family is None or not source.startswith("transformers."):
        return False
    return str(getattr(function, "__qualname__", "")).startswith(_FAMILY_HOOKS)


# ---- code and modes


def _lost_code(module: nn.Module) -> str | None:
    """Returns which forward differs from the forward its class was defined with, or None."""
    for name, part in module.named_modules():
        if "forward" in part.__dict__:
            return f"{_place(name)} has a forward of its own, set on the instance"
    for cls in {type(part) for part in module.modules()}:
        stranger = _stranger_in(cls)
        if stranger is not None:
            return f"the forward of {cls.__name__} was replaced by one of {stranger}"
    return None


def _stranger_in(cls: type[nn.Module]) -> str | None:
    """Returns the foreign module whose code was patched into the forward of a class, or None."""
    holder = next(c for c in cls.__mro__ if "forward" in c.__dict__)
    home = {_package(holder.__module__), "torch", "smp"}
    function: Any = holder.__dict__["forward"]
    while function is not None:
        source = str(getattr(function, "__globals__", {}).get("__name__", holder.__module__))
        if _package(source) not in home:
            return source
        function = getattr(function, "__wrapped__", None)
    return None


def _package(name: str) -> str:
    return name.partition(".")[0]


def _lost_modes(module: nn.Module) -> str | None:
    for name, part in module.named_modules():
        if part.training != module.training:
            return (
                f"{_place(name)} is in {_mode(part)} mode, and what is around it in "
                f"{_mode(module)} mode"
            )
    return None


def _mode(module: nn.Module) -> str:
    return "training" if module.training else "evaluation"


# ---- structure


def _made_alike(module: nn.Module, arguments: Arguments, dtype: torch.dtype) -> nn.Module:
    """Makes a module of the same arguments: parameters on meta, buffers with their values."""
    args, kwargs = arguments
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), on_meta():
            return type(module)(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)


def _with_former(arguments: Arguments) -> Arguments:
    """Returns arguments with the default activation functions of their configuration classes."""
    args, kwargs = arguments
    return (
        tuple(_former(value) for value in args),
        {key: _former(value) for key, value in kwargs.items()},
    )


def _former(value: Any) -> Any:
    names = [
        n for n in ("hidden_act", "activation_function") if isinstance(getattr(value, n, 0), str)
    ]
    if not names:
        return value
    former, default = copy.deepcopy(value), type(value)()
    for name in names:
        setattr(former, name, getattr(default, name))
    return former


def _lost_of_structure(module: nn.Module, fresh: nn.Module) -> str | None:
    """Returns how a module differs from a fresh one of its class, or None."""
    others = dict(fresh.named_modules(remove_duplicate=False))
    parts = dict(module.named_modules(remove_duplicate=False))
    for name in parts.keys() ^ others.keys():
        return f"it has {'a' if name in parts else 'no'} part '{name}'"
    for name, part in parts.items():
        other = others[name]
        if type(part) is not type(other):
            expected = type(other).__name__
            return f"{_place(name)} is a {type(part).__name__} instead of a {expected}"
        problem = _lost_tensors(part, other) or _lost_attributes(part, other, name == "")
        if problem is not None:
            return problem if name == "" else f"{problem} of '{name}'"
    return None


def _lost_tensors(part: nn.Module, other: nn.Module) -> str | None:
    for kind, table, expected in (
        ("parameter", part._parameters, other._parameters),
        ("buffer", part._buffers, other._buffers),
    ):
        for name in sorted(table.keys() | expected.keys()):
            has, should_have = table.get(name), expected.get(name)
            if (has is None) != (should_have is None):
                return f"there is {'no' if has is None else 'a'} {kind} '{name}'"
            if has is None or should_have is None:
                continue
            if has.shape != should_have.shape:
                return f"the {kind} '{name}' has shape {list(has.shape)}"
            if kind == "buffer" and not _are_equal(has, should_have):
                return f"the values of the buffer '{name}' were changed"
    return None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Compares values up to what casts of a model lose and what it computes more precisely."""
    if a.is_meta or b.is_meta:
        return True
    b = b.to(a.device)
    if not a.is_floating_point():
        return torch.equal(a, b.to(a.dtype))
    return any(
        torch.allclose(a, b.to(rounded).to(a.dtype), rtol=1e-4, atol=1e-4, equal_nan=True)
        for rounded in (a.dtype, torch.bfloat16, torch.float16)
    )


def _lost_attributes(part: nn.Module, other: nn.Module, is_outermost: bool) -> str | None:
    has, expected = part.__dict__, other.__dict__
    for key in sorted(has.keys() | expected.keys()):
        if _is_kept(key):
            continue
        if key not in has:
            return f"the attribute '{key}' is missing"
        if key not in expected:
            if is_outermost and not callable(has[key]):
                continue  # it is copied
            return f"there is an attribute '{key}'"
        if not _is_same(has[key], expected[key]):
            return f"the attribute '{key}' was changed"
    return None


def _is_same(a: Any, b: Any) -> bool:
    """Compares values where possible; objects of one class are taken for equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return bool(a == b) or (a != a and b != b)
    if isinstance(a, Tensor):
        return a.shape == b.shape and _are_equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, functools.partial):
        return _is_same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__
    return not isinstance(a, type | types.BuiltinFunctionType)


def _is_kept(key: str) -> bool:
    """Returns whether an attribute is compared in another way, or is not the user's."""
    return (
        key in _TABLES
        or key in _HOOK_TABLES
        or key in _BOOKKEEPING
        or key.startswith(_FLAGS_OF_HOOKS)
        or _is_ours(key)
    )


def _is_ours(key: str) -> bool:
    return key.startswith("_smp_")


def _place(name: str) -> str:
    return f"its part '{name}'" if name else "it"
