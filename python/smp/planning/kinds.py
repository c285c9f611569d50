"""Describes devices of several kinds: who has which, and for which one a pipeline rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import smp._C as _C
from smp.partition.devices import replica_shares, samples_of_shares
from smp.planning import hardware
from smp.planning.hardware import Hardware, Link
from smp.planning.layout import Layout


class Place(NamedTuple):
    """A device of a pipeline rank: its kind, and its replica's samples over the mean of all."""

    kind: int
    share: float


@dataclass(frozen=True)
class Kinds:
    """The devices of all ranks, in the order of global ranks.

    Attributes:
        devices: kinds of devices; one may occur again after others.
        counts: number of neighbouring devices of each kind.
        speeds: speed of each kind at the work of a model, in units of `slowest`.
    """

    devices: tuple[Hardware, ...]
    counts: tuple[int, ...]
    speeds: tuple[float, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Returns the number of all devices."""
        return sum(self.counts)

    @property
    def are_alike(self) -> bool:
        """Returns whether all devices are of one kind."""
        return all(device == self.devices[0] for device in self.devices)

    @property
    def text(self) -> str:
        """Returns numbers and names of the devices."""
        pairs = zip(self.counts, self.devices, strict=True)
        return " + ".join(f"{count} x {device.name}" for count, device in pairs)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Returns the kind of each global rank's device."""
        return tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))

    @property
    def device_speeds(self) -> tuple[float, ...]:
        """Returns the speed of each global rank's device; empty where all are alike."""
        return (
            tuple(self.speeds[kind] for kind in self.kind_of) if len(set(self.speeds)) > 1 else ()
        )

    @property
    def has_uneven_memory(self) -> bool:
        """Returns whether some devices have more memory than others."""
        return len({device.memory_bytes for device in self.devices}) > 1

    def with_memory(self, num_bytes: int) -> Kinds:
        """Returns the same devices with another memory."""
        devices = tuple(replace(device, memory_bytes=num_bytes) for device in self.devices)
        return replace(self, devices=devices)

    def places(self, layout: Layout) -> tuple[tuple[Place, ...], ...]:
        """Returns the different devices of each pipeline rank over all replicas."""
        return _places(self.kind_of, self.speeds, *_degrees(layout))

    def samples(self, layout: Layout, num_samples: int) -> tuple[int, ...]:
        """Returns the samples of a step that each replica reads, as `smp.batch_slice` does.

        Raises:
            ValueError: there are fewer samples than replicas.
        """
        return _samples(self.kind_of, self.speeds, num_samples, *_degrees(layout))

    def awaited(self, layout: Layout, slowest: Hardware) -> list[Hardware]:
        """Returns the device that each pipeline rank waits for: the slowest for its samples.

        Args:
            layout: layout of the run.
            slowest: device whose rates are those of speed 1.

        Returns:
            devices that reach the rate for samples of a mean replica, and for a model that was
            traced for `slowest`.
        """
        rate = slowest.rate(layout.precision)
        made: dict[Place, Hardware] = {}  # so that equal ranks have the same object

        def device(place: Place) -> Hardware:
            own = rate * self.speeds[place.kind] / place.share
            return replace(
                self.devices[place.kind], flops={layout.precision: own}, product_share=1.0
            )

        found = []
        for own in self.places(layout):
            place = min(own, key=lambda place: self.speeds[place.kind] / place.share)
            if place not in made:
                made[place] = device(place)
            found.append(made[place])
        return found

    def least_bytes(self, layout: Layout) -> list[int]:
        """Returns the memory of the smallest device of each pipeline rank."""
        return [
            min(self.devices[place.kind].memory_bytes for place in own)
            for own in self.places(layout)
        ]


def load(text: str, num_ranks: int | None = None) -> Kinds:
    """Loads the devices of all ranks by their names or files.

    Args:
        text: text for `parse`.
        num_ranks: number of devices; None: the sum of those in the text.

    Raises:
        ValueError: the text has no such form or another number of devices, there is no such
            hardware, or kinds are of several types.
    """
    words = parse(text)
    total = sum(count or 0 for _, count in words) or num_ranks
    if total is None:
        raise ValueError(f"hardware {text!r} has no number of devices: expected {text}:NUMBER")
    if num_ranks is not None and total != num_ranks:
        raise ValueError(f"hardware {text!r} is {total} devices, and there are {num_ranks} ranks")
    devices = tuple(hardware.load(name) for name, _ in words)
    types = {device.type: name for device, (name, _) in zip(devices, words, strict=True)}
    if len(types) > 1:
        found = " and ".join(f"{name} is of type {kind}" for kind, name in types.items())
        raise ValueError(f"hardware {text!r}: {found}; the devices of a run are of one type")
    return Kinds(devices, tuple(count or total for _, count in words))


def parse(text: str) -> list[tuple[str, int | None]]:
    """Parses names of kinds of devices with their numbers, in the order of ranks.

    ``"a.json:2,b.json:1"`` are two devices like the one of ``a.json`` and one like that of
    ``b.json``. A single name may have no number (None): all devices are alike.

    Raises:
        ValueError: the text has no such form.
    """
    words = [word.strip() for word in text.split(",")]
    found: list[tuple[str, int | None]] = []
    for word in words:
        name, _, count = word.rpartition(":")
        if name and count.isdecimal() and int(count) > 0:
            found.append((name, int(count)))
        elif len(words) == 1 and word and not name:
            found.append((word, None))
        else:
            raise ValueError(
                f"{word!r} in hardware {text!r} has no number of devices: expected NAME:NUMBER for "
                "each kind in the order of ranks, as a100:2,slow.json:1"
            )
    return found


def slowest(devices: Sequence[Hardware], precision: str) -> Hardware:
    """Returns the slowest of several devices, with the slowest of all their links."""
    found = min(devices, key=lambda device: device.rate(precision))
    shared = [device.collective or device.inside for device in devices]
    has_own = any(device.collective is not None for device in devices)
    return replace(
        found,
        memory_bytes=min(device.memory_bytes for device in devices),
        inside=_slowest_link([device.inside for device in devices]),
        between=_slowest_link([device.between for device in devices]),
        collective=_slowest_link(shared) if has_own else None,
        at_once=min(device.at_once for device in devices),
        devices_per_host=min(device.devices_per_host for device in devices),
    )


def _slowest_link(links: Sequence[Link]) -> Link:
    return Link(min(x.bytes_per_s for x in links), max(x.latency_s for x in links))


def _degrees(layout: Layout) -> tuple[int, int, int, int, str]:
    return layout.num_ranks, layout.pp, layout.tp, layout.cp, layout.placement


# Layouts share few grids, and a search asks for each of them thousands of times.
@cache
def _shares(
    kind_of: tuple[int, ...], speeds: tuple[float, ...], *degrees: Any
) -> tuple[float, ...]:
    return tuple(replica_shares([speeds[kind] for kind in kind_of], _C.ProcessGrid(*degrees)))


@cache
def _samples(
    kind_of: tuple[int, ...], speeds: tuple[float, ...], num_samples: int, *degrees: Any
) -> tuple[int, ...]:
    return tuple(samples_of_shares(num_samples, _shares(kind_of, speeds, *degrees)))


@cache
def _places(
    kind_of: tuple[int, ...], speeds: tuple[float, ...], *degrees: Any
) -> tuple[tuple[Place, ...], ...]:
    grid, shares = _C.ProcessGrid(*degrees), _shares(kind_of, speeds, *degrees)
    found: list[set[Place]] = [set() for _ in range(grid.group_size("pp"))]
    for global_rank, kind in enumerate(kind_of):
        place = grid.coordinates(global_rank)
        found[place.pp].add(Place(kind, shares[place.rdp] * len(shares)))
    return tuple(tuple(sorted(own)) for own in found)
