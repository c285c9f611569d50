"""The split head of planned models beside compiled modules, and with another transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.compiled_training import noting_units, quick_compiler
from tests.dist.older import OLDER, OLDER_FOLDER
from tests.dist.pool import Pool
from tests.dist.split_training import (
    SplitRecord,
    SplitRun,
    check_run,
    marked_values,
    train_split,
)
from tests.reference.models import randomise_
from tests.reference.tolerances import assert_close


def train_compiled(rank: int, run: SplitRun) -> tuple[SplitRecord, list[str], int]:
    units: list[str] = []
    with quick_compiler() as num_graphs, noting_units(units):
        [record] = train_split(rank, [run])
        return record, units, num_graphs()


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("case", ["qwen3", "qwen3_tied"])
def test_a_model_with_a_split_head_is_compiled_and_trains_as_in_one_process(
    pool: Pool, case: str, pp: int
) -> None:
    run = SplitRun(case, pp, 2, 1, prescaled=True, compile="stage")
    results = pool.run(run.world_size, train_compiled, run)
    check_run(run, [record for record, _, _ in results])
    for _, units, num_graphs in results:
        assert units and num_graphs >= 1
        assert not [unit for unit in units if "lm_head" in unit]


# ---- another transformers ----------------------------------------------------

PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
VOCABULARY, SAMPLES, LENGTH = 41, 2, 6


def make() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = randomise_(transformers.LlamaForCausalLM(config), 1)
    return model


def ids_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def train_older(rank: int, prescaled: bool, pp: int) -> dict[str, Any]:
    """Gradients after one step, the loss, logits and which transformers it was."""
    import transformers

    import smp
    from smp.nn.planned.head import PlannedHead

    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": pp,
            "prescaled_batch": prescaled,
            "ddp": True,
        }
    )
    plain = make()
    smp.set_tensor_parallelism(plain, plan=PLAN)
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(ids: Tensor) -> tuple[Tensor, Tensor]:
        output = model(input_ids=ids, labels=ids)
        model.backward(output.loss)
        return output.loss.detach(), output.logits.detach()

    loss, logits = train_step(ids_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    return {
        "grads": marked_values(model, "grad"),
        "loss": loss.outputs[0],
        "logits": logits.outputs[0],
        "heads": sum(isinstance(module, PlannedHead) for module in model.modules()),
        "batch": smp.rdp_rank() if prescaled else smp.dp_rank(),
        "version": (transformers.__version__, str(transformers.__file__)),
    }


def alone(rank: int, num_batches: int) -> tuple[dict[str, Tensor], list[Any]]:
    model = make()
    seen = []
    for idx in range(num_batches):
        output = model(input_ids=ids_of(idx), labels=ids_of(idx))
        (output.loss / num_batches).backward()
        seen.append((output.loss.detach(), output.logits.detach()))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("prescaled", [False, True])
def test_a_plan_with_a_head_works_with_transformers_4_30_2(
    older_pool: Pool, prescaled: bool, pp: int
) -> None:
    from smp.tensor_parallel import partial

    results = older_pool.run(2 * pp, train_older, prescaled, pp)
    [(expected, seen)] = older_pool.run(1, alone, 1 if prescaled else 2)
    where = f"pp {pp} prescaled {prescaled}"
    grads = partial.merge([result["grads"] for result in results])
    assert_close(grads, expected, torch.float32, where)
    for result in results:
        assert result["heads"] == 1, "the head is not split"
        loss, logits = seen[result["batch"]]
        torch.testing.assert_close(result["loss"], loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result["logits"], logits, rtol=1e-4, atol=1e-5)
        version, file = result["version"]
        assert version == OLDER and Path(file).is_relative_to(OLDER_FOLDER)
