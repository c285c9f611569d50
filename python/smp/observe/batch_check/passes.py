"""Runs one pass of the check: a step function without gradients, whose losses are noted."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

import smp._C as _C
from smp.dropout.by_sample import Drawn, DrawsBySample
from smp.dropout.others import seed_others, state_of_others
from smp.modules.flat import is_cache
from smp.partition.trace_state import KeptValues
from smp.pipeline.remote_modules import CallFailed
from smp.pipeline.remote_tensor import localize

_log = logging.getLogger("smp")

#: model index that marks the end of the driver's body
ENDED = -1
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class BatchPass:
    """Runs of a step function over pieces of a batch, on one rank.

    Args:
        sizes: number of samples of each microbatch; their sum is the whole batch.
        device: device of this process.
        shakes: outputs of models are moved, each sample in its own way, so that losses that
            happen to be equal at the first step are not.
        rounds: operators get rounding errors.
        alike: all numbers that an operator draws are the same one.
        slopes: outputs of models get tangents, so that losses have slopes. Needs ``shakes``.

    Attributes:
        losses: values at which backward would begin, in order, by microbatch; with ``slopes`` each
            is followed by the derivative of the loss along the tangents.
        eps: machine epsilon of the coarsest dtype of these.
        failure: reason in words why the pass has no result; None: it ran.
        drawn: random numbers that were drawn.
        kept: copies of parameters that forwards have written to.
        shaken: shapes of outputs that were moved.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        *,
        shakes: bool,
        rounds: bool = False,
        alike: bool = False,
        slopes: bool = False,
    ) -> None:
        ends = [sum(sizes[: mb + 1]) for mb in range(len(sizes))]
        self._samples = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._device, self._shakes = device, shakes
        self._rounds, self._alike, self._slopes = rounds, alike, slopes
        self._num_calls: Counter[int] = Counter()
        self._ended: set[int] = set()
        self.losses: dict[int, list[float]] = {mb: [] for mb in range(len(sizes))}
        self.eps = 0.0
        self.failure: str | None = None
        self.drawn = Drawn()
        self.kept: KeptValues | None = None
        self.shaken: Counter[tuple[Any, ...]] = Counter()

    # ---- around code

    @contextlib.contextmanager
    def running(self, mb: int) -> Iterator[None]:
        """Prepares the block to compute a microbatch: a body, or a module for another rank."""
        rounds = mb + 1 if self._rounds else None
        _C.seed_generators(1, str(self._device))  # for operators that do not declare that they draw
        # A mode is entered once in each thread.
        mode = DrawsBySample(
            self._samples[mb],
            self.drawn,
            self._device,
            rounds,
            alike=self._alike,
            on_call=None if self.kept is None else self.kept.on_call,
        )
        seeded = seed_others()
        with mode:
            yield
        ended = state_of_others()
        if ended != seeded:
            self.drawn.others.add(ended)

    def keeping_tangents(self) -> contextlib.AbstractContextManager[Any]:
        """Lets tensors have tangents in all threads of the block, if losses are to have slopes."""
        return forward_ad.dual_level() if self._slopes else contextlib.nullcontext()

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Lets an exception of the block end the pass, not the step; peer failures are raised."""
        try:
            yield
        except Exception as error:
            if isinstance(error, _C.PeerFailure):
                raise
            self.fail(error)

    def fail(self, error: Exception) -> str:
        """Notes the error by which the pass ends, and returns it in words."""
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if isinstance(error, CallFailed):
            text = str(error)
        else:
            _log.debug("smp: a step function failed in the check of its loss", exc_info=error)
        if self.failure is None:
            self.failure = text
        return text

    @contextlib.contextmanager
    def replacing_backward(self) -> Iterator[None]:
        """Replaces ``loss.backward()``: it notes the loss and starts nothing."""
        theirs = torch.autograd.backward

        @functools.wraps(theirs)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
            self.on_backward(roots, grads)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = theirs

    # ---- calls of models

    def note_call(self, called_idx: int) -> None:
        """Notes that a rank that follows the driver received a model's output, or the end."""
        if called_idx == ENDED:
            self._ended.add(_C.current_microbatch())

    def follow(self, called_idx: int) -> None:
        """Notes a message of the driver that a call of a model has received.

        Raises:
            CallFailed: the driver's body is over.
        """
        self.note_call(called_idx)
        if called_idx == ENDED:
            raise CallFailed("the first pipeline rank calls models less often")

    def has_ended(self, mb: int) -> bool:
        """Returns whether the end of the driver's body has been received."""
        return mb in self._ended

    def on_output(self, model_idx: int, output: Any) -> Any:
        """Returns the output of a model, moved; for ranks where losses are noted."""
        if not self._shakes:
            return output
        mb = max(_C.current_microbatch(), 0)
        number = self._num_calls[mb]
        self._num_calls[mb] += 1
        leaves, spec = pytree.tree_flatten(output, is_leaf=is_cache)
        with _disable_current_modes():
            moved = [
                self._shake(leaf, mb, (model_idx, number, position))
                for position, leaf in enumerate(leaves)
            ]
        return pytree.tree_unflatten(moved, spec)

    def _shake(self, leaf: Any, mb: int, key: tuple[int, int, int]) -> Any:
        samples = self._samples[mb]
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            return leaf
        is_by_sample = leaf.shape[0] == len(samples) and leaf.numel() > 0
        self.shaken[key, is_by_sample] += 1
        if not is_by_sample:
            return leaf
        seed = 1
        for part in key:
            seed = _C.mix_seed(seed, part)
        rows: list[Tensor] = []
        tangents: list[Tensor] = []
        for sample in samples:
            spread = (seed / 2**64 + sample * _GOLDEN) % 1.0
            # Over four samples, two outputs are near zero in all combinations.
            is_near_zero = (sample & (1 + sum(key) % 3)).bit_count() % 2
            least, most = (0.7, 0.95) if is_near_zero else (0.0, 0.1 + 0.2 * spread)
            generator = torch.Generator().manual_seed(_C.mix_seed(seed, sample) >> 1)
            shares = torch.rand(tuple(leaf.shape[1:]), generator=generator)
            rows.append(least + (most - least) * shares)
            if self._slopes:
                tangents.append(torch.rand(shares.shape, generator=generator) - 0.5)
        leaf = localize(leaf)
        if self._slopes:
            leaf = forward_ad.unpack_dual(leaf).primal
        noise = torch.stack(rows).to(leaf.device, leaf.dtype)
        own = leaf.reshape(len(samples), -1)
        shape = (-1, *(1,) * (leaf.dim() - 1))
        is_zero = (own == 0).all(1).view(shape)
        is_mask = ((own == 0) | (own == 1)).all(1).view(shape)
        # Signs and bounds stay, because these may be probabilities. Zeros come from a head that has
        # not learnt; masks select positions.
        moved = noise.where(is_zero, leaf.where(is_mask, leaf * (1 - noise)))
        if not self._slopes:
            return moved
        tangent = torch.stack(tangents).to(leaf.device, leaf.dtype)
        return forward_ad.make_dual(moved, tangent.masked_fill(is_mask & ~is_zero, 0))

    def on_backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Notes the losses of a backward that would begin."""
        total = slope = 0.0
        for root, grad in zip(roots, grads or [None] * len(roots), strict=True):
            value = localize(root)
            self.eps = max(self.eps, torch.finfo(value.dtype).eps)
            if self._slopes:
                value, tangent = forward_ad.unpack_dual(value)
                slope += _sum(tangent, grad) if tangent is not None else 0.0
            total += _sum(value.detach(), grad)
        losses = self.losses[max(_C.current_microbatch(), 0)]
        losses += [total, slope] if self._slopes else [total]


def _sum(values: Tensor, factors: Tensor | None) -> float:
    return float((values.double() if factors is None else values.double() * factors).sum())
