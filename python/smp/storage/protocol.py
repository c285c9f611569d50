"""What a model, its optimizer and its checkpoints ask of the storage of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

import smp._C as _C
from smp.precision.holdings import Holding
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import Interval, interval_of, whole_shape

#: Makes all parameters of this rank real, and calls back with each one that has its values.
MakeReal = Callable[[Callable[[nn.Parameter], None]], None]


@dataclass(frozen=True)
class Stored:
    """What lies on this rank of a parameter or buffer.

    Attributes:
        shape: of the whole tensor.
        part: which elements of it ``values`` are.
        values: in the model's dtype; the memory itself.
        updated: which elements the optimizer updates here, if it does.
        master: these, in 16-bit training of what is trained; the memory itself.
        slice_: of this tensor-parallel rank; None: all ranks of its group have the same.
        is_shown: the model's own tensor shows the values; otherwise it shows a placeholder.
    """

    shape: tuple[int, ...]
    part: Part
    values: Tensor
    updated: Part
    master: Tensor | None
    slice_: Interval | None
    is_shown: bool

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        holding: Holding | None,
        values: Tensor,
        begin: int = 0,
        *,
        is_shown: bool = True,
    ) -> Stored:
        """The elements of the flattened ``tensor`` from ``begin`` on are ``values``."""
        slice_ = interval_of(tensor)
        part = Part.of_slice(tensor.shape, slice_, begin, values.numel())
        shape, updated, master = whole_shape(tensor), part, None
        if holding is not None:
            updated = replace(part, flat_begin=holding.begin, flat_numel=holding.numel)
            master = holding.master.detach() if holding.has_copy else None
        return cls(tuple(shape), part, values, updated, master, slice_, is_shown)


class Storage(Protocol):
    """Stores the parameters of one model that belong to this rank.

    Three implementations: `WholeParameters`, `FlatParameters` (whole parameters in flat buckets, of
    which a rank updates a part) and `ShardedParameters` (a rank keeps a part of each parameter).
    Which one it is `choose.make_storage` decides; nobody else asks.

    Attributes:
        holdings: what the optimizer updates in the place of trainable parameters, by parameter;
            parameters that are not there are updated themselves.
        shows_values: modules show the values of their parameters outside of forwards, too.
        gather_kinds: axes whose ranks take part when whole values are read.
        mixes_dtypes: activations of 16 bits meet wider buffers in code of the user.
    """

    holdings: dict[nn.Parameter, Holding]
    shows_values: bool
    gather_kinds: tuple[str, ...]
    mixes_dtypes: bool

    def place(
        self,
        local: Sequence[tuple[str, nn.Parameter]],
        make_real: MakeReal,
        load_kept: Callable[[], None],
    ) -> None:
        """Takes over the parameters of this rank, with the values of the first replica.

        Collective over the replicas.

        Args:
            local: names in the whole model and parameters of this rank, in one order on all ranks
                of their data-parallel group.
            make_real: see `MakeReal`; called once.
            load_kept: loads the states that were given before; called once.

        Raises:
            ValueError: on every rank, for a parameter that has no 16-bit form where it is to have
                one.
        """
        ...

    def thaw(self, name: str) -> None:
        """A parameter that was frozen when parameters were placed is trained from now on.

        Args:
            name: of the parameter.

        Raises:
            ValueError: what the optimizer updates was laid out without it.
        """
        ...

    # ---- of gradients

    def bucket_bytes(self, cap_bytes: int) -> int:
        """Size of a bucket of gradients, where the model's is ``cap_bytes``."""
        ...

    def sharding(self, kind: str) -> _C.Sharding | None:
        """How gradients over a kind of group are reduced into parts; None: every rank has all.

        Args:
            kind: "dp" or "rdp".
        """
        ...

    # ---- of steps

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        """A step begins that is alike wherever the arguments are."""
        ...

    def end_step(self) -> None: ...

    def abandon_step(self) -> None:
        """The step has failed. Not collective."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Around code that is no forward and may read parameters. Collective where
        forwards are."""
        ...

    def after_update(self) -> None:
        """The optimizer has changed what this rank holds. Collective over the ranks that hold one
        copy of the optimizer's state."""
        ...

    # ---- of values

    def settle(self) -> None:
        """Waits for values that are on their way to this rank."""
        ...

    def finish(self) -> None:
        """`settle` at the end of the run, when the other ranks may have left."""
        ...

    def stored(self, tensor: Any) -> Stored:
        """What lies here of a parameter or buffer of this rank."""
        ...

    def write(self, target: Tensor, value: Tensor) -> None:
        """Gives a parameter or buffer, and its master, a value; `after_load` follows at the end.

        Args:
            target: of the model.
            value: whole, or the slice of this tensor-parallel rank.
        """
        ...

    def after_load(self) -> None:
        """Values were written to what lies here, by `write` or to the memory of `stored`."""
        ...

    def whole(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """These parameters of this rank show their whole values, or slices, inside. Collective."""
        ...

    def gathers(self, tensor: Tensor) -> bool:
        """Is `gathered` of this tensor collective?"""
        ...

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole value of a parameter or buffer, detached. Collective over `gather_kinds`."""
        ...

    def state(self, keep: bool = True) -> dict[str, Any]:
        """The state dict of the model, detached, with whole values of what is on this rank.

        Collective over `gather_kinds`.

        Args:
            keep: False: takes part in the gathers, and returns nothing.
        """
        ...

    # ---- of the end

    def close(self) -> None:
        """Takes everything from around the modules, which may outlive their model. May be called
        twice."""
        ...

    def make_real(self) -> Storage:
        """Gives all parameters memory of their own, with whole values. Collective.

        Returns:
            what takes the place of this storage.
        """
        ...
