"""Losses that read parameters, or gradients of them, inside of a step function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool

WIDTH, WORDS = 6, 8
Config = dict[str, Any]
LAYOUTS: dict[str, tuple[int, Config]] = {
    "replicas": (2, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    "split": (2, {"tensor_parallel_degree": 2}),
    "split, one batch": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.table(ids)))
        return self.last(x)


def over_all(model: Any, net: Any, loss: Tensor) -> Tensor:
    total: Tensor = sum(p.square().sum() for p in model.parameters())  # type: ignore[assignment]
    return loss + 0.1 * total


def norms(model: Any, net: Any, loss: Tensor) -> Tensor:
    return loss + 0.1 * sum(p.norm() for p in model.parameters())


def through_modules(model: Any, net: Any, loss: Tensor) -> Tensor:
    return loss + 0.1 * (net.table.weight.norm() + net.last.weight.norm())


def of_gradient(model: Any, net: Any, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, net.table.weight, create_graph=True)
    return loss + 10 * gradient.square().sum()


def of_last_gradient(model: Any, net: Any, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, net.last.weight, create_graph=True)
    return loss + 10 * gradient.square().sum()


def of_listed_gradients(model: Any, net: Any, loss: Tensor) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 10 * sum(gradient.square().sum() for gradient in gradients)


PENALTIES: list[Callable[[Any, Any, Tensor], Tensor]] = [
    over_all,
    norms,
    through_modules,
    of_gradient,
    of_last_gradient,
    of_listed_gradients,
]


_UNUSED = "One of the differentiated Tensors appears to not have been used in the graph"
#: by layout and penalty, with what is said; all others are right
REFUSED = {
    # Each rank meets a parameter of the other one; the first to fail is whom both name.
    **{
        ("pipeline", name): "has no values here: it lives on pp_rank"
        for name in ("over_all", "norms", "through_modules")
    },
    **{("pipeline", f"of_{name}"): _UNUSED for name in ("gradient", "last_gradient")},
    ("pipeline", "of_listed_gradients"): _UNUSED,
    **{
        (layout, name): said
        for layout in ("split", "split, one batch")
        for name, said in (
            ("over_all", "code outside of its module computes with '"),
            ("norms", "code outside of its module computes with '"),
            ("of_gradient", _UNUSED),
            ("of_last_gradient", _UNUSED),
            ("of_listed_gradients", "code outside of its module computes with '"),
        )
    },
}


def ids() -> Tensor:
    torch.manual_seed(4)
    return torch.randint(WORDS, (8, 3))


def task(y: Tensor) -> Tensor:
    return y.square().mean()


def plain(penalty: Any, num_pieces: int) -> tuple[float, dict[str, Tensor]]:
    net = Net().double()
    losses = [penalty(net, net, task(net(piece))) for piece in ids().chunk(num_pieces)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def train(rank: int, config: Config, penalty: Any, by_model: bool) -> Any:
    import smp
    from smp.tensor_parallel.sharding import interval_of

    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **config})
    net = Net().double()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.table, True)
        smp.set_tensor_parallelism(net.middle, True)
        smp.set_tensor_parallelism(net.last, True)
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net.last, 1)
    net = model.get_module()  # type: ignore[assignment]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = penalty(model, net, task(model(x)))
        if by_model:
            model.backward(loss)
        else:
            loss.backward()
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    replicas = smp.rdp_size() if config.get("prescaled_batch") else smp.dp_size()
    own = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    loss = train_step(ids().chunk(replicas)[own]).reduce_mean()
    optimizer.step()
    after = model.state_dict()
    if smp.tp_size() > 1:
        assert any(interval_of(p) is not None for p in model.parameters())
    return float(loss), {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_penalty_is_that_of_one_process_or_refused(pool: Pool, layout: str, penalty: Any) -> None:
    num_ranks, config = LAYOUTS[layout]
    for by_model in (True, False):
        if layout == "pipeline" and not by_model:
            continue  # model.backward belongs there
        replicas = 1 if layout in ("pipeline", "split, one batch") else 2
        _, gradients = plain(penalty, 2 * replicas)
        env = {"SMP_CHECK_FIRST_STEP": "0"}
        outcomes = pool.outcomes(num_ranks, train, config, penalty, by_model, env=env)
        if any(outcome.error for outcome in outcomes):
            assert (layout, penalty.__name__) in REFUSED
            assert all(outcome.error for outcome in outcomes)
            assert any(REFUSED[layout, penalty.__name__] in outcome.message for outcome in outcomes)
            continue
        assert (layout, penalty.__name__) not in REFUSED
        for outcome in outcomes:
            for name, gradient in gradients.items():
                assert gradient.any()
                torch.testing.assert_close(outcome.value[1][name], gradient, rtol=1e-9, atol=1e-12)
