"""The tests of Hugging Face families hold with an older transformers as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.samples import part_of

REPO = Path(__file__).resolve().parents[2]
OLDER = "4.30.2"
FOLDER = REPO / f".venv-transformers-{OLDER}"
# One process each. Families train with this release in tests/dist, so what is registered and how
# close single modules are can wait for `make test-all`.
SUBJECTS = (("translators", "hooks", "arguments"), ("registration", "parity"))


@pytest.mark.sample
@pytest.mark.parametrize("subjects", part_of(SUBJECTS, 1), ids="-".join)
def test_with_transformers_4_30_2(subjects: tuple[str, ...]) -> None:
    if not (FOLDER / ".smp_ready").is_file():
        pytest.skip(f"no {FOLDER.name}; 'scripts/compat.sh transformers {OLDER}' sets it up")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(FOLDER), *sys.path[:1], *([before] if before else [])])
    check = f"import transformers; assert transformers.__version__ == '{OLDER}'"
    files = [f"tests/unit/test_hf_{subject}.py" for subject in subjects]
    arguments = ["-q", "-p", "no:cacheprovider", *files]
    code = f"import sys, pytest; {check}; sys.exit(pytest.main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path, "SMP_SAMPLES": "all"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
