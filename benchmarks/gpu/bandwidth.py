"""Part `bandwidth`: bytes per second of each operator and optimizer, as a share of a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import smp
from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.rows import Row
from smp.nn import functional as fused

OPERATOR = Limit(least=0.85)
ADAM = Limit(least=0.9)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT-J at 8 sequences of 2048 tokens; a dry run has tiny ones."""

    tokens: int = 16384
    hidden: int = 4096
    vocab: int = 50400
    batch: int = 8
    heads: int = 16
    head: int = 256
    parameters: int = 1_000_000_000
    copied: int = 1 << 30
    repeats: int = 30


TINY = Sizes(64, 32, 100, 2, 2, 8, 10_000, 1 << 16, 2)


@dataclass(frozen=True)
class Operator:
    """An operator, what has gradients, and the bytes that must at least move in each direction."""

    name: str
    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    forward_bytes: int
    backward_bytes: int


def num_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def make(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(DTYPE).requires_grad_()


def layer_norm(sizes: Sizes, device: str) -> Operator:
    t, h = sizes.tokens, sizes.hidden
    x, weight, bias = (make(device, *shape) for shape in ((t, h), (h,), (h,)))
    one = num_bytes(x)
    return Operator(
        f"layer_norm [{t}, {h}]",
        lambda: fused.layer_norm(x, weight, bias, 1e-5),
        (x, weight, bias),
        2 * one,
        3 * one,
    )


def rms_norm(sizes: Sizes, device: str) -> Operator:
    t, h = sizes.tokens, sizes.hidden
    x, weight = make(device, t, h), make(device, h)
    one = num_bytes(x)
    return Operator(
        f"rms_norm [{t}, {h}]", lambda: fused.rms_norm(x, weight), (x, weight), 2 * one, 3 * one
    )


def bias_dropout_residual(sizes: Sizes, device: str) -> Operator:
    t, h = sizes.tokens, sizes.hidden
    x, residual, bias = (make(device, *shape) for shape in ((t, h), (t, h), (h,)))
    one = num_bytes(x)
    return Operator(
        f"bias_dropout_residual [{t}, {h}]",
        lambda: fused.bias_dropout_residual(x, bias, residual, 0.1, 7),
        (x, bias, residual),
        3 * one,
        2 * one,
    )


def bias_gelu(sizes: Sizes, device: str, kind: str) -> Operator:
    """The operator between the matrices of the MLP."""
    t, wide = sizes.tokens, 4 * sizes.hidden
    x, bias = make(device, t, wide), make(device, wide)
    size = num_bytes(x)
    return Operator(
        f"bias_gelu {kind} [{t}, {wide}]",
        lambda: fused.bias_gelu(x, bias, kind),
        (x, bias),
        2 * size,
        3 * size,
    )


def rotary(sizes: Sizes, device: str, interleaved: bool) -> Operator:
    """A rotation of a quarter of each head, as in GPT-J."""
    seq, turned = sizes.tokens // sizes.batch, sizes.head // 4
    x = make(device, sizes.batch, seq, sizes.heads, sizes.head)
    angles = torch.randn(1, seq, turned // 2, device=device)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    size = 2 * num_bytes(x)
    kind = "neighbours" if interleaved else "halves"
    return Operator(
        f"rotary {turned}, {kind} {list(x.shape)}",
        lambda: fused.rotary(x, cos, sin, turned, interleaved),
        (x,),
        size,
        size,
    )


def softmax(sizes: Sizes, device: str) -> Operator:
    """The softmax of half a batch of scores; its causal mask leaves half of them."""
    seq = sizes.tokens // sizes.batch
    scores = make(device, sizes.batch // 2, sizes.heads, seq, seq)
    size = num_bytes(scores)
    return Operator(
        f"softmax, causal {list(scores.shape)}",
        lambda: fused.scaled_masked_softmax(scores, None, 0.125, causal=True),
        (scores,),
        size + size // 2,
        2 * size,
    )


def cross_entropy(sizes: Sizes, device: str) -> Operator:
    """The cross entropy of logits over the vocabulary."""
    logits = make(device, sizes.tokens, sizes.vocab)
    targets = torch.randint(0, sizes.vocab, (sizes.tokens,), device=device)
    size = num_bytes(logits)
    return Operator(
        f"cross_entropy {list(logits.shape)}",
        lambda: fused.cross_entropy(logits, targets),
        (logits,),
        size,
        2 * size,
    )


#: Each makes its own tensors: those of all together do not fit into every GPU.
OPERATORS: dict[str, Callable[[Sizes, str], Operator]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "bias_dropout_residual": bias_dropout_residual,
    "bias_gelu none": functools.partial(bias_gelu, kind="none"),
    "bias_gelu tanh": functools.partial(bias_gelu, kind="tanh"),
    "rotary, halves": functools.partial(rotary, interleaved=False),
    "rotary, neighbours": functools.partial(rotary, interleaved=True),
    "softmax": softmax,
    "cross_entropy": cross_entropy,
}


def sizes_of(figures: Figures) -> Sizes:
    return TINY if figures.device.is_dry else Sizes()


def measure(figures: Figures, name: str) -> None:
    """Forward and backward of an operator."""
    device, sizes = figures.device, sizes_of(figures)
    copy = device.copy_rate(sizes.copied)
    torch.manual_seed(1)
    operator = OPERATORS[name](sizes, device.kind)

    def forward() -> None:
        with torch.no_grad():
            operator.run()

    result = operator.run()
    gradient = torch.randn_like(result)

    def backward() -> None:
        torch.autograd.grad(result, operator.inputs, gradient, retain_graph=True)

    for way, work, size in (
        ("forward", forward, operator.forward_bytes),
        ("backward", backward, operator.backward_bytes),
    ):
        seconds = device.seconds(work, sizes.repeats)
        figures.add(
            f"{operator.name} {way}",
            size / seconds / copy,
            "of a copy",
            expected=OPERATOR,
            ms=seconds * 1e3,
            gb_per_s=size / seconds / 1e9,
        )


def parameters(sizes: Sizes, device: str) -> list[nn.Parameter]:
    """Float32, in pieces as large as a layer's matrices, with gradients."""
    piece = min(sizes.parameters, 1 << 26)
    params = [
        nn.Parameter(torch.randn(min(piece, sizes.parameters - begin), device=device))
        for begin in range(0, sizes.parameters, piece)
    ]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


#: Bytes of a parameter that must move: parameter, gradient and moments in, all but the gradient and
#: a bf16 copy out; LAMB knows its step only after a pass over everything, NovoGrad after the
#: gradients.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int, bool]] = {
    "FusedAdam with bf16 copies": (smp.optimizers.FusedAdam, 30, True),
    "FusedAdam": (smp.optimizers.FusedAdam, 28, False),
    "FusedLAMB": (smp.optimizers.FusedLAMB, 28 + 16, False),
    "FusedNovoGrad": (smp.optimizers.FusedNovoGrad, 4 + 20, False),
    "torch.optim.AdamW(fused=True)": (
        lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
        28,
        False,
    ),
}


def measure_optimizer(figures: Figures, name: str) -> None:
    sizes = sizes_of(figures)
    copy = figures.device.copy_rate(sizes.copied)
    make, bytes_each, has_copies = OPTIMIZERS[name]
    params = parameters(sizes, figures.device.kind)
    for p in params if has_copies else ():
        p._smp_copy = p.detach().bfloat16()  # type: ignore[attr-defined]
    step = make(params, lr=1e-6).step
    seconds = figures.device.seconds(step, sizes.repeats // 2)
    size = bytes_each * sizes.parameters
    figures.add(
        f"{name}, {sizes.parameters:.0e} parameters",
        size / seconds / copy,
        "of a copy",
        expected=ADAM if "FusedAdam" in name else None,
        ms=seconds * 1e3,
        gb_per_s=size / seconds / 1e9,
        bytes_each=bytes_each,
    )


#: Passes over the gradients.
PASSES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum_of_squares": lambda grads: torch.ops.smp.sum_of_squares(grads),
    "found_nonfinite": lambda grads: torch.ops.smp.found_nonfinite(grads),
}


def measure_pass(figures: Figures, name: str) -> None:
    sizes = sizes_of(figures)
    copy = figures.device.copy_rate(sizes.copied)
    grads = [p.detach() for p in parameters(sizes, figures.device.kind)]
    seconds = figures.device.seconds(lambda: PASSES[name](grads), sizes.repeats)
    figures.add(
        f"{name}, {sizes.parameters:.0e} gradients",
        4 * sizes.parameters / seconds / copy,
        "of a copy",
        expected=OPERATOR,
        ms=seconds * 1e3,
    )


def measure_copy(figures: Figures) -> None:
    sizes = sizes_of(figures)
    rate = figures.device.copy_rate(sizes.copied)
    figures.add("copy", rate / 1e9, "GB/s", bytes=sizes.copied)


def rows(part: str, is_dry: bool) -> list[Row]:
    kinds = ((OPERATORS, measure), (OPTIMIZERS, measure_optimizer), (PASSES, measure_pass))
    works = {name: work for names, work in kinds for name in names}
    found = [Row(name, functools.partial(work, name=name)) for name, work in works.items()]
    return [Row("copy", measure_copy), *found]
