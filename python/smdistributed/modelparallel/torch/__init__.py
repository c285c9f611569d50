"""`import smdistributed.modelparallel.torch as smp`: a re-export of `smp` and nothing else."""

import importlib
import sys

from smp import *  # noqa: F403
from smp import __all__ as __all__

# Old scripts import these modules by their path; they are the very modules of smp.
for _name in ("model", "sharded_data_parallel_checkpoint", "state_mod", "step", "utils"):
    importlib.import_module(f"smp.{_name}")
for _name in [name.removeprefix("smp.") for name in sys.modules if name.startswith("smp.")]:
    if _name.split(".")[0] in (
        "amp",
        "model",
        "nn",
        "optimizers",
        "patches",
        "sharded_data_parallel_checkpoint",
        "state_mod",
        "step",
        "utils",
    ):
        sys.modules[f"{__name__}.{_name}"] = sys.modules[f"smp.{_name}"]
