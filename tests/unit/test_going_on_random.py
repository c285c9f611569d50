"""Random states are read again if, and only if, something has drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest

from smp.step.going_on import _NumpyRandom, _PythonRandom


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1)], ids=["words", "pair"])
def test_state_of_python_follows_each_draw(draw: object) -> None:
    assert callable(draw)
    reader = _PythonRandom()
    for _ in range(3):
        assert reader.state() == random.getstate()
        assert reader.state() is reader.state(), "it is not read again"
        draw()


@pytest.mark.parametrize("draw", [np.random.rand, np.random.randn], ids=["words", "pair"])
def test_state_of_numpy_follows_each_draw(draw: object) -> None:
    assert callable(draw)
    reader = _NumpyRandom()
    for _ in range(3):
        state, now = reader.state(), np.random.get_state(legacy=False)
        assert state is not None and isinstance(now, dict)
        assert (state["state"]["key"] == now["state"]["key"]).all()
        assert [state["state"]["pos"], state["gauss"]] == [now["state"]["pos"], now["gauss"]]
        assert state["has_gauss"] == now["has_gauss"]
        assert reader.state() is reader.state() or state["has_gauss"]
        draw()
