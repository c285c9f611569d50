"""Figures of a part: one JSON line each, written at once, so that nothing is lost when it ends."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.processes import TimedOut

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("transformers", "triton", "pytest", "hypothesis")


def versions() -> dict[str, str]:
    """Returns the versions of the software on which figures depend."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.cuda)
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str:
    """Returns the checkout's commit, or the variable COMMIT where it is set."""
    if said := os.environ.get("COMMIT"):
        return said
    with contextlib.suppress(FileNotFoundError):
        head, changes = (
            subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True)
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
        if head.returncode == 0:
            return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
    return "unknown"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; a line that was cut off when its process was killed is none."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


class Limit:
    """Bounds that a figure must or should keep.

    Args:
        most, least: bounds of the value.
    """

    def __init__(self, most: float | None = None, least: float | None = None) -> None:
        self.most, self.least = most, least

    def holds(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )

    def __str__(self) -> str:
        words = [] if self.least is None else [f">= {self.least:g}"]
        return " and ".join(words + ([] if self.most is None else [f"<= {self.most:g}"]))


class Figures:
    """Writes the lines of one part.

    A line has ``part``, ``name``, ``value`` (or None), ``unit``, ``state``, ``bound`` (what must
    hold, else the part fails), ``expected`` (what is aimed at), ``note``, ``detail``, ``device``,
    ``is_dry``, ``versions``, ``commit``, ``time``.

    States: "ok"; "missed", not what is expected, or not over in time; "skipped", with the reason;
    "failed". A dry run expects nothing.

    Args:
        part: name of the part.
        folder: gets ``<part>.jsonl``.
        device: device that is measured.
        limit_s: after which the part has to be over.
        is_new: empties the file first.
    """

    def __init__(
        self, part: str, folder: Path, device: Device, limit_s: float, is_new: bool = True
    ) -> None:
        self.part, self.device, self.num_failed = part, device, 0
        self._end = time.monotonic() + limit_s
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{part}.jsonl"
        if is_new:
            self.path.write_text("")
        self._common: dict[str, Any] = {
            "device": device.name,
            "is_dry": device.is_dry,
            "versions": versions(),
            "commit": commit(),
        }

    def name_device(self, name: str) -> None:
        """Sets the device's name in further lines."""
        self._common["device"] = name

    def failed(self) -> list[str]:
        """Returns the names of the part's lines that failed, also of those by other processes."""
        return [line["name"] for line in lines_of(self.path) if line["state"] == "failed"]

    def left_s(self) -> float:
        """Seconds until the part has to be over."""
        return self._end - time.monotonic()

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        bound: Limit | None = None,
        expected: Limit | None = None,
        note: str = "",
        **detail: Any,
    ) -> None:
        """Writes one figure."""
        state = "ok"
        if bound is not None and not bound.holds(value):
            state = "failed"
        elif expected is not None and not self.device.is_dry and not expected.holds(value):
            state = "missed"
        limits = {"bound": str(bound or ""), "expected": str(expected or "")}
        self._write(name, value, unit, state, note, limits, detail)

    def skip(self, name: str, reason: str) -> None:
        """A figure that there is not, and why."""
        self._write(name, None, "", "skipped", reason, {}, {})

    def miss(self, name: str, reason: str) -> None:
        """A figure that there should be, and why there is none."""
        self._write(name, None, "", "missed", reason, {}, {})

    def fail(self, name: str, reason: str) -> None:
        """Something that does not work. The part goes on, and ends with an error."""
        self._write(name, None, "", "failed", reason, {}, {})

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Makes a line of an error inside; its traceback goes to the log, and the part goes on.

        `TimedOut` says nothing about what was to be measured: the figure is missed.
        """
        try:
            yield
        except TimedOut as error:
            self.miss(name, str(error))
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip() or "no message"
            self.fail(name, f"{type(error).__name__}: {text.splitlines()[0][:300]}")

    def has_time(self, name: str, needed_s: float) -> bool:
        """Returns whether so many seconds are left; if not, records that the figure was skipped."""
        if self.left_s() >= needed_s:
            return True
        self.skip(name, f"{self.left_s():.0f} s were left, it takes about {needed_s:.0f} s")
        return False

    def _write(
        self,
        name: str,
        value: float | None,
        unit: str,
        state: str,
        note: str,
        limits: dict[str, str],
        detail: dict[str, Any],
    ) -> None:
        self.num_failed += state == "failed"
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        line = {
            "part": self.part,
            "name": name,
            "value": value,
            "unit": unit,
            "state": state,
            "bound": "",
            "expected": "",
            **limits,
            "note": note,
            "detail": detail,
            **self._common,
            "time": now,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = "" if value is None else f"{value:.5g} {unit} "
        limit = limits.get("bound") or limits.get("expected") or ""
        print(f"{state:8}{name}: {shown}{f'({limit}) ' if limit else ''}{note}", flush=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that all parts have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, default=REPO / "build" / "gpu")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--limit-s", type=float, default=530.0)
    return made


def note_end(part: str, folder: Path, device: Device, status: int) -> None:
    """Says in the lines of a part how it ended, if it did not get to say so itself."""
    if status in (0, 1):
        return
    words = {124: "ended by its limit", 137: "killed, by its limit or for its memory"}
    figures = Figures(part, folder, device, 0.0, is_new=False)
    figures.fail("end", words.get(status, f"ended with status {status}"))
