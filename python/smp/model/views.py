"""Members of `DistributedModel` that list its parameters, buffers and modules by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from smp.data_parallel import reduction_of
from smp.model.parts import ModelParts
from smp.nn import DistributedModule
from smp.precision.holdings import master_of
from smp.tensor_parallel.sharding import interval_of
from smp.world import runtime


class ModelViews(nn.Module):
    """A base of `DistributedModel`; ``local_*`` are valid after the partition."""

    _parts: Callable[[], ModelParts]
    _runtime: runtime.Runtime

    def is_local_parameter(self, parameter: Tensor) -> bool:
        """Returns whether this parameter lives on this rank."""
        return self._parts().is_local_parameter(parameter)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that live on this rank."""
        for _, parameter in self._parts().named_parameters():
            yield parameter

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters that live on this rank, with their names in the user's module."""
        return self._parts().named_parameters()

    def local_buffers(self) -> Iterator[Tensor]:
        """Yields buffers of modules that live on this rank."""
        for _, buffer in self._parts().named_buffers():
            yield buffer

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers of modules on this rank, with their names in the user's module."""
        return self._parts().named_buffers()

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that live on this rank."""
        for _, module in self._parts().named_modules():
            yield module

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields modules that live on this rank, with their names in the user's module."""
        return self._parts().named_modules()

    def virtual_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names, and the tensors that an optimizer updates on this rank for parameters.

        These are the parameters themselves, their masters in 16-bit training, and flat parts of
        masters where the state of the optimizer is sharded, once the model is partitioned.
        """
        for name, parameter in self.named_parameters():
            yield name, master_of(parameter)

    # ---- tensor parallelism

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yields modules that are split over tensor-parallel ranks, including nested ones."""
        for module in self.modules():
            if isinstance(module, DistributedModule):
                yield module

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """Returns whether the parameter is split over tensor-parallel ranks."""
        return interval_of(parameter) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Returns whether the buffer is split over tensor-parallel ranks; ours never are."""
        return False

    def is_scaled_batch_parameter(self, parameter: Tensor) -> bool:
        """Returns whether each rank's gradient covers the samples of its tensor-parallel group.

        Then `scaled_batch_reducer_named_parameters` has the parameter. With ``optimize: "memory"``
        norms and biases that all ranks hold are not such: a rank applies them to its part of the
        activations.
        """
        return reduction_of(self._runtime.rank, parameter).kind == "rdp_cp"

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Returns whether the buffer is used on the samples of the whole tensor-parallel group."""
        return any(
            own is buffer for module in self.distributed_modules() for own in module.buffers()
        )

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields local parameters whose gradients are summed over the data-parallel group."""
        for name, parameter in self.local_named_parameters():
            if reduction_of(self._runtime.rank, parameter).kind == "dp_cp":
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields local parameters whose gradients are summed over the RDP group."""
        for name, parameter in self.local_named_parameters():
            if reduction_of(self._runtime.rank, parameter).kind == "rdp_cp":
                yield name, parameter
