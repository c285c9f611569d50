"""Describes a model as a chain of parts with their costs for one sample."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, eq=False)
class Part:
    """A layer, or the modules before the first layer, between two, or behind the last one.

    All figures are for one sample. Work is in seconds of a device that does one FLOP per second,
    and whose memory is slower than its arithmetic by the same factor as on the device of the plan.

    Attributes:
        name: name of the first module.
        is_layer: the part is a repeated layer, which checkpoints are put around.
        split_elements, whole_elements: parameter elements that tensor parallelism divides, and
            others.
        tensors: elements of each parameter, whether it is divided, and whether it has 32 bits.
        split_forward, whole_forward: work of the forward that is divided, and that is not.
        split_backward, whole_backward: work of the backward that is divided, and that is not.
        split_kept, whole_kept: bytes of activations that are divided, and that are not.
        input_bytes: bytes with a gradient that come from the part before.
        largest_bytes: bytes of the largest tensor that it makes.
        tied_elements: elements of parameters that an earlier part has as well.
        frozen_split, frozen_whole: elements that are not trained, divided and whole.
        num_products: pairs of columns and rows that are summed over ranks in a forward.
        num_mixtures: number of these that are experts that tokens are routed to.
        routed_kept: bytes of activations that experts keep, and that are whole on each rank unless
            experts are spread over the ranks; included in `whole_kept`.
    """

    name: str
    is_layer: bool
    split_elements: int = 0
    whole_elements: int = 0
    tensors: tuple[tuple[int, bool, bool], ...] = ()
    split_forward: float = 0.0
    whole_forward: float = 0.0
    split_backward: float = 0.0
    whole_backward: float = 0.0
    split_kept: float = 0.0
    whole_kept: float = 0.0
    input_bytes: float = 0.0
    largest_bytes: float = 0.0
    tied_elements: int = 0
    frozen_split: int = 0
    frozen_whole: int = 0
    num_products: int = 0
    num_mixtures: int = 0
    routed_kept: float = 0.0

    @property
    def elements(self) -> int:
        """Returns the elements of all parameters."""
        return self.split_elements + self.whole_elements

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
        width: channels between layers; 0: not known.
        experts: number of experts of each mixture; 0: there is none.
        routed: number of experts that a token is sent to.
    """

    parts: tuple[Part, ...]
    tail: Part | None
    tokens: int
    heads: int
    width: int
    experts: int = 0
    routed: int = 1

    @property
    def elements(self) -> int:
        """Returns the number of parameter elements, shared ones once."""
        return sum(part.elements for part in (*self.parts, *([self.tail] if self.tail else [])))

    @property
    def forward(self) -> float:
        """Returns the work of a forward."""
        chain = (*self.parts, *([self.tail] if self.tail else []))
        return sum(part.split_forward + part.whole_forward for part in chain)

    def repeated(self, num_layers: int) -> ModelProfile:
        """Returns the same model with `num_layers` layers, all like its second one."""
        first = next(i for i, part in enumerate(self.parts) if part.is_layer)
        layers = [part for part in self.parts if part.is_layer]
        others = [part for part in self.parts[first:] if not part.is_layer]
        middle = [
            replace(layers[min(1, len(layers) - 1)], name=f"layer {i}") for i in range(num_layers)
        ]
        return replace(self, parts=(*self.parts[:first], *middle, *others))
