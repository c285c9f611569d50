"""Writes a CUDA source as C++ for the emulation: `kernel<<<...>>>(...)` becomes a function call.

Usage: host_sources.py <source> <written file>
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LAUNCH = "::smp::kernels::emulated::launch"
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def rewritten(text: str) -> str:
    """The text with its launches rewritten; line numbers stay."""
    while (mark := text.find("<<<")) >= 0:
        begin = _kernel_begin(text, mark)
        end_of_grid = _closing(text, mark + 3, ">>>")
        opening = text.index("(", end_of_grid)
        end = _closing(text, opening + 1, ")") + 1
        kernel, grid = text[begin:mark].rstrip(), text[mark + 3 : end_of_grid]
        arguments = text[end_of_grid + 3 : end]
        call = f"{_LAUNCH}({grid}, [&] {{ {kernel}{arguments}; }})"
        missing = text[begin:end].count("\n") - call.count("\n")
        text = text[:begin] + call + "\n" * missing + text[end:]
    return text


def _kernel_begin(text: str, mark: int) -> int:
    """Finds where a launched kernel's name begins, with template arguments before ``mark``."""
    at = mark
    while text[at - 1].isspace():
        at -= 1
    depth = 0
    while depth or text[at - 1] == ">":
        depth += {">": 1, "<": -1}.get(text[at - 1], 0)
        at -= 1
    name = re.search(r"[\w:]+$", text[:at])
    if name is None:
        raise SystemExit(f"no name of a kernel before a launch: {text[max(0, at - 80) : mark]!r}")
    return name.start()


def _closing(text: str, at: int, wanted: str) -> int:
    """The first place from ``at`` on where ``wanted`` stands outside of brackets."""
    depth = 0
    while depth or not text.startswith(wanted, at):
        depth += (text[at] in _PAIRS) - (text[at] in _PAIRS.values())
        at += 1
    return at


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f'#line 1 "{source}"\n{rewritten(source.read_text())}')


if __name__ == "__main__":
    main()
