"""Operators of the late device: when they run, with which results."""

from __future__ import annotations

import pytest
import torch

import tests.device as late
from tests.device.checks.held import Held


def ways(operator: str) -> dict[str, int]:
    return late.counts().get(operator, {})


def test_operators_run_later_on_the_thread_of_the_stream(held: Held) -> None:
    with torch.late.stream(held.stream):
        x = torch.ones(3, device="late")
        y = (x + 1) * x
        y.mul_(2)
        torch.add(y, 1, out=y)
        assert not held.stream.query()
    assert y.shape == (3,)
    held.release()
    assert y.tolist() == [5, 5, 5]
    # The functional ones run as `out=` of tensors that exist, as on CUDA.
    assert late.times_late("aten::add") == 2
    assert late.times_late("aten::mul_") + late.times_late("aten::mul") == 2


def test_views_alias_and_queue_nothing(held: Held) -> None:
    x = torch.zeros(2, 3, device="late")
    torch.late.current_stream().synchronize()
    with torch.late.stream(held.stream):
        for view in (x[1], x.t(), x.view(6), x.reshape(3, 2), x.unfold(1, 2, 1), x.detach()):
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        x.t()[2].fill_(7)
    held.release()
    assert x.tolist() == [[0, 0, 7], [0, 0, 7]]


@pytest.mark.parametrize(
    ("operator", "reason", "call"),
    [
        ("aten::_local_scalar_dense", "returns a number", lambda x: x[0].item()),
        ("aten::equal", "returns a number", lambda x: torch.equal(x, x)),
        ("aten::nonzero", "depends on data", lambda x: x.nonzero()),
        ("aten::masked_select", "depends on data", lambda x: x[x > 1]),
        ("aten::uniform_", "random", lambda x: x.uniform_()),
        ("aten::bernoulli_", "random", lambda x: torch.nn.functional.dropout(x, 0.5)),
    ],
)
def test_what_cannot_run_later_drains_the_stream(operator, reason, call) -> None:
    late.set_delays(5, 2000)
    x = torch.arange(4.0, device="late") + 1
    result = call(x)
    if operator not in late.counts():  # `x[mask]` and dropout have forms of their own
        operator = {
            "aten::masked_select": "aten::nonzero",
            "aten::bernoulli_": "aten::native_dropout",
        }[operator]
    assert ways(operator) == {reason: 1}
    if operator in ("aten::_local_scalar_dense", "aten::equal"):
        assert result == 1
    elif operator == "aten::nonzero":
        assert result.flatten().tolist() in ([0, 1, 2, 3], [2, 3, 4])


def test_an_operator_without_a_meta_kernel_drains_the_stream() -> None:
    library = torch.library.Library("late_checks", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.define("double_(Tensor(a!) x) -> ()")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("double_", lambda x: x.mul_(2) and None, "CPU")
    x = torch.full((1,), 3.0, device="late")
    assert torch.ops.late_checks.twice(x).tolist() == [6]
    assert ways("late_checks::twice") == {"no meta kernel": 1}
    # Nothing has to be allocated for this one.
    torch.ops.late_checks.double_(x)
    assert x.tolist() == [6]
    assert ways("late_checks::double_") == {"late": 1}


def test_a_meta_kernel_that_disagrees_is_an_error() -> None:
    library = torch.library.Library("late_checks", "FRAGMENT")
    library.define("first(Tensor x) -> Tensor")
    library.impl("first", lambda x: x[:1].clone(), "CPU")
    library.impl("first", lambda x: torch.empty_like(x), "Meta")
    torch.ops.late_checks.first(torch.ones(3, device="late"))
    with pytest.raises(RuntimeError, match=r"meta kernel of late_checks::first says float\[3\]"):
        torch.late.synchronize()


def test_wrong_shapes_are_errors_of_the_call() -> None:
    x = torch.ones(3, device="late")
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(2, device="late")
    torch.late.synchronize()


def test_tensors_of_two_devices_are_an_error() -> None:
    x = torch.ones(3, device="late:0")
    with pytest.raises(RuntimeError, match=r"at least two devices, late(:0)? and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices, late:0 and late:1"):
        x + torch.ones(3, device="late:1")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert x[torch.tensor([0, 2])].tolist() == [1, 1], "indices of the host are allowed"


def test_numbers_of_the_host_are_those_of_the_call(held: Held) -> None:
    number = torch.tensor(1.0)
    with torch.late.stream(held.stream):
        x = torch.zeros(2, device="late") + number
    number.fill_(5)
    held.release()
    assert x.tolist() == [1, 1]


def test_outputs_are_resized() -> None:
    x = torch.arange(6.0, device="late")
    out = torch.empty(0, device="late")
    torch.mul(x, 2, out=out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    found = torch.empty(0, dtype=torch.long, device="late")
    torch.nonzero(x > 3, out=found)
    assert found.flatten().tolist() == [4, 5]


def test_lists_of_tensors() -> None:
    xs = [torch.full((2,), float(i), device="late") for i in range(3)]
    torch._foreach_add_(xs, 1)
    assert [x.tolist() for x in torch._foreach_mul(xs, 2)] == [[2, 2], [4, 4], [6, 6]]
    assert torch.cat(xs).tolist() == [1, 1, 2, 2, 3, 3]
    assert [part.tolist() for part in torch.cat(xs).split(4)] == [[1, 1, 2, 2], [3, 3]]
    values, indices = torch.cat(xs).topk(1)
    assert (values.item(), late.times_late("aten::topk")) == (3, 1)
    assert indices.device.type == "late"


def test_storages_and_sizes() -> None:
    x = torch.arange(4.0, device="late")
    x.resize_(6)
    assert x[:4].tolist() == [0, 1, 2, 3]
    y = torch.empty(0, device="late").set_(x.untyped_storage(), 1, (2,), (1,))
    y.fill_(9)
    assert x[:4].tolist() == [0, 9, 9, 3]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    assert torch.isnan(x).all(), "memory that came back"
    assert torch.ones(2, dtype=torch.int32, device="late").view(torch.int16).tolist() == [
        1,
        0,
        1,
        0,
    ]


def test_tensors_are_printed_saved_and_copied(tmp_path) -> None:
    import copy

    x = torch.nn.Parameter(torch.arange(3.0, device="late"))
    assert "device='late:0'" in repr(x)
    assert copy.deepcopy(x).tolist() == [0, 1, 2]
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == torch.device("late:0")
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [0, 1, 2]


# ------------------------------------------------------------ random numbers


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(4)
    expected = [torch.randn(3), torch.nn.functional.dropout(torch.ones(8), 0.5), torch.randperm(5)]
    torch.manual_seed(4)
    before = torch.get_rng_state()
    found = [
        torch.randn(3, device="late"),
        torch.nn.functional.dropout(torch.ones(8, device="late"), 0.5),
        torch.randperm(5, device="late"),
    ]
    for a, b in zip(found, expected, strict=True):
        assert a.cpu().equal(b)
    assert torch.get_rng_state().equal(before), "the CPU's generator is left alone"


def test_states_of_generators() -> None:
    torch.late.manual_seed(3)
    state = torch.late.get_rng_state()
    a = torch.rand(4, device="late")
    torch.late.set_rng_state(state)
    assert torch.rand(4, device="late").equal(a)
    torch.late.manual_seed_all(3)
    assert torch.rand(4, device="late:1").cpu().equal(a.cpu()), "devices have their own"
    own = torch.Generator(device="late").manual_seed(3)
    assert torch.rand(4, device="late", generator=own).equal(a)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(4, device="late", generator=torch.Generator())
    with torch.random.fork_rng(device_type="late"):
        torch.late.manual_seed(3)
        assert torch.rand(4, device="late").equal(a)
