"""The documented names are there, as documented, and each has a test of what it does."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from tests.api.names import IMPORTS, INSTANCES, NAMES, PROTOCOLS
from tests.dist.pool import Pool

REPO = Path(__file__).resolve().parents[2]


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((REPO / path).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def expected_arguments(signature: str) -> inspect.Signature:
    names = {"pickle": pickle, **{name: getattr(smp, name) for name in smp.__all__}}
    function = eval(f"lambda {signature}: None", names)  # from our own table
    return inspect.signature(function)


def check_arguments(value: Any, signature: str, name: str) -> None:
    """The documented arguments come first, in their order, with their defaults."""
    expected = expected_arguments(signature).parameters.values()
    actual = inspect.signature(value).parameters
    for argument in expected:
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            assert any(p.kind is argument.kind for p in actual.values()), f"{name}: {argument}"
            continue
        there = argument.name in actual
        kinds = {p.kind for p in actual.values()}
        assert there or argument.VAR_KEYWORD in kinds, f"{name} has no {argument.name}"
        if there:
            own, given = actual[argument.name].default, argument.default
            assert own == given, f"{name}({argument.name}={own!r})"
            kind = actual[argument.name].kind
            assert kind is not kind.KEYWORD_ONLY or argument.kind is kind, f"{name}: {argument}"
    documented = [a.name for a in expected if a.name in actual]
    positional = [
        p.name
        for p in actual.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "function"
    ]
    places = [positional.index(a) for a in documented if a in positional]
    assert places == list(range(len(places))), f"{name} takes {positional}"


def find(name: str) -> Any:
    value: Any = smp
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_is_there_as_documented(name: str) -> None:
    signature, _ = NAMES[name]
    value = find(name)
    if signature is not None:
        check_arguments(value, signature, name)
    v1 = importlib.import_module("smdistributed.modelparallel.torch")
    assert functools.reduce(getattr, name.split("."), v1) is value or callable(value)
    assert "." in name or name in smp.__all__


def test_every_name_has_a_test() -> None:
    tests = {name: test for name, (_, test) in NAMES.items()} | PROTOCOLS
    for kind, members in INSTANCES.items():
        tests |= {f"{kind}: {name}": test for name, (_, test) in members.items()}
    assert len(tests) > 180
    missing = {}
    for name, test in tests.items():
        path, _, function = test.partition("::")
        if function not in functions_of(path):
            missing[name] = test
    assert not missing


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_objects_have_their_members(precision: str) -> None:
    smp.init({} if precision == "fp32" else {precision: True})
    try:
        model = smp.DistributedModel(nn.Linear(2, 1))
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        objects = {"model": model, "optimizer": optimizer, "state": smp.state}
        objects["module_manager"] = smp.state.module_manager
        objects["step_output"] = smp.step(lambda x: x)(torch.ones(1))
        for kind, value in objects.items():
            for name, (signature, _) in INSTANCES[kind].items():
                member = getattr(value, name)
                if signature is not None:
                    check_arguments(member, signature, f"{kind}.{name}")
        inner: Any = model
        for _ in range(5):
            inner = getattr(inner, "module", inner)
        assert inner is model.get_module()
    finally:
        smp.shutdown()


def look_at_shards(rank: int) -> None:
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "bf16": True})
    model = smp.DistributedModel(nn.Linear(2, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    parameter = model.get_module().weight
    objects = {"sharded_optimizer": optimizer, "sharded_parameter": parameter}
    objects["ds_tensor"] = parameter.ds_tensor
    for kind, value in objects.items():
        for name in INSTANCES[kind]:
            assert hasattr(value, name), f"{kind}.{name}"


def test_sharded_objects_have_their_members(pool: Pool) -> None:
    pool.run(2, look_at_shards)


def test_modules_are_imported_before_init_in_a_new_process() -> None:
    lines = ["import importlib"]
    for path, names in IMPORTS.items():
        module = f"smdistributed.modelparallel.{path}".rstrip(".")
        lines += [f"module = importlib.import_module('{module}')"]
        lines += [f"module.{name}" for name in names]
        lines += [f"from {module} import {name}" for name in names]
    lines += ["import smdistributed.modelparallel.torch as smp"]
    lines += ["assert callable(smp.step) and not smp.is_initialized()"]
    lines += ["assert smp.state_mod.state is smp.state"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
