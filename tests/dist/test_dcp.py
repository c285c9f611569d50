"""Checkpoints that `smp ckpt export --format dcp` writes are read by FSDP2 with its optimizer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from smp.checkpoint import cli
from tests.dist.pool import Pool

STEPS = 3


class Net(nn.Module):
    """A model with a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(step))


def train_and_save(rank: int, config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Returns the parameters after a further step behind the checkpoint."""
    import smp

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(optimizer_of(model))

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        model.backward(loss)
        return loss

    for idx in range(STEPS + 1):
        if idx == STEPS:
            smp.save_checkpoint(folder, "last", model=model, optimizer=optimizer)
        optimizer.zero_grad()
        step(batch(idx))
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def resume_by_fsdp(rank: int, folder: str, is_flat: bool) -> dict[str, Tensor]:
    import smp

    smp.init({"ddp": True})
    model = make()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    found, moments = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": found, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    optimizer.zero_grad()
    model(batch(STEPS)).backward()
    optimizer.step()
    return {name: p.full_tensor() for name, p in model.state_dict().items()}


def export(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["ckpt", "export", *map(str, arguments)])
    status: int = parsed.execute(parsed)
    return status


@pytest.mark.parametrize(
    ("size", "config", "is_flat"),
    [
        (2, {"pipeline_parallel_degree": 2}, False),
        (2, {"pipeline_parallel_degree": 2}, True),
        (2, {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_gradient_clipping": 0.0}, True),
        (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True}, False),
    ],
    ids=str,
)
@pytest.mark.sample(keep=2)
def test_fsdp_goes_on_as_the_job_does(
    pool: Pool, tmp_path: Path, size: int, config: dict[str, Any], is_flat: bool
) -> None:
    expected = pool.run(size, train_and_save, config, str(tmp_path / "smp"))[0]
    assert export(tmp_path / "smp", tmp_path / "dcp", "--format", "dcp") == 0
    for found in pool.run(2, resume_by_fsdp, str(tmp_path / "dcp"), is_flat):
        assert found.keys() == expected.keys() and "head.weight" in found
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_folder_with_files_is_left_alone(pool: Pool, tmp_path: Path, capsys: Any) -> None:
    pool.run(2, train_and_save, {"pipeline_parallel_degree": 2}, str(tmp_path / "smp"))
    (tmp_path / "file").write_text("")
    assert export(tmp_path / "smp", tmp_path, "--format", "dcp") == 1
    assert "is not empty; give a new folder" in capsys.readouterr().err
