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
    """The schedule that the server runs.

    Attributes:
        policy: name of a policy; without effect if there are lists.
        num_chunks: stages per rank.
        lists: actions of each pipeline rank, in the text form; empty if a policy decides.
    """

    policy: str
    num_chunks: int = 1
    lists: tuple[str, ...] = ()

    @property
    def kept_microbatches(self) -> list[int] | None:
        """Returns how many microbatches of activations each rank's list keeps, or None."""
        if not self.lists:
            return None
        return [-(-_peak_units(actions) // self.num_chunks) for actions in self.lists]


def choose_schedule(rank: Rank) -> ChosenSchedule:
    """Returns the schedule of this run. Collective over all ranks if there is a file.

    Raises:
        ValueError: the file cannot be read, is no schedule, or its schedule cannot finish with
            this number of ranks and microbatches; every rank raises it.
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
    """Returns the text in its normal form, and an error message or None."""
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
    """Returns the most (microbatch, chunk) units at once from forward to last action."""
    words = actions.split()
    peak = kept = 0
    for word in words:
        if word[0] == "F":
            kept += 1
            peak = max(peak, kept)
        elif word[0] == "W" or "W" + word[1:] not in words:
            kept -= 1
    return peak
