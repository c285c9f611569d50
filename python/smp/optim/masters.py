"""Replaces parameters by masters in the groups of a torch optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import smp._C as _C
from smp.config.schema import Config
from smp.model.torch_training.coupling import Coupling, coupling
from smp.optim.adam import FusedAdam
from smp.optim.fused import FusedOptimizer
from smp.precision.holdings import (
    Holding,
    cut,
    holding_of,
    holding_with_master,
    model_parameter_of,
    parameters_of,
)
from smp.storage.shards import lay_out
from smp.tensor_parallel.sharding import dim_of, interval_of
from smp.world import runtime
from smp.world.rank import Rank


def choose_storage(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Tells `FusedAdam` where its moments are and how 16-bit parameters keep their digits.

    Raises:
        ValueError: ``bf16_masters`` or ``offload_optimizer_state`` needs `FusedAdam`, or the first
            contradicts its ``masters``; ``update_in_backward`` needs an optimizer that updates each
            parameter by itself.
    """
    if config.update_in_backward:
        _refuse_coupled(optimizer, config)
    kind = config.bf16_masters
    if not isinstance(optimizer, FusedAdam):
        name = type(optimizer).__name__
        if kind != "fp32":
            raise ValueError(
                f'{_C.rank_prefix()}smp config: bf16_masters="{kind}": parameters have no FP32 '
                f"masters, and {name} would lose most updates in BF16; use "
                'smp.optimizers.FusedAdam, or leave bf16_masters at "fp32"'
            )
        if config.offload_optimizer_state:
            raise ValueError(
                f"{_C.rank_prefix()}smp config: offload_optimizer_state: {name} updates on the "
                "device with all of its state there; use smp.optimizers.FusedAdam, which has the "
                "update of AdamW and of Adam, or set offload_optimizer_state=False"
            )
        return
    if optimizer.masters not in ("fp32", kind):
        raise ValueError(
            f'{_C.rank_prefix()}FusedAdam has masters="{optimizer.masters}", but the configuration '
            f'has bf16_masters="{kind}", which decides; set bf16=True and '
            f'bf16_masters="{optimizer.masters}", or leave the argument out'
        )
    optimizer.masters = kind
    optimizer.set_moments_on_host(config.offload_optimizer_state)


def _refuse_coupled(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raises a ValueError if an update needs more than a parameter's gradient on this rank."""
    if isinstance(optimizer, FusedAdam):
        return
    reads = None
    if isinstance(optimizer, FusedOptimizer):
        reads = "norms of all gradients"
    elif (found := coupling(optimizer)) is Coupling.PARAMETERS:
        reads = found.value
    elif config.tensor_parallel_degree > 1 and (
        found is Coupling.ELEMENTS or config.optimizer_state == "tensors"
    ):
        reads = "the parts of a parameter on other ranks"
    if reads is not None:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: update_in_backward: {type(optimizer).__name__} reads "
            f"{reads} in an update, but the gradients of a bucket are applied before others exist; "
            "use smp.optimizers.FusedAdam or torch.optim.AdamW, or set update_in_backward=False"
        )


def adopt_masters(optimizer: torch.optim.Optimizer, are_whole: Sequence[bool]) -> None:
    """Replaces parameters that have a holding by its master, one by one and in their places.

    Their state in the optimizer moves along. Sharded masters of a group are laid out behind each
    other. May be called again.

    Args:
        optimizer: optimizer of torch.
        are_whole: whether the state of a group's parameters stays whole (see `WholeTensors`).
    """
    lay_out(map(model_parameter_of, group["params"]) for group in optimizer.param_groups)
    for group, is_whole in zip(optimizer.param_groups, are_whole, strict=True):
        for position, parameter in enumerate(group["params"]):
            holding = holding_of(parameter)
            if holding is None:
                continue
            group["params"][position] = holding.master
            if holding.has_copy:
                # A fused optimizer writes the rounded master here.
                holding.master._smp_copy = holding.piece  # type: ignore[attr-defined]
            if parameter in optimizer.state:
                entry = optimizer.state.pop(parameter)
                optimizer.state[holding.master] = _held_state(optimizer, entry, holding, is_whole)


def _held_state(
    optimizer: torch.optim.Optimizer, entry: dict[str, Any], holding: Holding, is_whole: bool
) -> dict[str, Any]:
    """Returns a rank's elements of the state of a whole parameter, or all of them."""
    if isinstance(optimizer, FusedAdam):
        wide = optimizer.wide_entry(holding.parameter, entry)
        return optimizer.stored_entry(holding.master, _cut_entry(wide, holding, is_whole))
    return _cut_entry(entry, holding, is_whole)


def _cut_entry(entry: dict[str, Any], holding: Holding, is_whole: bool) -> dict[str, Any]:
    whole = list(holding.parameter.shape)
    dtype = torch.promote_types(holding.master.dtype, torch.float32)
    return {
        name: (value if is_whole else cut(value, holding)).to(dtype)
        if isinstance(value, Tensor) and list(value.shape) == whole
        else value
        for name, value in entry.items()
    }


def holdings_of(optimizer: torch.optim.Optimizer) -> list[Holding]:
    """Returns the holdings whose masters the optimizer updates."""
    holdings = (holding_with_master(p) for p in parameters_of(optimizer))
    return [holding for holding in holdings if holding is not None]


class MasterViews:
    """The names under which FP16 optimizers show their parameters; one list per group.

    `DistributedOptimizer` inherits them; they read its ``param_groups``.
    """

    param_groups: list[dict[str, Any]]
    _rank: Rank
    _runtime: runtime.Runtime

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's 16-bit parameters."""
        return [[h.parameter for h in group] for group in self._holding_groups(True)]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Masters of the model's 16-bit parameters, in the same order."""
        return [[h.master for h in group] for group in self._holding_groups(True)]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Parameters that are updated themselves, without a copy."""
        return [
            [p for p in group["params"] if (h := holding_with_master(p)) is None or not h.has_copy]
            for group in self.param_groups
        ]

    @property
    def master_params_created(self) -> bool:
        """True once there are masters, which is after the partition of the model."""
        return any(self._holding_groups(True))

    @property
    def fp32paramid_from_fp16paramid(self) -> dict[int, int]:
        """``id`` of the master by ``id`` of the model's parameter."""
        return {id(h.parameter): id(h.master) for g in self._holding_groups(True) for h in g}

    @property
    def fp32_from_fp16_paramid_groups(self) -> list[list[int]]:
        """``id`` of each master of :attr:`fp32_from_fp16_groups`."""
        return [[id(h.master) for h in group] for group in self._holding_groups(True)]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor | None]:
        """Masters of this rank's parts of sharded parameters, as one flat tensor per group.

        The tensors have no gaps (see `FlatGroup`). Needs sharded data parallelism.
        """
        if self._rank.config.sharded_data_parallel_degree == 1:
            raise AttributeError("fp32_partitioned_groups_flat: parameters are not sharded")
        groups = (map(model_parameter_of, group["params"]) for group in self.param_groups)
        return [group.flat for group in lay_out(groups)]

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of sharded parameters together."""
        return self._runtime.process_groups.of("shard")

    @property
    def master_is_distributed(self) -> dict[int, bool]:
        """Flags by ``id`` of the master: whether tensor-parallel ranks split the parameter."""
        return {key: dim is not None for key, dim in self.master_distribution_axis.items()}

    @property
    def master_distribution_axis(self) -> dict[int, int | None]:
        """The dim along which the parameter is split, by ``id`` of the master."""
        axes: dict[int, int | None] = {}
        for group in self.param_groups:
            for p in group["params"]:
                interval = interval_of(model_parameter_of(p))
                axes[id(p)] = dim_of(interval)
        return axes

    def _holding_groups(self, has_copy: bool) -> list[list[Holding]]:
        groups: list[list[Holding]] = []
        for group in self.param_groups:
            holdings = (holding_with_master(p) for p in group["params"])
            groups.append([h for h in holdings if h is not None and h.has_copy == has_copy])
        return groups
