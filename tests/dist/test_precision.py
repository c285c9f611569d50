"""Training in 16 bits with float32 masters equals the same arithmetic in one process."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.half_training import (
    DTYPES,
    STEPS,
    HalfRun,
    RankRecord,
    joined,
    make,
    marked,
    reference,
    same,
    train,
)
from tests.dist.pool import Pool, RankFailure
from tests.harness import train_step_of
from tests.reference.denoiser import Denoiser
from tests.reference.tolerances import largest

# Where every sum has the same terms in the same order as in one process.
EXACT = [
    HalfRun("fp16"),
    HalfRun("bf16", "reuse"),
    HalfRun("fp16", "gpt2", microbatches=1),
    HalfRun("fp16", pp=2, microbatches=4),
    HalfRun("bf16", pp=2, schedule="simple"),
    HalfRun("fp16", dp=2),
    HalfRun("bf16", "gpt2", dp=2),
    HalfRun("bf16", pp=2, dp=2),
    HalfRun("bf16", "reuse", dp=2, sharding="optimizer"),
    HalfRun("fp16", "gpt2", dp=2, microbatches=1, sharding="data"),  # reduces every microbatch
    HalfRun("fp16", pp=2, dp=2, sharding="optimizer"),
    HalfRun("bf16", pp=2, dp=2, sharding="data"),
]
# Where 16-bit sums have another order: results are as far from those of float32 as one process is.
ROUNDED = [
    HalfRun("fp16", "reuse", pp=2),
    HalfRun("bf16", "gpt2", pp=2),
    HalfRun("fp16", "gpt2", tp=2),
    HalfRun("bf16", "gptj", tp=2),
    HalfRun("fp16", "gpt2", pp=2, tp=2),
    HalfRun("bf16", "gpt2", tp=2, dp=2, sharding="optimizer"),
    HalfRun("fp16", "gpt2", tp=2, dp=2, sharding="data"),
]


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize("run", EXACT, ids=str)
def test_equals_one_process_bit_by_bit(pool: Pool, run: HalfRun) -> None:
    records = pool.run(run.world_size, train, run)
    expected = reference(run, run.precision)
    check_kind(records, run)
    for record in records:
        for step in range(STEPS):
            assert record.losses[step] == expected.losses[step][record.rdp_rank]
    for step in range(STEPS):
        same(joined(records, run, lambda r, s=step: r.grads[s]), expected.grads[step], "gradients")
    same(joined(records, run, lambda r: r.masters), expected.masters, "masters")
    same(joined(records, run, lambda r: r.params), expected.params, "parameters")


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("run", ROUNDED, ids=str)
def test_is_as_close_to_float32_as_one_process(pool: Pool, run: HalfRun) -> None:
    records = pool.run(run.world_size, train, run)
    half, single = reference(run, run.precision), reference(run, "fp32")
    check_kind(records, run)
    for record in records:
        for step in range(STEPS):
            for ours, theirs, exact in zip(
                record.losses[step],
                half.losses[step][record.rdp_rank],
                single.losses[step][record.rdp_rank],
                strict=True,
            ):
                limit = 2 * abs(theirs - exact) + 2 * torch.finfo(DTYPES[run.precision]).eps
                assert abs(ours - exact) <= limit * max(1.0, abs(exact))
    for step in range(STEPS):
        ours = joined(records, run, lambda r, s=step: r.grads[s])
        close(ours, half.grads[step], single.grads[step], f"gradients of step {step}")
    close(joined(records, run, lambda r: r.masters), half.masters, single.masters, "masters")


_LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {}, "pp 2": {"pp": 2}, "dp 2": {"dp": 2}, "tp 2": {"tp": 2},
    "sdp 2": {"dp": 2, "sharding": "data"}, "sharded state": {"dp": 2, "sharding": "optimizer"},
}  # fmt: skip


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_modules_kept_in_float32_train_as_those_that_transformers_loads(
    pool: Pool, layout: str, precision: str
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run = HalfRun(precision, "ernie4_5_moe", split=True, **_LAYOUTS[layout])
    records = pool.run(run.world_size, train, run)
    half, single = reference(run, run.precision), reference(run, "fp32")
    check_kind(records, run)
    router = "model.layers.1.mlp.gate.weight"
    params = joined(records, run, lambda r: r.params)
    assert all(p.dtype == half.params[name].dtype for name, p in params.items())
    assert params[router].dtype == torch.float32 != params["model.norm.weight"].dtype
    assert not torch.equal(params[router], half.initial[router]), "routers are trained"
    for step in range(STEPS):
        ours = joined(records, run, lambda r, s=step: r.grads[s])
        close(ours, half.grads[step], single.grads[step], f"gradients of step {step}")
    close(joined(records, run, lambda r: r.masters), half.masters, single.masters, "masters")


def denoise(rank: int, precision: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Trains a model that gets float time steps, and has float32 in buffers."""
    import smp

    smp.init({precision: True, "microbatches": 2, "ddp": True, **layout})
    torch.manual_seed(1)
    plain = Denoiser()
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
        loss = model(x, timestep, target)
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        output = train_step(*denoising_batch(smp.dp_rank(), step))
        losses.append([float(loss) for loss in output.outputs])
        optimizer.step()
        optimizer.zero_grad()
    seen = [] if not plain.seen else plain.seen[0].tolist()
    return {
        "losses": losses,
        "seen": seen,
        "buffers": {n: (b.dtype, b.clone()) for n, b in plain.named_buffers()},
        "dp": smp.dp_rank(),
    }


def denoising_batch(replica: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, target = torch.randn(2, 12, 8, generator=generator)
    return x, torch.full((12,), 997.0), target


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_degree": 2},
        {},
        {"shard_optimizer_state": True},
        {
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 0.0,
        },
    ],
    ids=["pp 2", "dp 2", "sharded state", "sdp 2"],
)
def test_float_inputs_and_buffers_keep_their_digits_in_every_layout(
    pool: Pool, layout: dict[str, Any], precision: str
) -> None:
    records = pool.run(2, denoise, precision, layout)
    torch.manual_seed(1)
    plain = Denoiser()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    replicas = {record["dp"] for record in records}
    for step in range(STEPS):
        for replica in replicas:
            for mb in range(2):
                half = [t.chunk(2)[mb] for t in denoising_batch(replica, step)]
                loss = plain(*half)
                (loss / (2 * len(replicas))).backward()
                for record in records:
                    if record["dp"] == replica:
                        # A loss is a mean of products of numbers with 8 bits.
                        assert record["losses"][step][mb] == pytest.approx(loss.item(), rel=0.02)
        optimizer.step()
        optimizer.zero_grad()
    assert [997.0] * 6 in [record["seen"] for record in records]
    for record in records:
        for name, (dtype, buffer) in record["buffers"].items():
            assert dtype == torch.float32 or name.endswith("num_batches_tracked")
            if name in ("frequencies", "slopes", "weights"):
                assert torch.equal(buffer, plain.get_buffer(name))


def check_kind(records: list[RankRecord], run: HalfRun) -> None:
    """The run really was one in 16 bits, and its norms are those of all gradients."""
    for record in records:
        assert record.dtypes == {DTYPES[run.precision], torch.float32}
        assert record.norms == records[0].norms
    for step in range(STEPS):
        grads = joined(records, run, lambda r, s=step: r.grads[s])
        assert largest(grads) > 1e-3 and all(g.dtype == torch.float32 for g in grads.values())
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        assert records[0].norms[step] == pytest.approx(norm, rel=1e-6)
    masters = joined(records, run, lambda r: r.masters)
    params = joined(records, run, lambda r: r.params)
    for name, param in params.items():
        assert torch.equal(param, masters[name].to(param.dtype)), name


def close(
    ours: dict[str, Tensor], half: dict[str, Tensor], single: dict[str, Tensor], what: str
) -> None:
    """Our error is at most twice that of one process in 16 bits, over all elements (2-norm)."""
    keys = half.keys() & ours.keys()  # what is tied may be there under one name
    assert len(keys) > len(half) / 2

    def error(values: dict[str, Tensor]) -> float:
        return math.sqrt(sum((values[k] - single[k]).double().square().sum().item() for k in keys))

    assert 0 < error(ours) <= 2 * error(half), f"{what}: {error(ours)}, one process {error(half)}"


# ---- what masters are for --------------------------------------------------


class Scale(nn.Module):
    """Multiplies by one number, whose gradient is the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def step_tinily(rank: int, precision: str) -> tuple[float, float, int]:
    """Many updates, each below the resolution of 16 bits at 1."""
    import smp

    smp.init({"ddp": True, precision: True})
    model = smp.DistributedModel(Scale())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-13))
    train_step = train_step_of(model, lambda model, x: model(x).mean())
    changes = 0
    weight = model.get_module().weight
    for _ in range(128):
        before = weight.detach().clone()
        train_step(torch.ones(2, 1))
        optimizer.step()
        optimizer.zero_grad()
        changes += int(not torch.equal(before, weight))
    return float(optimizer.param_groups[0]["params"][0]), float(weight), changes


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_masters_keep_what_16_bits_cannot(pool: Pool, precision: str) -> None:
    for master, weight, changes in pool.run(2, step_tinily, precision):
        assert master == 1 - 128 * 2.0**-13
        assert weight == float(torch.tensor(master).to(DTYPES[precision]))
        # Less often than the master: a 16-bit weight alone would not have moved at all.
        assert 0 < changes < 40


# ---- loss scaling ----------------------------------------------------------

HISTORY = ".xx..x...xx....."  # x: an infinite gradient on one rank
ARGUMENTS = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 2}


def scale_loss(rank: int, run: HalfRun, kind: str) -> dict[str, Any]:
    """Puts infinities into gradients of one rank, a different one each time."""
    import smp
    from tests.dist.half_training import batch_of, init_half, poison_backward

    init_half(run)
    model, optimizer, train_step = make(
        run, kind=kind, dynamic_loss_scale=True, dynamic_loss_args=ARGUMENTS
    )
    seen: dict[str, Any] = {"scales": [], "overflows": [], "skips": [], "norms": [], "lrs": []}
    assert optimizer.overflow is False and optimizer.loss_scale == 64.0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    victim: list[bool] = [False]

    def poison(grad: Tensor) -> Tensor:
        return torch.full_like(grad, math.inf) if victim[0] else grad

    train_step(batch_of(run, smp.rdp_rank(), 0))  # partitions
    optimizer.zero_grad()
    poison_backward(model, poison)
    for step, letter in enumerate(HISTORY):
        victim[0] = letter == "x" and step % smp.size() == smp.rank()
        losses = train_step(batch_of(run, smp.rdp_rank(), step))
        assert all(math.isfinite(loss) for loss in losses.outputs)
        seen["overflows"].append(optimizer.overflow)
        seen["norms"].append(float(optimizer.clip_master_grads(1e-3)))
        before = marked(model, "masters"), marked(model, "params")
        optimizer.step()
        after = marked(model, "masters"), marked(model, "params")
        unchanged = all(
            torch.equal(old[name], new[name])
            for old, new in zip(before, after, strict=True)
            for name in old
            if isinstance(old[name], Tensor)
        )
        seen["skips"].append(unchanged)
        if not optimizer.overflow:
            scheduler.step()
        seen["scales"].append(optimizer.loss_scale)
        seen["lrs"].append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (HalfRun("fp16", dp=2), ""),
        (HalfRun("fp16", pp=2), ""),
        (HalfRun("fp16", "gpt2", pp=2, tp=2), ""),
        (HalfRun("fp16", dp=2, sharding="optimizer"), ""),
        (HalfRun("fp16", pp=2, dp=2, sharding="data"), ""),
        (HalfRun("fp16", pp=2), "FusedAdam"),
        (HalfRun("fp16", "gpt2", tp=2), "FusedLAMB"),
        (HalfRun("fp16", dp=2, sharding="optimizer"), "FusedNovoGrad"),
        (HalfRun("fp16", pp=2, dp=2, sharding="data"), "FusedAdam"),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, run: HalfRun, kind: str) -> None:
    from tests.reference.loss_scale import scale_trace

    overflows = [letter == "x" for letter in HISTORY]
    results = pool.run(run.world_size, scale_loss, run, kind)
    for seen in results:
        assert seen["overflows"] == overflows
        assert seen["skips"] == overflows
        assert seen["scales"] == scale_trace(overflows, **ARGUMENTS)
        assert [norm == -1.0 for norm in seen["norms"]] == overflows
        assert seen["norms"] == results[0]["norms"]
        assert seen["lrs"][-1] == pytest.approx(1e-2 * 0.5 ** overflows.count(False))


def count_reads(rank: int, run: HalfRun, kind: str) -> dict[str, int]:
    """Numbers that the host reads in whole training steps, one of which overflows."""
    import smp
    from tests.dist.half_training import batch_of, init_half, poison_backward
    from tests.reference.host_reads import count_host_reads

    init_half(run)
    scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0}}
    model, optimizer, train_step = make(run, kind=kind, **scaling)
    overflows = [False]

    def poison(grad: Tensor) -> Tensor:
        return torch.full_like(grad, math.inf) if overflows[0] else grad

    def step(idx: int) -> Counter[str]:
        with count_host_reads() as forward_reads:
            train_step(batch_of(run, smp.rdp_rank(), idx))
        with count_host_reads() as reads:
            optimizer.clip_master_grads(1e-3)
            optimizer.step()
            optimizer.zero_grad()
        # The cross entropy of split heads checks targets, if they are on the CPU.
        return reads if run.is_split else forward_reads + reads

    step(0)
    poison_backward(model, poison)
    seen = step(1)
    overflows[0] = smp.rank() == 1
    seen += step(2)
    assert optimizer.step_was_skipped and optimizer.loss_scale == 32.0
    return dict(seen)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (HalfRun("fp16", pp=2), "FusedAdam"),
        (HalfRun("fp16", "gpt2", pp=2, tp=2), "FusedLAMB"),
        (HalfRun("fp16", dp=2, sharding="optimizer"), "FusedLAMB"),
        (HalfRun("fp16", dp=2, sharding="data"), "FusedNovoGrad"),
    ],
    ids=str,
)
def test_updates_leave_their_numbers_on_the_device(pool: Pool, run: HalfRun, kind: str) -> None:
    assert pool.run(run.world_size, count_reads, run, kind) == [{}] * run.world_size


def start_at_default_scale(rank: int, run: HalfRun) -> dict[str, Any]:
    import smp
    from tests.dist.half_training import batch_of, init_half

    init_half(run)
    _, optimizer, train_step = make(run, static_loss_scale=None, dynamic_loss_scale=True)
    overflows, losses = [], []
    for _ in range(40):
        loss = train_step(batch_of(run, smp.rdp_rank(), 0)).reduce_mean()
        losses.append(float(loss))
        overflows.append(optimizer.overflow)
        optimizer.step()
        optimizer.zero_grad()
    return {"overflows": overflows, "losses": losses, "scale": optimizer.loss_scale}


def test_the_default_scale_comes_down_before_training_begins(pool: Pool) -> None:
    run = HalfRun("fp16", pp=2)
    for seen in pool.run(2, start_at_default_scale, run):
        num_skipped = seen["overflows"].index(False)
        assert 10 <= num_skipped <= 20
        assert seen["overflows"] == [True] * num_skipped + [False] * (40 - num_skipped)
        assert seen["scale"] == 2.0 ** (32 - num_skipped)
        losses = seen["losses"]
        assert losses[:num_skipped] == [losses[0]] * num_skipped
        assert losses[-1] < 0.7 * losses[0]


def backward_at_the_loss_itself(rank: int) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "fp16": True, "ddp": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(sgd, static_loss_scale=64.0)

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    train_step(torch.ones(4, 4))
    optimizer.step()


def test_a_backward_without_the_loss_scale_is_refused_in_pipelines(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"call model.backward\(loss\)"):
        pool.run(2, backward_at_the_loss_itself)
