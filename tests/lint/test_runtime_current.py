"""Checks that only functions that users call ask for the runtime of the process."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.lint.layers import REPO

_SMP = REPO / "python" / "smp"

# Functions that may call `runtime.current()`, by file. A private function is called by public
# functions of its file that would all begin with the same line.
ALLOWED: dict[str, frozenset[str]] = {
    "activations/checkpointing.py": frozenset({"_check_type"}),
    "activations/recompute.py": frozenset({"recompute"}),
    "automatic/ready.py": frozenset({"auto"}),
    "checkpoint/files.py": frozenset({"load", "save"}),
    "checkpoint/loading.py": frozenset({"resume_from_checkpoint"}),
    "checkpoint/saving.py": frozenset({"save_checkpoint", "wait_for_uploads"}),
    "context_parallel/regions.py": frozenset({"group"}),
    "data_parallel/batch_shares.py": frozenset({"batch_slice"}),
    "integrations/accelerator.py": frozenset({"SMPAccelerator.__init__", "distributed_optimizer"}),
    "integrations/pretrained.py": frozenset({"save_huggingface"}),
    "integrations/serving.py": frozenset({"stream_parameters"}),
    "integrations/trainer.py": frozenset({"SMPTrainerMixin.__init__"}),
    "launching/first_rank.py": frozenset({"_leave"}),
    "model/distributed_model.py": frozenset({"DistributedModel.__init__"}),
    "nn/layout.py": frozenset({"current"}),
    "observe/metrics.py": frozenset({"_run"}),
    "observe/nonfinite.py": frozenset({"detect_nonfinite"}),
    "observe/timeline/__init__.py": frozenset({"trace"}),
    "optim/amp.py": frozenset({"GradScaler.__init__"}),
    "optim/distributed_optimizer.py": frozenset({"DistributedOptimizer.__init__"}),
    "precision/grad_norm.py": frozenset({"clip_grad_norm_", "grad_norm"}),
    "partition/contexts.py": frozenset({"_run"}),
    "partition/report.py": frozenset({"explain_partition", "save_partition"}),
    "replacement/marks.py": frozenset({"_run"}),
    "step/decorator.py": frozenset({"StepFunction.__call__"}),
    "step/going_on.py": frozenset({"on_resize"}),
    "step/taking_over.py": frozenset({"take_over"}),
    "tensor_parallel/reading.py": frozenset({"is_outside"}),
    "tensor_parallel/regions.py": frozenset({"_group"}),
    "v1/replicas.py": frozenset({"DistributedDataParallel.__init__"}),
    "world/comm.py": frozenset({"_run"}),
    "world/preemption.py": frozenset({"_run", "on_signal"}),
    "world/state.py": frozenset({"_run"}),
}

MOST_CALLS = 41


def calls(text: str) -> Iterator[str]:
    """Qualified name of the function around each call of `runtime.current`; "" at the top."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("runtime.current"):
            yield ".".join(names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(ast.parse(text), ())


def other_names(text: str) -> list[str]:
    """Imports that would hide a call: `from smp.world.runtime import current`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith("world.runtime")
        and any(alias.name in ("current", "_current") for alias in node.names)
    ]


def callers(text: str, name: str) -> set[str]:
    """Functions of a file that mention a function of it, by their own names."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != name:
            if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)):
                found.add(node.name)
    return found


def serves_public_functions(text: str, qualified: str) -> bool:
    """Returns whether all chains of callers of a name end at public functions of the file."""
    known, waiting = {qualified}, [qualified]
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        if not any(part.startswith("_") and not part.endswith("__") for part in parts):
            continue
        above = callers(text, parts[-1])
        if not above:
            return False
        waiting += above - known
        known |= above
    return True


def _asking() -> dict[str, Counter[str]]:
    asking = {}
    for path in sorted(_SMP.rglob("*.py")):
        found = Counter(calls(path.read_text()))
        if found:
            asking[path.relative_to(_SMP).as_posix()] = found
    return asking


def test_only_functions_that_users_call_ask_for_the_runtime() -> None:
    asking = _asking()
    assert {file: set(found) for file, found in asking.items()} == ALLOWED
    assert sum(found.total() for found in asking.values()) < MOST_CALLS


def test_they_are_public_or_stand_for_public_ones() -> None:
    for file, names in ALLOWED.items():
        text = (_SMP / file).read_text()
        for name in names:
            assert serves_public_functions(text, name), f"{file}: {name}"


def test_nobody_asks_under_another_name() -> None:
    for path in sorted(Path(_SMP).rglob("*.py")):
        assert not other_names(path.read_text()), path


def test_the_rules_see_what_they_forbid() -> None:
    text = (
        "class Owner:\n    def __init__(self):\n        self.r = runtime.current()\n"
        "def _inner():\n    return smp.world.runtime.current().rank\n"
        "def outer():\n    return _inner()\n"
        "def _alone():\n    return runtime.current()\n"
    )
    assert list(calls(text)) == ["Owner.__init__", "_inner", "_alone"]
    assert serves_public_functions(text, "_inner")
    assert not serves_public_functions(text, "_alone")
    assert other_names("from smp.world.runtime import current as now")
