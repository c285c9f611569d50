"""Gradients of one model, averaged over its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

import smp._C as _C
from smp import data_parallel
from smp.model.backward_updates import BackwardUpdates
from smp.model.laid_out import LaidOutParameters
from smp.model.parameter_hooks import ParameterHooks
from smp.precision.holdings import master_of
from smp.storage.choose import lockstep_of
from smp.storage.protocol import Storage
from smp.world.rank import Rank


class GradientReduction:
    """Lays out the gradients of this rank's parameters and reduces them, step by step.

    Args:
        rank: rank of this process.
        overlap: whether to reduce buckets during the backward.
        averages: whether to divide by the number of microbatches.
        passes_per_reduction: steps whose gradients are added up before they are reduced.
        bucket_cap_bytes: size of a bucket.

    Attributes:
        reducers: one per group of ranks, once the parameters are placed.
        trainable_bytes: bytes of trainable parameters on this rank; equal in other replicas.
        script_hooks: hooks of the script on the parameters.
        all_have_hooks: whether all replicas have as many of them.
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
        #: Updates during the backward; None: gradients stay until the next step.
        self.updates: BackwardUpdates | None = None
        self._overlap = overlap
        self.averages = averages
        self._passes_per_reduction = passes_per_reduction
        self._bucket_cap_bytes = bucket_cap_bytes
        self.reducers: list[_C.Reducer] = []
        self.trainable_bytes = 0
        self._past_reductions = 0  # counted by reducers that were replaced
        self._laid_out = LaidOutParameters()
        self.script_hooks = ParameterHooks(rank)
        self._hook: data_parallel.CommHook | None = None
        self.all_have_hooks = True
        self._has_begun = False  # whether a training step has begun
        if rank.config.update_in_backward:
            self.updates = self._updates_in_backward()

    def _updates_in_backward(self) -> BackwardUpdates:
        passes = self._passes_per_reduction
        for argument, is_so in {
            f"backward_passes_per_step={passes}": passes > 1,
            "overlapping_allreduce=False": not self.overlaps,
        }.items():
            if is_so:
                raise ValueError(
                    f"{_C.rank_prefix()}DistributedModel: {argument}: gradients have to exist when "
                    "the backward is over, but update_in_backward applies and drops each of them "
                    "in the backward; leave the argument out, or set update_in_backward=False"
                )
        return BackwardUpdates(self._rank)

    def lay_out(
        self,
        local: Sequence[tuple[str, nn.Parameter]],
        storage: Storage,
        ties: Mapping[str, Sequence[str]],
    ) -> None:
        """Lays out gradients for the present dtypes of the parameters.

        Collective over the replicas; not while a step runs.

        Args:
            local: names in the whole model, and parameters of this rank in their final place.
            storage: storage of the parameters.
            ties: further names of a parameter, by name.
        """
        trainable = [(name, p) for name, p in local if p.requires_grad]
        self.trainable_bytes = sum(p.numel() * p.element_size() for _, p in trainable)
        self._laid_out = LaidOutParameters(local)
        obstacle = self._obstacle_to_hooks(storage)
        self.script_hooks = ParameterHooks(self._rank, trainable, obstacle)
        self._past_reductions = self.num_reductions
        self.reducers = []  # the former reducers drop their references to the parameters
        self.reducers = data_parallel.make_reducers(
            self._rank,
            trainable,
            target_of=master_of,
            sharding_of=storage.sharding,
            bucket_cap_bytes=storage.bucket_bytes(self._bucket_cap_bytes),
            overlap=self.overlaps,
            average=self.averages,
            passes_per_reduction=self._passes_per_reduction,
            ties=ties,
            hook=self._hook,
            apply=None if self.updates is None else self.updates.apply,
        )
        if self.updates is not None:
            self.updates.lay_out(trainable)

    def _obstacle_to_hooks(self, storage: Storage) -> str:
        reasons = {
            "each rank updates pieces": storage.sharding("dp_cp") is not None,
            "update_in_backward applies gradients in the backward": self.updates is not None,
            "backward_passes_per_step adds up gradients before they are reduced": (
                self._passes_per_reduction > 1
            ),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    @property
    def overlaps(self) -> bool:
        """True if ranks may exchange gradients and parameters while others compute."""
        return self._overlap and self._rank.config.overlapping_allreduce

    @property
    def is_hooked(self) -> bool:
        """True if a hook of the user sums and averages gradients."""
        return self._hook is not None

    @property
    def num_reductions(self) -> int:
        """Number of steps whose gradients this rank has taken part in reducing."""
        now = sum(reducer.stats.num_reductions for reducer in self.reducers)
        return self._past_reductions + now

    @property
    def has_frozen(self) -> bool:
        """True if gradients were laid out without some parameters, which may be thawed."""
        return bool(self._laid_out.frozen)

    @property
    def in_step(self) -> bool:
        """True while gradients are being reduced."""
        return any(reducer.in_step for reducer in self.reducers)

    def thawed(self) -> str | None:
        """Returns the name of a parameter thawed since gradients were laid out, or None.

        Raises:
            RuntimeError: gradients of several steps are being added up, and some exist already.
        """
        name = self._laid_out.thawed()
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
        """Lets a hook sum gradients, in place of an earlier hook. Collective over the replicas.

        Args:
            hook: the user's hook.
            root: the user's model.

        Returns:
            whether gradients that are laid out have to be laid out again.

        Raises:
            ValueError: gradients are not summed in buckets that all replicas have whole.
            RuntimeError: some gradients are kept and not summed yet.
        """
        lockstep = lockstep_of(self._rank)
        of_storage = None if lockstep is None else f"{lockstep.key}={lockstep.value}"
        data_parallel.refuse_comm_hook(self._rank, self.overlaps, of_storage)
        if self._hook is not None:
            self._hook.take_over(hook)
            return False
        if self._passes_per_reduction > 1 and self._has_trained(root):
            raise RuntimeError(
                f"{_C.rank_prefix()}register_comm_hook: gradients of {self._passes_per_reduction} "
                "backward_passes_per_step are added up before they are summed over replicas, so "
                "register the first hook before training begins; another one may replace it later"
            )
        self._hook = hook
        return True

    def _has_trained(self, root: nn.Module) -> bool:
        has_grads = any(master_of(p).grad is not None for p in root.parameters())
        return has_grads or self._has_begun or self.num_reductions > 0

    # ---- steps

    def begin_step(self, num_microbatches: int, may_overlap: bool = True) -> None:
        """Begins a training step. Collective over the replicas."""
        self._has_begun = True
        if self.updates is not None:
            self.updates.begin_step()
        if self.script_hooks.is_needed:
            self.script_hooks.begin_step(num_microbatches, self.all_have_hooks)
        # Two reducers have no common order on two replicas before the end of a step; on a device
        # their sums would wait for each other. There only the last one overlaps: it has the split
        # layers, which are most of a model.
        for reducer in self.reducers:
            is_last = reducer is self.reducers[-1]
            overlaps = may_overlap and (is_last or not self._rank.comms.run_ahead)
            reducer.begin_step(num_microbatches, overlaps, self._hook is None)
        self._laid_out.begin_step()

    def shadow_step(self) -> None:
        """Takes part in a step of other replicas with nothing to add. Collective over them."""
        self.script_hooks.look(1)
        self.script_hooks.begin_step(1, may_change=False)
        for reducer in self.reducers:
            reducer.begin_step(1, are_shares=True)
        for reducer in reversed(self.reducers):
            reducer.end_step()
        self.script_hooks.end_step()

    def microbatch_done(self, mb: int) -> None:
        """Notes that a microbatch has all its gradients; a server does this by itself."""
        for reducer in reversed(self.reducers):
            if reducer.in_step:
                reducer.finish_microbatch(mb)

    def end_step(self) -> None:
        """Waits until the gradients of the step are reduced."""
        self._laid_out.check()
        for reducer in reversed(self.reducers):  # the overlapping one comes first
            reducer.end_step()
        if self.updates is not None:
            self.updates.end_step()
        if self.script_hooks.taken:
            self.script_hooks.end_step()

    def abandon_step(self) -> None:
        """Abandons a step that has failed; its gradients are lost. Not collective."""
        self._laid_out.forget()
        for reducer in self.reducers:
            if reducer.in_step:
                reducer.cancel_step()
        if self.updates is not None:
            self.updates.abandon_step()
        self.script_hooks.abandon_step()

    def close(self) -> None:
        """Drops the references to the parameters."""
        self.reducers = []
