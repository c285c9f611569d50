"""Runs a program in one process and on several ranks, and compares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.programs.interpreter import Delays, Interpreter, build, flatten, no_delays
from tests.dist.programs.language import WIDTH, Program
from tests.reference.single_process import make_optimizer
from tests.reference.tolerances import TOLERANCE, assert_close, relative_difference

MAX_DELAY_US = 2000  # in forward and backward
MAX_TRANSPORT_DELAY_US = 500
NUDGE = 1e-14  # some ten times what the rounding of a program amounts to


@dataclass
class Record:
    """Records what a run left on one rank; names are those of the plain module."""

    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    sums: list[list[float]] = field(default_factory=list)  # of all outputs, likewise
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # [step]
    params: dict[str, Tensor] = field(default_factory=dict)


def make_inputs(program: Program, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x``, row order within each microbatch, mask, target: of a whole batch."""
    generator = torch.Generator().manual_seed(program.seed * 100 + step)
    rows = program.rows[step]
    count = rows * program.microbatches
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    order = [torch.randperm(rows, generator=generator) for _ in range(program.microbatches)]
    mask = torch.rand(count, WIDTH, generator=generator) < 0.4
    target = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.cat(order), mask, target


def losses_of(program: Program, output: Any, target: Tensor) -> tuple[list[Tensor], Tensor]:
    """Computes a loss term for each weighted output that needs gradients, and the outputs' sum."""
    terms: list[Tensor] = []
    total = torch.zeros((), dtype=torch.float64)
    for leaf, weight in zip(flatten(output), program.weights, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        total = total + leaf.detach().double().sum()
        if leaf.dtype == torch.float64 and leaf.requires_grad and weight:
            factors = target if leaf.shape == target.shape else 1.0
            terms.append(weight * (leaf * factors).sum() / len(target))
    return terms, total


def grads_of(named: Any) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in named}


# ---- one process -----------------------------------------------------------


def run_plain(program: Program, nudge: float = 0.0) -> Record:
    """Runs a program in plain autograd, one microbatch after the other.

    Args:
        nudge: relative change of the inputs.

    Raises:
        RuntimeError: autograd does not accept the program.
    """
    model, _ = build(program)
    optimizer = make_optimizer(model.parameters())
    record = Record()
    for step in range(len(program.rows)):
        pieces = [tensor.chunk(program.microbatches) for tensor in make_inputs(program, step)]
        losses, sums = [], []
        for x, order, mask, target in zip(*pieces, strict=True):
            output = model(x * (1 + nudge), order, mask)
            terms, total = losses_of(program, output, target)
            loss = torch.stack(terms).sum()
            loss.backward()
            losses.append(loss.item())
            sums.append(total.item())
        record.losses.append(losses)
        record.sums.append(sums)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= program.microbatches
        record.grads.append(grads_of(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


def is_chaotic(program: Program, plain: Record) -> bool:
    """Returns whether rounding alone changes the numbers, as in the sine of a very large number."""
    try:
        compare([run_plain(program, NUDGE)], plain)
    except AssertionError:
        return True
    return False


# ---- several ranks ---------------------------------------------------------


def _init(program: Program) -> None:
    import smp

    config: dict[str, Any] = {
        "pipeline_parallel_degree": program.pp,
        "microbatches": program.microbatches,
        "pipeline": program.schedule,
        "static_mode": program.static,
        "auto_partition": False,
        "default_partition": 0,
    }
    if program.active:
        config["active_microbatches"] = program.active
    smp.init(config)


class Bundle(nn.Module):
    """Several programs as one model; a step runs one of them."""

    def __init__(self, roots: list[nn.Module]) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)

    def forward(self, index: int, *inputs: Tensor) -> Any:
        return self.roots[index](*inputs)


def _make_root(program: Program) -> nn.Module:
    import smp

    def place(index: int) -> contextlib.AbstractContextManager[Any]:
        return smp.partition(index)

    if program.contexts:
        return build(program, place)[0]
    root, modules = build(program)
    # Parents first: the call covers everything below.
    for module, owner in reversed(list(zip(modules, program.owners, strict=True))):
        smp.set_partition(module, owner)
    return root


def run_distributed(rank: int, texts: list[str], delay_seed: int | None = None) -> list[Record]:
    """Runs the programs one after the other in one model, on each rank of the pool.

    The first program's settings (pipeline size, schedule, ...) apply to all of them.
    """
    import smp
    import smp_testing

    programs = [Program.from_text(text) for text in texts]
    if delay_seed is not None:
        Interpreter.delays = Delays(delay_seed, rank, MAX_DELAY_US)
        smp_testing.set_delays(delay_seed, MAX_TRANSPORT_DELAY_US)
    torch.manual_seed(77)
    try:
        _init(programs[0])
        return _train(programs, smp.DistributedModel(Bundle([_make_root(p) for p in programs])))
    finally:
        Interpreter.delays = no_delays
        smp_testing.set_delays(0, 0)
        smp.shutdown()


def _train(programs: list[Program], model: Any) -> list[Record]:
    import smp

    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def train(
        index: int, x: Tensor, order: Tensor, mask: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        terms, total = losses_of(programs[index], model(index, x, order, mask), target)
        loss = torch.stack(terms).sum()
        if programs[index].lists:
            model.backward(terms, [torch.ones_like(term) for term in terms])
        else:
            model.backward(loss)
        return loss, total

    records = []
    for index, program in enumerate(programs):
        record = Record()
        for step in range(len(program.rows)):
            loss, total = train(index, *make_inputs(program, step))
            record.losses.append([value.item() for value in loss.outputs])
            record.sums.append([value.item() for value in total.outputs])
            record.grads.append(grads_of(_part(model, index)))
            optimizer.step()
            optimizer.zero_grad()
        record.params = {n: p.detach().clone() for n, p in _part(model, index)}
        records.append(record)
    return records


def _part(model: Any, index: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Local parameters of one program, named as in its root; those of others have no gradient."""
    for name, parameter in model.local_named_parameters():
        _, _, rest = name.removeprefix("module.").partition(f"roots.{index}.")
        if rest:
            yield rest, parameter
        else:
            assert parameter.grad is None, f"{name} is of another program"


# ---- comparison ------------------------------------------------------------


def join(records: list[Record]) -> Record:
    """The parts of all ranks as one record; losses have to agree.

    Not bit by bit: a sum runs along the memory, and a transposed output arrives contiguous.
    """
    first = records[0]
    joined = Record(first.losses, first.sums, [{} for _ in first.grads])
    for record in records:
        _assert_near(record, first, "another rank")
        for whole, part in zip([*joined.grads, joined.params], [*record.grads, record.params],
                               strict=True):  # fmt: skip
            assert not set(whole) & set(part), f"two ranks hold {sorted(set(whole) & set(part))}"
            whole.update(part)
    return joined


def _assert_near(record: Record, other: Record, whose: str) -> None:
    for what in ("losses", "sums"):
        for step, expected in enumerate(getattr(other, what)):
            got = getattr(record, what)[step]
            difference = relative_difference(
                torch.tensor(got, dtype=torch.float64),
                torch.tensor(expected, dtype=torch.float64),
                1e-3,
            )
            assert difference <= TOLERANCE[torch.float64], (
                f"{what} of step {step}: {got}, but {whose} has {expected}"
            )


def compare(records: list[Record], plain: Record) -> None:
    """Losses, outputs, gradients by name and updated parameters equal those of one process."""
    joined = join(records)
    fp64 = torch.float64
    _assert_near(joined, plain, "one process")
    for step, grads in enumerate(plain.grads):
        assert_close(joined.grads[step], grads, fp64, f"gradients of step {step}")
    assert_close(joined.params, plain.params, fp64, "parameters after the last step")


def assert_identical(a: list[Record], b: list[Record]) -> None:
    """Two runs left the same bits."""
    first, second = join(a), join(b)
    assert first.losses == second.losses and first.sums == second.sums, "losses differ"
    for ours, theirs in zip([*first.grads, first.params], [*second.grads, second.params],
                            strict=True):  # fmt: skip
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            other = theirs[name]
            same = (value is None) == (other is None)
            if same and value is not None:
                assert other is not None
                same = torch.equal(value, other)
            assert same, f"{name} is not bitwise equal"
