"""Implements ``smp.auto``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import smp._C as _C
from smp.activations.checkpointing import set_activation_checkpointing
from smp.automatic import plan_file
from smp.automatic.choosing import Choice, Request, choose
from smp.automatic.looking import DTYPES, free_now, look
from smp.automatic.sources import Source, source_of
from smp.commands.printing import bytes_text
from smp.config.kinds import to_bytes
from smp.config.sources import LAUNCHER_VARIABLE
from smp.model import DistributedModel
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.replacement import set_tensor_parallelism
from smp.world import runtime
from smp.world.rank import Rank
from smp.world.roll_call import agree, roll_call, together

WHAT = "smp.auto"
_SNIPPET = "model, optimizer = smp.auto(model, optimizer_factory, batch=32)"

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def auto(
    model: nn.Module | str | os.PathLike[str] | Callable[[], Any],
    optimizer_factory: OptimizerFactory,
    *,
    batch: int,
    seq: int | None = None,
    precision: str | None = None,
    memory: int | str | None = None,
    config: Mapping[str, Any] | None = None,
    inputs: Any = None,
    file: str | os.PathLike[str] | None = "smp_auto.json",
    plan: str | os.PathLike[str] | None = None,
) -> tuple[DistributedModel, DistributedOptimizer]:
    """Chooses the fastest layout that fits into these devices, and makes model and optimizer.

    Collective over all ranks, in the place of `smp.init`. It measures the devices and links of the
    job, plans as ``smp plan`` does, initialises the layout, and wraps the model. Each rank reads
    the values of its own part from the files; no rank and no host holds the whole model. The first
    rank prints five lines: model, devices, layout and reason, memory, and the file.

    A rank reads ``batch / smp.rdp_size()`` samples per step.

    Args:
        model: a folder or name of Hugging Face with ``config.json`` and weights; or a function that
            makes the model, without memory for parameters, which are drawn, or read and quantized
            by `smp.quantize`, on the ranks that own them; or a module, the same on all ranks, which
            may be made in `smp.delay_param_initialization`.
        optimizer_factory: function that takes the parameters that require gradients and returns an
            optimizer, for example ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)``.
        batch: samples of a step, over all ranks.
        seq: tokens of a sample; None: as many as the model takes, 2048 at most.
        precision: "fp32", "bf16" or "fp16"; None: "bf16" on accelerators, "fp32" on CPUs.
        memory: memory of a rank that the plan may count with, in bytes or as "40GB"; None: the
            free memory of the fullest device. A tenth of it is left free.
        config: keys of the configuration that the layout has to have.
        inputs: arguments of the forward of a module that is not of transformers: a dictionary, a
            tuple or a tensor, with the batch as first dimension. A function may return them too.
        file: path to which the first rank writes the choice; None: it is not written.
        plan: path of such a file: nothing is measured or searched.

    Returns:
        the wrapped model and optimizer, for functions with `smp.step`.

    Raises:
        ValueError: there is no such model, an argument is wrong or differs between ranks, or
            nothing fits: the text names the nearest that does. Nothing has been loaded then, and
            smp is not initialized. Raised on all ranks.
        RuntimeError: smp is initialized already; or less memory is free than the plan needs.
    """
    if runtime.is_initialized():
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.auto initializes smp with the layout that it chooses; call it "
            "in the place of smp.init"
        )
    if os.environ.get(LAUNCHER_VARIABLE, "").strip():
        raise ValueError(
            f"smp.auto chooses the configuration, and {LAUNCHER_VARIABLE} sets it as well; start "
            "without --config, and give keys that the layout has to have as config="
        )
    runtime.init({"ddp": True})
    try:
        choice, source = _chosen_together(model, locals(), runtime.current().rank)
    finally:
        runtime.shutdown()
    rank = None
    try:
        runtime.init(choice.config)
        rank = runtime.current().rank
        return _made(choice, source, optimizer_factory, rank)
    except BaseException as error:
        if rank is not None:
            rank.report_raised(WHAT, error)
        runtime.shutdown()
        raise


def _chosen_together(model: Any, arguments: dict[str, Any], rank: Rank) -> tuple[Choice, Source]:
    """Returns the choice for the job, the same on all ranks. Collective."""
    error, request, source = None, None, None
    try:
        source = source_of(model, arguments["inputs"])
        request = _request(arguments, rank)
    except (ValueError, TypeError) as caught:
        error = str(caught)
    names = ("batch", "seq", "precision", "memory", "config", "file", "plan")
    call: dict[str, Any] = {name: arguments[name] for name in names}
    call |= {"model": source and source.name, "error": error}
    roll_call(rank, WHAT, call, _SNIPPET)
    assert source is not None and request is not None
    together(rank, WHAT, source.check)
    return _chosen(rank, source, request, arguments["file"], arguments["plan"]), source


def _request(arguments: Mapping[str, Any], rank: Rank) -> Request:
    """Returns the checked arguments."""
    if not callable(arguments["optimizer_factory"]):
        raise ValueError(
            "optimizer_factory: expected a function that takes parameters and returns an "
            f"optimizer, got {type(arguments['optimizer_factory']).__name__}"
        )
    for name in ("batch", "seq"):
        value = arguments[name]
        if not (type(value) is int and value > 0) and not (name == "seq" and value is None):
            raise ValueError(f"{name}: expected a whole number above 0, got {value!r}")
    precision = arguments["precision"] or ("fp32" if rank.device.type == "cpu" else "bf16")
    if precision not in DTYPES:
        raise ValueError(f"precision: expected one of {', '.join(DTYPES)}, got {precision!r}")
    config = arguments["config"]
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"config: expected a dictionary, got {type(config).__name__}")
    memory = arguments["memory"]
    return Request(
        arguments["batch"],
        arguments["seq"],
        precision,
        dict(config or {}),
        None if memory is None else _memory_bytes(memory),
    )


def _memory_bytes(memory: Any) -> int:
    try:
        return to_bytes(memory)
    except (ValueError, TypeError):
        raise ValueError(
            f'memory: expected bytes, or a size such as "40GB", got {memory!r}'
        ) from None


def _chosen(rank: Rank, source: Source, request: Request, file: Any, plan: Any) -> Choice:
    """Reads the choice, or looks and plans; the first rank says and writes it. Collective."""
    if plan is not None:

        def read() -> Choice:
            choice = plan_file.read(os.fspath(plan))
            plan_file.check(choice, os.fspath(plan), source.name, request, rank.world_size)
            return choice

        return together(rank, WHAT, read)
    seen = look(rank, request.precision)
    error, choice = None, None
    if rank.global_rank == 0:
        try:
            choice = choose(source.traced, request, seen, source.delays)
            _say(choice, file)
        except (ValueError, RuntimeError, OSError) as caught:
            error = caught
    found = agree(rank, WHAT, error, choice)[0]
    assert isinstance(found, Choice)
    return found


def _say(choice: Choice, file: Any) -> None:
    """Prints the choice and writes it."""
    last = "not written (file=None)"
    if file is not None:
        path = Path(os.fspath(file))
        plan_file.write(str(path), choice)
        last = f"written to {path}: plan={os.fspath(file)!r} gives the same without looking"
    print("\n".join(f"smp.auto: {line}" for line in (*choice.lines, last)), flush=True)


def _made(
    choice: Choice, source: Source, optimizer_factory: OptimizerFactory, rank: Rank
) -> tuple[DistributedModel, DistributedOptimizer]:
    """Makes model and optimizer in an initialized layout. Collective."""
    together(rank, WHAT, lambda: _check_room(choice, rank))
    module = source.make(DTYPES[choice.precision])
    if rank.sizes["tp"] > 1:
        set_tensor_parallelism(module)
    model = DistributedModel(module)
    for name in choice.checkpoints:
        set_activation_checkpointing(model.get_module().get_submodule(name))
    source.load(model)

    def make() -> DistributedOptimizer:
        made = optimizer_factory(p for p in model.parameters() if p.requires_grad)
        if not isinstance(made, Optimizer):
            raise ValueError(
                "optimizer_factory: expected it to return an optimizer of torch.optim, got "
                f"{type(made).__name__}"
            )
        return DistributedOptimizer(made, dynamic_loss_scale=choice.precision == "fp16")

    return model, together(rank, WHAT, make)


def _check_room(choice: Choice, rank: Rank) -> None:
    """Checks the free memory once more, before anything is loaded.

    Raises:
        RuntimeError: less is free than the plan needs.
    """
    free, needed = free_now(rank), choice.peak_bytes(rank.ranks["pp"])
    if free < needed:
        raise RuntimeError(
            f"{bytes_text(free)} are free on {rank.device} of {rank.launch.hostname} now, and the "
            f"plan needs {bytes_text(needed)}; nothing was loaded. Free the memory, or call "
            "smp.auto without plan="
        )
