"""Pretrained weights survive: Hugging Face files, split layers, Hugging Face again, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.older import OLDER, OLDER_FOLDER
from tests.dist.pool import Pool
from tests.dist.split_training import MODES, SplitRecord, SplitRun, check_run, train_split
from tests.reference.split_families import (
    OLDER_SPLIT_FAMILIES,
    SPLIT_FAMILIES,
    build_split_family,
)

DEGREES = (1, 2, 4)


def round_trip(rank: int, case: str, folder: str, degree: int) -> dict[str, Any]:
    """Loads with from_pretrained, splits, gathers and translates; says what came of it."""
    import transformers

    import smp
    from smp.tensor_parallel import sharding

    plain = build_split_family(case, torch.float32)
    if rank == 0:
        plain.save_pretrained(folder)
    smp.init({"tensor_parallel_degree": degree, "ddp": True})
    smp.barrier()
    with smp.tensor_parallelism():
        loaded = type(plain).from_pretrained(folder)
    expected = {key: value.clone() for key, value in loaded.state_dict().items()}
    model = smp.DistributedModel(loaded)
    state = model.state_dict()
    for to_theirs, _ in smp.state.module_manager.translate_functions:
        state = to_theirs(state)
    differing = [k for k in expected if k in state and not torch.equal(state[k], expected[k])]
    again = type(plain)(plain.config)
    again.load_state_dict(state, strict=True)
    split = [p for p in model.parameters() if sharding.interval_of(p) is not None]
    whole = sum(torch.Size(sharding.whole_shape(p)).numel() for p in split)
    # The other way: a plain state dict goes into the split model.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(plain.state_dict())
    restored = model.state_dict()
    for to_theirs, _ in smp.state.module_manager.translate_functions:
        restored = to_theirs(restored)
    return {
        "missing": sorted(set(expected) - set(state)),
        "new": sorted(set(state) - set(expected)),
        "differing": differing,
        "restored": all(torch.equal(restored[k], v) for k, v in expected.items()),
        "nonzero": all(bool(v.any()) for v in plain.state_dict().values() if v.is_floating_point()),
        "share": sum(p.numel() for p in split) / whole,
        "version": transformers.__version__,
        "file": transformers.__file__,
    }


def check(results: list[dict[str, Any]], degree: int) -> None:
    for result in results:
        assert not result["missing"] and not result["new"], "the key set has changed"
        assert not result["differing"]
        assert result["restored"] and result["nonzero"]
        assert result["share"] == 1.0 if degree == 1 else result["share"] < 1 / degree + 0.06


@pytest.mark.sample(keep=9)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_weights_survive_bit_by_bit(pool: Pool, tmp_path: Path, case: str, degree: int) -> None:
    check(pool.run(degree, round_trip, case, str(tmp_path), degree), degree)


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", OLDER_SPLIT_FAMILIES)
def test_weights_survive_bit_by_bit_with_transformers_4_30_2(
    older_pool: Pool, tmp_path: Path, case: str, degree: int
) -> None:
    results = older_pool.run(degree, round_trip, case, str(tmp_path), degree)
    check(results, degree)
    assert results[0]["version"] == OLDER
    assert Path(results[0]["file"]).is_relative_to(OLDER_FOLDER)


def judge(rank: int, run: SplitRun, records: list[SplitRecord]) -> str:
    """Compares with one process, under the pool's transformers; returns its version."""
    import transformers

    check_run(run, records)
    return str(transformers.__version__)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", OLDER_SPLIT_FAMILIES)
def test_split_family_trains_like_one_process_with_transformers_4_30_2(
    older_pool: Pool, case: str
) -> None:
    runs = [SplitRun(case, 1, 2, 1, mode, bool(scaled)) for mode, scaled in MODES]
    runs.append(SplitRun(case, 2, 2, 1))
    for run in runs:
        results = older_pool.run(run.world_size, train_split, [run])
        [version] = older_pool.run(1, judge, run, [records[0] for records in results])
        assert version == OLDER


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_untouched_models_differ_by_their_casts_only(pool: Pool, case: str) -> None:
    """Checks that fp64 models with their casts to float32 are 1e-5 away at most."""
    run = SplitRun(case, 1, 2, 1)
    records = [of_rank[0] for of_rank in pool.run(2, train_split, [run])]
    check_run(run, records, lifted=False)
