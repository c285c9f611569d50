"""A trial whether gradients of a part of the tokens are those of the whole.

A function of autograd may add the gradient of an auxiliary loss, and a hook may divide a gradient
by its norm; the forward shows neither. Attention gives constants in a trial, so all else has to
treat tokens alone, and a gradient of a part is the part of the gradient. With gradients of zero at
the results only such additions are left, however small they are beside others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smp.context_parallel.relations import Different, Pair, leaf_of
from smp.modules.tracing import running_again

_SEED = 12
_TIMES = 4.0  # a backward has more products one after the other


def compare_backward(
    results: Sequence[Pair], wholes: Sequence[Tensor], parts: Sequence[Tensor], length: int
) -> None:
    """Compares the gradients of arguments.

    Args:
        results: tensors that a block gives, and those that its attention gets.
        wholes, parts: arguments of both runs, which have gradients.
        length: number of tokens of the whole.

    Raises:
        Different: gradients of the part are other ones.
    """
    known = [pair for pair in results if pair.whole.requires_grad and pair.part.requires_grad]
    if sum(x.whole.requires_grad or x.part.requires_grad for x in results) != len(known):
        raise Different("its backward does something else for a part of the tokens")
    if not known or not wholes:
        return
    generator = torch.Generator().manual_seed(_SEED)
    for factor in (0.0, 1.0):
        given = [_random(pair.whole, generator) * factor for pair in known]
        own = [pair.leaf.part_of(x, length) for pair, x in zip(known, given, strict=True)]
        of_all = _gradients([pair.whole for pair in known], wholes, given)
        of_part = _gradients([pair.part for pair in known], parts, own)
        for whole, part in zip(of_all, of_part, strict=True):
            if whole.shape != part.shape:  # else all ranks have the argument, and terms of a sum
                dim = next(d for d in range(whole.dim()) if whole.shape[d] != part.shape[d])
                _compare(whole, part, dim, length)


def _compare(whole: Tensor, part: Tensor, dim: int, length: int) -> None:
    leaf = leaf_of(part, whole, length, "its gradient", _TIMES)
    if leaf.dim not in (None, dim):
        raise Different("its gradient is that of other tokens")


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(like.shape, generator=generator)
    return numbers.to(like.device, like.dtype)


def _gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of arguments.

    Tensors that the block has from elsewhere, as keys that layers share, may have the graph of the
    model behind them: that one does not run.
    """
    with saved_tensors_hooks(lambda x: x, lambda x: x), running_again():
        found = torch.autograd.grad(
            list(results), list(inputs), list(given), retain_graph=True, allow_unused=True
        )
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]
