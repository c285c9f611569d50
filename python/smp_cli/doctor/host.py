"""Probes the machine: cores, memory, limits, shared memory, temporary files. Without torch."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from smp_cli.cores import cpu_quota
from smp_cli.doctor.report import Section, gib

_CGROUP = Path("/sys/fs/cgroup")
_MIN_FILES = 4096
_MIN_PROCESSES = 4096
_MIN_SHM = 1 << 30
_MIN_FREE = 5 << 30
_MIN_MEMORY = 4 << 30
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p"}


def system() -> Section:
    """Describes platform, cores and memory."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    total, available, limit = _memory()
    section = Section("system")
    section.values = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": f"{cores} of {os.cpu_count()} usable",
        "cpu quota": None if quota is None else f"{quota:g} cores",
        "memory": f"{gib(available)} of {gib(total)} available",
        "memory limit": None if limit is None else gib(limit),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    if quota is not None and quota < cores:
        section.problems.append(
            f"the control group allows {quota:g} cores' worth of time, but {cores} are visible: "
            f"each process starts {cores} threads; set OMP_NUM_THREADS to cores divided by ranks"
        )
    usable = min(available, limit or available)
    if usable < _MIN_MEMORY:
        section.problems.append(
            f"only {gib(usable)} of memory can be used; ranks with real models will be killed by "
            "the system"
        )
    return section


def _memory() -> tuple[int, int, int | None]:
    """Returns the bytes in total, those available, and the limit of the control group."""
    sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    total, available = (int(sizes[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    texts = [_read(_CGROUP / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text and text.isdecimal()]
    return total, available, next((limit for limit in limits if limit < total), None)


def limits() -> Section:
    """Describes ulimit -n, -u, -l, -c."""
    section = Section("limits")
    kinds = {
        "open files (-n)": resource.RLIMIT_NOFILE,
        "processes (-u)": resource.RLIMIT_NPROC,
        "locked memory (-l)": resource.RLIMIT_MEMLOCK,
        "core files (-c)": resource.RLIMIT_CORE,
    }
    soft = []
    for name, kind in kinds.items():
        both = resource.getrlimit(kind)
        unlimited = resource.RLIM_INFINITY
        section.values[name] = "/".join("unlimited" if n == unlimited else str(n) for n in both)
        soft.append(float("inf") if both[0] == unlimited else both[0])
    files, processes, locked, _ = soft
    if files < _MIN_FILES:
        section.problems.append(
            f"a process may open {files} files; many ranks and loaders need more: ulimit -n 65536"
        )
    if processes < _MIN_PROCESSES:
        section.problems.append(
            f"this user may have {processes} processes and threads; ranks start dozens each: "
            "ulimit -u 65536"
        )
    if locked < 1 << 26 and Path("/dev/infiniband").exists():
        section.problems.append(
            f"only {gib(locked)} may be locked, and RDMA needs its buffers locked: "
            "ulimit -l unlimited"
        )
    return section


def shared_memory(folder: Path = Path("/dev/shm")) -> Section:
    """Describes the size of /dev/shm, and whether memory can be shared by descriptor (memfd)."""
    section = Section("shared memory", {str(folder): None, "memfd": False})
    try:
        usage = shutil.disk_usage(folder)
        section.values[str(folder)] = f"{gib(usage.free)} of {gib(usage.total)} free"
        if usage.free < _MIN_SHM:
            section.problems.append(
                f"{folder} has {gib(usage.free)} free; loaders with workers and NCCL use it and "
                "fail with a bus error: start the container with --shm-size=8g or --ipc=host"
            )
    except OSError as error:
        section.problems.append(f"{folder}: {error.strerror}; loaders with workers need it")
    try:
        descriptor = os.memfd_create("smp-doctor", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 1 << 20)
        os.close(descriptor)
        section.values["memfd"] = True
    except OSError as error:
        section.problems.append(
            f"memory cannot be shared by descriptor (memfd_create: {error.strerror}), so ranks of "
            "one host exchange messages over TCP, which is slower; a sandbox may forbid it"
        )
    section.values["ptrace scope"] = _read(Path("/proc/sys/kernel/yama/ptrace_scope"))
    return section


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def temporary_files() -> Section:
    """Describes the file system of TMPDIR, the folder of temporary files."""
    section = Section("files")
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        section.problems.append(
            f"no folder for temporary files can be written to: {error}; set TMPDIR"
        )
        return section
    usage, kind = shutil.disk_usage(folder), file_system(folder)
    section.values = {
        "TMPDIR": str(folder),
        "file system": kind,
        "space": f"{gib(usage.free)} of {gib(usage.total)} free",
    }
    if usage.free < _MIN_FREE:
        section.problems.append(f"{folder} has only {gib(usage.free)} free; set TMPDIR elsewhere")
    if kind in _NETWORK:
        section.problems.append(
            f"{folder} is on a network file system ({kind}): slow, and meeting files of ranks may "
            "appear late; set TMPDIR to a local disk"
        )
    return section


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Returns the kind of a folder's file system, as ``mount`` names it."""
    resolved = folder.resolve()
    found: list[tuple[int, int, str]] = []
    for index, line in enumerate((_read(mounts) or "").splitlines()):
        _, point, kind = line.split()[:3]
        path = Path(point.replace("\\040", " "))
        if path == resolved or path in resolved.parents:
            found.append((len(path.parts), index, kind))
    return max(found)[2] if found else None
