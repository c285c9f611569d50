"""Observers of steps: tools that look at models and steps from outside.

Rooms that run a step depend on this protocol and on no tool. Tools register a maker with
`use_observers` when the package is imported; each runtime makes its own observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from smp.world.runtime import Runtime

Body = Callable[[int], None]


class StepObserver:
    """Looks at the models and steps of one runtime. By default each method does nothing.

    ``engine`` is the engine of one `DistributedModel` (`smp.model.engine.Engine`).
    """

    def model_wrapped(self, module: nn.Module) -> None:
        """Receives a module that is about to be wrapped; its values are all on this rank."""

    def model_placing(self, engine: Any, trace: Any, local: Sequence[tuple[str, Any]]) -> None:
        """Receives a model whose parameters are about to move to their ranks.

        Args:
            engine: engine of the model, with its storage.
            trace: trace of the model on the first rank, if there is one.
            local: names and parameters of this rank.
        """

    def model_placed(self, engine: Any) -> None:
        """Receives a model whose parameters are where they stay. May be collective."""

    def model_partitioned(self, model: Any) -> None:
        """Receives a `DistributedModel` that runs from now on."""

    def model_closed(self, engine: Any) -> None:
        """Receives a model that was deleted, or ends with the runtime. Not collective."""

    def begin_step(self, engines: Sequence[Any], trains: bool) -> None:
        """Sees a step begin, on all ranks; before its models begin it."""

    def around_body(self, body: Body) -> Body:
        """Returns the body of a step, which gets the number of a microbatch, or one around it."""
        return body

    def call(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of a model's root on the first pipeline rank, or one around it."""
        return forward

    def backward(self, engine: Any, losses: Sequence[Tensor]) -> None:
        """Receives the losses at which a backward is about to begin, on the rank that has them."""

    def end_step(self) -> None:
        """Sees a step end, on all ranks; gradients are reduced. May be collective."""

    def abandon_step(self) -> None:
        """Sees a step fail. Not collective."""

    def step_trained(self, step: Any) -> bool:
        """Receives a `smp.step.batches.TrainedStep` before its result is returned, on all ranks.

        May be collective.

        Returns:
            whether to receive the next step of this function over these models, too.
        """
        return False

    def step_returned(self, duration_s: float, *, trains: bool, num_samples: int) -> None:
        """Sees a step function return.

        Args:
            duration_s: duration of the call in seconds.
            trains: whether gradients were enabled.
            num_samples: samples of the batch of this rank; 0: not known.
        """

    def failed(self, doing: str, error: BaseException) -> None:
        """Receives an error that is about to leave the library; may raise a better one.

        Args:
            doing: description of the work that failed.
            error: error that will be raised otherwise.
        """


_METHODS = tuple(name for name in vars(StepObserver) if not name.startswith("_"))
_makers: list[Callable[[Runtime], StepObserver]] = []


class Observers:
    """The observers of one runtime; those that leave a method as it is are not called.

    Attributes:
        model_wrapped, model_placing, ...: bound methods of the observers, in the order of these.
        version: number that changes with the observers.
    """

    model_wrapped: tuple[Callable[..., None], ...]
    model_placing: tuple[Callable[..., None], ...]
    model_placed: tuple[Callable[..., None], ...]
    model_partitioned: tuple[Callable[..., None], ...]
    model_closed: tuple[Callable[..., None], ...]
    begin_step: tuple[Callable[..., None], ...]
    around_body: tuple[Callable[[Body], Body], ...]
    call: tuple[Callable[[Any, Callable[..., Any]], Callable[..., Any]], ...]
    backward: tuple[Callable[..., None], ...]
    end_step: tuple[Callable[[], None], ...]
    abandon_step: tuple[Callable[[], None], ...]
    step_trained: tuple[Callable[[Any], bool], ...]
    step_returned: tuple[Callable[..., None], ...]
    failed: tuple[Callable[[str, BaseException], None], ...]

    def __init__(self, current: Runtime) -> None:
        self._all: tuple[StepObserver, ...] = ()
        self.version = 0
        self._set(make(current) for make in _makers)

    def add(self, observer: StepObserver) -> None:
        """Lets an observer see what happens from now on, behind the others."""
        self._set((*self._all, observer))

    def remove(self, observer: StepObserver) -> None:
        """Removes an observer, if it is present."""
        self._set(known for known in self._all if known is not observer)

    def of_kind(self, kind: type[StepObserver]) -> Any:
        """Returns the first observer of a class, or None."""
        return next((known for known in self._all if isinstance(known, kind)), None)

    def _set(self, observers: Iterable[StepObserver]) -> None:
        self._all = tuple(observers)
        self.version += 1
        for name in _METHODS:
            unchanged = getattr(StepObserver, name)
            changed = [o for o in self._all if getattr(type(o), name) is not unchanged]
            setattr(self, name, tuple(getattr(observer, name) for observer in changed))


def use_observers(*makers: Callable[[Runtime], StepObserver]) -> None:
    """Adds makers of observers, which each later runtime calls with itself."""
    _makers.extend(maker for maker in makers if maker not in _makers)
