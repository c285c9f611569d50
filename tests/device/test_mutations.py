"""The faults of the mutation run have their places in the sources."""

from __future__ import annotations

from tests.conftest import REPO
from tests.device.mutations import MUTATIONS, mutated_sources


def test_each_fault_has_one_place() -> None:
    sources = mutated_sources(REPO)
    for mutation in MUTATIONS:
        assert sources[mutation.file] != (REPO / mutation.file).read_text()
        assert f'"{mutation.name}"' in sources[mutation.file]
        assert mutation.is_found or mutation.why_not
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
