"""States of split models: whole, partial, on another degree; and the optimizer's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.split_training import SplitRun, init_split
from tests.dist.steps import make_optimizer
from tests.harness import labelled_loss, train_step_of
from tests.reference.split_families import build_split_family, make_split_batch

CASE = "gpt2"


def make(run: SplitRun, seed: int = 1) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a function that trains one step on a batch of all ranks."""
    import smp

    with smp.tensor_parallelism():
        plain = build_split_family(CASE, run.dtype, seed)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    train_step = train_step_of(model, labelled_loss)

    def train(step: int) -> None:
        train_step(make_split_batch(CASE, 0, step))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train


def names_of(model: Any) -> list[str]:
    return [name for name, _ in model.get_module().named_parameters()]


def train_and_save(rank: int, run: SplitRun, folder: str) -> dict[str, Any]:
    """Two steps, everything saved; then a third one."""
    import smp

    init_split(run)
    model, optimizer, train = make(run)
    train(0)
    train(1)
    whole = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    local = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(local, f"{folder}/part.pt", partial=True)
    assert Path(f"{folder}/part.pt_{smp.pp_rank()}_{smp.tp_rank()}").is_file() or smp.tp_size() == 1
    smp.save(local, f"{folder}/whole.pt", partial=False)
    train(2)
    return {"whole": whole, "third": model.state_dict(), "names": names_of(model)}


def resume(rank: int, run: SplitRun, folder: str, partial: bool) -> dict[str, Any]:
    """Continues from a file, with a model that had other weights."""
    import smp

    init_split(run)
    model, optimizer, train = make(run, seed=5)
    name = "part.pt" if partial else "whole.pt"
    saved = smp.load(f"{folder}/{name}", partial=partial)
    # The rank's part of a pipeline is not known yet.
    model.load_state_dict(saved["model"], same_partition_load=partial and run.pp == 1)
    optimizer.load_state_dict(saved["optimizer"])
    train(2)
    return dict(model.state_dict())


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.fixture(scope="module")
def one_rank(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training without a split: degree 1 has all of every parameter."""
    folder = str(tmp_path_factory.mktemp("one"))
    [result] = pool.run(1, train_and_save, SplitRun(CASE, 1, 1, 1), folder)
    return {**result, "folder": folder}


LAYOUTS = ((1, 2, 1), (1, 3, 1), (2, 2, 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_states_are_those_of_one_rank(
    pool: Pool, tmp_path: Path, one_rank: dict[str, Any], layout: tuple[int, int, int]
) -> None:
    run = SplitRun(CASE, *layout, prescaled=True)
    results = pool.run(run.world_size, train_and_save, run, str(tmp_path))
    expected = one_rank["whole"]
    for result in results:
        state = result["whole"]
        assert difference(state["model"], expected["model"]) < 1e-12
        entries = state["optimizer"]["state"]
        assert list(entries) == list(expected["optimizer"]["state"])
        for index, entry in expected["optimizer"]["state"].items():
            for key, value in entry.items():
                torch.testing.assert_close(entries[index][key], value, rtol=0, atol=1e-12)
    for partial in (True, False):
        for state in pool.run(run.world_size, resume, run, str(tmp_path), partial):
            assert difference(state, results[0]["third"]) == 0.0, "resumed differs"


def resume_raw(rank: int, run: SplitRun, folder: str, same: bool) -> dict[str, Any]:
    """Continues from this rank's file as torch reads it, with the marks that are in it."""
    import smp

    init_split(run)
    model, optimizer, train = make(run, seed=5)
    path = f"{folder}/part.pt_{smp.pp_rank()}_{smp.tp_rank()}"
    saved = torch.load(path, weights_only=True)
    assert "_smp_layout" in saved["model"] and "_smp_layout" in saved["optimizer"]
    result = model.load_state_dict(saved["model"], same_partition_load=same)
    assert result.missing_keys == result.unexpected_keys == []
    optimizer.load_state_dict(saved["optimizer"])
    train(2)
    return dict(model.state_dict())


@pytest.mark.parametrize(("pp", "same"), [(1, False), (1, True), (2, False)])
def test_files_that_the_script_reads_itself_are_loaded(
    pool: Pool, tmp_path: Path, pp: int, same: bool
) -> None:
    run = SplitRun(CASE, pp, 2, 1, prescaled=True)
    results = pool.run(run.world_size, train_and_save, run, str(tmp_path))
    for state in pool.run(run.world_size, resume_raw, run, str(tmp_path), same):
        assert difference(state, results[0]["third"]) == 0.0, "resumed differs"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_whole_file_goes_into_another_degree(
    pool: Pool, tmp_path: Path, one_rank: dict[str, Any], layout: tuple[int, int, int]
) -> None:
    run = SplitRun(CASE, *layout, prescaled=True)
    for state in pool.run(run.world_size, resume, run, one_rank["folder"], False):
        assert difference(state, one_rank["third"]) < 1e-12
    pool.run(run.world_size, train_and_save, run, str(tmp_path))
    [back] = pool.run(1, resume, SplitRun(CASE, 1, 1, 1), str(tmp_path), False)
    assert difference(back, one_rank["third"]) < 1e-12


def merge_too_few(rank: int, run: SplitRun) -> str:
    from smp.tensor_parallel import partial

    init_split(run)
    model, _, _ = make(run)
    try:
        partial.merge([model.local_state_dict()])
    except ValueError as error:
        return str(error)
    return ""


def test_a_missing_slice_is_named(pool: Pool) -> None:
    for text in pool.run(2, merge_too_few, SplitRun(CASE, 1, 2, 1)):
        assert "is split along dim" in text and "all tensor-parallel ranks" in text


def load_without_slices(rank: int, run: SplitRun) -> bool:
    """A partial optimizer state that does not speak of slices has whole entries."""
    from smp.tensor_parallel.partial import PARTIAL_MARK

    init_split(run)
    _, optimizer, train = make(run)
    train(0)
    whole = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict({**whole, PARTIAL_MARK: True})
    again = optimizer.state_dict()["state"]
    return all(
        torch.equal(entry["exp_avg"], again[index]["exp_avg"])
        and optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        for (index, entry), parameter in zip(
            whole["state"].items(), optimizer.param_groups[0]["params"], strict=True
        )
    )


def test_entries_without_a_word_of_slices_are_cut(pool: Pool) -> None:
    assert pool.run(2, load_without_slices, SplitRun(CASE, 1, 2, 1)) == [True, True]


def move_to_cpu(rank: int, layout: tuple[int, int]) -> None:
    import smp

    run = SplitRun(CASE, *layout, 1)
    init_split(run)
    model, _, train = make(run)
    train(0)
    with pytest.raises(RuntimeError, match=r"\w+ is split over 2 tensor-parallel ranks"):
        model.cpu()
    train(1)  # nothing has changed
    smp.shutdown()
    init_split(run)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    plain = torch.nn.Sequential(*layers)
    model = smp.DistributedModel(plain)
    x = torch.ones(2, 4)
    with torch.no_grad():
        output = smp.step(lambda x: model(x))(x.repeat(run.microbatches, 1))
    num_local = sum(1 for _ in model.local_parameters())
    assert num_local == 8 // layout[0]
    model.cpu()
    assert all(parameter.isfinite().all() for parameter in plain.parameters())
    assert torch.allclose(plain(x), output.outputs[0])


@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_cpu_gathers_what_is_not_split(pool: Pool, layout: tuple[int, int]) -> None:
    """Layouts of several tensor-parallel ranks, for models that have modules for them or not."""
    pool.run(layout[0] * layout[1], move_to_cpu, layout)
