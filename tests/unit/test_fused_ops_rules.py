"""Common rules of all operators of `smp.nn.functional`: gradients, strides, meta, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from smp.nn import functional as fused
from tests.reference.fused_ops import make


def operators(dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[Callable, list[Tensor]]]:
    """Name to the operator as a function of what has a gradient, and such arguments."""
    x, vector = make(3, 4, 6, dtype=dtype).to(device), make(6, dtype=dtype, seed=1).to(device)
    other = make(3, 4, 6, dtype=dtype, seed=2).to(device)
    scores = make(2, 2, 3, 5, dtype=dtype).to(device)
    mask = make(2, 1, 3, 5, dtype=dtype, seed=3).to(device)
    slopes = torch.tensor([0.5, 0.25], dtype=dtype, device=device)
    angles = make(1, 4, 2, dtype=dtype, seed=4).to(device)
    heads = make(2, 4, 3, 6, dtype=dtype).to(device)
    targets = torch.tensor([1, -100, 0, 5], device=device)
    f = fused
    return {
        "layer_norm": (lambda x, w, b: f.layer_norm(x, w, b, 1e-3), [x, vector, other[0, 0]]),
        "rms_norm": (lambda x, w: f.rms_norm(x, w, 1e-3), [x, vector]),
        "bias_gelu": (lambda x, b: f.bias_gelu(x, b), [x, vector]),
        "bias_gelu tanh": (lambda x, b: f.bias_gelu(x, b, "tanh"), [x, vector]),
        "scaled_masked_softmax": (
            lambda s: f.scaled_masked_softmax(s, mask, 0.5, True, 3, slopes, 0.3, 4),
            [scores],
        ),
        "bias_dropout_residual": (
            lambda x, b, r: f.bias_dropout_residual(x, b, r, 0.3, 4),
            [x, vector, other],
        ),
        "rotary": (lambda x: f.rotary(x, angles.cos(), angles.sin(), 4), [heads]),
        "rotary interleaved": (
            lambda x: f.rotary(x, angles.cos(), angles.sin(), 4, True),
            [heads],
        ),
        "cross_entropy": (lambda x: f.cross_entropy(x, targets, -100, 0.1), [x[0]]),
    }


NAMES = sorted(operators(torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_derivatives(name: str) -> None:
    function, inputs = operators(torch.float64)[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, leaves)
    # One at a time, the others without a gradient.
    for i in range(len(leaves)):
        some = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        assert torch.autograd.gradcheck(function, some)


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name: str) -> None:
    function, inputs = operators(torch.float32)[name]
    gaps = [torch.stack([x, x + 1], -1)[..., 0] for x in inputs]
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    want = function(*inputs)
    weights = make(*want.shape, dtype=torch.float32).transpose(0, -1).contiguous()
    weights = weights.transpose(0, -1)
    grads = []
    for variant in (inputs, gaps, turned):
        leaves = [x.detach().requires_grad_() for x in variant]
        y = function(*leaves)
        assert torch.equal(y, want)
        grads.append(torch.autograd.grad(y, leaves, weights))
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_differentiation_is_refused_by_name(name: str) -> None:
    function, inputs = operators(torch.float64)[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    weights = torch.ones_like(function(*leaves)).requires_grad_()
    grads = torch.autograd.grad(function(*leaves), leaves, weights, create_graph=True)
    op = name.split()[0].replace("dropout ", "")
    refused = f"smp::{op} can be differentiated once only"
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(grads[0].sum(), weights)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_penalty_is_refused_by_name(name: str) -> None:
    function, inputs = operators(torch.float64)[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    grads = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        torch.autograd.grad(grads[0].square().sum(), leaves[0])


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_go_forward_and_backward(name: str) -> None:
    function, inputs = operators(torch.bfloat16)[name]
    on_meta, _ = operators(torch.bfloat16, "meta")[name]
    want = function(*inputs)
    leaves = [x.to("meta").requires_grad_() for x in inputs]
    y = on_meta(*leaves)
    assert (y.device.type, y.shape, y.dtype) == ("meta", want.shape, want.dtype)
    assert y.stride() == want.stride()
    y.backward(torch.empty_like(y))
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_gives_nothing_out(name: str) -> None:
    function, inputs = operators(torch.float32)[name]
    if name == "cross_entropy":
        leaf = torch.zeros(0, 6, requires_grad=True)
        y = fused.cross_entropy(leaf, torch.zeros(0, dtype=torch.long))
        leaves, want = [leaf], (0,)
    else:
        leaves = [inputs[0][:0], *inputs[1:]]
        leaves = [x if x.dim() == 1 else x[:0] for x in leaves]
        leaves = [x.detach().requires_grad_() for x in leaves]
        if name == "scaled_masked_softmax":
            y = fused.scaled_masked_softmax(leaves[0], None, 0.5, dropout_p=0.1)
        else:
            y = function(*leaves)
        want = leaves[0].shape
    assert y.shape == want
    y.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and not bool(leaf.grad.any())


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_agree_with_the_kernels(name: str) -> None:
    function, inputs = operators(torch.float32)[name]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in inputs]
        y = function(*leaves)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    want = function(*inputs)
    assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())
    assert [g.shape for g in grads] == [x.shape for x in inputs]


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    function = {
        "layer_norm": lambda x, v: fused.layer_norm(x, v, v, 1e-5),
        "rms_norm": lambda x, v: fused.rms_norm(x, v, 1e-5),
        "bias_gelu": lambda x, v: fused.bias_gelu(x, v),
        "bias_gelu tanh": lambda x, v: fused.bias_gelu(x, v, "tanh"),
        "scaled_masked_softmax": lambda x, v: fused.scaled_masked_softmax(
            x[None, None] + v, None, 1.0, dropout_p=0.1
        ),
        "bias_dropout_residual": lambda x, v: fused.bias_dropout_residual(x, v, x, 0.1, 3),
        "rotary": lambda x, v: fused.rotary(
            (x + v).view(1, 700, 2, 301), torch.ones(1, 700, 5), torch.ones(1, 700, 5), 10
        ),
        "rotary interleaved": lambda x, v: fused.rotary(
            (x + v).view(1, 700, 2, 301), torch.ones(1, 700, 5), torch.ones(1, 700, 5), 10, True
        ),
        "cross_entropy": lambda x, v: fused.cross_entropy(x + v, torch.arange(700) % 602),
    }[name]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            x = make(700, 602, dtype=torch.float32).requires_grad_()
            vector = make(602, dtype=torch.float32, seed=1).requires_grad_()
            y = function(x, vector)
            y.backward(make(*y.shape, dtype=torch.float32, seed=2))
            results.append((y, x.grad, vector.grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            # The plain sum over rows of x + v is PyTorch's own.
            assert torch.equal(a, b) or (i == 2 and torch.allclose(a, b, rtol=1e-4, atol=1e-4))


def test_inference_and_no_grad_mode_give_the_same() -> None:
    for name, (function, inputs) in operators(torch.float32).items():
        want = function(*inputs)
        with torch.no_grad():
            assert torch.equal(function(*inputs), want), name
        with torch.inference_mode():
            assert torch.equal(function(*inputs), want), name


def test_wrong_arguments_are_refused_with_their_names() -> None:
    x, scores = make(2, 3, 6), make(1, 2, 3, 5)
    angles = make(1, 3, 2)
    cases: list[tuple[str, Callable[[], Tensor]]] = [
        (r"weight must have sizes \[6\]", lambda: fused.layer_norm(x, make(5), None)),
        ("x must be float32", lambda: fused.rms_norm(torch.ones(3, dtype=torch.long), None)),
        ("approximate must be one of", lambda: fused.bias_gelu(x, None, "fast")),
        (r"\[0, 1\], got 1.5", lambda: fused.dropout(x, 1.5, 0)),
        ("must have the same sizes", lambda: fused.bias_dropout_residual(x, None, x[0], 0.1, 0)),
        ("scores must be", lambda: fused.scaled_masked_softmax(x, None, 1.0)),
        ("mask must have sizes", lambda: fused.scaled_masked_softmax(scores, x, 1.0)),
        (
            "put 0 where a key is seen",
            lambda: fused.scaled_masked_softmax(scores, scores > 0, 1.0),
        ),
        (
            "get no gradient",
            lambda: fused.scaled_masked_softmax(scores, scores.clone().requires_grad_(), 1.0),
        ),
        ("needs causal=True", lambda: fused.scaled_masked_softmax(scores, None, 1.0, False, 2)),
        ("window must be None", lambda: fused.scaled_masked_softmax(scores, None, 1.0, True, 0)),
        ("must be .batch, length", lambda: fused.rotary(x, angles, angles, 4)),
        (
            "cos must have sizes",
            lambda: fused.rotary(make(2, 4, 3, 6), angles, angles, 4),
        ),
        ("2 angles per position", lambda: fused.rotary(x, make(1, 3, 3), make(1, 3, 3), 4)),
        ("label_smoothing", lambda: fused.cross_entropy(x[0], torch.tensor([0, 1, 2]), -1, 2.0)),
    ]
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()
