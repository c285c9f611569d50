"""``smp.trace``: records what the ranks of a pipeline do in a few steps, as files to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smp.observe.timeline.chrome import to_chrome
from smp.observe.timeline.document import build
from smp.observe.timeline.gather import gather
from smp.observe.timeline.page import to_page
from smp.world import comm, runtime

__all__ = ["trace"]


@contextmanager
def trace(path: str | Path, *, max_events: int = 200_000) -> Iterator[None]:
    """Records the steps inside the block and writes what each rank did. Collective.

    Rank 0 writes two files: ``<path>.json``, which chrome://tracing and Perfetto open, and
    ``<path>.html``, a page that needs nothing else: a row per rank, with the planned schedule above
    the executed one, tensors on their way, waits with their reason, and the bubble of each rank.

    The first step of a model partitions it and learns the shapes; trace later ones to measure a
    usual step. On a GPU a second row shows when the device executed a task, measured by events
    that are awaited only at the end of the block; bubbles and plan are computed from that row then.
    If tensors travel over lanes between devices, rows show each of them. This has not run on a GPU
    yet.

    Args:
        path: path of the files without their ending, or an existing folder, for ``trace.json`` and
            ``trace.html`` in it. The path of rank 0 counts.
        max_events: number of events kept per rank; if there are more, the oldest are dropped.

    Raises:
        ValueError: rank 0 cannot write there, or ``max_events`` is below 1; raised on all ranks
            before the block begins.
        RuntimeError: it is called inside another trace or a step function, or without a
            ``DistributedModel``, or no step ran in the block.
    """
    current = runtime.current()
    rank = current.rank
    rank.check_process("smp.trace")
    if current.steps.running is not None:
        raise RuntimeError(
            f"{rank.prefix}smp.trace was called inside step '{current.steps.running}'; call step "
            "functions inside of the trace instead"
        )
    stem = _open(current, path, max_events)
    num_steps = current.steps.num_finished
    try:
        yield
        comm.barrier(comm.WORLD)  # afterwards all tensors of the steps have arrived
    except BaseException:
        current.timeline.stop()
        current.timeline.discard()
        raise
    current.timeline.stop()
    if current.steps.num_finished == num_steps:
        raise RuntimeError(
            f"{rank.prefix}smp.trace: no step function was called inside of it, so there "
            "is nothing to write"
        )
    recordings = gather(current)
    error = None
    if rank.global_rank == 0:
        try:
            found = to_chrome(build(recordings))
            _file(stem, ".json").write_text(json.dumps(found), encoding="utf-8")
            _file(stem, ".html").write_text(to_page(found), encoding="utf-8")
        except OSError as failure:
            error = f"smp.trace could not write its files: {failure}"
    if error := comm.allgather(error, comm.WORLD)[0]:
        raise RuntimeError(rank.prefix + error)


def _open(current: runtime.Runtime, path: str | Path, max_events: int) -> Path:
    """Starts recording if no rank has an error; returns the path where rank 0 will write."""
    stem = _stem(path)
    error: tuple[type[Exception], str] | None = None
    if current.timeline.is_on:
        error = RuntimeError, "smp.trace was called inside of another smp.trace; end that one first"
    elif not current.wrapped.models:
        error = RuntimeError, "smp.trace needs a model; wrap it in smp.DistributedModel first"
    elif max_events < 1:
        error = ValueError, f"smp.trace: max_events is {max_events}; expected 1 or more"
    elif current.rank.global_rank == 0 and (complaint := _why_not_writable(stem)):
        error = ValueError, complaint
    if error is None:  # before the other ranks begin: what they send has to be recorded
        current.timeline.start(max_events)
    for rank, other in enumerate(comm.allgather(error, comm.WORLD)):
        if other is not None:
            if error is None:
                current.timeline.stop()
            kind, text = other
            raise kind(current.rank.prefix + text + (f" (on rank {rank})" if error is None else ""))
    return stem


def _stem(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        return path / "trace"
    return path.with_suffix("") if path.suffix in (".json", ".html") else path


def _file(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)


def _why_not_writable(stem: Path) -> str:
    if not stem.parent.is_dir():
        return f"smp.trace cannot write '{stem}.html': the folder '{stem.parent}' does not exist"
    for ending in (".json", ".html"):
        file = _file(stem, ending)
        existed = file.exists()
        try:
            with file.open("a"):
                pass
        except OSError as failure:
            return f"smp.trace cannot write '{file}': {failure.strerror}"
        if not existed:
            file.unlink()
    return ""
