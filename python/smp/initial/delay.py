"""Contexts in which models are made so that their initial values depend on seed and names alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from smp.initial.creation_values import note_value, noting_writers


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Makes parameters of modules created inside get the same values in every layout.

    The parameters are initialised by their module's own code: ``reset_parameters`` and the
    ``_init_weights`` of the Hugging Face model around it. Random numbers depend on the seed of
    PyTorch when the model is wrapped, and on the parameter's name in the model, alone.

    Delayed parameters are on the meta device until the model is partitioned; then each rank
    allocates its own ones, one module at a time. Values that constructors make them of, or write
    after their module's own code, are computed again; random ones depend on seed and name. Values
    computed from other delayed parameters cannot be, and wrapping raises a ``ValueError``.
    Parameters that get values after their module was made (``from_pretrained``,
    ``load_state_dict(assign=True)``) are real and stay.

    Parameters that are not delayed are real at once. When the model is wrapped, those that still
    have the values of their module's own code are drawn again; values from a checkpoint, a
    constructor or the user stay. Buffers are always real at once and stay.

    Args:
        enabled: whether parameters are delayed.
    """
    with on_meta() if enabled else contextlib.nullcontext(), noting_writers():
        yield


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Puts the parameters, and only these, of modules created inside on the meta device."""
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        had_one = self.__dict__.get("_parameters", {}).get(name) is not None
        original(self, name, param)
        # A parameter that replaces another one was loaded, or is shared with a module.
        if param is not None and not param.is_meta and not had_one:
            delayed = nn.Parameter(param.to("meta"), param.requires_grad)
            note_value(param, delayed)
            self._parameters[name] = delayed

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
