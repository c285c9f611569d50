"""Finds the origin of NaN and infinities: the first module, in time, that makes one.

A script puts suspicious steps into :func:`detect_nonfinite`, or the variable `SMP_DETECT_NONFINITE`
covers the whole run. While detection is on, forwards of modules are wrapped on the rank that owns
them, and gradients of their inputs, outputs and parameters have hooks. While it is off, a model
contains none of this.

PyTorch's anomaly mode also looks at a gradient where it is complete, and names an operator; this
module names the module of the whole job.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

import smp._C as _C
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.modules.tracing import is_tracing
from smp.world import comm, runtime
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")
_WATCHED = "_smp_watched"
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinity that a rank has seen in a step.

    Attributes:
        module: name in the whole model; "(root)" is the model itself.
        direction: "forward" or "backward".
        what: the tensor in words.
        kind: "NaN", or "Inf" if there is no NaN in it.
        global_rank: rank that has seen it.
        place: coordinates of the rank, ``"pp 1 tp 0 rdp 0"``.
        step: number of calls of step functions before this one, as in `SMP_FAULT`.
        microbatch: number of the microbatch; None outside steps, and where it is not known.
        time_ns: nanoseconds since the epoch, by the clock of the rank's host.
    """

    module: str
    direction: str
    what: str
    kind: str
    global_rank: int
    place: str
    step: int
    microbatch: int | None
    time_ns: int

    def __str__(self) -> str:
        mb = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return (
            f"{self.kind} in the {self.direction} of module '{self.module}': {self.what}; "
            f"step {self.step}{mb}, on global_rank {self.global_rank} ({self.place})"
        )


@contextlib.contextmanager
def detect_nonfinite(raises: bool = False) -> Iterator[list[NonFinite]]:
    """Finds the module that makes the first NaN or infinity of a step.

    Each rank logs the first value that it sees in a step at once. After the step the ranks of a
    replica compare theirs. Infinities in tensors that need no gradient count as masks. Enter the
    context on all ranks of a replica, outside step functions. Steps take longer inside, because
    the host waits for each tensor; numbers do not change.

    Args:
        raises: whether steps end with a FloatingPointError on all ranks if there is a NaN or an
            infinity; not for gradients that overflow under a dynamic loss scale, since their step
            is skipped.

    Yields:
        a list that gets the first entry of each step that has any, on all ranks of a replica.
    """
    detection = _detection_of(runtime.current())
    found: list[NonFinite] = []
    was_on, raised = detection.is_on, detection.raises
    detection.raises = raises or raised
    detection.sinks.append(found)
    detection.start()
    try:
        yield found
    finally:
        detection.sinks[:] = [sink for sink in detection.sinks if sink is not found]
        detection.raises = raised
        if not was_on:
            detection.stop()


class NonFiniteObserver(StepObserver):
    """Looks for values that are not finite, while `detect_nonfinite` or a setting asks for it."""

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current

    def model_partitioned(self, model: Any) -> None:
        setting = self._current.rank.settings.detect_nonfinite
        if setting != "0" and self._current.detection is None:
            _detection_of(self._current).raises = setting == "raise"
            _detection_of(self._current).start()
        elif isinstance(self._current.detection, _Detection):
            self._current.detection.watch(model)


def _detection_of(current: runtime.Runtime) -> _Detection:
    if current.detection is None:
        current.detection = _Detection(current)
    assert isinstance(current.detection, _Detection)
    return current.detection


class _Watched:
    """The modules that make and use a tensor whose gradient has a hook."""

    def __init__(self) -> None:
        self.makers: list[str] = []
        self.users: list[str] = []

    def words(self) -> tuple[str, str]:
        """Returns a module, and which of its gradients this is."""
        if self.users:
            # A module that passes a tensor on to a child of its own does not use it.
            last = self.users[-1]
            others = [u for u in self.users if not last.startswith(f"{u}.") and u != "(root)"]
            names = [name for name in dict.fromkeys(others) if name != last]
            also = f", used also by {', '.join(names)}" if names else ""
            return last, f"the gradient of its input{also}"
        return self.makers[-1], "the gradient that comes back to its output"


class _Detection(StepObserver):
    """Looks at the models of a runtime.

    Attributes:
        is_on: whether detection is on.
        raises: argument of `detect_nonfinite`.
        sinks: lists that get the first entry of each step.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self.is_on = self.raises = False
        self.sinks: list[list[NonFinite]] = []
        # The weak keys do not keep models alive.
        self._undo: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]]
        self._undo = weakref.WeakKeyDictionary()
        self._own: NonFinite | None = None  # first entry of this rank in this step
        self._running = threading.local()
        current.on_shutdown(self.stop)

    def start(self) -> None:
        """Begins to watch all models that are partitioned."""
        if not self.is_on:
            self._current.observers.add(self)
        self.is_on = True
        for model in self._current.wrapped.models:
            self.watch(model)

    def watch(self, model: Any) -> None:
        """Wraps the forwards of the modules that run here, if the model is partitioned."""
        if not self.is_on or not model.partitioned or model in self._undo:
            return
        undo: list[Callable[[], None]] = []
        self._undo[model] = undo
        prefix = "" if model._idx == 0 else f"{model._idx}:"
        for name, module in model.local_named_modules():
            around = functools.partial(self._around, prefix + (name or "(root)"), module)
            undo.append(wrap_forward(module, WrapperKind.CHECKS, around))
        for name, parameter in model.local_named_parameters():
            if parameter.requires_grad:
                owner, _, own = name.rpartition(".")
                hook = functools.partial(
                    self._check_gradient, prefix + (owner or "(root)"), f"the gradient of '{own}'"
                )
                undo.append(parameter.register_hook(hook).remove)

    def stop(self) -> None:
        """Removes all wrappers and hooks from the models."""
        self.is_on, self._own = False, None
        self._current.observers.remove(self)
        for functions in self._undo.values():
            for undo in functions:
                undo()
        self._undo.clear()

    # ---- looking

    def _around(self, name: str, module: nn.Module, forward: Forward) -> Forward:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or is_tracing():
                return forward(*args, **kwargs)
            callers = self._callers()
            given = _tensors((args, kwargs))
            if callers:
                self.check(given, callers[-1], "forward", f"an argument that it gives to '{name}'")
            else:
                self.check(given, name, "forward", "an argument")
            for tensor in given:
                self._hook(tensor, user=name)
            callers.append(name)
            try:
                result = forward(*args, **kwargs)
            finally:
                callers.pop()
            made = _tensors(result)
            self.check(made, name, "forward", "its output", module)
            for tensor in made:
                self._hook(tensor, maker=name)
            return result

        return functools.update_wrapper(checked, forward)

    def backward(self, engine: Any, losses: Sequence[Tensor]) -> None:
        self.check(losses, "(root)", "forward", "the loss made of its output")

    def _callers(self) -> list[str]:
        """Returns the modules whose forward this thread runs now, the innermost last."""
        callers: list[str] = vars(self._running).setdefault("callers", [])
        return callers

    def _hook(self, tensor: Tensor, user: str | None = None, maker: str | None = None) -> None:
        if not tensor.requires_grad:
            return
        watched = getattr(tensor, _WATCHED, None)
        if watched is None:
            watched = _Watched()
            setattr(tensor, _WATCHED, watched)
            tensor.register_hook(functools.partial(self._check_flowing, watched))
        if user is not None:
            watched.users.append(user)
        if maker is not None:
            watched.makers.append(maker)

    def _check_flowing(self, watched: _Watched, grad: Tensor) -> None:
        self._check_gradient(*watched.words(), grad)

    def _check_gradient(self, name: str, what: str, grad: Tensor) -> None:
        if self.is_on and self._own is None and (kind := _kind_of(grad)) is not None:
            self._note(name, "backward", what, kind, grad)

    def check(
        self,
        tensors: Sequence[Tensor],
        name: str,
        direction: str,
        what: str,
        module: nn.Module | None = None,
    ) -> None:
        """Checks values, unless something was found in this step.

        Args:
            tensors: tensors; those without data on this rank are skipped.
            name: name of the module, in the whole job.
            direction, what: see `NonFinite`.
            module: module whose parameters may be the reason.
        """
        for tensor in tensors if self._own is None else ():
            if type(tensor) not in _PLAIN or tensor.is_meta:
                continue
            kind = _kind_of(tensor)
            if kind is not None and (kind == "NaN" or tensor.requires_grad):
                own = () if module is None else module.named_parameters(recurse=False)
                for parameter_name, parameter in own:
                    if _kind_of(parameter) is not None:
                        what = f"{what}; its parameter '{parameter_name}' is not finite"
                        break
                self._note(name, direction, what, kind, tensor)
                return

    def _note(self, name: str, direction: str, what: str, kind: str, tensor: Tensor) -> None:
        current = self._current
        mb = _C.current_microbatch()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._own = NonFinite(
            name,
            direction,
            f"{what} ({dtype} {list(tensor.shape)}{self._scale(direction)})",
            kind,
            current.rank.global_rank,
            current.rank.grid.describe(current.rank.global_rank),
            current.steps.num_begun - 1
            if current.steps.running is not None
            else current.steps.num_begun,
            None if mb < 0 else mb,
            time.time_ns(),
        )
        _log.warning("%s%s", current.rank.prefix, self._own)

    def _scale(self, direction: str) -> str:
        optimizers: list[Any] = self._current.wrapped.optimizers
        scale = optimizers[-1].loss_scale if optimizers and direction == "backward" else 1.0
        return "" if scale == 1.0 else f", loss scale {scale:g}"

    # ---- end of a step

    def step_returned(self, duration_s: float, *, trains: bool, num_samples: int) -> None:
        """Finds the first entry over the ranks of a replica. Collective over them."""
        if not self.is_on:
            return
        own, self._own = self._own, None
        several = self._current.rank.sizes["mp"] > 1
        everyone = comm.allgather(own, comm.MP_GROUP) if several else [own]
        seen = sorted((o for o in everyone if o is not None), key=lambda o: o.time_ns)
        if not seen:
            return
        first: NonFinite = seen[0]
        if len(seen) > 1 and self._current.rank.ranks["mp"] == 0:
            _log.warning("%sfirst of %d ranks: %s", self._current.rank.prefix, len(seen), first)
        for sink in self.sinks:
            sink.append(first)
        if self.raises and not (first.direction == "backward" and self._skips):
            raise FloatingPointError(f"{self._current.rank.prefix}{first}")

    @property
    def _skips(self) -> bool:
        """Returns whether overflows of gradients only make steps be skipped."""
        optimizers: list[Any] = self._current.wrapped.optimizers
        return any(optimizer.loss_scaler.is_dynamic for optimizer in optimizers)


def _tensors(values: Any) -> list[Tensor]:
    """Returns floating-point tensors with data on this rank, at any depth of containers."""
    leaves = pytree.tree_leaves(values)
    return [t for t in leaves if type(t) in _PLAIN and t.is_floating_point() and not t.is_meta]


def _kind_of(tensor: Tensor) -> str | None:
    """Returns "NaN", "Inf", or None if all elements are finite."""
    if not tensor.is_floating_point():
        return None
    with torch.no_grad(), _disable_current_modes():
        if bool(tensor.isfinite().all()):
            return None
        return "NaN" if bool(tensor.isnan().any()) else "Inf"
