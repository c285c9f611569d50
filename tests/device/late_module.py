"""The module `torch.late`: functions of `torch.cuda` for the late device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import smp_late_device as _late
import torch

Device: TypeAlias = torch.device | str | int | None


def _index(device: Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "late":
            raise ValueError(f"Expected a late device, but got: {device}")
        device = device.index
    return _late.current_device() if device is None else device


# ------------------------------------------------------------------- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Does nothing, because devices need no beginning."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _late.num_devices()


def current_device() -> int:
    return _late.current_device()


def set_device(device: Device) -> None:
    _late.set_device(_index(device))


class device:
    """Makes a device current in a block, as `torch.cuda.device` does.

    Args:
        device: device, its name or its index; None or a negative index changes nothing.
    """

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _late.current_device()
        if self.idx >= 0:
            _late.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        _late.set_device(self.prev_idx)


class Properties(NamedTuple):
    """Facts about a device, named as `torch.cuda.get_device_properties` names them."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> Properties:
    return Properties(get_device_name(device), _late.memory(_index(device))["total"])


def get_device_name(device: Device = None) -> str:
    return f"late device {_index(device)}"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return 0, 0


def utilization(device: Device = None) -> int:
    return 0


def synchronize(device: Device = None) -> None:
    """Waits for all streams of a device; raises the error of work that failed."""
    _late.synchronize(_index(device))


# ------------------------------------------------------------------- streams


class Stream(torch.Stream):
    """A stream of the pool, as `torch.cuda.Stream`; priorities make no difference."""

    def __new__(cls, device: Device = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        index = _index(device)
        return _stream(_late.pool_stream(index, priority < 0), index)

    @property
    def late_stream(self) -> int:
        return self.stream_id


class Event:
    """Makes a `torch.Event` of the device; its methods take no class derived from that."""

    def __new__(  # noqa: PYI034
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event(
            "late", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def _stream(stream_id: int, index: int) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=stream_id, device_index=index, device_type=kind)


def current_stream(device: Device = None) -> Stream:
    index = _index(device)
    return _stream(_late.current_stream(index), index)


def default_stream(device: Device = None) -> Stream:
    return _stream(0, _index(device))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        _late.set_device(stream.device_index)
        _late.set_stream(stream.stream_id, stream.device_index)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes a stream and its device current in a block; None changes nothing."""
    if stream is None:
        yield
        return
    with device(stream.device_index):
        before = _late.set_stream(stream.stream_id, stream.device_index)
        try:
            yield
        finally:
            _late.set_stream(before, stream.device_index)


# -------------------------------------------------------------------- memory


def memory_allocated(device: Device = None) -> int:
    return _late.memory(_index(device))["allocated"]


def max_memory_allocated(device: Device = None) -> int:
    return _late.memory(_index(device))["peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    _late.reset_peak(_index(device))


def memory_reserved(device: Device = None) -> int:
    return _late.memory(_index(device))["reserved"]


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Returns bytes that are not reserved, and all bytes."""
    memory = _late.memory(_index(device))
    return memory["total"] - memory["reserved"], memory["total"]


def empty_cache() -> None:
    _late.empty_cache()


# ------------------------------------------------------------ random numbers


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _late.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    _late.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    _late.default_generator(_index(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for i in range(device_count()):
        _late.default_generator(i).manual_seed(seed)


def initial_seed() -> int:
    return _late.default_generator(_index(None)).initial_seed()


# ---------------------------------------------------------- mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True
