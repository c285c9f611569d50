"""The place of one model in the pipeline."""

from __future__ import annotations

from torch import nn

from smp.activations.saved_tensors import offloading
from smp.partition.decision import Decision
from smp.pipeline import RemoteModules
from smp.pipeline.opening import check_order, open_pipeline
from smp.world import runtime


class PipelinePlace:
    """Lets other ranks call modules of this rank, and this rank call those of others.

    Opens the pipeline of the runtime if the model is the first one. Collective over the ranks of
    the replica.

    Args:
        current: the runtime.
        idx: number of the model.
        root: the user's model.
        decision: owners of the modules.

    Attributes:
        modules: connects the modules of this rank with those of others.
        server: server of the pipeline.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        idx: int,
        root: nn.Module,
        decision: Decision,
    ) -> None:
        hub = current.pipeline
        if hub is None:
            hub = current.pipeline = open_pipeline(current.rank, decision, current.timeline)
        check_order(current.rank.config, hub, decision)
        self._hub = hub
        self.server = hub.server
        owners = [
            None if owner is None else current.rank.groups["pp"][owner]
            for owner in decision.owner_partitions
        ]
        self.modules = RemoteModules(
            root,
            decision.modules,
            owners,
            decision.names,
            current.rank.global_rank,
            current.rank.device,
            later_stages=decision.later_stages if self.server.is_driver else (),
            writes=decision.index.writes,
        )
        self.modules.around_served = offloading(current)
        names = decision.names
        if idx > 0:
            names = [f"{idx}:{name or '(root)'}" for name in names]
        depth = decision.depth_of(current.rank.ranks["pp"])
        hub.add(self.modules, names, decision.chunk_idxs or [0] * len(names), depth)
        # Registered last, called first: threads of the pipeline may still use the models.
        current.on_shutdown(hub.close)

    @property
    def is_driver(self) -> bool:
        """True if the root of the model runs on this rank."""
        return self.server.is_driver

    def leave(self) -> None:
        """Removes the model from the pipeline. May be called twice."""
        self._hub.remove(self.modules)

    def disconnect(self) -> None:
        """Restores the forwards of the modules."""
        self.modules.disconnect()
