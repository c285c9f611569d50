"""A call of a step function, over all models that take part."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

import smp._C as _C
from smp import data_parallel
from smp.data_parallel import BatchWeights
from smp.model.engine import Engine
from smp.model.mask_places import draws_of
from smp.modules import autocast
from smp.modules.watching import unwatched
from smp.step.agreement import Agreement
from smp.step.batches import Batch
from smp.step.cutting import Cutting
from smp.step.same_batch import SameBatch
from smp.storage.choose import lockstep_of
from smp.storage.protocol import Storage
from smp.world import comm, runtime, thread_device

_log = logging.getLogger("smp")


class StepRun:
    """Opens a step for all models, runs its bodies, and ends it.

    Args:
        current: the runtime.
        engines: engines of partitioned models, in the order in which these were wrapped.
        name: name of the step function.
        trains: whether gradients are enabled.
    """

    def __init__(
        self, current: runtime.Runtime, engines: Sequence[Engine], name: str, trains: bool
    ) -> None:
        self._current = current
        self._hub = current.pipeline
        self._engines = list(engines)
        self._name = name
        self._trains = trains
        self._seed = 0
        self._batch: SameBatch | None = None
        self._compares_hooks = False  # on gradients, which all replicas have then

    def begin(
        self,
        num_microbatches: int,
        weights: BatchWeights | None = None,
        cutting: Cutting | None = None,
    ) -> int:
        """Opens the step on all ranks of the replica, and over the replicas.

        Args:
            num_microbatches: number of microbatches of this rank.
            weights: weights of the microbatches of this rank's batch; None: another rank reads it.
            cutting: arguments of this rank, which are compared; None: nothing is compared.

        Returns:
            the number of microbatches of the driver, whose data count.

        Raises:
            ValueError: the models cannot take part in one step, or ranks that are to have one batch
                have others.
        """
        rank, trains = self._current.rank, self._trains
        if cutting is not None and rank.sizes["cp"] > 1 and rank.ranks["pp"] == 0:
            self._batch = SameBatch(rank, self._name, cutting.arguments)
            self._batch.compare()
        weights = weights if trains else None
        # This precedes calls of split layers by other ranks of the pipeline, which communicate too.
        self._seed = self._agreed_seed()
        agreement = None
        if rank.world_size > 1 and self._engines:
            agreement = Agreement(self._current, self._name, cutting, trains)
        if self._hub is not None:
            own = "" if agreement is None else agreement.words
            num_microbatches, words = self._hub.server.begin_step(self._name, num_microbatches, own)
            if agreement is not None and words != own:
                agreement.compare_pipeline(words)
        num_hooks = 0
        if trains:
            for engine in self._engines:
                num_hooks += engine.gradients.script_hooks.look(num_microbatches)
        if rank.comms.dp_cp_host is not None:
            all_have = self._agree(
                rank.comms.dp_cp_host, num_microbatches, agreement, weights, num_hooks
            )
            self._compares_hooks = all_have and num_hooks > 0
            for engine in self._engines if num_hooks else ():
                engine.gradients.all_have_hooks = all_have
        if len(self._engines) > 1:  # two might reduce in different orders on different replicas
            self._put_first_that_overlaps()
        for see in self._current.observers.begin_step:
            see(self._engines, trains)
        reducers: list[_C.Reducer] = []
        for engine in self._engines:
            engine.begin_step(num_microbatches, trains, engine is self._engines[0])
            reducers += engine.gradients.reducers
        if rank.comms.dp_cp_host is not None and weights is not None:
            weights.begin_exchange()
        if self._hub is not None:
            self._hub.server.set_microbatch_listeners(reducers)
        self._current.steps.num_begun += 1
        return num_microbatches

    def _put_first_that_overlaps(self) -> None:
        """Puts the model with the most trainable bytes first, which reduces while others run."""
        first = max(self._engines, key=lambda e: (e.gradients.trainable_bytes, -e.idx))
        self._engines.sort(key=lambda engine: engine is not first)

    def number_samples(self, batches: Sequence[Batch]) -> None:
        """Exchanges which samples of the batch each rank has, as masks depend on that.

        Collective over all ranks in a step that trains.

        Args:
            batches: batches that this process reads.
        """
        draws = draws_of(self._current)
        assert draws is not None
        for engine in self._engines:
            engine.mask_places.stand()
        draws.begin_step(
            [(batch.num_samples, batch.count) for batch in batches],
            batches[0].cutting.sample_dim(),
            trains=self._trains,
        )
        if self._hub is not None:
            self._hub.use_samples(draws.samples)

    def _agree(
        self,
        communicator: _C.Communicator,
        num_microbatches: int,
        agreement: Agreement | None,
        weights: BatchWeights | None,
        num_hooks: int,
    ) -> bool:
        """Keeps the models that all replicas have; garbage is collected at any time.

        Weights are exchanged in the same message, if there is one. Collective.

        Returns:
            whether all replicas are known to have as many hooks on gradients.
        """
        current = self._current
        several = self._trains and current.wrapped.num_wrapped > 1
        lockstep = lockstep_of(current.rank)
        shares = lockstep is not None and lockstep.is_forward
        ordered = shares or (current.rank.config.orders_replicas and self._hub is not None)
        # Replicas that have run out of batches (`smp.join`) take part in reductions only.
        joins = any(engine.uneven is not None for engine in self._engines)
        compares = agreement is not None and not joins
        if not (several or ordered or (compares and self._trains)):
            return False
        here = {engine.idx for engine in self._engines}
        missing = [int(idx not in here) for idx in range(current.wrapped.num_wrapped)]
        sums = [] if weights is None else weights.own_sums()
        told = data_parallel.gather_numbers(
            current.rank,
            communicator,
            [
                *sums,
                num_microbatches,
                -num_microbatches,
                num_hooks,
                -num_hooks,
                *(agreement.digests() if agreement is not None and compares else (0, 0)),
                *missing,
            ],
            "begin of a step",
        )
        columns = list(zip(*told, strict=True))
        if weights is not None:
            weights.take_sums([sum(column) for column in columns[: len(sums)]])
        maxima = [int(max(column)) for column in columns[len(sums) :]]
        if agreement is not None:
            agreement.compare_replicas(maxima[4:6])
        if ordered and maxima[0] != -maxima[1]:
            raise ValueError(
                f"{_C.rank_prefix()}step '{self._name}' has {num_microbatches} microbatches here "
                f"and between {-maxima[1]} and {maxima[0]} on the replicas; with "
                f"{lockstep.key if shares and lockstep else 'deterministic_server'} they follow "
                "one order: give them batches that make the same number of microbatches"
            )
        self._engines = [engine for engine in self._engines if not maxima[6 + engine.idx]]
        return maxima[2] == -maxima[3]

    def run(self, num_microbatches: int, body: Callable[[int], None]) -> None:
        """Runs the bodies; random numbers depend on (seed, batch, step, microbatch) alone.

        Args:
            num_microbatches: number of microbatches.
            body: runs one of them.
        """
        current = self._current
        outside = _C.RandomState.capture(str(current.rank.device))
        body = self._as_outside(body)
        for around in current.observers.around_body:
            body = around(body)
        try:
            if self._hub is None:
                self._run_alone(num_microbatches, body)
            else:
                with unwatched():  # else done around forwards, which do not overlap
                    self._hub.server.run_step(num_microbatches, self._seed, body)
        finally:
            outside.restore()

    def _as_outside(self, body: Callable[[int], None]) -> Callable[[int], None]:
        """Wraps a body, which runs under the autocast of this thread, and may read parameters."""
        gathering: list[Storage] = []
        for engine in self._engines:
            if engine.storage is not None and not engine.storage.shows_values:
                gathering.append(engine.storage)
        state = autocast.capture(self._current.rank.device)
        if not state and not gathering:
            return body

        def run(mb: int) -> None:
            with contextlib.ExitStack() as stack:
                for storage in gathering:
                    stack.enter_context(storage.reading())
                stack.enter_context(autocast.apply(state))
                body(mb)

        return run

    def _agreed_seed(self) -> int:
        """Returns the seed of this step. Collective over ranks that read one batch.

        These ranks compute the same outside of split layers, so they have to draw the same numbers;
        yet scripts give each a seed of its own, as for the creation of weights.
        """
        current = self._current
        seed, kind = torch.initial_seed() & (2**64 - 1), "dp"
        if current.rank.config.prescaled_batch and current.rank.sizes["tp"] > 1:
            seed, kind = current.rank.comms.tp_group.seed_of_first(seed), "rdp"
        if current.rank.sizes["cp"] > 1:
            seed = current.rank.comms.cp_group.seed_of_first(seed)
        for part in (current.rank.ranks[kind], current.steps.num_begun + 1):
            seed = _C.mix_seed(seed, part)
        return seed

    def _run_alone(self, num_microbatches: int, body: Callable[[int], None]) -> None:
        current, rank, engines = self._current, self._current.rank, self._engines
        step, device = current.steps.num_begun, rank.device
        timeline, board = current.timeline, rank.board
        timeline.begin_step(step - 1, num_microbatches)
        try:
            for mb in range(num_microbatches):
                _C.seed_generators(_C.mix_seed(self._seed, mb), str(device))
                for engine in engines:
                    engine.running_mb = mb
                timeline.begin_run(False, mb)
                if board is not None:
                    board.set_activity(f"step '{self._name}', microbatch {mb}")
                with _C.TaskScope(step, mb), thread_device.on(device):
                    body(mb)
                    rank.meter.mark()
                timeline.end_run()
                for engine in engines:
                    engine.gradients.microbatch_done(mb)
            timeline.end_step()
        finally:
            if board is not None:
                board.set_activity("")
            for engine in engines:
                engine.running_mb = None

    def end(self) -> None:
        """Waits for the reduction of the step's gradients.

        Collective over the replicas, and over the ranks of each.

        Raises:
            ValueError: ranks that are to have one batch had others on their devices.
            RuntimeError: hooks of the script on gradients have other results on other replicas.
        """
        if self._batch is not None:
            self._batch.compare_late()
        for engine in self._engines:
            engine.end_step(self._trains)
        if self._compares_hooks:
            self._compare_hooks()
        for see in self._current.observers.end_step:
            see()
        if self._trains and self._engines and not self._current.steps.has_trained:
            self._current.steps.has_trained = True
            self._warn_of_idle_offload()
        self._let_go()

    def _compare_hooks(self) -> None:
        """Compares gradients that hooks of the script may have changed. Collective over replicas.

        Raises:
            RuntimeError: on all ranks, if they differ.
        """
        rank = self._current.rank
        assert rank.comms.dp_cp_host is not None
        own = [engine.gradients.script_hooks.digest() for engine in self._engines]
        told = data_parallel.gather_numbers(
            rank, rank.comms.dp_cp_host, own, "gradients after hooks"
        )
        others = [peer for peer, row in zip(rank.groups["dp_cp"], told, strict=True) if row != own]
        if len({tuple(row) for row in told}) > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}step '{self._name}': hooks on gradients of parameters have "
                f"other results on ranks {others} than here. They run on each replica with the "
                "gradient of the whole batch, so they must not depend on the rank: weigh losses "
                "instead of gradients (@smp.step(weight=...)), and draw equal random numbers"
            )

    def _warn_of_idle_offload(self) -> None:
        """Warns if no module is checkpointed. Collective over the MP group."""
        store = self._current.activation_store
        if store is None or self._current.rank.config.offload_activations == "all":
            return
        # A request is sent with its call: only the rank that fulfils it counts it.
        own = store.stats()["checkpoints"] > 0 or any(e.checkpoints() for e in self._engines)
        anywhere = any(comm.allgather(own, comm.CommGroup.MP_GROUP))
        if self._current.rank.global_rank == 0 and not anywhere:
            _log.warning(
                "smp: offload_activations has no effect, because no module is checkpointed; use "
                "smp.set_activation_checkpointing"
            )

    def fail(self, error: BaseException) -> None:
        """Lets observers explain an error, and closes the step. Not collective."""
        try:
            for see in self._current.observers.failed:
                see(f"step '{self._name}'", error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes a step that failed; its gradients are lost. Not collective."""
        for engine in self._engines:
            engine.abandon_step()
        for see in self._current.observers.abandon_step:
            see()
        self._let_go()

    def _let_go(self) -> None:
        if self._current.dropout is not None:
            self._current.dropout.end_step()
        if self._hub is not None:
            self._hub.server.set_microbatch_listeners([])
        self._engines = []
