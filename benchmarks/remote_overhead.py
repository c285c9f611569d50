"""Measures the cost of calling a module on another rank besides the module, and its parts.

All figures are medians over single calls of a module with one number. Clocks of processes of one
machine are the same, so the parts of a call add up:

* ``round_trip``: the caller reads the value of each result before the next call. ``issue``: until
  the call has returned a handle; ``request``: from then until the module begins; ``module``: its
  own time; ``answer``: from its end until the caller has the value.
* ``run_ahead``: each result is the argument of the next call and nothing is read.
* ``hop``: from the end of a module to the start of the next one, which gets its result, when all
  requests are there before: on the same rank, and from rank to rank without the caller.
* ``issue_parts``: times of Python functions within `issue` and within the answering side.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from workers import Worker, place

import smp
from smp import _C
from smp.observe.metrics import server_stats
from smp.pipeline import packing, remote_modules

GATE_S = 0.25
"""Long enough for the caller to issue all calls of a chain."""
NAMES = ("tiny1", "tiny2")


class Tiny(nn.Module):
    """Adds a number to its argument and notes when."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))
        self.spans_s: list[tuple[float, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        begin_s = time.perf_counter()
        y = x + self.offset
        self.spans_s.append((begin_s, time.perf_counter()))
        return y


class Gate(nn.Module):
    """Holds the chain behind it back."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(GATE_S)
        return x + self.offset


class Caller(nn.Module):
    """A module whose forward is set by the benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Tiny()
        self.gate = Gate()
        self.tiny1 = Tiny()
        self.tiny2 = Tiny()
        self.run: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Bench:
    """The steps of one worker process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.per_step: int = worker.config["calls_per_step"]
        self.num_steps: int = -(-worker.config["calls"] // self.per_step)
        self.caller = Caller()
        last = smp.pp_size() - 1
        place(self.caller, {"gate": 1, "tiny1": 1, "tiny2": last})
        self.model = smp.DistributedModel(self.caller)
        model = self.model

        @smp.step
        def forward_step(x: Tensor) -> Tensor:
            return model(x)

        @smp.step
        def train_step(x: Tensor) -> Tensor:
            loss = model(x)
            model.backward(loss)
            return loss

        self._steps = {False: forward_step, True: train_step}

    def steps(self, run: Callable[[Tensor], Tensor], grad: bool = False) -> None:
        """Runs ``run`` as the body of every step, after two that do not count."""
        self.caller.run = run
        x = torch.zeros(1)
        with torch.set_grad_enabled(grad):
            for idx in range(2 + self.num_steps):
                if idx == 2:
                    self.forget()
                distributed.barrier()
                self._steps[grad](x)

    def forget(self) -> None:
        for tiny in (self.caller.own, self.caller.tiny1, self.caller.tiny2):
            tiny.spans_s.clear()
        self.marks: list[tuple[float, ...]] = []

    def spans(self) -> list[list[tuple[float, float]]]:
        """Gathers the spans that the tiny modules of the pipeline have noted on their ranks."""
        mine = [getattr(self.caller, name).spans_s for name in NAMES]
        everywhere = smp.allgather(mine, smp.PP_GROUP)
        return [max((part[i] for part in everywhere), key=len) for i in range(len(NAMES))]

    def round_trip(self) -> dict[str, float]:
        def run(x: Tensor) -> Tensor:
            tiny = self.caller.tiny1
            for _ in range(self.per_step):
                started_s = time.perf_counter()
                y = tiny(x)
                issued_s = time.perf_counter()
                float(y)
                self.marks.append((started_s, issued_s, time.perf_counter()))
            return x.sum()

        self.steps(run)
        spans = self.spans()[0]
        rows = [
            (end - start, issued - start, span[0] - issued, span[1] - span[0], end - span[1])
            for (start, issued, end), span in zip(self.marks, spans, strict=False)
        ]
        return medians(rows, ("round_trip", "issue", "request", "module", "answer"))

    def run_ahead(self, grad: bool) -> dict[str, float]:
        """Time of the caller per call, and of all until the last result is read."""
        totals: list[tuple[float, ...]] = []

        def run(x: Tensor) -> Tensor:
            tiny = self.caller.tiny1
            y = self.caller.own(x)
            step_started_s = time.perf_counter()
            for _ in range(self.per_step):
                started_s = time.perf_counter()
                y = tiny(y)
                self.marks.append((time.perf_counter() - started_s,))
            if not grad:
                float(y)
            totals.append(((time.perf_counter() - step_started_s) / self.per_step,))
            return y.sum()

        self.steps(run, grad)
        self.spans()
        values = medians(self.marks, ("issue",))
        if not grad:
            values |= medians(totals, ("all",))
        return values

    def forward_backward(self) -> dict[str, float]:
        """Time of a whole training step per call."""
        seconds: list[tuple[float, ...]] = []

        def timed(x: Tensor) -> Tensor:
            y = self.caller.own(x)
            for _ in range(self.per_step):
                y = self.caller.tiny1(y)
            return y.sum()

        self.caller.run = timed
        for idx in range(2 + self.num_steps):
            distributed.barrier()
            started_s = time.perf_counter()
            self._steps[True](torch.zeros(1))
            if idx >= 2:
                seconds.append(((time.perf_counter() - started_s) / self.per_step,))
        self.forget()
        return medians(seconds, ("forward_and_backward",))

    def hops(self) -> dict[str, float]:
        """Measures the time between modules: on rank 1, and between rank 1 and the last one."""
        values: dict[str, float] = {}
        for name in ("same_rank", "between_ranks"):
            if name == "between_ranks" and smp.pp_size() < 3:
                continue
            second = self.caller.tiny1 if name == "same_rank" else self.caller.tiny2

            def run(x: Tensor, second: nn.Module = second) -> Tensor:
                y = self.caller.gate(x)
                for _ in range(self.per_step // 2):
                    y = second(self.caller.tiny1(y))
                float(y)
                return x.sum()

            self.steps(run)
            spans = sorted(span for part in self.spans() for span in part)
            gaps_s = [spans[i + 1][0] - spans[i][1] for i in range(len(spans) - 1)]
            hops = [(gap_s,) for gap_s in gaps_s if gap_s < GATE_S / 2]
            values |= medians(hops, (f"hop_{name}",))
        return values

    def parts(self) -> dict[str, float]:
        """Python functions on both sides, one level at a time, so that timers cost little."""
        spent: dict[str, list[float]] = defaultdict(list)
        values: dict[str, float] = {}
        for owner, name in (
            (packing.Codec, "pack"),
            (packing.Codec, "pack_result"),
            (packing.Codec, "unpack"),
            (remote_modules.RemoteModules, "_call"),
            (remote_modules.RemoteModules, "_run"),
            (_C.Server, "remote_call"),
        ):
            with timed(owner, name, spent):
                self.steps(self._chain)
        for key, seconds in spent.items():
            values |= medians([(s,) for s in seconds], (key,))
        per_rank = smp.allgather(values, smp.PP_GROUP)
        return {f"{k}_rank{r}": v for r, part in enumerate(per_rank) for k, v in part.items()}

    def _chain(self, x: Tensor) -> Tensor:
        y = self.caller.own(x)
        for _ in range(self.per_step):
            y = self.caller.tiny1(y)
        float(y)
        return x.sum()


@contextmanager
def timed(owner: Any, name: str, spent: dict[str, list[float]]) -> Iterator[None]:
    """Notes the time of each call of a method, by name."""
    original = owner.__dict__[name]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[f"python_{name.strip('_')}"].append(time.perf_counter() - started_s)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def medians(rows: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    """Median and lower quartile of each column, in microseconds; nothing where there is none."""
    values: dict[str, float] = {}
    if not rows:
        return values
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        values[f"{name}_us"] = statistics.median(column) * 1e6
        values[f"{name}_q1_us"] = statistics.quantiles(column, n=4)[0] * 1e6
    return values


def main() -> None:
    worker = Worker("remote_overhead")
    worker.start(
        {
            "pipeline_parallel_degree": worker.config["num_ranks"],
            "microbatches": 1,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    bench = Bench(worker)
    bench.steps(lambda x: bench.caller.tiny1(x).sum())  # partitions
    results = {
        "round_trip": bench.round_trip,
        "run_ahead": lambda: bench.run_ahead(grad=False),
        "run_ahead_grad": lambda: bench.run_ahead(grad=True),
        "forward_backward": bench.forward_backward,
        "hop": bench.hops,
        "python": bench.parts,
    }
    for name, measure in results.items():
        before = server_stats()["remote_calls"]
        values = measure()
        values["calls"] = server_stats()["remote_calls"] - before
        worker.emit(name, values)
    smp.shutdown()


if __name__ == "__main__":
    main()
