"""Part `graph`: CUDA graphs of fused operators: replayed, they give what the operators give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import smp
from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.rows import Row
from smp.nn import functional as fused


class Graph:
    """A recording of a function's work on the device; a dry run calls the function again.

    Args:
        device: device on which the function works.
        work: reads and writes the same tensors each time; returns one.
    """

    def __init__(self, device: Device, work: Callable[[], Tensor]) -> None:
        self._graph, self._work = None, work
        if not device.is_cuda:
            self.result = work()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = work()

    def replay(self) -> Tensor:
        """Repeats the recorded work; returns its result."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.result.copy_(self._work())
        return self.result


def operators(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Forwards of one input ``[rows, columns]``."""
    n = x.shape[1]
    weight, bias = torch.randn(n, device=x.device), torch.randn(n, device=x.device)
    heads = x.view(1, x.shape[0], 2, n // 2)
    angles = torch.randn(1, x.shape[0], n // 8, device=x.device)
    targets = torch.arange(x.shape[0], device=x.device) % n
    return {
        "layer_norm": lambda: fused.layer_norm(x, weight, bias),
        "rms_norm": lambda: fused.rms_norm(x, weight),
        "bias_gelu": lambda: fused.bias_gelu(x, bias, "tanh"),
        "bias_dropout_residual": lambda: fused.bias_dropout_residual(x, bias, x, 0.1, 5),
        "softmax": lambda: fused.scaled_masked_softmax(x[None, None], None, 0.5, causal=True),
        "rotary": lambda: fused.rotary(heads, angles.cos(), angles.sin(), n // 4),
        "cross_entropy": lambda: fused.cross_entropy(x, targets),
    }


def compare(figures: Figures, name: str, x: Tensor, work: Callable[[], Tensor]) -> None:
    """The graph of a forward, replayed with another input, next to the operator itself."""
    graph = Graph(figures.device, work)
    before = graph.replay().clone()
    x.normal_()
    want = work()
    got = graph.replay()
    figures.device.synchronize()
    difference = float((got - want).abs().max())
    figures.add(f"{name}: largest difference", difference, "", bound=Limit(most=0.0))
    changed = float((got - before).abs().max())
    figures.add(f"{name}: change with the input", changed, "", bound=Limit(least=1e-3))
    repeats = 3 if figures.device.is_dry else 200
    for way, run in (("call", work), ("replay", graph.replay)):
        seconds = figures.device.seconds(run, repeats)
        figures.add(f"{name}: time of a {way}", seconds * 1e6, "us")


def update(figures: Figures) -> None:
    """A graph of an update of FusedAdam moves parameters as the updates themselves do."""

    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        torch.manual_seed(3)
        p = nn.Parameter(torch.randn(1001, device=figures.device.kind))
        p.grad = torch.randn_like(p)
        return p, smp.optimizers.FusedAdam([p], lr=0.1)

    def step(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.step()
        return p.detach()

    p, optimizer = make()
    Graph(figures.device, lambda: step(p, optimizer)).replay()
    # The graph's parameter took the steps before the recording, a dry run's recording, the replay.
    q, plain = make()
    num_steps = 4 if figures.device.is_cuda else 2
    for _ in range(num_steps):
        step(q, plain)
    difference = float((p - q).detach().abs().max())
    # Equality is not promised: a host that counts steps would not count those of a graph.
    figures.add("FusedAdam: largest difference", difference, "", expected=Limit(most=1e-6))


def operator(figures: Figures, name: str) -> None:
    """Compares one operator."""
    torch.manual_seed(1)
    shape = (16, 64) if figures.device.is_dry else (512, 1024)
    x = torch.randn(shape, device=figures.device.kind)
    compare(figures, name, x, operators(x)[name])


def rows(part: str, is_dry: bool) -> list[Row]:
    names = operators(torch.zeros(1, 64))
    found = [Row(name, functools.partial(operator, name=name)) for name in names]
    return [*found, Row("FusedAdam", update)]
