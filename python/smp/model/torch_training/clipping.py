"""``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` on parameters of a distributed model.

PyTorch's functions find only a part of a model on a rank: of a pipeline its own stage, of split
layers its slices, and of sharded state and of 16-bit parameters nothing or a copy. Each rank would
clip by another norm, or not at all, without an error. So while models are wrapped these functions
work like `smp.clip_grad_norm_` on parameters of such a model; other calls reach PyTorch's own.

``get_total_norm`` and ``clip_grads_with_norm_``, its two halves, have too little information for
that: the first gets gradients, of which a rank may have none. They are refused on such parameters.

Scripts have these functions by several names, from before the library was imported. All are
wrappers of torch that call the function in their closure, so that function is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.utils import clip_grad

import smp._C as _C
from smp.model.torch_training.known import has_known, has_known_gradient
from smp.precision.grad_norm import clip_grad_norm_, refuse_without_gradients
from smp.precision.gradients import gradients_of
from smp.precision.holdings import master_of, model_parameter_of
from smp.world import runtime

Parameters = Tensor | Iterable[Tensor]


class TorchClipping:
    """Replaces PyTorch's functions until the run is shut down.

    Inside of step functions, where gradients are not whole yet, it refuses them.

    Args:
        current: the runtime, whose models count.
        has_parts: whether a rank may have only parts of a model; else PyTorch's own suffice.

    Raises:
        RuntimeError: this release of torch has other functions.
    """

    def __init__(self, current: runtime.Runtime, has_parts: bool) -> None:
        self._rank, self._wrapped, self._steps = current.rank, current.wrapped, current.steps
        self._has_parts = has_parts
        ours: dict[str, Callable[..., Any]] = {
            "clip_grad_norm_": self._clip_norm,
            "clip_grad_value_": self._clip_value,
            "_get_total_norm": self._total_norm,
            "_clip_grads_with_norm_": self._clip_with_norm,
        }
        cells = {name: _cell(name) for name in ours}
        self._theirs: dict[str, Callable[..., Any]] = {
            name: cell.cell_contents for name, cell in cells.items()
        }

        def restore() -> None:
            for name, cell in cells.items():
                cell.cell_contents = self._theirs[name]

        for name, cell in cells.items():
            cell.cell_contents = ours[name]
        current.on_shutdown(restore)

    def _clip_norm(
        self,
        parameters: Parameters,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = _listed(parameters)
        if self._is_ours(listed, "clip_grad_norm_"):
            return clip_grad_norm_(listed, float(max_norm), float(norm_type), error_if_nonfinite)
        theirs = self._theirs["clip_grad_norm_"]
        norm: Tensor = theirs(listed, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm

    def _clip_value(
        self, parameters: Parameters, clip_value: float, foreach: bool | None = None
    ) -> None:
        listed = _listed(parameters)
        if self._is_ours(listed, "clip_grad_value_"):
            refuse_without_gradients(self._rank, "clipping of all gradients")
            updated = list({id(p): p for p in map(master_of, listed)}.values())
            if self._wrapped.uneven is not None:
                models = map(model_parameter_of, updated)
                self._wrapped.uneven.call("clip_grad_value_", models, float(clip_value))
            for gradients in {id(g): g for p in updated if (g := gradients_of(p))}.values():
                gradients.unscale()
            listed = [p for p in updated if p.grad is not None]
        if listed:
            self._theirs["clip_grad_value_"](listed, clip_value, foreach)

    def _is_ours(self, listed: list[Tensor], name: str) -> bool:
        if (self._has_parts or self._steps.running) and has_known(self._wrapped, listed):
            self._steps.refuse_inside(name)
            return True
        return False

    def _total_norm(self, tensors: Parameters, *args: Any, **kwargs: Any) -> Any:
        listed = _listed(tensors)
        if self._has_parts and has_known_gradient(self._wrapped, listed):
            _refuse("get_total_norm")
        return self._theirs["_get_total_norm"](listed, *args, **kwargs)

    def _clip_with_norm(self, parameters: Parameters, *args: Any, **kwargs: Any) -> Any:
        listed = _listed(parameters)
        if self._is_ours(listed, "clip_grads_with_norm_"):
            _refuse("clip_grads_with_norm_")
        return self._theirs["_clip_grads_with_norm_"](listed, *args, **kwargs)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{_C.rank_prefix()}torch.nn.utils.{name} sees the gradients of this rank only, which has "
        "a part of the model; use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), "
        "which clips by the norm over all ranks and returns it (max_norm=float('inf') to read it)"
    )


def _cell(name: str) -> CellType:
    """Returns the closure cell that has the function which one of torch's wrappers calls."""
    wrapper = getattr(clip_grad, name)
    cells: tuple[CellType, ...] = wrapper.__closure__ or ()
    if len(cells) != 1 or not callable(cells[0].cell_contents):
        raise RuntimeError(
            f"{_C.rank_prefix()}torch.nn.utils.{name} of this release of torch differs from the "
            "supported ones (smp doctor lists them), or was replaced; each rank would clip by its "
            "own gradients only"
        )
    return cells[0]


def _listed(parameters: Parameters) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
