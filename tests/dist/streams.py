"""Training over groups that look like those of a device, on whose collectives no host may wait.

The groups (`tests/cpp/comm/stream_group.h`) hide each result until the stream of the device comes
after the collective: who reads earlier gets NaN, who writes what is still read gets an error. They
also note what a rank has issued, over all groups, in order.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp import _C
from smp.world import groups
from smp.world.host_groups import CpuGroups
from tests.harness import labelled_loss, train_step_of
from tests.reference.split_families import build_split_family, make_split_batch

Issued = list[tuple[str, str]]  # [(group, call)]


@dataclass(frozen=True)
class Layout:
    """A layout and a configuration with which a model is trained."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    config: tuple[tuple[str, Any], ...] = ()
    overlap: bool = True

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    def __str__(self) -> str:
        degrees = {"pp": self.pp, "tp": self.tp, "dp": self.dp}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        parts += [f"{key}={value}" for key, value in self.config]
        return "-".join(parts) + ("" if self.overlap else "-late")


@dataclass
class Trained:
    """Holds one rank's results, and the collectives that it issued."""

    losses: list[Tensor] = field(default_factory=list)  # [step][microbatch]
    norms: list[Tensor] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)  # whole, after the last step
    issued: Issued = field(default_factory=list)


@contextlib.contextmanager
def streamed() -> Iterator[Any]:
    """Communicators that `smp.init` makes inside look like those of a device."""
    import smp_testing as suite

    make_plain = groups.make_on_device

    def make(
        device: torch.device,
        store: Any,
        on_cpu: CpuGroups,
        name: str,
        ranks: Sequence[int],
        global_rank: int,
        timeout_s: float,
    ) -> _C.Communicator:
        plain = make_plain(device, store, on_cpu, name, ranks, global_rank, timeout_s)
        # Sums in the order of the ranks, as those of the host are.
        shared = _C.share_collectives(
            plain, machine="one", enabled=True, ranks=list(ranks), timeout_s=timeout_s
        )
        made: _C.Communicator = suite.stream_group(shared, f"{name} {list(ranks)}")
        return made

    groups.make_on_device = make
    suite.forget_issued()
    suite.allow_waits(False)
    try:
        yield suite
    finally:
        groups.make_on_device = make_plain
        suite.allow_waits(True)  # at the end of a run the host may wait


def train(rank: int, layout: Layout, steps: int = 3) -> Trained:
    """Trains a small GPT-2; leaves smp initialised."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": layout.pp,
            "tensor_parallel_degree": layout.tp,
            "microbatches": 2,
            "ddp": True,
            **dict(layout.config),
        }
    )
    torch.manual_seed(7)
    with smp.tensor_parallelism(layout.tp > 1):
        plain = build_split_family("gpt2", torch.float64)
    model: Any = smp.DistributedModel(
        plain, bucket_cap_mb=0.01, overlapping_allreduce=layout.overlap
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    optimizer: Any = smp.DistributedOptimizer(inner)
    train_step = train_step_of(model, labelled_loss)
    result = Trained()
    clips_itself = dict(layout.config).get("sharded_data_parallel_degree", 1) > 1
    has_gradients = not dict(layout.config).get("update_in_backward", False)
    prescaled = dict(layout.config).get("prescaled_batch", False)
    for step in range(steps):
        batch_idx = smp.rdp_rank() if prescaled else smp.dp_rank()
        output = train_step(make_split_batch("gpt2", batch_idx, step))
        result.losses.append(torch.stack(list(output.outputs)).detach().clone())
        if has_gradients and not clips_itself:
            norm = smp.clip_grad_norm_(model.parameters(), 0.5)
            result.norms.append(torch.as_tensor(norm).clone())
        optimizer.step()
        optimizer.zero_grad()
    result.params = {name: value.clone() for name, value in model.state_dict().items()}
    return result


def train_both_ways(rank: int, layout: Layout) -> tuple[Trained, Trained]:
    """Plain, and over groups that look like a device's."""
    import smp

    plain = train(rank, layout)
    smp.shutdown()
    with streamed() as suite:
        result = train(rank, layout)
        result.issued = suite.issued()
    return plain, result


# ---- what may be said of the orders of all ranks --------------------------------------


def _members(group: str) -> set[int]:
    return {int(rank) for rank in group[group.index("[") + 1 : -1].split(",")}


def differences(issued: Sequence[Issued]) -> list[str]:
    """Pairs of ranks that issue the collectives of their common groups in different orders."""
    found = []
    for one in range(len(issued)):
        for other in range(one + 1, len(issued)):
            common = [
                [item for item in issued[rank] if {one, other} <= _members(item[0])]
                for rank in (one, other)
            ]
            if common[0] == common[1]:
                continue
            pairs = enumerate(zip(*common, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(map(len, common)))
            heads = [items[place] if place < len(items) else "nothing" for items in common]
            found.append(f"ranks {one} and {other}, call {place}: {heads[0]}, {heads[1]}")
    return found


def is_in_one_order(issued: Sequence[Issued]) -> bool:
    """Returns whether all collectives of all ranks can happen one after the other.

    This check finds more than `differences` does: four ranks can wait for each other in a ring of
    four groups, although no two ranks have two of these groups in common.
    """
    after: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    nodes: set[tuple[str, int]] = set()
    for calls in issued:
        count: Counter[str] = Counter()
        before = None
        for group, _ in calls:
            node = (group, count[group])
            count[group] += 1
            nodes.add(node)
            if before is not None:
                after[before].add(node)
            before = node
    num_before = Counter(node for followers in after.values() for node in followers)
    ready = [node for node in nodes if num_before[node] == 0]
    num_done = 0
    while ready:
        node = ready.pop()
        num_done += 1
        for follower in after[node]:
            num_before[follower] -= 1
            if num_before[follower] == 0:
                ready.append(follower)
    return num_done == len(nodes)
