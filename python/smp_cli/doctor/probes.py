"""The list of probes, and how one is run in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
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
    measures: bool = False
    """Others would disturb it."""

    def load(self) -> Callable[[], Section]:
        """The function."""
        module, _, function = self.function.partition(":")
        loaded: Callable[[], Section] = getattr(importlib.import_module(module), function)
        return loaded


PROBES: tuple[Probe, ...] = (
    Probe("system", "smp_cli.doctor.host:system", 10),
    Probe("limits", "smp_cli.doctor.host:limits", 10),
    Probe("shared memory", "smp_cli.doctor.host:shared_memory", 10),
    Probe("files", "smp_cli.doctor.host:temporary_files", 20, True),
    Probe("tools", "smp_cli.doctor.software:tools", 30),
    Probe("packages", "smp_cli.doctor.software:packages", 120),
    Probe("build", "smp_cli.doctor.software:build", 120),
    Probe("devices", "smp_cli.doctor.devices:devices", 120, True),
    Probe("transport shared memory", "smp_cli.doctor.transports:shared_memory", 120, True),
    Probe("transport tcp", "smp_cli.doctor.transports:tcp", 120, True),
    Probe("lanes between devices", "smp_cli.doctor.transports:lanes", 120, True),
    Probe("transport nccl", "smp_cli.doctor.transports:nccl", 120, True),
)


def python_path(env: Mapping[str, str]) -> str:
    """``PYTHONPATH`` with which another process finds the packages of this one."""
    return os.pathsep.join([_PACKAGES, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def run_probe(probe: Probe, limit_s: float) -> Section:
    """What a probe found; a section with a problem if it crashed or took too long."""
    reader, writer = os.pipe()
    env = dict(os.environ)
    env["PYTHONPATH"] = python_path(env)
    process = subprocess.Popen(
        [sys.executable, "-m", "smp_cli.doctor", probe.function, str(writer)],
        pass_fds=(writer,),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(writer)
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Section(
            probe.name, {}, [f"no answer within {limit_s:g} s; whatever it looks at hangs"]
        )
    finally:
        _end(process)
        with open(reader, encoding="utf-8") as pipe:
            os.set_blocking(reader, False)
            answer = pipe.read() or ""
    try:
        return Section.from_json(probe.name, json.loads(answer))
    except ValueError:
        text = printed.decode(errors="replace").strip()[-_MAX_TEXT:]
        status = process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return Section(probe.name, {}, [f"the probe {how}: {text}"])


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass  # in the kernel, for instance in a dead file system; it ends with its call
