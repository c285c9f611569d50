"""Backwards of autograd nodes in a trace: those of Python, of C++, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from smp.commands.split_form import split_form
from smp.partition.costs import Trace
from smp.partition.trace import trace

ROWS, WIDTH = 64, 48


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        halves = values @ weight.t(), values @ weight.t()
        return halves[0] + halves[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        return 2 * grads[0] @ weight, 2 * grads[0].t() @ values


class Node(nn.Linear):
    """Two products and their sum as one node."""

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = _Product.apply(values, self.weight)  # type: ignore[no-untyped-call]
        return result


class Plain(nn.Linear):
    """The same by operators."""

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.weight.t() + values @ self.weight.t()


class Without(nn.Linear):
    """The same without gradients, beside a product with them."""

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            found = values @ self.weight.t() + values @ self.weight.t()
        return values @ self.weight.t() + found


def traced(*layers: nn.Module) -> Trace:
    """Traces layers; moving memory costs nothing, so that products alone count."""
    values = torch.zeros(ROWS, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
    return trace(model, (values,), {}, device=torch.device("cpu"), flops_per_byte=1e-9)


@pytest.mark.parametrize("last", [False, True])
def test_backward_of_a_node_is_that_of_its_operators(last: bool) -> None:
    behind = () if last else (nn.Linear(WIDTH, WIDTH),)
    node, plain = traced(Node(WIDTH, WIDTH), *behind), traced(Plain(WIDTH, WIDTH), *behind)
    product = 2 * ROWS * WIDTH**2
    assert node.costs[2].forward_flops == plain.costs[2].forward_flops
    assert node.costs[2].backward_flops == plain.costs[2].backward_flops
    assert node.costs[2].backward_flops == pytest.approx(2 * 2 * product)
    assert node.costs[1] == plain.costs[1]


def test_backward_of_a_node_counts_once_for_all_that_read_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.node = Node(WIDTH, WIDTH)

        def forward(self, values: Tensor) -> Tensor:
            result: Tensor = self.node(values)
            return result * 2 + result.t().reshape(values.shape)

    found = traced(Twice())
    one = traced(Node(WIDTH, WIDTH))
    assert found.costs[3].backward_flops == one.costs[2].backward_flops > 0


def test_what_runs_without_gradients_has_no_backward() -> None:
    found = traced(Without(WIDTH, WIDTH)).costs[2]
    product = 2 * ROWS * WIDTH**2
    assert found.forward_flops == pytest.approx(3 * product)
    assert found.backward_flops == pytest.approx(2 * product)


def test_split_layers_have_the_backward_of_the_model() -> None:
    """Traces split layers, whose operators are nodes of C++."""
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=128, use_cache=False,
        attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(1, 32, dtype=torch.long)

    def model() -> nn.Module:
        with torch.device("meta"):
            return GPT2LMHeadModel(config).train()

    def work(root: nn.Module) -> tuple[float, float]:
        # Moving memory costs nothing, so that fused operators and single ones are alike.
        found = trace(
            root, (), {"input_ids": ids, "labels": ids}, device=torch.device("cpu"),
            flops_per_byte=1e-9,
        )  # fmt: skip
        costs = found.costs
        return sum(c.forward_flops for c in costs), sum(c.backward_flops for c in costs)

    plain = work(model())
    with split_form(model()) as form:
        assert form is not None
        split = work(form)
    assert split == pytest.approx(plain, rel=0.02) and plain[1] > 2 * plain[0]
