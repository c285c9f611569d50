"""Keys, rules and refusals of the configuration."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp import _C
from smp.config import kinds, processes
from smp.config import schema as config
from smp.config.schema import Config

# Every refusal: smp config: <key>=<value>: <reason>; <how to fix>
FORM = re.compile(r"^smp config: \w+=.+: .+; .+$", re.DOTALL)


def refusal(values: dict[str, Any], world_size: int = 1) -> str:
    """The text of the error that `values` cause at init, which must have the common form."""
    with pytest.raises(ValueError) as error:
        processes.check_world(Config.from_dict(values), world_size)
    text = str(error.value)
    assert FORM.match(text), text
    return text


# ---- defaults and conversions ------------------------------------------------------


def test_defaults_are_those_of_the_documentation() -> None:
    cfg = Config.from_dict({})
    assert cfg.to_dict() == {
        "pipeline_parallel_degree": 1,
        "microbatches": 1,
        "pipeline": "interleaved",
        "optimize": "memory",
        "placement_strategy": "cluster",
        "auto_partition": True,
        "default_partition": 0,
        "memory_weight": 0.8,
        "on_failure": "end",
        "redundancy": 0,
        "ddp": False,
        "active_microbatches": 1,  # 3, but not more than microbatches
        "deterministic_server": False,
        "offload_activations": False,
        "activation_loading_horizon": 4,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "context_parallel_ring_degree": 1,
        "expert_parallel_degree": 1,
        "fp16": False,
        "fp16_params": False,
        "bf16": False,
        "shard_optimizer_state": False,
        "optimizer_state": "auto",
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
        "static_mode": False,
        "fast_mode": False,
        "checkpoint_attentions": False,
        "_match_weights": True,
        "overlapping_allreduce": True,
        "use_times": False,
        "partition_file": None,
        "partition_memory_limit": None,
        "device_speeds": None,
        "virtual_stages": 1,
        "fused_linear_cross_entropy": False,
        "bf16_masters": "fp32",
        "offload_optimizer_state": False,
        "update_in_backward": False,
        "fp8": "none",
        "fp8_skip": "head, first, last",
        "layout_independent_dropout": False,
    }


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.from_dict({}).microbatches = 2  # type: ignore[misc]


def test_partitions_is_an_alias_in_both_directions() -> None:
    assert Config.from_dict({"partitions": 4}).pipeline_parallel_degree == 4
    assert Config.from_dict({"pipeline_parallel_degree": 4}).partitions == 4
    both = {"partitions": 4, "pipeline_parallel_degree": 4}
    assert Config.from_dict(both).partitions == 4


def test_memory_weight_follows_optimize_unless_given() -> None:
    assert Config.from_dict({"optimize": "speed"}).memory_weight == 0.2
    assert Config.from_dict({"optimize": "memory"}).memory_weight == 0.8
    assert Config.from_dict({"optimize": "speed", "memory_weight": 1}).memory_weight == 1.0
    assert Config.from_dict({"optimize": "speed", "memory_weight": None}).memory_weight == 0.2


@pytest.mark.parametrize(
    ("values", "active"),
    [
        ({"microbatches": 16, "partitions": 2}, 4),
        ({"microbatches": 16, "partitions": 2, "active_microbatches": None}, 4),
        ({"microbatches": 3, "partitions": 2}, 3),
        ({"microbatches": 16, "partitions": 2, "active_microbatches": 7}, 7),
        ({"microbatches": 4, "partitions": 2, "active_microbatches": 7}, 4),
        ({"microbatches": 16, "partitions": 2, "pipeline": "simple"}, 16),
    ],
)
def test_active_microbatches_default_and_clamp(values: dict[str, Any], active: int) -> None:
    assert Config.from_dict(values).active_microbatches == active


def test_integral_floats_are_integers() -> None:
    assert Config.from_dict({"sdp_reduce_bucket_size": 5e8}).sdp_reduce_bucket_size == 500_000_000


@pytest.mark.parametrize("value", [0, 1, True, False])
def test_zero_and_one_are_booleans(value: int) -> None:
    assert Config.from_dict({"prescaled_batch": value}).prescaled_batch is bool(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("4", 4),
        ("5e8", 5e8),
        ("0.2", 0.2),
        ("interleaved", "interleaved"),
    ],
)
def test_words_are_converted(text: str, value: object) -> None:
    assert kinds.convert_text(text) == value


def test_words_are_refused_where_values_are_expected() -> None:
    assert "microbatches='4'" in refusal({"microbatches": "4"})
    assert config.normalize({"microbatches": "4"}, from_text=True).values == {"microbatches": 4}
    for text in ("none", "residue"):
        given = config.normalize({"bf16_masters": text}, from_text=True).values
        assert given == {"bf16_masters": text}


def test_hints_of_public_scripts_are_accepted() -> None:
    hints = {
        "static_mode": True,
        "fast_mode": True,
        "checkpoint_attentions": True,
        "_match_weights": True,
        "overlapping_allreduce": True,
        "use_times": True,
        "ddp_dist_backend": "nccl",
        "prescaled_batch": 1,
        "skip_tracing": True,
        "sharded_data_parallel_degree": 1,
        "sdp_gradient_clipping": 1.0,
        "sdp_hierarchical_allgather": False,
    }
    cfg = Config.from_dict(hints)
    assert {key: getattr(cfg, key) for key in hints} == hints


# ---- one test per row of the table of errors ---------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("microbatches", True),
        ("microbatches", 2.5),
        ("microbatches", float("inf")),
        ("microbatches", None),
        ("pipeline_parallel_degree", 0),
        ("pipeline", "gpipe"),
        ("optimize", 3),
        ("ddp", "yes"),
        ("ddp", 2),
        ("auto_partition", None),
        ("default_partition", -1),
        ("sdp_gradient_clipping", -1.0),
        ("memory_weight", "heavy"),
    ],
)
def test_row_1_wrong_type_or_range_is_refused(key: str, value: object) -> None:
    text = refusal({key: value})
    assert text.startswith(f"smp config: {key}={value!r}: ")


def test_row_2_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert "did you mean 'microbatches'?" in refusal({"microbatch": 4})
    assert "did you mean 'pipeline_parallel_degree'?" in refusal({"pipeline_degree": 4})
    assert "did you mean 'partitions'?" in refusal({"partition": 4})


def test_row_2_keys_of_tensorflow_are_refused_with_the_reason() -> None:
    for key in ("horovod", "contiguous"):
        assert "TensorFlow" in refusal({key: True})


def test_private_unknown_keys_are_noted_and_ignored() -> None:
    normal = config.normalize({"_secret": 1, "microbatches": 2})
    assert normal.values == {"microbatches": 2}
    assert len(normal.notes) == 1
    assert "_secret=1" in normal.notes[0]


def test_row_3_two_names_with_different_values_are_refused() -> None:
    text = refusal({"partitions": 2, "pipeline_parallel_degree": 4})
    assert "partitions=2" in text
    assert "pipeline_parallel_degree=4" in text


def test_row_4_world_must_be_a_multiple_of_the_degrees() -> None:
    assert "pipeline_parallel_degree=3" in refusal({"partitions": 3, "ddp": True}, world_size=8)
    values = {"partitions": 2, "tensor_parallel_degree": 3, "ddp": True}
    text = refusal(values, world_size=8)
    assert "tensor_parallel_degree=3" in text
    assert "2 * 3 = 6" in text
    text = refusal({"partitions": 2, "context_parallel_degree": 3, "ddp": True}, world_size=8)
    assert "context_parallel_degree=3" in text and "2 * 1 * 3 = 6" in text


def test_row_5_data_and_tensor_parallelism_need_ddp() -> None:
    assert "ddp=False" in refusal({"partitions": 2}, world_size=4)
    assert "tensor_parallel_degree=2" in refusal({"tensor_parallel_degree": 2}, world_size=2)
    assert "context_parallel_degree=2" in refusal({"context_parallel_degree": 2}, world_size=2)
    ring = {"context_parallel_degree": 4, "context_parallel_ring_degree": 3, "ddp": True}
    text = refusal(ring, world_size=4)
    assert "context_parallel_ring_degree=3" in text and "use a divisor of 4" in text
    text = refusal({"sharded_data_parallel_degree": 2}, world_size=2)
    assert "sharded_data_parallel_degree=2" in text
    processes.check_world(Config.from_dict({"partitions": 2}), 2)
    processes.check_world(Config.from_dict({"partitions": 2, "ddp": True}), 4)


def test_experts_are_spread_over_all_tensor_parallel_ranks_or_none() -> None:
    text = refusal({"expert_parallel_degree": 2})
    assert "expert_parallel_degree=2" in text and "set tensor_parallel_degree=2" in text
    four = {"tensor_parallel_degree": 4, "ddp": True}
    text = refusal({**four, "expert_parallel_degree": 2})
    assert "expert_parallel_degree=2" in text and "use 1 or 4" in text
    for good in (1, 4):
        made = Config.from_dict({**four, "expert_parallel_degree": good})
        assert made.expert_parallel_degree == good


def test_row_6_placement_is_a_name_or_a_permutation() -> None:
    for bad in ("DPP", "dpt", "clusters", "DP", "", "DPTCC", "DPC"):
        text = refusal({"placement_strategy": bad})
        assert "placement_strategy" in text and "a permutation of 'DPT' or 'DPTC'" in text
    for good in ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD", "DPCT", "CPTD"):
        assert Config.from_dict({"placement_strategy": good}).placement_strategy == good


def test_row_7_default_partition_must_exist_without_auto_partition() -> None:
    values = {"partitions": 2, "auto_partition": False, "default_partition": 2}
    assert "default_partition=2" in refusal(values, world_size=2)
    Config.from_dict({**values, "default_partition": 1})
    Config.from_dict({**values, "auto_partition": True})  # not used


def test_row_8_one_half_precision_only() -> None:
    assert "fp16=True" in refusal({"fp16": True, "bf16": True})


def test_parameters_without_masters_are_those_of_bf16() -> None:
    for others in ({}, {"fp16": True}):
        text = refusal({"bf16_masters": "none", **others})
        assert "bf16_masters" in text and "set bf16=True" in text
    config = Config.from_dict({"bf16": True, "bf16_masters": "residue"})
    assert not config.has_masters and Config.from_dict({"bf16": True}).has_masters


@pytest.mark.parametrize(
    "other",
    [
        {"microbatches": 2},
        {"fp16": True},
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2, "ddp": True},
        {"overlapping_allreduce": False},
    ],
)
def test_updates_in_the_backward_need_gradients_that_are_complete_there(
    other: dict[str, Any],
) -> None:
    text = refusal({"update_in_backward": True, **other})
    key = next(iter(other))
    assert f"({key}={other[key]})" in text and f"leave {key} out" in text
    Config.from_dict(other)
    assert Config.from_dict({"update_in_backward": True, "bf16": True}).update_in_backward


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shard_optimizer_state", True),
        ("sharded_data_parallel_degree", 2),
        ("update_in_backward", True),
        ("device_speeds", "1:4"),
        ("context_parallel_degree", 2),
        ("expert_parallel_degree", 2),
    ],
)
@pytest.mark.parametrize("on_failure", ["shrink", "spare"])
def test_ranks_that_are_lost_take_nothing_with_them_or_it_is_refused(
    on_failure: str, key: str, value: object
) -> None:
    given = {"ddp": True, "tensor_parallel_degree": 2, "on_failure": on_failure, key: value}
    text = refusal(given, 4)
    assert f"({key}=" in text and f"on_failure='{on_failure}'" in text
    given.pop("on_failure")
    processes.check_world(Config.from_dict(given), 4)


def test_going_on_takes_two_replicas() -> None:
    given = {"pipeline_parallel_degree": 2, "ddp": True, "on_failure": "shrink"}
    assert "start at least 4 processes" in refusal(given, 2)
    processes.check_world(Config.from_dict(given), 4)


def test_copies_are_for_several_processes_without_replicas_that_are_replaced() -> None:
    given: dict[str, Any] = {"pipeline_parallel_degree": 2, "ddp": True, "redundancy": 1}
    assert 'set on_failure="spare"' in refusal(given, 2)
    assert 'set on_failure="spare"' in refusal({**given, "on_failure": "shrink"}, 2)
    given["on_failure"] = "spare"
    assert "start 2 processes" in refusal(given, 4)
    processes.check_world(Config.from_dict(given), 2)
    assert "hold one replica" in refusal({**given, "pipeline_parallel_degree": 1}, 1)


@pytest.mark.parametrize(
    ("sharding", "num_ranks"),
    [
        ({"sharded_data_parallel_degree": 2}, 4),
        ({"sharded_data_parallel_degree": 2}, 8),
        ({"shard_optimizer_state": True}, 4),
    ],
)
def test_copies_are_for_sharded_state_too(sharding: dict[str, Any], num_ranks: int) -> None:
    given = {"pipeline_parallel_degree": 2, "ddp": True, "on_failure": "spare", **sharding}
    assert "with redundancy=1 keeps copies" in refusal(given, num_ranks)
    processes.check_world(Config.from_dict({**given, "redundancy": 1}), num_ranks)
    # One rank per stage has all of the state, and copies serve it as they serve any pipeline.
    if "shard_optimizer_state" in sharding:
        processes.check_world(Config.from_dict({**given, "redundancy": 1}), 2)


def test_row_9_bf16_is_valid_without_sharded_data_parallelism() -> None:
    assert Config.from_dict({"bf16": True}).bf16


def test_row_10_sharding_degree_must_divide_and_shards_states_already() -> None:
    values = {"sharded_data_parallel_degree": 3, "ddp": True}
    assert "does not divide" in refusal(values, world_size=4)
    tp = {"sharded_data_parallel_degree": 4, "ddp": True, "tensor_parallel_degree": 2}
    assert "does not divide" in refusal(tp, world_size=4)
    processes.check_world(Config.from_dict(tp), 8)
    both = {**values, "shard_optimizer_state": True}
    assert "shard_optimizer_state=False" in refusal(both, world_size=3)
    cp = {"sharded_data_parallel_degree": 4, "ddp": True, "context_parallel_degree": 2}
    assert "times context_parallel_degree, 6; use a divisor of 6" in refusal(cp, world_size=6)
    processes.check_world(Config.from_dict(cp), 8)
    with_pp = {"sharded_data_parallel_degree": 2, "ddp": True, "partitions": 2}
    processes.check_world(Config.from_dict(with_pp), 4)


@pytest.mark.parametrize(
    "key", ["activation_loading_horizon", "microbatches", "active_microbatches"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_row_11_counts_are_positive(key: str, value: int) -> None:
    assert f"{key}={value}" in refusal({key: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_row_12_memory_weight_is_a_fraction(value: float) -> None:
    assert "memory_weight" in refusal({"memory_weight": value})


def test_row_13_backend_is_one_that_is_known() -> None:
    assert "ddp_dist_backend='gloo'" in refusal({"ddp_dist_backend": "gloo"})


def test_row_18_later_init_keeps_the_topology() -> None:
    current = Config.from_dict({"partitions": 2})
    processes.check_same_topology(current, Config.from_dict({"partitions": 2, "microbatches": 4}))
    for change in ({"partitions": 1}, {"partitions": 2, "placement_strategy": "spread"}):
        with pytest.raises(ValueError, match="already initialized") as error:
            processes.check_same_topology(current, Config.from_dict(change))
        assert FORM.match(str(error.value))


def test_advice_is_given_for_odd_settings() -> None:
    odd = Config.from_dict({"tensor_parallel_degree": 6, "ddp": True})
    assert "power of two" in processes.advice(odd)[0]
    assert processes.advice(Config.from_dict({})) == []


@pytest.mark.parametrize("value", [2**31, 2.0**31, -(10**400), 10**400], ids=range(4))
def test_numbers_that_the_core_cannot_count_are_refused(value: float) -> None:
    for key in ("pipeline_parallel_degree", "microbatches", "virtual_stages"):
        text = refusal({key: value})
        assert FORM.match(text) and "is not an integer in [1, 2147483647]" in text


def test_sizes_may_be_larger_than_counts() -> None:
    assert Config.from_dict({"sdp_max_live_parameters": 2**40}).sdp_max_live_parameters == 2**40
    assert "sdp_max_live_parameters" in refusal({"sdp_max_live_parameters": 2**63})


# ---- properties --------------------------------------------------------------------

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400]),
    st.floats(),
    st.sampled_from(["", "True", "simple", "speed", "spread", "nccl", "4"]),
    st.lists(st.none()),
)
_KEYS = st.sampled_from([f.name for f in dataclasses.fields(Config)] + ["partitions"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_KEYS, _VALUES, max_size=6), st.integers(1, 16))
def test_any_values_are_accepted_or_refused_in_the_common_form(
    values: dict[str, Any], world_size: int
) -> None:
    try:
        cfg = Config.from_dict(values)
        processes.check_world(cfg, world_size)
    except ValueError as error:
        assert FORM.match(str(error)), error
    else:
        assert Config.from_dict(cfg.to_dict()) == cfg
        per_batch = cfg.pipeline_parallel_degree * cfg.tensor_parallel_degree
        assert world_size % (per_batch * cfg.context_parallel_degree) == 0
        assert 1 <= cfg.active_microbatches <= cfg.microbatches


# ---- partition and schedule ----------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (4096, 4096),
        ("12GiB", 12 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        (" 800 MB ", 800_000_000),
        ("3kB", 3000),
        ("7B", 7),
    ],
)
def test_a_memory_limit_is_a_number_of_bytes_or_a_text_with_a_unit(
    value: object, num_bytes: int
) -> None:
    assert Config.from_dict({"partition_memory_limit": value}).partition_memory_limit == num_bytes


@pytest.mark.parametrize("value", ["1:2, 2.5", "[1,1,2.5]", [1, 1, 2.5], (1, 1, 2.5)])
def test_speeds_are_a_list_with_counts(value: object) -> None:
    config = Config.from_dict({"device_speeds": value, "ddp": True})
    assert config.device_speeds == (1.0, 1.0, 2.5)
    processes.check_world(config, 3)
    text = refusal({"device_speeds": value, "ddp": True}, 4)
    assert "device_speeds=[1.0, 1.0, 2.5]: has 3 speeds for 4 processes" in text


@pytest.mark.parametrize("value", ["", "1, fast", "0, 1", "1:0, 2", "1:x", [], [1, -1], 2, True])
def test_other_speeds_are_refused(value: object) -> None:
    assert "is not a list of numbers above 0" in refusal({"device_speeds": value})


def test_memory_limits_of_pipeline_ranks_are_a_list() -> None:
    values = {"partition_memory_limit": "1GiB:2, 3GB", "pipeline_parallel_degree": 3}
    assert Config.from_dict(values).memory_limits == (2**30, 2**30, 3_000_000_000)
    one = {**values, "partition_memory_limit": "1GiB"}
    assert Config.from_dict(one).memory_limits == (2**30,) * 3
    assert Config.from_dict({}).memory_limits == ()
    assert "has 3 sizes for 2 pipeline ranks" in refusal(
        {**values, "partitions": 2} | {"pipeline_parallel_degree": 2}, 2
    )


@pytest.mark.parametrize("value", [0, -1, "12", "12 GB free", "0.1B", "GiB", True])
def test_other_memory_limits_are_refused(value: object) -> None:
    assert "a number of bytes above 0, or a text like '12GiB'" in refusal(
        {"partition_memory_limit": value}
    )


def test_a_file_is_a_path_that_is_not_empty() -> None:
    key = "partition_file"
    assert getattr(Config.from_dict({key: "a/b.txt"}), key) == "a/b.txt"
    for value in ("", "  ", 3):
        assert "is not a text that is not empty" in refusal({key: value})


def test_schedules_are_the_policies_of_the_core() -> None:
    names = _C.policy_names()
    assert names == list(config.PIPELINES)
    for name in names:
        cfg = Config.from_dict({"pipeline": name, "partitions": 2, "microbatches": 8})
        policy = _C.make_policy(name)
        assert cfg.pipeline == policy.name == name
        assert cfg.active_microbatches == policy.default_active_microbatches(2, 8)
        assert cfg.virtual_stages == policy.default_chunks
    text = refusal({"pipeline": "gpipe"})
    assert all(repr(name) in text for name in names)


def test_each_schedule_has_its_number_of_active_microbatches_and_stages() -> None:
    base = {"partitions": 4, "microbatches": 16}
    expected = {
        "interleaved": (6, 1),
        "simple": (16, 1),
        "virtual_interleaved": (8, 2),
        "zero_bubble": (4, 1),
    }
    for pipeline, (active, stages) in expected.items():
        cfg = Config.from_dict(base | {"pipeline": pipeline})
        assert (cfg.active_microbatches, cfg.virtual_stages) == (active, stages)
    given = Config.from_dict(base | {"pipeline": "virtual_interleaved", "virtual_stages": 3})
    assert given.virtual_stages == 3


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"virtual_stages": 2}, "has an effect with pipeline='virtual_interleaved' only"),
        (
            {"partitions": 2, "pipeline": "virtual_interleaved", "auto_partition": False},
            "smp.partition names ranks only, not their stages",
        ),
        ({"pipeline": "zero-bubble"}, "'zero_bubble'"),
    ],
)
def test_keys_of_the_schedule_go_together(values: dict[str, Any], text: str) -> None:
    assert text in refusal(values, values.get("partitions", 1))


def test_a_partition_file_says_where_virtual_stages_are() -> None:
    values = {"partitions": 2, "pipeline": "virtual_interleaved", "auto_partition": False}
    assert Config.from_dict(values | {"partition_file": "f"}).virtual_stages == 2
