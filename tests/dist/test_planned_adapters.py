"""Adapters of PEFT inside of layers that a plan splits train like in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.steps import marked_values
from tests.harness import labelled_loss, train_step_of
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.models import randomise_
from tests.reference.split_families import make_split_batch, make_split_family
from tests.reference.tolerances import assert_close

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def adapted(case: str) -> nn.Module:
    """A model with adapters; their parameters are trained, and have random values."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, lora_dropout=0.0)
    model: nn.Module = peft.get_peft_model(make_split_family(case, torch.float64), config)
    return randomise_(model.double(), 1).train()


class Tables(nn.Module):
    """An embedding and a head, which a job splits without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, padding_idx=0, scale_grad_by_freq=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def adapted_tables() -> nn.Module:
    """Returns a model whose embedding and head have adapters with random values."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["table", "head"])
    return randomise_(peft.get_peft_model(Tables(), config).double(), 1).train()


def ids_of(idx: int) -> Tensor:
    return torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(idx))


def train_tables(_: int, prescaled: bool) -> tuple[Any, str]:
    """Returns gradients after one step, and the class of the embedding."""
    import smp

    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": prescaled, "ddp": True})
    plain = adapted_tables()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss = model(ids).square().mean()
        model.backward(loss)
        return loss

    train_step(ids_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    return marked_values(model, "grad"), type(plain.base_model.model.table.base_layer).__name__


def train_once(rank: int, case: str, tp: int, prescaled: bool) -> tuple[Any, Any]:
    """Gradients after one step, and shapes of parameters."""
    import smp

    smp.init({"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True})
    with lifted_casts():
        plain = adapted(case)
    lift_forwards(plain)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, labelled_loss)
    train_step(make_split_batch(case, smp.rdp_rank() if prescaled else smp.dp_rank(), 0))
    shapes = {name: tuple(p.shape) for name, p in model.local_named_parameters()}
    return marked_values(model, "grad"), shapes


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(("case", "tp"), [("qwen3", 2), ("qwen3_tied", 4), ("llama", 2)])
@pytest.mark.parametrize("prescaled", [False, True])
def test_adapters_are_split_with_their_base_layer(
    pool: Pool, case: str, tp: int, prescaled: bool
) -> None:
    from smp.tensor_parallel import partial

    results = pool.run(tp, train_once, case, tp, prescaled)
    place = "base_model.model.model.layers.0."
    for _, shapes in results:
        assert shapes[place + "mlp.down_proj.base_layer.weight"] == (32, 24 // tp)
        assert shapes[place + "mlp.down_proj.lora_A.default.weight"] == (3, 24 // tp)
        assert shapes[place + "mlp.down_proj.lora_B.default.weight"] == (32, 3)
        assert shapes[place + "mlp.up_proj.lora_A.default.weight"] == (3, 32)
        assert shapes[place + "mlp.up_proj.lora_B.default.weight"] == (24 // tp, 3)
    num_batches = 1 if prescaled else tp
    with lifted_casts():
        plain = adapted(case)
        batches = [make_split_batch(case, idx, 0) for idx in range(num_batches)]
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
        for batch, count in zip(batches, counts, strict=True):
            (plain(**batch)["loss"] * count / sum(counts)).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert any("lora_A" in name for name in expected)
    assert not any("base_layer" in name for name in expected)
    whole = partial.merge([grads for grads, _ in results])
    assert_close(whole, expected, torch.float64, f"{case} tp {tp} {prescaled}", 1e-9)


@pytest.mark.parametrize("prescaled", [False, True])
def test_adapters_of_a_split_embedding(pool: Pool, prescaled: bool) -> None:
    from smp.tensor_parallel import partial

    results = pool.run(2, train_tables, prescaled)
    assert {kind for _, kind in results} == {"DistributedEmbedding"}
    plain = adapted_tables()
    num_batches = 1 if prescaled else 2
    for idx in range(num_batches):
        (plain(ids_of(idx)).square().mean() / num_batches).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert any("lora_embedding_A" in name for name in expected)
    whole = partial.merge([grads for grads, _ in results])
    assert_close(whole, expected, torch.float64, f"tables {prescaled}", 1e-9)
