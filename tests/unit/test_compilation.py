"""Compiled and other parts of a model in one process, and the messages about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import smp
from smp.compilation.backend import max_variants
from smp.model import engine_of
from tests.dist.compiled_training import Block, Net, make_net, quick_compiler


@pytest.fixture(autouse=True)
def num_graphs() -> Iterator[Callable[[], int]]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    smp.init({})
    with quick_compiler() as number:
        yield number
    smp.shutdown()
    distributed.destroy_process_group()


BLOCKS = [f"blocks.{i}" for i in range(4)]


def wrapped(net: nn.Module, **options: Any) -> Any:
    return smp.DistributedModel(net, **{"compile": "stage", **options})


def units_of(model: Any) -> list[str]:
    return engine_of(model).compiled.units


def check(model: Any, plain: nn.Module, x: Tensor) -> None:
    """Output and gradients are those of the plain model."""
    model.zero_grad()
    plain.zero_grad()
    got, expected = model(x), plain(x)
    got.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(got, expected)
    for (name, mine), other in zip(
        model.get_module().named_parameters(), plain.parameters(), strict=True
    ):
        assert mine.grad is not None and other.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad)


def inputs(batch: int = 3) -> Tensor:
    return torch.randn(batch, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_equal_blocks_share_one_graph(num_graphs: Callable[[], int]) -> None:
    model = wrapped(make_net())
    check(model, make_net(), inputs())
    assert units_of(model) == [*BLOCKS, "last"]
    assert num_graphs() == 1


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match='compile must be "stage" or None, got True'):
        wrapped(make_net(), compile=True)


def test_hooks_inside_of_a_compiled_module_run(num_graphs: Callable[[], int]) -> None:
    """Registers a hook after compilation; after its removal the module runs compiled again."""
    net, plain = make_net(), make_net()
    model = wrapped(net)
    check(model, plain, inputs())
    seen = []
    handle = net.blocks[1].norm.register_forward_hook(lambda *_: seen.append(1))
    check(model, plain, inputs())
    assert seen == [1] and "blocks.1" not in units_of(model)
    handle.remove()
    check(model, plain, inputs())
    assert seen == [1] and units_of(model) == [*BLOCKS, "last"]


def test_a_hook_of_the_compiled_module_itself_runs_around_it() -> None:
    net = make_net()
    model = wrapped(net)
    seen = []
    net.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    check(model, make_net(), inputs())
    assert seen == [1] and "blocks.0" in units_of(model)


def test_kinds_of_arguments_are_bounded(
    num_graphs: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = wrapped(make_net()), make_net()
    limit = max_variants()
    with caplog.at_level(logging.WARNING, "smp"):
        for batch in range(2, limit + 5):
            check(model, plain, inputs(batch))
    assert num_graphs() == limit
    said = [r.getMessage() for r in caplog.records if "without torch.compile" in r.getMessage()]
    assert len(said) == 1 and f"compiled for {limit} kinds of arguments" in said[0], said


def test_hooks_of_all_modules_run(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net()
    model = wrapped(net)
    check(model, make_net(), inputs())
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    with caplog.at_level(logging.WARNING, "smp"):
        model(inputs())
    handle.remove()
    assert {net.blocks[0].norm, net.last.drop} <= set(seen)
    assert any("hooks are registered for all modules" in r.getMessage() for r in caplog.records)


class Cached(Block):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x)


class CachedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Cached() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for block in self.blocks:
            x = block(x, cache=cache)
        return self.last(x)


def test_modules_that_get_an_attention_cache_run_in_eager_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = CachedNet()
    model = wrapped(net)
    with caplog.at_level(logging.WARNING, "smp"):
        model(torch.ones(2, 6))
    said = [r.getMessage() for r in caplog.records if "use_cache=False" in r.getMessage()]
    assert said and said[0].startswith("smp: Cached ('blocks.0')"), said


class Raising(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise LookupError("two are too few")
        return super().forward(x)


def test_what_a_module_raises_by_itself_is_raised() -> None:
    net = make_net()
    net.last = Raising().double()
    with pytest.raises(LookupError, match="two are too few"):
        wrapped(net)(inputs(2))


def failing_backend(graph: Any, example: Any) -> Any:
    raise NotImplementedError("no such operator")


def test_what_the_backend_refuses_runs_in_eager_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped(make_net(), compile=None)
    model.compile(backend=failing_backend)
    with caplog.at_level(logging.WARNING, "smp"):
        check(model, make_net(), inputs())
    said = [r.getMessage() for r in caplog.records]
    assert any("Net ('(root)') runs without torch.compile" in line for line in said), said
    assert any("no such operator" in line for line in said), said


def test_the_whole_of_one_graph_raises_as_in_pytorch() -> None:
    model = wrapped(make_net(decides=True), compile=None)
    model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        model(inputs())


@pytest.mark.parametrize("is_compiled_after", (False, True))
def test_a_model_that_is_whole_is_compiled_as_a_whole(
    num_graphs: Callable[[], int], is_compiled_after: bool
) -> None:
    net, plain = make_net(), make_net()
    called: Any
    if is_compiled_after:
        model = wrapped(net, compile=None)
        called = torch.compile(model, backend="aot_eager")
    else:
        called = model = wrapped(torch.compile(net, backend="aot_eager"), compile=None)
    torch.testing.assert_close(called(inputs()), plain(inputs()))
    assert units_of(model) == [""] and num_graphs() == 1
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.get_module() is net


def test_disabling_takes_a_request_back() -> None:
    net = make_net()
    net.blocks[0].compile(backend="aot_eager")
    model = wrapped(net, compile=None)
    model.compile(backend="aot_eager")
    model(inputs())
    assert units_of(model) == [""]
    model.compile(disable=True)
    check(model, make_net(), inputs())
    assert units_of(model) == ["blocks.0"]


def test_code_is_compiled_once_for_all_threads(num_graphs: Callable[[], int]) -> None:
    """Compiles in one thread; other threads run the result, as contexts of a step do."""
    import threading

    model, plain = wrapped(make_net()), make_net()
    x = inputs()
    expected = plain(x)
    results: list[Tensor] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: results.append(model(x)))
        thread.start()
        thread.join()
    assert len(results) == 4 and num_graphs() == 1
    for result in results:
        torch.testing.assert_close(result, expected)
