"""Prints what CMake has to know about the installed torch, one `name=value` per line."""

import os
import sys
from pathlib import Path


def main() -> None:
    # torch warns on stderr about missing devices; only errors are of interest here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.utils.cpp_extension as cpp_extension

    facts = {
        "VERSION": torch.__version__,
        "STAMP": str(Path(torch.__file__).with_name("version.py")),
        "INCLUDE_DIRS": ";".join(p for p in cpp_extension.include_paths() if Path(p).is_dir()),
        "LIBRARY_DIRS": ";".join(p for p in cpp_extension.library_paths() if Path(p).is_dir()),
        "CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    }
    # Older releases isolate pybind11 modules by these names; ours must say the same.
    macros = []
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            macros.append(f'PYBIND11_{name}="{value}"')
    facts["PYBIND11_MACROS"] = ";".join(macros)
    for name, value in facts.items():
        sys.stdout.write(f"{name}={value}\n")


if __name__ == "__main__":
    main()
