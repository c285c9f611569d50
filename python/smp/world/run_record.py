"""Records a job for orchestrators: its manifest, and events of its life (docs/orchestrators.md).

Rank 0 writes, or the rank that has taken its place. Nothing is written in a step after the first.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import smp._C as _C
from smp import _event_lines, _version
from smp.world import events, failure
from smp.world.failure import Culprit
from smp.world.launch import Launch, restart_count
from smp.world.processes import process_space
from smp.world.rendezvous import Hello
from smp.world.settings import Settings, device_of

if TYPE_CHECKING:
    from smp.world.runtime import Runtime

_log = logging.getLogger("smp")
_MAX_CHARACTERS = 400  # characters of a text in an event
#: Kinds of failures after which a rank writes nothing itself.
_SILENT = ("died", "unreachable", "stuck")


def versions() -> dict[str, str]:
    """Returns the versions of smp, torch and Python, for users."""
    return {
        "smp": _version.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def check_files(settings: Settings, global_rank: int) -> None:
    """Checks on the first rank that the event file and the manifest can be written.

    Raises:
        ValueError: names the variable, the path and the reason.
    """
    if global_rank:
        return
    for variable, path, target in (
        (_event_lines.PATH_VARIABLE, settings.events, settings.events),
        (_event_lines.MANIFEST_VARIABLE, settings.manifest, _draft_of(settings.manifest)),
    ):
        if target is None:
            continue
        try:
            os.close(_event_lines.open_file(target))
            if target != path:
                os.unlink(target)
        except OSError as error:
            raise ValueError(
                f"smp: {variable}={path!r} cannot be written on this host: {error.strerror}; name "
                "a file in a folder that exists"
            ) from None


def hello_of(launch: Launch, device_type: str, num_devices: int) -> Hello:
    """Returns the hello of this process, without what ranks have to agree on.

    On the first rank it has the name of the job: that of the environment, or a random one.
    """
    run = os.environ.get(_event_lines.RUN_VARIABLE) or secrets.token_hex(8)
    return Hello(
        launch.world_size,
        launch.hostname,
        launch.hostname,
        device_type,
        num_devices,
        None,
        pid=os.getpid(),
        process_space=process_space(),
        run="" if launch.global_rank else run,
    )


class RunRecord:
    """Writes the manifest and the events of one `smp.init`, if the environment names files.

    Args:
        current: the runtime, which makes this before anything that is recorded.

    Attributes:
        has_events: whether there is an event file.
        is_wanted: whether there is one, or a manifest.
    """

    def __init__(self, current: Runtime) -> None:
        self._current, settings = current, current.rank.settings
        self._events, self._manifest = settings.events, settings.manifest
        self.has_events = self._events is not None
        self.is_wanted = self.has_events or self._manifest is not None
        self._run, self._began_s = "", time.time()
        self._attempt = int(restart_count(os.environ))
        self._hellos: Sequence[Hello] = ()
        self._partitions: dict[int, dict[str, str]] = {}
        self._layout: dict[str, Any] = {}
        self._end = events.Ended("finished")
        if self.has_events:
            current.on_shutdown(self._ended)  # the first callback is the last that runs

    @property
    def _is_writer(self) -> bool:
        return self._current.rank.global_rank == 0 and self._current.rank.is_own_process

    # ---- what has happened -----------------------------------------------------

    def started(self, hellos: Sequence[Hello]) -> None:
        """Records that all ranks are connected.

        Args:
            hellos: hello of each rank, index = global rank.
        """
        self._hellos, self._run = hellos, hellos[0].run
        self._layout = self._layout_now()
        if not self._is_writer:
            return
        self._write_manifest()
        manifest = None if self._manifest is None else os.path.abspath(self._manifest)
        self._append(events.Started(len(hellos), self._layout, manifest))

    def partitioned(self, model: int, places: Mapping[str, str]) -> None:
        """Records where the modules of a model are.

        Args:
            model: number of the model.
            places: pipeline rank, and chunk, of each module that is whole there.
        """
        self._partitions[model] = dict(places)
        if not self._is_writer or self._current.has_taken_place:
            return  # a process that takes a place finds the partition decided
        self._write_manifest()
        self._append(events.Partitioned(model))

    def saved(
        self,
        path: Path,
        tag: str,
        step: int,
        num_bytes: int,
        seconds: float,
        store: object = None,
    ) -> None:
        """Records a checkpoint that is complete in a folder. Any thread.

        Args:
            path: folder of the checkpoint, or its file.
            tag: tag of the checkpoint.
            step: number of calls of step functions before it.
            num_bytes: size of all its files in bytes.
            seconds: time since the call that saves.
            store: address that gets it as well, or None.
        """
        address = None if store is None else str(store)
        self.write(
            events.Checkpoint(
                os.path.abspath(path), tag, step, num_bytes, round(seconds, 3), address
            )
        )

    def stored(self, store: object, name: str, seconds: float) -> None:
        """Records a checkpoint that is complete in a store. Any thread of the first rank."""
        self.write(events.Stored(str(store), name, round(seconds, 3)))

    def failed(self, culprit: Culprit, error: BaseException, *, ends: bool) -> None:
        """Records a failure, on the first rank, or on the second if the first cannot.

        Args:
            culprit: rank that has failed.
            error: error of this rank.
            ends: whether this process ends with it.
        """
        lines = failure.message_of(error)
        words = (culprit.words, lines[0].replace(_C.rank_prefix(), "", 1))
        text = ": ".join(words[culprit.is_other :])[:_MAX_CHARACTERS]
        rank, launched = self._current.rank, self._current.launched
        number = None if culprit.rank is None else launched[culprit.rank]
        if ends:
            self._end = events.Ended("failed", rank=number, text=text)
        stands_in = rank.is_own_process and rank.global_rank == 1
        stands_in = stands_in and culprit.rank == 0 and culprit.kind in _SILENT
        if self._is_writer or stands_in:
            self._append(events.Failed(number, culprit.kind, culprit.where, text))
        if ends and stands_in:
            self._append_end()

    def preempted(self, exit_status: int) -> None:
        """Records that this process saves and ends, to be started again."""
        self._end = events.Ended("preempted", exit_status)

    def resized(
        self,
        lost: Sequence[int],
        newcomers: Sequence[int],
        seconds: Mapping[str, float],
        reason: str,
    ) -> None:
        """Records that the other ranks go on. The first that has not just come writes.

        Args:
            lost, newcomers: numbers that the launcher gave to the ranks and processes.
            seconds: parts of the time that the ranks have lost.
            reason: the failure, in words.
        """
        before, self._layout = self._layout, self._layout_now()
        current = self._current
        if not (current.is_first_of_old(newcomers) and current.rank.is_own_process):
            return
        self._write_manifest()
        parts = {name: round(value, 4) for name, value in seconds.items()}
        ranks = list(current.launched)
        self._append(events.Resized(list(lost), ranks, before, self._layout, parts, reason))

    def met(self, hellos: Sequence[Hello]) -> None:
        """Takes the hellos of the ranks that go on, also in a process that has just come."""
        self._hellos = hellos
        self._run = hellos[0].run
        self._layout = self._layout or self._layout_now()

    def _ended(self) -> None:
        if self._is_writer and self._run:
            self._append_end()

    def _append_end(self) -> None:
        if failure.FAILURE_VARIABLE not in os.environ:  # otherwise the launcher writes it
            self._append(self._end)

    # ---- files -----------------------------------------------------------------

    def write(self, event: events.Event) -> None:
        """Writes an event on the first rank; the others return at once."""
        if self._is_writer:
            self._append(event)

    def _append(self, event: events.Event) -> None:
        if self._events is None or not self._run:
            return
        values = asdict(event)
        try:
            _event_lines.append(self._events, event.NAME, self._run, self._attempt, values)
        except OSError as error:  # training is worth more than its record
            self._warn(_event_lines.PATH_VARIABLE, self._events, error)

    def _write_manifest(self) -> None:
        if self._manifest is None:
            return
        draft = _draft_of(self._manifest)
        assert draft is not None
        try:
            Path(draft).write_text(json.dumps(self._content(), indent=1) + "\n")
            os.replace(draft, self._manifest)
        except OSError as error:
            self._warn(_event_lines.MANIFEST_VARIABLE, self._manifest, error)

    def _warn(self, variable: str, path: str, error: OSError) -> None:
        _log.warning(
            "%s%s=%r was not written: %s", _C.rank_prefix(), variable, path, error.strerror
        )

    def _content(self) -> dict[str, Any]:
        rank = self._current.rank
        return {
            "v": _event_lines.VERSION,
            "run": self._run,
            "attempt": self._attempt,
            "time": self._began_s,
            "command": sys.orig_argv,
            "folder": os.getcwd(),
            "versions": versions(),
            "config": rank.config.to_dict(),
            "layout": self._layout,
            "ranks": self._ranks(),
            "partitions": [
                {"model": model, "modules": modules}
                for model, modules in sorted(self._partitions.items())
            ],
        }

    def _layout_now(self) -> dict[str, Any]:
        rank = self._current.rank
        axes = {axis: rank.sizes[axis] for axis in ("pp", "tp", "cp", "rdp", "dp")}
        return {**axes, "placement": rank.grid.placement}

    def _ranks(self) -> list[dict[str, Any]]:
        hosts = [hello.host for hello in self._hellos]
        result = []
        for number, hello in enumerate(self._hellos):
            local = hosts[:number].count(hello.host)
            at = self._current.rank.grid.coordinates(number)
            result.append(
                {
                    "rank": self._current.launched[number],
                    "host": hello.host,
                    "pid": hello.pid,
                    "device": str(device_of(hello.device, local, hello.num_devices)),
                    **{axis: getattr(at, axis) for axis in ("pp", "tp", "cp", "rdp")},
                }
            )
        return result


def _draft_of(manifest: str | None) -> str | None:
    return None if manifest is None else f"{manifest}.{os.getpid()}.draft"
