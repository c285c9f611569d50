"""Activations and gradients go from the rank that made them to the rank that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.observe.metrics import difference, server_stats
from smp.world import runtime
from tests.dist.pool import WITHOUT_CHECKS, Pool

PP, BLOCKS, MICROBATCHES = 4, 8, 4
BATCH, SEQUENCE, HIDDEN, VOCABULARY = 8, 48, 32, 64
#: one activation between blocks, of one microbatch, in fp32
BOUNDARY_BYTES = BATCH // MICROBATCHES * SEQUENCE * HIDDEN * 4


def build(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if family == "gptj":
        config = transformers.GPTJConfig(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=HIDDEN,
            n_layer=BLOCKS,
            n_head=4,
            rotary_dim=4,
        )
        return transformers.GPTJForCausalLM(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers  # type: ignore


def train(rank: int, family: str, num_steps: int) -> list[dict[str, Any]]:
    """Traffic of the last two steps on this rank; two blocks per rank, the rest on the last."""
    smp.init(
        {
            "pipeline_parallel_degree": PP,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    model = build(family)
    for i, block in enumerate(blocks_of(model)):
        smp.set_partition(block, i * PP // BLOCKS)
    decoder = model.transformer if hasattr(model, "transformer") else model.model
    smp.set_partition(decoder.ln_f if hasattr(decoder, "ln_f") else decoder.norm, PP - 1)
    smp.set_partition(model.lm_head, PP - 1)
    model = smp.DistributedModel(model)

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    found = []
    server = None
    for i in range(num_steps):
        ids = torch.randint(
            VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(i)
        )
        server = runtime.current().server
        before = server_stats(), ({} if server is None else server.data_bytes_to())
        step(ids)
        server = runtime.current().server
        assert server is not None
        sent = server.data_bytes_to()
        found.append(
            {
                **difference(server_stats(), before[0]),
                "to": {peer: num - before[1].get(peer, 0) for peer, num in sent.items()},
            }
        )
    smp.shutdown()
    return found


@pytest.mark.parametrize("family", ["gptj", "llama"])
def test_activations_and_gradients_never_pass_through_a_rank_that_does_not_use_them(
    pool: Pool, family: str
) -> None:
    results = pool.run(PP, train, family, 3)
    one_way = MICROBATCHES * BOUNDARY_BYTES
    # The driver's own tensors: the mask once per rank, positions, rotary tables, labels.
    mask = BATCH * SEQUENCE * SEQUENCE * 4 if family == "gptj" else 0
    small = mask + one_way // 2
    for rank in range(PP):
        sent: dict[int, int] = results[rank][-1]["to"]
        for peer in range(PP):
            if abs(peer - rank) == 1:  # one activation there, one gradient back
                extra = 64 if rank > 0 else small  # losses
                assert one_way <= sent.get(peer, 0) <= one_way + extra, (rank, peer, sent)
            elif rank == 0:  # the driver's own tensors, once per rank
                assert sent.get(peer, 0) <= small, (rank, peer, sent)
            else:
                assert sent.get(peer, 0) <= one_way // 16, (rank, peer, sent)


@pytest.mark.parametrize("family", ["gptj", "llama"])
def test_the_driver_sends_one_request_per_remote_call_and_waits_for_its_own_gradient_only(
    pool: Pool, family: str
) -> None:
    results = pool.run(PP, train, family, 4, env=WITHOUT_CHECKS)
    steady = results[0][-1]
    calls = steady["remote_calls"] / MICROBATCHES
    print(f"{family}: per microbatch {calls} requests, {steady['headers'] / MICROBATCHES} headers")
    assert steady["pushes"] == 0, "routes are known after the first steps"
    # Six blocks, the norm, the head and the loss, forward and backward; notices to three ranks.
    assert 2 * (BLOCKS - BLOCKS // PP + 3) <= calls <= 2 * (BLOCKS - BLOCKS // PP + 4)
    assert steady["headers"] / MICROBATCHES <= calls + 4 * (PP - 1)
    for rank in range(PP):
        assert results[rank][-1]["records"] == 0 and results[rank][-1]["stored"] == 0
