"""Members of `DistributedModel` that tell where its parameters, buffers and modules are."""

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
    """Mixed into `DistributedModel`; ``local_*`` are valid from the partition on."""

    _parts: Callable[[], ModelParts]
    _runtime: runtime.Runtime

    def is_local_parameter(self, parameter: Tensor) -> bool:
        """Does this parameter live on this rank?"""
        return self._parts().is_local_parameter(parameter)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that live on this rank."""
        for _, parameter in self._parts().named_parameters():
            yield parameter

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as in the user's module, and parameters that live on this rank."""
        return self._parts().named_parameters()

    def local_buffers(self) -> Iterator[Tensor]:
        """Buffers of modules that live on this rank."""
        for _, buffer in self._parts().named_buffers():
            yield buffer

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in the user's module, and buffers of modules that live on this rank."""
        return self._parts().named_buffers()

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that live on this rank."""
        for _, module in self._parts().named_modules():
            yield module

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names as in the user's module, and modules that live on this rank."""
        return self._parts().named_modules()

    def virtual_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names, and what an optimizer updates on this rank in the place of parameters.

        These are the parameters themselves, their masters in 16-bit training, and flat parts of
        masters where the state of the optimizer is sharded, once the model is partitioned.
        """
        for name, parameter in self.named_parameters():
            yield name, master_of(parameter)

    # ---- tensor parallelism

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules that are split over tensor-parallel ranks, those inside of others too."""
        for module in self.modules():
            if isinstance(module, DistributedModule):
                yield module

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """Is the parameter split over tensor-parallel ranks?"""
        return interval_of(parameter) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Is the buffer split over tensor-parallel ranks? None of this library is."""
        return False

    def is_scaled_batch_parameter(self, parameter: Tensor) -> bool:
        """Does its gradient cover the samples of the whole tensor-parallel group on each rank?

        It is then one of `scaled_batch_reducer_named_parameters`. With ``optimize: "memory"`` norms
        and biases that all ranks hold are not: a rank applies them to its part of the activations.
        """
        return reduction_of(self._runtime.rank, parameter).kind == "rdp"

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Is it used on the samples of the whole tensor-parallel group?"""
        return any(
            own is buffer for module in self.distributed_modules() for own in module.buffers()
        )

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters whose gradients are summed over the data-parallel group."""
        for name, parameter in self.local_named_parameters():
            if reduction_of(self._runtime.rank, parameter).kind == "dp":
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters whose gradients are summed over the reduced-data-parallel group."""
        for name, parameter in self.local_named_parameters():
            if reduction_of(self._runtime.rank, parameter).kind == "rdp":
                yield name, parameter
