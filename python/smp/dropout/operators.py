"""Replaces PyTorch's dropout, so that code in a known place gets its masks from `places`.

PyTorch's operators get another implementation. All code that drops leads to these operators:
modules, functions, attention, the transformer layers and recurrent layers of ``torch.nn``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import smp._C as _C
from smp.dropout import places
from smp.dropout.masks import scaled
from smp.dropout.places import KEY, Place

_aten = torch.ops.aten
# Keys below autograd serve tensors of inference mode.
_DISPATCH = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")


class Operators:
    """Replaces the operators that drop for the whole process, until `close`.

    Args:
        runs_step: returns whether a step runs.
    """

    def __init__(self, runs_step: Callable[[], bool]) -> None:
        self._runs_step = runs_step
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        self._taken: list[Any] = []
        kinds: dict[str, Callable[..., Tensor]] = {
            "dropout": _dropout,
            "feature_dropout": _feature_dropout,
            "alpha_dropout": _alpha_dropout,
            "feature_alpha_dropout": _feature_alpha_dropout,
        }
        for name, drop in kinds.items():
            self._take(name, getattr(_aten, name).default, drop, in_place=False)
            self._take(f"{name}_", getattr(_aten, f"{name}_").default, drop, in_place=True)
        for dispatch in ("AutogradCUDA", "CUDA"):
            self._library.impl("scaled_dot_product_attention", _attention, dispatch)
        self._taken.append(_aten.scaled_dot_product_attention.default)
        self._forget_choices()

    def _take(self, name: str, op: Any, drop: Callable[..., Tensor], *, in_place: bool) -> None:
        def implementation(x: Tensor, p: float, train: bool) -> Tensor:
            if not train or p == 0.0 or x.numel() == 0:
                return op.decompose(x, p, train)  # type: ignore[no-any-return]
            place = self._place_of(x)
            if place is None:
                return op.decompose(x, p, train)  # type: ignore[no-any-return]
            result = drop(place, x, p)
            return x.copy_(result) if in_place else result

        assert self._library is not None
        for dispatch in _DISPATCH:
            self._library.impl(name, implementation, dispatch)
        self._taken.append(op)

    def _place_of(self, x: Tensor) -> Place | None:
        place = places.current()
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not _C.is_recomputing() and self._runs_step():
            # The place is unknown: backward does not run where the first forward was.
            raise RuntimeError(
                f"{_C.rank_prefix()}{KEY}: dropout of a tensor of shape {list(x.shape)} in a "
                "backward: expected a second forward of smp.set_activation_checkpointing or "
                "smp.patches.checkpoint.checkpoint, which have the masks of the first one. Use "
                f"these in the place of torch.utils.checkpoint, or leave {KEY} out"
            )
        if place is not None and (isinstance(x, FakeTensor) or torch._is_functional_tensor(x)):
            raise place.refused(
                x,
                "it is inside of a function that torch.compile compiles, which would keep the "
                "mask of one step for all",
                "do not compile it",
            )
        return place

    def close(self) -> None:
        """Restores PyTorch's implementations. May be called twice."""
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None
            self._forget_choices()

    def _forget_choices(self) -> None:
        """Makes PyTorch look up the implementations of the replaced operators again.

        Tracers of torch.compile keep the implementation they have found, and would go on with an
        implementation without a gradient. Code compiled before would draw masks of its own.
        """
        for op in self._taken:
            op._dispatch_cache.clear()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def _dropout(place: Place, x: Tensor, p: float) -> Tensor:
    return place.drop(x, p)


def _noise_shape(place: Place, x: Tensor) -> list[int]:
    """Returns the shape of a mask with one element for each channel of a sample."""
    if place.dim != 0 or x.dim() < 2:
        raise place.refused(
            x, "expected [samples, channels, *], where channels are dropped", "give it so"
        )
    return [*x.shape[:2], *(1,) * (x.dim() - 2)]


def _feature_dropout(place: Place, x: Tensor, p: float) -> Tensor:
    shape = _noise_shape(place, x)
    if p >= 1.0:
        return x * 0.0
    return scaled(x, place.mask(x, shape, p).expand(x.shape), 1.0 / (1.0 - p))


def _alpha_dropout(place: Place, x: Tensor, p: float) -> Tensor:
    return _alpha(x, p, place.mask_of(x, p) if p < 1.0 else None)


def _feature_alpha_dropout(place: Place, x: Tensor, p: float) -> Tensor:
    shape = _noise_shape(place, x)
    return _alpha(x, p, place.mask(x, shape, p) if p < 1.0 else None)


def _alpha(x: Tensor, p: float, mask: Tensor | None) -> Tensor:
    """Sets dropped elements to the least value of a SELU; keeps mean and variance (Klambauer 2017).

    A mask of None drops all elements.
    """
    if mask is None:
        return x * 0.0
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    kept = mask.to(x.dtype)
    return x * (kept * a) + ((kept - 1.0) * (alpha * a) + alpha * a * p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention; with dropout in a known place, without fused kernels' own masks."""
    if dropout_p > 0.0 and places.current() is not None:
        result: Tensor = torch._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
        return result
    plain: Tensor = _aten.scaled_dot_product_attention.default.decompose(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return plain
