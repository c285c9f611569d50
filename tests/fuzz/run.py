"""Runs decoders on mutated inputs of their corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.decoders import Decoder
from tests.fuzz.mutator import Mutator

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Count:
    """Numbers of inputs that a decoder understood and refused."""

    num_understood: int
    num_refused: int


class Failed(AssertionError):
    """Reports an input for which a decoder raised an error that it may not raise."""


def run(name: str, decoder: Decoder, num_runs: int, seed: int) -> Count:
    """Runs a decoder on mutated inputs of its corpus.

    Args:
        name: name of the corpus.
        decoder: decoder under test.
        num_runs: number of inputs.
        seed: seed of the mutations.

    Raises:
        Failed: with the input.
    """
    corpus = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    mutator = Mutator(corpus, decoder, seed)
    num_understood = 0
    for number in range(num_runs):
        content = mutator.next()
        try:
            num_understood += decoder.understands(content)
        except Exception as error:
            raise Failed(
                f"{name}, input {number} of seed {seed}: {type(error).__name__}: {error}; "
                f"{content!r}"
            ) from error
    return Count(num_understood, num_runs - num_understood)


def run_all(decoders: Mapping[str, Decoder], num_runs: int, seed: int) -> dict[str, Count]:
    """Runs all decoders on `num_runs` inputs each."""

    return {name: run(name, decoder, num_runs, seed) for name, decoder in decoders.items()}
