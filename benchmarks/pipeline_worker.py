"""Runs one process of `pipeline`: measures all cases, rank 0 prints the results."""

from __future__ import annotations

import gc
import math
import resource
import time
from dataclasses import dataclass, field
from typing import Any

from allocation_meter import AllocationMeter
from models import GptShape
from pipeline_contenders import Case, Contender, OneProcess, with_smp, with_torch
from pipeline_models import make_batch, make_model
from pipeline_report import report, report_pipelines
from torch import distributed
from workers import Worker

import smp
from smp.observe.metrics import server_stats

TRACED_STEPS = 3


@dataclass
class Samples:
    """Repeats of one contender on this rank."""

    step_s: list[float] = field(default_factory=list)
    """Between two barriers."""
    cpu_s: list[float] = field(default_factory=list)
    system_s: list[float] = field(default_factory=list)
    """The part of it in the kernel."""
    page_faults: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    """Above what was there when the step began."""
    own_bytes: int = 0
    """Kept between steps: parameters, optimizer, gradients that are not given back."""
    losses: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    """Of one step."""


class Race:
    """Lets contenders take turns in the same processes.

    Args:
        case: case that the contenders train.
        meter: counter of the process's bytes.
    """

    def __init__(self, case: Case, meter: AllocationMeter) -> None:
        self.case = case
        self.meter = meter
        self.contenders: dict[str, Contender | None] = {}
        self.samples: dict[str, Samples] = {}

    def enter(self, name: str, make: Any) -> Any:
        """Makes a contender with ``make() -> (contender, other)`` and runs it once."""
        before = self.meter.restart()
        contender, other = make()
        self.contenders[name] = contender
        self.samples[name] = Samples()
        if contender is not None:
            self.samples[name].losses.append(contender.run())
            contender.finish()
        distributed.barrier()
        gc.collect()
        self.samples[name].own_bytes = self.meter.live() - before
        return other

    def add(self, name: str, contender: Contender | None) -> None:
        """Adds a contender that has run before, or None where it has no work on this rank."""
        self.contenders[name] = contender
        self.samples[name] = Samples()

    def turn(self) -> None:
        """Runs and measures one step of every contender."""
        for name, contender in self.contenders.items():
            samples = self.samples[name]
            distributed.barrier()
            before = server_stats() if name == "smp" else {}
            live = self.meter.restart()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s, started_s = time.process_time(), time.perf_counter()
            loss = contender.run() if contender is not None else math.nan
            samples.cpu_s.append(time.process_time() - cpu_s)
            after = resource.getrusage(resource.RUSAGE_SELF)
            samples.system_s.append(after.ru_stime - usage.ru_stime)
            samples.page_faults.append(after.ru_minflt - usage.ru_minflt)
            distributed.barrier()
            samples.step_s.append(time.perf_counter() - started_s)
            samples.peak_bytes.append(self.meter.peak() - live)
            samples.losses.append(loss)
            if before:
                samples.counters = _difference(server_stats(), before)
            if contender is not None:
                contender.finish()


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    names = [name for name, value in after.items() if isinstance(value, int | float)]
    return {name: after[name] - before[name] for name in names}


def measure_case(worker: Worker) -> None:
    config = worker.config
    kind, microbatches, repeats = config["kind"], config["microbatches"], config["repeats"]
    shape = GptShape(**config["shape"])
    num_ranks = config["num_ranks"]
    weight = config["memory_weight"]
    worker.start(
        {
            "pipeline_parallel_degree": num_ranks,
            "microbatches": microbatches,
            "pipeline": config["pipeline"],
            "active_microbatches": config["active"],
            **({} if weight is None else {"memory_weight": weight}),
            "auto_partition": not config["cut"],
        }
    )
    batch = make_batch(kind, shape, microbatches * config["microbatch_size"])
    case = Case(kind, shape, microbatches, num_ranks, batch)
    meter = AllocationMeter()
    race = Race(case, meter)
    ours = race.enter("smp", lambda: with_smp(make_model(kind, shape), case, config["cut"]))
    race.enter("torch_1f1b", lambda: (with_torch(make_model(kind, shape), case), None))
    named = smp.allgather([name for name, _ in ours.local_named_modules()], smp.PP_GROUP)
    owner_of = {name: rank for rank, names in enumerate(named) for name in names}
    if config["pipelines_only"]:
        for _ in range(repeats):
            race.turn()
        report_pipelines(worker, case, race.samples, owner_of)
        draw(race, config["trace"])
        smp.shutdown()
        return
    count = min(microbatches, config["one_process_microbatches"])
    one = OneProcess(make_model(kind, shape), case, count)
    one.watch(owner_of, meter)
    contender = one.contender()
    is_first = smp.pp_rank() == 0
    race.add("one_process", contender if is_first else None)
    if config["one_process_everywhere"]:
        race.add("one_process_everywhere", contender)
    for _ in range(repeats):
        race.turn()
    report(worker, case, race.samples, one, owner_of)
    draw(race, config["trace"])
    smp.shutdown()


def draw(race: Race, path: str) -> None:
    """The timeline of some more steps of smp, which are not counted."""
    contender = race.contenders["smp"]
    if not path or contender is None:
        return
    with smp.trace(path):
        for _ in range(TRACED_STEPS):
            contender.run()
            contender.finish()


def main() -> None:
    measure_case(Worker("pipeline"))


if __name__ == "__main__":
    main()
