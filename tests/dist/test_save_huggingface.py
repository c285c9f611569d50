"""Ranks write a folder of `from_pretrained` at once (`save_huggingface`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.resume_training import BEFORE, Job, make
from tests.dist.test_resume_files import plain_names
from tests.dist.test_stream import adapted
from tests.reference.models import randomise_

JOBS = (
    Job(2, 2, 1, "none", "fp32"),
    Job(2, 1, 2, "sdp2", "bf16"),
    Job(1, 2, 2, "state", "fp32"),
    Job(1, 1, 4, "none", "fp32"),
    Job(1, 1, 1, "none", "fp32"),
    Job(1, 2, 1, "none", "fp32", cp=2),
)


def train_and_save(
    rank: int, job: Job, folder: str, max_shard_bytes: int, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Returns the state in the names of the plain model, all files, and those of this rank."""
    import smp
    from smp.checkpoint import safetensors_stream

    model, _, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    own: list[str] = []
    write = safetensors_stream.write

    def noted(path: Path, tensors: Any) -> Any:
        own.append(path.name)
        return write(path, tensors)

    safetensors_stream.write = noted  # type: ignore[assignment]
    files = smp.save_huggingface(model, folder, max_shard_bytes=max_shard_bytes, dtype=dtype)
    safetensors_stream.write = write
    state = plain_names({name: tensor.clone() for name, tensor in model.state_dict().items()})
    train(BEFORE)
    return state, [path.name for path in files], own


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_folder_loads_as_the_plain_model(pool: Pool, tmp_path: Path, job: Job) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "new" / "model"
    results = pool.run(job.world_size, train_and_save, job, str(folder), 6000, None)
    state, files, _ = results[0]
    written = [name for _, _, own in results for name in own]
    assert len(written) > 4 and len(set(written)) == len(written)
    assert all(own for _, _, own in results), "all ranks write"
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert {*written, "model.safetensors.index.json", "config.json"} == set(files)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == (torch.bfloat16 if job.precision == "bf16" else torch.float32)
        assert torch.equal(tensor, state[name]), name


def test_a_small_model_is_one_file_of_the_wanted_dtype(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = Job(2, 1, 1, "none", "fp32")
    results = pool.run(2, train_and_save, job, str(tmp_path), 10**9, torch.bfloat16)
    assert [own for _, _, own in results if own] == [["model.safetensors"]]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, results[0][0][name].bfloat16()), name


def fail_to_save(rank: int, folder: str) -> list[str]:
    import smp
    from smp.checkpoint import safetensors_stream

    model, _, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    train(0)
    write = safetensors_stream.write
    texts = []

    def full(*_: Any) -> Any:
        raise OSError("the disk is full")

    for is_failing in (True, False, False):
        if is_failing and rank == 1:
            safetensors_stream.write = full
        try:
            smp.save_huggingface(model, folder, max_shard_bytes=6000)
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
        safetensors_stream.write = write
        smp.barrier()
        texts.append(",".join(sorted(path.name[:6] for path in Path(folder).iterdir())))
        smp.barrier()
    try:
        smp.save_huggingface(model, folder, max_shard_bytes=0)
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_a_failed_save_leaves_nothing_and_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    for texts in pool.run(2, fail_to_save, str(tmp_path)):
        assert "failed on global_rank 1: OSError: the disk is full" in texts[0] and texts[1] == ""
        assert texts[2] == "" and texts[3].startswith("config,model-,model-")
        assert "already has safetensors files; give another folder" in texts[4]
        assert texts[5] == texts[3]
        assert "max_shard_bytes must be at least 1, got 0" in texts[6]


def save_adapted(rank: int, base: str, folder: str) -> Any:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2})
    model = smp.DistributedModel(adapted(base, ["q_proj"]))

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids).logits.square().mean()
        model.backward(loss)
        return loss

    train_step(torch.arange(16).view(4, 4) % 20)
    smp.save_huggingface(model, folder, max_shard_bytes=2000)
    state = model.state_dict()
    return state if rank == 0 else None


def test_adapters_are_merged_into_the_files(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    base = tmp_path / "base"
    randomise_(LlamaForSequenceClassification(sizes), 2).save_pretrained(base)
    state = pool.run(2, save_adapted, str(base), str(tmp_path / "out"))[0]
    single = adapted(str(base), ["q_proj"])
    single.load_state_dict(state)
    merged = single.merge_and_unload().state_dict()
    loaded = LlamaForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert loaded.keys() == merged.keys()
    for name, value in merged.items():
        assert torch.equal(loaded[name], value), name
