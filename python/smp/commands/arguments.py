"""Reads the arguments of commands about a model, and traces it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smp_cli.sagemaker import CONFIG_FORM, split_config

from smp.commands.ending import BadUse, DoesNotFit
from smp.commands.models import Call, LoadedModel, load_model, quiet_transformers
from smp.commands.printing import parse_bytes
from smp.commands.split_form import split_form
from smp.config.processes import check_world
from smp.config.schema import Config, normalize
from smp.config.sources import read_user_config
from smp.modules.state_bytes import STATE_DTYPES
from smp.partition.trace import TraceError
from smp.planning import hardware, kinds
from smp.planning.estimate import Estimate, estimate
from smp.planning.kinds import Kinds
from smp.planning.run_cuts import Run, sample_seconds
from smp.replacement import fuse_heads


def add_model(parser: argparse.ArgumentParser, memory: str) -> None:
    """Adds ``MODEL``, ``--seq``, ``--json``, ``--state-dtype`` and ``--memory``.

    Args:
        memory: words for the command's use of ``--memory``.
    """
    parser.add_argument(
        "model", metavar="MODEL", help="folder or name of Hugging Face, or module:function"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--state-dtype",
        choices=tuple(STATE_DTYPES),
        default="fp32",
        help="storage of Adam's moments, as in smp.optimizers.FusedAdam; default: fp32",
    )
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help=f"of a device (80GiB): {memory}"
    )


def add_run(parser: argparse.ArgumentParser, memory: str) -> None:
    """Adds the arguments of `add_model`, ``--config``, ``--processes`` and ``--microbatch``."""
    add_model(parser, memory)
    parser.add_argument(
        "--config",
        metavar=CONFIG_FORM,
        help="configuration of smp.init: JSON or YAML files and single keys, later ones win",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="of the run; default: the fewest that the degrees need",
    )
    parser.add_argument(
        "--microbatch",
        type=int,
        default=1,
        metavar="N",
        help="samples of a microbatch that a rank reads; default: 1",
    )


def add_pipeline_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `add_run`, and ``--page``."""
    add_run(parser, "a limit")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write a page (HTML)")


def add_hardware(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Adds ``--hardware``."""
    parser.add_argument(
        "--hardware",
        default=default,
        metavar="NAME|FILE[:N],...",
        help=f"{', '.join(hardware.names())} (data sheets), or a file; several kinds with the "
        f"number of each in the order of ranks: a100:2,slow.json:1; default: {default or 'none'}",
    )


def read_kinds(arguments: argparse.Namespace, num_ranks: int | None, precision: str) -> Kinds:
    """Loads the devices of ``--hardware``, with the memory of ``--memory`` if it is given.

    Args:
        arguments: parsed arguments.
        num_ranks: number of devices; None: the sum of those in the argument.
        precision: "fp32", "bf16" or "fp16".

    Raises:
        BadUse: the argument is wrong, or a device has no rate for this precision.
    """
    try:
        found = kinds.load(arguments.hardware, num_ranks)
    except (ValueError, OSError) as error:
        raise BadUse(str(error)) from None
    for device in found.devices:
        if precision not in device.flops:
            raise BadUse(f"precision {precision}: {device.name} has no rate for it")
    return found if arguments.memory is None else found.with_memory(arguments.memory)


def with_speeds(found: Kinds, loaded: LoadedModel, call: Call, precision: str) -> Kinds:
    """Returns devices with their speeds at the work of a model; the one with the least rate has 1.

    Args:
        found: devices.
        loaded: the model.
        call: arguments of a forward with one sample.
        precision: "fp32", "bf16" or "fp16".

    Raises:
        BadUse: the model cannot be traced.
    """
    try:
        seconds = [sample_seconds(loaded.module, call, own, precision) for own in found.devices]
    except TraceError as error:
        raise BadUse(f"model {loaded.name!r} cannot be traced: {error}") from None
    rates = [device.rate(precision) for device in found.devices]
    unit = seconds[rates.index(min(rates))]
    return replace(found, speeds=tuple(round(unit / own, 4) for own in seconds))


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Checks that counts are at least 1 if they are given.

    Args:
        arguments: parsed arguments.
        names: names of options, without the two dashes.

    Raises:
        BadUse: a count is below 1.
    """
    for name in names:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None and value < 1:
            raise BadUse(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Traced:
    """A model, the run that the arguments describe, and its estimate."""

    loaded: LoadedModel
    run: Run
    found: Estimate


def traced_run(arguments: argparse.Namespace, **choices: Any) -> Traced:
    """Traces the model of the arguments of `add_run` under their configuration.

    Args:
        arguments: parsed arguments.
        choices: other attributes of the `Run`.

    Raises:
        BadUse: the arguments are wrong, or the model cannot be traced.
        DoesNotFit: the model cannot be partitioned as configured.
    """
    run = _read_run(arguments, choices)
    with quiet_transformers():
        loaded = load_model(arguments.model)
        if run.kinds is not None:
            run = _on_kinds(run, run.kinds, load_model(arguments.model), arguments.seq)
        call = loaded.call(arguments.microbatch, arguments.seq)
        return Traced(loaded, run, traced_estimate(loaded, *call, run))


def _on_kinds(run: Run, devices: Kinds, loaded: LoadedModel, seq: int | None) -> Run:
    """Returns a run with the speeds of its devices at the work of a model, and their memory."""
    devices = with_speeds(devices, loaded, loaded.call(1, seq), run.layout.precision)
    config = replace(run.config, device_speeds=devices.device_speeds or None)
    rooms = tuple(devices.least_bytes(run.layout))
    device = devices.devices[0].type
    return replace(run, config=config, rooms=rooms, device=device, kinds=devices)


def traced_pipeline(arguments: argparse.Namespace) -> Traced:
    """Returns the same as `traced_run`, for questions about a partition.

    Raises:
        BadUse: as `traced_run`; or the configuration has no pipeline.
    """
    if _read_run(arguments, {}).layout.pp == 1:
        raise BadUse(
            "there is one partition, and nothing to decide; give pipeline_parallel_degree, for "
            "example --config pipeline_parallel_degree=2,microbatches=8"
        )
    return traced_run(arguments)


def _read_run(arguments: argparse.Namespace, choices: dict[str, Any]) -> Run:
    """Reads the run of the arguments; ``ddp`` is set by default.

    Raises:
        BadUse: there is an unknown key, a bad value, a file that cannot be read, or degrees that
            do not divide the number of processes.
    """
    check_counts(arguments, "microbatch", "seq", "processes")
    try:
        given = _given(arguments.config)
        config = Config.from_dict({"ddp": True, **given})
        replicas = math.lcm(config.context_parallel_degree, config.sharded_data_parallel_degree)
        text = getattr(arguments, "hardware", None)
        counted = 0 if text is None else sum(count or 0 for _, count in kinds.parse(text))
        num_ranks = (
            arguments.processes
            or counted
            or (config.pipeline_parallel_degree * config.tensor_parallel_degree * replicas)
        )
        check_world(config, num_ranks)
    except ValueError as error:
        raise BadUse(str(error)) from None
    if text is not None and config.device_speeds is not None:
        raise BadUse("device_speeds are found for --hardware; give one of the two")
    run = Run(
        config,
        frozenset(given),
        num_ranks,
        rooms=(arguments.memory,) * config.pipeline_parallel_degree if arguments.memory else (),
        state_dtype=arguments.state_dtype,
        **choices,
    )
    if text is None:
        return run
    return replace(run, kinds=read_kinds(arguments, num_ranks, run.layout.precision))


def _given(text: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in [] if text is None else split_config(text):
        key, separator, value = word.partition("=")
        read = normalize({key: value}, from_text=True) if separator else read_user_config(word)
        given |= read.values
    return given


def traced_estimate(
    loaded: LoadedModel, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run
) -> Estimate:
    """Calls `estimate`, and converts its errors to those of a command.

    Raises:
        BadUse: the model cannot be traced.
        DoesNotFit: the model cannot be partitioned as configured.
    """
    try:
        if run.layout.tp == 1:
            fuse_heads(loaded.module, run.config)
            return estimate(loaded.module, args, kwargs, run)
        with split_form(loaded.module) as form:
            model = loaded.module if form is None else form
            fuse_heads(model, run.config)
            return estimate(model, args, kwargs, run)
    except TraceError as error:
        raise BadUse(f"model {loaded.name!r} cannot be traced: {error}") from None
    except (ValueError, OSError) as error:
        raise DoesNotFit(str(error)) from None
