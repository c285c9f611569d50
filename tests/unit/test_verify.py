"""Decisions of `smp verify` without a process: layouts, kept arguments, rounding differences."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import nn

from smp.commands.ending import BadUse
from smp.commands.verify.command import SplitWords, divide
from smp.commands.verify.compare import EXACT, HALF, NEAR
from smp.commands.verify.layouts import ALL, ALONE, parse_layouts
from smp.observe.verification.arguments import KeptArguments
from smp.observe.verification.comparison import (
    Difference,
    Stage,
    differences,
    first_module,
    in_words,
    share_of,
)
from smp.observe.verification.order import Order
from smp.observe.verification.rows import row_of
from tests.patience import PATIENCE_S

# ---- layouts


def test_names_of_layouts() -> None:
    (layout,) = parse_layouts("pp2tp2dp4")
    assert (layout.pp, layout.tp, layout.dp, layout.num_processes) == (2, 2, 4, 16)
    assert [one.name for one in parse_layouts("all")] == list(ALL)
    (partly,) = parse_layouts("sdp2dp4")
    assert (partly.dp, partly.sdp, partly.num_processes) == (4, 2, 4)
    sharded, state, experts = parse_layouts("sdp2, os4,ep2,sdp2")
    assert (sharded.dp, sharded.sdp) == (2, 2)
    assert (state.dp, state.shards_state) == (4, True)
    assert (experts.tp, experts.spreads_experts) == (2, True)
    sequences, shards = parse_layouts("cp2,cp2sdp2dp1")
    assert (sequences.cp, sequences.dp, sequences.num_processes) == (2, 1, 2)
    assert sequences.configuration({})["context_parallel_degree"] == 2
    assert (shards.sdp, shards.num_processes) == (2, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no layout"),
        ("pp2,xx3", "'xx3' is no layout"),
        ("pp", "'pp' is no layout"),
        ("pp2pp2", "gives a degree twice"),
        ("pp1", "has 1 processes"),
        ("pp8dp4", "has 32 processes"),
        ("sdp2os2", "give one of both"),
        ("dp4sdp3", "over a divisor of the 4 replicas"),
        ("dp4os2", "over all 4 replicas"),
        ("tp2ep4", "over all tensor-parallel ranks"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadUse, match=words):
        parse_layouts(text)


def test_layout_takes_the_place_of_degrees_and_keeps_the_rest() -> None:
    given = {"microbatches": 4, "pipeline_parallel_degree": 8, "bf16": True}
    (layout,) = parse_layouts("pp2")
    values = layout.configuration(given)
    assert values["pipeline_parallel_degree"] == 2 and values["microbatches"] == 4
    assert values["bf16"] is True and "auto_partition" not in values
    assert layout.configuration(given, is_exact=True)["bf16"] is False
    assert ALONE.configuration(given)["auto_partition"] is True


# ---- arguments


def test_arguments_come_back_with_the_models_of_the_other_process() -> None:
    model, batch = (
        nn.Linear(2, 2),
        {"x": torch.randn(3, 2), "mask": torch.ones(3, dtype=torch.bool)},
    )
    kept = KeptArguments(((model, OrderedDict(batch)), {"scale": 2.0, "again": model}))
    other = nn.Linear(2, 2)
    (found, back), rest = KeptArguments(
        ((other, OrderedDict(x=torch.zeros(1, 2))), {"scale": 1.0, "again": other})
    ).restored(kept.data)
    assert found is other and rest == {"scale": 2.0, "again": other}
    assert list(back) == ["x", "mask"] and all(torch.equal(back[k], batch[k]) for k in batch)


def test_equal_arguments_have_equal_bytes() -> None:
    x = torch.randn(4, 3)
    assert KeptArguments({"x": x}).data == KeptArguments({"x": x.clone()}).data
    assert KeptArguments({"x": x}).data != KeptArguments({"x": x + 1e-6}).data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_floating_point_arguments_are_cast_and_others_are_not(dtype: torch.dtype) -> None:
    given: dict[str, Any] = {"x": torch.randn(2, 2).to(dtype), "i": torch.arange(3), "e": [1, "a"]}
    back = KeptArguments(given, torch.float64).restored()
    assert back["x"].dtype == torch.float64 and torch.equal(back["x"], given["x"].double())
    assert back["i"].dtype == torch.int64 and back["e"] == [1, "a"]


# ---- what is rounding


def test_shares_of_differences() -> None:
    one = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert share_of(one, one, 0.0) == 0.0
    assert share_of(one * 1.1, one, 0.0) == pytest.approx(0.1 / 1.1)
    assert share_of(one * 1e-9, one * 0, 1.0) == pytest.approx(5e-9)
    assert share_of(one * 1.1, one, 0.0, slack=0.6) == 0.0
    assert share_of(one[:1], one, 0.0) == float("inf")
    assert share_of(one * float("nan"), one, 0.0) == float("inf")
    both = torch.tensor([float("inf"), 1.0], dtype=torch.float64)
    assert share_of(both, both, 0.0) == 0.0


def share_of_half(real: torch.Tensor, one: torch.Tensor, exact: torch.Tensor) -> float:
    """Difference of 16 bits from float64, over that of one process; 0.0 if it is rounding."""
    stages = [Stage(items={("gradient", "w"): value}) for value in (real, exact, one)]
    found = list(differences(stages[0], stages[1], HALF, stages[2]))
    return max((difference.share for difference in found), default=0.0)


def test_sixteen_bits_may_be_as_wrong_as_one_process_times_four() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000, dtype=torch.float64, generator=generator)
    one = exact.bfloat16().double()
    other = (exact * 1.001).bfloat16().double()
    assert share_of_half(one, one, exact) == share_of_half(other, one, exact) == 0.0
    largest: dict[str, float] = {}
    stages = [Stage(items={("output", "x"): value}) for value in (one, exact)]
    assert not list(differences(*stages, HALF, stages[0], largest))
    assert largest["output"] == pytest.approx(1.0)
    assert 4 < share_of_half(exact * 1.05, one, exact) < 100
    assert share_of_half(exact * float("nan"), one, exact) == float("inf")
    assert share_of_half(exact[:3], one, exact) == float("inf")


def found_in(real: dict[Any, Any], one: dict[Any, Any]) -> list[Difference]:
    return list(differences(Stage(items=real), Stage(items=one), NEAR))


def test_small_quantities_are_measured_by_the_largest_of_their_kind() -> None:
    one = {("gradient", "a"): torch.ones(3), ("gradient", "b"): torch.full((3,), 1e-6)}
    assert not found_in(one | {("gradient", "b"): torch.full((3,), 1.05e-6)}, one)
    (difference,) = found_in(one | {("gradient", "b"): torch.full((3,), 2e-6)}, one)
    assert difference.name == "b" and difference.share == pytest.approx(1e-4)


def test_gradient_that_did_not_come_is_zero_and_an_unknown_value_is_passed_over() -> None:
    one = {("gradient", "a"): torch.ones(3), ("value", "b"): torch.ones(3)}
    (difference,) = found_in({}, one)
    assert difference.words().startswith("the gradient of 'a' differs: none came, norm 0 instead")
    assert not found_in({}, {("gradient", "a"): torch.zeros(3)})


def test_first_module_differs_from_all_calls_of_a_rank() -> None:
    x, y = row_of(torch.ones(2)), row_of(torch.zeros(2))
    one = {(0, "a", 0): [x], (0, "a", 1): [y], (0, "b", 0): [x]}
    other_order = {(0, "a", 0): [y], (0, "a", 1): [x], (0, "b", 0): [x]}
    assert first_module([("rank 1", other_order)], one, EXACT.limit) is None
    found = first_module([("rank 1", other_order | {(0, "b", 0): [y]})], one, EXACT.limit)
    assert found is not None and (found.name, found.place) == ("b", "rank 1")
    halves = {(0, "b", 0): [row_of(torch.ones(1))]}
    assert first_module([("rank 1", halves)], one, EXACT.limit) is None


def test_factors_are_told() -> None:
    one = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert "(0.5 times it)" in in_words(one / 2, one)
    assert "times" not in in_words(one.flip(0), one)
    assert in_words(one[:1], one) == "shape (1,) instead of (2,)"
    assert in_words(one[:1], one[1:]) == "3 instead of 4"


# ---- the command


def test_order_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    Order("somewhere", 3, True).write(path)
    assert Order.read(str(path)) == Order("somewhere", 3, True, None)
    path.write_text("{}")
    with pytest.raises(ValueError, match="SMP_VERIFY=.*is for `smp verify` alone"):
        Order.read(str(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layouts", "qq2"], "'qq2' is no layout"),
        (["--steps", "0"], "--steps 0 is no whole number > 0"),
        (["--timeout-s", "0"], "--timeout-s 0 is no number of seconds > 0"),
        (["--config", "no_such.json"], "cannot read 'no_such.json'"),
        ([], "there is no script 'no_such.py'"),
    ],
)
def test_bad_use_is_one_line_and_status_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    name = str(script) if options else "no_such.py"
    assert main(["verify", *options, name]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


BEFORE = {"layouts": "pp2,dp2", "steps": 3, "config": None, "timeout_s": 600.0}


def divided(*words: str, **before: Any) -> SplitWords:
    given = {**BEFORE, "keep": None, "json": False, **before}
    return divide(words, argparse.Namespace(**given))


def test_options_are_taken_in_front_of_the_script_and_behind_it() -> None:
    words = ("--rate", "0.1", "--layouts", "pp2", "data", "--steps=2", "-x", "--json", "-1")
    found = divided(*words)
    assert found.options == {"layouts": "pp2", "steps": 2, "json": True}
    assert found.script == ("--rate", "0.1", "data", "-x", "-1")
    assert divided("--rate", "8").options == {} and divided().script == ()


def test_all_words_behind_a_separator_are_the_scripts() -> None:
    found = divided("--layouts", "tp2", "--", "--steps", "9", "--", "--layouts")
    assert found.options == {"layouts": "tp2"}
    assert found.script == ("--steps", "9", "--", "--layouts")
    assert divided("--", "--json").options == {}


def test_only_whole_names_are_taken_behind_the_script() -> None:
    assert divided("--layout", "x", "--step=1").script == ("--layout", "x", "--step=1")


@pytest.mark.parametrize(
    ("words", "before", "text"),
    [
        (["--steps", "many"], {}, "--steps: invalid int value: 'many'.*for the script .* '--'"),
        (["--layouts"], {}, "--layouts: expected one argument"),
        (["--rate", "1", "--", "2"], {}, "'--rate' between the script and '--' is no option"),
        (["--steps", "9"], {"steps": 2}, "--steps is in front .* and behind it; give it once"),
    ],
)
def test_words_that_may_be_anybodys_are_refused(
    words: list[str], before: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadUse, match=text):
        divided(*words, **before)


def test_options_behind_the_script_count_and_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["verify", str(script), "--rate", "1", "--layouts", "qq2"]) == 2
    assert "'qq2' is no layout" in (error := capsys.readouterr().err)
    assert f"--layouts behind '{script}': taken by smp verify" in error
    assert main(["verify", str(script), "--layouts", "qq2", "--", "--rate", "1"]) == 2
    assert "taken by" not in capsys.readouterr().err


def test_script_that_fails_is_shown_and_status_2(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nraise RuntimeError(f'no data for {sys.argv[1]}')\n")
    words = ["--layouts", "pp2", "--", "me"]
    command = [sys.executable, "-m", "smp_cli", "verify", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last == (
        "smp verify: the script fails in one process already: RuntimeError: no data for me"
    )
