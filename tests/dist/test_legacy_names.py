"""Names that old scripts read: what ranks hold of split and sharded parameters."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.harness import own_loss, train_step_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(6, 4)
        self.whole = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.whole(torch.tanh(self.split(x))).square().mean()
        return result


def wrap(config: dict[str, Any]) -> tuple[Any, Any]:
    import smp

    smp.init(config)
    torch.manual_seed(1)
    net = Net()
    smp.set_tensor_parallelism(net.split)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    return model, optimizer


def train(model: Any, optimizer: Any) -> None:

    step_function = train_step_of(model, own_loss)
    step_function(torch.randn(4, 6))
    optimizer.step()


def look_at_slices(rank: int, folder: str) -> None:
    import smp

    model, optimizer = wrap({"ddp": True, "tensor_parallel_degree": 2})
    parameters = dict(model.get_module().named_parameters())
    axes = {name: smp.utils.get_distribution_axis(p) for name, p in parameters.items()}
    assert axes["split.weight"] == 1 and axes["whole.weight"] is None
    # As scripts use it: join along the axis, and cut again.
    weight = parameters["split.weight"].detach()
    slices = smp.allgather(weight, smp.TP_GROUP)
    joined = torch.cat(slices, dim=axes["split.weight"])
    assert joined.shape == (4, 6)
    size = joined.shape[1] // smp.tp_size()
    assert torch.equal(joined.narrow(1, smp.tp_rank() * size, size), weight)
    assert model.is_distributed_parameter(parameters["split.weight"])
    assert not model.is_distributed_parameter(parameters["whole.weight"])
    assert model.is_scaled_batch_parameter(parameters["split.weight"])
    # The bias is added to a sum that a rank has for its own samples.
    assert not model.is_scaled_batch_parameter(parameters["split.bias"])
    assert not model.is_scaled_batch_parameter(parameters["whole.bias"])
    scaled = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    rest = {name for name, _ in model.default_reducer_named_parameters()}
    assert scaled | rest == set(parameters) and not scaled & rest
    assert "split.weight" in scaled and "whole.weight" in rest
    assert not any(model.is_distributed_buffer(b) for b in model.buffers())
    assert not any(model.is_scaled_batch_buffer(b) for b in model.buffers())
    by_index = smp.state.param_index_to_name_tp_group
    by_name = smp.state.param_name_to_index_tp_group
    assert len(by_index) == len(by_name) == 2
    assert [by_index[smp.tp_rank()][i] for i in range(len(parameters))] == list(parameters)
    assert all(by_name[0][name] == index for index, name in by_index[0].items())
    train(model, optimizer)
    helpers = importlib.import_module("smdistributed.modelparallel.test.torch.utils")
    helpers.dump_model(model, f"{folder}/dump")
    smp.barrier()
    helpers.verify(model, f"{folder}/dump")
    train(model, optimizer)
    with pytest.raises(AssertionError, match=r"is not as in .*dump"):
        helpers.verify(model, f"{folder}/dump")


def test_slices_are_found_joined_and_compared(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, look_at_slices, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"dump_0_0", "dump_0_1"}


def look_at_reductions(rank: int, prescaled: bool, optimize: str) -> None:
    import smp

    config = {"ddp": True, "tensor_parallel_degree": 2, "optimize": optimize}
    smp.init({**config, "prescaled_batch": prescaled})
    model = smp.DistributedModel(smp.nn.DistributedTransformerLayer(2, 4, 8, 8))
    parameters = dict(model.local_named_parameters())
    scaled = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    rest = {name for name, _ in model.default_reducer_named_parameters()}
    assert scaled | rest == set(parameters) and not scaled & rest
    assert {n for n, p in parameters.items() if model.is_scaled_batch_parameter(p)} == scaled
    # In "memory" a rank applies what all ranks hold to its part of the activations.
    whole = {n for n, p in parameters.items() if not model.is_distributed_parameter(p)}
    assert len(whole) == 6, whole  # two norms, two biases of rows
    assert rest == (whole if optimize == "memory" else set())


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["own_batch", "prescaled"])
def test_scaled_batch_parameters_are_those_of_the_reducer(
    pool: Pool, prescaled: bool, optimize: str
) -> None:
    pool.run(2, look_at_reductions, prescaled, optimize)


def look_at_shards(rank: int, is_half: bool) -> int:
    config = {"ddp": True, "shard_optimizer_state": True, "fp16": is_half, "auto_partition": False}
    model, optimizer = wrap(config)
    train(model, optimizer)
    assert optimizer.redefined_params
    virtual = dict(model.virtual_named_parameters())
    assert list(virtual) == [name for name, _ in model.named_parameters()]
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in virtual.values()} == updated
    assert sum(p.numel() for p in virtual.values()) < sum(p.numel() for p in model.parameters())
    assert optimizer._param_id_to_index().keys() >= updated
    by_name = optimizer.param_name_to_index()
    assert by_name["split.weight"] == 0 and len(by_name) == 4
    local = optimizer._param_index_to_param_local()
    assert all(local[by_name[name.split("module.")[-1]]] is p for name, p in virtual.items())
    if is_half:
        masters = optimizer.fp32_from_fp16
        assert len(masters) == 4 and all(m.dtype == torch.float32 for m in masters.values())
        assert all(p.dtype == torch.float16 for p in masters)
    # Scripts put functions of their own in the place of these.
    optimizer.param_name_to_index = dict
    assert optimizer.param_name_to_index() == {}
    return sum(p.numel() for p in virtual.values())


@pytest.mark.parametrize("is_half", [False, True])
def test_sharded_parameters_have_virtual_ones(pool: Pool, is_half: bool) -> None:
    assert sum(pool.run(2, look_at_shards, is_half)) == 33, "each element is on one rank"
