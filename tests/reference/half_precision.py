"""Training in 16 bits in one process: what every distributed run must reproduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.reference.weights import divisor_of, shares

LEARNING_RATE = 1e-2
# With the default epsilon a gradient near zero turns rounding into a whole step.
ADAM_EPSILON = 1e-3


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


@dataclass
class HalfRecord:
    """A record of a run; names as in the plain model."""

    initial: dict[str, Tensor] = field(default_factory=dict)  # masters before the first step
    losses: list[list[list[float]]] = field(default_factory=list)  # [step][replica][microbatch]
    grads: list[dict[str, Tensor]] = field(default_factory=list)  # [step], without loss scale
    norms: list[float] = field(default_factory=list)  # [step], of these, before clipping
    masters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    params: dict[str, Tensor] = field(default_factory=dict)  # in 16 bits, after the last step


def copy_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """A copy in 16 bits. Transformers itself loads one of its models; else parameters are cast."""
    if hasattr(type(model), "from_pretrained"):
        loaded: nn.Module = type(model).from_pretrained(  # type: ignore[attr-defined]
            None, config=model.config, state_dict=model.state_dict(), dtype=dtype
        )
        return loaded.train(model.training)
    result = copy.deepcopy(model)
    for parameter in result.parameters():
        parameter.data = parameter.data.to(dtype)
    return result


class HalfModel(nn.Module):
    """A 16-bit copy of a model that takes and gives float32.

    Args:
        model: model in float32; its parameters are the masters.
        dtype: dtype of the copy.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.copy = copy_in(dtype, model)
        self.masters = dict(model.named_parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, (args, kwargs)
        )
        return pytree.tree_map_only(
            Tensor, lambda t: t.float() if t.dtype == self.dtype else t, self.copy(*args, **kwargs)
        )

    def take_grads(self) -> dict[str, Tensor]:
        """The gradients in float32, which are then gone."""
        named = dict(self.copy.named_parameters())
        grads = {name: p.grad.float() for name, p in named.items() if p.grad is not None}
        self.copy.zero_grad()
        return grads

    def refresh(self) -> None:
        """Rounds the masters into the copy."""
        with torch.no_grad():
            for name, parameter in self.copy.named_parameters():
                parameter.copy_(self.masters[name])


def _pieces(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    cut = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: cut[name][mb] for name in batch} for mb in range(count)]


def _weight(
    half: HalfModel, compute_loss: Callable[..., Tensor], piece: dict[str, Tensor]
) -> float:
    num_samples = len(next(iter(piece.values())))
    with torch.no_grad():
        return divisor_of(half.copy, lambda: compute_loss(half, piece), num_samples)[1]


def train_half(
    model: nn.Module,
    dtype: torch.dtype,
    compute_loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    batches: Sequence[Sequence[dict[str, Tensor]]],
    microbatches: int,
    loss_scale: float = 1.0,
    clipping: float | None = None,
) -> HalfRecord:
    """AdamW on float32 masters; gradients of 16 bits are added in float32, in microbatch order.

    Args:
        model: model in float32.
        dtype: torch.float16 or torch.bfloat16; torch.float32 for the reference of both.
        compute_loss: loss of a model and a microbatch.
        batches: batches of each step, one per replica.
        microbatches: number of pieces into which a batch is cut.
        loss_scale: factor of the loss.
        clipping: L2 norm that gradients are clipped to.
    """
    half = HalfModel(model, dtype)
    optimizer = make_optimizer(half.masters.values())
    record = HalfRecord({name: p.detach().clone() for name, p in half.masters.items()})
    limit = float("inf") if clipping is None else clipping
    for step_batches in batches:
        record.losses.append([])
        total: dict[str, Tensor] = {}
        cut = [_pieces(batch, microbatches) for batch in step_batches]
        weights = [[_weight(half, compute_loss, piece) for piece in own] for own in cut]
        for own, parts in zip(cut, shares(weights), strict=True):
            sums: dict[str, Tensor] = {}
            losses = []
            for piece, share in zip(own, parts, strict=True):
                loss = compute_loss(half, piece)
                (loss * (loss_scale * share)).backward()
                losses.append(loss.item())
                for name, grad in half.take_grads().items():
                    sums[name] = sums[name] + grad if name in sums else grad
            record.losses[-1].append(losses)
            for name, grad in sums.items():
                total[name] = total[name] + grad if name in total else grad
        for name, master in half.masters.items():
            master.grad = total[name] / loss_scale if name in total else None
        record.grads.append({n: p.grad.clone() for n, p in half.masters.items() if n in total})
        record.norms.append(nn.utils.clip_grad_norm_(half.masters.values(), limit).item())
        optimizer.step()
        half.refresh()
    record.masters = {name: p.detach().clone() for name, p in half.masters.items()}
    record.params = {name: p.detach().clone() for name, p in half.copy.named_parameters()}
    return record
