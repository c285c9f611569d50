"""Importing smp does no work: it opens nothing, starts nothing and prints nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.installed import python_path
from tests.patience import PATIENCE_S

_PROBE = """
import importlib, json, os, pkgutil, sys, threading
import torch, torch.distributed

events = []
def watch(event, args):
    if event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.fork"):
        events.append(event)
sys.addaudithook(watch)
threads = set(t.ident for t in threading.enumerate())
environment = dict(os.environ)
random_state = torch.get_rng_state()

import smp
names = ["smp"] + [
    m.name
    for m in pkgutil.walk_packages(smp.__path__, "smp.")
    if m.module_finder.find_spec(m.name).origin.endswith(".py")  # no shared libraries
    and not m.name.startswith("smp.integrations.")  # each imports what it is for
]
for name in names:
    importlib.import_module(name)

print(json.dumps({
    "names": names,
    "events": events,
    "threads": len(set(t.ident for t in threading.enumerate()) - threads),
    "environment": sorted(k for k in set(environment) | set(os.environ)
                          if environment.get(k) != os.environ.get(k)),
    "random_state_kept": bool(torch.equal(random_state, torch.get_rng_state())),
    "process_group": torch.distributed.is_initialized(),
    "hugging_face": sorted({"transformers", "accelerate", "peft"} & set(sys.modules)),
    "libmpi": "libmpi" in open("/proc/self/maps").read(),
}))
"""


def test_all_modules_import_without_side_effects(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=tmp_path,  # works from any folder
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"importing printed: {lines[:-1]}"
    seen = json.loads(lines[0])
    assert {"smp", "smp.config.schema", "smp.step"} <= set(seen.pop("names"))
    assert seen == {
        "events": [],
        "threads": 0,
        "environment": [],
        "random_state_kept": True,
        "process_group": False,
        "hugging_face": [],
        "libmpi": False,  # loaded only when asked for: it patches memory functions
    }
