"""Trains the models of `tests/reference` with sharded parameters, and looks at them on the way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from smp.model import engine_of
from smp.modules.materialize import is_placeholder
from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build

# A configuration that keeps no parameter whole and clips no gradient.
SHARDED: dict[str, Any] = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}


@dataclass(frozen=True)
class Trained:
    """Records what one rank saw in one run."""

    losses: list[list[float]]  # [step][microbatch]
    params: dict[str, Tensor]  # whole, after the last step
    evaluated: Tensor  # before the first step
    change: float  # largest of a parameter over the whole run
    num_sharded: int = 0
    stats: dict[str, int] = field(default_factory=dict)


def sharded(run: Run, degree: int, **config: Any) -> Run:
    """The same run with sharded parameters."""
    keys = {**dict(run.config), "sharded_data_parallel_degree": degree, **SHARDED, **config}
    return replace(run, config=tuple(keys.items()))


def check_is_sharded(model: Any, degree: int) -> int:
    """Every parameter of this rank is in parts, and nothing else of it has memory.

    Returns:
        how many there are.
    """
    parameters = list(model.local_parameters())
    for parameter in parameters:
        part = -(-parameter.numel() // degree)
        assert parameter.ds_shape == parameter.shape
        assert parameter.ds_numel == parameter.numel()
        assert parameter.ds_tensor.ds_numel == parameter.ds_tensor.numel() == part
        assert parameter.untyped_storage().nbytes() <= 16, "the whole of it must be freed"
        assert is_placeholder(parameter)
    store = engine_of(model).storage.store
    assert store.stats.live_elements == 0
    return len(parameters)


def stats_of(model: Any) -> dict[str, int]:
    stats = engine_of(model).storage.store.stats
    return {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}


def make_optimizer(model: nn.Module, dtype: torch.dtype) -> Any:
    import smp

    # Where a gradient is zero but for rounding, a tiny epsilon makes full steps of it.
    eps = 1e-8 if dtype == torch.float64 else 1e-3
    return smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps))


def _wrap(run: Run) -> Any:
    import smp

    # Replicas other than the first receive the first one's values.
    seed = 1 + smp.rdp_rank()
    if smp.tp_size() == 1:
        return make_model(run, seed)
    model = build(run.case, run.dtype, seed=seed)
    smp.set_tensor_parallelism(model, True)
    return smp.DistributedModel(model)


def train(rank: int, run: Run, clip: float | None = None) -> Trained:
    """Trains with or without sharding, as the configuration says.

    Args:
        clip: largest norm of the gradients, if the optimizer does not clip them itself.
    """
    import smp

    init(run)
    degree = dict(run.config).get("sharded_data_parallel_degree", 1)
    model = _wrap(run)
    case = run.case

    @smp.step
    def evaluate_step(batch: dict[str, Tensor]) -> Tensor:
        return compute_loss(case, model, batch)

    train_step = train_step_of(model, lambda model, batch: compute_loss(case, model, batch))
    with torch.no_grad():
        model.eval()
        evaluated = torch.stack(list(evaluate_step(make_batch(case, run.dtype, 0, 99)).outputs))
        model.train()
    optimizer = make_optimizer(model, run.dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses: list[list[float]] = []
    num_sharded = 0
    for step in range(run.steps):
        output = train_step(make_batch(case, run.dtype, smp.dp_rank(), step))
        losses.append([loss.item() for loss in output.outputs])
        if degree > 1:
            num_sharded = check_is_sharded(model, degree)
        elif clip is not None:
            assert smp.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    params = {name: value.clone() for name, value in model.state_dict().items()}
    change = max(float((params[n] - v).abs().max()) for n, v in before.items() if v.numel())
    stats = stats_of(model) if degree > 1 else {}
    return Trained(losses, params, evaluated, change, num_sharded, stats)


def train_all(rank: int, runs: list[Run], clip: float | None = None) -> list[Trained]:
    import smp

    results = []
    for run in runs:
        with _noting(run):
            results.append(train(rank, run, clip))
        smp.shutdown()
    return results


@contextlib.contextmanager
def _noting(run: Run) -> Any:
    try:
        yield
    except Exception as error:
        error.add_note(f"while running {run} {dict(run.config)}")
        raise


def check_equal(got: list[Trained], expected: list[Trained], tolerance: float) -> None:
    """Two runs saw the same on all ranks.

    Args:
        tolerance: largest relative difference of a tensor; 0: bit by bit.
    """
    for mine, other in zip(got, expected, strict=True):
        assert mine.params.keys() == other.params.keys()
        for name, value in mine.params.items():
            _check(value, other.params[name], tolerance, name)
        _check(torch.tensor(mine.losses), torch.tensor(other.losses), tolerance, "losses")
        _check(mine.evaluated, other.evaluated, tolerance, "evaluation")


def _check(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    if tolerance == 0:
        assert torch.equal(got, expected), f"{what} is not bitwise equal"
        return
    scale = expected.double().abs().max().clamp(min=1e-3)
    difference = float((got.double() - expected.double()).abs().max() / scale)
    assert difference <= tolerance, f"{what} differs by {difference:.2e}"


def check_runs(
    pool: Pool,
    run: Run,
    degree: int,
    *,
    tolerance: float,
    clip: float | None = None,
    **config: Any,
) -> list[Trained]:
    """Sharded training equals plain data parallelism.

    Returns:
        what the ranks of the sharded run saw.
    """
    if clip is not None:
        config["sdp_gradient_clipping"] = clip
    runs = [run, sharded(run, degree, **config)]
    results = pool.run(run.world_size, train_all, runs, clip)
    plain, parts = ([ranks[i] for ranks in results] for i in range(2))
    check_equal(parts, plain, tolerance)
    assert all(result.num_sharded > 1 and result.change > 1e-3 for result in parts)
    assert all(result.stats["num_gathers"] > 0 for result in parts)
    return parts
