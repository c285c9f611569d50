"""smp: model-parallel training of unmodified PyTorch modules.

Wrap a module in :class:`DistributedModel`, its optimizer in :class:`DistributedOptimizer`, move
forward and backward into a function decorated with :func:`step`, and launch with torchrun, mpirun
or Slurm. Importing this package does not communicate and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from smp.world import extension

extension.load()

from smp import (  # noqa: E402
    amp,
    metrics,
    model,
    nn,
    optimizers,
    patches,
    preemption,
    schedule,
    sharded_data_parallel_checkpoint,
    state_mod,
    utils,
)
from smp._C import PeerFailure  # noqa: E402
from smp._version import __version__  # noqa: E402
from smp.activations.checkpointing import set_activation_checkpointing  # noqa: E402
from smp.checkpoint import (  # noqa: E402
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
    wait_for_uploads,
)
from smp.checkpoint.saving import StoppingSaver  # noqa: E402
from smp.data_parallel import batch_slice  # noqa: E402
from smp.initial.delay import delay_param_initialization  # noqa: E402
from smp.initial.delay import delay_param_initialization as delayed_parameter_initialization  # noqa: E402
from smp.integrations.adapters import save_adapters  # noqa: E402
from smp.integrations.pretrained import save_huggingface  # noqa: E402
from smp.integrations.quantization import quantize  # noqa: E402
from smp.integrations.serving import stream_parameters  # noqa: E402
from smp.model import DistributedModel, is_tracing, whole_parameters  # noqa: E402
from smp.observe import OBSERVERS  # noqa: E402
from smp.observe.nonfinite import detect_nonfinite  # noqa: E402
from smp.observe.timeline import trace  # noqa: E402
from smp.optim.distributed_optimizer import DistributedOptimizer  # noqa: E402
from smp.partition import partition, set_partition  # noqa: E402
from smp.partition.report import explain_partition, save_partition  # noqa: E402
from smp.precision.grad_norm import clip_grad_norm_, grad_norm  # noqa: E402
from smp.replacement import (  # noqa: E402
    model_creation,
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)

# `step` and `partition` are submodules and public functions at once; as in the documented
# interface the attribute is the function.
from smp.step import step  # noqa: E402
from smp.step.going_on import Resized, on_resize  # noqa: E402
from smp.step.microbatch import StepOutput  # noqa: E402
from smp.step.taking_over import take_over  # noqa: E402
from smp.world.comm import (  # noqa: E402
    CP_GROUP,
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    cp_barrier,
    cp_rank,
    cp_size,
    dp_barrier,
    dp_rank,
    dp_size,
    get_cp_group,
    get_cp_process_group,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_barrier,
    pp_rank,
    pp_size,
    rank,
    rdp_barrier,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    size,
    tp_barrier,
    tp_rank,
    tp_size,
)
from smp.world.observers import use_observers  # noqa: E402
from smp.world.preemption import requested as preemption_requested  # noqa: E402
from smp.world.preemption import use_saver  # noqa: E402
from smp.world.runtime import init, is_initialized, shutdown  # noqa: E402
from smp.world.state import state  # noqa: E402

if TYPE_CHECKING:
    from smp.automatic import auto
    from smp.launching import launch
else:
    # The rooms below plan, and few scripts need that: they are imported with the first use.
    _LATE = {"auto": "smp.automatic", "launch": "smp.launching"}

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})


use_saver(StoppingSaver())
use_observers(*OBSERVERS)

__all__ = [
    "CP_GROUP",
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "PeerFailure",
    "RankType",
    "Resized",
    "StepOutput",
    "__version__",
    "allgather",
    "amp",
    "auto",
    "barrier",
    "batch_slice",
    "broadcast",
    "clip_grad_norm_",
    "cp_barrier",
    "cp_rank",
    "cp_size",
    "delay_param_initialization",
    "delayed_parameter_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "detect_nonfinite",
    "explain_partition",
    "get_cp_group",
    "get_cp_process_group",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_group",
    "get_world_process_group",
    "grad_norm",
    "init",
    "is_initialized",
    "is_tracing",
    "launch",
    "load",
    "local_rank",
    "local_size",
    "metrics",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "on_resize",
    "optimizers",
    "partition",
    "patches",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "preemption",
    "preemption_requested",
    "quantize",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_adapters",
    "save_checkpoint",
    "save_huggingface",
    "save_partition",
    "schedule",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "sharded_data_parallel_checkpoint",
    "shutdown",
    "size",
    "state",
    "state_mod",
    "step",
    "take_over",
    "stream_parameters",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "trace",
    "utils",
    "wait_for_uploads",
    "whole_parameters",
]
