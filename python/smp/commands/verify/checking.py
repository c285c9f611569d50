"""Runs a script in one process and in other layouts, and judges each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from smp.commands.verify import verdict as judging
from smp.commands.verify.compare import EXACT, NEAR, Comparison, compare
from smp.commands.verify.jobs import Script, ScriptFailed, same_inputs
from smp.commands.verify.layouts import ALONE, Layout
from smp.commands.verify.records import Records
from smp.commands.verify.verdict import Verdict

#: Without results in float64, a smaller difference in float32 counts as rounding.
_BY_SIZE = 1e-3


@dataclass
class Check:
    """The check of one script.

    Args:
        script: the script.
        say: function that is called with lines about the progress.
    """

    script: Script
    say: Callable[[str], None]
    _plain: Records | None = field(default=None, init=False)

    def begin(self) -> Records:
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
            return Verdict(
                layout.name, judging.FAILED, f"the script fails in this layout: {failed}"
            )
        try:
            one = self._one(layout.name, real)
        except ScriptFailed as failed:
            text = f"one process cannot compute with the inputs of this layout: {failed}"
            return Verdict(layout.name, judging.FAILED, text, notes=tuple(real.notes))
        return self._judge(layout, real, one)

    def _one(self, name: str, real: Records) -> Records:
        if self._plain is not None and same_inputs(self._plain, real):
            return self._plain
        self.say(f"{name}: one process with the inputs of {real.num_batches} data-parallel ranks")
        return self.script.run(f"{name}-one", ALONE, replay=real)

    def _judge(self, layout: Layout, real: Records, one: Records) -> Verdict:
        near = EXACT if real.half else NEAR[max(real.dtypes & NEAR.keys(), default="torch.float32")]
        found = compare(real, one, near)
        notes = _notes(real, one, found)
        result = Verdict(layout.name, judging.EQUAL, largest=found.largest, notes=notes)
        if not judging.counted(found, real.num_batches):
            return result
        if one.draws and not _before(found):
            return replace(
                result,
                answer=judging.RANDOM,
                text=f"the model drops out at random, or draws in another way: '{one.draws[0]}'",
                module=one.draws[0],
                hints=(
                    "layouts draw other random numbers by design, so nothing can be compared: run "
                    "it with dropout 0 (in most configurations keys with 'drop' in their name), or "
                    "with layout_independent_dropout in the configuration of smp.init",
                ),
            )
        if real.half:
            return self._by_ratio(layout, real, one, found, result)
        if near == EXACT:
            return _differing(result, found, real, one)
        return self._in_float64(layout, real, one, found, result)

    def _in_float64(
        self, layout: Layout, real: Records, one: Records, found: Comparison, result: Verdict
    ) -> Verdict:
        try:
            self.say(f"{layout.name}: again in float64")
            exact = self.script.run(f"{layout.name}-float64", layout, is_exact=True)
            name = f"{layout.name}-float64-one"
            exact_one = self.script.run(name, ALONE, replay=exact, is_exact=True)
        except ScriptFailed as failed:
            note = f"it does not run in float64 ({failed}); judged by size alone"
            result = replace(result, notes=(*result.notes, note))
            shares = [d.share for d in judging.counted(found, real.num_batches)]
            if max(shares) <= _BY_SIZE:
                return replace(result, answer=judging.ROUNDING)
            return _differing(result, found, real, one)
        again = compare(exact, exact_one, EXACT)
        result = replace(result, exact=again.largest)
        if not judging.counted(again, exact.num_batches):
            return replace(result, answer=judging.ROUNDING)
        return _differing(result, again, exact, exact_one)

    def _by_ratio(
        self, layout: Layout, real: Records, one: Records, found: Comparison, result: Verdict
    ) -> Verdict:
        try:
            self.say(f"{layout.name}: one process in float64, for the error of 16 bits")
            truth = self.script.run(f"{layout.name}-exact", ALONE, replay=real, is_exact=True)
        except ScriptFailed as failed:
            note = f"it does not run in float64 ({failed}), so the error of 16 bits is not known"
            result = replace(result, notes=(*result.notes, note))
            return _differing(result, found, real, one)
        again = compare(real, one, EXACT, truth)
        result = replace(result, exact=again.largest)
        if not judging.counted(again, real.num_batches):
            return replace(result, answer=judging.ROUNDING)
        # The first module is found by comparing results with one process in 16 bits.
        rough = compare(real, one, 3e-2)
        again.module = rough.module
        return _differing(result, again, real, one)


def _before(found: Comparison) -> bool:
    """Returns whether there are differences that random numbers of a step cannot explain."""
    return any(d.kind in ("value", "setting") for d in found.differences)


def _differing(result: Verdict, found: Comparison, real: Records, one: Records) -> Verdict:
    text, module, step, hints = judging.describe(result.layout, found, real, one)
    return replace(result, answer=judging.DIFFERS, text=text, module=module, step=step, hints=hints)


def _notes(real: Records, one: Records, found: Comparison) -> tuple[str, ...]:
    notes = list(dict.fromkeys([*real.notes, *one.notes]))
    if one.taken:
        more = f", and {len(one.taken) - 1} more" if len(one.taken) > 1 else ""
        notes.append(
            "data that are no arguments of the step function (a closure, a global or an iterator "
            f"brings them) are others here than in one process, which was given those of this "
            f"layout ({one.taken[0]}{more}); what makes them is not compared"
        )
    if found.unknown:
        notes.append(
            f"{len(found.unknown)} quantities have other names in this layout and are not compared "
            f"('{found.unknown[0]}' for one)"
        )
    if real.num_batches > 1 and any(d.kind == "buffer" for d in found.differences):
        notes.append("buffers that the forward writes are each replica's own, and not compared")
    if real.num_updates != one.num_updates:
        notes.append(
            f"{real.num_updates} updates here and {one.num_updates} in one process; as many "
            "as both have are compared"
        )
    return tuple(notes)
