"""Explaining a running partition, keeping it as a file, and using the file again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool
from tests.dist.training import Run, check_runs, init, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch

CHAIN = Run("chain", 2, 1)


def partitioned(run: Run) -> nn.Module:
    """A model after its first step."""
    import smp

    init(run)
    model = make_model(run)
    train = train_step_of(model, lambda model, batch: compute_loss(run.case, model, batch))
    train(make_batch(run.case, run.dtype, smp.dp_rank(), 0))
    return model


def explanations(rank: int, run: Run) -> tuple[Any, str, str]:
    import smp

    _model = partitioned(run)  # explained as long as it lives
    whole = smp.explain_partition()
    one = str(smp.explain_partition("layers.0.linear"))
    with pytest.raises(ValueError) as refusal:
        smp.explain_partition("layers.9")
    return whole, one, str(refusal.value)


@pytest.mark.parametrize("skip_tracing", [False, True])
def test_all_ranks_get_the_explanation_of_the_one_that_traced(
    pool: Pool, skip_tracing: bool
) -> None:
    run = Run("chain", 2, 1, config=(("skip_tracing", skip_tracing),))
    (whole, one, error), (other, other_one, other_error) = pool.run(2, explanations, run)
    assert whole == other and one == other_one
    assert whole.traced is not skip_tracing
    assert [rank.param_bytes > 0 for rank in whole.ranks] == [True, True]
    assert (whole.crossing_bytes > 0) is not skip_tracing
    assert "'layers.0.linear' is on pp_rank " in one and ": largest load " in one
    for text in (error, other_error):
        assert "explain_partition: the model has no module 'layers.9'" in text


PLACED = [
    # In order, out of order, a whole list, a module and one below it.
    Run("chain", 2, 1, placed=(("layers.1", 1),)),
    Run("chain", 2, 1, placed=(("layers.0", 1), ("head", 0))),
    Run("chain", 2, 1, placed=(("layers", 0),)),
    Run("chain", 2, 1, placed=(("layers", 1), ("layers.3", 0))),
    Run("reuse", 2, 1, placed=(("other", 1), ("shared", 0))),
    Run("nested", 2, 1, placed=(("doll.inner", 1), ("doll.inner.inner", 0))),
]


def test_modules_that_are_set_are_there_and_train_as_in_one_process(pool: Pool) -> None:
    check_runs(pool, PLACED)


def why(rank: int, run: Run) -> list[tuple[int, str]]:
    import smp

    _model = partitioned(run)
    names = ("layers.1", "layers.1.linear", "head")
    modules = [smp.explain_partition(name).module for name in names]
    return [(module.pp_rank, module.reason) for module in modules if module is not None]


def test_the_report_says_which_modules_were_set(pool: Pool) -> None:
    for run in (
        PLACED[0],
        Run("chain", 2, 1, config=(("skip_tracing", True),), placed=PLACED[0].placed),
    ):
        first, second = pool.run(2, why, run)
        assert first == second
        assert first[0] == first[1] == (1, "set_partition puts it here")
        assert "order of execution" in first[2][1]


def set_apart(rank: int) -> str:

    run = Run("reuse", 2, 1, placed=(("other", 0), ("tied", 1)))
    init(run)
    model = make_model(run)
    train = train_step_of(model, lambda model, batch: compute_loss(run.case, model, batch))
    with pytest.raises(ValueError) as refusal:
        train(make_batch(run.case, torch.float64, 0, 0))
    return str(refusal.value)


def test_shared_parameters_that_are_set_apart_are_refused_by_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, set_apart)
    assert "'other' (set to 0) and 'tied' (set to 1) share the parameter" in first
    assert first.partition("] ")[2] == second.partition("] ")[2]


def shares(rank: int, run: Run) -> tuple[float | None, list[float], str]:
    import smp

    model = partitioned(run)
    whole = smp.explain_partition()
    return whole.step_ratio, [r.compute_share for r in whole.ranks], model._decision.text  # type: ignore[union-attr, return-value]


def test_time_counts_where_nobody_has_weighed_it_against_memory(pool: Pool) -> None:
    first, second = pool.run(2, shares, CHAIN)
    assert first == second
    assert first[0] is not None and first[0] >= 1
    for key, value in (("memory_weight", 0.8), ("optimize", "memory"), ("optimize", "speed")):
        given = Run("chain", 2, 1, config=((key, value),))
        assert pool.run(2, shares, given)[0][0] is None, key
    assert first[1][0] >= 0.5, "the rank in front waits less"
    check_runs(pool, [CHAIN, Run("chain", 2, 1, schedule="zero_bubble")])


def given_by_one(rank: int, giver: int, skip_tracing: bool) -> float | None:
    import smp

    # The value is the default, so that the ranks have equal configurations.
    keys: tuple[tuple[str, Any], ...] = (("skip_tracing", skip_tracing),)
    given = keys + ((("memory_weight", 0.8),) if rank == giver else ())
    _model = partitioned(Run("chain", 2, 1, config=given))
    return smp.explain_partition().step_ratio


def test_the_first_rank_says_whether_time_is_weighed_against_memory(pool: Pool) -> None:
    for skip_tracing in (False, True):
        assert pool.run(2, given_by_one, 0, skip_tracing) == [None, None]
    first, second = pool.run(2, given_by_one, 1, False)
    assert first == second and first is not None
    assert pool.run(2, given_by_one, 1, True) == [None, None], "without costs there is no time"


def before_the_partition(rank: int) -> list[str]:
    import smp

    init(CHAIN)
    texts = []
    for call in (smp.explain_partition, lambda: smp.save_partition("nowhere")):
        with pytest.raises(RuntimeError) as refusal:
            call()
        texts.append(str(refusal.value))
    return texts


def test_before_the_partition_there_is_nothing_to_explain_or_to_save(pool: Pool) -> None:
    for texts in pool.run(2, before_the_partition):
        assert "smp.explain_partition: no model is partitioned yet" in texts[0]
        assert "smp.save_partition: no model is partitioned yet" in texts[1]


def save(rank: int, run: Run, path: str) -> tuple[str, str]:
    import smp

    model = partitioned(run)
    smp.save_partition(path)
    with pytest.raises(OSError) as refusal:
        smp.save_partition(f"{path}/not/a/folder")
    return str(model._decision.text), str(refusal.value)  # type: ignore[union-attr, operator]


def test_a_saved_partition_is_used_again_even_if_edited(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "partition"
    texts = pool.run(2, save, CHAIN, str(path))
    assert texts[0][0] == texts[1][0]
    assert all("smp.save_partition: " in text for _, text in texts)
    again = Run("chain", 2, 1, config=(("partition_file", str(path)),))
    check_runs(pool, [again])
    edited = ["smp partition v1", "partitions 2", "layers 1", "layers.0 0", "head 1"]
    path.write_text("\n".join(edited))
    (text, _), _ = pool.run(2, save, again, str(tmp_path / "copy"))
    assert text.endswith("layers.[1-3], head"), "one layer is on the first rank, the rest is not"
    check_runs(pool, [Run("chain", 2, 1, config=(("partition_file", str(tmp_path / "copy")),))])


def refused(rank: int, key: str, value: Any) -> str:

    init(Run("chain", 2, 1, config=((key, value),)))
    model = make_model(CHAIN)
    train = train_step_of(model, lambda model, batch: compute_loss("chain", model, batch))
    with pytest.raises(ValueError) as refusal:
        train(make_batch("chain", torch.float64, 0, 0))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("smp partition v1\npartitions 3\n", "it is for 3 partitions, this run has 2"),
        ("smp partition v1\npartitions 2\nlayer.0 0\n", "did you mean 'layers.0'"),
        ("smp partition v1\npartitions 2\nlayers 1\n", "no line is about module 'head'"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_all_ranks_alike(
    pool: Pool, content: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "partition"
    if content is not None:
        path.write_text(content)
    first, second = pool.run(2, refused, "partition_file", str(path))
    assert reason in first and str(path) in first
    assert first.partition("] ")[2] == second.partition("] ")[2]


def test_a_memory_limit_that_no_partition_keeps_is_refused_by_all_ranks(pool: Pool) -> None:
    texts = pool.run(2, refused, "partition_memory_limit", "1kB")
    assert texts[0].partition("] ")[2] == texts[1].partition("] ")[2]
    assert "limit" in texts[0] and "1000" in texts[0]


def test_one_process_explains_as_well() -> None:
    import smp

    smp.init({})
    try:
        _model = smp.DistributedModel(nn.Linear(2, 3))
        explanation = smp.explain_partition()
        assert [rank.param_bytes for rank in explanation.ranks] == [36]
    finally:
        smp.shutdown()
