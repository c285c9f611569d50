"""``smp ckpt`` on stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp.checkpoint import manifest as manifests
from smp.checkpoint.store import names
from smp.checkpoint.store.objects import ObjectStore
from tests.unit import s3_server
from tests.unit.test_checkpoint_cli import _run, _save, _state


@pytest.fixture(params=["file", pytest.param("s3", marks=s3_server.NEEDED)])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SMP_STORE_FOLDER", str(tmp_path / "cache"))
    if request.param == "s3":
        for name, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(name, value)
        return f"s3://{s3_server.BUCKET}/{tmp_path.name}"
    return f"file://{tmp_path}/store"


def changed() -> dict[str, object]:
    state = _state()
    state["model/scale"] = state["model/scale"] + 1
    return dict(state)


def test_commands_work_on_stores(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ckpts"
    old = _save(path, "old_partial", _state(), 1, 2, 3)
    new = _save(path, "new_partial", changed(), 0, 1, 2)  # type: ignore[arg-type]
    assert _run("send", path, address, "--tag", "new") == 0
    assert _run("send", old, address) == 0
    told = capsys.readouterr().out
    num_files = len(manifests.read(old).files)
    assert f": complete, {num_files} files sent, 0 were there" in told
    assert _run("send", old, address) == 0
    assert f": complete, 0 files sent, {num_files} were there" in capsys.readouterr().out

    assert _run("list", address) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(".")[0] for line in lines] == ["old_partial", "new_partial"]
    assert all(line.endswith(", complete") for line in lines)

    assert _run("info", address, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"].startswith(f"{address}/new_partial.")
    assert facts["layout"]["sizes"] == {"pp": 1, "tp": 1, "rdp": 2}
    cached = [p.name for p in (tmp_path / "cache").rglob("*") if p.suffix == ".pt"]
    assert cached == [], "the manifest is enough"

    assert _run("diff", address, old) == 1
    assert "model/scale" in capsys.readouterr().out
    assert _run("diff", address, new) == 0
    assert _run("diff", old, address, "--tag", "old_partial") == 1  # the tag is of the first
    capsys.readouterr()
    assert _run("verify", address) == 0
    assert "all as written" in capsys.readouterr().out

    assert _run("fetch", address, tmp_path / "got" / "x_partial", "--tag", "old") == 0
    assert _run("verify", tmp_path / "got" / "x_partial") == 0
    assert _run("diff", tmp_path / "got", old, "--tag", "x") == 0
    assert [p.name for p in (tmp_path / "got").iterdir()] == ["x_partial"]
    assert _run("fetch", address, tmp_path / "got" / "x_partial") == 1
    assert "exists already" in capsys.readouterr().err

    assert _run("reshard", address, tmp_path / "one_partial") == 0
    assert _run("diff", address, tmp_path / "one_partial") == 0
    assert _run("export", address, tmp_path / "exported", "--tag", "old") == 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()

    capsys.readouterr()
    assert _run("prune", address, "--keep", 1) == 0
    assert capsys.readouterr().out.startswith(f"deleted {address}/old_partial.")
    assert _run("info", address, "--tag", "old") == 1
    assert "no complete checkpoint 'old'; it has: new_partial" in capsys.readouterr().err


def test_what_is_wrong_in_a_store_is_said(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = _save(tmp_path / "ckpts", "a_partial", _state(), 1, 2, 3)
    assert _run("send", saved, address) == 0
    assert _run("diff", address, saved) == 0  # now it lies in the cache
    store = ObjectStore(names.parse(address))
    (key,) = store.generations()
    wrong = bytearray((saved / "model_0.pt").read_bytes())
    wrong[-700] ^= 1
    (tmp_path / "wrong").write_bytes(wrong)
    (tmp_path / "short").write_bytes(b"x")
    store.put(key, "model_0.pt", tmp_path / "wrong")
    store.put(key, "model_1.pt", tmp_path / "short")
    store.put(key, "strange", tmp_path / "short")
    store.delete(key, "model_2.pt")
    capsys.readouterr()
    assert _run("verify", address) == 1, "the store is read, not the cache"
    told = capsys.readouterr().out
    assert "model_0.pt is damaged" in told and "model_1.pt: 1 bytes, " in told
    assert "model_2.pt: missing" in told and "strange: not in the manifest" in told
    assert "4 problems" in told
    store.delete(key, manifests.FILE_NAME)
    assert _run("verify", address) == 1
    assert "has no complete checkpoint; it has: none" in capsys.readouterr().err
    assert _run("list", address) == 0
    assert capsys.readouterr().out.strip().endswith(", not complete")
    # A damaged file of a folder is not sent.
    store.delete(key, "model_0.pt")
    (saved / "model_0.pt").write_bytes(wrong)
    assert _run("send", saved, address) == 1
    assert "model_0.pt is damaged" in capsys.readouterr().err


def test_folders_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save(tmp_path, "a_partial", _state())
    _save(tmp_path, "b_partial", _state())
    assert _run("list", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["a_partial", "b_partial"]
