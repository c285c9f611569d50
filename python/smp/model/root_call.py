"""One call of a whole model: its arguments as the module takes them, and what it puts into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import smp._C as _C
from smp.modules import host_values
from smp.modules.given import Change, Given
from smp.precision import cast_outputs


class RootCall:
    """The arguments of one call, on the device of the model.

    Args:
        arguments: (args, kwargs) of the step function.
        device: of the model.
        casts: whether outputs are cast to float32.
    """

    def __init__(self, arguments: Any, device: torch.device, casts: bool) -> None:
        self._given = _given(arguments)
        self._casts = casts
        on_device = device.type == "cpu"
        prepared = arguments if on_device else host_values.upload(arguments, device)
        # Copies to a device have made copies of containers.
        self._taken = self._given if prepared is arguments else _given(prepared)
        self._prepared = prepared
        #: number of containers among the arguments, and what the module has done to them
        self.filled: tuple[int, list[Change]] = (0, [])

    def run(self, call: Callable[..., Any]) -> Any:
        """The output of the model; what it has put into its arguments is there."""
        args, kwargs = self._prepared
        output = call(*args, **kwargs)
        taken = self._taken
        filled = len(taken.containers), taken.changes()
        if taken is self._given and not self._casts:
            self.filled = filled
            return output
        told = taken.told(output)
        self.filled = filled
        if self._casts:
            told, self.filled = cast_outputs(told), cast_outputs(filled)
        return self.settle(self.filled, told)

    def settle(self, filled: tuple[int, list[Change]], output: Any) -> Any:
        """Does to the arguments what was done to others like them.

        Args:
            filled: of the call that ran the model, here or on the first pipeline rank.
            output: of this call.

        Returns:
            the output; what of the arguments is in it is the caller's.

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


def _given(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Given:
    args, kwargs = arguments
    return Given.to(args, kwargs, objects=False)
