"""Who may include or import whom, and a checker of it.

The tables are the architecture (see ARCHITECTURE.md); a new room or module gets a line here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

# C++ rooms, lower layers first; a room may include rooms of lower layers only.
CPP_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"common", "kernels"}),
    frozenset({"topology", "partition", "schedule", "autograd"}),
    frozenset({"comm", "memory"}),
    frozenset({"nn"}),
    frozenset({"tensor_parallel", "data_parallel", "optim", "checkpoint", "pipeline"}),
    frozenset({"bindings"}),
)

# Stricter than their layer: these include nothing else of ours.
CPP_NARROW: dict[str, frozenset[str]] = {
    "topology": frozenset({"common"}),
    "partition": frozenset({"common"}),
    "schedule": frozenset({"common"}),
    "autograd": frozenset({"common"}),
    "comm": frozenset({"common", "topology"}),
}

# Python modules and packages directly below `smp`, lower layers first. The large layers of
# ARCHITECTURE.md are `config`, `runtime`, `comm`, the features, and what the user calls; modules
# that serve one of them stand just below it.
PYTHON_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_C", "_build_info", "_extension", "_version"}),
    frozenset({"config"}),
    frozenset(
        {
            "autocast",
            "config_sources",
            "creation",
            "foreign_wrappers",
            "forwards",
            "launch",
            "module_writes",
            "optimizers",
            "schedule",
            "tracing",
            "transforms",
        }
    ),
    frozenset({"fault_injection", "groups", "host_objects", "presence", "process_hooks"}),
    frozenset({"settings"}),
    frozenset({"links", "rendezvous", "wrapped"}),
    frozenset({"runtime"}),
    frozenset({"comm", "device_numbers", "roll_call", "state_mod"}),
    frozenset({"tensor_parallel"}),
    frozenset({"memory"}),
    frozenset(
        {
            "metrics",
            "microbatch",
            "nn",
            "nonfinite",
            "partition",
            "pipeline",
            "preemption",
            "timeline",
        }
    ),
    frozenset({"data_parallel"}),
    frozenset({"precision", "utils"}),
    frozenset({"first_step"}),
    frozenset({"activations", "chosen_schedule", "model_parts", "partition_report", "replacement"}),
    frozenset({"open_pipeline", "state_loading"}),
    frozenset(
        {
            "backward_roots",
            "engine",
            "grad_norm",
            "loss_checks",
            "model_views",
            "patches",
            "root_call",
        }
    ),
    frozenset({"join"}),
    frozenset({"model", "step_run"}),
    frozenset({"first_use", "fused_step", "legacy_optimizer", "model_dump", "optimizer_state"}),
    frozenset({"amp", "optimizer", "step"}),
    frozenset({"checkpoint"}),
    frozenset({"integrations", "sharded_data_parallel_checkpoint"}),
    frozenset({"__main__"}),
)

_INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]')


def includes(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of each include in a C++ file."""
    for line_number, line in enumerate(path.read_text().splitlines(), start=1):
        if match := _INCLUDE.match(line):
            yield line_number, match[1]


def cpp_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp", ".cu"})


def allowed_rooms(room: str) -> frozenset[str]:
    """Rooms that ``room`` may include, apart from itself."""
    below: frozenset[str] = frozenset()
    for layer in CPP_LAYERS:
        if room in layer:
            return CPP_NARROW.get(room, below)
        below |= layer
    raise KeyError(room)


def check_cpp(root: Path) -> list[str]:
    """Complaints about includes below ``root/csrc`` and ``root/tests/cpp``."""
    complaints = []
    for base in ("csrc", "tests/cpp"):
        for path in cpp_files(root / base):
            place = path.relative_to(root).as_posix()
            room = path.relative_to(root / base).parts[0]
            try:
                allowed = allowed_rooms(room) | {room}
            except KeyError:
                complaints.append(f"{place}: '{room}' is in no layer of CPP_LAYERS")
                continue
            for line, include in includes(path):
                if include.startswith("csrc/"):
                    other = include.split("/")[1]
                    if other not in allowed:
                        complaints.append(
                            f"{place}:{line}: '{room}' may not include '{other}', only "
                            f"{', '.join(sorted(allowed - {room})) or 'itself'}"
                        )
                elif include.startswith(("../", "./")) or (path.parent / include).is_file():
                    complaints.append(
                        f"{place}:{line}: write '{include}' from the repository root (csrc/...)"
                    )
    return complaints


def _smp_module(name: str) -> str | None:
    """``"smp.comm.groups"`` -> ``"comm"``; "" for ``smp`` itself; None for other packages."""
    parts = name.split(".")
    if parts[0] != "smp":
        return None
    return parts[1] if len(parts) > 1 else ""


def python_layer(name: str) -> int:
    for index, layer in enumerate(PYTHON_LAYERS):
        if name in layer:
            return index
    raise KeyError(name)


def _targets(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Modules of smp (first level, "" for the package) that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            kept = package[: len(package) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        # `from smp import comm` names the module, not the package.
        names = [f"smp.{alias.name}" for alias in node.names] if base == "smp" else [base]
    else:
        return
    for name in names:
        module = _smp_module(name)
        if module is not None:
            yield module


def check_python(root: Path) -> list[str]:
    """Complaints about imports inside ``root/python/smp``."""
    complaints = []
    package_root = root / "python" / "smp"
    for path in sorted(package_root.rglob("*.py")):
        relative = path.relative_to(package_root)
        if relative.as_posix() == "__init__.py":
            continue  # on top of everything
        place = path.relative_to(root).as_posix()
        own = relative.parts[0].removesuffix(".py")
        try:
            own_layer = python_layer(own)
        except KeyError:
            complaints.append(f"{place}: '{own}' is in no layer of PYTHON_LAYERS")
            continue
        package = ["smp", *relative.parts[:-1]]
        tree = ast.parse(path.read_text())
        inside_functions = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.walk(node)
        }
        for node in ast.walk(tree):
            for other in _targets(node, package):
                where = f"{place}:{getattr(node, 'lineno', 0)}"
                if id(node) in inside_functions:
                    complaints.append(f"{where}: import '{other or 'smp'}' at the top of the file")
                if other == own:
                    continue
                if not other:
                    complaints.append(f"{where}: import the module, not the package 'smp'")
                    continue
                try:
                    other_layer = python_layer(other)
                except KeyError:
                    complaints.append(f"{where}: '{other}' is in no layer of PYTHON_LAYERS")
                    continue
                if other_layer >= own_layer:
                    complaints.append(f"{where}: '{own}' may not import '{other}' (not below it)")
    return complaints


def cmake_dependencies(root: Path) -> dict[str, frozenset[str]]:
    """Room -> rooms below it, as ``CMakeLists.txt`` declares them (transitive)."""
    text = (root / "CMakeLists.txt").read_text()
    closure: dict[str, frozenset[str]] = {}
    for body in re.findall(r"smp_add_room\(([^)]*)\)", text):
        words = body.split()
        room, deps, reading = words[0], [], False
        for word in words[1:]:
            if word.isupper():
                reading = word == "DEPS"
            elif reading:
                deps.append(word)
        closure[room] = frozenset(deps).union(*(closure[dep] for dep in deps))
    return closure
