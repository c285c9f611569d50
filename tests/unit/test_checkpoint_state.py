"""The parts of checkpoints that need no processes: values, lazy tensors, files of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.checkpoint import archive, huggingface, safetensors_stream, whole_model
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.checkpoint.values import decode, encode

VALUES = (
    None,
    True,
    3,
    1e-3,
    float("inf"),
    "text",
    [1, [2.5]],
    (0.9, 0.999),
    {"a": (1,), 2: None},
    torch.tensor(3.0),
    torch.tensor(1 / 3, dtype=torch.float64),
    torch.tensor([[1, 2]], dtype=torch.int16),
    torch.tensor(float("nan")),
    torch.tensor([True, False]),
)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_exactly(value: Any) -> None:
    text = json.dumps(encode(value, "x"), allow_nan=False)
    back = decode(json.loads(text), torch.device("cpu"))
    assert type(back) is type(value)
    if isinstance(value, Tensor):
        assert back.dtype == value.dtype
        torch.testing.assert_close(back, value, rtol=0, atol=0, equal_nan=True)
    else:
        assert back == value


@pytest.mark.parametrize("value", (object(), torch.zeros(5000), {"a": print}), ids=("a", "b", "c"))
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="group 3 is"):
        encode(value, "group 3")


@pytest.mark.parametrize(
    "value",
    ({"tensor": 1}, {"x": 1}, {"tensor": [1], "dtype": "load", "shape": [1], "on_cpu": True}),
    ids=str,
)
def test_malformed_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        decode(value, torch.device("cpu"))


# ---- lazy tensors ----------------------------------------------------------------------


def test_lazy_tensors_compute_what_operators_would() -> None:
    real = {"a": torch.randn(6, 4), "b": torch.randn(6, 4)}
    made: list[str] = []

    def make(name: str) -> Tensor:
        made.append(name)
        return real[name]

    lazy = {n: LazyTensor.leaf(n, t.shape, t.dtype, lambda n=n: make(n)) for n, t in real.items()}

    def work(a: Tensor, b: Tensor) -> list[Tensor]:
        first, second = a.chunk(2)
        return [torch.cat([first, b.t()[:, :4].t()]), second.contiguous().view(-1), a + 1]

    results = work(lazy["a"], lazy["b"])
    assert not made, "nothing is made before it is asked for"
    for result, expected in zip(results, work(real["a"], real["b"]), strict=True):
        assert isinstance(result, LazyTensor)
        assert result.shape == expected.shape and result.dtype == expected.dtype
        assert torch.equal(result.make(), expected)
    assert results[0].leaves == {"a", "b"} and results[2].leaves == {"a"}


def test_lazy_tensors_do_not_change() -> None:
    lazy = LazyTensor.leaf("a", (2,), torch.float32, lambda: torch.zeros(2))
    with pytest.raises(TypeError, match="changes a tensor"):
        lazy.add_(1)


# ---- files of whole models -------------------------------------------------------------


def test_safetensors_are_those_of_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.randn(7).bfloat16(),
        "d": torch.empty(0, 2),
        "e": torch.tensor(True),
    }
    made = {n: archive.Deferred(tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()}
    safetensors_stream.write(tmp_path / "own.safetensors", made)
    library.save_file(tensors, tmp_path / "theirs.safetensors")
    read = [
        library.load_file(tmp_path / "own.safetensors"),
        huggingface.read_safetensors(tmp_path / "own.safetensors"),
        huggingface.read_safetensors(tmp_path / "theirs.safetensors"),
    ]
    for state in read:
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


BAD_HEADERS = (
    {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
    {"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}},
    {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}},
    {"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}},
    {"a": {"dtype": "F32", "shape": [0, -1], "data_offsets": [0, 0]}},
    {"a": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]}},
    {"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 0]}},
    {"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}},
    {"a": 3},
    [],
)


@pytest.mark.parametrize("header", BAD_HEADERS, ids=str)
def test_malformed_safetensors_are_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    with pytest.raises(ValueError, match="x.safetensors is not a safetensors file"):
        huggingface.read_safetensors(path)
    path.write_bytes((2**60).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="a header of"):
        huggingface.read_safetensors(path)


def test_json_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = (opening * 10**5 + "0" + closing * 10**5).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
        with pytest.raises(ValueError, match="x.safetensors is not a safetensors file"):
            huggingface.read_safetensors(path)
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_bytes(text)
        with pytest.raises(ValueError, match="not an index of weights"):
            huggingface.open_weights(index)


def test_an_index_stays_in_its_folder(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    (tmp_path / "in").mkdir()
    index = tmp_path / "in" / "pytorch_model.bin.index.json"
    for name, text in (
        ("../x.bin", "not an index of weights"),
        ("y", "not an index"),
        (3, "not an index"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}} if name != "y" else {}))
        with pytest.raises(ValueError, match=text):
            huggingface.open_weights(index)
    torch.save({"b": torch.ones(1)}, tmp_path / "in" / "x.bin")
    index.write_text(json.dumps({"weight_map": {"a": "x.bin"}}))
    with pytest.raises(ValueError, match="'a' among them"):
        huggingface.open_weights(index)


class Other:
    pass


def test_weights_with_objects_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Other()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="objects other than tensors"):
        huggingface.open_weights(tmp_path / "x.pt")
    torch.save([torch.ones(1)], tmp_path / "y.pt")
    with pytest.raises(ValueError, match="not the state dict"):
        huggingface.open_weights(tmp_path / "y.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(huggingface.open_weights(tmp_path / "old.pt")["a"], torch.ones(2))


# ---- whole models ----------------------------------------------------------------------


def test_the_table_of_an_embedding_is_kept_and_not_the_head() -> None:
    table, bias = torch.zeros(3, 2), torch.zeros(3)
    content = {"lm_head.weight": table, "lm_head.bias": bias, "wte.weight": table}
    kept = whole_model._as_safetensors(content)
    assert kept.keys() == {"lm_head.bias", "wte.weight"} and kept["wte.weight"] is table
