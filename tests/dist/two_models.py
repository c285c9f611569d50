"""Programs that train several models, run in one process and on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.training import join_parts, local_parameters
from tests.patience import PATIENCE_S
from tests.reference.single_process import make_optimizer
from tests.reference.tolerances import assert_close, largest, relative_difference

WIDTH = 6
MICROBATCHES = 4
STEPS = 3

Backward = Callable[[int, Tensor], None]  # number of the model whose method it is, loss


class Residual(nn.Module):
    """A block with a loop over its layers, so that it may be cut."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h)) * self.scale
        return self.norm(x + h)  # type: ignore[no-any-return]


def make_models(num: int = 2, seed: int = 5) -> list[nn.Module]:
    torch.manual_seed(seed)
    kinds = [
        nn.Sequential(*(Residual(0.5 + i) for i in range(4))),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Residual(1.0) for _ in range(3))),
        nn.Sequential(*(Residual(2.0) for _ in range(3)), nn.Linear(WIDTH, WIDTH)),
    ]
    return [kind.double() for kind in kinds[:num]]


def make_batch(step: int, replica: int, rows: int = 2 * MICROBATCHES) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


# ---- the programs: bodies of step functions -------------------------------------------


def chain(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """The output of one is the input of the other, one backward through both."""
    loss: Tensor = (models[1](models[0](x)) - x).square().mean()
    backward(1, loss)
    return loss


def chain_back(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """The same with the first model's backward, and the second one first."""
    loss: Tensor = (models[0](models[1](x)) * x).mean()
    backward(0, loss)
    return loss


def alternate(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """Calls two models twice each, in turn, with skip connections between the calls."""
    h = models[0](x)
    y = models[1](h)
    z = models[0](h + torch.sin(y))
    loss: Tensor = (models[1](z) + y).square().mean()
    backward(0, loss)
    return loss


def adversaries(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """Generator and discriminator, both losses in one step function."""
    generator, discriminator = models
    made = generator(x)
    judge = nn.functional.softplus(-discriminator(x)).mean()
    judge = judge + nn.functional.softplus(discriminator(made.detach())).mean()
    backward(1, judge)
    fool: Tensor = nn.functional.softplus(-discriminator(made)).mean()
    backward(0, fool)
    return judge.detach() + fool.detach()


def judge_alone(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """The discriminator's step; the generator runs without gradients."""
    with torch.no_grad():
        made = models[0](x)
    loss: Tensor = models[1](x).square().mean() - 0.5 * models[1](made).square().mean()
    backward(1, loss)
    return loss


def fool_alone(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """The generator's step, through the discriminator."""
    loss: Tensor = models[1](models[0](x)).square().mean()
    backward(0, loss)
    return loss


def distil(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """A teacher under no_grad, whose outputs are the student's targets."""
    with torch.no_grad():
        target = models[0](x)
    loss = nn.functional.mse_loss(models[1](x), target)
    backward(1, loss)
    return loss


def three(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """Two critics look at one actor, with a backward each."""
    act = models[0](x)
    first: Tensor = models[1](act).square().mean()
    second: Tensor = models[2](act.detach()).mean()
    backward(2, second)
    backward(0, first)
    return first.detach() + second.detach()


def second_alone(models: Sequence[nn.Module], backward: Backward, x: Tensor) -> Tensor:
    """Calls the second model and leaves the first one unused."""
    loss: Tensor = models[1](x).square().mean()
    backward(1, loss)
    return loss


@dataclass(frozen=True)
class Program:
    """Step functions that take turns, and the models whose optimizers step after each."""

    bodies: tuple[tuple[Callable[..., Tensor], tuple[int, ...]], ...]
    num_models: int = 2
    frozen: tuple[int, ...] = ()  # models whose parameters want no gradient


PROGRAMS = {
    "chain": Program(((chain, (0, 1)),)),
    "chain_back": Program(((chain_back, (0, 1)),)),
    "alternate": Program(((alternate, (0, 1)),)),
    "adversaries": Program(((adversaries, (0, 1)),)),
    "adversaries_in_turn": Program(((judge_alone, (1,)), (fool_alone, (0,)))),
    "distil": Program(((distil, (1,)),)),
    "distil_from_frozen": Program(((distil, (1,)),), frozen=(0,)),
    "three": Program(((three, (0, 1, 2)),), num_models=3),
    "first_use_later": Program(((second_alone, (1,)), (chain, (0, 1)))),
    "first_use_behind_a_partitioned_one": Program(((second_alone, (1,)), (chain_back, (0, 1)))),
}


@dataclass(frozen=True)
class Run:
    """A run of a program, with the fields that `tests.dist.training.join_parts` reads."""

    case: str
    pp: int
    dp: int
    schedule: str = "interleaved"
    config: tuple[tuple[str, Any], ...] = ()
    rows: tuple[int, ...] = ()  # of each replica's batches; empty: all alike

    def __str__(self) -> str:
        return f"{self.case} pp{self.pp} dp{self.dp} {self.schedule} {dict(self.config)}"

    def batch(self, step: int, replica: int) -> Tensor:
        return make_batch(step, replica, *self.rows[replica : replica + 1])


@dataclass
class Record:
    """Records what a rank, or the only process, saw; parameters are ``<model>:<name>``."""

    pp_rank: int = 0
    dp_rank: int = 0
    cp_rank: int = 0
    losses: list[list[float]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    owned: list[int] = field(default_factory=list)  # parameters here, per model


def numbered(parts: Sequence[dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {f"{i}:{name}": p for i, part in enumerate(parts) for name, p in part.items()}


def grads_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in parameters.items()}


def freeze(models: Sequence[nn.Module], frozen: Sequence[int]) -> None:
    for idx in frozen:
        models[idx].requires_grad_(False)


def optimizers_of(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [make_optimizer(model.parameters()) for model in models]


def step_optimizers(optimizers: Sequence[torch.optim.Optimizer], which: Sequence[int]) -> None:
    for idx in which:
        optimizers[idx].step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def train_plain(run: Run) -> tuple[Record, list[list[list[float]]]]:
    """Trains in one process; gradients are means over the samples of all replicas.

    Returns:
        the record, and losses by step, replica and microbatch.
    """
    program = PROGRAMS[run.case]
    models = make_models(program.num_models)
    freeze(models, program.frozen)
    optimizers = optimizers_of(models)
    record = Record()
    losses: list[list[list[float]]] = []
    parameters = numbered([dict(model.named_parameters()) for model in models])
    for step in range(STEPS):
        for body, which in program.bodies:
            losses.append([])
            batches = [run.batch(step, replica) for replica in range(run.dp)]
            for x in batches:
                pieces = x.tensor_split(min(MICROBATCHES, len(x)))
                losses[-1].append([])
                for piece in pieces:
                    weight = len(piece) / sum(map(len, batches))
                    loss = body(models, lambda _, t, w=weight: (t * w).backward(), piece)
                    losses[-1][-1].append(loss.item())
            record.grads.append(grads_of(parameters))
            step_optimizers(optimizers, which)
    record.params = {name: p.detach().clone() for name, p in parameters.items()}
    return record, losses


def train(rank: int, run: Run) -> Record:
    """The same with smp; leaves it initialised."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp,
            "microbatches": MICROBATCHES,
            "pipeline": run.schedule,
            "ddp": run.dp > 1,
        }
        | dict(run.config)
    )
    program = PROGRAMS[run.case]
    plain = make_models(program.num_models, seed=5 + smp.dp_rank())
    freeze(plain, program.frozen)
    models = [smp.DistributedModel(model) for model in plain]
    optimizers: list[Any] = [smp.DistributedOptimizer(o) for o in optimizers_of(models)]

    def make_step(body: Callable[..., Tensor]) -> Any:
        @smp.step
        def step(x: Tensor) -> Tensor:
            return body(models, lambda idx, loss: models[idx].backward(loss), x)

        return step

    steps = [(make_step(body), which) for body, which in program.bodies]
    record = Record(smp.pp_rank(), smp.dp_rank())
    for step_idx in range(STEPS):
        for step, which in steps:
            output = step(run.batch(step_idx, smp.dp_rank()))
            record.losses.append([loss.item() for loss in output.outputs])
            record.grads.append(grads_of(local_of(models)))
            step_optimizers(optimizers, which)
    record.params = {name: p.detach().clone() for name, p in local_of(models).items()}
    record.owned = [len(local_parameters(model)) for model in models]
    assert smp.metrics.server_stats()["records"] == 0
    return record


def local_of(models: Sequence[Any]) -> dict[str, nn.Parameter]:
    """A model that is not partitioned yet has no part here."""
    return numbered([local_parameters(m) if m.partitioned else {} for m in models])


def train_all(rank: int, runs: list[Run]) -> list[Record]:
    import smp

    records = []
    for run in runs:
        try:
            records.append(train(rank, run))
        except Exception as error:
            error.add_note(f"while running {run}")
            raise
        smp.shutdown()
    return records


def check(records: list[Record], run: Run) -> None:
    """Losses, all gradients and parameters equal those of one process."""
    reference, losses = train_plain(run)
    used_all = PROGRAMS[run.case].bodies[0][0] is not second_alone
    for record in records:
        assert all(record.owned), f"{run}: {record.pp_rank} holds {record.owned} parameters"
        for got, expected in zip(record.losses, losses, strict=True):
            difference = relative_difference(
                torch.tensor(got), torch.tensor(expected[record.dp_rank])
            )
            assert difference <= 1e-10, f"{run}: losses {got} instead of {expected}"
    for idx, expected_grads in enumerate(reference.grads):
        grads = join_parts(records, run, str(idx))  # type: ignore[arg-type]
        if idx == 0 and not used_all:
            expected_grads = {n: g for n, g in expected_grads.items() if n in grads}
        assert largest(grads) > 1e-3, f"{run}: gradients are zero, the test shows nothing"
        assert_close(grads, expected_grads, torch.float64, f"{run}: gradients of call {idx}")
    params = join_parts(records, run, "params")  # type: ignore[arg-type]
    assert_close(params, reference.params, torch.float64, f"{run}: parameters")


def check_runs(pool: Any, runs: list[Run], timeout: float = PATIENCE_S) -> None:
    results = pool.run(runs[0].pp * runs[0].dp, train_all, runs, timeout=timeout)
    for index, run in enumerate(runs):
        check([records[index] for records in results], run)
