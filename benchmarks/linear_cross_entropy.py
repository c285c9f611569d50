"""Loss of a large head with its gradients: time and peak memory, with and without logits.

`in_chunks` is the idea of Liger's kernel in plain PyTorch: gradients are computed in forward, chunk
by chunk. Liger's own code needs Triton, and a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from profiled_memory import peak_bytes
from timer import Timing, compare, measure
from torch import Tensor
from torch.nn import functional
from workers import Worker

import smp
from smp.nn.functional import linear_cross_entropy

#: largest differences of losses, by dtype
AGREE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Computes logits and their loss as models of transformers do."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


class InChunks(torch.autograd.Function):
    """The mean loss, whose gradients are computed in forward in chunks of tokens.

    Source: Liger-Kernel, arXiv:2410.10989, section 3.2: as many chunks as the vocabulary is larger
    than the hidden size.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        num_chunks = math.ceil(weight.shape[0] / weight.shape[1])
        size = 1 << (math.ceil(hidden.shape[0] / num_chunks) - 1).bit_length()
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, hidden.shape[0], size):
            rows = slice(begin, begin + size)
            logits = (hidden[rows] @ weight.t()).float()
            logs = logits.log_softmax(-1)
            total += functional.nll_loss(logs, labels[rows], reduction="sum")
            d_logits = logs.exp_()
            d_logits[torch.arange(len(d_logits)), labels[rows]] -= 1
            d_logits = (d_logits / hidden.shape[0]).to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], d_weight * grads[0], None


def main() -> None:
    worker = Worker("linear_cross_entropy")
    worker.start({})
    config = worker.config
    dtype = getattr(torch, config["dtype"])
    torch.manual_seed(1)
    hidden = torch.randn(config["tokens"], config["hidden"]).to(dtype).requires_grad_()
    weight = torch.randn(config["vocab_size"], config["hidden"]).mul_(0.02).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(config["vocab_size"], (config["tokens"],))
    contenders: dict[str, Callable[[], Tensor]] = {
        "logits": lambda: whole_logits(hidden, weight, labels),
        "in_chunks": lambda: InChunks.apply(hidden, weight, labels),
        "smp": lambda: linear_cross_entropy(hidden, weight, labels),
        "smp_recompute": lambda: linear_cross_entropy(hidden, weight, labels, recompute=True),
    }
    losses = {name: loss().item() for name, loss in contenders.items()}
    worst = max(abs(loss - losses["logits"]) for loss in losses.values())
    if worst > AGREE[dtype] * losses["logits"]:
        raise RuntimeError(f"losses differ: {losses}")

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            (0.5 * loss()).backward()

        return run

    steps = {name: step(loss) for name, loss in contenders.items()}
    peaks = {}
    for name, run in steps.items():
        hidden.grad = weight.grad = None
        peaks[name] = peak_bytes(run)
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    timings = measure(steps, worker.repeats, worker.warmup)
    for name, timing in timings.items():
        values = timing.summary() | compare(timing, timings["logits"])
        own, base = (Timing(t.cpu_samples_s) for t in (timing, timings["logits"]))
        values["cpu_ratio_median"] = compare(own, base)["ratio_median"]
        values["peak_mb"] = peaks[name] / 1e6
        values["peak_without_gradients_mb"] = (peaks[name] - gradients) / 1e6
        values["peak_ratio"] = peaks[name] / peaks["logits"]
        worker.emit(name, values)
    smp.shutdown()


if __name__ == "__main__":
    main()
