"""The page of figures of the site: which results of `benchmarks/results` it draws, and how.

Each figure takes its numbers from one file and links to the page of results that describes them.
Nothing is written here that is not in the file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from website.charts import Bar, Point, Ratio, bar_chart, ratio_chart, scatter
from website.results import RESULTS, Line, conditions, read

_MODELS = {"gptj": "GPT-J", "llama": "Llama", "plain": "plain"}


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        title: heading of the plot.
        source: file of `benchmarks/results`, without suffix; its page has the same name unless
            `page` says another.
        note: sentence that describes the measurement.
        chosen: returns whether a line of the file is in the plot.
        draw: SVG of the lines.
        repeats: see `conditions`.
    """

    title: str
    source: str
    note: str
    chosen: Callable[[Line], bool]
    draw: Callable[[Sequence[Line]], str]
    page: str = ""
    repeats: str = ""

    def lines(self) -> list[Line]:
        """The lines that are drawn.

        Raises:
            ValueError: there are none.
        """
        lines = [line for line in read(self.source) if self.chosen(line)]
        if not lines:
            raise ValueError(f"{self.source}.jsonl has no line for the figure {self.title!r}")
        return lines


def _ratio(line: Line, label: str, group: str = "", prefix: str = "ratio") -> Ratio:
    values = (line[f"{prefix}_{what}"] for what in ("median", "q1", "q3"))
    return Ratio(label, group, *values)


# ---- which lines -------------------------------------------------------------------------


def _is_smp_pipeline(line: Line) -> bool:
    return (line["benchmark"], line["contender"]) == ("pipeline", "smp")


def _has_ratio(line: Line) -> bool:
    return "ratio_median" in line


def _is_any(line: Line) -> bool:
    return True


def _is_planned(line: Line) -> bool:
    """Returns whether a line is of one layout, not the summary of all."""
    return bool(line["contender"] != "all")


def _ratios_of(benchmark: str) -> Callable[[Line], bool]:
    """Makes a filter of a benchmark's lines that leaves out the baseline, whose ratio is 1."""

    def chosen(line: Line) -> bool:
        return line["benchmark"] == benchmark and bool(line.get("ratio_median", 1.0) != 1.0)

    return chosen


# ---- how they are drawn ------------------------------------------------------------------


def _pipelines(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        model, count = _MODELS[line["model"]], line["microbatches"]
        schedule = line.get("pipeline", "interleaved")
        group = f"hidden size {line['config']['shape']['hidden']}"
        label = f"{model}, {schedule}, {count} microbatches"
        rows.append(_ratio(line, label, group, "1f1b_ratio"))
    return ratio_chart(rows, "time of a step / time of 1F1B cut by hand; below 1 smp is faster")


def _foundations(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        config, kind = line["config"], line["benchmark"]
        count = f"{config['microbatches']} microbatches"
        if kind == "pipeline_step":
            group = "two stages, against 1F1B"
            label = f"{config['grouping']}, {config['pipeline']}, {count}"
        elif kind == "data_parallel_step":
            group, label = "two replicas, against DistributedDataParallel", count
        else:
            group = "one process, against a plain loop"
            label = f"hidden size {config['shape']['hidden']}, {count}"
        rows.append(_ratio(line, label, group))
    return ratio_chart(rows, "time of a step / time of the baseline; below 1 smp is faster")


_SPLIT = {
    "one_process": "one process, on both ranks at once",
    "smp_speed": "smp, speed, common batch",
    "smp_memory": "smp, memory, common batch",
    "smp_own": "smp, memory, own batches",
    "planned": "the model's plan, common batch",
    "planned_own": "the model's plan, own batches",
    "speed": "hand-written, speed, common batch",
    "memory": "hand-written, memory, common batch",
    "memory_own": "hand-written, memory, own batches",
}


def _split_layers(lines: Sequence[Line]) -> str:
    rows = [_ratio(line, _SPLIT[line["contender"]]) for line in lines]
    return ratio_chart(rows, "time of a step / time of DTensor; below 1 smp is faster")


def _planned(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        load = line["environment"]["load_average"]
        with_ = "with" if line["config"]["optimizer"] else "without"
        group = f"{with_} optimizer, load average {load:.1f}, {line['repeats']} repeats"
        rows.append(_ratio(line, _SPLIT[line["contender"]], group))
    return ratio_chart(rows, "time of a step / time of transformers' tp_plan; below 1 is faster")


def _head(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        batches = "common batch" if line["config"]["prescaled"] else "own batches"
        rows.append(_ratio(line, f"{line['config']['dtype']}, {batches}"))
    return ratio_chart(rows, "time with split logits / time with gathered ones")


def _long_sequences(lines: Sequence[Line]) -> str:
    words = {1: "heads", 2: "ring"}
    rows = []
    for line in lines:
        config = line["config"]
        rows.append(_ratio(line, f"{config['tokens']} tokens, {words[config['ring']]}"))
    return ratio_chart(rows, "time of a step on two ranks / time of one process")


def _experts(lines: Sequence[Line]) -> str:
    words = {"experts": "each rank has half of the experts", "features": "half of each expert"}
    words["exchange"] = "sending and bringing back alone"
    rows = []
    for line in lines:
        group = f"load average {line['environment']['load_average']:.1f}"
        rows.append(_ratio(line, words[line["contender"]], group))
    return ratio_chart(rows, "time of a step / time of two replicas with all experts")


def _fused(lines: Sequence[Line]) -> str:
    """Forward and backward together; several runs as the median of their medians, within the
    outermost of their quartiles."""
    cases: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        name = line["contender"].removesuffix(" forward+backward")
        cases.setdefault((line["config"]["dtype"], name), []).append(line)
    rows = [
        Ratio(
            name,
            dtype,
            statistics.median(line["ratio_median"] for line in runs),
            min(line["ratio_q1"] for line in runs),
            max(line["ratio_q3"] for line in runs),
        )
        for (dtype, name), runs in cases.items()
    ]
    return ratio_chart(rows, "time of forward and backward / time of eager PyTorch")


_PEERS = {
    "replicas": "replicas, against DDP",
    "sharded_optimizer": "sharded optimizer, against ZeRO",
    "sharded_data": "sharded data, against FSDP2",
    "checkpointing": "checkpointing, against PyTorch's",
}


def _memory_case(line: Line) -> str:
    count = line["config"]["num_ranks"]
    return f"{_PEERS[line['config']['subject']]}, {count} rank{'s' if count > 1 else ''}"


def _memory_times(lines: Sequence[Line]) -> str:
    rows = [_ratio(line, _memory_case(line)) for line in lines]
    return ratio_chart(rows, "time of a step / time of the peer; below 1 smp is faster")


def _memory_peaks(lines: Sequence[Line]) -> str:
    bars = []
    for line in sorted(lines, key=lambda line: line["contender"] != "smp"):
        series = "smp" if line["contender"] == "smp" else "the peer"
        bars.append(Bar(_memory_case(line), series, line["state_mb"] + line["step_peak_mb"]))
    bars.sort(key=lambda bar: list(_PEERS.values()).index(bar.label.rpartition(", ")[0]))
    return bar_chart(bars, "MB per rank: state, and the peak of a step above it")


def _host_bytes(lines: Sequence[Line]) -> str:
    words = {"hierarchical": "by hosts", "flat": "ring over all ranks"}
    bars = [
        Bar(f"{line['hosts']} hosts with {line['per_host']} ranks", words[line["way"]],
            line["sent_to_bound"])
        for line in lines
    ]  # fmt: skip
    return bar_chart(bars, "bytes that a host sends / the least that any sum has to send")


def _planned_memory(lines: Sequence[Line]) -> str:
    points = [
        Point(line["contender"], max(line["peak_mb"]), max(line["estimate_mb"])) for line in lines
    ]
    return scatter(points, "MB on the fullest rank")


def _planned_times(lines: Sequence[Line]) -> str:
    points = [Point(line["contender"], line["median_ms"], line["predicted_ms"]) for line in lines]
    return scatter(points, "ms of a step")


def _control_plane(lines: Sequence[Line]) -> str:
    bars = [
        Bar(f"{line['num_ranks']} ranks", "training", line["steady"]["hub_cpu_s"]) for line in lines
    ]
    return bar_chart(bars, "seconds that the thread of the hub computes in five of training")


# ---- the page ----------------------------------------------------------------------------

_PLANNING = "planning_xeon2_202611"
_FUSED_NOTE = "Operators of smp against the same in eager PyTorch, one thread. "

FIGURES = (
    Figure("Pipelines on an idle machine", "pipeline_default_epyc2_idle_202611",
           "Two ranks against PyTorch's 1F1B, cut by hand into equal blocks; all choices are the "
           "library's.",
           _is_smp_pipeline, _pipelines, repeats="3 or 4"),
    Figure("Pipelines, partition and schedule of the library", "pipeline_default_epyc2_202611",
           "Two ranks against PyTorch's 1F1B, cut by hand into equal blocks.",
           _is_smp_pipeline, _pipelines, repeats="3 or 4"),
    Figure("Pipelines, an earlier run", "pipeline_epyc2_202611",
           "The same question three days before.",
           _is_smp_pipeline, _pipelines, repeats="5, 4 and 3"),
    Figure("zero_bubble that leaves short gaps empty", "pipeline_zero_bubble_xeon2_202611",
           "The schedule as it is now, a small model; an indication.",
           _is_smp_pipeline, _pipelines, repeats="3"),
    Figure("Split layers against DTensor", "tensor_parallel_epyc2_202611",
           "Four transformer layers on two ranks, forward and backward.",
           _ratios_of("tensor_parallel"), _split_layers),
    Figure("A Llama that is split by its plan", "planned_epyc2_202611",
           "Two ranks against transformers' own tensor parallelism, which uses DTensor.",
           _ratios_of("planned"), _planned),
    Figure("Head and loss over a split vocabulary", "planned_head_epyc2_202611",
           "A Qwen3 of one layer with 32768 words on two ranks.",
           _ratios_of("planned_head"), _head),
    Figure("Sequences that two ranks share", "context_parallel_epyc2_202611",
           "A Llama with one sequence, by heads or around rings, against one process on each.",
           lambda line: line["contender"] == "smp", _long_sequences, repeats="6, 4, 3 and 2"),
    Figure("Experts over two ranks", "experts_epyc2_202611",
           "A Mixtral of two layers with eight experts, three runs.",
           _ratios_of("experts"), _experts),
    Figure("Time beside PyTorch's own ways of sharing state", "memory_xeon2_202611",
           "30 million parameters with AdamW, against DDP, ZeroRedundancyOptimizer, FSDP2 and "
           "`torch.utils.checkpoint`.",
           lambda line: line["benchmark"] == "memory" and line["contender"] == "smp",
           _memory_times),
    Figure("Memory beside them", "memory_xeon2_202611",
           "The same runs.",
           lambda line: line["benchmark"] == "memory"
           and line["contender"] not in ("torch_plain", "torch_checkpoint_whole"),
           _memory_peaks),
    Figure("Fused operators, Xeon", "fused_ops_xeon2_202611",
           _FUSED_NOTE + "Four runs: median of their medians, outermost of their quartiles.",
           lambda line: line["contender"].endswith("forward+backward"), _fused),
    Figure("Fused operators, EPYC", "tensor_parallel_epyc2_202611", _FUSED_NOTE.strip(),
           lambda line: line["contender"].endswith("forward+backward"), _fused),
    Figure("Sums over hosts: bytes", "hosts_xeon2_202611",
           "All-reduce of 64 MiB; hosts are namespaces of one machine. Bytes depend on no load.",
           _is_any, _host_bytes),
    Figure("The hub of a job with thousands of ranks", "control_plane_xeon2_202611",
           "The real hub of rank 0, and ranks that only talk to it.",
           _is_any, _control_plane, repeats="1"),
    Figure("Memory that `smp estimate` predicts", _PLANNING,
           "Twenty layouts of one GPT-2; on the line the prediction is exact.",
           _is_planned, _planned_memory),
    Figure("Times that `smp plan` predicts", "planning_xeon2_calibrated_202611",
           "The same layouts on an idle machine, all constants from its calibration.",
           _is_planned, _planned_times, page=_PLANNING),
    Figure("The foundations, before results went from owner to owner", "foundations_epyc2_202611",
           "What the first milestone cost; pipelines are faster since.",
           _has_ratio, _foundations),
)  # fmt: skip

_HEAD = """\
# Figures

Drawn from the raw lines of [the results](../README.md) when the site is built: points are medians,
lines go from the first quartile to the third. Green: both quartiles are below 1; orange: both are
above; grey: 1 lies between them. **All of it was measured on two virtual cores, without a GPU.**
Read the conditions below each plot, and the page behind it for what the plot does not say: a load
average well above 1 at the start means that other work shared the cores.
"""


def page() -> str:
    """The page of figures, as Markdown."""
    return "\n".join([_HEAD, *(_section(figure) for figure in FIGURES), _undrawn()])


def _section(figure: Figure) -> str:
    lines = figure.lines()
    return (
        f"## {figure.title}\n\n{figure.note}\n\n"
        f"<figure>{figure.draw(lines)}</figure>\n\n"
        f"{conditions(lines, figure.repeats)}. [Results]({figure.page or figure.source}.md)\n"
    )


def _undrawn() -> str:
    drawn = {name for figure in FIGURES for name in (figure.source, figure.page)}
    others = sorted(path.stem for path in RESULTS.glob("*.md") if path.stem not in drawn)
    titles = [
        f"- [{(RESULTS / f'{name}.md').read_text().splitlines()[0].lstrip('# ')}]({name}.md)"
        for name in others
    ]
    return "\n".join(["## Results without a plot", "", *titles, ""])
