"""A model trained on the late device has the numbers of the CPU, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tests.device as late


class Model(nn.Module):
    """A small decoder: embedding, attention, GELU, layer norms and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.last = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        gate = F.softmax(self.up(x), dim=-1)
        x = x + self.down(F.gelu(self.up(x), approximate="tanh") * gate)
        return self.last(x) @ self.words.weight.t()


def train(device: str, dtype: torch.dtype, foreach: bool) -> list[torch.Tensor]:
    """Returns the losses of four steps, and the parameters then."""
    torch.manual_seed(1)
    model = Model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    tokens = torch.randint(20, (3, 9)).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in [*losses, *model.parameters()]]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_has_the_numbers_of_the_cpu(dtype: torch.dtype, foreach: bool) -> None:
    late.set_delays(3, 300)
    found = train("late", dtype, foreach)
    for a, b in zip(found, train("cpu", dtype, foreach), strict=True):
        assert a.equal(b)
    for operator in ("addmm", "native_layer_norm", "gelu", "_softmax", "nll_loss_forward"):
        assert late.times_late(f"aten::{operator}") >= 4, (operator, late.counts())


def test_autocast_casts_products() -> None:
    x = torch.ones(2, 2, device="late")
    with torch.autocast("late", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert F.softmax(x @ x, dim=-1).dtype == torch.float32
    assert (x @ x).dtype == torch.float32
