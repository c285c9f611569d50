"""The parts of parameters that one rank keeps, and their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.modules.materialize import cast, make_placeholder
from smp.modules.training_dtypes import training_dtype
from smp.precision.holdings import write_values

_SHARD = "_smp_shard"


@dataclass
class Shard:
    """The part of a parameter that one rank keeps.

    Attributes:
        parameter: parameter of the model, which shows a placeholder.
        tensor: ``[c]``, the part in the model's dtype, padded with zeros (``ds_tensor``).
        begin, numel: elements ``[begin, begin + numel)`` of the flattened parameter.
        piece: ``tensor[:numel]``.
        flat: ``[c]`` in the master's dtype: the same memory, unless 16-bit training gives it more
            digits; None for parameters that are frozen in 16 bits or not floating.
        master: leaf, ``flat[:numel]``; None for frozen parameters.
    """

    parameter: nn.Parameter
    tensor: Tensor
    begin: int
    numel: int
    piece: Tensor
    flat: Tensor | None
    master: nn.Parameter | None

    def move(self, flat: Tensor) -> None:
        """Moves the values to ``flat``, also for all other users of the tensors."""
        with torch.no_grad():
            flat.copy_(self.tensor if self.flat is None else self.flat)
        if self.flat is not None and self.flat.data_ptr() == self.tensor.data_ptr():
            self.tensor.data = flat
            self.piece.data = flat[: self.numel]
        if self.master is not None:
            self.master.data = flat[: self.numel]
        if self.flat is not None:
            self.flat = flat

    def write(self, value: Tensor) -> None:
        """Writes the part of a whole value."""
        part = value.detach().reshape(-1)[self.begin : self.begin + self.numel]
        write_values(self.piece, self.master, part)


class Cutter:
    """Keeps one part of each parameter and frees the rest, one parameter at a time.

    The memory of all parts exists from the beginning. Parts of one dtype lie behind each other in
    the order of the parameters, whatever the order in which these are cut.

    Args:
        parameters: names and parameters with elements; they may have no values yet.
        position: number of the part that is kept.
        num_shards: number of parts.
        half: dtype of floating parameters, unless they are kept wider; None: no dtype changes.
        device: device of the parts.
        has_masters: whether parameters of 16 bits have masters in float32.

    Attributes:
        shards: shards in the order of the parameters; they have values once they are cut.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        position: int,
        num_shards: int,
        half: torch.dtype | None,
        device: torch.device,
        *,
        has_masters: bool,
    ) -> None:
        plans = [_plan(parameter, num_shards, half, has_masters) for _, parameter in parameters]
        memories = _Memories(plans, device)
        self.shards: dict[nn.Parameter, Shard] = {}
        self._waiting = {parameter: name for name, parameter in parameters}
        for (_, parameter), plan in zip(parameters, plans, strict=True):
            begin = min(position * plan.part, parameter.numel())
            numel = min(plan.part, parameter.numel() - begin)
            tensor = memories.take(plan.dtype, plan.part)
            has_flat = plan.master_dtype is not None or plan.dtype in (torch.float32, torch.float64)
            flat: Tensor | None = tensor if has_flat else None
            if plan.master_dtype is not None and plan.master_dtype != plan.dtype:
                flat = memories.take(plan.master_dtype, plan.part)
            master = None
            if plan.master_dtype is not None:
                assert flat is not None
                master = nn.Parameter(flat[:numel].data)
            self.shards[parameter] = Shard(
                parameter, tensor, begin, numel, tensor[:numel], flat, master
            )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.shards

    def cut(self, parameter: nn.Parameter) -> None:
        """Keeps the part of a parameter that has its values now, and frees the whole."""
        shard = self.shards[parameter]
        values = parameter.data.reshape(-1)[shard.begin : shard.begin + shard.numel]
        with torch.no_grad():
            if shard.flat is not None:
                shard.flat[: shard.numel].copy_(values)
            shard.tensor[: shard.numel].copy_(values)
        hide_values(self._waiting[parameter], parameter)
        cast(parameter, shard.tensor.dtype)
        _describe(parameter, shard.tensor)
        setattr(parameter, _SHARD, shard)
        del self._waiting[parameter]

    def check_all_cut(self) -> None:
        """Asserts that every parameter was cut."""
        assert not self._waiting, f"whole parameters: {sorted(self._waiting.values())}"


@dataclass(frozen=True)
class FlatPlace:
    """The place of a parameter's part in the flat tensor of its group.

    Attributes:
        parameter: parameter of the model.
        offset: offset of the part's first element.
        is_trained: whether the optimizer updates it.
    """

    parameter: nn.Parameter
    offset: int
    is_trained: bool


@dataclass(frozen=True)
class FlatGroup:
    """The masters of one group of an optimizer.

    Attributes:
        flat: the parts of this rank, ``c`` elements for each of the group's parameters, padded with
            zeros and without gaps. Masters are views of it, and so is ``ds_tensor`` unless the
            model has 16 bits. The parts of frozen 16-bit parameters are copies. None for an empty
            group, and for one with masters of several dtypes.
        places: places of the parameters that have a shard here, in order.
    """

    flat: Tensor | None
    places: list[FlatPlace]


def lay_out(groups: Iterable[Iterable[Tensor]]) -> list[FlatGroup]:
    """Puts the masters of each group of an optimizer behind each other.

    Args:
        groups: parameters of models; those that have no shard here are skipped.
    """
    laid_out = []
    for group in groups:
        shards = [shard for p in group if (shard := shard_of(p)) is not None]
        ends = itertools.accumulate(shard.tensor.numel() for shard in shards)
        places = [
            FlatPlace(shard.parameter, end - shard.tensor.numel(), shard.master is not None)
            for shard, end in zip(shards, ends, strict=True)
        ]
        laid_out.append(FlatGroup(_lay_out(shards), places))
    return laid_out


def shard_of(parameter: Tensor) -> Shard | None:
    """Returns this rank's part of a parameter; None if parameters are whole."""
    shard = getattr(parameter, _SHARD, None)
    assert shard is None or isinstance(shard, Shard)
    return shard


def forget(parameter: nn.Parameter) -> None:
    """Removes the shard from a parameter, which is whole again."""
    for name in (_SHARD, "ds_shape", "ds_numel", "ds_tensor"):
        delattr(parameter, name)


def _lay_out(shards: Sequence[Shard]) -> Tensor | None:
    flats = [shard.flat for shard in shards]
    dtypes = {torch.float32 if flat is None else flat.dtype for flat in flats}
    floating = all(shard.parameter.is_floating_point() for shard in shards)
    if len(dtypes) != 1 or not floating:
        return None
    total = sum(shard.tensor.numel() for shard in shards)
    known = [flat for flat in flats if flat is not None]
    if len(known) == len(flats) and _are_adjacent(known):
        return known[0].as_strided((total,), (1,))
    result = torch.zeros(total, dtype=dtypes.pop(), device=shards[0].tensor.device)
    for shard, part in zip(
        shards, result.split([shard.tensor.numel() for shard in shards]), strict=True
    ):
        shard.move(part)
    return result


def _are_adjacent(parts: Iterable[Tensor]) -> bool:
    end = None
    for part in parts:
        begin = (part.untyped_storage().data_ptr(), part.storage_offset())
        if end is not None and begin != end:
            return False
        end = (begin[0], begin[1] + part.numel())
    return True


@dataclass(frozen=True)
class _Plan:
    part: int
    dtype: torch.dtype
    master_dtype: torch.dtype | None


def _plan(
    parameter: nn.Parameter, num_shards: int, half: torch.dtype | None, has_masters: bool
) -> _Plan:
    floating = parameter.is_floating_point()
    dtype = training_dtype(parameter, half) if half is not None and floating else parameter.dtype
    master_dtype = None
    if parameter.requires_grad and floating:
        master_dtype = torch.float32 if half is not None and has_masters else dtype
    return _Plan(-(-parameter.numel() // num_shards), dtype, master_dtype)


class _Memories:
    """Memory for each dtype, handed out piece by piece."""

    def __init__(self, plans: Iterable[_Plan], device: torch.device) -> None:
        totals: dict[torch.dtype, int] = {}
        for plan in plans:
            for dtype in {plan.dtype, plan.master_dtype or plan.dtype}:
                totals[dtype] = totals.get(dtype, 0) + plan.part
        self._rest = {
            dtype: torch.zeros(total, dtype=dtype, device=device) for dtype, total in totals.items()
        }

    def take(self, dtype: torch.dtype, numel: int) -> Tensor:
        rest = self._rest[dtype]
        self._rest[dtype] = rest[numel:]
        return rest[:numel]


def hide_values(name: str, parameter: nn.Parameter) -> None:
    """Makes a parameter show a placeholder in place of its whole value.

    Args:
        name: name of the parameter.
        parameter: the parameter, a part of which is on this rank.
    """
    make_placeholder(parameter, parameter.device, _why(name))


def _why(name: str) -> str:
    return (
        f"{_C.rank_prefix()}parameter '{name}' has no values here outside of forwards, as each "
        "rank keeps a part of it (sharded_data_parallel_degree). Read it in model.state_dict(), or "
        "inside of `with smp.whole_parameters(model):` between steps, where it may be written to; "
        "in a step function read it through its module (module.weight). All ranks do the same"
    )


def _describe(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Sets the attributes that scripts read from a sharded parameter."""
    attributes = {"ds_shape": parameter.shape, "ds_numel": parameter.numel(), "ds_tensor": tensor}
    for name, value in attributes.items():
        setattr(parameter, name, value)
    tensor.ds_numel = tensor.numel()  # type: ignore[attr-defined]
