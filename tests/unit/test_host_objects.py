"""Objects on their way to other ranks."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch

from smp.world import host_objects

CPU = torch.device("cpu")


class Settings(dict):  # type: ignore[type-arg]
    pass


def there_and_back(obj: Any) -> Any:
    return host_objects.unpack(host_objects.pack(obj), CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.randn(3).to(torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.layout}",
)
def test_tensors_arrive_equal(tensor: torch.Tensor) -> None:
    copy = there_and_back(tensor)
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    if tensor.layout is torch.sparse_coo:
        tensor, copy = tensor.to_dense(), copy.to_dense()
    if tensor.is_quantized:
        tensor, copy = tensor.dequantize(), copy.dequantize()
    assert torch.equal(copy, tensor)


def test_memory_apart_gives_equal_tensors_and_no_graphs() -> None:
    tensor = torch.arange(3.0)
    given = {"a": [tensor, tensor, torch.tensor(True)], "b": torch.arange(6).view(2, 3).t(), "c": 1}
    given["d"] = torch.empty(0, 4, requires_grad=True)
    head, parts = host_objects.pack_apart(given)
    assert sum(part.numel() for part in parts) == 3 * 4 + 1 + 6 * 8
    memory = torch.cat(parts)
    copy = host_objects.unpack_apart(head, memory, CPU)
    memory.zero_()
    torch.testing.assert_close(copy, given, rtol=0, atol=0)
    assert copy["a"][0] is copy["a"][1] and copy["d"].requires_grad
    with pytest.raises(ValueError, match="has a graph"):
        host_objects.pack_apart(copy["d"] * 2)


def test_large_memory_of_a_message_is_neither_copied_nor_pickled() -> None:
    large, small = torch.arange(100_000.0), torch.arange(5)
    parameter = torch.nn.Parameter(torch.ones(300, 400).t())
    data, parts = host_objects.pack_message([large, small, parameter, large])
    assert len(data) < 2000 and [part.nbytes for part in parts] == [400_000, 480_000]
    assert parts[0].data_ptr() == large.data_ptr()
    copy = host_objects.unpack(data, CPU, [part.clone() for part in parts])
    torch.testing.assert_close(copy, [large, small, parameter, large], rtol=0, atol=0)
    assert copy[0] is copy[3] and type(copy[2]) is torch.nn.Parameter
    assert host_objects.unpack(data, CPU, parts)[0].data_ptr() == large.data_ptr()


def test_view_travels_without_its_storage() -> None:
    whole = torch.zeros(1_000_000)
    assert len(host_objects.pack(whole[:10])) < 1000


def test_nested_objects_keep_classes_and_identity() -> None:
    tensor = torch.ones(2)
    obj = Settings(a=[1, tensor], b=collections.OrderedDict(x=tensor), c=(None, "text"))
    copy = there_and_back(obj)
    assert type(copy) is Settings
    assert type(copy["b"]) is collections.OrderedDict
    assert copy["c"] == (None, "text")
    assert copy["a"][1] is copy["b"]["x"]
    assert torch.equal(copy["a"][1], tensor)


def test_parameters_and_requires_grad_survive() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    copy = there_and_back([parameter, torch.ones(2, requires_grad=True)])
    assert type(copy[0]) is torch.nn.Parameter
    assert not copy[0].requires_grad
    assert copy[1].requires_grad
    result = torch.ones(2, requires_grad=True) * 2  # has a graph, which stays here
    assert there_and_back(result).is_leaf


def test_received_tensor_is_writable_and_independent() -> None:
    data = host_objects.pack(torch.zeros(3))
    first = host_objects.unpack(data, CPU)
    first += 1
    assert host_objects.unpack(data, CPU).tolist() == [0, 0, 0]


def test_gpu_of_the_sender_means_the_device_of_the_receiver() -> None:
    sent = host_objects.pack([torch.device("cuda:3"), CPU])
    assert host_objects.unpack(sent, torch.device("cuda:1")) == [torch.device("cuda:1"), CPU]


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        host_objects.pack(lambda: None)
