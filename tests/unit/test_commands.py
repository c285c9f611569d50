"""Common parts of commands about models: the model's origin, the output, the exit status."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants as hub_constants
from torch import nn
from transformers import AutoConfig

from smp.commands import ending, printing, report
from smp.commands.ending import BadUse, DoesNotFit
from smp.commands.models import load_model

HERE = "tests.unit.test_commands"
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 100,
}


def plain() -> nn.Module:
    return nn.Linear(4, 4)


def with_inputs() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(4, 3), {"input": torch.zeros(1, 7, 4)}


def huge() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(1 << 20, 1 << 20, bias=False), torch.zeros(1, 1 << 20)


def returns_text() -> str:
    return "gpt2"


def fails() -> nn.Module:
    raise RuntimeError("no such table\nsecond line")


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return str(tmp_path)


def test_model_of_a_folder_has_no_memory_and_arguments_with_labels(gpt2: str) -> None:
    loaded = load_model(gpt2)
    assert {p.device.type for p in loaded.module.parameters()} == {"meta"}
    assert loaded.module.training and loaded.trained == "GPT2LMHeadModel"
    args, kwargs = loaded.call(3, 16)
    assert args == () and {name: tuple(t.shape) for name, t in kwargs.items()} == {
        "input_ids": (3, 16),
        "labels": (3, 16),
    }
    assert loaded.call(1, None)[1]["input_ids"].shape == (1, 64)


def test_function_gives_model_and_arguments_of_any_batch() -> None:
    loaded = load_model(f"{HERE}:with_inputs")
    assert {p.device.type for p in loaded.module.parameters()} == {"meta"}
    assert loaded.call(5, None)[1]["input"].shape == (5, 7, 4)
    assert loaded.call(5, None)[1]["input"].device.type == "cpu"


def test_four_terabytes_are_not_allocated() -> None:
    loaded = load_model(f"{HERE}:huge")
    assert sum(p.numel() for p in loaded.module.parameters()) == 1 << 40


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/no/such/folder", "no model '/no/such/folder'"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:no_function", "cannot be imported: AttributeError"),
        (f"{HERE}:GPT2", "GPT2 is no function"),
        (f"{HERE}:fails", "raised RuntimeError: no such table"),
        (f"{HERE}:returns_text", "returned str; expected a module"),
        (f"{HERE}:plain", "nothing is known of the arguments of Linear"),
    ],
)
def test_model_that_cannot_be_built_is_one_line(name: str, text: str) -> None:
    with pytest.raises(BadUse) as raised:
        load_model(name)
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("answers", [False, True])
def test_hub_that_cannot_be_reached_is_an_error_at_once(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips the hub's client, which retries, both for a closed and for a silent port."""
    told = []
    real = AutoConfig.from_pretrained

    def look(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", look)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not answers:
            server.close()
        monkeypatch.setattr(hub_constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(BadUse, match=f"http://127.0.0.1:{port} cannot be reached") as raised:
            load_model("nobody/has-this-model")
    assert told == [{"local_files_only": True}]
    assert "\n" not in str(raised.value) and "expected a folder" in str(raised.value)


def test_what_was_downloaded_is_there_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--somebody--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    assert load_model("somebody/tiny").trained == "GPT2LMHeadModel"


def test_too_many_tokens_are_refused(gpt2: str) -> None:
    with pytest.raises(BadUse, match="64 tokens at most, got --seq 65"):
        load_model(gpt2).call(1, 65)


@pytest.mark.parametrize(
    ("error", "status"), [(BadUse("too bad"), ending.BAD_USE), (DoesNotFit("by 1 GB"), ending.NO)]
)
def test_errors_become_a_line_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise error

    assert ending.guarded("plan", run)(argparse.Namespace()) == status
    captured = capsys.readouterr()
    assert captured.err == f"smp plan: {error}\n" and captured.out == ""


def test_table_prints_names_with_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = report.Table(("module", "bytes"), [("h.[0-5]", "1"), ("[bold]", "22")])
    report.print_blocks([report.Text("sizes"), table, report.OnPage("<hr>")])
    assert capsys.readouterr().out.splitlines() == [
        "sizes",
        "module   bytes",
        "h.[0-5]      1",
        "[bold]      22",
    ]


def test_pages_have_the_blocks_and_no_markup_of_names(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    table = report.Table(("module",), [("<b>",)])
    report.write_page(path, "a & b", [report.Heading("h"), table, report.Listing(["x", " y"])])
    text = path.read_text()
    assert "<title>a &amp; b</title>" in text and "<td>&lt;b&gt;</td>" in text
    assert "<h2>h</h2>" in text and "<pre>x\n y</pre>" in text and "<b>" not in text
    with pytest.raises(BadUse, match="cannot write"):
        report.write_page(tmp_path, "title", [])


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 << 30), ("80GB", 80_000_000_000), ("1.5 kB", 1500), ("12", 12), ("7B", 7)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert printing.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "12iB", "-1GB", "0", "80 apples"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a size like 80GiB"):
        printing.parse_bytes(text)


def test_quantities_have_three_digits() -> None:
    assert [printing.bytes_text(n) for n in (0, 999, 1 << 20, 79.6 * 2**30)] == [
        "0 B", "999 B", "1 MiB", "79.6 GiB",
    ]  # fmt: skip
    assert [printing.count_text(n) for n in (7, 1_234_567, 175e9)] == ["7", "1.23 M", "175 G"]
