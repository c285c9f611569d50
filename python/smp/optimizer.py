"""``smp.DistributedOptimizer``: an optimizer whose parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from smp import _C, comm, grad_norm, runtime
from smp.model import DistributedModel
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import PARTIAL_MARK, SHARDS_MARK
from smp.tensor_parallel.sharding import interval_of, replaced_name, slice_of, whole_shape

_LOSS_SCALE_ARGUMENTS = (
    "init_scale",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer over the parameters of a :class:`DistributedModel`, or of the plain model.

    Behaves as the wrapped optimizer and shares its ``param_groups`` and ``state``. Each rank
    updates the parameters that it holds; all others have no gradient and are left alone.

    Args:
        optimizer: a ``torch.optim.Optimizer``. Wrapping the result of an earlier call wraps the
            optimizer inside of it.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: for fp16 training, without
            effect otherwise. The entries of ``dynamic_loss_args`` may also be given as keywords.
    """

    # Accelerate leaves such an optimizer as it is, and asks it whether a step was skipped.
    _is_accelerate_prepared = True
    step_was_skipped = False

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **loose_loss_args: Any,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are those of the wrapped optimizer.
        current = runtime.current()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{_C.rank_prefix()}DistributedOptimizer wraps a torch.optim.Optimizer, got a "
                f"{type(optimizer).__name__}"
            )
        unknown = sorted(
            (dict(dynamic_loss_args or {}) | loose_loss_args).keys() - set(_LOSS_SCALE_ARGUMENTS)
        )
        if unknown:
            raise ValueError(
                f"{_C.rank_prefix()}unknown loss scale arguments {unknown}; the known ones are "
                f"{', '.join(_LOSS_SCALE_ARGUMENTS)}"
            )
        _check_none_replaced(optimizer)
        self.optimizer = optimizer
        self._pending_load: dict[str, Any] | None = None
        current.add_optimizer(self)

    # ---- as the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the wrapped optimizer, which schedulers and users may change."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the wrapped optimizer's groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; the same one on every rank."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters of this rank. Call it outside of the step function.

        Args:
            closure: recomputes the loss, for optimizers that want it.

        Returns:
            what the wrapped optimizer returns.
        """
        if self._pending_load is not None:
            self._load_pending()
        is_local = self._locality()
        if any(is_local(p) for group in self.param_groups for p in group["params"]):
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        # Some optimizers cannot work on nothing.
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips the gradients of all groups to a norm over the whole model.

        Collective; see :func:`smp.clip_grad_norm_`.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        return grad_norm.clip_grad_norm_(parameters, max_norm)

    # ---- state

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """State of the parameters of this rank, marked as partial. Not collective.

        Args:
            gather_if_shard: without effect unless the optimizer state is sharded.
        """
        return {**self._local_state(), **self._marks()}

    def _marks(self) -> dict[str, Any]:
        """What a partial state says of itself: which parameters are slices."""
        slices = partial.slices_of(enumerate(self._parameters()))
        return {PARTIAL_MARK: True, **({SHARDS_MARK: slices} if slices else {})}

    def state_dict(self) -> dict[str, Any]:
        """State of all parameters of the model, as the wrapped optimizer would have it alone.

        Collective over the ranks of a replica (the MP group) once the model is partitioned; before
        that it is this rank's.
        """
        result = self._local_state()
        if comm.mp_size() == 1 or not self._is_partitioned(any):
            return result
        own = {**_to_cpu(result["state"]), **self._marks()}
        merged = partial.merge(comm.allgather(own, comm.MP_GROUP), partial.join_optimizer_entries)
        slices = self._marks().get(SHARDS_MARK, {})
        for index, entry in result["state"].items():
            if index not in slices:
                merged[index] = entry  # on this rank's device
        order = [index for index in range(len(self._parameters())) if index in merged]
        rest = [key for key in merged if not isinstance(key, int)]
        return {**result, "state": {key: merged[key] for key in order + rest}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a full state dict, or the partial one that this rank saved.

        Before the model is partitioned the dict is kept and loaded right after. Collective over
        the MP group for partial dicts.
        """
        self._pending_load = dict(state_dict)
        models = self._models()
        if not models:
            return  # the first step is early enough
        if self._is_partitioned(all):
            self._load_pending()
        for model in models:
            if not model.partitioned:
                model.register_post_partition_hook(lambda *_: self._load_if_partitioned())

    def _load_if_partitioned(self) -> None:
        if self._is_partitioned(all):
            self._load_pending()

    def _load_pending(self) -> None:
        given, self._pending_load = self._pending_load, None
        if given is None:
            return
        is_partial = bool(given.pop(PARTIAL_MARK, False))
        held = given.pop(SHARDS_MARK, {})
        entries: dict[Any, Any] = given["state"]
        parameters = self._parameters()
        is_local = self._locality()
        local = {index for index, p in enumerate(parameters) if is_local(p)}
        slices = partial.slices_of(enumerate(parameters))
        is_own = is_partial and all(held.get(i) == slices[i] for i in entries if i in slices)
        if is_partial and comm.mp_size() > 1:
            entries, is_own = _complete(entries, held, local, is_own)
        if not is_own:
            entries = {
                index: _slice_entry(entry, parameters[index]) if index in slices else entry
                for index, entry in entries.items()
                if not isinstance(index, int) or index in local
            }
        given["state"] = {
            index: entry
            for index, entry in entries.items()
            if not isinstance(index, int) or index in local
        }
        self.optimizer.load_state_dict(given)

    def _local_state(self) -> dict[str, Any]:
        result = self.optimizer.state_dict()
        parameters = self._parameters()
        is_local = self._locality()
        entries = {
            index: entry
            for index, entry in result["state"].items()
            if not isinstance(index, int) or is_local(parameters[index])
        }
        return {**result, "state": entries}

    def _parameters(self) -> list[Tensor]:
        """Parameters by the index that they have in state dicts."""
        unique = {id(p): p for group in self.param_groups for p in group["params"]}
        return list(unique.values())

    def _models(self) -> list[DistributedModel]:
        """Models whose parameters these are; all there are when there is one or none."""
        models = [m for m in runtime.current().models if isinstance(m, DistributedModel)]
        if len(models) > 1:
            own = {id(parameter) for parameter in self._parameters()}
            models = [m for m in models if any(id(p) in own for p in m.parameters())]
        return models

    def _is_partitioned(self, how_many: Callable[[Iterable[bool]], bool]) -> bool:
        models = self._models()
        return bool(models) and how_many(model.partitioned for model in models)

    def _locality(self) -> Callable[[Tensor], bool]:
        """Says of a parameter if it is updated here. All are until their model is partitioned."""
        models = self._models()
        if not models:
            return lambda _: True
        if len(models) == 1:
            model = models[0]
            return lambda p: not model.partitioned or model.is_local_parameter(p)
        remote = {
            id(parameter)
            for model in models
            if model.partitioned
            for parameter in model.parameters()
            if not model.is_local_parameter(parameter)
        }
        return lambda p: id(p) not in remote


def _check_none_replaced(optimizer: torch.optim.Optimizer) -> None:
    names = [
        name
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (name := replaced_name(parameter)) is not None
    ]
    if names:
        raise ValueError(
            f"{_C.rank_prefix()}the optimizer holds {len(names)} parameters, '{names[0]}' for one, "
            "of modules that distributed ones have replaced; make it from the parameters of the "
            "DistributedModel"
        )


def _complete(
    entries: dict[Any, Any], held: dict[int, partial.Slice], local: set[int], is_own: bool
) -> tuple[dict[Any, Any], bool]:
    """Adds entries of local parameters that other ranks of the replica have. Collective.

    After the same partition every rank has all of its own, and nothing big is sent.

    Args:
        entries: of this rank.
        held: which of them are slices.
        local: parameters of this rank.
        is_own: these are the slices of this rank.

    Returns:
        entries, and whether those of split parameters are slices still.
    """
    holdings = comm.allgather((set(entries), local, is_own), comm.MP_GROUP)
    held_by_some = {index for there, _, _ in holdings for index in there}
    is_whole = any((wanted & held_by_some) - there for there, wanted, _ in holdings)
    if not is_whole and all(own for _, _, own in holdings):
        return entries, True
    marked = {**_to_cpu(entries), SHARDS_MARK: held}
    return partial.merge(
        comm.allgather(marked, comm.MP_GROUP), partial.join_optimizer_entries
    ), False


def _slice_entry(entry: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a slice out of that of the whole parameter."""
    interval, shape = interval_of(parameter), whole_shape(parameter)
    return {
        name: slice_of(value, interval).clone()
        if isinstance(value, Tensor) and list(value.shape) == shape
        else value
        for name, value in entry.items()
    }


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value
