"""Figures of `make gpu`: what is counted, what a line says, and the page that is made of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

from benchmarks.gpu import arithmetic, figures, page
from benchmarks.gpu.arithmetic import Shape
from benchmarks.gpu.attention import backend_of
from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures, Limit, note_end
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.tests_of import counts_of

# ---- arithmetic ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(), Shape(3, 32, 4, 4, 57, 16)], ids=str)
def test_parameters_are_those_of_the_model(shape: Shape) -> None:
    config = GPTJConfig(
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        rotary_dim=shape.rotary,
        vocab_size=shape.vocab,
        n_positions=shape.seq,
    )
    with torch.device("meta"):
        model = GPTJForCausalLM(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.matmul_parameters == sum(m.weight.numel() for m in linear)


def test_operations_of_a_token_are_those_of_its_products() -> None:
    shape = Shape(layers=2, hidden=8, heads=2, rotary=2, vocab=10, seq=4)
    products = 2 * (2 * 12 * 8 * 8 + 10 * 8)
    # Scores and weighted values of a token that sees half of the others.
    attention = 2 * (2 * 2 * 4 * 8) / 2
    assert arithmetic.flops_per_token(shape) == 3 * (products + attention)
    assert arithmetic.mfu(100.0, shape, 1e6) == 3e-4 * (products + attention)


def test_bytes_grow_with_layers_and_microbatches_and_fall_with_recomputation() -> None:
    shape = Shape()
    assert arithmetic.layer_bytes(shape, 8) == 14 * 2 * 4096 * 8 * 2048
    whole, less = (arithmetic.activation_bytes(shape, 4, flag) for flag in (False, True))
    assert whole - less == 27 * arithmetic.layer_bytes(shape, 4) - 28 * 2 * 4096 * 4 * 2048
    assert arithmetic.peak_bytes(shape, 4, True) == 18 * shape.parameters + less


def test_as_many_layers_as_fit_are_taken() -> None:
    shape = Shape()
    need = arithmetic.peak_bytes(shape, 4, False)
    assert arithmetic.fitting(shape, 4, False, 2 * need) == shape
    smaller = arithmetic.fitting(shape, 4, False, need)
    assert 1 <= smaller.layers < 28 and smaller.hidden == shape.hidden
    assert arithmetic.peak_bytes(smaller, 4, False) <= 0.9 * need
    with pytest.raises(ValueError, match="no layer of"):
        arithmetic.fitting(shape, 4, False, 1000)


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["void cutlass_gemm", "cudnn_generated_sdpa_sm90_flash_fprop"], "cudnn"),
        (["void pytorch_flash::flash_fwd_kernel<...>"], "flash"),
        (["fmha_cutlassF_bf16_aligned_64x128_rf_sm80"], "efficient"),
        (["ampere_bf16_s16816gemm", "softmax_warp_forward"], "math"),
    ],
)
def test_a_backend_is_known_by_its_kernels(names: list[str], backend: str) -> None:
    assert backend_of(names, is_cuda=True) == backend


# ---- lines -----------------------------------------------------------------------------


class Gpu(Device):
    """A GPU that is not there."""

    def __init__(self, name: str = "NVIDIA H200") -> None:
        super().__init__("cpu")
        self._name = name

    is_cuda = property(lambda self: False)  # type: ignore[assignment]
    is_dry = property(lambda self: False)  # type: ignore[assignment]
    name = property(lambda self: self._name)  # type: ignore[assignment]


def lines_of(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / f"{part}.jsonl").read_text().splitlines()]


def test_a_line_is_there_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    made = Figures("graph", tmp_path, Gpu(), 60.0)
    made.add("x", 0.5, "of a copy", expected=Limit(least=0.85), ms=3.0)
    [line] = lines_of(tmp_path, "graph")
    assert (line["part"], line["name"], line["value"], line["unit"]) == (
        "graph",
        "x",
        0.5,
        "of a copy",
    )
    assert line["state"] == "missed" and line["expected"] == ">= 0.85" and line["bound"] == ""
    assert line["device"] == "NVIDIA H200" and not line["is_dry"]
    assert line["versions"]["torch"] == torch.__version__ and line["commit"]
    assert line["detail"] == {"ms": 3.0} and made.num_failed == 0


def test_what_must_hold_fails_the_part_and_what_is_expected_does_not(tmp_path: Path) -> None:
    made = Figures("graph", tmp_path, Device("cpu"), 60.0)
    made.add("expected", 0.5, "", expected=Limit(least=0.85))  # of a CPU nothing is expected
    assert made.num_failed == 0
    made.add("bound", 2.0, "", bound=Limit(most=1.0))
    made.skip("left out", "no tool")
    made.miss("too much", "out of memory")
    with made.measuring("broken"):
        raise RuntimeError("first line\nsecond line")
    states = {line["name"]: line["state"] for line in lines_of(tmp_path, "graph")}
    assert states == {
        "expected": "ok",
        "bound": "failed",
        "left out": "skipped",
        "too much": "missed",
        "broken": "failed",
    }
    assert made.num_failed == 2
    assert lines_of(tmp_path, "graph")[-1]["note"] == "RuntimeError: first line"


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path: Path) -> None:
    made = Figures("graph", tmp_path, Device("cpu"), 5.0)
    assert made.has_time("short", 1.0) and not made.has_time("long", 100.0)
    [line] = lines_of(tmp_path, "graph")
    assert line["state"] == "skipped" and "takes about 100 s" in line["note"]


def test_a_part_that_was_killed_keeps_its_lines_and_gets_one_more(tmp_path: Path) -> None:
    Figures("graph", tmp_path, Gpu(), 60.0).add("x", 1.0, "")
    for status in (0, 1, 124):
        note_end("graph", tmp_path, Gpu(), status)
    names = [(line["name"], line["state"], line["note"]) for line in lines_of(tmp_path, "graph")]
    assert names == [("x", "ok", ""), ("end", "failed", "ended by its limit")]


def test_without_a_device_only_a_dry_run_starts() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="DEVICE=cpu makes a dry run"):
        Device("cuda")
    assert Device("cpu").is_dry


def test_the_commit_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "0123abc")
    assert figures.commit() == "0123abc"


def test_reports_of_tests_are_counted() -> None:
    counts = counts_of(
        """<testsuites><testsuite time="2.5">
        <testcase classname="a" name="passes"/>
        <testcase classname="a" name="fails"><failure message="x"/></testcase>
        <testcase classname="a" name="breaks"><error message="x"/></testcase>
        <testcase classname="a" name="waits"><skipped message="x"/></testcase>
        </testsuite></testsuites>"""
    )
    assert (counts.passed, counts.skipped, counts.seconds) == (1, 1, 2.5)
    assert counts.failed == ("a::fails", "a::breaks")


# ---- the page --------------------------------------------------------------------------


def measured(folder: Path, device: Device) -> None:
    made = Figures("graph", folder, device, 60.0)
    made.add("time | call", 12.3456, "us")
    made.add("differences", 0, "", bound=Limit(most=0.0))
    made = Figures("kernels", folder, device, 60.0)
    made.skip("memcheck", "there is no compute-sanitizer")


def test_the_page_has_a_table_for_each_part(tmp_path: Path) -> None:
    measured(tmp_path, Gpu())
    text = page.page(page.read(tmp_path))
    assert text.startswith("# `make gpu`: NVIDIA H200 (")
    assert "| time \\| call | 12.35 us |  | ok |  |" in text
    assert "| differences | 0 | <= 0 | ok |  |" in text
    assert "| memcheck |  |  | skipped | there is no compute-sanitizer |" in text
    assert "dry run" not in text and "3 lines: 2 ok, 0 missed, 1 skipped, 0 failed" in text
    order = [text.index(f"(`{part}`)") for part in PARTS]
    assert order == sorted(order) and text.count("Did not run.") == len(PARTS) - 2


def test_equal_lines_make_equal_pages(tmp_path: Path) -> None:
    measured(tmp_path, Gpu())
    lines = page.read(tmp_path)
    again = [json.loads(json.dumps(line, sort_keys=True)) for line in lines]
    assert page.page(lines) == page.page(again)


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    measured(tmp_path, Gpu())
    with (tmp_path / "graph.jsonl").open("a") as file:
        file.write('{"part": "graph", "na')
    assert len(page.read(tmp_path)) == 3


def test_figures_of_a_gpu_go_to_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    measured(tmp_path, Gpu())
    page.write(tmp_path, results)
    [name] = {path.stem for path in results.iterdir()}
    assert name.startswith("gpu_nvidia_h200_20")
    assert (results / f"{name}.md").read_text() == (tmp_path / f"{name}.md").read_text()
    lines = (results / f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(line)["part"] for line in lines] == ["kernels", "graph", "graph"]
    page.write(tmp_path, results, "first")
    assert (results / "gpu_first.md").exists()


def test_a_dry_run_is_marked_and_never_goes_to_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    measured(tmp_path, Gpu())
    Figures("share", tmp_path, Device("cpu"), 60.0).add("hop", 1.0, "ms")  # one line is enough
    [path] = page.write(tmp_path, results)
    assert "no figure on this page was measured on a GPU" in path.read_text()
    assert path.parent == tmp_path and list(results.iterdir()) == []


def test_without_figures_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run a part first"):
        page.write(tmp_path, tmp_path)
