"""Puts distributed modules in the place of marked ones, weights included."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp import _C, memory, runtime
from smp.nn import huggingface
from smp.nn.gradient_checkpointing import take_over_checkpointing
from smp.partition import contexts
from smp.partition.tree import READS_CHILDREN
from smp.replacement.adapters import adapter_in
from smp.replacement.marks import Mark, is_candidate, mark_of
from smp.tensor_parallel import sharding
from smp.tensor_parallel.registry import (
    Declined,
    Registration,
    Unsupported,
    arguments_of,
    registration_of,
)

_log = logging.getLogger("smp")

_NEW_WEIGHTS = (
    "gets new weights: it was made while PreTrainedModel.init_weights was switched off, so its "
    "own were never initialised; to keep values, give them by from_pretrained or load_state_dict "
    "before the model is wrapped"
)


def replace_marked(root: nn.Module) -> tuple[nn.Module, list[Registration]]:
    """Replaces the outermost marked modules that have a distributed form, in place.

    Args:
        root: a model; it may be replaced itself.

    Returns:
        the model, and the registrations that were used, each once.
    """
    huggingface.register_available()
    replacement = _Replacement(root)
    new_root = replacement.visit(root, "")
    return new_root, list(replacement.used.values())


class _Replacement:
    """One walk over a model, outermost modules first.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.used: dict[type[nn.Module], Registration] = {}
        self._done: dict[nn.Module, nn.Module] = {}
        self._said: set[tuple[type[nn.Module], str]] = set()
        self._holders: dict[Tensor, set[nn.Module]] = {}
        self._readers: dict[nn.Module, nn.Module] = {}
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(parameter, set()).add(module)
            if isinstance(module, READS_CHILDREN):
                inside = (part for part in module.modules() if part is not module)
                self._readers.update(dict.fromkeys(inside, module))

    def visit(self, module: nn.Module, name: str, around: tuple[nn.Module, ...] = ()) -> nn.Module:
        """The module that takes the place of ``module``; itself in most cases.

        Args:
            module: of the model.
            name: where it is in there.
            around: the modules that it is in, nearest first.
        """
        if module in self._done:
            return self._done[module]
        self._done[module] = module
        if is_candidate(module):
            new = self._distributed_form(module, name, around)
            if isinstance(new, nn.Module):
                self._done[module] = new
                return new
            self._say(module, name, f"is not distributed: {new.reason}")
        for key, child in list(module._modules.items()):
            if child is not None:
                path = f"{name}.{key}" if name else key
                module._modules[key] = self.visit(child, path, (module, *around))
        return module

    def _say(self, module: nn.Module, name: str, what: str) -> None:
        """Tells the user of rank 0, once per class."""
        if runtime.current().global_rank == 0 and (type(module), what) not in self._said:
            self._said.add((type(module), what))
            _log.warning("smp: %s ('%s') %s", type(module).__name__, name, what)

    def _distributed_form(
        self, module: nn.Module, name: str, around: Sequence[nn.Module]
    ) -> nn.Module | Declined:
        registration, mark = registration_of(module), mark_of(module)
        assert registration is not None and mark is not None
        if self._shares_weights(module):
            return Declined("it shares parameters with modules outside of it")
        if module in self._readers:
            return Declined(
                f"the {type(self._readers[module]).__name__} around it reads its parameters "
                "instead of calling it, and has to find them whole"
            )
        adapter = adapter_in(module)
        if adapter is not None:
            return Declined(
                f"it has adapters of PEFT inside, {adapter} for one, which its distributed form "
                "would not have; parts of it without adapters may be distributed"
            )
        made = _construct(module, registration, mark, around)
        if isinstance(made, Declined):
            return made
        problem = _take_over(module, made)
        if problem is not None:
            return problem
        is_worth_it = registration.was_initialised is None or registration.was_initialised(module)
        if not is_worth_it and not any(p.is_meta for p in module.parameters()):
            self._say(module, name, _NEW_WEIGHTS)
        _take_over_values(module, made, registration, name, is_worth_it)
        _install_adapter(made, registration)
        take_over_checkpointing(module, made)
        for key, parameter in module.named_parameters():
            sharding.mark_replaced(parameter, f"{name}.{key}" if name else key)
        self.used[type(module)] = registration
        return made

    def _shares_weights(self, module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(not self._holders[p] <= inside for p in module.parameters())


def _construct(
    module: nn.Module, registration: Registration, mark: Mark, around: Sequence[nn.Module]
) -> nn.Module | Declined:
    arguments = arguments_of(module, around)
    if arguments is None:
        return Declined(
            "it is a copy, or was made before its class was registered, so the arguments of its "
            "__init__ are not known"
        )
    args, kwargs = tuple(arguments[0]), dict(arguments[1])
    if registration.init_hook is not None:
        translated = registration.init_hook(*args, **kwargs)
        if translated is None:
            return Declined("its init hook declines")
        if isinstance(translated, Declined):
            return translated
        args, kwargs = tuple(translated[0]), dict(translated[1])
    if registration.options_of is not None:
        kwargs |= registration.options_of(module)
    signature = inspect.signature(registration.dist_module)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{_C.rank_prefix()}{type(module).__name__} was registered with "
            f"{registration.dist_module.__name__}{signature}, which does not take what its init "
            f"hook returned, {args} and {kwargs}: {error}"
        ) from error
    for key, value in mark.options.items():
        if key in signature.parameters:
            bound.arguments[key] = value
    try:
        with memory.on_meta():  # see _take_over for their values
            made = registration.dist_module(*bound.args, **bound.kwargs)
    except Unsupported as error:
        return Declined(str(error))
    return made


def _take_over(module: nn.Module, made: nn.Module) -> Declined | None:
    """Gives a new module what the original is besides its arguments and values: dtype, mode."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) == 1:
        made.to(dtype=dtypes.pop())
    made.train(module.training)
    frozen = [not p.requires_grad for p in module.parameters()]
    if all(frozen) and frozen:
        made.requires_grad_(False)
    elif any(frozen):
        return Declined(
            "some of its parameters require gradients and some do not; freeze after wrapping"
        )
    partition = contexts.mark_of(module)
    if partition is not None:
        contexts.set_partition(made, partition)
    if hasattr(module, "config"):
        made.config = module.config
    return None


def _take_over_values(
    module: nn.Module,
    made: nn.Module,
    registration: Registration,
    name: str,
    is_worth_it: bool,
) -> None:
    """Weights of the original, as far as it has them and they are worth it; new ones else."""
    is_delayed = any(parameter.is_meta for parameter in module.parameters())
    translate = None if registration.translators is None else registration.translators[1]
    missing: list[str] = []
    if is_worth_it:
        state: Mapping[str, Tensor] = module.state_dict()
        if translate is not None:
            state = translate(dict(state))
        missing = inherit(made, state)
    if missing and registration.family is not None:
        raise RuntimeError(
            f"{_C.rank_prefix()}the weights of {type(module).__name__} have no entries for "
            f"{missing} of {type(made).__name__}"
        )
    if is_delayed:
        # Whole tensors of the original are made and cut one by one, when they are needed.
        memory.keep_original(made, module if is_worth_it else None, translate)
        return
    if missing:
        _log.info("smp: %s gets new values for %s", type(made).__name__, missing)
    memory.initialise_delayed(
        made, lambda _: True, runtime.current().device, name=name, on_ready=_move_to_cpu
    )


def _move_to_cpu(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.cpu()


def inherit(made: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Fills parameters with their slices of whole tensors; names those that ``state`` lacks.

    Those whose whole tensor has no values stay what they are.
    """
    missing = []
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            whole = state.get(name)
            if whole is None or list(whole.shape) != sharding.whole_shape(parameter):
                missing.append(name)
                continue
            if whole.is_meta:
                continue
            part = sharding.slice_of(whole, sharding.interval_of(parameter))
            memory.fill(parameter, part)
        for name, buffer in made.named_buffers():
            if name in state:
                buffer.copy_(state[name])
    return missing


def _adapted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    adapter = self._smp_adapter(self)  # one per call: microbatches take turns
    args, kwargs = adapter.forward_args(*args, **kwargs)
    return adapter.wrap(type(self).forward(self, *args, **kwargs))


def _install_adapter(made: nn.Module, registration: Registration) -> None:
    if registration.adapter is None:
        return
    made._smp_adapter = registration.adapter  # type: ignore[assignment]
    # A bound method, so that a deep copy has its own.
    made.__dict__["forward"] = types.MethodType(_adapted_forward, made)
