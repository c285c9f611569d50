"""Hooks of the script on parameters, which run once per step, with the gradient of the batch.

A plain script has one backward for its batch. In a step autograd computes terms of its gradients:
one for each microbatch, on each replica. A hook that does more than multiply by constants, such as
clipping, makes another sum of them. So the hooks are taken off parameters while a step runs, and
run at its end, on all replicas. These compare what the hooks have made of gradients, since each
updates its own parameters. Hooks that only look may be on some replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.precision.gradients import gradients_of
from smp.precision.holdings import master_of
from smp.tensor_parallel.sharding import interval_of
from smp.world.log import first_rank_log
from smp.world.rank import Rank

# The attribute of a plain tensor: 16-bit parameters show their master's gradient instead.
_native: Any = torch.Tensor.grad
_Table = dict[int, Callable[[Tensor], Any]]


@dataclass
class _Taken:
    """A parameter whose hooks were taken off.

    Attributes:
        name: name in the whole model.
        parameter: parameter of the user's model.
        tables: tables of PyTorch from which hooks were taken, with these.
        before: gradient of earlier steps, to which that of this step is added.
    """

    name: str
    parameter: nn.Parameter
    tables: list[tuple[_Table, _Table]] = field(default_factory=list)
    before: Tensor | None = None

    def give_back(self) -> None:
        for table, hooks in self.tables:
            table.update(hooks)


class ParameterHooks:
    """Runs hooks of the script on the gradients that a step has computed.

    Args:
        rank: rank of this process.
        trainable: names in the whole model, and parameters of this rank.
        obstacle: reason why no gradient is complete when a step ends; empty: they are.

    Attributes:
        is_needed: whether the next step has hooks to take off, or `look` was not called for it.
        taken: parameters whose hooks are off.
    """

    def __init__(
        self,
        rank: Rank,
        trainable: Sequence[tuple[str, nn.Parameter]] = (),
        obstacle: str = "",
    ) -> None:
        self._rank, self._trainable, self._obstacle = rank, trainable, obstacle
        self._found: list[_Taken] | None = None
        self.is_needed = True
        self.taken: list[_Taken] = []
        self._digests: list[Tensor] = []
        self._may_change = True

    def look(self, num_microbatches: int) -> int:
        """Looks for hooks of the script that the next step is to take off.

        Args:
            num_microbatches: number of microbatches of this rank.

        Returns:
            their number; 0 where the batch has one backward.
        """
        self._found = []
        self.is_needed = False
        if num_microbatches == 1 and self._rank.sizes["dp_cp"] == 1:
            return 0
        with torch._C.DisableTorchFunctionSubclass():
            for name, p in self._trainable:
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    self._find(name, p)
        if not self._found:
            return 0
        self.is_needed = True
        return sum(len(hooks) for taken in self._found for _, hooks in taken.tables)

    def _find(self, name: str, parameter: nn.Parameter) -> None:
        assert self._found is not None
        taken = _Taken(name, parameter)
        for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            hooks = {key: hook for key, hook in (table or {}).items() if not _is_ours(hook)}
            if table is not None and hooks:
                taken.tables.append((table, hooks))
        if taken.tables:
            self._found.append(taken)

    def begin_step(self, num_microbatches: int, may_change: bool = True) -> None:
        """Takes hooks off parameters, unless the batch has one backward.

        Args:
            num_microbatches: number of microbatches of this rank.
            may_change: whether hooks may change gradients, because all replicas have as many.

        Raises:
            RuntimeError: a hook wants ``.grad`` after its accumulation, and this rank never has the
                gradient of the whole parameter.
        """
        if self._found is None:
            self.look(num_microbatches)
        found, self._found, self.is_needed = self._found or [], None, True
        self._may_change, self._digests = may_change, []
        for taken in found:
            self._take(taken)

    def _take(self, taken: _Taken) -> None:
        if obstacle := self._obstacle_of(taken.parameter):
            self._tell(taken, obstacle)
            return
        for table, hooks in taken.tables:
            for key in hooks:
                del table[key]
        target = master_of(taken.parameter)
        before = _native.__get__(target)
        if before is not None:
            taken.before = before.clone()
            _native.__set__(target, None)
        self.taken.append(taken)

    def _obstacle_of(self, parameter: nn.Parameter) -> str:
        is_split = interval_of(parameter) is not None
        return self._obstacle or ("ranks have slices (tensor parallelism)" if is_split else "")

    def _tell(self, taken: _Taken, obstacle: str) -> None:
        if any(table is taken.parameter._post_accumulate_grad_hooks for table, _ in taken.tables):
            raise RuntimeError(
                f"{_C.rank_prefix()}parameter '{taken.name}' has a hook of "
                f"register_post_accumulate_grad_hook, but no complete gradient: {obstacle}. Do "
                "what the hook does behind the step, or leave this key of the configuration out"
            )
        if first_rank_log.is_new(ParameterHooks):
            first_rank_log.warning(
                "smp: hooks on gradients of parameters (such as of '%s') run once per microbatch, "
                "before sums over ranks, because %s. Hooks that do more than multiply by constants "
                "(clip, normalize) give other gradients than on the whole batch",
                taken.name,
                obstacle,
            )

    def end_step(self) -> None:
        """Runs hooks on the gradients of the step, which are reduced."""
        done, self.taken = self.taken, []
        for taken in done:
            taken.give_back()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for taken in done:
                self._run(taken)

    def _run(self, taken: _Taken) -> None:
        parameter, target = taken.parameter, master_of(taken.parameter)
        grad: Tensor | None = _native.__get__(target)
        if grad is None:
            _native.__set__(target, taken.before)
            return
        after = [h for table, h in taken.tables if table is parameter._post_accumulate_grad_hooks]
        version = grad._version
        for _, hooks in taken.tables[: len(taken.tables) - len(after)]:
            self._change(taken.name, target, grad, hooks)
        self._check_change(taken.name, grad._version == version)
        if taken.before is not None:
            grad.add_(taken.before)
        version = grad._version
        for hooks in after:
            for hook in hooks.values():
                hook(parameter)
        now: Tensor | None = _native.__get__(target)
        self._check_change(taken.name, now is grad and grad._version == version)
        if now is not None and self._rank.sizes["dp_cp"] > 1:
            words = now.detach().reshape(-1).view(torch.int16)
            self._digests.append(words.sum(dtype=torch.int64))

    def _change(self, name: str, target: Tensor, grad: Tensor, hooks: _Table) -> None:
        gradients = gradients_of(target)
        scale = 1.0 if gradients is None else gradients.scale_now
        value = given = grad if isinstance(scale, float) and scale == 1.0 else grad / scale
        version = given._version
        for hook in hooks.values():
            changed = hook(value)
            if changed is None:
                continue
            if not isinstance(changed, Tensor) or changed.shape != grad.shape:
                what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed)
                raise RuntimeError(
                    f"{_C.rank_prefix()}a hook on the gradient of '{name}' has to return a tensor "
                    f"of shape {tuple(grad.shape)}, or None; it returned {what}"
                )
            value = changed
        if value is not given or (given is not grad and given._version != version):
            grad.copy_(value * scale)

    def _check_change(self, name: str, is_same: bool) -> None:
        if not (is_same or self._may_change):
            raise RuntimeError(
                f"{_C.rank_prefix()}a hook changes the gradient of '{name}', and not all replicas "
                "have as many hooks on gradients, or model.join is on, so that their parameters "
                "might differ; register it on all ranks, and not in join"
            )

    def digest(self) -> int:
        """Returns a digest of the gradients of the last step after hooks. Waits for a device."""
        return int(torch.stack(self._digests).sum()) if self._digests else 0

    def abandon_step(self) -> None:
        """Gives hooks and earlier gradients back after a step that failed."""
        done, self.taken = self.taken, []
        for taken in done:
            taken.give_back()
            if taken.before is not None:
                _native.__set__(master_of(taken.parameter), taken.before)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of functools.partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] == "smp"
