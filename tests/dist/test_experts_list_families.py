"""Families of transformers whose experts are modules in a dictionary, spread by a plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.steps import (
    Reference,
    Steps,
    check_numbers,
    compare,
    make_optimizer,
    reference_steps,
    run_steps,
)
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.models import randomise_

STEPS, MICROBATCHES, VOCABULARY, EXPERTS = 2, 2, 29, 5
#: Plans by family, which name the lists of experts; layers without experts have none.
PLANS = {
    "switch_transformers": {
        f"{stack}.block.*.layer.*.mlp.experts": "ep_dispatch_experts"
        for stack in ("encoder", "decoder")
    },
    "nllb_moe": {
        f"model.{stack}.layers.*.ffn.experts": "ep_dispatch_experts"
        for stack in ("encoder", "decoder")
    },
}


def make(family: str) -> Any:
    """Makes a model in float64 with random values; its experts have room for few of the tokens."""
    import transformers

    if family == "switch_transformers":
        config: Any = transformers.SwitchTransformersConfig(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_heads=2, num_layers=2,
            num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
            num_experts=EXPERTS, expert_capacity=3, dropout_rate=0.0, router_jitter_noise=0.0,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        model: Any = transformers.SwitchTransformersForConditionalGeneration(config)
    else:
        config = transformers.NllbMoeConfig(
            vocab_size=VOCABULARY, d_model=8, encoder_ffn_dim=12, decoder_ffn_dim=12,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_sparse_step=2, decoder_sparse_step=2,
            num_experts=EXPERTS, expert_capacity=8, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, moe_token_dropout=0.0, encoder_layerdrop=0.0,
            decoder_layerdrop=0.0, max_position_embeddings=32, decoder_start_token_id=2,
            use_cache=False,
        )  # fmt: skip
        model = transformers.NllbMoeForConditionalGeneration(config)
    return randomise_(model.double(), 5).train()


def make_batch(replica: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + step)
    draw = functools.partial(torch.randint, 3, VOCABULARY, generator=generator)
    return {"input_ids": draw((4, 7)), "labels": draw((4, 6))}


@dataclass(kw_only=True)
class Record(Steps):
    params: dict[str, Tensor] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


def train(rank: int, family: str, tp: int, prescaled: bool) -> Record:
    import smp

    smp.init(
        {
            "tensor_parallel_degree": tp, "expert_parallel_degree": tp, "ddp": True,
            "prescaled_batch": prescaled, "microbatches": MICROBATCHES,
        }
    )  # fmt: skip
    with lifted_casts():
        plain = make(family)
    lift_forwards(plain)
    smp.set_tensor_parallelism(plain, plan=PLANS[family])
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    record = Record(rdp_rank=0, batch_idx=0 if prescaled else rank)
    batch_of = functools.partial(make_batch, record.batch_idx)
    run_steps(record, model, optimizer, batch_of, STEPS)
    record.own = {n for n, p in plain.named_parameters() if ".experts." in n and p.numel()}
    record.params = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return record


def alone(rank: int, family: str, num_batches: int) -> Reference:
    with lifted_casts():
        return reference_steps(make(family), make_batch, num_batches, MICROBATCHES, STEPS)


def check(pool: Pool, family: str, tp: int, prescaled: bool) -> None:
    from smp.tensor_parallel import partial

    [expected] = pool.run(1, alone, family, 1 if prescaled else tp)
    records = pool.run(tp, train, family, tp, prescaled)
    names = {name for name in expected.params if ".experts." in name}
    assert names and names == set.union(*(record.own for record in records))
    assert sum(len(record.own) for record in records) == len(names)
    for record in records:
        check_numbers(family, record, expected, 1e-9, 1e-6)
        compare(record.params, expected.params, torch.float64, 1e-9, f"{family}: parameters")
    for step in range(STEPS):
        whole = partial.merge([record.grads[step] for record in records])
        what = f"{family}: gradients of step {step}"
        compare(whole, expected.grads[step], torch.float64, 1e-9, what)
    with_grad = {name for name in names if bool(expected.grads[0].get(name, torch.zeros(1)).any())}
    # NLLB-MoE of 5.23 calls its first two experts, whatever the router says.
    assert len(with_grad) > len(names) / 3, "few experts get tokens"


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("prescaled", [False, True], ids=["own", "common"])
@pytest.mark.parametrize("family", PLANS)
def test_a_family_with_a_dictionary_of_experts(pool: Pool, family: str, prescaled: bool) -> None:
    check(pool, family, 2, prescaled)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", PLANS)
def test_a_family_of_an_older_transformers(older_pool: Pool, family: str, tp: int) -> None:
    check(older_pool, family, tp, tp == 2)
