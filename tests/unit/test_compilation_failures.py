"""Code that cannot be compiled, or fails when compiled, runs in eager mode with equal numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import make_boxed_func

import smp
from smp.compilation.trial import is_local, try_out
from tests.dist.compiled_training import Block, code_folder, compiler_of, make_net
from tests.unit.test_compilation import check, inputs, num_graphs, units_of, wrapped

__all__ = ["code_folder", "num_graphs"]


@pytest.fixture(autouse=True)
def settings_of_pytorch() -> Iterator[None]:
    with functorch.patch(donated_buffer=True):
        yield


class RefusedError(RuntimeError):
    """An error of the compiler, or of the code that it has made."""


def refuse(*_: Any) -> Any:
    raise RefusedError("no such operator")


def as_it_is(graph: Any, _: Any) -> Any:
    return make_boxed_func(graph.forward)


def refuse_to_run(graph: Any, _: Any) -> Any:
    return make_boxed_func(refuse)


def backend_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    # Code that cannot be traced fails before any of these; code without gradients is forward.
    return aot_autograd(fw_compiler=forward, bw_compiler=backward, inference_compiler=forward)


FAILING = {
    "backend": refuse,
    "compiling forward": backend_of(refuse, as_it_is),
    "compiling backward": backend_of(as_it_is, refuse),
    "running forward": backend_of(refuse_to_run, as_it_is),
    "running backward": backend_of(as_it_is, refuse_to_run),
}


class Counting(Block):
    """Keeps sums, as batch normalization does, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().sum(0))
        return super().forward(x) + self.total


class Several(Counting):
    """Cannot be one graph."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if float(x.detach().sum()) > 1e9 else 1.0
        return super().forward(x * scale)


def make(last: type[Counting]) -> nn.Module:
    net = make_net()
    net.last = last()
    return net.double()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [r.getMessage() for r in caplog.records]
    return [line for line in said if "without torch.compile" in line]


@pytest.mark.parametrize("last", (Counting, Several))
@pytest.mark.parametrize("place", FAILING)
def test_a_failure_anywhere_leaves_no_trace(
    place: str, last: type[Counting], caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers, random ones too, and buffers are those of the plain model, twice."""
    net, plain = make(last), make(last)
    model = wrapped(net, compile=None)
    model.compile(backend=FAILING[place])
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2):
            results = []
            for called in (model, plain):
                torch.manual_seed(seed)
                called.zero_grad()
                out = called(inputs())
                out.square().sum().backward()
                results.append((out, torch.rand(1)))
            torch.testing.assert_close(*results, rtol=0, atol=0)
            for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None and other.grad is not None, name
                assert torch.equal(mine.grad, other.grad), name
            assert torch.equal(net.last.total, plain.last.total)  # type: ignore[union-attr]
    said = lines(caplog)
    assert said and all("no such operator" in line for line in said), said
    assert len(said) == len(set(said))
    assert any("Net ('(root)')" in line for line in said), said
    assert not [r for r in caplog.records if r.name == "torch._dynamo.convert_frame"]


def test_a_failure_while_a_module_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    """The forward of a checkpointed module has run compiled by then, without gradients."""
    net, plain = make_net(dropout=0.5), make_net(dropout=0.5)
    model = wrapped(net, compile=None)
    for block in (*net.blocks, net.last):
        smp.set_activation_checkpointing(block)
    model.compile(backend=FAILING["running backward"])
    for seed in (1, 2):
        for called in (model, plain):
            torch.manual_seed(seed)
            called.zero_grad()
            called(inputs()).square().sum().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and torch.equal(mine.grad, other.grad)
    assert lines(caplog)


def test_the_compiler_itself_may_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole graphs are refused as PyTorch does it, several ones by a defect of the compiler."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    run = InstructionTranslatorBase.run

    def lost(translator: Any) -> None:
        if not translator.one_graph:
            raise AssertionError("lost the thread")
        run(translator)

    monkeypatch.setattr(InstructionTranslatorBase, "run", lost)
    model = wrapped(make_net(decides=True), compile=None)
    model.compile(backend="aot_eager")
    with caplog.at_level(logging.WARNING):
        check(model, make_net(decides=True), inputs())
    said = lines(caplog)
    assert len(said) == 1 and "Net ('(root)')" in said[0] and "lost the thread" in said[0], said
    assert not [r for r in caplog.records if r.name == "torch._dynamo.convert_frame"]


def test_an_assertion_of_the_compiler_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch hands it on as it is, without a class of its own around it."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    def lost(translator: Any) -> None:
        raise AssertionError("lost the thread")

    monkeypatch.setattr(InstructionTranslatorBase, "run", lost)
    model = wrapped(make_net())
    with caplog.at_level(logging.WARNING, "smp"):
        check(model, make_net(), inputs())
    said = lines(caplog)
    assert said == [
        "smp: Block ('blocks.0', 'blocks.1', 'blocks.2' and 2 more) runs without torch.compile: "
        "torch.compile: AssertionError: lost the thread"
    ]


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) * self.scale


def failing_late(graph: Any, example: Any) -> Any:
    """Code that raises something of its own for large numbers."""

    def run(*args: Any) -> Any:
        tokens = next(arg for arg in args if arg.dtype == torch.int64)
        if int(tokens.max()) > 2:
            raise RefusedError("an assertion of generated code")
        return graph.forward(*args)

    return run


def test_what_a_module_raises_later_is_raised_as_in_eager_mode() -> None:
    model = wrapped(Looking(), compile=None)
    model.compile(backend=failing_late)
    model(torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="index out of range in self"):
        model(torch.tensor([0, 9]))
    assert units_of(model) == [""], "the module is as good as before"
    # Something may have been written by then: no second try in another way.
    with pytest.raises(RefusedError, match="generated code"):
        model(torch.tensor([0, 3]))


# ---- the trial ---------------------------------------------------------------


def test_a_trial_leaves_no_trace() -> None:
    base = torch.arange(12.0)
    written, view = base[:6], base[4:8].expand(3, 4)
    weight = nn.Parameter(torch.ones(2, 4).t())
    hooked: list[Tensor] = []
    weight.register_hook(hooked.append)
    seen: list[Any] = []

    def code(written: Tensor, view: Tensor, weight: Tensor, number: int) -> Any:
        seen.append((view.stride(), weight.stride(), weight.requires_grad, written.requires_grad))
        written.add_(number)
        seen.append(view[0].tolist())
        weight.mul_(2.0)
        return view @ weight + torch.rand(2), None

    before = torch.get_rng_state()
    assert try_out(code, [written, view, weight, 5])
    assert seen == [((0, 1), (1, 4), True, False), [9.0, 10.0, 6.0, 7.0]], "they share memory"
    assert torch.equal(base, torch.arange(12.0)) and torch.equal(weight, torch.ones(4, 2))
    assert weight.grad is None and not hooked
    assert torch.equal(before, torch.get_rng_state())


def test_a_trial_that_lacks_memory_says_nothing() -> None:
    def code(x: Tensor) -> Any:
        raise torch.OutOfMemoryError("too small")

    assert not try_out(code, [torch.ones(1)])


class Summing(nn.Module):
    """Talks to other ranks by itself."""

    def __init__(self, talks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.talks = talks

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x))
        if self.talks:
            distributed.all_reduce(out)
        return out


@pytest.mark.parametrize("talks", (False, True))
def test_what_talks_to_other_ranks_is_not_tried(talks: bool) -> None:
    """Skips the trial call of code with collectives: other ranks would have to join it."""
    called, local = [], []

    def backend(graph: Any, example: Any) -> Any:
        local.append(is_local(graph))
        return lambda *args: called.append(1) or graph.forward(*args)

    model = wrapped(Summing(talks), compile=None)
    model.compile(backend=backend)
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert local == [not talks] and len(called) == (1 if talks else 2)
    # Whether its backward may run twice is not noted then.
    assert functorch.donated_buffer == (not talks)


# ---- donated buffers -----------------------------------------------------------


def loss_of(module: Any, x: Tensor) -> Tensor:
    return module(x).square().sum()


def test_a_kept_graph_is_the_business_of_the_library_only() -> None:
    """Compiles a block in the script itself: it still refuses to keep a graph."""
    model, plain = wrapped(make_net()), make_net()
    assert functorch.donated_buffer
    loss = loss_of(model, inputs())
    loss.backward(retain_graph=True)
    loss.backward()
    loss = loss_of(plain, inputs())
    loss.backward(retain_graph=True)
    loss.backward()
    for mine, other in zip(model.get_module().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert units_of(model) and functorch.donated_buffer
    block = torch.compile(make_net().blocks[0], backend="aot_eager")
    loss_of(block, inputs()).backward()  # compiled with the first backward, for one
    loss = loss_of(block, inputs())
    with pytest.raises(RuntimeError, match="donated"):
        loss.backward(retain_graph=True)


@pytest.fixture
def folder(code_folder: Path) -> Iterator[Path]:
    # Off by default in older releases.
    with compiler_of(code_folder), functorch.patch(enable_autograd_cache=True):
        yield code_folder


@pytest.mark.sample(keep=0)
def test_code_from_the_cache_keeps_its_graph(folder: Path) -> None:
    """Takes code from the cache, whose notes on itself differ from those of new code."""
    from torch._dynamo.utils import counters

    x = inputs()
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        net = make_net()
        model = wrapped(net, compile=None)
        net.last.compile()
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        assert units_of(model) == ["last"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1, counters["aot_autograd"]


@pytest.mark.sample(keep=0)
def test_attention_of_the_cpu_in_float64_runs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inductor believes that it returns float32 there, which is found in backward only."""
    net, plain = Attending().double(), Attending().double()
    model = wrapped(net, compile=None)
    model.compile()
    with caplog.at_level(logging.WARNING, "smp"):
        check(model, plain, inputs())
    (said,) = lines(caplog)
    assert "Attending ('(root)')" in said and "expected scalar type Double" in said, said


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.enter = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.enter(x).view(1, -1, 2, 12).transpose(1, 2).split(4, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
