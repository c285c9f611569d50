"""Attention over one rank's heads: PyTorch's fused kernel where it applies, else our softmax."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

import smp._C as _C
from smp.dropout import places
from smp.dropout.masks import Slice
from smp.nn import attention_order, functional
from smp.nn.attention_rule import beyond_fused, takes_fused
from smp.tensor_parallel import regions
from smp.world.log import first_rank_log


@dataclass(frozen=True)
class Scoring:
    """The options by which products of queries and keys become probabilities.

    Attributes:
        scale: factor of the products.
        causal: position i sees positions up to i.
        window: largest number of positions that a position sees, itself the last; needs ``causal``.
        in_fp32: products and softmax are computed in float32 at least.
        prescale: factor by which products are made smaller, and enlarged again inside the softmax,
            so that they fit into float16; 1 for no effect.
        flash: ``scaled_dot_product_attention`` is used where it can do all this.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    in_fp32: bool = False
    prescale: float = 1.0
    flash: bool = True


def alibi_slopes(num_heads: int, bias_max: float) -> Tensor:
    """Returns slopes ``2 ** -(i * bias_max / num_heads)`` of heads ``i = 1..num_heads``."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64)
    return torch.exp2(-heads * bias_max / num_heads)


def tell_beyond_fused(scoring: Scoring, has_slopes: bool) -> None:
    """Logs, once on rank 0, why a new layer cannot use the fused kernel.

    Args:
        scoring: options of the layer.
        has_slopes: the layer uses ALiBi.
    """
    if not scoring.flash:
        return
    for name in beyond_fused(scoring.window, has_slopes, scoring.prescale):
        if first_rank_log.is_new((__name__, name)):
            first_rank_log.info(
                "smp: layers with %s use the ordinary softmax instead of PyTorch's fused attention",
                name,
            )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    dropout_p: float,
    slopes: Tensor | None = None,
    own_heads: Slice | None = None,
    of_group: bool = False,
) -> Tensor:
    """Returns the weighted values of one rank's heads.

    Args:
        query: ``[B, heads, Q, D]``.
        key, value: ``[B, heads, K, D]``.
        mask: additive mask, broadcast to ``[B, heads, Q, K]``; None if nothing is masked.
        scoring: options by which scores are computed.
        dropout_p: probability of dropout in this call; ranks draw different dropout masks.
        slopes: slopes of ALiBi, ``[heads]``.
        own_heads: place of these heads among all heads; None if these are all heads.
        of_group: the batch holds the samples of all ranks of the tensor-parallel group.

    Returns:
        ``[B, heads, Q, D]``.
    """
    place = places.current()
    drop: Callable[[Tensor], Tensor] | None = None
    if dropout_p > 0.0 and place is not None:
        drop = partial(place.drop, p=dropout_p, part=own_heads, of_group=of_group or None)
        dropout_p = 0.0
    window = scoring.window
    if window is not None and window >= key.shape[2]:
        window = None  # the window covers all keys
    plain = not beyond_fused(window, slopes is not None, scoring.prescale)
    if drop is None and scoring.flash and plain and _fused_fits(query, scoring.in_fp32, dropout_p):
        return _flash(query, key, value, mask, scoring, dropout_p)
    return _softmax(query, key, value, mask, scoring, dropout_p, slopes, window, drop)


def _fused_fits(query: Tensor, in_fp32: bool, dropout_p: float) -> bool:
    return takes_fused(
        query.device.type,
        query.dtype,
        in_fp32=in_fp32,
        drops=dropout_p > 0.0,
        reduces_in_16_bits=torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    dropout_p: float,
) -> Tensor:
    causal = scoring.causal
    if mask is not None:
        mask = _mask_for(mask, query, key, causal)
        causal = False
    order = attention_order.preferring(query, key.shape[2], mask, causal)
    with _drawing(dropout_p, query.device), order:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            dropout_p,
            is_causal=causal,
            scale=scoring.scale,
        )


def _softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    dropout_p: float,
    slopes: Tensor | None,
    window: int | None,
    drop: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    if scoring.prescale != 1.0:
        query = query * (scoring.scale / scoring.prescale)
    if scoring.in_fp32:
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(wide), key.to(wide)
    scores = torch.matmul(query, key.transpose(-1, -2))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if slopes is not None:
        slopes = slopes.to(scores.device, wide)
    probabilities = functional.scaled_masked_softmax(
        scores,
        None if mask is None else _cast(mask, wide),
        scoring.scale if scoring.prescale == 1.0 else scoring.prescale,
        scoring.causal,
        window,
        slopes,
        dropout_p=dropout_p,
        seed=regions.own_seed() if dropout_p > 0.0 else 0,
        in_fp32=scoring.in_fp32 or scoring.prescale != 1.0,
    )
    if drop is not None:
        probabilities = drop(probabilities)
    return torch.matmul(probabilities.to(value.dtype), value)


# ---- masks -----------------------------------------------------------------------------

# All layers of a stack get one mask, so its cast and causal forms are computed once.
_made_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _mask_for(mask: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Returns an additive mask in the query's dtype, with future keys masked if ``causal``."""
    if mask.dtype == query.dtype and not causal:
        return mask  # a cached value must not hold the mask, which is its key
    if mask.requires_grad or mask.is_inference():
        return _make_mask(mask, query, key, causal)
    made = _made_masks.setdefault(mask, {})
    what = (mask._version, query.dtype, query.shape[2], causal)
    if what not in made:
        made.clear()
        made[what] = _make_mask(mask, query, key, causal)
    result = made[what]
    assert isinstance(result, Tensor)
    return result


def _make_mask(mask: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    mask = _cast(mask, query.dtype)
    if causal:
        shape = (query.shape[2], key.shape[2])
        future = torch.ones(shape, dtype=torch.bool, device=mask.device).triu_(1)
        mask = mask.masked_fill(future, float("-inf"))
    return mask


def _cast(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a mask and keeps its most negative number finite, so that masked rows are not NaN."""
    if torch.finfo(mask.dtype).min >= torch.finfo(dtype).min:
        return mask.to(dtype)
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype)


@contextlib.contextmanager
def _drawing(dropout_p: float, device: torch.device) -> Iterator[None]:
    """Seeds the device's generator for one call, differently on each tensor-parallel rank."""
    if dropout_p == 0.0:
        yield
        return
    seed = regions.own_seed()  # drawn first, so that the restored state has advanced
    # Captures by the device's index: the thread's current device may be another one.
    before = _C.RandomState.capture(str(device))
    _C.seed_generators(seed, str(device))
    try:
        yield
    finally:
        before.restore()
