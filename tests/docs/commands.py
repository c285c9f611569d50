"""Commands in documents: parsed by the programs that they start, executed where that is cheap."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from smp_cli.main import build_parser
from smp_cli.main import main as smp_main
from torch.distributed.run import get_args_parser

from smp.commands.verify.command import divide
from tests.docs.pages import REPO

#: Names that pages use for files of the reader.
PLACEHOLDERS = {"train.py", "package.train", "config.json"}
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_TARGETS = set(re.findall(r"^([a-z_-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))


def lines_of(source: str) -> list[list[str]]:
    """The words of each command; comments, and variables in front, are left out."""
    result = []
    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and _VARIABLE.match(words[0]):
            words.pop(0)
        if words:
            result.append(words)
    return result


def check(words: list[str], folder: Path, *, runs: bool) -> None:
    """Raises if a program, file or option of a command does not exist.

    Args:
        words: words of one command.
        folder: folder of the page, with files that its blocks have made.
        runs: False where a mark says that the program is not there.
    """
    program, *arguments = words
    if program == "smp":
        parsed = _parse(build_parser(arguments[0]), arguments)
        if parsed.command in ("run", "verify"):
            own = parsed.command == "verify" and divide(parsed.args, parsed)
            _check_script([parsed.script, *(own.script if own else parsed.args)], folder)
            if parsed.config is not None and "=" not in parsed.config:
                _check_file(parsed.config, folder)
    elif program == "torchrun":
        parsed = _parse(get_args_parser(), arguments)
        _check_script([parsed.training_script, *parsed.training_script_args], folder)
    elif program == "python":
        if arguments[:2] == ["-m", "smp"]:
            check(["smp", *arguments[2:]], folder, runs=runs)
        else:
            _check_script(arguments, folder)
    elif program == "make":
        for target in arguments:
            assert "=" in target or target in _TARGETS, f"make has no target {target}"
    else:
        assert not runs, f"{program} is no program that this test knows: say 'not run: REASON'"
        scripts = [word for word in words if word.endswith((".py", ".sbatch"))]
        for script in scripts:
            _check_file(script, folder)


#: Subcommands of `smp` that are executed, and the place of the file that they need, if any.
_EXECUTED = {
    "ckpt": 3,
    "estimate": None,
    "plan": None,
    "explain": None,
    "simulate": None,
    "verify": 2,
}


def is_executed(words: list[str], folder: Path) -> bool:
    """Returns whether a command is a cheap one whose files are there."""
    if words[0] != "smp" or words[1] not in _EXECUTED:
        return False
    if "--hardware" in words and words[words.index("--hardware") + 1].endswith(".json"):
        return False  # what another command would measure first
    place = _EXECUTED[words[1]]
    return place is None or (folder / words[place]).exists()


def execute(words: list[str], status: int = 0) -> str:
    """Runs a command of `_EXECUTED` in this process, and returns its output.

    Args:
        words: words of the command.
        status: exit status that is expected.

    Raises:
        AssertionError: another command; it fails.
    """
    assert words[0] == "smp" and words[1] in _EXECUTED, words
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        ended = smp_main(words[1:])
    assert ended == status, f"{shlex.join(words)} ends with {ended}:\n{output.getvalue()}"
    return output.getvalue()


def _parse(parser: object, arguments: list[str]):  # type: ignore[no-untyped-def]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return parser.parse_args(arguments)  # type: ignore[attr-defined]
    except SystemExit:
        raise AssertionError(f"{shlex.join(arguments)}: {errors.getvalue()}") from None


def _check_script(words: list[str], folder: Path) -> None:
    """A script exists, and has the options that it is given."""
    script, *arguments = words
    path = _check_file(script, folder)
    if path is None:
        return
    source = path.read_text()
    for word in _options(arguments):
        assert f'"{word}"' in source, f"{script} has no option {word}"


def _options(words: list[str]) -> Iterator[str]:
    yield from (word.partition("=")[0] for word in words if word.startswith("--"))


def _check_file(name: str, folder: Path) -> Path | None:
    for base in (folder, REPO):
        if (base / name).is_file():
            return base / name
    assert name in PLACEHOLDERS, f"{name} does not exist"
    return None
