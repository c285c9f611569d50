"""``smp plan``: predicts the fastest layouts of a model on a number of devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from smp.commands.arguments import (
    add_hardware,
    add_model,
    check_counts,
    read_kinds,
    with_speeds,
)
from smp.commands.ending import DONE, BadUse, DoesNotFit, guarded
from smp.commands.models import Call, LoadedModel, load_model, quiet_transformers
from smp.commands.printing import bytes_text, count_text, print_json
from smp.commands.report import Table, print_blocks
from smp.commands.split_form import split_form
from smp.config.schema import Config
from smp.modules.materialize import cast
from smp.modules.state_bytes import MASTER_BYTES
from smp.partition.trace import TraceError
from smp.planning.hardware import Hardware
from smp.planning.kinds import slowest
from smp.planning.layout import Layout
from smp.planning.run_cuts import View
from smp.planning.search import MICROBATCHES, USABLE, Found, Job, Plan, search
from smp.replacement import fuse_heads

_SHOWN = 10
_FUSED = "fused_linear_cross_entropy"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_parser(subparsers: Any) -> None:
    """Adds the command ``plan``. Exit status 1: nothing fits; 2: bad use."""
    parser = subparsers.add_parser(
        "plan",
        help="the fastest layouts of a model on so many devices",
        description="Looks for the fastest layouts that fit into memory: one process, no device, "
        "no weights. Times and memory are predictions.",
    )
    add_model(parser, "to fit into; default: the hardware's")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="devices; default: those that --hardware counts"
    )
    parser.add_argument("--per-host", type=int, metavar="N", help="of them; default: 8")
    parser.add_argument(
        "--batch", type=int, default=512, metavar="N", help="samples of a step; default: 512"
    )
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16", help="default: bf16")
    add_hardware(parser, "h200")
    parser.add_argument(
        "--without-logits", action="store_true", help=f"with {_FUSED} in the configuration"
    )
    parser.add_argument(
        "--bf16-masters",
        choices=tuple(MASTER_BYTES),
        default="fp32",
        help="digits of parameters beyond BF16, as in the configuration; default: fp32",
    )
    parser.add_argument(
        "--offload-optimizer-state",
        action="store_true",
        help="moments in host memory, as in the configuration",
    )
    parser.add_argument(
        "--update-in-backward",
        action="store_true",
        help="no gradient outlives its update, as in the configuration: one microbatch",
    )
    parser.add_argument("--explain", type=int, metavar="N", help="all about plan N")
    parser.set_defaults(execute=guarded("plan", _run))


def _run(arguments: argparse.Namespace) -> int:
    check_counts(arguments, "gpus", "per-host", "batch", "seq", "explain")
    devices = read_kinds(arguments, arguments.gpus, arguments.precision)
    device, num_ranks = slowest(devices.devices, arguments.precision), devices.num_ranks
    per_host = min(arguments.per_host or device.devices_per_host, num_ranks)
    if num_ranks % per_host:
        raise BadUse(f"--gpus {num_ranks} is no multiple of --per-host {per_host}")
    if arguments.bf16_masters != "fp32" and arguments.precision != "bf16":
        raise BadUse(f"--bf16-masters {arguments.bf16_masters} needs --precision bf16")
    keys = {_FUSED: True} if arguments.without_logits else {}
    with (
        quiet_transformers(),
        profiled(
            partial(load_model, arguments.model), arguments.seq, arguments.precision, device, keys
        ) as views,
    ):
        loaded, whole, split = views
        if not devices.are_alike:
            make = partial(load_model, arguments.model)
            call = _computing(make, arguments.seq, arguments.precision)[1]
            devices = with_speeds(devices, loaded, call, arguments.precision)
        job = Job(
            whole,
            device,
            num_ranks,
            per_host,
            device.memory_bytes,
            arguments.batch,
            arguments.precision,
            split,
            keys,
            arguments.state_dtype,
            arguments.bf16_masters,
            arguments.offload_optimizer_state,
            arguments.update_in_backward,
            None if devices.are_alike else devices,
        )
        found = search(job)
    if not found.plans:
        advice = ". Use more devices, shorter sequences, or a smaller model"
        raise DoesNotFit(nothing_fits(job, found) + (advice if found.nearest else ""))
    plans = found.plans[:_SHOWN]
    if arguments.explain is not None and arguments.explain > len(plans):
        raise BadUse(f"--explain {arguments.explain}: there are {len(plans)} plans")
    if arguments.json:
        print_json({**_hardware(job), "plans": [facts(job, plan) for plan in plans]})
    elif arguments.explain is not None:
        _explain(job, plans[arguments.explain - 1])
    else:
        _print(loaded, job, found)
    return DONE


def _hardware(job: Job) -> dict[str, Any]:
    if job.kinds is None:
        return {"hardware": job.hardware.to_json()}
    kinds = job.kinds
    return {
        "hardware": [device.to_json() for device in kinds.devices],
        "num_devices": kinds.counts,
        "speeds": kinds.speeds,
    }


@contextmanager
def profiled(
    make: Callable[[], LoadedModel],
    seq: int | None,
    precision: str,
    device: Hardware,
    keys: Mapping[str, Any] | None = None,
) -> Iterator[tuple[LoadedModel, View, View | None]]:
    """Traces a model in the precision that it computes in, also in the form of split layers.

    The latter lives inside the block; it is None if no layer has such a form.

    Args:
        make: function that returns the model, each time a new one.
        seq: tokens of a sample; None for the model's default.
        precision: "fp32", "bf16" or "fp16".
        device: hardware of the plan.
        keys: keys of the configuration that change what the model computes.

    Raises:
        BadUse: there is no such model, or it cannot be traced.
    """
    loaded, call = _computing(make, seq, precision)
    name = loaded.name
    config = Config.from_dict(keys or {})
    try:
        fuse_heads(loaded.module, config)
    except ValueError as error:
        raise BadUse(str(error)) from None
    try:
        whole = View.of(loaded.module, call, device, precision)
    except TraceError as error:
        raise BadUse(f"model {name!r} cannot be traced: {error}") from None
    # Building the split form changes the modules, so it gets a second model.
    with split_form(_computing(make, seq, precision)[0].module) as form:
        if form is not None:
            fuse_heads(form, config)
        try:
            split = None if form is None else View.of(form, call, device, precision)
        except TraceError as error:
            raise BadUse(f"model {name!r}, split, cannot be traced: {error}") from None
        yield loaded, whole, split


def _computing(
    make: Callable[[], LoadedModel], seq: int | None, precision: str
) -> tuple[LoadedModel, Call]:
    """Returns a model, and a call of it with one sample in a precision."""
    loaded, dtype = make(), DTYPES[precision]
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


def nothing_fits(job: Job, found: Found) -> str:
    """Returns in words why a search has found no plan, with the layout that is nearest."""
    if found.nearest is None:
        if job.drops_gradients:
            return (
                f"no layout: with --update-in-backward a replica has one microbatch, of "
                f"{', '.join(map(str, MICROBATCHES))} samples, and a batch of {job.samples} cannot "
                f"be divided so over {job.num_ranks} devices; choose another --batch"
            )
        return (
            f"no layout: a batch of {job.samples} samples cannot be divided over the replicas of "
            f"{job.num_ranks} devices; choose another --batch"
        )
    nearest = found.nearest
    held, room = max(
        zip(nearest.held, nearest.rooms, strict=True), key=lambda pair: pair[0].peak / pair[1]
    )
    return (
        f"none of {found.tried} layouts fits into {bytes_text(room)} "
        f"({USABLE} of {bytes_text(room / USABLE)}); the nearest, {nearest.layout.text()}, needs "
        f"{bytes_text(held.peak)}"
    )


def facts(job: Job, plan: Plan) -> dict[str, Any]:
    """Returns a plan for programs: seconds, bytes, shares of the step."""
    time, layout = plan.time, plan.layout
    return {
        "step_s": time.total,
        "samples_per_s": job.samples / time.total,
        "tokens_per_s": job.samples * job.profile.tokens / time.total,
        "bubble": time.bubble,
        "shares": plan.shares(),
        "bound": plan.bound,
        "sent_bytes": plan.sent(),
        "peak_bytes": plan.peak_bytes,
        "ranks": [
            {**asdict(held), "peak": held.peak, "room": room, "microbatch_s": seconds}
            for held, room, seconds in zip(plan.held, plan.rooms, plan.rank_seconds(), strict=True)
        ],
        "checkpoint_layers": _again(job, layout),
        "samples_per_microbatch": layout.microbatch,
        "samples_per_rank": layout.microbatch * layout.microbatches,
        "config": {**layout.config(), **job.keys},
    }


def _print(loaded: LoadedModel, job: Job, found: Found) -> None:
    elements = count_text(job.profile.elements)
    print(f"{loaded.trained}, {elements} parameters on {_devices(job)}")
    print(f"{found.fitting} of {found.tried} layouts fit; all figures are predictions")
    plans = found.plans[:_SHOWN]
    rows = [
        {
            "#": number,
            "layout": text,
            "step": f"{plan.time.total:.3g} s",
            "tokens/s": count_text(job.samples * job.profile.tokens / plan.time.total),
            "memory": bytes_text(plan.peak_bytes),
            "bubble": f"{plan.time.bubble:.0%}",
            "in hosts": bytes_text(plan.sent()["inside"]),
            "between": bytes_text(plan.sent()["between"]),
            "bound": plan.bound,
        }
        for number, (plan, text) in enumerate(
            zip(plans, layout_texts([plan.layout for plan in plans]), strict=True), start=1
        )
    ]
    print_blocks([Table.of(rows, text_columns=2)])
    if job.kinds is not None:
        print("ranks of plan 1:")
        print_blocks([_ranks(job, plans[0])])
    print("configuration of plan 1:")
    _print_config(job, plans[0].layout)


def _devices(job: Job) -> str:
    return f"{job.num_ranks} x {job.hardware.name}" if job.kinds is None else job.kinds.text


def _ranks(job: Job, plan: Plan) -> Table:
    """Returns a table of the work and memory of each pipeline rank and of its devices."""
    assert job.kinds is not None, "of several kinds"
    rows = []
    for rank, places in enumerate(job.kinds.places(plan.layout)):
        held, room = plan.held[rank], plan.rooms[rank]
        names = dict.fromkeys(job.kinds.devices[place.kind].name for place in places)
        elements = sum(
            stage.elements(plan.layout.shares) for stage in plan.stages if stage.rank == rank
        )
        rows.append(
            {
                "pp_rank": rank,
                "devices": " or ".join(names),
                "elements": count_text(elements),
                "a microbatch": f"{1e3 * plan.rank_seconds()[rank]:.3g} ms",
                "memory": bytes_text(held.peak),
                "of": bytes_text(room),
            }
        )
    return Table.of(rows, text_columns=2)


def _print_config(job: Job, layout: Layout, indent: int | None = None) -> None:
    print(json.dumps({**layout.config(), **job.keys}, indent=indent))
    if again := _again(job, layout):
        which = f"{len(again)} layers: {', '.join(again)}" if layout.kept_layers else "each layer"
        print(f"and smp.set_activation_checkpointing on {which}")


def _again(job: Job, layout: Layout) -> list[str]:
    """Returns the names of the layers that are computed again."""
    layers = job.layers(layout) if layout.checkpoints else []
    return [name for name in layers if name not in layout.kept_layers]


def layout_texts(layouts: Sequence[Layout]) -> list[str]:
    """Returns the words of each layout, and the keys in which layouts with equal words differ."""
    texts = []
    for layout in layouts:
        own = layout.config()
        same = [one.config() for one in layouts if one.text() == layout.text()]
        keys = {key for one in same for key in one if one.get(key) != same[0].get(key)}
        words = (f"{key}={own.get(key)}" for key in sorted(keys))
        texts.append(", ".join([layout.text(), *words]))
    return texts


def _explain(job: Job, plan: Plan) -> None:
    layout, step_s = plan.layout, plan.time.total
    print(layout.text())
    print(f"step {step_s:.4g} s, {job.samples / step_s:.4g} samples/s (predicted)")
    shares = sorted(plan.shares().items(), key=lambda item: -item[1])
    print("busiest rank: " + ", ".join(f"{name} {share:.1%}" for name, share in shares))
    rows = []
    for stage, time in zip(plan.stages, plan.time.stages, strict=True):
        held = plan.held[stage.rank]
        names = dict.fromkeys((stage.parts[0].name, stage.parts[-1].name))
        rows.append(
            {
                "pp_rank": stage.rank,
                "from .. to": " .. ".join(names),
                "forward": f"{1e3 * time.forward:.3g} ms",
                "backward": f"{1e3 * (time.backward + time.weight):.3g} ms",
                "state": bytes_text(held.parameters + held.gradients + held.optimizer),
                "activations": bytes_text(held.activations),
                "peak": bytes_text(held.peak),
            }
        )
    print_blocks([Table.of(rows, text_columns=2)])
    if job.kinds is not None:
        print_blocks([_ranks(job, plan)])
    devices = (job.hardware,) if job.kinds is None else job.kinds.devices
    for line in dict.fromkeys(f"hardware: {one.name}. {one.source}" for one in devices):
        print(line)
    print("configuration:")
    _print_config(job, layout, indent=2)
    samples = layout.microbatch * layout.microbatches
    if job.kinds is None or not layout.device_speeds:
        print(f"each of {layout.rdp} replicas reads {samples} samples per step")
    else:
        counts = ", ".join(map(str, job.kinds.samples(layout, job.samples)))
        print(f"replicas read {counts} samples per step (smp.batch_slice({job.samples}))")
