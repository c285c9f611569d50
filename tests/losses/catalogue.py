"""The catalogue of all losses, in the order of the table."""

from __future__ import annotations

import importlib

from tests.losses.case import CASES as CASES

for _name in ("supervised", "sequences", "batchwise"):  # they register cases
    importlib.import_module(f"tests.losses.{_name}")
