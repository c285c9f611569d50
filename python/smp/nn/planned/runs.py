"""Records of runs of a block with random features, which trials compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smp._device import device_module, is_accelerator
from smp.dropout import places

# Tolerances of norms. An error is a good part of the norm, since the features differ in size.
_OF_HALVES = 0.05


class CannotTry(Exception):
    """A reason why a block cannot be tried."""


@dataclass
class Record:
    """A record of one run in eval mode and without a graph.

    Attributes:
        given: path and input of each row that is called.
        error: exception of the code.
        has_drawn: whether the code has drawn from a generator of torch.
    """

    given: list[tuple[str, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    has_drawn: bool = False

    def run(self, code: Callable[[], object], device: torch.device) -> None:
        """Runs code that adds to `given`.

        Args:
            code: function to call.
            device: device whose generator it may draw from.
        """
        before = _generators(device)
        with torch.no_grad(), places.at(None):
            try:
                code()
            except Exception as error:  # whatever the code of a model raises
                self.error = error
        self.has_drawn = not all(map(torch.equal, before, _generators(device)))

    def check(self) -> None:
        """Raises CannotTry unless this run with all features can be compared with others."""
        if self.error is not None:
            raise CannotTry(f"with all features it raises {_described(self.error)}")
        if not self.given:
            raise CannotTry("it calls no row")
        if self.has_drawn:
            raise CannotTry("it draws random numbers in eval mode")

    def problem_of(
        self, own: Record, sizes: Mapping[str, Sequence[int]], rank: int, tolerance: float
    ) -> str | None:
        """Compares this run, which has all features, with a run that has those of a rank.

        Args:
            own: run with the features of the rank.
            sizes: numbers of input features by rank, by path of the row.
            rank: tensor-parallel rank.
            tolerance: largest difference relative to the norm, other than of 16-bit features.

        Returns:
            the difference as the end of a sentence, or None.

        Raises:
            CannotTry: runs cannot be compared.
        """
        if own.has_drawn:
            raise CannotTry("it draws random numbers in eval mode")
        for (row, all_features), (other, features) in zip(self.given, own.given, strict=False):
            if other != row:
                return f"with a part of the features it comes to '{other}', and not to '{row}'"
            problem = _problem_at(row, sizes[row], rank, all_features, features, tolerance)
            if problem is not None:
                return problem
        if own.error is not None:
            return f"with a part of the features it raises {_described(own.error)}"
        if len(own.given) != len(self.given):
            return (
                f"with a part of the features it calls {len(own.given)} rows; expected "
                f"{len(self.given)}, as with all of them"
            )
        return None


def _problem_at(
    row: str,
    sizes: Sequence[int],
    rank: int,
    all_features: Tensor,
    features: Tensor,
    tolerance: float,
) -> str | None:
    """Returns what is wrong with a row's input as the end of a sentence, or None."""
    if all_features.shape[-1] != sum(sizes):
        raise CannotTry(
            f"'{row}' gets {all_features.shape[-1]} features of {sum(sizes)} that it takes"
        )
    begin, num = sum(sizes[:rank]), sizes[rank]
    expected = all_features.narrow(-1, begin, num)
    if features.shape != expected.shape:
        return (
            f"'{row}' gets {list(features.shape)} on this rank; expected {list(expected.shape)}, "
            f"{num} of {sum(sizes)} features"
        )
    share = _difference(features, expected)
    if share <= (_OF_HALVES if features.dtype.itemsize == 2 else tolerance):
        return None
    return (
        f"what '{row}' gets of a part of the features differs by {share:.0%} from that part of "
        "what it gets of all of them"
    )


def random_features(shape: Sequence[int], seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns random numbers of different size and with a mean, so that functions of all differ.

    Args:
        shape: shape of the result; features are its last dim.
        seed: number that gives the same features in each run.
        dtype: dtype of the result; the default one if not given.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator, dtype=dtype)
    return (noise + 0.5) * torch.linspace(0.5, 1.5, shape[-1], dtype=dtype)


def _generators(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that code on a device draws from."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(device_module(device).get_rng_state(device))
    return states


def _difference(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference relative to the second; only finite elements count."""
    a, b = one.double(), other.double()
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    norm = float(b.norm())
    difference = float((a - b).norm())
    return difference / norm if norm else float(difference > 0)


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
