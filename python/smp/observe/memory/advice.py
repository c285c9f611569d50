"""Which settings would have made a rank fit: arithmetic, without a model or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

_NUM_SHOWN = 3


@dataclass(frozen=True)
class Need:
    """What a rank needs at the peak of a step, by what a setting can change. Bytes.

    Attributes:
        parameters, gradients, optimizer: as this rank holds them.
        activations: of all microbatches in flight, with what else a step makes.
        fixed: what none of the settings changes, such as the largest gathered unit.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    fixed: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.fixed


@dataclass(frozen=True)
class Situation:
    """A rank that has run out of memory.

    Attributes:
        need: of this rank, with the settings as they are.
        room_bytes: that it has.
        pp, rdp: sizes of these axes.
        shard_size: ranks that hold one copy of the optimizer state together.
        shards_parameters: `sharded_data_parallel_degree` is above 1.
        microbatches: of the configuration.
        in_flight: microbatches whose activations this rank keeps at once.
        most_in_flight: the same however many microbatches there are.
        samples: of a microbatch.
        checkpointed_bytes: activations of all microbatches in flight if each block were
            checkpointed; None: not known, or they are.
        num_blocks: of the model, which can lie on pipeline ranks of their own.
        largest_unit_bytes: of the largest block's parameters, whole.
        is_fp32: parameters are trained in FP32 as they are.
        optimizer_per_parameter: bytes of optimizer state for a byte of parameters.
    """

    need: Need
    room_bytes: float
    pp: int = 1
    rdp: int = 1
    shard_size: int = 1
    shards_parameters: bool = False
    microbatches: int = 1
    in_flight: int = 1
    most_in_flight: int = 1
    samples: int = 1
    checkpointed_bytes: float | None = None
    num_blocks: int = 1
    largest_unit_bytes: float = 0.0
    is_fp32: bool = True
    optimizer_per_parameter: float = 2.0


@dataclass(frozen=True)
class Setting:
    """A change of settings, and what the rank would need with it.

    Attributes:
        words: how it is written.
        needs_bytes: of the rank then.
    """

    words: str
    needs_bytes: float


Change = tuple[str, Callable[[Situation], Situation]]


def settings_that_fit(situation: Situation) -> list[Setting]:
    """Up to three settings with each of which alone the rank would have fitted.

    Those that cost least time come first. Where fewer than three do alone, pairs follow.
    """
    changes = list(_changes(situation))
    found: list[Setting] = []
    kinds: set[str] = set()
    for words, change in changes:
        kind = words.split(":")[0]
        changed = change(situation).need.total
        if changed <= situation.room_bytes and kind not in kinds:
            kinds.add(kind)
            found.append(Setting(words, changed))
    for (one, first), (other, second) in combinations(changes, 2):
        pair_kinds = {one.split(":")[0], other.split(":")[0]}
        if len(found) >= _NUM_SHOWN:
            break
        if len(pair_kinds) < 2 or pair_kinds & kinds:
            continue
        if _excludes(one, other):
            continue
        changed = second(first(situation)).need.total
        if changed <= situation.room_bytes:
            kinds |= pair_kinds
            found.append(Setting(f"{one} and {other}", changed))
    return found[:_NUM_SHOWN]


def best_setting(situation: Situation) -> Setting | None:
    """The one that leaves least; None where nothing helps at all."""
    found = [Setting(w, change(situation).need.total) for w, change in _changes(situation)]
    better = [one for one in found if one.needs_bytes < situation.need.total]
    return min(better, key=lambda one: one.needs_bytes, default=None)


def _excludes(one: str, other: str) -> bool:
    both = one + other
    return "sharded_data_parallel_degree" in both and "shard_optimizer_state" in both


def _changes(s: Situation) -> Iterator[Change]:
    """Settings that are open to this rank, the cheapest first."""
    if s.rdp > 1 and s.shard_size == 1:
        yield '"shard_optimizer_state": True', _shard_optimizer
    for kept in range(s.in_flight - 1, 0, -1) if s.pp > 1 else ():
        yield f'"active_microbatches": {kept}', _with_active(kept)
    factor = 2
    while factor <= s.samples:
        yield f'"microbatches": {s.microbatches * factor}', _with_microbatches(factor)
        factor *= 2
    if s.checkpointed_bytes is not None and s.checkpointed_bytes < s.need.activations:
        yield "smp.set_activation_checkpointing: on each block of the model", _checkpoint
    if s.rdp > 1 and not s.shards_parameters:
        yield f'"sharded_data_parallel_degree": {s.rdp}', _shard_parameters
    if s.is_fp32:
        yield '"bf16": True', _in_bf16
    if s.num_blocks >= 2 * s.pp:
        yield f'"pipeline_parallel_degree": {2 * s.pp}', _with_more_stages


def _with_need(s: Situation, **changed: float) -> Situation:
    return replace(s, need=replace(s.need, **changed))


def _shard_optimizer(s: Situation) -> Situation:
    return replace(_with_need(s, optimizer=s.need.optimizer / s.rdp), shard_size=s.rdp)


def _shard_parameters(s: Situation) -> Situation:
    """A part of everything, and two units whole at a time: one is used, one is gathered."""
    n = s.need
    return _with_need(
        s,
        parameters=n.parameters / s.rdp,
        gradients=n.gradients / s.rdp,
        optimizer=n.optimizer / (s.rdp if s.shard_size == 1 else 1),
        fixed=n.fixed + 2 * s.largest_unit_bytes,
    )


def _with_active(kept: int) -> Callable[[Situation], Situation]:
    def change(s: Situation) -> Situation:
        share = min(1.0, kept / s.in_flight)
        return replace(
            _with_need(s, activations=s.need.activations * share),
            in_flight=min(kept, s.in_flight),
            most_in_flight=min(kept, s.most_in_flight),
            checkpointed_bytes=None
            if s.checkpointed_bytes is None
            else s.checkpointed_bytes * share,
        )

    return change


def _with_microbatches(factor: int) -> Callable[[Situation], Situation]:
    def change(s: Situation) -> Situation:
        in_flight = max(s.in_flight, min(s.most_in_flight, s.microbatches * factor))
        # Pieces differ by one sample.
        share = -(-s.samples // factor) / s.samples * in_flight / s.in_flight
        return replace(
            _with_need(s, activations=s.need.activations * share),
            in_flight=in_flight,
            microbatches=s.microbatches * factor,
            samples=-(-s.samples // factor),
            checkpointed_bytes=None
            if s.checkpointed_bytes is None
            else s.checkpointed_bytes * share,
        )

    return change


def _checkpoint(s: Situation) -> Situation:
    assert s.checkpointed_bytes is not None
    return replace(
        _with_need(s, activations=min(s.checkpointed_bytes, s.need.activations)),
        checkpointed_bytes=None,
    )


def _in_bf16(s: Situation) -> Situation:
    """16-bit parameters and activations; gradients, masters and state of 4 bytes an element."""
    n, whole = s.need, s.need.parameters
    state = n.optimizer + whole / (s.shard_size if s.shard_size > 1 else 1)  # with masters
    return replace(
        _with_need(s, parameters=whole / 2, optimizer=state, activations=n.activations / 2),
        is_fp32=False,
    )


def _with_more_stages(s: Situation) -> Situation:
    """Half of the blocks for each rank; the first one keeps twice the microbatches of half size."""
    n = s.need
    return replace(
        _with_need(
            s, parameters=n.parameters / 2, gradients=n.gradients / 2, optimizer=n.optimizer / 2
        ),
        pp=2 * s.pp,
    )
