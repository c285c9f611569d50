"""Names of the optimizer in scripts that use an FP16 package of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.optim.masters import MasterViews
from smp.precision import (
    DynamicLossScaler,
    LossScaler,
    ScaledGradients,
    StaticLossScaler,
)
from smp.precision.holdings import holding_with_master, model_parameter_of, parameters_of
from smp.world import device_numbers
from smp.world.rank import Rank

_SCALER = "loss_scaler"
# Key in the state of a scaler that scales nothing.
_IN_USE = "in_use"


class HalfState:
    """Values that FP16 optimizers save beside the state of their inner optimizer.

    They have the keys of apex' FP16 optimizer. Scripts read them from a saved state, and set them
    on the optimizer, before they load the rest.
    """

    _loss_scaler: LossScaler
    _gradients: ScaledGradients
    _rank: Rank
    _is_scaled: bool
    first_closure_call_this_step: bool
    param_groups: Any

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler of the loss; a static one of 1 unless training is in fp16.

        Setting it takes over the values of another scaler, or of its ``state_dict()`` from a saved
        state. This has no effect without a loss scale.
        """
        return self._loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, given: LossScaler | Mapping[str, Any]) -> None:
        own = self._loss_scaler
        if isinstance(given, Mapping):
            if self._is_scaled and given.get(_IN_USE, True):
                own.load_state_dict(given)
            return
        if not isinstance(given, DynamicLossScaler | StaticLossScaler):
            raise TypeError(
                f"{_C.rank_prefix()}optimizer.loss_scaler takes the 'loss_scaler' of a saved "
                f"state, or a scaler of smp.precision, got a {type(given).__name__}"
            )
        if not self._is_scaled or given is own:
            return
        self.dynamic_loss_scale = given.is_dynamic
        if isinstance(own, DynamicLossScaler) and isinstance(given, DynamicLossScaler):
            own.take_over(given)
        else:
            own.loss_scale = given.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale follows overflows.

        With a loss scale it can only be set to its present value.
        """
        return self._loss_scaler.is_dynamic

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, given: bool) -> None:
        if self._is_scaled and bool(given) != self.dynamic_loss_scale:
            raise ValueError(
                f"{_C.rank_prefix()}the optimizer was made with dynamic_loss_scale="
                f"{self.dynamic_loss_scale} and cannot change to {bool(given)}; give "
                f"dynamic_loss_scale={bool(given)} to smp.DistributedOptimizer"
            )

    @property
    def overflow(self) -> bool:
        """True if a gradient of the last step was infinite or NaN on any rank, in fp16 training.

        Waits for the device, once per step. A value that is set counts until the next step, unless
        the present gradients have been checked.
        """
        return bool(self._gradients.overflow)

    @overflow.setter
    def overflow(self, given: bool) -> None:
        if self._is_scaled and not self._gradients.is_checked:
            number = device_numbers.number(1.0, self._rank.device) if given else None
            self._gradients.overflow = device_numbers.DeviceFlag(number)

    def update_master_grads(self) -> None:
        """Takes the loss scale out of the gradients of masters. Collective over the MP group."""
        self._gradients.unscale()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns gradients of the masters without loss scale, by group; None after an overflow.

        Collective over the MP group.
        """
        self._gradients.check()
        if self.overflow:
            return None
        self._gradients.divide()
        return [[p.grad for p in group["params"]] for group in self.param_groups]

    def _half_state(self) -> dict[str, Any]:
        """Returns these values in 16-bit training; else an empty dict."""
        config = self._rank.config
        if config.half_dtype is None and not config.fp16_params:
            return {}
        scaler = self._loss_scaler.state_dict()
        return {
            _SCALER: scaler if self._is_scaled else {**scaler, _IN_USE: False},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
        }

    def _take_half_state(self, state: dict[str, Any]) -> None:
        """Removes these values from a state, and takes over the loss scaler.

        The saved overflow does not concern the present gradients.
        """
        scaler = state.pop(_SCALER, None)
        if scaler is not None:
            self.loss_scaler = scaler
        for name in ("dynamic_loss_scale", "overflow", "first_closure_call_this_step"):
            state.pop(name, None)


class LegacyNames(HalfState, MasterViews):
    """Masters, indices and names of updated parameters, as `DistributedOptimizer` shows them.

    Indices are those of the optimizer's state dicts, names those of the model's. Scripts replace
    the methods by functions of their own.
    """

    optimizer: torch.optim.Optimizer
    _models: Callable[[], list[Any]]
    _is_local: Callable[[Tensor], bool]
    _use_masters: Callable[[], None]

    @property
    def redefined_params(self) -> bool:
        """True if the groups have parts of the model's parameters instead of these.

        This is so with a sharded state once the model is partitioned.
        """
        updated = parameters_of(self.optimizer)
        return self._rank.sizes["shard"] > 1 and any(map(holding_with_master, updated))

    @property
    def fp32_from_fp16(self) -> dict[Tensor, Tensor]:
        """Masters by the 16-bit parameters of the model."""
        return {
            parameter: master
            for parameters, masters in zip(
                self.fp16_groups, self.fp32_from_fp16_groups, strict=True
            )
            for parameter, master in zip(parameters, masters, strict=True)
        }

    def init_master_params(self) -> None:
        """Replaces parameters of partitioned models by their masters.

        Existing masters stay. Without this call it happens after the partition.
        """
        self._use_masters()

    def _param_id_to_index(self) -> dict[int, int]:
        """Returns indices by ``id`` of parameters of the model and of their masters."""
        return {
            id(tensor): index
            for index, updated in enumerate(parameters_of(self.optimizer))
            for tensor in (model_parameter_of(updated), updated)
        }

    def param_name_to_index(self) -> dict[str, int]:
        """Returns indices by names of parameters in the user's model, all names of tied ones."""
        indices = self._param_id_to_index()
        return {
            name: indices[id(parameter)]
            for model in self._models()
            for name, parameter in model.get_module().named_parameters(remove_duplicate=False)
            if id(parameter) in indices
        }

    def _param_index_to_param_local(self) -> dict[int, Tensor]:
        """Returns the tensors that this rank updates, by index."""
        numbered = enumerate(parameters_of(self.optimizer))
        return {index: updated for index, updated in numbered if self._is_local(updated)}
