"""Checks parameters that need no gradient when gradients are laid out, but may need one later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

import smp._C as _C


class FrozenParameters:
    """The parameters of a rank for which no gradients were laid out.

    A gradient that such a parameter gets in a step is neither averaged over microbatches nor summed
    over replicas. So a thawed parameter is laid out before the next step, or refused.

    Args:
        parameters: names in the whole model, and parameters of this rank.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        self._before: list[tuple[Tensor, int] | None] = []

    def thawed(self) -> str | None:
        """Returns the name of the first parameter that needs a gradient now, or None."""
        return next((name for name, p in self._frozen if p.requires_grad), None)

    def begin_step(self) -> None:
        """Notes the gradients that the parameters have before the step."""
        self._before = [_state(parameter) for _, parameter in self._frozen]

    def check(self) -> None:
        """Raises a ValueError if a parameter got a gradient since the step began."""
        for (name, parameter), before in zip(self._frozen, self._before, strict=False):
            now = _state(parameter)
            if now is not None and (
                before is None or now[0] is not before[0] or now[1] != before[1]
            ):
                raise ValueError(
                    f"{_C.rank_prefix()}parameter '{name}' was frozen when this step began, and "
                    "has got a gradient in it: code of the model or of the step function has "
                    "thawed it meanwhile (requires_grad_(True)). That gradient is neither averaged "
                    "over microbatches nor summed over replicas; thaw parameters between steps, "
                    "on all ranks"
                )


def _state(parameter: nn.Parameter) -> tuple[Tensor, int] | None:
    grad = parameter.grad
    return None if grad is None else (grad, grad._version)


def refuse_thawed(name: str, option: str) -> None:
    """Raises a ValueError: state was laid out without a parameter that was thawed since.

    Args:
        name: name of the parameter.
        option: configuration option for which state is laid out once.
    """
    raise ValueError(
        f"{_C.rank_prefix()}parameter '{name}' was frozen when the model was partitioned, and has "
        f"been thawed since (requires_grad_(True)); with {option} the state of what is trained is "
        "laid out once. Let it require a gradient until the first step is over, and freeze it "
        "then until it is to be trained; or save a checkpoint, and thaw it before "
        "smp.DistributedModel(...) in a job that resumes from there"
    )
