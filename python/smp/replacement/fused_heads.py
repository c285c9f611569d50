"""Finds the heads of a model whose loss can be computed without logits."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

import smp._C as _C
from smp.config.schema import Config
from smp.nn.fused_head import fuse_loss
from smp.nn.lm_head import DistributedTransformerLMHead
from smp.nn.planned.head import PlannedHead
from smp.replacement.plan_cuts import is_model, output_head
from smp.world.log import first_rank_log

_KEY = "fused_linear_cross_entropy"


def fuse_heads(root: nn.Module, config: Config) -> None:
    """Makes the heads of a model compute losses without logits, if the configuration says so.

    Args:
        root: model, after parts of it were replaced.
        config: configuration of the run.

    Raises:
        ValueError: the model has no head for which this is possible.
    """
    if not config.fused_linear_cross_entropy:
        return
    # Gradients that wait for backward, one set per microbatch under way, would take more memory
    # than they save.
    recomputes = config.pipeline_parallel_degree > 1 and config.active_microbatches > 1
    problems: list[str] = []
    fused: list[str] = []
    for name, module in list(root.named_modules()):
        if isinstance(module, DistributedTransformerLMHead) and module.add_lm_head:
            module.lm_head.fuses_loss = True
            fused.append(name or type(module).__name__)
        elif is_model(module) and output_head(module) is not None:
            problem = _problem_of(module)
            if problem is None:
                fuse_loss(module, output_head(module), recomputes)  # type: ignore[arg-type]
                fused.append(name or type(module).__name__)
            else:
                problems.append(f"'{name or type(module).__name__}' {problem}")
    if not fused:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: {_KEY}=True: no head of {type(root).__name__} can "
            f"compute its loss without logits ({'; '.join(problems) or 'none was found'}); set it "
            "to False, or call smp.nn.functional.linear_cross_entropy in your own loss"
        )
    first_rank_log.info("smp: losses are computed without logits: %s", ", ".join(fused))
    if problems:
        first_rank_log.warning("smp: losses are computed from logits: %s", "; ".join(problems))


def _problem_of(model: Any) -> str | None:
    """Returns why the loss of a model of transformers needs logits, as a predicate, or None."""
    head = output_head(model)
    if type(head) not in (nn.Linear, PlannedHead):
        return f"has a {type(head).__name__} as its head; expected nn.Linear"
    if "forward" in head.__dict__:
        return "has a head with a forward of its own, set on the instance"
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__qualname__", "") != "ForCausalLMLoss" or not _is_of_transformers(loss):
        return "has another loss function than ForCausalLMLoss of transformers"
    try:
        text = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):
        text = ""
    if "self.loss_function(" not in text:
        return "does not compute its loss with self.loss_function"
    return None


def _is_of_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "transformers"
