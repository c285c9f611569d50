"""Makes the page that shows a trace: one file that loads no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent / "page_parts"


def to_page(trace: Mapping[str, Any]) -> str:
    """Returns the HTML text.

    Args:
        trace: Chrome trace of `to_chrome`, which the script of the page reads.
    """
    # "<" could end the script element; JSON has another way to write it.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "/*STYLE*/": _part("timeline.css"),
        "/*DATA*/": data,
        "/*SCRIPT*/": _part("timeline.js"),
    }
    page, rest = "", _part("timeline.html")
    for mark, text in parts.items():  # in the order of the file: inserted text is not searched
        before, rest = rest.split(mark)
        page += before + text
    return page + rest


def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
