"""Part `attention-order`: the fastest backends of attention by shape, as a table for `smp.nn`.

Each row measures one kind of call with every backend. The last one writes the table beside the
figures, `attention_orders.json`. ``python -m benchmarks.gpu.attention_order FOLDER`` brings it into
the package (`python/smp/nn/attention_orders.json`), where layers read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks.gpu.figures import Figures, lines_of
from benchmarks.gpu.rows import Row
from smp.nn.attention_order import BACKENDS, MASKS, device_kind, read_rows

REPO = Path(__file__).resolve().parents[2]
PACKAGED = REPO / "python" / "smp" / "nn" / "attention_orders.json"
PART, TABLE = "attention-order", "attention_orders.json"
#: Times whose ratios to the fastest one lie between two powers of this number count as equal.
NEAR = 1.03
#: The plain kernel keeps all scores in memory, and beyond so many keys is not worth a try.
MOST_PLAIN_KEYS = 2048


@dataclass(frozen=True)
class Call:
    """A kind of call.

    Attributes:
        dtype, head_size, mask: the same as in `smp.nn.attention_order.OrderRow`.
        keys: positions of a sample.
        hidden: elements of a position in all heads.
        tokens: positions of all samples.
    """

    dtype: str
    head_size: int
    mask: str
    keys: int
    hidden: int = 4096
    tokens: int = 16384

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads = max(1, self.hidden // self.head_size)
        return max(1, self.tokens // self.keys), heads, self.keys, self.head_size

    @property
    def name(self) -> str:
        return f"{self.dtype}, heads of {self.head_size}, mask {self.mask}, {self.keys} keys"


#: 64 and 128 are the sizes of most models; 80 and 96 of GPT-2's and Phi's larger ones, 256 of GPT-J
#: and Gemma.
CALLS = [
    Call(dtype, head_size, mask, keys)
    for dtype, head_size, mask, keys in itertools.product(
        ("bfloat16", "float16"), (64, 80, 96, 128, 256), MASKS, (512, 2048, 8192)
    )
]
#: Some of them with less work, for a dry run.
TINY = [
    replace(call, hidden=128, tokens=512)
    for call in CALLS
    if (call.dtype, call.head_size, call.keys) == ("bfloat16", 64, 512)
]


def work_of(call: Call, device: str) -> Callable[[], object]:
    """Returns a forward and a backward of a call."""
    torch.manual_seed(1)
    dtype: torch.dtype = getattr(torch, call.dtype)
    qkv = [torch.randn(call.shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.randn_like(qkv[0])
    mask: Tensor | None = None
    if call.mask == "tensor":  # additive, as layers of `smp.nn` make it: causal with padding
        future = torch.ones(call.keys, call.keys, dtype=torch.bool, device=device).triu(1)
        lengths = torch.linspace(call.keys // 2, call.keys, call.shape[0], device=device)
        beyond = torch.arange(call.keys, device=device) >= lengths.long()[:, None]
        hidden = future[None, None] | beyond[:, None, None, :]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)

    def work() -> object:
        result = F.scaled_dot_product_attention(*qkv, mask, is_causal=call.mask == "causal")
        return torch.autograd.grad(result, qkv, gradient)

    return work


def measure(figures: Figures, call: Call) -> None:
    """Adds a figure for each backend, or the reason why it refuses the call."""
    device = figures.device
    work = work_of(call, device.kind)
    kind = device_kind(torch.device(device.kind))
    for backend, chosen in BACKENDS.items():
        name = f"{call.name}: {backend}"
        if backend == "math" and call.keys > MOST_PLAIN_KEYS:
            figures.skip(name, "scores of all heads would be in memory")
            continue

        def run(chosen: Any = chosen) -> None:
            with sdpa_kernel(chosen):
                work()

        try:
            run()
        except RuntimeError as error:
            if "CUDA error" in str(error):  # a backend that refuses leaves the device alone
                raise
            figures.skip(name, f"refused: {str(error).strip().splitlines()[0][:160]}")
            continue
        seconds = device.seconds(run, 2 if device.is_dry else 10)
        key = {
            "device": kind,
            "dtype": call.dtype,
            "head_size": call.head_size,
            "mask": call.mask,
            "least_keys": call.keys,
        }
        figures.add(name, seconds * 1e3, "ms", case=key, backend=backend)


def table_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the table: for each case its backends, the fastest first.

    Backends that are nearly as fast as the fastest one come in the order of `BACKENDS`, since
    timings vary.

    Args:
        lines: figures of the part, as in its file.
    """
    cases: dict[str, dict[str, float]] = {}
    for line in lines:
        detail = line.get("detail", {})
        if line["state"] == "ok" and "case" in detail:
            key = json.dumps(detail["case"], sort_keys=True)
            cases.setdefault(key, {})[detail["backend"]] = line["value"]
    rows = []
    for key, times in cases.items():
        usual = [name for name in BACKENDS if name in times]
        order = sorted(usual, key=lambda name: _steps(times[name], min(times.values())))
        milliseconds = {name: float(f"{times[name]:.4g}") for name in order}
        rows.append({**json.loads(key), "order": order, "ms": milliseconds})
    return rows


def _steps(time: float, fastest: float) -> int:
    """Returns the distance of a time from the fastest one, in steps of `NEAR`."""
    return 0 if time <= 0 else math.floor(math.log(time / fastest) / math.log(NEAR))


def write_table(figures: Figures) -> None:
    """Writes the table of all rows that were measured before."""
    lines = lines_of(figures.path)
    rows = table_of(lines)
    first = lines[0] if lines else {}
    source = (
        f"{figures.device.name}, torch {first.get('versions', {}).get('torch')}, "
        f"commit {first.get('commit')}, {first.get('time')}: forward and backward"
    )
    path = figures.path.with_name(TABLE)
    write(path, source, rows)
    read_rows(path.read_text(), TABLE)
    figures.add("cases of the table", len(rows), "", note=TABLE)


def write(path: Path, source: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a table, one row a line."""
    listed = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    body = f"[\n{listed}\n  ]" if listed else "[]"
    path.write_text(f'{{\n  "source": {json.dumps(source)},\n  "rows": {body}\n}}\n')


def install(measured: Path, packaged: Path = PACKAGED) -> int:
    """Takes measured rows into the package's table, in place of rows of the same devices.

    Returns:
        number of rows of the new table.

    Raises:
        ValueError: the file is no table, or one of a dry run.
    """
    read_rows(measured.read_text(), str(measured))
    new = json.loads(measured.read_text())
    devices = {row["device"] for row in new["rows"]}
    if "cpu" in devices or not devices:
        raise ValueError(f"{measured}: expected figures of a GPU, got those of {devices or '{}'}")
    old = json.loads(packaged.read_text())
    kept = [row for row in old["rows"] if row["device"] not in devices]
    source = f"{old['source']}; {new['source']}" if kept else new["source"]
    write(packaged, source, [*kept, *new["rows"]])
    return len(kept) + len(new["rows"])


def rows(part: str, is_dry: bool) -> list[Row]:
    found = [Row(call.name, partial(measure, call=call)) for call in (TINY if is_dry else CALLS)]
    return [*found, Row("table", write_table, needed_s=1.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes a measured table into the package.")
    parser.add_argument("folder", type=Path, help="GPU_OUT of `make gpu`")
    folder: Path = parser.parse_args().folder
    try:
        number = install(folder / TABLE)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{PACKAGED}: {number} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
