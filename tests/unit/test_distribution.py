"""The distribution has a name of its own; the module, and the command, are `smp`."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess

import pytest
from smp_cli.doctor import versions

from tests.lint.layers import REPO

# Commands by which pip would take `smp` from an index, where it is another project.
_FROM_INDEX = re.compile(r"pip install (?:-\S+ )*[\"']?smp(?![-\w'])")


def test_name_of_the_distribution_is_one_everywhere() -> None:
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg")
    assert config["metadata"]["name"] == versions.DISTRIBUTION == "smp-train"
    assert "smp = smp_cli:main" in config["options.entry_points"]["console_scripts"]
    wheel = versions.DISTRIBUTION.replace("-", "_")
    script = (REPO / "scripts" / "wheel.sh").read_text()
    assert script.count(f"dist/{wheel}-*.whl") == 2 and "dist/smp-" not in script


def test_nobody_is_told_to_install_the_other_project() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout
    if not names:
        pytest.skip("no git, which lists the files")
    kinds = (".md", ".py", ".sh", ".Dockerfile", ".toml", ".cfg", ".cpp")
    told = [
        f"{name}: {match[0]}"
        for name in names.split()
        if name.endswith(kinds)
        and not name.startswith(("tests/", "CHANGELOG"))
        and (REPO / name).exists()
        for match in _FROM_INDEX.finditer((REPO / name).read_text())
    ]
    assert not told
    assert _FROM_INDEX.search('pip install "smp[store]"') and _FROM_INDEX.search("pip install smp")


def test_doctor_warns_of_the_other_project(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def with_namesake(name: str) -> str:
        return "4.2.0" if name == "smp" else version(name)

    assert not any("smp 4.2.0" in problem for problem in versions.packages().problems)
    monkeypatch.setattr(importlib.metadata, "version", with_namesake)
    (problem,) = (one for one in versions.packages().problems if "smp 4.2.0" in one)
    assert problem.endswith("this one is smp-train: pip uninstall smp")
