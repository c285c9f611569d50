"""Errors of saving and resuming on all ranks, and the orders in which objects may be made."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool
from tests.dist.resume_training import Job, make, state_of
from tests.harness import train_step_of


def save_on_one(rank: int, folder: str, elsewhere: str) -> tuple[str, str]:
    import smp

    model, optimizer, train = make(Job(1, 1, 2, "none", "fp32"), seed=1)
    train(0)
    try:
        if rank == 0:
            smp.save_checkpoint(folder, "x", model=model, optimizer=optimizer)
        elif elsewhere == "barrier":
            smp.barrier()
        elif elsewhere == "step":
            train(1)
        elif elsewhere == "resume":
            smp.resume_from_checkpoint(folder, "x")
        elif elsewhere == "allgather":
            smp.allgather(1, smp.WORLD)
            smp.barrier()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("elsewhere", ("barrier", "step", "resume", "allgather", "end"))
def test_saving_on_some_ranks_is_an_error_with_the_snippet(
    pool: Pool, tmp_path: Path, elsewhere: str
) -> None:
    outcomes = pool.outcomes(2, save_on_one, str(tmp_path), elsewhere)
    kind, text = outcomes[0].value
    assert kind in ("PeerFailure", "RuntimeError"), outcomes[0]
    assert "not on all ranks" in text and "smp.save_checkpoint(path, tag='x'" in text
    assert "if smp.rank() == 0" in text
    assert not (tmp_path / "x_partial").exists()


def save_slowly(rank: int, folder: str) -> str:
    """Saves after one rank has computed for longer than it takes to find a deadlock."""
    import smp

    model, optimizer, train = make(Job(1, 1, 2, "none", "fp32"), seed=1)
    train(0)
    if rank == 1:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            torch.ones(1000).sum()
    smp.save_checkpoint(folder, "slow", model=model, optimizer=optimizer)
    return (Path(folder) / "newest").read_text()


@pytest.mark.sample(keep=0)
def test_a_slow_rank_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, save_slowly, str(tmp_path)) == ["slow_partial"] * 2


def call_otherwise(rank: int, folder: str) -> list[str]:
    """Returns the error of each of these calls; the job goes on after it."""
    import smp

    model, optimizer, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    texts = []

    def refused(**arguments: Any) -> None:
        given = {"path": folder, "tag": "t", "model": model, "optimizer": optimizer, **arguments}
        try:
            smp.save_checkpoint(**given)
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append("no error")

    refused()  # not partitioned
    train(0)
    refused(tag=f"t{rank}")
    refused(num_kept_partial_checkpoints=0)
    refused(model=None, optimizer=None)
    refused(partial=False, blocking=False)
    refused(path=folder if rank == 0 else folder + "2")
    refused(tag=None if rank == 1 else "t")
    train(1)
    return texts


def test_wrong_arguments_are_errors_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(2, call_otherwise, str(tmp_path)):
        words = ("not partitioned", "tag is 't0'", "at least 1", "nothing to save", "blocking")
        for text, word in zip(texts, (*words, "path is", "tag must be"), strict=True):
            assert word in text
    assert not list(tmp_path.iterdir())


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/smp_hostile",)


def resume_content(rank: int, folder: str) -> Any:
    import argparse

    from transformers import GPT2Config

    import smp

    model, optimizer, train = make(Job(1, 1, 2, "none", "fp32"), seed=1)
    train(0)
    seen = []
    content = {"args": argparse.Namespace(lr=0.1), "config": GPT2Config(n_layer=3), "n": [1]}
    for tag, value in (("kind", content), ("none", None), ("hostile", {"x": Hostile()})):
        smp.save_checkpoint(folder, tag, model=model, user_content=value)
    for tag in ("kind", "none", "hostile"):
        try:
            seen.append(smp.resume_from_checkpoint(folder, tag, load_optimizer=False))
        except ValueError as error:
            seen.append(str(error))
    return seen


def test_user_content_is_data(pool: Pool, tmp_path: Path) -> None:
    Path("/tmp/smp_hostile").unlink(missing_ok=True)
    for kind, none, hostile in pool.run(2, resume_content, str(tmp_path)):
        assert kind["args"].lr == 0.1 and kind["config"].n_layer == 3 and kind["n"] == [1]
        assert none == {}
        assert "posix.system" in hostile and "unsafe_user_content=True" in hostile
        assert "add_safe_globals" in hostile
    assert not Path("/tmp/smp_hostile").exists()


def save_for_others(rank: int, job: Job, folder: str) -> Any:
    import smp

    model, optimizer, train = make(job, seed=1)
    train(0)
    train(1)
    smp.save_checkpoint(folder, "o", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "model", model=model)
    smp.save_checkpoint(folder, "optimizer", optimizer=optimizer)
    smp.save_checkpoint(folder, "whole", partial=False, model=model)
    return state_of(model, optimizer)


def resume_in_order(rank: int, job: Job, folder: str) -> list[Any]:
    """The optimizer comes after the call, or the call has no use for it."""
    import smp

    states = []
    model, _, train = make(job, seed=2)
    smp.resume_from_checkpoint(folder, "o", load_optimizer_states=False)
    train(7)
    smp.shutdown()

    model, optimizer, train = make(job, seed=2)
    torch_optimizer = optimizer.optimizer
    del optimizer
    # As a script that makes its optimizer late: none is wrapped yet.
    from smp.world import runtime

    runtime.current().wrapped.numbered_optimizers.clear()
    smp.resume_from_checkpoint(folder, "o")
    late = smp.DistributedOptimizer(torch_optimizer)
    seen = [group["lr"] for group in late.param_groups]
    model.register_post_partition_hook(lambda *_: states.append(state_of(model, late)))
    train_once(model, late)
    return [seen, states[0]]


def train_once(model: Any, optimizer: Any) -> None:
    import smp

    @smp.step
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens)["loss"]
        model.backward(loss)
        return loss

    step(torch.arange(8).view(4, 2))
    optimizer.step()


@pytest.mark.parametrize(
    "job", (Job(2, 1, 1), Job(1, 1, 2, "state"), Job(1, 1, 2, "sdp2")), ids=str
)
def test_the_optimizer_may_be_made_later(pool: Pool, tmp_path: Path, job: Job) -> None:
    from tests.dist.test_resume import check_equal

    [expected] = pool.run(1, save_for_others, Job(1, 1, 1), str(tmp_path))
    for rates, state in pool.run(2, resume_in_order, job, str(tmp_path)):
        assert rates == [1e-2 / 4] * 2  # at once, so that a scheduler made now begins there
        check_equal("late", expected, state)


ORDERS = (("model", "optimizer"), ("optimizer", "model"), ("whole", "optimizer"),
          ("optimizer", "whole"))  # fmt: skip


def resume_halves(rank: int, job: Job, folder: str, is_early: bool) -> list[Any]:
    """Resumes in a trained model, or in a model that is not partitioned yet if ``is_early``."""
    import smp

    states: list[Any] = []
    for order in ORDERS:
        model, optimizer, train = make(job, seed=2)
        if not is_early:
            train(0)
        for tag in order:
            smp.resume_from_checkpoint(folder, tag, partial=tag != "whole")
        if is_early:
            look = lambda *_, m=model, o=optimizer: states.append(state_of(m, o))  # noqa: E731
            model.register_post_partition_hook(look)
            train(0)
        else:
            states.append(state_of(model, optimizer))
        smp.shutdown()
    return states


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    ("job", "is_early"),
    ((Job(2, 1, 1), False), (Job(2, 1, 1, "none", "bf16"), False),
     (Job(2, 1, 1, "none", "bf16"), True), (Job(1, 1, 2, "sdp2", "bf16"), False),
     (Job(1, 2, 1, "none", "fp16"), False)),
)  # fmt: skip
def test_model_and_optimizer_in_two_checkpoints(
    pool: Pool, tmp_path: Path, job: Job, is_early: bool
) -> None:
    """Checks all orders of resuming.

    Values with more digits than the model's 16 bits come from the optimizer's checkpoint.
    """
    from tests.dist.test_resume import check_equal

    saver = Job(1, 1, 2, "state", job.precision)
    expected, _ = pool.run(2, save_for_others, saver, str(tmp_path))
    is_rounded = job.precision != "fp64"
    assert is_rounded == any("_smp_master" in e for e in expected.optimizer["state"].values())
    for states in pool.run(2, resume_halves, job, str(tmp_path), is_early):
        assert len(states) == len(ORDERS)
        for order, state in zip(ORDERS, states, strict=True):
            check_equal(str(order), expected, state)


def go_back(rank: int, job: Job, folder: str) -> tuple[Any, Any, Any]:
    import smp

    model, optimizer, train = make(job, seed=1)
    train(0)
    train(1)
    smp.save_checkpoint(folder, "o", optimizer=optimizer)
    at = state_of(model, optimizer)
    for step in range(2, 6):
        train(step)
    later = state_of(model, optimizer)
    smp.resume_from_checkpoint(folder, "o", load_sharded_optimizer_state=False)
    return at, later, state_of(model, optimizer)


def test_masters_go_back_with_the_optimizer(pool: Pool, tmp_path: Path) -> None:
    from tests.dist.test_resume import check_equal

    for job in (Job(1, 2, 1, "none", "bf16"), Job(1, 1, 2, "sdp2", "bf16")):
        for at, later, back in pool.run(2, go_back, job, str(tmp_path / str(job))):
            name = next(iter(at.model))
            assert not torch.equal(at.model[name], later.model[name])
            if job.sharding == "none":
                check_equal(str(job), at, back)
                continue
            # The state of the optimizer itself is as it was before the call.
            for index, entry in back.optimizer["state"].items():
                saved, kept = at.optimizer["state"][index], later.optimizer["state"][index]
                assert torch.equal(entry["_smp_master"], saved["_smp_master"])
                assert torch.equal(entry["exp_avg"], kept["exp_avg"])
            for name, tensor in at.model.items():
                assert torch.equal(back.model[name], tensor), name


def save_two_models(rank: int, folder: str) -> list[Any]:
    import smp

    states = []
    for seed in (1, 3):
        model, optimizer, train = make(Job(2, 1, 1), seed=seed)
        train(0)
        smp.save_checkpoint(folder, str(seed), model=model, optimizer=optimizer)
        states.append(state_of(model, optimizer))
        smp.shutdown()
    model, optimizer, train = make(Job(2, 1, 1), seed=2)
    for seed in (1, 3):
        smp.resume_from_checkpoint(folder, str(seed))
    model.register_post_partition_hook(lambda *_: states.append(state_of(model, optimizer)))
    train(0)
    return states


def test_the_last_call_counts_before_the_partition_too(pool: Pool, tmp_path: Path) -> None:
    from tests.dist.test_resume import check_equal

    for first, second, loaded in pool.run(2, save_two_models, str(tmp_path)):
        name = next(iter(first.model))
        assert not torch.equal(first.model[name], second.model[name])
        check_equal("the last call", second, loaded)


def resume_other(rank: int, folder: str) -> list[str]:
    """Models and optimizers that are not those that were saved."""
    import smp

    texts = []

    def attempt(layers: int, two_groups: bool, **arguments: Any) -> None:
        smp.init({"pipeline_parallel_degree": 1, "ddp": True, "microbatches": 1})
        plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        model = smp.DistributedModel(plain)
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
        given = groups if two_groups else parameters
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(given, lr=0.1))
        try:
            if not arguments:
                smp.save_checkpoint(folder, "p", model=model, optimizer=optimizer)
            else:
                smp.resume_from_checkpoint(folder, "p", **arguments)
            texts.append("fine")
        except RuntimeError as error:
            texts.append(str(error))
        smp.shutdown()

    attempt(2, True)
    attempt(3, True, strict=True)
    attempt(1, True, strict=True)
    attempt(2, False, strict=True)
    attempt(3, False, strict=False)
    return texts


def test_other_models_are_refused_with_names(pool: Pool, tmp_path: Path) -> None:
    for _, more, less, groups, loose in pool.run(2, resume_other, str(tmp_path)):
        assert "nothing for '2.weight', '2.bias'" in more
        assert "the model has nothing for '1.bias', '1.weight'" in less
        assert "parameter group 0" in groups and "several saved groups" in groups
        assert loose == "fine"


def resume_missing(rank: int, folder: str) -> list[str]:
    import smp

    model, _, _ = make(Job(1, 1, 2), seed=1)
    texts = []
    for tag, partial in ((None, True), ("x", True), ("x", False)):
        try:
            smp.resume_from_checkpoint(folder, tag, partial)
        except FileNotFoundError as error:
            texts.append(str(error))
    del model
    return texts


def test_what_is_missing_is_named(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "y.pt").write_text("")
    for newest, partial, full in pool.run(2, resume_missing, str(tmp_path)):
        assert "no checkpoint has been saved" in newest
        assert "'x'" in partial and "y.pt" in partial
        assert "['x', 'x.index.json']" in full and "y.pt" in full


def follow(rank: int, folder: str, saves: bool) -> str:
    """Saves a manual partition that the automatic one would never choose, or resumes it."""
    import smp

    smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 1, **MANUAL[saves]})
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    if saves:
        for idx, layer in enumerate(plain):
            smp.set_partition(layer, int(idx == 5))
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = train_step_of(model, lambda model, x: model(x).sum())
    if not saves:
        smp.resume_from_checkpoint(folder)
    step(torch.ones(2, 3))
    if saves:
        smp.save_checkpoint(folder, "f", model=model, optimizer=optimizer)
    return str([name for name, _ in model.local_named_parameters()])


MANUAL: dict[bool, dict[str, Any]] = {True: {"auto_partition": False}, False: {}}


def resume_damaged(rank: int, folder: str) -> str:
    try:
        follow(rank, folder, False)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def test_the_partition_of_a_checkpoint_is_followed(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(2, follow, str(tmp_path), True)
    assert saved[1] == "['5.weight', '5.bias']"
    assert pool.run(2, follow, str(tmp_path), False) == saved
    files = sorted(path for path in (tmp_path / "f_partial").iterdir())
    assert len(files) >= 9
    for path in files:
        # Each file that a rank reads on this layout; SGD has saved no state.
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 3] ^= 4
        path.write_bytes(damaged)
        for text in pool.run(2, resume_damaged, str(tmp_path)):
            is_read = not path.name.startswith("optimizer_")
            assert (path.name in text) if is_read else text == "no error", f"{path.name}: {text}"
        path.write_bytes(whole)
