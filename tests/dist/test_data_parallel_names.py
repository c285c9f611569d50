"""Names of `smdistributed.dataparallel`: what they do, and what they refuse."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool

DISTRIBUTED = "smdistributed.dataparallel.torch.distributed"
DOCUMENTED = (
    *("ReduceOp", "all_gather", "all_reduce", "all_to_all_single", "barrier", "broadcast"),
    *("get_local_rank", "get_rank", "get_world_size", "group", "init_process_group"),
    *("is_available", "is_initialized"),
)


def test_documented_names_are_there_and_nothing_starts() -> None:
    names = importlib.import_module(DISTRIBUTED)
    assert sorted(n for n in vars(names) if not n.startswith("_")) == sorted(DOCUMENTED)
    package = "smdistributed.dataparallel.torch.parallel"
    short, long = (importlib.import_module(f"{package}{end}") for end in ("", ".distributed"))
    assert short.DistributedDataParallel is long.DistributedDataParallel
    torch_names = importlib.import_module("smdistributed.dataparallel.torch")
    assert torch_names.get_local_rank is names.get_local_rank
    assert not names.is_initialized() and not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group.. first"):
        short.DistributedDataParallel(nn.Linear(1, 1))


def reduce(rank: int) -> None:
    dist = importlib.import_module(DISTRIBUTED)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    dist.init_process_group()  # again
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (rank, 2, rank)
    op = dist.ReduceOp
    for kind, expected in ((op.SUM, 3.0), (op.AVERAGE, 1.5), (op.MIN, 1.0), (op.MAX, 2.0)):
        dist.all_reduce(value := torch.tensor([rank + 1.0]), kind)
        assert value.item() == expected, kind
    work = dist.all_reduce(value := torch.tensor([rank + 1.0]), op.AVERAGE, async_op=True)
    work.wait()
    assert value.item() == 1.5
    outputs = torch.zeros(2, dtype=torch.int64)
    dist.all_to_all_single(outputs, torch.tensor([10 * rank, 10 * rank + 1]))
    assert outputs.tolist() == [rank, 10 + rank]
    dist.barrier(dist.group.WORLD)
    with pytest.raises(TypeError, match="AVERAGE of torch.int64"):
        dist.all_reduce(torch.ones(1, dtype=torch.int64), op.AVERAGE)
    with pytest.raises(ValueError, match="has one group"):
        dist.all_reduce(torch.ones(1), group="others")
    with pytest.raises(ValueError, match="backend 'mpi' is not there"):
        dist.init_process_group("mpi")
    with pytest.raises(ValueError, match=r"init_process_group\(rank=7\)"):
        dist.init_process_group(rank=7)


def test_tensors_are_reduced_gathered_and_exchanged(pool: Pool) -> None:
    pool.run(2, reduce)


def wrap_a_split_job(rank: int) -> None:
    dist = importlib.import_module(DISTRIBUTED)
    with pytest.raises(ValueError, match="splits models over 2 ranks"):
        dist.init_process_group()


def test_split_models_are_refused(pool: Pool) -> None:
    parameters = '{"pipeline_parallel_degree": 2, "ddp": true}'
    pool.run(2, wrap_a_split_job, env={"SM_HP_MP_PARAMETERS": parameters})


def go_away(rank: int, how: str) -> str:
    import smp
    from smp.world import runtime

    dist = importlib.import_module(DISTRIBUTED)
    parallel = importlib.import_module("smdistributed.dataparallel.torch.parallel")
    dist.init_process_group()
    model = parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):  # torch looks at the order of gradients once
        model(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        if how == "raises":
            runtime.current().rank.report_raised("the script", RuntimeError("on purpose"))
        smp.shutdown()
        return ""
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("how", "expected"),
    [("raises", "global_rank 1 .*on purpose"), ("leaves", "global_rank 1 .*has left")],
)
def test_a_rank_that_is_gone_is_named_in_backward(pool: Pool, how: str, expected: str) -> None:
    said = pool.run(2, go_away, how)[0]
    assert re.search(expected, said), said
