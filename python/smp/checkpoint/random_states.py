"""Saves a rank's random states, restores them on an equal layout, seeds new ones on another."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch

import smp._C as _C
from smp._device import device_module, is_accelerator

_log = logging.getLogger("smp")


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the states of PyTorch's, Python's and numpy's generators, as plain values."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if is_accelerator(device):
        states[device.type] = device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = {
            "name": name,
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        }
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Restores the states that :func:`capture` returned."""
    torch.set_rng_state(states["torch"].cpu())
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if is_accelerator(device) and device.type in states:
        device_module(device).set_rng_state(states[device.type].cpu(), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        state = states["numpy"]
        keys = numpy.array(state["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(
            (state["name"], keys, state["position"], state["has_gauss"], state["cached"])
        )


def seed_anew(seed: int, num_steps: int, global_rank: int, *, drops_alike: bool = False) -> None:
    """Seeds the generators by the seed of the first rank, the steps so far and the rank.

    Args:
        seed: seed of the first rank.
        num_steps: number of steps so far.
        global_rank: global rank of this process.
        drops_alike: whether dropout masks are independent of these states.
        drops_alike: masks of dropout do not depend on these states.
    """
    mixed = _C.mix_seed(_C.mix_seed(seed & (2**64 - 1), num_steps), global_rank)
    torch.manual_seed(mixed & (2**63 - 1))
    random.seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed & (2**32 - 1))
    if global_rank == 0:
        _log.warning(
            "smp: the checkpoint was saved on another layout, so random states are seeded again "
            "from the seed, the steps so far and the rank; %s from those of an uninterrupted run",
            "shuffling differs" if drops_alike else "dropout and shuffling differ",
        )
