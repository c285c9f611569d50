"""Adam and AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.modules import state_bytes
from smp.modules.state_bytes import MASTER_BYTES, STATE_DTYPES
from smp.optim.compact_state import narrowed, new_entry, split, widened
from smp.optim.fused import Batch, FusedOptimizer, Params
from smp.optim.host_moments import MomentSlots, cut_into_pieces
from smp.precision.holdings import holding_with_master
from smp.tensor_parallel.partial import MASTER


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay (AdamW), or plain Adam.

    Results equal those of ``torch.optim.AdamW``, or of ``torch.optim.Adam`` without
    ``adam_w_mode``, and each loads state dicts of the other. State of a parameter: ``step``,
    ``exp_avg``, ``exp_avg_sq``.

    The state can take fewer bytes. State dicts have FP32 values in torch's names in any case, on
    the host if the state does not; so they fit every ``state_dtype``.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a number or a tensor with one.
        bias_correction: whether to divide the moments by ``1 - beta ** step``.
        betas: decay rates of the averages of gradients and of their squares.
        eps: number that is added to the root of the second moment.
        adam_w_mode: whether weights decay beside the moments; else the decay is added to gradients.
        weight_decay: factor of the decay.
        amsgrad: False; the variant is not supported.
        set_grad_none: default of :meth:`zero_grad`.
        state_dtype: storage of the moments: ``"fp32"`` (in the dtype of the parameter), ``"bf16"``,
            or ``"int8"``, codes relative to the largest of 256 neighbouring elements.
        stochastic_rounding: whether values in fewer bytes are rounded up or down at random, with
            the values as means; else to nearest, which loses changes below half a unit.
        masters: storage of the digits that bfloat16 parameters lack: ``"fp32"``, a master beside
            the parameter, which has to be float32 here; or the parameter itself is updated, with
            ``"residue"``, 8 further bits in the state, or ``"none"``.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019. Arguments: FusedAdam of NVIDIA apex.
    8-bit state: Dettmers et al. 2022 (arXiv:2110.02861).
    """

    # Class attributes, so that unpickled optimizers of former releases have them.
    state_dtype: str = "fp32"
    stochastic_rounding: bool = True
    masters: str = "fp32"
    moments_on_host: bool = False  # set by `choose_storage`

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        state_dtype: str = "fp32",
        stochastic_rounding: bool = True,
        masters: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        _check_choice("state_dtype", state_dtype, STATE_DTYPES)
        _check_choice("masters", masters, MASTER_BYTES)
        self.state_dtype, self.masters = state_dtype, masters
        self.stochastic_rounding = stochastic_rounding
        super().__init__(params, defaults, set_grad_none)

    def _update(self, batches: list[Batch]) -> None:
        away: dict[torch.device, list[Batch]] = {}
        for batch in batches:
            if self._is_away(batch.params[0]):
                pieces = cut_into_pieces(batch, state_bytes.PIECE_ELEMENTS)
                away.setdefault(batch.device, []).extend(pieces)
            else:
                self._update_batch(batch)
        for device, pieces in away.items():
            MomentSlots(device).update(pieces, self._update_batch)

    def _update_batch(self, batch: Batch) -> None:
        rest = (self._lr(batch), *batch.adam_options, self._grad_scale, self._found_inf)
        if self._is_compact(batch.params[0]):
            torch.ops.smp.fused_adam_compact_(*batch.lists, *self._compact_lists(batch), *rest)
        else:
            torch.ops.smp.fused_adam_(*batch.lists, *rest)

    # ---- state in host memory

    def set_moments_on_host(self, are_on_host: bool) -> None:
        """Moves moments of large parameters to host memory, or back to the device."""
        if are_on_host == self.moments_on_host:
            return
        self.moments_on_host = are_on_host
        for param, entry in self.state.items():
            if "exp_avg" in entry:
                wide = self.wide_entry(param, entry)
                self.state[param] = narrowed(wide, param, *self._form_of(param))

    def _is_away(self, param: Tensor) -> bool:
        return self.moments_on_host and param.numel() >= state_bytes.LEAST_AWAY_ELEMENTS

    # ---- state in fewer bytes

    def _is_compact(self, param: Tensor) -> bool:
        """Returns whether the state of a parameter has another form than torch's."""
        return self.state_dtype != "fp32" or (
            self.masters != "fp32" and param.dtype == torch.bfloat16
        )

    def _has_own_form(self, param: Tensor) -> bool:
        """Returns whether the state of a parameter is not as torch's optimizers have it."""
        return self._is_compact(param) or self._is_away(param)

    def _has_residue(self, param: Tensor) -> bool:
        return self.masters == "residue" and param.dtype == torch.bfloat16

    def _compact_lists(self, batch: Batch) -> tuple[list[Any], ...]:
        """Returns the lists of ``fused_adam_compact_`` beside those of all updates."""
        lists = [
            [state[name] for state in batch.states if name in state]
            for name in ("exp_avg_scale", "exp_avg_sq_scale", "residue")
        ]
        seeds = batch.positions if self.stochastic_rounding else []
        return (*lists, batch.begins, seeds)

    def _begin_of(self, param: Tensor) -> int:
        holding = holding_with_master(param) if self._is_compact(param) else None
        return 0 if holding is None else holding.begin

    def _new_moments(self, param: Tensor) -> dict[str, Tensor]:
        return new_entry(param, *self._form_of(param))

    def _form_of(self, param: Tensor) -> tuple[torch.dtype, int, bool, bool]:
        """Returns the arguments of `new_entry` after the parameter."""
        is_compact = self._is_compact(param)
        if is_compact:
            self._check_dtype(param)
        dtype = STATE_DTYPES[self.state_dtype] if is_compact else param.dtype
        return dtype, self._begin_of(param), self._has_residue(param), self._is_away(param)

    def _check_dtype(self, param: Tensor) -> None:
        if param.dtype == torch.bfloat16 and self.masters == "fp32":
            raise ValueError(
                f"{_C.rank_prefix()}FusedAdam: a parameter with sizes {list(param.shape)} is "
                'bfloat16, and masters="fp32": set bf16 in the configuration and wrap the '
                'optimizer in smp.DistributedOptimizer, or choose masters="residue" or "none"'
            )

    def wide_entry(self, param: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter in torch's names and in FP32."""
        if not entry or not self._is_compact(param):
            return entry
        return widened(entry, param, self._begin_of(param))

    def stored_entry(self, param: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter in the form in which this optimizer keeps it.

        Args:
            param: parameter, or the part of it that this rank updates.
            entry: state in torch's names, in any floating dtype.
        """
        if "exp_avg" not in entry or not self._has_own_form(param):
            return entry
        stored = narrowed(entry, param, *self._form_of(param))
        step = torch.as_tensor(entry["step"])
        return {**stored, "step": step.to(param.device, torch.float32, copy=True).reshape(())}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's names and in FP32.

        Values of a state in fewer bytes are copies in host memory.
        """
        result = super().state_dict()
        for index, param in enumerate(self._parameters()):
            if index in result["state"]:
                result["state"][index] = exported_entry(self, param)
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Loads a state dict of this class, in any format, or of ``torch.optim.AdamW``."""
        params = self._parameters()
        if not any(self._has_own_form(param) for param in params):
            super().load_state_dict(dict(state_dict))
            return
        groups = state_dict["param_groups"]
        indices = list(itertools.chain.from_iterable(group["params"] for group in groups))
        entries = dict(state_dict["state"])
        own = {
            param: entries.pop(index)
            for index, param in zip(indices, params, strict=False)
            if index in entries and self._has_own_form(param)
        }
        # Torch would make whole copies, in the dtype and on the device of the parameter.
        super().load_state_dict({**state_dict, "state": entries})
        for param, entry in own.items():
            self.state[param] = self.stored_entry(param, entry)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        own = ("state_dtype", "stochastic_rounding", "masters", "moments_on_host")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}


def exported_entry(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """Returns the state of a parameter as files have it.

    Tensors of a state in fewer bytes are FP32 copies in host memory, others the state itself.
    """
    entry: dict[str, Any] = optimizer.state[param]
    if not isinstance(optimizer, FusedAdam) or not optimizer._is_compact(param):
        return entry
    wide = optimizer.wide_entry(param, entry)
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in wide.items()}


def imported_entry(
    optimizer: torch.optim.Optimizer, param: Tensor, entry: dict[str, Any]
) -> dict[str, Any]:
    """Returns the state in the form of an optimizer, from the form of files.

    An FP32 value that was saved beside a bfloat16 parameter is written to ``param``.
    """
    if MASTER in entry:
        write_master(optimizer, param, entry[MASTER])
        if not keeps_residue(optimizer, param):
            entry = {name: value for name, value in entry.items() if name != MASTER}
    return optimizer.stored_entry(param, entry) if isinstance(optimizer, FusedAdam) else entry


def has_own_form(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Returns whether `imported_entry` decides about the dtypes and devices of a state."""
    return isinstance(optimizer, FusedAdam) and optimizer._has_own_form(param)


def write_master(optimizer: torch.optim.Optimizer, param: Tensor, value: Tensor) -> None:
    """Writes an FP32 value to a tensor that an optimizer updates, rounded as its residue needs."""
    value = value.to(param.device).view(param.shape)
    with torch.no_grad():
        param.copy_(split(value.float())[0] if keeps_residue(optimizer, param) else value)


def keeps_residue(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Returns whether the state of a parameter has digits of it."""
    return isinstance(optimizer, FusedAdam) and optimizer._has_residue(param)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(
            f"{_C.rank_prefix()}FusedAdam: {name} must be one of {listed}, got {value!r}"
        )
