"""Gradients of one model, averaged over its replicas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import smp._C as _C
from smp import data_parallel
from smp.precision.holdings import master_of
from smp.storage.choose import lockstep_of
from smp.storage.protocol import Storage
from smp.world.rank import Rank


class GradientReduction:
    """Lays out the gradients of this rank's parameters and reduces them, step by step.

    Args:
        rank: of this process.
        overlap: reduce buckets while backward goes on.
        averages: divide by the number of microbatches.
        passes_per_reduction: steps whose gradients are added up before they are reduced.
        bucket_cap_bytes: size of a bucket.

    Attributes:
        reducers: one per group of ranks, once the parameters are placed.
        trainable_bytes: on this rank, as on its peers in other replicas.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        overlap: bool,
        averages: bool,
        passes_per_reduction: int,
        bucket_cap_bytes: int,
    ) -> None:
        self._rank = rank
        self._overlap = overlap
        self.averages = averages
        self._passes_per_reduction = passes_per_reduction
        self._bucket_cap_bytes = bucket_cap_bytes
        self.reducers: list[_C.Reducer] = []
        self.trainable_bytes = 0
        self._past_reductions = 0  # of reducers that others took the place of
        self._dtypes = data_parallel.KeptDtypes([])
        self._kept = data_parallel.KeptGradients([], master_of)
        self._frozen = data_parallel.FrozenParameters([])
        self._hook: data_parallel.CommHook | None = None
        self._has_begun = False  # a step that trains

    def lay_out(self, local: Sequence[tuple[str, nn.Parameter]], storage: Storage) -> None:
        """Lays out gradients for parameters of the dtypes that they have now.

        Collective over the replicas; not while a step runs.

        Args:
            local: names in the whole model, and parameters of this rank in their final place.
            storage: of the parameters.
        """
        trainable = [(name, p) for name, p in local if p.requires_grad]
        self.trainable_bytes = sum(p.numel() * p.element_size() for _, p in trainable)
        self._dtypes = data_parallel.KeptDtypes(trainable)
        self._kept = data_parallel.KeptGradients(trainable, master_of)
        self._frozen = data_parallel.FrozenParameters(local)
        self._past_reductions = self.num_reductions
        self.reducers = []  # the former ones let go of the parameters
        self.reducers = data_parallel.make_reducers(
            self._rank,
            trainable,
            target_of=master_of,
            sharding_of=storage.sharding,
            bucket_cap_bytes=storage.bucket_bytes(self._bucket_cap_bytes),
            overlap=self.overlaps,
            average=self.averages,
            passes_per_reduction=self._passes_per_reduction,
            hook=self._hook,
        )

    @property
    def overlaps(self) -> bool:
        """May ranks exchange gradients and parameters while others work?"""
        return self._overlap and self._rank.config.overlapping_allreduce

    @property
    def is_hooked(self) -> bool:
        """Does a hook of the user's sum and average gradients?"""
        return self._hook is not None

    @property
    def num_reductions(self) -> int:
        """Steps whose gradients this rank has taken part in reducing."""
        now = sum(reducer.stats.num_reductions for reducer in self.reducers)
        return self._past_reductions + now

    @property
    def in_step(self) -> bool:
        """Are gradients on their way?"""
        return any(reducer.in_step for reducer in self.reducers)

    def thawed(self) -> str | None:
        """Name of a parameter that was thawed since gradients were laid out; None: there is none.

        Raises:
            RuntimeError: gradients of several steps are added up, and some are there already.
        """
        name = self._frozen.thawed()
        if name is not None and self._passes_per_reduction > 1 and self._has_begun:
            raise RuntimeError(
                f"{_C.rank_prefix()}parameter '{name}' was thawed (requires_grad_(True)) after "
                f"training began, while gradients of {self._passes_per_reduction} "
                "backward_passes_per_step are added up before they are summed over replicas; "
                "thaw parameters before the first step, or train with "
                "backward_passes_per_step=1"
            )
        return name

    def use_hook(self, hook: data_parallel.CommHook, root: nn.Module) -> bool:
        """Lets a hook sum gradients, in place of an earlier one. Collective over the replicas.

        Args:
            hook: the user's.
            root: the user's model.

        Returns:
            whether gradients that are laid out have to be laid out anew.

        Raises:
            ValueError: gradients are not summed by buckets that all replicas have whole.
            RuntimeError: some gradients are kept that are not summed yet.
        """
        lockstep = lockstep_of(self._rank)
        of_storage = None if lockstep is None else f"{lockstep.key}={lockstep.value}"
        data_parallel.refuse_comm_hook(self._rank, self.overlaps, of_storage)
        if self._hook is not None:
            self._hook.take_over(hook)
            return False
        if self._passes_per_reduction > 1 and self._has_trained(root):
            raise RuntimeError(
                f"{_C.rank_prefix()}register_comm_hook: gradients of "
                f"{self._passes_per_reduction} backward_passes_per_step are added up before they "
                "are summed over replicas, so the first hook is registered before training begins; "
                "others may take its place later"
            )
        self._hook = hook
        return True

    def _has_trained(self, root: nn.Module) -> bool:
        has_grads = any(master_of(p).grad is not None for p in root.parameters())
        return has_grads or self._has_begun or self.num_reductions > 0

    # ---- steps

    def begin_step(self, num_microbatches: int, may_overlap: bool = True) -> None:
        """A step that trains begins. Collective over the replicas."""
        self._has_begun = True
        self._frozen.begin_step()
        # Nothing orders two reducers against each other on two replicas before the end of a step;
        # on a device their sums would wait for each other. The last one has the split layers, which
        # are most of a model.
        is_ahead = any(group.is_stream_ordered for group in self._rank.comms.made)
        for reducer in self.reducers:
            is_last = reducer is self.reducers[-1]
            overlaps = may_overlap and (is_last or not is_ahead)
            reducer.begin_step(num_microbatches, overlaps, not self.is_hooked)
        self._kept.begin_step()

    def shadow_step(self) -> None:
        """Takes part in a step of other replicas with nothing to add. Collective over them."""
        for reducer in self.reducers:
            reducer.begin_step(1, are_shares=True)
        for reducer in reversed(self.reducers):
            reducer.end_step()

    def microbatch_done(self, mb: int) -> None:
        """All gradients of a microbatch have come. A server tells the reducers by itself."""
        for reducer in reversed(self.reducers):
            if reducer.in_step:
                reducer.finish_microbatch(mb)

    def end_step(self) -> None:
        """Waits until the gradients of the step are reduced."""
        self._dtypes.check()
        self._frozen.check()
        self._kept.check()
        for reducer in reversed(self.reducers):  # the one that overlaps comes first
            reducer.end_step()

    def abandon_step(self) -> None:
        """The step has failed; its gradients are lost. Not collective."""
        self._kept.forget()
        for reducer in self.reducers:
            if reducer.in_step:
                reducer.cancel_step()

    def close(self) -> None:
        """Lets go of the parameters."""
        self.reducers = []
