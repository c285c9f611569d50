"""``smp.stream_parameters``: the tensors of a model from their owners, for engines that serve."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.checkpoint.archive import Deferred
from smp.checkpoint.exporting import second_names
from smp.checkpoint.gathering import Gatherer
from smp.integrations import adapters as adapters_of_peft
from smp.model import DistributedModel, engine_of
from smp.modules import packed
from smp.replacement import to_theirs
from smp.storage.parts import Named
from smp.world import runtime
from smp.world.rank import Rank
from smp.world.roll_call import roll_call, together

WHAT = "smp.stream_parameters"
ADAPTERS = ("merged", "kept", "only")
NAMES = ("model", "files")
_SNIPPET = "for name, tensor in smp.stream_parameters(model): ..."
#: Bytes between two times when ranks agree to go on.
_ROUND_BYTES = 64 << 20


def stream_parameters(
    model: DistributedModel,
    *,
    receivers: int | Sequence[int] | None = 0,
    dtype: torch.dtype | None = None,
    adapters: str = "merged",
    names: str = "model",
) -> ParameterStream:
    """Returns the model's tensors one by one, in the names of Hugging Face, from their owners.

    ``for name, tensor in smp.stream_parameters(model): ...`` is collective over all ranks, as is
    the call. The loop runs on receivers; on the other ranks it has no turns, and ends when the
    stream ends. No rank holds more than the parts of one tensor besides its own state. A tensor is
    in host memory and belongs to the receiver. Tied weights and buffers of the state dict come
    once.

    A receiver may leave its loop early, by ``break`` or an exception. It gets no more tensors, and
    the loops of the other ranks end when all receivers have left or have got everything. The loop
    may contain no other collective call unless all ranks receive.

    Args:
        model: partitioned model.
        receivers: global rank, or ranks, that get all tensors; None: all ranks.
        dtype: dtype of floating-point tensors; None: the model's own, which in 16-bit training is
            that of the 16-bit values.
        adapters: treatment of a ``PeftModel``'s adapter. ``"merged"``: into the weights (LoRA), as
            ``merge_and_unload`` does; ``"kept"``: the base model without it, and then the active
            adapter in the names of PEFT's files; ``"only"``: the active adapter alone.
        names: ``"model"``: names and shapes of the plain model's ``state_dict()``; ``"files"``:
            those that ``save_pretrained`` writes, which differ where transformers joins tensors
            when it loads, such as those of experts.

    Returns:
        an iterable for one loop, which knows names, dtypes and shapes before (`ParameterStream`).

    Raises:
        ValueError: on all ranks, if arguments are invalid, or differ, if the weights are
            quantized, or if adapters cannot be merged.
        RuntimeError: a rank has failed.
        PeerFailure: not all ranks have called this.
    """
    current = runtime.current()
    rank = current.rank
    chosen = list(range(rank.world_size))
    if receivers is not None:
        chosen = [receivers] if isinstance(receivers, int) else sorted(set(receivers))
    call = {
        "model": model._idx if isinstance(model, DistributedModel) else None,
        "receivers": chosen,
        "dtype": str(dtype),
        "adapters": adapters,
        "names": names,
        "error": problem_of(model, dtype, adapters, names) or _problem_of_ranks(chosen, rank),
    }
    roll_call(rank, WHAT, call, _SNIPPET)
    current.wrapped.spread_written()

    def planned() -> ParameterStream:
        served = Served.of(model, rank, dtype, adapters, names, copies=True)
        deferred = served.gatherer.plan(
            served.content, dict.fromkeys(served.content, tuple(chosen))
        )
        return ParameterStream(served.gatherer, deferred, chosen, rank)

    return together(rank, WHAT, planned)


def problem_of(model: Any, dtype: Any, adapters: str, names: str) -> str | None:
    """Returns the reason why a model cannot be sent like this, or None."""
    if not isinstance(model, DistributedModel):
        return f"model must be a DistributedModel, got a {type(model).__name__}"
    if not model.partitioned:
        return "the model is not partitioned yet; call this after the first step"
    if adapters not in ADAPTERS:
        return f"adapters must be one of {', '.join(ADAPTERS)}, got {adapters!r}"
    if names not in NAMES:
        return f"names must be one of {', '.join(NAMES)}, got {names!r}"
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return f"dtype must be a dtype of floating-point numbers or None, got {dtype!r}"
    if adapters == "only":
        is_adapted = adapters_of_peft.is_adapted(model.get_module())
        return None if is_adapted else 'adapters="only" is for a model of PEFT'
    weight = packed.name_in(model.get_module())
    if weight is not None:
        return (
            f'weights are quantized, {weight} for one; send the adapter alone (adapters="only") to '
            "an engine that has the base model"
        )
    return None


def _problem_of_ranks(receivers: Sequence[int], rank: Rank) -> str | None:
    if not receivers or not all(isinstance(r, int) and 0 <= r < rank.world_size for r in receivers):
        return f"receivers must be among the ranks 0 to {rank.world_size - 1}, got {receivers}"
    return None


@dataclass(frozen=True)
class Served:
    """The tensors of a model in the names of those who load them.

    Attributes:
        gatherer: gathers what they are made of; nothing is planned yet.
        content: tensors without values, by name; of tied ones the first.
    """

    gatherer: Gatherer
    content: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        model: DistributedModel,
        rank: Rank,
        dtype: torch.dtype | None,
        adapters: str,
        names: str,
        copies: bool = False,
    ) -> Served:
        """Returns the tensors of a partitioned model; see `stream_parameters`.

        Raises:
            ValueError: adapters cannot be merged.
        """
        module: Any = model.get_module()
        is_adapted = adapters_of_peft.is_adapted(module)
        layers = adapters_of_peft.merges(module) if is_adapted and adapters == "merged" else {}
        gatherer = Gatherer(model, rank, copies)
        whole = set(layers)  # tensors whose digits count until they are merged
        for key, layer in layers.items():
            whole.update(adapters_of_peft.inputs_of(key, layer, module.active_adapter))
        _check_tied(whole, gatherer.state.aliases)

        def dtype_of(named: Named) -> torch.dtype:
            is_cast = named.tensor.is_floating_point() and named.name not in whole
            return dtype if is_cast and dtype is not None else named.tensor.dtype

        state = gatherer.lazy_state(dtype_of)
        own: dict[str, Tensor] = {}
        if is_adapted:
            state, own = _apart(module, state, layers, adapters)
        content = to_theirs(engine_of(model).registrations, state) if state else {}
        for name in second_names(content):
            del content[name]
        if names == "files":
            content = _as_files(module.get_base_model() if is_adapted else module, content)
        return cls(gatherer, {n: _as(t, dtype) for n, t in {**content, **own}.items()})


def _check_tied(names: set[str], aliases: Mapping[str, str]) -> None:
    tied = names & {*aliases, *aliases.values()}
    if tied:
        raise ValueError(
            f"{_C.rank_prefix()}the adapter of '{min(tied)}' cannot be merged: the weight is tied "
            "to another, which has no adapter. Untie them before adapters are added "
            '(tie_word_embeddings=False), or send the adapter beside the model (adapters="kept")'
        )


def _apart(
    module: Any, state: Mapping[str, Tensor], layers: Mapping[str, Any], adapters: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the base model's tensors, and those of the adapter, both by their names in files."""
    names = adapters_of_peft.names_in(module, state)
    own = {name: state[key] for key, name in names.own.items()}
    if adapters == "only":
        return {}, own
    adapter = module.active_adapter
    base = {}
    for key, name in names.base.items():
        base[name] = state[key]
        if key in layers:
            inputs = adapters_of_peft.inputs_of(key, layers[key], adapter)
            first, second = (state[each] for each in inputs)
            base[name] = adapters_of_peft.merged(state[key], first, second, layers[key], adapter)
    if adapters == "kept":
        return base, own
    return {**base, **{name: state[key] for key, name in names.trained.items()}}, {}


def _as_files(module: Any, content: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that files have for those of a model in memory.

    Releases of transformers before 5 have them alike.
    """
    place = "transformers.core_model_loading"
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return content
    if importlib.util.find_spec(place) is None:
        return content
    reverted: dict[str, Tensor] = importlib.import_module(place).revert_weight_conversion(
        module, content
    )
    return reverted


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class ParameterStream:
    """The tensors of a model, one by one; see :func:`smp.stream_parameters`.

    Attributes:
        names, dtypes, shapes: lists of what the tensors have, in their order, on all ranks.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        deferred: Mapping[str, Deferred],
        receivers: Sequence[int],
        rank: Rank,
    ) -> None:
        self.names = list(deferred)
        self.dtypes = [tensor.dtype for tensor in deferred.values()]
        self.shapes = [tensor.shape for tensor in deferred.values()]
        self._gatherer, self._rank = gatherer, rank
        self._made = list(deferred.values())
        self._ends = round_ends([tensor.num_bytes for tensor in deferred.values()], _ROUND_BYTES)
        self._staying = set(receivers)
        self._is_used = False

    def __len__(self) -> int:
        return len(self.names)

    def announcement(self) -> dict[str, list[Any]]:
        """Returns names, names of dtypes and shapes, as engines want them before the tensors."""
        return {
            "names": list(self.names),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_used:
            raise RuntimeError(
                f"{_C.rank_prefix()}a stream of parameters has one loop; call "
                "smp.stream_parameters again, on all ranks"
            )
        self._is_used = True
        return self._turns()

    def _turns(self) -> Iterator[tuple[str, Tensor]]:
        is_receiver = self._rank.global_rank in self._staying
        begin = 0
        for number, end in enumerate(self._ends):
            if not self._meets(leaves=False):
                return
            if not is_receiver:
                with self._rank.reporting(WHAT):
                    self._gatherer.serve(end)
            for idx in range(begin, end) if is_receiver else ():
                with self._rank.reporting(WHAT):
                    tensor = self._made[idx].make().contiguous()
                try:
                    yield self.names[idx], tensor
                except GeneratorExit:
                    self._leave(number)
                    raise
                del tensor
            begin = end

    def _meets(self, leaves: bool) -> bool:
        """Meets the other ranks between rounds; returns whether some receiver stays.

        Args:
            leaves: whether this rank has left its loop.
        """
        left = roll_call(self._rank, WHAT, {}, _SNIPPET, own=leaves)
        gone = {rank for rank in self._staying if left[rank]}
        self._gatherer.leave_out(gone)
        self._staying -= gone
        return bool(self._staying)

    def _leave(self, number: int) -> None:
        """Ends the loop of this rank in a round; it serves others as long as they stay."""
        if not self._rank.can_communicate:
            return
        with self._rank.reporting(WHAT):
            self._gatherer.drain(self._ends[number])
            for end in self._ends[number + 1 :]:
                if not self._meets(leaves=True):
                    return
                self._gatherer.drain(end)


def round_ends(sizes: Sequence[int], round_bytes: int) -> list[int]:
    """Returns the ends of rounds of tensors: each but the last has at least so many bytes.

    Args:
        sizes: bytes of each tensor.
        round_bytes: bytes of a round.
    """
    ends = []
    held = 0
    for end, size in enumerate(sizes, start=1):
        held += size
        if held >= round_bytes:
            ends.append(end)
            held = 0
    return list(dict.fromkeys(itertools.chain(ends, [len(sizes)] if sizes else [])))
