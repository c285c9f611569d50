"""Names that old scripts use, in a world of one."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.v1.sharded_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint as get_full_state_dict,
)


@pytest.fixture
def start() -> Iterator[Any]:
    def init(**config: Any) -> tuple[Any, Any]:
        smp.init(config)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, smp.DistributedOptimizer(inner, dynamic_loss_scale=True)

    yield init
    smp.shutdown()


def test_messages_carry_the_rank() -> None:
    assert smp.utils.rmsg("hello") == "hello"
    smp.init()
    try:
        assert smp.utils.rmsg("hello").endswith("] hello") and "global_rank 0" in smp.utils.rmsg("")
    finally:
        smp.shutdown()


def test_the_state_is_one_object() -> None:
    module = importlib.import_module("smdistributed.modelparallel.torch.state_mod")
    assert module.state is smp.state and smp.state.cfg is None
    assert smp.state.param_index_to_name_tp_group == smp.state.param_name_to_index_tp_group == []


def test_the_alias_delays_initialisation(start: Any) -> None:
    start()
    with smp.delayed_parameter_initialization():
        assert nn.Linear(2, 2).weight.is_meta
    with smp.delayed_parameter_initialization(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta


def test_parameters_have_indices_and_names(start: Any) -> None:
    model, optimizer = start()
    names = [name for name, _ in model.get_module().named_parameters()]
    assert optimizer.param_name_to_index() == {name: i for i, name in enumerate(names)}
    assert smp.state.param_index_to_name_tp_group == [dict(enumerate(names))]
    own = list(model.parameters())
    assert optimizer._param_id_to_index() == {id(p): i for i, p in enumerate(own)}
    assert [optimizer._param_index_to_param_local()[i] for i in range(4)] == own
    assert [p for _, p in model.virtual_named_parameters()] == own
    assert not optimizer.redefined_params and optimizer.fp32_from_fp16 == {}
    assert not optimizer.dynamic_loss_scale, "there is no loss scale in float32"


def test_masters_have_their_names(start: Any) -> None:
    model, optimizer = start(fp16=True)
    optimizer.init_master_params()
    masters = optimizer.fp32_from_fp16
    assert list(masters) == list(model.parameters()) and optimizer.dynamic_loss_scale
    updated = optimizer.param_groups[0]["params"]
    assert [id(m) for m in masters.values()] == [id(p) for p in updated]
    assert [p for _, p in model.virtual_named_parameters()] == updated
    indices = optimizer._param_id_to_index()
    assert all(indices[id(p)] == indices[id(m)] for p, m in masters.items())


@pytest.mark.parametrize("precision", [{}, {"fp16": True}])
def test_gradients_are_dropped_by_the_legacy_keyword(start: Any, precision: Any) -> None:
    model, optimizer = start(**precision)

    def gradients() -> list[Any]:
        return [p.grad for group in optimizer.param_groups for p in group["params"]]

    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_grads_to_None=False)
    assert all(grad is not None and not grad.any() for grad in gradients())
    optimizer.zero_grad(set_grads_to_None=True)
    assert gradients() == [None] * 4


@pytest.mark.parametrize("arguments", [{"update_master_grads": v} for v in (True, False)])
def test_backward_has_the_arguments_of_apex(start: Any, arguments: Any) -> None:
    model, optimizer = start(fp16=True)
    optimizer.loss_scale = 8.0
    x = torch.randn(5, 3)

    def gradients(backward: Any) -> list[torch.Tensor]:
        optimizer.zero_grad()
        smp.step(lambda: backward(model(x).float().sum()))()
        optimizer.update_master_grads()
        (group,) = optimizer.inspect_master_grad_data()
        return [grad.clone() for grad in group]

    plain = gradients(model.backward)
    assert plain[0].abs().max() > 0
    found = gradients(lambda loss: optimizer.backward(loss, retain_graph=False, **arguments))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    with pytest.raises(ValueError, match="retain_graph=True is not supported"):
        optimizer.backward(model(x).float().sum(), retain_graph=True)


def test_a_plain_model_is_dumped_and_verified(tmp_path: Path) -> None:
    helpers = importlib.import_module("smdistributed.modelparallel.test.torch.utils")
    model = nn.Linear(2, 2)
    file = helpers.dump_model(model, tmp_path / "model")
    assert file.name == "model_0_0"
    helpers.verify(model, tmp_path / "model")
    with torch.no_grad():
        model.bias += 1
    with pytest.raises(AssertionError, match="'bias' is not as in"):
        helpers.verify(model, tmp_path / "model")
    with pytest.raises(AssertionError, match="differ in .*'weight'"):
        helpers.verify(nn.BatchNorm1d(2, affine=False), tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        helpers.verify(model, tmp_path / "other")


# ---- sharded checkpoints


def write_sharded(folder: Path, num_shards: int, is_list: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint as its format is described, and what it is made of."""
    torch.manual_seed(2)
    whole = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2)}
    groups = [["a", "b"], ["c"]]
    target = folder / "step3_partial"
    target.mkdir()
    buffer = torch.arange(4)
    torch.save({"module": {"mask": buffer, "a": torch.empty(0)}}, target / "model_0.pt")
    for index in range(num_shards):
        flats = []
        for group in groups:
            parts = []
            for name in group:
                part = -(-whole[name].numel() // num_shards)
                padded = torch.zeros(part * num_shards)
                padded[: whole[name].numel()] = whole[name].flatten()
                parts.append(padded[index * part : (index + 1) * part])
            flats.append(torch.cat(parts))
        count = [num_shards] * len(groups) if is_list else num_shards
        torch.save(
            {"partition_count": count, "fp32_flat_groups": flats}, target / f"optimizer_{index}.pt"
        )
    shapes = [{name: whole[name].shape for name in group} for group in groups]
    torch.save({"buffer_names": ["mask"], "param_shapes": shapes}, target / "user_content.pt")
    (folder / "newest").write_text("step3_partial")
    return {"mask": buffer, **whole}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("tag", [None, "step3", "step3_partial"])
def test_shards_are_merged_to_the_whole_model(
    tmp_path: Path, num_shards: int, tag: str | None
) -> None:
    expected = write_sharded(tmp_path, num_shards, is_list=tag is None)
    state = get_full_state_dict(tmp_path, tag)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    half = get_full_state_dict(str(tmp_path), tag, dtype=torch.bfloat16)
    assert half["a"].dtype == torch.bfloat16 and half["mask"].dtype == torch.int64


def test_the_newest_may_be_a_whole_model(tmp_path: Path) -> None:
    expected = write_sharded(tmp_path, 2)
    (tmp_path / "newest").write_text("full.pt")
    (tmp_path / "full.pt").touch()
    with pytest.raises(FileNotFoundError, match=r"names 'full.pt', a whole model.*tag"):
        get_full_state_dict(tmp_path)
    # As save_checkpoint leaves a folder that is complete.
    (tmp_path / "step3_partial" / "manifest.json").touch()
    assert list(get_full_state_dict(tmp_path)) == list(expected)


class Foreign:
    """A user's object beside a model."""

    num_loaded = 0

    def __init__(self) -> None:
        self.value = torch.ones(2)

    def __setstate__(self, state: Any) -> None:
        Foreign.num_loaded += 1


def test_objects_of_users_are_passed_over(tmp_path: Path) -> None:
    expected = write_sharded(tmp_path, 2)
    path = tmp_path / "step3_partial" / "user_content.pt"
    content = torch.load(path, weights_only=True)
    torch.save({"config": Foreign(), "args": argparse.Namespace(a=1), **content}, path)
    assert list(get_full_state_dict(tmp_path)) == list(expected)
    assert Foreign.num_loaded == 0


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, 2)
    folder = tmp_path / "step3_partial"
    with pytest.raises(FileNotFoundError, match="step4"):
        get_full_state_dict(tmp_path, "step4")
    flats = torch.load(folder / "optimizer_1.pt", weights_only=True)
    cut = {**flats, "fp32_flat_groups": [flats["fp32_flat_groups"][0][:5]] * 2}
    torch.save(cut, folder / "optimizer_1.pt")
    with pytest.raises(ValueError, match=r"group 0: 'a' of shape \(3, 5\) ends at element 8"):
        get_full_state_dict(tmp_path)
    (folder / "optimizer_1.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer_1\.pt"):
        get_full_state_dict(tmp_path)
    torch.save({}, folder / "user_content.pt")
    with pytest.raises(ValueError, match="no 'buffer_names'"):
        get_full_state_dict(tmp_path)
    (tmp_path / "newest").unlink()
    with pytest.raises(FileNotFoundError, match="newest"):
        get_full_state_dict(tmp_path)


def test_modules_of_old_scripts_are_found_before_init() -> None:
    root = "smdistributed.modelparallel.torch"
    for name in ("nn", "optimizers", "amp", "patches.checkpoint", "model", "state_mod", "utils",
                 "step", "sharded_data_parallel_checkpoint", "nn.huggingface.gptneox"):  # fmt: skip
        module = importlib.import_module(f"{root}.{name}")
        assert module.__name__ == f"smp.{name}"
    step = importlib.import_module(f"{root}.step")
    assert step.StepOutput is smp.StepOutput
    assert not smp.is_initialized()
