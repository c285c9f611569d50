"""Modules that the user or the library has compiled, on two pipeline ranks, in small."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.compiled_training import (
    Net,
    NetRun,
    make_net,
    reference_net,
    train_net,
)
from tests.dist.pool import Pool
from tests.reference.tolerances import relative_difference

Wrap = Callable[[Net], Any]


def _model(net: Any, **options: Any) -> Any:
    import smp

    return smp.DistributedModel(net, **options)


def stage(net: Net) -> Any:
    return _model(net, compile="stage")


def compiled_before(net: Net) -> Any:
    return _model(torch.compile(net, backend="aot_eager"))


def compiled_in_place_before(net: Net) -> Any:
    net.compile(backend="aot_eager")
    return _model(net)


def parts_compiled_before(net: Net) -> Any:
    net.blocks[1] = torch.compile(net.blocks[1], backend="aot_eager")
    net.blocks[2].compile(backend="aot_eager", dynamic=False)
    net.last.forward = torch.compile(net.last.forward, backend="aot_eager")  # type: ignore[method-assign]
    return _model(net)


def compiled_after(net: Net) -> Any:
    return torch.compile(_model(net), backend="aot_eager")


def compiled_in_place_after(net: Net) -> Any:
    model = _model(net)
    model.compile(backend="aot_eager")
    return model


def parts_compiled_after(net: Net) -> Any:
    model = _model(net)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return model


BLOCKS = {f"blocks.{i}" for i in range(4)}
FORMS: dict[Wrap, set[str]] = {
    stage: BLOCKS | {"last"},
    compiled_before: BLOCKS | {"last"},
    compiled_in_place_before: BLOCKS | {"last"},
    parts_compiled_before: {"blocks.1", "blocks.2", "last"},
    compiled_after: BLOCKS | {"last"},
    compiled_in_place_after: BLOCKS | {"last"},
    parts_compiled_after: BLOCKS,
}


def run_forms(rank: int) -> list[NetRun]:
    return [train_net(wrap, make_net()) for wrap in FORMS]


def check_equal(results: list[NetRun], losses: list[float], state: dict[str, Any]) -> None:
    assert len(results) == 2
    for result in results:
        assert relative_difference(torch.tensor(result.losses), torch.tensor(losses)) < 1e-10
        assert result.state.keys() == state.keys()
        for name, value in state.items():
            assert relative_difference(result.state[name], value) < 1e-9, name


@pytest.mark.sample(keep=0)
def test_modules_that_are_compiled_before_or_after_wrapping_run_where_they_lie(pool: Pool) -> None:
    """Checks that modules on two ranks are compiled in parts, under their usual parameter names.

    The runs follow each other in one process: contexts of later ones are other threads.
    """
    losses, state = reference_net(make_net())
    by_rank = pool.run(2, run_forms)
    for wrap, (first, second) in zip(FORMS, zip(*by_rank, strict=True), strict=True):
        check_equal([first, second], losses, state)
        assert {*first.units, *second.units} == FORMS[wrap], (wrap, first.units, second.units)
        assert first.num_graphs + second.num_graphs >= 1
        # One graph for the code of a block, another one for inputs without gradients at most.
        assert max(first.num_graphs, second.num_graphs) <= 2
        if wrap is not parts_compiled_before:
            assert first.units and second.units
        assert not [name for name in first.names + second.names if "_orig_mod" in name]


def marked(net: Net) -> Any:
    """Checkpointed blocks with dropout, some of them in eager mode when they are computed first."""
    import smp

    model = stage(net)
    for block in net.blocks:
        smp.set_activation_checkpointing(block)
    return model


def marked_in_eager_mode(net: Net) -> Any:
    import smp

    model = _model(net)
    for block in net.blocks:
        smp.set_activation_checkpointing(block)
    return model


def run_checkpointed(rank: int) -> list[NetRun]:
    results = []
    for autocast in (False, True):
        for wrap in (marked_in_eager_mode, marked):
            net = make_net(dropout=0.4)
            results.append(train_net(wrap, net.float() if autocast else net, autocast=autocast))
    return results


def test_checkpointed_blocks_draw_the_numbers_of_eager_mode(pool: Pool) -> None:
    for plain, compiled, plain_half, compiled_half in pool.run(2, run_checkpointed):
        assert compiled.num_graphs >= 1 and compiled_half.num_graphs >= 1
        check_near(compiled, plain, 1e-10)
        # Under autocast a compiled block may keep intermediate numbers in float32.
        check_near(compiled_half, plain_half, 4e-2)
        assert plain.losses[0] != plain.losses[4]


def check_near(got: NetRun, expected: NetRun, limit: float) -> None:
    assert relative_difference(torch.tensor(got.losses), torch.tensor(expected.losses)) < limit
    for name, value in expected.state.items():
        assert relative_difference(got.state[name], value, floor=1.0) < limit, name


def run_failing(rank: int) -> NetRun:
    net = make_net(decides=True)
    return train_net(stage, net)


def test_rank_0_tells_what_another_rank_cannot_compile(pool: Pool) -> None:
    """The module runs in eager mode, and its part is compiled."""
    losses, state = reference_net(make_net(decides=True))
    first, second = pool.run(2, run_failing)
    check_equal([first, second], losses, state)
    assert "last" not in second.units and "last.inner" in second.units, second.units
    (told,) = [line for line in first.said if "without torch.compile" in line]
    assert "Deciding ('last') runs without torch.compile: torch.compile: UserError" in told
    assert "data-dependent" in told and "compiled_training.py" in told, "it names the line"
    assert not [line for line in second.said if "without torch.compile" in line]


def run_failing_beside(rank: int) -> tuple[NetRun, list[str]]:
    def refuse(graph: Any, example: Any) -> Any:
        raise OSError("no space left")

    def wrap(net: Net) -> Any:
        model = _model(net)
        for block in net.blocks:
            block.compile(backend=refuse if rank == 1 else "aot_eager")
        return model

    logging.getLogger("smp").setLevel(logging.INFO)
    try:
        run = train_net(wrap, make_net(), config={"pipeline_parallel_degree": 1, "ddp": True})
    finally:
        logging.getLogger("smp").setLevel(logging.NOTSET)
    return run, [line for line in run.said if "without torch.compile" in line]


def test_a_replica_tells_what_it_alone_cannot_compile(pool: Pool) -> None:
    losses, state = reference_net(make_net())
    (first, nothing), (second, told) = pool.run(2, run_failing_beside)
    check_equal([first, second], losses, state)
    assert set(first.units) == BLOCKS and not nothing
    assert not BLOCKS & set(second.units)
    (line,) = [line for line in told if "OSError: no space left" in line and "Block" in line]
    assert line.startswith("smp: [global_rank 1 |")


def run_schedules(rank: int) -> list[NetRun]:
    return [
        train_net(stage, make_net(), config={"pipeline": schedule})
        for schedule in ("zero_bubble", "simple", "virtual_interleaved")
    ]


def test_compiled_blocks_follow_every_schedule(pool: Pool) -> None:
    losses, state = reference_net(make_net())
    for runs in zip(*pool.run(2, run_schedules), strict=True):
        check_equal(list(runs), losses, state)
        # With two stages per rank the partition cuts some of these small blocks.
        assert sum(run.num_graphs for run in runs) >= 1


def run_sharded_state(rank: int) -> NetRun:
    config = {"pipeline_parallel_degree": 1, "ddp": True, "shard_optimizer_state": True}
    return train_net(stage, make_net(), config=config)


def test_blocks_whose_parameters_are_gathered_late_are_compiled(pool: Pool) -> None:
    """Checks replicas that both have the data of one process, so sums over them change nothing."""
    losses, state = reference_net(make_net())
    results = pool.run(2, run_sharded_state)
    check_equal(results, losses, state)
    for result in results:
        assert set(result.units) == BLOCKS | {"last"}
        assert result.num_graphs >= 1


def run_partition_file(rank: int, folder: Path) -> str:
    import smp

    path = folder / "partition.json"

    def wrap(net: Net) -> Any:
        model = compiled_before(net)
        model.register_post_partition_hook(lambda model, optimizer: smp.save_partition(str(path)))
        return model

    train_net(wrap, make_net(), steps=1)
    return path.read_text()


def test_a_partition_file_has_the_names_of_the_plain_model(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, run_partition_file, tmp_path):
        assert "blocks.[2-3]" in text and "_orig_mod" not in text
