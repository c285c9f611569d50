"""Tables of the rooms that a room may include or import, and a checker of them.

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
    frozenset({"topology", "partition", "schedule", "autograd", "health"}),
    frozenset({"comm", "memory"}),
    frozenset({"shm", "lanes", "nn"}),
    frozenset({"mailbox"}),
    frozenset({"tensor_parallel", "gradients", "parameters", "optim", "checkpoint", "pipeline"}),
    frozenset({"bindings"}),
)

# Stricter than their layer: these include nothing else of ours.
CPP_NARROW: dict[str, frozenset[str]] = {
    "topology": frozenset({"common"}),
    "partition": frozenset({"common"}),
    "schedule": frozenset({"common"}),
    "autograd": frozenset({"common"}),
    "health": frozenset({"common"}),
    "comm": frozenset({"common", "health"}),
    "shm": frozenset({"common", "health", "comm"}),
    "lanes": frozenset({"common", "autograd", "health", "comm", "memory"}),
    "mailbox": frozenset({"common", "autograd", "health", "comm", "memory", "shm", "lanes"}),
}

# Folders of `tests/cpp` that serve rooms and include none.
CPP_OF_TESTS = frozenset({"cuda_runtime"})

# Rooms of `python/smp`, lower layers first. `_C` and what the build writes lie below all of them.
PYTHON_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"config", "modules"}),
    frozenset({"world"}),
    frozenset({"tensor_parallel"}),
    frozenset({"dropout", "initial", "partition"}),
    frozenset({"activations"}),
    frozenset({"data_parallel", "nn", "pipeline", "precision"}),
    frozenset({"compilation", "context_parallel", "planning", "replacement", "storage"}),
    frozenset({"model"}),
    frozenset({"optim", "step"}),
    frozenset({"checkpoint", "observe"}),
    frozenset({"commands", "integrations", "v1"}),
    frozenset({"automatic", "launching"}),
)
PYTHON_BELOW_ALL = frozenset(
    {"_C", "_build_info", "_device", "_event_lines", "_torch_releases", "_version"}
)

# Import paths of users beside the rooms: they give out names of rooms and do nothing else.
PUBLIC_PATHS = frozenset(
    {
        "amp",
        "metrics",
        "optimizers",
        "patches",
        "preemption",
        "schedule",
        "sharded_data_parallel_checkpoint",
        "state_mod",
        "utils",
    }
)
# Tools look at the core; the core runs without them.
TOOLS = frozenset({"observe", "planning", "commands", "automatic", "launching", "smp_cli"})
_ON_TOP = PUBLIC_PATHS | {"__init__", "__main__"}

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
    if room in CPP_OF_TESTS:
        return below
    for layer in CPP_LAYERS:
        if room in layer:
            return CPP_NARROW.get(room, below)
        below |= layer
    raise KeyError(room)


#: Folders of tests/cpp that belong to no room and include nothing of `csrc`.
CPP_OF_NO_ROOM = {"device"}


def check_cpp(root: Path) -> list[str]:
    """Complaints about includes below ``root/csrc`` and ``root/tests/cpp``."""
    complaints = []
    for base in ("csrc", "tests/cpp"):
        for path in cpp_files(root / base):
            place = path.relative_to(root).as_posix()
            room = path.relative_to(root / base).parts[0]
            try:
                is_of_none = base == "tests/cpp" and room in CPP_OF_NO_ROOM
                allowed = {room} if is_of_none else allowed_rooms(room) | {room}
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
    """``"smp.world.comm.groups"`` -> ``"comm"``; "" for ``smp`` itself; None for other packages."""
    parts = name.split(".")
    if parts[0] != "smp":
        return None
    return parts[1] if len(parts) > 1 else ""


def python_layer(room: str) -> int:
    """Number of the room's layer; -1 for what lies below all rooms."""
    if room in PYTHON_BELOW_ALL:
        return -1
    for index, layer in enumerate(PYTHON_LAYERS):
        if room in layer:
            return index
    raise KeyError(room)


def _targets(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Modules of smp (first level, "" for the package) that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            kept = package[: len(package) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        # `from smp import world` names the room, not the package.
        names = [f"smp.{alias.name}" for alias in node.names] if base == "smp" else [base]
    else:
        return
    for name in names:
        module = _smp_module(name)
        if module is not None:
            yield module


def used_tools(root: Path) -> dict[str, frozenset[str]]:
    """Returns the tools that each file of the core imports; files without any are left out."""
    package_root = root / "python" / "smp"
    found: dict[str, set[str]] = {}
    for path in sorted(package_root.rglob("*.py")):
        relative = path.relative_to(package_root)
        if len(relative.parts) == 1 or relative.parts[0] in TOOLS | PUBLIC_PATHS:
            continue
        for name in _imported_modules(path):
            parts = name.split(".")
            top = parts[1] if parts[0] == "smp" and len(parts) > 1 else parts[0]
            if top in TOOLS:
                found.setdefault(relative.as_posix(), set()).add(top)
    return {place: frozenset(tools) for place, tools in found.items()}


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "smp":
            yield from (f"smp.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def check_python(root: Path) -> list[str]:
    """Complaints about imports inside ``root/python/smp``."""
    complaints = []
    package_root = root / "python" / "smp"
    for path in sorted(package_root.rglob("*.py")):
        relative = path.relative_to(package_root)
        own = relative.parts[0].removesuffix(".py")
        if own in PUBLIC_PATHS:
            complaints += _check_public_path(path, path.relative_to(root).as_posix())
        elif own not in _ON_TOP:
            complaints += _check_room_file(path, path.relative_to(root).as_posix(), relative)
    return complaints


def _check_public_path(path: Path, place: str) -> Iterator[str]:
    """A public path gives out names of rooms: it may hold imports and aliases."""
    for node in ast.parse(path.read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
            yield f"{place}:{node.lineno}: a public path gives out names only; code is in rooms"


def _check_room_file(path: Path, place: str, relative: Path) -> Iterator[str]:
    own = relative.parts[0].removesuffix(".py")
    if len(relative.parts) == 1 and own not in PYTHON_BELOW_ALL:
        yield f"{place}: a module beside the rooms; it belongs into one of them"
        return
    try:
        own_layer = python_layer(own)
    except KeyError:
        yield f"{place}: '{own}' is in no layer of PYTHON_LAYERS"
        return
    tree = ast.parse(path.read_text())
    inside_functions = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        for other in _targets(node, ["smp", *relative.parts[:-1]]):
            where = f"{place}:{getattr(node, 'lineno', 0)}"
            if id(node) in inside_functions:
                yield f"{where}: import '{other or 'smp'}' at the top of the file"
            if other != own and (problem := _problem(own, own_layer, other)):
                yield f"{where}: {problem}"


def _problem(own: str, own_layer: int, other: str) -> str | None:
    """Returns the reason why a room may not import something of smp; None if it may."""
    if not other or other in _ON_TOP:
        return f"import the room that has it, not 'smp{'.' if other else ''}{other}'"
    try:
        other_layer = python_layer(other)
    except KeyError:
        return f"'{other}' is in no layer of PYTHON_LAYERS"
    return None if other_layer < own_layer else f"'{own}' may not import '{other}' (not below it)"


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
