"""The first meeting of the ranks: a key-value store, and messages through it."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp._torch_releases import tcp_store
from smp.config.sources import ReadConfig, compare_configs
from smp.world.groups import make_grid
from smp.world.host_groups import check_dist_backend
from smp.world.interfaces import HostAddress, ReachabilityCheck, is_loopback
from smp.world.job_secret import check_same_secret
from smp.world.launch import Launch, Rendezvous, TorchGroup, plan_rendezvous
from smp.world.presence import wait_for_hellos
from smp.world.processes import namespace
from smp.world.settings import Settings, check_devices, check_gpu_sharing
from smp.world.sockets import end_silent_connections

# Seconds for which a rank that already failed waits for the others to read its error.
FAREWELL_S = 10.0
# Variable with the number of the process that is a rank, and the rank; child processes inherit it.
_RANK_PROCESS = "SMP_RANK_PROCESS"
# Seconds until a folder has to be visible here: network file systems remember its absence.
_FOLDER_S = 10.0
# Seconds until a name has to be known: clusters register hosts while these start.
_NAME_S = 20.0
# All ranks may connect at the same time.
_BACKLOG = 1024


@dataclass(frozen=True)
class Hello:
    """The message of each rank to all others before anything is set up."""

    world_size: int
    host: str
    """Host name, possibly simulated."""
    machine: str
    """Equal on two ranks when loopback connects them."""
    device: str
    """Type of the device, such as "cpu" or "cuda"."""
    num_devices: int
    config: dict[str, Any] | None
    """Effective configuration; None when `error` is set."""
    error: str | None = None
    """Error that keeps this rank from starting."""
    way: dict[str, str] = field(default_factory=dict)
    """Way by which the other hosts reach this one: a `HostAddress`."""
    secret: str = ""
    """Fingerprint of the secret that the environment gives; empty: none."""
    pid: int = 0
    """Number of the process."""
    process_space: str = ""
    """Equal on two ranks that see each other's processes; empty: this one sees none."""
    run: str = ""
    """Name of the job; that of the first rank counts, and all have it once they have met."""


def machine_id(hostname: str) -> str:
    """Returns a name of the machine and network namespace in which this process runs."""
    try:
        return namespace("net")
    except OSError:
        return hostname


class MeetingPoint:
    """The store of this launch. One object per process serves all inits.

    The store stays open between shutdown and the next init, because a rank that is ahead may
    already be using it. Each init has its own key prefix.
    """

    def __init__(self) -> None:
        self.host = ""
        """Host at which the ranks meet; empty: they meet in a file."""
        self.identity = ""
        """Text that is the same on all ranks of this launch, and on no others."""
        self._identity = ""
        self._store: dist.Store | None = None
        self._num_inits: Counter[str] = Counter()

    def open(
        self,
        launch: Launch,
        env: Mapping[str, str],
        timeout_s: float,
        group: TorchGroup | None = None,
    ) -> dist.Store:
        """Opens a store whose keys belong to this init alone.

        Args:
            launch: launch of this process.
            env: environment variables.
            timeout_s: time-out of the connection and of each wait, in seconds.
            group: default group of torch, whose processes have met already.

        Raises:
            ValueError: the environment names no place to meet.
            RuntimeError: the place does not answer.
        """
        place = plan_rendezvous(launch, env, tempfile.gettempdir(), os.getuid(), group)
        self.host = place.host
        self.identity = f"{place.identity} size {launch.world_size}"
        identity = f"{self.identity} rank {launch.global_rank}"
        _refuse_in_worker(identity, launch.global_rank, env)
        if self._store is None or self._identity != identity:
            self._store = None
            self._store = _connect(place, launch, timeout_s)
            self._identity = identity
        self._num_inits[identity] += 1
        os.environ[_RANK_PROCESS] = f"{os.getpid()} {identity}"
        self._store.set_timeout(timedelta(seconds=timeout_s))
        prefix = f"smp/{place.attempt}/{self._num_inits[identity]}"
        return dist.PrefixStore(prefix, self._store)

    def end(self) -> None:
        """Removes the mark of this process as a rank, so that its children may be ranks."""
        os.environ.pop(_RANK_PROCESS, None)


def _refuse_in_worker(identity: str, rank: int, env: Mapping[str, str]) -> None:
    """Refuses a child of a rank's process that inherited its environment and its rank."""
    pid, _, of_parent = env.get(_RANK_PROCESS, "").partition(" ")
    if not pid or int(pid) == os.getpid() or of_parent != identity:
        return
    raise RuntimeError(
        f"smp.init was called in process {os.getpid()}, which process {pid} has started, and that "
        f"is rank {rank} of this job already; workers that are spawned (of a DataLoader, of "
        "multiprocessing) run the main module of the script again: put what the script does under "
        "`if __name__ == '__main__':`, and start other programs with RANK, WORLD_SIZE and an "
        "address of their own"
    )


def _connect(place: Rendezvous, launch: Launch, timeout_s: float) -> dist.Store:
    if place.kind == "hash":
        return dist.HashStore()
    if place.kind == "file":
        if place.private_folder:
            make_private(os.path.dirname(place.path))
        _await_folder(os.path.dirname(place.path))
        _make_unreadable(place.path)
        return dist.FileStore(place.path, launch.world_size + (launch.spares or 0))
    hosts_store = launch.global_rank == 0 and not place.has_server
    _await_name(place)
    try:
        store = tcp_store(
            place.host,
            place.port,
            launch.world_size,
            hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # torch.distributed may use the same address
            master_listen_fd=_loopback_listener(place) if hosts_store else None,
        )
    except Exception as error:
        raise RuntimeError(
            f"smp launch: rank {launch.global_rank} cannot "
            f"{'listen on' if hosts_store else 'reach'} {place.host}:{place.port} "
            f"({place.named_by}): {error}; check that "
            f"{'the store' if place.has_server else 'rank 0'} runs there"
            f"{' and that the port is free' if hosts_store else ''}"
        ) from None
    end_silent_connections(place.port)
    return store


def _loopback_listener(place: Rendezvous) -> int | None:
    """Opens a socket that only processes of this host can reach, for the store of rank 0.

    The store would listen at all addresses of this host, and has no secret. Returns None when ranks
    may come from elsewhere, or the port is taken, perhaps by a store of this process: then torch
    opens its own.
    """
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    addresses = [place[0] for *_, place in found]
    if not all(is_loopback(str(address)) for address in addresses):
        return None
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            return None
        return listener.detach()


def _await_name(place: Rendezvous) -> None:
    """Waits for a host name to be known; the store would try until its time-out."""
    deadline = time.monotonic() + _NAME_S
    while True:
        try:
            socket.getaddrinfo(place.host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"smp launch: host {socket.gethostname()!r} does not know the address of "
                    f"{place.host!r} ({place.named_by}), where the ranks meet: {error.strerror}; "
                    "give an address, or correct the names (DNS, /etc/hosts)"
                ) from None
        time.sleep(0.5)


def _await_folder(folder: str) -> None:
    """Waits for a folder to exist and to be writable; the store would try until its time-out."""
    deadline = time.monotonic() + _FOLDER_S
    while not os.path.isdir(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        fault = "may not be written to" if os.path.isdir(folder) else "does not exist"
        raise RuntimeError(
            f"smp launch: the ranks are to meet in the folder {folder}, which {fault} on host "
            f"{socket.gethostname()!r}; make it, on a file system that all ranks share, or correct "
            "SMP_RENDEZVOUS"
        )


def make_private(folder: str) -> None:
    """Makes a folder that only this user may enter, and checks an existing one.

    Raises:
        OSError: it cannot be made.
        RuntimeError: it belongs to another user, or others may enter.
    """
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        pass
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise RuntimeError(
            f"smp launch: {folder} is not a folder of this user with mode 0700; remove it, or "
            "set SMP_RENDEZVOUS=file:///path"
        )


def _make_unreadable(path: str) -> None:
    """Makes the file of the store, which has the secret of the job, unreadable for others.

    The store itself would create it with the permissions of the umask.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise RuntimeError(
            f"smp launch: the ranks are to meet in the file {path}, which cannot be opened: "
            f"{error.strerror}; remove it, or correct SMP_RENDEZVOUS"
        ) from None


def exchange_hellos(
    store: dist.Store, launch: Launch, hello: Hello, timeout_s: float
) -> list[Hello]:
    """Returns the hello of every rank, index = global rank. Collective.

    Raises:
        RuntimeError: ranks did not come in time; names them.
        ValueError: another rank has an error, or another world size.
    """
    store.set(f"hello/{launch.global_rank}", json.dumps(asdict(hello)))
    keys = [f"hello/{rank}" for rank in range(launch.world_size)]

    def read(rank: int, text: bytes) -> Hello:
        other = Hello(**json.loads(text))
        if other.world_size != launch.world_size:
            raise ValueError(
                f"smp launch: rank {rank} was started as one of {other.world_size} processes, "
                f"rank {launch.global_rank} as one of {launch.world_size}; start all ranks of a "
                "job with the same number"
            )
        return other

    def look_at_first(text: bytes) -> None:
        read(0, text)

    texts = wait_for_hellos(store, launch.global_rank, keys, timeout_s, look_at_first)
    return [read(rank, text) for rank, text in enumerate(texts)]


def meet(
    store: dist.Store, launch: Launch, hello: Hello, read: ReadConfig, settings: Settings
) -> list[Hello]:
    """Returns the hello of every rank, once all agree. Collective.

    Raises:
        RuntimeError: ranks did not come in time.
        ValueError: the ranks disagree or one has an error; the same text on all ranks.
    """
    hellos = exchange_hellos(store, launch, hello, settings.timeout_s)
    try:
        raise_first_error([other.error for other in hellos])
        check_same_secret([other.secret for other in hellos])
        compare_configs([other.config or {} for other in hellos])
        hosts = [other.host for other in hellos]
        nums_devices = [other.num_devices for other in hellos]
        check_devices(hosts, [other.device for other in hellos], nums_devices, settings.share_gpu)
        if read.config is not None:
            grid = make_grid(read.config, launch.world_size)
            if hello.device == "cuda":
                check_gpu_sharing(grid.groups("dp_cp"), hosts, nums_devices)
            check_dist_backend(read.config, grid.groups("dp_cp"), hosts, hello.device)
        machines = [other.machine for other in hellos]
        if len(set(machines)) > 1:
            crossing = ReachabilityCheck(store, launch.global_rank, machines, hosts)
            ways = crossing.agree([HostAddress(**o.way) for o in hellos], settings.timeout_s)
            hellos = [
                replace(other, way=asdict(way)) for other, way in zip(hellos, ways, strict=True)
            ]
    except ValueError:
        say_farewell(store, launch)
        raise
    return hellos


def raise_first_error(errors: Sequence[str | None]) -> None:
    """Raises the error of the lowest rank that has one, with the same text on every rank.

    Args:
        errors: error of each rank, index = global rank.

    Raises:
        ValueError: the error; its text names the rank unless all ranks have the same error.
    """
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return
    ranks = [rank for rank, error in enumerate(errors) if error == first]
    where = "" if len(ranks) == len(errors) else f" (on ranks {ranks} of {len(errors)})"
    raise ValueError(first + where)


def say_farewell(store: dist.Store, launch: Launch) -> None:
    """Keeps the store open before `init` fails, until all ranks have read it."""
    deadline = time.monotonic() + FAREWELL_S
    arrived = store.add("farewell", 1)
    while arrived < launch.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        arrived = store.add("farewell", 0)
