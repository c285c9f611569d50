"""Clients A, C, D and their helpers: GPT scripts of the original library's users."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)
from tests.clients.running import Client
from tests.dist.pool import Pool

A = {
    "tensor_parallel_degree": 2,
    "fp16": 1,
    "shard_optimizer_state": 1,
    "batch_size": 4,
    "microbatches": 2,
    "hidden": 128,
}


def check(results: list[dict[str, Any]], num_losses: int) -> None:
    """Losses are there on every rank, and training helps."""
    for result in results:
        assert len(result["losses"]) == num_losses
        assert all(map(math.isfinite, result["losses"]))
        assert math.isfinite(result["validation"])
        assert result["means"] == pytest.approx(results[0]["means"], rel=1e-6)
        assert result["validation"] == pytest.approx(results[0]["validation"], rel=1e-3)
    means = results[0]["means"]
    assert sum(means[-2:]) < sum(means[:2])


def test_client_a_fine_tunes_with_tensor_parallelism_and_resumes(
    pool: Pool, tmp_path: Path
) -> None:
    client = Client(pool, tmp_path, "client_a.py")
    first = client.run(4, A | {"finetune": 1})
    check(first, 4)
    assert len({result["num_params"] for result in first}) == 1
    assert first[0]["num_split"] > 0 and not first[0]["overflow"]
    # The weights are the pretrained ones, although nothing loads them after the replacement.
    assert first[0]["losses"][0] == pytest.approx(first[0]["plain"], rel=0.02)
    newest = (tmp_path / "output" / "newest").read_text().strip()
    assert newest == "total_steps2_partial"
    again = client.run(4, A | {"finetune": 1, "load_partial": 1})
    for one, other in zip(first, again, strict=True):
        assert other["losses"] == one["losses"][2:], "training goes on bit by bit"


def test_client_a_trains_with_heads_that_do_not_divide(pool: Pool, tmp_path: Path) -> None:
    client = Client(pool, tmp_path, "client_a.py")
    results = client.run(2, A | {"heads": 3, "hidden": 48, "max_steps": 3, "save_step": 0})
    check(results, 3)
    assert results[0]["num_split"] > 0, "the first rank has two heads, the other one"


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("prescaled", [0, 1])
def test_client_c_by_tensor_parallelism(pool: Pool, tmp_path: Path, prescaled: int) -> None:
    client = Client(pool, tmp_path, "client_c.py")
    argv = {"tensor_parallel_degree": 4, "fp16": 1, "shard_optimizer_state": 1, "heads": 4}
    argv |= {"manual_partition": 1, "prescaled_batch": prescaled, "fork_loader": 1}
    world_size = 4 if prescaled else 8
    results = client.run(world_size, argv | {"logits_output": prescaled})
    check(results, 4)
    assert results[0]["num_split"] == 1


@pytest.mark.sample(keep=0)
def test_client_c_with_a_pipeline_of_layers_placed_by_hand(pool: Pool, tmp_path: Path) -> None:
    client = Client(pool, tmp_path, "client_c.py")
    argv = {"pipeline_parallel_degree": 2, "microbatches": 2, "manual_partition": 1}
    argv |= {"fp16": 1, "shard_optimizer_state": 1, "activation_strategy": "group_2", "layers": 4}
    check(client.run(4, argv), 4)


SDP = {"sharded_data_parallel_degree": 2, "bf16": 1, "skip_tracing": 1, "delayed_param": 1}


def test_client_c_by_sharded_data_parallelism_resumes(pool: Pool, tmp_path: Path) -> None:
    client = Client(pool, tmp_path, "client_c.py")
    argv = SDP | {"offload_activations": 1, "gradient_accumulation": 2, "prescaled_batch": 0}
    first = client.run(2, argv)
    check(first, 8)
    assert first[0]["norm"] > 0
    whole = get_full_state_dict_from_sharded_data_parallel_checkpoint(tmp_path / "output")
    names = {name for name in whole if whole[name].is_floating_point()}
    assert sum(whole[name].numel() for name in names) == first[0]["num_params"]
    again = client.run(2, argv | {"load_partial": 1})
    for one, other in zip(first, again, strict=True):
        assert other["losses"] == one["losses"][4:]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bloom", "falcon", "flan_t5"])
def test_client_d_trains_a_family(pool: Pool, tmp_path: Path, model_type: str) -> None:
    client = Client(pool, tmp_path, "client_d.py")
    argv = SDP | {"model_type": model_type, "prescaled_batch": 0, "max_steps": 3}
    argv |= {"delayed_param": int(model_type == "gpt2"), "heads": 4}
    argv |= {"checkpoint_sublayers": int(model_type == "falcon"), "load_full": 0}
    results = client.run(2, argv)
    check(results, 3)
    assert results[0]["norm"] > 0
    assert (results[0]["num_split"] > 0) == (model_type in ("gpt2", "gpt_neox"))


def test_client_d_trains_gptj_with_tensor_parallelism_too(pool: Pool, tmp_path: Path) -> None:
    client = Client(pool, tmp_path, "client_d.py")
    argv = SDP | {"model_type": "gptj", "tensor_parallel_degree": 2, "heads": 4}
    check(client.run(4, argv), 4)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("how", ["load_full", "finetune"])
def test_client_d_begins_with_pretrained_weights(pool: Pool, tmp_path: Path, how: str) -> None:
    """Loads a plain state dict after wrapping, or makes the model with ``from_pretrained``."""
    client = Client(pool, tmp_path, "client_d.py")
    argv = SDP | {"model_type": "gpt2", "prescaled_batch": 0, how: 1}
    results = client.run(2, argv | {"delayed_param": int(how == "load_full")})
    check(results, 4)
    ours, plain = results[0]["first"]
    assert ours == pytest.approx(plain, rel=5e-3)
