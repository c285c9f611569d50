"""Saves, merges and loads the state of an optimizer of which every rank has a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smp.optim.adam import keeps_residue, write_master
from smp.precision.holdings import (
    holding_with_master,
    model_parameter_of,
    parameters_of,
)
from smp.tensor_parallel import partial
from smp.tensor_parallel.cutting import cut, part_of
from smp.tensor_parallel.partial import (
    FLAT_MARK,
    MASTER,
    OWNED_MARK,
    PARTIAL_MARK,
    SHARDS_MARK,
    Flat,
)
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import whole_shape
from smp.world import comm, roll_call
from smp.world.rank import Rank

_LOCAL_SNIPPET = (
    "state = optimizer.local_state_dict()  # on all ranks; gather_if_shard=False gathers nothing\n"
    "    if smp.rdp_rank() == 0:\n"
    "        smp.save(state, path)"
)

Entries = dict[Any, Any]


class OptimizerState:
    """Saves and loads the state of a torch optimizer whose parameters are spread over ranks.

    Entries are by index of the parameter, as in state dicts of torch. The entry of a 16-bit
    parameter has its master besides the optimizer's own values. Of a tensor that is updated whole,
    only its owner has these values, whole; masters lie in parts in any case.

    Args:
        rank: rank of this process.
        optimizer: optimizer of torch, with masters in its groups.
        is_local: returns whether one of its parameters is updated on this rank.
        owned: flags of the tensors in the groups that are updated whole: whether this rank does it.
    """

    def __init__(
        self,
        rank: Rank,
        optimizer: torch.optim.Optimizer,
        is_local: Callable[[Tensor], bool],
        owned: Mapping[Tensor, bool],
    ) -> None:
        self._rank = rank
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        numbered = enumerate(self._parameters)
        self._owned = {index: owned[p] for index, p in numbered if p in owned}
        self._local = {index for index, p in enumerate(self._parameters) if is_local(p)}

    # ---- saving

    def local(self) -> dict[str, Any]:
        """Returns the state dict with the entries of this rank."""
        result = self._optimizer.state_dict()
        entries = {}
        for index in sorted(self._local):
            entry = dict(result["state"].get(index, {}))
            holding = holding_with_master(self._parameters[index])
            if holding is not None and holding.has_copy:
                entry[MASTER] = holding.master.detach()
            if entry:
                entries[index] = entry
        rest = {key: e for key, e in result["state"].items() if not isinstance(key, int)}
        return {**result, "state": {**entries, **rest}}

    def marks(self) -> dict[str, Any]:
        """Returns the marks of a partial state: the slices and cut parameters in it."""
        flat = self._flat() if self._is_sharded else None
        return partial.marks_of(self._slices(), flat, self._owned)

    @property
    def _is_sharded(self) -> bool:
        return self._rank.sizes["shard"] > 1

    def of_rank(self, gather_shards: bool) -> dict[str, Any]:
        """Returns the marked state of this rank.

        Args:
            gather_shards: whether the first rank of a shard group gets the state of its members.
                Collective over that group if the state is sharded, else not.
        """
        own, marks = self.local(), self.marks()
        if not gather_shards or not self._is_sharded:
            return {**own, **marks}
        roll_call.meet(self._rank, "optimizer.local_state_dict", ("shard",), _LOCAL_SNIPPET)
        first = self._rank.groups["shard"][0]
        mine = {**to_cpu(own["state"]), FLAT_MARK: marks[FLAT_MARK], OWNED_MARK: self._owned}
        if self._rank.global_rank != first:
            comm.send(mine, first, comm.RankType.WORLD_RANK)
            return {**own, **marks}
        others = self._rank.groups["shard"][1:]
        parts = [mine, *(comm.recv_from(rank, comm.RankType.WORLD_RANK) for rank in others)]
        del marks[FLAT_MARK]
        return {**own, "state": partial.merge(parts), **marks}

    def whole(self) -> dict[str, Any]:
        """Returns the state of all parameters, like the optimizer's in one process.

        Collective over the MP group, and over the RDP_CP group if the state is sharded.
        """
        snippet = "state = optimizer.state_dict()  # on all ranks"
        if not self._is_sharded:
            snippet += ", or inside of `if smp.rdp_rank() == 0:`"
        groups = ("rdp_cp", "mp") if self._is_sharded else ("mp",)
        roll_call.meet(self._rank, "optimizer.state_dict", groups, snippet)
        result = self.local()
        if self._is_sharded:
            mine = {**to_cpu(result["state"]), FLAT_MARK: self._flat(), OWNED_MARK: self._owned}
            parts = comm.allgather(mine, comm.CommGroup.RDP_CP_GROUP)
            result["state"] = partial.merge(comm.of_shard_group(parts))
        if comm.mp_size() == 1:
            return result
        slices = self._slices()
        marked = {**to_cpu(result["state"]), SHARDS_MARK: slices, OWNED_MARK: self._owned}
        merged = partial.merge(comm.allgather(marked, comm.MP_GROUP))
        for index, entry in result["state"].items():
            if index not in slices:
                merged[index] = entry  # on this rank's device
        order = [index for index in range(len(self._parameters)) if index in merged]
        rest = [key for key in merged if not isinstance(key, int)]
        return {**result, "state": {key: merged[key] for key in order + rest}}

    # ---- loading

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads a whole state, or a partial one, masters included.

        Collective over the MP group for partial states, and over the RDP_CP group for states of
        sharded optimizers.
        """
        given = dict(state)
        is_partial = bool(given.pop(PARTIAL_MARK, False))
        held, flat = given.pop(SHARDS_MARK, {}), given.pop(FLAT_MARK, None)
        owned = given.pop(OWNED_MARK, {})
        given.pop(partial.LAYOUT_MARK, None)  # mark of a file that was read unchanged
        entries: Entries = given["state"]
        own_flat = self._flat()
        is_cut = False  # whether entries are the elements that this rank holds
        if is_partial and (flat is not None or self._is_sharded):
            is_cut = self._is_sharded and flat is not None and _are_cut_alike(flat, own_flat)
            is_cut = is_cut and owned == self._owned
            told = comm.allgather((is_cut, flat is not None), comm.WORLD)
            is_cut = all(alike for alike, _ in told)
            if any(are_flat for _, are_flat in told) and not is_cut:
                marked = {**to_cpu(entries), FLAT_MARK: flat, OWNED_MARK: owned}
                entries = partial.merge(comm.allgather(marked, comm.CommGroup.RDP_CP_GROUP))
        slices = self._slices()
        is_own = is_partial and all(held.get(i) == slices[i] for i in entries if i in slices)
        is_own = is_own and owned == self._owned
        if is_partial and comm.mp_size() > 1 and not is_cut:
            marks = {SHARDS_MARK: held, OWNED_MARK: owned}
            entries, is_own = _complete(entries, marks, self._wanted, is_own)
        entries = {
            index: entry
            for index, entry in entries.items()
            if not isinstance(index, int) or index in self._local
        }
        for index in entries.keys() & range(len(self._parameters)):
            held = self._parameters[index]
            parameter = model_parameter_of(held)
            begin, numel, shape = own_flat.get(index, (0, parameter.numel(), parameter.shape))
            entry, rest = entries[index], {}
            if index in self._owned:
                entry, other = _split(entry)
                rest = other if self._owned[index] else {}
            if not is_own and index in slices:
                part = part_of(parameter, begin, numel)
                entry = _cut_entry(entry, whole_shape(parameter), part, held)
            elif not is_cut and index in own_flat:
                part = Part.flat(shape, begin, numel)
                entry = _cut_entry(entry, shape, part, held)
            entries[index] = {**rest, **entry}
        self._fill(given, entries)

    def _fill(self, given: dict[str, Any], entries: Entries) -> None:
        """Gives the optimizer its entries, and masters their values."""
        kept = {}
        for index, entry in entries.items():
            if isinstance(index, int) and MASTER in entry:
                master = self._parameters[index]
                of_master, rest = _split(entry)
                write_master(self._optimizer, master, of_master[MASTER])
                if keeps_residue(self._optimizer, master):
                    kept[index] = entry
                    continue
                entry = rest
                if not entry:
                    continue
            kept[index] = entry
        self._optimizer.load_state_dict({**given, "state": kept})

    # ---- which part this rank has

    @property
    def _wanted(self) -> set[int]:
        """Indices of the parameters that have an entry here once they were updated."""
        return {i for i in self._local if self._owned.get(i, True) or self._lies_in_parts(i)}

    def _lies_in_parts(self, index: int) -> bool:
        """Returns whether an entry has something that lies in parts: state, or a master."""
        holding = holding_with_master(self._parameters[index])
        return index not in self._owned or (holding is not None and holding.has_copy)

    def _slices(self) -> dict[Any, partial.Slice]:
        numbered = enumerate(self._parameters)
        return partial.slices_of(
            (index, model_parameter_of(p)) for index, p in numbered if self._lies_in_parts(index)
        )

    def _flat(self) -> dict[int, Flat]:
        flat: dict[int, Flat] = {}
        if not self._is_sharded:
            return flat
        for index in sorted(self._local):
            holding = holding_with_master(self._parameters[index])
            if holding is not None and self._lies_in_parts(index):
                flat[index] = (holding.begin, holding.numel, tuple(holding.shape))
        return flat


def _split(entry: Entries) -> tuple[Entries, Entries]:
    """Splits an entry into its master, if it has one, and the optimizer's own values."""
    master = {name: value for name, value in entry.items() if name == MASTER}
    return master, {name: value for name, value in entry.items() if name != MASTER}


def _are_cut_alike(flat: Mapping[int, Flat], own: Mapping[int, Flat]) -> bool:
    return {index: tuple(place) for index, place in flat.items()} == dict(own)


def _cut_entry(entry: Entries, shape: Sequence[int], part: Part, like: Tensor) -> Entries:
    """Returns a rank's part of the state of a parameter with these sizes.

    Copies have the sizes of `like`.
    """
    return {
        name: cut(value, part).clone().view(like.shape)
        if isinstance(value, Tensor) and list(value.shape) == list(shape)
        else value
        for name, value in entry.items()
    }


def _complete(
    entries: Entries, marks: Mapping[str, Any], wanted: set[int], is_own: bool
) -> tuple[Entries, bool]:
    """Adds entries of local parameters that other ranks of the replica have. Collective.

    After the same partition every rank has all its entries, and nothing big is sent.

    Args:
        entries: entries of this rank.
        marks: marks of the slices among them, and of those that owners have.
        wanted: parameters that have an entry on this rank.
        is_own: whether these are the slices of this rank.

    Returns:
        entries, and whether those of split parameters are still slices.
    """
    holdings = comm.allgather((set(entries), wanted, is_own), comm.MP_GROUP)
    held_by_some = {index for there, _, _ in holdings for index in there}
    is_whole = any((needed & held_by_some) - there for there, needed, _ in holdings)
    if not is_whole and all(own for _, _, own in holdings):
        return entries, True
    marked = {**to_cpu(entries), **marks}
    return partial.merge(comm.allgather(marked, comm.MP_GROUP)), False


def to_cpu(value: Any) -> Any:
    """Returns the same structure with tensors in host memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(item) for item in value)
    return value
