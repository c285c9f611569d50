"""What the models of one process share: the module server, and what answers its requests."""

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
    """One server for all models of this rank, which take turns under one schedule.

    Modules of a model have consecutive ids; ids of models that are gone are not used again.

    Args:
        server: of this rank; the hub installs its handlers.
        global_rank, device: of this process.
    """

    def __init__(self, server: Server, global_rank: int, device: torch.device) -> None:
        self.server = server
        #: microbatches run one after the other
        self.in_order = False
        self._modules_of: dict[int, RemoteModules] = {}
        self._owner_of: list[int] = []  # first id of the model, by module id
        # For what runs at the home of a tensor, whichever model has made it.
        self._functions = RemoteModules(nn.Identity(), (), (), (), global_rank, device)
        self._functions.connect(server, 0)
        server.set_forward_handler(self._serve)
        server.set_handle_factory(functools.partial(RemoteTensor.make, self._functions))
        server.set_microbatch_done(self._microbatch_done)

    def add(
        self, modules: RemoteModules, names: Sequence[str], chunk_idxs: Sequence[int], depth: int
    ) -> None:
        """Takes in a model, between steps and in one order on all ranks of the replica.

        Args:
            modules: of the model; it is connected.
            names: of its modules, for errors and the timeline.
            chunk_idxs: stage of each module on its rank.
            depth: how many ranks the data pass before this one.
        """
        first_id = self.server.add_modules(names, chunk_idxs, depth)
        self._owner_of += [first_id] * len(names)
        self._modules_of[first_id] = modules
        modules.connect(self.server, first_id)

    def remove(self, modules: RemoteModules) -> None:
        """Forgets a model; requests for it are errors from now on."""
        self._modules_of.pop(modules.first_id, None)
        modules.disconnect()

    def begin_step(self, name: str, num_microbatches: int, words: str) -> tuple[int, str]:
        """Opens a step on all ranks of the replica.

        Args:
            name: of the step function.
            num_microbatches: of this rank.
            words: of this rank; those of the driver reach the other ranks.

        Returns:
            the driver's number of microbatches, and its words.
        """
        begun = self.server.begin_step(name, num_microbatches, words)
        for modules in list(self._modules_of.values()):
            modules.begin_step()
        return begun

    def keep_first_apart(self, apart: bool) -> None:
        """Whether what calls of microbatch 0 need is forgotten with them: somebody looks on."""
        for modules in (self._functions, *self._modules_of.values()):
            modules.first_apart = apart

    def guard_calls(self, guard: Guard | None) -> None:
        """Sets what watches over the calls of the next steps; None: a failure ends a step."""
        for modules in (self._functions, *self._modules_of.values()):
            modules.guard = guard

    def use_samples(self, samples_of: Callable[[int], Samples]) -> None:
        """Says which samples a microbatch has, where masks of dropout depend on them."""
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
