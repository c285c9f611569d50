"""Opens the module server of this rank, by configuration, schedule and what the models need."""

from __future__ import annotations

import logging

from smp import _C
from smp.partition.decide import Decision
from smp.pipeline import PipelineHub
from smp.pipeline.chosen_schedule import ChosenSchedule
from smp.world import runtime

_log = logging.getLogger("smp")


def open_pipeline(
    current: runtime.Runtime, schedule: ChosenSchedule, decision: Decision
) -> PipelineHub:
    """The server and its hub, without models. Not collective.

    Args:
        current: the runtime.
        schedule: what the server runs by.
        decision: about the first model.
    """
    links, config = current.links, current.config
    assert links is not None and links.mailbox is not None and links.board is not None
    in_order = needs_order(current, decision)
    if in_order and schedule.lists:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: lists of schedule_file let microbatches overlap, which "
            "would mix what forwards of this model keep in one place; leave it out"
        )
    current.server = _C.Server(
        links.mailbox,
        links.board,
        global_rank=current.global_rank,
        pp_ranks=list(current.groups["pp"]),
        # These run their tasks in one order; the first one decides.
        order_ranks=list(current.groups["dp" if config.orders_replicas else "tp"]),
        policy=schedule.policy,
        actions=schedule.lists[current.ranks["pp"]] if schedule.lists else None,
        num_chunks=schedule.num_chunks,
        active_microbatches=1 if in_order else config.active_microbatches or 0,
        # The ranks of a tensor-parallel group run their modules, hence collectives, in one order.
        deterministic=config.orders_replicas or current.sizes["tp"] > 1,
        device=str(current.device),
        timeout_s=current.settings.timeout_s,
        timeline=current.timeline,
    )
    current.server.set_error_reporter(links.report_raised)
    hub = PipelineHub(current.server, current.global_rank, current.device)
    hub.in_order = in_order or config.active_microbatches == 1
    return hub


def check_order(current: runtime.Runtime, hub: PipelineHub, decision: Decision) -> None:
    """For a further model, when the pipeline runs already.

    Raises:
        ValueError: microbatches overlap, and must not for this model. On every rank.
    """
    if not hub.in_order and needs_order(current, decision):
        raise ValueError(
            f"{_C.rank_prefix()}a model that needs its microbatches one after the other cannot "
            "join others whose microbatches overlap; set active_microbatches=1 in smp.init"
        )


def needs_order(current: runtime.Runtime, decision: Decision) -> bool:
    """Must microbatches run one after the other? Rank 0 says why."""
    writes = decision.index.writes
    if not writes.in_order or current.config.microbatches == 1:
        return False
    if current.global_rank == 0:
        names = sorted(decision.names[idx] or "(root)" for idx in writes.reasons_for_order)
        _log.warning(
            "smp: microbatches run one after the other and do not overlap, because they would mix "
            "what forwards keep in one place: hooks, containers or buffers of %s",
            ", ".join(names[:6]) + (" and others" if len(names) > 6 else ""),
        )
    return True
