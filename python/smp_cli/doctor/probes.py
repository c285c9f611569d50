"""Lists the probes, and runs each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smp_cli.doctor.report import Section

_MAX_TEXT = 400
_PACKAGES = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Probe:
    """A function without arguments that returns a `Section`, as ``module:function``."""

    name: str
    function: str
    limit_s: float

    def load(self) -> Callable[[], Section]:
        """Imports the function."""
        module, _, function = self.function.partition(":")
        loaded: Callable[[], Section] = getattr(importlib.import_module(module), function)
        return loaded


PROBES: tuple[Probe, ...] = (
    Probe("system", "smp_cli.doctor.host:system", 10),
    Probe("limits", "smp_cli.doctor.host:limits", 10),
    Probe("shared memory", "smp_cli.doctor.host:shared_memory", 10),
    Probe("files", "smp_cli.doctor.host:temporary_files", 20),
    Probe("packages", "smp_cli.doctor.versions:packages", 120),
    Probe("build", "smp_cli.doctor.versions:build", 120),
    Probe("devices", "smp_cli.doctor.devices:devices", 120),
    Probe("ranks over shared memory", "smp_cli.doctor.ranks:over_shared_memory", 120),
    Probe("ranks over tcp", "smp_cli.doctor.ranks:over_tcp", 120),
    Probe("ranks on devices", "smp_cli.doctor.ranks:on_devices", 120),
)


def python_path(env: Mapping[str, str]) -> str:
    """Returns a ``PYTHONPATH`` with which another process finds the packages of this one."""
    return os.pathsep.join([_PACKAGES, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def run_probe(probe: Probe, limit_s: float) -> Section:
    """Runs a probe in a process; a crash and a process that takes too long are problems."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "smp_cli.doctor", probe.function, str(writer)],
        pass_fds=(writer,),
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(writer)
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Section(probe.name, {}, [f"no answer within {limit_s:g} s; the probe hangs"])
    finally:
        _end(process)
        with open(reader, encoding="utf-8") as pipe:
            os.set_blocking(reader, False)
            answer = pipe.read() or ""
    try:
        return Section(probe.name, **json.loads(answer))
    except ValueError:
        text = printed.decode(errors="replace").strip()[-_MAX_TEXT:]
        status = process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return Section(probe.name, {}, [f"the probe {how}: {text}"])


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    # A process inside a call of the kernel, for instance into a dead file system, ends later.
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
