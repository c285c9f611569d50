"""Runs a script in one process and in other layouts, and judges each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from smp.commands.verify.compare import (
    BY_SIZE,
    EQUAL,
    EXACT,
    FAILED,
    HALF,
    NEAR,
    RANDOM,
    ROUGH,
    ROUNDING,
    Comparison,
    Verdict,
    compare,
)
from smp.commands.verify.jobs import Script, ScriptFailed
from smp.commands.verify.layouts import ALONE, Layout
from smp.commands.verify.records import JobRecords, same_inputs


@dataclass
class Check:
    """The check of one script.

    Args:
        script: the script.
        say: function that is called with lines about the progress.
    """

    script: Script
    say: Callable[[str], None]
    _plain: JobRecords | None = field(default=None, init=False)

    def begin(self) -> JobRecords:
        """Runs the script in one process.

        Raises:
            ScriptFailed: the script fails in one process.
        """
        self.say("one process")
        self._plain = self.script.run("one", ALONE)
        return self._plain

    def layout(self, layout: Layout) -> Verdict:
        """Runs a layout and compares it."""
        self.say(f"{layout.name}: {layout.num_processes} processes")
        try:
            real = self.script.run(layout.name, layout)
        except ScriptFailed as failed:
            return Verdict(layout.name, FAILED, f"the script fails in this layout: {failed}")
        try:
            one = self._one(layout.name, real)
        except ScriptFailed as failed:
            text = f"one process cannot compute with the inputs of this layout: {failed}"
            return Verdict(layout.name, FAILED, text, notes=tuple(real.all("notes")))
        return self._judge(layout, real, one)

    def _one(self, name: str, real: JobRecords) -> JobRecords:
        if self._plain is not None and same_inputs(self._plain, real):
            return self._plain
        self.say(f"{name}: one process with the inputs of {real.num_batches} data-parallel ranks")
        return self.script.run(f"{name}-one", ALONE, replay=real)

    def _judge(self, layout: Layout, real: JobRecords, one: JobRecords) -> Verdict:
        is_exact = real.half is not None or real.all("dtypes") == [str(torch.float64)]
        found = compare(real, one, EXACT if is_exact else NEAR)
        result = Verdict(layout.name, EQUAL, largest=found.largest, notes=_notes(found))
        if not found.differences:
            return result
        draws = one.all("draws")
        if draws and found.may_be_random():
            return replace(
                result,
                answer=RANDOM,
                text=f"the model drops out at random, or draws in another way: '{draws[0]}'",
                module=draws[0],
                hints=(
                    "layouts draw other random numbers by design, so nothing can be compared: run "
                    "it with dropout 0 (in most configurations keys with 'drop' in their name), or "
                    "with layout_independent_dropout in the configuration of smp.init",
                ),
            )
        if is_exact and real.half is None:
            return found.described(result, EXACT.limit)
        try:
            again = self._half(layout, found) if real.half else self._in_float64(layout)
        except ScriptFailed as failed:
            return _by_size(result, found, f"it does not run in float64 ({failed})")
        result = replace(result, exact=again.largest)
        if not again.differences:
            return replace(result, answer=ROUNDING)
        return again.described(result, ROUGH if real.half else EXACT.limit)

    def _in_float64(self, layout: Layout) -> Comparison:
        """Runs layout and reference in float64, which decides."""
        self.say(f"{layout.name}: again in float64")
        name = f"{layout.name}-float64"
        exact = self.script.run(name, layout, is_exact=True)
        one = self.script.run(f"{name}-one", ALONE, replay=exact, is_exact=True)
        return compare(exact, one, EXACT)

    def _half(self, layout: Layout, found: Comparison) -> Comparison:
        """Compares both with the reference in float64, which shows the error of 16 bits."""
        self.say(f"{layout.name}: one process in float64, for the error of 16 bits")
        name = f"{layout.name}-exact"
        truth = self.script.run(name, ALONE, replay=found.real, is_exact=True)
        return compare(found.real, truth, HALF, third=found.one)


def _by_size(result: Verdict, found: Comparison, reason: str) -> Verdict:
    """Judges by the size of differences alone, where nothing runs in float64."""
    if found.real.half is not None:
        result = result.noted(f"{reason}, so the error of 16 bits is not known")
        return found.described(result, ROUGH)
    result = result.noted(f"{reason}; judged by size alone")
    if all(difference.share <= BY_SIZE for difference in found.differences):
        return replace(result, answer=ROUNDING)
    return found.described(result, NEAR.limit)


def _notes(found: Comparison) -> tuple[str, ...]:
    real, one = found.real, found.one
    notes = list(dict.fromkeys([*real.all("notes"), *one.all("notes")]))
    taken = one.all("taken")
    if taken:
        more = f", and {len(taken) - 1} more" if len(taken) > 1 else ""
        notes.append(
            "data that are no arguments of the step function (a closure, a global or an iterator "
            f"brings them) are others here than in one process, which was given those of this "
            f"layout ({taken[0]}{more}); what makes them is not compared"
        )
    if found.unknown:
        notes.append(
            f"{len(found.unknown)} quantities have other names in this layout and are not compared "
            f"('{found.unknown[0]}' for one)"
        )
    if found.has_buffers:
        notes.append("buffers that the forward writes are each replica's own, and not compared")
    if real.num_updates != one.num_updates:
        notes.append(
            f"{real.num_updates} updates here and {one.num_updates} in one process; as many "
            "as both have are compared"
        )
    return tuple(notes)
