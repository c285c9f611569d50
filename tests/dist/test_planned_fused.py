"""Queries, keys and values in one matrix, split by a plan of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.one_step import train_once
from tests.dist.pool import Pool, RankFailure
from tests.reference.models import randomise_
from tests.reference.tolerances import assert_close

SAMPLES, LENGTH, WIDTH, HEADS = 2, 5, 12, 3
MLP = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}
FUSED = {**MLP, "h.*.attn.c_attn": "qkv_colwise", "h.*.attn.c_proj": "rowwise"}
GATHERED = {
    **MLP,
    "h.*.attn.c_attn": "colwise_gather_output",
    "h.*.attn.c_proj": "rowwise_split_input",
}
FOUND = {**FUSED, "h.*.attn.c_attn": "colwise"}  # the order is found
NEOX = {"layers.*.attention.query_key_value": "colwise", "layers.*.attention.dense": "rowwise"}
OWN = {"qkv": "qkv_colwise", "proj": "rowwise"}


class Attention(nn.Module):
    """A fused projection to all queries, all keys and all values, as in vision models."""

    def __init__(self, out: int = 3 * WIDTH) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = HEADS, WIDTH // HEADS, WIDTH
        self.qkv, self.proj = nn.Linear(WIDTH, out), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(y.reshape(*x.shape[:2], self.attn_dim))


class Loss(nn.Module):
    """Around attention: a loss of what it gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


class Features(nn.Module):
    """Around a model of transformers: a loss of its features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.model(inputs_embeds=x, use_cache=False).last_hidden_state[..., 0].square().mean()
        )


def make(case: str) -> nn.Module:
    if case == "own":
        return randomise_(Loss(Attention()).double(), 1)
    transformers = pytest.importorskip("transformers")
    if case == "neox":
        config = transformers.GPTNeoXConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, vocab_size=11,
            intermediate_size=16, rotary_pct=1.0, max_position_embeddings=8,
        )  # fmt: skip
        model = transformers.GPTNeoXModel(config)
        model.embed_in.requires_grad_(False)
        return randomise_(Features(model).double(), 1)
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=2, vocab_size=11, n_positions=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2Model(config)
    model.wte.requires_grad_(False)
    return randomise_(Features(model).double(), 1)


def batch_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def train(rank: int, case: str, plan: dict[str, str], tp: int, prescaled: bool, pp: int = 1) -> Any:
    """Gradients, the whole state and the shapes of what a rank has."""
    import smp

    config = {"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True}
    smp.init({**config, "pipeline_parallel_degree": pp})
    plain = make(case)
    smp.set_tensor_parallelism(plain.model, plan=plan)
    return train_once(plain, batch_of, prescaled)


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize(
    ("case", "plan", "tp", "pp"),
    [
        ("gpt2", FUSED, 2, 1),
        ("gpt2", FUSED, 3, 1),
        ("gpt2", FUSED, 2, 2),
        ("gpt2", FOUND, 2, 1),
        ("gpt2", FOUND, 2, 2),
        ("gpt2", GATHERED, 2, 1),
        ("neox", NEOX, 3, 1),
        ("own", OWN, 2, 1),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_fused_queries_keys_and_values_have_the_gradients_of_one_process(
    pool: Pool, case: str, plan: dict[str, str], tp: int, pp: int, prescaled: bool
) -> None:
    from smp.tensor_parallel import partial

    results = pool.run(tp * pp, train, case, plan, tp, prescaled, pp)
    plain = make(case)
    num_batches = 1 if prescaled else tp
    for idx in range(num_batches):
        (plain(batch_of(idx)) / num_batches).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    where = f"{case} tp {tp} pp {pp} {prescaled}"
    assert_close(partial.merge([grads for grads, _, _ in results]), expected, torch.float64, where)
    fused = {
        shape
        for _, _, shapes in results
        for name, shape in shapes.items()
        if name.endswith(("c_attn.weight", "qkv.weight", "query_key_value.weight"))
    }
    assert fused and all(max(shape) < 3 * WIDTH for shape in fused), "nothing was split"
    for _, state, _ in results:
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def split_other(rank: int, word: str, out: int, knows_heads: bool) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    module = Attention(out)
    if not knows_heads:
        del module.num_heads, module.head_dim
    smp.set_tensor_parallelism(module, plan={"qkv": word, "proj": "rowwise"})
    smp.DistributedModel(module)


@pytest.mark.parametrize(
    ("word", "out", "knows_heads", "text"),
    [
        ("qkv_colwise", 2 * WIDTH, True, "24 features in 'qkv', which are not queries, keys and"),
        ("qkv_colwise", 3 * WIDTH, False, "no attribute such as num_heads that tells"),
        ("packed_colwise", 2 * WIDTH, True, "has packed columns in attention"),
    ],
)
def test_what_is_not_queries_keys_and_values_is_refused(
    pool: Pool, word: str, out: int, knows_heads: bool, text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        pool.run(2, split_other, word, out, knows_heads)
