"""Reads rank, size and host of this process from the launcher's variables.

All functions are pure functions of an environment mapping; nothing is connected here. They
understand ``smp run``, torchrun, Open MPI (also as SageMaker starts it), Slurm, processes that
already have a group of ``torch.distributed``, and a plain single process, in this order: a
torchrun started inside a Slurm job counts as torchrun.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from smp.config import given_files

HOSTNAME_VARIABLE = "SMP_HOSTNAME"
RENDEZVOUS_VARIABLE = "SMP_RENDEZVOUS"


@dataclass(frozen=True)
class Launch:
    """Place of this process among those that were started together."""

    launcher: str
    """"smp", "torchrun", "mpi", "slurm", "torch" (its default group) or "single"."""
    global_rank: int
    world_size: int
    local_rank: int
    """Position among the processes of this host."""
    local_size: int
    """Processes on this host; 0 while unknown (see `with_hosts`)."""
    hostname: str
    hosts: tuple[str, ...] = ()
    """Host name of each rank, once the ranks have exchanged them."""
    spares: int | None = None
    """Processes that are started with the ranks and wait for places; more may come later. None:
    there are none, also later. `world_size` is without them."""
    first_size: int = field(default=0, compare=False)
    """Ranks with which the job begins."""

    def __post_init__(self) -> None:
        if not self.first_size:
            object.__setattr__(self, "first_size", self.world_size)

    @property
    def is_spare(self) -> bool:
        """True for a process that waits, whose number is behind those of the ranks."""
        return self.spares is not None and self.global_rank >= self.world_size

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are known to share one host."""
        return self.world_size == 1 or (bool(self.hosts) and len(set(self.hosts)) == 1)


@dataclass(frozen=True)
class Rendezvous:
    """The place where the ranks first meet."""

    kind: str
    """"hash" (single process), "file" or "tcp"."""
    path: str = ""
    """Path of the file; its folder is made with mode 0700 if `private_folder`."""
    private_folder: bool = False
    host: str = ""
    port: int = 0
    has_server: bool = False
    """Whether host:port has a listener already: torchrun's agent, torch's default group, or
    ``smp store``."""
    attempt: str = "0"
    """Differs between jobs, and starts of all ranks, that use the same store."""
    named_by: str = "MASTER_ADDR and MASTER_PORT"
    """Variables that name the place, for messages."""

    @property
    def identity(self) -> str:
        """Text that is the same for the same meeting point."""
        return f"{self.kind}:{self.path or f'{self.host}:{self.port}'}#{self.attempt}"


@dataclass(frozen=True)
class TorchGroup:
    """The default group of `torch.distributed`, which was made before `smp.init`."""

    rank: int
    size: int
    place: Rendezvous | None
    """Place where its processes have met; None: others cannot reach it."""
    store: str
    """Class of its store, for messages."""


# ---- ranks -------------------------------------------------------------------

# Names of our own: Accelerate takes those of torchrun as the sign of a plain data-parallel job.
_SMP_RUN = ("SMP_RANK", "SMP_WORLD_SIZE")
_SMP_LOCAL = ("SMP_LOCAL_RANK", "SMP_LOCAL_SIZE")
_SMP_SPARES = "SMP_SPARES"
_TORCHRUN = ("RANK", "WORLD_SIZE")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")


def read_launch(env: Mapping[str, str], hostname: str, group: TorchGroup | None = None) -> Launch:
    """Returns rank, size and host of this process.

    Args:
        env: environment variables.
        hostname: name of this machine; `SMP_HOSTNAME` replaces it, so that
            several hosts can be simulated on one.
        group: default group of torch, used if no launcher has set variables.

    Raises:
        ValueError: a variable is missing, not a number, or out of range.
    """
    hostname = env.get(HOSTNAME_VARIABLE) or hostname
    if any(name in env for name in _SMP_RUN):
        local = _SMP_LOCAL if _SMP_LOCAL[0] in env else _SMP_RUN  # else one host
        launch = _read(env, "smp", *_SMP_RUN, *local)
    elif any(name in env for name in _TORCHRUN):
        launch = _read(env, "torchrun", *_TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif any(name in env for name in _OPEN_MPI):
        local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        launch = _read(env, "mpi", *_OPEN_MPI, *local)
    elif "SLURM_PROCID" in env:
        size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        launch = _read(env, "slurm", "SLURM_PROCID", size_name, "SLURM_LOCALID", None)
        launch = replace(launch, local_size=_slurm_local_size(env, launch.world_size))
    elif group is not None and group.size > 1:
        launch = Launch("torch", group.rank, group.size, 0, 0, hostname)
    else:
        return Launch("single", 0, 1, 0, 1, hostname, hosts=(hostname,))
    if _SMP_SPARES in env:
        launch = _with_spares(launch, max(0, _integer(env, _SMP_SPARES, launch.launcher)))
    hosts = (hostname,) if launch.world_size == 1 else ()
    launch = replace(launch, hostname=hostname, hosts=hosts)
    if not (0 <= launch.global_rank < launch.world_size or launch.is_spare):
        raise ValueError(
            f"smp launch: {launch.launcher} gives rank {launch.global_rank} of "
            f"{launch.world_size} processes; expected 0 <= rank < size, check the environment"
        )
    return launch


def _with_spares(launch: Launch, spares: int) -> Launch:
    """Returns the launch of a job in which the last `spares` processes wait for places."""
    # Only `smp run` has processes that are not counted in the size.
    size = launch.world_size - (0 if launch.launcher == "smp" else spares)
    if size < 1:
        raise ValueError(
            f"smp launch: {_SMP_SPARES}={spares} of the {launch.world_size} processes that "
            f"{launch.launcher} has started are to wait; start more, at least one rank has to be "
            "left"
        )
    return replace(launch, spares=spares, world_size=size, first_size=size)


def with_hosts(launch: Launch, hosts: Sequence[str]) -> Launch:
    """Returns `launch` with local rank and size counted from the host names of all ranks.

    Args:
        launch: launch of this process.
        hosts: host name of each rank, index = global rank.
    """
    peers = [rank for rank, host in enumerate(hosts) if host == launch.hostname]
    return replace(
        launch,
        local_rank=peers.index(launch.global_rank),
        local_size=len(peers),
        hosts=tuple(hosts),
    )


def _read(
    env: Mapping[str, str],
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str | None,
) -> Launch:
    rank, size = _integer(env, rank_name, launcher), _integer(env, size_name, launcher)
    # Hand-made environments often set only RANK and WORLD_SIZE; host names give the rest.
    local_rank = _integer(env, local_rank_name, launcher) if local_rank_name in env else 0
    has_local_size = local_size_name is not None and local_size_name in env
    local_size = _integer(env, str(local_size_name), launcher) if has_local_size else 0
    return Launch(launcher, rank, size, local_rank, local_size, "")


def _integer(env: Mapping[str, str], name: str, launcher: str) -> int:
    text = env.get(name)
    if text is None:
        raise ValueError(
            f"smp launch: {name} is not set although this looks like a {launcher} job; "
            "set it, or remove the other variables of the launcher"
        )
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"smp launch: {name}={text!r} is not an integer; correct it") from None


def _slurm_local_size(env: Mapping[str, str], world_size: int) -> int:
    """Returns the number of tasks on this node, 0 if Slurm does not give it."""
    text = env.get("SLURM_NTASKS_PER_NODE", "")
    if text.isdigit():
        return min(int(text), world_size)
    counts = _expand_counts(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    node = env.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0


def _expand_counts(text: str) -> list[int]:
    """Expands counts: ``"2(x3),1"`` -> ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def first_slurm_host(nodelist: str) -> str:
    """Returns the first host of a node list: ``"node[01-04,07],gpu3"`` -> ``"node01"``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist.strip())
    if match is None:
        raise ValueError(f"smp launch: cannot read the Slurm node list {nodelist!r}")
    head, number, tail = match.groups()
    return head + (number or "") + (tail or "")


# ---- meeting point -----------------------------------------------------------

_FIRST_PORT, _NUM_PORTS = 20000, 20000
# Variables that differ between two mpiruns: those of Open MPI 5 first, then 4.
_MPI_JOB_VARIABLES = (
    "PMIX_NAMESPACE",
    "PMIX_SERVER_TMPDIR",
    "PMIX_SERVER_URI41",
    "PMIX_SERVER_URI4",
    "PMIX_SERVER_URI3",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
)


def plan_rendezvous(
    launch: Launch,
    env: Mapping[str, str],
    temp_folder: str,
    user_id: int,
    group: TorchGroup | None = None,
) -> Rendezvous:
    """Returns the place where the ranks of this launch meet.

    Args:
        launch: launch of this process.
        env: environment variables.
        temp_folder: a folder all processes of one host share.
        user_id: numeric user, part of the name of private folders.
        group: default group of torch, whose processes have met already.

    Raises:
        ValueError: the environment names no place.
    """
    if launch.world_size == 1:
        return Rendezvous("hash")
    attempt = restart_count(env)
    given = env.get(RENDEZVOUS_VARIABLE)
    if given:
        return _given_place(given, attempt)
    if launch.launcher == "torch":
        return _place_of_group(launch, group)
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if host and port:
        return Rendezvous(
            "tcp",
            host=host,
            port=_integer(env, "MASTER_PORT", launch.launcher),
            has_server=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=attempt,
        )
    if launch.launcher == "mpi" and launch.local_size == launch.world_size:
        folder = f"{temp_folder}/smp-{user_id}"
        return Rendezvous("file", path=f"{folder}/{_mpi_job(env)}", private_folder=True)
    if launch.launcher == "slurm" and env.get("SLURM_JOB_ID", "").isdigit():
        return _slurm_rendezvous(env, host)
    if launch.launcher == "mpi" and env.get("SM_HOSTS"):
        return _sagemaker_rendezvous(env, host, port)
    if group is not None and (group.rank, group.size) == (launch.global_rank, launch.world_size):
        return _place_of_group(launch, group)
    missing = "MASTER_PORT" if host else "MASTER_ADDR and MASTER_PORT"
    hint = " (mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>)"
    raise ValueError(
        f"smp launch: {launch.world_size} {launch.launcher} processes on several hosts have no "
        f"meeting point: {missing} is not set; set it to the host of rank 0 and a free port"
        + (hint if launch.launcher == "mpi" else "")
    )


def _given_place(text: str, attempt: str) -> Rendezvous:
    """Returns the place that ``SMP_RENDEZVOUS`` names."""
    url, port = urlsplit(text), None
    with suppress(ValueError):  # the port is no number
        port = url.port
    if url.scheme == "file" and not url.netloc and url.path.startswith("/"):
        return Rendezvous("file", path=text.removeprefix("file://"), attempt=attempt)
    job = url.path.strip("/")
    if url.scheme != "tcp" or not (url.hostname and port and job):
        raise ValueError(
            f"smp launch: {RENDEZVOUS_VARIABLE}={text!r} is not understood; expected "
            "file:///absolute/path, or tcp://host:port/job of a store (smp store), with another "
            "name for each job"
        )
    return Rendezvous(
        "tcp",
        host=url.hostname,
        port=port,
        has_server=True,
        attempt=f"{job}#{attempt}",
        named_by=RENDEZVOUS_VARIABLE,
    )


def _place_of_group(launch: Launch, group: TorchGroup | None) -> Rendezvous:
    if group is not None and group.place is not None:
        return group.place
    store = "store" if group is None else group.store
    raise ValueError(
        f"smp launch: torch.distributed is initialized as rank {launch.global_rank} of "
        f"{launch.world_size} with a {store}, in which other processes cannot be met; initialize "
        "it with an address or a file (init_method), or set MASTER_ADDR and MASTER_PORT, RANK and "
        "WORLD_SIZE"
    )


def restart_count(env: Mapping[str, str]) -> str:
    """Returns the number of earlier starts of all ranks, which differs between attempts."""
    names = ("SMP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return next((env[name] for name in names if env.get(name)), "0")


def _mpi_job(env: Mapping[str, str]) -> str:
    parts = [f"{name}={env[name]}" for name in _MPI_JOB_VARIABLES if name in env]
    if not parts:
        raise ValueError(
            "smp launch: mpirun has set no variable that identifies the job (PMIX_NAMESPACE); "
            "set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port"
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _slurm_rendezvous(env: Mapping[str, str], host: str | None) -> Rendezvous:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    step = env.get("SLURM_STEP_ID", "0")
    job = int(env["SLURM_JOB_ID"]) * 16 + (int(step) if step.isdigit() else 0)
    return Rendezvous(
        "tcp",
        host=host or first_slurm_host(nodes),
        port=_FIRST_PORT + job % _NUM_PORTS,
        attempt=restart_count(env),
    )


def _sagemaker_rendezvous(env: Mapping[str, str], host: str | None, port: str | None) -> Rendezvous:
    """Returns the place in a SageMaker job, whose first host runs ``mpirun`` and has rank 0."""
    try:
        hosts = sorted(given_files.parse_json(env["SM_HOSTS"]))
        first = str(hosts[0])
    except (ValueError, TypeError, IndexError):
        raise ValueError(
            f"smp launch: SM_HOSTS={env['SM_HOSTS']!r} is not a JSON list of host names; correct "
            "it, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    job = hashlib.sha256(f"{env.get('SAGEMAKER_JOB_NAME', '')} {hosts}".encode()).digest()
    number = int(port) if port else _FIRST_PORT + int.from_bytes(job[:4], "big") % _NUM_PORTS
    return Rendezvous("tcp", host=host or first, port=number, attempt=restart_count(env))
