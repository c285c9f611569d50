"""Attention's choice of a kernel; all kernels compute the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smp.nn import attend as attending
from smp.nn.attend import Scoring, attend
from smp.nn.attention_rule import takes_fused
from tests.reference.tolerances import relative_difference

HALVES = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*HALVES, *WIDE], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_the_fused_kernel_is_taken_where_it_computes_what_is_asked(
    device: str, dtype: torch.dtype
) -> None:
    for in_fp32, drops, low in itertools.product((False, True), repeat=3):
        taken = takes_fused(device, dtype, in_fp32=in_fp32, drops=drops, reduces_in_16_bits=low)
        has_scores = dtype in WIDE or (device == "cuda" and not low)
        assert taken == ((has_scores or not in_fp32) and (device == "cuda" or not drops))


def test_gpt_j_in_16_bits_takes_the_fused_kernel_on_cuda() -> None:
    asked: dict[str, Any] = {"in_fp32": True, "reduces_in_16_bits": False}
    for dtype, drops in itertools.product(HALVES, (False, True)):
        assert takes_fused("cuda", dtype, **asked, drops=drops)
        assert not takes_fused("cpu", dtype, **asked, drops=drops)


# ---- the kernels --------------------------------------------------------------------------


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the list of arguments with which the fused kernel is called."""
    calls: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def spied(query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kw: Any) -> Any:
        calls.append({"heads": key.shape[1], "mask": mask, **kw})
        return original(query, key, value, mask, *args, **kw)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    return calls


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are those for a GPU with flash; the kernels are those of the CPU."""

    def on_cuda(device: str, *args: Any, **kwargs: Any) -> bool:
        return takes_fused("cuda", *args, **kwargs)

    monkeypatch.setattr(attending, "takes_fused", on_cuda)


def tensors(heads: int, dtype: torch.dtype, length: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(2, n, length, 16, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for n in (4, heads, heads)
    ]


def padding(dtype: torch.dtype, length: int = 33) -> Tensor:
    mask = torch.zeros(2, 1, 1, length, dtype=dtype)
    mask[1, ..., length - 9 :] = torch.finfo(dtype).min
    return mask


def results(inputs: list[Tensor], mask: Tensor | None, scoring: Scoring) -> list[Tensor]:
    """Returns the results of attention and of its backward as float64."""
    output = attend(*inputs, mask, scoring, 0.0)
    generator = torch.Generator().manual_seed(6)
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output))
    grads = [x.grad for x in inputs]
    assert all(grad is not None and grad.any() for grad in grads)
    return [x.detach().double() for x in (output, *grads) if x is not None]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("as_on_cuda")
def test_scores_in_fp32_come_out_of_the_fused_kernel(
    dtype: torch.dtype, masked: bool, fused_calls: list[dict[str, Any]]
) -> None:
    """Compares both kernels with float64: their errors are those of 16 bits."""
    scoring = Scoring(0.25, causal=True, in_fp32=True)
    mask = padding(dtype) if masked else None
    got = results(tensors(4, dtype), mask, scoring)
    (call,) = fused_calls
    assert (call["mask"] is not None) == masked and call["is_causal"] != masked
    plain = results(tensors(4, dtype), mask, Scoring(0.25, causal=True, in_fp32=True, flash=False))
    assert len(fused_calls) == 1
    wide = None if mask is None else padding(torch.float64)
    exact = [x.detach().double().requires_grad_() for x in tensors(4, dtype)]
    expected = results(exact, wide, scoring)
    for ours, theirs, want in zip(got, plain, expected, strict=True):
        error, usual = relative_difference(ours, want), relative_difference(theirs, want)
        assert 0 < error <= 8 * max(usual, torch.finfo(dtype).eps / 4)


def test_the_cpu_keeps_its_softmax_in_float32(fused_calls: list[dict[str, Any]]) -> None:
    results(tensors(4, torch.bfloat16), None, Scoring(0.25, causal=True, in_fp32=True))
    assert not fused_calls
    results(tensors(4, torch.bfloat16), None, Scoring(0.25, causal=True))
    assert len(fused_calls) == 1
