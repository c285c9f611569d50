"""The configuration: its keys, their rules, and what is refused.

`smp.config.sources` reads the values.

Everything here is a pure function of its arguments. A value passes three gates:
`normalize` (known key, right type and range), `Config.of_checked` (keys that
depend on each other), and `check_world` of `processes.py`, the rules that need
the number of processes.

Every error reads ``smp config: <key>=<value>: <reason>; <how to fix>``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import smp._C as _C
from smp.config import kinds

PIPELINES = tuple(_C.policy_names())
# A placement without C puts the ranks of a context-parallel group beside those of a tensor-parallel
# one (csrc/topology/placement.h).
PLACEMENTS = (
    "cluster",
    "spread",
    *("".join(p) for letters in ("DPT", "DPTC") for p in itertools.permutations(letters)),
)


def config_error(key: str, value: object, reason: str, fix: str) -> ValueError:
    """Returns a configuration error in the form that all of them have."""
    return ValueError(f"smp config: {key}={value!r}: {reason}; {fix}")


# ---- kinds of values ---------------------------------------------------------


def _key(default: object, kind: kinds.Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


def _int(default: int | None, minimum: int, maximum: int = kinds.MAX_COUNT) -> Any:
    words = f"an integer in [{minimum}, {maximum}]"
    convert = functools.partial(kinds.to_int, minimum=minimum, maximum=maximum)
    form = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return _key(default, kinds.Kind(words, convert, form, default is None))


def _bool(default: bool, *choices: str) -> Any:
    words = ", ".join(["True or False", *map(repr, choices)])
    convert = functools.partial(kinds.to_bool, choices=choices)
    form: dict[str, Any] = {"enum": [True, False, *choices]} if choices else {"type": "boolean"}
    return _key(default, kinds.Kind(words, convert, form, choices=choices))


def _float(default: float | None, low: float, high: float) -> Any:
    words = f"a number in [{low:g}, {high:g}]" if high < math.inf else f"a number >= {low:g}"
    convert = functools.partial(kinds.to_float, low=low, high=high)
    form = {"type": "number", "minimum": low} | ({"maximum": high} if high < math.inf else {})
    return _key(default, kinds.Kind(words, convert, form, default is None))


def _text(default: str | None) -> Any:
    form = {"type": "string", "minLength": 1}
    words = "a text that is not empty"
    return _key(default, kinds.Kind(words, kinds.to_text, form, default is None))


def _sizes() -> Any:
    words = "a number of bytes above 0, or a text like '12GiB', or a list like '12GiB:2, 24GiB'"
    size = {"type": ["integer", "string"], "minimum": 1}
    form = {"anyOf": [size, {"type": "array", "items": size, "minItems": 1}]}
    return _key(None, kinds.Kind(words, kinds.to_sizes, form, True))


def _speeds() -> Any:
    words = "a list of numbers above 0 like '1:2, 2.5', which means 1, 1 and 2.5"
    numbers = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1}
    convert = functools.partial(kinds.to_tuple, convert=kinds.to_speed)
    return _key(None, kinds.Kind(words, convert, {"anyOf": [numbers, {"type": "string"}]}, True))


def _choice(default: str, *choices: str) -> Any:
    words = "one of " + ", ".join(repr(c) for c in choices)
    convert = functools.partial(kinds.to_choice, choices=choices)
    form = {"enum": list(choices)}
    return _key(default, kinds.Kind(words, convert, form, choices=choices))


def _placement() -> Any:
    words = "'cluster', 'spread' or a permutation of 'DPT' or 'DPTC'"
    convert = functools.partial(kinds.to_choice, choices=PLACEMENTS)
    form = {"enum": list(PLACEMENTS)}
    return _key("cluster", kinds.Kind(words, convert, form, choices=PLACEMENTS))


# ---- the keys ----------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The effective values of all keys; read-only. Made by `Config.from_dict`."""

    pipeline_parallel_degree: int = _int(1, 1)
    """Number of partitions of the model; alias `partitions`."""
    microbatches: int = _int(1, 1)
    """Parts into which a step cuts its batch; 1 means no pipelining."""
    pipeline: str = _choice(_C.DEFAULT_POLICY, *PIPELINES)
    """Schedule of microbatches."""
    optimize: str = _choice("memory", "memory", "speed")
    """Default of `memory_weight`; communication style of tensor parallelism."""
    placement_strategy: str = _placement()
    """Layout of ranks; the right-most letter varies fastest over neighbours."""
    auto_partition: bool = _bool(True)
    """Let the library assign modules to partitions."""
    default_partition: int = _int(0, 0)
    """Partition of modules outside any `smp.partition`."""

    memory_weight: float = _float(None, 0.0, 1.0)
    """0 balances compute only, 1 memory only. None: 0.2 for speed, else 0.8; if neither this nor
    `optimize` is given, the fastest partition that fits is searched for instead."""
    ddp: bool = _bool(False)
    """Needed for any data parallelism."""
    active_microbatches: int = _int(None, 1)
    """Microbatches in flight. None: `pp + 2`, all for the simple schedule, `2 * pp` with virtual
    stages, `pp` for zero_bubble."""
    deterministic_server: bool = _bool(False)
    """Data-parallel ranks serve requests in one agreed order."""
    offload_activations: bool | Literal["all"] = _bool(False, "all")
    """Keep activations in host memory: those of checkpoints, or all that forwards save."""
    activation_loading_horizon: int = _int(4, 1)
    """Number of pipeline tasks by which offloaded activations are loaded ahead."""
    tensor_parallel_degree: int = _int(1, 1)
    """Ranks over which single modules are split."""
    expert_parallel_degree: int = _int(1, 1)
    """Ranks over which the experts of a module are spread; 1 or `tensor_parallel_degree`."""
    context_parallel_degree: int = _int(1, 1)
    """Ranks that read one batch and compute a part of each of its sequences."""
    context_parallel_ring_degree: int = _int(1, 1)
    """Ranks around which keys and values of attention go; a divisor of `context_parallel_degree`,
    whose other ranks share heads."""
    fp16: bool = _bool(False)
    """FP16 training with master weights and loss scaling."""
    fp16_params: bool = _bool(False)
    """Create distributed modules in FP16 (older mechanism)."""
    bf16: bool = _bool(False)
    """BF16 training with master weights."""
    bf16_masters: str = _choice("fp32", "fp32", "residue", "none")
    """Digits of parameters beyond BF16: FP32 masters; residue: 8 further bits in the state of
    `FusedAdam`; none. The last two need that optimizer, which updates the parameters themselves."""
    fp8: str = _choice("none", "none", "rowwise", "tensorwise")
    """Linear layers multiply numbers of 8 bits that share a scale by row, or by tensor."""
    fp8_skip: str = _text("head, first, last")
    """Layers that `fp8` leaves as they are: the words head, first and last (blocks), and patterns
    of names, as in "head, *.gate"; none: all layers have 8 bits."""
    shard_optimizer_state: bool = _bool(False)
    """Each data-parallel rank keeps a part of the optimizer state."""
    optimizer_state: str = _choice("auto", "auto", "elements", "tensors")
    """State of tensors of which ranks hold parts: by elements, or whole tensors by owner. auto: the
    latter for optimizers that read whole tensors, which a trial shows."""
    offload_optimizer_state: bool = _bool(False)
    """Keep the moments of `FusedAdam` in host memory; an update copies them piece by piece."""
    update_in_backward: bool = _bool(False)
    """Update parameters while the backward runs, and drop each gradient at once."""
    prescaled_batch: bool = _bool(False)
    """Ranks of a tensor-parallel group get the same batch; no effect without such groups."""
    skip_tracing: bool = _bool(False)
    """Partition from parameter sizes only, without a tracing pass."""
    delayed_parameter_initialization: bool = _bool(False)
    """Create parameters only where they are needed."""
    sharded_data_parallel_degree: int = _int(1, 1)
    """Ranks over which parameters, gradients and states are sharded; 1 is off."""
    sdp_reduce_bucket_size: int = _int(500_000_000, 1, kinds.MAX_SIZE)
    """Largest number of elements of a gradient bucket (with sharded data parallelism)."""
    sdp_param_persistence_threshold: int = _int(1_000_000, 0, kinds.MAX_SIZE)
    """Smaller tensors stay whole, in elements."""
    sdp_max_live_parameters: int = _int(1_000_000_000, 1, kinds.MAX_SIZE)
    """Cap on gathered parameters, in elements."""
    sdp_hierarchical_allgather: bool = _bool(True)
    """Gather between hosts first, then inside of each host."""
    sdp_gradient_clipping: float = _float(1.0, 0.0, math.inf)
    """L2 threshold, always active with sharded data parallelism unless it is 0."""
    ddp_dist_backend: str = _choice("auto", "auto", "flat", "hierarchical", "nccl")
    """Way in which gradients are summed over several hosts. auto: by hosts where that is faster;
    flat, nccl: over all ranks at once. On GPUs NCCL sums all of them."""

    static_mode: bool = _bool(False)
    """Hint; never changes results."""
    fast_mode: bool = _bool(False)
    """Hint; never changes results."""
    checkpoint_attentions: bool = _bool(False)
    """Hint for scripts older than 1.10; fused attention keeps no scores."""
    _match_weights: bool = _bool(True)
    """Distributed modules inherit the weights of the modules that they replace."""
    overlapping_allreduce: bool = _bool(True)
    """Default of the `DistributedModel` argument of that name."""
    use_times: bool = _bool(False)
    """Default of `DistributedModel(trace_execution_times=...)`."""

    partition_file: str = _text(None)
    """Partition to use instead of deciding one; `smp.save_partition` writes such files."""
    partition_memory_limit: int | tuple[int, ...] = _sizes()
    """The most that a rank may hold, in bytes or as "12GiB", or one such size for each pipeline
    rank. None: no limit, but the search for the fastest partition considers the available memory
    of each rank."""
    device_speeds: tuple[float, ...] | None = _speeds()
    """Speeds of the devices of all ranks in any one unit, by global rank. None: all are alike."""
    virtual_stages: int = _int(None, 1)
    """Number of model parts per rank, run in turn. None: 2 for virtual_interleaved, else 1."""
    fused_linear_cross_entropy: bool = _bool(False)
    """Heads of language models compute losses in chunks of tokens, without logits in memory."""
    layout_independent_dropout: bool = _bool(False)
    """Masks of dropout depend on seed, step, sample, module and element, and on no layout."""
    on_failure: str = _choice("end", "end", "shrink", "spare")
    """When a rank dies, all ranks end, or the replicas that are whole go on without the others, or
    a process that waits takes its place."""
    redundancy: int = _int(0, 0, 1)
    """Copies of the state of each rank in the memory of other ranks, for jobs without replicas or
    with sharded state."""

    @property
    def partitions(self) -> int:
        """Alias of `pipeline_parallel_degree`."""
        return self.pipeline_parallel_degree

    def shard_size(self, num_replicas: int) -> int:
        """Returns the number of ranks that share one copy of parameters or optimizer state.

        The number is 1 without sharding.

        Args:
            num_replicas: number of ranks that have the same slices of the same partition.
        """
        return num_replicas if self.shard_optimizer_state else self.sharded_data_parallel_degree

    @property
    def goes_on(self) -> bool:
        """True if other ranks go on when one has failed."""
        return self.on_failure != "end"

    @property
    def memory_limits(self) -> tuple[int, ...]:
        """Returns the most that each pipeline rank may hold; empty without a limit."""
        limit = self.partition_memory_limit
        if isinstance(limit, tuple):
            return limit
        return () if limit is None else (limit,) * self.pipeline_parallel_degree

    @property
    def orders_replicas(self) -> bool:
        """Returns whether replicas run the tasks of a pipeline in one order.

        Ranks that gather parameters from each other have to.
        """
        return self.deterministic_server or self.sharded_data_parallel_degree > 1

    @property
    def sums_by_hosts(self) -> bool:
        """Returns whether tensors on the CPU are summed by hosts with equal numbers of ranks."""
        return self.ddp_dist_backend in ("auto", "hierarchical")

    @property
    def gathers_by_hosts(self) -> bool:
        """Returns whether shared tensors are gathered between hosts first, where possible."""
        return self.sums_by_hosts if self.shard_optimizer_state else self.sdp_hierarchical_allgather

    @property
    def half_dtype(self) -> torch.dtype | None:
        """Dtype that parameters are cast to, or None if they stay as they are."""
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else None

    @property
    def has_masters(self) -> bool:
        """Returns whether parameters of 16 bits have FP32 masters."""
        return self.bf16_masters == "fp32"

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        """Makes a configuration with these keys and defaults for the others.

        Args:
            values: values by key or alias; `None` means the default for keys
                whose default depends on others.

        Raises:
            ValueError: a key is unknown, a value is wrong, or values do not
                go together.
        """
        return cls.of_checked(normalize(values).values)

    @classmethod
    def of_checked(cls, values: Mapping[str, Any]) -> Config:
        """Makes a configuration from values that `normalize` has checked; see `from_dict`.

        Raises:
            ValueError: values do not go together.
        """
        full = {**DEFAULTS, **values}
        policy = _C.make_policy(full["pipeline"])
        microbatches = full["microbatches"]
        if full["memory_weight"] is None:
            full["memory_weight"] = 0.2 if full["optimize"] == "speed" else 0.8
        if full["virtual_stages"] is None:
            full["virtual_stages"] = policy.default_chunks
        if full["active_microbatches"] is None:
            pp = full["pipeline_parallel_degree"]
            full["active_microbatches"] = policy.default_active_microbatches(pp, microbatches)
        full["active_microbatches"] = min(full["active_microbatches"], microbatches)
        config = cls(**full)
        check_stages(config)
        check_ranks(config)
        if config.update_in_backward:
            check_updates(config)
        if config.on_failure != "end":
            check_going_on(config)
        if config.redundancy:
            check_redundancy(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns all keys with their effective values, in declaration order."""
        return dataclasses.asdict(self)


KINDS: dict[str, kinds.Kind] = {f.name: f.metadata["kind"] for f in dataclasses.fields(Config)}
DEFAULTS: dict[str, object] = {f.name: f.default for f in dataclasses.fields(Config)}
ALIASES = {"partitions": "pipeline_parallel_degree"}
_TENSORFLOW_KEYS = ("horovod", "contiguous")

# A second init may not change these: the ranks are already laid out.
TOPOLOGY_KEYS = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "context_parallel_ring_degree",
    "sharded_data_parallel_degree",
    "shard_optimizer_state",
    "placement_strategy",
    "ddp_dist_backend",
    "on_failure",
    "redundancy",
)


# ---- gate 1: single keys -----------------------------------------------------


@dataclass(frozen=True)
class CheckedConfig:
    """The checked values by canonical key, and notes for users."""

    values: dict[str, Any]
    notes: list[str]


def normalize(values: Mapping[str, object], *, from_text: bool = False) -> CheckedConfig:
    """Returns canonical names and checked values of the keys in `values`.

    Args:
        values: values by key or alias.
        from_text: strings such as ``"True"``, ``"4"``, ``"5e8"`` are converted.

    Returns:
        The values, and notes about private keys that are ignored.

    Raises:
        ValueError: rows 1, 2, 3, 6, 11, 12 and 13 of the configuration errors.
    """
    result: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    notes = []
    for key, raw in values.items():
        name = ALIASES.get(key, key)
        if name not in KINDS:
            notes.append(_reject_unknown(key, raw))
            continue
        kind = KINDS[name]
        value = raw
        if from_text and isinstance(raw, str) and raw not in kind.choices:
            value = kinds.convert_text(raw)
        try:
            parsed = None if value is None and kind.optional else kind.convert(value)
        except (TypeError, ValueError, OverflowError):
            fix = f"pass {kind.words} (default: {DEFAULTS[name]!r})"
            raise config_error(key, value, f"is not {kind.words}", fix) from None
        if name in result and result[name] != parsed:
            raise config_error(
                key,
                value,
                f"{given_as[name]}={result[name]!r} means the same key and differs",
                "give one of the two",
            )
        result[name] = parsed
        given_as[name] = key
    return CheckedConfig(result, notes)


def _reject_unknown(key: object, value: object) -> str:
    """Returns a warning for private keys, and raises an error for all others."""
    if not isinstance(key, str):
        raise config_error(str(key), value, "keys are strings", "rename the key")
    if key in _TENSORFLOW_KEYS:
        raise config_error(key, value, "exists for TensorFlow only", "remove the key")
    if key.startswith("_"):
        return f"smp config: {key}={value!r}: unknown private key, ignored"
    names = [*KINDS, *ALIASES]
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
    raise config_error(key, value, "unknown key", f"did you mean {nearest!r}?")


# ---- gate 2: keys that depend on each other ----------------------------------


def check_stages(config: Config) -> None:
    """Raises ValueError if keys for partitions, stages and their order contradict each other."""
    pp, is_auto = config.pipeline_parallel_degree, config.auto_partition
    if not is_auto and config.default_partition >= pp:
        raise config_error(
            "default_partition",
            config.default_partition,
            f"is outside [0, {pp}) while auto_partition is False",
            f"use 0 to {pp - 1} or raise pipeline_parallel_degree",
        )
    limits = config.partition_memory_limit
    if isinstance(limits, tuple) and len(limits) != pp:
        raise config_error(
            "partition_memory_limit",
            limits,
            f"has {len(limits)} sizes for {pp} pipeline ranks",
            f"give one size for all, or {pp} sizes",
        )
    if config.virtual_stages == 1:
        return
    if _C.make_policy(config.pipeline).default_chunks == 1:
        names = [name for name in PIPELINES if _C.make_policy(name).default_chunks > 1]
        raise config_error(
            "virtual_stages",
            config.virtual_stages,
            f"has an effect with pipeline={' or '.join(map(repr, names))} only",
            "set that, or leave virtual_stages at 1",
        )
    if pp > 1 and not is_auto and config.partition_file is None:
        raise config_error(
            "virtual_stages",
            config.virtual_stages,
            "smp.partition names ranks only, not their stages",
            "set auto_partition=True, give a partition_file, or use another schedule",
        )


def check_ranks(config: Config) -> None:
    """Raises ValueError if keys for the work and the dtypes of ranks contradict each other."""
    tp, sharding = config.tensor_parallel_degree, config.sharded_data_parallel_degree
    degrees = ("tensor_parallel_degree", "context_parallel_degree", "sharded_data_parallel_degree")
    for key in degrees:
        if getattr(config, key) > 1 and not config.ddp:
            raise config_error(key, getattr(config, key), "needs ddp", "set ddp=True")
    cp, ring = config.context_parallel_degree, config.context_parallel_ring_degree
    if cp % ring != 0:
        raise config_error(
            "context_parallel_ring_degree",
            ring,
            f"does not divide context_parallel_degree={cp}",
            f"use a divisor of {cp}",
        )
    experts = config.expert_parallel_degree
    if experts not in (1, tp):
        raise config_error(
            "expert_parallel_degree",
            experts,
            f"experts are spread over the {tp} ranks of a tensor-parallel group "
            f"(tensor_parallel_degree={tp}), or not at all",
            f"use 1 or {tp}" if tp > 1 else f"set tensor_parallel_degree={experts} as well",
        )
    if config.fp16 and config.bf16:
        raise config_error("fp16", True, "bf16 is set as well", "choose one of fp16 and bf16")
    if config.bf16_masters != "fp32" and not config.bf16:
        raise config_error(
            "bf16_masters",
            config.bf16_masters,
            "parameters have BF16 digits with bf16 only",
            'set bf16=True, or leave bf16_masters at "fp32"',
        )
    if sharding > 1 and config.shard_optimizer_state:
        raise config_error(
            "sharded_data_parallel_degree",
            sharding,
            "already shards the optimizer state",
            "set shard_optimizer_state=False",
        )


def check_updates(config: Config) -> None:
    """Raises ValueError if gradients have to exist longer than `update_in_backward` keeps them."""
    reasons = {
        "microbatches": (
            config.microbatches > 1,
            "gradients of all parameters are summed over microbatches before the first update",
        ),
        "fp16": (
            config.fp16,
            "whether an update is skipped is known when all gradients have been checked",
        ),
        "shard_optimizer_state": (config.shard_optimizer_state, _SHARDED_GRADIENTS),
        "sharded_data_parallel_degree": (
            config.sharded_data_parallel_degree > 1,
            _SHARDED_GRADIENTS,
        ),
        "overlapping_allreduce": (
            not config.overlapping_allreduce,
            "gradients are summed over replicas when the backward is over",
        ),
    }
    for key, (is_so, reason) in reasons.items():
        if is_so:
            raise config_error(
                "update_in_backward",
                True,
                f"{reason} ({key}={getattr(config, key)!r})",
                f"leave {key} out, or set update_in_backward=False",
            )


def check_redundancy(config: Config) -> None:
    """Raises ValueError if copies of states would have no use."""
    if config.on_failure != "spare":
        raise config_error(
            "redundancy",
            config.redundancy,
            "a copy of a state is for a process that takes the place of a lost rank "
            f"(on_failure={config.on_failure!r})",
            'set on_failure="spare", or leave redundancy out',
        )


def check_going_on(config: Config) -> None:
    """Raises ValueError if replicas cannot go on when a failure has broken others."""
    reasons = {
        "shard_optimizer_state": (
            config.shard_optimizer_state and not config.redundancy,
            _PART_IS_LOST,
        ),
        "sharded_data_parallel_degree": (
            config.sharded_data_parallel_degree > 1 and not config.redundancy,
            _PART_IS_LOST,
        ),
        "update_in_backward": (
            config.update_in_backward,
            "a step that fails has updated some parameters, and cannot be run again",
        ),
        "device_speeds": (
            config.device_speeds is not None,
            "it lists the devices of all ranks, which become fewer",
        ),
        "context_parallel_degree": (config.context_parallel_degree > 1, _NOT_SUPPORTED),
        "expert_parallel_degree": (config.expert_parallel_degree > 1, _NOT_SUPPORTED),
    }
    for key, (is_so, reason) in reasons.items():
        if is_so:
            raise config_error(
                "on_failure",
                config.on_failure,
                f"{reason} ({key}={getattr(config, key)!r})",
                f'leave {key} out, or set on_failure="end"',
            )


_PART_IS_LOST = (
    'a rank that dies takes its part of the state with it, unless on_failure="spare" with '
    "redundancy=1 keeps copies"
)
_NOT_SUPPORTED = "it is not supported by the ranks that go on"
_SHARDED_GRADIENTS = "ranks keep a share of the gradients, and update when they have all of it"
