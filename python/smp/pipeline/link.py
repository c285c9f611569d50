"""The boundary between modules of different ranks: who calls, and who answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smp import _C
from smp.pipeline import autocast, functions
from smp.pipeline.packing import Codec, is_certain
from smp.pipeline.remote_tensor import RemoteTensor, localize, resolve, rewrite

if TYPE_CHECKING:
    from smp._C import Server

# Stands for a module where a function of smp.pipeline.functions is meant (csrc/pipeline/wire.h).
_FUNCTION = -3


class PipelineLink:
    """Connects a partitioned model with the server of this rank.

    ``forward`` of every module that lives elsewhere is replaced *on the instance*, so
    ``module(...)`` keeps running ``__call__`` overrides and hooks here, at the caller, while
    ``super().forward`` and the class stay untouched. The owner runs ``forward`` alone.

    Args:
        root: the user's model; its index among ``modules`` is 0.
        modules: the distinct modules of the model in one order on all ranks.
        owners: global rank of the owner of each module; ``None``: runs wherever it is called.
        global_rank: of this process.
        device: of this process.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[nn.Module],
        owners: Sequence[int | None],
        global_rank: int,
        device: torch.device,
    ) -> None:
        self._root = root
        self._modules = modules
        self._codec = Codec(modules, device)
        self.device = device
        self._server: Server | None = None
        self._mode = ""
        self._remote = [
            (i, owner)
            for i, owner in enumerate(owners)
            if owner is not None and owner != global_rank and modules[i] is not root
        ]

    @property
    def server(self) -> Server:
        assert self._server is not None, "the pipeline is not open"
        return self._server

    def connect(self, server: Server) -> None:
        """Installs the calling side on the modules and the answering side on ``server``."""
        self._server = server
        server.set_forward_handler(self._serve)
        server.set_handle_factory(functools.partial(RemoteTensor.make, self))
        for module_id, owner in self._remote:
            module = self._modules[module_id]
            stub = self._stub(server, module, module_id, owner)
            # Not through nn.Module.__setattr__: it is neither parameter nor submodule.
            module.__dict__["forward"] = stub

    def begin_step(self) -> None:
        """Notes what results depend on besides arguments: frozen parameters and modes."""
        flags = [p.requires_grad for p in self._root.parameters()]
        flags += [module.training for module in self._modules]
        self._mode = f"{hash(tuple(flags)):x}"

    def disconnect(self) -> None:
        """Gives every module its own ``forward`` back."""
        self._server = None
        for module_id, _ in self._remote:
            self._modules[module_id].__dict__.pop("forward", None)

    def _stub(
        self, server: Server, module: nn.Module, module_id: int, owner: int
    ) -> Callable[..., Any]:
        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(server, owner, module_id, args, kwargs)

        return forward

    def call_function(
        self, name: str, handle: RemoteTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Has a function of `smp.pipeline.functions` run where its first argument is."""
        base = handle if handle._whole is None else handle._whole
        owner = _C.ref_state(base).home_rank
        return self._call(self.server, owner, _FUNCTION, (name, handle, *args), dict(kwargs))

    def _call(
        self,
        server: Server,
        owner: int,
        module_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        state = autocast.capture(self.device)
        structure, tensors = self._codec.pack((args, kwargs, state))
        answer, results, changed = server.remote_call(
            owner,
            module_id,
            self._root.training,
            structure,
            self._mode,
            [resolve(tensor) for tensor in tensors],
        )
        if changed:
            for idx, handle in zip(changed, results[-len(changed) :], strict=True):
                rewrite(tensors[idx], handle)
        return self._codec.unpack(answer, results, tensors)

    def _serve(
        self, module_id: int, mb: int, training: bool, structure: bytes, tensors: list[Tensor]
    ) -> tuple[bytes, list[Tensor], bool]:
        if training != self._root.training:
            raise RuntimeError(
                f"microbatch {mb}: the model is in {_mode_name(training)} mode on the calling rank but "
                f"in {_mode_name(self._root.training)} mode here; call model.train() or model.eval() "
                "on all ranks"
            )
        args, kwargs, state = self._codec.unpack(structure, tensors)
        with autocast.apply(state):
            if module_id == _FUNCTION:
                result = functions.shipped(args[0])(*args[1:], **kwargs)
            else:
                result = self._modules[module_id].forward(*args, **kwargs)
        structure, results = self._codec.pack(result, tensors)
        return structure, [localize(tensor) for tensor in results], not is_certain(result)

    def publish_output(self, output: Any) -> None:
        """Driver: sends the model's output to the other ranks of the replica."""
        structure, tensors = self._codec.pack(output)
        self.server.publish_output(structure, [resolve(tensor) for tensor in tensors])

    def await_output(self) -> Any:
        """Other ranks: the model's output of this microbatch, as leaves."""
        return self._codec.unpack(*self.server.await_output())


def _mode_name(training: bool) -> str:
    return "training" if training else "evaluation"
