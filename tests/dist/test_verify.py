"""`smp verify` names planted faults, and finds healthy layouts equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smp.commands.verify.compare import Verdict
from smp.commands.verify.records import JobRecords
from smp.observe.verification import EndOfVerification, Order
from tests.dist.pool import Pool
from tests.dist.verify_jobs import STEPS, PoolScript, ordered

WIDTH, BATCH = 8, 4


class Counting(nn.Linear):
    """Keeps how often it was called, which is how often it was called in this process."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Masked(nn.Linear):
    """Forgets its mask on other ranks than the first of the pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        import smp

        y = super().forward(x)
        return y if smp.pp_rank() > 0 else y.tril()


class ByRank(nn.Linear):
    """Scales the tokens of each context-parallel rank by another factor."""

    def forward(self, x: Tensor) -> Tensor:
        import smp

        return super().forward(x) * (1 + 0.1 * smp.cp_rank())


class Attending(nn.Module):
    """A block with attention, whose tokens context-parallel ranks share."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gain(nn.Module):
    """The plain form of a layer that is split with a mark left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.down(self.up(x).tanh())


def register_split_gain() -> None:
    """The mark says that each rank has the whole gradient of `gain`, and each has a term of it."""
    import smp
    from smp.nn import layout
    from smp.nn.linear import ColumnLinear, RowLinear
    from smp.tensor_parallel import sharding

    class SplitGain(smp.nn.DistributedModule):
        is_indivisible = True

        def __init__(self, width: int) -> None:
            super().__init__()
            self._layout = layout.current()
            sizes = sharding.split(4 * width)
            self.up = ColumnLinear(width, sizes, bias=True, std=None)
            self.gain = nn.Parameter(torch.ones(width))
            sharding.mark_whole(self.gain, partial=False)
            self.down = RowLinear(sizes, width, bias=True, std=None, layout=self._layout)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            (up,) = self._layout.columns(self._layout.enter(x), [self.up], length)
            term = self.gain * self.down(up.tanh())
            y = self._layout.sum_up(term, length) + self.gain.detach() * self.down.bias
            return self._layout.leave(y, length)

    smp.tp_register_with_module(Gain, SplitGain, lambda width: ((width,), {}))


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        attending = {"attention": nn.Linear, "tokens": ByRank}.get(fault)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            if attending is None
            else Attending(attending)
            for _ in range(3)
        )
        kinds = {"state": Counting, "mask": Masked}
        self.probe = (
            Gain(WIDTH)
            if fault == "mark"
            else kinds.get(fault.removeprefix("half "), nn.Linear)(WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(0.2 if fault == "dropout" else 0.0)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.drop(self.probe(x)))


def record(rank: int, order: Order, config: Mapping[str, Any], fault: str) -> int:
    """Runs a script as `smp verify` starts it; returns how many steps it was kept from."""
    import smp

    try:
        with ordered(rank, order):
            smp.init({"microbatches": 2, **config})
            steps_left = 10 * STEPS
            for _ in train(fault):
                steps_left -= 1
            return 0
    except EndOfVerification as end:
        assert end.code == 0
        return steps_left


def train(fault: str) -> Any:
    import smp

    if fault == "mark":
        register_split_gain()
    torch.manual_seed(1)
    with smp.tensor_parallelism(fault in ("", "mark")):
        net = Net(fault)
    if fault == "values":
        net.head.weight.data += 0.1 * smp.pp_size()
    half = torch.bfloat16 if fault.startswith("half") else torch.float32
    model = smp.DistributedModel(net)
    lr = 1e-2 * (smp.dp_size() if fault == "rate" else 1)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr))
    if fault == "reduction" and smp.dp_size() > 1:

        def leave_out(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, leave_out)

    @smp.step
    def train_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = functional.mse_loss(model(batch["x"]).float(), batch["y"].float())
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(smp.dp_rank())
    while True:
        x = torch.randn(BATCH, 5, WIDTH, generator=generator)
        y = torch.randn(BATCH, 5, 3, generator=generator)
        train_step(model, {"x": x.to(half), "y": y})
        if fault != "clip" or smp.pp_size() == 1:
            smp.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield


def verify(pool: Pool, folder: Path, fault: str, *layouts: str) -> tuple[list[Verdict], list[str]]:
    given = {"bf16": True} if fault.startswith("half") else {}
    script = PoolScript(pool, folder, record, (fault,), given)
    verdicts = script.verify(*layouts)
    left = set(script.results)
    assert left == {10 * STEPS - STEPS + 1}, "the script went on behind its last update"
    return verdicts, script.jobs


def test_healthy_layouts_are_equal(pool: Pool, tmp_path: Path) -> None:
    verdicts, jobs = verify(pool, tmp_path, "", "pp2", "tp2", "sdp2", "os2", "pp2dp2")
    assert [v.answer for v in verdicts if not v.is_good] == [], verdicts
    for verdict in verdicts:
        assert verdict.largest.keys() >= {"value", "output", "gradient", "parameter", "optimizer"}
        assert verdict.notes == (), verdict
    assert jobs[:2] == ["one", "pp2"] and "pp2-one" not in jobs, "inputs are equal"
    assert "sdp2-one" in jobs, "inputs of two ranks are replayed"
    one = JobRecords(tmp_path / "one")
    begin, *others, last = one.stages([0])
    assert [stage.what for stage in (*others, last)] == ["step", "update"] * STEPS
    assert float(begin.items["value", "head.weight"].norm()) > 0.1
    changes = [float(t.norm()) for (kind, _), t in last.items.items() if kind == "parameter"]
    assert len(changes) == 18 and min(changes) > 1e-3, "nothing was trained, the test shows nothing"


def test_healthy_layouts_of_sequences_in_parts_are_equal(pool: Pool, tmp_path: Path) -> None:
    layouts = ("cp2", "pp2cp2", "cp2dp2sdp4", "cp2dp2os2")
    verdicts, _ = verify(pool, tmp_path, "attention", *layouts)
    assert [v.answer for v in verdicts if not v.is_good] == [], verdicts
    for layout in layouts:
        records = JobRecords(tmp_path / layout)
        runs = [rows for _, rows in records.modules(0, records.counts(0))]
        shapes = {r.shape for rows in runs for r in rows.get((0, "blocks.0.norm", 0), [])}
        assert sorted(shapes) == [(2, 2, WIDTH), (2, 3, WIDTH)], (
            f"{layout}: no rank had a part of the tokens"
        )


@pytest.mark.parametrize(
    ("fault", "layout", "module", "words"),
    [
        ("state", "dp2", "probe", "may keep something from one microbatch to the next"),
        ("mask", "pp2", "probe", "its code, or a mask or attribute that it reads"),
        ("half mask", "pp2", "probe", "its code, or a mask or attribute that it reads"),
        ("reduction", "dp2", "head", "a sum of its gradient over these ranks is left out"),
        ("mark", "tp2", "probe", "a sum of its gradient over these ranks is left out"),
        ("tokens", "cp2", "drop", "results from 'blocks.0.norm' to 'drop' are parts"),
        ("tokens", "pp2cp2", "probe", "results from 'blocks.0.norm' to 'probe' are parts"),
        ("rate", "dp2", None, "'lr' of group 0 differs: 0.02 instead of 0.01"),
        ("clip", "pp2", None, "something between the step function and optimizer.step()"),
        ("values", "pp2", None, "before the first step: 'head.weight' has another value"),
    ],
)
def test_planted_fault_is_found_and_named(
    pool: Pool, tmp_path: Path, fault: str, layout: str, module: str | None, words: str
) -> None:
    (verdict,), _ = verify(pool, tmp_path, fault, layout)
    assert verdict.answer == "differs" and not verdict.is_good
    assert words in " ".join([verdict.text, *verdict.hints]), verdict
    if module is not None:
        assert (verdict.module, verdict.step) == (module, 0), verdict


def test_dropout_is_named_and_not_called_a_fault(pool: Pool, tmp_path: Path) -> None:
    verdicts, jobs = verify(pool, tmp_path, "dropout", "pp2", "dp2")
    assert [v.answer for v in verdicts] == ["random", "equal"], verdicts
    assert verdicts[0].module == "drop" and "run it with dropout 0" in verdicts[0].hints[0]
    assert "pp2-float64" not in jobs


def test_sixteen_bits_are_as_near_as_one_process(pool: Pool, tmp_path: Path) -> None:
    verdicts, _ = verify(pool, tmp_path, "half", "pp2", "tp2")
    assert all(v.is_good for v in verdicts), verdicts
