"""Writes the stub of the extension, ``_C.pyi``, from the extension itself.

pybind11-stubgen reads the signatures that pybind11 prints. Python is stricter than they say, or
mypy asks for more; `corrected` makes up for that.

Usage: write_stubs.py <folder with _C.so>
Without pybind11-stubgen (requirements/tools.txt) there is no stub: only mypy and the site need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tempfile
import types
from pathlib import Path

_ANY = "typing.Any"
_CORRECTIONS = (
    # pybind11 takes no float for an int, and stubs of 3.0 say SupportsInt of each.
    (r"typing\.SupportsInt\b", "int"),
    (r"typing\.SupportsFloat\b", "float"),
    # A default of None is not in the type of a shared pointer.
    (r"(: [A-Z]\w+) = None\b", r"\1 | None = None"),
    (r"\bcollections\.abc\.Callable\b(?!\[)", f"collections.abc.Callable[..., {_ANY}]"),
    (r"(?<![\w.])dict(?=[,):\s]|$)", f"dict[str, {_ANY}]"),
    (r"(?<![\w.])list(?=[,):\s]|$)", f"list[{_ANY}]"),
    (r"(?<![\w.])tuple(?=[,):\s]|$)", f"tuple[{_ANY}, ...]"),
    (r"def __eq__\(self, \w+: [^)]*\)", "def __eq__(self, other: object)"),
    (r"\*args\)", f"*args: {_ANY})"),
)


def corrected(stub: str) -> str:
    """Returns a stub of pybind11-stubgen with what mypy needs; texts of docstrings stay."""
    lines = []
    for line in stub.splitlines():
        if re.match(r"\s*(def |[A-Za-z_]\w*: )", line):
            for pattern, replacement in _CORRECTIONS:
                line = re.sub(pattern, replacement, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def generate(folder: Path) -> str:
    """Returns the stub of ``_C.so`` in a folder, without importing the package around it."""
    import torch.distributed  # noqa: F401 - the extension uses its types
    from pybind11_stubgen import main as write

    package = types.ModuleType("smp")
    package.__path__ = [str(folder)]
    sys.modules["smp"] = package
    extension = importlib.import_module("smp._C")
    enums = [name for name, value in vars(extension).items() if hasattr(value, "__members__")]
    with tempfile.TemporaryDirectory() as output:
        arguments = ["smp._C", "--output-dir", output, "--exit-code"]
        for name in enums:
            arguments += ["--enum-class-locations", f"^{name}$:smp._C"]
        write(arguments)
        return (Path(output) / "smp" / "_C.pyi").read_text()


def main(folder: Path) -> None:
    stub = folder / "_C.pyi"
    stub.unlink(missing_ok=True)
    if importlib.util.find_spec("pybind11_stubgen") is None:
        print("no stub of the extension: pybind11-stubgen is not installed")
        return
    stub.write_text(corrected(generate(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
