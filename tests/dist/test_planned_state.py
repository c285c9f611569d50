"""States of models that are split by a plan: whole, partial, sharded, on another degree."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.split_training import SplitRun, build_marked
from tests.dist.steps import make_optimizer
from tests.harness import labelled_loss, train_step_of
from tests.reference.former_names import make_former
from tests.reference.split_families import make_split_batch

CASES = ("qwen3_tied", "mixtral")


def make(run: SplitRun, seed: int, **config: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a function that trains one step on a batch of all ranks."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp, "tensor_parallel_degree": run.tp,
            "prescaled_batch": True, "microbatches": 2, "ddp": True, **config,
        }
    )  # fmt: skip
    model = smp.DistributedModel(build_marked(run, seed))
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    train_step = train_step_of(model, labelled_loss)

    def train(step: int) -> None:
        train_step(make_split_batch(run.case, 0, step))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train


def train_and_save(rank: int, run: SplitRun, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Two steps, everything saved; then a third one."""
    import smp

    model, optimizer, train = make(run, 1, **config)
    train(0)
    train(1)
    whole = copy.deepcopy(dict(model.state_dict()))
    smp.save_checkpoint(folder, tag="two", partial=True, model=model, optimizer=optimizer)
    train(2)
    split = [n for n, p in model.local_named_parameters() if model.is_distributed_parameter(p)]
    return {"whole": whole, "third": dict(model.state_dict()), "split": split}


def resume(rank: int, run: SplitRun, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Continues with a model that had other weights."""
    import smp

    model, optimizer, train = make(run, 5, **config)
    smp.resume_from_checkpoint(folder, tag="two", partial=True)
    train(2)
    return dict(model.state_dict())


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


@pytest.fixture(scope="module", params=CASES)
def one_rank(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("one"))
    result: dict[str, Any]
    [result] = pool.run(1, train_and_save, SplitRun(request.param, 1, 1, 1), folder, {})
    return {**result, "case": request.param}


SHARDED = {"shard_optimizer_state": True}


@pytest.mark.parametrize(
    ("layout", "config", "onto"),
    [
        ((1, 2, 1), {}, (1, 4, 1)),
        ((1, 4, 1), {}, (1, 1, 1)),
        ((2, 2, 1), {}, (1, 2, 1)),
        ((1, 2, 2), SHARDED, (1, 2, 1)),
    ],
    ids=str,
)
def test_state_of_a_planned_model_is_that_of_one_rank(
    pool: Pool,
    tmp_path: Path,
    one_rank: dict[str, Any],
    layout: tuple[int, int, int],
    config: dict[str, Any],
    onto: tuple[int, int, int],
) -> None:
    case = one_rank["case"]
    run, other = SplitRun(case, *layout), SplitRun(case, *onto)
    results = pool.run(run.world_size, train_and_save, run, str(tmp_path), config)
    for result in results:
        assert any(name.endswith(("down_proj.weight", "gate_up_proj")) for name in result["split"])
        assert difference(result["whole"], one_rank["whole"]) < 1e-12
        assert difference(result["third"], one_rank["third"]) < 1e-12
    for state in pool.run(run.world_size, resume, run, str(tmp_path), config):
        assert difference(state, results[0]["third"]) == 0.0, "resumed differs"
    for state in pool.run(other.world_size, resume, other, str(tmp_path), {}):
        assert difference(state, one_rank["third"]) < 1e-12, f"on {onto}"


def test_checkpoints_from_before_families_had_plans_resume(pool: Pool, tmp_path: Path) -> None:
    """Checks checkpoints with tensor names of a distributed form that exists no more."""
    run = SplitRun("llama", 2, 2, 1)
    results = pool.run(4, train_and_save, run, str(tmp_path), {})
    make_former(tmp_path / "two_partial", "llama", "LlamaForCausalLM")
    for state in pool.run(4, resume, run, str(tmp_path), {}):
        assert difference(state, results[0]["third"]) == 0.0


def make_late(rank: int, run: SplitRun) -> tuple[dict[str, Any], list[str]]:
    """Values of a model whose parameters are made when it is partitioned."""
    import smp
    from tests.reference.split_families import make_split_family

    smp.init(
        {
            "pipeline_parallel_degree": run.pp, "tensor_parallel_degree": run.tp, "ddp": True,
            "delayed_parameter_initialization": True,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=True):
        plain = make_split_family(run.case, torch.float32)
    assert all(p.is_meta for p in plain.parameters())
    model = smp.DistributedModel(plain)

    @smp.step
    def look(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        return loss

    look(make_split_batch(run.case, 0, 0))
    split = [n for n, p in model.local_named_parameters() if model.is_distributed_parameter(p)]
    return dict(model.state_dict()), split


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_delayed_parameters_of_a_planned_model_do_not_depend_on_the_layout(
    pool: Pool, layout: tuple[int, int, int], case: str
) -> None:
    [(expected, _)] = pool.run(1, make_late, SplitRun(case, 1, 1, 1))
    assert max(float(value.abs().max()) for value in expected.values()) > 0.01
    run = SplitRun(case, *layout)
    for state, split in pool.run(run.world_size, make_late, run):
        assert split
        assert difference(state, expected) == 0.0
