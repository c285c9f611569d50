"""Modules that others have wrapped are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed, nn

import smp


@pytest.fixture
def process_group() -> Iterator[None]:
    """Starts torch's process group, which its own wrappers need, and smp."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    smp.init({})
    yield
    smp.shutdown()
    distributed.destroy_process_group()


def fsdp(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh)
    return module


@pytest.mark.parametrize(
    ("wrap", "words"),
    (
        (nn.parallel.DistributedDataParallel, "is a DistributedDataParallel; smp reduces"),
        (nn.DataParallel, "is a DataParallel; smp reduces gradients itself: unwrap it"),
        (fsdp, "is a FullyShardedDataParallel; smp shards by itself"),
        (fsdp2, "is a FSDPModule; smp shards by itself"),
    ),
)
@pytest.mark.parametrize("is_inner", (False, True))
def test_wrappers_are_refused(
    process_group: None, wrap: Callable[[nn.Module], nn.Module], words: str, is_inner: bool
) -> None:
    module = wrap(nn.Linear(2, 2))
    where = "'1'" if is_inner else "the model itself"
    if is_inner:
        module = nn.Sequential(nn.Linear(2, 2), module)
    with pytest.raises(ValueError, match=f"^{where} {words}"):
        smp.DistributedModel(module)


@pytest.mark.parametrize("wrap", (nn.parallel.DistributedDataParallel, nn.DataParallel, fsdp))
def test_wrappers_around_a_model_are_refused_when_they_are_made_or_called(
    process_group: None, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = smp.DistributedModel(nn.Linear(2, 2))
    words = f"the module around this DistributedModel is a {wrap.__name__}; smp reduces"
    if wrap is fsdp:
        words = "the module around this DistributedModel is a FullyShardedDataParallel; smp shards"
    with pytest.raises(ValueError, match=words):
        wrap(model)(torch.ones(2, 2))
    assert model(torch.ones(2, 2)).shape == (2, 2)
    assert nn.Sequential(model)(torch.ones(2, 2)).shape == (2, 2)


def test_plain_modules_are_taken_while_the_wrappers_are_imported(process_group: None) -> None:
    import torch._dynamo
    import torch.distributed.fsdp

    assert torch.distributed.fsdp.FSDPModule and torch._dynamo.OptimizedModule
    smp.DistributedModel(nn.Linear(2, 2))
