"""Every refusal of the configuration reaches every rank, with the same text."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import smp
from smp.world import runtime, thread_device
from tests.dist.pool import Pool

pytestmark = pytest.mark.waits


def error_of_init(rank: int, config: Any) -> str:
    """The text of the ValueError of init."""
    with pytest.raises(ValueError) as error:
        smp.init(config)
    assert not smp.is_initialized()
    assert smp.state.cfg is None
    return str(error.value)


# Number of the row, configuration, words of the text: refused by one key, by its name, by several
# keys, and by the world. All rows are those of tests/unit/test_config.py.
ROWS: list[tuple[int, dict[str, Any], str]] = [
    (1, {"microbatches": "four"}, "microbatches='four'"),
    (2, {"microbatch": 4}, "did you mean 'microbatches'?"),
    (4, {"partitions": 3}, "2 processes cannot form groups"),
    (8, {"partitions": 2, "fp16": True, "bf16": True}, "choose one of fp16 and bf16"),
    (10, {"ddp": True, "sharded_data_parallel_degree": 3}, "does not divide"),
]


@pytest.mark.parametrize(("row", "config", "words"), ROWS)
def test_row_is_refused_on_all_ranks_with_one_text(
    pool: Pool, row: int, config: dict[str, Any], words: str
) -> None:
    texts = pool.run(2, error_of_init, config)
    assert words in texts[0]
    assert texts[0].startswith("smp config: ")
    assert texts[0] == texts[1]


def bad_on_one_rank(rank: int) -> str:
    return error_of_init(rank, {"partitions": 2, "microbatches": 0 if rank == 1 else 2})


def test_error_of_one_rank_reaches_the_other(pool: Pool) -> None:
    texts = pool.run(2, bad_on_one_rank)
    assert texts[0] == texts[1]
    assert "microbatches=0" in texts[0]
    assert "(on ranks [1] of 2)" in texts[0]


def different_on_one_rank(rank: int) -> str:
    return error_of_init(
        rank, {"partitions": 2, "microbatches": 4 if rank == 2 else 8, "ddp": True}
    )


def test_disagreement_names_key_values_and_ranks_on_all_ranks(pool: Pool) -> None:
    texts = pool.run(4, different_on_one_rank)
    assert len(set(texts)) == 1
    assert "microbatches is 8 on ranks [0, 1, 3], 4 on ranks [2]" in texts[0]


def different_world(rank: int) -> str:
    if rank == 1:
        os.environ["WORLD_SIZE"] = "3"
    with pytest.raises((ValueError, RuntimeError)) as error:
        os.environ["SMP_TIMEOUT_S"] = "3"
        smp.init({"ddp": True})
    return str(error.value)


def test_different_world_sizes_are_found(pool: Pool) -> None:
    texts = pool.run(2, different_world)
    assert "rank 1 was started as one of 3 processes" in texts[0]
    assert "rank 0 was started as one of 2 processes, rank 1 as one of 3" in texts[1]


def missing_peer(rank: int) -> str:
    if rank == 1:
        return ""
    os.environ["SMP_TIMEOUT_S"] = "1"
    with pytest.raises(RuntimeError) as error:
        smp.init({"partitions": 2})
    return str(error.value)


def test_missing_rank_is_named_after_the_time_out(pool: Pool) -> None:
    text = pool.run(2, missing_peer)[0]
    assert "ranks [1] of 2 did not arrive within 1 s" in text
    assert "SMP_TIMEOUT_S" in text


# ---- rows with a condition of their own --------------------------------------------


def init_with_faked_gpus(rank: int, share: str, config: dict[str, Any]) -> str:
    """Init on a machine that seems to have one GPU: the device, or the text of the error."""
    os.environ["SMP_SHARE_GPU"] = share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "look_at_devices", lambda settings: ("cuda", 1))
        try:
            smp.init(config)
        except ValueError as error:
            return str(error)
    return str(runtime.current().rank.device)


def test_row_14_more_processes_than_gpus_is_refused_on_all_ranks(pool: Pool) -> None:
    texts = pool.run(2, init_with_faked_gpus, "0", {"partitions": 2})
    assert texts[0] == texts[1]
    assert "has 1 visible GPUs" in texts[0]


def device_with_faked_gpus(rank: int) -> str:
    """The device that init has chosen when it connects, for which there would have to be a GPU."""

    def refuse(self: runtime.Runtime, *args: object) -> None:
        raise ValueError(f"chosen: {self.rank.device}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_device, "enter", lambda device: None)
        patch.setattr(runtime.Runtime, "connect", refuse)
        return init_with_faked_gpus(rank, "1", {"partitions": 2})


def test_row_14_does_not_apply_to_shared_gpus(pool: Pool) -> None:
    outcomes = pool.outcomes(2, device_with_faked_gpus)  # one may hear of the other's error
    assert all("chosen: cuda:0" in (one.value or one.message) for one in outcomes)


def test_data_parallel_ranks_on_one_gpu_are_refused_on_all_ranks(pool: Pool) -> None:
    texts = pool.run(2, init_with_faked_gpus, "1", {"ddp": True})
    assert texts[0] == texts[1]
    assert "ranks [0, 1] share GPU 0" in texts[0]


def init_twice(rank: int, second: dict[str, Any]) -> tuple[str, int]:
    smp.init({"partitions": 2, "microbatches": 4})
    with pytest.raises(ValueError) as error:
        smp.init(second)
    smp.barrier()  # still usable
    assert smp.state.cfg is not None
    return str(error.value), smp.state.cfg.microbatches


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"partitions": 1, "ddp": True}, "already initialized with 2"),
        ({"placement_strategy": "spread"}, "already initialized with 'cluster'"),
        ({"microbatches": -1}, "microbatches=-1"),
    ],
)
def test_row_18_second_init_with_another_layout_is_refused(
    pool: Pool, second: dict[str, Any], words: str
) -> None:
    results = pool.run(2, init_twice, second)
    assert results[0] == results[1]
    text, microbatches = results[0]
    assert words in text
    assert microbatches == 4


def second_init_differs(rank: int) -> str:
    smp.init({"partitions": 2})
    with pytest.raises(ValueError) as error:
        smp.init({"microbatches": 2 + rank})
    return str(error.value)


def test_later_init_must_agree_too(pool: Pool) -> None:
    texts = pool.run(2, second_init_differs)
    assert texts[0] == texts[1]
    assert "microbatches is 2 on ranks [0], 3 on ranks [1]" in texts[0]


# ---- sources -----------------------------------------------------------------------


def launcher_wins(rank: int, path: str) -> tuple[int, int, str]:
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"partitions": 2, "microbatches": 6})
    smp.init(path)
    cfg = smp.state.cfg
    assert cfg is not None
    return cfg.partitions, cfg.microbatches, cfg.pipeline


def test_launcher_wins_over_a_file(pool: Pool, tmp_path: Any) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text("partitions: 1\nmicrobatches: 3\npipeline: simple\n")
    assert pool.run(2, launcher_wins, str(path)) == [(2, 6, "simple")] * 2


def use_before_init(rank: int) -> int:
    for function in (smp.rank, smp.size, smp.dp_rank, smp.get_mp_group, smp.barrier):
        with pytest.raises(RuntimeError, match="call smp.init"):
            function()
    assert not smp.is_initialized()
    assert smp.state.cfg is None
    return smp.local_rank()


def test_use_before_init_is_refused_except_local_rank(pool: Pool) -> None:
    assert pool.run(2, use_before_init) == [0, 1]
