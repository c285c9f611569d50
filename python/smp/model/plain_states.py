"""State dicts that a script requests from plain modules, of which this rank has a part."""

from __future__ import annotations

from torch import nn

import smp._C as _C
from smp.modules.materialize import is_placeholder


def guard_states(root: nn.Module) -> None:
    """Makes ``state_dict()`` of modules raise while their parameters are elsewhere.

    ``save_pretrained`` and functions of adapters ask the plain model, and would write placeholders
    (NaN) into a file. With ``keep_vars=True``, which the library uses, names and shapes are
    available. A module that has its values again returns its state.

    Args:
        root: the user's model, partitioned.
    """
    for module in root.modules():
        if module._parameters:
            module.register_state_dict_pre_hook(_refuse_placeholders)


def _refuse_placeholders(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars:
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and is_placeholder(parameter):
            raise RuntimeError(
                f"{_C.rank_prefix()}state_dict() of a module whose parameters are not on this "
                f"rank: '{prefix}{name}' is a placeholder here. Call state_dict() of the "
                "DistributedModel on all ranks: it gathers whole values under the same names (for "
                "Hugging Face: save_pretrained(folder, state_dict=model.state_dict()))"
            )
