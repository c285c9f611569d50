"""The boundary between modules of different ranks: the calling and the answering side."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.activations.requests import Request, fulfil, take_request
from smp.dropout import frames, places
from smp.dropout.batches import Samples
from smp.modules import autocast
from smp.modules.argument_containers import ArgumentContainers
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.modules.module_writes import ModuleWrites
from smp.modules.transforms import is_transformed
from smp.pipeline import caches, functions
from smp.pipeline.call_state import AnswerState, CallState, RequestState
from smp.pipeline.callee import ValueWatch, Watched, is_certain
from smp.pipeline.packing import Codec
from smp.pipeline.remote_tensor import RemoteTensor, localize, resolve, rewrite, view_of

if TYPE_CHECKING:
    from smp._C import Server

# Calls of a step body whose results share memory with each other or with arguments.
_watched: contextvars.ContextVar[tuple[Watched, ...]] = contextvars.ContextVar(
    "smp_watched", default=()
)

# Module id that means a function of smp.pipeline.functions (csrc/pipeline/wire.h).
_FUNCTION = -3

# True in the service of a request: modules of this rank then run where they are called.
_serving: contextvars.ContextVar[bool] = contextvars.ContextVar("smp_serving", default=False)


class CallFailed(Exception):
    """A guarded call failed on another rank, and the step goes on."""


class Guard(Protocol):
    """A guard for calls that may fail without ending the step."""

    def running(self, mb: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a call that is served for a microbatch."""

    def fail(self, error: Exception) -> str:
        """Notes an error, and returns it in words."""


class RemoteModules:
    """Connects a partitioned model with the server of this rank.

    ``forward`` of every module that lives elsewhere is replaced *on the instance*, so
    ``module(...)`` keeps running ``__call__`` overrides and hooks here, at the caller, while
    ``super().forward`` and the class stay untouched. The owner runs only ``forward``.

    Args:
        root: the user's model; its index among ``modules`` is 0.
        modules: the distinct modules of the model in one order on all ranks.
        owners: global rank of the owner of each module; ``None`` if it runs where it is called.
        names: names of the modules, for errors.
        global_rank: global rank of this process.
        device: device of this process.
        later_stages: indices of modules of this rank that a step body does not run itself. They
            belong to a later stage of this rank; the body sends requests for them to its own
            rank, so that it can run ahead.
        writes: writes of forwards to attributes of modules.

    Attributes:
        first_id: id of the root among the modules of all models.
        mode: name for what results depend on in this step besides arguments; empty: no call has
            needed it yet.
        swaps: tensors that code of the step has put in the place of parameters and buffers.
        first_apart: whether results of calls in microbatch 0 predict only those of microbatch 0.
        guard: guard around served calls; results of guarded calls predict only those of guarded
            calls.
        samples_of: returns the samples of a microbatch, where masks of dropout depend on them.
        look_at: receives the tensors of a call before it is served.
        around_served: makes the forward of a module that other ranks call; None: it is its own.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[nn.Module],
        owners: Sequence[int | None],
        names: Sequence[str],
        global_rank: int,
        device: torch.device,
        later_stages: Sequence[int] = (),
        writes: ModuleWrites | None = None,
    ) -> None:
        self._root = root
        self._modules = modules
        self._names = names
        self._own_caches: dict[int, dict[int, Any]] = {}
        self._cache_places: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._codec = Codec(modules, device)
        self.device = device
        self._server: Server | None = None
        self.first_id = 0
        self.mode = ""
        self.first_apart = False
        self.guard: Guard | None = None
        self.samples_of: Callable[[int], Samples] | None = None
        self.look_at: Callable[[Any], None] | None = None
        self.around_served: Callable[[Forward], Forward] | None = None
        self._filled: dict[int, tuple[Any, int]] = {}
        self._undo: list[Callable[[], None]] = []
        self._remote = [
            (i, owner)
            for i, owner in enumerate(owners)
            if owner is not None and owner != global_rank and modules[i] is not root
        ]
        self._remote += [(i, global_rank) for i in later_stages]
        self._later_stages = frozenset(later_stages)
        away = dict(self._remote)
        if owners and owners[0] is not None and owners[0] != global_rank:
            away[0] = owners[0]
        writes = writes or ModuleWrites()
        self._state = CallState(modules, names, writes, away, global_rank)
        self.swaps = self._state.swaps

    @property
    def server(self) -> Server:
        assert self._server is not None, "the pipeline is not open"
        return self._server

    def connect(self, server: Server, first_id: int) -> None:
        """Installs the calling side on the modules.

        Args:
            server: server of this rank.
            first_id: id of the root at the server; the other modules follow.
        """
        self._server = server
        self.first_id = first_id
        for module_id, owner in self._remote:
            stub = functools.partial(self._stub, server, module_id, owner)
            self._undo.append(wrap_forward(self._modules[module_id], WrapperKind.REMOTE, stub))
        self._state.open()

    def forget_step(self) -> None:
        """Forgets what a step that has failed has left."""
        self._filled.clear()
        self.swaps.forget()

    def _kind_of_calls(self) -> str:
        """Returns a name for the calls that the server may expect to be like this one."""
        if not self.mode:  # frozen parameters and modes count
            flags = [p.requires_grad for p in self._root.parameters()]
            flags += [module.training for module in self._modules]
            self.mode = f"{hash(tuple(flags)):x}"
        guarded = ":guarded" if self.guard is not None else ""
        apart = self.first_apart and _C.current_microbatch() == 0
        return self.mode + guarded + (":first" if apart else "")

    def disconnect(self) -> None:
        """Restores every module's own ``forward``."""
        self._server = None
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._state.close()

    def _stub(self, server: Server, module_id: int, owner: int, own_forward: Forward) -> Forward:
        is_later_stage = module_id in self._later_stages

        def forward(*args: Any, **kwargs: Any) -> Any:
            request = take_request(self._modules[module_id])
            if is_later_stage and _serving.get():
                return _run_here(request, own_forward, args, kwargs)
            return self._call(server, owner, module_id, args, kwargs, request)

        return forward

    def call_function(
        self, name: str, home: RemoteTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a function of `smp.pipeline.functions` on the rank of ``home``."""
        state = _C.ref_state(home if home._whole is None else home._whole)
        assert state is not None
        return self._call(self.server, state.home_rank, _FUNCTION, (name, *args), dict(kwargs))

    def _call(
        self,
        server: Server,
        owner: int,
        module_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Request | None = None,
    ) -> Any:
        state = autocast.capture(self.device)
        seeds = None if request is None else self._seeds_of(server, request)
        if is_transformed((args, kwargs)):
            raise ValueError(
                f"{_C.rank_prefix()}module '{self._name(module_id)}' on another rank is called "
                "inside of a transform of torch.func (vmap, grad, jvp), which does not reach other "
                "ranks; let the partition be traced (skip_tracing=False), which keeps the module "
                "with its caller, or place both on one partition with smp.set_partition"
            )
        is_same_rank = module_id in self._later_stages
        along = None if module_id == _FUNCTION else self._state.along(module_id, is_same_rank)
        given = ArgumentContainers.of_call(args, kwargs)
        place = self._place_of(module_id, args, kwargs, request)
        structure, tensors, used_caches = self._codec.pack(
            (args, kwargs, state, request, seeds, along, place)
        )
        for cache in used_caches:
            idxs, here = self._places_of(module_id)
            caches.check_unfilled(cache, idxs, self._name(module_id), here)
        answer, results, changed, shares_memory, views = server.remote_call(
            owner,
            module_id if module_id == _FUNCTION else self.first_id + module_id,
            self._root.training,
            structure,
            self._kind_of_calls(),
            [resolve(tensor) for tensor in tensors],
        )
        if request is not None and len(request.modules) > 1:
            server.skip_calls(len(request.modules) - 1)
        if changed:
            for idx, handle in zip(changed, results[-len(changed) :], strict=True):
                rewrite(tensors[idx], handle)
        for view in views:
            results[view.result_idx] = view_of(tensors[view.argument_idx], view)
        if shares_memory and module_id != _FUNCTION:
            _watched.set((*_watched.get(), Watched(self._name(module_id), [*tensors, *results])))
        result, attributes, additions, filled = self._codec.unpack(answer, results, tensors)
        if isinstance(result, CallFailed):
            raise result
        if filled:
            self._note_filled(module_id, [given.containers[number] for number, _ in filled])
        result, attributes = given.settle(filled, (result, attributes))
        self._state.settle(AnswerState(additions, attributes), is_same_rank)
        return result

    def _note_filled(self, module_id: int, containers: Sequence[Any]) -> None:
        """Raises if another microbatch that is still under way also fills one of them."""
        mb = _C.current_microbatch()
        for container in containers:
            _, other = self._filled.setdefault(id(container), (container, mb))
            if other != mb:
                raise RuntimeError(
                    f"{_C.rank_prefix()}module '{self._name(module_id)}' on another rank has "
                    f"changed a {type(container).__name__} among its arguments in microbatch {mb}, "
                    f"and so has a module in microbatch {other}, which is not done yet: they would "
                    "mix. Make a new one in each call of the model, or set active_microbatches=1"
                )

    def _seeds_of(self, server: Server, request: Request) -> Tensor | None:
        """Returns seeds of modules that run together, as if they ran one by one; None for one.

        The seeds are a tensor, because they differ in each microbatch.
        """
        if len(request.modules) == 1:
            return None
        ids = [self.first_id + self._codec.module_ids[module] for module in request.modules]
        return torch.tensor(server.seeds_of_next_calls(ids), dtype=torch.int64)

    def _place_of(
        self,
        module_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        request: Request | None,
    ) -> places.SentPlace | None:
        """Returns the place of the call in the model if it may drop elements, else None."""
        if places.current() is None:
            return None
        if module_id == _FUNCTION:
            draws = functions.draws(args[0], args[1:], kwargs)
            return places.depart((), draws) if draws else None
        called = (self._modules[module_id],) if request is None else request.modules
        keys = [key for key in map(frames.key_of, called) if key is not None]
        return places.depart(keys) if keys else None

    def _name(self, module_id: int) -> str:
        return "a function" if module_id == _FUNCTION else self._names[module_id]

    def _places_of(self, module_id: int) -> tuple[frozenset[int], frozenset[int]]:
        """Returns cache places that a module of another rank uses, and those in use here."""
        if module_id == _FUNCTION:
            return frozenset(), frozenset()
        places = self._cache_places.get(module_id)
        if places is None:
            module = self._modules[module_id]
            away = {idx for idx, _ in self._remote}
            here = (other for idx, other in enumerate(self._modules) if idx not in away)
            beside = caches.layer_idxs_beside(module, here)
            places = self._cache_places[module_id] = (caches.layer_idxs(module), beside)
        return places

    def serve(
        self,
        module_id: int,
        mb: int,
        training: bool,
        is_first: bool,
        structure: bytes,
        tensors: list[Tensor],
    ) -> tuple[bytes, list[Tensor], bool]:
        """Runs a module for its caller, or a function of `smp.pipeline.functions`."""
        if training != self._root.training:
            raise RuntimeError(
                f"microbatch {mb}: the model is in {_mode_name(training)} mode on the calling rank "
                f"but in {_mode_name(self._root.training)} mode here; call model.train() or "
                "model.eval() on all ranks"
            )
        if self.look_at is not None:
            self.look_at(tensors)
        # Numbers of attention caches belong to this call, not to the thread that runs it.
        run = self._run if self.guard is None else functools.partial(self._run_guarded, self.guard)
        return contextvars.copy_context().run(run, module_id, mb, is_first, structure, tensors)

    def _run_guarded(
        self, guard: Guard, module_id: int, mb: int, *call: Any
    ) -> tuple[bytes, list[Tensor], bool]:
        """Runs a call that may fail; its caller always waits for the answer."""
        try:
            with guard.running(mb):
                answer, results, _ = self._run(module_id, mb, *call)
        except _C.PeerFailure:
            raise
        except Exception as error:
            failed = CallFailed(guard.fail(error))
            answer, results = self._codec.pack_result((failed, None, None, []))
        return answer, results, True

    def _run(
        self, module_id: int, mb: int, is_first: bool, structure: bytes, tensors: list[Tensor]
    ) -> tuple[bytes, list[Tensor], bool]:
        _serving.set(True)  # set in the copy of the context that belongs to this call
        own_caches = self._own_caches.setdefault(mb, {})
        args, kwargs, state, request, seeds, along, told = self._codec.unpack(
            structure, tensors, own_caches=own_caches
        )
        if module_id == _FUNCTION:
            function, args = functions.shipped(args[0]), args[1:]
        else:
            function = self._modules[module_id].forward
            if self.around_served is not None:
                function = self.around_served(function)
        if request is not None:
            own_seeds = () if seeds is None else seeds.tolist()
            function = functools.partial(self._fulfil, request, function, own_seeds)
        places.enter(places.arrive(told, functools.partial(self._samples, mb)))  # as above
        given, called = ArgumentContainers.of_call(args, kwargs), (args, kwargs)
        before = self._codec.pack_result(given.apart(called), tensors) if is_first else None
        watch, back = ValueWatch(), AnswerState()
        with (
            autocast.apply(state),
            watch if is_first else contextlib.nullcontext(),
            self._as_at_the_caller(module_id, mb, along),
        ):
            result = function(*args, **kwargs)
            if module_id != _FUNCTION:
                back = self._state.back(module_id, along)
        filled = given.changes()
        if before is not None and before != self._codec.pack_result(given.apart(called), tensors):
            raise RuntimeError(
                f"{_C.rank_prefix()}module '{self._name(module_id)}' changed an object among its "
                "arguments, which its caller on another rank cannot see (lists, dictionaries, sets "
                "of numbers and texts, and objects with attributes are followed); let it return "
                "its results, or put both on one partition"
            )
        result, attributes = given.with_references((result, back.attributes))
        told = (result, attributes, back.additions, filled)
        answer, results = self._codec.pack_result(told, tensors)
        certain = is_certain(result) and AnswerState(back.additions, attributes).is_certain
        certain = certain and all(is_certain(contents) for _, contents in filled)
        return answer, [localize(t) for t in results], watch.seen or not certain

    def _samples(self, mb: int) -> Samples:
        assert self.samples_of is not None, "a call draws masks, and no step has begun"
        return self.samples_of(mb)

    def _as_at_the_caller(
        self, module_id: int, mb: int, along: RequestState | None
    ) -> contextlib.AbstractContextManager[None]:
        if module_id == _FUNCTION:
            return contextlib.nullcontext()
        return self._state.as_at_the_caller(module_id, mb, along)

    def _fulfil(
        self,
        request: Request,
        forward: Forward,
        seeds: Sequence[int],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return fulfil(request, forward, args, kwargs, seeds, self.device)

    def microbatch_done(self, mb: int) -> None:
        """Frees the data of a finished microbatch."""
        self._own_caches.pop(mb, None)
        for key in [key for key, (_, filler) in list(self._filled.items()) if filler == mb]:
            del self._filled[key]
        self._state.microbatch_done(mb)

    def publish_output(self, output: Any) -> None:
        """Sends the model's output to the other ranks of the replica; for the driver."""
        for watched in _watched.get():
            watched.check()
        _watched.set(())
        structure, tensors = self._codec.pack_result(output)
        self.server.publish_output(structure, [resolve(tensor) for tensor in tensors])

    def await_output(self) -> Any:
        """Returns the model's output of this microbatch, as leaves; for ranks but the driver."""
        return self._codec.unpack(*self.server.await_output())


def _run_here(
    request: Request | None, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if request is None:
        return forward(*args, **kwargs)
    return fulfil(request, forward, args, kwargs)


def _mode_name(training: bool) -> str:
    return "training" if training else "evaluation"
