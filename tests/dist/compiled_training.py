"""Training functions that the ranks of tests of compiled modules run."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.training import RankRecord, Run, strip, train
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build
from tests.reference.single_process import accumulate_gradients

STAGE: tuple[tuple[str, Any], ...] = (("compile", "stage"),)


@dataclass(frozen=True)
class Compiled:
    """Holds one rank's record, and the names and number of what was compiled there."""

    record: RankRecord
    units: list[str]
    num_graphs: int
    said: list[str]


@pytest.fixture(scope="session")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of compiled code, from which later ranks and tests load."""
    return tmp_path_factory.getbasetemp().parent / "smp-compiled-code"


@contextlib.contextmanager
def compiler_of(folder: Path | str) -> Iterator[Callable[[], int]]:
    """The compiler as tests use it: code in one folder, no processes of its own.

    And no vectors: to compile kernels with them takes most of the time of a test.

    Yields:
        a function that tells how many graphs were compiled so far.
    """
    import torch._dynamo
    import torch._inductor.config

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    try:
        with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
            yield lambda: int(stats["unique_graphs"])
    finally:
        torch._dynamo.reset()
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def quick_compiler() -> Iterator[Callable[[], int]]:
    """Makes graphs as usual, which PyTorch's own operators execute without generated code.

    Yields:
        A function that returns the number of graphs.
    """
    from smp.compilation import compiled_forward
    from smp.modules.compiled import request_of

    before = compiled_forward.stage_request
    request = request_of(backend="aot_eager", fullgraph=True, dynamic=False)
    assert request is not None
    compiled_forward.stage_request = lambda: request
    try:
        with tempfile.TemporaryDirectory() as unused, compiler_of(unused) as num_graphs:
            yield num_graphs
    finally:
        compiled_forward.stage_request = before


def units_of_models() -> list[str]:
    """Names of the modules that are compiled on this rank, of all models."""
    from smp.model import engine_of
    from smp.world import runtime

    return [
        name
        for model in runtime.current().wrapped.models
        for name in engine_of(model).compiled.units
    ]


@contextlib.contextmanager
def noting_units(units: list[str]) -> Iterator[None]:
    """Puts into ``units`` what is compiled after the last call of a step function."""
    import smp

    step = smp.step

    def noting(function: Any) -> Any:
        stepped = step(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = stepped(*args, **kwargs)
            units[:] = units_of_models()
            return result

        return call

    smp.step = noting  # type: ignore[assignment]
    try:
        yield
    finally:
        smp.step = step


def train_compiled(rank: int, folder: Path, run: Run) -> Compiled:
    """Trains with what inductor makes of the model's parts."""
    units: list[str] = []
    with compiler_of(folder) as num_graphs, noting_units(units), log_of_smp() as said:
        record = train(rank, replace(run, model_args=run.model_args + STAGE))
        return Compiled(record, units, num_graphs(), said)


# ---- by what updates do ----------------------------------------------------

RATE = 0.25
STEPS = 3
MICROBATCHES = 4


@dataclass(frozen=True)
class Updated:
    """Holds one rank's results with plain gradient descent, whose updates show the gradients."""

    losses: list[list[float]]  # [step][microbatch]
    states: list[dict[str, Tensor]]  # whole, before the first step and after each
    units: list[str]
    num_graphs: int


LAYERS = {"gpt2": "transformer.h", "gptj": "transformer.h", "llama": "model.layers"}


def train_layout(rank: int, folder: Path, family: str, config: dict[str, Any]) -> Updated:
    """Trains a family, its blocks compiled; with tensor parallelism every other one is split."""
    import smp

    smp.init({"microbatches": MICROBATCHES, "ddp": True, **config})
    replica = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
    case = f"hf/{family}+nocache"
    plain = build(case, torch.float32)
    if smp.tp_size() > 1:
        for block in list(plain.get_submodule(LAYERS[family]).children())[::2]:
            smp.set_tensor_parallelism(block)
    units: list[str] = []
    with compiler_of(folder) as num_graphs, noting_units(units):
        model = smp.DistributedModel(plain, compile="stage")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
        train_step = train_step_of(model, lambda model, batch: compute_loss(case, model, batch))
        losses, states = [], [copied(model.state_dict())]
        for step in range(STEPS):
            output = train_step(make_batch(case, torch.float32, replica, step))
            losses.append([loss.item() for loss in output.outputs])
            optimizer.step()
            optimizer.zero_grad()
            states.append(copied(model.state_dict()))
        return Updated(losses, states, units, num_graphs())


def reference_updates(family: str, replicas: int) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Losses [step][replica][microbatch] and states of the same run in one process."""
    case = f"hf/{family}+nocache"
    model = build(case, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, states = [], [copied(model.state_dict())]
    for step in range(STEPS):
        batches = [make_batch(case, torch.float32, replica, step) for replica in range(replicas)]
        losses.append(accumulate_gradients(case, model, batches, MICROBATCHES))
        optimizer.step()
        optimizer.zero_grad()
        states.append(copied(model.state_dict()))
    return losses, states


def copied(state: dict[str, Any]) -> dict[str, Tensor]:
    return {strip(name): value.detach().clone() for name, value in state.items()}


def gradients_of(states: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """Computes each parameter's gradient in one step from the states before and after it."""
    before, after = states[step], states[step + 1]
    return {
        name: (before[name].double() - after[name].double()) / RATE
        for name in before
        if before[name].is_floating_point()
    }


# ---- a model whose compilation takes little --------------------------------

WIDTH = 6


class Block(nn.Module):
    """Draws random numbers where that is wanted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Deciding(Block):
    """Reads a value, which the compiler cannot; its part can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if float(x.detach().sum()) > 1e9 else 1.0
        return super().forward(self.inner(x) * scale)


class Net(nn.Module):
    """A model of equal blocks, followed by a last block that may be of another class."""

    def __init__(self, dropout: float = 0.0, decides: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.last = Deciding() if decides else Block(dropout)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def make_net(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).double()


def net_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(  # type: ignore[return-value]
        torch.randn(8, width, generator=generator, dtype=torch.float64) for width in (WIDTH, 1)
    )


@dataclass(frozen=True)
class NetRun:
    """Holds one rank's results of a run of `Net`."""

    losses: list[float]
    state: dict[str, Tensor]
    units: list[str]
    num_graphs: int
    said: list[str]
    names: list[str]  # all names that the library has given to the script


def train_net(
    wrap: Callable[[Net], Any],
    net: Net,
    *,
    steps: int = 4,
    autocast: bool = False,
    config: dict[str, Any] | None = None,
) -> NetRun:
    """Trains with graphs that PyTorch's own operators execute, and shuts smp down.

    Args:
        wrap: makes what the step function calls; may compile anything.
        net: the model.
        steps: number of training steps.
        autocast: run forwards in bfloat16.
        config: further keys for `smp.init`.
    """
    import smp

    # Memory in the balance leaves blocks whole, so that it is known what is compiled.
    own = {"pipeline_parallel_degree": 2, "microbatches": 4, "memory_weight": 0.8}
    smp.init({**own, **(config or {})})
    units: list[str] = []
    with quick_compiler() as num_graphs, noting_units(units), log_of_smp() as said:
        model = wrap(net)
        distributed = plain_of(model)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))

        @smp.step
        def train_step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x)
            loss = nn.functional.mse_loss(out.to(y.dtype), y)
            distributed.backward(loss)
            return loss

        losses = []
        dtype = next(net.parameters()).dtype
        torch.manual_seed(11)
        for step in range(steps):
            x, y = (part.to(dtype) for part in net_batch(step))
            losses += [loss.item() for loss in train_step(x, y).outputs]
            optimizer.step()
            optimizer.zero_grad()
        names = [name for name, _ in distributed.local_named_parameters()]
        names += [repr(optimizer.local_state_dict().keys()), *distributed.local_state_dict()]
        state = copied(distributed.state_dict())
        result = NetRun(losses, state, units, num_graphs(), said, names)
    smp.shutdown()
    return result


def plain_of(model: Any) -> Any:
    from smp.modules.compiled import plain

    return plain(model)


@contextlib.contextmanager
def log_of_smp() -> Iterator[list[str]]:
    """Collects the messages that the library logs."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep()
    logging.getLogger("smp").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("smp").removeHandler(handler)


def reference_net(net: Net, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """The same run in one process; losses by microbatch."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x, y = net_batch(step)
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = nn.functional.mse_loss(net(part), target)
            (loss / 4).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, copied(net.state_dict())
