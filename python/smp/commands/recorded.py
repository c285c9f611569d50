"""A recorded run beside the partition that a command explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smp.commands.decided import Decided
from smp.commands.ending import BadUse
from smp.commands.report import Table
from smp.config import given_files
from smp.observe.timeline import recorded as recordings
from smp.observe.timeline.recorded import Recorded
from smp.planning.reasons import compute_shares
from smp.planning.recorded_costs import with_recorded

_COLUMNS = ("pp_rank", "forward", "backward", "recorded", "estimated", "bubble")


@dataclass(frozen=True)
class Comparison:
    """Work of pipeline ranks, as recorded and as estimated.

    Attributes:
        path: of the trace.
        recorded: what is in it.
        estimated: shares of all work, by pipeline rank.
    """

    path: Path
    recorded: Recorded
    estimated: Sequence[float]

    @property
    def shares(self) -> list[float]:
        """Recorded shares of all work, by pipeline rank."""
        found = self.recorded
        pairs = zip(found.forward_ms, found.backward_ms, strict=True)
        return [(forward + backward) / found.total_ms for forward, backward in pairs]

    @property
    def title(self) -> str:
        """What was recorded, in words."""
        found = self.recorded
        return (
            f"Recorded in {self.path}: {found.num_steps} steps of {found.microbatches} "
            f"microbatches; all work of one takes {found.total_ms:.4g} ms"
        )

    @property
    def table(self) -> Table:
        """Recorded and estimated work of each rank."""
        found = self.recorded
        rows = [
            [
                str(rank),
                f"{found.forward_ms[rank]:.4g} ms",
                f"{found.backward_ms[rank]:.4g} ms",
                f"{100 * own:.1f} %",
                f"{100 * expected:.1f} %",
                f"{100 * found.bubbles[rank]:.1f} %",
            ]
            for rank, (own, expected) in enumerate(zip(self.shares, self.estimated, strict=True))
        ]
        return Table(_COLUMNS, rows, text_columns=0)

    @property
    def facts(self) -> dict[str, Any]:
        """For programs: milliseconds of one microbatch, shares."""
        found = self.recorded
        return {
            "file": str(self.path),
            "steps": found.num_steps,
            "microbatches": found.microbatches,
            "ranks": [
                {
                    "pp_rank": rank,
                    "forward_ms": found.forward_ms[rank],
                    "backward_ms": found.backward_ms[rank],
                    "compute_share": own,
                    "estimated_share": expected,
                    "bubble": found.bubbles[rank],
                }
                for rank, (own, expected) in enumerate(
                    zip(self.shares, self.estimated, strict=True)
                )
            ],
        }


def compare(path: Path, decided: Decided) -> tuple[Comparison, Decided]:
    """Reads a file of ``smp.trace``; also the partition with its times instead of FLOPs.

    Raises:
        BadUse: it cannot be read, or is of another configuration.
    """
    decision, config = decided.decision, decided.config
    try:
        found = recordings.read(given_files.read_text(path))
        if found.microbatches != config.microbatches:
            raise ValueError(
                f"has {found.microbatches} microbatches; expected the {config.microbatches} of the "
                "configuration"
            )
        changed = with_recorded(
            decision, decided.costs, config, found.forward_ms, found.backward_ms
        )
    except OSError as error:
        raise BadUse(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise BadUse(f"--trace {path}: {error}") from None
    comparison = Comparison(path, found, compute_shares(decision, config))
    return comparison, replace(decided, decision=changed)
