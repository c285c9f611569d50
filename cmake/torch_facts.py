"""Prints what CMake has to know about the installed torch, one `name=value` per line.

torch is not imported: that takes seconds, and needs libraries that may still be on their way.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

# torchCheckFail(const char*, const char*, uint32_t, const std::string&), with the std::string of
# C++11 or the one before.
_CHECK = b"torchCheckFailEPKcS2_jRK"
_NEW_STRING, _OLD_STRING = _CHECK + b"NSt7__cxx11", _CHECK + b"Ss"
# Releases that isolate pybind11 modules by names have these; ours must say the same.
_PYBIND11_NAMES = b"_PYBIND11_COMPILER_TYPE"


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("there is no torch")
    folder = Path(spec.origin).parent
    include, lib = folder / "include", folder / "lib"
    facts = {
        "VERSION": runpy.run_path(str(folder / "version.py"))["__version__"],
        "STAMP": folder / "version.py",
        "INCLUDE_DIRS": f"{include};{include / 'torch/csrc/api/include'}",
        "LIBRARY_DIRS": lib,
        "CXX11_ABI": _cxx11_abi((lib / "libc10.so").read_bytes()),
        "PYBIND11_MACROS": ";".join(_pybind11_macros(lib / "libtorch_python.so")),
    }
    for name, value in facts.items():
        sys.stdout.write(f"{name}={value}\n")


def _cxx11_abi(c10: bytes) -> int:
    if (_NEW_STRING in c10) == (_OLD_STRING in c10):
        sys.exit("libc10.so does not show which std::string it was compiled with")
    return int(_NEW_STRING in c10)


def _pybind11_macros(library: Path) -> list[str]:
    if _PYBIND11_NAMES not in library.read_bytes():
        return []
    # torch warns on stderr about missing devices; only errors are of interest here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in names}
    return [f'PYBIND11_{name}="{value}"' for name, value in values.items() if value is not None]


if __name__ == "__main__":
    main()
