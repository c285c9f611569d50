"""The parameters, buffers and modules of a partitioned model that live on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.initial.initialise import initialise_delayed
from smp.initial.magnitudes import Magnitudes
from smp.modules import packed
from smp.modules.materialize import make_placeholder, make_real
from smp.precision.script_writes import OwnPiece, own
from smp.storage.protocol import Storage
from smp.tensor_parallel import partial, sharding
from smp.tensor_parallel.partial import PARTIAL_MARK, SHARDS_MARK
from smp.world import roll_call
from smp.world.rank import Rank

_EXTRA_STATE = "_extra_state"


def is_extra_state(key: str) -> bool:
    """Returns whether a key of a state dict is the extra state of a module."""
    return key.rpartition(".")[2] == _EXTRA_STATE


def set_extra_states(root: nn.Module, state: Mapping[str, Any]) -> None:
    """Sets extra states of modules, like ``nn.Module.load_state_dict``.

    Args:
        root: the user's model.
        state: state of the whole model; other keys are ignored.
    """
    for name, module in root.named_modules(remove_duplicate=False):
        key = f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE
        if key in state and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(state[key])


class ModelParts:
    """Views of a partitioned model, restricted to this rank, and its state by name.

    Args:
        root: the user's model.
        partition_of: pipeline rank of every module.
        pp_rank: pipeline rank of this process.
        storage: storage of the parameters that live here.
    """

    def __init__(
        self,
        root: nn.Module,
        partition_of: Mapping[nn.Module, int],
        pp_rank: int,
        storage: Storage,
    ) -> None:
        self.root = root
        self._partition_of = partition_of
        self._pp_rank = pp_rank
        self.storage = storage
        #: partition by parameter; parameters that modules share are on one partition
        self._parameter_partition: dict[Tensor, int] = {}
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._parameter_partition.setdefault(parameter, partition_of[module])

    def place(
        self,
        device: torch.device,
        seed: int,
        on_ready: Callable[[nn.Parameter], None],
    ) -> None:
        """Makes local parameters real on ``device`` and frees all others; moves all buffers.

        Buffers stay real on every rank: they are small and parents read those of their children.
        Tensors on the meta device are initialised here.

        Args:
            device: device of this process.
            seed: seed of the initialisation.
            on_ready: called once with each local parameter as soon as it is real, in one order on
                all replicas; may release its memory.
        """
        ready: set[nn.Parameter] = set()

        def note(parameter: nn.Parameter) -> None:
            ready.add(parameter)
            on_ready(parameter)

        names = {parameter: name for name, parameter in self.root.named_parameters()}
        magnitudes = Magnitudes(self.root)
        initialise_delayed(
            self.root,
            lambda p: self.is_local_parameter(p) and p not in magnitudes.late,
            device,
            seed=seed,
            on_ready=lambda p: None if p in magnitudes.read else note(p),
        )
        magnitudes.make(self.is_local_parameter, note)
        for parameter, partition in self._parameter_partition.items():
            assert isinstance(parameter, nn.Parameter)
            if partition != self._pp_rank:
                make_placeholder(parameter, device, _why_absent(names[parameter], partition))
                nothing = torch.empty(0, dtype=parameter.dtype, device=device)
                own(parameter, OwnPiece(names[parameter], 0, nothing, None, lambda: None))
            elif parameter not in ready:
                make_real(parameter, device)
                note(parameter)
        for module in self.root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def is_local_parameter(self, parameter: Tensor) -> bool:
        return self._parameter_partition.get(parameter) == self._pp_rank

    def remote_parameters(self) -> list[Tensor]:
        """Returns the parameters of other pipeline ranks."""
        return [p for p, rank in self._parameter_partition.items() if rank != self._pp_rank]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.root.named_parameters():
            if self.is_local_parameter(parameter):
                yield name, parameter

    def ties(self) -> dict[str, list[str]]:
        """Returns further names of parameters that have several, by their first name."""
        first: dict[nn.Parameter, str] = {}
        found: dict[str, list[str]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            own = first.setdefault(parameter, name)
            if own != name:
                found.setdefault(own, []).append(name)
        return found

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (f"{prefix}.{name}" if prefix else name), buffer

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.root.named_modules():
            if self._partition(name, module) == self._pp_rank:
                yield name, module

    def _partition(self, name: str, module: nn.Module) -> int:
        found = self._partition_of.get(module)
        if found is not None:
            return found
        if not any(self._partition_of.values()):  # one partition: some models replace layers
            return self._pp_rank
        raise RuntimeError(
            f"{_C.rank_prefix()}module '{name}' ({type(module).__name__}) was added to the model "
            "after the partition, so it is on no pipeline rank; build the model with it, or set "
            "pipeline_parallel_degree to 1"
        )

    def extra_states(self) -> dict[str, Any]:
        """Returns the extra states of the modules of this rank, by their keys in a state dict."""
        return {
            f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE: module.get_extra_state()
            for name, module in self.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    # ---- state by name

    def key_partitions(self) -> dict[str, int]:
        """Returns the partition with the true value, for each key of the model's state dict."""
        partitions: dict[str, int] = {}
        for prefix, module in self.root.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in self._parameter_partition:
                    raise RuntimeError(
                        f"{_C.rank_prefix()}parameter '{dot}{name}' was added to the model after "
                        "the partition, so nothing reduces its gradients; build the model with it"
                    )
                partitions[dot + name] = self._parameter_partition[parameter]
            partition = self._partition(prefix, module)
            for name in (*module._buffers, *packed.keys_of_parts(module)):
                partitions[dot + name] = partition
            partitions[dot + _EXTRA_STATE] = partition
        return partitions

    def meet(self, rank: Rank, what: str, is_merged: bool, **call: Any) -> None:
        """Waits for the ranks that have to make the same call. Collective over them.

        Args:
            rank: calling rank.
            what: name of the public function.
            is_merged: whether the call exchanges tensors over the replica, and not only over
                shards.
            call: arguments that have to be equal.
        """
        kinds = self.storage.gather_kinds
        guard = "" if kinds else ", or inside of `if smp.rdp_rank() == 0:`"
        groups = ("mp", *kinds) if is_merged else kinds
        roll_call.meet(rank, what, groups, f"state = {what}()  # on all ranks{guard}", call)

    def local_state(self) -> dict[str, Any]:
        """Returns the entries of the state dict that live here, detached, in the model's order.

        Collective like `Storage.state`.
        """
        partitions = self.key_partitions()
        return {
            key: value
            for key, value in self.storage.state().items()
            if partitions.get(key, 0) == self._pp_rank
        }

    def local_slices(self) -> dict[str, partial.Slice]:
        """Returns the slices in the local state, by key."""
        partitions = self.key_partitions()
        own = (
            (key, value)
            for key, value in self.root.state_dict(keep_vars=True).items()
            if partitions.get(key, 0) == self._pp_rank
        )
        return partial.slices_of(own)

    def marked_state(self) -> dict[str, Any]:
        """Returns the local state with marks that show that it is partial."""
        marks: dict[str, Any] = {PARTIAL_MARK: True}
        slices = self.local_slices()
        if slices:
            marks[SHARDS_MARK] = slices
        return {**self.local_state(), **marks}

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the whole state dict, merged from the marked ones of all ranks of a replica."""
        whole = partial.merge(parts)
        partitions = self.key_partitions()
        merged: dict[str, Any] = {}
        for key in self.root.state_dict(keep_vars=True):
            if key not in whole:
                raise ValueError(
                    f"'{key}' belongs to pipeline rank {partitions.get(key, 0)}, whose part of the "
                    "state does not have it; the parts come from another model or another partition"
                )
            merged[key] = whole[key]
        return merged

    def load(
        self, state: Mapping[str, Any], strict: bool, sliced: bool = False
    ) -> torch.nn.modules.module._IncompatibleKeys:
        """Loads the local entries of a whole state dict; keys are compared over the whole model.

        Args:
            state: whole tensors, or the slices that this rank holds if ``sliced``.
            strict: whether missing and unexpected keys are errors.
            sliced: whether split entries are the slices of this rank.

        Raises:
            RuntimeError: for missing or unexpected keys when ``strict``, and for wrong shapes.
        """
        result = self.compare(state, strict, sliced)
        partitions = self.key_partitions()
        of_packed = packed.keys_in(self.root)
        with torch.no_grad():
            for key, value in _tensors_in(self.root.state_dict(keep_vars=True)).items():
                if key not in state:
                    continue
                if key in of_packed:
                    if partitions[key] == self._pp_rank:
                        _check_equal(key, value, state[key])
                    continue
                is_parameter = isinstance(value, nn.Parameter)
                if not is_parameter or partitions[key] == self._pp_rank:
                    interval = None if sliced else sharding.interval_of(value)
                    self.storage.write(value, sharding.slice_of(state[key], interval))
        set_extra_states(self.root, state)
        self.storage.after_load()
        return result

    def compare(
        self, state: Mapping[str, Any], strict: bool, sliced: bool = False
    ) -> torch.nn.modules.module._IncompatibleKeys:
        """Returns and raises the same as :meth:`load`, without loading."""
        own = self.root.state_dict(keep_vars=True)
        missing = [key for key in own if key not in state]
        unexpected = [key for key in state if key not in own and key not in partial.MARKS]
        problems = []
        if strict and missing:
            problems.append(f"missing keys: {missing}")
        if strict and unexpected:
            problems.append(f"unexpected keys: {unexpected}")
        of_packed = packed.keys_in(self.root)  # compared by `load`, where they have values
        for key, value in _tensors_in(own).items():
            given = state.get(key)
            if not isinstance(given, Tensor) or key in of_packed:
                continue
            shape = list(value.shape) if sliced else sharding.whole_shape(value)
            if list(given.shape) != shape:
                problems.append(
                    f"'{key}' has shape {tuple(given.shape)}, the model has {tuple(shape)}"
                )
        if problems:
            raise RuntimeError(
                f"cannot load the state into {type(self.root).__name__}: " + "; ".join(problems)
            )
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _check_equal(key: str, own: Tensor, given: Tensor) -> None:
    """Raises a ValueError if a state dict has another quantized weight than the model."""
    ours, theirs = packed.parts_of(packed.detached(own)), packed.parts_of(given)
    is_equal = ours.keys() == theirs.keys() and all(
        torch.equal(part.cpu(), theirs[name].detach().cpu()) for name, part in ours.items()
    )
    if not is_equal:
        raise ValueError(
            f"{_C.rank_prefix()}'{key}' of the state dict differs from the quantized weight of the "
            "model, which no state is loaded into: make the model of the files that the state was "
            "trained on, with the same quantization, or load the entries of the adapters only "
            "(strict=False)"
        )


def _why_absent(name: str, partition: int) -> str:
    return (
        f"{_C.rank_prefix()}parameter '{name}' has no values here: it lives on pp_rank "
        f"{partition}. Read it in model.state_dict(), or inside of "
        "`with smp.whole_parameters(model):` between steps, where it may be written to, on all "
        "ranks; in a forward put what reads it on its rank (smp.set_partition)"
    )


def _tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns parameters and buffers of a state dict, without extra states."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and not is_extra_state(key)
    }
