"""Checkpoints of 16-bit training: masters and loss scales survive, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.half_training import (
    CLIPPED_NORM,
    DTYPES,
    HalfRun,
    RankRecord,
    batch_of,
    init_half,
    joined,
    make,
    marked,
    poison_backward,
    same,
)
from tests.dist.pool import Pool

SCALE = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**13}}


def advance(run: HalfRun, optimizer: Any, train_step: Any, step: int) -> None:
    import smp

    train_step(batch_of(run, smp.rdp_rank(), step))
    optimizer.step()
    optimizer.zero_grad()


def train_and_save(rank: int, run: HalfRun, folder: str) -> dict[str, Any]:
    """Two steps, everything saved; then a third one."""
    import smp

    init_half(run)
    model, optimizer, train_step = make(run, **SCALE)
    advance(run, optimizer, train_step, 0)
    optimizer.loss_scale = 2.0**10
    advance(run, optimizer, train_step, 1)
    local = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    if smp.rdp_rank() == 0:
        smp.save(local, f"{folder}/part.pt", partial=True)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if smp.rank() == 0:
        smp.save(whole, f"{folder}/whole.pt", partial=False)
    smp.barrier()
    advance(run, optimizer, train_step, 2)
    return marked(model, "masters")


def resume(
    rank: int, run: HalfRun, folder: str, partial: bool, optimizer_first: bool
) -> dict[str, Any]:
    """Continues from a file, with a model that had other weights."""
    import smp

    init_half(run)
    model, optimizer, train_step = make(run, seed=5, **SCALE)
    name = "part.pt" if partial else "whole.pt"
    saved = smp.load(f"{folder}/{name}", partial=partial)
    if optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    if not optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    advance(run, optimizer, train_step, 2)
    assert optimizer.loss_scale == 2.0**10 and not optimizer.overflow
    return marked(model, "masters")


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    "run",
    [
        HalfRun("fp16", dp=2),
        HalfRun("fp16", "gpt2", pp=2),
        HalfRun("fp16", "gpt2", tp=2),
        HalfRun("fp16", "gpt2", pp=2, tp=2),
    ],
    ids=str,
)
def test_training_goes_on_bit_by_bit(pool: Pool, tmp_path: Path, run: HalfRun) -> None:
    expected = pool.run(run.world_size, train_and_save, run, str(tmp_path))
    rounded = 0
    for partial, optimizer_first in ((True, False), (False, True)):
        resumed = pool.run(run.world_size, resume, run, str(tmp_path), partial, optimizer_first)
        for ours, theirs in zip(resumed, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                if isinstance(value, Tensor):
                    assert torch.equal(value, theirs[name]), f"{name}, partial {partial}"
                    rounded += int(not torch.equal(value, value.half().float()))
    assert rounded > 10, "16-bit weights would have been enough"


# ---- sharded states --------------------------------------------------------

PLAIN = HalfRun("fp16", dp=2)
OPTIMIZER = HalfRun("fp16", dp=2, sharding="optimizer")
DATA = HalfRun("fp16", dp=2, sharding="data")


def save_in_every_form(rank: int, run: HalfRun, folder: str) -> dict[str, Tensor]:
    """Two steps, the state in all forms that there are, and a third step."""
    import smp

    init_half(run)
    model, optimizer, train_step = make(run, **SCALE)
    advance(run, optimizer, train_step, 0)
    advance(run, optimizer, train_step, 1)
    weights = model.state_dict()
    states = {
        "whole": optimizer.state_dict(),
        "gathered": optimizer.local_state_dict(gather_if_shard=True),
        "own": optimizer.local_state_dict(gather_if_shard=False),
    }
    for form, state in states.items():
        if form == "own" or smp.rdp_rank() == 0:
            smp.save(
                {"model": weights, "optimizer": state}, f"{folder}/{form}.pt", v3=form == "own"
            )
    smp.barrier()
    advance(run, optimizer, train_step, 2)
    return {name: value.clone() for name, value in optimizer_values(optimizer).items()}


def optimizer_values(optimizer: Any) -> dict[str, Tensor]:
    """Masters and moments of all parameters, whole."""
    entries = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value.cpu() for i, e in entries.items() for name, value in e.items()}


def resume_from(rank: int, run: HalfRun, folder: str, form: str) -> dict[str, Tensor]:
    import smp

    init_half(run)
    model, optimizer, train_step = make(run, seed=5, **SCALE)
    path = f"{folder}/{form}.pt_0" + (f"_0_{smp.rdp_rank()}" if form == "own" else "")
    saved = torch.load(path, weights_only=False)
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    advance(run, optimizer, train_step, 2)
    return optimizer_values(optimizer)


@pytest.mark.parametrize("run", [OPTIMIZER, DATA], ids=lambda run: run.sharding)
def test_sharded_states_go_everywhere(pool: Pool, tmp_path: Path, run: HalfRun) -> None:
    here, plain = str(tmp_path / "here"), str(tmp_path / "plain")
    Path(here).mkdir(), Path(plain).mkdir()
    expected = pool.run(2, save_in_every_form, run, here)
    assert all(value.shape == expected[0][key].shape for key, value in expected[1].items())
    unsharded = pool.run(2, save_in_every_form, PLAIN, plain)
    forms = [(run, here, "whole"), (run, here, "gathered"), (run, here, "own")]
    forms += [(PLAIN, here, "gathered"), (PLAIN, here, "own"), (run, plain, "whole")]
    for resumed, folder, form in forms:
        for values in pool.run(2, resume_from, resumed, folder, form):
            assert values.keys() == unsharded[0].keys()
            for key, value in values.items():
                assert torch.equal(value, unsharded[0][key]), f"{key} of {form} in {resumed}"


def load_model_alone(rank: int, run: HalfRun) -> None:
    """A state in 16 bits without one of the optimizer: masters follow where they must."""
    import smp

    init_half(run)
    model, optimizer, train_step = make(run)
    advance(run, optimizer, train_step, 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = marked(model, "masters")
    advance(run, optimizer, train_step, 1)
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    held = {n: value for n, value in before.items() if isinstance(value, Tensor) and value.numel()}
    name = next(iter(held))
    after = marked(model, "masters")
    assert torch.equal(after[name].half(), held[name].half())
    model.load_state_dict({name: value.float() + 2.0**-20 for name, value in state.items()})
    exact = marked(model, "masters")[name]
    assert not torch.equal(exact, exact.half().float()), "float32 goes into masters as it is"
    assert smp.rdp_size() == 2


@pytest.mark.parametrize("run", [PLAIN, OPTIMIZER, DATA], ids=lambda run: run.sharding or "whole")
def test_masters_follow_a_model_that_is_loaded(pool: Pool, run: HalfRun) -> None:
    pool.run(2, load_model_alone, run)


def clip_sharded(rank: int, run: HalfRun) -> dict[str, Any]:
    """Norms in all ways that there are, with an update after each."""
    import smp

    init_half(run)
    model, optimizer, train_step = make(run)
    seen: dict[str, Any] = {"norms": [], "used": []}
    for step in range(3):
        train_step(batch_of(run, smp.rdp_rank(), step))
        seen["norms"].append(float(smp.clip_grad_norm_(model.parameters(), 1e9)))
        if run.sharding != "clipped data":
            seen["used"].append(float(optimizer.clip_master_grads(CLIPPED_NORM)))
        optimizer.step()
        if run.sharding == "clipped data":
            seen["used"].append(float(optimizer._global_grad_norm))
        optimizer.zero_grad()
    seen["values"] = optimizer_values(optimizer)
    if run.sharding == "clipped data":
        check_flat(model, optimizer)
    return seen


def check_flat(model: Any, optimizer: Any) -> None:
    """Checks the flat tensor that scripts read: parts of parameters in the optimizer's order."""
    from smp.world import runtime

    parts = [p.ds_tensor.ds_numel for p in model.parameters()]
    [flat] = optimizer.fp32_partitioned_groups_flat
    assert flat.shape == (sum(parts),) and flat.dtype == torch.float32
    for master, part in zip(optimizer.param_groups[0]["params"], flat.split(parts), strict=True):
        assert torch.equal(part[: master.numel()], master)
        assert part.data_ptr() == master.data_ptr() or not master.numel()
    group = torch.distributed.get_process_group_ranks(optimizer.ds_param_shard_group)
    assert group == list(runtime.current().rank.groups["shard"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_of_shards_are_those_of_all(pool: Pool, precision: str) -> None:
    plain, *others = (
        pool.run(2, clip_sharded, HalfRun(precision, dp=2, sharding=sharding))
        for sharding in ("", "optimizer", "clipped data")
    )
    assert min(plain[0]["norms"]) > CLIPPED_NORM
    for seen in others:
        assert seen[0]["norms"] == seen[1]["norms"] and seen[0]["used"] == seen[1]["used"]
        assert seen[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-6)
        assert seen[0]["used"] == pytest.approx(plain[0]["used"], rel=1e-6)
        for key, value in seen[0]["values"].items():
            if not key.endswith("_smp_master"):
                torch.testing.assert_close(value, plain[0]["values"][key], rtol=1e-4, atol=1e-6)


# ---- PyTorch's own mixed precision -----------------------------------------


def autocast(rank: int, pp: int, optimizer_args: dict[str, Any]) -> list[tuple[float, bool]]:
    """Trains under autocast with a GradScaler; one rank has infinite gradients at times."""
    import smp
    from tests.reference.data import make_batch
    from tests.reference.models import build

    smp.init({"pipeline_parallel_degree": pp, "microbatches": 2, "ddp": pp == 1})
    model = smp.DistributedModel(build("chain", torch.float32))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer_args)
    optimizer = smp.DistributedOptimizer(inner)
    scaler = smp.amp.GradScaler(init_scale=256.0, growth_interval=2)
    poisoned = [False]

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch["x"])
        loss = torch.nn.functional.mse_loss(output.float(), batch["y"])
        model.backward(scaler.scale(loss).squeeze())
        return loss

    seen = []
    train_step(make_batch("chain", torch.float32, smp.dp_rank(), 0))
    optimizer.zero_grad()
    poison_backward(model, lambda grad: grad * float("inf") if poisoned[0] else grad)
    for step in range(5):
        poisoned[0] = smp.rank() == 1 and step == 2
        train_step(make_batch("chain", torch.float32, smp.dp_rank(), step))
        before = [p.detach().clone() for p in model.local_parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True)
        )
        seen.append((scaler.get_scale(), moved))
        optimizer.zero_grad()
    return seen


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_on_all_ranks(pool: Pool, pp: int, fused: bool) -> None:
    for seen in pool.run(2, autocast, pp, {"fused": fused}):
        assert [scale for scale, _ in seen] == [256.0, 512.0, 256.0, 256.0, 512.0]
        assert [moved for _, moved in seen] == [True, True, False, True, True]


def clipped_with_scaler(
    rank: int, kind: str, optimizer_args: dict[str, Any], is_scaled: bool, clip: float = 0.05
) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of training with sharded parameters, whose gradients are clipped."""
    import smp
    from tests.reference.data import make_batch
    from tests.reference.models import build

    config = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": clip, "ddp": True}
    smp.init({**config, "sdp_param_persistence_threshold": 0})
    model = smp.DistributedModel(build("chain", torch.float32))
    classes = {"SGD": torch.optim.SGD, "FusedAdam": smp.optimizers.FusedAdam}
    inner = classes[kind](model.parameters(), lr=1.0 if kind == "SGD" else 1e-2, **optimizer_args)
    optimizer = smp.DistributedOptimizer(inner)
    scaler = smp.amp.GradScaler(init_scale=2.0**16, enabled=is_scaled)

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        model.backward(scaler.scale(loss).squeeze())
        return loss

    norms = []
    for step in range(2):
        train_step(make_batch("chain", torch.float32, smp.dp_rank(), step))
        scaler.step(optimizer)
        scaler.update()
        assert optimizer._global_grad_norm is not None
        norms.append(float(optimizer._global_grad_norm))
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "kind, args",
    [("SGD", {"fused": True}), ("SGD", {"fused": False}), ("FusedAdam", {"eps": 1e-4})],
)
def test_a_grad_scaler_leaves_clipping_of_shards_as_it_is(
    pool: Pool, kind: str, args: dict[str, Any]
) -> None:
    (norms, plain), _ = pool.run(2, clipped_with_scaler, kind, args, False)
    for seen, values in pool.run(2, clipped_with_scaler, kind, args, True):
        assert min(norms) > 0.05 and seen == pytest.approx(norms, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_there_without_clipping(pool: Pool, fused: bool) -> None:
    args = {"fused": fused}
    (expected, values), _ = pool.run(2, clipped_with_scaler, "SGD", args, False, 1e9)
    for is_scaled in (False, True):
        for norms, others in pool.run(2, clipped_with_scaler, "SGD", args, is_scaled, 0.0):
            assert min(norms) > 0 and norms == pytest.approx(expected, rel=1e-5)
            for name, value in others.items():
                torch.testing.assert_close(value, values[name], rtol=1e-5, atol=1e-6)


# ---- states of earlier releases --------------------------------------------

# Parameters that stay in float32 now; a buffer that is saved.
KEPT = [
    HalfRun("fp16", "ernie4_5_moe", split=True),
    HalfRun("bf16", "ernie4_5_moe", pp=2, split=True),
    HalfRun("bf16", "ernie4_5_moe", dp=2, split=True, sharding="optimizer"),
    HalfRun("fp16", "ernie4_5_moe", dp=2, split=True, sharding="data"),
    HalfRun("bf16", "deepseek_v3", dp=2, split=True),
]


def save_as_before(rank: int, run: HalfRun, folder: str) -> RankRecord:
    """Trains and saves as a release did that cast everything, buffers included."""
    import smp
    from smp.modules.training_dtypes import TrainingDtypes
    from smp.storage import half

    def cast_everything(root: Any, dtype: torch.dtype) -> TrainingDtypes:
        floating = ((m, n) for m in root.modules() for n, b in m._buffers.items() if b is not None)
        return TrainingDtypes(dtype, {}, dict.fromkeys(floating, dtype))

    plan, half.plan_dtypes = half.plan_dtypes, cast_everything
    try:
        init_half(run)
        model, optimizer, train_step = make(run)
        advance(run, optimizer, train_step, 0)
    finally:
        half.plan_dtypes = plan
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert {value.dtype for value in state["model"].values()} == {DTYPES[run.precision]}
    if smp.rank() == 0:
        smp.save(state, f"{folder}/whole.pt", partial=False)
    smp.save_checkpoint(folder, tag="parts", model=model, optimizer=optimizer)
    return held(model)


def load_from_before(rank: int, run: HalfRun, folder: str, how: str) -> RankRecord:
    import smp

    init_half(run)
    model, optimizer, train_step = make(run, seed=5)
    advance(run, optimizer, train_step, 0)
    if how == "parts":
        smp.resume_from_checkpoint(folder, tag="parts", model=model, optimizer=optimizer)
    else:
        saved = smp.load(f"{folder}/whole.pt", partial=False)
        for name in how.split():
            {"model": model, "optimizer": optimizer}[name].load_state_dict(saved[name])
    found = held(model)
    wide = {value.dtype for value in model.state_dict().values()}
    assert wide == {DTYPES[run.precision], torch.float32}
    losses = train_step(batch_of(run, smp.rdp_rank(), 1))
    optimizer.step()
    assert all(loss.isfinite() for loss in losses.outputs)
    return found


def held(model: Any) -> RankRecord:
    """Returns the masters that this rank trains, and its modules' buffers that are saved."""
    import smp

    saved = model.state_dict()
    buffers = {n: b.float() for n, b in model.get_module().named_buffers() if n in saved}
    places = (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank())
    return RankRecord(*places, masters=marked(model, "masters"), params=buffers)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("run", KEPT, ids=str)
def test_states_of_releases_that_cast_everything_load(
    pool: Pool, tmp_path: Path, run: HalfRun
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    expected = pool.run(run.world_size, save_as_before, run, str(tmp_path))
    for how in ("model optimizer", "optimizer model", "parts"):
        loaded = pool.run(run.world_size, load_from_before, run, str(tmp_path), how)
        masters = [joined(records, run, lambda r: r.masters) for records in (loaded, expected)]
        same(*masters, f"masters, {how}")
        for ours, theirs in zip(loaded, expected, strict=True):
            assert bool(ours.params) == (run.case == "deepseek_v3")
            same(ours.params, theirs.params, f"buffers, {how}")
