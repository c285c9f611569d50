"""Describes how tensors are copied from the device of one rank to that of another."""

from __future__ import annotations

from collections.abc import Iterable

Lane = tuple[int, int, str, str]
"""Source, destination, "ipc", "nccl" or "host", and the mailbox's reason."""


def describe(lanes: Iterable[Lane]) -> str:
    """Returns one line about all pairs of ranks.

    Args:
        lanes: lanes of all ordered pairs that have one; both directions are equal.

    Returns:
        For instance ``"ipc between 6 pairs of ranks; host between ranks 0 and 4 (they are on
        different hosts) and 1 more pair"``; empty without lanes.
    """
    pairs: dict[str, list[Lane]] = {}
    for lane in lanes:
        if lane[0] < lane[1]:
            pairs.setdefault(lane[2], []).append(lane)
    return "; ".join(_words(kind, found) for kind, found in sorted(pairs.items(), reverse=True))


def _words(kind: str, lanes: list[Lane]) -> str:
    source, destination, _, why = lanes[0]
    if kind == "ipc" and len(lanes) > 1:
        return f"{kind} between {len(lanes)} pairs of ranks"
    text = f"{kind} between ranks {source} and {destination} ({why})"
    rest = len(lanes) - 1
    return text + (f" and {rest} more pair{'' if rest == 1 else 's'}" if rest else "")
