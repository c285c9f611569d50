"""Forward and backward of a model as a whole, with and without a pipeline."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.activations.saved_tensors import offloading
from smp.model.backward_roots import (
    is_one,
    listed,
    run_backward,
    torch_backward,
    weighted,
)
from smp.model.engine import Engine
from smp.model.loss_parts import refuse_parts
from smp.model.pipeline_place import PipelinePlace
from smp.model.root_call import RootCall
from smp.model.share import current_share
from smp.modules.watching import unwatched
from smp.pipeline import resolve
from smp.pipeline.module_state import Running, running
from smp.pipeline.remote_tensor import RemoteTensor
from smp.world import runtime


class ModelCalls:
    """Runs the root of a model, or waits for the rank that does.

    Args:
        current: the runtime.
        engine: engine of the model.
        root: the user's model.
    """

    def __init__(self, current: runtime.Runtime, engine: Engine, root: nn.Module) -> None:
        self._runtime = current
        self._engine = engine
        self._root = root
        around = offloading(current)
        self._forward: Callable[..., Any] = root if around is None else around(root)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs `DistributedModel.forward`."""
        if self._engine.on_next_call is not None:
            self._engine.on_next_call(args, dict(kwargs))
        if self._engine.capture is not None:
            self._engine.compiled.take()
            on_call = functools.partial(self._engine.capture.on_call, self._root)
            return self._root_call(args, kwargs).run(lambda *a, **k: on_call(a, k))
        place = self._engine.pipeline
        if place is None:
            if self._runtime.rank.sizes["pp"] > 1:
                self._raise_outside_step("called")
            return self._forward_alone(args, kwargs)
        return self._forward_in_pipeline(place, args, kwargs)

    def _forward_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._engine.refuse_whole()
        if not self._engine.joins_step:
            if self._runtime.rank.keepers:  # layers communicate, or parameters are gathered
                self._runtime.rank.check_process("a forward outside of a step function")
            self._engine.settle()
            if torch.is_grad_enabled():
                self._engine.lay_out_thawed()
        with unwatched(), self._engine.mask_places.outside_of_steps():
            output = self._root_call(args, kwargs).run(self._forward)
        if self._engine.batch_pass is not None:
            return self._engine.batch_pass.on_output(self._engine.idx, output)
        self._note_output(output)
        if self._engine.uneven is not None:
            self._engine.uneven.watch(output)
        return output

    def _forward_in_pipeline(
        self, place: PipelinePlace, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        self._check_in_step("called")
        share = current_share()
        assert share is not None
        call = self._root_call(args, kwargs)
        if not place.is_driver:
            called_idx, output, share.weight, filled = place.modules.await_output()
            if self._engine.batch_pass is not None:
                self._engine.batch_pass.follow(called_idx)
            if called_idx != self._engine.idx:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the step function calls model {self._engine.label} "
                    f"here, but model {called_idx} on the first pipeline rank; all ranks of a "
                    f"replica call their models in one order ({self._runtime.wrapped.candidates})"
                )
            return call.settle(filled, output)
        with running(Running.BODY):
            forward = self._forward
            for around in self._runtime.observers.call:
                forward = around(self._engine, forward)
            output = call.run(forward)
        self._note_output(output)
        place.modules.publish_output((self._engine.idx, output, share.weight, call.filled))
        if self._engine.batch_pass is not None:
            return self._engine.batch_pass.on_output(self._engine.idx, output)
        return output

    def _note_output(self, output: Any) -> None:
        self._engine.loss.watch_backward(output)
        share = current_share()
        if share is not None and torch.is_grad_enabled():
            share.note_outputs(output)

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None,
    ) -> None:
        """Runs `DistributedModel.backward`."""
        if self._engine.capture is not None:
            self._engine.capture.on_backward()
            return
        roots, grads = listed(self._runtime.rank.ranks["pp"], tensors, grad_tensors)
        place = self._engine.pipeline
        if self._engine.batch_pass is not None:
            if place is None or place.is_driver:
                self._engine.batch_pass.on_backward(roots, grads)
            return
        if place is None and self._runtime.rank.sizes["pp"] > 1:
            self._raise_outside_step("run backward")
        if place is None or place.is_driver:
            for see in self._runtime.observers.backward:
                see(self._engine, roots)
            refuse_parts(self._runtime, roots)
        if place is None:
            self._backward_alone(roots, grads)
        else:
            self._backward_in_pipeline(place, roots, grads)

    def _backward_alone(
        self, tensors: list[Tensor], grad_tensors: list[Tensor | None] | None
    ) -> None:
        timeline = self._runtime.timeline
        if timeline.is_on and self._engine.running_mb is not None:  # another box in the timeline
            timeline.end_run()
            timeline.begin_run(True, self._engine.running_mb)
        factor = self._engine.loss.at_root()
        if self._engine.loss.skips(factor):
            return
        if not is_one(factor):
            tensors, grad_tensors = weighted(tensors, grad_tensors, factor, False)
        with unwatched(), self._runtime.steps.scaling_loss(), _share_of_backward():
            torch_backward(tensors, grad_tensors)

    def _backward_in_pipeline(
        self,
        place: PipelinePlace,
        tensors: list[Tensor],
        grad_tensors: list[Tensor | None] | None,
    ) -> None:
        self._check_in_step("run backward")
        server = place.server
        if not server.is_driver:
            server.await_backward()
            return
        factor = self._engine.loss.at_root()
        # A rank that waits for no forward need not wait for the value of a loss on another rank:
        # the owner of the loss runs the backward right after it. In some schedules all forwards
        # come first.
        ahead = not _C.make_policy(self._runtime.rank.config.pipeline).forwards_come_first
        if ahead or not is_one(factor):
            tensors, grad_tensors = weighted(tensors, grad_tensors, factor, ahead)
        for root in () if ahead else tensors:  # its forward is over when the loss is there
            if isinstance(root, RemoteTensor):
                root.wait()
        server.begin_backward()
        if not self._engine.loss.skips(factor):
            with self._runtime.steps.scaling_loss(), _share_of_backward():
                run_backward(tuple(resolve(root) for root in tensors), grad_tensors)
        server.end_backward()

    def _check_in_step(self, what: str) -> None:
        if not self._engine.in_step():
            self._raise_outside_step(what)
        if not self._engine.joins_step:
            raise RuntimeError(
                f"{_C.rank_prefix()}the model ({self._engine.label}) is {what} here but was "
                "deleted on another replica; delete models on all ranks, or on none"
            )

    def _raise_outside_step(self, what: str) -> NoReturn:
        step = self._runtime.steps.running
        if step is not None and not self._engine.partitioned:
            raise RuntimeError(
                f"{_C.rank_prefix()}the model ({self._engine.label}) is {what} in step '{step}', "
                "whose first call did not use it, and it is not partitioned yet; call it in the "
                "first call (smp.is_tracing() is True while it is traced), or use it in a step "
                "function of its own"
            )
        raise RuntimeError(
            f"{_C.rank_prefix()}the model is {what} outside of a step function; with "
            f"pipeline_parallel_degree {self._runtime.rank.sizes['pp']} forward and backward "
            "belong in a function decorated with @smp.step"
        )

    def _root_call(self, *arguments: Any) -> RootCall:
        casts = self._runtime.rank.config.half_dtype is not None
        if casts and (self._engine.partitioned or self._is_cast()):
            self._engine.operands.look_at(arguments)
        return RootCall(arguments, self._runtime.rank.device, casts)

    def _is_cast(self) -> bool:
        """Returns whether the script has made the model in 16 bits."""
        dtypes = (p.dtype for p in self._root.parameters() if p.is_floating_point())
        return next(dtypes, None) in (torch.float16, torch.bfloat16)


def _share_of_backward() -> contextlib.AbstractContextManager[None]:
    share = current_share()
    return contextlib.nullcontext() if share is None else share.backward()
