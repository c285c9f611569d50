"""Parses names of small layouts, and sets their degrees in a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp.commands.ending import BadUse

#: Layouts of "all": every way to spread a model, and the pairs that meet in one world of four.
ALL = ("pp2", "tp2", "cp2", "dp2", "sdp2", "os2", "pp2tp2", "pp2dp2")
_MOST_PROCESSES = 16
_TOKEN = re.compile(r"(pp|tp|ep|cp|dp|sdp|os)([1-9][0-9]*)")
_EXAMPLE = "expected degrees like pp2, tp2, dp2, sdp2, os2, ep2 or several of them (pp2dp2)"


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a job.

    Attributes:
        name: name that the user wrote.
        pp, tp, cp, dp: pipeline, tensor, context and replica degree; ``dp`` counts replicas of a
            split model with batches of their own.
        sdp: number of ranks over which parameters are sharded; divides ``cp * dp``.
        shards_state: optimizer state is sharded over the replicas.
        spreads_experts: experts are spread over the tensor-parallel ranks.
    """

    name: str
    pp: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    sdp: int = 1
    shards_state: bool = False
    spreads_experts: bool = False

    @property
    def num_processes(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    def configuration(self, given: Mapping[str, Any], is_exact: bool = False) -> dict[str, Any]:
        """Returns a configuration that replaces the script's own values.

        Args:
            given: keys of the command line.
            is_exact: everything is computed in float64.
        """
        values = {
            **given,
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "expert_parallel_degree": self.tp if self.spreads_experts else 1,
            "context_parallel_degree": self.cp,
            "sharded_data_parallel_degree": self.sdp,
            "shard_optimizer_state": self.shards_state,
            "ddp": True,
            "partition_file": None,  # the file is for the script's own degree
        }
        if self.pp == 1:
            values["virtual_stages"] = None
            values["auto_partition"] = True
        if is_exact:
            values |= {"fp16": False, "bf16": False, "fp16_params": False}
        return values


#: one process
ALONE = Layout("one process")


def parse_layouts(text: str) -> list[Layout]:
    """Parses ``all``, or names of layouts that are separated by commas.

    Raises:
        BadUse: a name is not a layout.
    """
    names = list(ALL) if text.strip() == "all" else [name.strip() for name in text.split(",")]
    return [_parse(name) for name in dict.fromkeys(names)]


def _parse(name: str) -> Layout:
    tokens = _TOKEN.findall(name)
    if not tokens or "".join(a + b for a, b in tokens) != name:
        raise BadUse(f"--layouts: {name!r} is no layout; {_EXAMPLE}, or all")
    degrees = {kind: int(number) for kind, number in tokens}
    if len(degrees) < len(tokens):
        raise BadUse(f"--layouts: {name!r} gives a degree twice; {_EXAMPLE}")
    tp = degrees.get("ep", degrees.get("tp", 1))
    cp, sdp, shards = (degrees.get(kind, 1) for kind in ("cp", "sdp", "os"))
    dp = degrees.get("dp", max(sdp, shards))
    if degrees.get("tp", tp) != tp:
        raise BadUse(f"--layouts: {name!r}: experts are spread over all tensor-parallel ranks")
    if sdp > 1 and shards > 1:
        raise BadUse(
            f"--layouts: {name!r}: sdp shards the optimizer state already; give one of both"
        )
    if cp * dp % sdp != 0:
        raise BadUse(
            f"--layouts: {name!r}: parameters are sharded over a divisor of the {cp * dp} replicas"
        )
    if shards not in (1, dp):
        raise BadUse(f"--layouts: {name!r}: the optimizer state is sharded over all {dp} replicas")
    pp, spreads_experts = degrees.get("pp", 1), "ep" in degrees
    layout = Layout(name, pp, tp, cp, dp, sdp, shards > 1, spreads_experts)
    if not 2 <= layout.num_processes <= _MOST_PROCESSES:
        raise BadUse(
            f"--layouts: {name!r} has {layout.num_processes} processes; 2 to {_MOST_PROCESSES} of "
            "this machine are compared with one"
        )
    return layout
