"""Writes a CUDA source as C++ for the emulation.

A launch `kernel<<<...>>>(...)` becomes a function call, and a variable that the threads of a block
share gets a static variable that names it, so that its accesses are watched.

Usage: host_sources.py <source> <written file>
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LAUNCH = "::smp::kernels::emulated::launch"
_SHARED = re.compile(r"__shared__ ([^;]*?(\w+)\s*(?:\[[^;]*\])?);")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def rewritten(text: str) -> str:
    """Rewrites launches and shared variables; line numbers stay."""
    text = _SHARED.sub(_static, text)
    while (mark := text.find("<<<")) >= 0:
        begin = _kernel_begin(text, mark)
        end_of_grid = _closing(text, mark + 3, ">>>")
        opening = text.index("(", end_of_grid)
        end = _closing(text, opening + 1, ")") + 1
        kernel, grid = text[begin:mark].rstrip(), text[mark + 3 : end_of_grid]
        arguments = text[end_of_grid + 3 : end]
        name = f'"{" ".join(kernel.split())}"'
        call = f"{_LAUNCH}({name}, {grid}, [&] {{ {kernel}{arguments}; }})"
        missing = text[begin:end].count("\n") - call.count("\n")
        text = text[:begin] + call + "\n" * missing + text[end:]
    return text


def _static(match: re.Match[str]) -> str:
    """Returns a shared variable as a static one: a single block runs at a time."""
    declaration, name = match.groups()
    place = f'{name}_in_a_block("{name}", &{name}, sizeof {name})'
    return f"static {declaration}; static const ::smp::kernels::emulated::Shared {place};"


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
