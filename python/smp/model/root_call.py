"""A call of a whole model: arguments in the form for the module, and its changes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import smp._C as _C
from smp.modules import host_values
from smp.modules.argument_containers import ArgumentContainers, Change
from smp.precision import cast_outputs


class RootCall:
    """The arguments of one call, on the device of the model.

    Args:
        arguments: (args, kwargs) of the step function.
        device: device of the model.
        casts: whether outputs are cast to float32.
    """

    def __init__(self, arguments: Any, device: torch.device, casts: bool) -> None:
        self._given = _given(arguments)
        self._casts = casts
        on_device = device.type == "cpu"
        prepared = arguments if on_device else host_values.upload(arguments, device)
        # A copy to a device copies containers, too.
        self._taken = self._given if prepared is arguments else _given(prepared)
        self._prepared = prepared
        #: number of containers among the arguments, and what the module has done to them
        self.filled: tuple[int, list[Change]] = (0, [])

    def run(self, call: Callable[..., Any]) -> Any:
        """Returns the output of the model, after its changes to the arguments are applied."""
        args, kwargs = self._prepared
        output = call(*args, **kwargs)
        taken = self._taken
        filled = len(taken.containers), taken.changes()
        if taken is self._given and not self._casts:
            self.filled = filled
            return output
        referenced = taken.with_references(output)
        self.filled = filled
        if self._casts:
            referenced, self.filled = cast_outputs(referenced), cast_outputs(filled)
        return self.settle(self.filled, referenced)

    def settle(self, filled: tuple[int, list[Change]], output: Any) -> Any:
        """Applies changes of another rank's arguments to the arguments of this call.

        Args:
            filled: changes of the call that ran the model, here or on the first pipeline rank.
            output: output of this call.

        Returns:
            the output, in which parts of the arguments are the caller's own objects.

        Raises:
            RuntimeError: the arguments have other containers here.
        """
        count, changes = filled
        if changes and count != len(self._given.containers):
            raise RuntimeError(
                f"{_C.rank_prefix()}the model changes lists or dictionaries among its "
                f"arguments, of which there are {count} where it runs and "
                f"{len(self._given.containers)} here; call the model with the same arguments on "
                "all ranks, and with each container once"
            )
        return self._given.settle(changes, output)


def _given(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> ArgumentContainers:
    args, kwargs = arguments
    return ArgumentContainers.of_call(args, kwargs, objects=False)
