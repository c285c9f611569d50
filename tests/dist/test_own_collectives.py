"""Models that call `torch.distributed` themselves: refused in pipelines where ranks would wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from tests.dist.pool import Pool


class Counting(nn.Module):
    """Divides by a number of samples that is summed over ranks, as losses of detectors do."""

    def __init__(self, is_over_replicas: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.is_over_replicas = is_over_replicas

    def forward(self, x: Tensor) -> Tensor:
        import smp

        group = smp.get_dp_process_group() if self.is_over_replicas else None
        count = torch.tensor([float(len(x))])
        distributed.all_reduce(count, group=group)
        return self.layers(x).square().sum() / count * distributed.get_world_size(group)


def train(rank: int, is_over_replicas: bool, config: dict[str, Any]) -> tuple[str, float]:
    import smp

    smp.init({"ddp": True, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Counting(is_over_replicas))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        model.backward(loss)
        return loss

    try:
        return "", float(step(torch.ones(2 + 2 * smp.dp_rank(), 4)).reduce_mean())
    except RuntimeError as error:
        return str(error), 0.0


PIPELINE = {"pipeline_parallel_degree": 2}


def test_a_collective_of_all_ranks_is_refused_in_a_pipeline(pool: Pool) -> None:
    for text, _ in pool.run(4, train, False, PIPELINE):
        assert "c10d.allreduce_.default over global ranks [0, 1, 2, 3]" in text
        assert "the others would be waited for forever" in text


def test_collectives_of_ranks_that_run_the_same_code_work(pool: Pool) -> None:
    plain = [loss for _, loss in pool.run(2, train, False, {})]
    in_pipelines = pool.run(4, train, True, PIPELINE)
    assert [text for text, _ in in_pipelines] == [""] * 4
    assert sorted({round(loss, 6) for _, loss in in_pipelines}) == sorted(
        round(x, 6) for x in plain
    )
    assert plain[0] != plain[1], "the samples of the other rank count"
