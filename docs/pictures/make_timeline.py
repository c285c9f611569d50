"""Draws a step of a real pipeline run, planned above executed: the picture of the README.

torchrun --nproc-per-node 2 docs/pictures/make_timeline.py docs/pictures/timeline.svg

Traces some steps of a small GPT-2 by `smp.trace` and draws the fastest one, which other programs
on the machine have disturbed least. The page of `smp.trace` shows more: waits, tensors, names.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import smp

MICROBATCHES = 6
NUM_STEPS = 24
COLOURS = {"F": "#4c8bc9", "B": "#e0893a", "W": "#7fb069"}
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
WIDTH, LEFT, RIGHT, TOP, ROW, GAP = 960, 130, 16, 66, 24, 18
GREY, TEXT = "#8a8a8a", "#222222"
NEAR_US = 150.0  # pieces of one microbatch that are this close are one box


class Box(NamedTuple):
    begin_us: float
    end_us: float
    phase: str
    mb: int


Rows = dict[tuple[int, bool], list[Box]]  # by rank and whether planned


def record(stem: Path) -> None:
    """Trains and traces; rank 0 writes the files of `smp.trace`. Collective."""
    num_stages = int(os.environ["WORLD_SIZE"])  # of torchrun
    smp.init({"pipeline_parallel_degree": num_stages, "microbatches": MICROBATCHES})
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=192, n_layer=8, n_head=4, use_cache=False
    )
    model = smp.DistributedModel(GPT2LMHeadModel(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.randint(512, (4 * MICROBATCHES, 64))

    @smp.step
    def train_step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            train_step(model, tokens)
            optimizer.step()
            optimizer.zero_grad()

    run(3)  # the first one partitions and learns shapes
    with smp.trace(stem):
        run(NUM_STEPS)


def read_steps(path: Path) -> list[Rows]:
    """Boxes of each step out of a file of `smp.trace`."""
    steps: dict[int, Rows] = defaultdict(lambda: defaultdict(list))
    words = {word: phase for phase, word in WORDS.items()}
    for event in json.loads(path.read_text())["traceEvents"]:
        category, args = event.get("cat"), event.get("args", {})
        if event["ph"] != "X" or not (category == "planned" or category in words):
            continue
        phase = event["name"][0] if category == "planned" else words[category]
        box = Box(event["ts"], event["ts"] + event["dur"], phase, args["microbatch"])
        steps[args["step"]][event["pid"], category == "planned"].append(box)
    return [{key: joined(boxes) for key, boxes in rows.items()} for rows in steps.values()]


def joined(boxes: list[Box]) -> list[Box]:
    """A rank runs a microbatch in pieces, one per module that others wait for."""
    result: list[Box] = []
    for box in sorted(boxes):
        last = result[-1] if result else None
        same = last is not None and (last.phase, last.mb) == (box.phase, box.mb)
        if last is not None and same and box.begin_us - last.end_us < NEAR_US:
            result[-1] = last._replace(end_us=box.end_us)
        else:
            result.append(box)
    return result


def span(rows: Rows, planned: bool) -> tuple[float, float]:
    boxes = [box for (_, is_plan), own in rows.items() if is_plan == planned for box in own]
    return min(box.begin_us for box in boxes), max(box.end_us for box in boxes)


def idle(rows: Rows, rank: int, planned: bool) -> float:
    """Share of the step in which a rank ran nothing."""
    begin, end = span(rows, planned)
    return 1.0 - sum(b.end_us - b.begin_us for b in rows[rank, planned]) / (end - begin)


def draw(rows: Rows) -> str:
    ranks = sorted({rank for rank, _ in rows})
    begin = min(span(rows, planned)[0] for planned in (True, False))
    end = max(span(rows, planned)[1] for planned in (True, False))
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    parts, y = [], float(TOP)
    for rank in ranks:
        for planned in (True, False):
            word = "planned" if planned else "executed"
            share = f"{idle(rows, rank, planned):.0%} idle"
            label = f"rank {rank} {word}"
            parts.append(text(LEFT - 8, y + 11, label, anchor="end"))
            parts.append(text(LEFT - 8, y + 22, share, anchor="end", colour=GREY, size=9))
            width = WIDTH - LEFT - RIGHT
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW}" fill="#f3f3f3"/>'
            )
            for box in rows[rank, planned]:
                parts += draw_box(box, LEFT + (box.begin_us - begin) * scale, y, scale, planned)
            y += ROW + 3
        y += GAP
    parts += axis(end - begin, scale, y - GAP + 4)
    height = int(y + 22)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    title = f"One training step of GPT-2 on {len(ranks)} ranks, {MICROBATCHES} microbatches"
    return "\n".join([head, text(LEFT, 24, title, size=15), *legend(rows), *parts, "</svg>\n"])


def draw_box(box: Box, x: float, y: float, scale: float, planned: bool) -> list[str]:
    width = max(0.6, (box.end_us - box.begin_us) * scale - 0.6)
    shade = ' fill-opacity="0.55"' if planned else ""
    parts = [
        f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{ROW}" '
        f'fill="{COLOURS[box.phase]}"{shade}/>'
    ]
    if width > 16:
        parts.append(text(x + width / 2, y + 16, f"{box.phase}{box.mb}", anchor="middle", size=10))
    return parts


def legend(rows: Rows) -> list[str]:
    parts, x = [], LEFT
    for phase in sorted({box.phase for own in rows.values() for box in own}, key="FBW".index):
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{COLOURS[phase]}"/>')
        parts.append(text(x + 17, 46, f"{WORDS[phase]} ({phase} and its microbatch)"))
        x += 210
    return parts


def axis(length_us: float, scale: float, y: float) -> list[str]:
    step_ms = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if length_us / 1e3 / s <= 10)
    ticks = range(0, int(length_us / 1e3) + 1, step_ms)
    return [text(LEFT + ms * 1e3 * scale, y + 10, f"{ms} ms", colour=GREY, size=10) for ms in ticks]


def text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = TEXT, size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{words}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    picture = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder) / "trace")
        if smp.rank() == 0:
            steps = read_steps(Path(folder) / "trace.json")
            fastest = min(steps, key=lambda rows: span(rows, False)[1] - span(rows, False)[0])
            picture.write_text(draw(fastest), encoding="utf-8")


if __name__ == "__main__":
    main()
