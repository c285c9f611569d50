"""Checks that only the library changes gradients, and what they are laid out for, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.precision.holdings import master_of

# The attribute of a plain tensor: 16-bit parameters show their master's gradient instead.
_native: Any = torch.Tensor.grad
_native_grad = _native.__get__


class LaidOutParameters:
    """The parameters of a rank when gradients are laid out.

    The library owns gradients until a step is over: it averages them over all microbatches, and
    sums them over replicas. Code of the model or of the step function must not

    * assign or drop ``.grad``: it would cover one microbatch only, or lose earlier microbatches;
    * change a dtype: the parameter has another node in autograd then, whose gradients the reducers
      do not get;
    * thaw a parameter: a gradient that has no place in the layout is neither averaged nor summed.
      A parameter that is thawed between steps is laid out before the next one, or refused.

    Args:
        parameters: names in the whole model, and parameters of this rank.

    Attributes:
        frozen: parameters that need no gradient.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]] = ()) -> None:
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        self.frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        self._dtypes = [(name, p, p.dtype) for name, p in trained]
        owned = {id(t): (name, t) for name, p in trained for t in (p, master_of(p))}
        self._owned = [tensor for _, tensor in owned.values()]
        self._names = [name for name, _ in owned.values()]
        self._before: list[Tensor | None] = []
        self._frozen_before: list[tuple[Tensor, int] | None] = []

    def thawed(self) -> str | None:
        """Returns the name of the first parameter that needs a gradient now, or None."""
        return next((name for name, p in self.frozen if p.requires_grad), None)

    def begin_step(self) -> None:
        """Notes the present gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            self._before = list(map(_native_grad, self._owned))
            if self.frozen:
                self._frozen_before = [_state(parameter) for _, parameter in self.frozen]

    def check(self) -> None:
        """Checks gradients and parameters at the end of a step.

        Raises:
            ValueError: a dtype has changed, or a parameter was thawed and has got a gradient.
            RuntimeError: a gradient is another tensor than before.
        """
        before, self._before = self._before, []  # frees the noted gradients
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, dtype in self._dtypes:
                if parameter.dtype != dtype:
                    _refuse_dtype(name, parameter.dtype, dtype)
            for (name, parameter), then in zip(self.frozen, self._frozen_before, strict=False):
                now = _state(parameter)
                if now is not None and (then is None or now[0] is not then[0] or now[1] != then[1]):
                    _refuse_gradient_of_frozen(name)
            for name, tensor, grad in zip(self._names, self._owned, before, strict=False):
                if _native_grad(tensor) is not grad:
                    _refuse_assigned(name)

    def forget(self) -> None:
        """Forgets the noted gradients of a step that failed."""
        self._before = []


def _state(parameter: nn.Parameter) -> tuple[Tensor, int] | None:
    grad = _native_grad(parameter)
    return None if grad is None else (grad, grad._version)


def _refuse_dtype(name: str, now: torch.dtype, laid_out: torch.dtype) -> NoReturn:
    module = name.rpartition(".")[0]
    raise ValueError(
        f"{_C.rank_prefix()}parameter '{name}' has dtype {now}, and had {laid_out} when its "
        "gradients were laid out: code of the model has converted it since, as routers do with "
        f"self.{module.rpartition('.')[2]}.to(...). Its gradients would be wrong. Convert the "
        f"module before smp.DistributedModel(...): model.get_submodule('{module}').to({now}); with "
        "bf16 or fp16 in the configuration parameters have to keep the dtype that training gives "
        "them"
    )


def _refuse_gradient_of_frozen(name: str) -> NoReturn:
    raise ValueError(
        f"{_C.rank_prefix()}parameter '{name}' was frozen when this step began, and has got a "
        "gradient in it: code of the model or of the step function has thawed it meanwhile "
        "(requires_grad_(True)). That gradient is neither averaged over microbatches nor summed "
        "over replicas; thaw parameters between steps, on all ranks"
    )


def _refuse_assigned(name: str) -> NoReturn:
    raise RuntimeError(
        f"{_C.rank_prefix()}.grad of '{name}' was assigned, or dropped, inside of a step. A step "
        "function runs once per microbatch, and gradients are averaged over these and summed over "
        "replicas when it has returned: reset them before it, and change them after it. Gradients "
        "of torch.autograd.grad are those of one microbatch of this rank; use model.backward(loss)"
    )
