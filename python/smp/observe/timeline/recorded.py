"""What a file of ``smp.trace`` says about the work of each pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from smp.config import given_files
from smp.observe.timeline.chrome import CATEGORIES, DEVICE, EXECUTED


@dataclass(frozen=True)
class Recorded:
    """Means over the replicas and steps of a trace.

    Attributes:
        num_steps: that were recorded.
        microbatches: of each.
        forward_ms, backward_ms: of one microbatch, by pipeline rank; of the device where its rows
            are there. Gradients of weights are backward.
        bubbles: share of the steps in which a rank ran nothing, by pipeline rank.
    """

    num_steps: int
    microbatches: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    bubbles: tuple[float, ...]

    @property
    def total_ms(self) -> float:
        """Of one microbatch on all pipeline ranks."""
        return sum(self.forward_ms) + sum(self.backward_ms)


def read(text: str) -> Recorded:
    """Reads the JSON file that ``smp.trace`` writes.

    Raises:
        ValueError: the text is no such file, or nothing ran in the steps of it.
    """
    try:
        document = given_files.parse_json(text)
        other = document["otherData"]
        pp_rank = {int(rank): int(place) for rank, place in other["pp_rank"].items()}
        bubble = {int(rank): float(share) for rank, share in other["bubble"].items()}
        boxes = _boxes(document["traceEvents"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"is no JSON file of smp.trace ({type(error).__name__}: {error})"
        ) from None
    forward: dict[int, float] = defaultdict(float)
    backward: dict[int, float] = defaultdict(float)
    for box in boxes:
        times = forward if box["cat"] == CATEGORIES[0] else backward
        times[pp_rank[box["pid"]]] += box["dur"] / 1e3
    steps = {box["args"]["step"] for box in boxes}
    microbatches = {box["args"]["microbatch"] for box in boxes}
    num_ranks = max(pp_rank.values(), default=-1) + 1
    if not boxes or not steps or len(forward) < num_ranks:
        raise ValueError(f"has no forwards of all {num_ranks} pipeline ranks")
    rounds = len(steps) * len(microbatches) * len(pp_rank) / num_ranks
    return Recorded(
        len(steps),
        len(microbatches),
        tuple(forward[rank] / rounds for rank in range(num_ranks)),
        tuple(backward[rank] / rounds for rank in range(num_ranks)),
        tuple(
            sum(bubble[rank] for rank, place in pp_rank.items() if place == pp)
            / sum(place == pp for place in pp_rank.values())
            for pp in range(num_ranks)
        ),
    )


def _boxes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of tasks; those of the device, for ranks that have them."""
    tasks = [e for e in events if e["ph"] == "X" and e.get("cat") in CATEGORIES]
    on_device = {e["pid"] for e in tasks if e["tid"] == DEVICE}
    return [e for e in tasks if e["tid"] == (DEVICE if e["pid"] in on_device else EXECUTED)]
