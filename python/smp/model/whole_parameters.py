"""``smp.whole_parameters``: reads and writes of parameters that lie on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

import smp._C as _C
from smp.data_parallel import broadcast_from_first
from smp.model.parts import ModelParts
from smp.modules.watching import unwatched
from smp.tensor_parallel import partial
from smp.tensor_parallel.sharding import interval_of, slice_of
from smp.world import comm, roll_call
from smp.world.rank import Rank

if TYPE_CHECKING:
    from smp.model.engine import Engine

# A gather of one bunch needs as much additional memory, on the ranks of a replica.
_BUNCH_BYTES = 64 << 20


@contextlib.contextmanager
def showing_whole(
    rank: Rank, engine: Engine, parts: ModelParts, parameters: Iterable[nn.Parameter] | None
) -> Iterator[None]:
    """Shows whole parameters on every rank inside; written values stay.

    Collective over all ranks. The first replica's values count.

    Args:
        rank: rank of this process.
        engine, parts: engine of the model, and its parts on this rank.
        parameters: parameters of the model; None: all.

    Raises:
        ValueError: a given parameter is not one of the model.
        RuntimeError: some ranks have not called it, or with other parameters.
    """
    named = _chosen(parts, parameters)
    snippet, call = "with smp.whole_parameters(model):  # on all ranks", {"parameters": list(named)}
    roll_call.meet(rank, "smp.whole_parameters", ("world",), snippet, call)
    local = {name: p for name, p in named.items() if parts.is_local_parameter(p)}
    storage = parts.storage
    with unwatched(), storage.whole(list(local.values())):
        shown = {name: p.data for name, p in named.items()}
        engine.shows_whole = _show(rank, named, local)
        try:
            yield
            values = {name: p.detach() for name, p in local.items()}
        finally:
            engine.shows_whole = False
            for name, value in shown.items():  # the script may have assigned memory, too
                named[name].data = value
        for name, value in values.items():
            interval = interval_of(local[name])
            # A contiguous copy, as it must not be the memory that is written to.
            own = slice_of(value, interval).clone(memory_format=torch.contiguous_format)
            broadcast_from_first(rank, [own], "dp_cp" if interval is None else "rdp_cp")
            storage.write(local[name], own)
    storage.after_load()


def _chosen(
    parts: ModelParts, parameters: Iterable[nn.Parameter] | None
) -> dict[str, nn.Parameter]:
    """Returns the chosen parameters by name, in the order of the model."""
    named = dict(parts.root.named_parameters())
    if parameters is None:
        return named
    wanted = {id(p) for p in parameters}
    chosen = {name: p for name, p in named.items() if id(p) in wanted}
    if len(chosen) < len(wanted):
        raise ValueError(
            f"{_C.rank_prefix()}smp.whole_parameters got {len(wanted) - len(chosen)} tensors that "
            "are not parameters of the model; pass parameters of model.parameters()"
        )
    return chosen


def _show(rank: Rank, named: Mapping[str, nn.Parameter], local: Mapping[str, nn.Parameter]) -> bool:
    """Puts whole values into parameters of which this rank has a part.

    Returns:
        whether the replica has several ranks, so that there may be such parameters.
    """
    if rank.sizes["mp"] == 1:
        return False
    for bunch in _bunches(named):
        own = {name: local[name].detach() for name in bunch if name in local}
        marks = partial.marks_of(partial.slices_of((name, local[name]) for name in own), None)
        wholes = partial.merge(comm.allgather({**own, **marks}, comm.MP_GROUP))
        for name in bunch:
            if name not in local or interval_of(local[name]) is not None:
                named[name].data = wholes[name]
    return True


def _bunches(named: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    bunch: list[str] = []
    num_bytes = 0
    for name, parameter in named.items():
        bunch.append(name)
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= _BUNCH_BYTES:
            yield bunch
            bunch, num_bytes = [], 0
    if bunch:
        yield bunch
