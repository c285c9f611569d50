"""Protocols of the objects that rooms above attach to the runtime of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

import smp._C as _C


class Pipeline(Protocol):
    """The state that partitioned models of several pipeline ranks share (`PipelineHub`)."""

    server: _C.Server
    in_order: bool

    def add(
        self, modules: Any, names: Sequence[str], chunk_idxs: Sequence[int], depth: int
    ) -> None: ...
    def remove(self, modules: Any) -> None: ...
    def keep_first_apart(self, apart: bool) -> None: ...
    def guard_calls(self, guard: Any) -> None: ...
    def use_samples(self, samples_of: Callable[[int], Any]) -> None: ...
    def close(self) -> None: ...


class Copies(Protocol):
    """Keeps a copy of another rank's state: `smp.step.copies`."""

    noted: list[Any]

    @property
    def notes(self) -> Any: ...
    @property
    def kept(self) -> Any: ...
    def join_groups(self) -> None: ...
    def begin(self) -> None: ...
    def exchange(self, name: str, result: Any) -> bool: ...
    def commit(self) -> None: ...


class Dropout(Protocol):
    """Draws masks that do not depend on the layout: `smp.dropout.draws`."""

    def begin_step(
        self, parts: Sequence[tuple[int, int]], dim: int | None, *, trains: bool
    ) -> None: ...
    @property
    def is_open(self) -> bool: ...
    def samples(self, mb: int, part: int | None = None) -> Any: ...
    def body(self, mb: int, part: int | None = None) -> Any: ...
    def end_step(self) -> None: ...


class Detection(Protocol):
    """Finds NaN and infinities: `smp.observe.nonfinite`.

    Attributes:
        is_on: whether tensors are checked now.
        raises: whether a step that computes such a value ends with an error.
        sinks: lists to which the first finding of a step is appended.
    """

    is_on: bool
    raises: bool
    sinks: list[list[Any]]

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def watch(self, model: Any) -> None: ...
    def check(
        self,
        tensors: Sequence[Tensor],
        name: str,
        direction: str,
        what: str,
        module: nn.Module | None = None,
    ) -> None: ...


class TorchOptimizers(Protocol):
    """Looks at PyTorch's optimizers while models are wrapped: `smp.model.torch_training`."""

    own: Any

    def watch(self, optimizer: Optimizer) -> None: ...


class Scaling(Protocol):
    """The factor by which a script has scaled all gradients of a rank."""

    @property
    def factor(self) -> float: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def place(self) -> str: ...


class PartGradients(Protocol):
    """Watches how a script uses gradients of parts of a model: `smp.model.torch_training`."""

    is_idle: bool

    def norm_was_read(self) -> None: ...
    def scaling(self) -> Scaling | None: ...
    def step_begins(self) -> None: ...


class Verification(Protocol):
    """Records a job that `smp verify` has started: `smp.observe.verification`."""

    def calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]: ...
    def around(self, function: Callable[..., Any]) -> Callable[..., Any]: ...
    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...
    def backward(self) -> AbstractContextManager[None]: ...
    def step_done(self, trains: bool, result: Any, counts: Sequence[int]) -> None: ...
    def updated(self, optimizer: Any) -> None: ...
