"""Ranks that compute each other's samples leave a mask out together, or not at all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import WITHOUT_CHECKS, Pool
from tests.dist.split_training import SplitRun, init_split, whole_of
from tests.dist.steps import marked_values
from tests.harness import labelled_loss, train_step_of
from tests.reference.lifted_casts import lifted_casts
from tests.reference.split_families import BATCH, build_split_family, make_split_batch
from tests.reference.tolerances import assert_close, relative_difference
from tests.reference.weights import divisor_of, shares

LAYERS, MICROBATCHES = 4, 2
# Indices of padded samples of a batch: none, one in the second microbatch, one in each.
PADDED: dict[str, tuple[int, ...]] = {"none": (), "second": (3,), "each": (1, 3)}


@dataclass
class Record:
    """Records what one rank saw."""

    batch_idx: int
    losses: list[Tensor]
    grads: dict[str, Any]
    num_masks: int
    num_calls: int


def make_batch(case: str, batch_idx: int, padded: str) -> dict[str, Tensor]:
    batch = make_split_batch(case, batch_idx, 0)
    mask = torch.ones_like(batch["attention_mask"])
    mask[list(PADDED[padded]), -2:] = 0
    batch["input_ids"] = batch["input_ids"].clamp(min=2) * mask + (1 - mask)
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask}


def train(rank: int, run: SplitRun, padded: tuple[str, ...]) -> Record:
    """Trains for one step; ``padded`` has a key of `PADDED` for each batch."""
    import smp
    from smp.nn import attention

    init_split(run)
    masks: list[bool] = []
    original = attention.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any) -> Tensor:
        masks.append(mask is not None)
        return original(query, key, value, mask, *args)

    with smp.tensor_parallelism():
        plain = build_split_family(run.case, run.dtype)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, labelled_loss)
    idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    batch = make_batch(run.case, idx, padded[idx])
    if run.pp > 1:  # the trace calls layers, too
        train_step(batch)
        model.zero_grad()
    attention.attend = attend
    try:
        losses = train_step(batch).outputs
    finally:
        attention.attend = original
    return Record(idx, losses, marked_values(model, "grad"), sum(masks), len(masks))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def check(pool: Pool, run: SplitRun, padded: tuple[str, ...], num_dropped: int) -> None:
    """Compares with one process, and checks in how many microbatches there was no mask.

    Args:
        pool: pool of processes that run the ranks.
        run: the layout.
        padded: keys of `PADDED`, one per batch.
        num_dropped: microbatches in which attention gets no mask.
    """
    assert len(padded) == run.num_batches and BATCH % MICROBATCHES == 0
    records = pool.run(run.world_size, train, run, padded, env=WITHOUT_CHECKS)
    with lifted_casts():
        model = build_split_family(run.case, run.dtype)
        batches = [make_batch(run.case, idx, kind) for idx, kind in enumerate(padded)]
        found: list[Tensor] = []
        weights: list[float] = []
        for idx, batch in enumerate(batches):
            for mb in range(MICROBATCHES):
                pieces = {name: x.chunk(MICROBATCHES)[mb] for name, x in batch.items()}
                run_piece = functools.partial(loss_of, model, pieces)
                loss, weight = divisor_of(model, run_piece, len(pieces["labels"]))
                found.append(loss)
                weights.append(weight)
                for record in (r for r in records if r.batch_idx == idx):
                    assert relative_difference(record.losses[mb], loss.detach()) <= 1e-9
        for loss, share in zip(found, shares([weights])[0], strict=True):
            (loss * share).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grads = whole_of(run.case, [record.grads for record in records])
    assert_close({n: grads[n] for n in expected}, expected, run.dtype, str(run), 1e-9)
    for record in records:
        assert record.num_calls == LAYERS // run.pp * MICROBATCHES
        assert record.num_masks == LAYERS // run.pp * (MICROBATCHES - num_dropped), str(run)


OWN = (
    (("none", "none"), 2),
    (("none", "second"), 1),
    (("second", "none"), 1),
    (("each", "none"), 0),
    (("none", "each"), 0),
)


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("case", ["gptj", "gptneox", "bert"])
@pytest.mark.parametrize(("padded", "num_dropped"), OWN, ids=str)
def test_own_batches(pool: Pool, case: str, padded: tuple[str, ...], num_dropped: int) -> None:
    check(pool, SplitRun(case, 1, 2, 1), padded, num_dropped)


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize(("padded", "num_dropped"), [("none", 2), ("second", 1), ("each", 0)])
def test_one_batch(pool: Pool, optimize: str, padded: str, num_dropped: int) -> None:
    """Checks a common batch; layers read the length of a cut, uneven sequence from its mask."""
    run = SplitRun("gptj", 1, 2, 1, optimize, prescaled=True)
    check(pool, run, (padded,), 0 if optimize == "memory" else num_dropped)


@pytest.mark.parametrize(("padded", "num_dropped"), [("none", 2), ("second", 1)])
def test_layers_of_other_pipeline_ranks_get_none_either(
    pool: Pool, padded: str, num_dropped: int
) -> None:
    check(pool, SplitRun("gptj", 2, 1, 1), (padded,), num_dropped)
    check(pool, SplitRun("gptneox", 2, 2, 1), (padded, "none"), num_dropped)
