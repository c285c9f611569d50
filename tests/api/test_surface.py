"""The public surface changes on purpose only."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys

import pytest

from tests.api.surface import GOLDEN, surface

# The names that the public documentation of v1 has, and those of this library.
NAMES = """
init is_initialized is_tracing state shutdown
rank local_rank mp_rank dp_rank pp_rank tp_rank rdp_rank
size local_size mp_size dp_size pp_size tp_size rdp_size
get_mp_group get_dp_group get_tp_group get_pp_group get_rdp_group get_world_group
get_world_process_group get_mp_process_group get_dp_process_group
get_pp_process_group get_tp_process_group get_rdp_process_group
CommGroup RankType WORLD MP_GROUP DP_GROUP PP_GROUP TP_GROUP RDP_GROUP
broadcast send recv_from allgather
barrier mp_barrier dp_barrier pp_barrier tp_barrier rdp_barrier
step StepOutput DistributedModel model partition set_partition
DistributedOptimizer save load clip_grad_norm_ grad_norm metrics set_activation_checkpointing
patches
""".split()

SIGNATURES = {
    "step": {"non_split_inputs": None, "input_split_axes": None, "detach_outputs": True},
    "DistributedModel": {
        "trace_device": "gpu",
        "trace_execution_times": False,
        "overlapping_allreduce": True,
        "backward_passes_per_step": 1,
        "average_grads_across_microbatches": True,
        "bucket_cap_mb": 25,
        "trace_memory_usage": False,
        "broadcast_buffers": True,
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
    },
    "DistributedOptimizer": {
        "static_loss_scale": 1.0,
        "dynamic_loss_scale": False,
        "dynamic_loss_args": None,
    },
    "set_activation_checkpointing": {
        "preserve_rng_state": True,
        "pack_args_as_tuple": False,
        "strategy": "each",
    },
    "save": {"partial": True, "pickle_protocol": 2, "v3": False},
    "load": {"map_location": None, "partial": True, "back_compat": False},
}

# Keys of v1 and of this library with their defaults.
CONFIG_DEFAULTS = {
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "ddp": False,
    "deterministic_server": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "fp16": False,
    "fp16_params": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "delayed_parameter_initialization": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "ddp_dist_backend": "auto",
}


def test_surface_equals_the_golden_file() -> None:
    golden, now = json.loads(GOLDEN.read_text()), json.loads(json.dumps(surface()))
    for part in ("names", "config"):
        missing = sorted(set(golden[part]) - set(now[part]))
        new = sorted(set(now[part]) - set(golden[part]))
        changed = [n for n in golden[part] if n in now[part] and golden[part][n] != now[part][n]]
        assert not (missing or new or changed), (
            f"{part}: gone {missing}, new {new}, changed "
            f"{[(n, golden[part][n], now[part][n]) for n in changed]}; if this is meant, run "
            "python -m tests.api.surface --write and write it into CHANGELOG.md"
        )


@pytest.mark.parametrize("name", NAMES)
def test_documented_name_exists(name: str) -> None:
    import smp

    assert hasattr(smp, name) and name in smp.__all__


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_documented_arguments_and_defaults(name: str) -> None:
    import smp

    parameters = inspect.signature(getattr(smp, name)).parameters
    for argument, default in SIGNATURES[name].items():
        assert argument in parameters, f"{name} has no {argument}"
        assert parameters[argument].default == default, f"{name}({argument}=...)"


@pytest.mark.parametrize("key", sorted(CONFIG_DEFAULTS))
def test_documented_config_default(key: str) -> None:
    assert surface()["config"][key] == CONFIG_DEFAULTS[key]


def test_public_names_have_docstrings() -> None:
    import smp

    bare = [
        name
        for name in smp.__all__
        if (inspect.isfunction(getattr(smp, name)) or inspect.isclass(getattr(smp, name)))
        and not inspect.getdoc(getattr(smp, name))
    ]
    assert not bare, f"no docstring: {bare}"


def test_v1_import_path_is_the_same_library() -> None:
    import smp

    assert importlib.util.find_spec("smdistributed")
    v1 = importlib.import_module("smdistributed.modelparallel.torch")
    for name in NAMES:
        assert getattr(v1, name) is getattr(smp, name), name
    model = importlib.import_module("smdistributed.modelparallel.torch.model")
    assert model.DistributedModel is smp.DistributedModel
    modules = importlib.import_module("smdistributed.modelparallel.torch.nn")
    assert modules.FusedLayerNorm is smp.nn.FusedLayerNorm
    optimizers = importlib.import_module("smdistributed.modelparallel.torch.optimizers")
    assert optimizers.FusedLamb is smp.optimizers.FusedLAMB
    patches = importlib.import_module("smdistributed.modelparallel.torch.patches.checkpoint")
    assert patches.checkpoint is smp.patches.checkpoint.checkpoint
    family = importlib.import_module("smdistributed.modelparallel.torch.nn.huggingface.gpt2")
    assert family is smp.nn.huggingface.gpt2
    assert not inspect.ismodule(v1.step) and callable(v1.step)
    version = importlib.import_module("smdistributed.modelparallel").__version__
    assert tuple(map(int, version.split(".")[:2])) >= (1, 10)


def test_import_has_no_side_effects() -> None:
    program = (
        "import sys, threading, os\n"
        "import torch\n"
        "before = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))\n"
        "import smp\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
        "assert not torch.distributed.is_initialized() and not smp.is_initialized()\n"
        "assert threading.active_count() == 1\n"
        "after = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))\n"
        "assert after == before, f'threads and files {before} became {after}'\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
