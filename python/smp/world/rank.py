"""A rank: its place, settings, connections and communicators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import smp._C as _C
from smp.config.sources import ReadConfig
from smp.world import process_hooks
from smp.world.connections import Connections
from smp.world.failure import Culprit
from smp.world.groups import Groups, build_groups, make_grid, own_groups
from smp.world.launch import Launch
from smp.world.settings import Settings
from smp.world.shrinking import choose_keepers

if TYPE_CHECKING:
    from smp.world.between_steps import BetweenSteps

# Time in which a launcher starts another process, and that process comes to `init`.
_PATIENCE_S = 60.0


class Rank:
    """A rank between `init` and `shutdown`. Objects that need one take it as an argument.

    Its attributes do not change while steps run. A later `init` may add keys to `config`. After the
    loss of other ranks the place is another one (`Runtime.regroup`).

    Attributes:
        config: effective configuration; ``given`` are the keys that the user wrote.
        launch: launcher, host of this process and hosts of all ranks.
        settings: values of the `SMP_*` variables.
        device: device of the tensors of this rank.
        meter: progress of the device on the work given to it; measures nothing on the CPU.
        global_rank, world_size, local_rank, local_size: place of this process among all, and on
            its host.
        grid: places of all ranks.
        shard_size: ranks that hold one copy of a sharded state together.
        groups: global ranks of the group of this process, ascending, by kind
            (`groups.GROUP_KINDS` and `groups.SHARD_KINDS`).
        ranks: position of this process in that group, by kind.
        sizes: size of that group, by kind.
        pid: number of the process that called `init`.
        connections: liveness, messages and objects; None in a world of one.
        comms: tensor communicators of the groups; None for a group of one.
        stops: finds the boundary between steps at which all ranks stop.
        is_apart: whether other ranks have made the next call that communicates already, before a
            rank was lost, and do not make it again. So it is in a process that takes the place of
            the lost rank until it comes to where the others are.
        gathers_later: whether parts that other ranks update come with the next step only, as
            this rank has gone on after a failure between two steps, or has taken a place.
        keepers: rank that keeps a copy of each rank's state, index = global rank; empty without
            `redundancy`.
        between: notes about exchanges since the last step, and what others know about them; None
            inside of steps and without `redundancy`.
        terms_at: makes the `Terms` that roll calls compare, from a name of what the ranks do; None
            before a model is wrapped.
    """

    def __init__(
        self, read: ReadConfig, launch: Launch, settings: Settings, device: torch.device
    ) -> None:
        assert read.config is not None
        self.config, self.given = read.config, read.given
        self.settings = settings
        self.device = device
        self.meter = _C.DeviceMeter(str(device))
        self.pid = os.getpid()
        self._has_ended = self._is_alone = False
        self.is_apart = self.gathers_later = self._is_stop_asked = False
        self.keepers: list[int] = []
        self.between: BetweenSteps | None = None
        self.terms_at: Callable[[str], Any] | None = None
        self.take_place(launch)

    def take_place(self, launch: Launch) -> None:
        """Takes a place among the ranks of a launch, not connected to the others yet.

        Args:
            launch: own number, and the number of all ranks, which may be smaller than before.
        """
        self.launch = launch
        self.global_rank, self.world_size = launch.global_rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.grid = make_grid(self.config, launch.world_size)
        self.shard_size = self.config.shard_size(self.grid.group_size("rdp_cp"))
        self.groups = own_groups(self.grid, self.global_rank, self.shard_size)
        self.ranks = {kind: ranks.index(self.global_rank) for kind, ranks in self.groups.items()}
        self.sizes = {kind: len(ranks) for kind, ranks in self.groups.items()}
        if self.config.redundancy and not self.keepers:
            self.keepers = choose_keepers(launch.hosts)
        self.connections: Connections | None = None
        self.comms = Groups()
        self.stops = _C.StopAgreement(_C.FaultBoard(self.global_rank))
        _C.set_rank_prefix(f"[global_rank {self.global_rank} | {self.place}] ")

    def connect(
        self,
        store: dist.Store,
        *,
        loopback: bool,
        own_host: str,
        own_address: str,
        secret: bytes,
        addresses: Sequence[str],
        machine: str,
        shares_gpus: bool = False,
    ) -> None:
        """Connects to the other ranks of a world of more than one. Collective.

        Args:
            store: keys of this init.
            loopback: whether all ranks are on one machine; then nothing listens elsewhere.
            own_host: address of this machine as others see it.
            own_address: the same as a number; empty: not known.
            secret: secret of this job.
            addresses: address of each rank's machine, if known.
            machine: text that is equal on ranks that may share memory.
            shares_gpus: whether some ranks use one GPU together.
        """
        connections = Connections(
            self.global_rank,
            [self._describe(rank) for rank in range(self.world_size)],
            self.timeout_s,
            self.settings.hang_s,
            self.settings.hang_action == "raise",
            self.device,
            self.meter,
        )
        self.connections, self.stops = connections, connections.stops
        connections.board.set_addresses(list(addresses))
        connections.connect(
            store,
            own_host=own_host,
            own_address=own_address,
            loopback=loopback,
            secret=secret,
            transport=self.settings.transport,
            machine=machine,
            shared_memory=self.settings.shared_memory,
            ring_mb=self.settings.ring_mb,
            pipeline=self.groups["pp"][0],
            lane=self.settings.lane,
            lane_slot_mb=self.settings.lane_slot_mb,
        )
        self.comms = build_groups(
            self.grid,
            self.global_rank,
            store,
            connections.on_cpu,
            shard_size=self.shard_size,
            device=self.device,
            board=connections.board,
            machine=machine,
            gather_hosts=self.launch.hosts if self.config.gathers_by_hosts else (),
            sum_hosts=self.launch.hosts if self.config.sums_by_hosts else (),
            shared_memory=self.settings.shared_memory,
            timeout_s=self.timeout_s,
            hang_s=self.settings.hang_s,
            shares_gpus=shares_gpus,
            confirms_steps=self.may_lose_ranks,
        )

    @property
    def may_lose_ranks(self) -> bool:
        """True if the others go on when a rank is lost."""
        is_replaced = self.sizes["rdp"] > 1 or bool(self.keepers)
        return self.config.goes_on and (is_replaced or self.may_grow)

    @property
    def may_grow(self) -> bool:
        """True if the job has fewer replicas than at its beginning, and processes may add some."""
        return self.config.on_failure == "spare" and self.world_size < self.launch.first_size

    @property
    def patience_s(self) -> float:
        """Seconds for which ranks wait for a process that is started in place of a lost one.

        Without a word of the user that is no time for replicas, which can go on without it.
        """
        given = self.settings.replacement_s
        return (_PATIENCE_S if self.keepers else 0.0) if given is None else given

    def _describe(self, rank: int) -> str:
        """Returns the place of a rank in the grid, and its host if there are several."""
        hosts = self.launch.hosts
        host = f", host {hosts[rank]}" if len(set(hosts)) > 1 else ""
        return self.grid.describe(rank) + host

    def wait_for_all(self, what: str) -> None:
        """Waits until all ranks have made their connections. Collective."""
        if self.connections is not None:
            self.connections.wait_for_all(what)

    # ---- names of parts --------------------------------------------------------

    @property
    def place(self) -> str:
        """Coordinates of this rank in words: ``"pp 1 tp 0 rdp 0"``."""
        return self.grid.describe(self.global_rank)

    @property
    def prefix(self) -> str:
        """Words in front of every error of this rank."""
        return _C.rank_prefix()

    @property
    def timeout_s(self) -> float:
        """Bound of every wait."""
        return self.settings.timeout_s

    @property
    def board(self) -> _C.FaultBoard | None:
        """Health of the other ranks; None in a world of one."""
        return None if self.connections is None else self.connections.board

    @property
    def is_watched(self) -> bool:
        """True if the other ranks notice a failure of this one."""
        return self.connections is not None and self.connections.is_watched

    @property
    def mailbox(self) -> _C.Mailbox | None:
        """Messages between ranks; None in a world of one."""
        return None if self.connections is None else self.connections.mailbox

    @property
    def exchange(self) -> _C.ObjectExchange | None:
        """Byte strings between ranks; None in a world of one."""
        return None if self.connections is None or self._is_alone else self.connections.exchange

    def stand_apart(self) -> None:
        """Begins the time before this process joins the others in the place of a lost rank.

        Modules are split as in that place, and nothing is exchanged.
        """
        self.is_apart = True
        split = _C.TensorParallelGroup(None, self.ranks["tp"], self.sizes["tp"])
        self.comms = Groups(tp_group=split)

    @property
    def is_alone(self) -> bool:
        """True inside of `alone`."""
        return self._is_alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets this rank repeat alone what the others have done together before it came.

        Nothing is exchanged in the block, and nothing is broadcast.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    # ---- health ----------------------------------------------------------------

    @property
    def is_own_process(self) -> bool:
        """True if this is the rank's process; a forked child has none of its threads."""
        return os.getpid() == self.pid

    @property
    def can_communicate(self) -> bool:
        """True while the run goes on in this process, and no rank has failed."""
        has_failed = self.board is not None and self.board.fault_text() is not None
        return self.is_own_process and not self._has_ended and not has_failed

    def check_process(self, what: str) -> None:
        """Refuses communication as `check_run`, and where the others do not make this call again.

        Raises:
            RuntimeError: names ``what`` and the remedy.
        """
        self.check_run(what)
        if self.is_apart:
            raise RuntimeError(
                f"{self.prefix}{what} was called in a process that takes the place of a lost rank, "
                "where the others do not make this call again; call it after the step in which "
                "they are, and leave out what the result of smp.take_over replaces (a checkpoint "
                "that is loaded)"
            )
        if self.between is not None:
            self.between.notes.num_calls += 1

    def skips_call(self) -> bool:
        """Returns whether other ranks have made the present call before a failure."""
        if self.is_apart and self.between is not None:
            self.between.pass_call(self)
            return True
        return self.is_apart

    def check_run(self, what: str) -> None:
        """Refuses communication in a forked child, and when the run is over.

        Raises:
            RuntimeError: names ``what`` and the remedy; also after `shutdown`.
        """
        if self._has_ended:
            raise RuntimeError(
                f"{what} was called by an object of a run that smp.shutdown has ended; create "
                "models and optimizers again after smp.init"
            )
        if not self.is_own_process:
            raise RuntimeError(
                f"{self.prefix}{what} was called in a process forked from process {self.pid}, "
                "which is the one that called smp.init; communicate there (ranks and sizes may be "
                "read here)"
            )

    def check_sums(self) -> None:
        """Refuses to go on with sums of a device that a failure has cut off.

        The host has not waited for these sums, so the failure has not been raised yet.

        Raises:
            PeerFailure: a rank has failed.
        """
        if self.comms.run_ahead and self.connections is not None:
            self.connections.board.raise_if_faulted()

    def request_stop(self) -> None:
        """Asks all ranks to stop at one boundary between steps."""
        self._is_stop_asked = True
        if self.connections is not None:
            self.connections.request_stop()
        else:
            self.stops.decide(self.stops.freeze())

    def repeat_request(self) -> None:
        """Asks again for a stop that a rank has asked for before these connections were made."""
        if self._is_stop_asked:
            self.request_stop()

    def report_raised(self, where: str, error: BaseException) -> None:
        """Reports an error to all other ranks, unless they caused it."""
        connections = self.connections
        if connections is None or not self.is_own_process:
            return
        if isinstance(error, _C.PeerFailure) and connections.board.fault_text() is not None:
            connections.has_failed = True  # the others have the same report
        elif not connections.has_failed:
            connections.report_raised(where, process_hooks.describe_exception(error))

    def on_pipeline_rank(self, pp_rank: int) -> list[int]:
        """Returns the global ranks with this place in their pipelines."""
        ranks = range(self.world_size)
        return [rank for rank in ranks if self.grid.coordinates(rank).pp == pp_rank]

    def words_of(self, global_rank: int) -> str:
        """Returns words for people: ``"global_rank 1 (pipeline stage 1)"``."""
        at = self.grid.coordinates(global_rank)
        axes = {"pp": ("pipeline stage", at.pp), "tp": ("tensor rank", at.tp)}
        axes |= {"cp": ("context rank", at.cp), "rdp": ("replica", at.rdp)}
        places = [f"{n} {i}" for axis, (n, i) in axes.items() if self.sizes[axis] > 1]
        hosts = self.launch.hosts
        places += [f"host {hosts[global_rank]}"] * (len(set(hosts)) > 1)
        return f"global_rank {global_rank} ({', '.join(places)})"

    def culprit(self, error: BaseException) -> Culprit:
        """Returns the rank that caused an uncaught exception of this rank."""
        board, connections = self.board, self.connections
        kind = None if board is None else board.fault_kind()
        if not isinstance(error, _C.PeerFailure) or board is None or kind is None:
            where = "" if connections is None else connections.failed_in
            return Culprit(self.global_rank, self.words_of(self.global_rank), where=where)
        number, hosts = board.fault_rank(), self.launch.hosts
        if number is None:
            return Culprit(None, "all ranks", kind, is_other=True)
        is_near = hosts[number] == hosts[self.global_rank]
        described = f"global_rank {number} ({self._describe(number)})"
        return Culprit(
            number,
            self.words_of(number),
            kind,
            is_other=True,
            is_near=is_near,
            described=described,
        )

    @contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """Reports an exception that leaves the block to all other ranks."""
        try:
            yield
        except BaseException as error:  # sys.exit and Ctrl-C, too
            self.report_raised(where, error)
            raise

    # ---- end -------------------------------------------------------------------

    def leave(self) -> None:
        """Says goodbye to the other ranks, and waits for their goodbyes."""
        self._has_ended = True
        if self.connections is not None:
            self.connections.leave()

    def drop_communicators(self) -> None:
        """Ends the communicators of the groups, and operations in flight if a rank has failed.

        Collective if none has; all ranks have said goodbye then.
        """
        if self.connections is not None and self.connections.is_healthy:
            self.comms.shut_down()
        else:
            self.comms.abort()
        self.comms = Groups()

    def close(self) -> None:
        """Ends threads and connections."""
        self._is_stop_asked |= self.stops.is_asked
        if self.connections is not None:
            self.connections.close()
