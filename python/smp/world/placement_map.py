"""Describes the places of the ranks of a run in a few lines for people."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_RANKS = 16  # most ranks with a line each
_MAX_HOSTS = 12  # most hosts with a line each
_MAX_NAMED_HOSTS = 4  # most hosts in one line
_AXES = ("pp", "tp", "cp", "rdp")
_AXIS_WORDS = ("pipeline stages", "tensor-parallel ranks", "context-parallel ranks", "replicas")
_SHOWN_IF_SPLIT = "cp"

Coordinates = tuple[int, int, int, int]


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in short form: ``"0-3 6 8-9"``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def placement_words(
    hosts: Sequence[str], devices: Sequence[str], coordinates: Sequence[Coordinates]
) -> list[str]:
    """Returns a line about the layout of the ranks, and one about their hosts if there are several.

    Args:
        hosts: host of each rank, index = global rank.
        devices: device of each rank, such as "cuda:1".
        coordinates: places of each rank on the axes pp, tp, cp and rdp.
    """
    names = list(dict.fromkeys(hosts))
    kind = "CPU" if devices[0] == "cpu" else "GPUs"
    counts = [len({place[axis] for place in coordinates}) for axis in range(len(_AXES))]
    sizes = [f"{n} {words}" for n, words in zip(counts, _AXIS_WORDS, strict=True) if n > 1]
    plural = "s" if len(names) > 1 else ""
    lines = [f"{len(hosts)} ranks on {len(names)} host{plural}, {kind}: {', '.join(sizes)}"]
    if len(names) > 1:
        shown = names if len(names) <= _MAX_NAMED_HOSTS else names[: _MAX_NAMED_HOSTS - 1]
        parts = [f"{ranges(_ranks_on(name, hosts))} on {name}" for name in shown]
        rest = len(names) - len(shown)
        lines.append(f"ranks {', '.join(parts)}" + (f", and {rest} hosts more" if rest else ""))
    return lines


def placement_map(
    hosts: Sequence[str],
    devices: Sequence[str],
    coordinates: Sequence[Coordinates],
    placement: str,
) -> str:
    """Returns a table of ranks, or of hosts if there are many ranks.

    Args:
        hosts: host of each rank, index = global rank.
        devices: device of each rank, such as "cuda:1".
        coordinates: places of each rank on the axes pp, tp, cp and rdp.
        placement: order of the axes, the last of which varies fastest.
    """
    names = list(dict.fromkeys(hosts))
    head = f"smp: places of the ranks; placement_strategy {placement}"
    ranks_of = {name: _ranks_on(name, hosts) for name in names}
    axes = _shown_axes(coordinates)
    if len(hosts) <= _MAX_RANKS:
        rows = [
            (
                f"global_rank {rank}",
                hosts[rank],
                devices[rank],
                _places([coordinates[rank]], axes),
            )
            for rank in range(len(hosts))
        ]
    else:
        shown = names if len(names) <= _MAX_HOSTS else [*names[: _MAX_HOSTS - 2], names[-1]]
        rows = [_row_of_host(name, ranks_of[name], devices, coordinates, axes) for name in shown]
        if len(shown) < len(names):
            num_left_out = len(names) - len(shown)
            rows.insert(-1, (f"({num_left_out} more hosts)", "...", "...", "..."))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join([head, *lines])


def _ranks_on(name: str, hosts: Sequence[str]) -> list[int]:
    return [rank for rank, host in enumerate(hosts) if host == name]


def _row_of_host(
    host: str,
    ranks: Sequence[int],
    devices: Sequence[str],
    coordinates: Sequence[Coordinates],
    axes: Sequence[int],
) -> tuple[str, str, str, str]:
    kinds = list(dict.fromkeys(devices[rank].partition(":")[0] for rank in ranks))
    own = [devices[rank] for rank in ranks]
    numbers = [int(device.partition(":")[2]) for device in own if ":" in device]
    device = f"{kinds[0]}:{ranges(numbers)}" if numbers else " ".join(kinds)
    places = _places([coordinates[rank] for rank in ranks], axes)
    return f"global_ranks {ranges(ranks)}", host, device, places


def _shown_axes(coordinates: Sequence[Coordinates]) -> list[int]:
    """Returns the axes of a table; the context axis only if it has more than one place."""
    return [
        i
        for i, axis in enumerate(_AXES)
        if axis != _SHOWN_IF_SPLIT or any(place[i] for place in coordinates)
    ]


def _places(coordinates: Sequence[Coordinates], axes: Sequence[int]) -> str:
    return " ".join(
        f"{_AXES[i]} {ranges([place[i] for place in coordinates]).replace(' ', ',')}" for i in axes
    )
