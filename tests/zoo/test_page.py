"""The page of the zoo can be read back, so that later runs are added to it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.zoo.judging import CRASH, EQUAL, REFUSED, SKIPPED, Result
from tests.zoo.page import results_of
from tests.zoo.table import read, write

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = [
    Result("patterns/patterns/Loop", "patterns", "pp2", EQUAL, "nothing was split", True, 0.5),
    Result("timm/vit/test_vit", "vit", "pp2", REFUSED, "ValueError: no such thing", False, 2.0),
    Result("transformers/llama/Llama", "llama", "pp2", SKIPPED, "NoRecipe: none"),
    Result("patterns/patterns/Loop", "patterns", "tp2", EQUAL, bitwise=True, first_step_s=0.5),
    Result("timm/vit/test_vit", "vit", "tp2", CRASH, first_step_s=2.0),
    Result("transformers/unnamed/0", "unnamed", "tp2", SKIPPED),
]


def tables_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_the_page_of_what_a_page_says_has_the_same_tables(tmp_path: Path) -> None:
    written = tmp_path / "models.md"
    write(written, read([PAGE]))
    assert tables_of(written.read_text()) == tables_of(PAGE.read_text())
    assert len(tables_of(PAGE.read_text())) > 700


def test_results_come_back_from_a_page(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    write(page, RESULTS)
    assert list(map(asdict, results_of(page.read_text()))) == list(map(asdict, RESULTS))


def test_later_results_take_the_place_of_those_on_a_page(tmp_path: Path) -> None:
    page, later = tmp_path / "models.md", tmp_path / "later.json"
    write(page, RESULTS)
    new = Result("timm/vit/test_vit", "vit", "tp2", EQUAL, first_step_s=1.0)
    later.write_text(json.dumps(asdict(new)) + "\n")
    found = read([page, later])
    assert len(found) == len(RESULTS) and [r for r in found if r.mode == "tp2"][1] == new


def test_a_page_of_another_form_is_refused() -> None:
    text = "## By model\n\n| model | pp2 | first step | reason |\n| a: B | equal | soon | |\n"
    with pytest.raises(ValueError, match="expected a model, 1 outcomes, seconds and a reason"):
        results_of("\n" + text)
