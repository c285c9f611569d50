"""Optimizers of PyTorch over parameters of distributed models, and over others beside them.

A script may update a pipeline with an optimizer that it has not wrapped: each rank has gradients of
its own parameters. If masters or pieces are updated instead of them, such an optimizer would find
no gradient and train nothing, without an error; it is refused.

An optimizer may also have parameters that no distributed model has: weights of several losses, a
criterion with centers. Their gradients would be sums over the microbatches of one rank, whereas
those of a model are means over the batch of all replicas. The first gradient that arrives shows
whether they take part in a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

import smp._C as _C
from smp.model.torch_training.coupling import refuse_parts
from smp.model.torch_training.known import known_parameters
from smp.precision.holdings import master_of, model_parameter_of, parameters_of
from smp.tensor_parallel.sharding import replaced_name
from smp.world import runtime
from smp.world.wrapped import Numbered


class TorchOptimizers:
    """Looks at optimizers that a script uses while models are wrapped.

    Args:
        current: the runtime, whose models and optimizers count.

    Attributes:
        own: unwrapped optimizers of models that have made an update.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._rank, self._wrapped, self._steps = current.rank, current.wrapped, current.steps
        self._tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.own: Numbered[torch.optim.Optimizer] = Numbered()
        self._strangers: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
        handle = register_optimizer_step_pre_hook(self._before_update)
        current.on_shutdown(handle.remove)
        current.on_shutdown(self._forget)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watches for gradients of steps that arrive at parameters which no model has.

        Args:
            optimizer: optimizer of PyTorch, with its present groups.
        """
        rank = self._rank
        if rank.world_size == 1 and rank.config.microbatches == 1:
            return  # the gradients are those of one process
        known = known_parameters(self._wrapped)
        for number, tensor in enumerate(parameters_of(optimizer)):
            is_known = id(model_parameter_of(tensor)) in known
            if not is_known and tensor.requires_grad and tensor not in self._strangers:
                hook = self._on_gradient(type(optimizer).__name__, number)
                self._strangers[tensor] = tensor.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, optimizer: str, number: int) -> Callable[[Tensor], None]:
        def arrived(tensor: Tensor) -> None:
            step = self._steps.running
            if step is None or id(tensor) in known_parameters(self._wrapped):
                return
            raise RuntimeError(
                f"{_C.rank_prefix()}the loss of step '{step}' depends on parameter {number} of "
                f"{optimizer}, of shape {tuple(tensor.shape)}, which no DistributedModel has: its "
                "gradient would be the sum over the microbatches of this rank, and not the mean "
                "over the batch of all replicas. Put the module that has it (a loss with "
                "parameters) and the model into one module, and wrap that; or wrap it in a "
                "DistributedModel of its own; or leave it out of the optimizer"
            )

        return arrived

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for wrapper in self._wrapped.optimizers:
            if wrapper.optimizer is optimizer:
                return
        refuse_replaced(optimizer)
        known = known_parameters(self._wrapped)
        own = [p for p in parameters_of(optimizer) if id(p) in known]
        if own:
            self._check_own(optimizer, own)
        elif self._steps.running is not None:
            return  # a small net of the script's own, which learns by itself
        if optimizer not in self._tried:
            self._tried.add(optimizer)
            if own:
                refuse_parts(self._rank, optimizer)
                self.own.add(optimizer)
            self.watch(optimizer)

    def _check_own(self, optimizer: torch.optim.Optimizer, own: Sequence[Tensor]) -> None:
        self._steps.refuse_inside("optimizer.step")
        if any(master_of(p) is not p for p in own):
            raise RuntimeError(
                f"{_C.rank_prefix()}{type(optimizer).__name__} has parameters of a "
                "DistributedModel of which this rank updates pieces, or copies in 32 bits, so it "
                "would find no gradient and train nothing; wrap it: "
                "smp.DistributedOptimizer(optimizer)"
            )

    def _forget(self) -> None:
        for handle in self._strangers.values():
            handle.remove()
        self._strangers.clear()


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError for parameters of modules that split ones have replaced."""
    names = [name for p in parameters_of(optimizer) if (name := replaced_name(p)) is not None]
    if names:
        raise ValueError(
            f"{_C.rank_prefix()}the optimizer holds {len(names)} parameters, '{names[0]}' among "
            "them, of modules that distributed ones have replaced; make it from the parameters of "
            "the DistributedModel"
        )
