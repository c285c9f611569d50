"""Parts that releases of torch have or lack, both ways whichever release is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp import _torch_releases as releases


def test_a_backend_whose_base_class_cannot_abort_is_asked_itself() -> None:
    class Base: ...

    class Nccl(Base):
        def abort(self) -> None: ...

    class NewBase:
        def abort(self) -> None: ...

    nccl = Nccl()
    assert releases.abort_of(nccl, Base) == nccl.abort
    assert releases.abort_of(nccl, NewBase) is None


def test_blocks_are_limited_where_options_can_say_it() -> None:
    new, old = SimpleNamespace(config=SimpleNamespace(max_ctas=32)), SimpleNamespace()
    releases.limit_ctas(new, 4)
    releases.limit_ctas(old, 4)
    assert new.config.max_ctas == 4
    assert not vars(old)


def test_operators_that_a_release_lacks_are_left_out() -> None:
    assert releases.operators("mm", "_not_of_any_release") == [torch.ops.aten.mm]


def test_properties_of_tensors_that_a_release_lacks_are_left_out() -> None:
    assert releases.getters("shape", "not_of_any_release") == {torch.Tensor.shape.__get__}


def test_settings_that_a_module_lacks_are_left_out() -> None:
    module = SimpleNamespace(donated_buffer=True)
    assert releases.known({"donated_buffer": False, "other": 1}, module) == {
        "donated_buffer": False
    }


@pytest.mark.parametrize("name", ["FailOnRecompileLimitHit", "RecompileLimitExceeded"])
def test_the_limit_of_compiled_kinds_is_known_by_either_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Limit(Exception): ...

    monkeypatch.setattr(torch._dynamo.exc, name, Limit, raising=False)
    assert releases.is_recompile_limit(Limit())
    assert not releases.is_recompile_limit(RuntimeError())


def test_a_minor_release_has_two_numbers() -> None:
    assert releases.minor("2.11.0+cu130") == "2.11"
    assert releases.minor("2.6.0+debian") == "2.6"
    assert torch.__version__.startswith(releases.minor() + ".")


def test_a_store_does_without_what_it_was_not_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def without(*place: Any, use_libuv: bool = True, **options: Any) -> Any:
        asked.append(use_libuv)
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was build without libuv")
        return place, options

    monkeypatch.setattr(releases, "TCPStore", without)
    made: Any = releases.tcp_store("here", 1, 2, True, multi_tenant=True)
    assert made == (("here", 1, 2, True), {"multi_tenant": True})
    assert asked == [True, False]


def test_a_store_that_cannot_be_reached_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(releases, "TCPStore", fails)
    with pytest.raises(RuntimeError, match="nobody is there"):
        releases.tcp_store("here", 1, 2, False)
