"""The interface of a storage of parameters to models, optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

import smp._C as _C
from smp.precision.holdings import Holding
from smp.storage.shards import Shard

#: Makes all parameters of this rank real, and calls back with each one when it has its values.
MakeReal = Callable[[Callable[[nn.Parameter], None]], None]


class Storage(Protocol):
    """Stores the parameters of one model that belong to this rank.

    There are three implementations: `WholeParameters`, `FlatParameters` (whole parameters in flat
    buckets, of which a rank updates a part) and `ShardedParameters` (a rank keeps a part of each
    parameter). Only `choose.make_storage` decides between them.

    Attributes:
        holdings: parts and masters that the optimizer updates, by trainable parameter; parameters
            without a holding are updated themselves.
        shards: parts of the parameters of which this rank keeps a part alone.
        shows_values: whether modules show the values of their parameters outside of forwards, too.
        gather_kinds: axes whose ranks take part when whole values are read.
        mixes_dtypes: whether activations of 16 bits meet wider buffers in code of the user.
        has_steps: whether steps have to begin and to end here.
    """

    holdings: dict[nn.Parameter, Holding]
    shards: dict[nn.Parameter, Shard]
    shows_values: bool
    gather_kinds: tuple[str, ...]
    mixes_dtypes: bool
    has_steps: bool

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
            ValueError: on every rank, for a parameter that has no 16-bit form but needs one.
        """
        ...

    def thaw(self, name: str) -> None:
        """Begins training of a parameter that was frozen when parameters were placed.

        Args:
            name: name of the parameter.

        Raises:
            ValueError: the tensors that the optimizer updates were laid out without it.
        """
        ...

    def join_groups(self) -> None:
        """Joins the groups of the ranks that go on after a failure; values stay. Not collective.

        Values that other ranks have updated are gathered again in the next step.
        """
        ...

    # ---- gradients

    def bucket_bytes(self, cap_bytes: int) -> int:
        """Returns the size of a bucket of gradients, if the model's is ``cap_bytes``."""
        ...

    def sharding(self, kind: str) -> _C.Sharding | None:
        """Returns how gradients are reduced into parts; None: every rank has whole ones.

        Args:
            kind: kind of the group, "dp_cp" or "rdp_cp".
        """
        ...

    # ---- steps

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        """Begins a step, which is the same on all ranks with the same arguments."""
        ...

    def end_step(self) -> None: ...

    def abandon_step(self) -> None:
        """Abandons a step that has failed. Not collective."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Returns a context for code, other than forwards, that may read parameters.

        Collective where forwards are.
        """
        ...

    def after_update(self) -> None:
        """Takes over updates by the optimizer.

        Collective over the ranks that hold one copy of the optimizer's state.
        """
        ...

    # ---- values

    def settle(self) -> None:
        """Waits for values that are being sent to this rank."""
        ...

    def finish(self) -> None:
        """Waits like `settle` at the end of the run, when the other ranks may have left."""
        ...

    def write(self, target: Tensor, value: Tensor) -> None:
        """Writes a value to a parameter or buffer and its master; `after_load` has to follow.

        Args:
            target: parameter or buffer of the model.
            value: whole value, or the slice of this tensor-parallel rank.
        """
        ...

    def after_load(self) -> None:
        """Takes over values that were written by `write` or to the memory of `parts.Entry`."""
        ...

    def whole(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Shows whole values, or slices, of these parameters of this rank inside. Collective."""
        ...

    def gathers(self, tensor: Tensor) -> bool:
        """Returns whether `gathered` of this tensor is collective."""
        ...

    def gathered(self, tensor: Tensor) -> Tensor:
        """Returns the whole value of a tensor, detached. Collective over `gather_kinds`."""
        ...

    def state(self, keep: bool = True) -> dict[str, Any]:
        """Returns the state dict of the model, detached, with whole values of this rank's tensors.

        Collective over `gather_kinds`.

        Args:
            keep: False: takes part in the gathers, and returns nothing.
        """
        ...

    # ---- end

    def close(self) -> None:
        """Removes all wrappers from the modules, which may outlive their model.

        May be called twice.
        """
        ...

    def make_real(self) -> Storage:
        """Gives all parameters memory of their own, with whole values. Collective.

        Returns:
            storage that replaces this one.
        """
        ...


def refuse_thawed(name: str, option: str) -> None:
    """Raises a ValueError: state was laid out without a parameter that was thawed since.

    Args:
        name: name of the parameter.
        option: configuration option for which state is laid out once.
    """
    raise ValueError(
        f"{_C.rank_prefix()}parameter '{name}' was frozen when the model was partitioned, and has "
        f"been thawed since (requires_grad_(True)); with {option} the state of what is trained is "
        "laid out once. Let it require a gradient until the first step is over, and freeze it "
        "then until it is to be trained; or save a checkpoint, and thaw it before "
        "smp.DistributedModel(...) in a job that resumes from there"
    )
