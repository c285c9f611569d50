"""A device and its links as a few numbers: those of data sheets, or measured on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib import resources
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from smp.config import given_files
from smp.data_parallel import DEFAULT_MB, bucket_cap_bytes

_FOLDER = "devices"


@dataclass(frozen=True)
class Link:
    """From one device to others.

    Attributes:
        bytes_per_s: in one direction, for each device.
        latency_s: of a small message.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Overheads:
    """What a step takes on the cores of a host besides work and messages, in seconds of a core.

    Measured while all cores are busy, with the library itself (`benchmarks/calibration.py`).

    Attributes:
        microbatch_element_s: of a microbatch, for each element of the parameters: they are read for
            the forward and the backward, and their gradients are written and added to sums.
        update_element_s: of a step, for each element: the optimizer, and gradients set to zero.
        call_s: of a module that code on another rank calls, and of its backward, on both ranks.
        microbatch_s: of a microbatch on each rank of a pipeline.
        alone: as many times as fast is a core while the others idle.
        crowded: as many times as long takes the work of ranks that wait for each other, if they are
            more than cores.
    """

    microbatch_element_s: float
    update_element_s: float
    call_s: float
    microbatch_s: float
    alone: float
    crowded: float


@dataclass(frozen=True)
class Hardware:
    """What a plan knows of a machine.

    Attributes:
        name: for people.
        source: where the numbers come from.
        flops: per second, by precision: "fp32", "bf16", "fp16".
        product_share: of these, what large products reach; an assumption unless it was measured.
        memory_bytes: of a device.
        memory_bytes_per_s: of its memory.
        inside: the link between devices of a host.
        between: that of a device to other hosts.
        host_copy_bytes_per_s: between the device and its host, in one direction.
        at_once: devices of a host that run at full speed at the same time (cores of a CPU); 0: all.
        devices_per_host: where ``--per-host`` is not given.
        collective: the link inside of a host for sums and gathers over groups of ranks; None: the
            same as for messages.
        overheads: of cores; None: not known.
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
        """FLOPs per second that large products reach."""
        return self.flops[precision] * self.product_share

    def flops_per_byte(self, precision: str) -> float:
        """FLOPs that take as long as moving one byte through memory."""
        return self.rate(precision) / self.memory_bytes_per_s

    @property
    def type(self) -> str:
        """Of its devices, as PyTorch calls it."""
        return "cpu" if self.at_once else "cuda"

    @property
    def bucket_bytes(self) -> int:
        """Of gradients that are reduced together, by default."""
        return bucket_cap_bytes(DEFAULT_MB, torch.device(self.type))

    def to_json(self) -> dict[str, Any]:
        """What `read` takes."""
        return asdict(self)


def names() -> list[str]:
    """Devices that the package has data-sheet figures of."""
    files = [path.name for path in _folder().iterdir()]
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def _folder() -> Traversable:
    return resources.files("smp.planning").joinpath(_FOLDER)


def load(name: str) -> Hardware:
    """Of the package by name, or of a file.

    Raises:
        ValueError: there is no such device and no such file, or the file is not one.
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
    """Hardware of a JSON text.

    Raises:
        ValueError: it is not one; names what is wrong.
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
        value = getattr(hardware, field.name)
        numbers = value.values() if isinstance(value, dict) else [value]
        if isinstance(value, Link):
            numbers = [value.bytes_per_s]
        elif isinstance(value, Overheads):
            numbers = asdict(value).values()
        for number in numbers:
            if isinstance(number, str) or number is None:
                continue
            if field.name == "at_once" and number == 0:
                continue
            if not isinstance(number, int | float) or number <= 0:
                raise ValueError(f"hardware {where!r}: {field.name} has to be above 0")
    return hardware
