"""A step of a model whose layers are split, as its ranks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.steps import marked_values
from tests.harness import own_loss, train_step_of
from tests.reference.tolerances import assert_close


def train_once(plain: nn.Module, batch_of: Callable[[int], Tensor], prescaled: bool) -> Any:
    """Gradients, the whole state and the shapes of what a rank has. Collective, after `smp.init`.

    Args:
        plain: the model, whose forward gives the loss.
        batch_of: makes the batch of a replica; with ``prescaled`` split ranks have it in common.
        prescaled: the configuration's ``prescaled_batch``.
    """
    import smp

    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    train_step(batch_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    shapes = {name: tuple(p.shape) for name, p in model.local_named_parameters()}
    return marked_values(model, "grad"), model.state_dict(), shapes


def assert_gradients(
    of_ranks: Iterable[Mapping[str, Any]],
    plain: nn.Module,
    batches: list[Tensor],
    where: str,
    loss_of: Callable[[Any, Any], Tensor] = own_loss,
) -> None:
    """Compares what ranks have with one process, which takes the mean loss over all batches."""
    from smp.tensor_parallel import partial

    for batch in batches:
        (loss_of(plain, batch) / len(batches)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(partial.merge(list(of_ranks)), expected, torch.float64, where)
