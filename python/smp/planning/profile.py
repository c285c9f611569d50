"""Describes a model as a chain of parts with their costs for one sample."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Shares:
    """Shares of one process's microbatch that a rank of a tensor-parallel group has.

    Attributes:
        split_state: share of the parameters of split modules.
        split: share of activations inside split modules, and of their work.
        whole: share of activations between split modules, and of the work on them.
    """

    split_state: float
    split: float
    whole: float


@dataclass(frozen=True)
class Amount:
    """Work or bytes, by whether tensor parallelism divides them."""

    split: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.split + other.split, self.whole + other.whole)

    def on(self, shares: Shares) -> float:
        """Returns the amount of one rank."""
        return self.split * shares.split + self.whole * shares.whole

    @property
    def total(self) -> float:
        """Returns the amount of the whole model."""
        return self.split + self.whole


class Weight(NamedTuple):
    """A parameter: its elements, and whether it is divided, has 32 bits, and is trained.

    A quantized weight is whole on its rank and has no elements, only bytes, which no precision or
    sharding changes.
    """

    elements: int
    is_split: bool
    is_wide: bool = False
    is_trained: bool = True
    packed_bytes: int = 0

    def on(self, shares: Shares) -> float:
        """Returns the elements on one rank."""
        return self.elements * (shares.split_state if self.is_split else 1.0)


@dataclass(frozen=True, eq=False)
class Part:
    """A layer, or the modules before the first layer, between two, or behind the last one.

    All figures are for one sample. Work is in seconds of a device that does one FLOP per second,
    and whose memory is slower than its arithmetic by the same factor as on the device of the plan.

    Attributes:
        name: name of the first module.
        is_layer: the part is a repeated layer, which checkpoints are put around.
        is_kept: activations are kept, also where other layers are computed again.
        weights: parameters that no earlier part has.
        forward, backward: work.
        kept: bytes of activations.
        input_bytes: bytes with a gradient that come from the part before.
        largest_bytes: bytes of the largest tensor that it makes.
        tied_elements: elements of parameters that an earlier part has as well.
        num_products: pairs of columns and rows that are summed over ranks in a forward.
        num_mixtures: number of these that are experts that tokens are routed to.
        routed_kept: bytes of activations that experts keep, and that are whole on each rank unless
            experts are spread over the ranks; included in `kept`.
    """

    name: str
    is_layer: bool
    weights: tuple[Weight, ...] = ()
    forward: Amount = Amount()
    backward: Amount = Amount()
    kept: Amount = Amount()
    input_bytes: float = 0.0
    largest_bytes: float = 0.0
    tied_elements: int = 0
    num_products: int = 0
    num_mixtures: int = 0
    routed_kept: float = 0.0
    is_kept: bool = False

    @property
    def elements(self) -> int:
        """Returns the elements of all parameters."""
        return sum(self._elements)

    def elements_on(self, shares: Shares) -> float:
        """Returns the elements that a rank computes with."""
        split, whole = self._elements
        return split * shares.split_state + whole

    @cached_property
    def _elements(self) -> tuple[int, int]:
        split = sum(weight.elements for weight in self.weights if weight.is_split)
        return split, sum(weight.elements for weight in self.weights) - split

    @property
    def costs(self) -> tuple[object, ...]:
        """Returns all figures, without the name."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "name")


@dataclass(frozen=True)
class ModelProfile:
    """A model as parts in the order of execution.

    Attributes:
        parts: parts of the chain, at least one.
        tail: work behind the last part that has to be on the rank of the first one, because they
            share parameters (a head tied to the embedding), or None.
        tokens: tokens of a sample; 1 for a model without token inputs.
        heads: attention heads that tensor parallelism can divide; 0: not known.
        experts: number of experts of each mixture; 0: there is none.
        routed: number of experts that a token is sent to.
        key_heads: heads of keys and values; 0: as many as there are heads.
    """

    parts: tuple[Part, ...]
    tail: Part | None
    tokens: int
    heads: int
    experts: int = 0
    routed: int = 1
    key_heads: int = 0

    def sent_keys(self, num_ranks: int) -> float:
        """Returns the heads of keys that ranks sharing heads exchange, over those of queries.

        Each rank gets one at least.

        Args:
            num_ranks: number of ranks that have other heads.
        """
        if self.key_heads == 0 or self.heads == 0:
            return 1.0
        return min(1.0, max(self.key_heads, num_ranks) / self.heads)

    @property
    def chain(self) -> tuple[Part, ...]:
        """Returns all parts, the tail at the end."""
        return self.parts if self.tail is None else (*self.parts, self.tail)

    @property
    def elements(self) -> int:
        """Returns the number of parameter elements, shared ones once."""
        return sum(part.elements for part in self.chain)
