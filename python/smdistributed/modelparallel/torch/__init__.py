"""`import smdistributed.modelparallel.torch as smp`: a re-export of `smp` and nothing else."""

import sys

from smp import *  # noqa: F403
from smp import __all__ as __all__

# `import smdistributed.modelparallel.torch.nn.huggingface.gpt2` finds the module of smp itself.
for _name in [name.removeprefix("smp.") for name in sys.modules if name.startswith("smp.")]:
    if _name.split(".")[0] in ("amp", "model", "nn", "optimizers", "step"):
        sys.modules[f"{__name__}.{_name}"] = sys.modules[f"smp.{_name}"]
