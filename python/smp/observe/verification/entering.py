"""Records data that reach the computation of a step function other than by its arguments.

A batch may come by a closure, a global or an iterator. It meets the model in one of two places: as
an argument of the model's call, or in an operator that also takes an output of the model (a loss,
for example). Tensors are recorded in these places. A process that replays the data of several ranks
gets their tensors in the same places.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

import smp._C as _C
from smp.modules.flat import Flat
from smp.modules.tracing import is_tracing
from smp.observe.verification.arguments import KeptArguments
from smp.observe.verification.comparison import share_of

_CALL = "the model's call"
_NEAR = 1e-6  # share of a norm: the same data, computed by another number of threads
_SETTERS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


class Entry(NamedTuple):
    """Data that enter in one place.

    Attributes:
        name: name of the operator, or of the model's call.
        tensors: tensors in the order of the arguments.
        numbers: numbers among the arguments of an operator; they are compared only.
    """

    name: str
    tensors: list[Any]
    numbers: list[Any]


class Entering:
    """The recorder of entering data on one rank.

    Args:
        dtype: dtype that entering floating-point tensors are cast to; None: they stay as they are.
        own_tensors: function that returns buffers of the wrapped models, which are no data.
        notes_draws: record which operators on outputs of a model draw random numbers; only where
            one thread runs at a time.
        keeps: whether the data of this rank are recorded.

    Attributes:
        taken: places where the process was given other data than its own.
        draws: step functions that draw random numbers, each once.
        notes: notes on numbers that differ, and on data that cannot be followed.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        own_tensors: Callable[[], Iterator[Tensor]],
        notes_draws: bool,
        keeps: bool,
    ) -> None:
        self.dtype, self.notes_draws, self.keeps = dtype, notes_draws, keeps
        self._own_tensors = own_tensors
        self._own: frozenset[int] = frozenset()
        self._threads = threading.local()
        self._records: dict[int, list[Entry]] = {}  # by microbatch
        self._given: list[list[Entry]] | None = None
        self._where = ""
        self.taken: list[str] = []
        self.draws: list[str] = []
        self.notes: list[str] = []

    # ---- a step

    def begin(self, number: int, replay: Path | None) -> None:
        """Begins a step.

        Args:
            number: number of the call, counted from 0.
            replay: folder of a job whose data the process computes with.
        """
        self._records.clear()
        self._where = f"step {number}"
        self._own = frozenset(id(tensor) for tensor in self._own_tensors())
        self._given = None
        if replay is not None:
            files = sorted(replay.glob(f"entering-*-{number}.pickle"))
            read = [pickle.loads(path.read_bytes()) for path in files]
            self._given = [[Entry(*e) for e in entries] for batch in read for entries in batch]

    def take(self) -> bytes:
        """Returns the data that entered in all microbatches of the step, and clears them."""
        found = [[tuple(e) for e in self._records[mb]] for mb in sorted(self._records)]
        self._records.clear()
        return KeptArguments(found).data

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a step function to record the data that enter it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            mb = -1 if is_tracing() else _C.current_microbatch()
            where = f"microbatch {max(mb, 0)} of {self._where}"
            given = self._given if mb >= 0 else None
            if given is not None and mb >= len(given):
                raise ValueError(_other_steps(where))
            body = _Body(self, function.__qualname__, where, None if given is None else given[mb])
            self._threads.body = body
            try:
                with body:
                    result = function(*args, **kwargs)
                body.end()
            finally:
                self._threads.body = None
            if mb >= 0 and self.keeps and given is None:
                self._records[mb] = body.entries
            return result

        return functools.update_wrapper(watched, function)

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records and runs the model's call; operators inside it are not recorded."""
        body: _Body | None = getattr(self._threads, "body", None)
        if body is None:
            return forward(args, kwargs)
        args, kwargs = body.entered_call(args, kwargs)
        with body.paused():
            result = forward(args, kwargs)
        body.follow(result)
        return result

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Pauses the recording for the model's backward, in which checkpoints run again."""
        body: _Body | None = getattr(self._threads, "body", None)
        with contextlib.nullcontext() if body is None else body.paused():
            yield

    def is_own(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is a parameter or buffer of a model."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._own

    def compare_numbers(self, place: str, given: Sequence[Any], own: Sequence[Any]) -> None:
        """Records a note on the first numbers that differ."""
        known = any(note.startswith("the step function computes with") for note in self.notes)
        for other, mine in zip(given, own, strict=False):
            if other != mine and other == other and not known:
                self.notes.append(
                    f"the step function computes with {other} in this layout where one process has "
                    f"{mine}, and each went on with its own ({place})"
                )
                return


class _Body(overrides.TorchFunctionMode):
    """Watches the operators of one microbatch, in its thread."""

    def __init__(
        self, owner: Entering, function: str, where: str, given: Sequence[Entry] | None
    ) -> None:
        super().__init__()
        self._owner, self._function, self._where = owner, function, where
        self._given = None if given is None else [entry for entry in given if entry.tensors]
        self._given_bare = [entry for entry in given or () if not entry.tensors]  # numbers alone
        self._results: Any = WeakIdKeyDictionary()  # tensors that depend on a model
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._is_paused = False
        self._number = 0
        self.entries: list[Entry] = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses watching inside, and hides this mode as far as possible."""
        self._is_paused, was_paused = True, self._is_paused
        try:
            is_top = overrides._get_current_function_mode() is self
            with overrides._pop_mode_temporarily() if is_top else contextlib.nullcontext():
                yield
        finally:
            self._is_paused = was_paused

    def end(self) -> None:
        """Raises unless everything entered that entered on the other rank."""
        if self._given is None:
            return
        if self._number != len(self._given):
            missing = self._given[self._number].name
            raise ValueError(_other_steps(f"{self._where}: '{missing}' is missing"))
        if [e.name for e in self._given_bare] != [e.name for e in self.entries]:
            return  # scripts may print on some ranks only, for example
        for other, mine in zip(self._given_bare, self.entries, strict=True):
            place = f"{self._where}: '{mine.name}'"
            self._owner.compare_numbers(place, other.numbers, mine.numbers)

    def follow(self, result: Any) -> None:
        """Marks tensors as outputs of a model, or as computed from them."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._results[leaf] = True

    def _depends(self, tensor: Tensor) -> bool:
        if tensor in self._results or self._owner.is_own(tensor):
            return True
        return tensor.requires_grad and not tensor.is_leaf

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        data = [i for i, tensor in tensors.items() if not self._depends(tensor)]
        if len(data) == len(tensors):
            return func(*args, **kwargs)
        numbers = [leaf for leaf in leaves if type(leaf) in (bool, int, float)]
        name = getattr(func, "__name__", str(func))
        written = _written(name, args, kwargs)
        if data:
            results = [tensor for i, tensor in tensors.items() if i not in data]
            cast = all(t.dtype == torch.float64 for t in results if t.is_floating_point())
            for i, other in zip(
                data, self._entered(name, [leaves[i] for i in data], numbers, cast), strict=True
            ):
                leaves[i] = _put(leaves[i], other) if leaves[i] is written else other
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        elif numbers:
            self.entries.append(Entry(name, [], numbers))
        before = torch.get_rng_state() if self._owner.notes_draws and not is_tracing() else None
        result = func(*args, **kwargs)
        self.follow((result, _written(name, args, kwargs)))
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            words = f"the step function '{self._function}'"
            if words not in self._owner.draws:
                self._owner.draws.append(words)
        return result

    def entered_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Records the arguments of the model's call, and returns those to compute with."""
        try:
            flat = Flat((args, kwargs), lambda tensor: not self._depends(tensor))
        except ValueError as error:
            note = f"an argument of the model's call cannot be followed ({error})"
            if note not in self._owner.notes:
                self._owner.notes.append(note)
            return args, kwargs
        tensors = flat.take()
        data = [i for i, tensor in enumerate(tensors) if not self._depends(tensor)]
        own = [tensors[i] for i in data]
        others = self._entered(_CALL, own, [], cast=True) if data else []
        if all(mine is other for mine, other in zip(own, others, strict=True)):
            return args, kwargs
        for i, other in zip(data, others, strict=True):
            tensors[i] = other
        found: tuple[Any, Any] = flat.filled(tensors)
        return found

    def _entered(
        self, name: str, tensors: Sequence[Tensor], numbers: Sequence[Any], cast: bool
    ) -> list[Tensor]:
        """Records entering tensors, and returns the tensors to compute with."""
        dtype = self._owner.dtype if cast else None
        own = [_cast(tensor, dtype) for tensor in tensors]
        if self._given is None:
            if self._owner.keeps:
                kept = [self._copy(tensor) for tensor in own]
                self.entries.append(Entry(name, kept, list(numbers)))
            return own
        place = f"{self._where}: '{name}'"
        if self._number >= len(self._given):
            raise ValueError(_other_steps(place))
        entry = self._given[self._number]
        self._number += 1
        if entry.name != name or len(entry.tensors) != len(own):
            raise ValueError(_other_steps(f"{place} instead of '{entry.name}'"))
        self._owner.compare_numbers(place, entry.numbers, numbers)
        return [
            self._chosen(place, mine, _cast(other, dtype))
            for mine, other in zip(own, entry.tensors, strict=True)
        ]

    def _chosen(self, place: str, own: Tensor, given: Tensor) -> Tensor:
        dtypes, layouts = {own.dtype, given.dtype}, {own.layout, given.layout}
        is_alike = len(dtypes) == 1 and layouts == {torch.strided} and own.shape == given.shape
        if is_alike and _are_equal(own, given):
            return own
        if not (is_alike and own.is_floating_point() and _are_near(own, given)):
            self._owner.taken.append(place)
        if not own.requires_grad:
            return given.to(own.device)
        if own.shape != given.shape:
            raise ValueError(_other_steps(f"{place}: {tuple(own.shape)} requires gradients"))
        return _put(own, given)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the tensor's present value; the same copy for all places."""
        key = (id(tensor), 0 if tensor.is_inference() else tensor._version)
        if key not in self._copies:
            self._copies[key] = (tensor, tensor.detach().to("cpu", copy=True))
        return self._copies[key][1]


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the argument that an operator writes, or None."""
    if "out" in kwargs:
        return kwargs["out"]
    is_inplace = name.endswith("_") and not name.endswith("__")
    return args[0] if args and (is_inplace or name in _SETTERS) else None


def _put(own: Tensor, given: Tensor) -> Tensor:
    """Copies values into a tensor of the script, unless they are there, and returns it."""
    if own is not given:
        with torch.no_grad():
            own.copy_(given)
    return own


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.requires_grad:
        return tensor
    return tensor.to(dtype)


def _are_equal(own: Tensor, given: Tensor) -> bool:
    return bool(((own == given.to(own.device)) | ((own != own) & (given != given))).all())


def _are_near(own: Tensor, given: Tensor) -> bool:
    return share_of(own.detach().to("cpu", torch.float64), given.to(torch.float64)) <= _NEAR


def _other_steps(text: str) -> str:
    return (
        f"{_C.rank_prefix()}smp verify: the step function computes in another order in one process "
        f"than in the other layout, so neither can be given the data of the other ({text}); pass "
        "the batch as an argument, and do not let the layout decide which operators run"
    )
