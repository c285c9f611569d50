"""Every block of the documents does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smp.config.schema import Config
from tests.dist.pool import Pool
from tests.dist.processes import run_ranks
from tests.dist.test_torch_group import free_port
from tests.docs import commands
from tests.docs.pages import PAGES, Block, blocks_of, missing_lines

SETUP = Path(__file__).parent / "setup"


class Page:
    """Runs the blocks of one page, one after the other, in one folder."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._script: list[Block] = []
        self._output = ""

    def run(self, block: Block, *, ends_script: bool) -> None:
        """Runs or checks a block.

        Args:
            ends_script: no further block continues this one.
        """
        kind = block.language
        if "file" in block.marks:
            (self._folder / block.marks["file"]).write_text(block.source)
        if "not run" in block.marks:
            if kind == "sh":
                self._check_commands(block)
        elif kind == "python":
            self._script = [*self._script, block] if "continues" in block.marks else [block]
            if ends_script:
                self._run_script()
        elif kind == "diff":
            self._run_diff(block)
        elif kind == "sh":
            self._check_commands(block)
        elif kind == "json":
            Config.from_dict(json.loads(block.source))
        elif "prints" in block.marks:
            missing = missing_lines(block, self._output)
            assert not missing, f"{block.where}: {missing} are not in\n{self._output}"

    def _run_script(self) -> None:
        """The blocks of a script, in lines of the numbers that they have on the page."""
        first = self._script[0]
        lines: list[str] = []
        for block in self._script:
            lines += [""] * (block.line - len(lines)) + block.source.splitlines()
        sizes = map(int, first.marks["run"].split(","))
        self._output = "".join(self._start(first, "\n".join(lines), size) for size in sizes)

    def _run_diff(self, block: Block) -> None:
        """Runs both scripts of a diff, by default the old one alone, and compares their losses."""
        *others, size = map(int, block.marks["run"].split(","))
        sizes = (*others, size) if others else (1, size)
        results = [
            self._start(block, "".join(_side(block.source, sign)), number, sign == "-")
            for sign, number in zip("-+", sizes, strict=True)
        ]
        losses = [re.findall(r"loss (\S+)", text) for text in results]
        assert tuple(map(len, losses)) == sizes
        for loss in losses[0] + losses[1]:
            assert float(loss) == pytest.approx(float(losses[0][0]), rel=1e-5)
        self._output = results[1]

    def _start(self, block: Block, source: str, size: int, is_plain: bool = False) -> str:
        env = {"OMP_NUM_THREADS": "1"}
        if is_plain:  # as torchrun sets them
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        setup = block.marks.get("with")
        prefix = f"import os; os.chdir({str(self._folder)!r})"
        suffix = ""
        if setup is not None:
            prefix += f"; from tests.docs.setup.{setup} import *"
            file = SETUP / f"{setup}.py"
            assert file.is_file(), f"{block.where}: {file} does not exist"
            if "def after(" in file.read_text():
                suffix = f"\nfrom tests.docs.setup import {setup}; {setup}.after(globals())\n"
        script = self._folder / f".{block.page.stem}_{block.line}.py"
        # The first line of a script is that of a fence, or above it.
        body = source.removeprefix("\n") if source.startswith("\n") else source
        script.write_text(f"{prefix}\n{body}{suffix}")
        spares = int(block.marks.get("spares", 0))
        launcher = "smp run" if spares else "torchrun"
        ended = run_ranks(self._pool, script, size, env=env, launcher=launcher, spares=spares)
        status = int(block.marks.get("ends", 0))
        failed = sorted((r for r in ended if r.returncode != status), key=lambda rank: rank.time)
        assert not failed, (
            f"{block.where}: rank {failed[0].rank} of {size} ended with {failed[0].returncode}:\n"
            f"{failed[0].output[-3000:]}"
        )
        return "".join(rank.output for rank in ended)

    def _check_commands(self, block: Block) -> None:
        for words in commands.lines_of(block.source):
            commands.check(words, self._folder, runs="not run" not in block.marks)
            if "not run" not in block.marks and commands.is_executed(words, self._folder):
                self._output = commands.execute(words, int(block.marks.get("ends", 0)))


def _side(source: str, sign: str) -> list[str]:
    """The lines of a diff that one side has."""
    lines = source.splitlines(keepends=True)
    return [line[1:] or "\n" for line in lines if line[0] in (" ", sign, "\n")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_do_what_they_say(
    pool: Pool, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Page(pool, tmp_path)
    blocks = blocks_of(page)
    scripts = [block for block in blocks if block.language == "python"]
    for block in blocks:
        later = scripts[scripts.index(block) + 1 :] if block in scripts else []
        runner.run(block, ends_script=not (later and "continues" in later[0].marks))


def test_most_blocks_are_run() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    not_run = [block for block in blocks if "not run" in block.marks]
    scripts = [b for b in blocks if b.language in ("python", "diff") and b not in not_run]
    assert len(scripts) > 2 * len(not_run)
