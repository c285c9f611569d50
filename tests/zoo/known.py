"""Lists known defects: models whose outcome is neither equal nor a refusal, with the reason.

No entry may excuse a silent difference for long: an entry goes when its cause is mended, and
`tests/zoo/test_zoo.py` fails when an entry of the sample is no longer needed.
"""

from __future__ import annotations

import fnmatch

from tests.zoo.judging import Result

# (pattern of the model, mode or "*") -> reason
KNOWN: dict[tuple[str, str], str] = {}


def reason_for(result: Result) -> str | None:
    """Returns the reason for a known outcome, or None."""
    for (model, mode), reason in KNOWN.items():
        if fnmatch.fnmatch(result.model, model) and mode in ("*", result.mode):
            return reason
    return None
