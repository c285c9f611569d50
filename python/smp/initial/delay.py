"""Contexts in which models are made so that their initial values depend on seed and names alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from smp.initial.creation_values import noting_draws
from smp.initial.later_writes import note_value, noting_writes


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters of modules that are created inside get the same values in every layout.

    They are initialised by their module's own code, which is ``reset_parameters`` and the
    ``_init_weights`` of the Hugging Face model around it, on random numbers that depend on the seed
    of PyTorch when the model is wrapped and on the parameter's name in the model alone.

    Delayed, they are on the meta device until the model is partitioned; then each rank allocates
    its own ones, one module at a time. What constructors make them of, and write to them behind
    their module's own code, is repeated, on random numbers of seed and name if it draws them; what
    they compute of other delayed parameters cannot be, and wrapping raises a ``ValueError``.
    Parameters that come with values after their module was made (``from_pretrained``,
    ``load_state_dict(assign=True)``) are real and stay. Not delayed, they are real at once; when
    the model is wrapped, those that are still as their module's own code left them are drawn again,
    and all others stay: from a checkpoint, by a constructor, changed by the user. Buffers are real
    at once and stay in any case.

    Args:
        enabled: whether they are delayed.
    """
    with noting_draws():
        if enabled:
            with on_meta(), noting_writes():
                yield
        else:
            yield


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules that are created inside are on the meta device; nothing else."""
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        had_one = self.__dict__.get("_parameters", {}).get(name) is not None
        original(self, name, param)
        # What takes the place of another parameter was loaded, or is shared with a module.
        if param is not None and not param.is_meta and not had_one:
            delayed = nn.Parameter(param.to("meta"), param.requires_grad)
            note_value(param, delayed)
            self._parameters[name] = delayed

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
