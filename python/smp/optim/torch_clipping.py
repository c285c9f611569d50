"""``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` on parameters of a distributed model.

What PyTorch's functions find on a rank is a part: of a pipeline its own stage, of split layers its
slices, and of sharded state and of 16-bit parameters nothing or a copy. Each rank would clip by
another norm, or not at all, and nobody would say so. So while models are wrapped these functions do
what `smp.clip_grad_norm_` does where they are given parameters of such a model; other calls are
theirs.

Scripts have these functions by several names, from before the library was imported. Both are
wrappers of torch's own that call what is in their closure, so that is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType

from torch import Tensor, nn
from torch.nn.utils import clip_grad

import smp._C as _C
from smp.optim.grad_norm import clip_grad_norm_
from smp.precision.gradients import gradients_of
from smp.precision.holdings import master_of, model_parameter_of
from smp.world import runtime

Parameters = Tensor | Iterable[Tensor]


class TorchClipping:
    """Takes the place of PyTorch's two functions until the run is shut down.

    Args:
        current: the runtime, whose models count.

    Raises:
        RuntimeError: this release of torch has other functions.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._wrapped = current.wrapped
        sizes, config = current.rank.sizes, current.rank.config
        # Otherwise gradients are whole on each rank, and the model's own.
        if sizes["mp"] == sizes["shard"] == 1 and config.half_dtype is None:
            return
        self._norm, self._value = _cell("clip_grad_norm_"), _cell("clip_grad_value_")
        if isinstance(getattr(self._norm.cell_contents, "__self__", None), TorchClipping):
            return  # of this run: it was restored when another one ended
        self._their_norm: Callable[..., Tensor] = self._norm.cell_contents
        self._their_value: Callable[..., None] = self._value.cell_contents
        self._norm.cell_contents, self._value.cell_contents = self._clip_norm, self._clip_value
        current.on_shutdown(self._restore)

    def _restore(self) -> None:
        self._norm.cell_contents, self._value.cell_contents = self._their_norm, self._their_value

    def _clip_norm(
        self,
        parameters: Parameters,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = _listed(parameters)
        if self._has_part(listed):
            return clip_grad_norm_(listed, float(max_norm), float(norm_type), error_if_nonfinite)
        return self._their_norm(listed, max_norm, norm_type, error_if_nonfinite, foreach)

    def _clip_value(
        self, parameters: Parameters, clip_value: float, foreach: bool | None = None
    ) -> None:
        listed = _listed(parameters)
        if self._has_part(listed):
            updated = list({id(p): p for p in map(master_of, listed)}.values())
            for gradients in {id(g): g for p in updated if (g := gradients_of(p))}.values():
                gradients.unscale()
            listed = [p for p in updated if p.grad is not None]
        if listed:
            self._their_value(listed, clip_value, foreach)

    def _has_part(self, listed: Iterable[Tensor]) -> bool:
        """Is one of them of a wrapped model, or what is updated in its place?"""
        models = [model for model in self._wrapped.models if isinstance(model, nn.Module)]
        known = {id(p) for model in models for p in model.parameters()}
        return any(id(model_parameter_of(p)) in known for p in listed)


def _cell(name: str) -> CellType:
    """Where one of torch's wrappers has the function that it calls."""
    wrapper = getattr(clip_grad, name)
    cells: tuple[CellType, ...] = wrapper.__closure__ or ()
    if len(cells) != 1 or not callable(cells[0].cell_contents):
        raise RuntimeError(
            f"{_C.rank_prefix()}torch.nn.utils.{name} of this torch has another form than those "
            "that smp was written for (smp doctor names the releases), or was replaced; each rank "
            "would clip by the gradients that it has itself"
        )
    return cells[0]


def _listed(parameters: Parameters) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
