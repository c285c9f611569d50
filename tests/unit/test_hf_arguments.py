"""Arguments of calls of replaced models: heeded as theirs, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from smp.nn.huggingface import adapters
from tests.reference import hugging_face as hf
from tests.reference.hf_parity import (
    BATCH,
    DECODERS,
    SEQUENCE,
    make_batch,
    pair,
    replaced,
)
from tests.reference.hugging_face import HIDDEN, LAYERS
from tests.reference.lifted_casts import lifted_casts
from tests.reference.tolerances import relative_difference

pytestmark = pytest.mark.usefixtures("running")


REFUSED = {
    "past_key_values": ((torch.ones(1), torch.ones(1)),),
    "inputs_embeds": torch.ones(BATCH, SEQUENCE, HIDDEN),
    "output_attentions": True,
    "output_hidden_states": True,
    "head_mask": torch.ones(LAYERS, 4),
    "cache_position": torch.arange(SEQUENCE),
    "shift_labels": torch.ones(BATCH, SEQUENCE),
    "encoder_hidden_states": torch.ones(BATCH, 3, HIDDEN),
}


@pytest.mark.parametrize("argument", REFUSED)
@pytest.mark.parametrize("name", DECODERS)
def test_arguments_that_would_have_no_effect_are_refused(name: str, argument: str) -> None:
    family = hf.family(name)
    plain, new = family.build(), replaced(family.build())
    batch = make_batch(name)
    parameters = inspect.signature(type(plain).forward).parameters
    if argument not in parameters and "kwargs" not in parameters:
        with pytest.raises(TypeError, match=argument):
            new(**batch, **{argument: REFUSED[argument]})
        return
    with pytest.raises(ValueError, match=rf"{family.translators.NAMES.family}.*'{argument}'"):
        new(**batch, **{argument: REFUSED[argument]})
    for nothing in (None, *([False] if argument.startswith("output_") else [])):
        assert list(new(**batch, **{argument: nothing})) == ["loss", "logits"]
    assert list(new(**batch, use_cache=True)) == ["loss", "logits"]


@pytest.mark.parametrize("name", DECODERS)
def test_losses_are_divided_by_the_number_of_items(name: str) -> None:
    family = hf.family(name)
    plain, new = family.build(), replaced(family.build())
    batch = make_batch(name)
    parameters = inspect.signature(type(plain).forward).parameters
    if "num_items_in_batch" not in parameters and "kwargs" not in parameters:  # older releases
        with pytest.raises(TypeError, match="num_items_in_batch"):
            new(**batch, num_items_in_batch=3)
        return
    for num_items in (3, torch.tensor(100)):
        expected = plain(**batch, num_items_in_batch=num_items).loss
        assert relative_difference(expected, plain(**batch).loss) > 0.1
        loss = new(**batch, num_items_in_batch=num_items).loss
        assert relative_difference(loss, expected) <= 1e-4
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for model in (plain, new):  # a microbatch without labels adds nothing to a sum
        assert model(**batch, num_items_in_batch=3).loss == 0


@pytest.mark.parametrize("name", DECODERS)
def test_arguments_are_bound_by_the_installed_signature(name: str) -> None:
    family = hf.family(name)
    plain, new = family.build(), replaced(family.build())
    batch = make_batch(name)
    names = list(inspect.signature(type(plain).forward).parameters)[1:]
    positional = [batch.get(key) for key in names[: names.index("labels") + 1]]
    assert torch.equal(new(*positional).loss, new(**batch).loss)
    assert relative_difference(new(*positional).loss, plain(*positional).loss) <= 1e-4


def test_wrong_shapes_are_named() -> None:
    new = replaced(hf.family("gpt2").build())
    batch = make_batch("gpt2")
    with pytest.raises(ValueError, match="gpt2.*'attention_mask'.*expected \\[4, 7\\]"):
        new(**{**batch, "attention_mask": torch.ones(BATCH, SEQUENCE + 1)})
    with pytest.raises(ValueError, match="'attention_mask'"):
        new(**{**batch, "attention_mask": torch.ones(BATCH, 1, SEQUENCE, SEQUENCE)})
    with pytest.raises(ValueError, match="'input_ids' is missing"):
        new(attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match="'input_ids'.*shape"):
        new(input_ids=batch["input_ids"][None])


def test_packed_samples_are_refused_where_the_release_would_part_them() -> None:
    family = hf.family("gptneox")
    plain, new = family.build(), replaced(family.build())
    ids = make_batch("gptneox")["input_ids"]
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(BATCH, -1)
    if hf.is_older():
        assert relative_difference(
            new(input_ids=ids, position_ids=packed).logits,
            plain(input_ids=ids, position_ids=packed).logits,
        ) <= 1e-4  # fmt: skip
        return
    with pytest.raises(ValueError, match="'position_ids'"):
        new(input_ids=ids, position_ids=packed)
    mask = torch.ones_like(ids)
    got = new(input_ids=ids, position_ids=packed, attention_mask=mask)
    expected = plain(input_ids=ids, position_ids=packed, attention_mask=mask)
    assert relative_difference(got.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders_refuse_what_they_cannot_give(name: str) -> None:
    new = replaced(hf.family(name).build())
    batch = make_batch(name)
    for argument in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=f"{name}.*'{argument}'"):
            new(**batch, **{argument: True})
    if hf.is_older():
        with pytest.raises(ValueError, match=f"{name}.*'head_mask'"):
            new(**batch, head_mask=torch.ones(LAYERS, 4))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders_take_masks_of_pairs(name: str) -> None:
    plain, ours = pair(name, torch.float64)
    batch = make_batch(name)
    pairs = torch.ones(BATCH, SEQUENCE, SEQUENCE, dtype=torch.long)
    pairs[:, 2, 4:] = pairs[1, 5, :3] = 0
    if not hf.is_older():
        pairs = pairs[:, None].bool()  # prepared by the caller
    batch["attention_mask"] = pairs
    with lifted_casts():
        expected = plain(**batch)
    assert relative_difference(ours(**batch)["logits"], expected["logits"]) <= 1e-9


def test_masks_of_ranks_with_own_batches_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases leave a mask out where the samples of a rank need none."""
    said: list[bool] = []
    others_say = False

    class OwnBatches:
        has_own_batches = True

        def all_say(self, says: bool, what: str) -> bool:
            said.append(says)
            return says and others_say

    monkeypatch.setattr(adapters.layouts, "current", OwnBatches)
    hidden = torch.zeros(3, 5, 8)
    given: Any = None
    none = adapters._additive(given, "attention_mask", None, hidden, 5)
    some = torch.ones(3, 1, 5, 5, dtype=torch.bool)
    some[1, :, :, 3:] = False
    masked = adapters._additive(given, "attention_mask", some, hidden, 5)
    one = adapters._additive(given, "attention_mask", torch.zeros(1, 1, 1, 5), hidden, 5)
    assert none is not None and masked is not None and one is not None
    assert none.shape == masked.shape == one.shape == (3, 1, 1, 5)
    assert not none.any() and masked[1, 0, 0].tolist() == [0, 0, 0, *[masked.min().item()] * 2]
    assert said == [True, False, True]
    others_say = True
    zeros = torch.zeros(1, 1, 1, 5)
    assert adapters._additive(given, "attention_mask", None, hidden, 5) is None
    assert adapters._additive(given, "attention_mask", zeros, hidden, 5) is None
    again = adapters._additive(given, "attention_mask", some, hidden, 5)
    assert again is not None and torch.equal(again, masked)
