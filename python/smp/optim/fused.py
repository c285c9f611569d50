"""The base of the fused optimizers: lists for the kernels, numbers of a step, state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import smp._C as _C

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class SumNorms(Protocol):
    """Sums numbers of parameters whose elements are spread over ranks."""

    def __call__(self, norms: Tensor, parameters: Sequence[Tensor], is_max: bool) -> Tensor:
        """
        Args:
            norms: float64 ``[k, len(parameters)]``, of the elements that this rank has.
            parameters: parameters of the optimizer, in the order of its groups, on every rank.
            is_max: whether to take maxima instead of sums; then the numbers are >= 0.

        Returns:
            the same numbers over all elements of each parameter; may be ``norms`` itself.
        """


@dataclass
class Batch:
    """Parameters of one group for one call of an operator, and their other tensors."""

    group: dict[str, Any]
    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # among all parameters
    begins: list[int] = field(default_factory=list)  # see `FusedOptimizer._begin_of`

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Arguments at the front of operators that do the whole update."""
        return (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps, self.copies)

    @property
    def adam_options(self) -> tuple[float, float, float, float, bool, bool]:
        """Numbers of the group, in the order of the operators of Adam and LAMB."""
        group = self.group
        return (
            *betas_of(group),
            group["eps"],
            group["weight_decay"],
            group["adam_w_mode"],
            group["bias_correction"],
        )


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer with one operator for many parameters.

    Parameters are float32 or float64 (`FusedAdam` takes others as well); gradients have their
    dtype, or 16 bits. A parameter may have a 16-bit copy, ``parameter._smp_copy``, that is written
    in the same pass, rounded to nearest even.

    The caller, `smp.DistributedOptimizer` or `torch.amp.GradScaler`, may set these attributes:

    * ``grad_scale``: divisor of gradients. A tensor with one number, or None.
    * ``found_inf``: if it is not 0, nothing changes. A tensor with one number, or None.
    * ``sum_norms``: :class:`SumNorms` if elements are spread over ranks, or None.
    * ``grad_norm``: norm of all gradients of the model before the division; a tensor with one
      number, or None. It is used if ``wants_grad_norm``; without it the norm is that of the
      parameters of this optimizer.

    These numbers are read on the device, so the host does not wait in a step.
    """

    # A class attribute, so that unpickled optimizers have it.
    _step_supports_amp_scaling = True
    sum_norms: SumNorms | None = None
    grad_norm: Tensor | None = None
    set_grad_none: bool = True

    def __init__(self, params: Params, defaults: dict[str, Any], set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; options that are not given are those of the constructor.

        Raises:
            ValueError: options are out of range.
        """
        check_options(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)

    @property
    def wants_grad_norm(self) -> bool:
        """True if ``grad_norm`` is used."""
        return False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients.

        Args:
            set_to_none: whether to drop them instead of writing zeros; None: ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient.

        Args:
            closure: function that recomputes the loss.

        Returns:
            result of the closure.

        Raises:
            ValueError: a parameter has a dtype that the optimizer does not take, or tensors do not
                fit each other.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self._batches())
        return loss

    def _update(self, batches: list[Batch]) -> None:
        """Updates parameters and state."""
        raise NotImplementedError

    def _new_moments(self, param: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter before its first update, without its step."""
        return {
            name: torch.zeros_like(param, memory_format=torch.preserve_format)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _batches(self) -> list[Batch]:
        """Returns parameters with a gradient, by group and kind of their tensors."""
        result: list[Batch] = []
        position = 0
        for group in self.param_groups:
            batches: dict[Any, Batch] = {}
            for param in group["params"]:
                if param.grad is not None:
                    copy = getattr(param, "_smp_copy", None)
                    key = (param.device, param.dtype, copy is not None, self._is_away(param))
                    if key not in batches:
                        batches[key] = Batch(group, param.device)
                    self._add(batches[key], param, copy)
                    batches[key].positions.append(position)
                position += 1
            result += batches.values()
        return result

    def _is_away(self, param: Tensor) -> bool:
        """Returns whether the moments of a parameter are in host memory between updates."""
        return False

    def _begin_of(self, param: Tensor) -> int:
        """Returns the number of a tensor's first element in the parameter; 0 if nothing needs it.

        The tensor may be a part of a sharded parameter.
        """
        return 0

    def _add(self, batch: Batch, param: Tensor, copy: Tensor | None) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state.update(self._new_moments(param))
        batch.params.append(param)
        batch.grads.append(_laid_out_as(param))
        batch.exp_avgs.append(state["exp_avg"])
        batch.exp_avg_sqs.append(state["exp_avg_sq"])
        batch.steps.append(state["step"])
        batch.states.append(state)
        batch.begins.append(self._begin_of(param))
        if copy is not None:
            batch.copies.append(copy)

    def _lr(self, batch: Batch) -> Tensor:
        """Returns the learning rate as a number on the device, cached until it changes."""
        lr = batch.group["lr"]
        if isinstance(lr, Tensor):
            return lr
        cache: dict[tuple[float, torch.device], Tensor] = self.__dict__.setdefault("_numbers", {})
        key = (float(lr), batch.device)
        if key not in cache:
            if len(cache) > 16:
                cache.clear()
            cache[key] = torch.full((), key[0], dtype=torch.float64, device=batch.device)
        return cache[key]

    @property
    def _grad_scale(self) -> Tensor | None:
        # GradScaler deletes the attributes after a step.
        return getattr(self, "grad_scale", None)

    @property
    def _found_inf(self) -> Tensor | None:
        return getattr(self, "found_inf", None)

    def _over_ranks(
        self, batches: Sequence[Batch], norms: Sequence[Tensor], is_max: bool = False
    ) -> list[Tensor]:
        """Combines ``norms``, float64 [k, parameters] per batch, over parts of parameters."""
        if self.sum_norms is None:
            return list(norms)
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            return list(norms)
        rows = norms[0].shape[0] if norms else self._num_norms
        device = batches[0].device if batches else params[0].device
        # The table has all parameters, as other ranks may have gradients where this one has none.
        table = torch.zeros(rows, len(params), dtype=torch.float64, device=device)
        places = [self._places(batch, device) for batch in batches]
        for place, values in zip(places, norms, strict=True):
            table.index_copy_(1, place, values.to(device))
        table = self.sum_norms(table, params, is_max)
        return [
            table.index_select(1, place).to(batch.device)
            for place, batch in zip(places, batches, strict=True)
        ]

    def _places(self, batch: Batch, device: torch.device) -> Tensor:
        """Returns positions of a batch's parameters as an index, cached until they change."""
        cache: dict[Any, Tensor] = self.__dict__.setdefault("_indices", {})
        key = (tuple(batch.positions), device)
        if key not in cache:
            if len(cache) > 16:
                cache.clear()
            cache[key] = torch.tensor(batch.positions, device=device)
        return cache[key]

    _num_norms = 1  # numbers per parameter that `sum_norms` gets

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes state and groups, also those of the optimizers of torch."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            check_options(type(self).__name__, group)
            for param in group["params"]:
                entry = self.state.get(param)
                if entry:
                    step = torch.as_tensor(entry["step"])
                    entry["step"] = step.to(param.device, torch.float32, copy=True).reshape(())


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError if options of a group are out of range."""

    def refuse(key: str, wanted: str) -> None:
        raise ValueError(f"{_C.rank_prefix()}{name}: {key} must be {wanted}, got {options[key]!r}")

    lr = options["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            refuse("lr", "a number or a tensor with one")
    elif not lr >= 0:
        refuse("lr", ">= 0")
    for key in ("eps", "weight_decay"):
        if not options[key] >= 0:
            refuse(key, ">= 0")
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        refuse("betas", "two numbers in [0, 1)")
    for key in ("amsgrad", "maximize"):
        if options.get(key):
            refuse(key, "False: the fused update has no such variant")


def betas_of(group: Mapping[str, Any]) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _laid_out_as(param: Tensor) -> Tensor:
    """Returns the gradient with its elements in the memory order of the parameter."""
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise ValueError(
            f"{_C.rank_prefix()}the gradient of a parameter with sizes {list(param.shape)} has "
            f"layout {grad.layout}; fused optimizers take dense ones: set sparse=False"
        )
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
