"""A step of `smp.optimizers` next to the fused and the foreach optimizers of torch.

The step of smp has what a 16-bit model needs: the norm of all gradients, clipping by it, and BF16
copies of the parameters. ``{"device": "cuda", "num_parameters": 1000000000}`` for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timer import compare, measure
from torch import Tensor, nn
from workers import Worker

import smp

HIDDEN = 1024
# Shapes of a transformer layer: attention, both halves of the MLP, biases and norms.
SHAPES = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]
SHAPES += [(3 * HIDDEN,), (4 * HIDDEN,)] + [(HIDDEN,)] * 6
MAX_NORM = 1.0


def make_parameters(num_parameters: int, device: str) -> list[nn.Parameter]:
    """Makes parameters of as many transformer layers as are needed, with gradients."""
    per_layer = sum(torch.Size(shape).numel() for shape in SHAPES)
    shapes = SHAPES * max(1, round(num_parameters / per_layer))
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def smp_step(params: list[nn.Parameter]) -> Callable[[], object]:
    for p in params:
        p._smp_copy = p.detach().bfloat16()  # type: ignore[attr-defined]
    grads = [p.grad for p in params]
    optimizer = smp.optimizers.FusedAdam(params, lr=1e-6, weight_decay=0.01)

    def run() -> None:
        squares = torch.ops.smp.sum_of_squares(grads)
        optimizer.grad_scale, _, optimizer.found_inf = torch.ops.smp.clip_divisor(  # type: ignore[attr-defined]
            squares, MAX_NORM, None
        )
        optimizer.step()

    return run


def bare_smp_step(params: list[nn.Parameter]) -> Callable[[], object]:
    """The update alone: neither norm nor copies."""
    bare = [nn.Parameter(p.detach()) for p in params]
    for p, q in zip(params, bare, strict=True):
        q.grad = p.grad
    return smp.optimizers.FusedAdam(bare, lr=1e-6, weight_decay=0.01).step


def torch_step(params: list[nn.Parameter]) -> Callable[[], object]:
    return torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True).step


def torch_whole_step(params: list[nn.Parameter]) -> Callable[[], object]:
    """The same as `smp_step` out of torch's parts."""
    optimizer = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True)
    copies: list[Tensor] = [p.detach().bfloat16() for p in params]

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, params)

    return run


def main() -> None:
    worker = Worker("fused_optimizers")
    worker.start({})
    torch.manual_seed(1)
    torch.set_num_threads(worker.config.get("num_threads", 1))
    device = worker.config.get("device", "cpu")
    params = make_parameters(worker.config["num_parameters"], device)
    contenders = {
        "smp": smp_step(params),
        "torch": torch_step(params),
        "smp_bare": bare_smp_step(params),
        "torch_whole": torch_whole_step(params),
    }
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    timings = measure(contenders, worker.repeats, worker.warmup, sync)
    for name, other in (("smp", "torch"), ("smp", "torch_whole"), ("smp_bare", "torch")):
        values = timings[name].summary()
        values |= {"other_median_ms": timings[other].median_s * 1e3}
        values |= compare(timings[name], timings[other])
        worker.emit(f"{name} to {other}", values)
    smp.shutdown()


if __name__ == "__main__":
    main()
