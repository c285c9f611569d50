"""Launcher, dict and file as sources of the configuration, and the agreement of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp.config import sources as config_sources
from smp.config.schema import CheckedConfig


def env(values: dict[str, Any]) -> dict[str, str]:
    return {"SM_HP_MP_PARAMETERS": json.dumps(values)}


def test_launcher_wins_per_key_and_the_difference_is_noted() -> None:
    plan = config_sources.read_config(
        {"partitions": 4, "microbatches": 8, "optimize": "speed"},
        {},
        env({"partitions": 2, "microbatches": 8}),
        world_size=2,
    )
    assert plan.error is None
    assert plan.config is not None
    assert plan.config.partitions == 2
    assert plan.config.microbatches == 8
    assert plan.config.optimize == "speed"
    assert len(plan.notes) == 1
    assert "pipeline_parallel_degree=2 from the launcher replaces 4" in plan.notes[0]


def test_launcher_text_values_are_converted() -> None:
    given = config_sources.read_launcher_config(env({"ddp": "True", "microbatches": "4"}))
    assert given.values == {"ddp": True, "microbatches": 4}


def test_launcher_pairs_are_understood() -> None:
    pairs = {"SM_HP_MP_PARAMETERS": "partitions=2, ddp=True,optimize=speed"}
    given = config_sources.read_launcher_config(pairs)
    assert given.values == {"pipeline_parallel_degree": 2, "ddp": True, "optimize": "speed"}


def test_absent_launcher_gives_nothing() -> None:
    assert config_sources.read_launcher_config({}) == CheckedConfig({}, [])


@pytest.mark.parametrize("text", ['{"partitions": 2', "[1, 2]"])
def test_broken_launcher_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SM_HP_MP_PARAMETERS"):
        config_sources.read_launcher_config({"SM_HP_MP_PARAMETERS": text})


def test_json_and_yaml_files_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"partitions": 2, "sdp_reduce_bucket_size": 5e8}')
    (tmp_path / "a.yaml").write_text("partitions: 2\nsdp_reduce_bucket_size: 5e8\n")
    from_json = config_sources.read_user_config(tmp_path / "a.json")
    from_yaml = config_sources.read_user_config(str(tmp_path / "a.yaml"))
    assert from_json == from_yaml
    expected = {"pipeline_parallel_degree": 2, "sdp_reduce_bucket_size": 500_000_000}
    assert from_json.values == expected


def test_empty_yaml_file_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("# nothing\n")
    assert config_sources.read_user_config(tmp_path / "a.yml").values == {}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.toml", "", "neither"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=complaint):
        config_sources.read_user_config(tmp_path / name)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing.json"):
        config_sources.read_user_config(tmp_path / "nothing.json")


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="got int"):
        config_sources.read_user_config(4)  # type: ignore[arg-type]


def test_later_plan_adds_to_the_earlier_values() -> None:
    first = config_sources.read_config({"partitions": 2}, {}, {}, world_size=2)
    second = config_sources.read_config({"microbatches": 16}, first.given, {}, world_size=2)
    assert second.config is not None
    assert second.config.partitions == 2
    assert second.config.active_microbatches == 4  # the default is computed again


def test_plan_holds_the_error_instead_of_raising() -> None:
    plan = config_sources.read_config({"partitions": 3}, {}, {}, world_size=2)
    assert plan.config is None
    assert plan.error is not None
    assert "pipeline_parallel_degree=3" in plan.error


def test_disagreeing_ranks_are_named_with_key_and_values() -> None:
    same = {"microbatches": 4, "ddp": True}
    config_sources.compare_configs([same, same])
    with pytest.raises(ValueError) as error:
        config_sources.compare_configs([same, {**same, "microbatches": 2}, same])
    text = str(error.value)
    assert "microbatches is 4 on ranks [0, 2], 2 on ranks [1]" in text
    assert "ddp" not in text


# ---- launcher, then the argument of init, then defaults ---------------


@pytest.mark.parametrize(
    ("launcher", "argument", "expected"),
    [
        ({"partitions": 2}, {"partitions": 4}, 2),
        ({"pipeline_parallel_degree": 2}, {"partitions": 4}, 2),
        ({"partitions": 2, "pipeline_parallel_degree": 2}, None, 2),
        (None, {"partitions": 4}, 4),
        ({"microbatches": 2}, {"partitions": 4}, 4),
        (None, None, 1),
    ],
)
def test_sources_have_this_priority(
    launcher: dict[str, Any] | None, argument: dict[str, Any] | None, expected: int
) -> None:
    given = {} if launcher is None else env(launcher)
    plan = config_sources.read_config(argument, {}, given, world_size=expected)
    assert plan.error is None and plan.config is not None
    assert plan.config.pipeline_parallel_degree == expected


def test_both_names_of_the_degree_from_the_launcher_must_agree() -> None:
    given = env({"partitions": 2, "pipeline_parallel_degree": 4})
    plan = config_sources.read_config(None, {}, given, world_size=2)
    assert plan.error is not None and "partitions" in plan.error
