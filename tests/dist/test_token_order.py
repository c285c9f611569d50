"""Split layers leave tokens as they were gathered, and compute what they do with sorted ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.nn.layout import Layout
from smp.tensor_parallel import regions
from tests.dist.pool import Pool
from tests.reference.tolerances import assert_close

SAMPLES, LENGTH, WIDTH, VOCABULARY = 4, 8, 16, 19
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.3},
    "one norm": {
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "fused_qkv": True,
        "rotary_dim": 4,
    },
    "cross attention": {"add_cross_attention": True},
}


@dataclass
class Run:
    """A record of one forward and backward on a rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_pieces: list[int] = field(default_factory=list)
    copied: int = 0


class Copies(TorchDispatchMode):
    """Counts the elements that operators copy, as many as lie in a result."""

    NAMES = ("aten.cat.", "aten.clone.", "aten.copy_.")

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(self.NAMES):
            self.num_elements += result.numel()
        return result


def run(kind: str, call: Any, module: torch.nn.Module, x: Tensor | None) -> Run:
    """Runs a module forward and backward.

    Args:
        kind: "sorted" for tokens in the order of the samples, "gathered" for those of a gather,
            "pieces" for a gather in as many pieces as possible.
        call: the forward, which returns a loss.
        module: module whose gradients are wanted.
        x: input whose gradient is wanted.
    """
    seen = Run()
    order, num_pieces = Layout.order, regions.num_pieces

    def most_pieces(part: Tensor, extent: int) -> int:
        seen.num_pieces.append(extent if kind == "pieces" else num_pieces(part, extent))
        return seen.num_pieces[-1]

    regions.num_pieces = most_pieces
    if kind == "sorted":
        Layout.order = Layout.order_of = lambda *_: None  # type: ignore[method-assign]
    try:
        torch.manual_seed(3)
        with Copies() as copies:
            loss = call()
            loss.backward()
    finally:
        regions.num_pieces = num_pieces
        Layout.order = order  # type: ignore[method-assign]
    seen.copied = copies.num_elements
    named = {name: p.grad for name, p in module.named_parameters()}
    seen.tensors = {"loss": loss.detach(), **named}
    if x is not None:
        seen.tensors["x"] = x.grad
    return seen


def layer_runs(
    rank: int, size: int, config: dict[str, Any], options: dict[str, Any], samples: int
) -> dict[str, Run]:
    """Runs a layer in all orders, in float64."""
    smp.init({"tensor_parallel_degree": size, "ddp": True, **config})
    runs = {}
    for kind in ("sorted", "gathered", "pieces"):
        torch.manual_seed(1)
        given = {"pre_layernorm": True, "post_layernorm": False, **options}
        given = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **given}
        sizes = (size, WIDTH // size, WIDTH, 2 * WIDTH)
        layer = smp.nn.DistributedTransformerLayer(*sizes, causal_mask_size=LENGTH, **given)
        layer.double()
        torch.manual_seed(2 if config["prescaled_batch"] else 2 + rank)
        x = torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        others = [torch.randn_like(x), None] if layer.add_cross_attention else []

        def call(layer: Any = layer, x: Tensor = x, others: list[Any] = others) -> Tensor:
            first, last = others[:1], others[1:]
            result: Tensor = layer((x, *first, None, *last))[0]
            return result.square().mean()

        runs[kind] = run(kind, call, layer, x)
    return runs


def check(runs: dict[str, Run], where: str) -> None:
    expected = runs["sorted"].tensors
    assert all(value is not None and value.abs().sum() > 0 for value in expected.values())
    for kind in ("gathered", "pieces"):
        assert_close(runs[kind].tensors, expected, torch.float64, f"{where}, {kind}")
    assert not runs["sorted"].num_pieces  # no order was asked for
    assert set(runs["gathered"].num_pieces) == {1}
    assert min(runs["pieces"].num_pieces) > 1


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prescaled", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_in_any_order_give_the_same_numbers(
    pool: Pool, name: str, prescaled: bool, size: int
) -> None:
    config = {"optimize": "memory", "prescaled_batch": prescaled}
    for runs in pool.run(size, layer_runs, size, config, OPTIONS[name], SAMPLES):
        check(runs, f"{name} prescaled={prescaled} tp {size}")


def test_pieces_of_one_sequence_are_cut_along_it(pool: Pool) -> None:
    config = {"optimize": "memory", "prescaled_batch": True}
    for runs in pool.run(2, layer_runs, 2, config, {}, 1):
        check(runs, "one sample")
        assert set(runs["pieces"].num_pieces) == {LENGTH // 2}


def test_only_what_attention_reads_is_copied(pool: Pool) -> None:
    """Counts what a rank copies beside its transfers, in elements."""
    config = {"optimize": "memory", "prescaled_batch": True}
    whole = SAMPLES * LENGTH * WIDTH
    # Forward and backward of the stack's borders each take a part, and gather all.
    borders = 2 * (whole // 2 + whole)
    for runs in pool.run(2, layer_runs, 2, config, {}, SAMPLES):
        # Forward and backward have two gathers and two sums each; inputs are gathered twice.
        assert runs["sorted"].copied == borders + 10 * whole
        # Queries, keys, values and the results of attention, of the heads of a rank, twice.
        assert runs["gathered"].copied == borders + 2 * 4 * whole // 2


def test_a_batch_of_one_sample_is_not_copied_at_all(pool: Pool) -> None:
    config = {"optimize": "memory", "prescaled_batch": True}
    for runs in pool.run(2, layer_runs, 2, config, {}, 1):
        assert runs["gathered"].copied == runs["sorted"].copied


def model_runs(rank: int, prescaled: bool) -> dict[str, Run]:
    """Runs a language model in all orders, in float64."""
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "ddp": True,
            "optimize": "memory",
            "prescaled_batch": prescaled,
        }
    )
    runs = {}
    for kind in ("sorted", "gathered", "pieces"):
        torch.manual_seed(1)
        sizes = (2, 2, 4, 8, 16, VOCABULARY, LENGTH)
        model = smp.nn.DistributedTransformerLMHead(
            *sizes, 0.0, 0.0, causal_mask_size=LENGTH, pre_layernorm=True, post_layernorm=False
        )
        model.double()
        torch.manual_seed(2 if prescaled else 2 + rank)
        ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH))

        def call(model: Any = model, ids: Tensor = ids) -> Tensor:
            loss: Tensor = model((ids, None, None, None, ids)).loss
            return loss

        runs[kind] = run(kind, call, model, None)
    return runs


@pytest.mark.parametrize("prescaled", [True, False])
def test_tables_and_losses_do_not_depend_on_the_order(pool: Pool, prescaled: bool) -> None:
    for runs in pool.run(2, model_runs, prescaled):
        check(runs, f"language model, prescaled={prescaled}")
