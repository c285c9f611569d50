"""Checks that code of others in the repository is listed, with its licence."""

from __future__ import annotations

import re

from tests.lint.layers import REPO


def test_code_of_others_is_listed_with_its_licence() -> None:
    folder = REPO / "third_party"
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names
    listed = re.findall(r"^\| `([\w-]+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(names)
    packaged = (REPO / "debian" / "copyright").read_text()
    for name in names:
        assert (folder / name / "LICENSE").is_file() and (folder / name / "README.md").is_file()
        assert f"Files: third_party/{name}/*" in packaged
