"""Code that calls a module with other tensors in the place of its own, in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.harness import train_step_of

WIDTH, BATCHES = 6, 4


class Outer(nn.Module):
    """A module whose middle is on another rank, so that microbatches take turns in its forward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.away, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.away(torch.tanh(self.before(x))))
        return self.after(x) * self.scale


def by_functional_call(outer: Outer, others: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(outer, others, (x,))
    return result


def by_hand(outer: Outer, others: dict[str, Tensor], x: Tensor) -> Tensor:
    """Swaps parameters and buffers for a call, as scripts of meta-learning do."""
    tables = [
        (module._parameters if key in module._parameters else module._buffers, key, name)
        for name in others
        for path, _, key in [name.rpartition(".")]
        for module in [outer.get_submodule(path)]
    ]
    own = [table[key] for table, key, _ in tables]
    for table, key, name in tables:
        table[key] = others[name]  # type: ignore[assignment]
    try:
        result: Tensor = outer(x)
    finally:
        for (table, key, _), tensor in zip(tables, own, strict=True):
            table[key] = tensor  # type: ignore[assignment]
    return result


class Net(nn.Module):
    """Weights depend on the sample, as those of a hypernetwork do."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.outer = Outer()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + x.square().mean()
        names = ("before.weight", "after.weight", "after.bias")
        others = {name: factor * self.outer.get_parameter(name) for name in names}
        result: Tensor = self.how(self.outer, {**others, "scale": factor * self.outer.scale}, x)
        return result


def samples() -> Tensor:
    torch.manual_seed(8)
    return torch.randn(BATCHES, WIDTH, dtype=torch.float64)  # a sample per microbatch


def plain(how: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    net = Net(how).double()
    losses = [net(x[None]).square().mean() for x in samples()]
    torch.stack(losses).mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return [loss.detach() for loss in losses], gradients


def train(rank: int, how: Any) -> dict[str, Any]:
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": BATCHES,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    net = Net(how).double()
    smp.set_partition(net.outer.away, 1)
    model = smp.DistributedModel(net)
    turns: list[int] = []
    net.outer.before.register_forward_hook(lambda *_: turns.append(smp._C.current_microbatch()))
    net.outer.after.register_forward_hook(lambda *_: turns.append(smp._C.current_microbatch()))
    train_step = train_step_of(model)

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x).square().mean()

    before = model.state_dict()
    results: dict[str, Any] = {}
    for _ in range(2):  # the first one is more orderly than later ones
        model.zero_grad()
        results["losses"] = [loss.detach() for loss in train_step(samples()).outputs]
        results["gradients"] = {
            name: p.grad for name, p in model.local_named_parameters() if p.grad is not None
        }
    with torch.no_grad():
        results["evaluated"] = evaluate(samples()).outputs
    results["turns"] = turns
    after = model.state_dict()
    results["same"] = all(torch.equal(before[key], after[key]) for key in before)
    results["tables"] = {type(m._parameters) for m in net.modules()}
    smp.shutdown()
    results["left"] = {type(m._parameters) for m in net.modules()}
    return results


@pytest.mark.parametrize("how", [by_functional_call, by_hand])
def test_each_microbatch_computes_with_the_tensors_that_it_has_put_into_a_module(
    pool: Pool, how: Any
) -> None:
    losses, gradients = plain(how)
    results = pool.run(2, train, how, env={"SMP_CHECK_FIRST_STEP": "0"})
    turns = results[0]["turns"]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    assert any(a != b for a, b in pairs), "microbatches have taken turns inside of the module"
    for result in results:
        assert result["same"]
        torch.testing.assert_close(result["losses"], losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(list(result["evaluated"]), losses, rtol=1e-12, atol=0)
        assert result["left"] == {dict}
    found = results[0]["gradients"] | results[1]["gradients"]
    assert found.keys() == gradients.keys() and "outer.away.weight" in results[1]["gradients"]
    for name, gradient in gradients.items():
        assert gradient.any()
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


def leave(rank: int, how: str) -> None:

    def swap(outer: Outer, others: dict[str, Tensor], x: Tensor) -> Tensor:
        if how == "left":
            outer.before._parameters["weight"] = others["before.weight"]  # type: ignore[assignment]
        else:
            del outer.before.weight
        return outer(x)

    train(rank, swap)


@pytest.mark.parametrize(
    "how, expected",
    [
        ("left", "put other tensors in the place of 'outer.before.weight'"),
        ("deleted", "code of the step deletes 'outer.before.weight'"),
    ],
)
def test_a_parameter_that_a_microbatch_does_not_put_back_is_refused(
    pool: Pool, how: str, expected: str
) -> None:
    outcomes = pool.outcomes(2, leave, how, env={"SMP_CHECK_FIRST_STEP": "0"})
    assert all(outcome.error for outcome in outcomes)
    assert expected in outcomes[0].message and "[global_rank 0 | pp 0" in outcomes[0].message
