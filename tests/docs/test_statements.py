"""Statements of documents about the sources: links, variables, keys, texts of errors."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from smp.config.schema import ALIASES, Config
from tests.docs import commands
from tests.docs.pages import REPO, blocks_of

TEXTS = [
    *(REPO / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")),
    REPO / "SECURITY.md",
    *sorted((REPO / "docs").rglob("*.md")),
    *sorted((REPO / "examples").rglob("*.md")),
    *sorted((REPO / "benchmarks").rglob("*.md")),
]
REFERENCE = REPO / "docs" / "running_reference.md"
#: Variables that users may set, and variables that one rank hands to another process; C++ macros
#: and test settings are neither.
_VARIABLE = re.compile(r'"(SMP_[A-Z][A-Z0-9_]*[A-Z0-9])"')
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> list[str]:
    """Relative links, with their anchors."""
    text = _FENCE.sub("", page.read_text())
    return [link for link in _LINK.findall(text) if "://" not in link]


def anchors_of(page: Path) -> set[str]:
    """Names of the headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(REPO)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One & two\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [x](b.md#one--two) [x](c.md) [x](b.md#three) [x](https://c.md)\n")
    assert broken_links(page) == ["c.md", "b.md#three"]


def test_every_page_is_in_the_index() -> None:
    index = {link.partition("#")[0] for link in links_of(REPO / "docs" / "README.md")}
    pages = {page.name for page in (REPO / "docs").glob("*.md")} - {"README.md"}
    assert pages - index == set()


# ---- variables of the environment ----------------------------------------------------


@cache
def variables_of_sources() -> frozenset[str]:
    """Names that the library and its command read from the environment or set there."""
    found: set[str] = set()
    for folder, suffixes in (("python", {".py"}), ("csrc", {".cpp", ".h", ".cu"})):
        for path in (REPO / folder).rglob("*"):
            if path.suffix in suffixes:
                found.update(_VARIABLE.findall(path.read_text()))
    return frozenset(found)


def test_variables_of_the_sources_are_documented() -> None:
    assert len(variables_of_sources()) > 15
    documented = set(re.findall(r"`(SMP_[A-Z0-9_]+)", REFERENCE.read_text()))
    assert variables_of_sources() - documented == set()


def test_documented_variables_exist() -> None:
    """Finds variables of builds and tests in the files of builds and tests."""
    build = [REPO / "CMakeLists.txt", REPO / "Makefile", REPO / "setup.py"]
    build += (REPO / "cmake").rglob("*.cmake")
    build += (REPO / "scripts").glob("*.sh")
    tests = [p for p in (REPO / "tests").rglob("*.py") if "docs" not in p.parts]
    headers = (REPO / "csrc" / "common").glob("*.h")
    known = set(variables_of_sources())
    for path in (*build, *tests, *headers):
        known.update(re.findall(r"SMP_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    # Variables of other libraries; docs/migration.md says that they are ignored.
    ignored = {"SMP_NCCL_THROTTLE_LIMIT", "SMP_DISABLE_D2D", "SMP_D2D_GPU_BUFFER_SIZE_BYTES"}
    for page in TEXTS:
        named = set(re.findall(r"\bSMP_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
        assert named - known - ignored == set(), page.name


# ---- keys of the configuration -------------------------------------------------------


def documented_keys() -> dict[str, str]:
    """Returns the default of each key in the tables of the reference."""
    section = REFERENCE.read_text().split("\n## Configuration\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?: \(alias `(\w+)`\))? \|.*\| ?(.*?) ?\|$", section, re.M)
    for name, alias, _ in rows:
        assert alias == "" or ALIASES[alias] == name
    assert len({row[0] for row in rows}) == len(rows)
    return {name: default.strip("`") for name, _, default in rows}


def test_every_key_is_documented_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    documented = documented_keys()
    assert documented.keys() == fields.keys()
    fixed = {name: str(default) for name, default in fields.items() if default is not None}
    assert {name: documented[name] for name in fixed} == fixed


# ---- texts of errors -----------------------------------------------------------------


@cache
def messages_of_sources() -> tuple[str, ...]:
    """Literal texts of the library, those of one expression together."""
    messages = []
    for path in sorted((REPO / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant):
                messages.append("...".join(_literals(node)))
    for path in sorted((REPO / "csrc").rglob("*.cpp")):
        source = re.sub(r'"\s*\n\s*"', "", path.read_text())
        for statement in re.split(r";\s*\n", source):
            literals = re.findall(r'"((?:[^"\\\n]|\\.)*)"', statement)
            messages.append("...".join(literals).replace("\\n", "\n"))
    return tuple(message for message in messages if len(message) > 5)


def _literals(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return [text for part in node.values for text in _literals(part)]
    if isinstance(node, ast.BinOp):
        return _literals(node.left) + _literals(node.right)
    return []


def quoted(page: Path) -> list[str]:
    """Messages that headings and the first column of tables quote."""
    lines = _FENCE.sub("", page.read_text()).splitlines()
    heads = [line for line in lines if line.startswith(("### ", "| `"))]
    first = [line.split(" | ")[0] for line in heads]
    return [text for line in first for text in re.findall(r"`([^`]+)`", line)]


def missing_messages(texts: list[str]) -> list[str]:
    """Returns texts whose pieces between ``...`` are in no message of the sources, in order."""
    missing = []
    for text in texts:
        pieces = [re.escape(piece.strip()) for piece in text.split("...") if piece.strip()]
        pattern = re.compile(".*".join(pieces), re.DOTALL)
        if not any(pattern.search(message) for message in messages_of_sources()):
            missing.append(text)
    return missing


def test_quoted_messages_are_those_of_the_sources() -> None:
    texts = quoted(REPO / "docs" / "troubleshooting.md")
    assert len(texts) > 30
    assert missing_messages(texts) == []


def test_messages_that_do_not_exist_are_found() -> None:
    assert missing_messages(["the model is ... outside of a step function"]) == []
    assert missing_messages(["the model is ... inside of a step function"]) != []


# ---- the reader of pages -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```\nx\n```\n", "language ''"),
        ("```ruby\nx\n```\n", "language 'ruby'"),
        ("```python\nx\n```\n", "needs one of the marks"),
        ("<!-- walk: 2 -->\n```python\nx\n```\n", "unknown mark 'walk'"),
        ("<!-- not run -->\n```sh\nx\n```\n", "give the reason"),
        ("```sh\nx\n", "has no end"),
    ],
)
def test_blocks_that_say_nothing_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        blocks_of(page)


# ---- the reader of commands ----------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("smp run -n 2 --fast train.py", "--fast"),
        ("smp run -n 2 nowhere.py", "nowhere.py does not exist"),
        ("smp ckpt look checkpoints", "invalid choice"),
        ("torchrun --nproc-per-core 2 train.py", "nproc-per-core"),
        ("python examples/gptj/finetune.py --dq 2", "no option --dq"),
        ("SMP_HANG_S=3 make tests", "no target tests"),
        ("mpirun -np 2 python train.py", "say 'not run"),
    ],
)
def test_wrong_commands_are_found(tmp_path: Path, command: str, complaint: str) -> None:
    (words,) = commands.lines_of(f"# comment\n{command}\n")
    with pytest.raises(AssertionError, match=complaint):
        commands.check(words, tmp_path, runs=True)


def test_right_commands_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('add("--epochs")\n')
    text = "smp run -n 2 mine.py --epochs 3\ntorchrun --nproc-per-node 2 train.py\nmake quick\n"
    for words in commands.lines_of(text):
        commands.check(words, tmp_path, runs=True)
    commands.check(["srun", "python", "train.py"], tmp_path, runs=False)
