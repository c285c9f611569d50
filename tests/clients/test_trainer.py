"""`SMPTrainer` with transformers 5 against the plain Trainer in one process."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool
from tests.dist.processes import launch
from tests.reference.tolerances import half_loss_tolerance

LOGGED = 1.01e-4  # losses are logged with four digits


@dataclass(frozen=True)
class Job:
    """A call of ``train``.

    Attributes:
        config: configuration of smp; empty: the plain Trainer.
    """

    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "gpt2"
    batch: int = 4
    accumulate: int = 2
    max_steps: int = 4
    num_eval: int = 16
    resume: str = ""
    is_split: bool = False
    drops_labels: bool = False
    has_adapters: bool = False
    has_own_mean: bool = False
    has_term: bool = False
    init_scale: float = 2.0**8


def with_adapters(model: Any) -> Any:
    """Adds adapters to the last layers only: a pipeline's first stage has nothing to train."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True,
            layers_to_transform=[2, 3], init_lora_weights=False,
        ),
    )  # fmt: skip


def own_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Ignores the number that the Trainer gives."""
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def with_term(trainer: type) -> type:
    """Adds what one process needs: a sum that is divided, and a term that is a mean."""

    class WithTerm(trainer):  # type: ignore[misc]
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs["logits"].flatten(0, 1), inputs["labels"].flatten()
            total = nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = total / num_items_in_batch + logits.square().mean()
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    return WithTerm


def train(rank: int, job: Job) -> dict[str, Any]:
    import smp

    if job.config:
        smp.init(job.config)
    if not job.config or smp.size() == 1:  # no launcher started it
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    from transformers import Trainer, TrainingArguments, set_seed

    from smp.integrations.trainer import SMPTrainer
    from tests.clients.scripts.trainer_models import accuracy, model_of, samples_of

    training = TrainingArguments(
        output_dir=job.folder, use_cpu=True, per_device_train_batch_size=job.batch,
        per_device_eval_batch_size=job.batch, gradient_accumulation_steps=job.accumulate,
        max_steps=job.max_steps, learning_rate=2e-2, adam_epsilon=1e-3, weight_decay=0.01,
        warmup_steps=1, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True, seed=7, data_seed=7, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    set_seed(3)
    with smp.tensor_parallelism(job.is_split):
        model = model_of(job.kind)
    if job.has_adapters:
        model = with_adapters(model)
    samples, evaluated = samples_of(job.kind, 64, seed=1), samples_of(job.kind, job.num_eval, 2)
    if job.drops_labels:  # microbatches and batches count different numbers of tokens
        for index, sample in enumerate([*samples, *evaluated]):
            sample["labels"][: 1 + index % 7] = -100
    SMPTrainer.dynamic_loss_args = {"init_scale": job.init_scale}
    kind: type = SMPTrainer if job.config else Trainer
    trainer: Any = (with_term(kind) if job.has_term else kind)(
        model=model, args=training, train_dataset=samples, eval_dataset=evaluated,
        compute_metrics=accuracy, compute_loss_func=own_mean if job.has_own_mean else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=job.resume or None)
    final = trainer.evaluate()
    history = trainer.state.log_history
    names = ("loss", "learning_rate", "grad_norm", "eval_loss", "eval_accuracy", "eval_checksum")
    result: dict[str, Any] = {n: [e[n] for e in history if n in e] for n in names}
    result["final"] = final["eval_loss"]
    result["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    result["num_split"] = result["num_local"] = 0
    if job.config:
        wrapped = trainer.model_wrapped
        result["num_local"] = sum(1 for _ in wrapped.local_parameters())
        result["num_split"] = sum(map(wrapped.is_distributed_parameter, wrapped.parameters()))
    saved = {}
    if rank == 0:
        checkpoint = Path(job.folder, f"checkpoint-{job.max_steps}")
        if job.has_adapters:
            set_seed(3)
            again = type(model).from_pretrained(model_of(job.kind), checkpoint)
            assert not list(checkpoint.glob("model*")), "adapters alone are exported"
            info: dict[str, Any] = {}
        else:
            again, info = type(model).from_pretrained(checkpoint, output_loading_info=True)
        result["not_loaded"] = [names for names in info.values() if names]
        saved = {name: float(value.double().sum()) for name, value in again.state_dict().items()}
    result["saved"] = saved
    del trainer
    return result


def check_same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert abs(expected["loss"][0] - expected["loss"][-1]) > 0.1, "nothing was learnt"
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], abs=LOGGED)
        assert result["learning_rate"] == expected["learning_rate"]
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-4)
        assert result["eval_accuracy"] == pytest.approx(expected["eval_accuracy"])
        assert result["eval_checksum"] == pytest.approx(expected["eval_checksum"], rel=1e-5)
        assert result["best"] == expected["best"]
    assert results[0]["not_loaded"] == []
    assert results[0]["saved"] == pytest.approx(expected["saved"], rel=1e-3, abs=1e-4)


PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


def test_trainer_counts_tokens_and_resumes_elsewhere(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), batch=8, drops_labels=True))
    assert expected["final"] == max(expected["eval_loss"]), "the best one was loaded"
    folder = str(tmp_path / "four")
    sharded = PIPELINE | {"shard_optimizer_state": True}
    job = Job(folder, sharded, drops_labels=True)
    results = pool.run(4, train, job)
    check_same(results, expected)
    assert all(result["num_local"] > 0 for result in results), "each has a part"
    checkpoint = f"{folder}/checkpoint-2"
    for world_size, config, batch in ((4, sharded, 4), (2, {"microbatches": 4, "ddp": True}, 4)):
        job = Job(folder, config, batch=batch, drops_labels=True, resume=checkpoint)
        check_same(pool.run(world_size, train, job), expected)


def test_trainer_evaluates_uneven_batches(pool: Pool, tmp_path: Path) -> None:
    argv: dict[str, Any] = {"kind": "roberta", "num_eval": 11, "accumulate": 1}
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), **argv))
    check_same(pool.run(2, train, Job(str(tmp_path / "two"), PIPELINE, **argv)), expected)


@pytest.mark.parametrize("has_own_mean", [False, True])
def test_means_that_ignore_the_number_of_labels(
    pool: Pool, tmp_path: Path, has_own_mean: bool
) -> None:
    """The forward of BERT takes the number, and its loss stays a mean over masked words."""
    argv: dict[str, Any] = {"kind": "bert", "drops_labels": True, "has_own_mean": has_own_mean}
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), batch=8, **argv))
    check_same(pool.run(4, train, Job(str(tmp_path / "four"), PIPELINE, **argv)), expected)


def test_losses_for_one_process_with_terms_that_no_number_divides(
    pool: Pool, tmp_path: Path
) -> None:
    argv: dict[str, Any] = {"drops_labels": True, "has_term": True}
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), batch=8, **argv))
    check_same(pool.run(4, train, Job(str(tmp_path / "four"), PIPELINE, **argv)), expected)


@pytest.mark.sample(keep=0)
def test_trainer_trains_in_16_bits(pool: Pool, tmp_path: Path) -> None:
    from tests.clients.scripts.trainer_models import LAYERS, MASKED

    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), kind="bert"))
    for dtype, half in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        folder = str(tmp_path / dtype)
        job = Job(folder, PIPELINE | {dtype: True}, kind="bert")
        results = pool.run(2, train, job)
        result = results[0]
        # The ordinary Trainer has no 16 bits with masters on a CPU; ours has, in one process.
        one = replace(job, folder=f"{folder}_one", config={"microbatches": 2, dtype: True})
        check_same(results, pool.run(1, train, one)[0])
        for loss, plain in zip(result["loss"], expected["loss"], strict=True):
            counts = {"num_blocks": LAYERS, "num_terms": job.batch * job.accumulate * MASKED}
            assert abs(loss - plain) <= half_loss_tolerance(half, plain, **counts)
        assert result["loss"] != expected["loss"], f"{dtype} shows"
        again = replace(job, resume=f"{folder}/checkpoint-2")
        assert pool.run(2, train, again)[0]["loss"] == result["loss"]
    job = Job(str(tmp_path / "large"), PIPELINE | {"fp16": True}, kind="bert", init_scale=2.0**20)
    result = pool.run(2, train, job)[0]
    assert not math.isfinite(result["grad_norm"][0])
    assert result["learning_rate"][:2] == [0.0, 0.0], "a skipped update does not count"


@pytest.mark.sample(keep=0)
def test_trainer_gives_ranks_of_one_batch_the_same_samples(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), batch=8, drops_labels=True))
    config = {"context_parallel_degree": 2, "microbatches": 2, "ddp": True}
    job = Job(str(tmp_path / "four"), config | {"shard_optimizer_state": True}, drops_labels=True)
    check_same(pool.run(4, train, job), expected)
    again = replace(job, resume=f"{tmp_path}/four/checkpoint-2")
    check_same(pool.run(4, train, again), expected)


def test_trainer_splits_tensors(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), drops_labels=True))
    config = {"tensor_parallel_degree": 2, "microbatches": 2, "ddp": True, "_match_weights": True}
    job = Job(str(tmp_path / "two"), config, batch=2, drops_labels=True, is_split=True)
    results = pool.run(2, train, job)
    check_same(results, expected)
    assert results[0]["num_split"] > 0


@pytest.mark.sample(keep=0)
def test_accelerate_launches_the_ranks(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), batch=8, drops_labels=True))
    folder = tmp_path / "four"
    words = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=4", "--num_machines=1"]
    words += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    script = Path(__file__).parent / "scripts" / "launched_trainer.py"
    ended = launch([sys.executable, "-m", *words, str(script), str(folder), json.dumps(PIPELINE)])
    assert ended.returncode == 0, ended.stdout[-3000:]
    results = [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(4)]
    check_same(results, expected)
    assert all(result["num_local"] > 0 for result in results), "each has a part"


@pytest.mark.sample(keep=0)
def test_trainer_trains_adapters(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, train, Job(str(tmp_path / "one"), has_adapters=True))
    folder = str(tmp_path / "two")
    results = pool.run(2, train, Job(folder, PIPELINE, has_adapters=True))
    check_same(results, expected)
    # The same from a checkpoint of the Trainer in one process as from one of our own.
    for start in (tmp_path / "one", tmp_path / "two"):
        resume = str(start / "checkpoint-2")
        job = Job(str(tmp_path / "again"), PIPELINE, has_adapters=True, resume=resume)
        again = pool.run(2, train, job)
        for result in again:
            assert result["loss"] == pytest.approx(expected["loss"], abs=LOGGED)
    # Adapters are exported in 16 bits; what the optimizer adds to has more digits.
    half = replace(job, folder=str(tmp_path / "half"), config=PIPELINE | {"bf16": True}, resume="")
    first = pool.run(2, train, half)
    again = pool.run(2, train, replace(half, resume=f"{half.folder}/checkpoint-2"))
    for one, other in zip(first, again, strict=True):
        assert other["loss"] == one["loss"] and other["grad_norm"] == one["grad_norm"]
    assert first[0]["loss"] != expected["loss"]
