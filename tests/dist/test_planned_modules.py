"""Modules that a plan of the user's splits: equal to one process, or refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.one_step import assert_gradients
from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of
from tests.reference.models import randomise_

MODES = tuple(itertools.product(("memory", "speed"), (False, True)))
SAMPLES, LENGTH, WIDTH, HEADS, INNER, WORDS = 3, 5, 12, 6, 14, 11
ATTENTION = {f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
PLAN = {
    "table": "embedding_rowwise",
    **ATTENTION,
    "blocks.*.attention.dense": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "middle": "rowwise_split_input",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:-1], self.num_heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in self.inputs())
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dense(y.transpose(1, 2).flatten(2))

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class Block(nn.Module):
    """A block with norms between split layers, and a column whose input a parameter scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(F.gelu(self.up(x * self.scale)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        mask = (ids != 0)[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.middle(x)).flatten(0, 1), ids.flatten())


class Reading(Network):
    """Reads weights that are split: of a column inside of a block, of a head outside."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.linear(self.table(ids), self.head.weight).square().mean()


def batch_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    ids[:, LENGTH - idx % 3 :] = 0  # other lengths on each rank
    return ids


def init(tp: int, prescaled: bool, **config: Any) -> None:
    import smp

    smp.init({"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True, **config})


def train_once(
    rank: int,
    network: type[nn.Module],
    tp: int,
    optimize: str,
    prescaled: bool,
    pp: int = 1,
    plan: dict[str, str] = PLAN,
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Gradients of this rank after one step, and shapes of what it holds."""
    import smp
    from tests.dist.steps import marked_values

    init(tp, prescaled, optimize=optimize, pipeline_parallel_degree=pp)
    with smp.tensor_parallelism(plan=plan):
        plain = randomise_(network().double(), 1)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    train_step(batch_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    shapes = {name: tuple(p.shape) for name, p in model.local_named_parameters()}
    return marked_values(model, "grad"), shapes


def check(results: Any, network: type[nn.Module], num_batches: int, where: str) -> None:
    plain = randomise_(network().double(), 1)
    batches = [batch_of(idx) for idx in range(num_batches)]
    assert_gradients([grads for grads, _ in results], plain, batches, where)


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("optimize", "prescaled"), MODES)
def test_planned_modules_have_the_gradients_of_one_process(
    pool: Pool, tp: int, optimize: str, prescaled: bool
) -> None:
    results = pool.run(tp, train_once, Network, tp, optimize, prescaled)
    for rank, (_, shapes) in enumerate(results):
        heads = (3, 3)[rank] if tp == 2 else (2, 2, 1, 1)[rank]
        inner = (7, 7)[rank] if tp == 2 else (4, 4, 3, 3)[rank]
        assert shapes["blocks.0.attention.query.weight"] == (heads * 2, WIDTH)
        assert shapes["blocks.0.attention.dense.weight"] == (WIDTH, heads * 2)
        assert shapes["blocks.1.up.bias"] == (inner,)
        assert shapes["blocks.1.down.weight"] == (WIDTH, inner)
        assert shapes["head.weight"][0] == shapes["table.weight"][0] < WORDS
        assert shapes["middle.weight"] == (WIDTH, WIDTH // tp)
    check(results, Network, 1 if prescaled else tp, f"tp {tp} {optimize} {prescaled}")


@pytest.mark.parametrize("prescaled", [False, True])
def test_a_pipeline_cuts_between_planned_blocks(pool: Pool, prescaled: bool) -> None:
    results = pool.run(4, train_once, Network, 2, "memory", prescaled, 2)
    assert 0 < len(results[0][1]) < len(list(Network().parameters()))
    check(results, Network, 1 if prescaled else 2, "pp 2")


@pytest.mark.parametrize("prescaled", [False, True])
def test_code_that_reads_planned_weights_gets_them_whole(pool: Pool, prescaled: bool) -> None:
    results = pool.run(2, train_once, Reading, 2, "speed", prescaled)
    check(results, Reading, 1 if prescaled else 2, "read")


class DroppingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(self.drop(x * self.scale))))))


def drop(rank: int, prescaled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a whole parameter of a block, and what is drawn behind it."""
    import smp

    init(2, prescaled)
    torch.manual_seed(rank)
    with smp.tensor_parallelism(plan=FEED):
        model = smp.DistributedModel(randomise_(DroppingBlock().double(), 1))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        y = model(x)
        model.backward(y.square().mean())
        return y.detach()

    x = torch.ones(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    y = train_step(x).outputs[0]
    grad = dict(model.local_named_parameters())["scale"].grad
    assert grad is not None
    return grad, y, torch.rand(3)


@pytest.mark.parametrize("prescaled", [False, True])
def test_dropout_in_a_block_is_the_same_on_all_ranks(pool: Pool, prescaled: bool) -> None:
    results = pool.run(2, drop, prescaled)
    (first, y, _), (other, other_y, _) = results
    assert 0 < int((y == 0).sum()) < y.numel()
    assert torch.equal(first, other) and float(first.abs().max()) > 1e-3
    if prescaled:
        assert torch.equal(y, other_y)


# ---- further words


class Experts(nn.Module):
    """Sends each token to one expert; gate rows lie before the rows that they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.ones(3, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.ones(3, WIDTH, INNER))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eoh->teo", x, self.gate_up).chunk(2, -1)
        y = torch.einsum("teo,eho->teh", F.silu(gate) * up, self.down)
        return y[torch.arange(len(x)), chosen] * weights


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.mlp, self.router, self.experts = Mlp(), nn.Linear(WIDTH, 3), Experts()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.mlp(x)
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        return (flat + self.experts(flat, chosen, weights[:, None])).square().mean()


ROUTED = {
    "table": "embedding_colwise",
    "mlp.gate_up": "packed_colwise",
    "mlp.down": "rowwise",
    "experts": "moe_tp_experts",
    "experts.gate_up": "packed_colwise",
    "experts.down": "rowwise",
}


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("prescaled", [False, True])
def test_packed_columns_and_experts_have_the_gradients_of_one_process(
    pool: Pool, tp: int, prescaled: bool
) -> None:
    results = pool.run(tp, train_once, Routed, tp, "speed", prescaled, 1, ROUTED)
    for rank, (_, shapes) in enumerate(results):
        inner = (7, 7)[rank] if tp == 2 else (5, 5, 4)[rank]
        assert shapes["mlp.gate_up.weight"] == (2 * inner, WIDTH)
        assert shapes["experts.gate_up"] == (3, 2 * inner, WIDTH)
        assert shapes["experts.down"] == (3, WIDTH, inner)
        assert shapes["table.weight"] == (WORDS, WIDTH // tp)
    check(results, Routed, 1 if prescaled else tp, f"tp {tp} {prescaled}")


class Gained(nn.Module):
    """A parameter between a column and its row, of which the plan says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)) * self.gain)
        return y


def train_twice(rank: int, plan: dict[str, str], prescaled: bool) -> Tensor:
    import smp

    init(2, prescaled)
    with smp.tensor_parallelism(plan=plan):
        model = smp.DistributedModel(randomise_(Gained().double(), 1))

    train_step = train_step_of(model)
    x = torch.ones(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    train_step(x)
    grad = dict(model.local_named_parameters())["gain"].grad
    assert grad is not None
    found = grad.clone()
    train_step(x)
    return found


@pytest.mark.parametrize("prescaled", [False, True])
def test_a_plan_that_forgets_a_sum_is_refused_in_the_second_step(
    pool: Pool, prescaled: bool
) -> None:
    with pytest.raises(RankFailure, match="gradients of 'gain' are not the same"):
        pool.run(2, train_twice, FEED, prescaled)
    summed = {**FEED, "gain": "replicated_with_grad_allreduce"}
    first, second = pool.run(2, train_twice, summed, prescaled)
    plain = randomise_(Gained().double(), 1)
    plain(torch.ones(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)).square().mean().backward()
    assert torch.allclose(first, plain.gain.grad) and torch.equal(first, second)


# ---- refusals


class Tall(nn.Module):
    """Gives its block an argument without samples along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        return y.square().mean()


class Folded(Block):
    """Something else than the columns goes into the row."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.down(F.pad(self.up(x), (0, 1)))


class OneHead(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 1


def refuse(rank: int, plan: dict[str, str], make: Any, run: bool = False) -> None:
    import smp

    init(2, False)
    with smp.tensor_parallelism(plan=plan):
        plain = make().double()
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    if run:
        train_step(torch.ones(SAMPLES, LENGTH, WIDTH, dtype=torch.float64))


FEED = {"up": "colwise", "down": "rowwise"}
INSIDE = {f"block.{name}": word for name, word in FEED.items()}


@pytest.mark.parametrize(
    ("plan", "make", "run", "text"),
    [
        ({"up": "sideways"}, Block, False, "'sideways' of 'up'.*The words are.*rowwise"),
        ({**FEED, "upp": "colwise"}, Block, False, "names 'upp', which is in no Block"),
        ({"up": "colwise"}, Block, False, "'up' of a Block.*no rows"),
        ({"norm": "rowwise", "up": "colwise"}, Block, False, "is a LayerNorm; expected Linear"),
        ({"query": "colwise", "dense": "rowwise"}, OneHead, False, "has 1 heads"),
        (INSIDE, Tall, True, r"the argument '1' has shape \[5, 5\]; expected 3 samples"),
        (FEED, Folded, True, "got 8 features; expected the 7 of this rank"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_split_is_refused_by_name(
    pool: Pool, plan: dict[str, str], make: Any, run: bool, text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        pool.run(2, refuse, plan, make, run)
