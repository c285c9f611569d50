"""Blocks that compute a part of the tokens of each sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import smp._C as _C
from smp.context_parallel import attention, regions, token_functions
from smp.context_parallel.caches import Additions, has_caches, num_tensors
from smp.context_parallel.late_whole import LateWhole, Place
from smp.context_parallel.parts import activations_in, is_mask, mapped, token_dim, walk
from smp.context_parallel.relations import Leaf
from smp.context_parallel.ring_work import Rings
from smp.context_parallel.trial import Verdict, try_block
from smp.dropout import places
from smp.modules import collected
from smp.modules.argument_containers import ArgumentContainers
from smp.modules.flat import is_cache
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.modules.late import LateTensor
from smp.modules.sequence_blocks import find_blocks, mark_indivisible, unmark_indivisible
from smp.modules.tracing import is_tracing
from smp.nn.draws import any_drops, draws_from, rates_in
from smp.nn.run_aside import has_no_data
from smp.world.log import first_rank_log
from smp.world.rank import Rank

_LONGEST_TRIAL = 4096  # tokens; a longer sequence is tried with its begin
_MOST_TRIALS = 16  # of a block

#: dims along which arguments are cut, by name
Dims = tuple[tuple[str, int | None], ...]
#: these, and numbers and flags that the block's code may ask; a block is tried once for each
Kind = tuple[Dims, tuple[Any, ...]]


@dataclass(frozen=True)
class _Run:
    """A call of a block in parts, as its inner wrapper sees it."""

    verdict: Verdict
    length: int


_BY_PLACE: Kind = ((), (places.KEY,))
_MASKS_OF_PARTS = f"dropout masks of a part would be others than those of the whole ({places.KEY})"
_RUN = "_smp_run"  # keyword that carries it, because checkpoints hand arguments to second runs


class Block:
    """A block of one model, and what trials have found out about it.

    Args:
        module: block.
        name: name in the model.
        reads: whether results become whole at once.
        rings: rings of the context-parallel group.

    Attributes:
        num_cut: number of calls in parts.
        num_whole: number of calls with whole sequences.
        num_in_ring: number of calls of attention that went around rings.
    """

    def __init__(self, module: nn.Module, name: str, reads: bool, rings: Rings) -> None:
        self.module, self.name, self._reads, self._rings = module, name, reads, rings
        self._rates: list[tuple[nn.Module, str]] | None = None
        self.num_cut = self.num_whole = self.num_in_ring = 0
        self._verdicts: dict[Kind, Verdict] = {}
        self._names = _names_of(module)

    @property
    def problems(self) -> list[str]:
        """Reasons why calls had whole sequences."""
        return [v.problem for v in self._verdicts.values() if v.problem is not None]

    @property
    def shares_heads(self) -> bool:
        """Returns whether it has attention of parts, and none that went around rings."""
        forms = [form for v in self._verdicts.values() for _, form in v.forms]
        return self.num_in_ring == 0 and any(form.queries_cut for form in forms)

    def around(self, inner: Forward) -> Forward:
        """Returns a forward that cuts arguments and returns what becomes whole when it is read."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(inner, args, kwargs)

        return forward

    def inside(self, inner: Forward) -> Forward:
        """Returns a forward whose attention is exchanged, inside of checkpoints."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            run: _Run | None = kwargs.pop(_RUN, None)
            if run is None:
                return inner(*args, **kwargs)
            exchange = attention.Exchange(run.verdict.forms, run.length, self._rings)
            with attention.handled_by(exchange), self._drawing():
                try:
                    return inner(*args, **kwargs)
                finally:  # a second run of a checkpoint ends early
                    self.num_in_ring += exchange.num_in_ring

        return forward

    def _drawing(self) -> AbstractContextManager[None]:
        """Returns a context in which ranks drop different elements, as they have other tokens.

        Outside of it all ranks draw alike.
        """
        if not self._drops():
            return nullcontext()
        return draws_from(regions.group().own_seed(), self._device())

    def _drops(self) -> bool:
        if self._rates is None:
            self._rates = rates_in(self.module)
        return self.module.training and any_drops(self._rates)

    def _call(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = self._named(args, kwargs)
        found = activations_in(named)
        if found is None:
            return self._whole(inner, args, kwargs)
        num_samples, length = dict(_walked(named))[found].shape[:2]
        if length < regions.group().size or _collects_inside() or not _may_run(named):
            return self._whole(inner, args, kwargs)
        if places.current() is not None and self._drops():
            if _BY_PLACE not in self._verdicts:
                self._verdicts[_BY_PLACE] = self._told(Verdict(_MASKS_OF_PARTS))
            return self._whole(inner, args, kwargs)
        kinds = tuple((name, _token_dim(name, x, length)) for name, x in _walked(named))
        kind = (kinds, (torch.is_grad_enabled(), *_flags_of(named), *self._flags()))
        if kind not in self._verdicts:
            self._verdicts[kind] = self._try(inner, named, args, kwargs, kinds, length)
        verdict = self._verdicts[kind]
        if verdict.problem is not None:
            return self._whole(inner, args, kwargs)
        self.num_cut += 1
        dims = dict(kinds)
        own_args, own_kwargs = self._mapped(args, kwargs, lambda name, x: _part(x, dims.get(name)))
        given = [*own_args, *own_kwargs.values()]
        added = Additions(given)
        copies = [x for x, y in zip(given, named.values(), strict=True) if x is not y]
        copied = ArgumentContainers([x for x in copies if isinstance(x, list | dict)])
        result = inner(*own_args, **own_kwargs, **{_RUN: _Run(verdict, length)})
        if copied.changed():
            raise RuntimeError(
                f"{_C.rank_prefix()}'{self.name}' ({type(self.module).__name__}) changes a list or "
                "a dictionary among its arguments, in which there are tensors of all tokens; "
                "context_parallel_degree needs these in a container of their own"
            )
        others = length - regions.own(length).size
        added.count([others * is_of_tokens for is_of_tokens in verdict.counts])
        parts = zip(added.tensors(), verdict.added, strict=True)
        added.replace([_late(x, leaf, length, num_samples) for x, leaf in parts])

        def whole(name: str, part: Tensor) -> Tensor:
            late = _late(part, verdict.results[name], length, num_samples)
            return _read(late) if self._reads else late

        return mapped(result, "", whole)

    def _whole(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_whole += 1
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
        kinds: Dims,
        length: int,
    ) -> Verdict:
        """Tries the block for these arguments. Collective over the context-parallel group."""
        if len(self._verdicts) >= _MOST_TRIALS:
            return self._told(Verdict("its numbers and flags change from call to call"))
        dims = dict(kinds)
        # A window of a cache that is longer than the trial would not be seen.
        is_short = length <= _LONGEST_TRIAL or has_caches(named.values())
        short = length if is_short else _LONGEST_TRIAL

        def arguments(in_parts: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def of_trial(name: str, x: Tensor) -> Tensor:
                x = _shortened(name, _read(x).detach(), dims.get(name), length, short)
                dim = dims.get(name)
                return regions.cut(x, dim) if in_parts and dim is not None else x

            return self._mapped(args, kwargs, of_trial)

        verdict = try_block(self.module, inner, arguments, short, self._rings)
        what = f"rings of '{self.name}'"
        if self._rings.size == 1 or not regions.all_say(verdict.is_of_rings, what):
            verdict = verdict.without_rings()
        is_right = regions.all_say(verdict.problem is None, f"parts of sequences in '{self.name}'")
        if not is_right:
            verdict = Verdict(regions.first_text(verdict.problem, self._device()))
        if verdict.added:
            # The last rank's window of a cache is that of the whole: only others see a window.
            most = regions.largest([leaf.most or 0 for leaf in verdict.added], self._device())
            pairs = zip(verdict.added, most, strict=True)
            verdict.added = [Leaf(2, most=n) if n else leaf for leaf, n in pairs]
        return self._told(verdict)

    def _told(self, verdict: Verdict) -> Verdict:
        if verdict.problem is not None and verdict.problem not in self.problems:
            first_rank_log.warning(
                "smp: context_parallel_degree: every rank computes whole sequences in '%s' (%s): "
                "%s",
                self.name,
                type(self.module).__name__,
                verdict.problem,
            )
        return verdict

    def _flags(self) -> Iterator[Any]:
        """Yields numbers and flags in attributes, which code may ask, `training` among them."""
        for module in self.module.modules():
            state = module.__dict__
            yield from (
                (key, _flag_of(state[key]))
                for key in state
                if type(state[key]) in _FLAGS and not key.startswith("_")
            )

    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))


_FLAGS = (bool, int, float, str, type(None))


def _flag_of(value: Any) -> Any:
    """Returns what is compared of a number: a rate may change in each step, but for zero."""
    return value != 0 if isinstance(value, float) else value


def _flags_of(named: dict[str, Any]) -> Iterator[Any]:
    for name, value in named.items():
        if type(value) in _FLAGS:
            yield name, _flag_of(value)
        elif is_cache(value):  # attention reads what it holds
            yield name, num_tensors(value)


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


def _token_dim(name: str, x: Tensor, length: int) -> int | None:
    """Returns the dim along which an argument is cut; what a block left in a container is not."""
    is_inside = "." in name or "[" in name
    return None if is_inside and isinstance(x, LateTensor) else token_dim(name, x, length)


def _read(x: Tensor) -> Tensor:
    return x.read() if isinstance(x, LateTensor) else x


def _part(x: Tensor, dim: int | None) -> Tensor:
    """Returns this rank's part of an argument, or the argument without a dim."""
    if dim is None:
        return x
    if isinstance(x, LateWhole) and (part := x.part_along(dim)) is not None:
        return part
    return regions.cut(_read(x), dim)


def _shortened(name: str, x: Tensor, dim: int | None, length: int, short: int) -> Tensor:
    """Returns the first of an argument's tokens; masks are cut along queries and keys."""
    if dim is not None:
        return x.narrow(dim, 0, short)
    if is_mask(name, x, length):
        for each in range(max(0, x.dim() - 2), x.dim()):
            if x.shape[each] == length:
                x = x.narrow(each, 0, short)
    return x


def _late(part: Tensor, leaf: Leaf, length: int, num_samples: int) -> Tensor:
    """Returns the whole of a part of a result, gathered when it is read."""
    if leaf.dim is None:
        return part
    place = Place.along(leaf.dim, length, leaf.most)
    return LateWhole.of(part, place.flat(num_samples) if leaf.is_flat else place)


# ---- the blocks of a model


class SequenceParts:
    """The blocks of a model that compute this rank's part of each sequence.

    Args:
        rank: the rank that holds the model.
        root: model, after parts of it were replaced.
        label: returns the name of the model in messages.
        in_step: returns whether the model runs inside of a step function.
        ring: number of ranks of a ring.

    Attributes:
        is_told: whether nothing is left to be told.
        blocks: blocks of the model; none without context parallelism.
    """

    def __init__(
        self,
        rank: Rank,
        root: nn.Module,
        label: Callable[[], str],
        in_step: Callable[[], bool],
        ring: int,
    ) -> None:
        self._label, self.is_told = label, rank.sizes["cp"] == 1
        self._in_step, self._ring = in_step, ring
        self._undo: list[Callable[[], Any]] = []
        self.blocks: list[Block] = []
        if rank.sizes["cp"] == 1:
            return
        token_functions.install()
        attention.replaced.begin()
        self._undo.append(attention.replaced.end)
        # Between pipeline ranks a result travels as an ordinary tensor.
        reads = rank.sizes["pp"] > 1
        rings = Rings(rank.sizes["cp"], ring)
        self.blocks = [Block(module, name, reads, rings) for name, module in find_blocks(root)]
        self._undo.append(wrap_forward(root, WrapperKind.SEQUENCE, self._around_root))
        for block in self.blocks:
            mark_indivisible(block.module)
            self._undo += attention.watch_methods(block.module)
            self._undo += [
                wrap_forward(block.module, WrapperKind.SEQUENCE, block.around),
                wrap_forward(block.module, WrapperKind.ATTENTION, block.inside),
            ]

    def _around_root(self, inner: Forward) -> Forward:
        """Returns a forward whose results are ordinary tensors outside of step functions.

        There nothing makes ranks run the same code behind it.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            return output if self._in_step() else tree_map_only(LateTensor, _read, output)

        return forward

    def refuse_compiled(self, is_compiled: bool) -> None:
        """Raises ValueError if `torch.compile` compiles modules of a model with such blocks.

        Compiled code would keep the way that attention took when it was compiled.
        """
        if is_compiled and self.blocks:
            raise ValueError(
                f"{_C.rank_prefix()}smp config: context_parallel_degree={regions.group().size}: "
                f"torch.compile compiles modules of model {self._label()}, and cannot follow "
                "blocks that compute parts of sequences; do not compile it, or set the degree to 1"
            )

    def tell(self) -> None:
        """Says after the first step how many blocks computed parts."""
        self.is_told = True
        have_run = [block for block in self.blocks if block.num_cut + block.num_whole]
        num_cut = sum(block.num_cut > 0 for block in have_run)
        say = first_rank_log.info if num_cut else first_rank_log.warning
        share_heads = [block.name for block in have_run if block.shares_heads]
        if self._ring > 1 and share_heads:
            first_rank_log.warning(
                "smp: context_parallel_ring_degree: attention of %d of %d blocks, '%s' first, goes "
                "around no ring; all %d ranks share its heads, because not all of it is "
                "scaled_dot_product_attention of equally many queries and keys, without dropout "
                "and without gradients for its mask",
                len(share_heads),
                len(have_run),
                share_heads[0],
                regions.group().size,
            )
        say(
            "smp: context_parallel_degree: %d of %d blocks of model %s compute parts of sequences; "
            "every rank computes all else",
            num_cut,
            len(self.blocks),
            self._label(),
        )

    def leave(self) -> None:
        """Restores the forwards of blocks. May be called twice."""
        for undo in self._undo:
            undo()
        for block in self.blocks:
            unmark_indivisible(block.module)
        self._undo = []
