"""Updates of replicas that share an optimizer state, inside of `join`.

Each replica updates its part of all parameters, so replicas without a batch make the updates of the
others, and whatever changes gradients before them, as torch's ZeroRedundancyOptimizer does in a
Join. Here these calls are announced one by one, so that steps and updates need not alternate, and
hyperparameters come from a replica that has a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from torch import nn

import smp._C as _C
from smp.model.engine import Engine
from smp.precision.grad_norm import clip_grad_norm_, grad_norm
from smp.precision.holdings import master_of
from smp.world import runtime


class Join(Protocol):
    """The part of an open `join` that calls on shards use."""

    @property
    def engine(self) -> Engine: ...
    @property
    def current(self) -> runtime.Runtime: ...
    @property
    def has_shadows(self) -> bool: ...
    def exchange_call(self) -> None: ...
    def send_to_shadows(self, content: Any) -> None: ...
    def receive(self) -> Any: ...
    def drop_gradients(self) -> None: ...


class JoinShards:
    """The calls of an open `join` that need the optimizer state of all replicas.

    Args:
        uneven: the `join`, which communicates.
    """

    def __init__(self, uneven: Join) -> None:
        self._uneven = uneven
        self._is_shadow = False  # this replica has no batch, and makes the calls of others
        self._is_dropped = False  # the script has dropped its gradients since the last step
        self._have_some = False  # replicas without a batch have gradients that were not applied
        # Gradients of this rank with their versions; None: a call has changed them.
        self._mark: list[tuple[int, int]] | None = None
        self._versions: list[int] | None = None  # of the parameters, which scripts change

    # ---- on a replica that has a batch

    def call(self, name: str, parameters: Iterable[Any], *arguments: Any) -> None:
        """Announces a call. Collective over the replicas.

        Args:
            name: name of the call; see `make`.
            parameters: parameters of the model that it is about.
            arguments: further arguments.
        """
        if self._is_shadow:
            return
        uneven = self._uneven
        uneven.exchange_call()
        self._check_parameters()
        if uneven.has_shadows:
            if self._mark is not None and self._mark != self._marks():
                self.refuse("a change of gradients by code of the script")
            numbers = {parameter: i for i, parameter in enumerate(self._parameters())}
            own = [numbers[p] for p in parameters if p in numbers]  # others have no gradient here
            uneven.send_to_shadows((name, own, arguments))
        self._mark = None
        if name == "optimizer" and arguments[1] == "step":
            self._have_some = False

    def dropped(self) -> None:
        """Notes that the script has dropped the gradients."""
        self._is_dropped = True

    def refuse(self, what: str) -> NoReturn:
        """Raises, because replicas without a batch cannot do the same.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{_C.rank_prefix()}{what} inside of join() with shard_optimizer_state=True: replicas "
            "without a batch update a part of the parameters and cannot do the same; use step "
            "functions, smp.clip_grad_norm_ and optimizer.step() only, or leave "
            "shard_optimizer_state out"
        )

    def before_step(self) -> None:
        """Brings gradients of replicas without a batch to the state of those here."""
        has_some = self._has_gradients()
        self._check_parameters()
        if self._have_some and not has_some:
            self._mark = None
            self.call("drop", ())
            self._have_some = False
        elif has_some and not self._have_some and self._uneven.has_shadows:
            self.refuse("gradients that stay after optimizer.step()")
        self._is_dropped = False

    def after_step(self) -> None:
        """Notes that a step has left gradients."""
        self._have_some, self._mark = True, self._marks()

    def _check_parameters(self) -> None:
        # Updates and gathers change memory behind the parameters, and no version of these.
        versions = [parameter._version for parameter in self._parameters()]
        if self._uneven.has_shadows and self._versions not in (None, versions):
            self.refuse("writing to parameters")
        self._versions = versions

    def _has_gradients(self) -> bool:
        return not self._is_dropped and bool(self._marks())

    def _marks(self) -> list[tuple[int, int]]:
        grads = [master_of(parameter).grad for parameter in self._parameters()]
        return [(grad.data_ptr(), grad._version) for grad in grads if grad is not None]

    def _parameters(self) -> list[nn.Parameter]:
        parts = self._uneven.engine.parts
        return [] if parts is None else [parameter for _, parameter in parts.named_parameters()]

    # ---- on a replica without a batch

    def begin_shadow(self) -> None:
        """Begins to make the calls of others."""
        if not self._has_gradients():
            self._uneven.drop_gradients()
        self._is_shadow = True

    def after_shadow_step(self) -> None:
        """Checks gradients for overflows, as step functions do."""
        for optimizer in self._uneven.current.wrapped.optimizers:
            optimizer._step_done()

    def make(self, name: str, numbers: Sequence[int], arguments: Sequence[Any]) -> None:
        """Makes a call of the other replicas."""
        parameters = self._parameters()
        selected = [parameters[number] for number in numbers]
        if name == "optimizer":
            self._call_optimizer(*arguments)
        elif name == "clip_grad_norm_":
            clip_grad_norm_(selected, *arguments)
        elif name == "grad_norm":
            grad_norm(selected, *arguments)
        elif name == "clip_grad_value_":
            nn.utils.clip_grad_value_(selected, *arguments)
        else:
            assert name == "drop", name
            self._uneven.drop_gradients()

    def _call_optimizer(
        self,
        number: int,
        method: str,
        arguments: Sequence[float],
        values: Sequence[dict[str, Any]],
    ) -> None:
        optimizer: Any = self._uneven.current.wrapped.numbered_optimizers[number]
        _set_values(optimizer, values)
        getattr(optimizer, method)(*arguments)
        if method == "step":
            self._uneven.drop_gradients()

    # ---- at the end

    def catch_up(self, is_active: bool) -> None:
        """Takes over hyperparameters, and drops gradients that the other replicas have dropped."""
        optimizers: list[Any] = self._uneven.current.wrapped.optimizers
        if is_active:
            values = [hyperparameters(optimizer) for optimizer in optimizers]
            self._uneven.send_to_shadows((values, self._has_gradients()))
            return
        values, has_some = self._uneven.receive()
        for optimizer, own in zip(optimizers, values, strict=True):
            _set_values(optimizer, own)
        if not has_some:
            self._uneven.drop_gradients()


def announce(optimizer: Any, method: str, *arguments: float) -> None:
    """Lets replicas without a batch call the same method of their optimizer. Collective then."""
    wrapped = optimizer._runtime.wrapped
    if wrapped.uneven is not None:
        numbers = (n for n, known in wrapped.numbered_optimizers.items() if known is optimizer)
        values = hyperparameters(optimizer)
        wrapped.uneven.call("optimizer", (), next(numbers), method, arguments, values)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Returns learning rates and other values of parameter groups."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _set_values(optimizer: Any, values: Sequence[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, values, strict=True):
        group.update(own)
