"""Registry of wrapped models and optimizers while they live, and their translators."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import smp._C as _C

_T = TypeVar("_T")


@dataclass
class ModuleManager:
    """Place where supported model families leave their state-dict translators."""

    translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = field(
        default_factory=list
    )

    def add(self, translators: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
        """Adds pairs of functions that are not there yet."""
        for pair in translators:
            if pair not in self.translate_functions:
                self.translate_functions.append(pair)


module_manager = ModuleManager()
"""Translators of this process; empty again after `shutdown`."""


class WrappedModel(Protocol):
    """The part of a `DistributedModel` that this layer uses."""

    @property
    def _label(self) -> str: ...
    @property
    def _idx(self) -> int: ...
    @property
    def _decision(self) -> Any: ...
    @property
    def _expected_memory(self) -> Any: ...
    @property
    def partitioned(self) -> bool: ...


class WrappedOptimizer(Protocol):
    """The part of a `DistributedOptimizer` that this layer uses."""

    optimizer: Any
    param_groups: Any
    whole_tensors: Any
    _gradients: Any

    def _has_local(self) -> bool: ...
    def _use_masters(self) -> None: ...
    def _spread_written(self) -> None: ...
    def _step_done(self) -> None: ...
    def _gradients_used(self, engines: Any) -> None: ...
    def _engines(self) -> Any: ...
    def param_name_to_index(self) -> dict[str, int]: ...


class UnevenCalls(Protocol):
    """An open `join` of replicas that share an optimizer state (`smp.model.join`).

    Replicas without a batch make the calls that need all shards of the state, too.
    """

    def call(self, name: str, parameters: Iterable[Any], *arguments: Any) -> None:
        """Announces a call. Collective over the replicas."""

    def dropped(self) -> None:
        """Notes that the script has dropped the gradients."""

    def refuse(self, what: str) -> None:
        """Raises, because replicas without a batch cannot do the same."""


class Numbered(weakref.WeakValueDictionary[int, _T]):
    """Objects that still live, by their numbers in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._num_added = 0

    def add(self, item: _T) -> None:
        self[self._num_added] = item
        self._num_added += 1


class Wrapped:
    """Registry of models and optimizers wrapped under one runtime.

    Attributes:
        partitioned: numbers of the models that are partitioned; equal on all ranks.
        passed_over: numbers of other models, by step function whose first call did not use them.
        placed: places of the modules of a model, which outlive its wrapper.
        engines: engines of the partitioned models that live, by number, in ascending order.
        numbered_models, numbered_optimizers: models and optimizers that live, by number.
        num_wrapped: number of models wrapped so far, including deleted ones.
        has_holdings: whether optimizers update other tensors than the parameters of modules.
        uneven: open `join` in which calls on shards are announced, or None.
    """

    def __init__(self) -> None:
        self.partitioned: set[int] = set()
        self.passed_over: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
        self.placed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.numbered_models: Numbered[WrappedModel] = Numbered()
        self.numbered_optimizers: Numbered[WrappedOptimizer] = Numbered()
        self._waiting: list[Callable[[WrappedOptimizer], None]] = []
        self.engines: dict[int, Any] = {}
        self.num_wrapped = 0
        self.has_holdings = False
        self.uneven: UnevenCalls | None = None
        self._has_local: dict[int, tuple[tuple[int, ...], bool]] = {}

    def add_model(self, model: WrappedModel) -> int:
        """Registers a wrapped model; returns its number, which is never used again.

        The registry does not keep the model alive.
        """
        self.numbered_models.add(model)
        self.num_wrapped += 1
        return self.num_wrapped - 1

    def add_engine(self, idx: int, engine: Any) -> None:
        """Registers the engine of a model that is partitioned now."""
        self.partitioned.add(idx)
        self.engines = dict(sorted({**self.engines, idx: engine}.items()))

    @property
    def models(self) -> list[WrappedModel]:
        """Wrapped models that live, in the order in which they were made."""
        return list(self.numbered_models.values())

    @property
    def candidates(self) -> str:
        """The models that live, in words."""
        return "; ".join(model._label for model in self.models)

    @property
    def model(self) -> WrappedModel | None:
        """The model of calls that name none; None before one is wrapped.

        Raises:
            RuntimeError: there are several.
        """
        models = self.models
        if len(models) > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}this call names no model and {len(models)} are wrapped "
                f"({self.candidates}); call the method of the model that is meant, or pass it"
            )
        return models[0] if models else None

    def add_optimizer(self, optimizer: WrappedOptimizer) -> None:
        """Registers a wrapped optimizer, without keeping it alive."""
        self.numbered_optimizers.add(optimizer)
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback(optimizer)

    def on_next_optimizer(self, callback: Callable[[WrappedOptimizer], None]) -> None:
        """Calls back with the next optimizer that is wrapped."""
        self._waiting.append(callback)

    @property
    def optimizers(self) -> list[WrappedOptimizer]:
        """Wrapped optimizers that live, in the order in which they were made."""
        return list(self.numbered_optimizers.values())

    def note_dropped(self) -> None:
        """Notes that the script has dropped gradients."""
        if self.uneven is not None:
            self.uneven.dropped()

    def spread_written(self) -> None:
        """Copies into models what the script has written to the tensors that optimizers update."""
        if self.has_holdings:
            for optimizer in self.optimizers:
                optimizer._spread_written()

    def updating(self) -> list[tuple[int, Any]]:
        """Returns PyTorch's optimizers that update something on this rank, with their numbers."""
        updating = []
        for number, each in list(self.numbered_optimizers.items()):
            # The models and its groups alone decide whether an optimizer updates something here.
            groups = map(itemgetter("params"), each.optimizer.param_groups)
            params = map(id, itertools.chain.from_iterable(groups))
            state = (self.num_wrapped, len(self.partitioned), len(self.engines), *params)
            known = self._has_local.get(number)
            if known is None or known[0] != state:
                known = self._has_local[number] = state, each._has_local()
            if known[1]:
                updating.append((number, each.optimizer))
        return updating

    @property
    def optimizer(self) -> WrappedOptimizer | None:
        """The last wrapped optimizer that lives, if any."""
        optimizers = self.optimizers
        return optimizers[-1] if optimizers else None

    def forget(self) -> None:
        """Forgets all models and optimizers; numbers begin at 0 again."""
        self.__init__()  # type: ignore[misc]
