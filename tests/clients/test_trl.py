"""Trainers of TRL behind `SMPTrainerMixin` against the same trainers in one process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool

LOGGED = 1.01e-4  # losses are logged with four digits
WORDS = 40


@dataclass(frozen=True)
class Job:
    """A call of ``train``.

    Attributes:
        config: configuration of smp; empty: the plain trainer of TRL.
        options: arguments of TRL's configuration.
        reference: model of DPO that is compared with: "given", "loaded" from the model's folder,
            or "adapters": the policy without its adapters, or with their first values.
    """

    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    method: str = "sft"
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    num_texts: int = 64
    reference: str = "given"
    keeps_adapter: bool = False
    resume: str = ""
    with_logits: bool = False


def tokenizer_of_words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_llava() -> tuple[Any, Any]:
    """Returns a vision-language model of four layers, and its processor."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = tokenizer_of_words()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}{% for c in m['content'] %}"
        "{{ '<image>' if c['type'] == 'image' else ' ' + c['text'] }}{% endfor %}{% endfor %}",
    )  # fmt: skip
    torch.manual_seed(5)
    seeing = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    token = tokenizer.convert_tokens_to_ids("<image>")
    reading = tiny_llama(5).config
    reading.vocab_size = len(tokenizer)
    config = LlavaConfig(vision_config=seeing, text_config=reading, image_token_index=token)
    return LlavaForConditionalGeneration(config), processor


def with_image(row: dict[str, str], generator: torch.Generator) -> dict[str, Any]:
    from PIL import Image

    pixels = torch.randint(0, 255, (16, 16, 3), generator=generator, dtype=torch.uint8)
    return {
        "images": [Image.fromarray(pixels.numpy())],
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["chosen"]}],
    }


def texts(method: str, count: int, seed: int) -> Any:
    """Texts of very different lengths, so that microbatches count different numbers of tokens."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)

    def text(longest: int) -> str:
        length = int(torch.randint(2, longest, (), generator=generator))
        first = int(torch.randint(0, WORDS, (), generator=generator))
        return "".join(f" w{(first + 3 * i) % WORDS}" for i in range(length))

    rows = [
        {"prompt": "w1" + text(5), "chosen": text(12), "rejected": text(8)} for _ in range(count)
    ]
    if method == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    if method == "images":
        rows = [with_image(row, generator) for row in rows]
    return Dataset.from_list(rows)


def adapted(model: Any) -> Any:
    from peft import get_peft_model

    torch.manual_seed(11)
    return get_peft_model(model, lora())


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False, lora_dropout=0.0,
    )  # fmt: skip


def checksum(prediction: Any) -> dict[str, float]:
    kept = prediction.predictions[prediction.label_ids > 0]  # others are padding
    return {"checksum": float(abs(kept).sum())}


def train(rank: int, job: Job) -> dict[str, Any]:
    import smp

    if job.config:
        smp.init(job.config)
    if not job.config or smp.size() == 1:  # no launcher started it
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from smp.integrations.trainer import SMPTrainerMixin

    class Supervised(SMPTrainerMixin, SFTTrainer):
        pass

    class Preferring(SMPTrainerMixin, DPOTrainer):
        pass

    arguments: Any = DPOConfig if job.method == "dpo" else SFTConfig
    training = arguments(
        output_dir=job.folder, use_cpu=True, bf16=False, per_device_train_batch_size=job.batch,
        per_device_eval_batch_size=job.batch, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=2e-2, adam_epsilon=1e-3, weight_decay=0.01, warmup_steps=1,
        max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2,
        seed=7, data_seed=7, report_to=[], disable_tqdm=True, **job.options,
    )  # fmt: skip
    model, processing = tiny_llama(5), tokenizer_of_words()
    if job.method == "images":
        model, processing = tiny_llava()
    start = os.path.join(job.folder, "start")
    if rank == 0:
        if job.reference == "loaded":
            model.save_pretrained(start)
        # In files, as TRL keeps what it computes of a data set beside it, for all ranks.
        texts(job.method, job.num_texts, seed=1).save_to_disk(f"{job.folder}/texts")
        texts(job.method, 16, seed=2).save_to_disk(f"{job.folder}/evaluated")
    if job.config:
        smp.barrier()
    model.config._name_or_path = start
    extra: dict[str, Any] = {}
    if job.method == "dpo" and job.reference == "given":
        extra["ref_model"] = tiny_llama(6)
    if job.keeps_adapter:
        model = adapted(model)
    elif job.reference == "adapters":
        extra["peft_config"] = lora()
    kinds = (Preferring, DPOTrainer) if job.method == "dpo" else (Supervised, SFTTrainer)
    trainer: Any = kinds[0 if job.config else 1](
        model=model, args=training, processing_class=processing,
        train_dataset=load_from_disk(f"{job.folder}/texts"),
        eval_dataset=load_from_disk(f"{job.folder}/evaluated"),
        compute_metrics=checksum if job.with_logits else None, **extra,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=job.resume or None)
    history = trainer.state.log_history
    left_out = ("runtime", "per_second", "flos", "epoch", "step", "train_loss")
    result: dict[str, Any] = {"history": [
        {k: v for k, v in entry.items() if not k.endswith(left_out)} for entry in history
    ]}  # fmt: skip
    result["final"] = trainer.evaluate()["eval_loss"]
    wrapped = trainer.model_wrapped
    result["num_local"] = sum(1 for _ in wrapped.local_parameters()) if job.config else 0
    result["num_sharded"] = sum(hasattr(p, "_smp_shard") for p in wrapped.parameters())
    state = wrapped.state_dict()
    result["state"] = {k: v for k, v in state.items() if v.is_floating_point()}
    saved = Path(job.folder, "checkpoint-4")
    name = "adapter_model.safetensors" if (saved / "adapter_model.safetensors").exists() else ""
    result["saved"] = name or sorted(f.name for f in saved.glob("*.safetensors"))[0]
    return result


def check_same(
    results: list[dict[str, Any]], expected: dict[str, Any], left_out: tuple[str, ...] = ()
) -> None:
    losses = [entry["loss"] for entry in expected["history"] if "loss" in entry]
    assert abs(losses[0] - losses[-1]) > 0.01, "nothing was learnt"
    for result in results:
        assert len(result["history"]) == len(expected["history"])
        for own, other in zip(result["history"], expected["history"], strict=True):
            assert own.keys() == other.keys()
            for name, value in other.items():
                if not name.endswith((*left_out, *UNSURE)):
                    assert own[name] == pytest.approx(value, rel=1e-3, abs=LOGGED), name
        assert result["final"] == pytest.approx(expected["final"], abs=1e-4)
        assert result["saved"] == expected["saved"]
        assert result["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            assert torch.allclose(result["state"][name], value, atol=1e-4, rtol=1e-3), name


# The first policy of some jobs is their reference: which of two rewards of 0 is larger, rounding
# decides.
UNSURE = ("rewards/accuracies",)

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


def check_layouts(pool: Pool, tmp_path: Path, job: Job, layouts: list[Any]) -> None:
    """Compares a job with its plain run on the global batch, and again from its checkpoint."""
    (expected,) = pool.run(1, train, replace(job, folder=str(tmp_path / "one"), batch=8))
    for world_size, config in layouts:
        folder = str(tmp_path / f"many_{len(config)}_{world_size}")
        replicas = world_size // config.get("pipeline_parallel_degree", 1)
        own = replace(job, folder=folder, config=config, batch=8 // replicas)
        results = pool.run(world_size, train, own)
        check_same(results, expected)
        assert all(result["num_local"] > 0 for result in results)
        is_sharded = config.get("sharded_data_parallel_degree", 1) > 1
        assert all((result["num_sharded"] > 20) == is_sharded for result in results)
        own = replace(own, resume=f"{folder}/checkpoint-2")
        # TRL counts tokens from 0 again.
        check_same(pool.run(world_size, train, own), expected, left_out=("num_tokens",))


BOTH = [(4, PIPELINE | {"shard_optimizer_state": True}), (2, {"microbatches": 2, "ddp": True})]


def test_sft_counts_completions(pool: Pool, tmp_path: Path) -> None:
    check_layouts(pool, tmp_path, Job("", options={"max_length": 32}), BOTH)


@pytest.mark.sample(keep=0)
def test_dpo_compares_with_a_second_model(pool: Pool, tmp_path: Path) -> None:
    check_layouts(pool, tmp_path, Job("", method="dpo"), BOTH)


@pytest.mark.sample(keep=0)
def test_dpo_takes_adapters_away(pool: Pool, tmp_path: Path) -> None:
    check_layouts(pool, tmp_path, Job("", method="dpo", reference="adapters"), BOTH)


@pytest.mark.sample(keep=0)
def test_dpo_compares_with_the_first_adapter(pool: Pool, tmp_path: Path) -> None:
    check_layouts(
        pool, tmp_path, Job("", method="dpo", reference="adapters", keeps_adapter=True), BOTH
    )


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("reference", ["given", "loaded", "adapters"])
def test_dpo_computes_references_before(pool: Pool, tmp_path: Path, reference: str) -> None:
    options = {"precompute_ref_log_probs": True}
    check_layouts(pool, tmp_path, Job("", {}, "dpo", options, reference=reference), BOTH)


@pytest.mark.sample(keep=0)
def test_dpo_mixes_losses(pool: Pool, tmp_path: Path) -> None:
    options = {
        "loss_type": ["ipo", "sigmoid"], "loss_weights": [1.0, 0.5], "use_weighting": True,
        "ld_alpha": 0.5,
    }  # fmt: skip
    job = Job("", {}, "dpo", options, reference="loaded", with_logits=True)
    check_layouts(pool, tmp_path, job, BOTH)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_sft_packs(pool: Pool, tmp_path: Path, strategy: str) -> None:
    options = {"packing": True, "packing_strategy": strategy, "max_length": 24}
    options |= {"eval_packing": False}
    check_layouts(pool, tmp_path, Job("", {}, "sft", options, num_texts=300), BOTH)


@pytest.mark.sample(keep=0)
def test_sft_smooths_labels_without_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    job = Job("", options={"max_length": 32, "label_smoothing_factor": 0.1})
    check_layouts(pool, tmp_path, job, BOTH[1:])
    for outcome in pool.outcomes(2, train, replace(job, folder=str(tmp_path), config=PIPELINE)):
        assert "with label_smoothing_factor TRL calls the model once for the" in outcome.message


@pytest.mark.sample(keep=0)
def test_sft_leaves_padding_out(pool: Pool, tmp_path: Path) -> None:
    options = {"padding_free": True, "max_length": None, "loss_type": "dft"}
    check_layouts(pool, tmp_path, Job("", {}, "sft", options), BOTH)


@pytest.mark.sample(keep=0)
def test_sft_reads_images(pool: Pool, tmp_path: Path) -> None:
    check_layouts(pool, tmp_path, Job("", method="images", options={"max_length": None}), BOTH)


@pytest.mark.sample(keep=0)
def test_sft_trains_adapters_with_metrics(pool: Pool, tmp_path: Path) -> None:
    job = Job("", options={"max_length": 32}, reference="adapters", with_logits=True)
    check_layouts(pool, tmp_path, job, BOTH)


def refused(rank: int, folder: str) -> dict[str, str]:
    """Returns the errors of uses that are refused, by name."""
    import smp

    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2})
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments
    from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

    from smp.integrations.trainer import SMPTrainerMixin

    class Supervised(SMPTrainerMixin, SFTTrainer):
        pass

    class Preferring(SMPTrainerMixin, DPOTrainer):
        pass

    errors = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except (TypeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    def make(kind: Any, arguments: Any, is_split: bool = False, **options: Any) -> Any:
        with smp.tensor_parallelism(is_split):
            model = tiny_llama(5)
        args = arguments(folder, use_cpu=True, report_to=[], **options)
        method = "sft" if kind is Supervised else "dpo"
        return kind(
            model=model, args=args, processing_class=tokenizer_of_words(),
            train_dataset=texts(method, 8, seed=1),
            **({"ref_model": tiny_llama(6)} if method == "dpo" else {}),
        )  # fmt: skip

    attempt("order", lambda: type("Late", (SFTTrainer, SMPTrainerMixin), {}))
    attempt("generates", lambda: type("Group", (SMPTrainerMixin, GRPOTrainer), {}))
    attempt("no trainer", lambda: type("Alone", (SMPTrainerMixin,), {})())
    attempt("16 bits", lambda: make(Supervised, SFTConfig))
    plain = {"bf16": False}
    attempt("offloads", lambda: make(Supervised, SFTConfig, activation_offloading=True, **plain))
    attempt("sorts", lambda: make(Preferring, DPOConfig, loss_type=["aot"], **plain))
    attempt("syncs", lambda: make(Preferring, DPOConfig, sync_ref_model=True, **plain))
    early = {"precompute_ref_log_probs": True, **plain}
    attempt("in memory", lambda: make(Preferring, DPOConfig, **early))
    attempt("split", lambda: make(Supervised, SFTConfig, is_split=True, **plain).train())

    class OfTrainer(SMPTrainerMixin, Trainer):
        pass

    wrapped = smp.DistributedModel(tiny_llama(7))
    args = TrainingArguments(folder, use_cpu=True, report_to=[])
    attempt("wrapped", lambda: OfTrainer(model=wrapped, args=args))
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], parallelism_config=ParallelismConfig()
    )
    attempt("engine", lambda: OfTrainer(model=tiny_llama(8), args=args))
    return errors


def test_uses_that_are_not_supported_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    words = {
        "order": "TypeError: class Late: SMPTrainerMixin comes after SFTTrainer",
        "generates": "TypeError: class Group: GRPOTrainer of TRL is not supported",
        "no trainer": "TypeError: Alone has no Trainer behind SMPTrainerMixin",
        "16 bits": "the TrainingArguments ask for bf16; set bf16: True",
        "offloads": "Supervised: activation_offloading=True is not supported",
        "sorts": "Preferring: loss_type 'aot' sorts the pairs of a batch",
        "syncs": "Preferring: sync_ref_model=True is not supported",
        "in memory": "needs a data set in files that all ranks read, and 'train' is in memory",
        "split": "is split over tensor-parallel ranks, and TRL computes its loss from",
        "engine": "OfTrainer: parallelism_config of the arguments",
        "wrapped": "OfTrainer wraps the model itself; give it the plain one",
    }
    for errors in pool.run(2, refused, str(tmp_path)):
        assert errors.keys() == words.keys()
        for name, text in words.items():
            assert text in errors[name], (name, errors[name])


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_parameters_are_sharded(pool: Pool, tmp_path: Path, method: str) -> None:
    sharded = {
        "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0,
        "sdp_hierarchical_allgather": False, "microbatches": 2, "ddp": True,
    }  # fmt: skip
    check_layouts(pool, tmp_path, Job("", method=method), [(2, sharded)])
