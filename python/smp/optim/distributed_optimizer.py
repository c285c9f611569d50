"""``smp.DistributedOptimizer``: an optimizer whose parameters are spread over ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp import precision
from smp.model import DistributedModel, engine_of
from smp.model.engine import Engine
from smp.model.join_shards import announce
from smp.model.torch_training.optimizers import refuse_replaced
from smp.modules.watching import unwatched
from smp.optim.fused_step import FusedUpdates
from smp.optim.masters import adopt_masters, choose_storage, holdings_of
from smp.optim.script_wrappers import take_apart
from smp.optim.state import OptimizerState
from smp.optim.v1_names import LegacyNames
from smp.optim.whole_tensors import WholeTensors
from smp.optim.written import WrittenMasters
from smp.precision import LossScaler, ScaledGradients, StaticLossScaler, grad_norm
from smp.precision.holdings import model_parameter_of, parameters_of, reload_masters, updates_some
from smp.world import runtime
from smp.world.device_numbers import DeviceFlag


class DistributedOptimizer(LegacyNames, torch.optim.Optimizer):
    """Wraps an optimizer over the parameters of a :class:`DistributedModel`, or of the plain model.

    Behaves like the wrapped optimizer and shares its ``param_groups`` and ``state``. Each rank
    updates the parameters that it holds; all others have no gradient and do not change.

    With 16-bit or sharded parameters the groups hold the tensors that this rank updates instead
    (masters) as soon as their model is partitioned; learning-rate schedulers may be made of this
    optimizer or of the wrapped one. With ``fp16: True`` the loss is scaled: `model.backward` takes
    the unscaled loss, and an update whose gradients are not finite is skipped on all ranks.

    Where an optimizer reads whole tensors (Muon) and ranks hold parts, an owner updates each tensor
    (key ``optimizer_state``); making such an optimizer and adding groups to it are collective.

    Norms, loss scales and the check for infinite gradients stay on the device. The fused optimizers
    of `smp.optimizers` and ``torch.optim.Adam(fused=True)`` also skip there, so the host does not
    wait in a training step unless it reads `overflow`, `loss_scale`, `step_was_skipped` or a norm.
    Other optimizers cannot skip: with ``fp16: True``, :meth:`step` waits once.

    Args:
        optimizer: a ``torch.optim.Optimizer``. Wrapping the result of an earlier call wraps the
            optimizer inside of it. An FP16 optimizer of the script's own (apex, and scripts before
            1.10) passes on its optimizer and its loss scale, and is replaced by this one.
        static_loss_scale: factor of the loss; None means 1. This argument and the next two have
            no effect except in fp16 training.
        dynamic_loss_scale: whether the scale follows overflows instead.
        dynamic_loss_args: arguments of the dynamic scale
            (:class:`smp.precision.DynamicLossScaler`). Its entries may also be given as
            keywords.

    Raises:
        ValueError: no optimizer; unknown loss scale arguments; the module of a parameter was
            replaced; a key needs `FusedAdam`; the optimizer needs several whole tensors, or has a
            class of its own for its state; an FP16 optimizer of the script without ``fp16: True``.
    """

    # Accelerate does not wrap such an optimizer, and asks it whether a step was skipped.
    _is_accelerate_prepared = True

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **loose_loss_args: Any,
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are those of the wrapped
        # optimizer.
        current = runtime.current()
        whole = None
        if isinstance(optimizer, DistributedOptimizer):
            whole, optimizer = optimizer.whole_tensors, optimizer.optimizer
        loss_args = {**(dynamic_loss_args or {}), **loose_loss_args}
        own = take_apart(optimizer, current.rank.config.fp16)
        if own is not None:
            optimizer, loss_args = own.optimizer, own.loss_args
            static_loss_scale, dynamic_loss_scale = own.loss_scale, own.is_dynamic
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{_C.rank_prefix()}DistributedOptimizer wraps a torch.optim.Optimizer, got a "
                f"{type(optimizer).__name__}"
            )
        scaler = precision.make_loss_scaler(
            static_loss_scale, dynamic_loss_scale, loss_args, current.rank.device
        )
        refuse_replaced(optimizer)
        self.whole_tensors: WholeTensors = whole or WholeTensors(current.rank, optimizer)
        choose_storage(optimizer, current.rank.config)
        self.optimizer = optimizer
        self._is_scaled = current.rank.config.fp16
        self._loss_scaler: LossScaler = scaler if self._is_scaled else StaticLossScaler()
        # The runtime does not keep this object alive.
        self._runtime, self._rank = current, current.rank
        self._gradients = ScaledGradients(
            current.rank, optimizer, self.loss_scaler, is_scaled=self._is_scaled
        )
        self._fused = FusedUpdates(current.rank, optimizer)
        self._skipped = DeviceFlag()
        self._num_reductions = 0  # reductions of the models' gradients at the end of the last step
        #: norm of the gradients before clipping in the last update with sharded data parallelism
        self._global_grad_norm: Tensor | None = None
        self._pending_load: dict[str, Any] | None = None
        self.first_closure_call_this_step = True
        self._use_masters()
        current.wrapped.add_optimizer(self)

    # ---- as the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the wrapped optimizer, which schedulers and users may change."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the wrapped optimizer's groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        found = getattr(self.optimizer, name)
        return self._watched(found) if inspect.ismethod(found) else found

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a method of the wrapped optimizer; its writes to parameters reach the model."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._written.digest()
            result = method(*args, **kwargs)
            if self._written.digest() != before:
                self._spread(self._engines())
            return result

        return run

    def _spread_written(self) -> None:
        """Copies values that the script has written to masters or pieces into the model.

        Collective like :meth:`step` if the script has written any.
        """
        if self._written.is_new():
            if self._runtime.wrapped.uneven is not None:
                self._runtime.wrapped.uneven.refuse("writing to parameters")
            self._spread(self._engines())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; the same one on every rank."""
        self.optimizer.add_param_group(param_group)
        self._use_masters()

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """Resets the gradients of all parameters.

        Args:
            set_to_none: whether to drop them instead of writing zeros.
            set_grads_to_None: another name of ``set_to_none``, which has precedence if given.

        Raises:
            RuntimeError: inside of a step function.
        """
        self._runtime.steps.refuse_inside("optimizer.zero_grad", "in front of")
        if set_grads_to_None is not None:
            set_to_none = set_grads_to_None
        self._runtime.wrapped.note_dropped()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._gradients_used(self._engines())

    # ---- updating

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters of this rank. Call it outside of the step function.

        Collective over the ranks that hold one copy of a sharded state. With sharded data
        parallelism gradients are clipped here, and it is also collective over a replica.

        Args:
            closure: function that recomputes the loss, for optimizers that need it. It cannot be
                used with a dynamic loss scale.

        Returns:
            result of the wrapped optimizer; None if the update is skipped.

        Raises:
            ValueError: closure with a dynamic loss scale.
            RuntimeError: gradients made by a closure are not finite, or a step function is
                running.
        """
        theirs = self.optimizer
        # Hooks are code of the script, whose writes to parameters elsewhere are noticed.
        has_hooks = theirs._optimizer_step_pre_hooks or theirs._optimizer_step_post_hooks
        with unwatched(not has_hooks):
            self._runtime.steps.refuse_inside("optimizer.step")
            self._load_pending()
            if self._runtime.wrapped.uneven is not None:
                if closure is not None:
                    self._runtime.wrapped.uneven.refuse("optimizer.step with a closure")
                announce(self, "step")
            self._rank.check_sums()
            engines = self._engines()
            if self._is_scaled:
                self._check_scale(engines)
            result = self._step_without(engines) if closure is None else self._step_with(closure)
            if self._runtime.verification is not None:
                self._runtime.verification.updated(self)
            return result

    def _step_without(self, engines: Sequence[Engine]) -> Any:
        self._gradients.check()
        overflow = self._skipped = self._gradients.overflow
        result = None
        if not self._is_scaled or self._fused.skips or not overflow:
            try:
                result = self._update(engines)
            except Exception as error:
                for see in self._runtime.observers.failed:
                    see("the update of the optimizer", error)
                raise
        if self._is_scaled:
            self._loss_scaler.update_scale(False if overflow.number is None else overflow.number)
        self._gradients_used(engines, are_applied=True)
        return result

    @property
    def step_was_skipped(self) -> bool:
        """True if the last update was skipped. Waits for the device in fp16 training."""
        return bool(self._skipped)

    def _gradients_used(self, engines: Sequence[Engine], are_applied: bool = False) -> None:
        self._runtime.steps.has_gradients = False
        if are_applied:
            self._runtime.steps.missed_at = None
        self._gradients.used(are_applied)
        if self._is_scaled:
            self._num_reductions = _num_reductions(engines)

    def _check_scale(self, engines: Sequence[Engine]) -> None:
        """Raises unless its models use this scale; the last wrapped optimizer sets it."""
        for engine in engines:
            if engine.loss.scaler is self._loss_scaler:
                continue
            scale = engine.loss.scale  # with several optimizers the host has to wait
            if scale != self.loss_scale:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the loss scale of this optimizer is {self.loss_scale:g}, "
                    f"but its model scales losses by {scale:g}, as set by another "
                    "DistributedOptimizer; give all of them the same static_loss_scale, or put the "
                    "parameters into one"
                )

    def _update(self, engines: Sequence[Engine]) -> Any:
        """Applies gradients, and passes the update on to the models."""
        result, fused = None, self._fused
        if fused.divides:
            self._take_given_scale()
        self._clip_shards()
        whole = self.whole_tensors
        if whole.has_some:
            if not fused.divides:
                self._gradients.divide()
            whole.gather()
            whole.show()
        try:
            has_local = self._has_local()  # some optimizers cannot work on nothing
            if fused.divides:
                result = fused.step(
                    self._gradients.divisor,
                    self._gradients.overflow.number if fused.skips else None,
                    has_local=has_local,
                    given_found_inf=vars(self).get("found_inf"),  # see _take_given_scale
                )
            elif has_local:
                if not whole.has_some:
                    self._gradients.divide()
                result = self.optimizer.step()
        finally:
            if whole.has_some:
                whole.hide()
        if whole.has_some:
            whole.spread()
        self._spread(engines, fused.writes_copies)
        return result

    def _take_given_scale(self) -> None:
        """Takes over the scale that torch's GradScaler leaves here for optimizers that divide.

        Code that reads gradients before them needs it, and it must not count twice.
        """
        given = vars(self).get("grad_scale")
        if given is not None:
            self._gradients.scaled_by(given)
            self.grad_scale = None  # the scaler deletes the attribute

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if self.loss_scaler.is_dynamic:
            raise ValueError(
                f"{_C.rank_prefix()}a closure cannot be called again after an overflow, which "
                "occurs with a dynamic loss scale; use static_loss_scale, or step() without closure"
            )
        self.first_closure_call_this_step = True

        def evaluate() -> Any:
            self.whole_tensors.hide()
            if not self.first_closure_call_this_step:
                self.whole_tensors.spread()
                self._spread(self._engines())  # changes by the optimizer between two calls
            self.first_closure_call_this_step = False
            self._gradients.used()
            with torch.enable_grad():
                loss = closure()
            self._gradients.check()
            if self.overflow:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the gradients of the closure with loss scale "
                    f"{self.loss_scale:g} are not finite; use a smaller static_loss_scale"
                )
            self._clip_shards()
            self._gradients.divide()
            self.whole_tensors.gather()
            self.whole_tensors.show()
            return loss

        self.whole_tensors.show()
        try:
            result = self.optimizer.step(evaluate) if self._has_local() else evaluate()
        finally:
            self.whole_tensors.hide()
        self.whole_tensors.spread()
        engines = self._engines()  # the closure may have partitioned a model
        self._spread(engines)
        self._loss_scaler.update_scale(False)
        self._gradients_used(engines, are_applied=True)
        return result

    def _spread(self, engines: Sequence[Engine], are_written: bool = False) -> None:
        """Brings masters into the models, here and on other ranks.

        Args:
            engines: engines of the partitioned models.
            are_written: whether the optimizer has left copies of masters in the models.
        """
        self._written.spread(are_written)
        for engine in engines:
            engine.after_update()

    def _has_local(self) -> bool:
        """Returns whether there is something to update; before the partition all is local."""
        groups = self.optimizer.param_groups
        return not all(self._remote.issuperset(group["params"]) for group in groups)

    def _use_masters(self) -> None:
        """Replaces parameters of partitioned models by masters. Collective where parts are new."""
        self.whole_tensors.look_at_groups()
        adopt_masters(self.optimizer, self.whole_tensors.in_groups)
        self._written = WrittenMasters(self.optimizer)
        self._gradients.attach()
        if self._runtime.torch_optimizers is not None:
            self._runtime.torch_optimizers.watch(self.optimizer)
        engines = self._engines()
        parts = [engine.parts for engine in engines if engine.parts is not None]
        self._remote = {p for part in parts for p in part.remote_parameters()}
        self.whole_tensors.lay_out(
            lambda p: any(part.is_local_parameter(model_parameter_of(p)) for part in parts)
        )
        for engine in engines:
            engine.update_with(self._fused, self._loss_scaler if self._is_scaled else None)

    def _step_done(self) -> None:
        """Ends a training step. Collective over the ranks that skip together."""
        before = self._num_reductions
        if self._is_scaled:
            self._num_reductions = _num_reductions(self._engines())
        self._gradients.step_done(before != self._num_reductions)

    # ---- loss scale

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in fp16 training, else 1. Waits for the device if it is dynamic."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.loss_scale = float(value)

    overflow = LegacyNames.overflow
    update_master_grads = LegacyNames.update_master_grads
    inspect_master_grad_data = LegacyNames.inspect_master_grad_data

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs ``model.backward(loss)`` on the model whose parameters these are.

        Args:
            loss: loss without a loss scale.
            update_master_grads: no effect. In either case masters have their gradients when the
                step function is over. They lose the loss scale when they are read, as in
                :meth:`update_master_grads` and :meth:`step`.
            retain_graph: False; nothing else is supported.

        Raises:
            ValueError: for ``retain_graph=True``.
            RuntimeError: the parameters are not those of one model.
        """
        if retain_graph:
            raise ValueError(
                f"{_C.rank_prefix()}optimizer.backward: retain_graph=True is not supported; add up "
                "the losses that share a graph, and call backward once"
            )
        models = self._models()
        if len(models) != 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}the optimizer has parameters of {len(models)} models; call "
                "model.backward(loss) of the model to train"
            )
        models[0].backward(loss)

    # ---- clipping

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of all groups to a norm over the whole model.

        Call it between the step call and :meth:`step`. Collective over the ranks of a replica (the
        MP group), and over the ranks that hold one copy of a sharded state.

        Returns:
            the norm before clipping, a tensor on the device as from :func:`smp.clip_grad_norm_`; -1
            if the gradients are not finite in fp16 training.
        """
        announce(self, "clip_master_grads", max_norm, norm_type)
        self._gradients.check()
        norm = self._clip(max_norm, norm_type)
        found_inf = self._gradients.overflow.number
        return norm if found_inf is None else norm.masked_fill(found_inf != 0, -1.0)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips like :meth:`clip_master_grads`, but returns infinite or NaN norms unchanged."""
        announce(self, "clip_grad_norm", max_norm)
        self._gradients.check()
        return self._clip(max_norm, 2.0)

    def _clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clips; fused optimizers divide when they read the gradients."""
        self._runtime.steps.refuse_inside("clip_master_grads")
        gradients = self._gradients
        norm = grad_norm.global_norm(self._rank, parameters_of(self.optimizer), norm_type)
        scale = gradients.divisor_tensor
        gradients.clip(norm.divisor(max_norm, scale))
        if not self._fused.divides:
            gradients.divide()
        return norm.rounded(norm.total / scale)

    def _clip_shards(self) -> None:
        """Clips in each update with sharded data parallelism, and records the norm in any case."""
        config = self._rank.config
        if config.sharded_data_parallel_degree == 1:
            return
        if config.sdp_gradient_clipping > 0:
            self._global_grad_norm = self._clip(config.sdp_gradient_clipping, 2.0)
            return
        norm = grad_norm.global_norm(self._rank, parameters_of(self.optimizer))
        self._global_grad_norm = norm.rounded(norm.total / self._gradients.divisor_tensor)

    # ---- state

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Returns the state of this rank's parameters with their masters, marked as partial.

        In 16-bit training it has keys of apex' FP16 optimizer: ``loss_scaler``,
        ``dynamic_loss_scale``, ``overflow`` and ``first_closure_call_this_step``.

        Args:
            gather_if_shard: whether ``rdp_rank`` 0 gets whole entries of a sharded state, which is
                collective over the RDP group. The other ranks, and all ranks if False, get their
                own elements, with marks of their places. Not collective otherwise.

        Raises:
            PeerFailure, RuntimeError: the call is collective, and some ranks have not made it.
        """
        self._rank.check_sums()
        return {**self._state().of_rank(gather_if_shard), **self._half_state()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all parameters, like the wrapped optimizer's in one process.

        Once the model is partitioned, this is collective over the ranks of a replica (the MP
        group), and over the RDP group if the state is sharded; before that it is the state of this
        rank. Entries of 16-bit parameters have their masters.

        Raises:
            PeerFailure, RuntimeError: some of these ranks have not called it.
        """
        self._rank.check_sums()
        state = self._state()
        whole = state.whole() if self._is_partitioned(any) else state.local()
        return {**whole, **self._half_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a full state dict, or the partial state dict that this rank saved.

        Before the model is partitioned the dict is kept and loaded right after the partition.
        Collective over the MP group for partial dicts, and over all ranks for those of a sharded
        state.
        """
        self._pending_load = dict(state_dict)
        models = self._models()
        if not models:
            return  # the first step loads it
        if self._is_partitioned(all):
            self._load_pending()
        for model in models:
            if not model.partitioned:
                model.register_post_partition_hook(lambda *_: self._load_if_partitioned())

    def reload_model_params(self) -> None:
        """Copies values that were written to parameters in the model into masters."""
        reload_masters(holdings_of(self.optimizer))

    def _load_if_partitioned(self) -> None:
        if self._is_partitioned(all):
            self._load_pending()

    def _load_pending(self) -> None:
        given, self._pending_load = self._pending_load, None
        if given is None:
            return
        self._take_half_state(given)
        self._state().load(given)
        self._spread(self._engines())

    def _state(self) -> OptimizerState:
        return OptimizerState(self._rank, self.optimizer, self._is_local, self.whole_tensors.owned)

    # ---- whose parameters these are

    def _models(self) -> list[DistributedModel]:
        """Returns the models whose parameters these are, or all models if there is at most one."""
        models = [m for m in self._runtime.wrapped.models if isinstance(m, DistributedModel)]
        if len(models) > 1:
            models = [m for m in models if updates_some(self.optimizer, m.parameters())]
        return models

    def _engines(self) -> list[Engine]:
        """Returns the engines of those that are partitioned."""
        return [engine for m in self._models() if (engine := engine_of(m)).partitioned]

    def _is_partitioned(self, how_many: Callable[[Iterable[bool]], bool]) -> bool:
        models = self._models()
        return bool(models) and how_many(model.partitioned for model in models)

    def _is_local(self, updated: Tensor) -> bool:
        """Returns whether a tensor in the groups is updated on this rank."""
        return model_parameter_of(updated) not in self._remote


def _num_reductions(engines: Iterable[Engine]) -> int:
    return sum(engine.gradients.num_reductions for engine in engines)
