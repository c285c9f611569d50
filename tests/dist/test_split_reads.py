"""Code that reads the weights of split modules from outside trains like one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of
from tests.reference.models import randomise_
from tests.reference.tolerances import assert_close

MODES = tuple(itertools.product(("memory", "speed"), (False, True)))
SAMPLES, WIDTH, WORDS = 3, 7, 11  # no width is even


class Reader(nn.Module):
    """Layers, and what reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.first(self.table(ids))
        return F.cross_entropy(self.read(hidden).flatten(0, 1), ids.flatten())

    def read(self, hidden: Tensor) -> Tensor:
        return self.last(hidden)


class Decoder(Reader):
    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table.weight)


class Transposed(Reader):
    def read(self, hidden: Tensor) -> Tensor:
        weight = self.first.weight
        return self.last(F.linear(hidden, weight.t(), self.first.bias) @ weight)


class Pieces(Reader):
    """Reads slices of a weight, as attention with queries, keys and values in one weight does."""

    def read(self, hidden: Tensor) -> Tensor:
        a, b = self.first.weight[:4], self.first.weight.chunk(2)[1]
        hidden = F.pad(F.linear(hidden, a, self.first.bias[:4]), (0, WIDTH - 4))
        return self.last(hidden) + F.linear(hidden, b).sum()


class Views(Reader):
    """Reads views that do not lie in one piece, as models that share a table of queries do."""

    def read(self, hidden: Tensor) -> Tensor:
        queries = self.table.weight.unsqueeze(0).expand(SAMPLES, -1, -1)
        left, right = self.first.weight.split(4, dim=1)
        narrow = F.linear(hidden[..., :4], left) + F.linear(hidden[..., 4:], right)
        return self.last(narrow) + self.last(self.first(queries)).sum()


class Probing(Reader):
    """Knows dtype, device and shape of a layer, and asks for nothing else."""

    def read(self, hidden: Tensor) -> Tensor:
        weight = self.last.weight
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
        assert weight.size(1) == weight.shape[-1] == WIDTH and weight.numel() == WORDS * WIDTH
        return self.last(hidden.to(weight.dtype).to(weight.device) / weight.shape[1])


class Penalised(Reader):
    def forward(self, ids: Tensor) -> Tensor:
        norms = self.first.weight.norm() + self.last.weight.abs().sum()
        scale = self.table.weight.detach().std() + self.last.weight.data.mean().item()
        return super().forward(ids) + 0.1 * norms * scale


class Recomputed(Reader):
    reentrant = False

    def read(self, hidden: Tensor) -> Tensor:
        weight = self.first.weight
        hidden = checkpoint(self.product, hidden, weight, use_reentrant=self.reentrant)
        return checkpoint(self.inner, hidden, use_reentrant=self.reentrant)

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden @ weight

    def inner(self, hidden: Tensor) -> Tensor:
        return F.linear(torch.tanh(hidden), self.last.weight, self.last.bias)


class Reentrant(Recomputed):
    reentrant = True


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Own(Reader):
    def read(self, hidden: Tensor) -> Tensor:
        return Product.apply(hidden, self.last.weight)


class Listening(Reader):
    """A hook that was put on after wrapping reads the module that it is given."""

    def read(self, hidden: Tensor) -> Tensor:
        if not self.last._forward_hooks:
            self.last.register_forward_hook(lambda m, _, out: out * m.weight.norm())
        return self.last(hidden)


class WritingToResults(Reader):
    """Writes to what layers without bias and tables give, as models of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden[:, 0] *= 2
        logits = self.last(self.first(hidden))
        logits[..., 0] = -5.0
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


READERS: tuple[type[Reader], ...] = (
    Decoder, Transposed, Pieces, Views, Probing, Penalised, Recomputed, Reentrant, Own, Listening,
    WritingToResults,
)  # fmt: skip


def batch_of(idx: int) -> Tensor:
    return torch.randint(WORDS, (SAMPLES, 4), generator=torch.Generator().manual_seed(idx))


def build(cls: type[Reader]) -> nn.Module:
    return randomise_(cls().double(), 1)


def train_once(
    rank: int, readers: list[type[Reader]], optimize: str, prescaled: bool, in_step: bool, pp: int
) -> list[tuple[int, float, dict[str, Any]]]:
    """Number of the batch, loss and gradients of this rank for each kind of reader."""
    import smp
    from tests.dist.steps import marked_values

    results = []
    for cls in readers:
        config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize}
        smp.init({**config, "prescaled_batch": prescaled, "pipeline_parallel_degree": pp})
        plain = build(cls)
        smp.set_tensor_parallelism(plain)
        model = smp.DistributedModel(plain)

        def run(ids: Tensor, model: Any = model) -> Tensor:
            loss: Tensor = model(ids)
            model.backward(loss)
            return loss

        batch_idx = smp.rdp_rank() if prescaled else smp.dp_rank()
        batch = batch_of(batch_idx)
        loss = smp.step(run)(batch).reduce_mean() if in_step else run(batch)
        assert all(p.shape[-1] < WIDTH for p in model.parameters() if p.dim() > 1)
        results.append((batch_idx, loss.item(), marked_values(model, "grad")))
        smp.shutdown()
    return results


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("in_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize(("optimize", "prescaled"), MODES)
def test_reading_a_split_weight_is_reading_the_whole(
    pool: Pool, optimize: str, prescaled: bool, in_step: bool
) -> None:
    if not in_step and not prescaled and optimize == "speed":
        pytest.skip("differs from the other layouts by nothing that matters here")
    by_rank = pool.run(2, train_once, list(READERS), optimize, prescaled, in_step, 1)
    check(by_rank, READERS, prescaled)


@pytest.mark.parametrize("prescaled", [False, True])
def test_it_is_in_a_pipeline_as_well(pool: Pool, prescaled: bool) -> None:
    readers = [
        Decoder,
        Transposed,
        Pieces,
        Views,
        Probing,
        Recomputed,
        Own,
    ]  # others read all there is
    check(pool.run(4, train_once, readers, "memory", prescaled, True, 2), readers, prescaled)


def check(
    by_rank: list[list[tuple[int, float, dict[str, Any]]]],
    readers: Sequence[type[Reader]],
    prescaled: bool,
) -> None:
    """Losses and gradients of all ranks are those of one process."""
    from smp.tensor_parallel import partial

    for idx, cls in enumerate(readers):
        plain = build(cls)
        batches = [batch_of(i) for i in range(1 if prescaled else 2)]
        losses = [plain(batch) for batch in batches]
        (torch.stack(losses).mean()).backward()
        for results in by_rank:
            expected = losses[results[idx][0]].item()
            assert results[idx][1] == pytest.approx(expected, rel=1e-12), cls.__name__
        whole = partial.merge([results[idx][2] for results in by_rank])
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        assert wanted
        assert_close({name: whole[name] for name in wanted}, wanted, torch.float64, cls.__name__)


class Writing(Reader):
    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.write = write

    def read(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            if self.write == "data":
                self.last.weight.data.clamp_(-0.1, 0.1)
            elif self.write == "view":
                self.last.weight[:2].zero_()
            elif self.write == "view of data":
                self.last.weight.data.t()[0].add_(1.0)
            else:
                self.last.weight.mul_(0.5)
        return self.last(hidden)


def write_once(rank: int, write: str) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    plain = Writing(write)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    model(batch_of(0))


@pytest.mark.parametrize("write", ["data", "view", "view of data", "itself"])
def test_writing_to_a_split_weight_is_refused(pool: Pool, write: str) -> None:
    with pytest.raises(RankFailure, match=r"'last.weight' is written to .* outside of its module"):
        pool.run(2, write_once, write)


class Summing(Reader):
    """A penalty that goes through all parameters."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "squares":
            penalty = sum(p.pow(2).sum() for p in self.parameters())
        elif self.kind == "norms":
            penalty = sum(p.norm() for p in self.parameters())
        elif self.kind == "vector":
            penalty = nn.utils.parameters_to_vector(self.parameters()).abs().mean()
        else:
            penalty = sum((p * p).mean() for p in self.parameters())
        return super().forward(ids) + 0.1 * penalty


def sum_once(rank: int, kind: str) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    plain = Summing(kind)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    train_step(batch_of(0))


@pytest.mark.parametrize("kind", ["squares", "norms", "vector", "products"])
def test_a_penalty_of_parts_is_refused(pool: Pool, kind: str) -> None:
    message = r"the loss depends on the parameter '(table|first|last).weight' outside of its module"
    with pytest.raises(RankFailure, match=message):
        pool.run(2, sum_once, kind)


def read_in_a_script(rank: int) -> tuple[list[int], bool, bool]:
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    plain = Reader()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    weight = plain.last.weight
    model(batch_of(0))
    is_own = any(p is weight for p in model.parameters())
    return list(weight.shape), is_own, isinstance(weight, nn.Parameter)


def test_scripts_get_the_part_that_the_optimizer_has(pool: Pool) -> None:
    shapes, own, kinds = zip(*pool.run(2, read_in_a_script), strict=True)
    assert shapes == ([WORDS, 4], [WORDS, 3]) and all(own) and all(kinds)
