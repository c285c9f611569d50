"""Blocks that compute a part of the tokens of each sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.context_parallel import attention, regions
from smp.context_parallel.caches import CacheChanges
from smp.context_parallel.late_whole import LateWhole
from smp.context_parallel.parts import activations_in, is_mask, mapped, token_dim, walk
from smp.context_parallel.trial import Leaf, Verdict, try_block
from smp.modules import collected
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.modules.late import LateTensor
from smp.modules.tracing import is_tracing
from smp.nn.run_aside import has_no_data
from smp.world.log import first_rank_log

_LONGEST_TRIAL = 1024  # tokens; a longer sequence is tried with its begin
_PER_RANK = 16  # tokens of each rank then

#: dims along which arguments are cut, by name; a block is tried once for each
Kinds = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class _Run:
    """A call of a block in parts, as its inner wrapper sees it."""

    verdict: Verdict
    length: int


_RUN = "_smp_run"  # keyword that carries it, because checkpoints hand arguments to second runs


class Block:
    """A block of one model, and what trials have found out about it.

    Args:
        module: block.
        name: name in the model.

    Attributes:
        num_cut: number of calls in parts.
        num_whole: number of calls with whole sequences.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.num_cut = self.num_whole = 0
        self._verdicts: dict[Kinds, Verdict] = {}
        self._names = _names_of(module)

    @property
    def problems(self) -> list[str]:
        """Reasons why calls had whole sequences."""
        return [v.problem for v in self._verdicts.values() if v.problem is not None]

    def around(self, inner: Forward) -> Forward:
        """Returns a forward that cuts arguments and returns what becomes whole when it is read."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(inner, args, kwargs)

        return forward

    @staticmethod
    def inside(inner: Forward) -> Forward:
        """Returns a forward whose attention is exchanged, inside of checkpoints."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            run: _Run | None = kwargs.pop(_RUN, None)
            if run is None:
                return inner(*args, **kwargs)
            with attention.handled_by(attention.Exchange(run.verdict.forms, run.length)):
                return inner(*args, **kwargs)

        return forward

    def _call(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = self._named(args, kwargs)
        found = activations_in(named)
        activations = None if found is None else dict(_walked(named))[found]
        length = 0 if activations is None else activations.shape[1]
        if length < regions.group().size or _collects_inside() or not _may_run(named):
            return self._whole(inner, args, kwargs)
        kinds = tuple((name, token_dim(name, x, length)) for name, x in _walked(named))
        if kinds not in self._verdicts:
            self._try(inner, named, args, kwargs, kinds, length)
        verdict = self._verdicts[kinds]
        if verdict.problem is not None:
            return self._whole(inner, args, kwargs)
        self.num_cut += 1
        dims = dict(kinds)
        own_args, own_kwargs = self._mapped(
            args, kwargs, lambda name, x: _part(x, dims.get(name))
        )
        caches = CacheChanges([*args, *kwargs.values()])
        result = inner(*own_args, **own_kwargs, **{_RUN: _Run(verdict, length)})
        cached = zip(caches.added(), verdict.cached, strict=True)
        caches.replace([_late(x, leaf, length, None) for x, leaf in cached])
        return mapped(result, "", lambda name, x: _late(x, verdict.results[name], length, activations))

    def _whole(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_whole += 1
        args, kwargs = self._mapped(args, kwargs, lambda _, x: _read(x))
        return inner(*args, **kwargs)

    # ---- arguments

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**{self._name(idx): x for idx, x in enumerate(args)}, **kwargs}

    def _name(self, idx: int) -> str:
        return self._names[idx] if idx < len(self._names) else f"argument {idx}"

    def _mapped(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[[str, Tensor], Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(mapped(x, self._name(idx), function) for idx, x in enumerate(args)),
            {name: mapped(x, name, function) for name, x in kwargs.items()},
        )

    # ---- the trial

    def _try(
        self,
        inner: Forward,
        named: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kinds: Kinds,
        length: int,
    ) -> None:
        """Tries the block for these arguments. Collective over the context-parallel group."""
        dims = dict(kinds)
        size = regions.group().size
        short = length if length <= _LONGEST_TRIAL else size * _PER_RANK

        def arguments(in_parts: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def of_trial(name: str, x: Tensor) -> Tensor:
                x = _shortened(name, _read(x).detach(), dims.get(name), length, short)
                dim = dims.get(name)
                return regions.cut(x, dim) if in_parts and dim is not None else x

            return self._mapped(args, kwargs, of_trial)

        verdict = try_block(self.module, inner, arguments, short)
        is_right = regions.all_say(verdict.problem is None, f"parts of sequences in '{self.name}'")
        if not is_right and verdict.problem is None:
            verdict = Verdict("another rank of its group finds so")
        self._verdicts[kinds] = verdict
        if verdict.problem is not None:
            first_rank_log.warning(
                "smp: context_parallel_degree: every rank computes whole sequences in '%s' (%s): "
                "%s",
                self.name,
                type(self.module).__name__,
                verdict.problem,
            )


def _names_of(module: nn.Module) -> list[str]:
    """Returns the names of the positional arguments of a module's forward."""
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in found if parameter.kind in kinds]


def _walked(named: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in named.items():
        yield from walk(value, name)


def _may_run(named: dict[str, Any]) -> bool:
    """Returns whether a call has numbers, and the ranks of its group take part in it."""
    return not is_tracing() and not any(has_no_data(x) for _, x in _walked(named))


def _collects_inside() -> bool:
    """Returns whether transformers collects what modules inside of blocks give."""
    return any(
        not isinstance(container, dict) or set(container) - {"hidden_states"}
        for _, container in collected.in_context()
    )


def _read(x: Tensor) -> Tensor:
    return x.read() if isinstance(x, LateTensor) else x


def _part(x: Tensor, dim: int | None) -> Tensor:
    """Returns this rank's part of an argument, or all of it without a dim."""
    if dim is None:
        return _read(x)
    if isinstance(x, LateWhole) and (part := x.part_along(dim)) is not None:
        return part
    return regions.cut(_read(x), dim)


def _shortened(name: str, x: Tensor, dim: int | None, length: int, short: int) -> Tensor:
    """Returns the begin of an argument's tokens; masks are cut along queries and keys."""
    if dim is not None:
        return x.narrow(dim, 0, short)
    if is_mask(name, x, length):
        for each in range(max(0, x.dim() - 2), x.dim()):
            if x.shape[each] == length:
                x = x.narrow(each, 0, short)
    return x


def _late(part: Tensor, leaf: Leaf, length: int, activations: Tensor | None) -> Tensor:
    """Returns the whole of a part of a result, gathered when it is read."""
    if leaf.dim is None:
        return part
    if leaf.is_flat:
        assert activations is not None
        apart = part.unflatten(0, (activations.shape[0], -1))
        return regions.gather(apart, 1, length).flatten(0, 1)
    return LateWhole.of(part, leaf.dim, length)


# ---- the blocks of a model


def find_blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that lists and sequences of a model hold, the outermost ones."""
    found: list[tuple[str, nn.Module]] = []

    def search(prefix: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(module, nn.ModuleList | nn.Sequential) and _is_block(child):
                found.append((name, child))
            else:
                search(name, child)

    search("", root)
    return found


def _is_block(module: nn.Module) -> bool:
    """Returns whether a module has a forward of its own, and modules inside."""
    holders = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, holders) and next(module.children(), None) is not None


def compute_in_parts(root: nn.Module) -> list[Block]:
    """Makes the blocks of a model compute this rank's part of each sequence.

    Args:
        root: model, after parts of it were replaced.

    Raises:
        ValueError: the model has no blocks.
    """
    attention.watch_transformers()
    blocks = [Block(module, name) for name, module in find_blocks(root)]
    if not blocks:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: context_parallel_degree={regions.group().size}: "
            f"{type(root).__name__} has no blocks; expected modules in an nn.ModuleList or "
            "nn.Sequential, which get activations [samples, tokens, features]"
        )
    for block in blocks:
        wrap_forward(block.module, WrapperKind.SEQUENCE, block.around)
        wrap_forward(block.module, WrapperKind.ATTENTION, Block.inside)
    return blocks
