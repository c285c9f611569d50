"""Figures of `make gpu`: what is counted, what a line says, and the page that is made of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

from benchmarks.gpu import arithmetic, attention, figures, gptj, nccl, page, ranks
from benchmarks.gpu.arithmetic import Shape
from benchmarks.gpu.attention import backend_of
from benchmarks.gpu.contenders import Way
from benchmarks.gpu.device import Device, Named
from benchmarks.gpu.figures import Figures, Limit, note_end
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.ranks import Ended, results_of

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


def test_layers_have_their_share_of_the_operations() -> None:
    shape = Shape(layers=2, hidden=8, heads=2, rotary=2, vocab=10, seq=4)
    head = 6 * 8 * 10
    assert arithmetic.layers_share(shape) == 1 - head / arithmetic.flops_per_token(shape)


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


class Refuses:
    """A call of PyTorch's function that fails."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self) -> torch.Tensor:
        raise RuntimeError(self._text)


def test_a_backend_that_breaks_the_device_does_not_count_as_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Figures("attention", tmp_path, Device("cpu"), 60.0)
    for text, state in (("No viable backend", "skipped"), ("CUDA error: bad address", "failed")):
        monkeypatch.setattr(attention, "make", lambda *words, text=text: ([], Refuses(text)))
        with made.measuring("forced"):
            attention.forced(made, "no mask, causal", "flash")
        assert lines_of(tmp_path, "attention")[-1]["state"] == state


# ---- GPT-J -----------------------------------------------------------------------------


def variant_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, memory_gb: float, variant: gptj.Variant
) -> list[dict[str, Any]]:
    """Lines of a variant whose steps are not run, on a GPU with so much memory."""

    def measure(figures: Figures, name: str, plan: gptj.Plan, way: Way, words: str) -> None:
        gptj.speed(figures, words, way, 0.5, is_ours=True)

    monkeypatch.setattr(gptj, "measure", measure)
    monkeypatch.setattr(gptj, "roof_of", lambda device: 8e14)
    monkeypatch.setattr(Gpu, "memory_bytes", property(lambda self: int(memory_gb * 1e9)))
    gptj.run_variant(Figures("gptj-steps", folder, Gpu(), 60.0), "smp.nn", variant)
    return lines_of(folder, "gptj-steps")


@pytest.mark.parametrize(("memory_gb", "layers"), [(84, 14), (150, 27), (1000, 28)])
def test_each_line_says_how_many_layers_were_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gb: float, layers: int
) -> None:
    first, *others = variant_lines(tmp_path, monkeypatch, memory_gb, gptj.Variant(4, False))
    assert (first["value"], first["unit"]) == (layers, "of 28")
    used = round(0.9 * memory_gb)
    assert first["note"] == f"28 take 137 GB by the formula, 0.9 of the memory is {used} GB"
    said = "all 28 layers" if layers == 28 else f"{layers} of 28 layers"
    assert others and all(f", {said}, " in line["name"] for line in others)


def test_a_layer_has_a_figure_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = variant_lines(tmp_path, monkeypatch, 84, gptj.Variant(4, False, 8))
    [line] = [line for line in lines if line["name"].endswith("a layer and microbatch")]
    share = arithmetic.layers_share(Shape(layers=14))
    assert line["unit"] == "ms" and line["value"] == pytest.approx(500.0 * share / 14 / 8)
    assert line["note"] == f"{100 * share:.0f} % of the operations are those of the layers"


def test_no_part_says_the_name_of_a_model_that_it_cuts() -> None:
    for part in PARTS.values():
        assert not part.words.startswith("GPT-J")
    assert "as many layers of GPT-J-6B as fit" in PARTS["gptj-steps"].words


def test_both_parts_of_gptj_measure_what_they_say() -> None:
    assert gptj.PLANS["gptj-steps"].shape.layers == 28 and gptj.PLANS["gptj-steps"].updates
    assert gptj.PLANS["gptj-layer"].shape.layers == 1
    for part, plan in gptj.PLANS.items():
        ways = {(v.microbatch, v.recompute) for v in plan.variants}
        assert ways == {(mb, flag) for mb in (4, 8) for flag in (True, False)}
        order = gptj.order_of(part, is_dry=False)
        assert len(set(order)) == len(order) == 3 * len(plan.variants)
        names = [name for name, _ in order[: plan.num_first + 2]]
        assert names == ["smp.nn"] * plan.num_first + ["Hugging Face", "Hugging Face, compiled"]
    # An update weighs less in a step of eight microbatches.
    assert gptj.PLANS["gptj-steps"].variants[1] == gptj.Variant(4, False, 8)


# ---- ranks -----------------------------------------------------------------------------


def test_ranks_that_do_not_end_are_missed_and_those_that_fail_are_failures(tmp_path: Path) -> None:
    made = Figures("nccl", tmp_path, Device("cpu"), 60.0)
    fine, hung = Ended(0, False, 7), Ended(-9, True, None)
    assert results_of([fine, fine]) == [7, 7]
    for ended, state in (([fine, hung], "missed"), ([Ended(-6, False, None), hung], "failed")):
        with made.measuring("ranks"):
            results_of(ended)
        assert lines_of(tmp_path, "nccl")[-1]["state"] == state
    assert lines_of(tmp_path, "nccl")[-1]["note"].startswith(
        "RuntimeError: ranks that failed: {0: 'signal SIGABRT'}, that did not end: [1]"
    )


def test_ranks_reach_each_other_without_the_name_of_their_host() -> None:
    assert ranks._variables(0, 1, "folder")["GLOO_SOCKET_IFNAME"] == "lo"


def test_layouts_of_few_ranks_come_first_and_large_ones_have_time() -> None:
    sizes = [cell.world_size for cell in nccl.CELLS]
    assert sizes == sorted(sizes)
    assert all(nccl.limit_of(cell) == 60.0 * cell.world_size for cell in nccl.CELLS)
    names = [row.name for row in nccl.rows("nccl", is_dry=False)]
    kills = [index for index, name in enumerate(names) if name.startswith("kill ")]
    assert len(kills) == 20
    before = [cell.world_size for cell in nccl.CELLS if names.index(str(cell)) < kills[0]]
    assert set(before) == {2} and names.index(str(nccl.CELLS[-1])) < kills[nccl.FIRST_KILLS]


@pytest.mark.parametrize(
    ("survivor", "killed", "state", "words"),
    [
        (Ended(0, False, {"error": "PeerFailure", "text": "died", "s": 0.1}), -9, "ok", "status 0"),
        (Ended(-6, False, {"error": "E", "text": "t", "s": 1.0}), -9, "failed", "SIGABRT"),
        (Ended(-6, False, None), -9, "failed", "raised nothing and ended with signal SIGABRT"),
        (Ended(0, False, {"error": None}), -9, "failed", "raised nothing"),
        (Ended(-9, True, None), -9, "missed", "was still waiting after"),
        (Ended(0, False, None), 1, "failed", "was to kill itself: status 1"),
    ],
)
def test_a_rank_survives_the_kill_of_its_peer_or_the_kill_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    survivor: Ended,
    killed: int,
    state: str,
    words: str,
) -> None:
    ended = [survivor, Ended(killed, False, None)]
    monkeypatch.setattr(nccl, "run_ranks", lambda *arguments: ended)
    made = Figures("nccl", tmp_path, Device("cpu"), 60.0)
    with made.measuring("kill 1"):
        nccl.abort(made, 1)
    line = lines_of(tmp_path, "nccl")[-1]
    assert line["state"] == state and words in line["note"]


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


def test_memory_is_what_other_processes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5)
    assert Device("cuda").memory_bytes == 65


def test_a_device_that_answers_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu")
    assert device.answers()
    text = "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(device, "synchronize", Refuses(text))
    assert not device.answers()


def test_the_commit_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "0123abc")
    assert figures.commit() == "0123abc"


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


def test_results_that_cannot_be_written_leave_the_page_with_the_lines(tmp_path: Path) -> None:
    measured(tmp_path, Gpu())
    [path] = page.write(tmp_path, tmp_path / "absent")
    assert path.parent == tmp_path


def test_a_line_from_before_the_device_was_reached_does_not_name_the_page(tmp_path: Path) -> None:
    Figures("build", tmp_path, Named("cuda"), 60.0).fail("end", "killed")
    measured(tmp_path, Gpu())
    lines = page.read(tmp_path)
    assert lines[0]["device"] == "a GPU" and page.name_of(lines).startswith("nvidia_h200_20")
    assert page.page(lines).startswith("# `make gpu`: NVIDIA H200 (")


def test_without_figures_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run a part first"):
        page.write(tmp_path, tmp_path)
