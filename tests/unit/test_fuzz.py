"""A few thousand inputs of each decoder; `make fuzz` runs a million."""

from __future__ import annotations

import pytest

from tests.fuzz.decoders import decoders
from tests.fuzz.run import CORPUS, Failed, run


@pytest.mark.parametrize("name", decoders())
def test_nearly_right_inputs_are_read_or_refused(name: str) -> None:
    count = run(name, decoders()[name], 4000, seed=1)
    # Both ways were gone.
    assert count.num_understood > 100 and count.num_refused > 1000


@pytest.mark.parametrize("name", decoders())
def test_the_corpus_is_right(name: str) -> None:
    paths = list((CORPUS / name).iterdir())
    assert len(paths) >= 2
    for path in paths:
        assert decoders()[name].understands(path.read_bytes()), path


def test_what_a_decoder_may_not_raise_is_told_with_its_input() -> None:
    class Breaks(type(decoders()["manifest"])):  # type: ignore[misc]
        def understands(self, content: bytes) -> bool:
            raise KeyError("of no use to a user")

    with pytest.raises(Failed, match=r"manifest, input 0 of seed 7: KeyError: .* b'"):
        run("manifest", Breaks(), 10, seed=7)
