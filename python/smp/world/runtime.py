"""The one process-wide object: who this process is, and everything that is running.

`init` makes it, `shutdown` ends it, `current` returns it. The environment is read here and
nowhere else.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from smp import _C
from smp._C import PeerFailure
from smp.config.schema import Config, check_same_topology
from smp.config.sources import Plan, UserConfig, compare_configs, make_plan
from smp.world import process_hooks
from smp.world.groups import Groups, TorchGroups, build_groups, make_grid, own_groups
from smp.world.launch import Launch, read_launch, with_hosts
from smp.world.links import Links
from smp.world.rendezvous import (
    Hello,
    MeetingPoint,
    exchange_hellos,
    machine_id,
    raise_first_error,
    say_farewell,
)
from smp.world.settings import (
    Settings,
    check_devices,
    check_gpu_sharing,
    choose_device_type,
    device_of,
    host_advice,
    read_settings,
    shares_gpus,
)
from smp.world.wrapped import ModuleManager, WrappedObjects

FAILURE_VARIABLE = "SMP_FAILURE_FILE"

logger = logging.getLogger("smp")


class State:
    """Global state that user code reads as `smp.state`."""

    def __init__(self) -> None:
        self.module_manager = ModuleManager()

    @property
    def cfg(self) -> Config | None:
        """Effective configuration, one attribute per key; None before `init`."""
        return None if _current is None else _current.config

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """By tp_rank: indices of the optimizer's parameters by their names in the model.

        The ranks of a tensor-parallel group have the same names. Empty before an optimizer is
        wrapped; of several the last one counts.
        """
        if _current is None or _current.optimizer is None:
            return []
        indices = _current.optimizer.param_name_to_index()
        return [dict(indices) for _ in range(_current.sizes["tp"])]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank: the first name of each of the optimizer's parameters, by index."""
        return [
            {index: name for name, index in reversed(indices.items())}
            for indices in self.param_name_to_index_tp_group
        ]


class Runtime(WrappedObjects):
    """One initialized rank. Made by `init`, ended by `shutdown`; see `current`.

    Attributes:
        config: effective configuration.
        launch: who started this process, its host and the hosts of all ranks.
        settings: values of the `SMP_*` variables.
        grid: places of all ranks.
        global_rank, world_size, local_rank, local_size: as the names say.
        ranks: position of this process in its group, by kind (`groups.GROUP_KINDS` and
            `groups.SHARD_KINDS`).
        sizes: size of that group, by kind.
        groups: global ranks of that group, ascending, by kind.
        device: where the tensors of this rank live.
        links: liveness, mailbox and object exchange; None in a world of one.
        comms: tensor communicators of the groups; its members are None for groups of one.
        pipeline: what the partitioned models of several pipeline ranks have in common.
        server: module server of these models.
        num_scaled_backwards: that are under way and began at a loss with its scale.
        timeline: records what this rank does while somebody wants to see it.
        num_steps: finished calls of step functions; num_begun: those that began.
        has_trained: one of these computed gradients.
        has_gradients: one did after the last update of an optimizer.
        stops: finds the boundary between steps at which all ranks stop.
        detection: of NaN and infinities, while somebody wants it.
    """

    def __init__(
        self, plan: Plan, launch: Launch, settings: Settings, device: torch.device
    ) -> None:
        super().__init__()
        assert plan.config is not None
        self.config = plan.config
        self.given, self.notes = plan.given, plan.notes
        self.launch = launch
        self.settings = settings
        self.device = device
        self.global_rank, self.world_size = launch.global_rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.grid = make_grid(plan, launch.world_size)
        rank = self.global_rank
        self.shard_size = self.config.shard_size(self.grid.group_size("rdp"))
        self.groups = own_groups(self.grid, rank, self.shard_size)
        self.ranks = {kind: ranks.index(rank) for kind, ranks in self.groups.items()}
        self.sizes = {kind: len(ranks) for kind, ranks in self.groups.items()}
        self.num_scaled_backwards = 0
        self.pipeline: object | None = None
        self.server: _C.Server | None = None
        self.timeline = _C.Timeline()
        self.num_steps = self.num_begun = 0
        self.has_trained = self.has_gradients = False
        self.stops = _C.StopAgreement(_C.FaultBoard(self.global_rank))
        self.detection: object | None = None
        self._activation_store: _C.ActivationStore | None = None
        self.pid = os.getpid()
        self.links: Links | None = None
        self.comms = Groups()
        self._torch_groups: TorchGroups | None = None
        self._store: dist.Store | None = None
        self._running_step: str | None = None
        self._loopback, self._closed = True, False
        self._on_step: list[Callable[[float], None]] = []
        self._on_shutdown: list[Callable[[], None]] = []
        _C.set_rank_prefix(f"[global_rank {rank} | {self.grid.describe(rank)}] ")

    def connect(
        self,
        store: dist.Store,
        *,
        loopback: bool,
        own_host: str,
        machine: str,
        shares_gpus: bool = False,
    ) -> None:
        """Connects to the other ranks of a world of more than one. Collective.

        Args:
            store: keys of this init.
            loopback: all ranks are on one machine; nothing listens elsewhere.
            own_host: address of this machine as others see it.
            machine: equal on ranks that may try to share memory.
            shares_gpus: some ranks use one GPU together.
        """
        self._store, self._loopback = store, loopback
        self.links = Links(
            self.global_rank,
            [self.grid.describe(rank) for rank in range(self.world_size)],
            self.settings.timeout_s,
            self.settings.hang_s,
        )
        self.stops = self.links.stops
        self.links.connect(
            store,
            own_host=own_host,
            loopback=loopback,
            transport=self.settings.transport,
            machine=machine,
            shared_memory=self.settings.shared_memory,
            ring_mb=self.settings.ring_mb,
        )
        self.comms = build_groups(
            self.grid,
            self.global_rank,
            store,
            shard_size=self.shard_size,
            device=self.device,
            board=self.links.board,
            machine=machine,
            hosts=self.launch.hosts if self.config.sdp_hierarchical_allgather else (),
            shared_memory=self.settings.shared_memory,
            loopback=self._loopback,
            timeout_s=self.settings.timeout_s,
            shares_gpus=shares_gpus,
        )
        if self.config.ddp:
            self._torch_groups = self._make_torch_groups(store)
        self.links.wait_for_all("smp.init")

    def _make_torch_groups(self, store: dist.Store) -> TorchGroups:
        return TorchGroups(
            self.grid,
            self.global_rank,
            store,
            shard_size=self.shard_size,
            device=self.device,
            loopback=self._loopback,
            timeout_s=self.settings.timeout_s,
        )

    # ---- health ----------------------------------------------------------------

    @property
    def board(self) -> _C.FaultBoard | None:
        """Health of the other ranks; None in a world of one."""
        return None if self.links is None else self.links.board

    @property
    def mailbox(self) -> _C.Mailbox | None:
        """Messages between ranks; None in a world of one."""
        return None if self.links is None else self.links.mailbox

    @property
    def exchange(self) -> _C.ObjectExchange | None:
        """Byte strings between ranks; None in a world of one."""
        return None if self.links is None else self.links.exchange

    @property
    def prefix(self) -> str:
        """Words in front of every error of this rank."""
        return _C.rank_prefix()

    def check_process(self, what: str) -> None:
        """Refuses communication in a forked child, which has none of our threads.

        Raises:
            RuntimeError: names `what` and says what to do.
        """
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"{self.prefix}{what} was called in a process forked from process {self.pid}, "
                "which is the one that called smp.init; communicate there (ranks and sizes may be "
                "read here)"
            )

    def request_stop(self) -> None:
        """Asks all ranks to stop at one boundary between steps."""
        if self.links is not None:
            self.links.request_stop()
        else:
            self.stops.decide(self.stops.freeze())

    def report_raised(self, where: str, error: BaseException) -> None:
        """Tells all other ranks that this one raised, unless it raised because of them."""
        if self.links is None or os.getpid() != self.pid:
            return
        if isinstance(error, PeerFailure) and self.links.board.fault_text() is not None:
            self.links.has_failed = True  # they know what we know
        elif not self.links.has_failed:
            self.links.report_raised(where, process_hooks.describe_exception(error))

    @contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """An exception that leaves the block is told to all other ranks."""
        try:
            yield
        except BaseException as error:  # sys.exit and Ctrl-C, too
            self.report_raised(where, error)
            raise

    # ---- activations -----------------------------------------------------------

    @property
    def activation_store(self) -> _C.ActivationStore | None:
        """Keeps arguments of checkpointed modules in host memory; None without
        `offload_activations`."""
        if not self.config.offload_activations:
            return None
        if self._activation_store is None:
            horizon = self.config.activation_loading_horizon
            self._activation_store = _C.ActivationStore(str(self.device), horizon)
        return self._activation_store

    # ---- steps -----------------------------------------------------------------

    @property
    def running_step(self) -> str | None:
        """Name of the step function that runs now."""
        return self._running_step

    def inject_fault(self, step: int, microbatch: int | None = None) -> None:
        """Misbehaves if `SMP_FAULT` says so for this place."""
        if self.settings.fault is not None:
            self.settings.fault.strike(self.global_rank, step, microbatch)

    @contextmanager
    def scaling_loss(self) -> Iterator[None]:
        """The block runs a backward that began with the loss scale, where it has to."""
        self.num_scaled_backwards += 1  # of several microbatches at once in a pipeline
        try:
            yield
        finally:
            self.num_scaled_backwards -= 1

    @contextmanager
    def exclusive_step(self, name: str) -> Iterator[None]:
        """Marks a step function as running.

        Raises:
            RuntimeError: one is running already.
        """
        if self._running_step is not None:
            raise RuntimeError(
                f"{self.prefix}step '{name}' was called inside step '{self._running_step}'; "
                "call step functions one after the other, and plain functions inside of them"
            )
        self._running_step = name
        try:
            yield
        finally:
            self._running_step = None

    def on_step(self, callback: Callable[[float], None]) -> None:
        """Calls back with the duration in seconds of each finished step."""
        self._on_step.append(callback)

    def step_finished(self, duration_s: float) -> None:
        """A step function returned after `duration_s`."""
        self.num_steps += 1
        for callback in self._on_step:
            callback(duration_s)

    # ---- torch groups ----------------------------------------------------------

    def process_group(self, kind: str) -> dist.ProcessGroup:
        """The `torch.distributed` group of a kind that this rank belongs to.

        Raises:
            RuntimeError: `ddp` is off.
        """
        self.check_process(f"get_{kind}_process_group")
        if not self.config.ddp:
            raise RuntimeError(
                f"{self.prefix}get_{kind}_process_group needs the configuration key ddp, "
                "which is False; pass ddp=True to smp.init"
            )
        if self._torch_groups is None:  # a world of one makes them when asked
            self._torch_groups = self._make_torch_groups(dist.HashStore())
        return self._torch_groups[kind]

    # ---- change and end --------------------------------------------------------

    def merge_config(self, plan: Plan) -> None:
        """Takes over the configuration of a later `init` with the same topology. Collective."""
        assert plan.config is not None
        self.config, self.given = plan.config, plan.given
        if self.config.ddp and self._torch_groups is None and self._store is not None:
            self._torch_groups = self._make_torch_groups(self._store)

    def log_at_rank0(self, notes: list[str]) -> None:
        for note in notes if self.global_rank == 0 else ():
            logger.warning(note)

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Calls back, last registered first, when nobody needs this rank any more."""
        self._on_shutdown.append(callback)

    def close(self) -> None:
        """Says goodbye to the other ranks and ends everything. May be called twice."""
        if self._closed:
            return
        self._closed = True
        links, torch_groups = self.links, self._torch_groups
        with ExitStack() as last_first:  # every part is ended, whatever others raise
            last_first.callback(_C.set_rank_prefix, "")
            last_first.callback(_C.use_host_allocator, False)
            if links is not None:
                last_first.callback(links.close)
            if torch_groups is not None:
                last_first.callback(torch_groups.destroy)
            last_first.callback(self._drop_references)
            for callback in self._on_shutdown:
                last_first.callback(callback)
            if links is not None:
                links.leave()

    def _drop_references(self) -> None:
        if self.links is not None and not self.links.is_healthy:
            self.comms.abort()
        self.comms = Groups()
        self.forget_wrapped()
        self.pipeline = self.server = self._torch_groups = self._store = None
        self._on_shutdown, self._on_step = [], []


# ---- the process-wide object -------------------------------------------------------

_current: Runtime | None = None
_meeting_point = MeetingPoint()
_has_hooks = False

state = State()


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        RuntimeError: `smp.init` has not been called.
    """
    if _current is None:
        raise RuntimeError("smp is not initialized; call smp.init() first, once in each process")
    return _current


def is_initialized() -> bool:
    """Whether `init` was called in this process and `shutdown` was not."""
    return _current is not None


def init(config: UserConfig = None) -> None:
    """Reads the configuration, finds the other ranks, and sets up groups. Collective.

    A second call adds keys to the configuration; it may not change the layout of the ranks.

    Args:
        config: dict of configuration keys, or path of a JSON or YAML file. Values from the
            launcher (`SM_HP_MP_PARAMETERS`) win.
    Raises:
        ValueError: the configuration of some rank is wrong, or the ranks disagree; raised on all
            ranks with the same text.
        RuntimeError: ranks did not come.
    """
    env = os.environ
    if _current is not None:
        _init_again(_current, config, env)
        return
    settings = read_settings(env)
    hostname = socket.gethostname()
    launch = read_launch(env, hostname)
    plan = make_plan(config, {}, env, launch.world_size)
    device_type, num_devices = _look_at_devices(settings)
    if launch.world_size == 1:
        if plan.error is not None:
            raise ValueError(plan.error)
        _start(Runtime(plan, launch, settings, device_of(device_type, 0, num_devices)))
        return
    store = _meeting_point.open(launch, env, settings.timeout_s)
    hello = Hello(
        launch.world_size,
        launch.hostname,
        machine_id(hostname),
        device_type,
        num_devices,
        plan.config_dict(),
        plan.error,
    )
    hellos = _meet(store, launch, hello, plan, settings)
    launch = with_hosts(launch, [other.host for other in hellos])
    device = device_of(device_type, launch.local_rank, num_devices)
    runtime = Runtime(plan, launch, settings, device)
    _start(runtime)
    try:
        runtime.connect(
            store,
            loopback=len({other.machine for other in hellos}) == 1,
            own_host=env.get("MASTER_ADDR") or hostname,
            machine=f"{hello.host} {hello.machine}",  # hosts may be simulated
            shares_gpus=shares_gpus(
                [other.host for other in hellos],
                [other.device for other in hellos],
                [other.num_devices for other in hellos],
            ),
        )
    except BaseException as error:
        runtime.report_raised("smp.init", error)
        _end()
        raise


def _look_at_devices(settings: Settings) -> tuple[str, int]:
    """ "cpu" or "cuda", and the number of visible GPUs."""
    wants_cuda = settings.device != "cpu"
    device_type = choose_device_type(
        settings, cuda_available=wants_cuda and torch.cuda.is_available()
    )
    return device_type, torch.cuda.device_count() if device_type == "cuda" else 0


def _meet(
    store: dist.Store, launch: Launch, hello: Hello, plan: Plan, settings: Settings
) -> list[Hello]:
    """The hellos of all ranks, once they agree."""
    hellos = exchange_hellos(store, launch, hello, settings.timeout_s)
    try:
        raise_first_error([other.error for other in hellos])
        compare_configs([other.config or {} for other in hellos])
        hosts = [other.host for other in hellos]
        nums_devices = [other.num_devices for other in hellos]
        check_devices(hosts, [other.device for other in hellos], nums_devices, settings.share_gpu)
        if hello.device == "cuda":
            grid = make_grid(plan, launch.world_size)
            check_gpu_sharing(grid.groups("dp"), hosts, nums_devices)
    except ValueError:
        say_farewell(store, launch)
        raise
    return hellos


def _start(runtime: Runtime) -> None:
    global _current, _has_hooks
    _current = runtime
    _C.use_host_allocator(runtime.settings.host_pool and runtime.device.type == "cpu")
    if runtime.world_size > 1 and not _has_hooks:
        _has_hooks = True
        process_hooks.install(_on_uncaught, _at_exit, _after_fork_in_child)
    process_hooks.make_log_visible(logger)
    hosts = runtime.launch.hosts
    runtime.log_at_rank0(runtime.notes + host_advice(runtime.grid.groups("tp"), hosts))


def _on_uncaught(error: BaseException) -> None:
    if _current is not None:
        _current.report_raised("the script (uncaught exception)", error)
        if path := os.environ.get(FAILURE_VARIABLE):
            board = _current.board
            knows_culprit = isinstance(error, PeerFailure) and board is not None
            culprit = board.fault_rank() if board and knows_culprit else _current.global_rank
            process_hooks.write_failure(path, culprit, error)


def _at_exit() -> None:
    """Says goodbye; the runtime of a finished script is nobody's any more."""
    uses_mpi = _current is not None and _current.settings.transport == "mpi"
    _end()
    if uses_mpi:
        _C.mpi_finalize()


def _after_fork_in_child() -> None:
    for owner in (_current, _meeting_point):
        process_hooks.keep_forever(owner)


def _init_again(runtime: Runtime, config: UserConfig, env: Mapping[str, str]) -> None:
    """Adds keys to the configuration of a running rank; the ranks must agree again."""
    runtime.check_process("smp.init")
    plan = make_plan(config, runtime.given, env, runtime.world_size)
    if plan.config is not None:
        try:
            check_same_topology(runtime.config, plan.config)
        except ValueError as error:
            plan = Plan({}, [], None, str(error))
    plans: list[dict[str, Any]] = [{"config": plan.config_dict(), "error": plan.error}]
    if runtime.exchange is not None:
        own = json.dumps(plans[0]).encode()
        plans = [json.loads(p) for p in runtime.exchange.all_gather(runtime.groups["world"], own)]
    raise_first_error([other["error"] for other in plans])
    compare_configs([other["config"] for other in plans])
    before, after = runtime.config.to_dict(), plans[0]["config"]
    runtime.merge_config(plan)
    changes = [f"{key}={after[key]!r}" for key in after if after[key] != before[key]]
    if changes:
        plan.notes.append("smp config: changed by a later smp.init: " + ", ".join(changes))
    runtime.log_at_rank0(plan.notes)


def shutdown() -> None:
    """Says goodbye to the other ranks and ends everything that `init` started.

    Waits until the other ranks call it too (or fail). May be called at any time outside of step
    functions, and twice; `init` may follow, with another layout. Runs by itself at the end of the
    process.

    Raises:
        RuntimeError: a step function runs, whose threads and messages cannot end in the middle.
    """
    if _current is not None and _current.running_step is not None:
        raise RuntimeError(
            f"{_current.prefix}smp.shutdown was called inside step '{_current.running_step}'; call "
            "it when the step function has returned (or raise an exception, which ends all ranks)"
        )
    _end()


def _end() -> None:
    global _current
    runtime, _current = _current, None
    state.module_manager.translate_functions.clear()  # their models end, too
    if runtime is not None and os.getpid() == runtime.pid:
        runtime.close()
        _meeting_point.end()
