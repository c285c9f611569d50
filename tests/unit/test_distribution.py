"""The distribution has a name of its own; the module, and the command, are `smp`."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import runpy
import subprocess

import pytest
import setuptools
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
    assert script.count(f"dist/{wheel}-*-") == 2 and "dist/smp-" not in script


@pytest.mark.parametrize(
    ("releases", "wanted"),
    [
        ("2.11.0+cu130", "torch>=2.11,<2.12"),
        ("2.12.1 2.11.0", "torch>=2.11,<2.13"),
        ("2.11.0 2.15.0", "torch>=2.11,!=2.12.*,!=2.13.*,!=2.14.*,<2.16"),
    ],
)
def test_a_wheel_asks_for_the_releases_of_torch_that_it_has(
    monkeypatch: pytest.MonkeyPatch, releases: str, wanted: str
) -> None:
    asked: dict[str, list[str]] = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    monkeypatch.setenv("SMP_WHEEL_TORCH", releases)
    runpy.run_path(str(REPO / "setup.py"))
    assert asked["install_requires"] == [wanted, "numpy", "PyYAML"]
    monkeypatch.setenv("SMP_WHEEL_TORCH", "2.15.0 3.0.0")
    with pytest.raises(SystemExit, match="one major release"):
        runpy.run_path(str(REPO / "setup.py"))


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
