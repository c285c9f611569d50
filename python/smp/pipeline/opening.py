"""Opens the module server of this rank, by configuration and needs of the models."""

from __future__ import annotations

import smp._C as _C
from smp.config.schema import Config
from smp.partition.decision import Decision
from smp.pipeline import PipelineHub
from smp.world.attached import Pipeline
from smp.world.log import first_rank_log
from smp.world.rank import Rank


def open_pipeline(rank: Rank, decision: Decision, timeline: _C.Timeline) -> PipelineHub:
    """Returns the hub of a new server, without models. Not collective.

    Args:
        rank: own rank, one of several of a pipeline.
        decision: decision about the first model.
        timeline: timeline that records the actions of the server.
    """
    config, connections = rank.config, rank.connections
    assert connections is not None and connections.mailbox is not None
    in_order = needs_order(config, decision)
    server = _C.Server(
        connections.mailbox,
        connections.board,
        global_rank=rank.global_rank,
        pp_ranks=list(rank.groups["pp"]),
        # The ranks of this group run their tasks in one order; the first one decides it.
        order_ranks=list(rank.groups["dp_cp" if config.orders_replicas else "tp_cp"]),
        policy=config.pipeline,
        num_chunks=config.virtual_stages,
        active_microbatches=1 if in_order else config.active_microbatches or 0,
        # Ranks that split modules or sequences run their modules, hence collectives, in one order.
        deterministic=config.orders_replicas or rank.sizes["tp_cp"] > 1,
        device=str(rank.device),
        timeout_s=rank.timeout_s,
        timeline=timeline,
        device_meter=rank.meter,
    )
    server.set_error_reporter(connections.report_raised)
    hub = PipelineHub(server, rank.global_rank, rank.device)
    hub.in_order = in_order or config.active_microbatches == 1
    return hub


def check_order(config: Config, hub: Pipeline, decision: Decision) -> None:
    """Checks that a further model can join the running pipeline.

    Raises:
        ValueError: microbatches overlap, and must not for this model; every rank raises it.
    """
    if not hub.in_order and needs_order(config, decision):
        raise ValueError(
            f"{_C.rank_prefix()}a model that needs its microbatches one after the other cannot "
            "join others whose microbatches overlap; set active_microbatches=1 in smp.init"
        )


def needs_order(config: Config, decision: Decision) -> bool:
    """Returns whether microbatches must run one after the other; rank 0 logs the reason."""
    writes = decision.index.writes
    if not writes.in_order or config.microbatches == 1:
        return False
    names = sorted(decision.names[idx] or "(root)" for idx in writes.reasons_for_order)
    first_rank_log.warning(
        "smp: microbatches run one after the other and do not overlap, because they would mix "
        "what forwards keep in one place: hooks, containers or buffers of %s. What a forward "
        "leaves for the next one (memories, hidden states) goes to the next microbatch, where one "
        "process on the whole batch takes it to the next step",
        ", ".join(names[:6]) + (" and others" if len(names) > 6 else ""),
    )
    return True
