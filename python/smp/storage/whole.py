"""Whole parameters, each on every rank of its data-parallel group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.data_parallel import broadcast_from_first
from smp.modules.materialize import plain_state
from smp.modules.training_dtypes import training_dtype
from smp.precision.holdings import Holding, load_value
from smp.precision.script_writes import OwnPiece, own
from smp.precision.shown_gradients import show_gradients
from smp.storage.half import cast_with_master, plan_castable
from smp.storage.protocol import MakeReal, Storage, refuse_thawed
from smp.storage.shards import Shard
from smp.tensor_parallel.sharding import interval_of
from smp.world.rank import Rank


class WholeParameters:
    """The parameters of the user's modules, unchanged; 16-bit training adds masters.

    Args:
        rank: rank of this process.
        root: the user's model; parameters of other pipeline ranks are placeholders.
    """

    shows_values = True
    gather_kinds: tuple[str, ...] = ()

    def __init__(self, rank: Rank, root: nn.Module) -> None:
        self._rank = rank
        self._root = root
        self.mixes_dtypes = self.has_steps = False
        self.holdings: dict[nn.Parameter, Holding] = {}
        self.shards: dict[nn.Parameter, Shard] = {}
        self._addresses: list[tuple[Holding, int]] = []

    def place(
        self,
        local: Sequence[tuple[str, nn.Parameter]],
        make_real: MakeReal,
        load_kept: Callable[[], None],
    ) -> None:
        make_real(lambda _: None)
        load_kept()
        split = [p for _, p in local if interval_of(p) is not None]
        whole = [p for _, p in local if interval_of(p) is None]
        broadcast_from_first(self._rank, whole + list(self._root.buffers()))
        broadcast_from_first(self._rank, split, "rdp_cp")
        dtypes = plan_castable(self._root, self._rank.config.half_dtype)
        self._lay_out(local)
        self._own(local)
        self._addresses = [(h, p.data_ptr()) for p, h in self.holdings.items() if p.numel()]
        self.has_steps = bool(self.holdings)
        if dtypes is not None:
            dtypes.cast(self._root)
            self.mixes_dtypes = dtypes.mixes

    def _lay_out(self, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Makes the holdings of parameters that have their values.

        Parameters are cast one by one, so that only one of them has an additional copy at a time.
        """
        half, has_masters = self._rank.config.half_dtype, self._rank.config.has_masters
        if half is None:
            return
        self.holdings = {
            parameter: cast_with_master(
                name, parameter, training_dtype(parameter, half), has_masters
            )
            for name, parameter in local
            if parameter.requires_grad and parameter.is_floating_point()
        }
        show_gradients(self.holdings.values())

    def _own(self, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Lets writes of the script reach masters, and explains errors about slices."""
        for name, parameter in local:
            held = self.holdings.get(parameter)
            if held is not None and held.has_copy:
                own(parameter, OwnPiece(name, held.begin, held.piece, held.master, self._written))
            elif interval_of(parameter) is not None:
                own(parameter, OwnPiece(name, 0, parameter.detach(), None, self._written))

    def _written(self) -> None:
        pass

    def thaw(self, name: str) -> None:
        half = self._rank.config.half_dtype
        if half is not None:
            refuse_thawed(name, "bf16" if half == torch.bfloat16 else "fp16")

    def join_groups(self) -> None:
        pass

    # ---- gradients

    def bucket_bytes(self, cap_bytes: int) -> int:
        return cap_bytes

    def sharding(self, kind: str) -> _C.Sharding | None:
        return None

    # ---- steps

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        for holding, address in self._addresses if trains else ():
            if holding.parameter.data_ptr() != address:
                raise ValueError(
                    f"{_C.rank_prefix()}parameter '{holding.name}' has been given other memory "
                    "(parameter.data = ..., or module.to(...)), which updates do not reach where "
                    "optimizer state is sharded or parameters have 16 bits; write into the memory "
                    "that it has, parameter.data.copy_(...), or load a state dict"
                )

    def end_step(self) -> None:
        pass

    def abandon_step(self) -> None:
        pass

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def after_update(self) -> None:
        pass

    # ---- values

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def write(self, target: Tensor, value: Tensor) -> None:
        load_value(target, value)

    def after_load(self) -> None:
        pass

    def whole(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        self.settle()
        return contextlib.nullcontext()

    def gathers(self, tensor: Tensor) -> bool:
        return False

    def gathered(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def state(self, keep: bool = True) -> dict[str, Any]:
        return plain_state(self._root) if keep else {}

    # ---- end

    def close(self) -> None:
        pass

    def make_real(self) -> Storage:
        return self
