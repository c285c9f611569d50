"""The page of the zoo: which models were tried, and how each did."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tests.zoo.judging import EQUAL, SKIPPED, Result, modes_of
from tests.zoo.known import reason_for
from tests.zoo.page import results_of

_TITLES = {
    "pp2": "two pipeline ranks, automatic partition",
    "outputs": "the same with hidden states, attentions and router logits on and in the loss",
    "pp3": "three pipeline ranks",
    "pp2dp2": "two pipeline ranks, two replicas",
    "dp2": "two replicas",
    "sdp2": "sharded data parallelism over two ranks",
    "tp2": "tensor parallelism over two ranks",
    "tp2own": "the same, each rank with samples of its own",
    "tp4": "tensor parallelism over four ranks",
    "pp2tp2": "two stages of two tensor-parallel ranks",
    "ep2": "experts spread over two ranks; losses and parameters",
    "ep2own": "the same, each rank with samples of its own",
    "cp2": "context parallelism over two ranks",
    "cp4": "context parallelism over four ranks",
    "pp2cp2": "two stages of two context-parallel ranks",
    "tp2cp2": "two tensor-parallel times two context-parallel ranks",
    "checkpointing": "two pipeline ranks, repeated layers checkpointed",
    "bf16": "two pipeline ranks, bfloat16",
}
_HEAD = """# Models that were tried

This page is made by `python -m tests.zoo --table docs/models.md`; do not edit it. A model class of
each family of the installed packages is made tiny by rule, and trained for three steps of AdamW on
several ranks and in one process, on the same weights and data. Losses, every gradient by name and
every parameter are compared.

| word | means |
|---|---|
| equal | the numbers of one process, up to the order of sums; with `=`: bit by bit |
| refused | an error of smp that says what it cannot do |
| known | open, with its reason in `tests/zoo/known.py` |
| crash, hang, different, nan | a defect |
| skipped | no package, no rule that makes inputs, or one process amplifies rounding as much |
"""


def read(files: list[Path]) -> list[Result]:
    """Results of earlier runs; of several for one model and mode, the last counts.

    Args:
        files: results, a line each, or pages (``.md``), which say less of each.
    """
    found: dict[tuple[str, str], Result] = {}
    for file in files:
        results = _results_in(file)
        modes = {result.mode for result in results if result.outcome == SKIPPED}
        for model, mode in list(found):
            if mode in modes and model.split("/")[1] == "unnamed":  # named now
                del found[model, mode]
        found.update({(result.model, result.mode): result for result in results})
    return list(found.values())


def _results_in(file: Path) -> list[Result]:
    text = file.read_text()
    if file.suffix == ".md":
        return results_of(text)
    return [Result(**json.loads(line)) for line in text.splitlines()]


def write(page: Path, results: list[Result], note: str = "") -> None:
    modes = modes_of(results)
    head, words = _HEAD.split("\n\n| word", 1)
    lines = [
        f"{head} {note}\n\n| word{words}" if note else _HEAD,
        "| mode | what | models | equal | bitwise | refused | known | defects | skipped |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += [_count(mode, [r for r in results if r.mode == mode]) for mode in modes]
    tried = [r for r in results if r.outcome != SKIPPED]
    lines += _by_source([r for r in results if r.mode == modes[0]], modes[0])
    lines += ["", "## By model", "", _note(tried), ""]
    lines += [f"| model | {' | '.join(modes)} | first step | reason |"]
    lines += ["|---|" + "---|" * (len(modes) + 2)]
    by_model: dict[str, list[Result]] = {}
    for result in tried:
        by_model.setdefault(result.model, []).append(result)
    lines += [_row(model, own, modes) for model, own in sorted(by_model.items())]
    skipped = [r for r in results if r.outcome == SKIPPED and r.mode == modes[0]]
    lines += ["", "## Not tried", "", "| model | why |", "|---|---|"]
    lines += [f"| {_name(r.model)} | {_plain(r.reason)} |" for r in skipped]
    page.write_text("\n".join(lines) + "\n")


def _note(tried: list[Result]) -> str:
    steps = sorted(r.step_s / r.alone_s for r in tried if r.alone_s > 0 and r.step_s > 0)
    first = sorted(r.first_step_s for r in tried if r.outcome == EQUAL and r.first_step_s > 0)
    if not steps or not first:
        return "No model was trained."
    return (
        f"A first step, with trace and partition, takes {first[len(first) // 2]:.2f} s (median; "
        f"longest {first[-1]:.1f} s), and a later step {steps[len(steps) // 2]:.1f} times (median) "
        "what one process takes, for models as small as these."
    )


def _by_source(results: list[Result], mode: str) -> list[str]:
    """Lists how the models of each package did in one mode."""
    by_source: dict[str, list[Result]] = {}
    for result in results:
        by_source.setdefault(result.model.split("/")[0], []).append(result)
    lines = ["", f"Of these in {mode}, by where the models come from:", ""]
    lines += ["| source | models | equal | bitwise | refused | known | defects | skipped |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    return lines + [f"| {source} {_counts(own)}" for source, own in sorted(by_source.items())]


def _count(mode: str, results: list[Result]) -> str:
    return f"| {mode} | {_TITLES.get(mode, '')} {_counts(results)}"


def _counts(results: list[Result]) -> str:
    counts = Counter(_word(result) for result in results)
    tried = len(results) - counts[SKIPPED]
    bitwise = sum(result.bitwise for result in results)
    defects = tried - counts[EQUAL] - counts["refused"] - counts["known"]
    share = f"{counts[EQUAL]} ({counts[EQUAL] / max(tried, 1):.1%})"
    return (
        f"| {tried} | {share} | {bitwise} | {counts['refused']} "
        f"| {counts['known']} | {defects} | {counts[SKIPPED]} |"
    )


def _word(result: Result) -> str:
    if result.outcome not in (EQUAL, SKIPPED, "refused") and reason_for(result):
        return "known"
    return result.outcome


def _row(model: str, results: list[Result], modes: list[str]) -> str:
    by_mode = {result.mode: result for result in results}
    cells = []
    for mode in modes:
        result = by_mode.get(mode)
        mark = " =" if result is not None and result.bitwise else ""
        cells.append(_word(result) + mark if result is not None else "")
    seconds = f"{results[0].first_step_s:.2f} s"
    of_others = sorted(results, key=lambda result: result.outcome == EQUAL)
    reasons = [reason_for(r) or r.reason for r in of_others if r.outcome != EQUAL or r.reason]
    reason = _plain(reasons[0]) if reasons else ""
    return f"| {_name(model)} | {' | '.join(cells)} | {seconds} | {reason} |"


def _name(model: str) -> str:
    source, family, name = model.split("/")
    of = "" if source in ("patterns", "transformers") else f"{source} "
    return f"{of}{family}: {name}"


def _plain(reason: str) -> str:
    """Removes ranks, paths, and what Markdown reads as its own."""
    text = re.sub(r"\[global_rank[^\]]*\] ", "", reason)
    text = re.sub(r"(?<!\w)/\S+", "(path)", text)
    text = re.sub(r"[|\[\]<>*_`#\\]", " ", text)
    return re.sub(r"\s+", " ", text)[:160].strip()
