"""Matrices of queries, keys and values of any order: a trial finds it, or they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.pool import Pool, RankFailure
from tests.dist.steps import marked_values
from tests.harness import forward_step, own_loss, train_step_of
from tests.reference.models import randomise_
from tests.reference.tolerances import assert_close

SAMPLES, LENGTH, SIZE, HEADS, KEYS = 2, 5, 6, 4, 2
WIDTH = HEADS * SIZE
PLAN = {"blocks.*.attention.qkv": "colwise", "blocks.*.attention.proj": "rowwise"}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns features of all heads; each of `k` and `v` serves several of `q`, side by side."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention with one matrix; names of attributes are of no known library."""

    num_keys = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.heads_of_all, self.size_of_one = HEADS, SIZE
        self.make_layers()

    def make_layers(self) -> None:
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.num_keys) * SIZE)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(attend(*self.parts(self.qkv(x))))
        return y

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys and values, ``[samples, length, heads, size]``."""
        raise NotImplementedError


class ByHead(Attention):
    """Query, key and value of each head lie together; the number of heads is an attribute."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (self.heads_of_all, 3, -1)).unbind(-2)


class ByHeadOfSize(Attention):
    """The same, for as many heads as there are."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (-1, 3, self.size_of_one)).unbind(-2)


class Concatenated(Attention):
    """Queries of all heads come first, then all keys, then all values."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(-1, (3, self.heads_of_all, self.size_of_one)).unbind(-3)
        return q, k, v


class ConcatenatedOfWidth(Attention):
    """The same, split at a width that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.width_of_all = WIDTH

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.split(self.width_of_all, -1)
        shape = (self.heads_of_all, self.size_of_one)
        return q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)


class Named(Attention):
    """The same with the names of transformers, and an argument that has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.q_norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        assert mask is None
        return super().forward(x)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        return self.q_norm(q), k, v


class Grouped(Attention):
    """A head of keys follows the queries that it serves, and then its values."""

    num_keys = KEYS

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.unflatten(-1, (-1, HEADS // self.num_keys + 2, self.size_of_one))
        q, k, v = x.split([HEADS // self.num_keys, 1, 1], -2)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


class GroupedConcatenated(Attention):
    """Queries of all heads come first, then fewer keys, then as many values."""

    num_keys = KEYS

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, self.num_keys

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = [self.num_heads, self.num_key_value_heads, self.num_key_value_heads]
        q, k, v = x.unflatten(-1, (-1, self.size_of_one)).split(sizes, -2)
        return q, k, v


class OneKey(GroupedConcatenated):
    """A single head of keys and values serves all queries."""

    num_keys = 1


class SizesFirst(Attention):
    """The heads of one feature lie together: no rank can have some of the heads."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(-1, (self.size_of_one, 3, self.heads_of_all)).unbind(-2)
        return q.transpose(-1, -2), k.transpose(-1, -2), v.transpose(-1, -2)


class Unused(Attention):
    """Heads have no effect yet."""

    strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x).unflatten(-1, (-1, 3, self.size_of_one))
        y: Tensor = self.proj(self.strength * x.sum(-2).flatten(-2))
        return y


class Block(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        others = (None,) if isinstance(self.attention, Named) else ()
        return x + self.attention(self.norm(x), *others)


class Model(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(attention), Block(attention)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(attention: type[Attention], seed: int) -> nn.Module:
    return randomise_(Model(attention).double(), seed)


def batch_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train(
    rank: int, attention: type[Attention], word: str, tp: int, prescaled: bool, pp: int, file: str
) -> Any:
    """Gradients of a step that begins with the whole state of a plain model, and shapes."""
    import smp

    config = {"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True}
    smp.init({**config, "pipeline_parallel_degree": pp})
    plain = make(attention, 1)
    smp.set_tensor_parallelism(plain, plan={**PLAN, "blocks.*.attention.qkv": word})
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    model.load_state_dict(make(attention, 2).state_dict())
    train_step_of(model, own_loss)(batch_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    grads = marked_values(model, "grad")
    optimizer.step()
    whole = model.state_dict()
    if rank == 0:
        torch.save(whole, file)
    return grads, {name: tuple(p.shape) for name, p in model.local_named_parameters()}


CASES = [
    (ByHead, "colwise", 2, 1),
    (ByHead, "colwise", 2, 2),
    (ByHead, "colwise", 3, 1),
    (ByHeadOfSize, "colwise", 2, 1),
    (Concatenated, "colwise", 2, 1),
    (Concatenated, "colwise", 2, 2),
    (Concatenated, "qkv_colwise", 3, 1),
    (ConcatenatedOfWidth, "colwise", 2, 1),
    (Named, "colwise", 2, 1),
    (Grouped, "colwise", 2, 1),
    (Grouped, "colwise", 2, 2),
    (GroupedConcatenated, "colwise", 2, 1),
    (GroupedConcatenated, "qkv_colwise", 2, 2),
    (OneKey, "colwise", 2, 1),
]


@pytest.mark.sample(keep=8)
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize(("attention", "word", "tp", "pp"), CASES)
def test_one_matrix_in_any_order_trains_as_in_one_process(
    pool: Pool,
    tmp_path: Path,
    attention: type[Attention],
    word: str,
    tp: int,
    pp: int,
    prescaled: bool,
) -> None:
    from smp.tensor_parallel import partial

    file = str(tmp_path / "whole.pt")
    results = pool.run(tp * pp, train, attention, word, tp, prescaled, pp, file)
    plain = make(attention, 2)
    num_batches = 1 if prescaled else tp
    for idx in range(num_batches):
        (plain(batch_of(idx)) / num_batches).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    where = f"{attention.__name__} tp {tp} pp {pp} {prescaled}"
    assert_close(partial.merge([grads for grads, _ in results]), expected, torch.float64, where)
    optimizer_of(plain.parameters()).step()
    other = make(attention, 3)
    other.load_state_dict(torch.load(file))
    trained = dict(other.state_dict())
    assert_close(trained, dict(plain.state_dict()), torch.float64, where)
    rows = {shape for _, shapes in results for n, shape in shapes.items() if "proj.weight" in n}
    assert rows and all(shape[1] < WIDTH for shape in rows), "nothing was split"
    columns = [shape for _, shapes in results for n, shape in shapes.items() if "qkv.weight" in n]
    is_whole = issubclass(attention, GroupedConcatenated)  # no slice has a rank's heads
    out = (HEADS + 2 * attention.num_keys) * SIZE
    assert all((shape[0] == out) == is_whole for shape in columns)


def make_late(rank: int, attention: type[Attention], tp: int, pp: int) -> dict[str, Any]:
    """Initial values of a model whose parameters are made when it is partitioned."""
    import smp

    config = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "ddp": True}
    smp.init({**config, "prescaled_batch": True, "delayed_parameter_initialization": True})
    torch.manual_seed(3)
    with smp.model_creation():
        plain = Model(attention)
    assert all(p.is_meta for p in plain.parameters())
    smp.set_tensor_parallelism(plain, plan=PLAN)
    model = smp.DistributedModel(plain)
    forward_step(model)(batch_of(0).float())
    return dict(model.state_dict())


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("attention", [Concatenated, Grouped, GroupedConcatenated])
def test_the_order_is_found_before_parameters_have_values(
    pool: Pool, attention: type[Attention], pp: int
) -> None:
    [expected] = pool.run(1, make_late, attention, 1, 1)
    for state in pool.run(2 * pp, make_late, attention, 2, pp):
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


def refuse(rank: int, attention: type[Attention], plan: dict[str, str]) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    plain = make(attention, 1)
    smp.set_tensor_parallelism(plain, plan=plan)
    smp.DistributedModel(plain)


class Hooked(ByHead):
    def __init__(self) -> None:
        super().__init__()
        self.proj.register_forward_hook(lambda *_: None)


class Fixed(Attention):
    """Attention with sizes in its code only."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads_of_all, self.size_of_one

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (-1, 3, SIZE)).unbind(-2)


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        (SizesFirst, "no known order of queries, keys and values fits the code.*each head's query"),
        (Unused, "both orders fit.*its word is qkv_colwise"),
        (Hooked, "cannot be told; a trial of 'blocks.0.attention' failed: 'proj' has hooks"),
        (
            Fixed,
            "cannot be told; a trial.*it reads no attribute that may be a number or size of heads",
        ),
    ],
)
def test_a_matrix_whose_order_is_unclear_is_refused(
    pool: Pool, attention: type[Attention], text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        pool.run(2, refuse, attention, PLAN)
