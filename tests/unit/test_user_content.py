"""Objects allowed in ``user_content``: data come back, and nothing of a file runs."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.checkpoint import numpy_values, user_content


class Other:
    pass


class Reduced:
    """An object that is pickled as a call of a function of one's own choice, with a state."""

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...], *state: Any) -> None:
        self.parts = (call, arguments, *state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def test_user_content_is_refused_by_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "user_content.pt"
    with caplog.at_level(logging.WARNING, "smp"):
        user_content.write(path, {"x": Other(), "n": 1}, "1")
    assert "test_user_content.Other" in caplog.text, "the save says so, not only the resume"
    assert "unsafe_user_content=True" in caplog.text
    with pytest.raises(ValueError, match=r"test_user_content\.Other"):
        user_content.read(path, unsafe=False)
    assert user_content.read(path, unsafe=True)["n"] == 1
    with torch.serialization.safe_globals([Other]):
        assert isinstance(user_content.read(path, unsafe=False)["x"], Other)
    with pytest.raises(ValueError, match="cannot be saved"):
        user_content.write(path, {"x": lambda: 1}, "1")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    path.write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises((ValueError, RuntimeError)):
        user_content.read(path, unsafe=False)


CODES = "?bhilqBHILQefdgFDG"
NUMPY: dict[str, Any] = {
    **{f"scalar {code}": np.dtype(code).type(1) for code in CODES},
    **{f"array {code}": np.arange(6).reshape(2, 3).astype(code) for code in CODES},
    "order": np.arange(4, dtype=">i4"),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "number in an array": np.array(3.0),
    "nothing": np.zeros((2, 0)),
    "text": np.str_("täxt"),
    "texts": np.array([b"ab", b"c"]),
    "state": np.random.RandomState(1).get_state(legacy=True),
}


@pytest.mark.parametrize("name", NUMPY)
def test_values_of_numpy_come_back(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.serialization.get_safe_globals()
    path, value = tmp_path / "user_content.pt", NUMPY[name]
    content = {"value": value, "again": [value], "tensor": torch.ones(2)}
    with caplog.at_level(logging.WARNING, "smp"):
        user_content.write(path, content, "1")
    assert not caplog.records
    back = user_content.read(path, unsafe=False)
    check_equal(back["value"], value)
    assert back["again"][0] is back["value"]
    assert set(torch.serialization.get_safe_globals()) == set(before)


def check_equal(back: Any, value: Any) -> None:
    if isinstance(value, tuple):
        assert len(back) == len(value)
        for one, other in zip(back, value, strict=True):
            check_equal(one, other)
    elif isinstance(value, np.ndarray | np.generic):
        # numpy swaps bytes to the order of the machine when it loads.
        assert isinstance(back, np.ndarray) == isinstance(value, np.ndarray)
        assert back.dtype == value.dtype.newbyteorder("=") and back.shape == value.shape
        assert back.flags.f_contiguous == value.flags.f_contiguous
        assert np.array_equal(back, value)
    else:
        assert back == value


def test_names_of_numpy_1_are_known(tmp_path: Path) -> None:
    path = tmp_path / "user_content.pt"
    torch.save({"a": np.int64(3), "b": np.ones(2)}, path)
    content = path.read_bytes()
    assert content.count(b"numpy._core.multiarray") == 2
    newer = "numpy._core.multiarray.scalar"
    assert numpy_values.known([newer, newer.replace("_core", "core"), "numpy.load"]) == [
        newer, "numpy.core.multiarray.scalar",
    ]  # fmt: skip
    assert numpy_values.real([newer])[0][0] is np.int64(0).__reduce__()[0]
    assert (
        numpy_values.real(["numpy.core.multiarray._reconstruct"])[0][0]
        is (np.ones(1).__reduce__()[0])
    )


def test_what_the_user_has_allowed_stays_allowed(tmp_path: Path) -> None:
    path, own = tmp_path / "user_content.pt", type(np.dtype("int64"))
    user_content.write(path, np.int64(3), "1")
    with torch.serialization.safe_globals([own]):
        assert user_content.read(path, unsafe=False) == 3
        assert own in torch.serialization.get_safe_globals()


def test_nothing_of_numpy_is_let_in_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user_content.pt"
    user_content.write(path, {"n": np.int64(3)}, "1")
    monkeypatch.setattr(numpy_values.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"objects of numpy\._core\.multiarray\.scalar"):
        user_content.read(path, unsafe=False)


def hostile() -> dict[str, Any]:
    rebuild, scalar = np.zeros(1).__reduce__()[0], np.int64(0).__reduce__()[0]
    plain = (3, "<", None, None, None, -1, -1, 0)

    def dtype(text: Any, *state: Any) -> Reduced:
        return Reduced(np.dtype, (text, False, True), *state)

    def array(*state: Any) -> Reduced:
        return Reduced(rebuild, (np.ndarray, (0,), b"b"), state)

    fields = (3, "<", None, ("a",), {"a": (dtype("O8"), 4096)}, -1, -1, 0)
    inner = (3, "<", None, ("a",), {"a": (dtype("i8"), 4096)}, -1, -1, 0)
    eight = b"8" * 8
    return {
        "objects": np.array([{}], dtype=object),
        "dates": np.datetime64("2020-01-01"),
        "records": np.zeros(2, dtype=[("a", "i8")]),
        "fields of objects": array(1, (1,), dtype("i8", fields), False, eight),
        "fields outside": array(1, (1,), dtype("i8", inner), False, eight),
        "flags": array(1, (1,), dtype("i8", (*plain[:-1], 63)), False, eight),
        "numbers that are tensors": dtype("i8", (torch.tensor(3), *plain[1:])),
        "a part of an array": dtype("i8", ("<", *plain[1:])),
        "too few bytes": array(1, (2,), dtype("i8", plain), False, eight),
        "a shape below zero": array(1, (-1, -1), dtype("i8", plain), False, eight),
        "list": array(1, (1,), dtype("i8", plain), False, [1]),
        "another version": array(0, (1,), dtype("i8", plain), False, eight),
        "a scalar of few bytes": Reduced(scalar, (dtype("i8", plain), b"8")),
        "a text of few bytes": Reduced(
            scalar, (dtype("U9", (3, "<", None, None, None, 36, 4, 8)), eight)
        ),
        "a longer text": dtype("U1", (3, "<", None, None, None, 4096, 4, 8)),
        "an array by itself": Reduced(np.ndarray, ((4,), dtype("i8", plain))),
        "an array of another class": Reduced(rebuild, (np.dtype, (0,), b"b")),
        "a dtype by its fields": dtype("i4,i4"),
        "an aligned dtype": Reduced(np.dtype, ("i8", True, True)),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_is_made_for_numpy_does_not_reach_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user_content.pt"
    torch.save({"x": hostile()[name]}, path)
    monkeypatch.setattr(numpy_values, "real", lambda _: pytest.fail("numpy was let in"))
    with pytest.raises(ValueError, match="what is not loaded as data .*numpy"):
        user_content.read(path, unsafe=False)
