"""Masks that no layout changes: training with dropout is that of one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.harness import own_loss, train_step_of
from tests.reference.dropping import PLAN, SAMPLES, Planned, Split, SplitLM, batch, make
from tests.reference.gradients import has_parts, marked_gradients, whole_gradients
from tests.reference.split_modules import float64
from tests.reference.tolerances import assert_close

STEPS = 3
MODELS = {"split": Split, "split_lm": SplitLM, "planned": Planned}


@dataclass(frozen=True)
class Setup:
    """A training run.

    Attributes:
        model: "plain", or a name of `MODELS`.
        pp, tp, rdp, cp: sizes.
        microbatches: number of microbatches of a step.
        checkpoints: strategy of activation checkpointing.
        config: further keys.
    """

    model: str = "plain"
    pp: int = 1
    tp: int = 1
    rdp: int = 1
    microbatches: int = 2
    checkpoints: str = ""
    config: tuple[tuple[str, Any], ...] = ()
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.num_replicas

    @property
    def num_replicas(self) -> int:
        return self.rdp * self.cp

    def __str__(self) -> str:
        keys = "".join(f" {key}={value}" for key, value in self.config)
        return f"pp{self.pp} tp{self.tp} cp{self.cp} rdp{self.rdp} mb{self.microbatches}{keys}"

    @property
    def shards(self) -> int:
        """Over how many replicas the state of a parameter is cut."""
        keys = dict(self.config)
        if keys.get("shard_optimizer_state"):
            return self.num_replicas
        return int(keys.get("sharded_data_parallel_degree", 1))


@dataclass
class Seen:
    """Records what one rank saw."""

    losses: list[float] = field(default_factory=list)  # mean over microbatches
    grads: list[dict[str, Any]] = field(default_factory=list)  # of this rank, with marks
    params: dict[str, Tensor] = field(default_factory=dict)  # of the whole model
    calls: int = 0
    replica: int = 0


def init(setup: Setup, **more: Any) -> None:
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": setup.pp,
            "tensor_parallel_degree": setup.tp,
            "context_parallel_degree": setup.cp,
            "microbatches": setup.microbatches,
            "ddp": True,
            "layout_independent_dropout": True,
            **dict(setup.config),
            **more,
        }
    )


def make_model(setup: Setup, values: dict[str, Tensor] | None) -> Any:
    import smp

    if setup.model == "plain":
        model = smp.DistributedModel(make())
    else:
        torch.manual_seed(1)
        plan = PLAN if setup.model == "planned" else None
        with float64(), smp.tensor_parallelism(plan is not None, plan=plan):
            plain = MODELS[setup.model]()
        model = smp.DistributedModel(plain.double())
    if values is not None:
        model.load_state_dict(values)
    if setup.checkpoints == "marks":
        smp.set_activation_checkpointing(model.get_module().blocks, strategy="contiguous")
        smp.set_activation_checkpointing(model.get_module().twice)
        smp.set_activation_checkpointing(model.get_module().turned)
    elif setup.checkpoints == "layers":
        smp.set_activation_checkpointing(model.get_module().blocks)
    elif setup.checkpoints == "parts":
        for block in model.get_module().blocks:
            for part in (block.drop, block.attention.drop, block.attention.dense, block.down):
                smp.set_activation_checkpointing(part)
    elif setup.checkpoints == "calls":
        blocks = model.get_module().blocks
        call = functools.partial(_checkpointed, list(blocks))
        blocks.forward = call
    return model


def _checkpointed(blocks: list[nn.Module], x: Tensor) -> Tensor:
    from smp.patches.checkpoint import checkpoint

    for block in blocks:
        x = checkpoint(block, x)
    return x


def own_part(whole: Tensor, setup: Setup) -> Tensor:
    import smp

    reads_one = dict(setup.config).get("prescaled_batch", False) and setup.tp > 1
    part, num = (smp.rdp_rank(), setup.rdp) if reads_one else (smp.dp_rank(), smp.dp_size())
    return whole.chunk(num)[part]


def make_optimizer(model: Any) -> Any:
    import smp

    # Small steps: at 1e-2 the third one had 1500 times the rounding differences of the first, which
    # on some processors was more than what is taken for equal.
    return smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3))


def run_steps(model: Any, optimizer: Any, setup: Setup, seen: Seen, begin: int, end: int) -> None:

    train_step = train_step_of(model, own_loss)
    for step in range(begin, end):
        seen.losses.append(train_step(own_part(batch(step), setup)).reduce_mean().item())
        seen.grads.append(marked_gradients(model))
        optimizer.step()
        optimizer.zero_grad()


def train(rank: int, setup: Setup, values: dict[str, Tensor] | None) -> Seen:
    import smp

    init(setup)
    model = make_model(setup, values)
    torch.manual_seed(100 + rank)  # each rank another seed, as scripts do
    optimizer = make_optimizer(model)
    seen = Seen(replica=smp.rdp_rank() * setup.cp + smp.cp_rank())
    run_steps(model, optimizer, setup, seen, 0, STEPS)
    seen.params = {n: v.cpu().clone() for n, v in model.state_dict().items()}
    if setup.pp > 1:
        seen.calls = smp.metrics.server_stats()["remote_calls"]
    return seen


def initial_values(rank: int, name: str) -> dict[str, Tensor]:
    init(Setup(name))
    return {n: v.clone() for n, v in make_model(Setup(name), None).state_dict().items()}


@functools.cache
def reference(pool: Pool, name: str) -> tuple[dict[str, Tensor], Seen]:
    """Values at the beginning, and one process with one microbatch."""
    (values,) = pool.run(1, initial_values, name)
    (seen,) = pool.run(1, train, Setup(name, microbatches=1), values)
    return values, seen


def check(pool: Pool, setup: Setup) -> list[Seen]:
    values, expected = reference(pool, setup.model)
    records = pool.run(setup.world_size, train, setup, values)
    assert len(records) == setup.world_size
    compare(records, expected, setup)
    return records


def compare(records: list[Seen], expected: Seen, setup: Setup) -> None:
    parts = SAMPLES // setup.rdp
    assert parts > 0
    for step in range(len(expected.losses)):
        found = torch.tensor([r.losses[step] for r in records], dtype=torch.float64).mean()
        torch.testing.assert_close(found.item(), expected.losses[step], rtol=1e-9, atol=1e-12)
    compare_gradients(records, expected, setup)
    for record in records:
        assert_close(record.params, expected.params, torch.float64, f"{setup}: parameters")
    if setup.pp > 1:
        assert sum(r.calls for r in records) >= STEPS * setup.microbatches, "nothing was remote"


def compare_gradients(records: list[Seen], expected: Seen, setup: Setup) -> None:
    """Compares gradients with one process, by name and for each replica."""
    if setup.shards > 1 or (setup.tp > 1 and setup.model != "plain"):
        assert all(has_parts(record.grads[0]) for record in records), "nothing is split"
    for step, one_process in enumerate(expected.grads):
        grads = whole_gradients([one_process])
        assert max(g.abs().max() for g in grads.values()) > 1e-3
        for replica in range(setup.num_replicas // setup.shards):
            ranks = [r for r in records if r.replica // setup.shards == replica]
            assert len(ranks) == setup.world_size * setup.shards // setup.num_replicas
            found = whole_gradients([r.grads[step] for r in ranks])
            assert found.keys() == grads.keys()
            assert_close(found, grads, torch.float64, f"{setup}, step {step}, replica {replica}")


# ---- what one process does -------------------------------------------------------------


def masks_of_one_process(rank: int, on: bool) -> list[dict[str, Tensor]]:
    """Returns masks of the elements that some modules drop, for steps of whole batches."""

    init(Setup(microbatches=1), layout_independent_dropout=on)
    model = make_model(Setup(), None)
    torch.manual_seed(100)
    module = model.get_module()
    steps: list[dict[str, Tensor]] = []
    for name in ("first", "blocks.0.inner", "blocks.1.inner", "blocks.1.channels", "twice.1"):

        def note(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
            while name in steps[-1]:
                name += "'"
            steps[-1][name] = output.detach() == 0.0

        module.get_submodule(name).register_forward_hook(note)

    train_step = train_step_of(model, own_loss)
    for _ in range(2):
        steps.append({})
        train_step(batch(0))
    return steps


def test_masks_drop_and_differ_between_steps_samples_modules_and_calls(pool: Pool) -> None:
    (steps,) = pool.run(1, masks_of_one_process, True)
    (again,) = pool.run(1, masks_of_one_process, True)
    rates = {"first": 0.3, "blocks.0.inner": 0.3, "blocks.1.inner": 0.3, "twice.1": 0.2}
    for name, mask in steps[0].items():
        assert torch.equal(mask, again[0][name]), name
        assert not torch.equal(mask, steps[1][name]), f"{name}: the same in both steps"
        assert not torch.equal(mask[0], mask[1]), f"{name}: the same for two samples"
        if name in rates:
            assert abs(mask.double().mean().item() - rates[name]) < 0.08, name
    assert not torch.equal(steps[0]["blocks.0.inner"], steps[0]["blocks.1.inner"])
    assert not torch.equal(steps[0]["twice.1"], steps[0]["twice.1'"])
    channels = steps[0]["blocks.1.channels"]
    assert (channels.all(2) == channels.any(2)).all() and channels.any(), "no channel is dropped"


def test_without_the_key_masks_are_those_of_pytorch(pool: Pool) -> None:
    (steps,) = pool.run(1, masks_of_one_process, False)
    (others,) = pool.run(1, masks_of_one_process, True)
    assert not torch.equal(steps[0]["first"], others[0]["first"])
    assert steps[0]["first"].any()


# ---- layouts ---------------------------------------------------------------------------

SHARDED = (("sharded_data_parallel_degree", 2), ("sdp_param_persistence_threshold", 0))
UNCLIPPED = (*SHARDED, ("sdp_gradient_clipping", 0))


@pytest.mark.parametrize("microbatches", [2, 3, 4, 8])
def test_microbatches_draw_as_the_batch(pool: Pool, microbatches: int) -> None:
    check(pool, Setup(microbatches=microbatches))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_pipelines_draw_as_one_process(pool: Pool, microbatches: int) -> None:
    check(pool, Setup(pp=2, microbatches=microbatches))


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(rdp=2),
        Setup(rdp=2, cp=2),
        Setup(pp=2, cp=2),
        Setup(pp=2, rdp=2),
        Setup(rdp=4, microbatches=1),
        Setup(rdp=2, config=UNCLIPPED),
        Setup(pp=2, rdp=2, config=UNCLIPPED),
        Setup(rdp=2, config=(("shard_optimizer_state", True),)),
    ],
    ids=str,
)
def test_replicas_draw_for_their_samples(pool: Pool, setup: Setup) -> None:
    check(pool, setup)


@pytest.mark.parametrize("schedule", ["simple", "zero_bubble", "virtual_interleaved"])
def test_schedules_draw_the_same(pool: Pool, schedule: str) -> None:
    check(pool, Setup(pp=2, microbatches=4, config=(("pipeline", schedule),)))


@pytest.mark.parametrize("checkpoints", ["marks", "calls"])
@pytest.mark.parametrize("pp", [1, 2])
def test_second_forwards_have_the_masks_of_the_first(pool: Pool, pp: int, checkpoints: str) -> None:
    check(pool, Setup(pp=pp, microbatches=2, checkpoints=checkpoints))


@pytest.mark.sample(keep=9)
@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_split_layers_draw_as_whole_ones(
    pool: Pool, model: str, layout: tuple[int, int, int], prescaled: bool, optimize: str
) -> None:
    config = (("optimize", optimize), ("prescaled_batch", prescaled))
    check(pool, Setup(model, *layout, config=config))


@pytest.mark.parametrize("prescaled", [False, True])
def test_blocks_of_a_plan_recompute_their_masks(pool: Pool, prescaled: bool) -> None:
    setup = Setup("planned", tp=2, config=(("prescaled_batch", prescaled),))
    for checkpoints in ("layers", "parts"):
        check(pool, replace(setup, checkpoints=checkpoints))


# ---- resuming --------------------------------------------------------------------------


def begin(rank: int, setup: Setup, values: dict[str, Tensor], folder: str) -> None:
    """Trains all steps but the last one, and saves."""
    import smp

    init(setup)
    model = make_model(setup, values)
    torch.manual_seed(100 + rank)
    optimizer = make_optimizer(model)
    run_steps(model, optimizer, setup, Seen(), 0, STEPS - 1)
    smp.save_checkpoint(folder, tag="now", model=model, optimizer=optimizer)


def go_on(rank: int, setup: Setup, folder: str) -> Seen:
    """The last step, by a job that has another seed."""
    import smp

    torch.manual_seed(7)
    init(setup)
    model = make_model(setup, None)
    optimizer = make_optimizer(model)
    smp.resume_from_checkpoint(folder, tag="now")
    seen = Seen()
    run_steps(model, optimizer, setup, seen, STEPS - 1, STEPS)
    seen.params = {n: v.cpu().clone() for n, v in model.state_dict().items()}
    return seen


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(pp=2), Setup(pp=2)),
        (Setup(pp=2), Setup(rdp=2, microbatches=1)),
        (Setup(rdp=2), Setup(microbatches=4)),
        (Setup(), Setup(pp=2, rdp=2)),
    ],
    ids=str,
)
def test_a_job_that_goes_on_draws_on(
    pool: Pool, tmp_path: Path, before: Setup, after: Setup
) -> None:
    values, expected = reference(pool, "plain")
    pool.run(before.world_size, begin, before, values, str(tmp_path))
    records = pool.run(after.world_size, go_on, after, str(tmp_path))
    for record in records:
        assert_close(record.params, expected.params, torch.float64, f"{before} to {after}")
    loss = sum(record.losses[0] for record in records) / len(records)
    assert loss == pytest.approx(expected.losses[-1], rel=1e-9)


# ---- other batches, other code ---------------------------------------------------------


class Rooted(nn.Module):
    """Drops by functions alone, and on results of other ranks; nothing says so beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(F.dropout(part(x), 0.2))
            x = F.dropout(x, 0.2)
        return x


def outputs_of_replicas(rank: int, setup: Setup, sizes: list[int]) -> tuple[Tensor, int, str]:
    """Runs replicas with batches of unequal sizes.

    Returns:
        the outputs, the number of remote calls, and the outcome of the first check.
    """
    import smp
    from smp.observe.verification.first_step import outcome_of

    init(setup)
    torch.manual_seed(1)
    model = smp.DistributedModel(Rooted().double())
    torch.manual_seed(100 + rank)
    whole = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(5)).double()

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        output = model(x)
        model.backward(output.sum())
        return output

    output = train_step(whole.split(sizes)[smp.dp_rank()]).concat()
    calls = smp.metrics.server_stats()["remote_calls"] if setup.pp > 1 else 0
    return output, calls, str(outcome_of(model))


@pytest.mark.parametrize(
    ("setup", "sizes"),
    [
        (Setup(rdp=2, microbatches=2), [5, 3]),
        (Setup(pp=2, rdp=2, microbatches=3), [3, 5]),
        (Setup(rdp=4, microbatches=2), [1, 4, 1, 2]),
    ],
    ids=str,
)
def test_replicas_with_unequal_batches_draw_as_one_process(
    pool: Pool, setup: Setup, sizes: list[int]
) -> None:
    ((expected, _, _),) = pool.run(1, outputs_of_replicas, Setup(microbatches=1), [8])
    assert 0.1 < (expected == 0).double().mean() < 0.3
    found = pool.run(setup.world_size, outputs_of_replicas, setup, sizes)
    by_replica = [output for output, _, _ in found]
    if setup.pp > 1:
        assert sum(calls for _, calls, _ in found) > 0
        # Masks are none of the generators', so nothing else would tell that the model drops.
        assert {"random numbers" in outcome for _, _, outcome in found[:1]} == {True}, found
        assert all(
            torch.equal(*pair) for pair in zip(by_replica[::2], by_replica[1::2], strict=True)
        )
        by_replica = by_replica[::2]
    torch.testing.assert_close(torch.cat(by_replica), expected, rtol=1e-9, atol=1e-12)


# ---- models of transformers ------------------------------------------------------------


def train_family(
    rank: int, case: str, setup: Setup, is_split: bool
) -> tuple[list[float], list[dict[str, Any]], dict[str, Tensor]]:
    """Trains a family.

    Returns:
        losses by step (mean over microbatches), this rank's gradients by step, and the final model.
    """
    import smp
    from tests.reference.models import randomise_
    from tests.reference.split_families import make_split_batch, make_split_family

    init(setup)
    with smp.tensor_parallelism(is_split):
        plain = make_split_family(case, torch.float64, dropout=True)
    rates = [value for key, value in plain.config.to_dict().items() if "drop" in key]
    assert rates.count(0.1) > 1, "it does not drop"
    model = smp.DistributedModel(randomise_(plain, 1).train())
    torch.manual_seed(100 + rank)
    optimizer = make_optimizer(model)

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        # The loss has all positions, so that microbatches count alike.
        loss = model(batch["input_ids"]).logits.square().mean()
        model.backward(loss)
        return loss

    losses, grads = [], []
    for step in range(2):
        parts = [make_split_batch(case, part, step)["input_ids"] for part in range(2)]
        losses.append(train_step({"input_ids": own_part(torch.cat(parts), setup)}).reduce_mean())
        grads.append(marked_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    params = {n: v.clone() for n, v in model.state_dict().items()}
    return [loss.item() for loss in losses], grads, params


@pytest.mark.parametrize(
    ("case", "setup", "is_split"),
    [
        ("gpt2", Setup(pp=2), False),
        ("gpt2", Setup(tp=2), True),
        ("gpt2", Setup(pp=2, tp=2, config=(("prescaled_batch", True),)), True),
        ("bert", Setup(tp=2), True),
    ],
    ids=str,
)
def test_models_of_transformers_draw_as_one_process(
    pool: Pool, case: str, setup: Setup, is_split: bool
) -> None:
    ((losses, grads, params),) = pool.run(1, train_family, case, Setup(microbatches=1), is_split)
    records = pool.run(setup.world_size, train_family, case, setup, is_split)
    means = torch.tensor([found for found, _, _ in records], dtype=torch.float64).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=0)
    for step, one_process in enumerate(grads):
        found = whole_gradients([of_rank[step] for _, of_rank, _ in records])
        expected = whole_gradients([one_process])
        assert found.keys() == expected.keys()
        assert_close(found, expected, torch.float64, f"{case} {setup}, step {step}")
    if setup.tp > 1:
        assert all(has_parts(of_rank[0]) for _, of_rank, _ in records), "nothing is split"
    for _, _, whole in records:
        assert_close(whole, params, torch.float64, f"{case} {setup}")
