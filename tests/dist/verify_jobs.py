"""Jobs of `smp verify` in processes that are there already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp.commands.verify.checking import Check
from smp.commands.verify.compare import Verdict
from smp.commands.verify.jobs import ScriptFailed
from smp.commands.verify.layouts import Layout, parse_layouts
from smp.commands.verify.records import JobRecords
from smp.observe.verification import Order
from tests.dist.pool import Pool, RankFailure

STEPS = 2


@contextlib.contextmanager
def ordered(rank: int, order: Order) -> Iterator[None]:
    """The environment of a rank that `smp verify` has started."""
    path = Path(order.folder) / f"order{rank}.json"
    order.write(path)
    os.environ |= {"SMP_VERIFY": str(path), "SMP_CHECK_FIRST_STEP": "0"}
    try:
        yield
    finally:
        del os.environ["SMP_VERIFY"], os.environ["SMP_CHECK_FIRST_STEP"]


@dataclass(frozen=True)
class PoolScript:
    """`Script` whose ranks call a function with their rank, the order, the configuration and more.

    Attributes:
        jobs: names of the jobs that ran.
        results: results of each job's ranks.
    """

    pool: Pool
    folder: Path
    record: Callable[..., Any]
    arguments: tuple[Any, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def run(
        self, name: str, layout: Layout, replay: JobRecords | None = None, is_exact: bool = False
    ) -> JobRecords:
        self.jobs.append(name)
        folder = self.folder / name
        folder.mkdir(parents=True)
        source = None if replay is None else str(replay.folder)
        order = Order(str(folder), STEPS, is_exact, source)
        config = layout.configuration(self.given, is_exact)
        try:
            ranks = layout.num_processes
            found = self.pool.run(ranks, self.record, order, config, *self.arguments)
        except RankFailure as failure:
            raise ScriptFailed(str(failure), "") from failure
        self.results.extend(found)
        return JobRecords(folder)

    def verify(self, *layouts: str) -> list[Verdict]:
        check = Check(self, lambda text: None)  # type: ignore[arg-type]
        check.begin()
        return [check.layout(layout) for layout in parse_layouts(",".join(layouts))]
