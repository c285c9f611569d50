"""`smp.partition` and `smp.set_partition` mark modules."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
from torch import nn

from smp.partition.contexts import mark_of, partition, set_partition
from tests.patience import PATIENCE_S


def test_modules_created_inside_are_marked_with_all_their_children() -> None:
    outside = nn.Linear(2, 2)
    with partition(1):
        inside = nn.Sequential(nn.Linear(2, 2), outside)
    after = nn.Linear(2, 2)
    assert [mark_of(m) for m in (inside, inside[0], outside, after)] == [1, 1, None, None]


def test_innermost_context_wins() -> None:
    with partition(1):
        first = nn.Linear(2, 2)
        with partition(3):
            second = nn.Linear(2, 2)
        third = nn.Linear(2, 2)
    assert [mark_of(m) for m in (first, second, third)] == [1, 3, 1]


def test_copies_made_inside_are_marked() -> None:
    layer = nn.TransformerEncoderLayer(4, 2)
    with partition(2):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        unpickled = pickle.loads(pickle.dumps(nn.Linear(2, 2)))
    assert {mark_of(m) for m in encoder.modules()} == {2}
    assert mark_of(unpickled) == 2
    assert mark_of(layer) is None
    assert mark_of(copy.deepcopy(encoder)) is None, "copies made outside go to the default"


def test_module_methods_are_restored_even_after_an_error() -> None:
    init, setstate = nn.Module.__init__, nn.Module.__setstate__
    with pytest.raises(KeyError), partition(0), partition(1):
        assert nn.Module.__init__ is not init
        raise KeyError
    assert nn.Module.__init__ is init
    assert nn.Module.__setstate__ is setstate
    assert mark_of(nn.Linear(2, 2)) is None


def test_wrapper_put_on_top_by_somebody_else_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.__init__
    calls = []
    with partition(1):
        ours = nn.Module.__init__

        def theirs(self: nn.Module, *args: object, **kwargs: object) -> None:
            calls.append(type(self))
            ours(self, *args, **kwargs)

        nn.Module.__init__ = theirs  # type: ignore[method-assign]
    try:
        assert nn.Module.__init__ is theirs
        assert mark_of(nn.Identity()) is None
        assert calls == [nn.Identity]
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def test_contexts_of_one_thread_do_not_mark_modules_of_another() -> None:
    made: list[nn.Module] = []
    with partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join(timeout=PATIENCE_S)
    assert mark_of(made[0]) is None


def test_set_partition_marks_the_subtree_and_later_calls_override() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    set_partition(model, 1)
    assert {mark_of(m) for m in model.modules()} == {1}
    set_partition(model[1][0], 2)
    assert [mark_of(model[1]), mark_of(model[1][0]), mark_of(model[1][1])] == [1, 2, 1]
    set_partition(model[1], 0)
    assert mark_of(model[1][0]) == 0
    assert mark_of(model[0]) == 1


def test_marks_do_not_keep_modules_alive() -> None:
    with partition(1):
        module = nn.Linear(2, 2)
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("index", [-1, 1.0, "1", True, None])
def test_what_is_no_index_is_an_error(index: object) -> None:
    with pytest.raises(ValueError, match=r"smp config: partition=.*is not an integer >= 0"):
        with partition(index):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError, match=r"smp config: set_partition=.*is not an integer >= 0"):
        set_partition(nn.Linear(2, 2), index)  # type: ignore[arg-type]


def test_set_partition_of_a_list_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="expected an nn.Module, got list"):
        set_partition([nn.Linear(2, 2)], 0)  # type: ignore[arg-type]
