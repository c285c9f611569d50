"""Plans of the user's that do not fit the code between columns and their rows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.one_step import assert_gradients, train_once
from tests.dist.pool import Pool, RankFailure
from tests.harness import labelled_loss, train_step_of
from tests.reference.models import randomise_
from tests.reference.split_families import build_split_family, make_split_batch

SAMPLES, LENGTH, WIDTH, HEADS, INNER = 2, 5, 12, 4, 20
QKV = {"body.qkv": "colwise", "body.proj": "rowwise"}
MLP = {"body.up": "colwise", "body.down": "rowwise"}


class Chunked(nn.Module):
    """A projection to all queries, then all keys, then all values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.parts(x), is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Viewed(Chunked):
    """The same by one view, as vision models do it."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = (*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        return q, k, v


class OfSize(Chunked):
    """Splits into parts of a width that is fixed at construction, as GPT-2 does."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = (*x.shape[:2], self.num_heads, -1)
        q, k, v = self.qkv(x).split(WIDTH, dim=-1)
        return q.reshape(shape), k.reshape(shape), v.reshape(shape)


class ByHeads(Chunked):
    """The three of each head lie together, as in BLOOM: `colwise` is right."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = (*x.shape[:2], self.num_heads, 3, -1)
        q, k, v = self.qkv(x).view(shape).permute(3, 0, 2, 1, 4)
        return q, k, v


class ThreeHeads(ByHeads):
    """A projection with as many heads as parts of each head: query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3


class ThreeChunked(Viewed):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3


class Scaled(nn.Module):
    """Needs an argument, so that no trial before the first call can run it."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = super().forward(x * scale)
        return y


class ScaledChunked(Scaled, Chunked):
    pass


class ScaledViewed(Scaled, Viewed):
    pass


class ScaledOfSize(Scaled, OfSize):
    pass


class ScaledByHeads(Scaled, ByHeads):
    pass


class ScaledThreeChunked(Scaled, ThreeChunked):
    pass


class Cache:
    """Keys of earlier calls; which are written to in place as well."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.calls = torch.zeros(())


class Caching(ByHeads):
    """Leaves its keys in an argument, and reads what is there."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        cache = cache or Cache()
        q, k, v = self.parts(x)
        cache.keys.append(k)
        cache.calls += 1
        y = F.scaled_dot_product_attention(q, sum(cache.keys), v * cache.calls.to(v.dtype))
        return self.proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.num_calls, self.seen = 0, []  # type: ignore[var-annotated]
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(x.shape)
        self.total.add_(1)
        return self.down(self.drop(self.between(self.up(x))))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class NormOfAll(Mlp):
    """A norm without parameters over all features."""

    def between(self, y: Tensor) -> Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


class LargestOfAll(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y - y.amax(-1, keepdim=True)


class Noise(Mlp):
    """Draws numbers whatever the mode is."""

    def between(self, y: Tensor) -> Tensor:
        return y + 0 * torch.rand_like(y)


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.last = body, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given: tuple[Any, ...] = (Cache(),) if isinstance(self.body, Caching) else ()
        if isinstance(self.body, Scaled):
            given = (x.new_ones(()),)
        return self.last(self.body(x, *given)).square().mean()


def make(cls: type[nn.Module]) -> nn.Module:
    return randomise_(Model(cls()).double(), 1)


def batch_of(idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def train(
    rank: int, cls: type[nn.Module], plan: dict[str, str], tp: int, prescaled: bool, pp: int = 1
) -> Any:
    import smp

    config = {"tensor_parallel_degree": tp, "prescaled_batch": prescaled, "ddp": True}
    smp.init({**config, "pipeline_parallel_degree": pp})
    plain = make(cls)
    smp.set_tensor_parallelism(plain, plan=plan)
    return train_once(plain, batch_of, prescaled)


@pytest.mark.parametrize(
    ("cls", "tp", "prescaled"),
    [
        (ScaledChunked, 2, True),
        (ScaledChunked, 2, False),
        (ScaledChunked, 4, True),
        (ScaledViewed, 2, True),
        (ScaledViewed, 4, False),
        (ScaledOfSize, 2, True),
        (ScaledThreeChunked, 3, True),
    ],
)
def test_queries_keys_and_values_behind_each_other_are_not_split_as_one(
    pool: Pool, cls: type[nn.Module], tp: int, prescaled: bool
) -> None:
    text = "plan does not fit 'body'.*'body.qkv' is colwise and makes 36.*its word is qkv_colwise"
    with pytest.raises(RankFailure, match=text):
        pool.run(tp, train, cls, QKV, tp, prescaled)


@pytest.mark.parametrize("cls", [NormOfAll, LargestOfAll])
def test_code_that_looks_at_all_features_together_is_refused(
    pool: Pool, cls: type[nn.Module]
) -> None:
    text = "what 'down' gets of a part of the features differs by"
    with pytest.raises(RankFailure, match=text):
        pool.run(2, train, cls, MLP, 2, True)


@pytest.mark.parametrize(
    ("cls", "plan", "tp", "pp"),
    [
        (ByHeads, QKV, 2, 1),
        (ByHeads, QKV, 4, 1),
        (ByHeads, QKV, 2, 2),
        (ScaledByHeads, QKV, 2, 1),
        (Viewed, QKV, 4, 1),
        (ThreeChunked, QKV, 3, 1),
        (ThreeHeads, QKV, 3, 1),
        (Caching, QKV, 2, 1),
        (Viewed, {**QKV, "body.qkv": "qkv_colwise"}, 4, 1),
        (Mlp, MLP, 2, 1),
        (Noise, MLP, 2, 1),
    ],
)
@pytest.mark.parametrize("prescaled", [True, False])
def test_plans_that_fit_are_taken(
    pool: Pool, cls: type[nn.Module], plan: dict[str, str], tp: int, pp: int, prescaled: bool
) -> None:
    results = pool.run(tp * pp, train, cls, plan, tp, prescaled, pp)
    batches = [batch_of(idx) for idx in range(1 if prescaled else tp)]
    grads = [grads for grads, _, _ in results]
    assert_gradients(grads, make(cls), batches, f"{cls.__name__} tp {tp}")


def train_and_look(rank: int, cls: type[nn.Module]) -> Any:
    """Returns the attributes and state that one step leaves on a module, and all log lines."""
    import smp

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)
    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True})
    plain = make(cls)
    plan = MLP if issubclass(cls, Mlp) else QKV
    smp.set_tensor_parallelism(plain, plan=plan)
    torch.manual_seed(5)
    train_once(plain, batch_of, True)
    body: Any = plain.body
    logging.getLogger("smp").removeHandler(handler)
    left = {k: v for k, v in body.__dict__.items() if k in ("num_calls", "seen", "num_heads")}
    state = torch.get_rng_state()
    return left, float(getattr(body, "total", 0)), body.training, state, lines


def test_a_trial_leaves_nothing_behind(pool: Pool) -> None:
    for left, total, training, state, _ in pool.run(2, train_and_look, Mlp):
        assert left == {"num_calls": 1, "seen": [torch.Size((SAMPLES, LENGTH, WIDTH))]}
        assert total == 1 and training
        torch.manual_seed(5)
        assert torch.equal(state, torch.get_rng_state())


class NoisyHeads(ByHeads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * torch.rand_like(x))


def test_what_cannot_be_tried_and_may_be_wrong_is_told(pool: Pool) -> None:
    (left, _, _, _, lines), other = pool.run(2, train_and_look, NoisyHeads)
    assert left == {"num_heads": HEADS // 2}
    told = [line for line in lines if "could not be tried: it draws random numbers" in line]
    assert len(told) == 1 and "its word is qkv_colwise" in told[0]
    assert not any("could not be tried" in line for line in other[-1])


def train_by_own_plan(rank: int, case: str, prescaled: bool, dtype: torch.dtype) -> Any:
    """Counts the planned blocks and those left untried, and returns log lines of failed trials."""
    import smp
    from smp.nn.planned.block import PlannedBlock
    from smp.replacement import plans

    lines: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smp")
    level = logger.level
    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": prescaled, "ddp": True})
    plain: Any = build_split_family(case, dtype)
    paths = [*dict(plain.named_modules()), *dict(plain.named_parameters())]
    unused = plans.match(plans.check_plan(plain.tp_plan), paths).unused
    plan = {key: word for key, word in plain.tp_plan.items() if key not in unused}
    smp.set_tensor_parallelism(plain, plan=plan)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, labelled_loss)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        train_step(make_split_batch(case, 0 if prescaled else smp.dp_rank(), 0))
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    blocks = [module for module in plain.modules() if isinstance(module, PlannedBlock)]
    left = sum(block._smp_trial is not None for block in blocks)
    return len(blocks), left, [line for line in lines if "could not be tried" in line]


@pytest.mark.parametrize(
    ("case", "prescaled", "dtype"),
    [
        ("llama", True, torch.float32),
        ("qwen3", False, torch.float32),
        ("qwen3_tied", True, torch.bfloat16),
        ("mixtral", True, torch.float64),
    ],
)
def test_plans_of_transformers_pass_their_trials(
    pool: Pool, case: str, prescaled: bool, dtype: torch.dtype
) -> None:
    for num_blocks, left, told in pool.run(2, train_by_own_plan, case, prescaled, dtype):
        assert num_blocks >= 2 and left == 0 and told == []


def train_unchecked(rank: int) -> Any:
    import os

    os.environ["SMP_CHECK_FIRST_STEP"] = "0"
    try:
        return train(rank, NormOfAll, MLP, 2, True)
    finally:
        del os.environ["SMP_CHECK_FIRST_STEP"]


def test_who_says_so_trains_in_spite_of_it(pool: Pool) -> None:
    assert all(grads for grads, _, _ in pool.run(2, train_unchecked))
