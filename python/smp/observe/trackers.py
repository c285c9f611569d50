"""Sends figures of steps to TensorBoard, Weights & Biases, MLflow or a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Values = Mapping[str, float]
_PREFIX = "smp/"


class Tracker(Protocol):
    """Takes the figures of a stretch of steps."""

    def write(self, step: int, values: Values) -> None:
        """Writes the figures of the stretch of steps that ends with ``step``."""

    def close(self) -> None:
        """Closes what the tracker itself has opened, and nothing else."""


class TensorBoard:
    """Scalars of a `torch.utils.tensorboard.SummaryWriter`.

    Args:
        writer: writer that the caller made and closes; None makes one of ``options``.
    """

    def __init__(self, writer: Any = None, **options: Any) -> None:
        self._owned = writer is None
        if writer is None:
            _package("tensorboard", "tensorboard")
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(**options)
        self._writer = writer

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(_PREFIX + name, value, step)

    def close(self) -> None:
        if self._owned:
            self._writer.close()
        else:
            self._writer.flush()


class WandB:
    """A run of Weights & Biases; steps are a metric separate from those of the script.

    Args:
        run: run that the caller has begun and finishes; None takes the active one, or begins one by
            ``wandb.init(**options)``.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._owned = False
        if run is None:
            wandb = _package("wandb", "wandb")
            self._owned = wandb.run is None
            run = wandb.init(**options) if self._owned else wandb.run
        self._run = run
        run.define_metric(f"{_PREFIX}step")
        run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({f"{_PREFIX}step": step, **{_PREFIX + k: v for k, v in values.items()}})

    def close(self) -> None:
        if self._owned:
            self._run.finish()


class MLflow:
    """The active run of MLflow; without one, one is begun by ``mlflow.start_run(**options)``."""

    def __init__(self, **options: Any) -> None:
        mlflow = _package("mlflow", "mlflow-skinny")
        active = mlflow.active_run()
        self._owned = active is None
        self._mlflow = mlflow
        self._run_id = (mlflow.start_run(**options) if active is None else active).info.run_id

    def write(self, step: int, values: Values) -> None:
        named = {_PREFIX + name: value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def close(self) -> None:
        if self._owned:
            self._mlflow.end_run()


class Function:
    """Calls ``function(step, values)``."""

    def __init__(self, function: Callable[[int, Values], object]) -> None:
        self._function = function

    def write(self, step: int, values: Values) -> None:
        self._function(step, values)

    def close(self) -> None:
        """Closes nothing: the function has no resources."""


_BY_NAME: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def make_tracker(target: Any, options: Mapping[str, Any]) -> Tracker:
    """Returns the tracker for a name, for an object of one of the packages, or for a function.

    Raises:
        ValueError: ``target`` is none of these, or has options that it does not take.
        ImportError: its package is not installed; the message names it.
    """
    if isinstance(target, str):
        if target not in _BY_NAME:
            raise ValueError(
                f"smp.metrics.to: {target!r} is not one of {sorted(_BY_NAME)}; pass a function "
                "(step, values) for anything else"
            )
        return _BY_NAME[target](**options)
    if options:
        raise ValueError(
            f"smp.metrics.to: the options {sorted(options)} are for trackers that are made here, "
            f"and {type(target).__name__} was given; pass them where that is made"
        )
    if hasattr(target, "add_scalar"):
        return TensorBoard(target)
    if hasattr(target, "log") and hasattr(target, "define_metric"):
        return WandB(target)
    if callable(target):
        return Function(target)
    raise ValueError(
        f"smp.metrics.to: expected one of {sorted(_BY_NAME)}, a SummaryWriter, a run of wandb or a "
        f"function (step, values), got {type(target).__name__}"
    )


def _package(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"smp.metrics.to: the package {name} cannot be imported ({error}); "
            f"pip install {distribution}"
        ) from error
