"""Masks that no layout changes: their numbers, and where they are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import smp
from smp.dropout import places
from smp.dropout.batches import BatchTable, Samples
from smp.dropout.masks import Slice, mixed, stays
from smp.dropout.parts import Block, Share
from smp.dropout.places import Place, RepeatedRun
from smp.nn import functional

CPU = torch.device("cpu")


# ---- samples ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_samples_are_numbered_over_all_parts_as_microbatches_are_cut(count: int) -> None:
    table = BatchTable(0, ((7, 2), (5, count), (6, 3)))
    whole = torch.arange(18)
    for part, pieces in enumerate(whole.split([7, 5, 6])):
        for mb, piece in enumerate(pieces.tensor_split(table.sizes[part][1])):
            assert list(table.ids(part, mb)) == piece.tolist()
    group = Samples(table, [2, 1], own=1, mb=0)
    assert group.ids(of_group=False) == list(table.ids(1, 0))
    assert group.ids(of_group=True) == [*table.ids(2, 0), *table.ids(1, 0)]


# ---- masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_that_stays_is_one_minus_p_in_each_sample(p: float) -> None:
    num = 200_000
    shares = stays(3, range(6), [num], p, CPU).double().mean(1)
    allowed = 5 * math.sqrt(p * (1 - p) / num)
    assert (shares - (1 - p)).abs().max() < allowed


def test_samples_and_keys_are_independent() -> None:
    masks = [stays(key, range(8), [50_000], 0.5, CPU) for key in (1, 2, mixed(1))]
    rows = torch.cat(masks).double() * 2 - 1
    products = rows @ rows.T / rows.shape[1]
    products.fill_diagonal_(0)
    assert products.abs().max() < 5 / math.sqrt(rows.shape[1])
    # Neighbours within a sample, too.
    for distance in (1, 2, 64, 4096):
        together = (rows[:, distance:] * rows[:, :-distance]).mean(1)
        assert together.abs().max() < 5 / math.sqrt(rows.shape[1])


def test_masks_are_those_of_the_kernels() -> None:
    """Compares two implementations of one hash: a sample is a row of a matrix."""
    for seed, p in ((5, 0.3), (2**63 + 11, 0.1)):
        kept = functional.dropout(torch.ones(7, 1001), p, seed) != 0
        assert torch.equal(stays(seed, range(7), [1001], p, CPU), kept)
        assert not kept.all()


def test_samples_that_are_drawn_one_by_one_have_the_same_masks() -> None:
    num = 3 * 2**18  # more than one sample is too many words
    together = stays(4, range(3), [num], 0.5, CPU)
    for idx in range(3):
        assert torch.equal(stays(4, [idx], [num], 0.5, CPU)[0], together[idx])
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_part_has_the_mask_of_the_whole(dim: int) -> None:
    sizes = [4, 6, 8]
    whole = stays(9, [3, 1], sizes, 0.4, CPU).view(2, *sizes)
    for begin, end in ((0, 2), (2, 3), (3, sizes[dim - 1])):
        cut = list(sizes)
        cut[dim - 1] = end - begin
        part = stays(9, [3, 1], cut, 0.4, CPU, Slice(dim, begin, sizes[dim - 1]))
        expected = whole.narrow(dim, begin, end - begin)
        assert torch.equal(part.view(expected.shape), expected)


# ---- places ----------------------------------------------------------------------------


def place_of(num_samples: int, **more: Any) -> Place:
    return Place(1, Samples(BatchTable(7, ((num_samples, 1),)), [0], 0, 0), "here", **more)


def test_rows_of_a_sample_are_elements_of_it() -> None:
    x = torch.ones(4, 6, 5)
    whole = place_of(4).drop(x, 0.5)
    rows = place_of(4).drop(x.flatten(0, 1), 0.5)
    assert torch.equal(rows.view(x.shape), whole)
    assert 0 < (whole == 0).sum() < whole.numel()
    turned = place_of(4, dim=1).drop(x.transpose(0, 1), 0.5)
    assert torch.equal(turned.transpose(0, 1), whole)


def test_what_comes_behind_a_second_run_counts_on() -> None:
    x = torch.ones(2, 50)
    place = place_of(2)
    plain = [place.drop(x, 0.5) for _ in range(3)]
    with places.at(place_of(2)) as _:
        again, here = RepeatedRun(), places.current()
        assert here is not None
        runs = []
        for _ in range(2):
            with again.run():
                inside = places.current()
                assert inside is not None and inside is not here
                runs.append([inside.drop(x, 0.5) for _ in range(2)])
        last = here.drop(x, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip([*runs[0], last], plain, strict=True))
    assert not torch.equal(plain[1], plain[2])


# ---- blocks of plans -------------------------------------------------------------------


def block_of(heads: Share | None) -> Block:
    """A block of which a column has run, with 8 of 12 features, of 12."""
    block = Block()
    block.heads, block.width, block.is_split = heads, 12, True
    block.columns[8] = Share(8, 4, 12)
    return block


@pytest.mark.parametrize(
    ("shape", "heads", "part"),
    [
        ([3, 5, 8], None, Slice(2, 4, 12)),
        ([3, 5, 8], Share(2, 1, 3), Slice(2, 4, 12)),
        ([3, 2, 5, 5], Share(2, 1, 3), Slice(1, 1, 3)),
        ([6, 5, 5], Share(2, 1, 3), Slice(0, 1, 3)),
        ([3, 5, 5], Share(1, 2, 3), Slice(0, 2, 3)),
        ([3, 5, 8], Share(1, 2, 3), Slice(2, 4, 12)),
    ],
)
def test_the_shape_tells_a_part(shape: list[int], heads: Share | None, part: Slice) -> None:
    assert block_of(heads).part_of(shape, 3) == (part, "")
    behind = block_of(heads)
    behind.is_split = False
    assert behind.part_of([3, 5, 12], 3) == (None, "")


@pytest.mark.parametrize(
    ("shape", "heads", "is_split", "words"),
    [
        ([3, 5, 12], None, True, "the shape of no part"),
        ([3, 5, 8], None, False, "behind the row"),
        ([3, 8, 8], Share(1, 2, 3), True, "one head and its features"),
    ],
)
def test_parts_that_cannot_be_told_are_refused(
    shape: list[int], heads: Share | None, is_split: bool, words: str
) -> None:
    block = block_of(heads)
    block.is_split = is_split
    place = Place(1, Samples(BatchTable(7, ((3, 1),)), [0], 0, 0), "here", block=block)
    with pytest.raises(RuntimeError, match=f"in module 'here': .*{words}.*out of the plan"):
        place.drop(torch.ones(shape), 0.5)


def test_a_copy_of_a_block_is_the_same_moment_of_it() -> None:
    block = block_of(Share(2, 1, 3))
    other = block.copy()
    other.is_split = False
    assert block.is_split and other.part_of([3, 5, 12], 3) == (None, "")
    block.take_over(other)
    assert not block.is_split and block.columns == other.columns and block.heads == other.heads


# ---- PyTorch's operators ---------------------------------------------------------------


@pytest.fixture
def alike() -> Iterator[None]:
    smp.init({"layout_independent_dropout": True})
    yield
    smp.shutdown()


class Function(nn.Module):
    """A model that calls a function, or a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def run(function: Any, x: Tensor, *, steps: bool = True) -> Tensor:
    """Returns a model's output for a batch in a training step; gradients are those of a sum."""
    model = smp.DistributedModel(Function(function))

    def body(x: Tensor) -> Tensor:
        output = model(x)
        model.backward(output.sum())
        return output

    if not steps:
        return body(x)
    return smp.step(body)(x).concat()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x * 1, 0.5, inplace=True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.dropout1d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: F.feature_alpha_dropout(x, 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, torch.eye(6)[None], dropout_p=0.5),
        nn.Sequential(nn.Dropout(0.5)),
        nn.AlphaDropout(0.5),
    ],
)
def test_a_step_repeats_its_masks_and_another_does_not(alike: None, function: Any) -> None:
    x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for seed in (1, 1, 2):
        smp.shutdown()
        smp.init({"layout_independent_dropout": True, "microbatches": 2 if found else 1})
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(run(function, x))
        assert torch.equal(state, torch.get_rng_state()), "it draws from the generator"
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found[0], found[2])


def test_gradients_have_the_mask() -> None:
    place, x = place_of(4), torch.randn(4, 60, dtype=torch.float64, requires_grad=True)
    dropped = place.copy().drop(x, 0.5) == 0
    assert 0 < dropped.sum() < dropped.numel()
    torch.autograd.gradcheck(lambda x: place.copy().drop(x, 0.5), (x,))
    (grad,) = torch.autograd.grad(place.copy().drop(x, 0.5).sum(), x)
    assert torch.equal(grad == 0, dropped) and torch.equal(
        grad[~dropped].unique(), grad.max()[None]
    )


def test_variance_and_mean_of_alpha_dropout_stay(alike: None) -> None:
    x = torch.randn(50, 4000, dtype=torch.float64)
    output = run(lambda x: F.alpha_dropout(x, 0.3, True), x.float())
    assert abs(output.mean().item()) < 0.02 and abs(output.std().item() - 1) < 0.02


def test_everything_goes_where_p_is_one(alike: None) -> None:
    assert not run(nn.Dropout(1.0), torch.ones(4, 6)).any()


def test_evaluation_and_code_outside_are_those_of_pytorch(alike: None) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))
    model.eval()
    x = torch.ones(4, 6)
    assert torch.equal(model(x), x)
    torch.manual_seed(3)
    own = F.dropout(x, 0.5)
    smp.shutdown()
    torch.manual_seed(3)
    assert torch.equal(own, F.dropout(x, 0.5))


# ---- what is refused -------------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 6, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(pack_sequence(list(x[:, None])))[0].data


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: F.dropout(x.sum(0), 0.5), "expected 4 samples along dim 0"),
        (lambda x: F.dropout(x[:3], 0.5), "expected 4 samples along dim 0"),
        (
            lambda x: torch.feature_dropout(x.flatten(), 0.5, True),
            r"expected \[samples, channels, \*\]",
        ),
        (
            lambda x: F.dropout(nn.Parameter(torch.ones(4, 4)), 0.5) @ x,
            "a parameter has no samples",
        ),
        (
            lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False),
            "in the place of torch.utils.checkpoint",
        ),
        (
            torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager"),
            "torch.compile compiles",
        ),
        (Packed(), "rows of a packed sequence"),
    ],
)
def test_masks_that_would_depend_on_the_layout_are_refused(
    alike: None, function: Any, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(function, torch.ones(4, 6))


def compiled_gradient() -> Tensor:
    """Returns the gradient of a weight before a dropout that drops nothing, in compiled code."""
    weight = torch.arange(6.0).requires_grad_()
    compiled = torch.compile(lambda x: F.dropout(x.sin(), 0.0), backend="aot_eager")
    compiled(weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_code_that_is_compiled_after_a_refusal_has_gradients(alike: None) -> None:
    """PyTorch's tracers keep the implementations that they have found."""
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager")
    with pytest.raises(RuntimeError, match="torch.compile compiles"):
        run(compiled, torch.ones(4, 6))
    smp.shutdown()
    torch.testing.assert_close(compiled_gradient(), torch.arange(6.0).cos())


def test_code_that_was_compiled_before_is_refused(alike: None) -> None:
    smp.shutdown()
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager")
    assert not compiled(torch.ones(4, 6, requires_grad=True)).all()
    smp.init({"layout_independent_dropout": True})
    with pytest.raises(RuntimeError, match="torch.compile compiles"):
        run(compiled, torch.ones(4, 6))


def test_a_call_outside_of_a_step_is_refused(alike: None) -> None:
    with pytest.raises(RuntimeError, match=r"outside of a step function.*@smp\.step"):
        run(nn.Dropout(0.5), torch.ones(4, 6), steps=False)


def test_a_step_without_gradients_is_refused(alike: None) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
        smp.step(lambda x: model(x))(torch.ones(4, 6))


def test_a_batch_that_is_no_argument_is_refused(alike: None) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))

    @smp.step
    def body() -> None:
        model(torch.ones(4, 6))

    with pytest.raises(RuntimeError, match="as an argument"):
        body()


def test_samples_along_several_dims_are_refused(alike: None) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))

    @smp.step(input_split_axes={"other": 1})
    def body(x: Tensor, other: Tensor) -> None:
        model(x + other.T)

    with pytest.raises(RuntimeError, match="samples along several dims"):
        body(torch.ones(4, 6), torch.ones(6, 4))


def test_samples_along_another_dim_are_found(alike: None) -> None:
    x = torch.ones(6, 4)
    found = []
    for microbatches in (1, 2):
        smp.shutdown()
        smp.init({"layout_independent_dropout": True, "microbatches": microbatches})
        torch.manual_seed(1)
        model = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))
        body = smp.step(lambda x, model=model: model(x), input_split_axes={"x": 1})
        found.append(torch.cat(body(x).outputs, 1))
    assert torch.equal(*found) and not found[0].all()


def test_a_compiled_model_is_refused(alike: None) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), compile="stage")
    with pytest.raises(ValueError, match="layout_independent_dropout=True: torch.compile"):
        smp.step(lambda x: model(x))(torch.ones(4, 6))
