"""Names of the optimizer that scripts with an FP16 package of their own use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smp import runtime
from smp.data_parallel import holding_with_master, model_parameter_of
from smp.precision import LossScaler, MasterViews, parameters_of


class LegacyNames(MasterViews):
    """What `DistributedOptimizer` shows of masters, indices and names of what it updates.

    Indices are those of the optimizer's state dicts, names those of the model's. Scripts replace
    the methods by functions of their own.
    """

    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    _models: Callable[[], list[Any]]
    _locality: Callable[[], Callable[[Tensor], bool]]
    _use_masters: Callable[[], None]

    @property
    def redefined_params(self) -> bool:
        """Are the parameters in the groups parts of those of the model by now?

        So it is with a sharded state once the model is partitioned.
        """
        updated = parameters_of(self.optimizer)
        return runtime.current().sizes["shard"] > 1 and any(map(holding_with_master, updated))

    @property
    def dynamic_loss_scale(self) -> bool:
        """Does the loss scale follow overflows?"""
        return self.loss_scaler.is_dynamic

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
        """Puts masters in the place of parameters of models that are partitioned.

        Those that are there already stay; otherwise this happens by itself after the partition.
        """
        self._use_masters()

    def _param_id_to_index(self) -> dict[int, int]:
        """Indices by ``id``, of parameters of the model and of their masters."""
        return {
            id(tensor): index
            for index, updated in enumerate(parameters_of(self.optimizer))
            for tensor in (model_parameter_of(updated), updated)
        }

    def param_name_to_index(self) -> dict[str, int]:
        """Indices by the names that the user's model has for parameters, all names of tied ones."""
        indices = self._param_id_to_index()
        return {
            name: indices[id(parameter)]
            for model in self._models()
            for name, parameter in model.get_module().named_parameters(remove_duplicate=False)
            if id(parameter) in indices
        }

    def _param_index_to_param_local(self) -> dict[int, Tensor]:
        """What is updated on this rank, by index."""
        is_local = self._locality()
        return {
            index: updated
            for index, updated in enumerate(parameters_of(self.optimizer))
            if is_local(updated)
        }
