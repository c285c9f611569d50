"""Writes a whole model into one file; the first rank gathers and writes it tensor by tensor."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from smp.checkpoint import archive, huggingface, safetensors_stream
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.archive import Deferred
from smp.checkpoint.entries import model_state
from smp.checkpoint.exporting import second_names
from smp.checkpoint.file_generation import FileGeneration
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.model import DistributedModel, engine_of
from smp.replacement import to_theirs
from smp.tensor_parallel.cutting import join, part_of
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm
from smp.world.rank import Rank
from smp.world.roll_call import together

WHAT = "smp.save_checkpoint"


def save_whole(
    path: Path,
    tag: str,
    model: DistributedModel,
    user_content: Any,
    translate: bool,
    generation: str,
    rank: Rank,
) -> None:
    """Writes ``path/<tag>`` and ``path/user_content_<tag>`` in one step. Collective over all ranks.

    Args:
        path: folder; made if missing.
        tag: name of the file. If it ends in ``.safetensors`` the file has that format, otherwise
            PyTorch's. With a name that Hugging Face gives to weights the model's configuration is
            written, too.
        model: partitioned model.
        user_content: user content of the first rank.
        translate: whether to use the translators of the model.
        generation: unique name of this write.
        rank: rank of this process.
    """
    gatherer = Gatherer(model, rank)
    is_safe = tag.endswith(huggingface.SAFETENSORS)
    writing: FileGeneration | None = None

    def begin() -> dict[str, Tensor]:
        nonlocal writing
        if rank.global_rank == 0:
            writing = FileGeneration.begin(path, tag, generation)
        content = gatherer.lazy_state()
        if translate:
            content = to_theirs(engine_of(model).registrations, content)
        return _as_safetensors(content) if is_safe else content

    def write() -> None:
        try:
            if writing is not None:
                _write(writing, model, structure, extra, user_content)
        finally:
            gatherer.drain()

    try:
        content = together(rank, WHAT, begin)
        extra = {} if is_safe else gatherer.extra_state()
        structure = gatherer.plan(content)
        together(rank, WHAT, write)
    finally:
        if writing is not None:
            writing.abandon()


def _as_safetensors(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keeps one name of each tensor, the one of transformers, in the order of the file."""
    left_out = set(second_names(content))
    kept = [(name, tensor) for name, tensor in content.items() if name not in left_out]
    return dict(sorted(kept, key=lambda item: -item[1].dtype.itemsize))


def _write(
    writing: FileGeneration,
    model: DistributedModel,
    structure: Mapping[str, Deferred],
    extra: Mapping[str, Any],
    user_content: Any,
) -> None:
    path, tag = writing.target.parent, writing.target.name
    if tag.endswith(huggingface.SAFETENSORS):
        safetensors_stream.write(writing.temporary, structure)
    else:
        archive.write(writing.temporary, {**structure, **extra})
    content_of_user = {} if user_content is None else user_content
    user_contents.write(writing.content, content_of_user, writing.generation)
    huggingface.write_config(path, tag, model.get_module(), writing.generation)
    writing.commit()


class Gatherer:
    """Gathers the tensors of a partitioned model on the first rank, one at a time, in one order.

    Every rank makes a gatherer, gives it the same content to :meth:`plan`, and either makes all
    tensors or drains it. A tensor stays on the first rank until the last tensor made of it is
    written.
    """

    def __init__(self, model: DistributedModel, rank: Rank) -> None:
        self._rank = rank
        self._state = model_state(model, rank)
        self._is_with_first = 0 in rank.groups["mp"]
        self._places: dict[tuple[int, int], int] = {}  # (pp, tp) of this replica: global rank
        if self._is_with_first:
            own = (rank.ranks["pp"], rank.ranks["tp"])
            places = comm.allgather(own, comm.MP_GROUP)
            self._places = dict(zip(places, rank.groups["mp"], strict=True))
        self._order: list[str] = []
        self._uses: Counter[str] = Counter()
        self._here: dict[str, Tensor] = {}

    def lazy_state(self) -> dict[str, Tensor]:
        """Returns the state dict, whose tensors are made of gathered ones on demand."""
        leaves = {
            name: LazyTensor.leaf(
                name,
                named.shape,
                named.tensor.dtype,
                functools.partial(self._here.__getitem__, name),
            )
            for name, named in self._state.tensors.items()
        }
        return {key: leaves[name] for key, name in self._state.keys.items()}

    def extra_state(self) -> dict[str, Any]:
        """Returns the extra state of modules, by key. Collective over the replica."""
        if not self._is_with_first:
            return {}
        merged: dict[str, Any] = {}
        for part in comm.allgather(self._state.others, comm.MP_GROUP):
            merged = {**part, **merged}
        return merged

    def plan(self, content: Mapping[str, Tensor]) -> dict[str, Deferred]:
        """Sets the order in which tensors are gathered.

        Returns:
            tensors that the first rank makes in this order. Those with several keys are one
            object, so that the file has them once.
        """
        deferred: dict[int, Deferred] = {}
        for tensor in content.values():
            if id(tensor) not in deferred:
                names = sorted(tensor.leaves) if isinstance(tensor, LazyTensor) else []
                self._order += [name for name in names if name not in self._uses]
                self._uses.update(names)
                make = functools.partial(self._made, tensor, names)
                deferred[id(tensor)] = Deferred(tuple(tensor.shape), tensor.dtype, make)
        return {key: deferred[id(tensor)] for key, tensor in content.items()}

    def _made(self, tensor: Tensor, names: Sequence[str]) -> Tensor:
        """Makes a tensor of gathered ones, in its turn. First rank."""
        for name in names:
            if name not in self._here:
                assert self._order[0] == name, f"{name} is made before {self._order[0]}"
                self._here[self._order.pop(0)] = self._gathered(name)
        result = tensor.make() if isinstance(tensor, LazyTensor) else tensor
        for name in names:
            self._uses[name] -= 1
            if self._uses[name] == 0:
                del self._here[name]
        return result

    def drain(self) -> None:
        """Takes part in gathering all remaining tensors."""
        while self._order:
            self._gathered(self._order.pop(0))

    def _gathered(self, name: str) -> Tensor:
        """Returns the whole tensor on the first rank; other ranks ignore the result."""
        named, storage, rank = self._state.tensors[name], self._state.storage, self._rank
        tensor, owner, interval = named.tensor, named.owner, interval_of(named.tensor)
        is_source = rank.ranks["pp"] == owner and (interval is not None or rank.ranks["tp"] == 0)
        value = tensor.detach()
        if is_source and storage.gathers(tensor):
            if rank.ranks["rdp_cp"] >= rank.sizes["shard"]:
                return value  # another copy
            value = storage.gathered(tensor)
        if not self._is_with_first:
            return value
        if rank.global_rank != 0:
            if is_source:
                comm.send((value.detach().cpu(), part_of(tensor)), 0, comm.RankType.WORLD_RANK)
            return value
        num_sources = 1 if interval is None else rank.sizes["tp"]
        pieces: list[tuple[Tensor, Part]] = []
        for tp_rank in range(num_sources):
            source = self._places[owner, tp_rank]
            if source == 0:
                pieces.append((value, part_of(tensor)))
            else:
                pieces.append(comm.recv_from(source, comm.RankType.WORLD_RANK))
        if interval is None:
            return pieces[0][0]
        return join([(piece.to(value.device), part) for piece, part in pieces], named.shape)
