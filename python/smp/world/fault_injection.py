"""`SMP_FAULT`: makes a rank of the user's script misbehave, to show how a job reacts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from smp.world.launch import restart_count

VARIABLE = "SMP_FAULT"
_KINDS = ("kill", "raise", "hang", "exit", "slow", "term")
_NUMBERS = ("rank", "step", "microbatch", "code", "attempt")


class InjectedError(RuntimeError):
    """The exception that ``SMP_FAULT=...,kind=raise`` raises."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault at the beginning of a call of a step function or of one of its microbatches."""

    rank: int
    step: int
    """Number of the call of a step function, from 0; a job that resumes continues to count."""
    kind: str
    microbatch: int | None = None
    """Microbatch in which to misbehave; None: before the step begins."""
    seconds: float = 10.0
    """Duration of ``slow``."""
    code: int = 3
    """Exit status of ``exit``."""

    def strike(self, rank: int, step: int, microbatch: int | None = None) -> None:
        """Misbehaves if this is the rank, the step and the microbatch."""
        if (rank, step, microbatch) != (self.rank, self.step, self.microbatch):
            return
        print(f"smp: {VARIABLE} strikes: {self.kind}", file=sys.stderr, flush=True)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "exit":
            sys.exit(self.code)
        elif self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind == "raise":
            raise InjectedError(f"{VARIABLE} asked rank {rank} to raise in step {step}")
        while self.kind == "hang":
            time.sleep(1.0)


def read_fault(env: Mapping[str, str]) -> InjectedFault | None:
    """Returns the fault of `SMP_FAULT`, for instance ``rank=1,step=3,kind=kill``.

    Further keys: ``microbatch``, ``seconds`` (of slow), ``code`` (of exit) and ``attempt``. The
    fault strikes only in this attempt of the job (0, the first, by default), so that a restarted
    job gets further.

    Raises:
        ValueError: the text is malformed.
    """
    text = env.get(VARIABLE, "").strip()
    if not text:
        return None
    values: dict[str, str] = {}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        values[key] = value
    kind = values.pop("kind", "")
    seconds = values.pop("seconds", "10")
    unknown = sorted(set(values) - set(_NUMBERS))
    wrong = [f"{key}={value}" for key, value in values.items() if not value.isdecimal()]
    if unknown or wrong or kind not in _KINDS or not {"rank", "step"} <= values.keys():
        raise ValueError(
            f"smp: {VARIABLE}={text!r} is not understood; write rank=R,step=S,kind=K with K of "
            f"{', '.join(_KINDS)}, and optionally microbatch=M, seconds=S, code=C, attempt=A"
        )
    try:
        numbers = {key: int(value) for key, value in values.items()}
        attempt = numbers.pop("attempt", 0)
        fault = InjectedFault(kind=kind, seconds=float(seconds), **numbers)
    except ValueError:
        raise ValueError(f"smp: {VARIABLE}={text!r}: seconds is not a number; correct it") from None
    return fault if str(attempt) == restart_count(env) else None
