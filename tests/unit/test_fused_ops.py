"""The operators of `smp.nn.functional` against plain PyTorch expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from smp.nn import functional as fused
from tests.reference import fused_ops as plain
from tests.reference.fused_ops import make

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Largest error of a result, compared with float64's, relative to the largest element.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
SHAPES = [(1, 1), (3, 7), (2, 5, 16), (4, 33), (2, 3, 257), (0, 5), (67, 1030)]


def assert_near(got: Tensor | None, want: Tensor | None, tolerance: float) -> None:
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert got.shape == want.shape
    scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=tolerance * scale)


def check(
    own: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    out_dtype: torch.dtype | None = None,
) -> None:
    """Values and gradients of ``own`` are those of ``reference`` in float64."""
    dtype = next(x.dtype for x in inputs if x is not None)
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    got, want = own(*leaves), reference(*exact)
    assert got.dtype == (out_dtype or dtype)
    assert_near(got, want, TOLERANCE[dtype])
    weights = make(*want.shape, dtype=got.dtype, seed=9)
    got.backward(weights)
    want.backward(weights.double())
    for leaf, other in zip(leaves, exact, strict=True):
        if leaf is not None and other is not None:
            assert leaf.grad is not None and leaf.grad.dtype == dtype
            # A gradient is summed from rounded results over rows.
            assert_near(leaf.grad, other.grad, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    x, n = make(*shape, dtype=dtype) * 3 + 1, shape[-1]
    params = [make(n, dtype=dtype, seed=s) if affine else None for s in (1, 2)]
    check(
        lambda x, w, b: fused.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, (n,), w, b, 1e-5),
        [x, *params],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    weight = make(shape[-1], dtype=dtype, seed=1) if affine else None
    check(
        lambda x, w: fused.rms_norm(x, w, 1e-6),
        lambda x, w: plain.rms_norm(x, w, 1e-6),
        [make(*shape, dtype=dtype), weight],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_gelu(
    shape: tuple[int, ...], dtype: torch.dtype, approximate: str, has_bias: bool
) -> None:
    bias = make(shape[-1], dtype=dtype, seed=1) if has_bias else None
    check(
        lambda x, b: fused.bias_gelu(x, b, approximate),
        lambda x, b: plain.bias_gelu(x, b, approximate),
        [make(*shape, dtype=dtype) * 3, bias],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_right_over_the_whole_range(dtype: torch.dtype, approximate: str) -> None:
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.tensor([1e4, -1e4, 1e-30, 0.0])])
    x = x.to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y = fused.bias_gelu(x, None, approximate)
    want = functional.gelu(exact, approximate=approximate)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (want_grad,) = torch.autograd.grad(want.sum(), exact)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=4 * eps, atol=4 * eps)
    # PyTorch's own derivative with tanh cancels digits of float64.
    eps *= 8 if dtype == torch.float64 else 1
    torch.testing.assert_close(grad.double(), want_grad, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 5, 5), (1, 2, 3, 17), (2, 2, 64, 64), (1, 1, 7, 1031)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    check(
        lambda x: fused.scaled_masked_softmax(x, None, 0.3, causal),
        lambda x: plain.scaled_masked_softmax(x, None, 0.3, causal),
        [make(*shape, dtype=dtype) * 4],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mask_shape", [(2, 1, 1, 33), (1, 1, 9, 33), (2, 3, 9, 33), (2, 1, 9, 1), (1, 1, 1, 1)]
)
def test_softmax_with_a_mask_slopes_and_a_window(
    mask_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mask = make(*mask_shape, dtype=dtype, seed=3)
    mask[mask > 1] = torch.finfo(dtype).min
    slopes = torch.tensor([0.5, 0.25, 0.125], dtype=dtype)
    for causal, window in ((False, None), (True, None), (True, 4), (True, 100)):
        check(
            lambda x, c=causal, w=window: fused.scaled_masked_softmax(x, mask, 0.7, c, w, slopes),
            lambda x, c=causal, w=window: plain.scaled_masked_softmax(
                x, mask.double(), 0.7, c, w, slopes.double()
            ),
            [make(2, 3, 9, 33, dtype=dtype)],
        )


def test_softmax_of_queries_without_keys_is_zero() -> None:
    # Three queries see less than one key; one sees only masked ones.
    scores = make(1, 1, 5, 2).requires_grad_()
    probs = fused.scaled_masked_softmax(scores, None, 1.0, causal=True)
    assert torch.equal(probs[0, 0, :3], torch.zeros(3, 2, dtype=torch.float64))
    assert float(probs[0, 0, 3:].sum()) == pytest.approx(2.0)
    mask = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    mask[0, 0, 4] = -torch.inf
    masked = fused.scaled_masked_softmax(scores, mask, 1.0, dropout_p=0.5)
    assert torch.equal(masked[0, 0, 4], torch.zeros(2, dtype=torch.float64))
    (grad,) = torch.autograd.grad(probs.square().sum() + masked.square().sum(), scores)
    assert bool(grad.isfinite().all())
    assert bool(grad[0, 0, 4].any())  # of the causal one


def test_softmax_passes_nan_on() -> None:
    for places in (slice(1), slice(3)):
        scores = torch.zeros(1, 1, 2, 3)
        scores[0, 0, 1, places] = torch.nan
        probs = fused.scaled_masked_softmax(scores, None, 1.0)
        assert bool(probs[0, 0, 1].isnan().all())
        torch.testing.assert_close(probs[0, 0, 0], torch.full((3,), 1 / 3))


def test_softmax_in_fp32_gives_float32_of_16_bit_scores() -> None:
    scores = make(1, 2, 3, 5, dtype=torch.bfloat16)
    probs = fused.scaled_masked_softmax(scores, None, 1.0, in_fp32=True)
    torch.testing.assert_close(probs, scores.float().softmax(-1))
    assert fused.scaled_masked_softmax(scores, None, 1.0).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_dropout_is_a_mask_times_the_probabilities(
    dtype: torch.dtype, causal: bool
) -> None:
    scores = make(2, 3, 9, 33, dtype=dtype)
    ones = torch.ones(2, 3, 9, 33, dtype=torch.float64)
    keep = fused.dropout(ones, 0.25, seed=11)
    check(
        lambda x: fused.scaled_masked_softmax(x, None, 0.7, causal, dropout_p=0.25, seed=11),
        lambda x: plain.scaled_masked_softmax(x, None, 0.7, causal) * keep,
        [scores],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_bias_dropout_residual(
    shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool, has_residual: bool
) -> None:
    keep = fused.dropout(torch.ones(shape, dtype=torch.float64), 0.3, seed=5)
    bias = make(shape[-1], dtype=dtype, seed=1) if has_bias else None
    residual = make(*shape, dtype=dtype, seed=2) if has_residual else None

    def reference(x: Tensor, b: Tensor | None, r: Tensor | None) -> Tensor:
        y = (x if b is None else x + b) * keep
        return y if r is None else y + r

    inputs = [make(*shape, dtype=dtype), bias, residual]
    check(lambda x, b, r: fused.bias_dropout_residual(x, b, r, 0.3, 5), reference, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_residual_adds_in_float32(dtype: torch.dtype) -> None:
    x, bias = make(5, 37, dtype=dtype), make(37, dtype=dtype, seed=1)
    residual = make(5, 37, dtype=torch.float32, seed=2)
    keep = fused.dropout(torch.ones(5, 37), 0.3, seed=5)
    want = (x.float() + bias.float()) * keep + residual
    y = fused.bias_dropout_residual(x, bias, residual, 0.3, 5)
    torch.testing.assert_close(y, want)
    y = fused.bias_dropout_residual(x, bias, residual.to(dtype), 0.3, 5, fp32_residual=True)
    assert y.dtype == torch.float32
    leaves = [t.detach().requires_grad_() for t in (x, bias, residual)]
    fused.bias_dropout_residual(*leaves, 0.3, 5).backward(torch.ones(5, 37))
    assert [leaf.grad.dtype for leaf in leaves] == [dtype, dtype, torch.float32]
    assert torch.equal(leaves[0].grad, keep.to(dtype))
    torch.testing.assert_close(leaves[1].grad, keep.sum(0).to(dtype))


def test_dropout_keeps_the_right_share_and_the_mean() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = fused.dropout(torch.ones(1000, 1000), p, seed=3)
        share = float((kept != 0).double().mean())
        assert share == pytest.approx(1 - p, abs=4 * (p * (1 - p) / 1e6) ** 0.5)
        torch.testing.assert_close(kept.max(), torch.tensor(1 / (1 - p)))
        # Rows and columns are as independent as their numbers allow.
        for dim in (0, 1):
            shares = (kept != 0).double().mean(dim)
            assert float(shares.std()) == pytest.approx((p * (1 - p) / 1e3) ** 0.5, rel=0.15)


def test_neighbours_rows_and_seeds_draw_independently() -> None:
    kept = (fused.dropout(torch.ones(1000, 1000), 0.5, seed=1) != 0).double() - 0.5
    other = (fused.dropout(torch.ones(1000, 1000), 0.5, seed=2) != 0).double() - 0.5
    for product in (
        kept * other,
        kept[1:] * kept[:-1],
        kept[:, 1:] * kept[:, :-1],
        kept[:, 16:] * kept[:, :-16],
        kept[512:] * kept[:-512],
    ):
        correlation = float(product.mean()) * 4
        assert abs(correlation) < 4 / product.numel() ** 0.5


@pytest.mark.parametrize(("p", "limit"), [(0.5, 5.5), (0.1, 7.0)])
def test_no_two_columns_and_no_two_rows_go_together(p: float, limit: float) -> None:
    # Standardised correlations of all pairs: their spread is one, none stands out. Normal numbers
    # pass 5.5 once in 26 million, and there are 0.8 million pairs; those of rare events are skewed.
    kept = (fused.dropout(torch.ones(1280, 1280), p, seed=4) != 0).double()
    kept = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    for matrix in (kept, kept.T):
        pairs = (matrix @ matrix.T / matrix.shape[1] ** 0.5).triu(1)
        pairs = pairs[torch.ones_like(pairs).triu(1) != 0]
        assert float(pairs.std()) == pytest.approx(1.0, abs=0.005)
        assert float(pairs.abs().max()) < limit


def test_triples_and_rectangles_of_elements_have_even_odds() -> None:
    kept = (fused.dropout(torch.ones(1000, 1000), 0.5, seed=8) != 0).double() * 2 - 1
    rows = kept[1:] * kept[:-1]
    for product in (
        kept[:, 2:] * kept[:, 1:-1] * kept[:, :-2],
        kept[2:] * kept[1:-1] * kept[:-2],
        rows[:, 1:] * rows[:, :-1],
        rows[:, 64:] * rows[:, :-64],
    ):
        assert abs(float(product.mean())) < 4 / product.numel() ** 0.5


def test_rare_events_are_as_rare_as_they_should_be() -> None:
    for p in (1e-4, 1 - 1e-4):  # the lowest and the highest numbers of each row
        kept = fused.dropout(torch.ones(2000, 1000), p, seed=6) != 0
        rare = kept if p > 0.5 else ~kept
        assert int(rare.sum()) == pytest.approx(200, abs=4 * 200**0.5)
        assert int(rare.sum(0).max()) <= 4 and int(rare.sum(1).max()) <= 4


def test_dropout_is_a_function_of_the_seed_alone() -> None:
    x = make(40, 3000, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            results.append(fused.dropout(x, 0.4, seed=-7))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0], fused.dropout(x, 0.4, seed=-8))
    assert torch.equal(results[0], fused.dropout(x, 0.4, seed=(1 << 64) - 7))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p: float) -> None:
    x = make(7, 33, dtype=torch.float32)
    assert torch.equal(fused.dropout(x, p, seed=1), x * (1 - p))
    residual = make(7, 33, dtype=torch.float32, seed=4)
    y = fused.bias_dropout_residual(x, None, residual, p, seed=1)
    assert torch.equal(y, x * (1 - p) + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 14, 32, 64, 70])
@pytest.mark.parametrize("table_batch", [1, 2])
def test_rotary(dtype: torch.dtype, interleaved: bool, rotary_dim: int, table_batch: int) -> None:
    angles = make(table_batch, 5, rotary_dim // 2, seed=4) * 3
    cos, sin = angles.cos(), angles.sin()
    check(
        lambda x: fused.rotary(x, cos, sin, rotary_dim, interleaved),
        lambda x: plain.rotary(x, cos, sin, rotary_dim, interleaved),
        [make(2, 5, 3, 71, dtype=dtype)],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (7, 33), (5, 1030), (64, 257)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(shape: tuple[int, int], dtype: torch.dtype, label_smoothing: float) -> None:
    targets = torch.arange(shape[0]) * 7 % shape[1]
    targets[shape[0] // 2 :: 3] = -100
    check(
        lambda x: fused.cross_entropy(x, targets, -100, label_smoothing),
        lambda x: functional.cross_entropy(
            x, targets, ignore_index=-100, label_smoothing=label_smoothing, reduction="none"
        ),
        [make(*shape, dtype=dtype) * 5],
        torch.float64 if dtype == torch.float64 else torch.float32,
    )


def test_cross_entropy_ignores_the_given_index_and_refuses_others() -> None:
    logits = make(3, 4)
    loss = fused.cross_entropy(logits, torch.tensor([0, 3, 2]), ignore_index=3)
    assert float(loss[1]) == 0.0 and float(loss[0]) > 0.0
    for bad in (4, -1, -100):
        with pytest.raises(IndexError, match=rf"target {bad} of token 1 is not in \[0, 4\)"):
            fused.cross_entropy(logits, torch.tensor([0, bad, 2]), ignore_index=3)
    with pytest.raises(ValueError, match="int64 targets"):
        fused.cross_entropy(logits, torch.zeros(3))


def test_cross_entropy_of_large_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    targets = torch.tensor([1, 2])
    want = functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(fused.cross_entropy(logits, targets), want)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_pieces_of_a_split_vocabulary_give_the_whole_cross_entropy(label_smoothing: float) -> None:
    logits, targets, ops = make(9, 37), torch.arange(9) * 4, torch.ops.smp
    targets[4] = -100
    begins = [0, 20, 29]
    parts = logits.split([20, 9, 8], dim=1)
    rows = torch.stack(
        [
            ops.cross_entropy_statistics(part, targets, begin, 37, -100, True)
            for part, begin in zip(parts, begins, strict=True)
        ]
    )
    top = rows[:, 0].amax(0)
    shift = rows[:, 0] - top
    exp_sum = (rows[:, 1] * shift.exp()).sum(0)
    sizes = torch.tensor([[20.0], [9.0], [8.0]])
    is_here = torch.stack(
        [(targets >= b) & (targets < b + p.shape[1]) for p, b in zip(parts, begins, strict=True)]
    )
    target_logit = (rows[:, 2] + shift * is_here).sum(0)
    total = (rows[:, 3] + sizes * shift).sum(0)
    loss = exp_sum.log() - (1 - label_smoothing) * target_logit - label_smoothing / 37 * total
    whole = logits.clone().requires_grad_()
    want = functional.cross_entropy(
        whole, targets, label_smoothing=label_smoothing, reduction="none"
    )
    torch.testing.assert_close(loss * (targets != -100), want)
    want.backward(make(9, seed=2))
    arguments = (37, -100, label_smoothing)
    grads = [
        ops.cross_entropy_backward(make(9, seed=2), part, targets, top, exp_sum, begin, *arguments)
        for part, begin in zip(parts, begins, strict=True)
    ]
    torch.testing.assert_close(torch.cat(grads, 1), whole.grad)
    own = parts[1].clone(memory_format=torch.contiguous_format)
    ops.cross_entropy_backward_(make(9, seed=2), own, targets, top, exp_sum, 20, *arguments)
    assert torch.equal(own, grads[1])
