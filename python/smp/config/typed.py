"""Types of the configuration, with which editors complete keys and check values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class ConfigDict(TypedDict, total=False):
    """Keys of `smp.init`, all of them optional. docs/running_reference.md describes them."""

    pipeline_parallel_degree: int
    partitions: int
    microbatches: int
    pipeline: str
    optimize: Literal["memory", "speed"]
    placement_strategy: str
    auto_partition: bool
    default_partition: int
    memory_weight: float | None
    ddp: bool
    active_microbatches: int | None
    deterministic_server: bool
    offload_activations: bool | Literal["all"]
    activation_loading_horizon: int
    tensor_parallel_degree: int
    expert_parallel_degree: int
    context_parallel_degree: int
    context_parallel_ring_degree: int
    fp16: bool
    fp16_params: bool
    bf16: bool
    bf16_masters: Literal["fp32", "residue", "none"]
    fp8: Literal["none", "rowwise", "tensorwise"]
    fp8_skip: str
    shard_optimizer_state: bool
    optimizer_state: Literal["auto", "elements", "tensors"]
    offload_optimizer_state: bool
    update_in_backward: bool
    prescaled_batch: bool
    skip_tracing: bool
    delayed_parameter_initialization: bool
    sharded_data_parallel_degree: int
    sdp_reduce_bucket_size: int
    sdp_param_persistence_threshold: int
    sdp_max_live_parameters: int
    sdp_hierarchical_allgather: bool
    sdp_gradient_clipping: float
    ddp_dist_backend: Literal["auto", "flat", "hierarchical", "nccl"]
    static_mode: bool
    fast_mode: bool
    checkpoint_attentions: bool
    _match_weights: bool
    overlapping_allreduce: bool
    use_times: bool
    partition_file: str | None
    partition_memory_limit: int | str | Sequence[int | str] | None
    device_speeds: str | Sequence[float] | None
    virtual_stages: int | None
    fused_linear_cross_entropy: bool
    layout_independent_dropout: bool
    on_failure: str
    redundancy: int
