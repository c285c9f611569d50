"""Shares the module server among the models of one process, and answers its requests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.dropout.batches import Samples
from smp.pipeline.remote_modules import Guard, RemoteModules
from smp.pipeline.remote_tensor import RemoteTensor

if TYPE_CHECKING:
    from smp._C import Server


class PipelineHub:
    """A server for all models of this rank, which take turns under one schedule.

    Modules of a model have consecutive ids; ids of deleted models are not used again.

    Args:
        server: server of this rank; the hub installs its handlers.
        global_rank, device: rank and device of this process.
    """

    def __init__(self, server: Server, global_rank: int, device: torch.device) -> None:
        self.server = server
        #: whether microbatches run one after the other
        self.in_order = False
        self._modules_of: dict[int, RemoteModules] = {}
        self._owner_of: list[int] = []  # first id of the model, by module id
        # These serve functions that run at the home of a tensor, for all models.
        self._functions = RemoteModules(nn.Identity(), (), (), (), global_rank, device)
        self._functions.connect(server, 0)
        server.set_forward_handler(self._serve)
        server.set_handle_factory(functools.partial(RemoteTensor.make, self._functions))
        server.set_microbatch_done(self._microbatch_done)

    def add(
        self, modules: RemoteModules, names: Sequence[str], chunk_idxs: Sequence[int], depth: int
    ) -> None:
        """Adds a model, between steps and in one order on all ranks of the replica.

        Args:
            modules: modules of the model, which are connected here.
            names: names of its modules, for errors and the timeline.
            chunk_idxs: stage of each module on its rank.
            depth: number of ranks that the data pass before this one.
        """
        first_id = self.server.add_modules(names, chunk_idxs, depth)
        self._owner_of += [first_id] * len(names)
        self._modules_of[first_id] = modules
        modules.connect(self.server, first_id)

    def remove(self, modules: RemoteModules) -> None:
        """Removes a model; later requests for it are errors."""
        self._modules_of.pop(modules.first_id, None)
        modules.disconnect()

    def keep_first_apart(self, apart: bool) -> None:
        """Sets whether calls of microbatch 0, which is observed then, are predicted apart."""
        for modules in (self._functions, *self._modules_of.values()):
            modules.first_apart = apart

    def guard_calls(self, guard: Guard | None) -> None:
        """Sets the guard of the calls in the next steps; with None a failure ends a step."""
        for modules in (self._functions, *self._modules_of.values()):
            modules.guard = guard

    def use_samples(self, samples_of: Callable[[int], Samples]) -> None:
        """Sets the function that returns a microbatch's samples, for masks of dropout."""
        for modules in (self._functions, *self._modules_of.values()):
            modules.samples_of = samples_of

    def close(self) -> None:
        """Ends the server's threads. May be called twice."""
        self.server.close()
        self._functions.disconnect()

    def _serve(
        self,
        module_id: int,
        mb: int,
        training: bool,
        is_first: bool,
        structure: bytes,
        tensors: list[Tensor],
    ) -> tuple[bytes, list[Tensor], bool]:
        if module_id < 0:
            return self._functions.serve(module_id, mb, training, is_first, structure, tensors)
        first_id = self._owner_of[module_id]
        modules = self._modules_of.get(first_id)
        if modules is None:
            raise RuntimeError(
                f"{_C.rank_prefix()}module '{self.server.module_names[module_id]}' belongs to a "
                "model that was deleted here but is still used on another rank; delete models on "
                "all ranks, or on none"
            )
        return modules.serve(module_id - first_id, mb, training, is_first, structure, tensors)

    def _microbatch_done(self, mb: int) -> None:
        for modules in (self._functions, *self._modules_of.values()):
            modules.microbatch_done(mb)
