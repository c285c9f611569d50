"""The process-wide runtime: `init` makes it, `shutdown` ends it, `current` returns it."""

from __future__ import annotations

import copyreg
import json
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

import smp._C as _C
from smp._device import is_accelerator
from smp.config.processes import check_same_topology
from smp.config.sources import ReadConfig, UserConfig, compare_configs, read_config
from smp.world import connecting, failure, lanes, nccl, process_hooks, thread_device
from smp.world.attached import (
    Copies,
    Detection,
    Dropout,
    PartGradients,
    Pipeline,
    TorchOptimizers,
    Verification,
)
from smp.world.host_groups import check_dist_backend, describe
from smp.world.interfaces import INTERFACE_VARIABLE, HostAddress, choose_way
from smp.world.job_secret import SECRET_KEY, fingerprint, given_secret, share_secret
from smp.world.launch import Launch, plan_rendezvous, read_launch, with_hosts
from smp.world.log import first_rank_log, logger
from smp.world.members import Members
from smp.world.observers import Observers
from smp.world.presence import await_key, tell_failure
from smp.world.process_groups import ProcessGroups
from smp.world.rank import Rank
from smp.world.rendezvous import Hello, MeetingPoint, machine_id, meet, raise_first_error
from smp.world.run_record import RunRecord, check_files, hello_of
from smp.world.settings import (
    Settings,
    device_of,
    host_advice,
    look_at_devices,
    read_settings,
    shares_gpus,
)
from smp.world.shrinking import refuse_shrinking
from smp.world.spares import Newcomer, claim_number, wait_for_place
from smp.world.steps import Steps
from smp.world.survivor_agreement import Decision
from smp.world.survivors import Survivors, await_decision
from smp.world.torch_group import read_torch_group, refuse_lonely_worker
from smp.world.wrapped import Wrapped, module_manager


class Runtime:
    """An initialized rank, and its models, steps and tools. `init` makes it, `shutdown` ends it.

    Attributes:
        rank: place, settings and connections of this process.
        wrapped: models and optimizers.
        steps: running step and counts of earlier ones.
        process_groups: process groups of `torch.distributed`.
        timeline: records the work of this rank while a reader wants it.
        pipeline: state that the partitioned models of several pipeline ranks share.
        dropout: draws masks that do not depend on the layout, if the configuration wants them.
        detection: finds NaN and infinities, while it is wanted.
        verification: records results, if `smp verify` has started the job.
        observers: tools that look at models and steps.
        torch_optimizers: looks at PyTorch's own, from the first wrapped model on.
        part_gradients: watches how the script uses gradients, if ranks have parts of a model.
        survivors: meets the other ranks after a failure, if they are to go on then.
        launched: number that the launcher gave to each rank, index = global rank.
        on_resize: callbacks that receive what has become of the ranks after a failure.
        record: writes what happens to this job, if files are named for it.
        newcomer: place of a lost rank that this process has, while it has no state.
        content_to_give: makes what the script in a process with the place of a lost rank gets.
        copies: keeps a copy of another rank's state, if the configuration wants that.
        step_to_repeat: gives a process with a copy the result of the step before; None: done.
        has_newcomers: whether some process has come later.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.wrapped = Wrapped()
        self.steps = Steps(rank)
        self.process_groups = ProcessGroups(rank)
        self.timeline = _C.Timeline(str(rank.device))
        self.pipeline: Pipeline | None = None
        self.dropout: Dropout | None = None
        self.detection: Detection | None = None
        self.verification: Verification | None = None
        self.torch_optimizers: TorchOptimizers | None = None
        self.part_gradients: PartGradients | None = None
        self._activation_store: _C.ActivationStore | None = None
        self.survivors: Survivors | None = None
        self.launched = list(range(rank.world_size))
        self.on_resize: list[Callable[[Any], None]] = []
        self.newcomer: Newcomer | None = None
        self.content_to_give: Callable[[], Any] | None = None
        self.has_newcomers = False
        self.copies: Copies | None = None
        self.step_to_repeat: Callable[[str], Any] | None = None
        self._met: Members | None = None
        self._on_shutdown: list[Callable[[], None]] = []
        self._closed = False
        self.record = RunRecord(self)
        self.observers = Observers(self)

    @property
    def has_taken_place(self) -> bool:
        """True if this process has come later."""
        return self.number >= self.rank.launch.first_size

    @property
    def number(self) -> int:
        """Returns the number that the launcher gave to this process."""
        waits = self.newcomer
        return self.launched[self.rank.global_rank] if waits is None else waits.number

    def is_first_of_old(self, newcomers: Collection[int]) -> bool:
        """Returns whether this is the first rank that has not just taken a place.

        Args:
            newcomers: numbers that the launcher gave to those that have.
        """
        old = next(rank for rank, number in enumerate(self.launched) if number not in newcomers)
        return self.rank.global_rank == old

    @property
    def server(self) -> _C.Server | None:
        """Module server of the partitioned models; None without several pipeline ranks."""
        return None if self.pipeline is None else self.pipeline.server

    @property
    def meeting(self) -> dist.Store | None:
        """Store in which the ranks have met; None in a world of one."""
        return None if self._met is None else self._met.store

    @property
    def activation_store(self) -> _C.ActivationStore | None:
        """Keeps arguments of checkpointed modules in host memory; None without
        `offload_activations`."""
        config = self.rank.config
        if not config.offload_activations:
            return None
        if self._activation_store is None:
            self._activation_store = _C.ActivationStore(
                str(self.rank.device), config.activation_loading_horizon
            )
        return self._activation_store

    def connect(
        self, store: dist.Store, meeting: Sequence[Hello], own_host: str, given: bytes | None
    ) -> None:
        """Connects to the other ranks of a world of more than one. Collective.

        Args:
            store: keys of this init.
            meeting: hello of each rank, index = global rank.
            own_host: address of this machine as others see it, if `meeting` does not have it.
            given: secret of this job from the environment; None: the job draws one.
        """
        self._met = Members(store, list(meeting), own_host, given, self.launched)
        self._connect(store)
        if self.rank.config.goes_on:
            self._watch_for_failures()
        self.process_groups.open(store, loopback=self._met.is_one_machine)
        self.rank.wait_for_all("smp.init")
        self._note_connected()
        self._show_connections()
        self.record.started(meeting)

    def _connect(self, store: dist.Store) -> None:
        """Makes the connections of the ranks that have met."""
        assert self._met is not None
        meeting, given, own_host = self._met.hellos, self._met.secret, self._met.own_host
        own = meeting[self.rank.global_rank]
        loopback = self._met.is_one_machine
        if not loopback and own.way["interface"]:
            # Groups of ours and of the script would otherwise look up an address by the host name.
            os.environ.setdefault(INTERFACE_VARIABLE, own.way["interface"])
        rank = self.rank
        if given is None and rank.global_rank:
            await_key(store, rank.global_rank, rank.world_size, SECRET_KEY, rank.timeout_s)
        self._met.secret = share_secret(store, self.rank.global_rank, given)
        rank.connect(
            store,
            loopback=loopback,
            own_host=own.way["address"] or own_host,
            own_address=own.way["address"],
            secret=self._met.secret,
            addresses=[] if loopback else [other.way["address"] for other in meeting],
            machine=f"{own.host} {own.machine}",  # hosts may be simulated
            shares_gpus=shares_gpus(
                [other.host for other in meeting],
                [other.device for other in meeting],
                [other.num_devices for other in meeting],
            ),
        )

    def _watch_for_failures(self) -> None:
        assert self._met is not None
        if self.rank.global_rank == 0:
            failure.note_given_up([])
        self.survivors = self._met.watch(self.rank)

    def _note_connected(self) -> None:
        if self.survivors is not None:
            self.survivors.is_connected = True

    def _show_connections(self) -> None:
        assert self._met is not None
        own = self._met.hellos[self.rank.global_rank]
        words, picture = self._met.placement(self.rank.grid)
        for line in words:
            first_rank_log.info("smp: %s", line)
        first_rank_log.debug("%s", picture)
        if text := describe(self.rank.comms.by_hosts):
            first_rank_log.debug("smp: %s", text)
        if not self._met.is_one_machine:
            first_rank_log.debug("smp: %s takes part as %s", own.host, HostAddress(**own.way))
        if is_accelerator(self.rank.device) and self.rank.mailbox is not None:
            if text := lanes.describe(self.rank.mailbox.lanes()):
                first_rank_log.info("smp: tensors between devices: %s", text)

    def enter(
        self, store: dist.Store, newcomer: Newcomer, own_host: str, given: bytes | None
    ) -> None:
        """Enters a place among the ranks, without a connection yet. Not collective.

        Args:
            store: keys of this init.
            newcomer: the place of this process.
            own_host, given: see `connect`.
        """
        place = newcomer.place
        assert place is not None
        secret = share_secret(store, newcomer.number, given)  # the number is no rank's
        self._met = Members(store, place.hellos, own_host, secret, place.launched, place.generation)
        self.launched, self.rank.keepers = place.launched, place.keepers
        self.newcomer = newcomer
        self.rank.stand_apart()

    def join(self) -> Decision | None:
        """Joins the other ranks in a process that has a place among them. Collective.

        Returns:
            their decision; None: they go on without this process.
        """
        assert self._met is not None and self.newcomer is not None
        self.newcomer.ask_for_state()
        decision = await_decision(self._met.keys, self.newcomer, self.rank.timeout_s)
        newcomers, own = dict(decision.newcomers), self.rank.global_rank
        if newcomers.get(own) != self.newcomer.number:
            return None
        failure.note_taken(self.newcomer.number)
        self.newcomer.close(has_joined=True)
        self.newcomer, self.rank.is_apart = None, False
        self.regroup(decision.kept, newcomers, own)
        return decision

    def regroup(self, kept: Sequence[int], newcomers: Mapping[int, int], own: int) -> None:
        """Connects the ranks that go on, in place of all. Collective over them.

        Models and optimizers stay; their owners lay out again what uses groups.

        Args:
            kept: present global ranks, index = global rank from now on; -1: a newcomer.
            newcomers: number of the process that takes a place, by global rank from now on.
            own: global rank of this process from now on.

        Raises:
            PeerFailure, RuntimeError: one of them has failed meanwhile.
        """
        assert self._met is not None
        self.end_groups()
        rank, met = self.rank, self._met
        met.become(kept, newcomers)
        self.launched, store = met.launched, met.keys
        self.has_newcomers |= bool(newcomers)
        launch = replace(rank.launch, global_rank=own, world_size=len(kept))
        rank.take_place(with_hosts(launch, [other.host for other in met.hellos]))
        first_rank_log.begin(rank.global_rank)
        self.record.met(met.hellos)
        self.process_groups = ProcessGroups(rank)
        if rank.may_lose_ranks:  # before connections: a rank may fail while these are made
            self._watch_for_failures()
        if len(kept) > 1:
            self._connect(store)
            self.process_groups.open(store, loopback=met.is_one_machine)
            rank.wait_for_all("the meeting of the ranks that go on")
            self._show_connections()
        self._note_connected()
        rank.repeat_request()

    def end_groups(self) -> None:
        """Ends connections and groups, and keeps models. Not collective after a failure."""
        if self.survivors is not None:
            self.survivors.close()
            self.survivors = None
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.rank.drop_communicators()
        self.process_groups.close()
        self.rank.close()

    def add_keys(self, read: ReadConfig) -> None:
        """Takes over the configuration of a later `init` with the same layout. Collective."""
        assert read.config is not None
        self.rank.config, self.rank.given = read.config, read.given
        self.process_groups.make_if_wanted()

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Registers a callback for when other ranks need this one no more; the last runs first."""
        self._on_shutdown.append(callback)

    def close(self) -> None:
        """Says goodbye to the other ranks and ends everything. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:  # every part is ended, whatever others raise
            if self.survivors is not None:
                last_first.callback(self.survivors.withdraw)
            if self.newcomer is not None:
                last_first.callback(self.newcomer.close, has_joined=False)
            last_first.callback(_C.set_rank_prefix, "")
            last_first.callback(_C.use_host_allocator, False)
            last_first.callback(self.rank.close)
            last_first.callback(self.process_groups.close)
            last_first.callback(self._drop_references)
            for callback in self._on_shutdown:
                last_first.callback(callback)
            self.rank.leave()
            if self.survivors is not None and not _has_failed:
                self.survivors.note_over()

    def _drop_references(self) -> None:
        self.rank.drop_communicators()
        self.rank.terms_at = None
        self.wrapped.forget()
        self.pipeline = None
        self._on_shutdown = []


# ---- the process-wide object -------------------------------------------------------

_current: Runtime | None = None
_meeting_point = MeetingPoint()
_failing: tuple[failure.FailureFile, int] | None = None  # file and rank, also after a run
_has_hooks = False
_has_failed = False  # an uncaught exception has ended the script
_init_culprit: failure.Culprit | None = None  # culprit of a failed smp.init


def current() -> Runtime:
    """Returns the runtime of this process.

    Raises:
        RuntimeError: `smp.init` has not been called.
    """
    if _current is None:
        raise RuntimeError("smp is not initialized; call smp.init() first, once in each process")
    return _current


def own_rank() -> Rank:
    """Returns the rank of this process."""
    return current().rank


# Copies and pickles of objects that hold a rank or a runtime get those of the process.
copyreg.pickle(Rank, lambda _: (own_rank, ()))
copyreg.pickle(Runtime, lambda _: (current, ()))


def is_initialized() -> bool:
    """Returns whether `init` was called in this process and `shutdown` was not."""
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
    global _init_culprit
    env = os.environ
    if _current is not None:
        _init_again(_current, config, env)
        return
    settings = read_settings(env)
    hostname = socket.gethostname()
    group = read_torch_group(env)
    launch = read_launch(env, hostname, group)
    refuse_lonely_worker(launch)
    read = read_config(config, {}, env, launch.world_size)
    if settings.device != "cpu":
        nccl.set_device_queues()  # before the first look, which may load the driver
    device_type, num_devices = look_at_devices(settings)
    if launch.world_size == 1 and not launch.is_spare:
        if read.error is not None:
            raise ValueError(read.error)
        assert read.config is not None
        check_dist_backend(read.config, [[0]], [launch.hostname], device_type)
        check_files(settings, 0)
        rank = Rank(read, launch, settings, device_of(device_type, 0, num_devices))
        runtime = Runtime(rank)
        _start(runtime, read.notes)
        _install_hooks()  # the end of the script waits for saves, and is an event
        runtime.record.started([hello_of(launch, device_type, num_devices)])
        return
    store = _meeting_point.open(launch, env, settings.timeout_s, group)
    if launch.spares is not None or (read.config is not None and read.config.goes_on):
        launch = claim_number(store, launch)
    _show_failures(launch.global_rank)
    way, secret, own_error = HostAddress("", "", ""), None, None
    try:
        way = choose_way(env, _meeting_point.host, hostname)
        secret = given_secret(env)
        check_files(settings, launch.global_rank)
        if read.config is not None and read.config.goes_on:
            place = plan_rendezvous(launch, env, tempfile.gettempdir(), os.getuid(), group)
            refuse_shrinking(
                read.config.on_failure, launch, place, env, device_type, settings.transport
            )
    except ValueError as error:  # all ranks are to hear of it
        own_error = str(error)
    hello = replace(
        hello_of(launch, device_type, num_devices),
        machine=machine_id(hostname),
        config=read.config_dict(),
        error=read.error or own_error,
        way=asdict(way),
        secret=fingerprint(secret),
    )
    own_host = env.get("MASTER_ADDR") or _meeting_point.host or hostname
    if launch.is_spare:
        _take_place(store, launch, hello, read, settings, own_host, secret)
        return
    meeting = meet(store, launch, hello, read, settings)
    meeting = [replace(other, run=meeting[0].run) for other in meeting]
    launch = with_hosts(launch, [other.host for other in meeting])
    device = device_of(device_type, launch.local_rank, num_devices)
    runtime = Runtime(Rank(read, launch, settings, device))
    _start(runtime, read.notes)
    try:
        runtime.connect(store, meeting, own_host, secret)
    except BaseException as error:
        if not runtime.rank.is_watched:
            tell_failure(store, launch.global_rank, error)
        runtime.rank.report_raised("smp.init", error)
        _init_culprit = runtime.rank.culprit(error)
        _end()
        raise


def _take_place(
    store: dist.Store,
    launch: Launch,
    hello: Hello,
    read: ReadConfig,
    settings: Settings,
    own_host: str,
    secret: bytes | None,
) -> None:
    """Waits until this process is needed, and starts it in its place."""
    newcomer, launch = wait_for_place(store, launch, hello, read)
    # The ranks have made these checks with each other.
    settings = replace(settings, check_first_step="0")
    device = device_of(hello.device, launch.local_rank, hello.num_devices)
    runtime = Runtime(Rank(read, launch, settings, device))
    runtime.enter(store, newcomer, own_host, secret)
    _start(runtime, read.notes)


def _start(runtime: Runtime, notes: Sequence[str]) -> None:
    global _current
    _current, rank = runtime, runtime.rank
    thread_device.enter(rank.device)
    _C.use_host_allocator(rank.settings.host_pool and rank.device.type == "cpu")
    process_hooks.make_log_visible(logger)
    first_rank_log.begin(rank.global_rank)
    for note in (*notes, *host_advice(rank.grid.groups("tp"), rank.launch.hosts)):
        first_rank_log.warning(note)


def _show_failures(global_rank: int) -> None:
    """Shortens reports of later failures on the terminal; their stacks are written to a file."""
    global _failing
    file = failure.FailureFile(_meeting_point.identity)
    file.open()
    _failing = file, global_rank
    _install_hooks()


def _install_hooks() -> None:
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        process_hooks.install(_on_uncaught, _at_exit, _after_fork_in_child)


def _on_uncaught(error: BaseException) -> bool:
    global _has_failed
    _has_failed = True
    culprit = _init_culprit
    if _current is not None:
        culprit = _current.rank.culprit(error)
        _current.rank.report_raised("the script (uncaught exception)", error)
        _current.record.failed(culprit, error, ends=True)
    if _failing is None or not _failing[0].is_own_process:
        return False
    file, number = _failing
    failure.show(error, culprit or failure.Culprit(number, f"global_rank {number}"), file)
    return True


def _at_exit() -> None:
    """Says goodbye at the end of a script, and ends the runtime."""
    uses_mpi = _current is not None and _current.rank.settings.transport == "mpi"
    _end()
    if _has_failed:
        connecting.exit_if_left_behind(1)
    if uses_mpi:
        _C.mpi_finalize()


def _after_fork_in_child() -> None:
    for owner in (_current, _meeting_point):
        process_hooks.keep_forever(owner)


def _init_again(runtime: Runtime, config: UserConfig, env: Mapping[str, str]) -> None:
    """Adds keys to the configuration of a running rank; the ranks must agree again."""
    rank = runtime.rank
    rank.check_process("smp.init")
    read = read_config(config, rank.given, env, rank.world_size)
    if read.config is not None:
        try:
            check_same_topology(rank.config, read.config)
        except ValueError as error:
            read = ReadConfig({}, [], None, str(error))
    configs: list[dict[str, Any]] = [{"config": read.config_dict(), "error": read.error}]
    if rank.exchange is not None:
        own = json.dumps(configs[0]).encode()
        configs = [json.loads(p) for p in rank.exchange.all_gather(rank.groups["world"], own)]
    raise_first_error([other["error"] for other in configs])
    compare_configs([other["config"] for other in configs])
    before, after = rank.config.to_dict(), configs[0]["config"]
    runtime.add_keys(read)
    changes = [f"{key}={after[key]!r}" for key in after if after[key] != before[key]]
    if changes:
        read.notes.append("smp config: changed by a later smp.init: " + ", ".join(changes))
    for note in read.notes:
        first_rank_log.warning(note)


def shutdown() -> None:
    """Says goodbye to the other ranks and ends everything that `init` started.

    Waits until the other ranks call it too (or fail). May be called at any time outside of step
    functions, and twice; `init` may follow, with another layout. Runs by itself at the end of the
    process.

    Raises:
        RuntimeError: a step function runs, whose threads and messages cannot end in the middle.
    """
    if _current is not None and _current.steps.running is not None:
        raise RuntimeError(
            f"{_current.rank.prefix}smp.shutdown was called inside step "
            f"'{_current.steps.running}'; call it when the step function has returned (or raise an "
            "exception, which ends all ranks)"
        )
    _end()


def _end() -> None:
    global _current
    runtime, _current = _current, None
    module_manager.translate_functions.clear()  # their models end, too
    first_rank_log.begin(None)
    if runtime is not None and runtime.rank.is_own_process:
        runtime.close()
        _meeting_point.end()
