"""Logits of planned language models: split in the loss, whole for everybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.pool import WITHOUT_CHECKS, Pool, RankFailure
from tests.dist.split_training import SplitRun, build_marked, init_split
from tests.reference.split_families import make_split_batch
from tests.reference.tolerances import assert_close

N, S, V = 3, 5, 101


def loss_of(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), labels.flatten(), **options)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return loss_of(torch.tanh(logits / 0.7) * 0.7, labels)


def scaled_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits *= 0.5
    logits = 0.3 * -(logits + 1)
    return loss_of(logits.float().contiguous().double(), labels, reduction="sum") / 7


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.float64)[..., :-1, :].contiguous()
    return loss_of(logits.reshape(-1, logits.shape[-1]), labels[:, 1:])


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    options: dict[str, Any] = {"label_smoothing": 0.2, "ignore_index": 3}
    losses = loss_of(logits, labels.clamp(3), reduction="none", **options)
    return losses.square().mean()


def of_one_position(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 2], labels[:, 2])


# Each of these looks at something that a rank does not have.


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    logits[:, :, 2:4] = -3.0
    return loss_of(logits, labels)


def samples(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[1:].logsumexp(-1).sum() + logits.sum(0).square().sum()


def with_tensors(logits: Tensor, labels: Tensor) -> Tensor:
    bias = torch.linspace(0, 1, V, dtype=logits.dtype)
    scale = torch.tensor(0.5, dtype=logits.dtype)
    return loss_of((logits + bias) * scale, labels, weight=bias)


def measured_first(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        best = logits.argmax(-1)
    return loss_of(logits, labels) + (best == labels).sum() + torch.cat([logits, logits]).mean()


def classes_first(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


STAY_SPLIT = (loss_of, capped, scaled_in_place, shifted, smoothed, of_one_position)
GET_WHOLE = (masked, samples, with_tensors, measured_first, classes_first)


def compute(rank: int, prescaled: bool) -> None:
    """Every function gives on split logits what it gives on whole ones, with gradients."""
    import smp
    from smp.nn import layout as layouts
    from smp.nn.planned import logits as planned
    from smp.tensor_parallel import regions, sharding

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": prescaled, "ddp": True})
    layout = layouts.current()
    vocabulary = planned.Vocabulary(layout, tuple(sharding.split(V)))
    begin, own = sharding.begin_of(vocabulary.sizes), vocabulary.sizes[rank]
    generator = torch.Generator().manual_seed(1)
    num = N * vocabulary.num_batches
    every = torch.randn(num, S, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (num, S), generator=generator)
    labels[:, 1] = -100
    mine = slice(rank * N, (rank + 1) * N) if layout.has_own_batches else slice(None)

    for function in (*STAY_SPLIT, *GET_WHOLE):
        whole = every.clone().requires_grad_()
        parts = range(vocabulary.num_batches)
        wanted = [function(whole[i * N : i * N + N] * 1, labels[i * N : i * N + N]) for i in parts]
        sum(wanted).backward()
        local = every[..., begin : begin + own].clone().requires_grad_()
        split: Any = planned.SplitLogits(local * 1, vocabulary)
        assert split.shape == (N, S, V) and split.size(-1) == V and len(split) == N
        before = regions.traffic()[1]
        found = function(split, labels[mine])
        sent = regions.traffic()[1] - before
        found.backward()
        where = f"{function.__name__} prescaled {prescaled}"
        own_wanted = wanted[rank if layout.has_own_batches else 0]
        assert whole.grad is not None and local.grad is not None
        wanted_grad = whole.grad[..., begin : begin + own]
        assert float(wanted_grad.abs().max()) > 1e-3
        assert_close(
            {"value": found.detach(), "grad": local.grad},
            {"value": own_wanted.detach(), "grad": wanted_grad},
            torch.float64,
            where,
        )
        is_split = sent < local.numel() * local.element_size() // 2
        assert is_split == (function in STAY_SPLIT), f"{where}: {sent} bytes"


@pytest.mark.parametrize("prescaled", [False, True])
def test_code_of_a_model_computes_with_split_logits_as_with_whole_ones(
    pool: Pool, prescaled: bool
) -> None:
    pool.run(2, compute, prescaled)


def make_differently(rank: int, function: Callable[..., Any]) -> None:
    import smp
    from smp.nn import layout as layouts
    from smp.nn.planned.logits import SplitLogits, Vocabulary

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    local = torch.ones(2 * N, S, 3 if rank == 0 else 2)
    function(rank, SplitLogits(local, Vocabulary(layouts.current(), (3, 2))))


def scale_by_rank(rank: int, logits: Any) -> None:
    F.cross_entropy((logits * (1.0 + rank)).view(-1, 5), torch.zeros(N * S, dtype=torch.int64))


def write_to_a_view(rank: int, logits: Any) -> None:
    logits[:, 1:][:, 0] = 1.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (scale_by_rank, "ranks have done different things to their logits"),
        (write_to_a_view, "there are views of them, which would not see it"),
    ],
)
def test_what_split_logits_cannot_follow_is_refused(
    pool: Pool, function: Callable[..., Any], text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        pool.run(2, make_differently, function)


class Widths(TorchDispatchMode):
    """Notes whether there is a tensor with a logit for each entry of the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(
            isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == self._vocabulary
            for x in pytree.tree_leaves(result)
            if not (isinstance(x, Tensor) and x.is_meta)
        ):
            self.found.append(str(func))
        return result


def watch_logits(rank: int, run: SplitRun) -> dict[str, tuple[list[str], int]]:
    """Functions that make whole logits, and bytes that are sent, with and without a reader."""
    import smp
    from smp.tensor_parallel import regions

    init_split(run)
    model = smp.DistributedModel(build_marked(run))
    batch = make_split_batch(run.case, smp.rdp_rank() if run.prescaled else smp.dp_rank(), 0)
    vocabulary = model.get_module().config.vocab_size

    @smp.step
    def train_step(batch: dict[str, Tensor], reads: bool) -> None:
        with Widths(vocabulary) as widths:
            output = model(**batch)
            if reads:
                assert output.logits.shape == (*batch["labels"].shape, vocabulary)
                assert type(output.logits) is Tensor
            model.backward(output.loss)
        found.extend(widths.found)

    seen = {}
    for reads in (False, True):
        found: list[str] = []
        before = regions.traffic()[1]
        train_step(batch, reads)
        seen["read" if reads else "unread"] = found, regions.traffic()[1] - before
    return seen


@pytest.mark.parametrize("prescaled", [False, True])
def test_training_makes_no_whole_logits(pool: Pool, prescaled: bool) -> None:
    run = SplitRun("qwen3_tied", 1, 2, 1, "memory", prescaled, microbatches=1)
    for seen in pool.run(2, watch_logits, run, env=WITHOUT_CHECKS):
        (unread, sent), (read, more) = seen["unread"], seen["read"]
        assert not unread and read
        assert more > sent > 0


def evaluate(rank: int) -> tuple[Tensor, Any, Tensor]:
    import smp

    run = SplitRun("qwen3", 1, 2, 1, "memory", microbatches=1)
    init_split(run)
    model = smp.DistributedModel(build_marked(run))
    batch = make_split_batch("qwen3", smp.dp_rank(), 0)
    labels = batch.pop("labels")

    @smp.step
    def step(batch: dict[str, Tensor], **options: Any) -> tuple[Any, ...]:
        output = model(**batch, **options)
        return (output,) if isinstance(output, Tensor) else tuple(output.values())[:1]

    (alone,) = step(batch)
    loss, *_ = step({**batch, "labels": labels})
    return alone.outputs[0], type(alone.outputs[0]), loss.outputs[0]


def test_without_labels_logits_are_whole_at_once(pool: Pool) -> None:
    for logits, cls, loss in pool.run(2, evaluate):
        assert cls is Tensor and logits.shape[-1] == 41 and loss.dim() == 0
