"""Settings of the library that come from the environment only, and the choice of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from smp._device import device_module, is_accelerator, registered_types
from smp._event_lines import MANIFEST_VARIABLE, PATH_VARIABLE
from smp.world.fault_injection import InjectedFault, read_fault

DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_HANG_S = 300.0
DEFAULT_UPLOAD_WAIT_S = 90.0
DEFAULT_METRICS_EVERY = 100
DEFAULT_RING_MB = 8
MAX_RING_MB = 4096
DEFAULT_SLOT_MB = 128
MAX_SLOT_MB = 65536


@dataclass(frozen=True)
class Settings:
    """Values of the `SMP_*` variables."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """`SMP_TIMEOUT_S`: bound of every wait."""
    device: str = "auto"
    """`SMP_DEVICE`: cpu, cuda, the name of a registered type of devices, or auto (CUDA when there
    is one)."""
    share_gpu: bool = False
    """`SMP_SHARE_GPU`: several processes may use one GPU."""
    transport: str = "gloo"
    """`SMP_TRANSPORT`: gloo, tcp or mpi, between ranks that share no memory."""
    shared_memory: bool = True
    """`SMP_SHM`: ranks of one host exchange messages through shared memory."""
    ring_mb: int = DEFAULT_RING_MB
    """`SMP_SHM_RING_MB`: MiB of shared memory for the messages of one rank to another."""
    lane: str = "auto"
    """`SMP_LANE`: auto, ipc, nccl or host: how tensors go from device to device."""
    lane_slot_mb: int = DEFAULT_SLOT_MB
    """`SMP_LANE_SLOT_MB`: MiB of one slot between devices."""
    hang_s: float = DEFAULT_HANG_S
    """`SMP_HANG_S`: seconds of waiting without progress that are reported; 0: never."""
    metrics_every: int = DEFAULT_METRICS_EVERY
    """`SMP_METRICS_EVERY`: training steps between lines of figures in the log; 0: no lines."""
    hang_action: str = "raise"
    """`SMP_HANG_ACTION`: raise ends the run after twice `SMP_HANG_S`; report does not."""
    replacement_s: float | None = None
    """`SMP_REPLACEMENT_S`: seconds for which ranks wait for a process that is started in place of a
    lost one; None: see `Rank.patience_s`."""
    preemption_path: str | None = None
    """`SMP_PREEMPTION_PATH`: path of the checkpoint that is saved on SIGTERM."""
    store_root: Path = Path("~/.cache/smp/checkpoints")
    """`SMP_STORE_FOLDER`: folder in which checkpoints are completed before their upload."""
    store_per_host: bool = False
    """`SMP_STORE_PER_HOST`: each host has a folder of its own for these."""
    upload_wait_s: float = DEFAULT_UPLOAD_WAIT_S
    """`SMP_UPLOAD_WAIT_S`: seconds for which preempted ranks wait for uploads of their checkpoints;
    0: not at all."""
    events: str | None = None
    """`SMP_EVENTS`: file that gets a line for each event; see `events`."""
    manifest: str | None = None
    """`SMP_MANIFEST`: file that describes the job."""
    fault: InjectedFault | None = None
    """`SMP_FAULT`: see `fault_injection`."""
    detect_nonfinite: str = "0"
    """`SMP_DETECT_NONFINITE`: 1 or raise: see `nonfinite`."""
    check_first_step: str = "auto"
    """`SMP_CHECK_FIRST_STEP`: auto, 1 or 0: see `observe.verification`."""
    verify: str | None = None
    """`SMP_VERIFY`: file that lists what to record: see `observe.verification`."""
    host_pool: bool = True
    """`SMP_HOST_POOL`: large tensors on the CPU stay out of the heap of the C library."""


def read_settings(env: Mapping[str, str]) -> Settings:
    """Reads settings from environment variables.

    Raises:
        ValueError: a variable has an invalid value.
    """
    return Settings(
        timeout_s=_seconds(env, "SMP_TIMEOUT_S", DEFAULT_TIMEOUT_S),
        device=_choice(env, "SMP_DEVICE", "auto", *registered_types()),
        share_gpu=_choice(env, "SMP_SHARE_GPU", "0", "1") == "1",
        transport=_choice(env, "SMP_TRANSPORT", "gloo", "tcp", "mpi"),
        shared_memory=_choice(env, "SMP_SHM", "1", "0") == "1",
        ring_mb=_mib(env, "SMP_SHM_RING_MB", DEFAULT_RING_MB, MAX_RING_MB),
        lane=_choice(env, "SMP_LANE", "auto", "ipc", "nccl", "host"),
        lane_slot_mb=_mib(env, "SMP_LANE_SLOT_MB", DEFAULT_SLOT_MB, MAX_SLOT_MB),
        hang_s=_seconds(env, "SMP_HANG_S", DEFAULT_HANG_S, allows_zero=True),
        metrics_every=_count(env, "SMP_METRICS_EVERY", DEFAULT_METRICS_EVERY),
        hang_action=_choice(env, "SMP_HANG_ACTION", "raise", "report"),
        replacement_s=_optional_seconds(env, "SMP_REPLACEMENT_S"),
        preemption_path=env.get("SMP_PREEMPTION_PATH") or None,
        store_root=Path(env.get("SMP_STORE_FOLDER") or Settings.store_root),
        store_per_host=_choice(env, "SMP_STORE_PER_HOST", "0", "1") == "1",
        upload_wait_s=_seconds(env, "SMP_UPLOAD_WAIT_S", DEFAULT_UPLOAD_WAIT_S, allows_zero=True),
        events=env.get(PATH_VARIABLE) or None,
        manifest=env.get(MANIFEST_VARIABLE) or None,
        fault=read_fault(env),
        detect_nonfinite=_choice(env, "SMP_DETECT_NONFINITE", "0", "1", "raise"),
        check_first_step=_choice(env, "SMP_CHECK_FIRST_STEP", "auto", "1", "0"),
        verify=env.get("SMP_VERIFY") or None,
        host_pool=_choice(env, "SMP_HOST_POOL", "1", "0") == "1",
    )


def _seconds(
    env: Mapping[str, str], name: str, default: float, *, allows_zero: bool = False
) -> float:
    text = env.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 1e9 or (seconds == 0 and not allows_zero):
        bound = ">= 0" if allows_zero else "> 0"
        raise ValueError(f"smp: {name}={text!r} is not a number of seconds {bound}; correct it")
    return seconds


def _optional_seconds(env: Mapping[str, str], name: str) -> float | None:
    return _seconds(env, name, 0.0, allows_zero=True) if env.get(name) else None


def _mib(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"smp: {name}={text!r} is not a whole number from 1 to {most}; correct it")
    return int(text)


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"smp: {name}={text!r} is not a whole number >= 0; correct it")
    return int(text)


def _choice(env: Mapping[str, str], name: str, default: str, *others: str) -> str:
    value = env.get(name) or default
    if value not in (default, *others):
        raise ValueError(f"smp: {name}={value!r} is not one of {[default, *others]}; correct it")
    return value


def choose_device_type(settings: Settings, *, is_available: bool) -> str:
    """Returns the type of the devices: "cpu", "cuda" or another accelerator.

    Args:
        settings: settings of this process.
        is_available: whether a device of the demanded type, or of CUDA for "auto", is visible.

    Raises:
        RuntimeError: an accelerator was demanded and is not available.
    """
    if settings.device == "auto":
        return "cuda" if is_available else "cpu"
    if is_accelerator(settings.device) and not is_available:
        raise RuntimeError(
            f"smp: SMP_DEVICE={settings.device}, but torch sees no {settings.device.upper()} "
            "device; use SMP_DEVICE=cpu"
        )
    return settings.device


def look_at_devices(settings: Settings) -> tuple[str, int]:
    """Returns the type of the devices, and the number of visible accelerators."""
    wanted = "cuda" if settings.device == "auto" else settings.device
    is_available = is_accelerator(wanted) and device_module(wanted).is_available()
    device_type = choose_device_type(settings, is_available=is_available)
    if not is_accelerator(device_type):
        return device_type, 0
    return device_type, device_module(device_type).device_count()


def device_of(device_type: str, local_rank: int, num_devices: int) -> torch.device:
    """Returns the device that a process works on."""
    if not is_accelerator(device_type):
        return torch.device(device_type)
    return torch.device(device_type, local_rank % max(1, num_devices))


def check_device_count(host: str, local_size: int, num_devices: int, share_gpu: bool) -> None:
    """Checks that each process has its own GPU, unless `SMP_SHARE_GPU=1`.

    Raises:
        ValueError: names the host and both numbers.
    """
    if local_size > num_devices and not share_gpu:
        raise ValueError(
            f"smp config: processes_per_host={local_size}: host {host!r} has {num_devices} visible "
            "GPUs and each process needs its own; start fewer processes, or set SMP_SHARE_GPU=1 "
            "to let processes share a GPU"
        )


def check_devices(
    hosts: Sequence[str], devices: Sequence[str], nums_devices: Sequence[int], share_gpu: bool
) -> None:
    """Checks devices of all ranks; the same answer on every rank.

    Args:
        hosts: host name of each rank.
        devices: type of the device of each rank.
        nums_devices: GPUs that each rank sees.
        share_gpu: whether `SMP_SHARE_GPU` is set.

    Raises:
        ValueError: devices differ, or a host has fewer GPUs than processes.
    """
    if len(set(devices)) > 1:
        ranks = {d: [r for r, other in enumerate(devices) if other == d] for d in set(devices)}
        raise ValueError(
            f"smp: the ranks use different devices: {dict(sorted(ranks.items()))}; set SMP_DEVICE "
            "to the same value on every rank"
        )
    if not is_accelerator(devices[0]):
        return
    for rank, host in enumerate(hosts):
        check_device_count(host, hosts.count(host), nums_devices[rank], share_gpu)


def check_gpu_sharing(
    dp_groups: Sequence[Sequence[int]], hosts: Sequence[str], nums_devices: Sequence[int]
) -> None:
    """Refuses data parallelism between processes that share a GPU: NCCL cannot do it.

    Args:
        dp_groups: global ranks of each data-parallel group.
        hosts: host name of each rank.
        nums_devices: GPUs that each rank sees.

    Raises:
        ValueError: names the ranks and the GPU.
    """
    gpus = [
        (host, hosts[:rank].count(host) % max(1, nums_devices[rank]))
        for rank, host in enumerate(hosts)
    ]
    for group in dp_groups:
        for gpu in {gpus[rank] for rank in group}:
            sharers = [rank for rank in group if gpus[rank] == gpu]
            if len(sharers) > 1:
                raise ValueError(
                    f"smp: the data-parallel ranks {sharers} share GPU {gpu[1]} of host "
                    f"{gpu[0]!r}, and NCCL needs one GPU for each; start fewer processes, or use "
                    "them for pipeline parallelism only"
                )


def shares_gpus(hosts: Sequence[str], devices: Sequence[str], nums_devices: Sequence[int]) -> bool:
    """Returns whether processes share a GPU on some host; see `check_devices`."""
    return any(
        device == "cuda" and hosts.count(host) > num_devices
        for host, device, num_devices in zip(hosts, devices, nums_devices, strict=True)
    )


def host_advice(tp_groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> list[str]:
    """Returns warnings about groups that cross hosts."""
    for group in tp_groups:
        names = sorted({hosts[rank] for rank in group})
        if len(names) > 1:
            return [
                f"smp: tensor-parallel group {list(group)} spans the hosts {names}, which is slow; "
                "use a placement_strategy that ends with T, or a tensor_parallel_degree that fits "
                "in a host"
            ]
    return []
