"""Describes a device and its links in a few numbers, from data sheets or measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib import resources
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

from smp.config import given_files

_FOLDER = "devices"


@dataclass(frozen=True)
class Link:
    """The link from one device to others.

    Attributes:
        bytes_per_s: bytes per second in one direction, for each device.
        latency_s: seconds of a small message.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Overheads:
    """Seconds of a core that a step takes in addition to work and messages.

    They are measured while all cores are busy, with the library (`benchmarks/calibration.py`).

    Attributes:
        microbatch_element_s: seconds of a microbatch per parameter element: it is read for the
            forward and the backward, and its gradient is written and added to a sum.
        update_element_s: seconds of a step per element: the optimizer, and zeroing of gradients.
        call_s: seconds of a module that code on another rank calls, and of its backward, on both
            ranks.
        microbatch_s: seconds of a microbatch on each rank of a pipeline.
        alone: speed of a core while the others idle, over its speed while all work.
        crowded: factor by which work of ranks that wait for each other takes longer, if there are
            more ranks than cores.
    """

    microbatch_element_s: float
    update_element_s: float
    call_s: float
    microbatch_s: float
    alone: float
    crowded: float


@dataclass(frozen=True)
class Hardware:
    """Figures of a machine that a plan is made for.

    Attributes:
        name: name for messages.
        source: origin of the numbers.
        flops: FLOPs per second, by precision: "fp32", "bf16", "fp16".
        product_share: share of `flops` that large products reach; assumed unless it was measured.
        memory_bytes: memory of a device.
        memory_bytes_per_s: bandwidth of its memory.
        inside: the link between devices of a host.
        between: the link of a device to other hosts.
        host_copy_bytes_per_s: bandwidth between the device and its host, in one direction.
        at_once: devices of a host that run at full speed at the same time (cores of a CPU); 0: all.
        devices_per_host: number that counts if ``--per-host`` is not given.
        collective: the link inside a host for sums and gathers over groups of ranks; None: the
            same as for messages.
        overheads: overheads of cores; None: not known.
    """

    name: str
    source: str
    flops: dict[str, float]
    product_share: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside: Link
    between: Link
    host_copy_bytes_per_s: float
    at_once: int = 0
    devices_per_host: int = 8
    collective: Link | None = None
    overheads: Overheads | None = None

    def rate(self, precision: str) -> float:
        """Returns the FLOPs per second that large products reach."""
        return self.flops[precision] * self.product_share

    def flops_per_byte(self, precision: str) -> float:
        """Returns the FLOPs that take as long as moving one byte through memory."""
        return self.rate(precision) / self.memory_bytes_per_s

    @property
    def type(self) -> str:
        """Returns the type of its devices, as PyTorch calls it."""
        return "cpu" if self.at_once else "cuda"

    def to_json(self) -> dict[str, Any]:
        """Returns values that `read` takes as JSON."""
        return asdict(self)


def names() -> list[str]:
    """Returns the devices for which the package has data-sheet figures."""
    files = [path.name for path in _folder().iterdir()]
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def _folder() -> Traversable:
    return resources.files("smp.planning").joinpath(_FOLDER)


def load(name: str) -> Hardware:
    """Loads hardware of the package by name, or from a file.

    Raises:
        ValueError: there is no such device or file, or the file does not describe hardware.
    """
    if name in names():
        return read(_folder().joinpath(f"{name}.json").read_text(), name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"no hardware {name!r}: expected one of {', '.join(names())}, or a file of "
            "the same keys (docs/planning.md)"
        )
    return read(given_files.read_text(path), name)


def read(text: str, where: str) -> Hardware:
    """Parses hardware from a JSON text.

    Raises:
        ValueError: the text does not describe hardware; the message names the mistake.
    """
    try:
        values: dict[str, Any] = given_files.parse_json(text)
        parts: dict[str, Any] = {key: Link(**values.pop(key)) for key in ("inside", "between")}
        for key, kind in (("collective", Link), ("overheads", Overheads)):
            if values.get(key) is not None:
                parts[key] = kind(**values.pop(key))
        hardware = Hardware(**{**values, **parts})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"hardware {where!r}: {error}") from None
    for field in fields(Hardware):
        for number in _numbers(getattr(hardware, field.name)):
            if number <= 0 and (field.name, number) != ("at_once", 0):
                raise ValueError(f"hardware {where!r}: {field.name} has to be above 0")
    return hardware


def _numbers(value: Any) -> list[float]:
    """Returns the numbers of a field that have to be above 0; other values are no numbers."""
    if isinstance(value, Link):
        return _numbers(value.bytes_per_s)
    if isinstance(value, Overheads):
        value = asdict(value)
    if isinstance(value, dict):
        return [number for own in value.values() for number in _numbers(own)]
    if value is None or isinstance(value, str):
        return []
    return [value if isinstance(value, int | float) else 0]
