"""``smp ckpt`` on folders of other layouts, without a job."""

from __future__ import annotations

import argparse
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from smp.checkpoint import archive, cli, exporting, folder, reader
from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import Deferred
from smp.checkpoint.folder import Generation
from smp.checkpoint.manifest import Block, Layout, Manifest, ManifestError, Piece, StoredEntry
from smp.checkpoint.reader import FolderReader
from smp.nn.huggingface import gpt2
from smp.tensor_parallel.parts import Part

State = dict[str, torch.Tensor]


def _run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["ckpt", *map(str, arguments)])
    status: int = parsed.execute(parsed)
    return status


def _state() -> State:
    generator = torch.Generator().manual_seed(1)
    return {
        "model/embed.weight": torch.randn(12, 8, generator=generator),
        "model/h.0.w": torch.randn(6, 8, 4, generator=generator).bfloat16(),
        "model/h.0.mask": torch.tensor([True, False, True]),
        "model/scale": torch.tensor(2.0),
        "master/embed.weight": torch.randn(12, 8, dtype=torch.float64, generator=generator),
        "optimizer/h.0.w/exp_avg": torch.randn(6, 8, 4, generator=generator),
    }


def _cut(entry: torch.Tensor, dim: int, num_slices: int, num_shards: int) -> list[Part]:
    """Parts of a tensor-parallel and sharded layout; what cannot be cut is whole."""
    shape = tuple(entry.shape)
    if dim >= entry.dim() or shape[dim] % num_slices:
        slices = [(-1, 0, entry.numel(), entry.numel())]
    else:
        step = shape[dim] // num_slices
        slices = [(dim, i * step, (i + 1) * step, shape[dim]) for i in range(num_slices)]
    parts = []
    for cut in slices:
        count = entry.numel() // max(cut[3], 1) * (cut[2] - cut[1])
        step = math.ceil(count / num_shards)
        for i in range(num_shards):
            begin = min(count, i * step)
            parts.append(Part(*cut, begin, min(count, begin + step) - begin))
    return parts


def _values(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    piece = tensor.flatten() if part.dim == -1 else tensor.movedim(part.dim, 0)
    piece = piece[part.begin : part.end]
    piece = piece if part.dim == -1 else piece.movedim(0, part.dim)
    return piece.flatten()[part.flat_begin : part.flat_begin + part.flat_numel]


def _save(
    path: Path,
    name: str,
    state: State,
    dim: int = 0,
    num_slices: int = 1,
    num_shards: int = 1,
    values: dict[str, Any] | None = None,
) -> Path:
    generation = Generation.begin(path, name, folder.new_generation())
    files: dict[str, dict[str, torch.Tensor]] = {}
    parts: dict[str, dict[str, Part]] = {}
    for entry, tensor in state.items():
        for idx, part in enumerate(_cut(tensor, dim, num_slices, num_shards)):
            file = f"{entry.partition('/')[0]}_{idx}.pt"
            files.setdefault(file, {})[entry] = _values(tensor, part)
            parts.setdefault(file, {})[entry] = part
    pieces = [Piece(values=values or {"steps": 7, "groups": [{"lr": 0.1}]})]
    for file, tensors in files.items():
        written = archive.write(generation.folder / file, tensors)
        piece = Piece({file: written.record})
        for place in written.places:
            entry = place.keys[0]
            whole = state[entry]
            block = Block(file, place.offset, parts[file][entry])
            dtype = str(whole.dtype).removeprefix("torch.")
            piece.entries[entry] = StoredEntry(dtype, tuple(whole.shape), [block])
        pieces.append(piece)
    (generation.folder / "user_content.pt").write_bytes(b"anything")
    record = manifests.record_of(generation.folder / "user_content.pt")
    pieces.append(Piece({"user_content.pt": record}))
    sizes = {"pp": 1, "tp": num_slices, "rdp": num_shards}
    generation.commit(
        Manifest.assemble(
            generation.generation, {"smp": "1.0"}, Layout({"ddp": True}, sizes), pieces
        )
    )
    return generation.target


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return _save(tmp_path / "ckpts", "a_partial", _state(), 1, 2, 3)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_part_is_read_from_any_layout(tmp_path: Path, dim: int) -> None:
    state = _state()
    path = _save(tmp_path, "a_partial", state, dim, 2, 3)
    with FolderReader(path) as opened:
        assert sum(len(e.blocks) for e in opened.manifest.entries.values()) > 18
        for name, tensor in state.items():
            assert torch.equal(opened.read(name), tensor)
            for wanted_dim in range(3):
                for part in _cut(tensor, wanted_dim, 2, 2):
                    assert torch.equal(opened.read(name, part), _values(tensor, part))
        with pytest.raises(ValueError, match="cannot be read into"):
            opened.read("model/scale", into=torch.empty(2))
        with pytest.raises(KeyError, match="no entry model/x"):
            opened.read("model/x")


def test_what_is_stored_nowhere_is_named(saved: Path) -> None:
    manifest = manifests.read(saved)
    entry = manifest.entries["model/embed.weight"]
    del entry.blocks[2]
    with pytest.raises(ManifestError, match="entry model/embed.weight: .*stored nowhere"):
        reader.plan("model/embed.weight", entry, Part.whole(entry.shape))


def test_info(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("info", saved.parent, "--entries") == 0
    text = capsys.readouterr().out
    assert "tp 2, rdp 3" in text and "model/h.0.w  bfloat16 [6, 8, 4]  6 blocks" in text
    assert "model       4 tensors, 292 elements" in text
    assert _run("info", saved, "--json", "--entries") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kinds"]["master"] == {"tensors": 1, "elements": 96, "bytes": 768}
    assert facts["entries"]["model/scale"]["shape"] == []


def test_verify_names_every_file_whose_byte_was_flipped(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("verify", saved) == 0
    assert "all as written" in capsys.readouterr().out
    names = sorted(p.name for p in saved.iterdir())
    assert len(names) >= 14
    for name in names:
        content = (saved / name).read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            damaged = bytearray(content)
            damaged[at] ^= 1
            (saved / name).write_bytes(damaged)
            assert _run("verify", saved) == 1
            assert name in capsys.readouterr().out.splitlines()[0]
        (saved / name).write_bytes(content)
    assert _run("verify", saved) == 0


def test_who_reads_a_flipped_byte_is_told(saved: Path) -> None:
    """Every file with elements: reading all of them names it."""
    for path in sorted(saved.glob("*_?.pt")):
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(content) // 3] ^= 4
        path.write_bytes(damaged)
        with FolderReader(saved) as opened, pytest.raises(RuntimeError, match=f"{path}: bytes"):
            for name in opened.manifest.entries:
                opened.read(name)
        path.write_bytes(content)


def test_verify_tells_what_is_missing_short_or_foreign(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "model_0.pt").unlink()
    (saved / "master_0.pt").write_bytes(b"short")
    (saved / "stranger").write_bytes(b"")
    assert _run("verify", saved) == 1
    text = capsys.readouterr().out
    for expected in ("model_0.pt: missing", "master_0.pt: 5 bytes,", "stranger: not in the"):
        assert expected in text
    assert "3 problems" in text


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("info", tmp_path) == 1
    assert capsys.readouterr().err.startswith(f"smp ckpt: {tmp_path} has no file 'newest'")
    for command in (["info"], ["verify"], ["info", "--tag", "x"], ["diff", tmp_path]):
        assert _run(command[0], tmp_path / "gone", *command[1:]) == 1
        text = f"smp ckpt: {tmp_path / 'gone'} does not exist; name a checkpoint, or the folder "
        assert capsys.readouterr().err.startswith(text)
    (tmp_path / "file").touch()
    assert _run("info", tmp_path / "file") == 1
    assert f"{tmp_path / 'file'} is a file; name the folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _run("export", tmp_path, tmp_path / "x", "--max-shard-size", "lots")
    assert "'lots' is not a size" in capsys.readouterr().err


def test_diff_compares_across_layouts(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _save(tmp_path, "b_partial", _state(), 0, 3, 2)
    assert _run("diff", saved, other) == 0
    assert "equal: 6 tensors" in capsys.readouterr().out
    state = _state()
    state["model/embed.weight"][3, 5] += 0.5
    state["model/h.0.w"][0, 0, 0] = math.nan
    state["model/scale"] = torch.tensor([2.0])
    del state["master/embed.weight"]
    state["model/new"] = torch.ones(2)
    values = {"steps": 8, "groups": [{"lr": 0.1}], "more": 1}
    changed = _save(tmp_path, "c_partial", state, values=values)
    assert _run("diff", saved, changed) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "model/embed.weight: 1 of 96 elements differ, by up to 0.5",
        "model/h.0.w: 1 of 192 elements differ, by up to nan",
        "model/scale: float32 [] became float32 [1]",
        "master/embed.weight: only in the first",
        "model/new: only in the second",
        "values.steps: 7 became 8",
        "values.more: only in the second",
        "7 differences",
    ]
    assert _run("diff", changed, changed) == 0, "not-a-number equals itself"


@pytest.mark.parametrize("num_parts", [1, 3])
def test_reshard(
    saved: Path, tmp_path: Path, num_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "a_partial"
    assert _run("reshard", saved, target, "--parts", num_parts) == 0
    assert _run("verify", target) == 0 and _run("diff", saved, target) == 0
    kinds = ("model", "optimizer", "fp16_states")
    expected = {f"{kind}_{i}.pt" for kind in kinds for i in range(num_parts)}
    names = {p.name for p in target.iterdir()}
    assert names == expected | {"user_content.pt", "manifest.json"}
    assert not (target.parent / "newest").exists()
    assert folder.find(target.parent, "a") == target
    manifest = manifests.read(target)
    assert set(manifest.layout.sizes.values()) == {1} and manifest.values["steps"] == 7
    if num_parts == 1:
        model = torch.load(target / "model_0.pt", weights_only=True, mmap=True)
        assert torch.equal(model["h.0.w"], _state()["model/h.0.w"])
    assert _run("reshard", saved, target) == 1
    assert "exists already" in capsys.readouterr().err


def test_reshard_of_a_damaged_folder_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    path = saved / "model_1.pt"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    target = tmp_path / "out" / "a_partial"
    assert _run("reshard", saved, target) == 1
    assert list(target.parent.iterdir()) == []


def _loaded(target: Path) -> State:
    state: State = {}
    for path in sorted(target.glob("*.safetensors")):
        state.update(safetensors.torch.load_file(path))
    return state


def _same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def test_export_keeps_names(saved: Path, tmp_path: Path) -> None:
    expected = {
        name.removeprefix("model/"): tensor
        for name, tensor in _state().items()
        if name.startswith("model/")
    }
    assert _run("export", saved, tmp_path / "one") == 0
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert _same(_loaded(tmp_path / "one"), expected)
    with safetensors.safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}

    assert _run("export", saved, tmp_path / "many", "--max-shard-size", "400B") == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [p.name for p in shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert _same(_loaded(tmp_path / "many"), expected)

    assert _run("export", saved, tmp_path / "half", "--dtype", "float16") == 0
    half = _loaded(tmp_path / "half")
    assert half["embed.weight"].dtype == torch.float16 and half["h.0.mask"].dtype == torch.bool
    assert _run("export", saved, tmp_path / "half") == 1, "nothing is overwritten"


def _gpt2_of_theirs() -> State:
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {"transformer.wte.weight": make(30, 8), "transformer.wpe.weight": make(16, 8)}
    for i in range(3):
        h = f"transformer.h.{i}."
        sizes = {
            "ln_1": (8, None),
            "attn.c_attn": (8, 24),
            "attn.c_proj": (8, 8),
            "ln_2": (8, None),
            "mlp.c_fc": (8, 32),
            "mlp.c_proj": (32, 8),
        }
        for name, (rows, columns) in sizes.items():
            state[f"{h}{name}.weight"] = make(rows, columns) if columns else make(rows)
            state[f"{h}{name}.bias"] = make(columns or rows)
    state["transformer.ln_f.weight"] = make(8)
    state["transformer.ln_f.bias"] = make(8)
    return state


@pytest.mark.parametrize("told_by", ["manifest", "option"])
def test_export_translates_families(tmp_path: Path, told_by: str) -> None:
    theirs = _gpt2_of_theirs()
    module_cls = gpt2.FAMILY.classes["head"]
    tied = {**theirs, "lm_head.weight": theirs["transformer.wte.weight"]}
    ours = gpt2.FAMILY.translators("head")[1](tied)
    assert any("seq_layers.2" in name for name in ours)
    ours = {name: t.clone() for name, t in ours.items() if not name.endswith("lm_head.weight")}
    state = {f"model/{name}": tensor for name, tensor in ours.items()}
    values: dict[str, Any] = {"registrations": [["gpt2", module_cls]]}
    told = values if told_by == "manifest" else None
    path = _save(tmp_path, "a_partial", state, 0, 2, 2, told)
    options = [] if told_by == "manifest" else ["--from", f"gpt2:{module_cls}"]
    assert _run("export", path, tmp_path / "hf", "--max-shard-size", "3KB", *options) == 0
    exported = _loaded(tmp_path / "hf")
    # Some releases of transformers have masks beside the weights.
    exported = {n: t for n, t in exported.items() if ".attn.bias" not in n and "masked" not in n}
    assert _same(exported, theirs)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2


def test_a_family_that_is_unknown_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no translation for X of the family gpt9"):
        exporting.translator("gpt9", "X")


def test_folders_may_be_larger_than_memory(tmp_path: Path) -> None:
    """Resharding, comparing and exporting 200 MB takes far less."""
    generation = Generation.begin(tmp_path, "big_partial", "1")
    num_tensors, numel = 25, 2_000_000
    tensors = {
        f"w{i}": Deferred((numel,), torch.float32, lambda i=i: torch.full((numel,), float(i)))
        for i in range(num_tensors)
    }
    options = archive.WriteOptions(buffer_bytes=1 << 20)
    written = archive.write(generation.folder / "model_0.pt", tensors, options)
    entries = {
        f"model/w{i}": StoredEntry(
            "float32", (numel,), [Block("model_0.pt", place.offset, Part.whole((numel,)))]
        )
        for i, place in enumerate(written.places)
    }
    files = {"model_0.pt": written.record}
    generation.commit(Manifest("1", {}, Layout({}, {}), files, entries, {}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = tmp_path / "big_partial"
    assert _run("reshard", source, tmp_path / "two_partial", "--parts", 2) == 0
    assert _run("diff", source, tmp_path / "two_partial") == 0
    assert _run("export", source, tmp_path / "hf") == 0
    assert _run("verify", source) == 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 160, f"{grown:.0f} MiB"
