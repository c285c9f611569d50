"""The schedule that the configuration asks for: a policy by name, or lists from a file."""

from __future__ import annotations

from dataclasses import dataclass

import smp._C as _C
from smp.config import given_files
from smp.config.schema import Config, config_error
from smp.pipeline import schedules as schedule
from smp.world import comm
from smp.world.rank import Rank


@dataclass(frozen=True)
class ChosenSchedule:
    """What the server runs by.

    Attributes:
        policy: name of a policy; without effect if there are lists.
        num_chunks: stages per rank.
        lists: per pipeline rank its actions in the text form; empty if a policy decides.
    """

    policy: str
    num_chunks: int = 1
    lists: tuple[str, ...] = ()

    @property
    def kept_microbatches(self) -> list[int] | None:
        """Per rank, how many microbatches of activations its list keeps; None with a policy."""
        if not self.lists:
            return None
        return [-(-_peak_units(actions) // self.num_chunks) for actions in self.lists]


def choose_schedule(rank: Rank) -> ChosenSchedule:
    """The schedule of this run. Collective over all ranks if there is a file.

    Raises:
        ValueError: on every rank, if the file cannot be read, is no schedule, or is one that
            cannot finish with this number of ranks and microbatches.
    """
    config, pp_size = rank.config, rank.sizes["pp"]
    if pp_size == 1:
        return ChosenSchedule(config.pipeline)
    if config.schedule_file is None:
        return ChosenSchedule(config.pipeline, config.virtual_stages)
    text, error = _read_on_rank0(rank)
    if error is not None:
        raise ValueError(_C.rank_prefix() + error)
    lists = tuple(line.partition(":")[2].strip() for line in text.splitlines())
    return ChosenSchedule(config.pipeline, _num_chunks(text), lists)


def _read_on_rank0(rank: Rank) -> tuple[str, str | None]:
    """The text in its normal form, or what is wrong with it."""
    result: tuple[str, str | None] = ("", None)
    if rank.global_rank == 0:
        try:
            result = (_read(rank.config, rank.sizes["pp"]), None)
        except ValueError as error:
            result = ("", str(error).removeprefix(_C.rank_prefix()))
    given: tuple[str, str | None] = comm.allgather(result, comm.WORLD)[0]
    return given


def _read(config: Config, pp_size: int) -> str:
    assert config.schedule_file is not None
    try:
        text = schedule.normalize(given_files.read_text(config.schedule_file))
        ranks = len(text.splitlines())
        if ranks != pp_size:
            raise ValueError(f"it has lines for {ranks} ranks, this run has {pp_size}")
        weight_ms = 1.0 if "W" in text else 0.0
        stages = [
            schedule.Stage(rank, 1.0, 1.0, weight_ms)
            for _ in range(_num_chunks(text))
            for rank in range(pp_size)
        ]
        schedule.simulate(stages, config.microbatches, text)
    except (OSError, ValueError, RuntimeError) as error:
        raise config_error(
            "schedule_file",
            config.schedule_file,
            str(error).removeprefix(_C.rank_prefix()),
            "smp.schedule.plan and smp.schedule.simulate write and try out such texts",
        ) from None
    return text


def _num_chunks(text: str) -> int:
    chunks = (word.partition(".")[2] for word in text.split() if not word.endswith(":"))
    return max((int(chunk) for chunk in chunks if chunk), default=0) + 1


def _peak_units(actions: str) -> int:
    """Most (microbatch, chunk) units whose forward has begun and whose last part has not."""
    words = actions.split()
    peak = kept = 0
    for word in words:
        if word[0] == "F":
            kept += 1
            peak = max(peak, kept)
        elif word[0] == "W" or "W" + word[1:] not in words:
            kept -= 1
    return peak
