"""Writes a whole model into one file; the first rank gathers and writes it tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from smp.checkpoint import archive, huggingface, safetensors_stream
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import ModelState, model_state, storage_of
from smp.checkpoint.exporting import second_names
from smp.checkpoint.file_generation import FileGeneration
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.model import DistributedModel, engine_of
from smp.replacement import to_theirs
from smp.tensor_parallel.cutting import join, part_of
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import interval_of, whole_shape
from smp.world import comm
from smp.world.rank import Rank
from smp.world.roll_call import agree

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
    error: BaseException | None = None
    content: dict[str, Tensor] = {}
    writing: FileGeneration | None = None
    try:
        try:
            if rank.global_rank == 0:
                writing = FileGeneration.begin(path, tag, generation)
            content = gatherer.lazy_state()
            if translate:
                content = to_theirs(engine_of(model).registrations, content)
            if tag.endswith(huggingface.SAFETENSORS):
                content = _as_safetensors(content)
        except Exception as caught:
            error = caught
        agree(rank, WHAT, error)
        extra = {} if tag.endswith(huggingface.SAFETENSORS) else gatherer.extra_state()
        gatherer.plan(content.values())
        if writing is None:
            gatherer.drain()
        else:
            try:
                _write(writing, model, content, extra, user_content, gatherer)
            except Exception as caught:
                error = caught
                gatherer.drain()
        agree(rank, WHAT, error)
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
    content: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    user_content: Any,
    gatherer: Gatherer,
) -> None:
    # Tensors under several names share one object, so that the file has them once.
    deferred: dict[int, archive.Deferred] = {}
    for tensor in content.values():
        make = gatherer.maker(tensor)
        deferred[id(tensor)] = archive.Deferred(tuple(tensor.shape), tensor.dtype, make)
    structure = {key: deferred[id(tensor)] for key, tensor in content.items()}
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

    Every rank makes a gatherer, gives it the same :meth:`plan`, and either takes all tensors or
    drains it. A tensor stays on the first rank until the last tensor made of it is written.
    """

    def __init__(self, model: DistributedModel, rank: Rank) -> None:
        self._rank = rank
        self._storage = storage_of(model)
        self._state: ModelState = model_state(model, rank.ranks["pp"])
        self._is_with_first = 0 in rank.groups["mp"]
        self._places: dict[tuple[int, int], int] = {}  # (pp, tp) of this replica: global rank
        if self._is_with_first:
            own = (rank.ranks["pp"], rank.ranks["tp"])
            places = comm.allgather(own, comm.MP_GROUP)
            self._places = dict(zip(places, rank.groups["mp"], strict=True))
        self._order: list[str] = []
        self._uses: dict[str, int] = {}
        self._here: dict[str, Tensor] = {}

    def lazy_state(self) -> dict[str, Tensor]:
        """Returns the state dict, whose tensors are made of gathered ones on demand."""
        leaves = {
            name: LazyTensor.leaf(name, shape, self._state.tensors[name].dtype, self._getter(name))
            for name, shape in self._state.shapes.items()
        }
        return {key: leaves[self._state.aliases.get(key, key)] for key in self._state.keys}

    def extra_state(self) -> dict[str, Any]:
        """Returns the extra state of modules, by key. Collective over the replica."""
        if not self._is_with_first:
            return {}
        merged: dict[str, Any] = {}
        for part in comm.allgather(self._state.others, comm.MP_GROUP):
            merged = {**part, **merged}
        return merged

    def _getter(self, name: str) -> Callable[[], Tensor]:
        return lambda: self._here[name]

    def plan(self, tensors: Any) -> None:
        """Sets the order in which tensors are made."""
        unique = {id(tensor): tensor for tensor in tensors}
        for tensor in unique.values():
            for name in sorted(tensor.leaves) if isinstance(tensor, LazyTensor) else ():
                if name not in self._uses:
                    self._order.append(name)
                self._uses[name] = self._uses.get(name, 0) + 1

    def maker(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns a function that makes a tensor in its turn, on the first rank."""
        if not isinstance(tensor, LazyTensor):
            return lambda: tensor
        names = sorted(tensor.leaves)

        def make() -> Tensor:
            for name in names:
                if name not in self._here:
                    assert self._order[0] == name, f"{name} is made before {self._order[0]}"
                    self._here[self._order.pop(0)] = self._gathered(name)
            result = tensor.make()
            for name in names:
                self._uses[name] -= 1
                if self._uses[name] == 0:
                    del self._here[name]
            return result

        return make

    def drain(self) -> None:
        """Takes part in gathering all remaining tensors."""
        while self._order:
            self._gathered(self._order.pop(0))

    def _gathered(self, name: str) -> Tensor:
        """Returns the whole tensor on the first rank; other ranks ignore the result."""
        tensor, owner = self._state.tensors[name], self._state.owners[name]
        rank = self._rank
        interval = interval_of(tensor)
        is_source = rank.ranks["pp"] == owner and (interval is not None or rank.ranks["tp"] == 0)
        value = tensor.detach()
        if is_source and self._storage.gathers(tensor):
            if rank.ranks["rdp"] >= rank.sizes["shard"]:
                return value  # another copy
            value = self._storage.gathered(tensor)
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
        return join([(piece.to(value.device), part) for piece, part in pieces], whole_shape(tensor))
