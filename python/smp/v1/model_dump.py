"""Parameters of a model in files, to compare two runs of one script."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.model import DistributedModel
from smp.world import comm, runtime


def dump_model(model: nn.Module, path: str | os.PathLike[str] = "model_dump") -> Path:
    """Writes parameters and buffers of this rank to ``<path>_<pp_rank>_<tp_rank>``.

    The first replica writes. Only gathering sharded parameters over their ranks is collective.

    Args:
        model: a `DistributedModel` that is partitioned, or a plain module.
        path: path without the suffix of the rank.

    Returns:
        The file of this rank and its equals in other replicas.
    """
    file = _file_of(path)
    state = _state(model)
    if not runtime.is_initialized() or runtime.own_rank().ranks["rdp_cp"] == 0:
        torch.save(state, file)
    return file


def verify(
    model: nn.Module,
    path: str | os.PathLike[str] = "model_dump",
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> None:
    """Compares this rank's parameters and buffers with those that :func:`dump_model` wrote.

    Args:
        model: the same as for :func:`dump_model`, of the same layout.
        path: the same as for :func:`dump_model`.
        rtol, atol: tolerances of ``torch.testing.assert_close``.

    Raises:
        AssertionError: parameters or buffers differ; the text names them.
        FileNotFoundError: there is no file of this layout.
    """
    file = _file_of(path)
    dumped = torch.load(file, map_location="cpu", weights_only=True)
    state = _state(model)
    names = sorted(set(dumped) ^ set(state))
    if names:
        raise AssertionError(f"{_C.rank_prefix()}{file} and the model differ in {names}")
    for name, value in state.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                value,
                dumped[name],
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, name=name: (  # type: ignore[misc]
                    f"{_C.rank_prefix()}'{name}' is not as in {file}: {text}"
                ),
            )


def _file_of(path: str | os.PathLike[str]) -> Path:
    if not runtime.is_initialized():
        return Path(f"{os.fspath(path)}_0_0")
    return Path(f"{os.fspath(path)}_{comm.pp_rank()}_{comm.tp_rank()}")


def _state(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, DistributedModel):
        state = model._parts().local_state()
    else:
        state = model.state_dict()
    return {name: v.detach().cpu() for name, v in state.items() if isinstance(v, Tensor)}
