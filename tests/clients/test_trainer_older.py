"""Client G: the unmodified Trainer of transformers 4.30 against the same Trainer in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.running import Client
from tests.dist.older import open_older_pool, skip_without_older
from tests.dist.pool import Pool
from tests.reference.tolerances import half_loss_tolerance

FRAMEWORK = json.dumps({"sagemaker_mpi_enabled": True})
# Losses are logged with four digits.
LOGGED = 1.01e-4

PIPELINE = {"partitions": 2, "microbatches": 2, "ddp": True}
# Settings that the test of this library in transformers' own suite uses, on fewer processes.
SPREAD = PIPELINE | {"placement_strategy": "spread", "pipeline": "interleaved", "optimize": "speed"}


@pytest.fixture(scope="module")
def expected_gpt2(trainer_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An ordinary training in one process."""
    return train(trainer_pool, tmp_path_factory.mktemp("one"), 1, None)


@pytest.fixture(scope="module")
def trainer_pool() -> Iterator[Pool]:
    """Processes in which transformers has been imported with the service's variables set."""
    skip_without_older()
    models = "transformers.models.roberta.modeling_roberta,transformers.models.bert.modeling_bert"
    pool = open_older_pool(
        f"accelerate,transformers.optimization,transformers.data.data_collator,{models}",
        SM_HP_MP_PARAMETERS=json.dumps({"partitions": 1}),
        SM_FRAMEWORK_PARAMS=FRAMEWORK,
    )
    yield pool
    pool.close()


def train(
    pool: Pool,
    folder: Path,
    world_size: int,
    parameters: dict[str, Any] | None,
    **argv: Any,
) -> dict[str, Any]:
    """Trains, in one process without `parameters`, and returns the first rank's report."""
    folder.mkdir(exist_ok=True)
    client = Client(pool, folder, "client_g.py", launcher="smp run")
    env = {"SM_FRAMEWORK_PARAMS": FRAMEWORK if parameters else ""}
    results = client.run(world_size, argv, parameters, more_env=env)
    for result in results:
        assert result["is_parallel"] == (parameters is not None)
        assert result["final"]["eval_loss"] == results[0]["final"]["eval_loss"]
        if parameters and parameters["partitions"] > 1:
            assert 0 < result["num_local"] < sum(r["num_local"] for r in results)
    assert results[0]["not_loaded"] == []
    return results[0]


def check_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same curve of losses, evaluations and learning rates."""
    assert max(expected["losses"]) - min(expected["losses"]) > 0.1, "nothing was learnt"
    assert result["losses"] == pytest.approx(expected["losses"], abs=LOGGED)
    assert result["rates"] == expected["rates"]
    assert result["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-4)
    assert result["accuracies"] == pytest.approx(expected["accuracies"])
    assert result["checksums"] == pytest.approx(expected["checksums"], rel=1e-5)
    assert os.path.basename(result["best"]) == os.path.basename(expected["best"])


def test_trainer_accumulates_saves_and_resumes_elsewhere(
    trainer_pool: Pool, tmp_path: Path, expected_gpt2: dict[str, Any]
) -> None:
    expected = expected_gpt2
    # The best one was loaded at the end, and is not the last one.
    assert expected["final"]["eval_loss"] == expected["evaluated"][0]
    sharded = PIPELINE | {"shard_optimizer_state": True}
    result = train(trainer_pool, tmp_path / "four", 4, sharded, batch=2)
    check_same(result, expected)
    saved = "checkpoint-2/optimizer.pt_{}_0_{}"
    assert {saved.format(pp, rdp) for pp in (0, 1) for rdp in (0, 1)} <= set(result["files"])
    checkpoint = tmp_path / "four" / "output" / "checkpoint-2"
    again = train(
        trainer_pool, tmp_path / "four", 1, {"partitions": 1, "ddp": True}, resume=checkpoint
    )
    check_same(again, expected)


def test_trainer_evaluates_uneven_batches_before_and_after_training(
    trainer_pool: Pool, tmp_path: Path
) -> None:
    argv = {"kind": "roberta", "num_eval": 11, "accumulate": 1, "evaluate_first": 1}
    expected = train(trainer_pool, tmp_path / "one", 1, None, **argv)
    check_same(train(trainer_pool, tmp_path / "two", 2, SPREAD, **argv), expected)


@pytest.mark.sample(keep=0)
def test_trainer_trains_in_fp16(trainer_pool: Pool, tmp_path: Path) -> None:
    from tests.clients.scripts.trainer_models import LAYERS, MASKED

    expected = train(trainer_pool, tmp_path / "one", 1, None, kind="bert")
    half = PIPELINE | {"fp16": True}
    result = train(trainer_pool, tmp_path / "two", 2, half, kind="bert")
    # The ordinary Trainer has no fp16 on a CPU; this one has, in one process.
    alone = train(trainer_pool, tmp_path / "alone", 1, half | {"partitions": 1}, kind="bert")
    check_same(result, alone)
    assert result["fp16"] and alone["fp16"] and not expected["fp16"]
    for loss, plain in zip(result["losses"], expected["losses"], strict=True):
        terms = 4 * 2 * MASKED  # of as many samples
        limit = half_loss_tolerance(torch.float16, plain, num_blocks=LAYERS, num_terms=terms)
        assert abs(loss - plain) <= limit + LOGGED
    assert result["losses"] != expected["losses"], "fp16 shows"
    checkpoint = tmp_path / "two" / "output" / "checkpoint-2"
    again = train(trainer_pool, tmp_path / "two", 2, half, kind="bert", resume=checkpoint)
    assert again["losses"] == result["losses"] and again["evaluated"] == result["evaluated"]


@pytest.mark.sample(keep=0)
def test_trainer_skips_updates_that_overflow(trainer_pool: Pool, tmp_path: Path) -> None:
    half = PIPELINE | {"fp16": True}
    scale = 2.0**17
    result = train(trainer_pool, tmp_path / "large", 2, half, kind="bert", init_scale=scale)
    assert result["fp16"] and scale / 2**4 < result["loss_scale"] < scale, (
        "the first updates were skipped"
    )
    assert not result["has_overflow"], "the last one was not"
    assert result["evaluated"][0] != result["evaluated"][1], "then it is trained"
    scale = 2.0**60
    result = train(trainer_pool, tmp_path / "huge", 2, half, kind="bert", init_scale=scale)
    assert result["has_overflow"] and result["loss_scale"] == scale / 2**4, "after four updates"
    assert result["evaluated"][0] == result["evaluated"][1], "nothing has changed"


def test_trainer_splits_tensors(
    trainer_pool: Pool, tmp_path: Path, expected_gpt2: dict[str, Any]
) -> None:
    split = {"partitions": 1, "tensor_parallel_degree": 2, "microbatches": 2, "ddp": True}
    result = train(
        trainer_pool, tmp_path / "two", 2, split | {"_match_weights": True}, batch=2, split=1
    )
    check_same(result, expected_gpt2)
    assert result["num_split"] > 0
