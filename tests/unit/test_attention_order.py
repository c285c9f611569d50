"""The order of attention's backends: its table, the choice from it, and the part that measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import attention_order as measured
from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures, lines_of
from smp.nn import attend, attention_order
from smp.nn.attend import Scoring
from smp.nn.attention_order import OrderRow, order_for, ordered, read_rows

BF16 = ("cuda 9.0", "bfloat16")
ROWS = (
    OrderRow(*BF16, 256, "causal", 512, ("flash",)),
    OrderRow(*BF16, 256, "causal", 4096, ("cudnn", "efficient")),
    OrderRow(*BF16, 256, "causal", 2048, ("efficient",)),
    OrderRow(*BF16, 128, "causal", 1, ("math",)),
)


@pytest.mark.parametrize(
    ("case", "order"),
    [
        ((*BF16, 256, "causal", 511), ()),
        ((*BF16, 256, "causal", 512), ("flash",)),
        ((*BF16, 256, "causal", 4095), ("efficient",)),
        ((*BF16, 256, "causal", 10**6), ("cudnn", "efficient")),
        ((*BF16, 256, "none", 4096), ()),
        ((*BF16, 192, "causal", 4096), ()),
        (("cuda 9.0", "float16", 256, "causal", 4096), ()),
        (("cuda 8.0", "bfloat16", 256, "causal", 4096), ()),
    ],
)
def test_a_call_has_the_order_of_the_longest_row_that_it_reaches(
    case: tuple[Any, ...], order: tuple[str, ...]
) -> None:
    assert order_for(ROWS, *case) == order
    assert order_for((), *case) == ()


def test_backends_that_a_script_has_disabled_stay_so() -> None:
    assert ordered(("cudnn", "efficient"), ("flash", "efficient", "math")) == [
        "efficient",
        "flash",
        "math",
    ]
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_order.enabled_backends() == ("math",)
    assert set(attention_order.enabled_backends()) == set(attention_order.BACKENDS)


def test_table_of_the_package_is_read_and_has_no_row_of_a_cpu() -> None:
    assert all(row.device.startswith("cuda ") for row in attention_order.table())


GOOD = {
    "device": "cuda 9.0",
    "dtype": "bfloat16",
    "head_size": 64,
    "mask": "none",
    "least_keys": 1,
    "order": ["flash"],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": "64"}, "t.json, row 1: expected 'head_size', of type int"),
        ({"mask": "some"}, "mask: expected one of none, causal, tensor, got 'some'"),
        ({"order": ["fast"]}, "order: expected some of flash, efficient, cudnn, math"),
        ({"order": []}, "order: expected some of"),
        ({"order": ["math", "math"]}, "each backend once"),
        ({"least_keys": 0}, "least_keys >= 1"),
    ],
)
def test_rows_that_are_wrong_are_named(changes: dict[str, Any], words: str) -> None:
    assert read_rows(json.dumps({"rows": [GOOD]}), "t.json")[0].order == ("flash",)
    with pytest.raises(ValueError, match=words):
        read_rows(json.dumps({"rows": [GOOD, {**GOOD, **changes}]}), "t.json")
    with pytest.raises(ValueError, match='expected an object with "rows"'):
        read_rows("[]", "t.json")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Notes PyTorch's order of backends at each call of its attention."""
    orders: list[list[int]] = []
    theirs = F.scaled_dot_product_attention

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order())
        return theirs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    yield orders


def test_layers_call_attention_with_the_order_of_their_shape(
    seen: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = [torch.randn(2, 2, 16, 8) for _ in range(3)]
    usual = torch._C._get_sdp_priority_order()
    expected = attend.attend(*qkv, None, Scoring(0.3, causal=True), 0.0)
    row = OrderRow("cpu", "float32", 8, "causal", 16, ("math", "flash"))
    monkeypatch.setattr(attention_order, "_shipped", lambda: (row,))
    found = attend.attend(*qkv, None, Scoring(0.3, causal=True), 0.0)
    torch.testing.assert_close(found, expected)
    attend.attend(*qkv, None, Scoring(0.3), 0.0)
    first = [int(SDPBackend.MATH), int(SDPBackend.FLASH_ATTENTION)]
    assert seen[0] == seen[2] == usual != seen[1] and seen[1][:2] == first
    assert torch._C._get_sdp_priority_order() == usual


@pytest.mark.parametrize("rows", [(), (OrderRow("cpu", "float32", 8, "causal", 8, ("math",)),)])
def test_compiled_attention_is_one_graph(
    rows: tuple[OrderRow, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_order, "_shipped", lambda: rows)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend._flash(query, key, value, None, Scoring(0.3, causal=True), 0.0)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for length in (7, 9, 16):
        qkv = [torch.randn(2, 2, length, 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*qkv), run(*qkv))


def line(backend: str, value: float | None, keys: int = 512, state: str = "ok") -> dict[str, Any]:
    case = {**GOOD, "least_keys": keys}
    del case["order"]
    return {"state": state, "value": value, "detail": {"case": case, "backend": backend}}


def test_rows_have_the_fastest_backend_first() -> None:
    lines = [
        *(line(name, value) for name, value in (("flash", 2.0), ("cudnn", 1.0), ("math", 9.0))),
        *(line(name, value, 2048) for name, value in (("cudnn", 1.0), ("flash", 1.01))),
        line("efficient", None, 2048, "skipped"),
        {"state": "ok", "value": 1.0, "detail": {}},
    ]
    found = measured.table_of(lines)
    assert [row["order"] for row in found] == [["cudnn", "flash", "math"], ["flash", "cudnn"]]
    assert found[0]["ms"] == {"cudnn": 1.0, "flash": 2.0, "math": 9.0}
    assert len(read_rows(json.dumps({"rows": found}), "")) == 2


def test_dry_part_writes_a_table_that_the_package_does_not_take(tmp_path: Path) -> None:
    figures = Figures(measured.PART, tmp_path, Device("cpu"), 60.0)
    [call] = [call for call in measured.TINY if call.mask == "tensor"]
    measured.measure(figures, call)
    measured.write_table(figures)
    states = {each["name"]: each["state"] for each in lines_of(figures.path)}
    assert states[f"{call.name}: flash"] == states[f"{call.name}: math"] == "ok"
    assert states[f"{call.name}: cudnn"] == "skipped"
    path = tmp_path / measured.TABLE
    [row] = read_rows(path.read_text(), measured.TABLE)
    assert (row.device, row.mask, row.least_keys) == ("cpu", "tensor", 512)
    assert set(row.order) == {"flash", "math"}
    with pytest.raises(ValueError, match="expected figures of a GPU"):
        measured.install(path, tmp_path / "packaged.json")


def test_measured_rows_take_the_place_of_those_of_their_device(tmp_path: Path) -> None:
    packaged, new = tmp_path / "packaged.json", tmp_path / "new.json"
    other = {**GOOD, "device": "cuda 8.0"}
    measured.write(packaged, "before", [GOOD, other])
    measured.write(new, "now", [{**GOOD, "order": ["cudnn"]}])
    assert measured.install(new, packaged) == 2
    rows = read_rows(packaged.read_text(), "")
    assert {row.device: row.order for row in rows} == {
        "cuda 8.0": ("flash",),
        "cuda 9.0": ("cudnn",),
    }
    assert json.loads(packaged.read_text())["source"] == "before; now"
