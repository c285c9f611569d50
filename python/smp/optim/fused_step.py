"""Updates by optimizers that divide gradients by themselves: torch's fused ones and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp.optim.fused import FusedOptimizer
from smp.precision import grad_norm
from smp.precision.holdings import model_parameter_of, parameters_of
from smp.tensor_parallel.sharding import interval_of
from smp.world import device_numbers
from smp.world.rank import Rank


class FusedUpdates:
    """Makes updates with divided gradients.

    Args:
        rank: rank of this process.
        optimizer: optimizer that updates; :meth:`step` requires that it `divides`.

    Attributes:
        divides: whether the optimizer divides gradients while it reads them, as fused ones do.
        writes_copies: whether it writes ``_smp_copy`` of the tensors that it updates.
        skips: whether it changes nothing if ``found_inf`` is not 0, without the host. Torch's SGD
            does not count: its first update makes buffers that a skipped one leaves undefined.
    """

    def __init__(self, rank: Rank, optimizer: torch.optim.Optimizer) -> None:
        self._rank = rank
        self._optimizer = optimizer
        self.divides = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.writes_copies = isinstance(optimizer, FusedOptimizer)
        is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        self.skips = self.writes_copies or (self.divides and is_adam)
        self._are_split: Tensor | None = None  # see _split_mask
        self._split: list[bool] = []

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates."""
        return self._optimizer

    def update_now(self) -> None:
        """Applies the gradients that exist at the moment, in the middle of a backward."""
        if self.divides:
            self.step(1.0)
        else:
            self._optimizer.step()

    def step(
        self,
        divisor: float | Tensor,
        found_inf: Tensor | None = None,
        *,
        has_local: bool = True,
        given_found_inf: Tensor | None = None,
    ) -> Any:
        """Makes one update. The host does not wait.

        If the optimizer needs norms of whole gradients, this is collective over the ranks that hold
        parts of the same parameters, and over the ranks of a replica.

        Args:
            divisor: divisor of the gradients; a tensor if only the device has its value.
            found_inf: one number, for an optimizer that `skips`; if not 0, nothing changes. Or
                None.
            has_local: whether there is something to update on this rank.
            given_found_inf: number like ``found_inf``, set by a caller's scaler; or None.

        Returns:
            result of the optimizer.
        """
        target: Any = self._optimizer
        grad_scale = None
        if isinstance(divisor, Tensor) or divisor != 1.0:
            if not isinstance(divisor, Tensor):
                divisor = device_numbers.number(divisor, self._rank.device)
            grad_scale = divisor.float()  # as torch's fused optimizers expect
        if found_inf is not None:
            found_inf = found_inf.float()
            if given_found_inf is not None:
                found_inf = torch.maximum(found_inf, given_found_inf)
            given_found_inf = found_inf
        target.grad_scale, target.found_inf = grad_scale, given_found_inf
        if self.writes_copies:  # it is ours
            target.sum_norms = self._sum_norms if self._are_spread else None
            if target.wants_grad_norm and (self._are_spread or self._rank.sizes["mp"] > 1):
                parameters = parameters_of(self._optimizer)
                target.grad_norm = grad_norm.global_norm(self._rank, parameters).total
        try:
            return target.step() if has_local else None
        finally:
            del target.grad_scale, target.found_inf
            if self.writes_copies:
                target.sum_norms = target.grad_norm = None

    def _sum_norms(self, norms: Tensor, parameters: Sequence[Tensor], is_max: bool) -> Tensor:
        """Combines numbers of the elements here to those of whole parameters (`SumNorms`).

        Terms are added in order of rank, so that all ranks get the same bits.
        """
        combine = device_numbers.maxima if is_max else device_numbers.sums
        whole = combine(self._rank, norms.reshape(-1), ("shard",))
        if self._rank.sizes["tp"] > 1:
            over_ranks = combine(self._rank, whole, ("tp",)).view_as(norms)
            whole = torch.where(self._split_mask(parameters), over_ranks, whole.view_as(norms))
        return whole.view_as(norms)

    def _split_mask(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns a mask of the parameters that are split over tp, cached until it changes."""
        split = [interval_of(model_parameter_of(p)) is not None for p in parameters]
        if self._are_split is None or split != self._split:
            self._split = split
            self._are_split = torch.tensor(split, device=self._rank.device)
        return self._are_split

    @property
    def _are_spread(self) -> bool:
        """True if elements of one parameter may be on several ranks."""
        sizes = self._rank.sizes
        return sizes["shard"] > 1 or sizes["tp"] > 1
