"""Checkpoints go from jobs to FSDP2 and back, with the optimizer (`smp ckpt export`, `import`)."""

from __future__ import annotations

import argparse
import importlib.util
import pickle
import subprocess
import sys
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
from smp.checkpoint.reader import FolderReader
from tests.dist.pool import Pool
from tests.dist.processes import REPO
from tests.dist.torchtitan_training import Trainer

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


def train_by_fsdp(rank: int, folder: str, is_flat: bool) -> dict[str, Tensor]:
    """Saves behind some steps; returns the parameters after a further one."""
    import smp

    smp.init({"ddp": True})
    model = make()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    for idx in range(STEPS + 1):
        if idx == STEPS:
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
            found, moments = get_state_dict(model, optimizer, options=options)
            checkpoint.save({"model": found, "optim": moments}, checkpoint_id=folder)
        optimizer.zero_grad()
        model(batch(idx)).backward()
        optimizer.step()
    return {name: p.full_tensor() for name, p in model.state_dict().items()}


def resume(rank: int, config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    import smp

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for parameter in model.parameters():
        parameter.data.zero_()
    smp.resume_from_checkpoint(folder, "imported")

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        model.backward(loss)
        return loss

    step(batch(STEPS))
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares parameters in the names of one rank."""
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def ckpt(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["ckpt", *map(str, arguments)])
    status: int = parsed.execute(parsed)
    return status


#: number of processes, configuration of the job, and form of the optimizer's state in FSDP2
LAYOUTS: list[tuple[int, dict[str, Any], bool]] = [
    (2, {"pipeline_parallel_degree": 2}, False),
    (2, {"pipeline_parallel_degree": 2}, True),
    (2, {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_gradient_clipping": 0.0}, True),
    (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True}, False),
]
#: jobs for readers and writers that know one form
JOBS = [(size, config) for size, config, _ in LAYOUTS[1:]]


@pytest.mark.parametrize(("size", "config", "is_flat"), LAYOUTS, ids=str)
@pytest.mark.sample(keep=2)
def test_fsdp_goes_on_as_the_job_does(
    pool: Pool, tmp_path: Path, size: int, config: dict[str, Any], is_flat: bool
) -> None:
    expected = pool.run(size, train_and_save, config, str(tmp_path / "smp"))[0]
    assert ckpt("export", tmp_path / "smp", tmp_path / "dcp", "--format", "dcp") == 0
    for found in pool.run(2, resume_by_fsdp, str(tmp_path / "dcp"), is_flat):
        assert found.keys() == expected.keys() and "head.weight" in found
        check_equal(expected, found)


def test_a_folder_with_files_is_left_alone(pool: Pool, tmp_path: Path, capsys: Any) -> None:
    pool.run(2, train_and_save, {"pipeline_parallel_degree": 2}, str(tmp_path / "smp"))
    (tmp_path / "file").write_text("")
    assert ckpt("export", tmp_path / "smp", tmp_path, "--format", "dcp") == 1
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "config", "is_flat"), LAYOUTS, ids=str)
@pytest.mark.sample(keep=2)
def test_a_job_goes_on_as_fsdp_does(
    pool: Pool, tmp_path: Path, size: int, config: dict[str, Any], is_flat: bool
) -> None:
    expected = pool.run(2, train_by_fsdp, str(tmp_path / "dcp"), is_flat)[0]
    target = tmp_path / "imported_partial"
    assert ckpt("import", tmp_path / "dcp", target, "--optimizer-key", "optim") == 0
    for found in pool.run(size, resume, config, str(tmp_path)):
        check_equal(found, expected)
    assert ckpt("export", target, tmp_path / "again", "--format", "dcp") == 0
    for found in pool.run(2, resume_by_fsdp, str(tmp_path / "again"), is_flat):
        check_equal(expected, found)


def test_a_model_alone_without_a_key_is_read(pool: Pool, tmp_path: Path, capsys: Any) -> None:
    state = make().state_dict()
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ckpt("import", tmp_path / "dcp", tmp_path / "none") == 1
    assert "name the key of the model (--model-key;" in capsys.readouterr().err
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new", "--model-key", "") == 0
    with FolderReader(tmp_path / "new") as reader:
        for name, value in state.items():
            assert torch.equal(reader.read(f"model/{name}"), value)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_code_in_metadata_does_not_run(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "dcp").mkdir()
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.write_bytes(pickle.dumps(Harmful()))
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new") == 1
    found = capsys.readouterr()
    assert "code ran" not in found.out and "it names builtins.print" in found.err
    # A module of the list has imported `os`.
    module, name = "torch.distributed.checkpoint.metadata", "os.getcwd"
    words = b"".join(b"\x8c" + bytes([len(w)]) + w.encode() for w in (module, name))
    metadata.write_bytes(b"\x80\x04" + words + b"\x93)R.")
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new") == 1
    assert f"it names {module}.{name}" in capsys.readouterr().err
    metadata.unlink()
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new") == 1
    assert "has no file .metadata" in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: Any) -> None:
    checkpoint.save({"model": make().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.unlink()
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new") == 1
    assert "cannot be read as data: FileNotFoundError" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_extensions_are_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    checkpoint.save({"model": make().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["stream.zstd/1"]
    file.write_bytes(pickle.dumps(metadata))
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new") == 1
    assert "is written with the extensions stream.zstd/1" in capsys.readouterr().err


def test_options_of_another_form_are_errors(pool: Pool, tmp_path: Path, capsys: Any) -> None:
    pool.run(2, train_and_save, {"pipeline_parallel_degree": 2}, str(tmp_path / "smp"))
    words = ("export", tmp_path / "smp", tmp_path / "new")
    assert ckpt(*words, "--format", "dcp", "--max-shard-size", "1MB") == 1
    assert "--max-shard-size is for --format hf" in capsys.readouterr().err
    assert ckpt(*words, "--without-optimizer") == 1
    assert "--without-optimizer is for --format dcp and megatron-dist" in capsys.readouterr().err
    assert ckpt(*words, "--model-key", "") == 1
    assert "--optimizer-key are for --format dcp and megatron-dist" in capsys.readouterr().err
    assert ckpt(*words, "--format", "dcp", "--model-key", "optimizer") == 1
    assert "the optimizer's key is 'optimizer'; give it one of its own" in capsys.readouterr().err


# ---- Megatron-Core -----------------------------------------------------------------------

MEGATRON = REPO / "tests" / "dist" / "scripts" / "megatron_folder.py"
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed; pip install --no-deps -r requirements/megatron.txt",
)


def by_megatron(how: str, folder: Path, file: Path) -> Any:
    """Lets Megatron-Core load or save a folder; returns the contents of the file then."""
    command = [sys.executable, str(MEGATRON), how, str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(file, weights_only=True)


def wanted_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns empty tensors for a model and its moments, by key."""
    wanted = {}
    for name, parameter in model.named_parameters():
        wanted[f"model.{name}"] = torch.zeros_like(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            wanted[f"optimizer.state.{name}.{key}"] = torch.zeros_like(parameter)
    return {key: tensor.detach() for key, tensor in wanted.items()}


@needs_megatron
@pytest.mark.parametrize(("size", "config"), JOBS, ids=str)
@pytest.mark.sample(keep=1)
def test_megatron_reads_and_writes_the_job(
    pool: Pool, tmp_path: Path, size: int, config: dict[str, Any]
) -> None:
    expected = pool.run(size, train_and_save, config, str(tmp_path / "smp"))[0]
    words = ("--format", "megatron-dist")
    assert ckpt("export", tmp_path / "smp", tmp_path / "exported", *words) == 0
    torch.save(wanted_of(make()), tmp_path / "tensors")
    found = by_megatron("load", tmp_path / "exported", tmp_path / "tensors")
    with FolderReader(tmp_path / "smp" / "last_partial") as reader:
        for key in wanted_of(make()):
            entry = key.removeprefix("optimizer.state.").replace("model.", "model/", 1)
            if key.startswith("optimizer."):
                name, _, moment = entry.rpartition(".")
                entry = f"optimizer/{name}/{moment}"
            assert torch.equal(found[key], reader.read(entry)), key
    assert len(found["optimizer"]["param_groups"]) == 2

    # The same values in a folder that the package has written.
    torch.save({**{key: found.pop(key) for key in wanted_of(make())}, "common": found},
               tmp_path / "given")  # fmt: skip
    (tmp_path / "written").mkdir()
    by_megatron("save", tmp_path / "written", tmp_path / "given")
    assert ckpt("import", tmp_path / "written", tmp_path / "imported_partial") == 0
    for values in pool.run(size, resume, config, str(tmp_path)):
        check_equal(values, expected)


def test_folders_for_megatron_come_back(pool: Pool, tmp_path: Path, capsys: Any) -> None:
    config = {"pipeline_parallel_degree": 2}
    expected = pool.run(2, train_and_save, config, str(tmp_path / "smp"))[0]
    folder = tmp_path / "exported"
    assert ckpt("export", tmp_path / "smp", folder, "--format", "megatron-dist") == 0
    assert ckpt("import", folder, tmp_path / "imported_partial") == 0
    for values in pool.run(2, resume, config, str(tmp_path)):
        check_equal(values, expected)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert ckpt("import", folder, tmp_path / "other_partial") == 1
    assert "names {'sharded_backend': 'zarr'}, and" in capsys.readouterr().err


# ---- torchtitan --------------------------------------------------------------------------

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed; pip install --no-deps -r requirements/torchtitan.txt",
)


def resume_by_torchtitan(rank: int, folder: str, loads_all: bool) -> dict[str, Tensor]:
    """Returns the parameters after a further step, or those that were loaded alone."""
    import smp

    smp.init({"ddp": True})
    own = ["dataloader", "lr_scheduler", "train_state"]
    options = {"initial_load_model_only": not loads_all, "exclude_from_loading": own}
    model = make()
    for parameter in model.parameters():
        parameter.data.zero_()
    trainer = Trainer(model, f"{folder}/new", initial_load_path=f"{folder}/dcp", **options)
    assert trainer.checkpoints.load()
    if loads_all:
        trainer.train(batch(STEPS))
    return trainer.values()


def train_by_torchtitan(rank: int, folder: str) -> dict[str, Tensor]:
    """Saves behind some steps; returns the parameters after a further one."""
    import smp

    smp.init({"ddp": True})
    trainer = Trainer(make(), folder)
    for idx in range(STEPS):
        trainer.train(batch(idx))
    assert trainer.checkpoints.save(STEPS)
    trainer.train(batch(STEPS))
    return trainer.values()


@needs_torchtitan
@pytest.mark.parametrize(("size", "config"), JOBS, ids=str)
@pytest.mark.sample(keep=1)
def test_torchtitan_goes_on_as_the_job_does(
    pool: Pool, tmp_path: Path, size: int, config: dict[str, Any]
) -> None:
    expected = pool.run(size, train_and_save, config, str(tmp_path / "smp"))[0]
    words = ("--format", "dcp", "--model-key", "")
    assert ckpt("export", tmp_path / "smp", tmp_path / "dcp", *words) == 0
    for found in pool.run(2, resume_by_torchtitan, str(tmp_path), True):
        assert found.keys() == expected.keys()
        check_equal(expected, found)
    loaded = pool.run(2, resume_by_torchtitan, str(tmp_path), False)[0]
    with FolderReader(tmp_path / "smp" / "last_partial") as reader:
        for name, value in loaded.items():
            saved = name.replace("head", "embed")  # the two are one parameter
            assert torch.equal(value, reader.read(f"model/{saved}")), name


@needs_torchtitan
@pytest.mark.parametrize(("size", "config"), JOBS, ids=str)
@pytest.mark.sample(keep=1)
def test_a_job_goes_on_as_torchtitan_does(
    pool: Pool, tmp_path: Path, capsys: Any, size: int, config: dict[str, Any]
) -> None:
    expected = pool.run(2, train_by_torchtitan, str(tmp_path / "saved"))[0]
    folder, target = tmp_path / "saved" / f"step-{STEPS}", tmp_path / "imported_partial"
    assert ckpt("import", folder, target) == 1
    assert '--model-key "" if it has none' in capsys.readouterr().err
    assert ckpt("import", folder, target, "--model-key", "", "--optimizer-key", "") == 1
    assert "the optimizer's key is ''; give it one of its own" in capsys.readouterr().err
    assert ckpt("import", folder, target, "--model-key", "") == 0
    assert "not imported: dataloader, lr_scheduler, train_state" in capsys.readouterr().out
    for found in pool.run(size, resume, config, str(tmp_path)):
        check_equal(found, expected)


def test_names_that_begin_like_a_key_are_the_models(tmp_path: Path, capsys: Any) -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    state = {**model.state_dict(), "train_state": {"step": torch.tensor(3)}}
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ckpt("import", tmp_path / "dcp", tmp_path / "none") == 1
    assert ckpt("import", tmp_path / "dcp", tmp_path / "new", "--model-key", "") == 0
    with FolderReader(tmp_path / "new") as reader:
        names = {f"model/{name}" for name in model.state_dict()}
        assert reader.manifest.entries.keys() == names
    # Without another key above a value nothing tells them apart; what is left is named.
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    assert ckpt("import", tmp_path / "flat", tmp_path / "part") == 0
    assert "not imported: head.bias, head.weight" in capsys.readouterr().out


def test_a_damaged_tensor_is_an_error(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "dcp"
    checkpoint.save({"model": make().state_dict()}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    values = make().layers[0].weight.detach().numpy().tobytes()
    content[content.index(values) + 3] ^= 1
    file.write_bytes(content)
    assert ckpt("import", folder, tmp_path / "new") == 1
    text = capsys.readouterr().err
    assert "'model.layers.0.weight' cannot be read as data" in text and "damaged: checksum" in text
    assert not (tmp_path / "new").exists()
