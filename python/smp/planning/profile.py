"""A model as a chain of parts with what each costs for one sample: all that a plan asks of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, eq=False)
class Part:
    """A layer, or what lies before the first one, between two, or behind the last one.

    Of one sample. Work is in seconds of a device that does one FLOP per second, and moves bytes as
    much slower than it computes as the device of the plan does.

    Attributes:
        name: of its first module.
        is_layer: one of the repeated ones, which checkpoints are put around.
        split_elements, whole_elements: of parameters that tensor parallelism divides, and others.
        tensors: elements of each parameter, whether it is divided, and whether it has 32 bits.
        split_forward, whole_forward: work of the forward that is divided, and that is not.
        split_backward, whole_backward: the same of the backward.
        split_kept, whole_kept: bytes of activations.
        input_bytes: what comes into it from the part before, with a gradient.
        largest_bytes: of the largest tensor that it makes.
        tied_elements: of parameters that a part before it has as well.
        frozen_split, frozen_whole: elements of these two that are not trained.
        num_products: pairs of columns and rows that are summed over ranks in a forward.
        num_mixtures: of these, experts that tokens are routed to.
        routed_kept: bytes of activations that experts keep, and that are whole on each rank unless
            experts are spread over the ranks; part of `whole_kept`.
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
        """Of all parameters."""
        return self.split_elements + self.whole_elements

    @property
    def costs(self) -> tuple[object, ...]:
        """All but the name."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "name")


@dataclass(frozen=True)
class ModelProfile:
    """Parts in the order of execution.

    Attributes:
        parts: at least one.
        tail: work behind the last part that has to be where the first one is, because they share
            parameters (a head tied to the embedding); None if there is none.
        tokens: of a sample; 1 for a model that is not given tokens.
        heads: that tensor parallelism can divide; 0: not known.
        width: channels between layers; 0: not known.
        experts: of each mixture; 0: there is none.
        routed: experts that a token goes to.
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
        """Parameters, shared ones once."""
        return sum(part.elements for part in (*self.parts, *([self.tail] if self.tail else [])))

    @property
    def forward(self) -> float:
        """Work of a forward."""
        chain = (*self.parts, *([self.tail] if self.tail else []))
        return sum(part.split_forward + part.whole_forward for part in chain)

    def repeated(self, num_layers: int) -> ModelProfile:
        """The same model with so many layers, all as its second one."""
        first = next(i for i, part in enumerate(self.parts) if part.is_layer)
        layers = [part for part in self.parts if part.is_layer]
        others = [part for part in self.parts[first:] if not part.is_layer]
        middle = [
            replace(layers[min(1, len(layers) - 1)], name=f"layer {i}") for i in range(num_layers)
        ]
        return replace(self, parts=(*self.parts[:first], *middle, *others))
