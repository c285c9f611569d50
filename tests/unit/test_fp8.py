"""Products with 8-bit operands, and the choice of the layers that have them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.replacement.fp8_layers import choose_layers
from tests.reference.fp8 import VALUES, product, rounded, use_fp8
from tests.reference.tolerances import relative_difference

SCALINGS = ("rowwise", "tensorwise")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Gradients = tuple[Tensor, Tensor, Tensor | None]


def operands(dtype: torch.dtype, tokens: int = 5, bias: bool = True) -> list[Tensor | None]:
    """Returns an input of very different rows, a weight and a bias."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.logspace(-3, 3, max(tokens, 1))[:tokens, None]
    x = torch.randn(tokens, 32, generator=generator) * rows
    weight = torch.randn(48, 32, generator=generator)
    shift = torch.randn(48, generator=generator) if bias else None
    return [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, shift)]


def ours(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
    result: Tensor = torch.ops.smp.fp8_linear(x, weight, bias, scaling)
    return result


def with_gradients(
    function: Callable[..., Tensor], given: list[Any], scaling: str
) -> tuple[Tensor, ...]:
    """Returns the result and the gradients of all operands."""
    result = function(*given, scaling)
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(result.shape, generator=generator).to(result.dtype)
    wanted = [tensor for tensor in given if tensor is not None]
    return (result.detach(), *torch.autograd.grad(result, wanted, grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_weight_that_was_rounded_to_codes_by_tensor_has_the_same_products(
    dtype: torch.dtype,
) -> None:
    """Factors of rows do not suffice, since the gradient of the input has factors of columns.

    The largest number is rounded down to a power of two times 1.75, so the second factor differs.
    """
    x, weight, bias = operands(dtype)
    assert x is not None and weight is not None
    wide = weight.detach() * torch.logspace(-6, 0, 48, dtype=dtype)[:, None] / 8
    wide[0, 0] = 225 / 512
    assert wide.abs().max() == 225 / 512
    for scaling, dim in (("tensorwise", None), ("rowwise", 1)):
        again = rounded(wide, VALUES, dim).to(dtype)
        assert (again != wide).any()
        first, second = (
            with_gradients(ours, [x, value.clone().requires_grad_(), bias], scaling)
            for value in (wide, again)
        )
        assert torch.equal(first[0], second[0])
        is_equal = torch.equal(first[1], second[1])
        # The difference is one of codes; the digits of bf16 may hide it.
        assert is_equal if scaling == "tensorwise" else not is_equal or dtype == torch.bfloat16
    assert rounded(wide, VALUES, None).max() == 224 / 512


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [5, 16, 33])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(keep=4)
def test_product_and_gradients_equal_decoded_numbers(
    dtype: torch.dtype, scaling: str, tokens: int, bias: bool
) -> None:
    given = operands(dtype, tokens, bias)
    found = with_gradients(ours, given, scaling)
    want = with_gradients(product, given, scaling)
    # Codes are exact, and sums have at least 24 bits; then both round once.
    limit = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    for one, other in zip(found, want, strict=True):
        assert other.abs().max() > 0
        assert relative_difference(one, other) <= limit


@pytest.mark.parametrize("scaling", SCALINGS)
def test_eight_bits_are_near_and_not_equal(scaling: str) -> None:
    x, weight, bias = operands(torch.float32)
    assert x is not None and weight is not None and bias is not None
    exact = nn.functional.linear(x, weight, bias)
    error = relative_difference(ours(x, weight, bias, scaling), exact)
    assert 1e-4 < error < 2**-4


def test_small_rows_keep_their_digits_rowwise_only() -> None:
    x, weight, _ = operands(torch.float32, bias=False)
    assert x is not None and weight is not None
    exact = nn.functional.linear(x, weight)[0]
    errors = {s: relative_difference(ours(x, weight, None, s)[0], exact) for s in SCALINGS}
    assert errors["rowwise"] < 0.1 < errors["tensorwise"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_product_of_nothing_has_gradients_of_zeros(scaling: str) -> None:
    given = operands(torch.float32, tokens=0)
    result, dx, dweight, dbias = with_gradients(ours, given, scaling)
    assert result.shape == (0, 48) and dx.shape == (0, 32)
    assert not dweight.any() and not dbias.any() and dweight.shape == (48, 32)


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38])
def test_extreme_numbers_have_finite_products(value: float) -> None:
    x = torch.full((16, 16), value)
    for scaling in SCALINGS:
        result = ours(x, torch.eye(16), None, scaling)
        assert torch.allclose(result, x, rtol=0.1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(value: float, scaling: str) -> None:
    x = torch.ones(16, 16)
    x[3, 4] = value
    assert not ours(x, torch.ones(16, 16), None, scaling)[3].isfinite().any()
    weight = torch.ones(16, 16, requires_grad=True)
    ours(torch.ones(16, 16), weight, None, scaling).backward(x)
    assert weight.grad is not None and not weight.grad[4].isfinite().any()


def test_frozen_weights_and_inputs_have_no_gradient() -> None:
    x, weight, bias = operands(torch.float32)
    assert x is not None and weight is not None
    [dx] = torch.autograd.grad(ours(x, weight.detach(), bias, "tensorwise").sum(), [x])
    [dw] = torch.autograd.grad(ours(x.detach(), weight, bias, "tensorwise").sum(), [weight])
    both = torch.autograd.grad(ours(x, weight, bias, "tensorwise").sum(), [x, weight])
    assert torch.equal(dx, both[0]) and torch.equal(dw, both[1])


def test_second_derivative_is_refused_by_name() -> None:
    x, weight, _ = operands(torch.float32)
    assert x is not None and weight is not None
    [dx] = torch.autograd.grad(ours(x, weight, None, "rowwise").sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_linear"):
        dx.sum().backward()


def test_autocast_casts_operands() -> None:
    x, weight, bias = operands(torch.float32)
    assert x is not None and weight is not None and bias is not None
    with torch.autocast("cpu", torch.bfloat16):
        result = ours(x, weight, bias, "rowwise")
    assert result.dtype == torch.bfloat16
    want = ours(x.bfloat16(), weight.bfloat16(), bias, "rowwise")
    assert torch.equal(result, want)


def test_result_may_be_written_in_place() -> None:
    x, weight, bias = operands(torch.float32)
    assert x is not None and weight is not None
    ours(x, weight, bias, "rowwise").relu_().sum().backward()
    assert weight.grad is not None and weight.grad.any()


def test_compiled_code_has_no_graph_break_and_the_same_numbers() -> None:
    layer = nn.Linear(32, 48)
    use_fp8_of_smp(layer, "rowwise")
    x = torch.randn(16, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def use_fp8_of_smp(layer: nn.Linear, scaling: str) -> None:
    from smp.nn.fp8 import Fp8Linear
    from smp.tensor_parallel.products import use_fp8 as mark

    layer.__class__ = Fp8Linear
    mark(layer, scaling)


@pytest.mark.parametrize(
    ("x", "weight", "text"),
    [
        (torch.ones(4, 16), torch.ones(16, 8), r"expected an input \[..., in\]"),
        (torch.ones(4, 16), torch.ones(16, 16).bfloat16(), "one dtype"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x: Tensor, weight: Tensor, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):  # as errors of PyTorch's operators
        ours(x, weight, None, "rowwise")


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(RuntimeError, match='"rowwise" or "tensorwise", got "columnwise"'):
        ours(torch.ones(4, 16), torch.ones(16, 16), None, "columnwise")


# ---- the choice of layers ----------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 3)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x))) * self.gate(x).sum(-1, True)
        return result


class Net(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(32, width)
        self.front = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.front(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


INNER = ["front", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"]


def test_head_and_first_and_last_block_and_odd_sizes_stay_out() -> None:
    choice = choose_layers(Net(), "head, first, last")
    assert list(choice.converted) == INNER
    assert choice.left == {
        "in first blocks": ["blocks.0.up", "blocks.0.gate", "blocks.0.down"],
        "with sizes that 16 does not divide": ["blocks.1.gate", "blocks.2.gate"],
        "in last blocks": ["blocks.3.up", "blocks.3.gate", "blocks.3.down"],
        "heads": ["head"],
    }


@pytest.mark.parametrize(
    ("skip", "num"),
    [
        ("none", 10),
        ("head", 9),
        ("first", 8),
        ("head, front", 8),
        ("head,*.down", 5),
        ("blocks.*", 2),
    ],
)
def test_fp8_skip_names_layers(skip: str, num: int) -> None:
    assert len(choose_layers(Net(), skip).converted) == num


def test_tied_heads_and_layers_of_other_classes_stay_out() -> None:
    class Own(nn.Linear):
        pass

    net = Net()
    net.head = nn.Linear(16, 32, bias=False)
    net.head.weight = net.embedding.weight
    net.behind = nn.Linear(16, 16)
    net.blocks[1].up = Own(16, 32)
    net.blocks[2].up.forward = lambda x: x  # type: ignore[method-assign]
    choice = choose_layers(net, "head, first, last")
    assert choice.left["heads"] == ["head", "behind"]
    assert choice.left["of classes of their own"] == ["blocks.1.up"]
    assert choice.left["with forwards of their own"] == ["blocks.2.up"]


def test_last_layer_is_the_head_of_a_model_without_blocks() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Flatten(), Block(16))
    choice = choose_layers(net, "head")
    assert choice.left["heads"] == ["3.down"]


def wrapped(config: dict[str, Any], net: nn.Module) -> Any:
    smp.init(config)
    return smp.DistributedModel(net)


def test_wrapped_model_trains_as_the_plain_script(caplog: pytest.LogCaptureFixture) -> None:
    plain = Net().double()
    for name in INNER:
        use_fp8(plain.get_submodule(name), "rowwise")  # type: ignore[arg-type]
    ids = torch.arange(32).view(4, 8)
    with caplog.at_level(logging.INFO, "smp"):
        model = wrapped({"fp8": "rowwise"}, Net().double())
    assert "fp8 (rowwise): 5 of 14 linear layers of Net multiply with 8 bits" in caplog.text
    assert "4 with sizes that 16 does not divide" not in caplog.text
    assert "2 with sizes that 16 does not divide: blocks.1.gate" in caplog.text
    assert "fp8 beside torch.float64" in caplog.text
    assert list(model.state_dict()) == list(Net().state_dict())
    for net in (plain, model):
        net(ids).square().mean().backward()
    for (name, want), found in zip(
        plain.named_parameters(), model.get_module().parameters(), strict=True
    ):
        assert want.grad is not None and found.grad is not None and want.grad.any()
        assert relative_difference(found.grad, want.grad) < 1e-12, name


def test_hooks_and_attributes_of_layers_stay() -> None:
    net, seen = Net(), []
    layer = net.blocks[1].up
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = wrapped({"fp8": "tensorwise"}, net)
    model(torch.arange(8)[None])
    assert model.get_module().blocks[1].up is layer and isinstance(layer, nn.Linear)
    assert seen == [torch.float32]


def test_model_without_such_layers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smp"):
        wrapped({"fp8": "rowwise"}, nn.Sequential(nn.Linear(6, 6)))
    assert "0 of 1 linear layers of Sequential multiply with 8 bits; 1 heads: 0" in caplog.text


def test_patterns_that_fit_no_layer_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smp"):
        wrapped({"fp8": "rowwise", "fp8_skip": "hed, *.down, head,"}, Net())
    assert "no linear layer of Net has a name like 'hed'; its words are head" in caplog.text


def test_devices_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp._device import fp8_problem

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    problem = fp8_problem(torch.device("cuda", 0))
    assert problem is not None and "capability 8.0" in problem and "8.9" in problem
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8_problem(torch.device("cuda", 0)) is None
    assert fp8_problem(torch.device("cpu")) is None
    monkeypatch.setattr("smp.replacement.fp8_layers.fp8_problem", lambda device: "it has none")
    with pytest.raises(ValueError, match="fp8='rowwise': it has none; leave fp8 at 'none'"):
        wrapped({"fp8": "rowwise"}, Net())
