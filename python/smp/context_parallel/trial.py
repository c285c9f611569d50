"""A trial whether a block computes the same from a part of the tokens as from all of them.

Before the first call of its kind a block runs twice more, without dropout: with all tokens, and
with this rank's part of them. In the second run attention gives the part of what it gave in the
first one, so ranks do not communicate. What attention gets, and what the block gives, then has to
be this rank's part. A convolution over time, a recurrent mixer, positions by index, a router with a
capacity or a norm over the sequence give something else. Noise is added to parameters, so that a
mixer is seen whose weights or gates are zero at first. Where gradients are enabled both runs have a
graph, and gradients of activations are compared as well (`trial_backward`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp.context_parallel import attention, regions
from smp.context_parallel.attention import Call, CannotShare, Form
from smp.context_parallel.caches import Additions, copied
from smp.context_parallel.parts import Interval, walk
from smp.context_parallel.relations import Different, Leaf, Pair, is_close, leaf_of
from smp.context_parallel.ring import attend_alone, own_of_all
from smp.context_parallel.ring_work import DotProducts, Rings
from smp.context_parallel.trial_backward import compare_backward
from smp.modules.argument_containers import ArgumentContainers, fill
from smp.modules.flat import tensors_in
from smp.modules.forwards import WrapperKind, is_wrapped
from smp.modules.materialize import is_placeholder
from smp.modules.state_changes import StateComparison
from smp.modules.tracing import running_again
from smp.nn.draws import rates_in
from smp.nn.run_aside import device_of, random_state_kept, run_aside

_NOISE_SEED = 11


@dataclass
class Verdict:
    """The result of a trial.

    Attributes:
        problem: reason why the block runs on whole sequences, as the end of a sentence; or None.
        forms: calls of attention, with the modules that they belong to.
        results: tensors of its result, by place.
        added: tensors that it adds to caches and containers among its arguments, in their order.
        counts: whether each whole number in these caches counts its tokens, in their order.
        problem_of_heads: reason why ranks cannot share the heads of a call, or None.
    """

    problem: str | None = None
    forms: list[tuple[Any, Form]] = field(default_factory=list)
    results: dict[str, Leaf] = field(default_factory=dict)
    added: list[Leaf] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    problem_of_heads: str | None = None

    @property
    def is_of_rings(self) -> bool:
        """Returns whether all attention of parts can go around rings."""
        in_parts = [form for _, form in self.forms if form.queries_cut]
        return self.problem is None and bool(in_parts) and all(f.in_ring for f in in_parts)

    def without_rings(self) -> Verdict:
        """Returns the verdict for ranks that share the heads of all calls."""
        if self.problem is None and self.problem_of_heads is not None:
            return Verdict(self.problem_of_heads)
        forms = [(owner, dataclasses.replace(form, in_ring=False)) for owner, form in self.forms]
        return dataclasses.replace(self, forms=forms)


@dataclass
class _Outcome:
    """The outcome of a run.

    Attributes:
        result: result of the block.
        left: tensors in attributes and containers that it has changed.
        buffers: buffers that it has written, by name.
        added: new tensors in caches and containers among the arguments.
        told: other new items of containers.
        counts: growth of whole numbers in caches.
        writes_arguments: whether it has changed tensors among its arguments in place.
    """

    result: Any = None
    left: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    added: list[Tensor] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    writes_arguments: bool = False


def try_block(
    block: nn.Module,
    inner: Callable[..., Any],
    arguments: Callable[[bool], tuple[tuple[Any, ...], dict[str, Any]]],
    length: int,
    rings: Rings,
) -> Verdict:
    """Compares a block's run on a part of the tokens with one on all of them.

    Not collective: ranks may come to different verdicts.

    Args:
        block: block.
        inner: forward of the block.
        arguments: makes arguments for all tokens, or with True for this rank's part of them.
        length: number of tokens of the whole.
        rings: rings of the group.
    """
    recorder = _Recorder(rings)
    has_graph = torch.is_grad_enabled() and not _is_gathered(block)
    given = [_inputs(*arguments(in_parts), has_graph) for in_parts in (False, True)]
    try:
        whole = _run(block, inner, recorder, *given[0].call, has_graph)
    except Exception as error:
        return Verdict(f"it cannot be tried ({type(error).__name__}: {_first_line(error)})")
    checker = _Checker(recorder.calls, length)
    try:
        own = _run(block, inner, checker, *given[1].call, has_graph)
        with torch.no_grad():
            verdict = _compare(whole, own, checker, length)
        if has_graph:
            pairs = [
                *_results(whole.result, own.result, verdict.results),
                *checker.given_to_attention,
            ]
            compare_backward(pairs, given[0].tensors, given[1].tensors, length)
        return verdict
    except Different as reason:
        return Verdict(str(reason))
    except Exception as error:
        return Verdict(
            f"its code fails with a part of the tokens ({type(error).__name__}: "
            f"{_first_line(error)})"
        )


def _is_gathered(block: nn.Module) -> bool:
    """Returns whether modules gather their parameters, also for each backward of theirs."""
    return any(is_wrapped(module, WrapperKind.PARAMETERS) for module in block.modules())


@dataclass
class _Given:
    """Arguments of a run.

    Attributes:
        call: positional and named arguments.
        tensors: the tensors of floating-point numbers in them, which have gradients.
    """

    call: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: list[Tensor]


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], has_graph: bool) -> _Given:
    every = [x for value in (*args, *kwargs.values()) for _, x in walk(value, "")]
    found = [x for x in every if has_graph and x.is_floating_point() and x.is_leaf]
    for tensor in found:
        tensor.requires_grad_()
    return _Given((args, kwargs), found)


@contextlib.contextmanager
def _graph(is_wanted: bool) -> Iterator[None]:
    """Records a graph inside or none; checkpoints around the block do not see its tensors."""
    own_hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.set_grad_enabled(is_wanted), own_hooks, running_again():
        yield


def _results(whole: Any, part: Any, leaves: dict[str, Leaf]) -> list[Pair]:
    """Returns the tensors of results, each beside its part."""
    parts = dict(walk(part, ""))
    return [Pair(x, parts[name], leaves[name]) for name, x in walk(whole, "")]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


def _run(
    block: nn.Module,
    inner: Callable[..., Any],
    handler: attention.Handler,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_graph: bool,
) -> _Outcome:
    outcome = _Outcome()
    args = tuple(map(copied, args))
    kwargs = {name: copied(value) for name, value in kwargs.items()}

    def run(*args: Any, **kwargs: Any) -> None:
        watch = StateComparison([block], copies=False)
        # Batch norms write without a change of version.
        buffers = {name: b.clone() for name, b in block.named_buffers()}
        of_files = ArgumentContainers(list(_globals_of(block)), objects=False)
        added = Additions([*args, *kwargs.values()])
        versions = [x._version for x in tensors_in([*args, *kwargs.values()])]
        draws = random.getstate()
        try:
            with _graph(has_graph), attention.handled_by(handler), _without_dropout(block):
                outcome.result = inner(*args, **kwargs)
        finally:
            random.setstate(draws)
            outcome.left = list(watch.compare().tensors)
            outcome.left += _restored(of_files)
            outcome.buffers = _written(block, buffers)
        now = [x._version for x in tensors_in([*args, *kwargs.values()])]
        outcome.writes_arguments = versions != now[: len(versions)]
        outcome.added = added.tensors()
        outcome.told = added.others()
        outcome.counts = added.counts()

    run_aside(block, run, args, kwargs)
    return outcome


def _restored(containers: ArgumentContainers) -> list[Tensor]:
    """Restores containers; returns the tensors that were put into them."""
    found: list[Tensor] = []
    for number, contents in containers.changed_from():
        found += tensors_in(containers.new_items_of(number))
        fill(containers.containers[number], contents)
    return found


def _written(block: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restores buffers; returns copies of those that were written, by name."""
    found: dict[str, Tensor] = {}
    for name, buffer in block.named_buffers():
        if name in before and not torch.equal(buffer, before[name]):
            found[name] = buffer.clone()
            # Graphs of earlier calls have saved it, and it has their values again.
            with torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(before[name])
    return found


def _globals_of(block: nn.Module) -> Iterator[Any]:
    """Yields lists, dictionaries and sets of files that the code of modules and hooks names.

    Functions of the same files which that code names are followed.
    """
    code: list[Any] = []
    for module in block.modules():
        if not type(module).__module__.startswith("torch."):
            code.append(type(module).forward)
        code += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    seen = set[int]()
    while code:
        function = code.pop()
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        names = {name for each in _codes_in(function.__code__) for name in each.co_names}
        for value in (function.__globals__[n] for n in names if n in function.__globals__):
            if isinstance(value, list | dict | set) and id(value) not in seen:
                seen.add(id(value))
                yield value
            elif getattr(value, "__globals__", None) is function.__globals__:
                code.append(value)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes_in(inner)


@contextlib.contextmanager
def _without_dropout(block: nn.Module) -> Iterator[None]:
    """Makes a module drop nothing, and adds the same noise to its parameters each time."""
    rates = [(module, key, module.__dict__[key]) for module, key in rates_in(block)]
    trained = [p for p in block.parameters() if p.requires_grad]
    # Modules that gather parameters may keep them from the first run on, and both runs are alike.
    noisy = () if _is_gathered(block) else block.parameters()
    parameters = [p for p in noisy if p.is_floating_point() and _has_values(p)]
    values = [p.data for p in parameters]
    try:
        for module, key, _ in rates:
            module.__dict__[key] = 0.0
        for parameter in trained:  # only gradients of activations are compared
            parameter.requires_grad_(False)
        with random_state_kept(device_of(values)):
            torch.manual_seed(_NOISE_SEED)
            for parameter in parameters:
                parameter.data = parameter.data + _noise_for(parameter)
        yield
    finally:
        for module, key, rate in rates:
            module.__dict__[key] = rate
        for parameter in trained:
            parameter.requires_grad_()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value


def _has_values(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter.data) is Tensor and parameter.element_size() >= 2
    return is_plain and not is_placeholder(parameter)


def _noise_for(parameter: nn.Parameter) -> Tensor:
    """Returns noise of the size of usual first weights."""
    fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
    noise: Tensor = torch.randn_like(parameter.data) / max(1, fan_in) ** 0.5
    return noise


def _added_leaf(part: Tensor, whole: Tensor, length: int) -> Leaf:
    """Returns how what a part adds to arguments belongs to what the whole adds there.

    Raises:
        Different: it does not.
    """
    try:
        return leaf_of(part, whole, length, "what it adds to its arguments")
    except Different:
        if whole.dim() != 4 or part.dim() != 4 or whole.shape[2] >= length:
            raise
    # A window: of each part the last tokens are left. Only the last rank has those of the whole.
    ranks, most = regions.group(), whole.shape[2]
    if part.shape[2] != min(most, regions.own(length).size):
        raise Different("a window of its cache has another length for a part of the tokens")
    is_last = ranks.group_rank == ranks.size - 1
    if is_last and not is_close(part, whole.narrow(2, most - part.shape[2], part.shape[2])):
        raise Different("a window of its cache has other tokens for a part of the sequence")
    return Leaf(2, most=most)


def _compare(whole: _Outcome, own: _Outcome, checker: _Checker, length: int) -> Verdict:
    wholes, parts = dict(walk(whole.result, "")), dict(walk(own.result, ""))
    if wholes.keys() != parts.keys() or len(checker.calls) != len(checker.forms):
        raise Different("its code does something else with a part of the tokens")
    if len(tensors_in(whole.result)) != len(wholes):
        raise Different(f"its result is a {type(whole.result).__name__}, or has one inside")
    if own.writes_arguments:
        raise Different("it changes its arguments in place")
    results = {name: leaf_of(parts[name], wholes[name], length, f"result{name}") for name in wholes}
    if len(whole.left) != len(own.left) or whole.buffers.keys() != own.buffers.keys():
        raise Different("it leaves something else in attributes for a part of the tokens")
    pairs = [*zip(own.left, whole.left, strict=True)]
    pairs += [(own.buffers[name], whole.buffers[name]) for name in whole.buffers]
    if not all(is_close(part, of_all) for part, of_all in pairs):
        raise Different("it leaves tensors in attributes that depend on the tokens")
    if len(whole.added) != len(own.added) or whole.told != own.told:
        raise Different("it adds something else to its arguments for a part of the tokens")
    added = [
        _added_leaf(part, of_all, length)
        for part, of_all in zip(own.added, whole.added, strict=True)
    ]
    counts = _counts(whole, own, length)
    return Verdict(None, checker.forms, results, added, counts, checker.problem_of_heads)


def _counts(whole: _Outcome, own: _Outcome, length: int) -> list[bool]:
    """Returns which numbers in caches count tokens.

    Raises:
        Different: one does something else.
    """
    part = regions.own(length).size
    if len(whole.counts) == len(own.counts):
        pairs = list(zip(whole.counts, own.counts, strict=True))
        if all(a == b or (a, b) == (length, part) for a, b in pairs):
            return [a != b for a, b in pairs]
    raise Different("it counts something else in its cache for a part of the tokens")


@dataclass
class _Recorded:
    call: Call
    output: Tensor
    problem: str | None
    in_ring: DotProducts | None  # its form, if blocks of keys give the result


class _Recorder:
    """Computes attention of all tokens and heads, and tries what this rank will compute of it."""

    has_second_runs = False

    def __init__(self, rings: Rings) -> None:
        self.calls: list[_Recorded] = []
        self._rings = rings

    def attend(self, call: Call) -> Tensor:
        with torch.no_grad():
            output = call.run(call.query, call.key, call.value, call.further, None)
            in_ring = self._of_blocks(call, output) if self._rings.size > 1 else None
            self.calls.append(_Recorded(call, output, self._problem(call, output), in_ring))
        return output

    def _of_blocks(self, call: Call, output: Tensor) -> DotProducts | None:
        """Returns the form of a call if blocks of keys give this rank's result in a ring."""
        try:
            heads = call.heads(self._rings.on_host)
        except CannotShare:
            return None
        products = call.products(call.query.shape[2])
        if products is None:
            return None
        rank = regions.group().group_rank % self._rings.on_host
        own = Interval.of_rank(heads.queries, rank)
        keys = Interval.of_rank(heads.keys, rank)
        mine = products.of_heads(own, sum(heads.queries))
        key, value = (keys.of(attention.repeated(x, heads), 1) for x in (call.key, call.value))
        found = attend_alone(own.of(call.query, 1), key, value, mine, self._rings)
        expected = own.of(output.movedim((call.heads_dim, call.tokens_dim), (1, 2)), 1)
        is_right = is_close(found, own_of_all(expected, mine, self._rings, 2))
        return products if is_right else None

    def _problem(self, call: Call, output: Tensor) -> str | None:
        try:
            heads = call.heads(regions.group().size)
        except CannotShare as reason:
            return str(reason)
        share = call.share(heads)
        keys = Interval.of_rank(heads.keys, regions.group().group_rank)
        key, value = (keys.of(attention.repeated(x, heads), 1) for x in (call.key, call.value))
        own = call.run(share.own.of(call.query, 1), key, value, call.further, share)
        if is_close(own, share.own.of(output, call.heads_dim)):
            return None
        return "its function of attention gives something else for some of the heads"


class _Checker:
    """Gives the own part of recorded results, and compares what attention gets."""

    has_second_runs = False

    def __init__(self, calls: list[_Recorded], length: int) -> None:
        self.calls, self.forms = calls, list[tuple[Any, Form]]()
        self.given_to_attention: list[Pair] = []
        self.problem_of_heads: str | None = None
        self._length = length

    def attend(self, call: Call) -> Tensor:
        if len(self.forms) == len(self.calls):
            raise Different("it calls attention more often for a part of the tokens")
        known = self.calls[len(self.forms)]
        with torch.no_grad():
            return self._attend(call, known)

    def _attend(self, call: Call, known: _Recorded) -> Tensor:
        cut = [
            self._is_cut(name, getattr(call, name), getattr(known.call, name))
            for name in ("query", "key", "value")
        ]
        # Parts among the further arguments may not change the form.
        in_ring = cut[1] and known.in_ring is not None
        in_ring = in_ring and call.products(self._length) == known.in_ring
        form = Form(cut[0], cut[1], self._further(call, known.call), in_ring)
        if cut[1] != cut[2] or (not cut[0] and (cut[1] or form.further)):
            raise Different("its attention mixes tokens of a part with others")
        if form.queries_cut and self.problem_of_heads is None:
            self.problem_of_heads = known.problem
        self.forms.append((call.owner, form))
        for name, is_cut in zip(("query", "key", "value"), cut, strict=True):
            of_all = getattr(known.call, name)
            leaf = Leaf(of_all.dim() - 2 if is_cut else None)
            self.given_to_attention.append(Pair(of_all, getattr(call, name), leaf))
        own = regions.own(self._length)
        return own.of(known.output, call.tokens_dim) if form.queries_cut else known.output

    def _further(self, call: Call, whole: Call) -> tuple[tuple[str, int], ...]:
        """Returns the dims along which further arguments are parts, by name."""
        parts, wholes = (dict(walk(each.further, "")) for each in (call, whole))
        if parts.keys() != wholes.keys():
            raise Different("its attention gets other arguments for a part of the tokens")
        leaves = {
            name: leaf_of(parts[name], wholes[name], self._length, f"{name} of its attention")
            for name in wholes
        }
        if any(leaf.is_flat for leaf in leaves.values()):
            raise Different("its attention gets tokens of all samples in one dim")
        return tuple((name, leaf.dim) for name, leaf in leaves.items() if leaf.dim is not None)

    def _is_cut(self, name: str, part: Tensor, whole: Tensor) -> bool:
        if is_close(part, whole):
            return False
        dim = whole.dim() - 2
        is_part = whole.shape[dim] == self._length
        if is_part and is_close(part, regions.own(self._length).of(whole, dim)):
            return True
        raise Different(
            f"the {name} of its attention is another one for a part of the tokens (positions by "
            "index, or a mix of tokens)"
        )
