"""Parts of `make site` that need no packages of its own: navigation, reference, copied pages.

The build itself is strict: a link, an anchor or a docstring that it does not understand ends it.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import smp
from tests.docs.pages import REPO
from website import figures, navigation, reference, results
from website.charts import Bar, Point, Ratio, bar_chart, ratio_chart, scatter
from website.stage import Stage, titled

SVG = "{http://www.w3.org/2000/svg}"


def test_the_navigation_has_every_page() -> None:
    pages = {path.relative_to(REPO).as_posix() for path in (REPO / "docs").rglob("*.md")}
    assert len(pages) > 30
    assert pages - set(navigation.copied()) == set()
    assert [page for page in navigation.copied() if not (REPO / page).is_file()] == []
    assert len(navigation.pages()) == len(set(navigation.pages()))


def test_the_reference_has_every_public_name() -> None:
    named = [name for page in reference.PAGES for name in page.names]
    assert sorted(named) == sorted(smp.__all__)


def test_headings_of_the_reference_are_the_names_of_users() -> None:
    (training,) = (page for page in reference.PAGES if page.name == "training")
    text = reference.markdown(training)
    # `smp.step` is a module as well; the text is that of the function.
    assert "::: smp.step.decorator.step\n    options:\n      heading: smp.step\n" in text


# ---- pages -------------------------------------------------------------------------------


def test_marks_become_titles() -> None:
    text = "<!-- run: 2; file: a.py -->\n```python\nx\n```\n<!-- a note -->\n"
    expected = '```python title="a.py, run by tests on 2 processes"\nx\n```\n<!-- a note -->\n'
    assert titled(text) == expected
    assert titled("<!-- not run: why -->\n```sh\nx\n```\n") == "```sh\nx\n```\n"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "b.md").write_text("# B\n")
    (folder / "run.py").write_text("x = 1\n")
    return folder


def test_links_to_sources_lead_to_pages_with_them(repo: Path, tmp_path: Path) -> None:
    text = "[b](b.md#b) [run](../run.py)\n```md\n[no](link.md)\n```\n"
    (repo / "docs" / "a.md").write_text(text)
    Stage(repo, tmp_path / "out", ["docs/a.md", "docs/b.md"]).copy_all()
    written = (tmp_path / "out" / "docs" / "a.md").read_text()
    assert written == "[b](b.md#b) [run](../run.py.source.md)\n```md\n[no](link.md)\n```\n"
    assert "x = 1\n" in (tmp_path / "out" / "run.py.source.md").read_text()


def test_links_to_nothing_are_refused(repo: Path, tmp_path: Path) -> None:
    (repo / "docs" / "a.md").write_text("[b](c.md)\n")
    with pytest.raises(ValueError, match=r"docs/a\.md: the link c\.md leads to nothing"):
        Stage(repo, tmp_path / "out", ["docs/a.md"]).copy_all()


# ---- figures -----------------------------------------------------------------------------


def test_every_file_of_results_is_drawn() -> None:
    files = {path.stem for path in results.RESULTS.glob("*.jsonl")}
    assert files and files == {figure.source for figure in figures.FIGURES}


@pytest.mark.parametrize("figure", figures.FIGURES, ids=lambda figure: figure.title)
def test_figures_have_the_numbers_of_their_files(figure: figures.Figure) -> None:
    lines = figure.lines()
    root = ElementTree.fromstring(figure.draw(lines))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) >= 1
    if figure.draw is figures._fused:  # several runs are one row
        return
    assert len(titles) == len(lines)
    numbers = {
        f"{value:.3f}" for line in lines for key, value in line.items() if key.endswith("_median")
    } | {f"{value:.4g}" for line in lines for value in _numbers(line)}
    for title in titles:
        assert set(re.findall(r"(?<=[: ])\d+\.?\d*(?=$| \()", title)) & numbers, title


def _numbers(line: results.Line) -> list[float]:
    plain = [value for value in line.values() if isinstance(value, float)]
    lists = [max(value) for value in line.values() if isinstance(value, list) and value]
    sums = [line["state_mb"] + line["step_peak_mb"]] if "state_mb" in line else []
    phases = [v["hub_cpu_s"] for v in line.values() if isinstance(v, dict) and "hub_cpu_s" in v]
    return [*plain, *phases, *(value for value in lists if isinstance(value, float)), *sums]


def test_the_page_says_the_conditions_of_each_figure() -> None:
    text = figures.page()
    assert text.count("<svg ") == len(figures.FIGURES)
    assert len(re.findall(r"2 virtual cores, CPU only; 2026-", text)) == len(figures.FIGURES)
    linked = set(re.findall(r"\]\((\w+\.md)\)", text))
    assert {path.name for path in results.RESULTS.glob("*.md")} == linked


def test_a_line_that_does_not_say_where_it_was_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'x' of the results does not say its \['commit', 'cpu'"):
        results.conditions([{"contender": "x", "environment": {"time": "", "torch": ""}}])


def _places(svg: str, tag: str, key: str) -> list[float]:
    return [float(mark.attrib[key]) for mark in ElementTree.fromstring(svg).iter(f"{SVG}{tag}")]


def test_ratios_lie_in_their_order_around_the_line_at_1() -> None:
    rows = [Ratio(f"{m}", "", m, m - 0.05, m + 0.05) for m in (0.5, 1.5, 1.0)]
    assert [row.verdict for row in rows] == ["less", "more", "even"]
    svg = ratio_chart(rows, "a / b")
    low, high, even = _places(svg, "circle", "cx")
    lines = ElementTree.fromstring(svg).iter(f"{SVG}line")
    (one,) = (float(mark.attrib["x1"]) for mark in lines if mark.attrib["class"] == "chart-one")
    assert even == one and low < one < high and one - low == pytest.approx(high - one, abs=0.2)


def test_bars_and_points_are_as_long_as_their_values() -> None:
    bars = [Bar("a", "x", 1.0), Bar("a", "y", 2.0)]
    short, long = (w for w in _places(bar_chart(bars, "s"), "rect", "width") if w != 12.0)
    assert long == pytest.approx(2 * short, abs=0.2)
    svg = scatter([Point("a", 1.0, 2.0), Point("b", 2.0, 1.0)], "ms")
    (x1, x2), (y1, y2) = _places(svg, "circle", "cx"), _places(svg, "circle", "cy")
    assert x2 - x1 == pytest.approx(y2 - y1, abs=0.2) and x1 < x2 and y1 < y2


def test_words_of_a_plot_are_words_and_not_markup() -> None:
    assert "a &lt;b&gt;" in ratio_chart([Ratio("a <b>", "", 1.0, 0.9, 1.1)], "x & y")
