"""Fused operators of `smp.nn.functional` next to plain PyTorch, one thread or one GPU.

``python benchmarks/fused_ops.py --config '{"device": "cuda", "dtype": "bfloat16"}'`` for a GPU;
there the bytes that an operator has to move per second are compared with a copy in the same turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from timer import Timing, compare, measure
from torch import Tensor
from torch.nn import functional
from workers import Worker

import smp
from smp.nn import functional as fused

COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class Case:
    """An operator in both versions, as functions without arguments."""

    name: str
    own: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]  # that get gradients
    forward_bytes: int  # that must be read and written
    backward_bytes: int


class Maker:
    """Inputs of one dtype on one device; a GPU gets more rows."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.device = device
        self.dtype = dtype
        self.factor = 16 if device == "cuda" else 1

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype).requires_grad_()


def num_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def elementwise_cases(make: Maker) -> list[Case]:
    rows, hidden = 512 * make.factor, 1024
    x, weight, bias = make(rows, hidden), make(hidden), make(hidden)
    residual, wide, wide_bias = make(rows, hidden), make(rows, 4 * hidden), make(4 * hidden)
    one, four = num_bytes(x), num_bytes(wide)

    def rms_norm() -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    cases = [
        Case(
            "layer_norm",
            lambda: fused.layer_norm(x, weight, bias, 1e-5),
            lambda: functional.layer_norm(x, (hidden,), weight, bias, 1e-5),
            (x, weight, bias),
            2 * one,
            3 * one,
        ),
        Case(
            "rms_norm",
            lambda: fused.rms_norm(x, weight, 1e-6),
            rms_norm,
            (x, weight),
            2 * one,
            3 * one,
        ),
        Case(
            "bias_dropout_residual",
            lambda: fused.bias_dropout_residual(x, bias, residual, 0.1, 7),
            lambda: functional.dropout(x + bias, 0.1) + residual,
            (x, bias, residual),
            3 * one,
            2 * one,
        ),
    ]
    for kind in ("none", "tanh"):
        cases.append(
            Case(
                f"bias_gelu_{kind}",
                lambda kind=kind: fused.bias_gelu(wide, wide_bias, kind),
                lambda kind=kind: functional.gelu(wide + wide_bias, approximate=kind),
                (wide, wide_bias),
                2 * four,
                3 * four,
            )
        )
    return cases


def softmax_cases(make: Maker) -> list[Case]:
    scores = make(4 * make.factor, 16, 128, 128)
    hidden = torch.full((128, 128), -1e4, device=make.device).triu(1).to(make.dtype)[None, None]
    size = num_bytes(scores)

    def plain() -> Tensor:
        return (scores * 0.125 + hidden).softmax(-1)

    return [
        Case(
            "softmax_mask",
            lambda: fused.scaled_masked_softmax(scores, hidden, 0.125),
            plain,
            (scores,),
            2 * size,
            3 * size,
        ),
        Case(
            "softmax_causal",
            lambda: fused.scaled_masked_softmax(scores, None, 0.125, causal=True),
            plain,
            (scores,),
            size + size // 2,
            2 * size,
        ),
        Case(
            "softmax_mask_dropout",
            lambda: fused.scaled_masked_softmax(scores, hidden, 0.125, dropout_p=0.1, seed=7),
            lambda: functional.dropout(plain(), 0.1),
            (scores,),
            3 * size,
            3 * size,
        ),
    ]


def rotary_cases(make: Maker) -> list[Case]:
    x = make(4 * make.factor, 128, 16, 64)
    angles = torch.randn(1, 128, 32, device=make.device)
    cos, sin = angles.cos().to(make.dtype), angles.sin().to(make.dtype)
    wide_cos, wide_sin = cos[:, :, None], sin[:, :, None]

    def plain_halves() -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * wide_cos - b * wide_sin, b * wide_cos + a * wide_sin], -1)

    def plain_neighbours() -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        turned = [a * wide_cos - b * wide_sin, b * wide_cos + a * wide_sin]
        return torch.stack(turned, -1).flatten(-2)

    size = 2 * num_bytes(x)
    own = fused.rotary
    return [
        Case("rotary", lambda: own(x, cos, sin, 64), plain_halves, (x,), size, size),
        Case(
            "rotary_interleaved",
            lambda: own(x, cos, sin, 64, True),
            plain_neighbours,
            (x,),
            size,
            size,
        ),
    ]


def cross_entropy_cases(make: Maker) -> list[Case]:
    logits = make(256 * make.factor, 16384)
    targets = torch.randint(0, 16384, (logits.shape[0],), device=make.device)
    size = num_bytes(logits)
    return [
        Case(
            "cross_entropy" + ("_smoothed" if smoothing else ""),
            lambda s=smoothing: fused.cross_entropy(logits, targets, -100, s),
            lambda s=smoothing: functional.cross_entropy(
                logits, targets, label_smoothing=s, reduction="none"
            ),
            (logits,),
            size,
            2 * size,
        )
        for smoothing in (0.0, 0.1)
    ]


def passes(case: Case) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Name of a pass to both versions of it and the bytes that it has to move."""
    results = case.own(), case.plain()
    gradients = [torch.randn_like(y) for y in results]

    def forward(function: Callable[[], Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                function()

        return run

    def backward(which: int) -> Callable[[], object]:
        return lambda: torch.autograd.grad(
            results[which], case.inputs, gradients[which], retain_graph=True
        )

    def both(function: Callable[[], Tensor], which: int) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(), case.inputs, gradients[which])

    return {
        "forward": (forward(case.own), forward(case.plain), case.forward_bytes),
        "backward": (backward(0), backward(1), case.backward_bytes),
        "forward+backward": (
            both(case.own, 0),
            both(case.plain, 1),
            case.forward_bytes + case.backward_bytes,
        ),
    }


def share_of_copy(own: Timing, own_bytes: int, copy: Timing) -> dict[str, float]:
    """Bytes per second of an operator over those of a copy, medians."""
    speed = own_bytes / own.median_s
    return {
        "gb_per_s": speed / 1e9,
        "share_of_copy": speed / (2 * COPY_BYTES / copy.median_s),
    }


def main() -> None:
    worker = Worker("fused_ops")
    worker.start({})
    device = worker.config.get("device", "cpu")
    dtype = getattr(torch, worker.config.get("dtype", "float32"))
    make = Maker(device, dtype)
    cases = elementwise_cases(make) + softmax_cases(make)
    cases += rotary_cases(make) + cross_entropy_cases(make)
    is_cuda = device == "cuda"
    sync = torch.cuda.synchronize if is_cuda else lambda: None
    source = torch.empty(COPY_BYTES if is_cuda else 0, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for case in cases:
        for name, (own, plain, own_bytes) in passes(case).items():
            contenders = {"smp": own, "plain": plain}
            if is_cuda:
                contenders["copy"] = lambda: target.copy_(source)
            timings = measure(contenders, worker.repeats, worker.warmup, sync)
            values = timings["smp"].summary()
            values |= {"plain_median_ms": timings["plain"].median_s * 1e3}
            values |= compare(timings["smp"], timings["plain"])
            if is_cuda:
                values |= share_of_copy(timings["smp"], own_bytes, timings["copy"])
            worker.emit(f"{case.name} {name}", values)
    smp.shutdown()


if __name__ == "__main__":
    main()
