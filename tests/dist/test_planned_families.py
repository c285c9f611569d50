"""Families that are split by their own plan train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.split_training import (
    LAYOUTS,
    MODES,
    SplitRun,
    build_marked,
    check_runs,
    init_split,
)
from tests.dist.steps import marked_values
from tests.harness import labelled_loss, train_step_of
from tests.reference.lifted_casts import lifted_casts
from tests.reference.split_families import (
    PLANNED_FAMILIES,
    build_split_family,
    make_split_batch,
)
from tests.reference.tolerances import assert_close


@pytest.mark.sample(keep=1)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "pp{}-tp{}-rdp{}".format(*layout))
@pytest.mark.parametrize("case", PLANNED_FAMILIES)
def test_planned_family_trains_like_one_process(
    pool: Pool, case: str, layout: tuple[int, int, int]
) -> None:
    modes = MODES if layout != (2, 2, 2) else (MODES[0], MODES[3])  # eight processes take longest
    check_runs(pool, [SplitRun(case, *layout, mode, bool(scaled)) for mode, scaled in modes])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", PLANNED_FAMILIES)
def test_planned_family_trains_like_one_process_in_fp32(pool: Pool, case: str) -> None:
    runs = [SplitRun(case, 1, 2, 2, "memory", bool(scaled), torch.float32) for scaled in (0, 1)]
    check_runs(pool, runs)


def batch_of(idx: int) -> dict[str, torch.Tensor]:
    """The first rank has no padding, so its mask says nothing."""
    batch = make_split_batch("qwen3", idx, 0)
    if idx == 0:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return batch


def train_on_masks(rank: int, run: SplitRun) -> dict[str, Any]:
    import smp

    init_split(run)
    model = smp.DistributedModel(build_marked(run))
    train_step = train_step_of(model, labelled_loss)
    train_step(batch_of(smp.dp_rank()))
    return marked_values(model, "grad")


def test_ranks_leave_out_a_mask_together_or_not_at_all(pool: Pool) -> None:
    """transformers makes none of a mask of ones, and the other rank needs its own."""
    from smp.tensor_parallel import partial

    parts = pool.run(2, train_on_masks, SplitRun("qwen3", 1, 2, 1, microbatches=1))
    with lifted_casts():
        plain = build_split_family("qwen3", torch.float64)
        batches = [batch_of(idx) for idx in range(2)]
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
        for batch, count in zip(batches, counts, strict=True):
            (plain(**batch)["loss"] * count / sum(counts)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(partial.merge(parts), expected, torch.float64, "masks", 1e-9)
