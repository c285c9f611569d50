"""Checkpointing in one process: what is kept, what runs again, and what is refused."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.activations import marks, placement
from smp.activations.checkpointing import checkpoint, checkpoint_sequential
from smp.activations.recompute import is_recomputing, recompute
from smp.activations.strategies import parse_strategy, plan_groups
from tests.harness import train_step_of


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if smp.is_initialized():
        smp.shutdown()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.log: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(is_recomputing())
        return self.dropout(torch.tanh(self.linear(x)))


def gradients(module: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    """Result and gradients of one run, argument first."""
    torch.manual_seed(seed)
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    (y * torch.rand_like(y)).sum().backward()
    grads = [p.grad for p in module.parameters()]
    assert x.grad is not None and x.grad.abs().max() > 0
    return [y.detach(), x.grad, *(g for g in grads if g is not None)]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_marked_module_runs_twice_with_one_result() -> None:
    net, x = Net(), torch.randn(4, 8)
    plain = gradients(net, x)
    smp.set_activation_checkpointing(net)
    net.log.clear()
    assert_same(gradients(net, x), plain)
    assert net.log == [False, True]
    with torch.no_grad():
        net(x)
    assert net.log == [False, True, False]


def test_other_random_numbers_without_preserving_them() -> None:
    net, x = Net(), torch.randn(64, 8)
    smp.set_activation_checkpointing(net, preserve_rng_state=False)
    smp.set_activation_checkpointing(net, preserve_rng_state=False)  # replaces the mark
    torch.manual_seed(1)
    x.requires_grad_()
    y = net(x)
    y.sum().backward()
    assert x.grad is not None and len(net.log) == 2
    # Some elements that the first run dropped, and that are no part of the result, have a gradient.
    plain = torch.where(y != 0, 2 * (1 - (y / 2) ** 2), 0).detach()
    assert not torch.allclose(x.grad, plain @ net.linear.weight.detach())


def test_recomputing_leaves_the_generators_alone() -> None:
    net, x = Net(), torch.randn(4, 8, requires_grad=True)
    smp.set_activation_checkpointing(net)
    loss = net(x).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs: list[int] = []

    def forward(self, pair: Pair, *rest: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        self.runs.append(1)
        assert pair.second is None and rest == ("text", None)
        x = self.linear(pair.first) * scale + kwargs["more"]["list"][0]
        return {"x": Pair(x, None), "same": pair.first, "ids": kwargs["ids"], "none": None}, 3


def test_any_structure_of_arguments_and_results() -> None:
    net = Nested()
    x, other = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    ids = torch.arange(4)

    def run(call: Any) -> list[Tensor]:
        net.zero_grad()
        x.grad = other.grad = None
        hidden = x * 1.0
        result, number = call(
            Pair(hidden, None), "text", None, scale=2.0, more={"list": [other]}, ids=ids
        )
        assert number == 3 and isinstance(result["x"], Pair) and result["none"] is None
        assert result["same"] is hidden and result["ids"] is ids
        (result["x"].first.sum() + (result["same"] ** 2).sum()).backward()
        assert x.grad is not None and other.grad is not None and net.linear.weight.grad is not None
        return [x.grad.clone(), other.grad.clone(), net.linear.weight.grad.clone()]

    plain = run(net)
    assert_same(run(lambda *args, **kwargs: checkpoint(net, *args, **kwargs)), plain)
    assert len(net.runs) == 3


def test_only_arguments_are_kept() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = torch.exp(x)
            alive.append(weakref.ref(inner))
            return torch.exp(inner).sum(-1)

    net, x = Wide(), torch.zeros(2, 8, requires_grad=True)
    y = net(x)
    assert alive[-1]() is None or y.grad_fn is not None
    y = checkpoint(net, x)
    assert alive[-1]() is None
    y.sum().backward()
    gc.collect()
    assert alive[-1]() is None and len(alive) == 3


@pytest.mark.parametrize("strategy", ["each", "group_2", "budget:1"])
def test_a_marked_module_is_garbage_when_the_program_lets_go(strategy: str) -> None:
    sequence = nn.Sequential(Net(), Net())
    smp.set_activation_checkpointing(sequence, strategy=strategy)
    gradients(sequence, torch.randn(2, 8))
    gone = [weakref.ref(module) for module in sequence.modules()]
    del sequence
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_surroundings_are_those_of_the_call() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")
    seen: list[tuple[str, torch.dtype, bool]] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            seen.append((variable.get(), y.dtype, torch.is_autocast_enabled("cpu")))
            return y.float()

    net, x = Looks(), torch.randn(4, 8, requires_grad=True)
    token = variable.set("inside")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(net, x)
    variable.reset(token)
    y.sum().backward()
    assert seen == [("inside", torch.bfloat16, True)] * 2
    y = checkpoint(net, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
    assert seen[2:] == [("outside", torch.float32, False)] * 2


def test_statistics_of_batch_norms_count_once() -> None:
    net, x = nn.BatchNorm1d(8), torch.randn(4, 8)
    plain = gradients(net, x)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.reset_running_stats()
    smp.set_activation_checkpointing(net)
    assert_same(gradients(net, x), plain)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def test_hooks_of_parameters_run_in_the_real_backward_only() -> None:
    net, x, calls = Net(), torch.randn(4, 8), []
    net.linear.weight.register_hook(lambda grad: calls.append(grad.shape))
    smp.set_activation_checkpointing(net)
    net(x)
    assert calls == []
    gradients(net, x)
    assert calls == [torch.Size([8, 8])]


def test_frozen_modules_with_plain_arguments_run_once() -> None:
    net, x = Net().requires_grad_(False), torch.randn(4, 8)
    smp.set_activation_checkpointing(net)
    assert not net(x).requires_grad
    net.requires_grad_(True)
    net(x).sum().backward()
    assert net.log == [False, False, True]


def test_errors_of_the_second_run_reach_the_caller() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise KeyError("in the second run")
            return x * 2

    y = checkpoint(Fails(), torch.ones(2, requires_grad=True))
    with pytest.raises(KeyError, match="in the second run"):
        y.sum().backward()
    assert not is_recomputing()


# ---- sequences ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2", "group_3", "budget:0"])
def test_sequences_give_the_same_bits(strategy: str) -> None:
    net = nn.Sequential(*(Net() for _ in range(5)))
    x = torch.randn(4, 8)
    plain = gradients(net, x)
    smp.set_activation_checkpointing(net, strategy=strategy)
    for layer in net:
        layer.log.clear()  # type: ignore[operator,union-attr]
    assert_same(gradients(net, x), plain)
    assert [layer.log for layer in net] == [[False, True]] * 5
    if not strategy.startswith("budget"):
        net_2 = nn.Sequential(*(Net() for _ in range(5)))
        net_2.load_state_dict(net.state_dict())
        again = gradients(_Called(net_2, strategy), x)
        assert_same(again, plain)
        assert [layer.log for layer in net_2] == [[False, True]] * 5


class _Called(nn.Module):
    def __init__(self, inner: nn.Sequential, strategy: str) -> None:
        super().__init__()
        self.inner, self.strategy = inner, strategy

    def forward(self, x: Tensor) -> Any:
        return checkpoint_sequential(self.inner, x, strategy=self.strategy)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]), pair[1]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("strategy", ["each", "contiguous"])
def test_tuples_need_not_be_announced(announced: bool, strategy: str) -> None:
    net = nn.Sequential(Both(), Both())
    x, mask = torch.randn(4, 8, requires_grad=True), torch.ones(4)
    smp.set_activation_checkpointing(net, pack_args_as_tuple=announced, strategy=strategy)
    for run in (net, lambda pair: checkpoint_sequential(net, pair, strategy)):
        x.grad = None
        hidden, same = run((x, mask))
        hidden.sum().backward()
        assert same is mask and x.grad is not None


def test_groups_are_neighbours_of_one_place() -> None:
    a, b = 0, 1
    groups = plan_groups([a, a, b, b, b], 3)  # the example of the public documentation
    assert groups == [(range(0, 2), True), (range(2, 5), True)]
    assert plan_groups([a, a, b, b, b], 2)[1:] == [(range(2, 4), True), (range(4, 5), True)]
    assert plan_groups([a, a, None, None, a], None) == [
        (range(0, 2), True),
        (range(2, 3), False),
        (range(3, 4), False),
        (range(4, 5), True),
    ]
    assert plan_groups([], 1) == []


@pytest.mark.parametrize("text", ["Each", "group", "group_0", "group_-1", "group_x", "budget", 3])
def test_strategies_that_are_none_are_refused_with_those_that_are(text: Any) -> None:
    with pytest.raises(ValueError, match="'each', 'contiguous', 'group_<N>'.*budget"):
        smp.set_activation_checkpointing(nn.Sequential(nn.Linear(1, 1)), strategy=text)
    with pytest.raises(ValueError, match=r"'each', 'contiguous'"):
        checkpoint_sequential(nn.Sequential(), torch.ones(1), strategy=text)


def test_budgets_are_read() -> None:
    assert parse_strategy("budget:1.5").budget_bytes == 3 * 2**29
    with pytest.raises(ValueError, match="set_activation_checkpointing"):
        checkpoint_sequential(nn.Sequential(), torch.ones(1), strategy="budget:1")


@pytest.mark.parametrize("strategy", ["each", "group_1", "budget:1"])
def test_a_sequence_with_a_forward_of_its_own(strategy: str) -> None:
    class Masked(nn.Sequential):
        def forward(self, hidden: Tensor, mask: Tensor, *, scale: float = 1.0) -> Any:
            for layer in self:
                hidden = layer(hidden) * mask * scale
            return hidden, mask

    net, x, mask = Masked(Net(), Net()), torch.randn(4, 8), torch.ones(8)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x, mask, scale=2.0)[0]  # type: ignore[no-any-return]

    caller = Caller()
    plain = gradients(caller, x)
    smp.set_activation_checkpointing(net, strategy=strategy)
    for layer in net:
        layer.log.clear()
    assert_same(gradients(caller, x), plain)
    assert [layer.log for layer in net] == [[False, True]] * 2


class Listed(nn.Module):
    """Layers in lists of a dict, called in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleDict({"a": nn.ModuleList([Net(), Net()]), "b": Net()})
        self.last = Net()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.groups["b"], *reversed(self.groups["a"]), self.last):  # type: ignore
            x = layer(x)
        return x

    def logs(self) -> list[list[bool]]:
        return [module.log for module in self.modules() if isinstance(module, Net)]


@pytest.mark.parametrize("strategy", ["each", "budget:1"])
def test_a_list_of_modules_stands_for_its_members(strategy: str) -> None:
    net, x = Listed(), torch.randn(4, 8)
    plain = gradients(net, x)
    smp.set_activation_checkpointing(net.groups, pack_args_as_tuple=True, strategy=strategy)
    for log in net.logs():
        log.clear()
    assert_same(gradients(net, x), plain)
    assert net.logs() == [[False, True]] * 3 + [[False]], "the last one is in no list"


def test_a_list_with_a_forward_is_a_module_like_others() -> None:
    class Stack(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
            return x

    net, x = Stack([Net(), Net()]), torch.randn(4, 8)
    plain = gradients(net, x)
    smp.set_activation_checkpointing(net)
    for layer in net:
        layer.log.clear()
    assert_same(gradients(net, x), plain)
    assert [layer.log for layer in net] == [[False, True]] * 2


def test_what_cannot_be_checkpointed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for nn.Sequential, and the module is a Linear"):
        smp.set_activation_checkpointing(nn.Linear(1, 1), strategy="contiguous")
    with pytest.raises(ValueError, match="pack_args_as_tuple"):
        smp.set_activation_checkpointing(nn.Linear(1, 1), pack_args_as_tuple=True)
    with pytest.raises(TypeError, match="only an nn.Module"):
        checkpoint(torch.tanh, torch.ones(1))  # type: ignore[arg-type]
    smp.init({})
    with pytest.raises(TypeError, match="modules inside of it"):
        smp.set_activation_checkpointing(smp.DistributedModel(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="never called"):
        checkpoint(nn.ModuleList([nn.Linear(1, 1)]), torch.ones(1))
    for strategy in ("contiguous", "group_2"):
        with pytest.raises(ValueError, match="members of a ModuleList are called one by one"):
            smp.set_activation_checkpointing(nn.ModuleList(), strategy=strategy)
    with pytest.raises(TypeError, match="takes an nn.Sequential"):
        checkpoint_sequential(nn.Linear(1, 1), torch.ones(1))  # type: ignore[arg-type]

    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="strategy='each'"):
        smp.set_activation_checkpointing(Own(), strategy="group_2")


# ---- partitions ----------------------------------------------------------------


@contextlib.contextmanager
def placed(partitions: dict[nn.Module, int], by_hand: bool) -> Iterator[None]:
    for i, (module, partition) in enumerate(partitions.items()):
        placement._places[module] = placement._Place(partition, 0, False, by_hand, f"m{i}")
    try:
        yield
    finally:
        for module in partitions:
            del placement._places[module]
        placement._warned.clear()


def test_a_module_on_two_partitions(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Sequential(Net(), Net()), Net())
    inner, x = net[0], torch.randn(4, 8)
    assert isinstance(inner, nn.Sequential)
    smp.set_activation_checkpointing(net)
    partitions = {inner: 0, inner[0]: 0, inner[1]: 1, net[1]: 1}
    with placed(partitions, by_hand=True):
        with pytest.raises(ValueError, match=r"'m0' \(Sequential\).*partitions \[0, 1\]"):
            marks.settle_marks([net])
        with pytest.raises(ValueError, match="must lie on one"):
            checkpoint(inner, x)
    with placed(partitions, by_hand=False), caplog.at_level(logging.WARNING, logger="smp"):
        marks.settle_marks([net])
        marks.settle_marks([net])
        assert sum("parts are checkpointed" in text for text in caplog.messages) == 1
        gradients(net, x)
    logs = [inner[0].log, inner[1].log, net[1].log]
    assert logs == [[False, True], [False, True], [False, True]], "parts of it, and the other one"


# ---- functions of PyTorch, transformers ------------------------------------------


def test_the_switch_of_transformers_is_taken_over() -> None:
    from transformers import GPT2Config, GPT2Model

    smp.init({})
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    # The switch turns the cache off, which alone changes bits on some processors.
    config.use_cache = False
    plain = GPT2Model(config)
    model = smp.DistributedModel(plain.train())
    ids = torch.randint(20, (2, 8))

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        plain.zero_grad()
        hidden = model(ids).last_hidden_state
        names = _names_of(hidden.grad_fn)
        assert ("SmpRecomputeBackward" in names) == plain.is_gradient_checkpointing
        assert "CheckpointFunctionBackward" not in names
        hidden.square().sum().backward()
        grads = [p.grad for p in plain.parameters()]
        return [hidden.detach(), *(grad.clone() for grad in grads if grad is not None)]

    before = run()
    model.gradient_checkpointing_enable()
    assert plain.is_gradient_checkpointing
    assert_same(run(), before)
    model.gradient_checkpointing_disable()
    assert_same(run(), before)


def _names_of(node: Any) -> set[str]:
    names: set[str] = set()
    todo = [node]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        todo += [child for child, _ in node.next_functions]
    return names


def test_our_own_layers_have_the_switch_of_transformers() -> None:
    smp.init({})
    stack = smp.nn.DistributedTransformer(
        num_layers=2, num_attention_heads=2, attention_head_size=4, hidden_size=8,
        intermediate_size=16,
    )  # fmt: skip
    inputs = (torch.randn(2, 3, 8, requires_grad=True), None)
    assert not stack.is_gradient_checkpointing
    stack.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert stack.is_gradient_checkpointing
    torch.manual_seed(4)
    hidden = stack(inputs)[0]
    assert "SmpRecomputeBackward" in _names_of(hidden.grad_fn)
    smp.set_activation_checkpointing(stack.seq_layers[0])  # once, not twice
    stack.gradient_checkpointing_disable()
    torch.manual_seed(4)
    assert torch.equal(stack(inputs)[0], hidden)


def test_attention_caches_are_left_out() -> None:
    from transformers import DynamicCache

    class Uses(nn.Module):
        def forward(self, x: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Tensor:
            assert past_key_values is None and not use_cache
            return x * 2

    x = torch.ones(2, requires_grad=True)
    recompute(Uses(), (x,), {"past_key_values": DynamicCache(), "use_cache": True}).sum().backward()
    assert x.grad is not None


def test_offloading_without_checkpoints_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    smp.init({"offload_activations": True, "microbatches": 2})
    net = Net()
    model = smp.DistributedModel(net)
    train = train_step_of(model, lambda model, x: model(x).sum())
    with caplog.at_level(logging.WARNING, logger="smp"):
        train(torch.randn(4, 8))
        train(torch.randn(4, 8))
    assert sum("offload_activations has no effect" in text for text in caplog.messages) == 1
    assert smp.metrics.offload_stats()["checkpoints"] == 0
    smp.set_activation_checkpointing(net)
    train(torch.randn(4, 8))
    assert smp.metrics.offload_stats()["checkpoints"] == 2
