"""`smp.nn.functional.linear_cross_entropy` against whole logits, on one rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.profiled_memory import peak_bytes
from smp.nn.functional import linear_cross_entropy
from smp.nn.linear_cross_entropy import MIN_CHUNK_BYTES
from tests.reference import linear_cross_entropy as plain
from tests.reference.linear_cross_entropy import IGNORED, options_of, problem

VOCABULARY, SHAPE = 29, (3, 7)
OPTIONS = ("label_smoothing", "z_loss", "class_weights", "token_weights")
SETS = [names for num in range(5) for names in itertools.combinations(OPTIONS, num)]
#: bytes of one, four and all 21 tokens in float64
CHUNKS = {"1 token": 1, "4 tokens": 4 * VOCABULARY * 8, "all": 1 << 20}


def results(
    function: Callable[..., Tensor], given: dict[str, Tensor | None], **options: Any
) -> list[Tensor | None]:
    """Returns the loss, and the gradients of the operands."""
    leaves = {
        name: x.detach().clone().requires_grad_(x.requires_grad)
        for name, x in given.items()
        if x is not None
    }
    loss = function(**leaves, **options)
    # An upstream gradient that is not 1, and not the same for all tokens.
    (loss * torch.linspace(0.5, 2, loss.numel()).view(loss.shape)).sum().backward()
    return [loss.detach(), *(x.grad for x in leaves.values())]


def assert_equal(got: list[Tensor | None], want: list[Tensor | None], tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(
                one.double(), other.double(), rtol=0, atol=tolerance * scale, equal_nan=True
            )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_all_options_equal_whole_logits(
    names: tuple[str, ...], reduction: str, recompute: bool
) -> None:
    options = {**options_of(names, SHAPE, VOCABULARY), "reduction": reduction}
    for with_bias, chunk_bytes in itertools.product((False, True), CHUNKS.values()):
        given = problem(*SHAPE, vocabulary=VOCABULARY, with_bias=with_bias)
        got = results(
            linear_cross_entropy, given, **options, recompute=recompute, chunk_bytes=chunk_bytes
        )
        want = results(plain.linear_cross_entropy, given, **options)
        assert want[1] is not None and float(want[1].abs().max()) > 0
        assert_equal(got, want, 1e-12)


@pytest.mark.parametrize("weights", [None, "class_weights"])
def test_the_mean_is_that_of_torch(weights: str | None) -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    options = options_of((weights,) if weights else (), SHAPE, VOCABULARY)
    got = linear_cross_entropy(**given, **options, label_smoothing=0.2)
    logits = functional.linear(given["hidden"], given["weight"])
    want = functional.cross_entropy(
        logits.flatten(0, 1),
        given["labels"].flatten(),
        weight=options.get("class_weights"),
        label_smoothing=0.2,
    )
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


class _Repeated(torch.autograd.Function):
    """A loss that runs forward again in backward, since its gradients serve one backward."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        ctx.loss = loss
        ctx.save_for_backward(*operands)
        return loss(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return None, *torch.autograd.grad(ctx.loss(*leaves), leaves, grads)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_pass_gradcheck(recompute: bool) -> None:
    given = problem(5, features=3, vocabulary=7, with_bias=True)
    options = options_of(OPTIONS, (5,), 7)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            given["labels"],
            bias=bias,
            **options,
            recompute=recompute,
            chunk_bytes=2 * 7 * 8,
        )

    operands = tuple(given[name] for name in ("hidden", "weight", "bias"))
    checked = loss if recompute else functools.partial(_Repeated.apply, loss)
    assert torch.autograd.gradcheck(checked, operands)


@pytest.mark.parametrize("recompute", [False, True])
def test_without_counted_tokens_the_loss_is_nan_and_gradients_are_zero(recompute: bool) -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    given["labels"] = torch.full(SHAPE, IGNORED)
    got = results(linear_cross_entropy, given, recompute=recompute)
    assert got[0] is not None and got[0].isnan()
    assert all(x is None or not x.any() for x in got[1:])
    assert linear_cross_entropy(**given, reduction="sum") == 0


def test_no_tokens_have_no_loss() -> None:
    given = problem(0, vocabulary=VOCABULARY)
    got = results(linear_cross_entropy, given, reduction="sum")
    assert got[0] == 0 and got[2] is not None and not got[2].any()
    assert linear_cross_entropy(**given, reduction="none").shape == (0,)


def test_other_numbers_may_be_ignored() -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    assert given["labels"] is not None
    given["labels"].masked_fill_(given["labels"] == IGNORED, 4)
    options = {"ignore_index": 4}
    want = results(plain.linear_cross_entropy, given, **options)
    assert_equal(results(linear_cross_entropy, given, **options), want, 1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_operands_get_no_gradient(frozen: str, recompute: bool) -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY, with_bias=True)
    operand = given[frozen]
    assert operand is not None
    given[frozen] = operand.detach()
    got = results(linear_cross_entropy, given, recompute=recompute)
    assert_equal(got, results(plain.linear_cross_entropy, given), 1e-12)


@pytest.mark.parametrize("names", [(), OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_as_exact_as_their_logits(
    dtype: torch.dtype, recompute: bool, names: tuple[str, ...]
) -> None:
    shape, vocabulary = (256,), 301
    given = problem(*shape, features=64, vocabulary=vocabulary, dtype=dtype, with_bias=True)
    options = options_of(names, shape, vocabulary)
    exact = {
        name: x.detach().double().requires_grad_() if x is not None and x.requires_grad else x
        for name, x in given.items()
    }
    size = torch.finfo(dtype).bits // 8
    got = results(
        linear_cross_entropy,
        given,
        **options,
        recompute=recompute,
        chunk_bytes=8 * vocabulary * size,
    )
    want = results(plain.linear_cross_entropy, exact, **options)
    assert got[0] is not None and got[0].dtype == torch.float32
    for one, other in zip(got, want, strict=True):
        if one is None or other is None:
            continue
        error = float((one.double() - other).abs().max() / other.abs().max())
        assert error < {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def test_sums_over_many_chunks_of_bfloat16_lose_no_digits() -> None:
    """Sums terms so many that a sum in bfloat16 would stop at half of it."""
    num, vocabulary = 512, 5
    hidden = torch.ones(num, 3, dtype=torch.bfloat16)
    weight = torch.zeros(vocabulary, 3, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(num, dtype=torch.int64)
    for recompute in (False, True):
        weight.grad = None
        linear_cross_entropy(
            hidden, weight, labels, reduction="sum", recompute=recompute, chunk_bytes=2 * vocabulary
        ).backward()
        assert weight.grad is not None
        # A chunk's gradient of 0.2 has been rounded to bfloat16.
        torch.testing.assert_close(
            weight.grad[1].float(), torch.full((3,), 0.2 * num), rtol=4e-3, atol=0
        )


def test_small_gradients_of_float16_are_scaled_before_they_are_rounded() -> None:
    """Unscaled, a token's gradient in a mean over 60,000 tokens is below the least float16."""
    vocabulary, num = 50, 20_000
    hidden = torch.ones(num, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(vocabulary, 2, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(num, dtype=torch.int64)
    scale = 2.0**14
    (linear_cross_entropy(hidden, weight, labels) * scale).backward()
    assert weight.grad is not None
    want = torch.full((2,), scale / vocabulary)
    torch.testing.assert_close(weight.grad[1].float(), want, rtol=1e-2, atol=0)


def test_under_autocast_products_are_those_of_linear() -> None:
    given = problem(40, features=32, vocabulary=64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(linear_cross_entropy, given)
        want = results(plain.linear_cross_entropy, given)
    assert got[1] is not None and got[1].dtype == torch.float32
    assert_equal(got, want, 2e-2)
    exact = results(plain.linear_cross_entropy, given)
    assert got[0] is not None and exact[0] is not None and got[0] != exact[0]


def test_a_second_backward_is_an_error_or_recomputes() -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    hidden = given["hidden"]
    assert hidden is not None
    loss = linear_cross_entropy(**given)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute=True"):
        loss.backward()
    hidden.grad = None
    loss = linear_cross_entropy(**given, recompute=True)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    first = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * first)


def test_gradients_of_gradients_are_an_error() -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    hidden = given["hidden"]
    assert hidden is not None
    for recompute in (False, True):
        loss = linear_cross_entropy(**given, recompute=recompute)
        (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            # A penalty of gradients beside a loss must not lose its part silently.
            (first.square().sum() + hidden.sum()).backward()


def test_fake_tensors_have_the_shapes() -> None:
    with FakeTensorMode():
        hidden = torch.randn(4, 6, 8, requires_grad=True)
        weight = torch.randn(33, 8, requires_grad=True)
        labels = torch.zeros(4, 6, dtype=torch.int64)
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=33 * 4 * 5)
        loss.backward()
        assert loss.shape == () and weight.grad is not None and weight.grad.shape == (33, 8)
        assert linear_cross_entropy(hidden, weight, labels, reduction="none").shape == (4, 6)


# ---- memory


def test_the_meter_sees_tensors() -> None:
    def run() -> None:
        first = torch.empty(1 << 20)
        del first
        torch.empty(1 << 19)

    assert peak_bytes(run) == 4 << 20


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_takes_at_most_a_chunk_and_a_fifth(dtype: torch.dtype, recompute: bool) -> None:
    """Besides the gradients, which have the sizes of their operands."""
    tokens, features, vocabulary = 1024, 64, 4096
    given = problem(tokens, features=features, vocabulary=vocabulary, dtype=dtype)
    hidden, weight = given["hidden"], given["weight"]
    assert hidden is not None and weight is not None
    chunk_bytes = tokens * vocabulary * dtype.itemsize // 8

    def step() -> None:
        linear_cross_entropy(**given, recompute=recompute, chunk_bytes=chunk_bytes).backward()

    gradients = hidden.numel() * dtype.itemsize + 4 * weight.numel()
    if dtype == torch.bfloat16:  # the sum in float32, and the gradient that is made of it
        gradients += 2 * weight.numel()
    assert peak_bytes(step) - gradients <= 1.2 * chunk_bytes
    hidden.grad = weight.grad = None

    def whole() -> None:
        plain.linear_cross_entropy(**given).backward()

    # The logits, and their gradient.
    assert peak_bytes(whole) >= 2 * 8 * chunk_bytes


def test_a_chunk_has_at_least_the_bytes_of_the_hidden_states() -> None:
    features, vocabulary = 8, 64
    small = problem(100, features=features, vocabulary=vocabulary, dtype=torch.float32)
    with torch.no_grad():
        of_small = peak_bytes(lambda: linear_cross_entropy(**small))
    assert of_small < 2 * 100 * vocabulary * 4  # one chunk of all tokens, not MIN_CHUNK_BYTES
    tokens = 3 * MIN_CHUNK_BYTES // (4 * 256)
    labels = torch.zeros(tokens, dtype=torch.int64)
    hidden, weight = torch.zeros(tokens, 256), torch.zeros(1024, 256)
    of_large = peak_bytes(lambda: linear_cross_entropy(hidden, weight, labels))
    assert 3 * MIN_CHUNK_BYTES <= of_large <= 1.2 * 3 * MIN_CHUNK_BYTES


# ---- errors


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, "int64 labels"),
        ({"labels": torch.zeros(SHAPE)}, ValueError, "int64 labels"),
        ({"weight": torch.zeros(VOCABULARY, 5).double()}, ValueError, "expected hidden"),
        ({"bias": torch.zeros(5).double()}, ValueError, "bias"),
        ({"weight": torch.zeros(VOCABULARY, 12)}, ValueError, "one floating dtype"),
        ({"labels": torch.full(SHAPE, VOCABULARY)}, IndexError, "target 29"),
        ({"class_weights": torch.ones(5)}, ValueError, "class_weights of shape"),
        ({"token_weights": torch.ones(5)}, ValueError, "token_weights of shape"),
        ({"token_weights": torch.ones(SHAPE, requires_grad=True)}, ValueError, "detach them"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ({"z_loss": -1.0}, ValueError, "z_loss"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes"),
        ({"begin": 5}, ValueError, "not within the vocabulary"),
    ],
)
def test_wrong_arguments_are_named(
    changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = problem(*SHAPE, vocabulary=VOCABULARY)
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{**given, **changed})
