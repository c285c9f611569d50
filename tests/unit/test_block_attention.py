"""Attention over blocks of keys: merged results and gradients are those of PyTorch's attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smp.context_parallel import block_attention
from smp.context_parallel.block_attention import Block, Rows
from tests.reference.tolerances import relative_difference

SCALE = 0.4
KERNELS = {"written out": block_attention._written_out, "of the CPU": block_attention._on_cpu}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _mask(kind: str, num_queries: int, num_keys: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.zeros(2, 1, num_queries, num_keys)
    mask[:, :, :, : num_keys // 2] = torch.randn(num_queries, num_keys // 2)
    mask[:, :, 1, : num_keys // 2] = -math.inf  # reads keys of the second block only
    mask[1, :, 2] = -math.inf  # reads none
    return mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("features", [8, 16])
@pytest.mark.parametrize("mask_kind", ["none", "some"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_blocks_give_the_result_and_gradients_of_all_keys(
    dtype: torch.dtype, mask_kind: str, features: int, device: str
) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, n, features, device=device).to(dtype).requires_grad_()
        for n in (7, 10, 10)
    )
    mask = _mask(mask_kind, 7, 10)
    mask = None if mask is None else mask.to(device, dtype)
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(
        *exact, attn_mask=None if mask is None else mask.double(), scale=SCALE
    )
    grad = torch.randn_like(expected)
    expected.backward(grad)

    halves = [(slice(0, 5), 0), (slice(5, 10), 1)]
    forms = [Block(None if mask is None else mask[..., s], False, SCALE) for s, _ in halves]
    with torch.no_grad():
        parts = [
            block_attention.forward(query, key[:, :, s], value[:, :, s], forms[i])
            for s, i in halves
        ]
        sums = torch.logaddexp(parts[0][1], parts[1][1])
        weights = [(part[1] - sums).exp().nan_to_num(0.0).unsqueeze(-1) for part in parts]
        out = sum(part[0].to(sums.dtype) * w for part, w in zip(parts, weights, strict=True)).to(
            dtype
        )
        assert relative_difference(out.double(), expected.detach()) < TOLERANCE[dtype]
        of_query = torch.zeros_like(query, dtype=sums.dtype)
        for s, i in halves:
            rows = Rows(query, out, sums, grad.to(dtype))
            found = block_attention.backward(rows, key[:, :, s], value[:, :, s], forms[i])
            of_query += found[0]
            for part, whole in zip(found[1:], exact[1:], strict=True):
                assert whole.grad is not None
                expected_part = whole.grad[:, :, s]
                assert relative_difference(part.double(), expected_part) < 4 * TOLERANCE[dtype]
        assert exact[0].grad is not None
        assert relative_difference(of_query.double(), exact[0].grad) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_kernels_agree_on_causal_attention(kernel: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    form = Block(None, True, SCALE)
    out, sums = KERNELS[kernel](query, key, value, form)
    scores = (query @ key.mT * SCALE).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    assert relative_difference(sums, scores.logsumexp(-1)) < 1e-12
    assert relative_difference(out, scores.softmax(-1) @ value) < 1e-12
    grad = torch.randn_like(out)
    found = block_attention._BACKWARD[KERNELS[kernel]](
        Rows(query, out, sums, grad), key, value, form
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    F.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE).backward(grad)
    for part, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None and relative_difference(part, leaf.grad) < 1e-12


def test_values_of_another_size_have_no_kernel() -> None:
    query, value = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4)
    out, _ = block_attention.forward(query, query, value, Block(None, False, SCALE))
    expected = (query @ query.mT * SCALE).softmax(-1) @ value
    assert relative_difference(out, expected) < 1e-5
