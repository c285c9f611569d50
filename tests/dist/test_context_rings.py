"""Attention whose keys go around rings of ranks (``context_parallel_ring_degree``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.context_training import ContextRun, Trained, check_runs, train
from tests.dist.pool import Pool
from tests.reference.context_models import batch_of, build
from tests.samples import part_of


def ring(name: str, size: int, **keys: Any) -> ContextRun:
    """Returns a run in which attention goes around rings of so many ranks."""
    config = (*keys.pop("config", ()), ("context_parallel_ring_degree", size))
    return ContextRun(name, config=config, **keys)


def check_in_ring(record: Trained, least: int) -> None:
    """Checks that all blocks computed parts, and that their attention went around rings."""
    assert record.blocks and not any("no ring" in line for line in record.warnings)
    for name, calls in record.blocks.items():
        assert calls.in_parts >= least and calls.problems == [], f"{name}: {calls}"
        assert calls.in_ring >= calls.in_parts, f"{name}: {calls}"


MASKS = ("causal", "sliding", "packed", "prefix", "bidirectional", "grouped heads")
OTHERS = ("checkpoint inside", "reentrant checkpoint inside", "checkpointed blocks")


@pytest.mark.sample
def test_masks_in_rings_train_like_one_process(pool: Pool) -> None:
    runs = [ring(name, 2) for name in part_of([*MASKS, *OTHERS], 4)]
    for record in check_runs(pool, runs):
        check_in_ring(record, 6)


FEATURES = {
    "three ranks": ring("sliding", 3, cp=3, lengths=(8, 7, 10)),
    "one token for each": ring("packed", 4, cp=4, lengths=(4, 5, 11)),
    "rings and heads": ring("causal", 2, cp=4, lengths=(9, 16, 7)),
    "rings and grouped heads": ring("grouped heads", 2, cp=4, lengths=(9, 16, 7)),
    "checkpoints": ring("sliding", 2, checkpointed=True),
    "sharded parameters": ring(
        "causal",
        2,
        config=(
            ("sharded_data_parallel_degree", 2),
            ("sdp_param_persistence_threshold", 0),
            ("sdp_gradient_clipping", 1e9),
        ),
    ),
    "bf16": ring("sliding", 2, config=(("bf16", True),)),
    "one sample": ring("prefix", 2, num_samples=1, microbatches=1),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("feature", FEATURES)
def test_rings_beside_a_feature_train_like_one_process(pool: Pool, feature: str) -> None:
    (record,) = check_runs(pool, [FEATURES[feature]])
    check_in_ring(record, 3)


@pytest.mark.sample(keep=0)
def test_more_ranks_than_heads_compute_parts_in_rings(pool: Pool) -> None:
    """Four heads on eight ranks: without rings each of them computes whole sequences."""
    run = ring("causal", 2, cp=8, lengths=(17, 8), steps=2)
    (record,) = check_runs(pool, [run])
    check_in_ring(record, 4)
    without = dataclasses.replace(run, config=())
    (record,) = check_runs(pool, [without])
    assert all("cannot be shared" in calls.problems[0] for calls in record.blocks.values())


@pytest.mark.sample(keep=0)
def test_attention_that_drops_elements_is_refused_with_more_ranks_than_heads(pool: Pool) -> None:
    run = ring("dropout of attention", 2, cp=8, lengths=(16,), steps=1)
    for (error,) in pool.run(8, train, [run]):
        assert isinstance(error, str)
        assert "4 heads of queries and 4 of keys cannot be shared by 8 ranks" in error
        assert "Set dropout of attention to 0" in error


@pytest.mark.sample(keep=0)
def test_attention_that_blocks_cannot_say_shares_heads_and_is_named(pool: Pool) -> None:
    """A mask with gradients, and an encoder of another length."""
    for name, others in (("bias of heads", 2), ("cross", 2)):
        (record,) = check_runs(pool, [ring(name, 2)])
        calls = record.blocks.values()
        assert all(each.in_parts >= 6 and not each.problems for each in calls)
        assert sum(each.in_ring == 0 for each in calls) >= others
        assert any(
            "'blocks.0'" in line and "goes around no ring" in line for line in record.warnings
        )


@pytest.mark.sample(keep=0)
def test_keys_that_are_not_read_are_not_sent(pool: Pool) -> None:
    """Bytes of attention over 64 tokens on four ranks: all keys, and a window of three."""
    sizes = {}
    for name in ("bidirectional", "sliding"):
        run = ring(name, 4, cp=4, lengths=(64,), steps=1, microbatches=1)
        records = [by_rank[0] for by_rank in pool.run(4, train, [run])]
        assert all(isinstance(record, Trained) for record in records)
        sizes[name] = sum(record.num_bytes for record in records if isinstance(record, Trained))
    keys = 2 * 2 * 12 * 64 * 8 * 2  # keys and values of two blocks, of two samples of 12 features
    assert sizes["bidirectional"] - sizes["sliding"] > 2 * keys, sizes


def attend_with_dead_rows(rank: int) -> list[Tensor]:
    """Attends with a mask in which tokens read nothing; returns the result and gradients."""
    import smp
    from smp.context_parallel import regions
    from smp.context_parallel.parts import share_heads
    from smp.context_parallel.ring import attend_in_ring
    from smp.context_parallel.ring_work import DotProducts, Rings

    smp.init({"context_parallel_degree": 2, "context_parallel_ring_degree": 2, "ddp": True})
    leaves = [x.requires_grad_() for x in inputs()]
    heads = share_heads(2, 2, 1)
    assert heads is not None
    own = [regions.cut(x, 2) for x in leaves]
    out = attend_in_ring(*own, heads, DotProducts(dead_rows(), False, None), Rings(2, 2), 9)
    regions.gather(out, 2, regions.sizes_of(9)).square().sum().backward()
    smp.shutdown()
    return [x.grad / 2 for x in leaves if x.grad is not None]


def evaluate(rank: int) -> tuple[list[float], int]:
    """Returns how far losses without gradients are from those of one process."""
    import smp

    smp.init({"context_parallel_degree": 2, "context_parallel_ring_degree": 2, "ddp": True})
    plain, batch = build("sliding"), batch_of(0, (9,), 2)
    expected = plain(**batch).item()
    model: Any = smp.DistributedModel(plain)

    @smp.step
    def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)
        return loss

    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(losses(model, batch).outputs[0].item() - expected)
    num_in_ring = min(block.num_in_ring for block in model._engine.sequences.blocks)
    smp.shutdown()
    return found, num_in_ring


@pytest.mark.sample(keep=0)
def test_rings_evaluate_without_gradients(pool: Pool) -> None:
    """Tensors of the inference mode have no versions, by which masks are known again."""
    for differences, num_in_ring in pool.run(2, evaluate):
        assert max(map(abs, differences)) < 1e-12 and num_in_ring == 2


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]


def dead_rows() -> Tensor:
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[4] = mask[0] = False
    return mask


@pytest.mark.sample(keep=0)
def test_tokens_that_read_nothing_give_zero(pool: Pool) -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=dead_rows())
    assert (out[:, :, 4] == 0).all()
    out.square().sum().backward()
    by_rank = pool.run(2, attend_with_dead_rows)
    for leaf, *parts in zip(leaves, *by_rank, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(sum(parts), leaf.grad, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]
