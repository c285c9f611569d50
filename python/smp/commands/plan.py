"""``smp plan``: predicts the fastest layouts of a model on a number of devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from smp.commands.arguments import add_memory, add_model, check_counts
from smp.commands.ending import DONE, BadUse, DoesNotFit, guarded
from smp.commands.models import Call, LoadedModel, load_model, quiet_transformers
from smp.commands.printing import bytes_text, count_text, print_json
from smp.commands.report import Table, print_blocks
from smp.commands.split_form import split_form
from smp.modules.materialize import cast
from smp.partition.trace import TraceError
from smp.planning import hardware
from smp.planning.half import computing_in
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout
from smp.planning.profile import ModelProfile
from smp.planning.run_cuts import RunCuts
from smp.planning.search import Found, Job, Plan, search
from smp.planning.traced_model import TracedModel

_SHOWN = 10
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_parser(subparsers: Any) -> None:
    """Adds the command ``plan``. Exit status 1: nothing fits; 2: bad use."""
    text = "the fastest layouts of a model on so many devices"
    parser = subparsers.add_parser(
        "plan",
        help=text,
        description="Looks for the fastest layouts that fit into memory: one process, no device, "
        "no weights. Times and memory are predictions.",
    )
    add_model(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices")
    parser.add_argument("--per-host", type=int, metavar="N", help="of them; default: 8")
    add_memory(parser, "to fit into; default: the hardware's")
    parser.add_argument(
        "--batch", type=int, default=512, metavar="N", help="samples of a step; default: 512"
    )
    parser.add_argument(
        "--precision", choices=sorted(_DTYPES), default="bf16", help="default: bf16"
    )
    parser.add_argument(
        "--hardware",
        default="h200",
        metavar="NAME|FILE",
        help=f"{', '.join(hardware.names())} (data sheets), or a file; default: h200",
    )
    parser.add_argument("--explain", type=int, metavar="N", help="all about plan N")
    parser.set_defaults(execute=guarded("plan", _run))


def _run(arguments: argparse.Namespace) -> int:
    check_counts(arguments, "gpus", "per-host", "batch", "seq", "explain")
    try:
        device = hardware.load(arguments.hardware)
        device.rate(arguments.precision)
    except (ValueError, OSError) as error:
        raise BadUse(str(error)) from None
    except KeyError:
        raise BadUse(
            f"--precision {arguments.precision}: {device.name} has no rate for it"
        ) from None
    per_host = min(arguments.per_host or device.devices_per_host, arguments.gpus)
    if arguments.gpus % per_host:
        raise BadUse(f"--gpus {arguments.gpus} is no multiple of --per-host {per_host}")
    with quiet_transformers(), _progress() as tell:
        tell("tracing the model")
        with profiled(arguments.model, arguments.seq, arguments.precision, device) as views:
            loaded, traced, split = views
            job = Job(
                traced.profile,
                device,
                arguments.gpus,
                per_host,
                arguments.memory or device.memory_bytes,
                arguments.batch,
                arguments.precision,
                None if split is None else split.profile,
                traced.cuts,
                None if split is None else split.cuts,
            )
            found = search(job, tell)
    if not found.plans:
        raise DoesNotFit(_nothing_fits(job, found))
    plans = found.plans[:_SHOWN]
    if arguments.explain is not None and arguments.explain > len(plans):
        raise BadUse(f"--explain {arguments.explain}: there are {len(plans)} plans")
    if arguments.json:
        print_json({"hardware": device.to_json(), "plans": [facts(job, plan) for plan in plans]})
    elif arguments.explain is not None:
        _explain(job, plans[arguments.explain - 1])
    else:
        _print(loaded, job, found)
    return DONE


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the progress of the command in one line, on terminals only."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    erase = "\r\x1b[K"
    try:
        yield lambda text: print(erase + text, end="", file=sys.stderr, flush=True)
    finally:
        print(erase, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class View:
    """A traced model as a plan uses it.

    Attributes:
        profile: chain of its layers.
        cuts: partitions that runs would have.
    """

    profile: ModelProfile
    cuts: RunCuts

    @classmethod
    def of(cls, root: nn.Module, call: Call, device: Hardware, precision: str) -> View:
        """Traces a model.

        Raises:
            TraceError: the forward raised.
        """
        half = None if precision == "fp32" else _DTYPES[precision]
        with computing_in(root, half):
            traced = TracedModel(root, *call, device.flops_per_byte(precision))
        return cls(traced.profile(), RunCuts(traced, device.type))


@contextmanager
def profiled(
    name: str, seq: int | None, precision: str, device: Hardware
) -> Iterator[tuple[LoadedModel, View, View | None]]:
    """Traces a model in the precision that it computes in, also in the form of split layers.

    The latter lives inside the block; it is None if no layer has such a form.

    Raises:
        BadUse: there is no such model, or it cannot be traced.
    """
    loaded, call = _computing(name, seq, precision)
    try:
        whole = View.of(loaded.module, call, device, precision)
    except TraceError as error:
        raise BadUse(f"model {name!r} cannot be traced: {error}") from None
    # Building the split form changes the modules, so it gets a second model.
    with split_form(_computing(name, seq, precision)[0].module) as form:
        try:
            split = None if form is None else View.of(form, call, device, precision)
        except TraceError as error:
            raise BadUse(f"model {name!r}, split, cannot be traced: {error}") from None
        yield loaded, whole, split


def _computing(name: str, seq: int | None, precision: str) -> tuple[LoadedModel, Call]:
    """Returns a model, and a call of it with one sample in a precision."""
    loaded, dtype = load_model(name), _DTYPES[precision]
    call = loaded.call(1, seq)
    if dtype == torch.float32:
        for parameter in loaded.module.parameters():
            if parameter.is_floating_point():
                cast(parameter, dtype)
    else:
        call = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, call
        )
    return loaded, call


def _nothing_fits(job: Job, found: Found) -> str:
    if found.nearest is None:
        return (
            f"no layout: a batch of {job.samples} samples cannot be divided over the replicas of "
            f"{job.num_ranks} devices; choose another --batch"
        )
    nearest = found.nearest
    return (
        f"none of {found.tried} layouts fits into {bytes_text(0.9 * job.memory_bytes)} "
        f"(0.9 of {bytes_text(job.memory_bytes)}); the nearest, {nearest.layout.text()}, needs "
        f"{bytes_text(nearest.peak_bytes)}. Use more devices, shorter sequences, or a smaller model"
    )


def facts(job: Job, plan: Plan) -> dict[str, Any]:
    """Returns a plan for programs: seconds, bytes, shares of the step."""
    time = plan.time
    return {
        "step_s": time.total,
        "samples_per_s": job.samples / time.total,
        "tokens_per_s": job.samples * job.profile.tokens / time.total,
        "bubble": time.bubble,
        "shares": plan.shares(),
        "bound": plan.bound,
        "sent_bytes": plan.sent(job.precision),
        "peak_bytes": plan.peak_bytes,
        "ranks": [{**asdict(held), "peak": held.peak} for held in plan.held],
        "checkpoint_layers": plan.layout.checkpoints,
        "samples_per_microbatch": plan.layout.microbatch,
        "samples_per_rank": plan.layout.microbatch * plan.layout.microbatches,
        "config": plan.layout.config(job.precision),
    }


def _print(loaded: LoadedModel, job: Job, found: Found) -> None:
    profile, device = job.profile, job.hardware
    print(
        f"{loaded.trained}, {count_text(profile.elements)} parameters on {job.num_ranks} x "
        f"{device.name}"
    )
    print(f"{found.fitting} of {found.tried} layouts fit; all figures are predictions")
    columns = (
        "#",
        "layout",
        "step",
        "tokens/s",
        "memory",
        "bubble",
        "in hosts",
        "between",
        "bound",
    )
    rows = []
    texts = layout_texts([plan.layout for plan in found.plans[:_SHOWN]], job.precision)
    for number, plan in enumerate(found.plans[:_SHOWN], start=1):
        sent = plan.sent(job.precision)
        tokens = job.samples * profile.tokens / plan.time.total
        rows.append(
            (
                str(number),
                texts[number - 1],
                f"{plan.time.total:.3g} s",
                count_text(tokens),
                bytes_text(plan.peak_bytes),
                f"{plan.time.bubble:.0%}",
                bytes_text(sent["inside"]),
                bytes_text(sent["between"]),
                plan.bound,
            )
        )
    print_blocks([Table(columns, rows, text_columns=2)])
    print("configuration of plan 1:")
    print(json.dumps(found.plans[0].layout.config(job.precision)))
    if found.plans[0].layout.checkpoints:
        print("and smp.set_activation_checkpointing on each layer")


def layout_texts(layouts: Sequence[Layout], precision: str) -> list[str]:
    """Returns the words of each layout, and the keys in which layouts with equal words differ."""
    same: dict[str, list[dict[str, Any]]] = {}
    for layout in layouts:
        same.setdefault(layout.text(), []).append(layout.config(precision))
    texts = []
    for layout in layouts:
        configs, own = same[layout.text()], layout.config(precision)
        keys = sorted(
            {key for one in configs for key in one if one.get(key) != configs[0].get(key)}
        )
        texts.append(", ".join([layout.text(), *(f"{key}={own.get(key)}" for key in keys)]))
    return texts


def _explain(job: Job, plan: Plan) -> None:
    layout = plan.layout
    print(layout.text())
    print(
        f"step {plan.time.total:.4g} s, {job.samples / plan.time.total:.4g} samples/s (predicted)"
    )
    shares = sorted(plan.shares().items(), key=lambda item: -item[1])
    print("busiest rank: " + ", ".join(f"{name} {share:.1%}" for name, share in shares))
    rows = []
    for stage, time in zip(plan.stages, plan.time.stages, strict=True):
        held = plan.held[stage.rank]
        first, last = stage.parts[0].name, stage.parts[-1].name
        rows.append(
            (
                str(stage.rank),
                first if first == last else f"{first} .. {last}",
                f"{1e3 * time.forward:.3g} ms",
                f"{1e3 * (time.backward + time.weight):.3g} ms",
                bytes_text(held.parameters + held.gradients + held.optimizer),
                bytes_text(held.activations),
                bytes_text(held.peak),
            )
        )
    columns = ("pp_rank", "from .. to", "forward", "backward", "state", "activations", "peak")
    print_blocks([Table(columns, rows, text_columns=2)])
    print(describe(job.hardware))
    print("configuration:")
    print(json.dumps(layout.config(job.precision), indent=2))
    if layout.checkpoints:
        print("and smp.set_activation_checkpointing on each layer")
    samples = layout.microbatch * layout.microbatches
    print(f"each of {layout.rdp} replicas reads {samples} samples per step")


def describe(device: Hardware) -> str:
    """Returns a line about the origin of a device's numbers."""
    return f"hardware: {device.name}. {device.source}"
