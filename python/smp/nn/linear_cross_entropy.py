"""Cross entropy of a linear head, in chunks of tokens, without logits in memory.

A chunk's logits are computed, reduced to three numbers per token, and overwritten by their
gradient, which is multiplied into the gradients of hidden states and weight. Only one chunk exists
at a time. docs/design/linear_cross_entropy.md has the reasons and the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import smp._C as _C
from smp.modules.tracing import is_recorded
from smp.nn.chunk_loss import ChunkLoss
from smp.tensor_parallel import regions

#: smallest default of a chunk's logits; smaller products do not use the cores well
MIN_CHUNK_BYTES = 16 << 20
#: blocks of a 16-bit product, of which one exists beside a chunk, with its conversion
_BLOCKS_PER_CHUNK = 20
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    recompute: bool = False,
    chunk_bytes: int | None = None,
    begin: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Returns the cross entropy of ``F.linear(hidden, weight, bias)`` without keeping logits.

    A token's loss is that of ``F.cross_entropy``, with its class weights and label smoothing, plus
    ``z_loss * logsumexp(logits) ** 2``. The result is float64 for float64 operands, else float32.

    Args:
        hidden: ``[*, features]``.
        weight: ``[vocabulary, features]``, of the dtype of ``hidden``.
        labels: int64 ``[*]``.
        bias: ``[vocabulary]``.
        ignore_index: label of tokens that do not count.
        label_smoothing: share of the target distribution that is spread over the vocabulary.
        z_loss: factor of the squared logarithm of the sum of exponentials.
        class_weights: ``[whole vocabulary]``; get no gradient.
        token_weights: ``[*]``, factors of the tokens' losses; get no gradient.
        reduction: "mean" divides the sum by the sum of ``token_weights * class_weights[labels]``
            over the counted tokens; "sum"; or "none" for losses ``[*]``.
        recompute: compute logits again in backward. Else gradients are computed in forward, and
            those of the weight wait for backward. Losses of reduction "none" and float16, whose
            gradients need the loss scale, are always recomputed.
        chunk_bytes: most bytes of a chunk's logits. By default the bytes of ``hidden``, and at
            least `MIN_CHUNK_BYTES`.
        begin: first entry of this rank's part, if ``vocab_size`` is given.
        vocab_size: entries of all ranks, if ``weight`` and ``bias`` are the part of this rank of
            the tensor-parallel group. All other arguments are then the same on all ranks, the call
            is collective, and the gradient of ``hidden`` is this rank's term of a sum.

    Raises:
        IndexError: a label is outside of the vocabulary (on CUDA its loss is NaN instead).
        ValueError: arguments do not fit together.
    """
    tensors = (hidden, weight, labels, bias, class_weights, token_weights)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(
            linear_cross_entropy,
            tensors,
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            class_weights=class_weights,
            token_weights=token_weights,
            reduction=reduction,
            recompute=recompute,
            chunk_bytes=chunk_bytes,
            begin=begin,
            vocab_size=vocab_size,
        )
        return result
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _check_tensors(hidden, weight, labels, bias)
    whole_size = weight.shape[0] if vocab_size is None else vocab_size
    _check_part(weight, begin, whole_size)
    _check_weights(labels, whole_size, class_weights, token_weights)
    _check_options(label_smoothing, z_loss, reduction, chunk_bytes)
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    targets = labels.to(hidden.device).flatten()
    loss = ChunkLoss(
        targets=targets,
        counted=targets != ignore_index,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        z_loss=z_loss,
        class_weights=None if class_weights is None else class_weights.detach().to(compute),
        begin=begin,
        vocab_size=whole_size,
        is_split=vocab_size is not None,
        chunk_tokens=0,
    )
    loss = replace(loss, chunk_tokens=_chunk_tokens(hidden, loss, chunk_bytes))
    rows = hidden.reshape(-1, hidden.shape[-1])
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    factors = None if reduction == "none" else _factors(loss, token_weights, reduction, compute)
    # A trace charges backwards by their forwards, so it must not see products of gradients there.
    recompute = recompute or hidden.dtype == torch.float16 or is_recorded()
    if needs_grad and factors is not None and not recompute:
        summed: Tensor = _AtOnce.apply(rows, weight, bias, loss, factors)
        return summed
    losses: Tensor = _Recomputed.apply(rows, weight, bias, loss)
    if factors is not None:
        return torch.dot(losses, factors)
    if token_weights is not None:
        losses = losses * token_weights.detach().to(losses).flatten()
    return losses.view(labels.shape)


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the operands of a product as autocast casts them."""
    kind = hidden.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _factors(
    loss: ChunkLoss, token_weights: Tensor | None, reduction: str, dtype: torch.dtype
) -> Tensor:
    """Returns the factor of each token's loss in the result, 0 where it does not count."""
    zero = torch.zeros((), dtype=dtype, device=loss.targets.device)
    if token_weights is None:
        factors = loss.counted.to(dtype)
    else:
        given = token_weights.detach().to(device=zero.device, dtype=dtype).flatten()
        factors = torch.where(loss.counted, given, zero)
    if reduction == "sum":
        return factors
    weights = factors if loss.class_weights is None else factors * loss.label_weights(loss.targets)
    # Without counted tokens the loss is NaN as in PyTorch, and gradients are 0.
    return torch.where(loss.counted, factors / weights.sum(), zero + loss.nan_if_nothing_counts())


def _chunk_tokens(hidden: Tensor, loss: ChunkLoss, chunk_bytes: int | None) -> int:
    """Returns the number of tokens of a chunk, which is the same on all ranks of a group."""
    logit_bytes = hidden.element_size()
    if chunk_bytes is None:
        chunk_bytes = max(hidden.numel() * logit_bytes, MIN_CHUNK_BYTES)
    if logit_bytes == 2 and loss.needs_exact_logits:
        logit_bytes += 4
    part = -(-loss.vocab_size // regions.size()) if loss.is_split else loss.vocab_size
    return max(1, chunk_bytes // max(1, part * logit_bytes))


# ---- all chunks


class _Products:
    """The products of a head with chunks of its input, and the sums of their gradients.

    Args:
        hidden: ``[tokens, features]``.
        weight: ``[entries, features]``.
        bias: ``[entries]`` or None.
        needed: operands that need gradients, in this order.
        loss: loss of the tokens.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, ...],
        loss: ChunkLoss,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        num = min(loss.chunk_tokens, hidden.shape[0])
        self._logits = hidden.new_empty(num, weight.shape[0])
        self.d_hidden = hidden.new_empty(hidden.shape) if needed[0] else None
        # Sums over several chunks are as exact as a sum inside of one product.
        is_exact = loss.num_chunks <= 1 or hidden.dtype.itemsize > 2
        dtype = hidden.dtype if is_exact else torch.float32
        self.d_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.d_bias = None
        if bias is not None and needed[2]:
            self.d_bias = torch.zeros_like(bias, dtype=dtype)

    def logits(self, chunk: slice) -> Tensor:
        """Returns a chunk's logits, in memory that the next chunk takes."""
        logits = self._logits[: chunk.stop - chunk.start]
        if self._bias is None:
            return torch.mm(self._hidden[chunk], self._weight.t(), out=logits)
        return torch.addmm(self._bias, self._hidden[chunk], self._weight.t(), out=logits)

    def add(self, chunk: slice, d_logits: Tensor) -> None:
        """Adds a chunk's terms to the gradients of the operands."""
        if self.d_hidden is not None:
            torch.mm(d_logits, self._weight, out=self.d_hidden[chunk])
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0)
        if self.d_weight is None:
            return
        if self.d_weight.dtype == d_logits.dtype:
            self.d_weight.addmm_(d_logits.t(), self._hidden[chunk])
            return
        # No operator adds a 16-bit product to a wider tensor, and a whole product takes memory.
        block_bytes = max(1, self._logits.numel() * d_logits.element_size() // _BLOCKS_PER_CHUNK)
        num_rows = max(1, block_bytes // (self._weight.shape[1] * d_logits.element_size()))
        for begin in range(0, self._weight.shape[0], num_rows):
            rows = slice(begin, begin + num_rows)
            self.d_weight[rows] += d_logits[:, rows].t() @ self._hidden[chunk]

    def gradients(self) -> list[Tensor | None]:
        return [self.d_hidden, self.d_weight, self.d_bias]


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a second differentiation raise RuntimeError, whatever the loss is part of.

    `once_differentiable` of PyTorch does so only if the gradient of the loss has a graph.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        refuse = torch._C._functions.DelayedError(
            "linear_cross_entropy has no second derivative", 1
        )
        return tuple(x if x is None else refuse(x.requires_grad_()) for x in results)

    return run


class _AtOnce(torch.autograd.Function):
    """The sum of the tokens' losses times factors, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: ChunkLoss,
        factors: Tensor,
    ) -> Tensor:
        products = _Products(hidden, weight, bias, ctx.needs_input_grad[:3], loss)
        total = factors.new_zeros(())
        for chunk in loss.chunks():
            logits, targets = products.logits(chunk), loss.targets[chunk]
            numbers = loss.statistics(logits, targets)
            total += torch.dot(loss.losses(numbers, targets, loss.counted[chunk]), factors[chunk])
            d_losses = torch.where(loss.counted[chunk], factors[chunk], 0.0)
            loss.write_gradient(logits, numbers, targets, d_losses)
            products.add(chunk, logits)
        ctx.gradients = products.gradients()
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{_C.rank_prefix()}linear_cross_entropy: a second backward through one loss; its "
                "gradients were computed in forward and are used up. Pass recompute=True"
            )
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grads[0])
        return *_narrowed(gradients, ctx.dtype), None, None


def _narrowed(gradients: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Casts gradients one by one, so that a wide sum is freed when its gradient has been made."""
    made: list[Tensor | None] = []
    gradient: Tensor | None = None
    while gradients:
        gradient = gradients.pop()
        made.insert(0, None if gradient is None else gradient.to(dtype))
        gradient = None
    return made


class _Recomputed(torch.autograd.Function):
    """The tokens' losses, whose logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: ChunkLoss
    ) -> Tensor:
        products = _Products(hidden, weight, bias, (False, False, False), loss)
        numbers = []
        losses = []
        for chunk in loss.chunks():
            targets = loss.targets[chunk]
            numbers.append(loss.statistics(products.logits(chunk), targets))
            losses.append(loss.losses(numbers[-1], targets, loss.counted[chunk]))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.loss, ctx.numbers = loss, numbers
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return torch.cat(losses) if losses else hidden.new_zeros(0, dtype=dtype)

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = _computed_again(ctx, grads[0])
        return *_narrowed(gradients, ctx.saved_tensors[0].dtype), None


def _computed_again(ctx: Any, d_losses: Tensor) -> list[Tensor | None]:
    """Returns the gradients of the operands; logits are freed with the variables of this call."""
    hidden, weight, bias = ctx.saved_tensors
    loss: ChunkLoss = ctx.loss
    products = _Products(hidden, weight, bias, ctx.needs_input_grad[:3], loss)
    for chunk, numbers in zip(loss.chunks(), ctx.numbers, strict=True):
        logits = products.logits(chunk)
        counted = torch.where(loss.counted[chunk], d_losses[chunk], 0.0)
        loss.write_gradient(logits, numbers, loss.targets[chunk], counted)
        products.add(chunk, logits)
    return products.gradients()


# ---- checks


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    fits = (
        hidden.dim() >= 1
        and weight.dim() == 2
        and weight.shape[1] == hidden.shape[-1]
        and labels.shape == hidden.shape[:-1]
        and labels.dtype == torch.int64
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        raise ValueError(
            f"{_C.rank_prefix()}linear_cross_entropy: expected hidden [*, features], weight "
            "[vocabulary, features], int64 labels [*] and bias [vocabulary], got "
            f"{list(hidden.shape)}, {list(weight.shape)}, {labels.dtype} {list(labels.shape)} and "
            f"{None if bias is None else list(bias.shape)}"
        )
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ValueError(
            f"{_C.rank_prefix()}linear_cross_entropy: hidden, weight and bias need one floating "
            f"dtype, got {', '.join(sorted(map(str, dtypes)))}; cast some of them"
        )


def _check_part(weight: Tensor, begin: int, vocab_size: int) -> None:
    end = begin + weight.shape[0]
    if begin < 0 or end > vocab_size:
        raise ValueError(
            f"{_C.rank_prefix()}linear_cross_entropy: entries {begin} to {end} are not within the "
            f"vocabulary of {vocab_size}"
        )


def _check_weights(
    labels: Tensor, vocab_size: int, class_weights: Tensor | None, token_weights: Tensor | None
) -> None:
    weights = {
        "class_weights": (class_weights, (vocab_size,)),
        "token_weights": (token_weights, labels.shape),
    }
    for name, (given, shape) in weights.items():
        if given is None:
            continue
        if given.shape != shape:
            raise ValueError(
                f"{_C.rank_prefix()}linear_cross_entropy: expected {name} of shape {list(shape)}, "
                f"got {list(given.shape)}"
            )
        if given.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{_C.rank_prefix()}linear_cross_entropy: {name} need a gradient, and get none; "
                'detach them, or use reduction="none" and multiply the losses'
            )


def _check_options(
    label_smoothing: float, z_loss: float, reduction: str, chunk_bytes: int | None
) -> None:
    problems = {
        f"label_smoothing must be in [0, 1], got {label_smoothing}": not 0 <= label_smoothing <= 1,
        f"z_loss must be at least 0, got {z_loss}": not z_loss >= 0,
        f"reduction must be one of {_REDUCTIONS}, got {reduction!r}": reduction not in _REDUCTIONS,
        f"chunk_bytes must be at least 1, got {chunk_bytes}": chunk_bytes is not None
        and chunk_bytes < 1,
    }
    for problem, is_true in problems.items():
        if is_true:
            raise ValueError(f"{_C.rank_prefix()}linear_cross_entropy: {problem}")
