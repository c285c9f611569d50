"""State dicts of the whole model: taken, loaded, and kept until the model is partitioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

import smp._C as _C
from smp.model.parts import ModelParts, is_extra_state, set_extra_states
from smp.modules.materialize import make_real, plain_state
from smp.precision.script_writes import disown
from smp.replacement import refuse_pieces, to_ours
from smp.storage.whole import WholeParameters
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import PARTIAL_MARK
from smp.tensor_parallel.registry import Registration
from smp.world import comm
from smp.world.rank import Rank


class _Call(NamedTuple):
    """A call of ``load_state_dict``, with its arguments."""

    state: Mapping[str, Any]
    strict: bool
    same_partition_load: bool


class _Kept:
    """Delays loading until parameters of the meta device are made.

    Tensors are not copied, because a state may be as large as the model. Instead, writes to
    them are detected.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._versions: list[dict[str, int]] = []

    def keep(self, state: Mapping[str, Any], strict: bool, same_partition_load: bool) -> None:
        """Adds a state; later states overwrite earlier ones, as when they are loaded at once."""
        kept = dict(state)
        versions = {}
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                continue
            if value.is_inference():  # inference tensors count no writes
                kept[key] = value.clone()
            else:
                versions[key] = value._version
        self._calls.append(_Call(kept, strict, same_partition_load))
        self._versions.append(versions)

    def take(self) -> list[_Call]:
        """Returns the calls so far, in their order, and forgets them. Collective over all ranks.

        Raises:
            RuntimeError: some ranks have loaded more often than others, which would leave replicas
                different, or a tensor was written to.
        """
        counts = comm.allgather(len(self._calls), comm.WORLD)
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}model.load_state_dict was called {len(self._calls)} times here "
                f"and between {min(counts)} and {max(counts)} times on the ranks of this job, "
                "before the model was partitioned; parameters of the meta device take their values "
                "on each rank, so call it on all of them"
            )
        for call, versions in zip(self._calls, self._versions, strict=True):
            for key, version in versions.items():
                if call.state[key]._version != version:
                    raise RuntimeError(
                        f"{_C.rank_prefix()}'{key}' of the state dict was written to after "
                        "model.load_state_dict, which keeps it until the first step because the "
                        "parameters are on the meta device; pass a copy "
                        f"({{key: value.clone() for key, value in state.items()}})"
                    )
        calls, self._calls, self._versions = self._calls, [], []
        return calls


class WholeState:
    """The state of a model by the names of the unwrapped one, over all ranks of a replica.

    Args:
        rank: rank of this process.
        root: the user's model.
        registrations: registrations of the modules that distributed ones have replaced.
    """

    def __init__(self, rank: Rank, root: nn.Module, registrations: Sequence[Registration]) -> None:
        self._rank = rank
        self._root = root
        self._registrations = registrations
        self._kept = _Kept()

    # ---- taking

    def gathered(self, parts: ModelParts | None, to_rank0: bool) -> dict[str, Any]:
        """Returns the result of `DistributedModel.state_dict`.

        Args:
            parts: parts on this rank; None before the partition.
            to_rank0: whether only global rank 0 gets it.
        """
        rank = self._rank
        is_wanted = not to_rank0 or rank.global_rank == 0
        if parts is None:
            return dict(self._root.state_dict()) if is_wanted else {}
        if rank.sizes["mp"] == 1:
            return parts.storage.state(keep=is_wanted)
        if not to_rank0:
            return parts.merged(comm.allgather(parts.marked_state(), comm.MP_GROUP))
        if 0 not in rank.groups["mp"]:
            return parts.storage.state(keep=False)
        if rank.global_rank != 0:
            comm.send(parts.marked_state(), 0, comm.RankType.WORLD_RANK)
            return {}
        others = [other for other in rank.groups["mp"] if other != 0]
        states = [parts.marked_state()]
        states += [comm.recv_from(other, comm.RankType.WORLD_RANK) for other in others]
        return parts.merged(states)

    def make_whole(self, parts: ModelParts | None, state: Mapping[str, Any]) -> None:
        """Makes all parameters and buffers real on the CPU.

        Args:
            parts: parts on this rank, which are real already, in the memory of a device.
            state: values by name.
        """
        cpu = torch.device("cpu")
        with torch.no_grad():
            for name, parameter in self._root.named_parameters():
                if parts is None or parts.is_local_parameter(parameter):
                    make_real(parameter, cpu)
                else:
                    disown(parameter)
                    parameter.data = state[name].detach().clone()
            for module in self._root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(cpu)
            for key, value in self._root.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor) and not is_extra_state(key):
                    value.copy_(state[key])
        set_extra_states(self._root, state)

    # ---- loading

    def load(
        self,
        parts: ModelParts | None,
        state: Mapping[str, Any],
        strict: bool,
        same_partition_load: bool,
    ) -> _IncompatibleKeys:
        """Runs `DistributedModel.load_state_dict`.

        Args:
            parts: parts on this rank; None before the partition.
        """
        waits = parts is None and any(p.is_meta for p in self._root.parameters())
        if not state.get(PARTIAL_MARK):
            translated = self.translated(state)
            if not strict:
                refuse_pieces(self._root, self._registrations, state, translated)
            if not waits:
                return self._parts(parts).load(translated, strict)
            fits = self._parts(parts).compare(translated, strict)
            self._kept.keep({**translated, PARTIAL_MARK: False}, strict, False)
            return fits
        if waits:
            self._kept.keep(state, strict, same_partition_load)
            return _IncompatibleKeys([], [])
        if not same_partition_load:
            held = [dict(state)]
            if self._rank.sizes["mp"] > 1:
                held = comm.allgather(held[0], comm.MP_GROUP)
            return self._parts(parts).load(partial.merge(held), strict)
        if parts is not None:
            expected = parts.local_state().keys()
            missing = [key for key in expected if key not in state]
            if strict and missing:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the partial state lacks {missing}; it was saved "
                    "under another partition: load it with same_partition_load=False"
                )
            full = plain_state(self._root)
            full.update(state)
            state = full
        return self._parts(parts).load(state, strict, sliced=True)

    def load_kept(self, parts: ModelParts) -> None:
        """Loads the states given before the partition. Collective over all ranks.

        This precedes the broadcast of the first replica's values, as when states are loaded at
        once.
        """
        if self._rank.sizes["pp"] == 1:
            return  # the model was partitioned when it was wrapped
        for state, strict, same_partition_load in self._kept.take():
            self.load(parts, state, strict, same_partition_load)

    def translated(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a state dict with the names of the distributed modules in the model."""
        return to_ours(self._registrations, state)

    def _parts(self, parts: ModelParts | None) -> ModelParts:
        """Returns the parts; before the partition each rank holds the whole model.

        Values can then be loaded at once, and the partition keeps those of this rank.
        """
        if parts is not None:
            return parts
        storage = WholeParameters(self._rank, self._root)
        return ModelParts(self._root, dict.fromkeys(self._root.modules(), 0), 0, storage)
