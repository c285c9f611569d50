"""Values of uploaded tensors stay available on the host until the tensors are written to."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.model.root_call import RootCall
from smp.modules import host_values
from smp.modules.host_values import is_known_zero, mapped, on_host, remember, upload

META = torch.device("meta")  # values cannot be read there


def uploaded(host: Tensor) -> Tensor:
    there: Tensor = upload({"x": [host]}, META)["x"][0]
    assert there.device == META
    return there


def test_values_are_known_where_they_came_from() -> None:
    host = torch.tensor([[0, 0], [0, 3]])
    there = uploaded(host)
    known = on_host(there)
    assert known is host and not is_known_zero(there)
    assert is_known_zero(uploaded(torch.zeros(3, dtype=torch.bool)))
    shifted = mapped(lambda x: x.view(-1) == 0, there)
    again = on_host(shifted)
    assert shifted.device == META and again is not None
    assert again.tolist() == [True, True, True, False]


def test_a_tensor_on_the_cpu_is_its_own_value() -> None:
    mask = torch.zeros(2, 3)
    assert on_host(mask) is mask and is_known_zero(mask)
    mask[0, 0] = 1
    assert not is_known_zero(mask)
    assert upload([mask], torch.device("cpu"))[0] is mask


@pytest.mark.parametrize("which", [0, 1], ids=["host", "device"])
def test_values_that_were_written_to_are_forgotten(which: int) -> None:
    host = torch.zeros(2, 3, dtype=torch.long)
    there = uploaded(host)
    assert is_known_zero(there)
    (host, there)[which].add_(1)
    assert on_host(there) is None and not is_known_zero(there)


def test_what_was_not_uploaded_is_not_known() -> None:
    host = torch.zeros(2, 3, dtype=torch.long)
    there = torch.zeros(2, 3, dtype=torch.long, device=META)
    assert on_host(there) is None and not is_known_zero(there)
    assert on_host(uploaded(host) + 0) is None
    with FakeTensorMode():
        fake = torch.zeros(2, 3, dtype=torch.long)
    assert on_host(fake) is None and not is_known_zero(fake)
    with torch.inference_mode():
        assert on_host(uploaded(torch.zeros(2, dtype=torch.long))) is None


def test_floating_tensors_are_not_kept() -> None:
    images = torch.zeros(2, 3)
    assert on_host(uploaded(images)) is None
    remember(torch.zeros(2, device=META), images)
    assert not is_known_zero(uploaded(images))


def test_a_look_inside_of_fake_tensors_is_a_real_one() -> None:
    host = torch.zeros(2, dtype=torch.long)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert is_known_zero(host)


def test_what_is_known_goes_with_its_tensor() -> None:
    there = uploaded(torch.zeros(2, dtype=torch.long))
    gc.collect()
    before = len(host_values._known)
    del there
    assert len(host_values._known) == before - 1


def test_a_model_finds_values_of_its_arguments() -> None:
    mask = torch.ones(2, 3, dtype=torch.long)
    seen: list[Any] = []

    def model(x: Tensor, *, options: dict[str, Tensor]) -> Tensor:
        seen.extend([x, options["mask"]])
        return x

    RootCall(((torch.ones(2),), {"options": {"mask": mask}}), META, False).run(model)
    assert seen[0].device == seen[1].device == META
    assert on_host(seen[1]) is mask and on_host(seen[0]) is None
