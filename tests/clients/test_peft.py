"""LoRA adapters of PEFT on models that are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Job:
    """A training of adapters.

    Attributes:
        config: configuration of smp; empty: plain PyTorch in one process.
        layers: indices of the layers with adapters; None: all.
    """

    folder: str
    config: dict[str, Any]
    kind: str = "gpt2"
    layers: tuple[int, ...] | None = None


def make_model(kind: str, is_split: bool = False) -> Any:
    # Before the context: arguments of single layers are noted from here on.
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    import smp

    torch.manual_seed(5)
    with smp.tensor_parallelism(is_split):
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=60, n_positions=12, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
            )  # fmt: skip
            return GPT2LMHeadModel(config)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=60, num_attention_heads=4, initializer_range=0.2, **sizes)
        )


def adapted(job: Job) -> Any:
    """A model with adapters that have an effect from the beginning."""
    from peft import LoraConfig, get_peft_model

    model = make_model(job.kind, job.config.get("tensor_parallel_degree", 1) > 1)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[job.kind], task_type="CAUSAL_LM",
        layers_to_transform=None if job.layers is None else list(job.layers),
        init_lora_weights=False, fan_in_fan_out=job.kind == "gpt2",
    )  # fmt: skip
    return get_peft_model(model, config)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 60, (4, 12), generator=generator) for _ in range(4)]


def train(rank: int, job: Job) -> dict[str, Any]:
    import smp

    smp.init(job.config)
    model = adapted(job)
    plain = model
    losses = []
    if job.config:
        model = smp.DistributedModel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    if job.config:
        optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    for ids in batches():
        optimizer.zero_grad()
        if job.config:
            loss = train_step(model, ids).reduce_mean()
            smp.clip_grad_norm_(model.parameters(), 0.5)
        else:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss))
    result: dict[str, Any] = {"losses": losses}
    if job.config:
        assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
        result["num_local"] = sum(1 for p in model.local_parameters() if p.requires_grad)
        result["num_split"] = sum(map(model.is_distributed_parameter, model.parameters()))
    state = model.state_dict()
    if rank == 0:
        plain.save_pretrained(job.folder, state_dict=state)
        from peft import PeftModel

        again = PeftModel.from_pretrained(make_model(job.kind), job.folder).eval()
        with torch.no_grad():
            result["logits"] = again(input_ids=batches()[0]).logits
    return result


JOBS = {
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    "split": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}),
}


@pytest.mark.covering(times=1)
@pytest.mark.parametrize("layers", [None, (0,), (3,)])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", list(JOBS))
def test_adapters_train_and_export(
    pool: Pool, tmp_path: Any, layout: str, kind: str, layers: tuple[int, ...] | None
) -> None:
    expected = pool.run(1, train, Job(str(tmp_path / "one"), {}, kind, layers))[0]
    world_size, config = JOBS[layout]
    results = pool.run(world_size, train, Job(str(tmp_path / "two"), config, kind, layers))
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert torch.allclose(results[0]["logits"], expected["logits"], atol=1e-4)
    has_none = [result["num_local"] == 0 for result in results]
    if layout == "split":
        # Models and layers around adapters stay whole; layers without any are cut.
        assert (results[0]["num_split"] > 20) == (layers is not None or kind == "llama")
        assert not any(has_none)
    else:
        assert has_none == [layers == (3,), layers == (0,)], "a stage has nothing to train"
