"""Experts that are modules in a list, on different ranks, equal one process.

No code of the mixtures knows of ranks: `tests/reference/listed_experts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.dist.steps import (
    Steps,
    check_numbers,
    compare,
    make_optimizer,
    reference_steps,
    replicas_of,
    run_steps,
)
from tests.harness import own_loss, train_step_of
from tests.reference.listed_experts import (
    CHOICES,
    EXPERTS,
    FORMS,
    TOKENS,
    WIDTH,
    Model,
    make_batch,
    make_model,
)

PLAN = {"layers.*.experts": "ep_dispatch_experts"}
BESIDE = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
STEPS, MICROBATCHES = 2, 2
SHARDED = (
    ("sharded_data_parallel_degree", 2), ("sdp_param_persistence_threshold", 0),
    ("sdp_gradient_clipping", 0),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    form: str
    tp: int = 2
    pp: int = 1
    rdp: int = 1
    prescaled: bool = False
    favourite: bool = False
    spreads: bool = True
    checkpointing: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.rdp


@dataclass(kw_only=True)
class Record(Steps):
    params: dict[str, Tensor] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)  # parameters of experts with elements here
    loads: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of tokens and choices, by layer


def start(run: Run) -> tuple[Any, Any, Model]:
    import smp

    smp.init(
        {
            "tensor_parallel_degree": run.tp, "pipeline_parallel_degree": run.pp,
            "expert_parallel_degree": run.tp if run.spreads else 1,
            "prescaled_batch": run.prescaled, "microbatches": MICROBATCHES, "ddp": True,
            **dict(run.config),
        }
    )  # fmt: skip
    plain = make_model(run.form, run.favourite)
    smp.set_tensor_parallelism(plain, plan=PLAN | (BESIDE if run.form == "shared" else {}))
    model = smp.DistributedModel(plain)
    for layer in plain.layers if run.checkpointing else ():
        smp.set_activation_checkpointing(layer)
    return model, smp.DistributedOptimizer(make_optimizer(model.parameters())), plain


def train(rank: int, run: Run) -> Record:
    import smp

    model, optimizer, plain = start(run)
    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    record = Record(rdp_rank=smp.rdp_rank(), batch_idx=batch_idx)
    batch_of = functools.partial(make_batch, run.form, batch_idx)
    run_steps(record, model, optimizer, batch_of, STEPS, keeps_grads=not run.config)
    record.own = [n for n, p in plain.named_parameters() if ".experts." in n and p.numel()]
    record.loads = [layer.loads for layer in plain.layers]
    record.counts = [int(layer.counts.sum()) for layer in plain.layers]
    record.params = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return record


@functools.cache
def reference_of(form: str, num_batches: int, favourite: bool) -> Any:
    model = make_model(form, favourite)
    batch_of = functools.partial(make_batch, form)
    return reference_steps(model, batch_of, num_batches, MICROBATCHES, STEPS)


def check(run: Run, records: Sequence[Record]) -> None:
    from smp.tensor_parallel import partial

    num_batches = run.rdp if run.prescaled else run.tp * run.rdp
    expected = reference_of(run.form, num_batches, run.favourite)
    for record in records:
        check_numbers(str(run), record, expected, 1e-9, 1e-9)
        # Each forward has counted once, though it has run twice.
        times = STEPS * MICROBATCHES
        if not run.checkpointing:  # lists of numbers are appended to again, as in PyTorch
            assert all(len(loads) in (0, times) for loads in record.loads), record.loads
        if run.pp == 1 and run.form != "shared":  # which has the tokens of all
            assert record.counts == [4 * TOKENS * CHOICES * STEPS] * 2
        names = {name for name in expected.params if ".experts." in name}
        shares = {n.split(".experts.")[1].split(".")[0] for n in record.own}
        assert len(shares) < EXPERTS and set(record.own) < names
        compare(record.params, expected.params, torch.float64, 1e-9, f"{run}: parameters")
    for replica in replicas_of(records):
        for step in range(len(replica[0].grads)):
            whole = partial.merge([record.grads[step] for record in replica])
            whole = {name: value for name, value in whole.items() if value.numel()}
            what = f"{run}: gradients of step {step}"
            assert set(whole) == set(expected.grads[step]), what
            compare(whole, expected.grads[step], torch.float64, 1e-9, what)


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("prescaled", [False, True], ids=["own", "common"])
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_share_a_list(pool: Pool, form: str, prescaled: bool) -> None:
    run = Run(form, prescaled=prescaled)
    records = pool.run(2, train, run)
    check(run, records)
    for index, record in enumerate(records):
        assert any(".experts." in name for name in record.own), index
    assert not set(records[0].own) & set(records[1].own)


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    "run",
    [
        Run("loop", 4),
        Run("masks", 4, prescaled=True),
        Run("loop", 2, rdp=2),
        Run("loop", 2, pp=2, prescaled=True),
        Run("table", 2, pp=2),
        Run("sparing", 4),
        Run("loop", 2, rdp=2, config=(("shard_optimizer_state", True),)),
        Run("masks", 2, rdp=2, config=SHARDED),
        Run("loop", checkpointing=True),
        Run("shared", 4),
    ],
    ids=str,
)
def test_a_list_on_other_layouts(pool: Pool, run: Run) -> None:
    check(run, pool.run(run.world_size, train, run))


@pytest.mark.parametrize("form", ["loop", "masks"])
def test_experts_that_nobody_calls_have_the_gradients_of_one_process(pool: Pool, form: str) -> None:
    run = Run(form, favourite=True)
    expected = reference_of(form, 2, True).grads[0]
    given = {name.split(".")[3] for name in expected if ".experts." in name}
    assert len(given) == (2 if form == "loop" else EXPERTS)
    check(run, pool.run(2, train, run))


LEGS = [Run("loop"), Run("loop", 4), Run("loop", spreads=False), Run("loop", 1), Run("loop", 2)]


def go_on(rank: int, run: Run, folder: str, step: int) -> dict[str, Tensor]:
    import smp

    model, optimizer, _ = start(run)
    if step:
        smp.resume_from_checkpoint(folder)
    run_steps(
        Steps(rdp_rank=0, batch_idx=0),
        model,
        optimizer,
        lambda _: make_batch(run.form, 0, step),
        1,
    )
    smp.save_checkpoint(folder, f"after{step}", model=model, optimizer=optimizer)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def test_a_list_resumes_on_other_numbers_of_ranks(pool: Pool, tmp_path: Path) -> None:
    states: list[dict[str, Tensor]] = []
    for step, leg in enumerate(LEGS):
        run = Run("loop", leg.tp, prescaled=True, spreads=leg.spreads and leg.tp > 1)
        states = pool.run(run.tp, go_on, run, str(tmp_path), step)
    batch_of = functools.partial(make_batch, "loop")
    expected = reference_steps(make_model("loop"), batch_of, 1, MICROBATCHES, len(LEGS)).params
    for state in states:
        compare(state, expected, torch.float64, 1e-9, "parameters after all legs")


class Changed(nn.Module):
    """A model with one mixture, in which something is not as it has to be."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([make_model("loop").layers[0]])
        experts = self.layers[0].experts
        if how == "few":
            del experts[1:]
        if how == "buffer":
            experts[1].register_buffer("seen", torch.zeros(1))
        if how == "hook":
            experts[0].register_forward_hook(lambda *_: None)
        if how == "chained":
            self.layers[0].__class__ = Chained
        if how == "in_place":
            self.layers[0].__class__ = InPlace
        if how == "parts":
            self.layers[0].__class__ = Parts

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "elsewhere":
            x = x + self.layers[0].experts[0](x)
        y: Tensor = self.layers[0]([x + 0] if self.how == "in_place" else x + 0)
        return y.square().mean()


class Chained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](self.experts[0](x))  # type: ignore[no-any-return, operator, index]


class InPlace(nn.Module):
    def forward(self, given: list[Tensor]) -> Tensor:
        given[0].mul_(2)
        return self.experts[1](given[0])  # type: ignore[no-any-return, operator, index]


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0].up(x) + self.experts[4].up(x)  # type: ignore


def try_changed(rank: int, how: str) -> None:
    import smp

    smp.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "ddp": True})
    plain = Changed(how).double()
    smp.set_tensor_parallelism(plain, plan=PLAN)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    train_step(torch.ones(2, 3, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("few", "it has 1 experts, which 2 ranks cannot share"),
        ("buffer", "expert '1': it has a buffer, 'seen'"),
        ("hook", "expert '0': there is a hook on it"),
        ("chained", "calls its experts with other rows in a second run"),
        ("in_place", "changes a tensor inside of one of its arguments in place"),
        ("elsewhere", "is called from elsewhere"),
        ("parts", "experts have to be called, and not their parts"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(pool: Pool, how: str, reason: str) -> None:
    with pytest.raises(RankFailure, match=reason):
        pool.run(2, try_changed, how)


def test_dropout_behind_experts_drops_the_same_of_common_tokens(pool: Pool) -> None:
    first, second = pool.run(2, losses_with_dropout)
    assert first == second and len(set(first)) == 3


def losses_with_dropout(rank: int) -> list[float]:
    """Returns the losses of three steps with dropout on a common batch.

    The ranks' experts draw random numbers for different numbers of rows.
    """
    import smp

    smp.init(
        {
            "tensor_parallel_degree": 2, "expert_parallel_degree": 2, "ddp": True,
            "prescaled_batch": True,
        }
    )  # fmt: skip
    plain = make_model("loop")
    for layer in plain.layers:
        for expert in layer.experts:
            expert.up = nn.Sequential(expert.up, nn.Dropout(0.5))
    # Behind the experts of the first layer.
    plain.layers[1].gate = nn.Sequential(nn.Dropout(0.5), plain.layers[1].gate)
    smp.set_tensor_parallelism(plain, plan=PLAN)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, lambda model, x: model(x)["loss"])
    torch.manual_seed(7)
    return [float(train_step(make_batch("loop", 0, 0)["x"]).reduce_mean()) for _ in range(3)]


def initial_state(rank: int, tp: int) -> dict[str, Tensor]:
    """Returns the state of a model whose parameters are made when it is partitioned."""
    import smp

    smp.init(
        {
            "tensor_parallel_degree": tp, "expert_parallel_degree": tp, "ddp": True,
            "delayed_parameter_initialization": True,
        }
    )  # fmt: skip
    torch.manual_seed(100 + rank)  # of creation, which does not matter
    with smp.delay_param_initialization():
        plain = Model("loop")
    assert all(p.is_meta for p in plain.parameters())
    smp.set_tensor_parallelism(plain, plan=PLAN)
    torch.manual_seed(3)
    model = smp.DistributedModel(plain)

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        loss: Tensor = model(x)["loss"]
        return loss

    with torch.no_grad():
        loss = evaluate(make_batch("loop", 0, 0)["x"].float())
    assert bool(torch.as_tensor(loss.reduce_mean()).isfinite())
    return {k: v.clone() for k, v in model.state_dict().items() if "counts" not in k}


def test_delayed_experts_have_the_values_of_their_names(pool: Pool) -> None:
    [expected] = pool.run(1, initial_state, 1)
    for state in pool.run(2, initial_state, 2):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert bool(value.any()) and torch.equal(state[name], value), name
