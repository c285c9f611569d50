"""Families of transformers whose blocks compute parts of sequences train like one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.dist import split_training
from tests.dist.pool import Pool
from tests.dist.split_training import SplitRun
from tests.dist.training import RankRecord, Run, check_runs
from tests.samples import part_of

CASES = (
    *("hf/llama", "hf/mistral of a window", "hf/gptj", "hf/gpt2", "hf/gpt_neo", "hf/gpt_neox"),
    *("hf/qwen2", "hf/bert", "hf/roberta", "hf/vit"),
)


def check_parts(run: Run, records: Sequence[RankRecord], least: int = 4) -> None:
    """Blocks that ran have computed parts only."""
    num_blocks = 0
    for record in records:
        for name, (num_cut, problems) in record.parts.items():
            assert problems == [], f"{run}: {name}: {problems}"
            num_blocks += num_cut >= run.steps * run.microbatches
    num_replicas = len(records) // run.pp
    assert num_blocks == least * num_replicas, f"{run}: {[r.parts for r in records]}"


@pytest.mark.sample
def test_families_train_in_parts_like_one_process(pool: Pool) -> None:
    runs = [Run(case, 1, 1, cp=2, lifted=True) for case in part_of(CASES, 2)]
    for run, records in zip(runs, check_runs(pool, runs), strict=True):
        check_parts(run, records)


@pytest.mark.sample(keep=0)
def test_t5_trains_in_parts_but_for_its_first_blocks(pool: Pool) -> None:
    (records,) = check_runs(pool, [Run("hf/t5", 1, 1, cp=2, lifted=True)])
    for record in records:
        in_parts = {name for name, (num_cut, _) in record.parts.items() if num_cut}
        assert in_parts == {"encoder.block.1", "decoder.block.1"}
        assert all(record.parts[f"{half}.block.0"][1] for half in ("encoder", "decoder"))


LAYOUTS = {
    "pp2": Run("hf/llama", 2, 1, cp=2, lifted=True),
    "dp2": Run("hf/gpt_neox", 1, 2, cp=2, lifted=True),
    "cp4": Run("hf/qwen2", 1, 1, cp=4, lifted=True),  # more ranks than heads of keys
    "pp2 simple": Run("hf/gptj", 2, 1, "simple", cp=2, lifted=True),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_beside_other_axes_train_like_one_process(pool: Pool, layout: str) -> None:
    run = LAYOUTS[layout]
    (records,) = check_runs(pool, [run])
    check_parts(run, records)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("prescaled", [False, True])
def test_parts_of_split_layers_train_like_one_process(pool: Pool, prescaled: bool) -> None:
    split_training.check_runs(pool, [SplitRun("llama", 1, 2, 1, cp=2, prescaled=prescaled)])
