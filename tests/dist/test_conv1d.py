"""``Conv1D`` of transformers, split alone and by a plan: a linear layer with a weight [in, out]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.one_step import assert_gradients, train_once
from tests.dist.pool import Pool
from tests.reference.models import randomise_

transformers = pytest.importorskip("transformers")

WIDTH, INNER, HEADS, SAMPLES, LENGTH = 12, 10, 3, 2, 5
PLAN = {
    "query": "colwise",
    "key": "colwise",
    "value": "colwise",
    "dense": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
    "mixed": "rowwise_split_input",
    "head": "colwise_gather_output",
}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv1d = transformers.pytorch_utils.Conv1D
        self.c_fc, self.c_proj = conv1d(INNER, WIDTH), conv1d(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return y


class Attention(nn.Module):
    def __init__(self, num_keys: int) -> None:
        super().__init__()
        conv1d, size = transformers.pytorch_utils.Conv1D, WIDTH // HEADS
        self.num_heads, self.head_dim, self.num_key_value_groups = HEADS, size, HEADS // num_keys
        self.query = conv1d(WIDTH, WIDTH)
        self.key, self.value = (conv1d(num_keys * size, WIDTH) for _ in range(2))
        self.dense = conv1d(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def heads(layer: nn.Module) -> Tensor:
            return layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        k, v = (
            heads(layer).repeat_interleave(self.num_key_value_groups, 1)
            for layer in (self.key, self.value)
        )
        y = F.scaled_dot_product_attention(heads(self.query), k, v)
        return self.dense(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block like those of GPT-2, with a layer for every word of a plan."""

    def __init__(self, num_keys: int = HEADS) -> None:
        super().__init__()
        conv1d = transformers.pytorch_utils.Conv1D
        self.attention, self.mlp = Attention(num_keys), Feed()
        self.mixed, self.head = conv1d(WIDTH, WIDTH), conv1d(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.mlp(x)
        y: Tensor = self.head(self.mixed(x)).square().mean()
        return y


def batch_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def train(rank: int, tp: int, prescaled: bool, num_keys: int, by_plan: bool, pp: int = 1) -> Any:
    """Gradients, the whole state and the shapes of what a rank has."""
    import smp

    config = {"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True}
    smp.init({**config, "pipeline_parallel_degree": pp})
    inside = {f"attention.{key}" if "." not in key else key: word for key, word in PLAN.items()}
    inside |= {key: inside.pop(f"attention.{key}") for key in ("mixed", "head")}
    plain = randomise_(Block(num_keys).double(), 1)
    if by_plan:
        smp.set_tensor_parallelism(plain, plan=inside)
    else:
        smp.set_tensor_parallelism(plain)
    return train_once(plain, batch_of, prescaled)


def check(results: Any, num_keys: int, num_batches: int, where: str) -> None:
    plain = randomise_(Block(num_keys).double(), 1)
    batches = [batch_of(idx) for idx in range(num_batches)]
    assert_gradients([grads for grads, _, _ in results], plain, batches, where)
    for _, state, _ in results:
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("prescaled", [False, True])
def test_conv1d_alone_has_the_gradients_of_one_process(pool: Pool, prescaled: bool) -> None:
    results = pool.run(2, train, 2, prescaled, HEADS, False)
    for _, _, shapes in results:
        assert shapes["mlp.c_proj.weight"] == (INNER // 2, WIDTH)
        assert shapes["mlp.c_proj.bias"] == (WIDTH,)
        assert shapes["head.weight"] == (WIDTH // 2, 7)
    check(results, HEADS, 1 if prescaled else 2, f"alone {prescaled}")


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize(("tp", "num_keys", "pp"), [(2, HEADS, 1), (3, 1, 1), (2, HEADS, 2)])
def test_conv1d_of_a_plan_has_the_gradients_of_one_process(
    pool: Pool, tp: int, num_keys: int, pp: int, prescaled: bool
) -> None:
    results = pool.run(tp * pp, train, tp, prescaled, num_keys, True, pp)
    seen: dict[str, Any] = {}
    for _, _, shapes in results:
        seen |= shapes
    assert seen["mlp.c_fc.weight"][0] == WIDTH and seen["mlp.c_fc.weight"][1] < INNER
    assert seen["mlp.c_proj.weight"][0] < INNER and seen["mlp.c_proj.weight"][1] == WIDTH
    assert seen["attention.key.weight"][1] < WIDTH
    assert seen["head.weight"][1] < 7 and seen["head.bias"][0] < 7
    assert seen["mixed.weight"] == (WIDTH // tp, WIDTH)
    check(results, num_keys, 1 if prescaled else tp, f"tp {tp} pp {pp} {prescaled}")
